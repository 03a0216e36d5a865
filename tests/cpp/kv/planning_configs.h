// Random configurations of every kind of life cycle, and slow definitions of which blocks are kept,
// for tests of the planning functions.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "helicore/kv/layout.h"

namespace helicore::kv::testing {

class Dice {
 public:
  explicit Dice(uint32_t seed) : random_(seed) {}
  int64_t below(int64_t n) { return std::uniform_int_distribution<int64_t>(0, n - 1)(random_); }
  int32_t in(int32_t first, int32_t last) {
    return std::uniform_int_distribution<int32_t>(first, last)(random_);
  }
  bool coin() { return below(2) == 0; }

 private:
  std::mt19937 random_;
};

struct Planned {
  explicit Planned(KVCacheManagerConfig c)
      : config(std::move(c)), registry(config), layout(config, registry) {}
  const PoolGroupLayout& group(size_t g) const {
    return layout.groups()[PoolGroupId(static_cast<int32_t>(g))];
  }
  size_t num_groups() const { return layout.groups().count(); }

  KVCacheManagerConfig config;
  LifeCycleRegistry registry;
  StorageLayout layout;
};

inline LayerConfig random_layer(Dice& dice, int32_t id, int64_t max_bytes) {
  std::vector<BufferConfig> buffers{{"k", 1 + dice.below(max_bytes)}};
  if (dice.coin()) buffers.push_back({"v", dice.coin() ? buffers[0].size : 1 + dice.below(300)});
  if (dice.below(5) == 0) return SsmLayerConfig{id, buffers};
  AttentionLayerConfig layer{id, buffers};
  if (dice.coin()) layer.sliding_window_size = dice.in(1, 40);
  if (layer.sliding_window_size && dice.coin()) layer.num_sink_tokens = dice.in(0, 9);
  if (dice.below(3) == 0) layer.cache_domain = CacheDomain::kDraft;
  return layer;
}

inline BatchDesc random_batch(Dice& dice, int32_t max_sequences, int32_t max_tokens) {
  BatchDesc batch;
  const int32_t count = dice.in(0, max_sequences);
  for (int32_t i = 0; i < count; ++i) {
    const int32_t capacity = dice.in(0, max_tokens);
    batch.kv_caches.push_back({capacity, dice.in(0, capacity)});
  }
  if (dice.coin()) batch.system_prompt_length = dice.in(0, max_tokens);
  return batch;
}

inline KVCacheManagerConfig random_config(Dice& dice, int64_t max_bytes) {
  KVCacheManagerConfig config;
  config.tokens_per_block = dice.in(1, 9);
  config.cache_tiers = {HostCacheTierConfig{1 << 20}};
  config.commit_min_snapshot = true;
  config.max_util_for_resume = dice.coin() ? 0.97 : 0.5;
  const int32_t count = dice.in(1, 6);
  for (int32_t i = 0; i < count; ++i) config.layers.push_back(random_layer(dice, i, max_bytes));
  if (dice.coin()) config.swa_scratch_reuse = SwaScratchReuseConfig{dice.in(0, 12)};
  for (int64_t i = dice.below(3); i > 0; --i)
    config.constraints.push_back(random_batch(dice, 3, 60));
  if (dice.coin()) config.typical_step = random_batch(dice, 4, 200);
  return config;
}

// Whether no position from `history` on attends to any token of the block.
inline bool is_stale(const LifeCycle& lc, int32_t history, int32_t block, int32_t tpb) {
  if (int64_t{block} * tpb >= history) return false;  // not history yet
  if (lc.kind == LayerType::kSsm) return (block + 1) * tpb <= history;
  if (!lc.window || block < lc.num_sink_blocks) return false;
  return (block + 1) * tpb - 1 <= history - *lc.window;  // its last token is out of the window
}

// Whether the block is opened by the step and stale after it, the tail that may be rewound aside.
inline bool is_scratch(const LifeCycle& lc, const KVCacheDesc& step, int32_t rewind, int32_t block,
                       int32_t tpb) {
  if (lc.kind == LayerType::kSsm || !lc.window) return false;
  return block * tpb >= step.history_length && block * tpb < step.capacity &&
         is_stale(lc, std::max(0, step.capacity - rewind), block, tpb);
}

// Blocks that one sequence keeps, leaving the first `shared` out.
inline int64_t blocks_kept(const LifeCycle& lc, const KVCacheDesc& step, int32_t shared,
                           int32_t tpb) {
  if (lc.kind == LayerType::kSsm) return 1;
  int64_t kept = 0;
  for (int32_t block = shared; block * tpb < step.capacity; ++block) {
    if (!is_stale(lc, step.history_length, block, tpb)) ++kept;
  }
  return kept;
}

}  // namespace helicore::kv::testing
