// The weighted sum over slots.
#include <cstdint>

#include "helicore/core/cpu/simd.h"
#include "helicore/moe/cpu/finalize_kernels.h"

namespace helicore::moe::HELICORE_ISA_NS {

using namespace ::helicore::HELICORE_ISA_NS;  // NOLINT: the vector types of this variant

namespace {

template <typename Out>
void finalize_typed(const FinalizeParams& p) {
  for (int64_t t = 0; t < p.tokens; ++t) {
    const int32_t* position = p.position + t * p.top_k;
    const float* weights = p.weights + t * p.top_k;
    Out* out = static_cast<Out*>(p.out) + t * p.out_stride;
    for (int64_t c = 0; c < p.columns; c += 16) {
      VF acc = zero();
      for (int32_t s = 0; s < p.top_k; ++s) {
        if (position[s] < 0) continue;
        acc = fma(set1(weights[s]), load(p.rows + position[s] * p.stride + c), acc);
      }
      if (p.shared != nullptr) acc = add(acc, load(p.shared + t * p.stride + c));
      const int64_t left = p.columns - c;
      if (left >= 16) {
        store(out + c, acc);
      } else {
        store_n(out + c, acc, static_cast<int>(left));
      }
    }
  }
}

}  // namespace

void finalize_kernel(const FinalizeParams& params) {
  if (params.out_dtype == DType::kBFloat16) return finalize_typed<BFloat16>(params);
  finalize_typed<float>(params);
}

}  // namespace helicore::moe::HELICORE_ISA_NS
