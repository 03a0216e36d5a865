#include "helicore/core/softmax_stats.h"

#include <gtest/gtest.h>

namespace helicore {
namespace {

TEST(SoftmaxStatsTest, merging_with_an_empty_side_is_the_identity) {
  SoftmaxStats x{3.0f, 2.5f};
  MergeWeights w = merge_weights(x, {});
  EXPECT_EQ(w.a, 1.0f);
  EXPECT_EQ(w.b, 0.0f);
  EXPECT_EQ(w.stats.m, 3.0f);
  EXPECT_EQ(w.stats.l, 2.5f);
}

TEST(SoftmaxStatsTest, two_empty_sides_give_an_empty_row_and_no_nan) {
  MergeWeights w = merge_weights({}, {});
  EXPECT_TRUE(w.stats.empty());
  EXPECT_TRUE(std::isinf(w.stats.lse()) && w.stats.lse() < 0);
  EXPECT_EQ(w.a, 0.0f);
  EXPECT_EQ(w.b, 0.0f);
}

TEST(SoftmaxStatsTest, merge_equals_one_pass_in_any_order) {
  // Scores (base 2) 1, 2, 5 with values 10, 20, 40.
  double weights = std::exp2(1.0) + std::exp2(2.0) + std::exp2(5.0);
  double expected = (std::exp2(1.0) * 10 + std::exp2(2.0) * 20 + std::exp2(5.0) * 40) / weights;
  SoftmaxStats left{2.0f, 1.5f};
  SoftmaxStats right{5.0f, 1.0f};
  double left_o = (10 * 0.5 + 20) / 1.5;
  MergeWeights ab = merge_weights(left, right);
  EXPECT_NEAR(ab.a * left_o + ab.b * 40, expected, 1e-5);
  MergeWeights ba = merge_weights(right, left);
  EXPECT_NEAR(ba.b * left_o + ba.a * 40, expected, 1e-5);
  EXPECT_NEAR(ab.stats.lse2(), std::log2(weights), 1e-6);
}

}  // namespace
}  // namespace helicore
