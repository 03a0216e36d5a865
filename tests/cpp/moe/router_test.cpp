// Expert selection against a naive double-precision router.
#include "helicore/moe/router.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "helicore/core/error.h"
#include "helicore/core/thread_pool.h"
#include "nn/matrix.h"

namespace helicore::moe {
namespace {

using nn::testing::available_isas;
using nn::testing::Matrix;

constexpr double kInf = std::numeric_limits<double>::infinity();

struct Choice {
  std::vector<int32_t> ids;
  std::vector<double> weights;
  double gap = kInf;  // smallest distance between neighbours that decided something
};

std::vector<int32_t> descending(const std::vector<double>& values) {
  std::vector<int32_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return values[static_cast<size_t>(a)] > values[static_cast<size_t>(b)];
  });
  return order;
}

double gap_at(const std::vector<double>& values, const std::vector<int32_t>& order, int32_t k) {
  double gap = kInf;
  for (int32_t i = 0; i < k && i + 1 < static_cast<int32_t>(order.size()); ++i) {
    gap = std::min(gap, values[static_cast<size_t>(order[static_cast<size_t>(i)])] -
                            values[static_cast<size_t>(order[static_cast<size_t>(i) + 1])]);
  }
  return gap;
}

std::vector<double> naive_scores(const std::vector<double>& logits, Scoring scoring) {
  std::vector<double> s(logits.size());
  if (scoring == Scoring::kSigmoid) {
    for (size_t i = 0; i < s.size(); ++i) s[i] = 1.0 / (1.0 + std::exp(-logits[i]));
    return s;
  }
  const double top = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (size_t i = 0; i < s.size(); ++i) sum += s[i] = std::exp(logits[i] - top);
  for (double& v : s) v /= sum;
  return s;
}

// `mask` is what the choice of experts outside the kept groups becomes.
Choice naive_route(const std::vector<double>& logits, const float* bias, const RouterConfig& c,
                   double mask = -kInf) {
  const std::vector<double> scores = naive_scores(logits, c.scoring);
  std::vector<double> choice = scores;
  for (size_t i = 0; bias != nullptr && i < choice.size(); ++i) choice[i] += bias[i];
  Choice out;
  if (c.group_score != GroupScore::kNone) {
    const auto size = static_cast<size_t>(c.num_experts / c.n_group);
    std::vector<double> group;
    for (size_t g = 0; g < static_cast<size_t>(c.n_group); ++g) {
      std::vector<double> members(choice.begin() + static_cast<int64_t>(g * size),
                                  choice.begin() + static_cast<int64_t>((g + 1) * size));
      std::sort(members.rbegin(), members.rend());
      const bool single = c.group_score == GroupScore::kMax || size == 1;
      group.push_back(single ? members[0] : members[0] + members[1]);
    }
    const std::vector<int32_t> order = descending(group);
    if (c.topk_group < c.n_group) out.gap = gap_at(group, order, c.topk_group);
    for (size_t i = static_cast<size_t>(c.topk_group); i < order.size(); ++i) {
      for (size_t e = 0; e < size; ++e) choice[static_cast<size_t>(order[i]) * size + e] = mask;
    }
  }
  const std::vector<int32_t> order = descending(choice);
  out.gap = std::min(out.gap, gap_at(choice, order, c.top_k));
  double sum = 0;
  for (int32_t i = 0; i < c.top_k; ++i) {
    out.ids.push_back(order[static_cast<size_t>(i)]);
    out.weights.push_back(scores[static_cast<size_t>(out.ids.back())]);
    sum += out.weights.back();
  }
  for (double& w : out.weights) w = (c.norm_topk_prob ? w / (sum + 1e-20) : w) * c.scaling;
  return out;
}

struct Routed {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

Routed run_route(Matrix& x, Matrix& gate, std::vector<float>* bias, const RouterConfig& c) {
  Routed r;
  r.ids.assign(static_cast<size_t>(x.rows * c.top_k), -7);
  r.weights.assign(r.ids.size(), NAN);
  TensorView b;
  if (bias != nullptr) b = make_view(bias->data(), DType::kFloat32, {c.num_experts});
  route(x.view(), gate.view(), bias != nullptr ? &b : nullptr, c,
        make_view(r.ids.data(), DType::kInt32, {x.rows, c.top_k}),
        make_view(r.weights.data(), DType::kFloat32, {x.rows, c.top_k}));
  return r;
}

Routed run_select(std::vector<float> logits, std::vector<float>* bias, const RouterConfig& c) {
  const auto rows = static_cast<int64_t>(logits.size()) / c.num_experts;
  Routed r;
  r.ids.assign(static_cast<size_t>(rows * c.top_k), -7);
  r.weights.assign(r.ids.size(), NAN);
  TensorView b;
  if (bias != nullptr) b = make_view(bias->data(), DType::kFloat32, {c.num_experts});
  select_experts(make_view(logits.data(), DType::kFloat32, {rows, c.num_experts}),
                 bias != nullptr ? &b : nullptr, c,
                 make_view(r.ids.data(), DType::kInt32, {rows, c.top_k}),
                 make_view(r.weights.data(), DType::kFloat32, {rows, c.top_k}));
  return r;
}

std::vector<RouterConfig> configs() {
  return {
      {.num_experts = 16,
       .top_k = 4,
       .n_group = 4,
       .topk_group = 2,
       .group_score = GroupScore::kTop2Sum,
       .norm_topk_prob = true,
       .scaling = 2.5f},
      {.num_experts = 256,
       .top_k = 8,
       .n_group = 8,
       .topk_group = 4,
       .group_score = GroupScore::kTop2Sum,
       .norm_topk_prob = true,
       .scaling = 2.5f},
      {.num_experts = 384,
       .top_k = 8,
       .group_score = GroupScore::kTop2Sum,
       .norm_topk_prob = true,
       .scaling = 2.827f},
      {.num_experts = 64, .top_k = 6, .scoring = Scoring::kSoftmax},
      {.num_experts = 160,
       .top_k = 6,
       .n_group = 8,
       .topk_group = 3,
       .scoring = Scoring::kSoftmax,
       .group_score = GroupScore::kMax,
       .scaling = 16.0f},
      {.num_experts = 7, .top_k = 1, .norm_topk_prob = true, .scaling = 3.0f},
      {.num_experts = 5,
       .top_k = 5,
       .n_group = 5,
       .topk_group = 5,
       .group_score = GroupScore::kTop2Sum},
  };
}

class RouterTest : public ::testing::Test {
 protected:
  void TearDown() override {
    set_isa(detected_isa());
    set_num_threads(2);
  }
  std::vector<float> random_bias(int32_t n, float mean = 0.0f) {
    std::vector<float> bias(static_cast<size_t>(n));
    std::normal_distribution<float> normal(mean, 0.1f);
    for (float& b : bias) b = normal(rng_);
    return bias;
  }
  std::mt19937 rng_{23};
};

TEST_F(RouterTest, choice_equals_the_double_precision_router_except_at_near_ties) {
  int64_t compared = 0;
  for (Isa isa : available_isas()) {
    set_isa(isa);
    for (RouterConfig c : configs()) {
      for (DType dtype : {DType::kBFloat16, DType::kFloat32}) {
        const int64_t d = 50;
        Matrix x(60, d, dtype, rng_), gate(c.num_experts, d, DType::kFloat32, rng_);
        for (float& v : gate.f) v *= 0.2f;
        std::vector<float> bias = random_bias(c.num_experts);
        const bool biased = c.scoring == Scoring::kSigmoid;
        const Routed r = run_route(x, gate, biased ? &bias : nullptr, c);
        for (int64_t t = 0; t < x.rows; ++t) {
          std::vector<double> logits(static_cast<size_t>(c.num_experts));
          for (int64_t e = 0; e < c.num_experts; ++e) {
            for (int64_t i = 0; i < d; ++i) {
              logits[static_cast<size_t>(e)] += double(x.at(t, i)) * gate.at(e, i);
            }
          }
          const Choice want = naive_route(logits, biased ? bias.data() : nullptr, c);
          if (want.gap < 1e-5) continue;
          ++compared;
          for (int32_t s = 0; s < c.top_k; ++s) {
            const auto i = static_cast<size_t>(t * c.top_k + s);
            ASSERT_EQ(r.ids[i], want.ids[static_cast<size_t>(s)]) << name_of(isa) << " token " << t;
            ASSERT_NEAR(r.weights[i], want.weights[static_cast<size_t>(s)],
                        want.weights[static_cast<size_t>(s)] * 1e-5);
          }
        }
      }
    }
  }
  EXPECT_GT(compared, 1000);
}

TEST_F(RouterTest, masking_with_zero_would_choose_other_experts_under_negative_bias) {
  const RouterConfig c = configs()[0];
  int differ = 0;
  for (int t = 0; t < 50; ++t) {
    std::vector<float> logits(16), bias = random_bias(16, -2.0f);
    std::normal_distribution<float> normal;
    for (float& v : logits) v = normal(rng_);
    const std::vector<double> exact(logits.begin(), logits.end());
    const Routed r = run_select(logits, &bias, c);
    const Choice right = naive_route(exact, bias.data(), c);
    EXPECT_EQ(r.ids, right.ids);
    if (naive_route(exact, bias.data(), c, 0.0).ids != r.ids) ++differ;
  }
  EXPECT_GT(differ, 25);
}

TEST_F(RouterTest, equal_scores_go_to_the_lower_id_at_both_levels) {
  for (Isa isa : available_isas()) {
    set_isa(isa);
    for (const RouterConfig& c : configs()) {
      const Routed r =
          run_select(std::vector<float>(static_cast<size_t>(c.num_experts)), nullptr, c);
      for (int32_t s = 0; s < c.top_k; ++s) EXPECT_EQ(r.ids[static_cast<size_t>(s)], s);
    }
  }
}

TEST_F(RouterTest, weights_come_from_scores_and_not_from_biased_scores) {
  const RouterConfig c{.num_experts = 4, .top_k = 1};
  std::vector<float> bias = {0.0f, 0.0f, 0.0f, 5.0f};
  const Routed r = run_select({1.0f, 2.0f, 3.0f, -1.0f}, &bias, c);
  EXPECT_EQ(r.ids[0], 3);
  EXPECT_NEAR(r.weights[0], 1.0 / (1.0 + std::exp(1.0)), 1e-6);
}

TEST_F(RouterTest, nan_logits_are_chosen_last_with_weight_zero_and_ids_stay_distinct) {
  for (Isa isa : available_isas()) {
    set_isa(isa);
    for (const RouterConfig& c : configs()) {
      for (int nans = 0; nans <= c.num_experts; nans += std::max(1, c.num_experts / 4)) {
        std::vector<float> logits(static_cast<size_t>(2 * c.num_experts), 0.5f);
        for (int i = 0; i < nans; ++i) logits[static_cast<size_t>(i)] = NAN;
        if (nans > 1) logits[static_cast<size_t>(nans - 1)] = -INFINITY;
        const Routed r = run_select(logits, nullptr, c);
        const Routed clean =
            run_select(std::vector<float>(static_cast<size_t>(c.num_experts), 0.5f), nullptr, c);
        std::set<int32_t> distinct(r.ids.begin(), r.ids.begin() + c.top_k);
        EXPECT_EQ(distinct.size(), static_cast<size_t>(c.top_k));
        EXPECT_GE(*distinct.begin(), 0);
        EXPECT_LT(*distinct.rbegin(), c.num_experts);
        for (int32_t s = 0; s < c.top_k; ++s) {
          const auto i = static_cast<size_t>(s);
          EXPECT_FALSE(std::isnan(r.weights[i]));
          if (std::isnan(logits[static_cast<size_t>(r.ids[i])])) {
            EXPECT_EQ(r.weights[i], 0.0f);
          }
          // The other row is as if it were alone.
          EXPECT_EQ(r.ids[i + static_cast<size_t>(c.top_k)], clean.ids[i]);
          EXPECT_EQ(r.weights[i + static_cast<size_t>(c.top_k)], clean.weights[i]);
        }
      }
    }
  }
}

TEST_F(RouterTest, infinite_logits_give_finite_weights) {
  const RouterConfig sigmoid{.num_experts = 4, .top_k = 2};
  const Routed a = run_select({INFINITY, -INFINITY, 0.0f, 1.0f}, nullptr, sigmoid);
  EXPECT_EQ(a.ids, (std::vector<int32_t>{0, 3}));
  EXPECT_FLOAT_EQ(a.weights[0], 1.0f);
  const RouterConfig softmax{.num_experts = 4, .top_k = 2, .scoring = Scoring::kSoftmax};
  const Routed b = run_select({-INFINITY, 0.0f, 0.0f, -INFINITY}, nullptr, softmax);
  EXPECT_EQ(b.ids, (std::vector<int32_t>{1, 2}));
  EXPECT_FLOAT_EQ(b.weights[0], 0.5f);
}

TEST_F(RouterTest, a_token_is_routed_the_same_alone_and_with_any_threads) {
  const RouterConfig c = configs()[1];
  for (Isa isa : available_isas()) {
    set_isa(isa);
    Matrix x(77, 300, DType::kBFloat16, rng_), gate(c.num_experts, 300, DType::kFloat32, rng_);
    std::vector<float> bias = random_bias(c.num_experts);
    set_num_threads(3);
    const Routed all = run_route(x, gate, &bias, c);
    for (int64_t t : {0, 3, 40, 76}) {
      set_num_threads(t % 2 == 0 ? 1 : 2);
      Matrix one(1, 300, DType::kBFloat16, rng_);
      std::copy_n(x.h.begin() + t * 300, 300, one.h.begin());
      const Routed r = run_route(one, gate, &bias, c);
      EXPECT_TRUE(std::equal(r.ids.begin(), r.ids.end(), all.ids.begin() + t * c.top_k));
      EXPECT_EQ(std::memcmp(r.weights.data(), all.weights.data() + t * c.top_k,
                            sizeof(float) * static_cast<size_t>(c.top_k)),
                0);
    }
  }
}

TEST_F(RouterTest, impossible_configurations_are_refused_by_field) {
  const RouterConfig good = configs()[0];
  EXPECT_NO_THROW(good.validate());
  auto expect_refused = [&](const char* field, auto change) {
    RouterConfig c = good;
    change(c);
    try {
      c.validate();
      FAIL() << field;
    } catch (const InvalidArgument& e) {
      EXPECT_NE(std::string(e.what()).find(field), std::string::npos) << e.what();
    }
  };
  expect_refused("num_experts must", [](RouterConfig& c) { c.num_experts = 0; });
  expect_refused("n_group must", [](RouterConfig& c) { c.n_group = 3; });
  expect_refused("n_group must", [](RouterConfig& c) { c.n_group = 0; });
  expect_refused("topk_group must", [](RouterConfig& c) { c.topk_group = 5; });
  expect_refused("top_k must", [](RouterConfig& c) { c.top_k = 9; });
  expect_refused("top_k must", [](RouterConfig& c) { c.top_k = 0; });
  expect_refused("n_group must", [](RouterConfig& c) { c.group_score = GroupScore::kNone; });
}

}  // namespace
}  // namespace helicore::moe
