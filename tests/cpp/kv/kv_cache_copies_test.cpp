// Pages that are copied because somebody writes on: whoever only reads does not wait for it.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <thread>

#include "helicore/kv/cpu_device.h"
#include "helicore/kv/kv_cache_manager.h"
#include "kv/fake_device.h"
#include "kv/gated_device.h"
#include "kv/kv_configs.h"

namespace helicore::kv::testing {
namespace {

constexpr int64_t kPage = 2 * CpuDevice::kInlineBytes;  // too much for the caller's thread

KVCacheManagerConfig wide_config(bool with_state) {
  KVCacheManagerConfig config = attention_config(4, 8, 1, kPage / 4);
  if (with_state) {
    config.layers.push_back(SsmLayerConfig{.layer_id = 9, .buffers = {{"s", kPage}}});
    config.cache_tiers = {HostCacheTierConfig{16 * kPage}};
    config.commit_min_snapshot = true;
  }
  return config;
}

// Runs `calls`, one thread each, until all stand at the gate; then readers must come through.
void expect_readers_pass(KVCacheManager& manager, Gate& gate,
                         const std::vector<std::function<void()>>& calls) {
  gate.shut();
  std::vector<std::thread> threads;
  for (const auto& call : calls) {
    threads.emplace_back(call);
    gate.await(static_cast<int>(threads.size()));
  }
  auto readers = std::async(std::launch::async, [&] {
    (void)manager.probe_reuse(iota_tokens(6));
    (void)manager.stats();
    (void)manager.storage_statistics();
    (void)manager.num_available_blocks();
  });
  // As long as it takes: only a reader that hangs gets to the end of this.
  const bool passed = readers.wait_for(std::chrono::seconds(30)) == std::future_status::ready;
  gate.open();
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(passed) << "a reader waits for a copy";
}

class CopiesTest : public ::testing::Test {
 protected:
  void make(bool with_state) {
    auto device =
        std::make_unique<GatedDevice>(std::make_unique<CpuDevice>(CacheDeviceConfig{}), gate_);
    manager_ = std::make_unique<KVCacheManager>(wide_config(with_state), std::move(device));
  }
  std::unique_ptr<KVCache> started(int32_t num_tokens, int value) {
    auto cache = manager_->create_kv_cache();
    EXPECT_TRUE(cache->resume() && cache->resize(num_tokens));
    for (int32_t slot : cache->base_page_indices(LifeCycleId(0))) {
      std::memset(page(0, "latent", slot), value, kPage);
    }
    return cache;
  }
  std::byte* page(int32_t layer, const char* role, int32_t slot) {
    return reinterpret_cast<std::byte*>(manager_->mem_pool_base_address(layer, role)) +
           slot * kPage;
  }
  void expect_last_block(const KVCache& cache, int value) {
    const std::byte* at = page(0, "latent", cache.base_page_indices(LifeCycleId(0)).back());
    EXPECT_EQ(at[0], std::byte(value));
    EXPECT_EQ(at[kPage - 1], std::byte(value));
  }

  Gate gate_;
  std::unique_ptr<KVCacheManager> manager_;
};

TEST_F(CopiesTest, readers_pass_while_a_partly_matched_block_is_copied) {
  make(false);
  auto first = started(6, 7);
  first->commit(iota_tokens(6), true);
  first->close();
  const auto prompt = iota_tokens(6);
  auto second = manager_->create_kv_cache({.input_tokens = prompt});
  ASSERT_EQ(second->num_committed_tokens(), 6);
  bool resumed = false;
  expect_readers_pass(*manager_, gate_, {[&] { resumed = second->resume(); }});
  ASSERT_TRUE(resumed);
  expect_last_block(*second, 7);
}

TEST_F(CopiesTest, readers_pass_while_a_fork_copies_what_it_writes) {
  make(false);
  auto parent = started(6, 5);
  ASSERT_TRUE(parent->resize(6, 6));
  auto child = parent->fork();
  bool resumed = false;
  expect_readers_pass(*manager_, gate_, {[&] { resumed = child->resume(); }});
  ASSERT_TRUE(resumed);
  expect_last_block(*child, 5);
  EXPECT_NE(child->base_page_indices(LifeCycleId(0)).back(),
            parent->base_page_indices(LifeCycleId(0)).back());
}

TEST_F(CopiesTest, whoever_writes_in_place_waits_for_a_fork_that_copies_from_there) {
  make(false);
  auto parent = started(6, 5);
  ASSERT_TRUE(parent->resize(6, 6));
  auto child = parent->fork();
  gate_.shut();
  std::thread copying([&] { EXPECT_TRUE(child->resume()); });
  gate_.await(1);
  std::thread writing([&] {
    EXPECT_TRUE(parent->resize(7));
    gate_.leave();
  });
  EXPECT_EQ(gate_.await(2), 2) << "the last holder goes on while its page is read";
  gate_.open();
  copying.join();
  writing.join();
}

TEST_F(CopiesTest, readers_pass_while_a_state_and_a_tail_are_kept_for_others) {
  make(true);
  auto cache = started(6, 3);
  std::memset(page(9, "s", cache->ssm_base_index()), 9, kPage);
  expect_readers_pass(*manager_, gate_, {[&] { cache->commit(iota_tokens(6)); }});
  // The state may be written again once the commit is done.
  std::memset(page(9, "s", cache->ssm_base_index()), 1, kPage);
  std::memset(page(0, "latent", cache->base_page_indices(LifeCycleId(0)).back()), 1, kPage);
  const auto prompt = iota_tokens(6);
  auto next = manager_->create_kv_cache({.input_tokens = prompt});
  ASSERT_EQ(next->num_committed_tokens(), 6);
  ASSERT_TRUE(next->resume());
  expect_last_block(*next, 3);
  EXPECT_EQ(page(9, "s", next->ssm_base_index())[kPage - 1], std::byte(9));
}

TEST(Copies, readers_pass_while_the_source_of_a_copy_is_on_its_way_up) {
  Gate gate;
  auto owned =
      std::make_unique<FakeDevice>(FakeOptions{.type = DeviceType::kCpu, .stuck_throws = false});
  owned->set_grain(16);
  KVCacheManagerConfig config = attention_config(4, 4, 1, 16);
  config.cache_tiers.push_back(HostCacheTierConfig{64 * 8});
  KVCacheManager manager(config, std::make_unique<GatedDevice>(std::move(owned), gate));
  auto first = manager.create_kv_cache();
  ASSERT_TRUE(first->resume() && first->resize(8));
  first->commit(iota_tokens(8));
  first->close();
  auto filler = manager.create_kv_cache();
  ASSERT_TRUE(filler->resume() && filler->resize(16));  // sends both blocks down
  filler->close();
  const auto prompt = iota_tokens(8);
  auto whole = manager.create_kv_cache({.input_tokens = prompt});
  auto part = manager.create_kv_cache({.input_tokens = std::span(prompt).first(6)});
  ASSERT_EQ(whole->cached_tokens_by_level(), (std::vector<int32_t>{0, 8}));
  ASSERT_EQ(part->num_committed_tokens(), 6);
  bool resumed[2] = {false, false};
  expect_readers_pass(
      manager, gate, {[&] { resumed[0] = whole->resume(); }, [&] { resumed[1] = part->resume(); }});
  EXPECT_TRUE(resumed[0] && resumed[1]);
}

}  // namespace
}  // namespace helicore::kv::testing
