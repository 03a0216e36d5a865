// Random matrices, packed weights and the list of instruction sets for tests of kernels.
#pragma once

#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "helicore/core/cpu/isa.h"
#include "helicore/core/tensor_view.h"
#include "helicore/nn/linear.h"

namespace helicore::nn::testing {

inline std::vector<Isa> available_isas() {
  std::vector<Isa> isas;
  for (Isa isa : {Isa::kGeneric, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16}) {
    if (isa <= detected_isa()) isas.push_back(isa);
  }
  return isas;
}

// A typed matrix with its values as floats.
struct Matrix {
  int64_t rows, cols;
  DType dtype;
  std::vector<float> f;
  std::vector<BFloat16> h;

  Matrix(int64_t r, int64_t c, DType d, std::mt19937& rng, bool poison = false)
      : rows(r), cols(c), dtype(d), f(static_cast<size_t>(r * c)), h(f.size()) {
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < f.size(); ++i) {
      f[i] = poison ? std::numeric_limits<float>::quiet_NaN() : normal(rng);
      h[i] = BFloat16(f[i]);
      if (dtype == DType::kBFloat16) f[i] = static_cast<float>(h[i]);
    }
  }
  TensorView view() {
    void* p = dtype == DType::kBFloat16 ? static_cast<void*>(h.data()) : f.data();
    return make_view(p, dtype, {rows, cols});
  }
  float at(int64_t r, int64_t c) const {
    const auto i = static_cast<size_t>(r * cols + c);
    return dtype == DType::kBFloat16 ? static_cast<float>(h[i]) : f[i];
  }
};

struct Packed {
  std::vector<float> storage;
  TensorView view;

  Packed(const TensorView& weight, int64_t groups = 1) {
    const int64_t n = weight.size(0), k = weight.size(1);
    const int64_t numel = packed_numel(weight.dtype, n, k, groups);
    storage.resize(static_cast<size_t>(numel) + 16);
    const int64_t blocks = groups * ((n / groups + 15) / 16);
    view = weight.dtype == DType::kBFloat16
               ? make_view(storage.data(), weight.dtype, {blocks, (k + 1) / 2, 16, 2})
               : make_view(storage.data(), weight.dtype, {blocks, k, 16});
    pack_linear(weight, view, groups);
  }
};

}  // namespace helicore::nn::testing
