// Element types, devices and the bfloat16 storage type. Every area uses these names.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace helicore {

// Element type of a tensor. Values are part of the ABI.
enum class DType : uint8_t {
  kFloat32 = 0,
  kBFloat16 = 1,
  kFloat16 = 2,
  kFloat8E4M3 = 3,
  kUInt8 = 4,
  kInt32 = 5,
  kInt64 = 6,
  kBool = 7,
};

// Bytes of one element.
[[nodiscard]] size_t size_of(DType dtype) noexcept;
// Lower-case name as torch spells it: "float32", "bfloat16", ...
[[nodiscard]] std::string_view name_of(DType dtype) noexcept;

enum class DeviceType : uint8_t { kCpu = 0, kCuda = 1 };

// A device: type and ordinal (0 for the CPU).
struct Device {
  DeviceType type = DeviceType::kCpu;
  int32_t index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

[[nodiscard]] std::string_view name_of(DeviceType type) noexcept;

using TokenId = int32_t;

// bfloat16 storage. Conversion from float rounds to nearest even; NaN stays NaN (quiet).
struct BFloat16 {
  uint16_t bits = 0;

  BFloat16() = default;
  explicit BFloat16(float value) noexcept {
    uint32_t u = std::bit_cast<uint32_t>(value);
    if (std::isnan(value)) {
      bits = static_cast<uint16_t>((u >> 16) | 0x40u);
    } else {
      bits = static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
    }
  }
  explicit operator float() const noexcept {
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  }
};
static_assert(sizeof(BFloat16) == 2);

}  // namespace helicore
