// Life cycles that share a pool group and some that have one of their own go through every level
// and come back byte for byte, and each is counted for itself.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <optional>

#include "helicore/kv/introspection.h"
#include "kv/fake_device.h"
#include "kv/fake_engine.h"

namespace helicore::kv::testing {
namespace {

using ::testing::IsEmpty;

constexpr int32_t kTokensPerBlock = 4;

// Groups of layers 0 and 1: one pool group. Layer 2: another. Layer 3 has two buffers: a third.
KVCacheManagerConfig grouped_config(const std::vector<int64_t>& blocks) {
  KVCacheManagerConfig config;
  config.tokens_per_block = kTokensPerBlock;
  config.layers = {AttentionLayerConfig{0, {{"k", 64}}}, AttentionLayerConfig{1, {{"k", 64}}, 32},
                   AttentionLayerConfig{2, {{"k", 48}}, 40},
                   AttentionLayerConfig{3, {{"k", 32}, {"v", 80}}, 48}};
  for (int64_t count : blocks) config.cache_tiers.push_back(HostCacheTierConfig{count * 288});
  config.initial_pool_ratio = std::vector<double>{64.0 / 288, 64.0 / 288, 48.0 / 288, 112.0 / 288};
  config.max_util_for_resume = 1.0;
  return config;
}

class ColdGroups : public ::testing::Test {
 protected:
  ColdGroups() {
    auto device = std::make_unique<FakeDevice>(
        FakeOptions{.type = DeviceType::kCpu, .automatic = true, .any_order = true});
    device->set_grain(16);
    device_ = device.get();
    manager_.emplace(grouped_config({8, 5, 40}), std::move(device));
  }
  // Every byte of every page of the sequence: a byte that follows from its place and `salt`.
  template <typename Visitor>
  void for_each_byte(const KVCache& cache, int salt, const Visitor& visit) {
    for (const LayerConfig& layer : manager_->init_config().layers) {
      for (const BufferConfig& buffer : buffers_of(layer)) {
        const int32_t id = layer_id_of(layer);
        const BufferAttr& attr = manager_->buffer_attr(id, buffer.role);
        auto* base = reinterpret_cast<std::byte*>(manager_->mem_pool_base_address(id, buffer.role));
        const auto table = cache.base_page_indices(attr.life_cycle);
        for (size_t b = 0; b < table.size(); ++b) {
          if (table[b] == kBadPageIndex) continue;
          for (int64_t i = 0; i < buffer.size; ++i) {
            const uint64_t value = mix(mix(uint64_t(salt), b), uint64_t(id * 1000 + i));
            visit(base[table[b] * attr.slot_bytes() + i],
                  static_cast<std::byte>(value + buffer.role[0]));
          }
        }
      }
    }
  }
  std::unique_ptr<KVCache> start(int salt) {
    auto cache = manager_->create_kv_cache();
    EXPECT_TRUE(cache->resume());
    EXPECT_TRUE(cache->resize(8 * kTokensPerBlock));
    for_each_byte(*cache, salt, [](std::byte& at, std::byte value) { at = value; });
    return cache;
  }
  int64_t num_wrong(const KVCache& cache, int salt) {
    int64_t count = 0;
    for_each_byte(cache, salt, [&](std::byte at, std::byte value) { count += at != value; });
    return count;
  }
  MigrationCounters counters(int level, int32_t layer) {
    return manager_->migration_stats()
        .levels[static_cast<size_t>(level)][manager_->layer_group_id(layer)];
  }

  // What came to the coldest level and did not leave it is there, for each layer.
  void expect_counted() {
    const ManagerState& state = Introspection::state(*manager_);
    std::map<int32_t, int64_t> coldest;
    for (size_t i = 0; i < state.store.pages().num_records(); ++i) {
      const PageRecord& page = state.store.page(PageId(static_cast<uint32_t>(i)));
      if (page.in_use && page.level == 2) ++coldest[page.life_cycle];
    }
    for (int32_t layer : {0, 1, 2, 3}) {
      const MigrationCounters counts = counters(2, layer);
      EXPECT_EQ(coldest[manager_->layer_group_id(layer).value()],
                counts.offloaded_pages - counts.onboarded_pages)
          << "layer " << layer;
    }
  }

  FakeDevice* device_ = nullptr;
  std::optional<KVCacheManager> manager_;
};

TEST_F(ColdGroups, merged_and_split_ones_come_back_from_every_level_byte_for_byte) {
  ASSERT_EQ(manager_->pool_group_of(manager_->layer_group_id(0)),
            manager_->pool_group_of(manager_->layer_group_id(1)));
  ASSERT_NE(manager_->pool_group_of(manager_->layer_group_id(0)),
            manager_->pool_group_of(manager_->layer_group_id(2)));
  ASSERT_NE(manager_->pool_group_of(manager_->layer_group_id(2)),
            manager_->pool_group_of(manager_->layer_group_id(3)));
  std::vector<std::unique_ptr<KVCache>> caches;
  for (int salt = 1; salt <= 3; ++salt) {
    caches.push_back(start(salt));
    EXPECT_EQ(num_wrong(*caches.back(), salt), 0);
    caches.back()->suspend();
  }
  for (int32_t layer : {0, 1, 2, 3}) {
    EXPECT_GE(counters(1, layer).offloaded_pages, 4) << "layer " << layer;
    EXPECT_EQ(counters(1, layer).onboarded_pages + counters(2, layer).onboarded_pages, 0);
  }
  expect_counted();
  for (int salt : {1, 3, 2, 1}) {
    KVCache& cache = *caches[static_cast<size_t>(salt) - 1];
    ASSERT_TRUE(cache.resume()) << describe(*cache.last_failure());
    EXPECT_EQ(num_wrong(cache, salt), 0) << "sequence " << salt;
    EXPECT_EQ(num_wrong(cache, salt + 1) > 0, true) << "another sequence's bytes are others";
    cache.suspend();
  }
  for (int32_t layer : {0, 1, 2, 3}) {
    EXPECT_GT(counters(2, layer).onboarded_pages, 0) << "layer " << layer;
    EXPECT_EQ(counters(0, layer).offloaded_pages, 0) << "nothing comes from above the hot level";
  }
  expect_counted();
  EXPECT_THAT(device_->violations(), IsEmpty());
  Introspection::check(*manager_);
}

}  // namespace
}  // namespace helicore::kv::testing
