// Router logits (dot products along the width) and expert selection.
//
// A logit is one vector chain over ascending 16-wide pieces of the width, then one fixed horizontal
// sum: its bits do not depend on the tile. The selection works row by row in fp32.
#include <cmath>
#include <cstdint>

#include "helicore/core/cpu/simd.h"
#include "helicore/moe/cpu/router_kernels.h"
#include "helicore/nn/cpu/simd_math.h"

namespace helicore::moe::HELICORE_ISA_NS {

using namespace ::helicore::HELICORE_ISA_NS;  // NOLINT: the vector types of this variant

namespace {

constexpr float kInfinity = __builtin_inff();

template <int kR, int kE, typename X>
void dot_tile(const LogitsParams& p, int64_t row, int64_t expert) {
  VF acc[kR][kE];
  for (int r = 0; r < kR; ++r) {
    for (int e = 0; e < kE; ++e) acc[r][e] = zero();
  }
  const X* x = static_cast<const X*>(p.x) + row * p.x_stride;
  const float* gate = p.gate + expert * p.gate_stride;
  int64_t i = 0;
  for (; i + 16 <= p.width; i += 16) {
    VF xv[kR];
    for (int r = 0; r < kR; ++r) xv[r] = load(x + r * p.x_stride + i);
    for (int e = 0; e < kE; ++e) {
      VF g = load(gate + e * p.gate_stride + i);
      for (int r = 0; r < kR; ++r) acc[r][e] = fma(xv[r], g, acc[r][e]);
    }
  }
  if (i < p.width) {
    const int n = static_cast<int>(p.width - i);
    for (int e = 0; e < kE; ++e) {
      VF g = load_n(gate + e * p.gate_stride + i, n);
      for (int r = 0; r < kR; ++r) {
        acc[r][e] = fma(load_n(x + r * p.x_stride + i, n), g, acc[r][e]);
      }
    }
  }
  for (int r = 0; r < kR; ++r) {
    for (int e = 0; e < kE; ++e) {
      p.logits[(row + r) * p.num_experts + expert + e] = reduce_add(acc[r][e]);
    }
  }
}

template <int kR, typename X>
void dot_rows(const LogitsParams& p, int64_t row, int64_t begin, int64_t end) {
#if defined(HELICORE_SIMD_AVX512)
  constexpr int kE = 4;
#else
  constexpr int kE = 2;
#endif
  int64_t e = begin;
  if constexpr (kR == 1) {
    for (; e + 2 * kE <= end; e += 2 * kE) dot_tile<kR, 2 * kE, X>(p, row, e);
  }
  for (; e + kE <= end; e += kE) dot_tile<kR, kE, X>(p, row, e);
  for (; e < end; ++e) dot_tile<kR, 1, X>(p, row, e);
}

template <typename X>
void logits_typed(const LogitsParams& p, int64_t row_begin, int64_t row_end, int64_t begin,
                  int64_t end) {
#if defined(HELICORE_SIMD_AVX512)
  constexpr int kR = 4;
#else
  constexpr int kR = 2;
#endif
  int64_t row = row_begin;
  for (; row + kR <= row_end; row += kR) dot_rows<kR, X>(p, row, begin, end);
  for (; row < row_end; ++row) dot_rows<1, X>(p, row, begin, end);
}

// scores[e] for one row; NaN becomes 0 here and is -inf in the choice.
void score_row(const float* logits, int64_t experts, Scoring scoring, float* scores) {
  if (scoring == Scoring::kSigmoid) {
    for (int64_t e = 0; e < experts; e += 16) {
      const int n = experts - e < 16 ? static_cast<int>(experts - e) : 16;
      store(scores + e, sigmoid(load_n(logits + e, n)));
    }
    return;
  }
  float top = -kInfinity;
  for (int64_t e = 0; e < experts; ++e) {
    if (logits[e] > top) top = logits[e];
  }
  float sum = 0.0f;
  for (int64_t e = 0; e < experts; e += 16) {
    const int n = experts - e < 16 ? static_cast<int>(experts - e) : 16;
    store(scores + e, exp_accurate(max(sub(load_n(logits + e, n), set1(top)), set1(-87.0f))));
  }
  for (int64_t e = 0; e < experts; ++e) {
    if (logits[e] == top) scores[e] = 1.0f;
    if (std::isnan(logits[e]) || logits[e] == -kInfinity) scores[e] = 0.0f;
    sum += scores[e];
  }
  for (int64_t e = 0; e < experts && sum > 0.0f; ++e) scores[e] /= sum;
}

// The best two choices of a group.
struct TopTwo {
  float first = -kInfinity;
  float second = -kInfinity;
};
TopTwo top_two(const float* choice, int64_t n) {
  TopTwo t;
  for (int64_t i = 0; i < n; ++i) {
    if (choice[i] > t.first) {
      t.second = t.first;
      t.first = choice[i];
    } else if (choice[i] > t.second) {
      t.second = choice[i];
    }
  }
  return t;
}

// Sets the choice of every expert outside the best topk_group groups to -inf, in place.
void mask_groups(const RouterConfig& c, float* choice) {
  const int32_t size = c.num_experts / c.n_group;
  float group_score[kMaxGroups];
  bool kept[kMaxGroups];
  for (int32_t g = 0; g < c.n_group; ++g) {
    const TopTwo t = top_two(choice + g * size, size);
    group_score[g] = c.group_score == GroupScore::kMax || size == 1 ? t.first : t.first + t.second;
    kept[g] = false;
  }
  for (int32_t round = 0; round < c.topk_group; ++round) {
    int32_t best = -1;
    for (int32_t g = 0; g < c.n_group; ++g) {
      if (!kept[g] && (best < 0 || group_score[g] > group_score[best])) best = g;
    }
    kept[best] = true;
  }
  for (int32_t g = 0; g < c.n_group; ++g) {
    if (kept[g]) continue;
    for (int32_t e = g * size; e < (g + 1) * size; ++e) choice[e] = -kInfinity;
  }
}

// Keeps the k best (descending choice, then ascending id) by insertion; -inf choices are filled in
// last.
void top_k(const float* choice, int32_t experts, int32_t k, int32_t* ids) {
  float value[kMaxTopK];
  int32_t count = 0;
  for (int32_t e = 0; e < experts; ++e) {
    const float v = choice[e];
    if (v == -kInfinity || (count == k && !(v > value[k - 1]))) continue;
    int32_t at = count < k ? count++ : k - 1;
    for (; at > 0 && v > value[at - 1]; --at) {
      value[at] = value[at - 1];
      ids[at] = ids[at - 1];
    }
    value[at] = v;
    ids[at] = e;
  }
  // Too few finite choices: the lowest ids not taken yet, so that ids stay distinct and in range.
  for (int32_t e = 0; e < experts && count < k; ++e) {
    bool taken = false;
    for (int32_t i = 0; i < count; ++i) taken = taken || ids[i] == e;
    if (!taken) ids[count++] = e;
  }
}

void select_row(const SelectParams& p, int64_t row, float* scratch) {
  const RouterConfig& c = p.config;
  const float* logits = p.logits + row * c.num_experts;
  float* scores = scratch;
  float* choice = scratch + select_scratch(c.num_experts) / 2;
  score_row(logits, c.num_experts, c.scoring, scores);
  for (int32_t e = 0; e < c.num_experts; ++e) {
    if (std::isnan(logits[e])) scores[e] = 0.0f;
    const float v = p.bias != nullptr ? scores[e] + p.bias[e] : scores[e];
    choice[e] = std::isnan(logits[e]) || std::isnan(v) ? -kInfinity : v;
  }
  if (c.group_score != GroupScore::kNone && c.topk_group < c.n_group) mask_groups(c, choice);
  int32_t* ids = p.ids + row * c.top_k;
  float* weights = p.weights + row * c.top_k;
  top_k(choice, c.num_experts, c.top_k, ids);
  float sum = 0.0f;
  for (int32_t i = 0; i < c.top_k; ++i) {
    weights[i] = choice[ids[i]] == -kInfinity ? 0.0f : scores[ids[i]];
    sum += weights[i];
  }
  const float divisor = c.norm_topk_prob ? sum + 1e-20f : 1.0f;
  for (int32_t i = 0; i < c.top_k; ++i) weights[i] = weights[i] / divisor * c.scaling;
}

}  // namespace

void router_logits_kernel(const LogitsParams& params, int64_t row_begin, int64_t row_end,
                          int64_t expert_begin, int64_t expert_end) {
  if (params.dtype == DType::kBFloat16) {
    logits_typed<BFloat16>(params, row_begin, row_end, expert_begin, expert_end);
  } else {
    logits_typed<float>(params, row_begin, row_end, expert_begin, expert_end);
  }
}

void select_kernel(const SelectParams& params, int64_t row_begin, int64_t row_end, float* scratch) {
  for (int64_t row = row_begin; row < row_end; ++row) select_row(params, row, scratch);
}

}  // namespace helicore::moe::HELICORE_ISA_NS
