// Run-time element types to template parameters, for the launch functions of this folder.
#pragma once

#include <cuda_bf16.h>

#include "helicore/core/error.h"
#include "helicore/core/types.h"

namespace helicore::attention::cuda {

// Calls fn(T{}) with T = float or __nv_bfloat16; anything else throws NotSupported naming `what`.
template <typename Fn>
void dispatch_float(DType dtype, const char* what, Fn&& fn) {
  switch (dtype) {
    case DType::kFloat32:
      return fn(float{});
    case DType::kBFloat16:
      return fn(__nv_bfloat16{});
    default:
      throw NotSupported(detail::concat("[attention.cuda] ", what,
                                        " must be float32 or bfloat16, got ", name_of(dtype)));
  }
}

}  // namespace helicore::attention::cuda
