// Entry points of fp8_kernels.inc.cpp, one set per instruction set.
#pragma once

#include <cstdint>

#include "helicore/core/cpu/isa.h"
#include "helicore/core/types.h"

namespace helicore::quant {

HELICORE_DECLARE_ISA(void dequantize_kernel(const uint8_t* codes, int64_t size, float scale,
                                            void* out, DType out_dtype);)

}  // namespace helicore::quant
