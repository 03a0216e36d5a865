// Device twins of the scalar codes of quant/formats.h. CUDA sources only.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace helicore::quant::cuda {

__device__ inline float decode_e4m3(uint8_t code) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
}

// The nearest code, ties to even; magnitudes above 6 saturate, NaN gives 0.
__device__ inline uint32_t encode_e2m1(float x) {
  if (isnan(x)) return 0;
  const float m = fabsf(x);
  const int magnitude = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) +
                        (m >= 3.5f) + (m > 5.0f);
  return static_cast<uint32_t>(magnitude) | (signbit(x) ? 8u : 0u);
}

}  // namespace helicore::quant::cuda
