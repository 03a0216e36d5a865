#include "helicore/core/tensor_view.h"

#include "helicore/core/error.h"

namespace helicore {

int64_t TensorView::numel() const noexcept {
  int64_t n = 1;
  for (int d = 0; d < ndim; ++d) n *= shape[d];
  return n;
}

bool TensorView::is_contiguous() const noexcept {
  int64_t expected = 1;
  for (int d = ndim - 1; d >= 0; --d) {
    if (shape[d] != 1 && strides[d] != expected) return numel() == 0;
    expected *= shape[d];
  }
  return true;
}

std::string TensorView::describe() const {
  std::string out(name_of(dtype));
  out += "[";
  for (int d = 0; d < ndim; ++d) {
    if (d) out += ", ";
    out += std::to_string(shape[d]);
  }
  out += "] on ";
  out += name_of(device.type);
  return out;
}

TensorView make_view(void* data, DType dtype, std::initializer_list<int64_t> shape, Device device) {
  TensorView t;
  t.data = data;
  t.dtype = dtype;
  t.device = device;
  HELICORE_CHECK(shape.size() <= TensorView::kMaxDims, "core.make_view", "at most ",
                 TensorView::kMaxDims, " dimensions, got ", shape.size());
  for (int64_t s : shape) t.shape[t.ndim++] = s;
  int64_t stride = 1;
  for (int d = t.ndim - 1; d >= 0; --d) {
    t.strides[d] = stride;
    stride *= t.shape[d];
  }
  return t;
}

void check_shape(const TensorView& t, std::initializer_list<int64_t> shape, const char* where,
                 const char* name) {
  bool ok = t.ndim == static_cast<int>(shape.size());
  int d = 0;
  for (int64_t s : shape) {
    if (!ok) break;
    ok = s == -1 || t.shape[d] == s;
    ++d;
  }
  if (ok) return;
  std::string expected = "[";
  d = 0;
  for (int64_t s : shape) {
    if (d++) expected += ", ";
    expected += s == -1 ? "*" : std::to_string(s);
  }
  detail::throw_invalid(
      where, detail::concat(name, " must have shape ", expected, "], got ", t.describe()));
}

void check_dtype(const TensorView& t, DType dtype, const char* where, const char* name) {
  HELICORE_CHECK(t.dtype == dtype, where, name, " must be ", name_of(dtype), ", got ",
                 t.describe());
}

void check_contiguous(const TensorView& t, const char* where, const char* name) {
  HELICORE_CHECK(t.is_contiguous(), where, name, " must be contiguous, got a strided ",
                 t.describe());
}

void check_row_major(const TensorView& t, const char* where, const char* name) {
  HELICORE_CHECK(t.ndim == 0 || t.shape[t.ndim - 1] <= 1 || t.strides[t.ndim - 1] == 1, where, name,
                 " must have unit stride in its last dimension, got a strided ", t.describe());
}

}  // namespace helicore
