// A manager over the device whose clock is moved by hand, small enough to count slots, and an
// oracle: every block of a sequence holds values that follow from the sequence and its place.
#pragma once

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "helicore/core/error.h"
#include "helicore/kv/introspection.h"
#include "helicore/kv/kv_cache_manager.h"
#include "kv/fake_device.h"
#include "kv/fake_engine.h"

namespace helicore::kv::testing {

inline constexpr int64_t kUnit = 4096;  // bytes: the grain of every tier, and a block of layer 0

// Layer 0: full attention, one unit per block of 4 tokens. Layer 1, with `window` > 0: a sliding
// window, half a unit per block.
inline KVCacheManagerConfig sizing_config(const std::vector<int64_t>& units, int32_t window = 0) {
  KVCacheManagerConfig config;
  config.tokens_per_block = 4;
  config.layers = {AttentionLayerConfig{0, {{"k", kUnit}}}};
  if (window > 0) {
    config.layers.push_back(AttentionLayerConfig{1, {{"k", kUnit / 2}}, window});
  }
  for (size_t i = 0; i < units.size(); ++i) {
    if (i == 2) {
      config.cache_tiers.push_back(DiskCacheTierConfig{kUnit * units[i], "."});
    } else {
      config.cache_tiers.push_back(HostCacheTierConfig{kUnit * units[i]});
    }
  }
  config.max_util_for_resume = 1.0;
  return config;
}

class SizingBench {
 public:
  explicit SizingBench(const KVCacheManagerConfig& config, FakeOptions options = {}) {
    options.type = DeviceType::kCpu;
    auto owned = std::make_unique<FakeDevice>(options);
    owned->set_grain(kUnit);
    device_ = owned.get();
    ledger_ = owned->ledger();
    manager_ = std::make_unique<KVCacheManager>(config, std::move(owned));
  }
  KVCacheManager& manager() { return *manager_; }
  FakeDevice& device() { return *device_; }
  const FakeLedger& ledger() const { return *ledger_; }
  LevelSizer& sizer() { return Introspection::state(*manager_).sizer; }

  // An active cache of `tokens` tokens that are those of `sequence`, the last one in flight.
  std::unique_ptr<KVCache> start(int32_t tokens, int sequence, std::optional<int64_t> id = {}) {
    auto cache = manager_->create_kv_cache({.id = id});
    if (!cache->resume() || !cache->resize(tokens, tokens - 1))
      throw std::runtime_error("no room to start");
    fill(*cache, sequence, 0);
    return cache;
  }
  // Tokens [0, count) of a sequence.
  static std::vector<TokenId> tokens(int sequence, int32_t count) {
    std::vector<TokenId> result;
    for (int32_t i = 0; i < count; ++i) result.push_back(sequence * 10'000 + i);
    return result;
  }
  // Writes the blocks from `from` on; the cache is active.
  void fill(const KVCache& cache, int sequence, int32_t from) {
    for_each_page(cache, [&](std::byte* page, int64_t bytes, int32_t layer, int32_t block) {
      if (block < from) return;
      const uint64_t value = value_of(sequence, layer, block);
      std::memcpy(page, &value, sizeof(value));
      std::memcpy(page + bytes - sizeof(value), &value, sizeof(value));
    });
  }
  // What is wrong with the pages of an active cache, or nothing.
  std::string wrong(const KVCache& cache, int sequence) {
    std::string found;
    for_each_page(cache, [&](const std::byte* page, int64_t bytes, int32_t layer, int32_t block) {
      const uint64_t value = value_of(sequence, layer, block);
      if (std::memcmp(page, &value, sizeof(value)) == 0 &&
          std::memcmp(page + bytes - sizeof(value), &value, sizeof(value)) == 0) {
        return;
      }
      found = detail::concat("cache ", cache.id(), " layer ", layer, " block ", block);
    });
    return found;
  }
  int64_t total(int level, int32_t layer = 0) const {
    const PoolGroupId group = manager_->pool_group_of(manager_->layer_group_id(layer));
    return manager_->storage_statistics(level)[static_cast<size_t>(group.value())].total;
  }

 private:
  static uint64_t value_of(int sequence, int32_t layer, int32_t block) {
    return mix(mix(static_cast<uint64_t>(sequence), static_cast<uint64_t>(layer)),
               static_cast<uint64_t>(block));
  }
  template <typename Visitor>
  void for_each_page(const KVCache& cache, const Visitor& visit) {
    for (const LayerConfig& config : manager_->init_config().layers) {
      if (std::holds_alternative<SsmLayerConfig>(config)) continue;
      const int32_t layer = layer_id_of(config);
      const BufferAttr& buffer = manager_->buffer_attr(layer, "k");
      auto* base = reinterpret_cast<std::byte*>(manager_->mem_pool_base_address(layer, "k"));
      const auto row = cache.base_page_indices(buffer.life_cycle);
      for (size_t block = 0; block < row.size(); ++block) {
        if (row[block] == kBadPageIndex) continue;
        visit(base + row[block] * buffer.slot_bytes(), buffer.expanded_size, layer,
              static_cast<int32_t>(block));
      }
    }
  }

  std::shared_ptr<const FakeLedger> ledger_;
  std::unique_ptr<KVCacheManager> manager_;
  FakeDevice* device_ = nullptr;
};

}  // namespace helicore::kv::testing
