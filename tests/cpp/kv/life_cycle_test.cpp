#include "helicore/kv/life_cycle.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "helicore/core/error.h"
#include "kv/kv_configs.h"
#include "kv/planning_configs.h"

namespace helicore::kv::testing {
namespace {

TEST(LifeCycle, stale_ranges_agree_with_the_definition) {
  for (int32_t tpb : {1, 4, 32}) {
    for (int32_t sinks : {0, 1, 3}) {
      for (int32_t window : {1, 2, 4, 5, 33, 64}) {
        const LifeCycle lc{.window = window, .num_sink_blocks = sinks};
        for (int32_t history = 0; history < 200; ++history) {
          const auto range = lc.stale_range(history, tpb);
          for (int32_t block = 0; block * tpb < history + 2 * tpb; ++block) {
            ASSERT_EQ(range.contains(block), is_stale(lc, history, block, tpb))
                << "tpb " << tpb << " sinks " << sinks << " window " << window << " history "
                << history << " block " << block;
          }
        }
      }
    }
  }
}

TEST(LifeCycle, full_attention_never_has_stale_blocks) {
  const LifeCycle lc;
  for (int32_t history : {0, 1, 31, 32, 1000}) EXPECT_TRUE(lc.stale_range(history, 32).empty());
}

TEST(LifeCycle, a_window_in_flight_keeps_the_block_of_its_first_token) {
  const LifeCycle lc{.window = 128};
  EXPECT_TRUE(lc.stale_range(158, 32).empty()) << "position 158 still reads token 31";
  EXPECT_EQ(lc.stale_range(159, 32).end, 1);
}

TEST(LifeCycle, scratch_ranges_agree_with_the_definition) {
  Dice dice(3);
  int64_t num_scratch = 0;
  for (int round = 0; round < 4000; ++round) {
    LifeCycle lc;
    if (dice.below(8) > 0) lc.window = dice.in(1, 40);
    if (lc.window) lc.num_sink_blocks = dice.in(0, 3);
    const int32_t tpb = dice.in(1, 9);
    const int32_t capacity = dice.in(0, 150);
    const KVCacheDesc step{capacity, dice.in(0, capacity)};
    const int32_t rewind = dice.in(0, 40);
    const auto range = lc.scratch_range(step.history_length, step.capacity, rewind, tpb);
    for (int32_t block = 0; block < capacity / tpb + 3; ++block) {
      ASSERT_EQ(range.contains(block), is_scratch(lc, step, rewind, block, tpb))
          << "round " << round << " block " << block;
      num_scratch += range.contains(block);
    }
  }
  EXPECT_GT(num_scratch, 1000);
}

TEST(LifeCycle, a_step_inside_the_window_and_a_state_have_no_scratch_blocks) {
  const LifeCycle window{.window = 128};
  EXPECT_EQ(window.scratch_range(0, 1025, 0, 32), (HalfOpenRange<int32_t>{0, 28}));
  EXPECT_EQ(window.scratch_range(512, 1025, 0, 32), (HalfOpenRange<int32_t>{16, 28}));
  EXPECT_EQ(window.scratch_range(0, 1025, 33, 32), (HalfOpenRange<int32_t>{0, 27}));
  EXPECT_TRUE(window.scratch_range(1024, 1025, 0, 32).empty()) << "a decode step";
  EXPECT_TRUE(window.scratch_range(0, 158, 0, 32).empty());
  EXPECT_TRUE(window.scratch_range(0, 1025, 5000, 32).empty());
  EXPECT_TRUE(LifeCycle{}.scratch_range(0, 1025, 0, 32).empty());
  EXPECT_TRUE(LifeCycle{.kind = LayerType::kSsm}.scratch_range(0, 1025, 0, 32).empty());
}

TEST(LifeCycle, layers_share_a_life_cycle_exactly_when_their_keys_are_equal) {
  KVCacheManagerConfig config = attention_config(4, 8);
  const std::vector<BufferConfig> buffers{{"k", 64}};
  config.layers = {
      AttentionLayerConfig{10, buffers},
      AttentionLayerConfig{11, buffers, 64},
      AttentionLayerConfig{12, buffers, 64, 4},
      AttentionLayerConfig{13, buffers, {}, {}, CacheDomain::kDraft},
      AttentionLayerConfig{14, buffers, {}, 0},
      AttentionLayerConfig{15, buffers, 64, 3},
  };
  const LifeCycleRegistry registry(config);
  ASSERT_EQ(registry.count(), 4u);
  EXPECT_EQ(registry.of_layer(10), registry.of_layer(14));
  EXPECT_EQ(registry.of_layer(12), registry.of_layer(15)) << "3 and 4 sinks are one block";
  EXPECT_EQ(registry.of_layer(11).value(), 1);
  EXPECT_EQ(registry.of_layer(13).value(), 3);
  EXPECT_EQ(registry[registry.of_layer(13)].domain, CacheDomain::kDraft);
  EXPECT_FALSE(registry.ssm_life_cycle_id().has_value());
  EXPECT_THROW((void)registry.of_layer(99), InvalidArgument);
  EXPECT_THROW((void)registry.id_of(LifeCycle{.window = 7}), InvalidArgument);
}

TEST(LifeCycle, layers_of_unequal_reuse_policy_do_not_share_a_life_cycle) {
  KVCacheManagerConfig config = attention_config(4, 8);
  AttentionLayerConfig layer{.layer_id = 0, .buffers = {{"k", 64}}};
  config.layers = {layer};
  for (ReusePolicy policy : {ReusePolicy::kOptional, ReusePolicy::kPrivate}) {
    ++layer.layer_id;
    layer.reuse_policy = policy;
    config.layers.push_back(layer);
  }
  const LifeCycleRegistry registry(config);
  ASSERT_EQ(registry.count(), 3u);
  EXPECT_EQ(registry[registry.of_layer(0)].policy, ReusePolicy::kRequired);
  EXPECT_EQ(registry[registry.of_layer(1)].policy, ReusePolicy::kOptional);
  EXPECT_EQ(registry[registry.of_layer(2)].policy, ReusePolicy::kPrivate);
  EXPECT_EQ(name_of(ReusePolicy::kOptional), "OPTIONAL");
}

TEST(LifeCycle, recurrent_layers_share_one_life_cycle_of_the_target) {
  KVCacheManagerConfig config = attention_config(4, 8);
  config.layers = {SsmLayerConfig{0, {{"s", 64}}}, AttentionLayerConfig{1, {{"k", 64}}},
                   SsmLayerConfig{2, {{"s", 32}}}};
  const LifeCycleRegistry registry(config);
  EXPECT_EQ(registry.count(), 2u);
  ASSERT_TRUE(registry.ssm_life_cycle_id().has_value());
  EXPECT_EQ(registry.ssm_life_cycle_id()->value(), 0);
  EXPECT_EQ(registry[*registry.ssm_life_cycle_id()].stale_range(9, 4).end, 2);
}

}  // namespace
}  // namespace helicore::kv::testing
