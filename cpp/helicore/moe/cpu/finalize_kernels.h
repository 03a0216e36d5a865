// Entry point of finalize_kernels.inc.cpp, one per instruction set.
#pragma once

#include <cstdint>

#include "helicore/core/cpu/isa.h"
#include "helicore/core/types.h"

namespace helicore::moe {

// out[t, c] = sum over slots of weights[t, s] * rows[position[t, s], c] (+ shared[t, c]) for c in
// [0, columns).
struct FinalizeParams {
  const float* rows = nullptr;        // [tokens * top_k, stride] expert results in sorted order
  const float* shared = nullptr;      // [tokens, stride] or null
  int64_t stride = 0;                 // of rows and shared
  const int32_t* position = nullptr;  // [tokens, top_k]
  const float* weights = nullptr;     // [tokens, top_k]
  int64_t tokens = 0;
  int32_t top_k = 0;
  int64_t columns = 0;
  void* out = nullptr;  // [tokens, ...] at the first column
  int64_t out_stride = 0;
  DType out_dtype = DType::kBFloat16;
};

HELICORE_DECLARE_ISA(void finalize_kernel(const FinalizeParams& params);)

}  // namespace helicore::moe
