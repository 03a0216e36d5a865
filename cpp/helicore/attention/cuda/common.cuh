// Small device helpers of the portable kernels: element loads and stores, warp reductions,
// rotation.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "helicore/attention/mla_params.h"

namespace helicore::attention::cuda {

inline constexpr int kWarpSize = 32;

__device__ inline float load_as_float(const float* p) { return *p; }
__device__ inline float load_as_float(const __nv_bfloat16* p) { return __bfloat162float(*p); }
__device__ inline void store_float(float* p, float x) { *p = x; }
__device__ inline void store_float(__nv_bfloat16* p, float x) { *p = __float2bfloat16_rn(x); }

// Rounds to the element type and back: what a reader of the stored value would see.
template <typename T>
__device__ inline float rounded(float x) {
  if constexpr (sizeof(T) == 2) {
    return __bfloat162float(__float2bfloat16_rn(x));
  } else {
    return x;
  }
}

// Elements of a cache row.
__device__ inline int cache_width(const MlaCache& cache) {
  return cache.kv_lora_rank + cache.rope_dim;
}

__device__ inline float warp_sum(float x) {
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, offset);
  }
  return x;
}

// The rotated values of pair i of x[dr] (see RopeTable): first goes to out[i], second to out[i +
// dr/2].
template <typename T>
__device__ inline float2 rotate_pair(const T* x, int i, const RopeTable& rope, int32_t position) {
  const int half = rope.dim / 2;
  const float* table = rope.cos_sin + static_cast<int64_t>(position) * rope.dim;
  const float c = table[i];
  const float s = table[half + i];
  const float x0 = load_as_float(rope.interleaved ? x + 2 * i : x + i);
  const float x1 = load_as_float(rope.interleaved ? x + 2 * i + 1 : x + i + half);
  return {x0 * c - x1 * s, x1 * c + x0 * s};
}

}  // namespace helicore::attention::cuda
