#include "helicore/kv/planned_drop.h"

#include <gtest/gtest.h>

#include "helicore/kv/introspection.h"
#include "helicore/kv/kv_cache_manager.h"
#include "kv/kv_configs.h"

namespace helicore::kv::testing {
namespace {

// Full attention beside a window of 8 tokens, in blocks of 4.
KVCacheManagerConfig windowed_config() {
  KVCacheManagerConfig config = attention_config(4, 64);
  config.cache_tiers = {HostCacheTierConfig{1 << 20}};
  config.layers = {AttentionLayerConfig{0, {{"k", 256}}}, AttentionLayerConfig{1, {{"k", 256}}, 8}};
  config.reuse_match_backoff = 0;
  return config;
}

std::unique_ptr<KVCache> finished(KVCacheManager& manager, const std::vector<TokenId>& tokens) {
  auto cache = manager.create_kv_cache({.input_tokens = tokens});
  EXPECT_TRUE(cache->resume());
  const auto length = static_cast<int64_t>(tokens.size());
  EXPECT_TRUE(cache->resize(length));
  cache->commit(std::span(tokens).subspan(static_cast<size_t>(cache->num_committed_tokens())));
  cache->stop_committing();
  return cache;
}

TEST(PlannedDrop, drops_the_window_and_leaves_what_shorter_prefixes_need) {
  KVCacheManager manager(windowed_config());
  const auto tokens = iota_tokens(24);
  auto cache = finished(manager, tokens);
  auto plan = cache->plan_committed_block_drop();
  ASSERT_NE(plan, nullptr);
  EXPECT_EQ(plan->num_pages(), 2u) << "7 tokens before position 24 lie in two blocks";
  cache->close();
  EXPECT_EQ(manager.probe_reuse(tokens), 24);
  plan->drop();
  EXPECT_EQ(manager.probe_reuse(tokens), 16) << "the window in front of it is still there";
  EXPECT_THROW(plan->drop(), LogicError);
  Introspection::check(manager);
}

TEST(PlannedDrop, a_page_of_two_plans_goes_with_the_second) {
  KVCacheManager manager(windowed_config());
  const auto tokens = iota_tokens(24);
  auto a = finished(manager, tokens);
  auto b = finished(manager, tokens);
  auto plan_a = a->plan_committed_block_drop();
  auto plan_b = b->plan_committed_block_drop();
  a->close();
  b->close();
  plan_a->drop();
  EXPECT_EQ(manager.probe_reuse(tokens), 24);
  plan_b.reset();  // destruction drops
  EXPECT_EQ(manager.probe_reuse(tokens), 16);
}

TEST(PlannedDrop, needs_a_sequence_that_stopped_and_whose_tokens_are_all_there) {
  KVCacheManager manager(windowed_config());
  auto open = manager.create_kv_cache();
  ASSERT_TRUE(open->resume());
  EXPECT_THROW((void)open->plan_committed_block_drop(), LogicError);
  open->stop_committing();
  EXPECT_EQ(open->plan_committed_block_drop(), nullptr) << "nothing is committed";
}

TEST(PlannedDrop, of_a_sequence_inside_one_window_leaves_nothing_to_reuse) {
  KVCacheManager manager(windowed_config());
  const auto tokens = iota_tokens(8);
  auto cache = finished(manager, tokens);
  auto plan = cache->plan_committed_block_drop();
  ASSERT_NE(plan, nullptr);
  EXPECT_EQ(plan->num_pages(), 2u);
  cache->close();
  plan->drop();
  EXPECT_EQ(manager.probe_reuse(tokens), 0) << "full attention alone serves nothing";
  EXPECT_EQ(manager.probe_reuse(iota_tokens(4)), 0);
  Introspection::check(manager);
}

TEST(PlannedDrop, a_page_that_somebody_holds_stays) {
  KVCacheManager manager(windowed_config());
  const auto tokens = iota_tokens(24);
  auto cache = finished(manager, tokens);
  auto plan = cache->plan_committed_block_drop();
  cache->close();
  auto reader = manager.create_kv_cache({.input_tokens = tokens});
  ASSERT_EQ(reader->num_committed_tokens(), 24);
  plan->drop();
  EXPECT_EQ(manager.probe_reuse(tokens), 24);
  ASSERT_TRUE(reader->resume());
  Introspection::check(manager);
}

TEST(PlannedDrop, there_is_none_for_tokens_that_are_shown_in_part) {
  for (bool partial : {false, true}) {
    KVCacheManagerConfig config = windowed_config();
    config.enable_partial_reuse = partial;
    KVCacheManager manager(config);
    auto cache = finished(manager, iota_tokens(22));
    EXPECT_EQ(cache->plan_committed_block_drop() != nullptr, partial);
  }
}

// A recurrent layer beside full attention.
KVCacheManagerConfig recurrent_config() {
  KVCacheManagerConfig config = attention_config(4, 64);
  config.layers.push_back(SsmLayerConfig{7, {{"state", 128}}});
  config.commit_min_snapshot = true;
  return config;
}

TEST(PlannedDrop, takes_the_last_snapshot_and_leaves_the_one_before) {
  KVCacheManager manager(recurrent_config());
  const auto tokens = iota_tokens(24);
  auto cache = manager.create_kv_cache();
  ASSERT_TRUE(cache->resume());
  for (int32_t end : {12, 24}) {
    ASSERT_TRUE(cache->resize(end, end));
    cache->commit(std::span(tokens).subspan(static_cast<size_t>(end) - 12, 12), end == 24);
  }
  EXPECT_EQ(manager.probe_reuse(tokens), 24);
  auto plan = cache->plan_committed_block_drop();
  ASSERT_NE(plan, nullptr);
  EXPECT_EQ(plan->num_pages(), 1u) << "full attention is good for others too";
  cache->close();
  EXPECT_EQ(manager.probe_reuse(tokens), 24) << "a plan holds and drops nothing by itself";
  plan->drop();
  EXPECT_EQ(manager.probe_reuse(tokens), 12);
  EXPECT_THROW(plan->drop(), LogicError);
  Introspection::check(manager);
}

TEST(PlannedDrop, a_snapshot_of_two_plans_goes_with_the_second) {
  KVCacheManager manager(recurrent_config());
  const auto tokens = iota_tokens(12);
  std::vector<std::unique_ptr<PlannedDrop>> plans;
  for (int i = 0; i < 2; ++i) {
    auto cache = manager.create_kv_cache({.input_tokens = tokens});
    ASSERT_TRUE(cache->resume());
    ASSERT_TRUE(cache->resize(12, 12));
    cache->commit(std::span(tokens).subspan(static_cast<size_t>(cache->num_committed_tokens())),
                  true);
    plans.push_back(cache->plan_committed_block_drop());
    ASSERT_NE(plans.back(), nullptr) << i;
  }
  plans[0]->drop();
  EXPECT_EQ(manager.probe_reuse(tokens), 12);
  plans[1]->drop();
  EXPECT_EQ(manager.probe_reuse(tokens), 0);
  Introspection::check(manager);
}

TEST(PlannedDrop, a_plan_may_outlive_its_manager) {
  std::unique_ptr<PlannedDrop> plan;
  {
    KVCacheManager manager(windowed_config());
    auto cache = finished(manager, iota_tokens(24));
    plan = cache->plan_committed_block_drop();
    cache->close();
  }
  ASSERT_NE(plan, nullptr);
  plan->drop();
}

}  // namespace
}  // namespace helicore::kv::testing
