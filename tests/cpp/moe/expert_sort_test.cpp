// Grouping by expert: a stable permutation.
#include "helicore/moe/expert_sort.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace helicore::moe {
namespace {

TEST(ExpertSort, is_a_stable_bijection_grouped_by_ascending_expert) {
  std::mt19937 rng(6);
  for (int round = 0; round < 200; ++round) {
    const auto tokens = static_cast<int64_t>(rng() % 40);
    const auto top_k = static_cast<int32_t>(1 + rng() % 8);
    const auto experts = static_cast<int32_t>(1 + rng() % 30);
    const auto rows = static_cast<size_t>(tokens * top_k);
    std::vector<int32_t> ids(rows), offsets(static_cast<size_t>(experts) + 1, -9);
    for (int32_t& id : ids) id = static_cast<int32_t>(rng() % static_cast<unsigned>(experts));
    std::vector<int32_t> row_token(rows, -9), position(rows, -9);
    std::vector<int32_t> active(static_cast<size_t>(experts), -9);
    ExpertSort sort{offsets.data(), row_token.data(), position.data(), active.data(), 0};
    sort_by_expert(ids.data(), tokens, top_k, experts, &sort);
    EXPECT_EQ(offsets[0], 0);
    EXPECT_EQ(offsets[static_cast<size_t>(experts)], static_cast<int32_t>(rows));
    std::vector<int32_t> source(rows, -1);
    for (size_t i = 0; i < rows; ++i) {
      const auto row = static_cast<size_t>(position[i]);
      ASSERT_LT(row, rows);
      ASSERT_EQ(source[row], -1);
      source[row] = static_cast<int32_t>(i);
      ASSERT_EQ(row_token[row], static_cast<int32_t>(i) / top_k);
      ASSERT_GE(position[i], offsets[static_cast<size_t>(ids[i])]);
      ASSERT_LT(position[i], offsets[static_cast<size_t>(ids[i]) + 1]);
    }
    int32_t num_active = 0;
    for (int32_t e = 0; e < experts; ++e) {
      const int32_t begin = offsets[static_cast<size_t>(e)];
      const int32_t end = offsets[static_cast<size_t>(e) + 1];
      for (int32_t r = begin + 1; r < end; ++r) {
        ASSERT_LT(source[static_cast<size_t>(r) - 1], source[static_cast<size_t>(r)]);
      }
      if (end > begin) {
        ASSERT_EQ(active[static_cast<size_t>(num_active++)], e);
      }
    }
    EXPECT_EQ(sort.num_active, num_active);
  }
}

}  // namespace
}  // namespace helicore::moe
