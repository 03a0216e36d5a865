// CUDA twins in helicore._core.nn and helicore._core.moe, on torch's current stream; helicore.ops
// picks them by the device of its tensors.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <optional>

#include "casters.h"
#include "helicore/moe/cuda/routing.h"
#include "helicore/nn/cuda/elementwise.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace helicore::bindings {
namespace {

using OptionalTensor = std::optional<TensorView>;

const TensorView* pointer(const OptionalTensor& t) { return t ? &*t : nullptr; }

}  // namespace

void bind_nn_cuda(nb::module_& m) {
  m.def(
      "cuda_rms_norm",
      [](const TensorView& x, const OptionalTensor& residual, const TensorView& weight, float eps,
         const TensorView& out) {
        nn::cuda::rms_norm(x, pointer(residual), weight, eps, out, current_cuda_stream(x.device));
      },
      "x"_a, "residual"_a.none(), "weight"_a, "eps"_a, "out"_a,
      "rms_norm, or add_rms_norm with a residual, on CUDA tensors.");
  m.def(
      "cuda_silu_mul",
      [](const TensorView& gate_up, const TensorView& out) {
        nn::cuda::silu_mul(gate_up, out, current_cuda_stream(gate_up.device));
      },
      "gate_up"_a, "out"_a, "silu_mul on CUDA tensors.");
}

void bind_moe_cuda(nb::module_& m) {
  m.def(
      "cuda_select_experts",
      [](const TensorView& logits, const OptionalTensor& bias, const moe::RouterConfig& config,
         const TensorView& ids, const TensorView& weights) {
        moe::cuda::select_experts(logits, pointer(bias), config, ids, weights,
                                  current_cuda_stream(logits.device));
      },
      "logits"_a, "bias"_a.none(), "config"_a, "ids"_a, "weights"_a,
      "select_experts on CUDA tensors.");
  m.def(
      "cuda_sort_by_expert",
      [](const TensorView& ids, const TensorView& ends, const TensorView& tokens,
         const TensorView& rows) {
        moe::cuda::sort_by_expert(ids, ends, tokens, rows, current_cuda_stream(ids.device));
      },
      "ids"_a, "ends"_a, "tokens"_a, "rows"_a,
      "Rows in the order of experts: where each expert's end, the token of a row, the row of a "
      "choice. All int32.");
  m.def(
      "cuda_combine",
      [](const TensorView& y, const TensorView& rows, const TensorView& weights,
         const OptionalTensor& shared, const TensorView& out) {
        moe::cuda::combine(y, rows, weights, pointer(shared), out, current_cuda_stream(out.device));
      },
      "y"_a, "rows"_a, "weights"_a, "shared"_a.none(), "out"_a,
      "out[t] = sum of weights[t, j] * y[rows[t, j]] (+ shared[t]).");
}

}  // namespace helicore::bindings
