// Recurrent states whose snapshot can't be read back: the loss comes to light after the match was
// given out.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "helicore/kv/cpu_device.h"
#include "helicore/kv/introspection.h"
#include "helicore/kv/kv_cache_manager.h"
#include "kv/flaky_io.h"
#include "kv/kv_configs.h"
#include "kv/level_rig.h"
#include "kv/temp_dir.h"

namespace helicore::kv::testing {
namespace {

constexpr int64_t kState = 8192;
constexpr int64_t kBlock = 4096;

// Blocks of 4 tokens and a state, host memory over a file whose reads of states may fail.
class StateOnDisk : public ::testing::Test {
 protected:
  StateOnDisk() {
    KVCacheManagerConfig config;
    config.tokens_per_block = 4;
    config.layers = {AttentionLayerConfig{0, {{"k", kBlock}}}, SsmLayerConfig{9, {{"s", kState}}}};
    config.cache_tiers = {HostCacheTierConfig{4 * (kBlock + kState)},
                          DiskCacheTierConfig{int64_t{8} << 20, dir_.path().string()}};
    config.commit_min_snapshot = true;
    config.max_util_for_resume = 1.0;
    const auto is_state = [this](const IoRequest& request) {
      int64_t bytes = 0;
      for (const auto& buffer : request.buffers) bytes += static_cast<int64_t>(buffer.num_bytes);
      return fails_ && request.op == IoOp::kRead && bytes == kState;
    };
    auto inner = make_async_io(
        {.backend = IoBackend::kThreads, .queue_capacity = 4 * FileCopies::kRequestsPerLane});
    auto io = std::make_unique<FlakyIo>(std::move(inner),
                                        FlakyPlan{.fail_rate = 1.0, .eligible = is_state});
    manager_ = std::make_unique<KVCacheManager>(
        config, std::make_unique<CpuDevice>(CacheDeviceConfig{}, std::move(io)));
    put();
  }
  std::byte* state(const KVCache& cache) {
    return reinterpret_cast<std::byte*>(manager_->mem_pool_base_address(9, "s")) +
           int64_t{cache.ssm_base_index()} * kState;
  }
  // 8 tokens and the state behind them, on the file.
  void put() {
    auto first = manager_->create_kv_cache();
    ASSERT_TRUE(first->resume() && first->resize(8));
    std::memset(state(*first), 7, kState);
    first->commit(prompt_);
    first->close();
    std::vector<std::unique_ptr<KVCache>> fillers;
    while (true) {
      fillers.push_back(manager_->create_kv_cache());
      if (!fillers.back()->resume() || !fillers.back()->resize(4)) break;
    }
  }
  int level_of_state(const KVCache& cache) {
    return Introspection::state(*manager_).store.page(Introspection::state_page(cache).id).level;
  }
  void expect_nothing_leaked() {
    manager_->clear_reusable_blocks();
    Introspection::check(*manager_);
    EXPECT_EQ(Introspection::state(*manager_).store.pages().num_in_use(), 0u);
    for (int level : {0, 1}) {
      for (const PoolGroupStatistics& group : manager_->storage_statistics(level)) {
        EXPECT_EQ(group.free, group.total) << "level " << level;
      }
    }
  }

  TempDir dir_;
  std::atomic<bool> fails_{false};
  const std::vector<TokenId> prompt_ = iota_tokens(8);
  std::unique_ptr<KVCacheManager> manager_;
};

TEST_F(StateOnDisk, a_state_comes_back_when_nothing_fails) {
  auto cache = manager_->create_kv_cache({.input_tokens = prompt_});
  ASSERT_EQ(cache->num_committed_tokens(), 8);
  ASSERT_EQ(level_of_state(*cache), 1) << "on the file";
  ASSERT_TRUE(cache->resume());
  EXPECT_EQ(state(*cache)[kState - 1], std::byte(7));
  cache->close();
  expect_nothing_leaked();
}

TEST_F(StateOnDisk, a_state_that_cannot_be_read_is_lost_and_found_by_nobody_else) {
  fails_ = true;
  auto waiting = manager_->create_kv_cache({.input_tokens = prompt_});
  auto cache = manager_->create_kv_cache({.input_tokens = prompt_});
  ASSERT_EQ(cache->num_committed_tokens(), 8);
  EXPECT_FALSE(cache->resume());
  ASSERT_TRUE(cache->last_failure());
  EXPECT_TRUE(cache->last_failure()->data_lost);
  EXPECT_TRUE(cache->is_lost());
  EXPECT_EQ(manager_->probe_reuse(prompt_), 0) << "what can't be read is not offered again";
  EXPECT_TRUE(waiting->is_lost()) << "it holds the same snapshot";
  EXPECT_FALSE(waiting->resume());
  cache->close();
  waiting->close();
  fails_ = false;
  auto fresh = manager_->create_kv_cache({.input_tokens = prompt_});
  EXPECT_EQ(fresh->num_committed_tokens(), 0);
  EXPECT_TRUE(fresh->resume() && fresh->resize(8));
  fresh->close();
  expect_nothing_leaked();
}

TEST_F(StateOnDisk, a_prefetched_state_that_cannot_be_read_is_lost) {
  fails_ = true;
  auto cache = manager_->create_kv_cache({.input_tokens = prompt_});
  ASSERT_EQ(cache->num_committed_tokens(), 8);
  PrefetchTicket ticket = cache->prefetch();
  while (!ticket.is_done()) std::this_thread::yield();
  EXPECT_FALSE(cache->resume());
  EXPECT_TRUE(cache->last_failure()->data_lost);
  EXPECT_EQ(manager_->probe_reuse(prompt_), 0);
  cache->close();
  expect_nothing_leaked();
}

// The load fails when work that used it has been started: a GPU does not wait.
TEST(StateOnGpu, a_state_whose_load_fails_late_ends_the_sequence_and_what_it_left) {
  LevelRig rig({.blocks = {4, 9}, .with_state = true, .device = {.type = DeviceType::kCuda}});
  const auto tokens = LevelRig::tokens_from(0, 12);
  auto first = rig.started(8, 1);
  first->commit(std::span(tokens).first(8));
  first->close();
  {
    std::vector<std::unique_ptr<KVCache>> fillers;
    do {
      fillers.push_back(rig->create_kv_cache());
    } while (fillers.back()->resume() && fillers.back()->resize(4));
    rig.device().run_all();
  }
  rig.device().run_all();
  auto cache = rig->create_kv_cache({.input_tokens = std::span(tokens).first(8)});
  ASSERT_EQ(cache->num_committed_tokens(), 8);
  ASSERT_GE(Introspection::state(*rig).store.page(Introspection::state_page(*cache).id).level, 1);
  rig.device().run_all();
  ASSERT_TRUE(cache->resume()) << LevelRig::why(*cache);
  ASSERT_TRUE(cache->resize(12));
  cache->commit(std::span(tokens).subspan(8));
  // Two blocks come up in front of the state.
  rig.device().inject(FakeFault::kFailedTask, 1, 2);
  rig.device().run_all();
  ASSERT_EQ(rig.device().counters().num_failed, 1);
  EXPECT_FALSE(cache->resize(16));
  EXPECT_TRUE(cache->last_failure()->data_lost);
  EXPECT_THROW(cache->commit({}), DataLost);
  EXPECT_EQ(rig->probe_reuse(tokens), 0) << "nothing that was made of it is served";
  cache->close();
  rig.device().run_all();
  rig->clear_reusable_blocks();
  Introspection::check(*rig);
  EXPECT_EQ(Introspection::state(*rig).store.pages().num_in_use(), 0u);
}

}  // namespace
}  // namespace helicore::kv::testing
