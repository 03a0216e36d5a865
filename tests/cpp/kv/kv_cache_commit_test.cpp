// What is kept of what was committed, in whatever steps: the least for one length, and the same
// blocks for every interval.
#include <gtest/gtest.h>

#include <chrono>
#include <iostream>

#include "helicore/kv/introspection.h"
#include "helicore/kv/kv_cache_manager.h"
#include "kv/kv_configs.h"
#include "kv/page_tables.h"

namespace helicore::kv::testing {
namespace {

KVCacheManagerConfig window_config(bool min_snapshot) {
  KVCacheManagerConfig config = attention_config(4, 64);
  config.layers = {AttentionLayerConfig{0, {{"k", 256}}, 8}};
  config.commit_min_snapshot = min_snapshot;
  return config;
}

void commit_at_once(KVCacheManager& manager, const std::vector<TokenId>& tokens) {
  auto cache = manager.create_kv_cache();
  ASSERT_TRUE(cache->resume());
  ASSERT_TRUE(cache->resize(static_cast<int64_t>(tokens.size())));
  cache->commit(tokens, true);
}

TEST(MinSnapshot, keeps_the_pages_of_the_window_and_serves_no_shorter_prefix) {
  for (bool min_snapshot : {true, false}) {
    KVCacheManager manager(window_config(min_snapshot));
    const auto tokens = iota_tokens(24);
    commit_at_once(manager, tokens);
    EXPECT_EQ(manager.probe_reuse(tokens), 24);
    const auto shown = manager.storage_statistics()[0];
    EXPECT_EQ(shown.unavailable(), 0) << "all of it may be dropped";
    // 7 tokens before position 24 lie in two of six blocks.
    EXPECT_EQ(shown.evictable, min_snapshot ? 2 : 6);
    EXPECT_EQ(manager.probe_reuse(iota_tokens(20)), min_snapshot ? 0 : 20);
    EXPECT_EQ(manager.probe_reuse(iota_tokens(23)), 23) << "its window lies in the same two";
    Introspection::check(manager);
  }
}

TEST(MinSnapshot, each_commit_leaves_a_window_of_its_own) {
  KVCacheManager manager(window_config(true));
  const auto tokens = iota_tokens(40);
  auto cache = manager.create_kv_cache();
  ASSERT_TRUE(cache->resume());
  for (int32_t end : {12, 40}) {
    ASSERT_TRUE(cache->resize(end));
    const auto from = static_cast<size_t>(cache->num_committed_tokens());
    cache->commit(std::span(tokens).subspan(from, static_cast<size_t>(end) - from));
  }
  cache->close();
  EXPECT_EQ(manager.probe_reuse(tokens), 40);
  EXPECT_EQ(manager.probe_reuse(iota_tokens(36)), 12) << "the end of the first commit";
  EXPECT_EQ(manager.probe_reuse(iota_tokens(8)), 0);
}

constexpr int32_t kLength = 10'240;

// Commits kLength tokens `interval` at a time.
void commit_in_steps(KVCacheManager& manager, const std::vector<TokenId>& tokens,
                     int32_t interval) {
  auto cache = manager.create_kv_cache();
  ASSERT_TRUE(cache->resume());
  for (int32_t done = 0; done < kLength; done += interval) {
    const int32_t count = std::min(interval, kLength - done);
    ASSERT_TRUE(cache->resize(done + count));
    cache->commit(std::span(tokens).subspan(size_t(done), size_t(count)));
  }
}

TEST(CommitSteps, every_interval_leaves_the_same_blocks_under_the_same_keys) {
  const auto tokens = iota_tokens(kLength);
  for (int32_t interval = 1; interval <= 2048; interval *= 2) {
    KVCacheManager manager(attention_config(64, kLength / 64, 1, 16));
    commit_in_steps(manager, tokens, interval);
    EXPECT_EQ(manager.probe_reuse(tokens), kLength) << "interval " << interval;
    EXPECT_EQ(manager.stats().committed_blocks, uint64_t{kLength / 64});
    const auto keys = manager.chain_keys(tokens);
    std::vector<Digest> shown;
    for (const KVEvent& event : manager.snapshot_events()) {
      if (event.kind == EventKind::kStored) shown.push_back(event.key);
    }
    EXPECT_EQ(shown, keys) << "interval " << interval;
    EXPECT_EQ(slots_in_use(manager), 0);
  }
}

// Figures, by request: --gtest_also_run_disabled_tests --gtest_filter='*CommitSteps*'.
TEST(CommitSteps, DISABLED_time_of_every_interval) {
  const auto tokens = iota_tokens(kLength);
  for (int32_t interval = 1; interval <= 2048; interval *= 2) {
    double best = 1e9;
    for (int round = 0; round < 9; ++round) {
      KVCacheManager manager(attention_config(64, kLength / 64, 1, 16));
      const auto begin = std::chrono::steady_clock::now();
      commit_in_steps(manager, tokens, interval);
      const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
      best = std::min(best, time.count());
    }
    std::cout << "interval " << interval << ": " << best * 1e9 / kLength << " ns per token\n";
  }
}

}  // namespace
}  // namespace helicore::kv::testing
