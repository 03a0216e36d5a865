// SHA-256 (FIPS 180-4), with the CPU's SHA instructions when it has them and a portable twin.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace helicore::kv {

using Digest = std::array<uint8_t, 32>;

// Absorbs bytes in any number of pieces.
class Sha256 {
 public:
  Sha256() noexcept;
  void update(std::span<const uint8_t> bytes) noexcept;
  // The digest of everything absorbed; the object must not be used again.
  [[nodiscard]] Digest finish() noexcept;

 private:
  std::array<uint32_t, 8> state_;
  std::array<uint8_t, 64> buffer_;
  uint64_t num_bytes_ = 0;
};

[[nodiscard]] Digest sha256(std::span<const uint8_t> bytes) noexcept;
// Of `head`, below 64 bytes, and `bytes` after it: for short messages, whose copies would take as
// long as their compression.
[[nodiscard]] Digest sha256(std::span<const uint8_t> head, std::span<const uint8_t> bytes) noexcept;

// The compression function over `num_blocks` blocks of 64 bytes.
void sha256_compress_portable(uint32_t* state, const uint8_t* blocks, size_t num_blocks) noexcept;
// Call only when has_sha_instructions().
void sha256_compress_native(uint32_t* state, const uint8_t* blocks, size_t num_blocks) noexcept;
[[nodiscard]] bool has_sha_instructions() noexcept;

}  // namespace helicore::kv
