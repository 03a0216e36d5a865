#include "helicore/kv/quota.h"

#include <gtest/gtest.h>

#include <random>

#include "helicore/core/error.h"
#include "kv/kv_configs.h"

namespace helicore::kv::testing {
namespace {

struct Split {
  explicit Split(const KVCacheManagerConfig& c, int64_t quota, int64_t grain = kHostGrainBytes)
      : config(c),
        registry(config),
        layout(config, registry),
        split(split_quota(config, registry, layout, quota, grain)) {}
  int64_t used(int64_t grain = kHostGrainBytes) const {
    int64_t bytes = 0;
    for (size_t g = 0; g < layout.groups().count(); ++g) {
      const PoolGroupId id(static_cast<int32_t>(g));
      bytes += bytes_for_slots(layout.groups()[id], split.num_slots[id], grain);
    }
    return bytes;
  }
  KVCacheManagerConfig config;
  LifeCycleRegistry registry;
  StorageLayout layout;
  QuotaSplit split;
};

TEST(Quota, one_group_takes_all_that_fits) {
  const Split s(attention_config(4, 10, 1, 1024), 40960);
  EXPECT_EQ(s.split.num_slots[PoolGroupId(0)], 10);
  EXPECT_EQ(s.split.quota, 40960);
  EXPECT_EQ(s.split.raised_by, 0);
}

TEST(Quota, a_tiny_quota_is_raised_to_the_floor_and_says_by_how_much) {
  const Split s(attention_config(64, 1, 4, 4096), 1);
  EXPECT_EQ(s.split.num_slots[PoolGroupId(0)], 1);
  EXPECT_EQ(s.split.quota, 64 * 4096 * 4);
  EXPECT_EQ(s.split.raised_by, s.split.quota - 4096);
}

TEST(Quota, constraints_are_floors_with_headroom_for_the_resume_gate) {
  auto config = attention_config(4, 1);
  config.max_util_for_resume = 0.5;
  config.constraints = {BatchDesc{{{40, 39}, {40, 39}}, 20}};
  const Split s(config, 1);
  EXPECT_EQ(s.split.num_slots[PoolGroupId(0)], (10 + 5) * 2);
}

TEST(Quota, a_shared_system_prompt_counts_once) {
  const LifeCycle full;
  EXPECT_EQ(slots_for_batch(BatchDesc{{{40, 39}, {40, 39}}, 20}, full, {.tokens_per_block = 4}),
            5 + 5 + 5);
  EXPECT_EQ(slots_for_batch(BatchDesc{{}, 20}, full, {.tokens_per_block = 4}), 0);
  EXPECT_EQ(slots_for_batch(BatchDesc{{{0, 0}}, 0}, full, {.tokens_per_block = 4}), 0);
  const LifeCycle window{.window = 8};
  EXPECT_EQ(slots_for_batch(BatchDesc{{{41, 40}}, 0}, window, {.tokens_per_block = 4}), 11 - 8);
}

TEST(Quota, target_and_draft_get_the_same_number_of_blocks_by_default) {
  auto config = attention_config(4, 1);
  config.layers = {AttentionLayerConfig{0, {{"k", 4096}}}, AttentionLayerConfig{1, {{"k", 4096}}},
                   AttentionLayerConfig{2, {{"k", 4096}}, {}, {}, CacheDomain::kDraft}};
  const Split s(config, 3 * 4096 * 100);
  EXPECT_EQ(s.split.num_slots[PoolGroupId(0)], 100);
  EXPECT_EQ(s.split.num_slots[PoolGroupId(1)], 100);
}

TEST(Quota, an_initial_ratio_rules_the_split_but_not_the_floors) {
  auto config = attention_config(4, 1);
  config.layers = {AttentionLayerConfig{0, {{"k", 4096}}},
                   AttentionLayerConfig{1, {{"k", 4096}}, {}, {}, CacheDomain::kDraft}};
  config.initial_pool_ratio = {0.75, 0.25};
  EXPECT_EQ(Split(config, 4096 * 100).split.num_slots[PoolGroupId(0)], 75);
  config.initial_pool_ratio = {0.999, 0.001};
  const Split s(config, 4096 * 100);
  EXPECT_EQ(s.split.num_slots[PoolGroupId(1)], 1);
  EXPECT_EQ(s.split.num_slots[PoolGroupId(0)], 99);
}

TEST(Quota, random_splits_respect_budget_and_floors_and_waste_less_than_a_slot) {
  std::mt19937 random(7);
  const auto below = [&](int n) { return std::uniform_int_distribution<int>(0, n - 1)(random); };
  for (int round = 0; round < 300; ++round) {
    auto config = attention_config(4, 1);
    config.layers.clear();
    for (int i = 0; i <= below(4); ++i) {
      config.layers.push_back(
          AttentionLayerConfig{i,
                               {{"k", 1 + below(9000)}, {"v", 1 + below(300)}},
                               {},
                               {},
                               below(2) == 0 ? CacheDomain::kTarget : CacheDomain::kDraft});
    }
    if (below(2) == 0) config.constraints = {BatchDesc{{{1 + below(60), 0}}, 0}};
    const int64_t quota = 1 + below(1 << 20);
    const Split s(config, quota);
    ASSERT_LE(s.used(), s.split.quota) << "round " << round;
    ASSERT_GE(s.split.quota, quota);
    for (size_t g = 0; g < s.layout.groups().count(); ++g) {
      const PoolGroupId id(static_cast<int32_t>(g));
      const auto& shape = s.layout.groups()[id];
      ASSERT_GE(s.split.num_slots[id], static_cast<int32_t>(shape.variants.size()));
      const int64_t one_more = bytes_for_slots(shape, s.split.num_slots[id] + 1, kHostGrainBytes) -
                               bytes_for_slots(shape, s.split.num_slots[id], kHostGrainBytes);
      ASSERT_GT(s.used() + one_more, s.split.quota) << "round " << round << " wastes a slot";
    }
  }
}

}  // namespace
}  // namespace helicore::kv::testing
