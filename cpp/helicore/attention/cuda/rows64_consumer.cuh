// The multiplying warpgroups of the many-row decode kernel (mla_decode_rows64.cu).
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "helicore/attention/cuda/decode_dispatch.h"
#include "helicore/attention/cuda/mma.cuh"
#include "helicore/attention/cuda/rows64.cuh"
#include "helicore/core/softmax_stats.h"

namespace helicore::attention::cuda::rows64 {

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
    barrier_sync<kGroup0 + kGroup, kGroupThreads>();
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
    barrier_arrive<kGroup == 0 ? kProbEvenReady : kProbOddReady, 2 * kGroupThreads>();
  }

  // o += P V of this group's tile, once the softmax is done.
  __device__ void take_own(int tile, const float (&max)[2], const float (&sum)[2]) {
    restate(max);
    l[0] += sum[0];
    l[1] += sum[1];
    clear_unused(tile);
    add_own();
  }

  // The same of the other group's tile, which is in stage kStage.
  template <int kStage>
  __device__ void take_other(int tile) {
    barrier_sync<kStage == 0 ? kProbEvenReady : kProbOddReady, 2 * kGroupThreads>();
    float max[2];
    hear_maxima(max);
    restate(max);
    barrier_wait(full_barrier(shared, kStage, kGroup), tile / 2 & 1);
    clear_unused(tile);
    add_other(kStage == 0 ? kProbEven : kProbOdd);
  }

  __device__ void even_pair(int tile) {
    float max[2];
    float sum[2];
    start_scores(tile);
    wgmma_wait<0>();
    wgmma_settle(s);
    barrier_arrive<kScoresEven, 2 * kGroupThreads>();
    softmax(tile, m, max, sum);
    take_own(tile, max, sum);
    finish(0);
    if (tile + 1 == tiles) return;
    take_other<1>(tile + 1);
    finish(1);
  }

  __device__ void odd_pair(int tile) {
    barrier_sync<kScoresEven, 2 * kGroupThreads>();
    if (tile + 1 == tiles) {
      take_other<0>(tile);
      return finish(0);
    }
    float max[2];
    float sum[2];
    start_scores(tile + 1);
    take_other<0>(tile);
    wgmma_wait<1>();  // the scores
    wgmma_settle(s);
    softmax(tile + 1, m, max, sum);
    finish(0);
    take_own(tile + 1, max, sum);
    finish(1);
  }

  // Normalised rows, or partials, and their (m, l). They pass through shared memory, so that a warp
  // stores whole lines.
  __device__ void store(const SplitOutput& partial, int64_t first, int count) {
    float* const sums = reinterpret_cast<float*>(smem + kSums);
    barrier_sync<kBoth, 2 * kGroupThreads>();  // both groups are done with both stages
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      char* const to = smem + kStagesAt + kGroup * kStageBytes + row(i) * kResultRowBytes;
#pragma unroll
      for (int j = 0; j < kHalfColumns / 8; ++j) {
        *reinterpret_cast<float2*>(to + (j * 8 + lane() % 4 * 2) * 4) = {o[j * 4 + i * 2],
                                                                         o[j * 4 + i * 2 + 1]};
      }
      l[i] += __shfl_xor_sync(0xffffffffu, l[i], 1);
      l[i] += __shfl_xor_sync(0xffffffffu, l[i], 2);
      if (lane() % 4 != 0) continue;
      sums[kGroup * kRows + row(i)] = l[i];
      if (kGroup == 0) maxima(0)[row(i)] = m[i];
    }
    barrier_sync<kBoth, 2 * kGroupThreads>();
    store_columns(partial, first, count, sums);
  }

  // One of 128 groups of four columns of every second row.
  __device__ void store_columns(const SplitOutput& partial, int64_t first, int count,
                                const float* sums) const {
    const bool split = partial.num_splits > 1;
    const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
    const int column = thread * 4;
    const char* const from = smem + kStagesAt + column / kHalfColumns * kStageBytes +
                             column % kHalfColumns * static_cast<int>(sizeof(float));
#pragma unroll 4
    for (int row = kGroup; row < count; row += 2) {
      const float total = sums[row] + sums[kRows + row];
      const float inv = total > 0.0f ? 1.0f / total : 0.0f;
      const float4 x = *reinterpret_cast<const float4*>(from + row * kResultRowBytes);
      const int64_t at = (first + row) * kRank + column;
      if (split) {
        *reinterpret_cast<float4*>(partial.o + at) = {x.x * inv, x.y * inv, x.z * inv, x.w * inv};
      } else {
        *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(p.out) + at) = {
            pack_bf16(x.x * inv, x.y * inv), pack_bf16(x.z * inv, x.w * inv)};
      }
    }
    float* const stats = split ? partial.stats : p.stats;
    if (kGroup == 0 && thread < count && stats != nullptr) {
      stats[(first + thread) * 2] = maxima(0)[thread];
      stats[(first + thread) * 2 + 1] = sums[thread] + sums[kRows + thread];
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

}  // namespace helicore::attention::cuda::rows64
