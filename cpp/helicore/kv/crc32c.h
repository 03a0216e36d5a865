// CRC32C (Castagnoli, reflected polynomial 0x82f63b78; RFC 3720 appendix B.4), by SSE4.2 where the
// CPU has it and tables where it does not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace helicore::kv {

// Of `bytes` after whatever gave `crc` (0 for nothing): pieces may be fed one after the other.
[[nodiscard]] uint32_t crc32c(std::span<const std::byte> bytes, uint32_t crc = 0) noexcept;

[[nodiscard]] uint32_t crc32c_portable(std::span<const std::byte> bytes, uint32_t crc) noexcept;
// Call only when has_crc_instructions().
[[nodiscard]] uint32_t crc32c_native(std::span<const std::byte> bytes, uint32_t crc) noexcept;
[[nodiscard]] bool has_crc_instructions() noexcept;

}  // namespace helicore::kv
