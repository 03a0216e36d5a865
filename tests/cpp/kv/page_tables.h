// What tests read off a page table.
#pragma once

#include <cstdint>
#include <vector>

#include "helicore/kv/kv_cache_manager.h"

namespace helicore::kv::testing {

// The slots of a life cycle's blocks, BAD ones included.
inline std::vector<int32_t> table_of(const KVCache& cache, LifeCycleId group = LifeCycleId(0)) {
  const auto view = cache.base_page_indices(group);
  return {view.begin(), view.end()};
}

// Slots of the first pool group that nobody else can get, on the hot level.
inline int64_t slots_in_use(const KVCacheManager& manager) {
  return manager.storage_statistics()[0].unavailable();
}

}  // namespace helicore::kv::testing
