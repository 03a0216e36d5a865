// The matrix microkernels: a tile of kRows x (kBlocks * 16) outputs held in registers while k runs
// once from 0 to K.
//
// Order of sums: each output is one chain over ascending k. Tiles differ only in how many chains
// run side by side.
#include <cstdint>

#include "helicore/core/cpu/simd.h"
#include "helicore/nn/cpu/linear_kernels.h"
#include "helicore/nn/cpu/simd_math.h"

namespace helicore::nn::HELICORE_ISA_NS {

using namespace ::helicore::HELICORE_ISA_NS;  // NOLINT: the vector types of this variant

namespace {

constexpr int kMaxRows = 6;
constexpr int kMaxBlocks = 8;
#if defined(HELICORE_SIMD_AVX512)
constexpr int kWideBlocks = 8;  // blocks side by side for one or two rows
constexpr int kBlocks = 4;      // for more rows
constexpr int kWideRows = 2;
#elif defined(HELICORE_SIMD_AVX2)
constexpr int kWideBlocks = 4;
constexpr int kBlocks = 1;  // 4 x 1: sixteen registers hold no wider tile
constexpr int kWideRows = 1;
#else
constexpr int kWideBlocks = 1;
constexpr int kBlocks = 1;
constexpr int kWideRows = 1;
#endif

// Largest row tile for an x / weight pair: the widening forms need registers for the widened x.
template <typename X, typename W>
constexpr int row_tile() {
#if defined(HELICORE_SIMD_BF16)
  return sizeof(X) == 2 && sizeof(W) == 2 ? 6 : 4;
#elif defined(HELICORE_SIMD_AVX512) || defined(HELICORE_SIMD_AVX2)
  return 4;
#else
  return 2;
#endif
}

inline float as_float(float x) { return x; }
inline float as_float(BFloat16 x) { return static_cast<float>(x); }

// 16 pairs of bfloat16 at p -> the even and the odd elements as floats.
inline void load_pairs(const BFloat16* p, VF& even, VF& odd) {
#if defined(HELICORE_SIMD_AVX512)
  __m512i u = _mm512_loadu_si512(p);
  even.v = _mm512_castsi512_ps(_mm512_slli_epi32(u, 16));
  odd.v =
      _mm512_castsi512_ps(_mm512_and_si512(u, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
#elif defined(HELICORE_SIMD_AVX2)
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  __m256i u = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16));
  even.a = _mm256_castsi256_ps(_mm256_slli_epi32(u, 16));
  even.b = _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
  odd.a = _mm256_castsi256_ps(_mm256_and_si256(u, high));
  odd.b = _mm256_castsi256_ps(_mm256_and_si256(v, high));
#else
  for (int i = 0; i < 16; ++i) {
    even.v[i] = static_cast<float>(p[2 * i]);
    odd.v[i] = static_cast<float>(p[2 * i + 1]);
  }
#endif
}

// x[0] and x[1] in all lanes.
inline void broadcast_pair(const float* x, VF& even, VF& odd) {
  even = set1(x[0]);
  odd = set1(x[1]);
}
inline void broadcast_pair(const BFloat16* x, VF& even, VF& odd) {
#if defined(HELICORE_SIMD_AVX512)
  uint32_t pair;
  std::memcpy(&pair, x, sizeof(pair));
  __m512i u = _mm512_set1_epi32(static_cast<int>(pair));
  even.v = _mm512_castsi512_ps(_mm512_slli_epi32(u, 16));
  odd.v =
      _mm512_castsi512_ps(_mm512_and_si512(u, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
#elif defined(HELICORE_SIMD_AVX2)
  uint32_t pair;
  std::memcpy(&pair, x, sizeof(pair));
  const __m256i u = _mm256_set1_epi32(static_cast<int>(pair));
  even.a = even.b = _mm256_castsi256_ps(_mm256_slli_epi32(u, 16));
  odd.a = odd.b =
      _mm256_castsi256_ps(_mm256_and_si256(u, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
#else
  even = set1(static_cast<float>(x[0]));
  odd = set1(static_cast<float>(x[1]));
#endif
}

// out [kR][kN * 16] = x rows times packed blocks.
template <int kR, int kN, typename X>
void tile(const X* const* x, const float* w, int64_t block_stride, int64_t k, float* out) {
  VF acc[kR][kN];
  for (int r = 0; r < kR; ++r) {
    for (int n = 0; n < kN; ++n) acc[r][n] = zero();
  }
  for (int64_t i = 0; i < k; ++i) {
    VF xv[kR];
    for (int r = 0; r < kR; ++r) xv[r] = set1(as_float(x[r][i]));
    for (int n = 0; n < kN; ++n) {
      VF wv = load(w + n * block_stride + i * 16);
      for (int r = 0; r < kR; ++r) acc[r][n] = fma(xv[r], wv, acc[r][n]);
    }
  }
  for (int r = 0; r < kR; ++r) {
    for (int n = 0; n < kN; ++n) store(out + (r * kN + n) * 16, acc[r][n]);
  }
}

template <int kR, int kN, typename X>
void widening_tile(const X* const* x, const BFloat16* w, int64_t block_stride, int64_t k,
                   float* out) {
  VF acc[kR][kN];
  for (int r = 0; r < kR; ++r) {
    for (int n = 0; n < kN; ++n) acc[r][n] = zero();
  }
  for (int64_t i = 0; i + 1 < k; i += 2) {
    if constexpr (kN == 1) {  // one row's x at a time: fewer registers
      VF we, wo;
      load_pairs(w + i * 16, we, wo);
      for (int r = 0; r < kR; ++r) {
        VF xe, xo;
        broadcast_pair(x[r] + i, xe, xo);
        acc[r][0] = fma(xe, we, acc[r][0]);
        acc[r][0] = fma(xo, wo, acc[r][0]);
      }
    } else {
      VF xe[kR], xo[kR];
      for (int r = 0; r < kR; ++r) broadcast_pair(x[r] + i, xe[r], xo[r]);
      for (int n = 0; n < kN; ++n) {
        VF we, wo;
        load_pairs(w + n * block_stride + i * 16, we, wo);
        for (int r = 0; r < kR; ++r) {
          acc[r][n] = fma(xe[r], we, acc[r][n]);
          acc[r][n] = fma(xo[r], wo, acc[r][n]);
        }
      }
    }
  }
  if (k % 2 != 0) {
    for (int n = 0; n < kN; ++n) {
      VF we, wo;
      load_pairs(w + n * block_stride + (k - 1) * 16, we, wo);
      for (int r = 0; r < kR; ++r) acc[r][n] = fma(set1(as_float(x[r][k - 1])), we, acc[r][n]);
    }
  }
  for (int r = 0; r < kR; ++r) {
    for (int n = 0; n < kN; ++n) store(out + (r * kN + n) * 16, acc[r][n]);
  }
}

#if defined(HELICORE_SIMD_BF16)

template <int kR, int kN>
void pair_tile(const BFloat16* const* x, const BFloat16* w, int64_t block_stride, int64_t k,
               float* out) {
  __m512 acc[kR][kN];
  for (int r = 0; r < kR; ++r) {
    for (int n = 0; n < kN; ++n) acc[r][n] = _mm512_setzero_ps();
  }
  auto step = [&](int64_t i, const uint32_t (&pair)[kR]) __attribute__((always_inline)) {
    __m512bh wv[kN];
    for (int n = 0; n < kN; ++n) {
      wv[n] = (__m512bh)_mm512_loadu_si512(w + n * block_stride + i * 16);
    }
    for (int r = 0; r < kR; ++r) {
      const __m512bh xv = (__m512bh)_mm512_set1_epi32(static_cast<int>(pair[r]));
      for (int n = 0; n < kN; ++n) acc[r][n] = _mm512_dpbf16_ps(acc[r][n], wv[n], xv);
    }
  };
  uint32_t pair[kR];
  for (int64_t i = 0; i + 1 < k; i += 2) {
    for (int r = 0; r < kR; ++r) std::memcpy(&pair[r], x[r] + i, sizeof(uint32_t));
    step(i, pair);
  }
  if (k % 2 != 0) {
    for (int r = 0; r < kR; ++r) pair[r] = x[r][k - 1].bits;
    step(k - 1, pair);
  }
  for (int r = 0; r < kR; ++r) {
    for (int n = 0; n < kN; ++n) _mm512_storeu_ps(out + (r * kN + n) * 16, acc[r][n]);
  }
}

template <int kR, int kN>
void tile(const BFloat16* const* x, const BFloat16* w, int64_t block_stride, int64_t k,
          float* out) {
  pair_tile<kR, kN>(x, w, block_stride, k, out);
}
template <int kR, int kN>
void tile(const float* const* x, const BFloat16* w, int64_t block_stride, int64_t k, float* out) {
  widening_tile<kR, kN>(x, w, block_stride, k, out);
}

#else

template <int kR, int kN, typename X>
void tile(const X* const* x, const BFloat16* w, int64_t block_stride, int64_t k, float* out) {
  widening_tile<kR, kN>(x, w, block_stride, k, out);
}

#endif

// Runs the tile for `blocks` of 1..8; uneven counts are cut into instantiated widths. out is
// [kR][blocks * 16] with row stride `ld`.
template <int kR, typename X, typename W>
void row_tile_run(const X* const* x, const W* w, int64_t block_stride, int64_t k, int blocks,
                  float* out, int ld) {
  float part[kMaxRows * kMaxBlocks * 16];
  int done = 0;
  while (done < blocks) {
    const int left = blocks - done;
    const W* wp = w + done * block_stride;
    int n;
    if (kR <= kWideRows && kWideBlocks == 8 && left >= 8) {
      n = 8;
      tile<kR, kR <= kWideRows ? kWideBlocks : kBlocks>(x, wp, block_stride, k, part);
    } else if (kBlocks >= 4 && left >= 4) {
      n = 4;
      tile<kR, kBlocks >= 4 ? 4 : kBlocks>(x, wp, block_stride, k, part);
    } else if (kR <= kWideRows && kWideBlocks == 4 && left >= 4) {
      n = 4;
      tile<kR, kR <= kWideRows ? kWideBlocks : kBlocks>(x, wp, block_stride, k, part);
    } else if (kBlocks >= 2 && left >= 2) {
      n = 2;
      tile<kR, kBlocks >= 2 ? 2 : kBlocks>(x, wp, block_stride, k, part);
    } else {
      n = 1;
      tile<kR, 1>(x, wp, block_stride, k, part);
    }
    for (int r = 0; r < kR; ++r) {
      for (int b = 0; b < n; ++b) {
        store(out + r * ld + (done + b) * 16, load(part + (r * n + b) * 16));
      }
    }
    done += n;
  }
}

template <typename X, typename W>
void rows_run(const X* const* x, int rows, const W* w, int64_t block_stride, int64_t k, int blocks,
              float* out, int ld) {
  constexpr int kTile = row_tile<X, W>();
  switch (rows) {
    case 1:
      return row_tile_run<1>(x, w, block_stride, k, blocks, out, ld);
    case 2:
      return row_tile_run<2>(x, w, block_stride, k, blocks, out, ld);
    case 3:
      return row_tile_run<kTile >= 3 ? 3 : 1>(x, w, block_stride, k, blocks, out, ld);
    case 4:
      return row_tile_run<kTile >= 4 ? 4 : 1>(x, w, block_stride, k, blocks, out, ld);
    case 5:
      return row_tile_run<kTile >= 5 ? 5 : 1>(x, w, block_stride, k, blocks, out, ld);
    default:
      return row_tile_run<kTile >= 6 ? 6 : 1>(x, w, block_stride, k, blocks, out, ld);
  }
}

inline VF load_bias(const LinearParams& p, int64_t column, int n) {
  if (p.bias_dtype == DType::kBFloat16) {
    return load_n(static_cast<const BFloat16*>(p.bias) + column, n);
  }
  return load_n(static_cast<const float*>(p.bias) + column, n);
}

template <typename Out>
void finish_row(const LinearParams& p, int64_t row, int64_t column, int64_t columns,
                const float* acc) {
  const Out* residual = static_cast<const Out*>(p.residual);
  Out* out = static_cast<Out*>(p.out) + row * p.out_stride;
  for (int64_t c = 0; c < columns; c += 16) {
    const int n = columns - c < 16 ? static_cast<int>(columns - c) : 16;
    VF v = load(acc + c);
    if (p.bias != nullptr) v = add(v, load_bias(p, column + c, n));
    if (residual != nullptr) {
      v = add(v, load_n(residual + row * p.residual_stride + column + c, n));
    }
    if (n == 16) {
      store(out + column + c, v);
    } else {
      store_n(out + column + c, v, n);
    }
  }
}

template <typename X, typename W, typename Out>
void run_typed(const LinearParams& p, int64_t block_begin, int64_t block_end) {
  constexpr int kTile = row_tile<X, W>();
  const bool gated = p.activation == Activation::kSiluMul;
  const int64_t columns = gated ? p.weight.out_features / 2 : p.weight.out_features;
  const int64_t half_blocks = (columns + 15) / 16;
  const int64_t k = p.weight.in_features;
  const int64_t stride = p.weight.block_stride();
  const W* w = static_cast<const W*>(p.weight.data);
  const X* x = static_cast<const X*>(p.x);
  const int group = p.num_rows <= kWideRows && !gated ? kMaxBlocks : 4;
  float acc[kMaxRows * kMaxBlocks * 16];
  float up[kMaxRows * kMaxBlocks * 16];
  for (int64_t b = block_begin; b < block_end; b += group) {
    const int blocks = block_end - b < group ? static_cast<int>(block_end - b) : group;
    const int ld = blocks * 16;
    const int64_t valid = columns - b * 16 < ld ? columns - b * 16 : ld;
    for (int64_t r = 0; r < p.num_rows; r += kTile) {
      const int rows = p.num_rows - r < kTile ? static_cast<int>(p.num_rows - r) : kTile;
      const X* xr[kMaxRows];
      for (int i = 0; i < rows; ++i) {
        xr[i] = x + (p.row_index != nullptr ? p.row_index[r + i] : r + i) * p.x_stride;
      }
      rows_run<X, W>(xr, rows, w + b * stride, stride, k, blocks, acc, ld);
      if (gated) {
        rows_run<X, W>(xr, rows, w + (half_blocks + b) * stride, stride, k, blocks, up, ld);
        for (int i = 0; i < rows * ld; i += 16) {
          store(acc + i, silu_mul(load(acc + i), load(up + i)));
        }
      }
      for (int i = 0; i < rows; ++i) finish_row<Out>(p, r + i, b * 16, valid, acc + i * ld);
    }
  }
}

template <typename X, typename W>
void run_out(const LinearParams& p, int64_t block_begin, int64_t block_end) {
  if (p.out_dtype == DType::kBFloat16) {
    run_typed<X, W, BFloat16>(p, block_begin, block_end);
  } else {
    run_typed<X, W, float>(p, block_begin, block_end);
  }
}

}  // namespace

void linear_blocks_kernel(const LinearParams& p, int64_t block_begin, int64_t block_end) {
  const bool x16 = p.x_dtype == DType::kBFloat16;
  const bool w16 = p.weight.dtype == DType::kBFloat16;
  if (x16 && w16) return run_out<BFloat16, BFloat16>(p, block_begin, block_end);
  if (w16) return run_out<float, BFloat16>(p, block_begin, block_end);
  if (x16) return run_out<BFloat16, float>(p, block_begin, block_end);
  return run_out<float, float>(p, block_begin, block_end);
}

}  // namespace helicore::nn::HELICORE_ISA_NS
