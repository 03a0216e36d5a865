#include "helicore/kv/life_cycle.h"

#include <algorithm>

#include "helicore/core/error.h"

namespace helicore::kv {

HalfOpenRange<int32_t> LifeCycle::stale_range(int32_t history_length,
                                              int32_t tokens_per_block) const noexcept {
  if (kind == LayerType::kSsm) return {0, history_length / tokens_per_block};
  const int32_t begin = std::min(ceil_div(history_length, tokens_per_block), num_sink_blocks);
  if (!window) return {begin, begin};
  const int64_t first_read = static_cast<int64_t>(history_length) + 1 - *window;
  if (first_read <= 0) return {begin, begin};
  return {begin, std::max(begin, static_cast<int32_t>(first_read / tokens_per_block))};
}

HalfOpenRange<int32_t> LifeCycle::scratch_range(int32_t history_length, int32_t capacity,
                                                int32_t max_rewind_len,
                                                int32_t tokens_per_block) const noexcept {
  const int32_t first_new = ceil_div(history_length, tokens_per_block);
  if (kind == LayerType::kSsm || !window) return {first_new, first_new};
  const auto stale = stale_range(std::max(0, capacity - max_rewind_len), tokens_per_block);
  const int32_t begin = std::max(stale.begin, first_new);
  return {begin, std::max(begin, std::min(stale.end, ceil_div(capacity, tokens_per_block)))};
}

std::optional<int64_t> LifeCycle::max_live_blocks(int32_t tokens_per_block) const noexcept {
  if (kind == LayerType::kSsm) return 1;
  if (!window) return std::nullopt;
  return num_sink_blocks + (int64_t{*window} + tokens_per_block - 2) / tokens_per_block + 1;
}

LifeCycle life_cycle_of(const LayerConfig& layer, int32_t tokens_per_block) noexcept {
  const auto* attention = std::get_if<AttentionLayerConfig>(&layer);
  if (attention == nullptr) return {.kind = LayerType::kSsm};
  return {.kind = LayerType::kAttention,
          .domain = attention->cache_domain,
          .window = attention->sliding_window_size,
          .num_sink_blocks = ceil_div(attention->num_sink_tokens.value_or(0), tokens_per_block),
          .policy = attention->reuse_policy};
}

LifeCycleRegistry::LifeCycleRegistry(const KVCacheManagerConfig& config) {
  for (const LayerConfig& layer : config.layers) {
    const LifeCycle key = life_cycle_of(layer, config.tokens_per_block);
    if (!contains(key)) life_cycles_.push_back(key);
    of_layer_.emplace(layer_id_of(layer), id_of(key));
  }
}

bool LifeCycleRegistry::contains(const LifeCycle& life_cycle) const noexcept {
  return std::find(life_cycles_.begin(), life_cycles_.end(), life_cycle) != life_cycles_.end();
}

LifeCycleId LifeCycleRegistry::id_of(const LifeCycle& life_cycle) const {
  const auto it = std::find(life_cycles_.begin(), life_cycles_.end(), life_cycle);
  HELICORE_CHECK(it != life_cycles_.end(), "kv.life_cycle", "unknown life cycle (domain ",
                 name_of(life_cycle.domain), ", window ", life_cycle.window.value_or(-1),
                 ", policy ", name_of(life_cycle.policy), ")");
  return LifeCycleId(static_cast<int32_t>(it - life_cycles_.begin()));
}

LifeCycleId LifeCycleRegistry::of_layer(int32_t layer_id) const {
  const auto it = of_layer_.find(layer_id);
  HELICORE_CHECK(it != of_layer_.end(), "kv.life_cycle",
                 "layer_id must be one of the config's, got ", layer_id);
  return it->second;
}

std::optional<LifeCycleId> LifeCycleRegistry::ssm_life_cycle_id() const noexcept {
  for (size_t i = 0; i < life_cycles_.count(); ++i) {
    const LifeCycleId id(static_cast<int32_t>(i));
    if (life_cycles_[id].kind == LayerType::kSsm) return id;
  }
  return std::nullopt;
}

}  // namespace helicore::kv
