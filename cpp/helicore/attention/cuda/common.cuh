// Small device helpers of the portable kernels: rows of the cache, rotation.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "helicore/attention/mla_params.h"
#include "helicore/core/cuda/elements.cuh"

namespace helicore::attention::cuda {

using helicore::cuda::dispatch_float;
using helicore::cuda::kWarpSize;
using helicore::cuda::load_as_float;
using helicore::cuda::rounded;
using helicore::cuda::store_float;
using helicore::cuda::warp_sum;

// Elements of a cache row.
__device__ inline int cache_width(const MlaCache& cache) {
  return cache.kv_lora_rank + cache.rope_dim;
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
