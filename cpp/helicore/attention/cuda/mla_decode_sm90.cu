// Absorbed decode on tensor cores: bfloat16 queries, a bfloat16 cache of rope width 64 or 0 or a
// quantised one of rope width 64 (coded_tiles.cuh), R = 512, sm_90.
//
// A block serves kRows heads of one query token and one split of its tokens. Tiles of 64 latent
// rows arrive by one bulk copy per row, a ring of stages deep; a row in shared memory is padded by
// 16 bytes, so that eight rows of a matrix load hit all banks. The row serves as key (all columns)
// and, transposed on load, as value (first R columns).
//   scores   warps split tokens (kRows = 16, queries in registers) or heads, tokens and width
//   softmax  online, base 2; row maxima of the warps meet in shared memory
//   values   each of the eight warps sums 64 output columns of all heads
// Probabilities are rounded to bfloat16 for the second product; all sums are float32.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "helicore/attention/cuda/coded_tiles.cuh"
#include "helicore/attention/cuda/common.cuh"
#include "helicore/attention/cuda/decode_dispatch.h"
#include "helicore/attention/cuda/mla_cuda.h"
#include "helicore/attention/cuda/mma.cuh"
#include "helicore/attention/cuda/ranges.cuh"
#include "helicore/core/cuda/check.h"
#include "helicore/core/softmax_stats.h"

namespace helicore::attention::cuda {
namespace {

constexpr int kRank = 512;
constexpr int kTokens = 64;  // of a tile
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kUnit = 16;                     // bytes of a matrix row, of a copy
constexpr int kWarpColumns = kRank / kWarps;  // output columns of a warp
constexpr int kColumnTiles = kWarpColumns / 8;
constexpr int kProbBytes = kTokens * 2;  // row of probabilities
[[maybe_unused]] constexpr int kCopyRows = kTokens / kWarps;
constexpr int kSmallRows = 16;
constexpr int kLargeRows = 64;

// How the work of a block is laid out for kRows heads.
template <int kRows_, int kRope_, CacheFormat kFormat_ = CacheFormat::kDense>
struct Layout {
  static constexpr int kRank = cuda::kRank;
  static constexpr int kTokens = cuda::kTokens;
  static constexpr int kWarps = cuda::kWarps;
  static constexpr int kRows = kRows_;
  static constexpr int kRope = kRope_;
  static constexpr CacheFormat kFormat = kFormat_;
  static constexpr bool kIsCoded = kFormat != CacheFormat::kDense;
  static constexpr int kWidth = kRank + kRope;
  static constexpr int kRowBytes = kWidth * 2;
  static constexpr int kRowStride = kRowBytes + kUnit;
  static constexpr int kStageBytes = kTokens * kRowStride;
  static constexpr int kSteps = kWidth / 16;  // of the score product
  static constexpr bool kQueriesInRegisters = kRows == kSmallRows;
  // A coded tile has a ring of its own and is decoded into the one stage there is.
  static constexpr int kStages = kIsCoded ? 1 : kQueriesInRegisters ? 3 : 2;
  static constexpr int kRawStages = !kIsCoded ? 0 : kQueriesInRegisters ? 3 : 1;
  static constexpr int kRing = kIsCoded ? kRawStages : kStages;  // tiles under way

  static constexpr int kRowTiles = kRows / 16;
  // Scores end up as one row tile of a warp, kTokenTiles products of 16 x 8.
  static constexpr int kTokenWarps = kWarps / kRowTiles;
  static constexpr int kWarpTokens = kTokens / kTokenWarps;
  static constexpr int kTokenTiles = kWarpTokens / 8;

  static constexpr int kQ = kStages * kStageBytes;
  static constexpr int kProb = kQ + (kQueriesInRegisters ? 0 : kRows * kRowBytes);
  static constexpr int kRowMax =
      kProb + kRows * kProbBytes;  // [kTokenWarps, kRows], at the end sums
  static constexpr int kCorr = kRowMax + kTokenWarps * kRows * 4;  // [kRows], at the end maxima
  static constexpr int kBarriers = kCorr + kRows * 4;
  static constexpr int kRawRowBytes = static_cast<int>(row_bytes(kFormat, kRank, kRope));
  static constexpr int kRawStride = kRawRowBytes + kUnit;
  static constexpr int kRawStageBytes = kTokens * kRawStride;
  static constexpr int kRaw = (kBarriers + kRing * 8 + kUnit - 1) / kUnit * kUnit;
  static constexpr int kTotal = kRaw + kRawStages * kRawStageBytes;
};

// Address of 16-byte unit `unit` of row `row`; units are permuted within groups of eight, so that
// eight rows of one unit hit all banks.
__device__ inline uint32_t swizzled(uint32_t base, int row, int row_bytes, int unit) {
  return base + row * row_bytes + ((unit ^ (row & 7)) * kUnit);
}

// The tiles of a block: where rows come from and where they go.
template <typename L>
struct TileSource {
  const MlaDecodeParams& p;
  const int32_t* pages;
  int2 range;
  uint32_t shared;
  char* shared_pointer;

  __device__ int token_of(int tile) const {
    return range.x + tile * kTokens + (threadIdx.x / kWarpSize) * kCopyRows +
           threadIdx.x % kWarpSize;
  }

  // The page of this thread's row of `tile`; 0 when it copies none.
  __device__ int page_of(int tile) const {
    const int token = token_of(tile);
    return threadIdx.x % kWarpSize < kCopyRows && token < range.y ? pages[token / p.cache.page_size]
                                                                  : 0;
  }

  // Starts the copies of a tile; rows past the range become zero, for 0 * NaN of an unused row must
  // not happen.
  __device__ void start(int tile, int page) const {
    const int stage = tile % L::kStages;
    const uint32_t to = shared + stage * L::kStageBytes;
    const uint32_t barrier = shared + L::kBarriers + stage * 8;
    const int valid = min(kTokens, range.y - range.x - tile * kTokens);
    if (threadIdx.x == 0) barrier_expect(barrier, valid * L::kRowBytes);
    const int row = (threadIdx.x / kWarpSize) * kCopyRows + threadIdx.x % kWarpSize;
    if (threadIdx.x % kWarpSize < kCopyRows && row < valid) {
      const int64_t offset = static_cast<int64_t>(page) * p.cache.page_stride +
                             static_cast<int64_t>(token_of(tile) % p.cache.page_size) * L::kWidth;
      bulk_copy(to + row * L::kRowStride, static_cast<const __nv_bfloat16*>(p.cache.data) + offset,
                L::kRowBytes, barrier);
    }
    float4* const unused =
        reinterpret_cast<float4*>(shared_pointer + stage * L::kStageBytes + valid * L::kRowStride);
    for (int i = threadIdx.x; i < (kTokens - valid) * (L::kRowStride / kUnit); i += kThreads) {
      unused[i] = {0.0f, 0.0f, 0.0f, 0.0f};
    }
  }

  __device__ void wait(int tile) const {
    barrier_wait(shared + L::kBarriers + tile % L::kStages * 8, tile / L::kStages & 1);
  }
};

// Queries to shared memory, swizzled; heads past the end are zero. All loads are in flight before
// the first store.
template <typename L>
__device__ inline void load_queries(const MlaDecodeParams& p, int64_t t, int head_begin, char* to) {
  constexpr int kUnits = L::kRowBytes / kUnit;
  constexpr int kTotal = L::kRows * kUnits;
  constexpr int kLoads = (kTotal + kThreads - 1) / kThreads;
  const int heads = min(L::kRows, p.num_heads - head_begin);
  const uint4* from = reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(p.q) +
                                                     (t * p.num_heads + head_begin) * L::kWidth);
  uint4 loaded[kLoads];
#pragma unroll
  for (int n = 0; n < kLoads; ++n) {
    const int i = threadIdx.x + n * kThreads;
    loaded[n] = i < heads * kUnits ? __ldg(from + i) : uint4{0, 0, 0, 0};
  }
#pragma unroll
  for (int n = 0; n < kLoads; ++n) {
    const int i = threadIdx.x + n * kThreads;
    const int row = i / kUnits;
    if (i < kTotal) {
      *reinterpret_cast<uint4*>(to + row * L::kRowBytes + ((i % kUnits) ^ (row & 7)) * kUnit) =
          loaded[n];
    }
  }
}

// The [16, kWidth] queries of a block as operands of the score product.
template <typename L>
struct RegisterQueries {
  uint32_t a[L::kSteps][4];

  __device__ void load(uint32_t queries) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int k = 0; k < L::kSteps; ++k) {
      ldmatrix_x4(a[k], swizzled(queries, lane % 16, L::kRowBytes, 2 * k + lane / 16));
    }
  }

  // Scores of eight tokens a warp. Four chains of sums hide the latency of the products.
  __device__ void scores(uint32_t tile, char*, float (&s)[1][4]) const {
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;
    const uint32_t row = tile + (warp * 8 + lane % 8) * L::kRowStride + lane / 8 * kUnit;
    float chain[4][4] = {};
#pragma unroll
    for (int k = 0; k < L::kSteps; k += 2) {
      uint32_t b[4];
      ldmatrix_x4(b, row + k * 2 * kUnit);
      mma_bf16(chain[k % 4], a[k], b[0], b[1]);
      mma_bf16(chain[k % 4 + 1], a[k + 1], b[2], b[3]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[0][i] = (chain[0][i] + chain[1][i]) + (chain[2][i] + chain[3][i]);
    }
  }
};

// The same with 64 queries in shared memory. A warp multiplies 32 heads by 32 tokens over half of
// the width; warps w and w + 4 then exchange halves, so that each ends up with the sums of 16
// heads.
template <typename L>
struct SharedQueries {
  uint32_t queries;

  __device__ void load(uint32_t at) { queries = at; }

  __device__ void scores(uint32_t tile, char* exchange, float (&s)[4][4]) const {
    const int warp = threadIdx.x / kWarpSize;
    const int lane = threadIdx.x % kWarpSize;
    float part[2][4][4] = {};
    multiply(tile, part);
    float4* const mine = reinterpret_cast<float4*>(exchange) + warp % 4 * (4 * kWarpSize) + lane;
    const bool upper = warp >= 4;
    if (upper) give(mine, part[0]);
    __syncthreads();
    if (!upper) {
      take(mine, part[0], s);
      give(mine, part[1]);  // into the slots just read by this thread
    }
    __syncthreads();
    if (upper) take(mine, part[1], s);
  }

 private:
  __device__ void multiply(uint32_t tile, float (&part)[2][4][4]) const {
    constexpr int kHalf = L::kSteps / 2;
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;
    const int row = warp / 2 % 2 * 32 + lane % 16;
    const int first = warp / 4 * kHalf;
    const uint32_t tokens = tile + (warp % 2 * 32 + lane % 8 + lane / 16 * 8) * L::kRowStride +
                            lane / 8 % 2 * kUnit + first * 2 * kUnit;
    const uint32_t base = queries + row * L::kRowBytes;
    const int unit = 2 * first + lane / 16;
    uint32_t a[2][2][4];
    uint32_t b[2][2][4];
    const auto fetch = [&](int k) {
      const uint32_t at = base + ((unit + 2 * k) ^ (row & 7)) * kUnit;
      ldmatrix_x4(a[k % 2][0], at);
      ldmatrix_x4(a[k % 2][1], at + 16 * L::kRowBytes);
      ldmatrix_x4(b[k % 2][0], tokens + k * 2 * kUnit);
      ldmatrix_x4(b[k % 2][1], tokens + k * 2 * kUnit + 16 * L::kRowStride);
    };
    fetch(0);
#pragma unroll
    for (int k = 0; k < kHalf; ++k) {
      if (k + 1 < kHalf) fetch(k + 1);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          mma_bf16(part[i][j], a[k % 2][i], b[k % 2][j / 2][j % 2 * 2],
                   b[k % 2][j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }

  __device__ static void give(float4* to, const float (&part)[4][4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      to[j * kWarpSize] = {part[j][0], part[j][1], part[j][2], part[j][3]};
    }
  }

  __device__ static void take(const float4* from, const float (&part)[4][4], float (&s)[4][4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4 x = from[j * kWarpSize];
      s[j][0] = part[j][0] + x.x;
      s[j][1] = part[j][1] + x.y;
      s[j][2] = part[j][2] + x.z;
      s[j][3] = part[j][3] + x.w;
    }
  }
};

// The running softmax of a warp's 16 rows; lane l keeps rows l / 4 and l / 4 + 8. All warps of a
// row agree on m; l is the sum over the lane's own tokens.
template <typename L>
struct Softmax {
  float m[2] = {-INFINITY, -INFINITY};
  float l[2] = {0.0f, 0.0f};

  __device__ static int row(int half) {
    const int warp = threadIdx.x / kWarpSize;
    const int tile = L::kQueriesInRegisters ? 0 : warp / 2 % 2 * 2 + warp / 4;
    return tile * 16 + threadIdx.x % kWarpSize / 4 + half * 8;
  }
  __device__ static int token_warp() { return threadIdx.x / kWarpSize % L::kTokenWarps; }
  // The first of the two tokens of the lane in a token tile.
  __device__ static int token(int tile) {
    return token_warp() * L::kWarpTokens + tile * 8 + threadIdx.x % 4 * 2;
  }

  // Scales, hides tokens at `valid` and past it, leaves this warp's row maxima in row_max.
  __device__ void mask(float (&s)[L::kTokenTiles][4], float scale, int valid,
                       float* row_max) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = -INFINITY;
#pragma unroll
      for (int j = 0; j < L::kTokenTiles; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = s[j][h * 2 + c];
          x = token(j) + c < valid ? x * scale : -INFINITY;
          most = fmaxf(most, x);
        }
      }
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      if (threadIdx.x % 4 == 0) row_max[token_warp() * L::kRows + row(h)] = most;
    }
  }

  // Scores to probabilities in shared memory and rescale factors of the sums so far.
  __device__ void update(const float (&s)[L::kTokenTiles][4], const float* row_max, float* corr,
                         char* prob) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = row(h);
      float m_new = m[h];
#pragma unroll
      for (int w = 0; w < L::kTokenWarps; ++w) m_new = fmaxf(m_new, row_max[w * L::kRows + r]);
      const float base = m_new == -INFINITY ? 0.0f : m_new;  // of hidden scores: exp2(-inf) is 0
      const float c = fast_exp2(m[h] - base);
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < L::kTokenTiles; ++j) {
        const float x = fast_exp2(s[j][h * 2] - base);
        const float y = fast_exp2(s[j][h * 2 + 1] - base);
        sum += x + y;
        const int at = token(j);
        *reinterpret_cast<uint32_t*>(prob + r * kProbBytes + ((at / 8) ^ (r & 7)) * kUnit +
                                     at % 8 * 2) = pack_bf16(x, y);
      }
      l[h] = l[h] * c + sum;
      m[h] = m_new;
      if (token_warp() == 0 && threadIdx.x % 4 == 0) corr[r] = c;
    }
  }

  // Leaves the warp's sums in row_sum and the maxima in row_m.
  __device__ void finish(float* row_sum, float* row_m) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = l[h];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (threadIdx.x % 4 == 0) {
        row_sum[token_warp() * L::kRows + row(h)] = sum;
        if (token_warp() == 0) row_m[row(h)] = m[h];
      }
    }
  }
};

// o = o * corr + prob V, for the warp's columns of all rows.
template <typename L>
__device__ inline void accumulate(float (&o)[L::kRowTiles][kColumnTiles][4], uint32_t tile,
                                  uint32_t prob, const float* corr) {
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
#pragma unroll
  for (int i = 0; i < L::kRowTiles; ++i) {
    const float c0 = corr[i * 16 + lane / 4];
    const float c1 = corr[i * 16 + lane / 4 + 8];
    if (__all_sync(0xffffffffu, c0 == 1.0f && c1 == 1.0f)) continue;
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
      o[i][j][0] *= c0;
      o[i][j][1] *= c0;
      o[i][j][2] *= c1;
      o[i][j][3] *= c1;
    }
  }
  const uint32_t values =
      tile + lane % 16 * L::kRowStride + warp * kWarpColumns * 2 + lane / 16 * kUnit;
#pragma unroll
  for (int k = 0; k < kTokens / 16; ++k) {
    uint32_t a[L::kRowTiles][4];
#pragma unroll
    for (int i = 0; i < L::kRowTiles; ++i) {
      ldmatrix_x4(a[i], swizzled(prob, i * 16 + lane % 16, kProbBytes, 2 * k + lane / 16));
    }
#pragma unroll
    for (int j = 0; j < kColumnTiles; j += 2) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, values + k * 16 * L::kRowStride + j * kUnit);
#pragma unroll
      for (int i = 0; i < L::kRowTiles; ++i) {
        mma_bf16(o[i][j], a[i], b[0], b[1]);
        mma_bf16(o[i][j + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// Results of a block: normalised rows and their (m, l).
template <typename L>
__device__ inline void store_rows(const MlaDecodeParams& p, const SplitOutput& partial,
                                  int64_t row_begin, int heads,
                                  const float (&o)[L::kRowTiles][kColumnTiles][4],
                                  const float* row_sum, const float* row_m, float factor) {
  const int lane = threadIdx.x % kWarpSize;
  const int column = threadIdx.x / kWarpSize * kWarpColumns + lane % 4 * 2;
  const bool split = partial.num_splits > 1;
  const auto total = [&](int row) {
    float l = 0.0f;
    for (int w = 0; w < L::kTokenWarps; ++w) l += row_sum[w * L::kRows + row];
    return l;
  };
#pragma unroll
  for (int i = 0; i < L::kRowTiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = i * 16 + lane / 4 + h * 8;
      if (row >= heads) continue;
      const float l = total(row);
      const float inv = l > 0.0f ? factor / l : 0.0f;
      const int64_t at = (row_begin + row) * kRank + column;
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
        const float x = o[i][j][h * 2] * inv;
        const float y = o[i][j][h * 2 + 1] * inv;
        if (split) {
          *reinterpret_cast<float2*>(partial.o + at + j * 8) = {x, y};
        } else {
          *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(p.out) + at + j * 8) =
              pack_bf16(x, y);
        }
      }
    }
  }
  float* const stats = split ? partial.stats : p.stats;
  const int row = threadIdx.x;
  if (row < heads && stats != nullptr) {
    stats[(row_begin + row) * 2] = row_m[row];
    stats[(row_begin + row) * 2 + 1] = total(row);
  }
}

// A block without tokens: partials stay unwritten, the merge skips a sum of 0.
__device__ inline void store_empty(const MlaDecodeParams& p, const SplitOutput& partial,
                                   int64_t row_begin, int heads) {
  const bool split = partial.num_splits > 1;
  float* const stats = split ? partial.stats : p.stats;
  if (threadIdx.x < heads && stats != nullptr) {
    stats[(row_begin + threadIdx.x) * 2] = -INFINITY;
    stats[(row_begin + threadIdx.x) * 2 + 1] = 0.0f;
  }
  if (split) return;
  uint32_t* out =
      reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(p.out) + row_begin * kRank);
  for (int i = threadIdx.x; i < heads * kRank / 2; i += kThreads) out[i] = 0;
}

template <typename L>
__global__ void __launch_bounds__(kThreads, 1)
    latent_decode_kernel(const __grid_constant__ MlaDecodeParams p,
                         const __grid_constant__ SplitOutput partial) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900  // supports_latent refuses older devices
  extern __shared__ __align__(128) char smem[];
  const int head_tiles = (p.num_heads + L::kRows - 1) / L::kRows;
  const int64_t t = blockIdx.x / head_tiles;
  const int head_begin = blockIdx.x % head_tiles * L::kRows;
  const int heads = min(L::kRows, p.num_heads - head_begin);
  const int split = blockIdx.y;
  const int64_t row_begin =
      (static_cast<int64_t>(split) * p.num_tokens + t) * p.num_heads + head_begin;
  const int request = request_of(p.cu_q, p.num_requests, t);
  const int2 range = split_range(visible_tokens(p, request, t), split, partial.num_splits, kTokens);
  const int tiles = (range.y - range.x + kTokens - 1) / kTokens;
  start_dependent_launch();  // the merge waits for the whole grid before it reads
  if (tiles <= 0) return store_empty(p, partial, row_begin, heads);

  const uint32_t shared = shared_address(smem);
  using Source = std::conditional_t<L::kIsCoded, CodedSource<L>, TileSource<L>>;
  const Source source = {p, p.block_table + request * p.block_table_stride, range, shared, smem};
  float* const row_max = reinterpret_cast<float*>(smem + L::kRowMax);
  float* const corr = reinterpret_cast<float*>(smem + L::kCorr);
  if (threadIdx.x == 0) {
    for (int i = 0; i < L::kRing; ++i) barrier_init(shared + L::kBarriers + i * 8, 1);
    fence_before_bulk_copies();
  }
  __syncthreads();

  // Queries that end up in registers pass through the last stage, which is filled afterwards.
  constexpr int kLast = L::kStages - 1;
  constexpr int kEarly = !L::kIsCoded && L::kQueriesInRegisters ? kLast : L::kRing;
  constexpr int kQueriesAt = L::kQueriesInRegisters ? kLast * L::kStageBytes : L::kQ;
#pragma unroll
  for (int i = 0; i < kEarly; ++i) {
    if (i < tiles) source.start(i, source.page_of(i));
  }
  load_queries<L>(p, t, head_begin, smem + kQueriesAt);
  __syncthreads();
  std::conditional_t<L::kQueriesInRegisters, RegisterQueries<L>, SharedQueries<L>> queries;
  queries.load(shared + kQueriesAt);
  if constexpr (L::kQueriesInRegisters) {
    fence_before_bulk_copies();
    __syncthreads();
    if (!L::kIsCoded && kEarly < tiles) source.start(kEarly, source.page_of(kEarly));
    __syncthreads();
  }
  int next_page = source.page_of(L::kRing);
  const auto refill = [&](int tile) {
    if (tile + L::kRing >= tiles) return;
    source.start(tile + L::kRing, next_page);
    next_page = source.page_of(tile + L::kRing + 1);
  };
  // kFp8's one scale goes into the scores and the results.
  const float factor = L::kFormat == CacheFormat::kFp8 ? p.cache.scale : 1.0f;

  Softmax<L> softmax;
  float o[L::kRowTiles][kColumnTiles][4] = {};
  for (int tile = 0; tile < tiles; ++tile) {
    const uint32_t rows = shared + tile % L::kStages * L::kStageBytes;
    float s[L::kTokenTiles][4];
    source.wait(tile);
    if constexpr (L::kIsCoded) {
      source.decode(tile);
      __syncthreads();
      refill(tile);
    }
    queries.scores(rows, smem + L::kProb, s);
    softmax.mask(s, p.scale * factor * kLog2E, range.y - range.x - tile * kTokens, row_max);
    __syncthreads();
    softmax.update(s, row_max, corr, smem + L::kProb);
    __syncthreads();
    accumulate<L>(o, rows, shared + L::kProb, corr);
    __syncthreads();  // the stage, the probabilities and the factors are used up
    if constexpr (!L::kIsCoded) refill(tile);
  }
  softmax.finish(row_max, corr);
  __syncthreads();
  store_rows<L>(p, partial, row_begin, heads, o, row_max, corr, factor);
#endif
}

int rows_of(const MlaDecodeParams& p) {
  return p.num_heads > 2 * kSmallRows ? kLargeRows : kSmallRows;
}

int64_t blocks_of(const MlaDecodeParams& p) {
  return p.num_tokens * ((p.num_heads + rows_of(p) - 1) / rows_of(p));
}

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % kUnit == 0; }

bool supports_rows(const MlaCache& cache) {
  if (cache.format == CacheFormat::kDense) {
    return cache.dtype == DType::kBFloat16 && (cache.rope_dim == 64 || cache.rope_dim == 0) &&
           cache.page_stride * 2 % kUnit == 0;
  }
  return cache.rope_dim == 64 && cache.page_stride % kUnit == 0;
}

bool supports_latent(const MlaDecodeParams& p, const DecodeDevice& device, bool) {
  return device.compute_major >= 9 && p.q_dtype == DType::kBFloat16 &&
         p.cache.kv_lora_rank == kRank && supports_rows(p.cache) && aligned(p.cache.data) &&
         aligned(p.q) && aligned(p.out) && blocks_of(p) < (int64_t{1} << 31);
}

// The count that a simple model of the call's time likes best: waves of blocks, each a start-up and
// its tiles, then a merge whose traffic grows with the splits. Times in ns, from one H200.
int64_t latent_splits(const MlaDecodeParams& p, int64_t max_kv_len, const DecodeDevice& device) {
  constexpr double kStartNs = 5000.0;
  constexpr double kMergeNs = 2000.0;
  constexpr double kMergeRowNs = 0.8;  // a partial row written and read
  const double tile_ns = rows_of(p) == kLargeRows ? 4600.0 : 2300.0;
  const int64_t blocks = blocks_of(p);
  const int64_t tiles = std::max<int64_t>(1, (max_kv_len + kTokens - 1) / kTokens);
  int64_t best = 1;
  double best_ns = 0.0;
  for (int64_t s = 1; s <= std::min<int64_t>(tiles, kMaxSplits); ++s) {
    const auto waves = static_cast<double>((blocks * s + device.num_sms - 1) / device.num_sms);
    const auto depth = static_cast<double>((tiles + s - 1) / s);
    const auto partial_rows = static_cast<double>(s * p.num_tokens * p.num_heads);
    const double ns = waves * (kStartNs + depth * tile_ns) +
                      (s > 1 ? kMergeNs + partial_rows * kMergeRowNs : 0.0);
    if (s == 1 || ns < best_ns) {
      best = s;
      best_ns = ns;
    }
  }
  return best;
}

template <typename L>
void launch(const MlaDecodeParams& p, const SplitOutput& partial, Stream stream) {
  auto* kernel = latent_decode_kernel<L>;
  helicore::cuda::check(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, L::kTotal),
      "shared memory for latent_decode_kernel");
  const dim3 grid(static_cast<unsigned>(blocks_of(p)), static_cast<unsigned>(partial.num_splits));
  kernel<<<grid, kThreads, L::kTotal, static_cast<cudaStream_t>(stream)>>>(p, partial);
}

template <int kRope, CacheFormat kFormat>
void launch_rows(const MlaDecodeParams& p, const SplitOutput& partial, Stream stream) {
  if (rows_of(p) == kLargeRows) {
    launch<Layout<kLargeRows, kRope, kFormat>>(p, partial, stream);
  } else {
    launch<Layout<kSmallRows, kRope, kFormat>>(p, partial, stream);
  }
}

void run_latent(const MlaDecodeParams& p, const SplitOutput& partial, Stream stream) {
  switch (p.cache.format) {
    case CacheFormat::kDense:
      if (p.cache.rope_dim == 0) {
        launch_rows<0, CacheFormat::kDense>(p, partial, stream);
      } else {
        launch_rows<64, CacheFormat::kDense>(p, partial, stream);
      }
      break;
    case CacheFormat::kFp8:
      launch_rows<64, CacheFormat::kFp8>(p, partial, stream);
      break;
    case CacheFormat::kFp8DsMla:
      launch_rows<64, CacheFormat::kFp8DsMla>(p, partial, stream);
      break;
    case CacheFormat::kNvFp4:
      launch_rows<64, CacheFormat::kNvFp4>(p, partial, stream);
      break;
  }
  helicore::cuda::check_launch("latent_decode_kernel");
}

}  // namespace

const DecodeKernel kLatentDecode = {"latent_sm90", supports_latent, latent_splits, run_latent};

}  // namespace helicore::attention::cuda
