// Number formats of quantised tensors: FP8 E4M3 (OCP 8-bit floating point, "fn" variant: no
// infinities), the 128 x 128 block scaling of DeepSeek-V3 checkpoints, and FP4 E2M1 (magnitudes 0,
// 0.5, 1, 1.5, 2, 3, 4, 6).
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace helicore::quant {

inline constexpr float kE4M3Max = 448.0f;      // largest finite magnitude, code 0x7e
inline constexpr uint8_t kE4M3Nan = 0x7f;      // and 0xff
inline constexpr int64_t kFp8BlockSize = 128;  // rows and columns that share one fp32 scale
inline constexpr float kE2M1Max = 6.0f;        // largest magnitude, code 7
inline constexpr int64_t kNvFp4Group = 16;     // values of a row that share one e4m3 scale
inline constexpr int64_t kMxGroup = 32;        // values of a row that share one e8m0 scale

// Of values that are scaled by their largest magnitude: larger ones and infinities count as this.
inline constexpr float kLargestInput = 0x1p127f;
inline constexpr float kLeastTokenMax = 0x1p-9f;    // the largest magnitude of a row counts as this
inline constexpr float kLeastGroupMax = 1e-4f;      // and of a group of 128
inline constexpr float kLeastPackedScale = 1e-10f;  // of a group whose scale is a power of two

// The exact value of a code: sign, 4 exponent bits (bias 7), 3 mantissa bits; exponent 0 is
// subnormal.
[[nodiscard]] constexpr float decode_e4m3(uint8_t code) noexcept {
  const uint32_t magnitude = code & 0x7fu;
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
  if (magnitude == 0x7fu) return std::bit_cast<float>(sign | 0x7fc00000u);
  const float value = magnitude < 8u ? static_cast<float>(magnitude) * 0x1p-9f
                                     : std::bit_cast<float>((magnitude << 20) + (120u << 23));
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
}

// The nearest code, ties to even; magnitudes above 448 (infinity included) saturate; NaN stays NaN.
[[nodiscard]] inline uint8_t encode_e4m3(float value) noexcept {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint8_t>((bits >> 24) & 0x80u);
  const float magnitude = std::bit_cast<float>(bits & 0x7fffffffu);
  if (std::isnan(value)) return sign | kE4M3Nan;
  if (magnitude >= kE4M3Max) return sign | 0x7eu;
  if (magnitude < 0x1p-6f) {  // subnormal: multiples of 2^-9; adding 2^14 rounds to one of them
    const float shifted = magnitude + 0x1p14f;
    return sign | static_cast<uint8_t>(std::bit_cast<uint32_t>(shifted) & 0xfu);
  }
  const uint32_t m = std::bit_cast<uint32_t>(magnitude);
  const uint32_t rounded = m + 0x7ffffu + ((m >> 20) & 1u);
  const uint32_t code = (rounded >> 20) - (120u << 3);
  return sign | static_cast<uint8_t>(code > 0x7eu ? 0x7eu : code);
}

// The same with a code for every input: NaN gives 0. For values that are kept, like cache rows.
[[nodiscard]] inline uint8_t encode_e4m3_finite(float value) noexcept {
  return std::isnan(value) ? uint8_t{0} : encode_e4m3(value);
}

// The value of the low four bits: sign, 2 exponent bits (bias 1), 1 mantissa bit.
[[nodiscard]] constexpr float decode_e2m1(uint8_t code) noexcept {
  constexpr float kMagnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  return code & 8u ? -kMagnitudes[code & 7u] : kMagnitudes[code & 7u];
}

// The nearest code, ties to even; magnitudes above 6 saturate, NaN gives 0.
[[nodiscard]] inline uint8_t encode_e2m1(float value) noexcept {
  if (std::isnan(value)) return 0;
  const float m = std::fabs(value);
  const int magnitude = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) +
                        (m >= 3.5f) + (m > 5.0f);
  return static_cast<uint8_t>(magnitude | (std::signbit(value) ? 8 : 0));
}

}  // namespace helicore::quant
