// Vectors of e4m3 codes, for the kernels that are compiled once per instruction set. Internal to
// *.inc.cpp.
#pragma once

#include <cstdint>
#include <cstring>

#include "helicore/core/cpu/simd.h"
#include "helicore/quant/cpu/row_kernels.h"

namespace helicore::quant::HELICORE_ISA_NS {

using namespace ::helicore::HELICORE_ISA_NS;  // NOLINT: the vector types of this variant

// Sixteen codes as float32, exact. The bits of a code are those of a half float whose value is 2^8
// times smaller, subnormals included; only NaN needs care.
static inline VF decode_e4m3x16(const uint8_t* codes) {
#if defined(HELICORE_SIMD_AVX512) || defined(HELICORE_SIMD_AVX2)
  const __m256i w = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  const __m256i magnitude = _mm256_and_si256(w, _mm256_set1_epi16(0x7f));
  const __m256i nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f));
  const __m256i sign =
      _mm256_and_si256(_mm256_slli_epi16(w, 8), _mm256_set1_epi16(static_cast<int16_t>(0x8000)));
  __m256i half = _mm256_or_si256(_mm256_slli_epi16(magnitude, 7), sign);
  half = _mm256_or_si256(half, _mm256_and_si256(nan, _mm256_set1_epi16(0x7c00)));
#if defined(HELICORE_SIMD_AVX512)
  const VF x = {_mm512_cvtph_ps(half)};
#else
  const VF x = {_mm256_cvtph_ps(_mm256_castsi256_si128(half)),
                _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))};
#endif
  return mul(x, set1(0x1p8f));
#else
  VF out;
  for (int i = 0; i < 16; ++i) {
    const uint32_t magnitude = codes[i] & 0x7fu;
    const uint32_t sign = static_cast<uint32_t>(codes[i] & 0x80u) << 24;
    const uint32_t normal = (magnitude << 20) + (120u << 23);
    const uint32_t small =
        __builtin_bit_cast(uint32_t, static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f);
    uint32_t bits = magnitude < 8u ? small : normal;
    bits = magnitude == 0x7fu ? 0x7fc00000u : bits;
    out.v[i] = __builtin_bit_cast(float, bits | sign);
  }
  return out;
#endif
}

// As decode_e4m3x16 of the first n codes; the others are not touched.
static inline VF decode_e4m3_n(const uint8_t* codes, int n) {
  uint8_t some[16] = {};
  std::memcpy(some, codes, static_cast<size_t>(n));
  return decode_e4m3x16(some);
}

// encode_e4m3_finite() without branches.
static inline uint8_t encode_e4m3_one(float x) {
  uint32_t bits = __builtin_bit_cast(uint32_t, x);
  const uint32_t sign = (bits >> 24) & 0x80u;
  bits &= 0x7fffffffu;
  const uint32_t keep = bits > 0x7f800000u ? 0u : 0xffffffffu;     // NaN gives 0
  bits = bits > 0x43e00000u ? 0x43e00000u : bits;                  // 448
  const uint32_t rounded = bits + 0x7ffffu + ((bits >> 20) & 1u);  // to three bits, ties to even
  const uint32_t normal = (rounded >> 20) - (120u << 3);
  const float shifted = __builtin_bit_cast(float, bits) + 0x1p14f;  // to a multiple of 2^-9
  const uint32_t small = __builtin_bit_cast(uint32_t, shifted) & 0xfu;
  const uint32_t magnitude = bits < 0x3c800000u ? small : normal;  // 2^-6
  return static_cast<uint8_t>((magnitude | sign) & keep);
}

// The largest |x|, NaN not counted, at most kLargestInput; size a multiple of 16. A maximum is its
// second operand where one is NaN.
static inline float largest_magnitude(const float* x, int64_t size) {
  VF most = zero();
  for (int64_t i = 0; i < size; i += 16) {
    const VF a = load(x + i);
    most = max(max(a, sub(zero(), a)), most);
  }
  const float largest = reduce_max(most);
  return largest < kLargestInput ? largest : kLargestInput;
}

}  // namespace helicore::quant::HELICORE_ISA_NS
