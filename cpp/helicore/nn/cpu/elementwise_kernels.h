// Entry points of elementwise_kernels.inc.cpp, one set per instruction set.
#pragma once

#include <cstdint>

#include "helicore/core/cpu/isa.h"
#include "helicore/core/types.h"

namespace helicore::nn {

// Rows [begin, end) of a norm; strides in elements.
struct NormRows {
  const void* x = nullptr;  // [T, width]
  int64_t x_stride = 0;
  void* residual = nullptr;  // [T, width], updated in place, or null
  int64_t residual_stride = 0;
  const void* weight = nullptr;  // [width]
  void* out = nullptr;           // [T, width]
  int64_t out_stride = 0;
  int64_t width = 0;
  float eps = 0.0f;
  DType dtype = DType::kBFloat16;  // of all four
};

// Rows of silu(gate) * up.
struct SiluMulRows {
  const void* gate_up = nullptr;  // [T, 2 width]
  int64_t in_stride = 0;
  void* out = nullptr;  // [T, width]
  int64_t out_stride = 0;
  int64_t width = 0;
  DType dtype = DType::kBFloat16;
};

HELICORE_DECLARE_ISA(void rms_norm_kernel(const NormRows& rows, int64_t begin, int64_t end);
                     void silu_mul_kernel(const SiluMulRows& rows, int64_t begin, int64_t end);)

}  // namespace helicore::nn
