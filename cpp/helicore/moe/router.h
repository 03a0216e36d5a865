// The router of a mixture of experts: which experts a token goes to, and with which weights.
//
// Per token: logits = gate x in fp32; scores = sigmoid or softmax over all experts; choice = scores
// (+ bias); groups of experts other than the best `topk_group` are masked with -inf; the top_k
// experts by choice are taken. Weights are the scores (not the biased choice) of those experts,
// optionally divided by their sum, times `scaling`.
//
// Order: descending choice; equal choices go to the lower expert id, equal groups to the lower
// group. A NaN logit counts as -inf choice and weight 0. Ids are always distinct and in [0,
// num_experts), even when all logits are NaN.
#pragma once

#include <cstdint>

#include "helicore/core/tensor_view.h"

namespace helicore::moe {

enum class Scoring : uint8_t { kSigmoid = 0, kSoftmax = 1 };

// How a group of experts is scored.
enum class GroupScore : uint8_t {
  kNone = 0,     // no groups: n_group and topk_group must be 1 ("greedy")
  kMax = 1,      // best expert of the group ("group_limited_greedy")
  kTop2Sum = 2,  // sum of its two best choices ("noaux_tc")
};

struct RouterConfig {
  int32_t num_experts = 0;
  int32_t top_k = 0;
  int32_t n_group = 1;
  int32_t topk_group = 1;
  Scoring scoring = Scoring::kSigmoid;
  GroupScore group_score = GroupScore::kNone;
  bool norm_topk_prob = false;
  float scaling = 1.0f;

  // Throws InvalidArgument naming the field: sizes out of range, num_experts not a multiple of
  // n_group, topk_group > n_group, top_k larger than the experts of the kept groups.
  void validate() const;
};

inline constexpr int32_t kMaxExperts = 4096;
inline constexpr int32_t kMaxGroups = 256;
inline constexpr int32_t kMaxTopK = 64;

// x [T, D] bfloat16 or float32 (rows may be strided), gate [E, D] float32, bias [E] float32 or null
// -> ids int32 [T, k], weights float32 [T, k], both contiguous. In parallel over experts (few
// tokens) or tokens.
void route(const TensorView& x, const TensorView& gate, const TensorView* bias,
           const RouterConfig& config, const TensorView& ids, const TensorView& weights);

// The selection alone, from logits float32 [T, E] contiguous.
void select_experts(const TensorView& logits, const TensorView* bias, const RouterConfig& config,
                    const TensorView& ids, const TensorView& weights);

}  // namespace helicore::moe
