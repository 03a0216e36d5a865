#include "helicore/kv/quota.h"

#include <algorithm>
#include <cmath>

#include "helicore/core/error.h"

namespace helicore::kv {
namespace {

using Slots = TypedVec<PoolGroupId, int64_t>;

int64_t round_up(int64_t value, int64_t grain) { return (value + grain - 1) / grain * grain; }

// The largest n with bytes_for_slots(group, n) <= bytes.
int64_t slots_for_bytes(const PoolGroupLayout& group, int64_t bytes, int64_t grain) {
  int64_t low = 0;
  int64_t high = bytes / group.slot_bytes() + 1;
  while (low + 1 < high) {
    const int64_t middle = low + (high - low) / 2;
    (bytes_for_slots(group, middle, grain) <= bytes ? low : high) = middle;
  }
  return low;
}

Slots slots_per_group(const BatchDesc& batch, const KVCacheManagerConfig& config,
                      const LifeCycleRegistry& registry, const StorageLayout& layout) {
  Slots slots(layout.groups().count(), 0);
  for (size_t i = 0; i < registry.count(); ++i) {
    const LifeCycleId id(static_cast<int32_t>(i));
    slots[layout.group_of(id)] += slots_for_batch(batch, registry[id], config.tokens_per_block);
  }
  return slots;
}

Slots floors_of(const KVCacheManagerConfig& config, const LifeCycleRegistry& registry,
                const StorageLayout& layout) {
  Slots floors(layout.groups().count(), 0);
  for (size_t i = 0; i < registry.count(); ++i) {
    ++floors[layout.group_of(LifeCycleId(static_cast<int32_t>(i)))];
  }
  for (const BatchDesc& batch : config.constraints) {
    const Slots needed = slots_per_group(batch, config, registry, layout);
    for (size_t g = 0; g < floors.count(); ++g) {
      const PoolGroupId group(static_cast<int32_t>(g));
      // A batch that just fits must also pass the gate of resume.
      const auto padded = static_cast<int64_t>(
          std::ceil(static_cast<double>(needed[group]) / config.max_util_for_resume));
      floors[group] = std::max(floors[group], padded);
    }
  }
  return floors;
}

// Integer weights per group, all > 0.
Slots weights_of(const KVCacheManagerConfig& config, const LifeCycleRegistry& registry,
                 const StorageLayout& layout) {
  Slots weights(layout.groups().count(), 0);
  if (config.initial_pool_ratio) {
    const auto& ratio = *config.initial_pool_ratio;
    HELICORE_CHECK(ratio.size() == registry.count(), "kv.config",
                   "initial_pool_ratio must have one share per layer group (", registry.count(),
                   "), got ", ratio.size());
    for (size_t i = 0; i < ratio.size(); ++i) {
      weights[layout.group_of(LifeCycleId(static_cast<int32_t>(i)))] +=
          std::max<int64_t>(1, std::llround(ratio[i] * 1e9));
    }
    return weights;
  }
  std::vector<BatchDesc> batches{BatchDesc{{{2049, 2048}}, 0}};
  if (config.typical_step) {
    batches = {*config.typical_step};
  } else if (!config.constraints.empty()) {
    batches = config.constraints;
  }
  for (const BatchDesc& batch : batches) {
    const Slots needed = slots_per_group(batch, config, registry, layout);
    for (size_t g = 0; g < weights.count(); ++g) {
      const PoolGroupId group(static_cast<int32_t>(g));
      const int64_t bytes =
          std::max<int64_t>(1, needed[group]) * layout.groups()[group].slot_bytes();
      weights[group] = std::max(weights[group], bytes);
    }
  }
  return weights;
}

// Shares `budget` by weight among the groups that are not pinned to their floor; pins those that
// would fall below.
Slots share_out(const StorageLayout& layout, const Slots& weights, const Slots& floors,
                int64_t budget, int64_t grain) {
  Slots slots(weights.count(), 0);
  std::vector<bool> pinned(weights.count(), false);
  for (bool again = true; again;) {
    again = false;
    int64_t left = budget;
    __int128 total_weight = 0;
    for (size_t g = 0; g < pinned.size(); ++g) {
      const PoolGroupId group(static_cast<int32_t>(g));
      if (pinned[g])
        left -= bytes_for_slots(layout.groups()[group], floors[group], grain);
      else
        total_weight += weights[group];
    }
    for (size_t g = 0; g < pinned.size() && !again; ++g) {
      const PoolGroupId group(static_cast<int32_t>(g));
      if (pinned[g]) continue;
      const auto share =
          static_cast<int64_t>(static_cast<__int128>(left) * weights[group] / total_weight);
      slots[group] = slots_for_bytes(layout.groups()[group], share, grain);
      if (slots[group] < floors[group]) {
        slots[group] = floors[group];
        pinned[g] = true;
        again = true;
      }
    }
  }
  return slots;
}

}  // namespace

int64_t slots_for_batch(const BatchDesc& batch, const LifeCycle& life_cycle,
                        int32_t tokens_per_block) {
  if (life_cycle.kind == LayerType::kSsm) return static_cast<int64_t>(batch.kv_caches.size());
  const int32_t shared = batch.system_prompt_length / tokens_per_block;
  const auto stale_below = [](HalfOpenRange<int32_t> stale, int32_t end) {
    return std::max(0, std::min(stale.end, end) - std::min(stale.begin, end));
  };
  int64_t total = 0;
  int32_t always_stale_begin = 0;
  int32_t always_stale_end = shared;
  for (const KVCacheDesc& desc : batch.kv_caches) {
    const auto stale = life_cycle.stale_range(desc.history_length, tokens_per_block);
    const int32_t blocks = ceil_div(desc.capacity, tokens_per_block);
    const int32_t own_shared = shared - stale_below(stale, shared);
    total += std::max(0, blocks - stale_below(stale, blocks) - own_shared);
    always_stale_begin = std::max(always_stale_begin, std::min(stale.begin, shared));
    always_stale_end = std::min(always_stale_end, std::min(stale.end, shared));
  }
  if (!batch.kv_caches.empty()) {
    total += shared - std::max(0, always_stale_end - always_stale_begin);
  }
  return total;
}

int64_t bytes_for_slots(const PoolGroupLayout& group, int64_t num_slots, int64_t grain) {
  int64_t bytes = 0;
  for (int64_t piece : group.piece_bytes) bytes += round_up(num_slots * piece, grain);
  return bytes;
}

QuotaSplit split_quota(const KVCacheManagerConfig& config, const LifeCycleRegistry& registry,
                       const StorageLayout& layout, int64_t quota, int64_t grain) {
  const Slots floors = floors_of(config, registry, layout);
  const Slots weights = weights_of(config, registry, layout);
  int64_t minimum = 0;
  for (size_t g = 0; g < floors.count(); ++g) {
    const PoolGroupId group(static_cast<int32_t>(g));
    minimum += bytes_for_slots(layout.groups()[group], floors[group], grain);
  }
  QuotaSplit split;
  const int64_t asked = round_up(quota, grain);
  split.quota = std::max(asked, minimum);
  split.raised_by = split.quota - asked;

  const Slots slots = share_out(layout, weights, floors, split.quota, grain);
  int64_t left = split.quota;
  for (size_t g = 0; g < slots.count(); ++g) {
    const PoolGroupId group(static_cast<int32_t>(g));
    left -= bytes_for_slots(layout.groups()[group], slots[group], grain);
  }
  split.num_slots = TypedVec<PoolGroupId, int32_t>(slots.count(), 0);
  for (size_t g = 0; g < slots.count(); ++g) {  // what rounding left over
    const PoolGroupId group(static_cast<int32_t>(g));
    const PoolGroupLayout& shape = layout.groups()[group];
    const int64_t used = bytes_for_slots(shape, slots[group], grain);
    const int64_t count = slots_for_bytes(shape, used + left, grain);
    left -= bytes_for_slots(shape, count, grain) - used;
    HELICORE_CHECK(count < INT32_MAX, "kv.config", "cache_tiers[0].quota gives ", count,
                   " slots; at most ", INT32_MAX - 1, " can be addressed");
    split.num_slots[group] = static_cast<int32_t>(count);
  }
  return split;
}

}  // namespace helicore::kv
