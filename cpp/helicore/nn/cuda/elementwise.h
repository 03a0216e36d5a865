// Row-wise operations on CUDA tensors: twins of those in nn/elementwise.h, with the same roundings.
//
// All tensors of a call are on one device, bfloat16 or float32 of one dtype, last dimension
// contiguous; rows may be strided. Work is queued on `stream`; nothing allocates or synchronises.
// In a build without CUDA each throws NotSupported.
#pragma once

#include <cstdint>

#include "helicore/core/tensor_view.h"

namespace helicore::nn::cuda {

using Stream = void*;  // a cudaStream_t; null is the default stream

// x [T, D], weight [D], out [T, D]. With `residual` [T, D], residual += x first, and the norm is of
// the sum. `out` may be x.
void rms_norm(const TensorView& x, const TensorView* residual, const TensorView& weight, float eps,
              const TensorView& out, Stream stream);

// gate_up [T, 2 I], out [T, I].
void silu_mul(const TensorView& gate_up, const TensorView& out, Stream stream);

// The launches, with checked arguments; strides in elements.
struct NormParams {
  const void* x = nullptr;
  void* residual = nullptr;  // or null
  const void* weight = nullptr;
  void* out = nullptr;
  int64_t rows = 0;
  int64_t x_stride = 0;
  int64_t residual_stride = 0;
  int64_t out_stride = 0;
  int32_t width = 0;
  float eps = 0;
  DType dtype = DType::kFloat32;
};
void launch_rms_norm(const NormParams& params, Stream stream);

struct GateParams {
  const void* gate_up = nullptr;
  void* out = nullptr;
  int64_t rows = 0;
  int64_t in_stride = 0;
  int64_t out_stride = 0;
  int32_t width = 0;  // I
  DType dtype = DType::kFloat32;
};
void launch_silu_mul(const GateParams& params, Stream stream);

}  // namespace helicore::nn::cuda
