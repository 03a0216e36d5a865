// What is kept of what was committed, in whatever steps: the least for one length, the same blocks
// for every interval, and what comes after a block that another sequence showed first.
#include <gtest/gtest.h>

#include <array>
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

// Two sequences whose steps are not done commit the same block, so that the second keeps a page of
// its own that nobody else sees. What it shows after that outlives the block that the first showed.
// `common`: blocks in front of it that both share.
class DuplicateTest : public ::testing::TestWithParam<int32_t> {
 protected:
  DuplicateTest() {
    if (common_ > 0) commit_at_once(manager_, iota_tokens(common_));
    first_ = start(0);
    second_ = start(1);
    first_->commit(block_);
    second_->commit(block_);
    EXPECT_EQ(manager_.stats().rebased_blocks, 0u) << "the page is not there yet";
    Introspection::check(manager_);
  }
  std::unique_ptr<KVCache> start(size_t number) {
    auto cache = manager_.create_kv_cache({.input_tokens = prompt_});
    EXPECT_EQ(cache->num_committed_tokens(), common_);
    streams_[number] = manager_.make_step_stream();
    EXPECT_TRUE(cache->resume(streams_[number]));
    EXPECT_TRUE(cache->resize(common_ + 12));
    (void)manager_.submit_step(streams_[number]);
    return cache;
  }
  void end_steps() {
    for (StreamHandle stream : streams_) manager_.complete_step(stream, 1);
  }
  // Another sequence takes every slot that is not in use.
  void evict_the_rest() {
    auto filler = manager_.create_kv_cache();
    ASSERT_TRUE(filler->resume());
    const auto slots = manager_.storage_statistics()[0];
    ASSERT_TRUE(filler->resize(4 * (slots.total - slots.unavailable())));
    Introspection::check(manager_);
  }
  void expect_second_goes_on(const std::vector<TokenId>& committed) {
    Introspection::check(manager_);
    EXPECT_EQ(second_->committed_tokens(), committed);
    second_->close();
    Introspection::check(manager_);
    EXPECT_EQ(slots_in_use(manager_), 0);
    manager_.clear_reusable_blocks();
    const auto slots = manager_.storage_statistics()[0];
    EXPECT_EQ(slots.free + slots.pending, slots.total);
  }

  const int32_t common_ = 4 * GetParam();
  const std::vector<TokenId> prompt_ = iota_tokens(common_);
  const std::vector<TokenId> block_ = iota_tokens(4, common_);
  KVCacheManager manager_{attention_config(4, 16)};
  std::array<StreamHandle, 2> streams_{};
  std::unique_ptr<KVCache> first_, second_;
};

TEST_P(DuplicateTest, a_block_after_it_outlives_the_one_above) {
  second_->commit(iota_tokens(4, common_ + 4));
  first_->close();
  Introspection::check(manager_);
  end_steps();
  EXPECT_EQ(manager_.probe_reuse(iota_tokens(common_ + 8)), common_ + 8);
  evict_the_rest();
  EXPECT_EQ(manager_.probe_reuse(iota_tokens(common_ + 8)), common_) << "what is above it is gone";
  ASSERT_TRUE(second_->resize(common_ + 16));
  second_->commit(iota_tokens(4, common_ + 8));
  expect_second_goes_on(iota_tokens(common_ + 12));
}

TEST_P(DuplicateTest, a_partial_block_after_it_outlives_the_one_above) {
  second_->commit(iota_tokens(2, common_ + 4), true);
  first_->close();
  Introspection::check(manager_);
  end_steps();
  evict_the_rest();
  expect_second_goes_on(iota_tokens(common_ + 6));
}

TEST_P(DuplicateTest, the_one_that_was_shown_first_goes_before_its_node) {
  first_->close();
  Introspection::check(manager_);
  end_steps();
  evict_the_rest();
  second_->commit(iota_tokens(4, common_ + 4));
  expect_second_goes_on(iota_tokens(common_ + 8));
}

TEST_P(DuplicateTest, a_fork_goes_on_after_it_too) {
  end_steps();
  auto fork = second_->fork();
  second_->close();
  second_ = std::move(fork);
  ASSERT_TRUE(second_->resume());
  ASSERT_TRUE(second_->resize(common_ + 8));
  second_->commit(iota_tokens(4, common_ + 4));
  first_->close();
  Introspection::check(manager_);
  evict_the_rest();
  expect_second_goes_on(iota_tokens(common_ + 8));
}

INSTANTIATE_TEST_SUITE_P(CommonBlocks, DuplicateTest, ::testing::Values(0, 1));

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
