#include "helicore/kv/manager_state.h"

#include <utility>

#include "helicore/core/error.h"
#include "helicore/kv/introspection.h"

namespace helicore::kv {
namespace {

KVCacheManagerConfig checked(KVCacheManagerConfig config) {
  config.validate();
  check_supported(config);
  return config;
}

}  // namespace

ManagerState::ManagerState(KVCacheManagerConfig config_in)
    : config(checked(std::move(config_in))),
      registry(config),
      layout(config, registry),
      quota(
          split_quota(config, registry, layout, quota_of(config.cache_tiers[0]), kHostGrainBytes)),
      slots_per_block(layout.groups().count(), 0),
      num_life_cycles(registry.count()),
      store(layout, quota.num_slots),
      events(config.event_buffer_size, config.tokens_per_block),
      tree(store, registry.count(), config.tokens_per_block, &events) {
  for (size_t i = 0; i < num_life_cycles; ++i) {
    ++slots_per_block[layout.group_of(LifeCycleId(static_cast<int32_t>(i)))];
  }
  int32_t largest = 0;
  for (int32_t slots : quota.num_slots) largest = std::max(largest, slots);
  tree.reserve_nodes(static_cast<size_t>(largest));
  for (const auto& [id, buffer] : layout.buffers()) {
    const int64_t bound = buffer.page_index_upper_bound(quota.num_slots[buffer.group]);
    HELICORE_CHECK(bound <= INT32_MAX, "kv.config", "cache_tiers[0].quota: layer ", id.layer_id,
                   ", role '", id.role, "' would need page index ", bound,
                   "; page indices are 32-bit");
  }
}

std::optional<NoRoom> ManagerState::plan(int32_t num_blocks) const noexcept {
  for (size_t g = 0; g < slots_per_block.count(); ++g) {
    const PoolGroupId group(static_cast<int32_t>(g));
    const int64_t needed = int64_t{num_blocks} * slots_per_block[group];
    const PoolGroupCounts counts = store.counts(group);
    if (counts.available() < needed) {
      return NoRoom{.domain = layout.groups()[group].domain,
                    .pool_group = group,
                    .needed = needed,
                    .free = counts.free,
                    .evictable = counts.evictable};
    }
  }
  return std::nullopt;
}

void ManagerState::make_room(int32_t num_blocks) {
  for (size_t g = 0; g < slots_per_block.count(); ++g) {
    const PoolGroupId group(static_cast<int32_t>(g));
    const int32_t needed = num_blocks * slots_per_block[group];
    if (store.counts(group).free >= needed) continue;
    stats.evicted_blocks += static_cast<uint64_t>(tree.evict_until_free(group, needed));
  }
}

std::optional<NoRoom> ManagerState::utilisation_gate() const noexcept {
  if (num_active == 0) return std::nullopt;
  for (size_t g = 0; g < slots_per_block.count(); ++g) {
    const PoolGroupId group(static_cast<int32_t>(g));
    const PoolGroupCounts counts = store.counts(group);
    if (counts.unavailable() > config.max_util_for_resume * counts.total) {
      return NoRoom{.domain = layout.groups()[group].domain,
                    .pool_group = group,
                    .free = counts.free,
                    .evictable = counts.evictable,
                    .over_utilisation = true};
    }
  }
  return std::nullopt;
}

void ManagerState::verify() const {
#ifdef HELICORE_DEBUG_CHECKS
  check_invariants(*this);
#endif
}

}  // namespace helicore::kv
