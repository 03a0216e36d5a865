// Vector functions shared by the kernels of several areas; include after core/cpu/simd.h in a
// kernel file only.
#pragma once

#include "helicore/core/cpu/simd.h"

namespace helicore::HELICORE_ISA_NS {

// e^x within about 2 ulp for x in [-87, 88]: the rounding error of x * log2(e) is put back.
static inline VF exp_accurate(VF x) {
  const VF log2e = set1(1.44269502f);
  const VF log2e_low = set1(1.92596299e-8f);
  VF high = mul(x, log2e);
  VF low = fma(x, log2e_low, fma(x, log2e, sub(zero(), high)));
  return mul(exp2(high), fma(low, set1(0.693147181f), set1(1.0f)));
}

// 1 / (1 + e^-x) for finite or infinite x; what NaN gives is the caller's to replace.
static inline VF sigmoid(VF x) {
  VF e = exp_accurate(min(max(sub(zero(), x), set1(-87.0f)), set1(87.0f)));
  return div(set1(1.0f), add(set1(1.0f), e));
}

// silu(g) * u = g / (1 + e^-g) * u; NaN stays NaN.
static inline VF silu_mul(VF g, VF u) {
  VF e = exp(min(sub(zero(), g), set1(88.0f)));
  return mul(div(g, add(set1(1.0f), e)), u);
}

// x rounded to the element type and back; the pointer only names the type.
static inline VF round_to(VF x, const float*) { return x; }
static inline VF round_to(VF x, const BFloat16*) {
#if defined(HELICORE_SIMD_AVX512)
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(to_bf16(x)), 16))};
#elif defined(HELICORE_SIMD_AVX2)
  return {_mm256_castsi256_ps(_mm256_slli_epi32(round_bf16(x.a), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(round_bf16(x.b), 16))};
#else
  BFloat16 t[16];
  store(t, x);
  return load(t);
#endif
}

}  // namespace helicore::HELICORE_ISA_NS
