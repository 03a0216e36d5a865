#include "helicore/nn/elementwise.h"

#include <cstring>

#include "helicore/core/thread_pool.h"
#include "helicore/nn/checks.h"
#include "helicore/nn/cpu/elementwise_kernels.h"
#include "helicore/nn/linear.h"
#include "helicore/nn/parallel.h"

namespace helicore::nn {
namespace {

void norm(const TensorView& x, const TensorView* residual, const TensorView& weight, float eps,
          const TensorView& out, const char* where) {
  check_shape(x, {-1, -1}, where, "x");
  check_float_rows(x, where, "x");
  check_shape(weight, {x.size(1)}, where, "weight");
  check_plain(weight, x.dtype, where, "weight");
  check_shape(out, {x.size(0), x.size(1)}, where, "out");
  check_float_rows(out, where, "out");
  check_dtype(out, x.dtype, where, "out");
  HELICORE_CHECK(eps >= 0.0f, where, "eps must be >= 0, got ", eps);
  NormRows rows;
  if (residual != nullptr) {
    check_shape(*residual, {x.size(0), x.size(1)}, where, "residual");
    check_float_rows(*residual, where, "residual");
    check_dtype(*residual, x.dtype, where, "residual");
    rows.residual = residual->data;
    rows.residual_stride = residual->stride(0);
  }
  rows.x = x.data;
  rows.x_stride = x.stride(0);
  rows.weight = weight.data;
  rows.out = out.data;
  rows.out_stride = out.stride(0);
  rows.width = x.size(1);
  rows.eps = eps;
  rows.dtype = x.dtype;
  for_row_chunks(x.size(0), 0.15 * static_cast<double>(rows.width) + 10.0,
                 [&](int64_t begin, int64_t end) {
                   HELICORE_DISPATCH_ISA(rms_norm_kernel(rows, begin, end));
                 });
}

int64_t id_at(const TensorView& ids, int64_t i) {
  return ids.dtype == DType::kInt32 ? ids.ptr<int32_t>()[i] : ids.ptr<int64_t>()[i];
}

}  // namespace

void rms_norm(const TensorView& x, const TensorView& weight, float eps, const TensorView& out) {
  norm(x, nullptr, weight, eps, out, "nn.rms_norm");
}

void add_rms_norm(const TensorView& x, const TensorView& residual, const TensorView& weight,
                  float eps, const TensorView& out) {
  norm(x, &residual, weight, eps, out, "nn.add_rms_norm");
}

void silu_mul(const TensorView& gate_up, const TensorView& out) {
  constexpr const char* kWhere = "nn.silu_mul";
  check_shape(gate_up, {-1, -1}, kWhere, "gate_up");
  check_float_rows(gate_up, kWhere, "gate_up");
  HELICORE_CHECK(gate_up.size(1) % 2 == 0, kWhere, "gate_up must have an even width, got ",
                 gate_up.describe());
  check_shape(out, {gate_up.size(0), gate_up.size(1) / 2}, kWhere, "out");
  check_float_rows(out, kWhere, "out");
  check_dtype(out, gate_up.dtype, kWhere, "out");
  const SiluMulRows rows{gate_up.data,  gate_up.stride(0), out.data,
                         out.stride(0), out.size(1),       out.dtype};
  for_row_chunks(out.size(0), 0.3 * static_cast<double>(rows.width) + 5.0,
                 [&](int64_t begin, int64_t end) {
                   HELICORE_DISPATCH_ISA(silu_mul_kernel(rows, begin, end));
                 });
}

void mlp(const MlpTensors& t) {
  constexpr const char* kWhere = "nn.mlp";
  check_shape(t.x, {-1, -1}, kWhere, "x");
  check_float_rows(t.x, kWhere, "x");
  HELICORE_CHECK(t.intermediate > 0, kWhere, "intermediate must be > 0, got ", t.intermediate);
  ThreadPool& pool = default_pool();
  ThreadPool::Lease lease(pool);
  const int64_t rows = t.x.size(0);
  const auto bytes = static_cast<size_t>(rows * t.intermediate) * size_of(t.x.dtype);
  const TensorView hidden =
      make_view(pool.shared_scratch(bytes + 64), t.x.dtype, {rows, t.intermediate});
  linear(LinearTensors{.x = t.x,
                       .packed = t.packed_gate_up,
                       .out = hidden,
                       .out_features = 2 * t.intermediate,
                       .activation = Activation::kSiluMul});
  linear(LinearTensors{.x = hidden,
                       .packed = t.packed_down,
                       .out = t.out,
                       .residual = t.residual,
                       .out_features = t.out.size(-1)});
}

void embedding(const TensorView& ids, const TensorView& table, const TensorView& out) {
  constexpr const char* kWhere = "nn.embedding";
  check_shape(ids, {-1}, kWhere, "ids");
  check_cpu(ids, kWhere, "ids");
  check_contiguous(ids, kWhere, "ids");
  HELICORE_CHECK(ids.dtype == DType::kInt32 || ids.dtype == DType::kInt64, kWhere,
                 "ids must be int32 or int64, got ", ids.describe());
  check_shape(table, {-1, -1}, kWhere, "table");
  check_float_rows(table, kWhere, "table");
  check_shape(out, {ids.size(0), table.size(1)}, kWhere, "out");
  check_dtype(out, table.dtype, kWhere, "out");
  check_float_rows(out, kWhere, "out");
  for (int64_t i = 0; i < ids.size(0); ++i) {
    const int64_t id = id_at(ids, i);
    HELICORE_CHECK(id >= 0 && id < table.size(0), kWhere, "ids[", i, "] must be in 0..",
                   table.size(0) - 1, ", got ", id);
  }
  const size_t element = size_of(table.dtype);
  const size_t bytes = static_cast<size_t>(table.size(1)) * element;
  for_row_chunks(
      ids.size(0), 0.05 * static_cast<double>(bytes) + 5.0, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          std::memcpy(
              out.ptr<char>() + static_cast<size_t>(i * out.stride(0)) * element,
              table.ptr<char>() + static_cast<size_t>(id_at(ids, i) * table.stride(0)) * element,
              bytes);
        }
      });
}

}  // namespace helicore::nn
