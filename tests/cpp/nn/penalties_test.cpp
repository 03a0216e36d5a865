// Penalties, bias and masks against the obvious loops.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "helicore/core/error.h"
#include "helicore/nn/sampling.h"

namespace helicore::nn {
namespace {

struct Lists {
  std::vector<int32_t> row_ptr{0};
  std::vector<int32_t> ids;

  void add_row(const std::vector<int32_t>& row) {
    ids.insert(ids.end(), row.begin(), row.end());
    row_ptr.push_back(static_cast<int32_t>(ids.size()));
  }
  TokenLists view() {
    return {make_view(row_ptr.data(), DType::kInt32, {static_cast<int64_t>(row_ptr.size())}),
            make_view(ids.data(), DType::kInt32, {static_cast<int64_t>(ids.size())})};
  }
};

std::vector<int32_t> random_tokens(std::mt19937& rng, size_t most, int32_t vocab) {
  std::vector<int32_t> tokens(rng() % (most + 1));
  for (int32_t& t : tokens) t = static_cast<int32_t>(rng() % static_cast<unsigned>(vocab));
  return tokens;
}

void naive_penalties(float* logits, const std::vector<int32_t>& prompt,
                     const std::vector<int32_t>& output, float repetition, float presence,
                     float frequency) {
  std::set<int32_t> seen(prompt.begin(), prompt.end());
  seen.insert(output.begin(), output.end());
  for (int32_t id : seen) {
    logits[id] = logits[id] > 0 ? logits[id] / repetition : logits[id] * repetition;
  }
  std::map<int32_t, int> counts;
  for (int32_t id : output) ++counts[id];
  for (auto [id, n] : counts) {
    logits[id] -= frequency * static_cast<float>(n);
    logits[id] -= presence;
  }
}

TEST(Penalties, equal_the_naive_loops_on_random_requests) {
  std::mt19937 rng(4);
  std::normal_distribution<float> normal;
  const int32_t vocab = 50;
  const int64_t rows = 40;
  std::vector<float> logits(static_cast<size_t>(rows * vocab));
  for (float& v : logits) v = normal(rng);
  std::vector<float> expected = logits, repetition, presence, frequency;
  Lists prompt, output;
  for (int64_t r = 0; r < rows; ++r) {
    const auto p = random_tokens(rng, 60, vocab), o = random_tokens(rng, 60, vocab);
    repetition.push_back(r % 4 == 0 ? 1.0f : 0.5f + 0.1f * static_cast<float>(rng() % 15));
    presence.push_back(r % 3 == 0 ? 0.0f : 0.3f);
    frequency.push_back(r % 5 == 0 ? 0.0f : -0.2f);
    naive_penalties(expected.data() + r * vocab, p, o, repetition.back(), presence.back(),
                    frequency.back());
    prompt.add_row(p);
    output.add_row(o);
  }
  const std::vector<float> before = logits;
  apply_penalties(
      PenaltyTensors{.logits = make_view(logits.data(), DType::kFloat32, {rows, vocab}),
                     .prompt = prompt.view(),
                     .output = output.view(),
                     .repetition = make_view(repetition.data(), DType::kFloat32, {rows}),
                     .presence = make_view(presence.data(), DType::kFloat32, {rows}),
                     .frequency = make_view(frequency.data(), DType::kFloat32, {rows})});
  for (size_t i = 0; i < logits.size(); ++i) ASSERT_FLOAT_EQ(logits[i], expected[i]) << i;
  EXPECT_NE(logits, before);
}

TEST(Penalties, an_id_outside_the_vocabulary_is_refused_and_nothing_changes) {
  std::vector<float> logits(10, 1.0f), one = {2.0f, 2.0f};
  const std::vector<float> before = logits;
  for (int32_t bad : {5, -1, 1 << 30}) {
    Lists prompt, output;
    prompt.add_row({0});
    prompt.add_row({1});
    output.add_row({2, bad});
    output.add_row({});
    const TensorView settings = make_view(one.data(), DType::kFloat32, {2});
    EXPECT_THROW(
        apply_penalties(PenaltyTensors{.logits = make_view(logits.data(), DType::kFloat32, {2, 5}),
                                       .prompt = prompt.view(),
                                       .output = output.view(),
                                       .repetition = settings,
                                       .presence = settings,
                                       .frequency = settings}),
        InvalidArgument);
    EXPECT_EQ(logits, before);
  }
}

TEST(LogitBias, adds_every_listed_value) {
  std::vector<float> logits(8, 1.0f), values = {0.5f, -2.0f, 0.25f};
  Lists lists;
  lists.add_row({1, 3});
  lists.add_row({1});
  apply_logit_bias(make_view(logits.data(), DType::kFloat32, {2, 4}), lists.view(),
                   make_view(values.data(), DType::kFloat32, {3}));
  EXPECT_EQ(logits, (std::vector<float>{1, 1.5f, 1, -1, 1, 1.25f, 1, 1}));
}

TEST(MaskTokens, sets_listed_ids_to_minus_infinity) {
  std::vector<float> logits(8, 1.0f);
  Lists lists;
  lists.add_row({});
  lists.add_row({0, 3, 3});
  mask_tokens(make_view(logits.data(), DType::kFloat32, {2, 4}), lists.view());
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(logits, (std::vector<float>{1, 1, 1, 1, -inf, 1, 1, -inf}));
}

TEST(MaskTokens, a_broken_row_ptr_is_refused) {
  std::vector<float> logits(8, 1.0f);
  Lists lists;
  lists.add_row({0, 1});
  lists.add_row({2});
  for (int32_t wrong : {-1, 4}) {
    Lists broken = lists;
    broken.row_ptr[1] = wrong;
    EXPECT_THROW(mask_tokens(make_view(logits.data(), DType::kFloat32, {2, 4}), broken.view()),
                 InvalidArgument);
  }
  Lists late = lists;
  late.row_ptr[0] = 1;
  EXPECT_THROW(mask_tokens(make_view(logits.data(), DType::kFloat32, {2, 4}), late.view()),
               InvalidArgument);
}

}  // namespace
}  // namespace helicore::nn
