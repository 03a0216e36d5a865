// A manager on a device whose clock is moved by hand, and an engine that writes a number into rows.
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "helicore/kv/introspection.h"
#include "helicore/kv/kv_cache_manager.h"
#include "kv/fake_device.h"

namespace helicore::kv::testing {

// Layers of 64-byte blocks, `blocks` of them per level.
struct RigSpec {
  std::vector<int32_t> blocks{};
  int32_t tokens_per_block = 4;
  std::optional<int32_t> window = std::nullopt;  // of a second layer, beside full attention
  bool with_state = false;
  FakeOptions device{.type = DeviceType::kCpu};
};

class LevelRig {
 public:
  explicit LevelRig(const RigSpec& spec) {
    auto owned = std::make_unique<FakeDevice>(spec.device);
    device_ = owned.get();
    device_->set_grain(16);
    manager_ = std::make_unique<KVCacheManager>(config_of(spec), std::move(owned));
    row_bytes_ = 64 / spec.tokens_per_block;
  }
  ~LevelRig() {
    device_->run_all();
    manager_.reset();
  }
  LevelRig(const LevelRig&) = delete;
  LevelRig& operator=(const LevelRig&) = delete;

  KVCacheManager& operator*() { return *manager_; }
  KVCacheManager* operator->() { return manager_.get(); }
  FakeDevice& device() { return *device_; }

  // A cache with `tokens` tokens of capacity whose rows all hold `value`.
  std::unique_ptr<KVCache> started(int32_t tokens, int value, StreamHandle stream = 0) {
    auto cache = manager_->create_kv_cache();
    EXPECT_TRUE(cache->resume(stream)) << why(*cache);
    EXPECT_TRUE(cache->resize(tokens)) << why(*cache);
    write(*cache, 0, tokens, value);
    return cache;
  }
  // The same, committed as first, first + 1, ... and closed.
  void put(int32_t tokens, int value, TokenId first, StreamHandle stream = 0) {
    auto cache = started(tokens, value, stream);
    cache->commit(tokens_from(first, tokens));
    cache->close();
  }
  static std::vector<TokenId> tokens_from(TokenId first, int32_t count) {
    std::vector<TokenId> tokens;
    for (int32_t i = 0; i < count; ++i) tokens.push_back(first + i);
    return tokens;
  }
  static std::string why(const KVCache& cache) {
    return describe(cache.last_failure().value_or(NoRoom{}));
  }

  // In the order of the cache's stream.
  void write(const KVCache& cache, int32_t from, int32_t to, int value, int32_t layer = 0) {
    device_->launch(cache.stream().value_or(0), [rows = rows(cache, from, to, layer), value,
                                                 bytes = static_cast<size_t>(row_bytes_)] {
      for (std::byte* row : rows) std::memset(row, value, bytes);
    });
  }
  // What the rows hold when the stream gets there: one number per row, -1 for a mix.
  std::shared_ptr<std::vector<int>> read(const KVCache& cache, int32_t from, int32_t to,
                                         int32_t layer = 0) {
    auto out = std::make_shared<std::vector<int>>();
    device_->launch(cache.stream().value_or(0),
                    [out, rows = rows(cache, from, to, layer), bytes = row_bytes_] {
                      for (const std::byte* row : rows) {
                        bool same = true;
                        for (int64_t i = 0; i < bytes; ++i) same = same && row[i] == row[0];
                        out->push_back(same ? std::to_integer<int>(row[0]) : -1);
                      }
                    });
    return out;
  }
  std::byte* state(const KVCache& cache) {
    return reinterpret_cast<std::byte*>(manager_->mem_pool_base_address(9, "s")) +
           int64_t{cache.ssm_base_index()} * 64;
  }

 private:
  static KVCacheManagerConfig config_of(const RigSpec& spec) {
    KVCacheManagerConfig config;
    config.tokens_per_block = spec.tokens_per_block;
    config.layers = {AttentionLayerConfig{.layer_id = 0, .buffers = {{"k", 64}}}};
    if (spec.window) {
      config.layers.push_back(AttentionLayerConfig{
          .layer_id = 1, .buffers = {{"k", 64}}, .sliding_window_size = spec.window});
    }
    if (spec.with_state) {
      config.layers.push_back(SsmLayerConfig{.layer_id = 9, .buffers = {{"s", 64}}});
      config.commit_min_snapshot = true;
    }
    const auto num_layers = static_cast<int64_t>(config.layers.size());
    for (size_t i = 0; i < spec.blocks.size(); ++i) {
      const int64_t bytes = 64 * num_layers * spec.blocks[i];
      if (i == 0 && spec.device.type == DeviceType::kCuda) {
        config.cache_tiers.push_back(GpuCacheTierConfig{bytes});
      } else {
        config.cache_tiers.push_back(HostCacheTierConfig{bytes});
      }
    }
    config.max_util_for_resume = 1.0;
    return config;
  }
  std::vector<std::byte*> rows(const KVCache& cache, int32_t from, int32_t to, int32_t layer) {
    std::vector<std::byte*> out;
    auto* base = reinterpret_cast<std::byte*>(manager_->mem_pool_base_address(layer, "k"));
    const auto table = cache.base_page_indices(manager_->layer_group_id(layer));
    const int32_t block = manager_->tokens_per_block();
    for (int32_t t = from; t < to; ++t) {
      const int32_t slot = table[static_cast<size_t>(t / block)];
      if (slot == kBadPageIndex) continue;
      out.push_back(base + int64_t{slot} * 64 + t % block * row_bytes_);
    }
    return out;
  }

  FakeDevice* device_ = nullptr;
  std::unique_ptr<KVCacheManager> manager_;
  int64_t row_bytes_ = 0;
};

}  // namespace helicore::kv::testing
