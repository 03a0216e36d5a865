// RMS norm, with or without a residual, and SiLU gating. Both are bound by the launch at a few rows
// and by memory at many.
#include <cuda_runtime.h>

#include <algorithm>

#include "helicore/core/cuda/check.h"
#include "helicore/core/cuda/elements.cuh"
#include "helicore/nn/cuda/elementwise.h"

namespace helicore::nn::cuda {
namespace {

using helicore::cuda::dispatch_float;
using helicore::cuda::kWarpSize;
using helicore::cuda::load_as_float;
using helicore::cuda::rounded;
using helicore::cuda::store_float;
using helicore::cuda::warp_sum;

constexpr int kThreads = 256;

// One block a row. A thread reads back only what it wrote itself, so the residual needs no fence.
template <typename T, bool kHasResidual>
__global__ void __launch_bounds__(kThreads) rms_norm_kernel(const __grid_constant__ NormParams p) {
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
  T* residual = kHasResidual ? static_cast<T*>(p.residual) + row * p.residual_stride : nullptr;
  T* out = static_cast<T*>(p.out) + row * p.out_stride;
  const T* weight = static_cast<const T*>(p.weight);
  float sum = 0.0f;
  for (int i = threadIdx.x; i < p.width; i += kThreads) {
    float v = load_as_float(x + i);
    if constexpr (kHasResidual) {
      v = rounded<T>(v + load_as_float(residual + i));
      store_float(residual + i, v);
    }
    sum += v * v;
  }
  __shared__ float partial[kThreads / kWarpSize];
  sum = warp_sum(sum);
  if (threadIdx.x % kWarpSize == 0) partial[threadIdx.x / kWarpSize] = sum;
  __syncthreads();
  sum = 0.0f;
  for (int w = 0; w < kThreads / kWarpSize; ++w) sum += partial[w];
  const float inv_rms = rsqrtf(sum / static_cast<float>(p.width) + p.eps);
  const T* source = kHasResidual ? residual : x;
  for (int i = threadIdx.x; i < p.width; i += kThreads) {
    const float y = rounded<T>(load_as_float(source + i) * inv_rms);
    store_float(out + i, y * load_as_float(weight + i));
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) silu_mul_kernel(const __grid_constant__ GateParams p) {
  const int64_t row = blockIdx.y;
  const T* gate = static_cast<const T*>(p.gate_up) + row * p.in_stride;
  T* out = static_cast<T*>(p.out) + row * p.out_stride;
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= p.width) return;
  const float g = load_as_float(gate + i);
  const float u = load_as_float(gate + p.width + i);
  store_float(out + i, g / (1.0f + __expf(-g)) * u);
}

}  // namespace

void launch_rms_norm(const NormParams& params, Stream stream) {
  const auto rows = static_cast<unsigned>(params.rows);
  auto* s = static_cast<cudaStream_t>(stream);
  dispatch_float(params.dtype, "x", [&](auto element) {
    using T = decltype(element);
    if (params.residual != nullptr) {
      rms_norm_kernel<T, true><<<rows, kThreads, 0, s>>>(params);
    } else {
      rms_norm_kernel<T, false><<<rows, kThreads, 0, s>>>(params);
    }
  });
  helicore::cuda::check_launch("rms_norm_kernel");
}

void launch_silu_mul(const GateParams& params, Stream stream) {
  const auto blocks = static_cast<unsigned>((params.width + kThreads - 1) / kThreads);
  constexpr int64_t kMaxRows = 65535;  // of the grid's second dimension
  dispatch_float(params.dtype, "gate_up", [&](auto element) {
    using T = decltype(element);
    for (int64_t first = 0; first < params.rows; first += kMaxRows) {
      GateParams part = params;
      part.rows = std::min(kMaxRows, params.rows - first);
      part.gate_up = static_cast<const T*>(params.gate_up) + first * params.in_stride;
      part.out = static_cast<T*>(params.out) + first * params.out_stride;
      const dim3 grid(blocks, static_cast<unsigned>(part.rows));
      silu_mul_kernel<T><<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(part);
    }
  });
  helicore::cuda::check_launch("silu_mul_kernel");
}

}  // namespace helicore::nn::cuda
