// Layout and small helpers of the many-row decode kernel (mla_decode_rows64.cu).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "helicore/attention/cuda/common.cuh"
#include "helicore/attention/cuda/ranges.cuh"
#include "helicore/attention/cuda/wgmma.cuh"

namespace helicore::attention::cuda::rows64 {

inline constexpr int kRank = 512;
inline constexpr int kRows = 64;
inline constexpr int kTokens = 64;  // of a tile
inline constexpr int kGroupThreads = 128;
inline constexpr int kGroupWarps = kGroupThreads / kWarpSize;
inline constexpr int kThreads = 3 * kGroupThreads;
inline constexpr int kChunk = 64;  // columns
inline constexpr int kChunkBytes = kRows * kSwizzleRowBytes;
inline constexpr int kRankChunks = kRank / kChunk;
inline constexpr int kHalfChunks = kRankChunks / 2;  // of the value columns of a group
inline constexpr int kHalfColumns = kRank / 2;
inline constexpr int kMaxChunks = kRankChunks + 1;
inline constexpr int kStepBytes = 32;                           // 16 columns of a row
inline constexpr int kTokenStepBytes = 2 * kSwizzleGroupBytes;  // 16 rows of a chunk
inline constexpr int kUnit = 16;

// Shared memory. The last chunk of the even stage holds P_even once its rope columns are used up.
inline constexpr int kStageBytes = kMaxChunks * kChunkBytes;
inline constexpr int kStagesAt = kStageBytes;  // after the queries
inline constexpr int kProbEven = kStagesAt + kRankChunks * kChunkBytes;
inline constexpr int kProbOdd = kStagesAt + 2 * kStageBytes;
inline constexpr int kMaxima = kProbOdd + kChunkBytes;   // float [2, kRows]
inline constexpr int kSums = kMaxima + 2 * kRows * 4;    // float [2, kRows]
inline constexpr int kBarriers = kSums + 2 * kRows * 4;  // full [2, 2], empty [2, 2]
inline constexpr int kSharedBytes = kBarriers + 8 * 8;

// Results wait here for their stores: [kRows] of each group's columns, where its stage was. The
// pitch keeps the lanes of a store on different banks.
inline constexpr int kResultRowBytes = kHalfColumns * 4 + 32;
static_assert(kRows * kResultRowBytes <= kStageBytes);

// Named barriers; 0 is __syncthreads.
enum NamedBarrier : int { kScoresEven = 1, kProbEvenReady, kProbOddReady, kGroup0, kGroup1, kBoth };

template <int kName, int kThreads>
__device__ inline void barrier_sync() {
  asm volatile("barrier.cta.sync %0, %1;" ::"n"(kName), "n"(kThreads) : "memory");
}
template <int kName, int kThreads>
__device__ inline void barrier_arrive() {
  asm volatile("barrier.cta.arrive %0, %1;" ::"n"(kName), "n"(kThreads) : "memory");
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

}  // namespace helicore::attention::cuda::rows64
