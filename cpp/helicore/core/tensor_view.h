// A borrowed tensor: pointer, shape, strides (in elements), dtype and device. No ownership, no
// torch.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "helicore/core/types.h"

namespace helicore {

// Valid while the memory it points to lives; bindings guarantee that for the length of one call.
struct TensorView {
  static constexpr int kMaxDims = 6;

  void* data = nullptr;
  DType dtype = DType::kFloat32;
  Device device{};
  int ndim = 0;
  std::array<int64_t, kMaxDims> shape{};
  std::array<int64_t, kMaxDims> strides{};  // in elements

  [[nodiscard]] int64_t size(int dim) const noexcept { return shape[dim < 0 ? dim + ndim : dim]; }
  [[nodiscard]] int64_t stride(int dim) const noexcept {
    return strides[dim < 0 ? dim + ndim : dim];
  }
  [[nodiscard]] int64_t numel() const noexcept;
  [[nodiscard]] bool is_contiguous() const noexcept;
  template <typename T>
  [[nodiscard]] T* ptr() const noexcept {
    return static_cast<T*>(data);
  }
  // "bfloat16[4, 128] on cpu"
  [[nodiscard]] std::string describe() const;
};

// A contiguous view over raw memory.
[[nodiscard]] TensorView make_view(void* data, DType dtype, std::initializer_list<int64_t> shape,
                                   Device device = {});

// Checks used at every public entry; -1 in `shape` accepts any size. Throw InvalidArgument naming
// `name`.
void check_shape(const TensorView& t, std::initializer_list<int64_t> shape, const char* where,
                 const char* name);
void check_dtype(const TensorView& t, DType dtype, const char* where, const char* name);
void check_contiguous(const TensorView& t, const char* where, const char* name);
// The last dimension has stride 1 (rows may be strided).
void check_row_major(const TensorView& t, const char* where, const char* name);

}  // namespace helicore
