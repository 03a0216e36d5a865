// Sums over ranks (declared in merge_kernels.h).
#include "helicore/comm/cpu/merge_kernels.h"
#include "helicore/core/cpu/simd.h"

namespace helicore::comm::HELICORE_ISA_NS {
namespace {

using namespace ::helicore::HELICORE_ISA_NS;

template <class T>
void sum(const void* const* parts, int64_t num_parts, T* out, int64_t count) {
  const auto part = [parts](int64_t p) { return static_cast<const T*>(parts[p]); };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    VF total = load(part(0) + i);
    for (int64_t p = 1; p < num_parts; ++p) total = add(total, load(part(p) + i));
    store(out + i, total);
  }
  const int left = static_cast<int>(count - i);
  if (left == 0) return;
  VF total = load_n(part(0) + i, left);
  for (int64_t p = 1; p < num_parts; ++p) total = add(total, load_n(part(p) + i, left));
  store_n(out + i, total, left);
}

template <class T>
void weighted_sum(const void* const* parts, const float* weights, int64_t num_parts, T* out,
                  int64_t count) {
  const auto part = [parts](int64_t p) { return static_cast<const T*>(parts[p]); };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    VF total = zero();
    for (int64_t p = 0; p < num_parts; ++p) {
      if (weights[p] != 0.0f) total = fma(set1(weights[p]), load(part(p) + i), total);
    }
    store(out + i, total);
  }
  const int left = static_cast<int>(count - i);
  if (left == 0) return;
  VF total = zero();
  for (int64_t p = 0; p < num_parts; ++p) {
    if (weights[p] != 0.0f) total = fma(set1(weights[p]), load_n(part(p) + i, left), total);
  }
  store_n(out + i, total, left);
}

}  // namespace

void sum_kernel(const void* const* parts, int64_t num_parts, void* out, int64_t count,
                DType dtype) {
  if (dtype == DType::kFloat32) return sum(parts, num_parts, static_cast<float*>(out), count);
  sum(parts, num_parts, static_cast<BFloat16*>(out), count);
}

void weighted_sum_kernel(const void* const* parts, const float* weights, int64_t num_parts,
                         void* out, int64_t count, DType dtype) {
  if (dtype == DType::kFloat32) {
    return weighted_sum(parts, weights, num_parts, static_cast<float*>(out), count);
  }
  weighted_sum(parts, weights, num_parts, static_cast<BFloat16*>(out), count);
}

}  // namespace helicore::comm::HELICORE_ISA_NS
