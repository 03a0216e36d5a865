// From the bytes of a level to the slots of each pool group. Integer arithmetic only:
// deterministic, never above the budget, never below the floors.
#pragma once

#include <cstdint>
#include <vector>

#include "helicore/kv/layout.h"

namespace helicore::kv {

inline constexpr int64_t kHostGrainBytes = 4096;  // pools of host memory grow by this

struct QuotaSplit {
  TypedVec<PoolGroupId, int32_t> num_slots;
  int64_t quota = 0;      // bytes in effect: >= what was asked for
  int64_t raised_by = 0;  // bytes above the rounded request, when the floors needed them
};

// Slots of one life cycle that a batch needs, blocks of the shared system prompt counted once.
[[nodiscard]] int64_t slots_for_batch(const BatchDesc& batch, const LifeCycle& life_cycle,
                                      int32_t tokens_per_block);

// Bytes that `num_slots` slots of a group take when each pool is rounded up to the grain.
[[nodiscard]] int64_t bytes_for_slots(const PoolGroupLayout& group, int64_t num_slots,
                                      int64_t grain);

// Splits the quota of the hot level. Shares: initial_pool_ratio, else typical_step, else the
// constraints, else one sequence of 2049 tokens. Floors: one slot per life cycle and every
// constraint. Throws InvalidArgument when initial_pool_ratio has not one share per life cycle.
[[nodiscard]] QuotaSplit split_quota(const KVCacheManagerConfig& config,
                                     const LifeCycleRegistry& registry, const StorageLayout& layout,
                                     int64_t quota, int64_t grain);

}  // namespace helicore::kv
