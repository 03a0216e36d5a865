#include "helicore/kv/prefix_store_format.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "helicore/core/error.h"
#include "helicore/kv/crc32c.h"

namespace helicore::kv::store {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers are written as they lie");

constexpr char kMagic[8] = {'H', 'C', 'P', 'S', 'T', 'O', 'R', 'E'};
constexpr size_t kCrcAt = kHeaderBytes - sizeof(uint32_t);

enum RecordType : uint32_t { kEnd = 0, kPut = 0x31545550, kTombstone = 0x31424d54 };  // PUT1 TMB1

constexpr size_t kTypeAt = 4;  // after the record's checksum
constexpr size_t kPutHead = 64;
constexpr size_t kTombstoneBytes = 24;

template <typename T>
void store_at(std::byte* base, size_t offset, const T& value) noexcept {
  std::memcpy(base + offset, &value, sizeof(value));
}

template <typename T>
[[nodiscard]] T load_at(const std::byte* base, size_t offset) noexcept {
  T value;
  std::memcpy(&value, base + offset, sizeof(value));
  return value;
}

// The epoch seeds the checksum: a record of an older journal is no record of this one.
uint32_t record_crc(std::span<const std::byte> record, uint64_t epoch) noexcept {
  const uint32_t seed = crc32c(std::as_bytes(std::span(&epoch, 1)));
  return crc32c(record.subspan(kTypeAt), seed);
}

}  // namespace

std::vector<std::byte> encode_header(const Header& h) {
  std::vector<std::byte> out(kHeaderBytes);
  std::memcpy(out.data(), kMagic, sizeof(kMagic));
  store_at(out.data(), 8, h.version);
  store_at(out.data(), 12, h.tokens_per_block);
  store_at(out.data(), 16, h.block_bytes);
  store_at(out.data(), 24, h.num_slots);
  store_at(out.data(), 32, h.stamp);
  store_at(out.data(), 64, h.epoch);
  store_at(out.data(), 72, h.num_snapshot);
  store_at(out.data(), kCrcAt, crc32c(std::span(out).first(kCrcAt)));
  return out;
}

bool decode_header(std::span<const std::byte> bytes, Header* h, std::string* reason) {
  if (bytes.size() < kHeaderBytes) {
    *reason = detail::concat("the header has ", bytes.size(), " bytes of ", kHeaderBytes);
    return false;
  }
  if (std::memcmp(bytes.data(), kMagic, sizeof(kMagic)) != 0) {
    *reason = "the header's magic bytes are wrong";
    return false;
  }
  h->version = load_at<uint32_t>(bytes.data(), 8);
  if (h->version != kFormatVersion) return true;
  if (load_at<uint32_t>(bytes.data(), kCrcAt) != crc32c(bytes.first(kCrcAt))) {
    *reason = "the header's checksum is wrong";
    return false;
  }
  h->tokens_per_block = load_at<int32_t>(bytes.data(), 12);
  h->block_bytes = load_at<int64_t>(bytes.data(), 16);
  h->num_slots = load_at<int64_t>(bytes.data(), 24);
  h->stamp = load_at<Digest>(bytes.data(), 32);
  h->epoch = load_at<uint64_t>(bytes.data(), 64);
  h->num_snapshot = load_at<uint64_t>(bytes.data(), 72);
  return true;
}

size_t put_record_bytes(int32_t tokens_per_block) noexcept {
  return (kPutHead + sizeof(TokenId) * static_cast<size_t>(tokens_per_block) + 7) / 8 * 8;
}

size_t tombstone_record_bytes() noexcept { return kTombstoneBytes; }

void append_put(std::vector<std::byte>& out, const PutRecord& r, const Header& header) {
  const size_t start = out.size();
  const size_t size = put_record_bytes(header.tokens_per_block);
  out.resize(start + size);
  std::byte* at = out.data() + start;
  store_at(at, kTypeAt, kPut);
  store_at(at, 8, r.sequence);
  store_at(at, 16, r.slot);
  store_at(at, 20, r.ordinal);
  store_at(at, 24, r.data_crc);
  store_at(at, 28, static_cast<int32_t>(r.tokens.size()));
  store_at(at, 32, r.parent);
  std::memcpy(at + kPutHead, r.tokens.data(), r.tokens.size() * sizeof(TokenId));
  store_at(at, 0, record_crc({at, size}, header.epoch));
}

void append_tombstone(std::vector<std::byte>& out, const TombstoneRecord& r, const Header& header) {
  const size_t start = out.size();
  out.resize(start + kTombstoneBytes);
  std::byte* at = out.data() + start;
  store_at(at, kTypeAt, kTombstone);
  store_at(at, 8, r.sequence);
  store_at(at, 16, r.slot);
  store_at(at, 0, record_crc({at, kTombstoneBytes}, header.epoch));
}

size_t decode_record(std::span<const std::byte> bytes, const Header& header, Record* record) {
  if (bytes.size() < kTombstoneBytes) return 0;
  const std::byte* at = bytes.data();
  const auto type = load_at<uint32_t>(at, kTypeAt);
  const size_t size = type == kPut ? put_record_bytes(header.tokens_per_block) : kTombstoneBytes;
  if ((type != kPut && type != kTombstone) || bytes.size() < size) return 0;
  if (load_at<uint32_t>(at, 0) != record_crc(bytes.first(size), header.epoch)) return 0;
  if (type == kTombstone) {
    *record = TombstoneRecord{load_at<uint32_t>(at, 16), load_at<uint64_t>(at, 8)};
    return size;
  }
  const auto num_tokens = load_at<int32_t>(at, 28);
  if (num_tokens < 1 || num_tokens > header.tokens_per_block) return 0;
  PutRecord put{load_at<uint32_t>(at, 16), load_at<int32_t>(at, 20), load_at<uint64_t>(at, 8),
                load_at<uint32_t>(at, 24), load_at<Digest>(at, 32),  {}};
  put.tokens.resize(static_cast<size_t>(num_tokens));
  std::memcpy(put.tokens.data(), at + kPutHead, put.tokens.size() * sizeof(TokenId));
  *record = std::move(put);
  return size;
}

}  // namespace helicore::kv::store
