#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

#include "casters.h"
#include "gil.h"
#include "helicore/core/error.h"
#include "helicore/nn/elementwise.h"
#include "helicore/nn/linear.h"
#include "helicore/nn/parallel.h"
#include "helicore/nn/sampling.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace helicore::bindings {
namespace {

using OptionalTensor = std::optional<TensorView>;

const TensorView* pointer(const OptionalTensor& t) { return t ? &*t : nullptr; }

// Nanoseconds of a pass over all elements.
double pass_ns(const TensorView& t, double ns_per_element) {
  return static_cast<double>(t.numel()) * ns_per_element;
}

// Nanoseconds of multiplying each row of x with every element of packed weights.
double product_ns(const TensorView& x, const TensorView& packed) {
  const int64_t rows = x.ndim > 0 ? x.shape[0] : 0;
  return nn::product_ns(rows, packed.numel(), 1);
}

void bind_linear(nb::module_& m) {
  m.def(
      "packed_numel",
      [](const TensorView& weight, int64_t groups) {
        HELICORE_CHECK(weight.ndim >= 2, "nn.packed_numel", "weight must be [..., N, K], got ",
                       weight.describe());
        return nn::packed_numel(weight.dtype, weight.size(-2), weight.size(-1), groups);
      },
      "weight"_a, "groups"_a = 1, "Elements of the packed form of one [N, K] matrix of weight.");
  m.def("pack_linear", &nn::pack_linear, "weight"_a, "packed"_a, "groups"_a = 1,
        nb::call_guard<nb::gil_scoped_release>(),
        "Pack weight [..., N, K] into packed. See helicore.ops.pack_linear.");
  m.def("unpack_linear", &nn::unpack_linear, "packed"_a, "weight"_a, "groups"_a = 1,
        nb::call_guard<nb::gil_scoped_release>(), "The inverse of pack_linear.");
  m.def(
      "linear",
      [](const TensorView& x, const TensorView& packed, const TensorView& out, int64_t out_features,
         const OptionalTensor& bias, const OptionalTensor& residual, bool silu_mul) {
        ReleaseGilIfLong release(product_ns(x, packed));
        nn::linear(nn::LinearTensors{
            .x = x,
            .packed = packed,
            .out = out,
            .bias = pointer(bias),
            .residual = pointer(residual),
            .out_features = out_features,
            .activation = silu_mul ? nn::Activation::kSiluMul : nn::Activation::kNone});
      },
      "x"_a, "packed"_a, "out"_a, "out_features"_a, "bias"_a = nb::none(),
      "residual"_a = nb::none(), "silu_mul"_a = false,
      "out [T, N] = x [T, K] times a packed weight. See helicore.ops.linear.");
  m.def(
      "batched_linear",
      [](const TensorView& x, const TensorView& packed, const TensorView& out) {
        ReleaseGilIfLong release(product_ns(x, packed));
        nn::batched_linear(x, packed, out);
      },
      "x"_a, "packed"_a, "out"_a, "out[t, h] = x[t, h] times the packed matrix of head h.");
  m.def(
      "mlp",
      [](const TensorView& x, const TensorView& packed_gate_up, const TensorView& packed_down,
         const TensorView& out, int64_t intermediate, const OptionalTensor& residual) {
        ReleaseGilIfLong release(product_ns(x, packed_gate_up) + product_ns(x, packed_down));
        nn::mlp(nn::MlpTensors{.x = x,
                               .packed_gate_up = packed_gate_up,
                               .packed_down = packed_down,
                               .out = out,
                               .residual = pointer(residual),
                               .intermediate = intermediate});
      },
      "x"_a, "packed_gate_up"_a, "packed_down"_a, "out"_a, "intermediate"_a,
      "residual"_a = nb::none(), "Gated MLP. See helicore.ops.mlp.");
}

void bind_elementwise(nb::module_& m) {
  m.def(
      "rms_norm",
      [](const TensorView& x, const TensorView& weight, float eps, const TensorView& out) {
        ReleaseGilIfLong release(pass_ns(x, 0.3));
        nn::rms_norm(x, weight, eps, out);
      },
      "x"_a, "weight"_a, "eps"_a, "out"_a, "RMS norm of rows.");
  m.def(
      "add_rms_norm",
      [](const TensorView& x, const TensorView& residual, const TensorView& weight, float eps,
         const TensorView& out) {
        ReleaseGilIfLong release(pass_ns(x, 0.4));
        nn::add_rms_norm(x, residual, weight, eps, out);
      },
      "x"_a, "residual"_a, "weight"_a, "eps"_a, "out"_a,
      "residual += x in place, then RMS norm of the sum.");
  m.def(
      "silu_mul",
      [](const TensorView& gate_up, const TensorView& out) {
        ReleaseGilIfLong release(pass_ns(gate_up, 0.2));
        nn::silu_mul(gate_up, out);
      },
      "gate_up"_a, "out"_a, "out = silu(gate) * up.");
  m.def(
      "embedding",
      [](const TensorView& ids, const TensorView& table, const TensorView& out) {
        ReleaseGilIfLong release(pass_ns(out, 0.1));
        nn::embedding(ids, table, out);
      },
      "ids"_a, "table"_a, "out"_a, "out[i] = table[ids[i]]; an id out of range is a ValueError.");
}

void bind_sampling(nb::module_& m) {
  m.def(
      "sample",
      [](const TensorView& logits, const TensorView& temperature, const TensorView& top_k,
         const TensorView& top_p, const TensorView& min_p, const TensorView& seed,
         const TensorView& position, const TensorView& ids, const OptionalTensor& logprobs) {
        ReleaseGilIfLong release(pass_ns(logits, 1.5));
        nn::sample(nn::SampleTensors{.logits = logits,
                                     .temperature = temperature,
                                     .top_k = top_k,
                                     .top_p = top_p,
                                     .min_p = min_p,
                                     .seed = seed,
                                     .position = position,
                                     .ids = ids,
                                     .logprobs = pointer(logprobs)});
      },
      "logits"_a, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "seed"_a, "position"_a, "ids"_a,
      "logprobs"_a = nb::none(), "Draw one token per row. See helicore.ops.sample.");
  m.def(
      "top_logprobs",
      [](const TensorView& logits, const TensorView& ids, const TensorView& logprobs,
         const TensorView& ranks, const TensorView& top_ids, const TensorView& top_values) {
        ReleaseGilIfLong release(pass_ns(logits, 0.8));
        nn::top_logprobs(nn::LogprobTensors{.logits = logits,
                                            .ids = ids,
                                            .logprobs = logprobs,
                                            .ranks = ranks,
                                            .top_ids = top_ids,
                                            .top_logprobs = top_values});
      },
      "logits"_a, "ids"_a, "logprobs"_a, "ranks"_a, "top_ids"_a, "top_logprobs"_a,
      "Log-probabilities, ranks and best tokens. See helicore.ops.top_logprobs.");
}

void bind_penalties(nb::module_& m) {
  m.def(
      "apply_penalties",
      [](const TensorView& logits, const TensorView& prompt_row_ptr, const TensorView& prompt_ids,
         const TensorView& output_row_ptr, const TensorView& output_ids,
         const TensorView& repetition, const TensorView& presence, const TensorView& frequency) {
        ReleaseGilIfLong release(pass_ns(prompt_ids, 2.0) + pass_ns(output_ids, 4.0));
        nn::apply_penalties(nn::PenaltyTensors{.logits = logits,
                                               .prompt = {prompt_row_ptr, prompt_ids},
                                               .output = {output_row_ptr, output_ids},
                                               .repetition = repetition,
                                               .presence = presence,
                                               .frequency = frequency});
      },
      "logits"_a, "prompt_row_ptr"_a, "prompt_ids"_a, "output_row_ptr"_a, "output_ids"_a,
      "repetition"_a, "presence"_a, "frequency"_a,
      "Penalties in place. See helicore.ops.apply_penalties.");
  m.def(
      "apply_logit_bias",
      [](const TensorView& logits, const TensorView& row_ptr, const TensorView& ids,
         const TensorView& values) { nn::apply_logit_bias(logits, {row_ptr, ids}, values); },
      "logits"_a, "row_ptr"_a, "ids"_a, "values"_a, "logits[row, id] += value in place.");
  m.def(
      "mask_tokens",
      [](const TensorView& logits, const TensorView& row_ptr, const TensorView& ids) {
        nn::mask_tokens(logits, {row_ptr, ids});
      },
      "logits"_a, "row_ptr"_a, "ids"_a, "logits[row, id] = -inf in place.");
}

}  // namespace

void bind_nn(nb::module_& m) {
  bind_linear(m);
  bind_elementwise(m);
  bind_sampling(m);
  bind_penalties(m);
}

}  // namespace helicore::bindings
