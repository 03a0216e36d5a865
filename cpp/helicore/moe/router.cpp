#include "helicore/moe/router.h"

#include <algorithm>

#include "helicore/core/error.h"
#include "helicore/core/thread_pool.h"
#include "helicore/moe/cpu/router_kernels.h"
#include "helicore/moe/workspace.h"
#include "helicore/nn/checks.h"
#include "helicore/nn/parallel.h"

namespace helicore::moe {

void RouterConfig::validate() const {
  constexpr const char* kWhere = "moe.router";
  HELICORE_CHECK(num_experts >= 1 && num_experts <= kMaxExperts, kWhere,
                 "num_experts must be in 1..", kMaxExperts, ", got ", num_experts);
  HELICORE_CHECK(n_group >= 1 && n_group <= kMaxGroups && num_experts % n_group == 0, kWhere,
                 "n_group must be in 1..", kMaxGroups, " and divide num_experts ", num_experts,
                 ", got ", n_group);
  HELICORE_CHECK(topk_group >= 1 && topk_group <= n_group, kWhere,
                 "topk_group must be in 1..n_group (", n_group, "), got ", topk_group);
  HELICORE_CHECK(group_score != GroupScore::kNone || (n_group == 1 && topk_group == 1), kWhere,
                 "n_group must be 1 without group scores, got ", n_group);
  const int32_t reachable = topk_group * (num_experts / n_group);
  HELICORE_CHECK(top_k >= 1 && top_k <= kMaxTopK && top_k <= reachable, kWhere,
                 "top_k must be in 1..", std::min(kMaxTopK, reachable),
                 " (experts of the kept groups), got ", top_k);
  HELICORE_CHECK(scaling == scaling, kWhere, "scaling must be a number, got NaN");
}

namespace {

void check_selection(const TensorView* bias, const RouterConfig& config, int64_t rows,
                     const TensorView& ids, const TensorView& weights, const char* where) {
  config.validate();
  if (bias != nullptr) {
    check_shape(*bias, {config.num_experts}, where, "bias");
    nn::check_plain(*bias, DType::kFloat32, where, "bias");
  }
  check_shape(ids, {rows, config.top_k}, where, "ids");
  nn::check_plain(ids, DType::kInt32, where, "ids");
  check_shape(weights, {rows, config.top_k}, where, "weights");
  nn::check_plain(weights, DType::kFloat32, where, "weights");
}

void compute_logits(const LogitsParams& p, int64_t rows) {
  ThreadPool& pool = default_pool();
  const double row_ns = 0.03 * static_cast<double>(p.num_experts * p.width);
  if (rows > 2 * pool.num_threads() || !nn::worth_a_region(row_ns * static_cast<double>(rows))) {
    return nn::for_row_chunks(rows, row_ns, [&](int64_t begin, int64_t end) {
      HELICORE_DISPATCH_ISA(router_logits_kernel(p, begin, end, 0, p.num_experts));
    });
  }
  // Few rows: one range of experts per thread.
  const int64_t step = (p.num_experts + pool.num_threads() - 1) / pool.num_threads();
  pool.parallel_for((p.num_experts + step - 1) / step, [&](int64_t task) {
    const int64_t end = std::min(p.num_experts, (task + 1) * step);
    HELICORE_DISPATCH_ISA(router_logits_kernel(p, 0, rows, task * step, end));
  });
}

void select_rows(const SelectParams& p, int64_t rows) {
  const double row_ns = 3.0 * p.config.num_experts + 60.0;
  nn::for_row_chunks(rows, row_ns, [&](int64_t begin, int64_t end) {
    float scratch[select_scratch(kMaxExperts)];
    HELICORE_DISPATCH_ISA(select_kernel(p, begin, end, scratch));
  });
}

}  // namespace

void select_experts(const TensorView& logits, const TensorView* bias, const RouterConfig& config,
                    const TensorView& ids, const TensorView& weights) {
  constexpr const char* kWhere = "moe.select_experts";
  check_shape(logits, {-1, config.num_experts}, kWhere, "logits");
  nn::check_plain(logits, DType::kFloat32, kWhere, "logits");
  check_selection(bias, config, logits.size(0), ids, weights, kWhere);
  select_rows(SelectParams{logits.ptr<float>(), bias != nullptr ? bias->ptr<float>() : nullptr,
                           ids.ptr<int32_t>(), weights.ptr<float>(), config},
              logits.size(0));
}

void route_with(const RouteArgs& args, float* logits) {
  LogitsParams p;
  p.x = args.x->data;
  p.x_stride = args.x->stride(0);
  p.dtype = args.x->dtype;
  p.gate = args.gate->ptr<float>();
  p.gate_stride = args.gate->stride(0);
  p.width = args.x->size(1);
  p.logits = logits;
  p.num_experts = args.config->num_experts;
  compute_logits(p, args.x->size(0));
  select_rows(SelectParams{logits, args.bias != nullptr ? args.bias->ptr<float>() : nullptr,
                           args.ids, args.weights, *args.config},
              args.x->size(0));
}

void check_route(const TensorView& x, const TensorView& gate, const TensorView* bias,
                 const RouterConfig& config, const char* where) {
  config.validate();
  check_shape(x, {-1, -1}, where, "x");
  nn::check_float_rows(x, where, "x");
  check_shape(gate, {config.num_experts, x.size(1)}, where, "gate");
  nn::check_cpu(gate, where, "gate");
  check_dtype(gate, DType::kFloat32, where, "gate");
  check_row_major(gate, where, "gate");
  if (bias == nullptr) return;
  check_shape(*bias, {config.num_experts}, where, "bias");
  nn::check_plain(*bias, DType::kFloat32, where, "bias");
}

void route(const TensorView& x, const TensorView& gate, const TensorView* bias,
           const RouterConfig& config, const TensorView& ids, const TensorView& weights) {
  constexpr const char* kWhere = "moe.route";
  check_route(x, gate, bias, config, kWhere);
  check_selection(bias, config, x.size(0), ids, weights, kWhere);
  ThreadPool& pool = default_pool();
  ThreadPool::Lease lease(pool);
  auto* logits = static_cast<float*>(pool.shared_scratch(
      static_cast<size_t>(x.size(0) * config.num_experts + 16) * sizeof(float)));
  route_with(RouteArgs{&x, &gate, bias, &config, ids.ptr<int32_t>(), weights.ptr<float>()}, logits);
}

}  // namespace helicore::moe
