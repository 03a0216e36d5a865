// Loops over the elements of several ranks, one set per instruction set. Any length; pointers are
// aligned for their type.
#pragma once

#include <cstdint>

#include "helicore/core/cpu/isa.h"
#include "helicore/core/types.h"

namespace helicore::comm {

HELICORE_DECLARE_ISA(
    // out[i] = round(parts[0][i] + parts[1][i] + ...), in float32 in this order; float32 or
    // bfloat16. out may be one of the parts. All sets give the same bits.
    void sum_kernel(const void* const* parts, int64_t num_parts, void* out, int64_t count,
                    DType dtype);
    // out[i] = round(weights[0] * parts[0][i] + ...) likewise; a part of weight 0 is not read.
    void weighted_sum_kernel(const void* const* parts, const float* weights, int64_t num_parts,
                             void* out, int64_t count, DType dtype);)

}  // namespace helicore::comm
