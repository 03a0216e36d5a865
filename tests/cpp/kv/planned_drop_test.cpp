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
