// Softmax statistics and the merge of partial attention results; shared by attention, Helix and the
// tests.
//
// One convention everywhere: scores are scaled and in base 2, s' = sigma * (q.k) * log2(e). A row
// carries
//   m = max_j s'_j,   l = sum_j 2^(s'_j - m),   o = (sum_j 2^(s'_j - m) v_j) / l  (normalised).
// An empty row is (m = -inf, l = 0, o = 0). docs/design/mla-cpu.md derives the merge.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

namespace helicore {

inline constexpr float kLog2E = 1.44269504088896340736f;
inline constexpr float kLn2 = 0.69314718055994530942f;

struct SoftmaxStats {
  float m = -std::numeric_limits<float>::infinity();  // base 2
  float l = 0.0f;
  [[nodiscard]] bool empty() const noexcept { return !(l > 0.0f); }
  // log-sum-exp in base 2 and in base e; -inf for an empty row.
  [[nodiscard]] float lse2() const noexcept { return empty() ? m : m + std::log2(l); }
  [[nodiscard]] float lse() const noexcept { return lse2() * kLn2; }
};

// Weights of two partials in their merge; a weight of exactly 0 means: skip the term (its o may be
// NaN).
struct MergeWeights {
  float a = 0.0f;
  float b = 0.0f;
  SoftmaxStats stats;
};

[[nodiscard]] inline MergeWeights merge_weights(SoftmaxStats a, SoftmaxStats b) noexcept {
  if (a.empty() && b.empty()) return {};
  if (a.empty()) return {0.0f, 1.0f, b};
  if (b.empty()) return {1.0f, 0.0f, a};
  const float m = a.m > b.m ? a.m : b.m;
  const float wa = a.l * std::exp2(a.m - m);
  const float wb = b.l * std::exp2(b.m - m);
  const float w = wa + wb;
  return {wa / w, wb / w, {m, w}};
}

}  // namespace helicore
