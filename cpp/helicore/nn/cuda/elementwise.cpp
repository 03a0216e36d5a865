// The checks of the CUDA entries; compiled with and without CUDA.
#include "helicore/nn/cuda/elementwise.h"

#include "helicore/core/error.h"

namespace helicore::nn::cuda {
namespace {

void check_rows(const TensorView& t, const TensorView& first, const char* where, const char* name) {
  HELICORE_CHECK(t.device.type == DeviceType::kCuda && t.device == first.device, where, name,
                 " must be on one CUDA device with the rest, got ", t.describe());
  HELICORE_CHECK(
      t.dtype == first.dtype && (t.dtype == DType::kBFloat16 || t.dtype == DType::kFloat32), where,
      name, " must be bfloat16 or float32 like the rest, got ", t.describe());
  check_row_major(t, where, name);
}

}  // namespace

void rms_norm(const TensorView& x, const TensorView* residual, const TensorView& weight, float eps,
              const TensorView& out, Stream stream) {
  constexpr const char* kWhere = "nn.rms_norm";
  check_shape(x, {-1, -1}, kWhere, "x");
  const int64_t rows = x.size(0), width = x.size(1);
  check_rows(x, x, kWhere, "x");
  check_shape(weight, {width}, kWhere, "weight");
  check_rows(weight, x, kWhere, "weight");
  check_shape(out, {rows, width}, kWhere, "out");
  check_rows(out, x, kWhere, "out");
  NormParams p{.x = x.data,
               .weight = weight.data,
               .out = out.data,
               .rows = rows,
               .x_stride = x.stride(0),
               .out_stride = out.stride(0),
               .width = static_cast<int32_t>(width),
               .eps = eps,
               .dtype = x.dtype};
  if (residual != nullptr) {
    check_shape(*residual, {rows, width}, kWhere, "residual");
    check_rows(*residual, x, kWhere, "residual");
    p.residual = residual->data;
    p.residual_stride = residual->stride(0);
  }
  if (rows > 0 && width > 0) launch_rms_norm(p, stream);
}

void silu_mul(const TensorView& gate_up, const TensorView& out, Stream stream) {
  constexpr const char* kWhere = "nn.silu_mul";
  check_shape(out, {-1, -1}, kWhere, "out");
  const int64_t rows = out.size(0), width = out.size(1);
  check_shape(gate_up, {rows, 2 * width}, kWhere, "gate_up");
  check_rows(gate_up, gate_up, kWhere, "gate_up");
  check_rows(out, gate_up, kWhere, "out");
  const GateParams p{.gate_up = gate_up.data,
                     .out = out.data,
                     .rows = rows,
                     .in_stride = gate_up.stride(0),
                     .out_stride = out.stride(0),
                     .width = static_cast<int32_t>(width),
                     .dtype = out.dtype};
  if (rows > 0 && width > 0) launch_silu_mul(p, stream);
}

}  // namespace helicore::nn::cuda
