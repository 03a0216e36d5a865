// Entry points of router_kernels.inc.cpp, one set per instruction set.
#pragma once

#include <cstdint>

#include "helicore/core/cpu/isa.h"
#include "helicore/core/types.h"
#include "helicore/moe/router.h"

namespace helicore::moe {

struct LogitsParams {
  const void* x = nullptr;  // [T, D] in dtype
  int64_t x_stride = 0;
  DType dtype = DType::kBFloat16;
  const float* gate = nullptr;  // [E, D]
  int64_t gate_stride = 0;
  int64_t width = 0;        // D
  float* logits = nullptr;  // [T, E]
  int64_t num_experts = 0;  // E
};

struct SelectParams {
  const float* logits = nullptr;  // [T, E]
  const float* bias = nullptr;    // [E] or null
  int32_t* ids = nullptr;         // [T, k]
  float* weights = nullptr;       // [T, k]
  RouterConfig config;
};

// Floats of scratch that select_kernel needs.
inline int64_t select_scratch(int64_t num_experts) { return 2 * ((num_experts + 15) / 16 * 16); }

HELICORE_DECLARE_ISA(void router_logits_kernel(const LogitsParams& params, int64_t row_begin,
                                               int64_t row_end, int64_t expert_begin,
                                               int64_t expert_end);
                     void select_kernel(const SelectParams& params, int64_t row_begin,
                                        int64_t row_end, float* scratch);)

}  // namespace helicore::moe
