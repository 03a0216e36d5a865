#include "helicore/kv/sha256.h"

#include <bit>
#include <cstring>

namespace helicore::kv {
namespace {

using Compress = void (*)(uint32_t*, const uint8_t*, size_t) noexcept;

Compress pick_compress() noexcept {
  return has_sha_instructions() ? sha256_compress_native : sha256_compress_portable;
}

void compress(uint32_t* state, const uint8_t* blocks, size_t num_blocks) noexcept {
  static const Compress chosen = pick_compress();
  chosen(state, blocks, num_blocks);
}

constexpr std::array<uint32_t, 64> kRound = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t load_big_endian(const uint8_t* p) noexcept {
  return uint32_t{p[0]} << 24 | uint32_t{p[1]} << 16 | uint32_t{p[2]} << 8 | uint32_t{p[3]};
}

using State = std::array<uint32_t, 8>;
constexpr State kInitial = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                            0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

// Ends a message whose last `filled` (< 64) bytes lie at the front of `tail`, zeros after them.
// Returns the number of its last blocks.
size_t close_message(std::array<uint8_t, 128>& tail, size_t filled, uint64_t num_bytes) noexcept {
  tail[filled] = 0x80;
  const size_t num_blocks = filled < 56 ? 1 : 2;
  const uint64_t num_bits = __builtin_bswap64(num_bytes * 8);
  std::memcpy(tail.data() + num_blocks * 64 - sizeof(num_bits), &num_bits, sizeof(num_bits));
  return num_blocks;
}

Digest digest_of(const State& state) noexcept {
  Digest digest;
  for (size_t i = 0; i < state.size(); ++i) {
    const uint32_t word = __builtin_bswap32(state[i]);
    std::memcpy(digest.data() + 4 * i, &word, sizeof(word));
  }
  return digest;
}

}  // namespace

void sha256_compress_portable(uint32_t* state, const uint8_t* blocks, size_t num_blocks) noexcept {
  for (; num_blocks > 0; --num_blocks, blocks += 64) {
    std::array<uint32_t, 64> w;
    for (size_t i = 0; i < 16; ++i) w[i] = load_big_endian(blocks + 4 * i);
    for (size_t i = 16; i < 64; ++i) {
      const uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
      const uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    std::array<uint32_t, 8> v;
    std::memcpy(v.data(), state, sizeof(v));
    for (size_t i = 0; i < 64; ++i) {
      const uint32_t s1 = std::rotr(v[4], 6) ^ std::rotr(v[4], 11) ^ std::rotr(v[4], 25);
      const uint32_t choose = (v[4] & v[5]) ^ (~v[4] & v[6]);
      const uint32_t t1 = v[7] + s1 + choose + kRound[i] + w[i];
      const uint32_t s0 = std::rotr(v[0], 2) ^ std::rotr(v[0], 13) ^ std::rotr(v[0], 22);
      const uint32_t majority = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
      v = {t1 + s0 + majority, v[0], v[1], v[2], v[3] + t1, v[4], v[5], v[6]};
    }
    for (size_t i = 0; i < 8; ++i) state[i] += v[i];
  }
}

Sha256::Sha256() noexcept : state_(kInitial) {}

void Sha256::update(std::span<const uint8_t> bytes) noexcept {
  if (bytes.empty()) return;
  const size_t filled = num_bytes_ % 64;
  num_bytes_ += bytes.size();
  if (filled > 0) {
    const size_t take = std::min(bytes.size(), 64 - filled);
    std::memcpy(buffer_.data() + filled, bytes.data(), take);
    bytes = bytes.subspan(take);
    if (filled + take < 64) return;
    compress(state_.data(), buffer_.data(), 1);
  }
  const size_t whole = bytes.size() / 64;
  compress(state_.data(), bytes.data(), whole);
  bytes = bytes.subspan(whole * 64);
  if (!bytes.empty()) std::memcpy(buffer_.data(), bytes.data(), bytes.size());
}

Digest Sha256::finish() noexcept {
  std::array<uint8_t, 128> tail{};
  const size_t filled = num_bytes_ % 64;
  std::memcpy(tail.data(), buffer_.data(), filled);
  compress(state_.data(), tail.data(), close_message(tail, filled, num_bytes_));
  return digest_of(state_);
}

Digest sha256(std::span<const uint8_t> bytes) noexcept {
  Sha256 hash;
  hash.update(bytes);
  return hash.finish();
}

Digest sha256(std::span<const uint8_t> head, std::span<const uint8_t> bytes) noexcept {
  constexpr size_t kChunk = 1024;
  State state = kInitial;
  std::array<uint8_t, kChunk> chunk;
  size_t filled = head.size();
  std::memcpy(chunk.data(), head.data(), filled);
  const size_t num_bytes = filled + bytes.size();
  while (filled + bytes.size() >= 64) {
    const size_t take = std::min(bytes.size(), kChunk - filled);
    std::memcpy(chunk.data() + filled, bytes.data(), take);
    bytes = bytes.subspan(take);
    filled += take;
    const size_t whole = filled / 64;
    compress(state.data(), chunk.data(), whole);
    filled -= whole * 64;
    std::memmove(chunk.data(), chunk.data() + whole * 64, filled);
  }
  std::array<uint8_t, 128> tail{};
  std::memcpy(tail.data(), chunk.data(), filled);
  if (!bytes.empty()) std::memcpy(tail.data() + filled, bytes.data(), bytes.size());
  compress(state.data(), tail.data(), close_message(tail, filled + bytes.size(), num_bytes));
  return digest_of(state);
}

}  // namespace helicore::kv
