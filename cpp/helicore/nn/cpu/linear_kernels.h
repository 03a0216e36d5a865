// Entry points of linear_kernels.inc.cpp, one set per instruction set.
#pragma once

#include <cstdint>

#include "helicore/core/cpu/isa.h"
#include "helicore/nn/linear.h"

namespace helicore::nn {

HELICORE_DECLARE_ISA(void linear_blocks_kernel(const LinearParams& params, int64_t block_begin,
                                               int64_t block_end);)

}  // namespace helicore::nn
