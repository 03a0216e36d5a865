// Vector types for kernels that are compiled once per instruction set.
//
// A kernel file `x.inc.cpp` is listed through helicore_isa_variants() in CMake; it includes this
// header and puts all of its code into `namespace HELICORE_ISA_NS` (internal, one per variant, so
// that no inline function of one variant can be linked into another). The unit of work is VF:
// kLanes floats in one or more registers.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "helicore/core/types.h"

#if defined(HELICORE_ISA_avx512bf16)
#define HELICORE_ISA_NS isa_avx512bf16
#define HELICORE_SIMD_AVX512 1
#define HELICORE_SIMD_BF16 1
#elif defined(HELICORE_ISA_avx512)
#define HELICORE_ISA_NS isa_avx512
#define HELICORE_SIMD_AVX512 1
#elif defined(HELICORE_ISA_avx2)
#define HELICORE_ISA_NS isa_avx2
#define HELICORE_SIMD_AVX2 1
#else
#define HELICORE_ISA_NS isa_generic
#endif

#if defined(HELICORE_SIMD_AVX512) || defined(HELICORE_SIMD_AVX2)
#include <immintrin.h>
#endif

namespace helicore::HELICORE_ISA_NS {

// All helpers are `static inline` inside the variant's namespace.
#if defined(HELICORE_SIMD_AVX512)

inline constexpr int kLanes = 16;
struct VF {
  __m512 v;
};
static inline VF zero() { return {_mm512_setzero_ps()}; }
static inline VF set1(float x) { return {_mm512_set1_ps(x)}; }
static inline VF load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void store(float* p, VF a) { _mm512_storeu_ps(p, a.v); }
static inline __mmask16 tail_mask(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
// First n lanes (0 <= n <= kLanes); the others read as 0 and their memory is not touched.
static inline VF load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(tail_mask(n), p)}; }
static inline void store_n(float* p, VF a, int n) { _mm512_mask_storeu_ps(p, tail_mask(n), a.v); }
static inline VF load(const BFloat16* p) {
  __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
static inline VF load_n(const BFloat16* p, int n) {
  __m256i h = _mm256_maskz_loadu_epi16(tail_mask(n), p);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
static inline __m256i to_bf16(VF a) {  // nearest even; NaN stays NaN
  __m512i u = _mm512_castps_si512(a.v);
  __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  r = _mm512_mask_or_epi32(r, nan, u, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16));
}
static inline void store(BFloat16* p, VF a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(a));
}
static inline void store_n(BFloat16* p, VF a, int n) {
  _mm256_mask_storeu_epi16(p, tail_mask(n), to_bf16(a));
}
static inline VF add(VF a, VF b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline VF sub(VF a, VF b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline VF mul(VF a, VF b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline VF div(VF a, VF b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline VF fma(VF a, VF b, VF c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline VF max(VF a, VF b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline VF min(VF a, VF b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline float reduce_add(VF a) { return _mm512_reduce_add_ps(a.v); }
static inline float reduce_max(VF a) { return _mm512_reduce_max_ps(a.v); }
// 2^a for a in [-126, 127]; smaller inputs give 0, NaN gives NaN (max error about 2 ulp).
static inline VF exp2(VF a) {
  __m512 x = _mm512_max_ps(_mm512_set1_ps(-127.0f), a.v);
  __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 f = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(1.535336188319500e-4f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.339887440266574e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.618437357674640e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.550332471162809e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.402264791363012e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.931472028550421e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  __m512 r = _mm512_scalef_ps(p, n);
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), r)};
}

#elif defined(HELICORE_SIMD_AVX2)

inline constexpr int kLanes = 16;
struct VF {
  __m256 a, b;
};
static inline VF zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline VF set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline VF load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, VF x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
static inline VF load_n(const float* p, int n) {
  float t[16] = {};
  std::memcpy(t, p, sizeof(float) * static_cast<size_t>(n));
  return load(t);
}
static inline void store_n(float* p, VF x, int n) {
  float t[16];
  store(t, x);
  std::memcpy(p, t, sizeof(float) * static_cast<size_t>(n));
}
static inline VF load(const BFloat16* p) {
  __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  __m256i lo = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(h));
  __m256i hi = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(h, 1));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
}
static inline VF load_n(const BFloat16* p, int n) {
  BFloat16 t[16] = {};
  std::memcpy(t, p, sizeof(BFloat16) * static_cast<size_t>(n));
  return load(t);
}
static inline __m256i round_bf16(__m256 x) {
  __m256i u = _mm256_castps_si256(x);
  __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_add_epi32(u, _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff)));
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  __m256i q = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
  return _mm256_srli_epi32(_mm256_blendv_epi8(r, q, nan), 16);
}
static inline void store(BFloat16* p, VF x) {
  __m256i packed = _mm256_packus_epi32(round_bf16(x.a), round_bf16(x.b));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
static inline void store_n(BFloat16* p, VF x, int n) {
  BFloat16 t[16];
  store(t, x);
  std::memcpy(p, t, sizeof(BFloat16) * static_cast<size_t>(n));
}
static inline VF add(VF x, VF y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline VF sub(VF x, VF y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline VF mul(VF x, VF y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline VF div(VF x, VF y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline VF fma(VF x, VF y, VF z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
static inline VF max(VF x, VF y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline VF min(VF x, VF y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
static inline float reduce_add(VF x) {
  __m256 s = _mm256_add_ps(x.a, x.b);
  __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  t = _mm_add_ps(t, _mm_movehl_ps(t, t));
  return _mm_cvtss_f32(_mm_add_ss(t, _mm_shuffle_ps(t, t, 1)));
}
static inline float reduce_max(VF x) {
  __m256 s = _mm256_max_ps(x.a, x.b);
  __m128 t = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  t = _mm_max_ps(t, _mm_movehl_ps(t, t));
  return _mm_cvtss_f32(_mm_max_ss(t, _mm_shuffle_ps(t, t, 1)));
}
static inline __m256 exp2_half(__m256 a) {
  __m256 x = _mm256_max_ps(_mm256_set1_ps(-127.0f), a);
  __m256 n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 f = _mm256_sub_ps(x, n);
  __m256 p = _mm256_set1_ps(1.535336188319500e-4f);
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.339887440266574e-3f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(9.618437357674640e-3f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(5.550332471162809e-2f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(2.402264791363012e-1f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(6.931472028550421e-1f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.0f));
  __m256i e =
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  __m256 r = _mm256_mul_ps(p, _mm256_castsi256_ps(e));
  return _mm256_and_ps(r, _mm256_cmp_ps(a, _mm256_set1_ps(-126.0f), _CMP_NLT_UQ));
}
static inline VF exp2(VF x) { return {exp2_half(x.a), exp2_half(x.b)}; }

#else  // generic: plain loops, any architecture

inline constexpr int kLanes = 16;
struct VF {
  float v[16];
};
#define HELICORE_LANES(expr)                    \
  VF r;                                         \
  for (int i = 0; i < 16; ++i) r.v[i] = (expr); \
  return r
static inline VF zero() { return VF{}; }
static inline VF set1(float x) { HELICORE_LANES(x); }
static inline VF load(const float* p) { HELICORE_LANES(p[i]); }
static inline void store(float* p, VF a) { std::memcpy(p, a.v, sizeof(a.v)); }
static inline VF load_n(const float* p, int n) { HELICORE_LANES(i < n ? p[i] : 0.0f); }
static inline void store_n(float* p, VF a, int n) {
  std::memcpy(p, a.v, sizeof(float) * static_cast<size_t>(n));
}
static inline VF load(const BFloat16* p) { HELICORE_LANES(static_cast<float>(p[i])); }
static inline VF load_n(const BFloat16* p, int n) {
  HELICORE_LANES(i < n ? static_cast<float>(p[i]) : 0.0f);
}
static inline void store_n(BFloat16* p, VF a, int n) {
  for (int i = 0; i < n; ++i) p[i] = BFloat16(a.v[i]);
}
static inline void store(BFloat16* p, VF a) { store_n(p, a, 16); }
static inline VF add(VF a, VF b) { HELICORE_LANES(a.v[i] + b.v[i]); }
static inline VF sub(VF a, VF b) { HELICORE_LANES(a.v[i] - b.v[i]); }
static inline VF mul(VF a, VF b) { HELICORE_LANES(a.v[i] * b.v[i]); }
static inline VF div(VF a, VF b) { HELICORE_LANES(a.v[i] / b.v[i]); }
static inline VF fma(VF a, VF b, VF c) { HELICORE_LANES(a.v[i] * b.v[i] + c.v[i]); }
static inline VF max(VF a, VF b) { HELICORE_LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
static inline VF min(VF a, VF b) { HELICORE_LANES(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
static inline float reduce_add(VF a) {
  float s = 0.0f;
  for (float x : a.v) s += x;
  return s;
}
static inline float reduce_max(VF a) {
  float m = a.v[0];
  for (float x : a.v) m = x > m ? x : m;
  return m;
}
static inline VF exp2(VF a) { HELICORE_LANES(a.v[i] < -126.0f ? 0.0f : std::exp2(a.v[i])); }
#undef HELICORE_LANES

#endif

// e^a through exp2; same range rule.
static inline VF exp(VF a) { return exp2(mul(a, set1(1.44269504088896341f))); }

}  // namespace helicore::HELICORE_ISA_NS
