// Element loads and stores, warp sums, and run-time element types as template parameters: what
// kernels of several areas share. CUDA sources only.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "helicore/core/error.h"
#include "helicore/core/types.h"

namespace helicore::cuda {

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

__device__ inline float warp_sum(float x) {
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, offset);
  }
  return x;
}

// Calls fn(T{}) with T = float or __nv_bfloat16; anything else throws NotSupported naming `what`.
template <typename Fn>
void dispatch_float(DType dtype, const char* what, Fn&& fn) {
  switch (dtype) {
    case DType::kFloat32:
      return fn(float{});
    case DType::kBFloat16:
      return fn(__nv_bfloat16{});
    default:
      throw NotSupported(helicore::detail::concat(
          "[cuda] ", what, " must be float32 or bfloat16, got ", name_of(dtype)));
  }
}

}  // namespace helicore::cuda
