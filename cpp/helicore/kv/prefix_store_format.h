// The bytes of a prefix store's journal: a header and records, little-endian, each with a CRC32C.
// Pure functions; docs/design/prefix-store.md has the tables.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "helicore/kv/block_key.h"
#include "helicore/kv/types.h"

namespace helicore::kv::store {

inline constexpr uint32_t kFormatVersion = 1;
inline constexpr size_t kHeaderBytes = 4096;

struct Header {
  uint32_t version = kFormatVersion;
  int32_t tokens_per_block = 0;
  int64_t block_bytes = 0;
  int64_t num_slots = 0;  // when it was written; a store may be reopened with another count
  Digest stamp{};         // what the pages mean: model, dtype, layout
  uint64_t epoch = 0;     // counts journals of this directory; records carry it in their checksum
  uint64_t num_snapshot = 0;  // leading put records, most recently used first
  friend bool operator==(const Header&, const Header&) = default;
};

[[nodiscard]] std::vector<std::byte> encode_header(const Header& header);
// False, with the reason, when the bytes are no header or a damaged one. A foreign version is
// decoded only as far as `version`, and is no damage.
[[nodiscard]] bool decode_header(std::span<const std::byte> bytes, Header* header,
                                 std::string* reason);

// A block became readable in `slot`.
struct PutRecord {
  uint32_t slot = 0;
  int32_t ordinal = 0;  // 0: the parent is a scope's root key
  uint64_t sequence = 0;
  uint32_t data_crc = 0;  // CRC32C of the page bytes
  Digest parent{};
  std::vector<TokenId> tokens{};  // 1 .. tokens_per_block
  friend bool operator==(const PutRecord&, const PutRecord&) = default;
};

// The block that `sequence` put into `slot` is gone; the slot may be written over.
struct TombstoneRecord {
  uint32_t slot = 0;
  uint64_t sequence = 0;
  friend bool operator==(const TombstoneRecord&, const TombstoneRecord&) = default;
};

using Record = std::variant<PutRecord, TombstoneRecord>;

[[nodiscard]] size_t put_record_bytes(int32_t tokens_per_block) noexcept;
[[nodiscard]] size_t tombstone_record_bytes() noexcept;
void append_put(std::vector<std::byte>& out, const PutRecord& record, const Header& header);
void append_tombstone(std::vector<std::byte>& out, const TombstoneRecord& record,
                      const Header& header);

// Reads the record at the front of `bytes` and its length; 0 when there is none: the end, a torn
// record or a damaged one.
[[nodiscard]] size_t decode_record(std::span<const std::byte> bytes, const Header& header,
                                   Record* record);

}  // namespace helicore::kv::store
