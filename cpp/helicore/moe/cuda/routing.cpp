// The checks of the CUDA entries; compiled with and without CUDA.
#include "helicore/moe/cuda/routing.h"

#include "helicore/core/error.h"

namespace helicore::moe::cuda {
namespace {

void check_plain(const TensorView& t, DType dtype, const TensorView& first, const char* where,
                 const char* name) {
  HELICORE_CHECK(t.device.type == DeviceType::kCuda && t.device == first.device, where, name,
                 " must be on one CUDA device with the rest, got ", t.describe());
  check_dtype(t, dtype, where, name);
  check_contiguous(t, where, name);
}

}  // namespace

void select_experts(const TensorView& logits, const TensorView* bias, const RouterConfig& config,
                    const TensorView& ids, const TensorView& weights, Stream stream) {
  constexpr const char* kWhere = "moe.select_experts";
  config.validate();
  check_shape(logits, {-1, config.num_experts}, kWhere, "logits");
  check_plain(logits, DType::kFloat32, logits, kWhere, "logits");
  const int64_t num_tokens = logits.size(0);
  check_shape(ids, {num_tokens, config.top_k}, kWhere, "ids");
  check_plain(ids, DType::kInt32, logits, kWhere, "ids");
  check_shape(weights, {num_tokens, config.top_k}, kWhere, "weights");
  check_plain(weights, DType::kFloat32, logits, kWhere, "weights");
  SelectParams p{.logits = logits.ptr<const float>(),
                 .ids = ids.ptr<int32_t>(),
                 .weights = weights.ptr<float>(),
                 .num_tokens = num_tokens,
                 .config = config};
  if (bias != nullptr) {
    check_shape(*bias, {config.num_experts}, kWhere, "bias");
    check_plain(*bias, DType::kFloat32, logits, kWhere, "bias");
    p.bias = bias->ptr<const float>();
  }
  if (num_tokens > 0) launch_select(p, stream);
}

void sort_by_expert(const TensorView& ids, const TensorView& ends, const TensorView& tokens,
                    const TensorView& rows, Stream stream) {
  constexpr const char* kWhere = "moe.sort_by_expert";
  check_shape(ids, {-1, -1}, kWhere, "ids");
  check_plain(ids, DType::kInt32, ids, kWhere, "ids");
  check_shape(ends, {-1}, kWhere, "ends");
  check_plain(ends, DType::kInt32, ids, kWhere, "ends");
  HELICORE_CHECK(ends.size(0) >= 1 && ends.size(0) <= kMaxExperts, kWhere, "ends must have 1..",
                 kMaxExperts, " experts, got ", ends.size(0));
  check_shape(tokens, {ids.numel()}, kWhere, "tokens");
  check_plain(tokens, DType::kInt32, ids, kWhere, "tokens");
  check_shape(rows, {ids.size(0), ids.size(1)}, kWhere, "rows");
  check_plain(rows, DType::kInt32, ids, kWhere, "rows");
  launch_sort({.ids = ids.ptr<const int32_t>(),
               .ends = ends.ptr<int32_t>(),
               .tokens = tokens.ptr<int32_t>(),
               .rows = rows.ptr<int32_t>(),
               .num_choices = ids.numel(),
               .top_k = static_cast<int32_t>(ids.size(1)),
               .num_experts = static_cast<int32_t>(ends.size(0))},
              stream);
}

void combine(const TensorView& y, const TensorView& rows, const TensorView& weights,
             const TensorView* shared, const TensorView& out, Stream stream) {
  constexpr const char* kWhere = "moe.combine";
  check_shape(out, {-1, -1}, kWhere, "out");
  HELICORE_CHECK(out.dtype == DType::kBFloat16 || out.dtype == DType::kFloat32, kWhere,
                 "out must be bfloat16 or float32, got ", out.describe());
  check_plain(out, out.dtype, out, kWhere, "out");
  const int64_t num_tokens = out.size(0), width = out.size(1);
  check_shape(rows, {num_tokens, -1}, kWhere, "rows");
  check_plain(rows, DType::kInt32, out, kWhere, "rows");
  check_shape(weights, {num_tokens, rows.size(1)}, kWhere, "weights");
  check_plain(weights, DType::kFloat32, out, kWhere, "weights");
  check_shape(y, {rows.numel(), width}, kWhere, "y");
  check_plain(y, out.dtype, out, kWhere, "y");
  CombineParams p{.y = y.data,
                  .rows = rows.ptr<const int32_t>(),
                  .weights = weights.ptr<const float>(),
                  .out = out.data,
                  .num_tokens = num_tokens,
                  .top_k = static_cast<int32_t>(rows.size(1)),
                  .width = static_cast<int32_t>(width),
                  .dtype = out.dtype};
  if (shared != nullptr) {
    check_shape(*shared, {num_tokens, width}, kWhere, "shared");
    check_plain(*shared, out.dtype, out, kWhere, "shared");
    p.shared = shared->data;
  }
  if (num_tokens > 0 && width > 0) launch_combine(p, stream);
}

}  // namespace helicore::moe::cuda
