#include "helicore/kv/crc32c.h"

#include <array>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace helicore::kv {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;
using Table = std::array<uint32_t, 256>;

// tables[k][b]: the effect of byte b followed by k zero bytes.
constexpr std::array<Table, 8> make_tables() {
  std::array<Table, 8> tables{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t crc = b;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    tables[0][b] = crc;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t b = 0; b < 256; ++b) {
      tables[k][b] = (tables[k - 1][b] >> 8) ^ tables[0][tables[k - 1][b] & 0xff];
    }
  }
  return tables;
}

constexpr std::array<Table, 8> kTables = make_tables();

uint64_t load_8(const std::byte* at) noexcept {
  static_assert(std::endian::native == std::endian::little);
  uint64_t word = 0;
  std::memcpy(&word, at, sizeof(word));
  return word;
}

}  // namespace

uint32_t crc32c_portable(std::span<const std::byte> bytes, uint32_t crc) noexcept {
  crc = ~crc;
  const std::byte* at = bytes.data();
  size_t left = bytes.size();
  for (; left >= 8; left -= 8, at += 8) {
    const uint64_t word = load_8(at) ^ crc;
    crc = 0;
    for (size_t k = 0; k < 8; ++k) crc ^= kTables[7 - k][word >> (8 * k) & 0xff];
  }
  for (; left > 0; --left, ++at) {
    crc = (crc >> 8) ^ kTables[0][(crc ^ static_cast<uint32_t>(*at)) & 0xff];
  }
  return ~crc;
}

#if defined(__x86_64__)

namespace {

// The instruction has a latency of three cycles and a throughput of one, so three lanes of kLane
// bytes run abreast; a lane's remainder moves past the next lane by a table per byte of it.
constexpr size_t kLane = 1024;

std::array<Table, 4> make_lane_tables() noexcept {
  std::array<Table, 4> tables{};
  for (size_t k = 0; k < 4; ++k) {
    for (uint32_t b = 0; b < 256; ++b) {
      uint32_t crc = b << (8 * k);
      for (size_t i = 0; i < kLane; ++i) crc = (crc >> 8) ^ kTables[0][crc & 0xff];
      tables[k][b] = crc;
    }
  }
  return tables;
}

uint32_t skip_lane(const std::array<Table, 4>& tables, uint32_t crc) noexcept {
  return tables[0][crc & 0xff] ^ tables[1][crc >> 8 & 0xff] ^ tables[2][crc >> 16 & 0xff] ^
         tables[3][crc >> 24];
}

}  // namespace

bool has_crc_instructions() noexcept { return __builtin_cpu_supports("sse4.2") != 0; }

__attribute__((target("sse4.2"))) uint32_t crc32c_native(std::span<const std::byte> bytes,
                                                         uint32_t crc) noexcept {
  static const std::array<Table, 4> lane_tables = make_lane_tables();
  uint64_t a = ~crc;
  const std::byte* at = bytes.data();
  size_t left = bytes.size();
  for (; left >= 3 * kLane; left -= 3 * kLane, at += 3 * kLane) {
    uint64_t b = 0, c = 0;
    for (size_t i = 0; i < kLane; i += 8) {
      a = _mm_crc32_u64(a, load_8(at + i));
      b = _mm_crc32_u64(b, load_8(at + kLane + i));
      c = _mm_crc32_u64(c, load_8(at + 2 * kLane + i));
    }
    const uint32_t ab = skip_lane(lane_tables, static_cast<uint32_t>(a)) ^ static_cast<uint32_t>(b);
    a = skip_lane(lane_tables, ab) ^ static_cast<uint32_t>(c);
  }
  for (; left >= 8; left -= 8, at += 8) a = _mm_crc32_u64(a, load_8(at));
  auto tail = static_cast<uint32_t>(a);
  for (; left > 0; --left, ++at) tail = _mm_crc32_u8(tail, static_cast<unsigned char>(*at));
  return ~tail;
}

#else

bool has_crc_instructions() noexcept { return false; }
uint32_t crc32c_native(std::span<const std::byte> bytes, uint32_t crc) noexcept {
  return crc32c_portable(bytes, crc);
}

#endif

uint32_t crc32c(std::span<const std::byte> bytes, uint32_t crc) noexcept {
  static const bool native = has_crc_instructions();
  return native ? crc32c_native(bytes, crc) : crc32c_portable(bytes, crc);
}

}  // namespace helicore::kv
