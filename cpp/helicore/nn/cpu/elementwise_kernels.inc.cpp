// RMS norm and SiLU-gating, one row at a time.
#include <cmath>
#include <cstdint>

#include "helicore/core/cpu/simd.h"
#include "helicore/nn/cpu/elementwise_kernels.h"
#include "helicore/nn/cpu/simd_math.h"

namespace helicore::nn::HELICORE_ISA_NS {

using namespace ::helicore::HELICORE_ISA_NS;  // NOLINT: the vector types of this variant

namespace {

template <typename T>
inline VF load_part(const T* p, int64_t left) {
  return left >= 16 ? load(p) : load_n(p, static_cast<int>(left));
}
template <typename T>
inline void store_part(T* p, VF v, int64_t left) {
  if (left >= 16) {
    store(p, v);
  } else {
    store_n(p, v, static_cast<int>(left));
  }
}

// residual += x; returns the row to normalise.
template <typename T>
const T* add_residual(const NormRows& r, int64_t row) {
  const T* x = static_cast<const T*>(r.x) + row * r.x_stride;
  if (r.residual == nullptr) return x;
  T* residual = static_cast<T*>(r.residual) + row * r.residual_stride;
  for (int64_t i = 0; i < r.width; i += 16) {
    const int64_t left = r.width - i;
    store_part(residual + i, add(load_part(residual + i, left), load_part(x + i, left)), left);
  }
  return residual;
}

template <typename T>
void rms_norm_rows(const NormRows& r, int64_t begin, int64_t end) {
  const T* weight = static_cast<const T*>(r.weight);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = add_residual<T>(r, row);
    VF even = zero(), odd = zero();
    int64_t i = 0;
    for (; i + 32 <= r.width; i += 32) {
      VF a = load(x + i), b = load(x + i + 16);
      even = fma(a, a, even);
      odd = fma(b, b, odd);
    }
    for (; i < r.width; i += 16) {
      VF a = load_part(x + i, r.width - i);
      even = fma(a, a, even);
    }
    const float mean = reduce_add(add(even, odd)) / static_cast<float>(r.width);
    const VF scale = set1(1.0f / std::sqrt(mean + r.eps));
    T* out = static_cast<T*>(r.out) + row * r.out_stride;
    for (i = 0; i < r.width; i += 16) {
      const int64_t left = r.width - i;
      VF y = round_to(mul(load_part(x + i, left), scale), out);
      store_part(out + i, mul(y, load_part(weight + i, left)), left);
    }
  }
}

template <typename T>
void silu_mul_rows(const SiluMulRows& r, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* gate = static_cast<const T*>(r.gate_up) + row * r.in_stride;
    const T* up = gate + r.width;
    T* out = static_cast<T*>(r.out) + row * r.out_stride;
    for (int64_t i = 0; i < r.width; i += 16) {
      const int64_t left = r.width - i;
      store_part(out + i, silu_mul(load_part(gate + i, left), load_part(up + i, left)), left);
    }
  }
}

}  // namespace

void rms_norm_kernel(const NormRows& rows, int64_t begin, int64_t end) {
  if (rows.dtype == DType::kBFloat16) return rms_norm_rows<BFloat16>(rows, begin, end);
  rms_norm_rows<float>(rows, begin, end);
}

void silu_mul_kernel(const SiluMulRows& rows, int64_t begin, int64_t end) {
  if (rows.dtype == DType::kBFloat16) return silu_mul_rows<BFloat16>(rows, begin, end);
  silu_mul_rows<float>(rows, begin, end);
}

}  // namespace helicore::nn::HELICORE_ISA_NS
