// The experts of a mixture-of-experts layer on the CPU: routed experts, shared expert and their
// weighted sum.
//
//   y[t] = sum over slots s of weights[t, s] * down_e(silu(gate_e x[t]) * up_e x[t]),  e = ids[t,
//   s]   (+ shared(x[t]))
//
// Sums are fp32: each product, then the slots in ascending order, then the shared expert, then one
// rounding. The activation between the two products is kept in the dtype of x. Tokens are processed
// sorted by expert (stable: counting and a prefix sum, no atomics) in chunks; neither the chunk nor
// the batch changes the bits of a row.
#pragma once

#include <cstdint>

#include "helicore/core/tensor_view.h"
#include "helicore/moe/router.h"

namespace helicore::moe {

// Weights of one layer, packed as nn/linear.h says.
struct ExpertTensors {
  TensorView w13;  // [E, ...]: [2 I, D] each, gate rows then up rows, groups = 2
  TensorView w2;   // [E, ...]: [D, I] each
  const TensorView* shared_w13 = nullptr;  // [2 I_shared, D], groups = 2; or null: no shared expert
  const TensorView* shared_w2 = nullptr;   // [D, I_shared]
  int64_t intermediate = 0;                // I
  int64_t shared_intermediate = 0;         // I_shared
};

// x [T, D] bfloat16 or float32, ids int32 [T, k] in [0, E) (-1: an expert of another rank, that
// adds nothing here), weights float32 [T, k] -> out [T, D] in the dtype of x (out may not overlap
// x). Throws InvalidArgument on a wrong shape or an id out of range.
void moe_forward(const TensorView& x, const TensorView& ids, const TensorView& weights,
                 const ExpertTensors& experts, const TensorView& out);

// Router and experts in one call.
struct MoeBlock {
  TensorView gate;                   // float32 [E, D]
  const TensorView* bias = nullptr;  // float32 [E] or null
  RouterConfig router;
  ExpertTensors experts;
};
void moe_block(const TensorView& x, const MoeBlock& block, const TensorView& out);

}  // namespace helicore::moe
