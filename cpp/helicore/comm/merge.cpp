#include "helicore/comm/merge.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "helicore/comm/cpu/merge_kernels.h"
#include "helicore/core/softmax_stats.h"

namespace helicore::comm {
namespace {

SoftmaxStats stats_of(const PartialView& part, int64_t row) {
  const float* stats = static_cast<const float*>(part.stats) + 2 * row;
  return {stats[0], stats[1]};
}

// Weights of the ranks' partials of one row; they sum to 1, or are all 0.
void row_weights(const MergeParams& p, int64_t row, std::span<float> weights) {
  float most = -std::numeric_limits<float>::infinity();
  for (const PartialView& part : p.parts) {
    const SoftmaxStats stats = stats_of(part, row);
    if (!stats.empty()) most = std::max(most, stats.m);
  }
  float sum = 0.0f;
  for (size_t r = 0; r < p.parts.size(); ++r) {
    const SoftmaxStats stats = stats_of(p.parts[r], row);
    weights[r] = stats.empty() ? 0.0f : stats.l * std::exp2(stats.m - most);
    sum += weights[r];
  }
  for (float& weight : weights) weight = sum > 0.0f ? weight / sum : 0.0f;
}

}  // namespace

void sum_parts(std::span<const void* const> parts, void* out, int64_t count, DType dtype) {
  HELICORE_DISPATCH_ISA(
      sum_kernel(parts.data(), static_cast<int64_t>(parts.size()), out, count, dtype));
}

void merge_parts(const MergeParams& p) {
  const auto element = static_cast<int64_t>(size_of(p.dtype));
  const auto num_parts = static_cast<int64_t>(p.parts.size());
  std::vector<float> weights(p.parts.size());
  std::vector<const void*> rows(p.parts.size());
  auto* out = static_cast<std::byte*>(p.out);
  for (int64_t t = 0; t < p.tokens; ++t) {
    for (int64_t h = 0; h < p.own_heads; ++h) {
      const int64_t row = t * p.heads + p.first_head + h;
      row_weights(p, row, weights);
      for (size_t r = 0; r < rows.size(); ++r) {
        rows[r] = static_cast<const std::byte*>(p.parts[r].o) + row * p.width * element;
      }
      HELICORE_DISPATCH_ISA(weighted_sum_kernel(rows.data(), weights.data(), num_parts,
                                                out + (t * p.own_heads + h) * p.width * element,
                                                p.width, p.dtype));
    }
  }
}

}  // namespace helicore::comm
