// Selection: one warp a token. Sort: one block, counts in shared memory. Sum: one block a token.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>

#include "helicore/core/cuda/check.h"
#include "helicore/core/cuda/elements.cuh"
#include "helicore/moe/cuda/routing.h"

namespace helicore::moe::cuda {
namespace {

using helicore::cuda::dispatch_float;
using helicore::cuda::kWarpSize;
using helicore::cuda::load_as_float;
using helicore::cuda::store_float;
using helicore::cuda::warp_sum;

constexpr int kSortThreads = 1024;
constexpr int kCombineThreads = 128;
constexpr unsigned kAllLanes = 0xffffffffu;

// Greater for the greater value and, among equal values, for the lower index; never 0.
__device__ uint64_t ranked(float value, int index) {
  const uint32_t bits = __float_as_uint(value);
  const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(ordered) << 32 | ~static_cast<uint32_t>(index);
}

__device__ int index_of(uint64_t rank) { return static_cast<int>(~static_cast<uint32_t>(rank)); }

__device__ uint64_t warp_max(uint64_t x) {
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    x = max(x, __shfl_xor_sync(kAllLanes, x, offset));
  }
  return x;
}

// The greatest of ranks[0, n), which it sets to 0.
__device__ int take_best(uint64_t* ranks, int n, int lane) {
  uint64_t best = 0;
  for (int i = lane; i < n; i += kWarpSize) best = max(best, ranks[i]);
  best = warp_max(best);
  const int index = index_of(best);
  if (lane == index % kWarpSize) ranks[index] = 0;
  __syncwarp();
  return index;
}

// scores[E] of one token; a NaN logit has score 0.
__device__ void score(const float* logits, const RouterConfig& c, float* scores, int lane) {
  if (c.scoring == Scoring::kSigmoid) {
    for (int e = lane; e < c.num_experts; e += kWarpSize) {
      const float x = logits[e];
      scores[e] = isnan(x) ? 0.0f : 1.0f / (1.0f + expf(-x));
    }
    return;
  }
  float top = -INFINITY;
  for (int e = lane; e < c.num_experts; e += kWarpSize) {
    if (!isnan(logits[e])) top = fmaxf(top, logits[e]);
  }
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, offset));
  }
  float sum = 0.0f;
  for (int e = lane; e < c.num_experts; e += kWarpSize) {
    const float x = isnan(logits[e]) || top == -INFINITY ? 0.0f : expf(logits[e] - top);
    scores[e] = x;
    sum += x;
  }
  sum = warp_sum(sum);
  for (int e = lane; e < c.num_experts; e += kWarpSize) scores[e] = sum > 0 ? scores[e] / sum : 0;
}

// choice[E] of experts outside the best groups becomes -inf. `ranks` has room for the groups.
__device__ void keep_best_groups(const RouterConfig& c, float* choice, uint64_t* ranks, int lane) {
  const int size = c.num_experts / c.n_group;
  for (int g = lane; g < c.n_group; g += kWarpSize) {
    float first = -INFINITY, second = -INFINITY;
    for (int i = 0; i < size; ++i) {
      const float x = choice[g * size + i];
      second = fmaxf(second, fminf(first, x));
      first = fmaxf(first, x);
    }
    const bool sums = c.group_score == GroupScore::kTop2Sum && size > 1;
    ranks[g] = ranked(sums ? first + second : first, g);
  }
  __syncwarp();
  for (int i = 0; i < c.topk_group; ++i) take_best(ranks, c.n_group, lane);
  for (int e = lane; e < c.num_experts; e += kWarpSize) {
    if (ranks[e / size] != 0) choice[e] = -INFINITY;
  }
  __syncwarp();
}

__global__ void select_kernel(const __grid_constant__ SelectParams p) {
  extern __shared__ uint64_t shared[];
  const RouterConfig& c = p.config;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kWarpSize) + warp;
  if (token >= p.num_tokens) return;
  uint64_t* ranks = shared + static_cast<int64_t>(warp) * 2 * c.num_experts;  // [E]
  float* scores = reinterpret_cast<float*>(ranks + c.num_experts);            // [E]
  float* choice = scores + c.num_experts;                                     // [E]
  const float* logits = p.logits + token * c.num_experts;
  score(logits, c, scores, lane);
  for (int e = lane; e < c.num_experts; e += kWarpSize) {
    const float biased = p.bias == nullptr ? scores[e] : scores[e] + p.bias[e];
    choice[e] = isnan(logits[e]) || isnan(biased) ? -INFINITY : biased;
  }
  __syncwarp();
  if (c.group_score != GroupScore::kNone) keep_best_groups(c, choice, ranks, lane);
  for (int e = lane; e < c.num_experts; e += kWarpSize) ranks[e] = ranked(choice[e], e);
  __syncwarp();
  float sum = 0.0f;
  for (int k = 0; k < c.top_k; ++k) {
    const int e = take_best(ranks, c.num_experts, lane);
    sum += scores[e];
    if (lane == 0) p.ids[token * c.top_k + k] = e;
    if (lane == 0)
      p.weights[token * c.top_k + k] = scores[e] * (c.norm_topk_prob ? 1.0f : c.scaling);
  }
  if (!c.norm_topk_prob) return;
  __syncwarp();
  for (int k = lane; k < c.top_k; k += kWarpSize) {
    p.weights[token * c.top_k + k] = p.weights[token * c.top_k + k] / (sum + 1e-20f) * c.scaling;
  }
}

// One block. shared: a counter of each expert, which becomes the next row of that expert.
__global__ void __launch_bounds__(kSortThreads) sort_kernel(const __grid_constant__ SortParams p) {
  extern __shared__ int32_t next[];  // [E]
  __shared__ int32_t carry;
  for (int e = threadIdx.x; e < p.num_experts; e += kSortThreads) next[e] = 0;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < p.num_choices; i += kSortThreads) atomicAdd(&next[p.ids[i]], 1);
  __syncthreads();
  if (threadIdx.x < kWarpSize) {
    if (threadIdx.x == 0) carry = 0;
    __syncwarp();
    for (int first = 0; first < p.num_experts; first += kWarpSize) {
      const int e = first + static_cast<int>(threadIdx.x);
      const int32_t count = e < p.num_experts ? next[e] : 0;
      int32_t end = count;
      for (int offset = 1; offset < kWarpSize; offset *= 2) {
        const int32_t below = __shfl_up_sync(kAllLanes, end, offset);
        if (static_cast<int>(threadIdx.x) >= offset) end += below;
      }
      end += carry;
      __syncwarp();
      if (e < p.num_experts) {
        next[e] = end - count;
        p.ends[e] = end;
      }
      if (threadIdx.x == kWarpSize - 1) carry = end;
      __syncwarp();
    }
  }
  __syncthreads();
  for (int64_t i = threadIdx.x; i < p.num_choices; i += kSortThreads) {
    const int32_t row = atomicAdd(&next[p.ids[i]], 1);
    p.tokens[row] = static_cast<int32_t>(i / p.top_k);
    p.rows[i] = row;
  }
}

template <typename T>
__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(const __grid_constant__ CombineParams p) {
  const int64_t token = blockIdx.x;
  const int32_t* rows = p.rows + token * p.top_k;
  const float* weights = p.weights + token * p.top_k;
  const int i = blockIdx.y * kCombineThreads + threadIdx.x;
  if (i >= p.width) return;
  float sum = 0.0f;
  for (int k = 0; k < p.top_k; ++k) {
    const T* y = static_cast<const T*>(p.y) + static_cast<int64_t>(rows[k]) * p.width;
    sum += weights[k] * load_as_float(y + i);
  }
  if (p.shared != nullptr) {
    sum += load_as_float(static_cast<const T*>(p.shared) + token * p.width + i);
  }
  store_float(static_cast<T*>(p.out) + token * p.width + i, sum);
}

}  // namespace

void launch_select(const SelectParams& params, Stream stream) {
  const size_t per_warp = 2 * sizeof(uint64_t) * static_cast<size_t>(params.config.num_experts);
  constexpr size_t kDefaultShared = 48 << 10;
  const auto warps = static_cast<int64_t>(std::clamp<size_t>(kDefaultShared / per_warp, 1, 4));
  const size_t bytes = per_warp * static_cast<size_t>(warps);
  if (bytes > kDefaultShared) {
    helicore::cuda::check(
        cudaFuncSetAttribute(select_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(bytes)),
        "cudaFuncSetAttribute");
  }
  const auto blocks = static_cast<unsigned>((params.num_tokens + warps - 1) / warps);
  select_kernel<<<blocks, static_cast<unsigned>(warps) * kWarpSize, bytes,
                  static_cast<cudaStream_t>(stream)>>>(params);
  helicore::cuda::check_launch("select_kernel");
}

void launch_sort(const SortParams& params, Stream stream) {
  const size_t bytes = sizeof(int32_t) * static_cast<size_t>(params.num_experts);
  sort_kernel<<<1, kSortThreads, bytes, static_cast<cudaStream_t>(stream)>>>(params);
  helicore::cuda::check_launch("sort_kernel");
}

void launch_combine(const CombineParams& params, Stream stream) {
  const dim3 grid(static_cast<unsigned>(params.num_tokens),
                  static_cast<unsigned>((params.width + kCombineThreads - 1) / kCombineThreads));
  dispatch_float(params.dtype, "out", [&](auto element) {
    combine_kernel<decltype(element)>
        <<<grid, kCombineThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  });
  helicore::cuda::check_launch("combine_kernel");
}

}  // namespace helicore::moe::cuda
