// Absorbed decode for many rows: 64 packed query rows against pages of 64 tokens by warpgroup
// products. bfloat16 queries and cache, R = 512, rope width 64 or 0, sm_90a.
//
// The rows of a request are its (token, head) pairs in order; a block serves 64 of them and one
// split of the tokens they see. Latent tiles of 64 tokens alternate between two stages; tile 2 i is
// "even", 2 i + 1 "odd". Three warpgroups:
//   0   scores of even tiles, and columns [0, 256) of the result
//   1   scores of odd tiles, and columns [256, 512)
//   2   one warp copies the left halves of tiles (columns [0, 256)), one the rest
// Each of the first two needs the other's probabilities. For a pair of tiles, m the row maximum:
//   0:  S = q K_even;   m0 = max(m, S);  tell P_even and m0;  O += P_even V_even
//   1:  S = q K_odd;    O += P_even V_even;  m1 = max(m0, S);  tell P_odd and m1
//   0:  O += P_odd V_odd           1:  O += P_odd V_odd
// Group 1 starts its scores when group 0 has its own, so that one group's exponentials run under
// the other's products. A half of a stage is read last by the group whose columns it holds, which
// alone gives it back to the copying warp.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>

#include "helicore/attention/cuda/common.cuh"
#include "helicore/attention/cuda/decode_dispatch.h"
#include "helicore/attention/cuda/mla_cuda.h"
#include "helicore/attention/cuda/mma.cuh"
#include "helicore/attention/cuda/ranges.cuh"
#include "helicore/attention/cuda/tensor_map.h"
#include "helicore/attention/cuda/wgmma.cuh"
#include "helicore/core/cuda/check.h"
#include "helicore/core/softmax_stats.h"

namespace helicore::attention::cuda {
namespace {

constexpr int kRank = 512;
constexpr int kRows = 64;
constexpr int kTokens = 64;  // of a tile
constexpr int kGroupThreads = 128;
constexpr int kGroupWarps = kGroupThreads / kWarpSize;
constexpr int kThreads = 3 * kGroupThreads;
constexpr int kChunk = 64;  // columns
constexpr int kChunkBytes = kRows * kSwizzleRowBytes;
constexpr int kRankChunks = kRank / kChunk;
constexpr int kHalfChunks = kRankChunks / 2;  // of the value columns of a group
constexpr int kHalfColumns = kRank / 2;
constexpr int kMaxChunks = kRankChunks + 1;
constexpr int kStepBytes = 32;                           // 16 columns of a row
constexpr int kTokenStepBytes = 2 * kSwizzleGroupBytes;  // 16 rows of a chunk
constexpr int kUnit = 16;

// Shared memory. The last chunk of the even stage holds P_even once its rope columns are used up.
constexpr int kStageBytes = kMaxChunks * kChunkBytes;
constexpr int kStagesAt = kStageBytes;  // after the queries
constexpr int kProbEven = kStagesAt + kRankChunks * kChunkBytes;
constexpr int kProbOdd = kStagesAt + 2 * kStageBytes;
constexpr int kMaxima = kProbOdd + kChunkBytes;   // float [2, kRows]
constexpr int kSums = kMaxima + 2 * kRows * 4;    // float [2, kRows]
constexpr int kBarriers = kSums + 2 * kRows * 4;  // full [2, 2], empty [2, 2]
constexpr int kSharedBytes = kBarriers + 8 * 8;

// Named barriers; 0 is __syncthreads.
enum NamedBarrier : int { kScoresEven = 1, kProbEvenReady, kProbOddReady, kGroup0, kGroup1, kBoth };

__device__ inline void barrier_sync(int name, int threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
__device__ inline void barrier_arrive(int name, int threads) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

__device__ inline uint32_t full_barrier(uint32_t shared, int stage, int half) {
  return shared + kBarriers + (stage * 2 + half) * 8;
}
__device__ inline uint32_t empty_barrier(uint32_t shared, int stage, int half) {
  return full_barrier(shared, stage, half) + 4 * 8;
}
__device__ inline uint32_t stage_at(uint32_t shared, int stage) {
  return shared + kStagesAt + stage * kStageBytes;
}

// The 64 rows of a block. Rows of a call are numbered token * num_heads + head.
struct RowTile {
  int request;
  int64_t first;
  int count;
};

// The block's rows; false when it has none. A request's rows are cut at multiples of 64 from its
// first, and the block of (token, j) takes the j-th cut that falls into the token.
__device__ inline bool find_rows(const MlaDecodeParams& p, RowTile& rows) {
  const int heads = p.num_heads;
  const int per_token = (heads + kRows - 1) / kRows;
  const int64_t t = blockIdx.x / per_token;
  rows.request = request_of(p.cu_q, p.num_requests, t);
  const int64_t begin = p.cu_q[rows.request];
  const int64_t end = p.cu_q[rows.request + 1];
  const int64_t local = (t - begin) * heads;
  const int64_t cut = ((local + kRows - 1) / kRows + blockIdx.x % per_token) * kRows;
  if (t >= end || cut >= local + heads) return false;
  rows.first = begin * heads + cut;
  rows.count = static_cast<int>(min(int64_t{kRows}, end * heads - rows.first));
  return true;
}

// Tokens that any of the rows sees.
__device__ inline int visible_to_rows(const MlaDecodeParams& p, const RowTile& rows) {
  const int64_t last = (rows.first + rows.count - 1) / p.num_heads;
  if (p.kv_bound == nullptr) return visible_tokens(p, rows.request, last);
  int most = 0;
  for (int64_t t = rows.first / p.num_heads; t <= last; ++t) most = max(most, p.kv_bound[t]);
  return most;
}

// Copies half of every tile (0: left, 1: right with the rope columns), one warp.
template <int kHalf, int kChunks>
__device__ void copy_halves(const MlaDecodeParams& p, const CUtensorMap& map, const int32_t* pages,
                            int2 range, uint32_t shared) {
  constexpr int kFirst = kHalf * kHalfChunks;
  constexpr int kCount = kHalf == 0 ? kHalfChunks : kChunks - kHalfChunks;
  const int lane = threadIdx.x % kWarpSize;
  const int page_size = p.cache.page_size;
  const int box = min(page_size, kTokens);
  const int tiles = (range.y - range.x + kTokens - 1) / kTokens;
  const auto page_of = [&](int tile) {
    const int token = range.x + tile * kTokens + lane * box;
    return lane * box < kTokens && token < range.y ? pages[token / page_size] : 0;
  };
  int page = page_of(0);
  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % 2;
    const int token = range.x + tile * kTokens;
    const int copies = (min(kTokens, range.y - token) + box - 1) / box;
    const uint32_t full = full_barrier(shared, stage, kHalf);
    if (tile >= 2) barrier_wait(empty_barrier(shared, stage, kHalf), (tile / 2 - 1) & 1);
    if (lane == 0) barrier_expect(full, copies * box * kSwizzleRowBytes * kCount);
    __syncwarp();
    if (lane < copies) {
      const uint32_t to = stage_at(shared, stage) + lane * box * kSwizzleRowBytes;
      const int row = (token + lane * box) % page_size;
#pragma unroll
      for (int c = kFirst; c < kFirst + kCount; ++c) {
        tensor_copy(to + c * kChunkBytes, &map, c * kChunk, row, page, full);
      }
    }
    page = page_of(tile + 1);
  }
}

// Queries to shared memory, rows past the end as zeros; both consumer groups.
template <int kChunks>
__device__ inline void load_queries(const MlaDecodeParams& p, const RowTile& rows, char* smem) {
  constexpr int kUnits = kChunks * (kSwizzleRowBytes / kUnit);
  constexpr int kLoads = kRows * kUnits / (2 * kGroupThreads);
  const auto* q = static_cast<const uint4*>(p.q) + rows.first * kUnits;
  uint4 loaded[kLoads];  // all loads before the first store: one latency
#pragma unroll
  for (int n = 0; n < kLoads; ++n) {
    const int i = threadIdx.x + n * 2 * kGroupThreads;
    loaded[n] = i < rows.count * kUnits ? __ldg(q + i) : uint4{0, 0, 0, 0};
  }
#pragma unroll
  for (int n = 0; n < kLoads; ++n) {
    const int i = threadIdx.x + n * 2 * kGroupThreads;
    const int row = i / kUnits;
    const int unit = i % kUnits;
    *reinterpret_cast<uint4*>(smem + unit / 8 * kChunkBytes + row * kSwizzleRowBytes +
                              ((unit ^ row) & 7) * kUnit) = loaded[n];
  }
  fence_before_bulk_copies();
}

// One of the two groups that multiply: its half of the result and its rows' softmax. A thread has
// two rows, kGroup's tiles' scores of them, and kHalfColumns / 4 sums of each.
template <int kGroup, int kChunks>
struct Consumer {
  const MlaDecodeParams& p;
  const uint32_t shared;
  char* const smem;
  const int2 range;
  const int tiles;
  int bound[2];  // tokens after range.x that the rows see

  float o[kHalfColumns / 2] = {};
  float s[kTokens / 2];
  float m[2] = {-INFINITY, -INFINITY};
  float l[2] = {0.0f, 0.0f};  // over this group's tiles, in terms of m

  __device__ static int lane() { return threadIdx.x % kWarpSize; }
  __device__ static int row(int i) {
    return threadIdx.x % kGroupThreads / kWarpSize * 16 + lane() / 4 + i * 8;
  }
  __device__ static float base_of(float max) { return max == -INFINITY ? 0.0f : max; }
  __device__ float* maxima(int group) const {
    return reinterpret_cast<float*>(smem + kMaxima) + group * kRows;
  }

  // Starts s = q K of a tile that is there or on its way.
  __device__ void start_scores(int tile) {
    const uint32_t keys = stage_at(shared, kGroup);
    const uint32_t parity = tile / 2 & 1;
    barrier_wait(full_barrier(shared, kGroup, 0), parity);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (c == kHalfChunks) barrier_wait(full_barrier(shared, kGroup, 1), parity);
#pragma unroll
      for (int k = 0; k < kChunk / 16; ++k) {
        const uint32_t at = c * kChunkBytes + k * kStepBytes;
        wgmma_64x64(s, wgmma_operand(shared + at, 0), wgmma_operand(keys + at, 0), c + k > 0);
      }
    }
    wgmma_commit();
  }

  // Scores to base-2 exponents; the row maxima with `before` go to `max`.
  __device__ void mask(int tile, const float (&before)[2], float (&max)[2]) {
    const int valid = min(bound[0], bound[1]) - tile * kTokens;
    if (__all_sync(0xffffffffu, valid >= kTokens)) {
      scale_and_hide<false>(tile);
    } else {
      scale_and_hide<true>(tile);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      max[i] = before[i];
#pragma unroll
      for (int j = 0; j < kTokens / 8; ++j) {
        max[i] = fmaxf(max[i], fmaxf(s[j * 4 + i * 2], s[j * 4 + i * 2 + 1]));
      }
      max[i] = fmaxf(max[i], __shfl_xor_sync(0xffffffffu, max[i], 1));
      max[i] = fmaxf(max[i], __shfl_xor_sync(0xffffffffu, max[i], 2));
    }
  }

  template <bool kHide>
  __device__ void scale_and_hide(int tile) {
    const float scale = p.scale * kLog2E;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int valid = bound[i] - tile * kTokens;
#pragma unroll
      for (int j = 0; j < kTokens / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = s[j * 4 + i * 2 + c];
          x = !kHide || j * 8 + lane() % 4 * 2 + c < valid ? x * scale : -INFINITY;
        }
      }
    }
  }

  // Exponents to probabilities in terms of `max`, and their sums.
  __device__ void exponentials(const float (&max)[2], float (&sum)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float base = base_of(max[i]);
      sum[i] = 0.0f;
#pragma unroll
      for (int j = 0; j < kTokens / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = s[j * 4 + i * 2 + c];
          x = fast_exp2(x - base);
          sum[i] += x;
        }
      }
    }
  }

  // Restates sums that were in terms of m; m becomes `max`.
  __device__ void restate(const float (&max)[2]) {
    float c[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      c[i] = fast_exp2(m[i] - base_of(max[i]));
      l[i] *= c[i];
      m[i] = max[i];
    }
    if (__all_sync(0xffffffffu, c[0] == 1.0f && c[1] == 1.0f)) return;
#pragma unroll
    for (int j = 0; j < kHalfColumns / 2; j += 4) {
      o[j] *= c[0];
      o[j + 1] *= c[0];
      o[j + 2] *= c[1];
      o[j + 3] *= c[1];
    }
  }

  __device__ void tell_maxima(const float (&max)[2]) {
    if (lane() % 4 != 0) return;
    maxima(kGroup)[row(0)] = max[0];
    maxima(kGroup)[row(1)] = max[1];
  }
  __device__ void hear_maxima(float (&max)[2]) const {
    max[0] = maxima(1 - kGroup)[row(0)];
    max[1] = maxima(1 - kGroup)[row(1)];
  }

  // s as bfloat16 in shared memory.
  __device__ void tell_probabilities(int at) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      char* const to = smem + at + row(i) * kSwizzleRowBytes + lane() % 4 * 4;
#pragma unroll
      for (int j = 0; j < kTokens / 8; ++j) {
        *reinterpret_cast<uint32_t*>(to + ((j ^ row(i)) & 7) * kUnit) =
            pack_bf16(s[j * 4 + i * 2], s[j * 4 + i * 2 + 1]);
      }
    }
    fence_before_bulk_copies();
  }

  // Zeroes this group's value columns of rows past the range: 0 * NaN of an unused row must not
  // reach a sum.
  __device__ void clear_unused(int tile) {
    const int valid = range.y - range.x - tile * kTokens;
    if (valid >= kTokens) return;
    char* const values =
        smem + kStagesAt + tile % 2 * kStageBytes + kGroup * kHalfChunks * kChunkBytes;
    const int units = (kTokens - valid) * (kSwizzleRowBytes / kUnit);
    for (int c = 0; c < kHalfChunks; ++c) {
      char* const to = values + c * kChunkBytes + valid * kSwizzleRowBytes;
      for (int i = threadIdx.x % kGroupThreads; i < units; i += kGroupThreads) {
        *reinterpret_cast<uint4*>(to + i * kUnit) = {0, 0, 0, 0};
      }
    }
    fence_before_bulk_copies();
    barrier_sync(kGroup0 + kGroup, kGroupThreads);
  }

  __device__ uint64_t values(int stage, int k) const {
    return wgmma_operand(
        stage_at(shared, stage) + kGroup * kHalfChunks * kChunkBytes + k * kTokenStepBytes,
        kChunkBytes);
  }

  // Starts o += P V for this group's own tile, P from registers, ...
  __device__ void add_own() {
    uint32_t a[kTokens / 16][4];
#pragma unroll
    for (int k = 0; k < kTokens / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[k][i] = pack_bf16(s[k * 8 + i * 2], s[k * 8 + i * 2 + 1]);
    }
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTokens / 16; ++k) wgmma_64x256(o, a[k], values(kGroup, k));
    wgmma_commit();
  }

  // ... and for the other's.
  __device__ void add_other(int prob) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTokens / 16; ++k) {
      wgmma_64x256(o, wgmma_operand(shared + prob + k * kStepBytes, 0), values(1 - kGroup, k));
    }
    wgmma_commit();
  }

  __device__ void give_back(int stage) {
    __syncwarp();
    if (lane() == 0) barrier_arrive_one(empty_barrier(shared, stage, kGroup));
  }

  // Waits for products with values, and gives back the stage whose values they used.
  __device__ void finish(int stage) {
    wgmma_wait<0>();
    wgmma_settle(o);
    give_back(stage);
  }

  // From scores to probabilities that the other group knows; returns through `max` and `sum`.
  __device__ void softmax(int tile, const float (&before)[2], float (&max)[2], float (&sum)[2]) {
    mask(tile, before, max);
    tell_maxima(max);
    exponentials(max, sum);
    tell_probabilities(kGroup == 0 ? kProbEven : kProbOdd);
    barrier_arrive(kGroup == 0 ? kProbEvenReady : kProbOddReady, 2 * kGroupThreads);
  }

  // o += P V of this group's tile, once the softmax is done.
  __device__ void take_own(int tile, const float (&max)[2], const float (&sum)[2]) {
    restate(max);
    l[0] += sum[0];
    l[1] += sum[1];
    clear_unused(tile);
    add_own();
  }

  // The same of the other group's tile, which is `stage`.
  __device__ void take_other(int tile, int stage) {
    barrier_sync(stage == 0 ? kProbEvenReady : kProbOddReady, 2 * kGroupThreads);
    float max[2];
    hear_maxima(max);
    restate(max);
    barrier_wait(full_barrier(shared, stage, kGroup), tile / 2 & 1);
    clear_unused(tile);
    add_other(stage == 0 ? kProbEven : kProbOdd);
  }

  __device__ void even_pair(int tile) {
    float max[2];
    float sum[2];
    start_scores(tile);
    wgmma_wait<0>();
    wgmma_settle(s);
    barrier_arrive(kScoresEven, 2 * kGroupThreads);
    softmax(tile, m, max, sum);
    take_own(tile, max, sum);
    finish(0);
    if (tile + 1 == tiles) return;
    take_other(tile + 1, 1);
    finish(1);
  }

  __device__ void odd_pair(int tile) {
    barrier_sync(kScoresEven, 2 * kGroupThreads);
    if (tile + 1 == tiles) {
      take_other(tile, 0);
      return finish(0);
    }
    float max[2];
    float sum[2];
    start_scores(tile + 1);
    take_other(tile, 0);
    wgmma_wait<1>();  // the scores
    wgmma_settle(s);
    softmax(tile + 1, m, max, sum);
    finish(0);
    take_own(tile + 1, max, sum);
    finish(1);
  }

  // Normalised rows, or partials, and their (m, l).
  __device__ void store(const SplitOutput& partial, int64_t first, int count) {
    float* const sums = reinterpret_cast<float*>(smem + kSums);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      l[i] += __shfl_xor_sync(0xffffffffu, l[i], 1);
      l[i] += __shfl_xor_sync(0xffffffffu, l[i], 2);
      if (lane() % 4 == 0) sums[kGroup * kRows + row(i)] = l[i];
    }
    barrier_sync(kBoth, 2 * kGroupThreads);
    const bool split = partial.num_splits > 1;
    float* const stats = split ? partial.stats : p.stats;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (row(i) >= count) continue;
      const float total = sums[row(i)] + sums[kRows + row(i)];
      const float inv = total > 0.0f ? 1.0f / total : 0.0f;
      const int64_t at = (first + row(i)) * kRank + kGroup * kHalfColumns + lane() % 4 * 2;
#pragma unroll
      for (int j = 0; j < kHalfColumns / 8; ++j) {
        const float x = o[j * 4 + i * 2] * inv;
        const float y = o[j * 4 + i * 2 + 1] * inv;
        if (split) {
          *reinterpret_cast<float2*>(partial.o + at + j * 8) = {x, y};
        } else {
          *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(p.out) + at + j * 8) =
              pack_bf16(x, y);
        }
      }
      if (kGroup == 0 && lane() % 4 == 0 && stats != nullptr) {
        stats[(first + row(i)) * 2] = m[i];
        stats[(first + row(i)) * 2 + 1] = total;
      }
    }
  }

  __device__ void run(const SplitOutput& partial, int64_t first, int count) {
    for (int tile = 0; tile < tiles; tile += 2) {
      if constexpr (kGroup == 0) {
        even_pair(tile);
      } else {
        odd_pair(tile);
      }
    }
    store(partial, first, count);
  }
};

template <int kGroup, int kChunks>
__device__ void consume(const MlaDecodeParams& p, const SplitOutput& partial, const RowTile& rows,
                        int64_t first, int2 range, uint32_t shared, char* smem) {
  using Group = Consumer<kGroup, kChunks>;
  Group group = {p, shared, smem, range, (range.y - range.x + kTokens - 1) / kTokens, {}};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t t = (rows.first + min(Group::row(i), rows.count - 1)) / p.num_heads;
    group.bound[i] = min(visible_tokens(p, rows.request, t), range.y) - range.x;
  }
  group.run(partial, first, rows.count);
}

// A split without tokens: partials stay unwritten, the merge skips a sum of 0.
__device__ inline void store_empty(const MlaDecodeParams& p, const SplitOutput& partial,
                                   int64_t first, int count) {
  const bool split = partial.num_splits > 1;
  float* const stats = split ? partial.stats : p.stats;
  if (threadIdx.x < count && stats != nullptr) {
    stats[(first + threadIdx.x) * 2] = -INFINITY;
    stats[(first + threadIdx.x) * 2 + 1] = 0.0f;
  }
  if (split) return;
  uint32_t* out = reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(p.out) + first * kRank);
  for (int i = threadIdx.x; i < count * kRank / 2; i += kThreads) out[i] = 0;
}

template <int kChunks>
__global__ void __launch_bounds__(kThreads, 1)
    rows64_decode_kernel(const __grid_constant__ MlaDecodeParams p,
                         const __grid_constant__ SplitOutput partial,
                         const __grid_constant__ CUtensorMap map) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)  // supports_rows64 refuses others
  extern __shared__ __align__(1024) char smem[];
  RowTile rows;
  start_dependent_launch();  // the merge waits for the whole grid before it reads
  if (!find_rows(p, rows)) return;
  const int split = blockIdx.y;
  const int64_t first = split * p.num_tokens * p.num_heads + rows.first;
  const int2 range = split_range(visible_to_rows(p, rows), split, partial.num_splits, kTokens);
  if (range.y <= range.x) return store_empty(p, partial, first, rows.count);

  const uint32_t shared = shared_address(smem);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 4; ++i) {
      barrier_init(full_barrier(shared, i / 2, i % 2), 1);
      barrier_init(empty_barrier(shared, i / 2, i % 2), kGroupWarps);
    }
    fence_before_bulk_copies();
  }
  // Through a shuffle, so that the compiler sees one value for all lanes.
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / kGroupThreads, 0);
  __syncthreads();
  if (group == 2) {
    set_max_registers_down<24>();
    const int32_t* const pages = p.block_table + rows.request * p.block_table_stride;
    const int warp = threadIdx.x % kGroupThreads / kWarpSize;
    if (warp == 0) copy_halves<0, kChunks>(p, map, pages, range, shared);
    if (warp == 1) copy_halves<1, kChunks>(p, map, pages, range, shared);
  } else {
    set_max_registers_up<240>();
    load_queries<kChunks>(p, rows, smem);
    barrier_sync(kBoth, 2 * kGroupThreads);
    if (group == 0) {
      consume<0, kChunks>(p, partial, rows, first, range, shared, smem);
    } else {
      consume<1, kChunks>(p, partial, rows, first, range, shared, smem);
    }
  }
#endif
}

int64_t blocks_of(const MlaDecodeParams& p) {
  return p.num_tokens * ((p.num_heads + kRows - 1) / kRows);
}

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % kUnit == 0; }

bool supports_page(int page_size) {
  return page_size % kTokens == 0 || (page_size >= 8 && kTokens % page_size == 0);
}

// More than half of a tile's rows are used; with fixed splits the heads alone decide, so that a
// row's kernel does not depend on its batch.
bool fills_tiles(const MlaDecodeParams& p, bool fixed) {
  const int64_t rows = fixed ? p.num_heads : p.num_tokens * p.num_heads / p.num_requests;
  return rows > kRows / 2;
}

bool supports_rows64(const MlaDecodeParams& p, const DecodeDevice& device, bool fixed) {
  return device.compute_major == 9 && p.q_dtype == DType::kBFloat16 &&
         p.cache.dtype == DType::kBFloat16 && p.cache.kv_lora_rank == kRank &&
         (p.cache.rope_dim == kChunk || p.cache.rope_dim == 0) && p.num_requests > 0 &&
         fills_tiles(p, fixed) && supports_page(p.cache.page_size) &&
         p.cache.page_stride * 2 % kUnit == 0 && aligned(p.cache.data) && aligned(p.q) &&
         aligned(p.out) && blocks_of(p) < (int64_t{1} << 31);
}

// The count that a simple model of the call's time likes best: waves of blocks, each a start-up and
// its pairs of tiles, then a merge whose traffic grows with the splits. Times in ns, from one H200.
int64_t rows64_splits(const MlaDecodeParams& p, int64_t max_kv_len, const DecodeDevice& device) {
  constexpr double kStartNs = 5000.0;
  constexpr double kTileNs = 1500.0;
  constexpr double kMergeNs = 2000.0;
  constexpr double kMergeRowNs = 0.8;  // a partial row written and read
  const int64_t all_rows = p.num_tokens * p.num_heads;
  const int64_t blocks =
      std::max((all_rows + kRows - 1) / kRows, std::min<int64_t>(p.num_requests, blocks_of(p)));
  const int64_t tiles = std::max<int64_t>(1, (max_kv_len + kTokens - 1) / kTokens);
  int64_t best = 1;
  double best_ns = 0.0;
  for (int64_t s = 1; s <= std::min<int64_t>(tiles, kMaxSplits); ++s) {
    const auto waves = static_cast<double>((blocks * s + device.num_sms - 1) / device.num_sms);
    const auto depth = static_cast<double>((tiles + s - 1) / s);
    const auto partial_rows = static_cast<double>(s * all_rows);
    const double ns = waves * (kStartNs + depth * kTileNs) +
                      (s > 1 ? kMergeNs + partial_rows * kMergeRowNs : 0.0);
    if (s == 1 || ns < best_ns) {
      best = s;
      best_ns = ns;
    }
  }
  return best;
}

template <int kChunks>
void launch(const MlaDecodeParams& p, const SplitOutput& partial, const CUtensorMap& map,
            Stream stream) {
  auto* kernel = rows64_decode_kernel<kChunks>;
  helicore::cuda::check(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
      "shared memory for rows64_decode_kernel");
  const dim3 grid(static_cast<unsigned>(blocks_of(p)), static_cast<unsigned>(partial.num_splits));
  kernel<<<grid, kThreads, kSharedBytes, static_cast<cudaStream_t>(stream)>>>(p, partial, map);
}

void run_rows64(const MlaDecodeParams& p, const SplitOutput& partial, Stream stream) {
  const CUtensorMap map = cache_tensor_map(p.cache, std::min(p.cache.page_size, kTokens));
  if (p.cache.rope_dim == 0) {
    launch<kRankChunks>(p, partial, map, stream);
  } else {
    launch<kMaxChunks>(p, partial, map, stream);
  }
  helicore::cuda::check_launch("rows64_decode_kernel");
}

}  // namespace

const DecodeKernel kRows64Decode = {"rows64_sm90a", supports_rows64, rows64_splits, run_rows64};

}  // namespace helicore::attention::cuda
