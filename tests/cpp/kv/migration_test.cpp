// Several levels: pages move down when room is needed and come back with their bytes.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>

#include "helicore/kv/introspection.h"
#include "helicore/kv/kv_cache_manager.h"
#include "kv/fake_device.h"
#include "kv/kv_configs.h"
#include "kv/temp_dir.h"

namespace helicore::kv::testing {
namespace {

// `blocks` per level of one life cycle, 4 tokens and 4096 bytes each.
KVCacheManagerConfig tiers_config(std::vector<int32_t> blocks, const std::string& disk = "") {
  KVCacheManagerConfig config;
  config.tokens_per_block = 4;
  config.layers = {AttentionLayerConfig{0, {{"k", 4096}}}};
  for (size_t i = 0; i < blocks.size(); ++i) {
    const int64_t bytes = int64_t{4096} * blocks[i];
    if (i > 0 && i + 1 == blocks.size() && !disk.empty()) {
      config.cache_tiers.push_back(DiskCacheTierConfig{bytes, disk});
    } else {
      config.cache_tiers.push_back(HostCacheTierConfig{bytes});
    }
  }
  config.max_util_for_resume = 1.0;
  return config;
}

void fill(KVCacheManager& manager, KVCache& cache, int value) {
  auto* base = reinterpret_cast<std::byte*>(manager.mem_pool_base_address(0, "k"));
  for (int32_t slot : cache.base_page_indices(LifeCycleId(0))) {
    std::memset(base + slot * int64_t{4096}, value++, 4096);
  }
}

void expect_filled(KVCacheManager& manager, KVCache& cache, int value) {
  auto* base = reinterpret_cast<std::byte*>(manager.mem_pool_base_address(0, "k"));
  for (int32_t slot : cache.base_page_indices(LifeCycleId(0))) {
    ASSERT_GE(slot, 0);
    for (int64_t i : {0, 2048, 4095}) {
      ASSERT_EQ(base[slot * int64_t{4096} + i], std::byte(value)) << "slot " << slot;
    }
    ++value;
  }
}

std::unique_ptr<KVCache> started(KVCacheManager& manager, int32_t tokens, int value) {
  auto cache = manager.create_kv_cache();
  EXPECT_TRUE(cache->resume());
  EXPECT_TRUE(cache->resize(tokens)) << describe(cache->last_failure().value_or(NoRoom{}));
  fill(manager, *cache, value);
  return cache;
}

TEST(Migration, a_suspended_cache_gives_its_pages_and_gets_them_back) {
  TempDir dir;
  KVCacheManager manager(tiers_config({4, 3, 514}, dir.path().string()));
  auto a = started(manager, 16, 1);
  a->suspend();
  auto b = started(manager, 16, 50);
  EXPECT_EQ(manager.storage_statistics(1)[0].total, 3);
  EXPECT_EQ(manager.migration_stats().levels[1][LifeCycleId(0)].offloaded_pages +
                manager.migration_stats().levels[2][LifeCycleId(0)].offloaded_pages,
            4)
      << "two to the host level, which keeps one slot for passing, two past it to the disk";
  EXPECT_FALSE(a->resume()) << "b is active and has every page";
  EXPECT_EQ(a->last_failure()->level, 0);
  b->suspend();
  ASSERT_TRUE(a->resume());
  expect_filled(manager, *a, 1);
  a->suspend();
  ASSERT_TRUE(b->resume());
  expect_filled(manager, *b, 50);
  Introspection::check(manager);
}

TEST(Migration, two_caches_change_places_when_every_level_is_full) {
  KVCacheManager manager(tiers_config({4, 5}));
  auto a = started(manager, 16, 1);
  a->suspend();
  auto b = started(manager, 16, 50);
  for (int round = 0; round < 3; ++round) {
    b->suspend();
    ASSERT_TRUE(a->resume()) << describe(*a->last_failure());
    expect_filled(manager, *a, 1);
    a->suspend();
    ASSERT_TRUE(b->resume());
    expect_filled(manager, *b, 50);
  }
  EXPECT_EQ(manager.storage_statistics(1)[0].free, 1);
}

TEST(Migration, a_clean_copy_is_not_written_again) {
  KVCacheManager manager(tiers_config({4, 17}));
  std::vector<TokenId> tokens(16);
  for (int i = 0; i < 16; ++i) tokens[static_cast<size_t>(i)] = i;
  auto a = started(manager, 16, 1);
  a->commit(tokens);
  a->suspend();
  auto b = started(manager, 16, 50);  // pushes a down
  b->close();
  ASSERT_TRUE(a->resume());  // copies stay below
  expect_filled(manager, *a, 1);
  a->suspend();
  auto c = started(manager, 16, 90);
  const auto below = manager.migration_stats().levels[1][LifeCycleId(0)];
  EXPECT_EQ(below.unwritten_pages, 4);
  EXPECT_EQ(below.offloaded_bytes, 4 * 4096) << "the second time nothing was written";
  c->close();
  ASSERT_TRUE(a->resume());
  expect_filled(manager, *a, 1);
}

TEST(Migration, reused_tokens_are_counted_by_the_level_of_their_coldest_page) {
  KVCacheManager manager(tiers_config({4, 17}));
  std::vector<TokenId> tokens(16);
  for (int i = 0; i < 16; ++i) tokens[static_cast<size_t>(i)] = i;
  auto a = started(manager, 16, 1);
  a->commit(tokens);
  a->close();
  auto b = started(manager, 8, 50);  // two pages, the last of the prefix, go down
  auto c = manager.create_kv_cache({.input_tokens = tokens});
  EXPECT_EQ(c->num_committed_tokens(), 16);
  EXPECT_EQ(c->cached_tokens_by_level(), (std::vector<int32_t>{8, 8}));
}

TEST(Migration, a_failed_write_loses_the_page_and_says_so) {
  auto owned = std::make_unique<FakeDevice>(FakeOptions{.type = DeviceType::kCpu});
  FakeDevice& device = *owned;
  KVCacheManager manager(tiers_config({4, 17}), std::move(owned));
  auto a = started(manager, 16, 1);
  a->suspend();
  device.inject(FakeFault::kFailedTask, 1);
  auto b = started(manager, 4, 50);
  device.run_all();
  b->close();
  EXPECT_FALSE(a->resume());
  ASSERT_TRUE(a->last_failure());
  EXPECT_TRUE(a->last_failure()->data_lost);
  EXPECT_TRUE(a->is_lost());
  a->close();
  Introspection::check(manager);
}

}  // namespace
}  // namespace helicore::kv::testing
