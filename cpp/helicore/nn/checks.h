// Argument checks shared by the public entries of nn and moe.
#pragma once

#include <cstdint>

#include "helicore/core/error.h"
#include "helicore/core/tensor_view.h"

namespace helicore::nn {

inline void check_cpu(const TensorView& t, const char* where, const char* name) {
  HELICORE_CHECK(t.device.type == DeviceType::kCpu, where, name, " must be on the CPU, got ",
                 t.describe());
}

// bfloat16 or float32, on the CPU, last dimension contiguous.
inline void check_float_rows(const TensorView& t, const char* where, const char* name) {
  check_cpu(t, where, name);
  HELICORE_CHECK(t.dtype == DType::kBFloat16 || t.dtype == DType::kFloat32, where, name,
                 " must be bfloat16 or float32, got ", t.describe());
  check_row_major(t, where, name);
}

// `dtype`, on the CPU, contiguous.
inline void check_plain(const TensorView& t, DType dtype, const char* where, const char* name) {
  check_cpu(t, where, name);
  check_dtype(t, dtype, where, name);
  check_contiguous(t, where, name);
}

}  // namespace helicore::nn
