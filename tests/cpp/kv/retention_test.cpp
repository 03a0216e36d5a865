#include "helicore/kv/retention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "helicore/kv/introspection.h"
#include "helicore/kv/kv_cache_manager.h"
#include "kv/kv_configs.h"

namespace helicore::kv::testing {
namespace {

using ::testing::HasSubstr;

void commit_with(KVCacheManager& manager, const std::vector<TokenId>& tokens,
                 std::span<const RetentionRange> retention) {
  auto cache = manager.create_kv_cache({.retention = retention});
  ASSERT_TRUE(cache->resume());
  ASSERT_TRUE(cache->resize(static_cast<int64_t>(tokens.size())));
  cache->commit(tokens);
}

TEST(Retention, what_comes_before_a_range_is_worth_as_much) {
  const std::vector<RetentionRange> ranges{{8, 16, 80, 1000}, {16, 20, 50, 5000}};
  const Retention retention(ranges, 35);
  EXPECT_EQ(retention.of_block(0).priority, 80);
  EXPECT_EQ(retention.of_block(0).duration_ms, 5000) << "the later range needs it for longer";
  EXPECT_EQ(retention.of_block(12).priority, 80);
  EXPECT_EQ(retention.of_block(16).priority, 50);
  EXPECT_EQ(retention.of_block(20).priority, 35);
  EXPECT_EQ(retention.of_block(20).duration_ms, 0);
}

TEST(Retention, a_range_without_an_end_or_a_time_holds_for_everything_and_for_ever) {
  const std::vector<RetentionRange> ranges{{0, std::nullopt, 60, std::nullopt}, {0, 4, 90, 10}};
  const Retention retention(ranges, 35);
  EXPECT_EQ(retention.of_block(0).priority, 90);
  EXPECT_EQ(retention.of_block(0).duration_ms, 0);
  EXPECT_EQ(retention.of_block(1 << 20).priority, 60);
}

TEST(Retention, bad_ranges_are_refused_by_name) {
  const auto message = [](RetentionRange range) -> std::string {
    try {
      range.validate();
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_THAT(message({-1, 4, 50, 1}), HasSubstr("begin must be >= 0, got -1"));
  EXPECT_THAT(message({4, 4, 50, 1}), HasSubstr("end must be > begin 4"));
  EXPECT_THAT(message({0, 4, 101, 1}), HasSubstr("priority must be in [0, 100], got 101"));
  EXPECT_THAT(message({0, 4, 50, 0}), HasSubstr("duration_ms must be > 0 or None, got 0"));
}

TEST(Retention, a_kept_prefix_outlives_newer_ones_until_its_time_is_over) {
  KVCacheManager manager(attention_config(4, 8));
  int64_t now = 0;
  Introspection::state(manager).now_ns = [&] { return now; };
  const std::vector<RetentionRange> kept{{0, 8, 90, 1000}};
  commit_with(manager, iota_tokens(8, 0), kept);
  commit_with(manager, iota_tokens(8, 100), {});
  commit_with(manager, iota_tokens(24, 200), {});  // six of eight blocks
  EXPECT_EQ(manager.probe_reuse(iota_tokens(8, 0)), 8) << "older, but kept";
  EXPECT_EQ(manager.probe_reuse(iota_tokens(8, 100)), 0);
  for (int i = 3; i < 6; ++i) commit_with(manager, iota_tokens(24, 100 * i), {});
  EXPECT_EQ(manager.probe_reuse(iota_tokens(8, 0)), 8);
  now = 1001 * 1'000'000;  // from now on it is as any other block that was just used
  for (int i = 6; i < 9; ++i) commit_with(manager, iota_tokens(24, 100 * i), {});
  EXPECT_EQ(manager.probe_reuse(iota_tokens(8, 0)), 0);
  Introspection::check(manager);
}

// Else the tail would outlive what it needs, and be of no use.
TEST(Retention, a_block_committed_late_raises_the_blocks_before_it_again) {
  KVCacheManager manager(attention_config(4, 8));
  int64_t now = 0;
  Introspection::state(manager).now_ns = [&] { return now; };
  const std::vector<RetentionRange> kept{{0, std::nullopt, 80, 10}};
  auto cache = manager.create_kv_cache({.retention = kept});
  ASSERT_TRUE(cache->resume());
  ASSERT_TRUE(cache->resize(8));
  cache->commit(iota_tokens(4, 0));
  now = 11'000'000;
  ASSERT_TRUE(cache->resize(8));  // the first block is as any other now
  cache->commit(iota_tokens(4, 4));
  Introspection::check(manager);
  const ManagerState& state = Introspection::state(manager);
  for (const PageHandle& page : Introspection::pages(*cache)) {
    EXPECT_EQ(state.store.page(page.id).priority, 80);
  }
  now = 22'000'000;
  ASSERT_TRUE(cache->resize(9));
  for (int b = 0; b < 2; ++b) {
    const PageHandle page = Introspection::pages(*cache)[static_cast<size_t>(b)];
    EXPECT_EQ(state.store.page(page.id).priority, kPriorityDefault);
  }
}

TEST(Retention, a_pinned_prefix_stays_whatever_comes_and_goes_with_its_pin) {
  KVCacheManager manager(attention_config(4, 8));
  commit_with(manager, iota_tokens(8, 0), {});
  auto pin = manager.pin(iota_tokens(8, 0));
  EXPECT_EQ(pin->num_committed_tokens(), 8);
  for (int i = 1; i < 9; ++i) commit_with(manager, iota_tokens(24, 1000 * i), {});
  EXPECT_EQ(manager.probe_reuse(iota_tokens(8, 0)), 8);
  pin->close();
  auto& store = Introspection::state(manager).store;
  EXPECT_EQ(store.counts(PoolGroupId(0)).unavailable(), 0);
}

TEST(LifeCycleStats, pages_that_leave_the_window_by_their_own_commit_are_counted) {
  KVCacheManagerConfig config = attention_config(4, 64);
  config.layers = {AttentionLayerConfig{0, {{"k", 256}}}, AttentionLayerConfig{1, {{"k", 256}}, 8}};
  KVCacheManager manager(config);
  auto cache = manager.create_kv_cache();
  ASSERT_TRUE(cache->resume());
  ASSERT_TRUE(cache->resize(24));
  cache->commit(iota_tokens(24));
  EXPECT_EQ(manager.life_cycle_stats()[0].released_pages, 0u);
  EXPECT_EQ(manager.life_cycle_stats()[1].released_pages, 4u)
      << "7 tokens before position 24 lie in two of six blocks";
}

}  // namespace
}  // namespace helicore::kv::testing
