#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

#include "casters.h"
#include "gil.h"
#include "helicore/core/error.h"
#include "helicore/moe/experts.h"
#include "helicore/moe/router.h"
#include "helicore/nn/parallel.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace helicore::bindings {
namespace {

using OptionalTensor = std::optional<TensorView>;

const TensorView* pointer(const OptionalTensor& t) { return t ? &*t : nullptr; }

// Nanoseconds of the router: every row of x with every element of the gate.
double route_ns(const TensorView& x, const TensorView& gate) {
  return nn::product_ns(x.ndim > 0 ? x.shape[0] : 0, gate.numel(), 1);
}

// Nanoseconds of top_k experts of three [intermediate, D] matrices and the shared one for each row
// of x.
double experts_ns(const TensorView& x, int64_t top_k, int64_t intermediate,
                  int64_t shared_intermediate) {
  return nn::product_ns(1, 3 * (top_k * intermediate + shared_intermediate), x.numel());
}

moe::Scoring scoring_of(const std::string& name) {
  if (name == "sigmoid") return moe::Scoring::kSigmoid;
  if (name == "softmax") return moe::Scoring::kSoftmax;
  detail::throw_invalid("moe.router",
                        detail::concat("scoring must be sigmoid or softmax, got '", name, "'"));
}

moe::GroupScore group_score_of(const std::string& name) {
  if (name == "none") return moe::GroupScore::kNone;
  if (name == "max") return moe::GroupScore::kMax;
  if (name == "top2_sum") return moe::GroupScore::kTop2Sum;
  detail::throw_invalid(
      "moe.router", detail::concat("group_score must be none, max or top2_sum, got '", name, "'"));
}

moe::RouterConfig make_config(int32_t num_experts, int32_t top_k, int32_t n_group,
                              int32_t topk_group, const std::string& scoring,
                              const std::string& group_score, bool norm_topk_prob, float scaling) {
  const moe::RouterConfig config{.num_experts = num_experts,
                                 .top_k = top_k,
                                 .n_group = n_group,
                                 .topk_group = topk_group,
                                 .scoring = scoring_of(scoring),
                                 .group_score = group_score_of(group_score),
                                 .norm_topk_prob = norm_topk_prob,
                                 .scaling = scaling};
  config.validate();
  return config;
}

void bind_router(nb::module_& m) {
  nb::class_<moe::RouterConfig>(m, "RouterConfig",
                                "Frozen settings of a router; invalid ones are a ValueError.")
      .def(
          "__init__",
          [](moe::RouterConfig* self, int32_t num_experts, int32_t top_k, int32_t n_group,
             int32_t topk_group, const std::string& scoring, const std::string& group_score,
             bool norm_topk_prob, float scaling) {
            new (self)
                moe::RouterConfig(make_config(num_experts, top_k, n_group, topk_group, scoring,
                                              group_score, norm_topk_prob, scaling));
          },
          nb::kw_only(), "num_experts"_a, "top_k"_a, "n_group"_a = 1, "topk_group"_a = 1,
          "scoring"_a = "sigmoid", "group_score"_a = "none", "norm_topk_prob"_a = false,
          "scaling"_a = 1.0f)
      .def_ro("num_experts", &moe::RouterConfig::num_experts)
      .def_ro("top_k", &moe::RouterConfig::top_k)
      .def_ro("n_group", &moe::RouterConfig::n_group)
      .def_ro("topk_group", &moe::RouterConfig::topk_group)
      .def_ro("norm_topk_prob", &moe::RouterConfig::norm_topk_prob)
      .def_ro("scaling", &moe::RouterConfig::scaling);
  m.def(
      "route",
      [](const TensorView& x, const TensorView& gate, const OptionalTensor& bias,
         const moe::RouterConfig& config, const TensorView& ids, const TensorView& weights) {
        ReleaseGilIfLong release(route_ns(x, gate));
        moe::route(x, gate, pointer(bias), config, ids, weights);
      },
      "x"_a, "gate"_a, "bias"_a.none(), "config"_a, "ids"_a, "weights"_a,
      "Choose experts. See helicore.ops.route.");
  m.def(
      "select_experts",
      [](const TensorView& logits, const OptionalTensor& bias, const moe::RouterConfig& config,
         const TensorView& ids, const TensorView& weights) {
        ReleaseGilIfLong release(static_cast<double>(logits.numel()) * 3.0);
        moe::select_experts(logits, pointer(bias), config, ids, weights);
      },
      "logits"_a, "bias"_a.none(), "config"_a, "ids"_a, "weights"_a,
      "Choose experts from float32 logits [T, E].");
}

moe::ExpertTensors expert_tensors(const TensorView& w13, const TensorView& w2,
                                  const OptionalTensor& shared_w13, const OptionalTensor& shared_w2,
                                  int64_t intermediate, int64_t shared_intermediate) {
  return {.w13 = w13,
          .w2 = w2,
          .shared_w13 = pointer(shared_w13),
          .shared_w2 = pointer(shared_w2),
          .intermediate = intermediate,
          .shared_intermediate = shared_intermediate};
}

void bind_experts(nb::module_& m) {
  m.def(
      "moe_forward",
      [](const TensorView& x, const TensorView& ids, const TensorView& weights,
         const TensorView& w13, const TensorView& w2, const OptionalTensor& shared_w13,
         const OptionalTensor& shared_w2, const TensorView& out, int64_t intermediate,
         int64_t shared_intermediate) {
        ReleaseGilIfLong release(
            experts_ns(x, ids.ndim == 2 ? ids.shape[1] : 1, intermediate, shared_intermediate));
        moe::moe_forward(
            x, ids, weights,
            expert_tensors(w13, w2, shared_w13, shared_w2, intermediate, shared_intermediate), out);
      },
      "x"_a, "ids"_a, "weights"_a, "w13"_a, "w2"_a, "shared_w13"_a.none(), "shared_w2"_a.none(),
      "out"_a, "intermediate"_a, "shared_intermediate"_a = 0,
      "Routed and shared experts. See helicore.ops.moe_forward.");
  m.def(
      "moe_block",
      [](const TensorView& x, const TensorView& gate, const OptionalTensor& bias,
         const moe::RouterConfig& config, const TensorView& w13, const TensorView& w2,
         const OptionalTensor& shared_w13, const OptionalTensor& shared_w2, const TensorView& out,
         int64_t intermediate, int64_t shared_intermediate) {
        ReleaseGilIfLong release(route_ns(x, gate) +
                                 experts_ns(x, config.top_k, intermediate, shared_intermediate));
        moe::moe_block(x,
                       moe::MoeBlock{.gate = gate,
                                     .bias = pointer(bias),
                                     .router = config,
                                     .experts = expert_tensors(w13, w2, shared_w13, shared_w2,
                                                               intermediate, shared_intermediate)},
                       out);
      },
      "x"_a, "gate"_a, "bias"_a.none(), "config"_a, "w13"_a, "w2"_a, "shared_w13"_a.none(),
      "shared_w2"_a.none(), "out"_a, "intermediate"_a, "shared_intermediate"_a = 0,
      "Router and experts in one call. See helicore.ops.moe_block.");
}

}  // namespace

void bind_moe(nb::module_& m) {
  bind_router(m);
  bind_experts(m);
}

}  // namespace helicore::bindings
