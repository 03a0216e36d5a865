// Row-wise operations between the matrix products: RMS norm, SiLU-gating, the fused MLP, embedding
// lookup.
//
// All take bfloat16 or float32 tensors of one dtype, compute in fp32, and read and write rows that
// may be strided (last dimension contiguous). Rows are independent: the bits of a row do not depend
// on the batch or the threads.
#pragma once

#include "helicore/core/tensor_view.h"

namespace helicore::nn {

// out = weight * round(x / sqrt(mean(x^2) + eps)): normalised in fp32, rounded to the dtype, then
// multiplied by the weight and rounded again, as the published DeepSeek models do. x [T, D], weight
// [D], out [T, D]; out may be x.
void rms_norm(const TensorView& x, const TensorView& weight, float eps, const TensorView& out);

// residual += x (rounded to the dtype), then rms_norm(residual) into out. x, residual, out [T, D];
// out may be x.
void add_rms_norm(const TensorView& x, const TensorView& residual, const TensorView& weight,
                  float eps, const TensorView& out);

// out = silu(gate) * up, gate_up [T, 2 I] = gate columns then up columns, out [T, I]. One rounding.
void silu_mul(const TensorView& gate_up, const TensorView& out);

// A gated MLP: out = down(silu(gate x) * up x) (+ residual).
struct MlpTensors {
  TensorView x;                          // [T, D_in], any row stride
  TensorView packed_gate_up;             // [2 I, D_in] packed with groups = 2
  TensorView packed_down;                // [D, I] packed
  TensorView out;                        // [T, D]
  const TensorView* residual = nullptr;  // [T, D] in the dtype of out, may be out; or null
  int64_t intermediate = 0;              // I
};
// The activation is kept in the dtype of x between the two products.
void mlp(const MlpTensors& tensors);

// out[i] = table[ids[i]]; ids int32 or int64 [T], table [V, D], out [T, D]. An id outside [0, V)
// throws.
void embedding(const TensorView& ids, const TensorView& table, const TensorView& out);

}  // namespace helicore::nn
