// Register tiles of the latent-attention kernels, compiled once per instruction set. Internal to
// *.inc.cpp.
//
// One micro-kernel serves scores, expansion and projection: out[t][16 v + lane] = sum_k a[t][k]
// b[v][k][lane], where a's elements are broadcast from rows as they lie in memory and b is packed
// 16 lanes wide. Scores come out as [token][query row], so the softmax over tokens is vertical, and
// the probabilities are ready to be broadcast in the product with V, whose rows are read as they
// lie in memory too: no cache row is ever transposed or copied. Every output element is one chain
// of products in ascending k, so its bits do not depend on the tile it is in.
#pragma once

#include <limits>

#include "helicore/core/cpu/simd.h"

namespace helicore::attention::HELICORE_ISA_NS {

using namespace ::helicore::HELICORE_ISA_NS;  // NOLINT: internal file

inline constexpr int kBlockTokens = 64;    // tokens between two updates of the softmax state
inline constexpr int kSegmentTokens = 16;  // rows that lie at one stride
inline constexpr int kSegments = kBlockTokens / kSegmentTokens;

#if defined(HELICORE_SIMD_AVX512)
inline constexpr int kTileTokens = 8;
inline constexpr int kTileVecs = 2;
inline constexpr int kStripVecs = 2;
inline constexpr int kMaxPvRows = 12;
inline constexpr int kFewHeads = 4;  // up to here scores are dot products along the lanes
#else
inline constexpr int kTileTokens = 4;
inline constexpr int kTileVecs = 1;
inline constexpr int kStripVecs = 1;
inline constexpr int kMaxPvRows = 4;
inline constexpr int kFewHeads = 0;
#endif

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Minimax polynomial 1 + f q(f) of 2^f on [-1/2, 1/2], relative error below 1e-7.
inline constexpr float kExp2C1 = 0.69314698f;
inline constexpr float kExp2C2 = 0.24022242f;
inline constexpr float kExp2C3 = 0.05550734f;
inline constexpr float kExp2C4 = 0.00967151f;
inline constexpr float kExp2C5 = 0.00132647f;

// 2^x; -inf gives exactly 0 and NaN stays NaN.
static inline VF exp2_or_nan(VF x) {
#if defined(HELICORE_SIMD_AVX512)
  const __m512 y = _mm512_max_ps(_mm512_set1_ps(-160.0f), x.v);  // the second operand if it is NaN
  const __m512 n = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(y, n);
  __m512 p = _mm512_set1_ps(kExp2C5);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(kExp2C4));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(kExp2C3));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(kExp2C2));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(kExp2C1));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return {_mm512_scalef_ps(p, n)};
#else
  const VF y = max(set1(-160.0f), x);
  return add(exp2(y), sub(y, y));
#endif
}

// 16 pairs of bfloat16: the first of each pair in `even`, the second in `odd`.
static inline void load_pairs(const BFloat16* p, VF& even, VF& odd) {
#if defined(HELICORE_SIMD_AVX512)
  const __m512i u = _mm512_loadu_si512(p);
  even.v = _mm512_castsi512_ps(_mm512_slli_epi32(u, 16));
  odd.v =
      _mm512_castsi512_ps(_mm512_and_si512(u, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
#elif defined(HELICORE_SIMD_AVX2)
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  const __m256i u = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16));
  even = {_mm256_castsi256_ps(_mm256_slli_epi32(u, 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(w, 16))};
  odd = {_mm256_castsi256_ps(_mm256_and_si256(u, high)),
         _mm256_castsi256_ps(_mm256_and_si256(w, high))};
#else
  for (int i = 0; i < 16; ++i) {
    even.v[i] = static_cast<float>(p[2 * i]);
    odd.v[i] = static_cast<float>(p[2 * i + 1]);
  }
#endif
}

#if defined(HELICORE_SIMD_AVX512)
// Sums of the lanes of four vectors.
static inline __m128 reduce_four(const VF* a) {
  const __m512 t0 =
      _mm512_add_ps(_mm512_unpacklo_ps(a[0].v, a[1].v), _mm512_unpackhi_ps(a[0].v, a[1].v));
  const __m512 t1 =
      _mm512_add_ps(_mm512_unpacklo_ps(a[2].v, a[3].v), _mm512_unpackhi_ps(a[2].v, a[3].v));
  const __m512d d0 = _mm512_castps_pd(t0);
  const __m512d d1 = _mm512_castps_pd(t1);
  const __m512 u = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(d0, d1)),
                                 _mm512_castpd_ps(_mm512_unpackhi_pd(d0, d1)));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(u), _mm512_extractf32x8_ps(u, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
#endif

// How the broadcast operand A meets the packed operand B.
struct MulF32 {  // float32 x float32
  using A = float;
  using B = float;
  static constexpr int kStep = 1;
};
struct MulF32Bf16 {  // float32 x packed pairs of bfloat16
  using A = float;
  using B = BFloat16;
  static constexpr int kStep = 2;
};
#if defined(HELICORE_SIMD_BF16)
struct MulBf16 {  // bfloat16 pairs on both sides
  using A = BFloat16;
  using B = BFloat16;
  static constexpr int kStep = 2;
};
static inline __m512bh broadcast_pair(const BFloat16* p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof(pair));
  return (__m512bh)_mm512_set1_epi32(pair);
}
#endif

// out[t * ldo + 16 v + lane] for kTok rows of a and kVec panels of b; depth counts elements of a
// row.
template <class Mul, int kTok, int kVec>
static inline void dot_tile(const typename Mul::A* a, int64_t lda, const typename Mul::B* b,
                            int64_t b_panel, int64_t depth, float* out, int64_t ldo) {
  VF acc[kTok][kVec];
#pragma GCC unroll 16
  for (int t = 0; t < kTok; ++t) {
#pragma GCC unroll 4
    for (int v = 0; v < kVec; ++v) acc[t][v] = zero();
  }
  for (int64_t k = 0; k < depth; k += Mul::kStep) {
    const typename Mul::B* bk = b + k * 16;
    if constexpr (Mul::kStep == 1) {
      VF x[kVec];
#pragma GCC unroll 4
      for (int v = 0; v < kVec; ++v) x[v] = load(bk + v * b_panel);
#pragma GCC unroll 16
      for (int t = 0; t < kTok; ++t) {
        const VF y = set1(a[t * lda + k]);
#pragma GCC unroll 4
        for (int v = 0; v < kVec; ++v) acc[t][v] = fma(y, x[v], acc[t][v]);
      }
    } else if constexpr (sizeof(typename Mul::A) == 4) {
      VF even[kVec];
      VF odd[kVec];
#pragma GCC unroll 4
      for (int v = 0; v < kVec; ++v) load_pairs(bk + v * b_panel, even[v], odd[v]);
#pragma GCC unroll 16
      for (int t = 0; t < kTok; ++t) {
        const VF y = set1(a[t * lda + k]);
        const VF z = set1(a[t * lda + k + 1]);
#pragma GCC unroll 4
        for (int v = 0; v < kVec; ++v) {
          acc[t][v] = fma(z, odd[v], fma(y, even[v], acc[t][v]));
        }
      }
    } else {
#if defined(HELICORE_SIMD_BF16)
      __m512bh x[kVec];
#pragma GCC unroll 4
      for (int v = 0; v < kVec; ++v) {
        x[v] = (__m512bh)_mm512_loadu_si512(bk + v * b_panel);
      }
#pragma GCC unroll 16
      for (int t = 0; t < kTok; ++t) {
        const __m512bh y = broadcast_pair(a + t * lda + k);
#pragma GCC unroll 4
        for (int v = 0; v < kVec; ++v) acc[t][v].v = _mm512_dpbf16_ps(acc[t][v].v, x[v], y);
      }
#endif
    }
  }
#pragma GCC unroll 16
  for (int t = 0; t < kTok; ++t) {
#pragma GCC unroll 4
    for (int v = 0; v < kVec; ++v) store(out + t * ldo + v * 16, acc[t][v]);
  }
}

#if defined(HELICORE_SIMD_AVX512)
// Dot products along the lanes, for few heads: scores of kTokens keys and four query rows, out[t *
// ldo + r]. q holds rows of `depth` elements. Broadcasting would leave most lanes of a score vector
// idle.
template <class Mul, int kTokens>
static inline void few_tile(const typename Mul::A* k, int64_t ldk, const typename Mul::A* q,
                            int64_t depth, float* out, int64_t ldo) {
  VF acc[kTokens][4];
#pragma GCC unroll 4
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) acc[t][r] = zero();
  }
  if constexpr (sizeof(typename Mul::A) == 4) {
    for (int64_t i = 0; i < depth; i += 16) {
      const __mmask16 mask = tail_mask(static_cast<int>(min64(16, depth - i)));
      __m512 x[kTokens];
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; ++t) x[t] = _mm512_maskz_loadu_ps(mask, k + t * ldk + i);
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
        const __m512 y = _mm512_maskz_loadu_ps(mask, q + r * depth + i);
#pragma GCC unroll 4
        for (int t = 0; t < kTokens; ++t) acc[t][r].v = _mm512_fmadd_ps(x[t], y, acc[t][r].v);
      }
    }
  } else {
#if defined(HELICORE_SIMD_BF16)
    for (int64_t i = 0; i < depth; i += 32) {
      const __mmask32 mask =
          depth - i >= 32 ? 0xffffffffu : static_cast<__mmask32>((1u << (depth - i)) - 1u);
      __m512bh x[kTokens];
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; ++t) {
        x[t] = (__m512bh)_mm512_maskz_loadu_epi16(mask, k + t * ldk + i);
      }
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
        const __m512bh y = (__m512bh)_mm512_maskz_loadu_epi16(mask, q + r * depth + i);
#pragma GCC unroll 4
        for (int t = 0; t < kTokens; ++t) {
          acc[t][r].v = _mm512_dpbf16_ps(acc[t][r].v, x[t], y);
        }
      }
    }
#endif
  }
#pragma GCC unroll 4
  for (int t = 0; t < kTokens; ++t) _mm_storeu_ps(out + t * ldo, reduce_four(acc[t]));
}
#endif

// num_tokens (<= 16, rows up to the next multiple of the tile are read) rows of a against num_vecs
// panels of b.
template <class Mul>
static inline void dot_rows(const typename Mul::A* a, int64_t lda, int num_tokens,
                            const typename Mul::B* b, int64_t b_panel, int num_vecs, int64_t depth,
                            float* out, int64_t ldo) {
  int v = 0;
  for (; v + kTileVecs <= num_vecs; v += kTileVecs) {
    for (int t = 0; t < num_tokens; t += kTileTokens) {
      dot_tile<Mul, kTileTokens, kTileVecs>(a + t * lda, lda, b + v * b_panel, b_panel, depth,
                                            out + t * ldo + v * 16, ldo);
    }
  }
  if (v < num_vecs) {  // an odd panel: twice the tokens keep as many chains in flight
    if (num_tokens > kTileTokens) {
      dot_tile<Mul, 2 * kTileTokens, 1>(a, lda, b + v * b_panel, b_panel, depth, out + v * 16, ldo);
    } else {
      dot_tile<Mul, kTileTokens, 1>(a, lda, b + v * b_panel, b_panel, depth, out + v * 16, ldo);
    }
  }
}

// The arithmetic of one attention tile: float32 throughout, or bfloat16 products.
struct ComputeF32 {
  using Elem = float;
  using Dot = MulF32;
  static constexpr int kPair = 1;
  static constexpr int kStrip = 16 * kStripVecs;  // columns of V that one tile covers

  static inline void store_p(float* p, int64_t ldp, int64_t t, VF p0, VF p1) {
    store(p + t * ldp, p0);
    store(p + (t + 1) * ldp, p1);
  }
  // Column order of accumulators is memory order.
  static inline void to_columns(VF*) {}

  template <int kRows, int kStrips>
  static inline void pv_tile(const float* const* seg, int64_t ldv, int num_tokens, const float* p,
                             int64_t ldp, const float* alpha, float* o, int64_t ldo, int num_cols) {
    constexpr int kVecs = kStripVecs * kStrips;
    VF acc[kRows][kVecs];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) {
        acc[r][v] = alpha == nullptr ? zero() : mul(set1(alpha[r]), load(o + r * ldo + v * 16));
      }
    }
    const bool full = num_cols >= kStrip * kStrips;
    for (int t0 = 0; t0 < num_tokens; t0 += kSegmentTokens) {
      const float* x = seg[t0 / kSegmentTokens];
      const int n = static_cast<int>(min64(kSegmentTokens, num_tokens - t0));
      const float* pt = p + t0 * ldp;
      for (int t = 0; t < n; ++t, x += ldv, pt += ldp) {
        VF y[kVecs];
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) {
          const int left = num_cols - v * 16;
          y[v] = full ? load(x + v * 16)
                      : (left > 0 ? load_n(x + v * 16, left < 16 ? left : 16) : zero());
        }
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const VF w = set1(pt[r]);
#pragma GCC unroll 8
          for (int v = 0; v < kVecs; ++v) acc[r][v] = fma(w, y[v], acc[r][v]);
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) store(o + r * ldo + v * 16, acc[r][v]);
    }
  }
};

#if defined(HELICORE_SIMD_BF16)
struct ComputeBf16 {
  using Elem = BFloat16;
  using Dot = MulBf16;
  static constexpr int kPair = 2;
  static constexpr int kStrip = 32;

  static inline void store_p(BFloat16* p, int64_t ldp, int64_t t, VF p0, VF p1) {
    // [p0 x 16 | p1 x 16] to pairs (p0, p1) per row.
    alignas(64) static constexpr uint16_t kInterleave[32] = {
        0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(p1.v, p0.v);
    const __m512i pairs = _mm512_permutexvar_epi16(_mm512_load_si512(kInterleave), both);
    _mm512_storeu_si512(p + t * ldp, pairs);
  }
  // Accumulators hold columns {0-3, 8-11, 16-19, 24-27} and {4-7, 12-15, 20-23, 28-31} of a strip.
  static inline void to_columns(VF* a) {
    const __m512 lo = a[0].v;
    const __m512 hi = a[1].v;
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second =
        _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    a[0].v = _mm512_permutex2var_ps(lo, first, hi);
    a[1].v = _mm512_permutex2var_ps(lo, second, hi);
  }

  template <int kRows, int kStrips>
  static inline void pv_tile(const BFloat16* const* seg, int64_t ldv, int num_tokens,
                             const BFloat16* p, int64_t ldp, const float* alpha, float* o,
                             int64_t ldo, int num_cols) {
    constexpr int kVecs = 2 * kStrips;
    __m512 acc[kRows][kVecs];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) {
        acc[r][v] = alpha == nullptr ? _mm512_setzero_ps()
                                     : _mm512_mul_ps(_mm512_set1_ps(alpha[r]),
                                                     _mm512_loadu_ps(o + r * ldo + v * 16));
      }
    }
    const __mmask32 mask =
        num_cols >= 32 ? 0xffffffffu : static_cast<__mmask32>((1u << num_cols) - 1u);
    for (int t0 = 0; t0 < num_tokens; t0 += kSegmentTokens) {
      const BFloat16* x = seg[t0 / kSegmentTokens];
      const int n = static_cast<int>(min64(kSegmentTokens, num_tokens - t0));
      const BFloat16* pt = p + t0 * ldp;
      for (int t = 0; t < n; t += 2, x += 2 * ldv, pt += 2 * ldp) {
        // The partner of an odd last token is the token itself, with probability 0: no unused row
        // is read.
        const BFloat16* x1 = t + 1 < n ? x + ldv : x;
        __m512bh y[kVecs];
#pragma GCC unroll 4
        for (int i = 0; i < kStrips; ++i) {
          const __m512i v0 =
              kStrips > 1 ? _mm512_loadu_si512(x + i * 32) : _mm512_maskz_loadu_epi16(mask, x);
          const __m512i v1 =
              kStrips > 1 ? _mm512_loadu_si512(x1 + i * 32) : _mm512_maskz_loadu_epi16(mask, x1);
          y[2 * i] = (__m512bh)_mm512_unpacklo_epi16(v0, v1);
          y[2 * i + 1] = (__m512bh)_mm512_unpackhi_epi16(v0, v1);
        }
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const __m512bh w = broadcast_pair(pt + 2 * r);
#pragma GCC unroll 8
          for (int v = 0; v < kVecs; ++v) acc[r][v] = _mm512_dpbf16_ps(acc[r][v], y[v], w);
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) _mm512_storeu_ps(o + r * ldo + v * 16, acc[r][v]);
    }
  }
};
#endif

// Softmax state and scratch of up to 16 * num_vecs query rows. Rows past num_rows are computed on
// zero queries and dropped. Arrays are 64-byte aligned.
template <class C>
struct AttendTile {
  using Elem = typename C::Elem;
  int num_rows = 0;
  int num_vecs = 0;                // ceil(num_rows / 16)
  int depth = 0;                   // width of q and k
  int width = 0;                   // width of v
  int64_t ldo = 0;                 // width rounded up to a strip
  float scale_log2 = 0.0f;         // sigma * log2(e)
  Elem* q = nullptr;               // [num_vecs][depth / pair][16][pair], or [16 num_vecs][depth]
  bool few_heads = false;          // q is in rows and scores are dot products along the lanes
  float* scores = nullptr;         // [kBlockTokens][16 num_vecs]
  Elem* p = nullptr;               // [kBlockTokens / pair][16 num_vecs][pair]
  float* alpha = nullptr;          // [16 num_vecs]
  const int32_t* bound = nullptr;  // [num_rows] first token that a row does not see
  int32_t min_bound = 0;           // of the rows
};

// The running state: m in base 2, l, and o not divided by l, in the column order of C.
struct SoftmaxState {
  float* m = nullptr;  // [16 num_vecs]
  float* l = nullptr;  // [16 num_vecs]
  float* o = nullptr;  // [num_rows][ldo]
  bool empty = true;   // o is not initialised yet
};

static inline void reset(SoftmaxState& state, int num_vecs) {
  for (int v = 0; v < num_vecs; ++v) {
    store(state.m + 16 * v, set1(-std::numeric_limits<float>::infinity()));
    store(state.l + 16 * v, zero());
  }
  state.empty = true;
}

// Packs num_rows rows of q (row_stride elements apart) for dot_tile; lanes past num_rows are zero.
template <class C, class T>
static inline void pack_queries(const T* q, int64_t row_stride, AttendTile<C>& tile) {
  constexpr int kPair = C::kPair;
  if (tile.few_heads) {
    for (int row = 0; row < 16 * tile.num_vecs; ++row) {
      for (int k = 0; k < tile.depth; ++k) {
        typename C::Elem* out = tile.q + int64_t{row} * tile.depth + k;
        if (row < tile.num_rows) {
          *out = static_cast<typename C::Elem>(q[row * row_stride + k]);
        } else {
          *out = {};
        }
      }
    }
    return;
  }
  const int64_t panel = int64_t{tile.depth} * 16;
  for (int v = 0; v < tile.num_vecs; ++v) {
    typename C::Elem* out = tile.q + v * panel;
    for (int lane = 0; lane < 16; ++lane) {
      const int row = v * 16 + lane;
      typename C::Elem* o = out + lane * kPair;
      if (row >= tile.num_rows) {
        for (int k = 0; k < tile.depth; ++k) o[(k / kPair) * 16 * kPair + k % kPair] = {};
        continue;
      }
      const T* x = q + row * row_stride;
      if constexpr (kPair == 2) {
        for (int k = 0; k < tile.depth; k += 2) std::memcpy(o + k * 16, x + k, 4);
      } else {
        for (int k = 0; k < tile.depth; ++k) o[k * 16] = static_cast<float>(x[k]);
      }
    }
  }
}

// One row vector of the softmax update: new maximum, probabilities, rescale factors.
template <class C>
static inline void softmax_vec(AttendTile<C>& tile, SoftmaxState& state, int v, int num_tokens) {
  const int64_t lds = int64_t{tile.num_vecs} * 16;
  const float* s = tile.scores + v * 16;
  VF top = load(s);
  VF top1 = top;
  int t = 1;
  for (; t + 1 < num_tokens; t += 2) {
    top = max(top, load(s + t * lds));
    top1 = max(top1, load(s + (t + 1) * lds));
  }
  if (t < num_tokens) top = max(top, load(s + t * lds));
  const VF scale = set1(tile.scale_log2);
  const VF old_m = load(state.m + v * 16);
  const VF m = max(old_m, mul(max(top, top1), scale));
  // A row that saw nothing yet keeps m = -inf; a finite stand-in avoids -inf - -inf.
  const VF safe_m = max(m, set1(-1e30f));
  const VF minus_m = sub(zero(), safe_m);
  const VF alpha = exp2_or_nan(sub(old_m, safe_m));
  store(tile.alpha + v * 16, alpha);
  store(state.m + v * 16, m);
  VF sum0 = mul(load(state.l + v * 16), alpha);
  VF sum1 = zero();
  typename C::Elem* p = tile.p + v * 16 * C::kPair;
  for (t = 0; t + 1 < num_tokens; t += 2) {
    const VF p0 = exp2_or_nan(fma(load(s + t * lds), scale, minus_m));
    const VF p1 = exp2_or_nan(fma(load(s + (t + 1) * lds), scale, minus_m));
    sum0 = add(sum0, p0);
    sum1 = add(sum1, p1);
    C::store_p(p, lds, t, p0, p1);
  }
  if (t < num_tokens) {
    const VF p0 = exp2_or_nan(fma(load(s + t * lds), scale, minus_m));
    sum0 = add(sum0, p0);
    C::store_p(p, lds, t, p0, zero());
  }
  store(state.l + v * 16, add(sum0, sum1));
}

template <class C, int kRows, int kStrips>
static void pv_rows(const typename C::Elem* const* seg, int64_t ldv, int num_tokens, int row,
                    int col, const AttendTile<C>& tile, SoftmaxState& state) {
  const typename C::Elem* moved[kSegments];
  for (int s = 0; s < kSegments; ++s) moved[s] = seg[s] + col;
  C::template pv_tile<kRows, kStrips>(moved, ldv, num_tokens, tile.p + row * C::kPair,
                                      int64_t{tile.num_vecs} * 16,
                                      state.empty ? nullptr : tile.alpha + row,
                                      state.o + row * tile.ldo + col, tile.ldo, tile.width - col);
}

// Strips that a tile of few rows takes at a time, so that enough chains are in flight.
static constexpr int strips_of(int num_rows) {
#if defined(HELICORE_SIMD_AVX512)
  return num_rows <= 3 ? 4 : (num_rows <= 6 ? 2 : 1);
#else
  return num_rows == 1 ? 4 : (num_rows == 2 ? 2 : 1);
#endif
}

template <class C, int kRows>
static inline void pv_columns(const typename C::Elem* const* seg, int64_t ldv, int num_tokens,
                              int row, const AttendTile<C>& tile, SoftmaxState& state) {
  constexpr int kStrips = strips_of(kRows);
  int col = 0;
  for (; col + C::kStrip * kStrips <= tile.width; col += C::kStrip * kStrips) {
    pv_rows<C, kRows, kStrips>(seg, ldv, num_tokens, row, col, tile, state);
  }
  for (; col < tile.width; col += C::kStrip) {
    pv_rows<C, kRows, 1>(seg, ldv, num_tokens, row, col, tile, state);
  }
}

template <class C>
static inline void accumulate_values(const typename C::Elem* const* seg, int64_t ldv,
                                     int num_tokens, const AttendTile<C>& tile,
                                     SoftmaxState& state) {
  const int tiles = (tile.num_rows + kMaxPvRows - 1) / kMaxPvRows;
  for (int i = 0; i < tiles; ++i) {
    const int row = tile.num_rows * i / tiles;
    switch (tile.num_rows * (i + 1) / tiles - row) {
#define HELICORE_PV_ROWS(n)                                   \
  case n:                                                     \
    pv_columns<C, n>(seg, ldv, num_tokens, row, tile, state); \
    break
      HELICORE_PV_ROWS(1);
      HELICORE_PV_ROWS(2);
      HELICORE_PV_ROWS(3);
      HELICORE_PV_ROWS(4);
#if defined(HELICORE_SIMD_AVX512)
      HELICORE_PV_ROWS(5);
      HELICORE_PV_ROWS(6);
      HELICORE_PV_ROWS(7);
      HELICORE_PV_ROWS(8);
      HELICORE_PV_ROWS(9);
      HELICORE_PV_ROWS(10);
      HELICORE_PV_ROWS(11);
      HELICORE_PV_ROWS(12);
#endif
#undef HELICORE_PV_ROWS
      default:
        break;
    }
  }
}

// Rows of k and v of up to kBlockTokens tokens; segment s holds tokens [16 s, 16 s + 16).
template <class Elem>
struct TokenBlock {
  const Elem* k[kSegments] = {};
  const Elem* v[kSegments] = {};
  int64_t ldk = 0;
  int64_t ldv = 0;
  int num_tokens = 0;
  int32_t first_token = 0;  // position of token 0 in the request
};

// Scores, softmax and values of one block of tokens into `state`.
template <class C>
static void attend_block(const TokenBlock<typename C::Elem>& block, AttendTile<C>& tile,
                         SoftmaxState& state) {
  const int n = block.num_tokens;
  const int64_t lds = int64_t{tile.num_vecs} * 16;
#if defined(HELICORE_SIMD_AVX512)
  for (int t = 0; tile.few_heads && t < n; t += 4) {
    const typename C::Elem* k = block.k[t / kSegmentTokens] + t % kSegmentTokens * block.ldk;
    for (int r = 0; r < tile.num_rows; r += 4) {
      few_tile<typename C::Dot, 4>(k, block.ldk, tile.q + int64_t{r} * tile.depth, tile.depth,
                                   tile.scores + t * lds + r, lds);
    }
  }
#endif
  for (int t = 0; !tile.few_heads && t < n; t += kSegmentTokens) {
    dot_rows<typename C::Dot>(
        block.k[t / kSegmentTokens], block.ldk, static_cast<int>(min64(kSegmentTokens, n - t)),
        tile.q, int64_t{tile.depth} * 16, tile.num_vecs, tile.depth, tile.scores + t * lds, lds);
  }
  if (tile.min_bound < block.first_token + n) {  // the causal edge crosses this block
    for (int r = 0; r < tile.num_rows; ++r) {
      for (int64_t t = max64(0, int64_t{tile.bound[r]} - block.first_token); t < n; ++t) {
        tile.scores[t * lds + r] = -std::numeric_limits<float>::infinity();
      }
    }
  }
  for (int v = 0; v < tile.num_vecs; ++v) softmax_vec(tile, state, v, n);
  accumulate_values(block.v, block.ldv, n, tile, state);
  state.empty = false;
}

// One row of the result: o * factor / l in memory order, 0 for an empty row.
template <class C, class T>
static inline void write_row(const float* o, float l, float factor, int width, T* out) {
  if (l == 0.0f) {
    for (int c = 0; c < width; ++c) out[c] = T(0.0f);
    return;
  }
  const VF inverse = set1(factor / l);
  constexpr int kVecs = C::kStrip / 16;
  for (int col = 0; col < width; col += C::kStrip) {
    VF a[kVecs];
    for (int v = 0; v < kVecs; ++v) a[v] = mul(load(o + col + v * 16), inverse);
    C::to_columns(a);
    for (int v = 0; v < kVecs; ++v) {
      const int left = width - col - v * 16;
      if (left >= 16) {
        store(out + col + v * 16, a[v]);
      } else if (left > 0) {
        store_n(out + col + v * 16, a[v], left);
      }
    }
  }
}

}  // namespace helicore::attention::HELICORE_ISA_NS
