// Counters of a manager, copied out by value. Counts since construction; blocks are counted once
// per sequence block, not once per life cycle.
#pragma once

#include <cstdint>
#include <vector>

#include "helicore/kv/layout.h"
#include "helicore/kv/types.h"

namespace helicore::kv {

struct KVCacheStats {
  uint64_t num_lookups = 0;    // caches created with tokens
  uint64_t lookup_tokens = 0;  // tokens they asked for
  uint64_t hit_tokens = 0;     // tokens they found
  uint64_t full_reused_blocks = 0;
  uint64_t partial_reused_blocks = 0;
  uint64_t missed_blocks = 0;  // blocks of the expected prompt that were not found
  uint64_t allocated_blocks = 0;
  uint64_t committed_blocks = 0;
  uint64_t rebased_blocks = 0;  // committed blocks that another sequence had committed first
  uint64_t evicted_blocks = 0;
  uint64_t lost_pages = 0;         // whose copies between levels failed
  uint64_t skipped_snapshots = 0;  // recurrent states that found no slot: less to reuse later
  uint64_t copied_blocks = 0;      // private copies of blocks shared with the tree or with forks
  uint64_t num_forks = 0;
  uint64_t failed_resizes = 0;
  uint64_t failed_resumes = 0;
  uint64_t num_suspends = 0;
  uint64_t num_resumes = 0;
  friend bool operator==(const KVCacheStats&, const KVCacheStats&) = default;
};

// Pages of one life cycle since construction; with `domain` and `pool_group` the sums of those.
struct LifeCycleStats {
  CacheDomain domain = CacheDomain::kTarget;
  PoolGroupId pool_group{0};
  uint64_t allocated_pages = 0;  // new ones, copies included
  uint64_t copied_pages = 0;     // private copies of shared pages
  uint64_t reused_pages = 0;     // found at creation and held
  uint64_t reused_tokens = 0;    // in them
  uint64_t committed_pages = 0;  // shown to the tree of reusable blocks
  uint64_t released_pages = 0;   // that went out of the window
  friend bool operator==(const LifeCycleStats&, const LifeCycleStats&) = default;
};

// Pages of one life cycle that passed through one level since construction.
struct MigrationCounters {
  int64_t offloaded_pages = 0;  // came from a hotter level
  int64_t offloaded_bytes = 0;
  int64_t onboarded_pages = 0;  // left for a hotter level
  int64_t onboarded_bytes = 0;
  int64_t unwritten_pages = 0;  // came back to a copy that was still there: nothing was written
  int64_t dropped_pages = 0;    // went from here for good
  friend bool operator==(const MigrationCounters&, const MigrationCounters&) = default;
};

struct MigrationStats {
  std::vector<TypedVec<LifeCycleId, MigrationCounters>> levels{};  // [level][life cycle]
  int64_t dropped_nodes = 0;  // blocks that left the tree of reusable blocks
};

// One pool group of a level, at one moment.
struct PoolGroupStatistics {
  PoolGroupId pool_group{0};
  CacheDomain domain = CacheDomain::kTarget;
  std::vector<int64_t> slot_sizes{};  // bytes per pool
  int64_t total = 0;                  // slots
  int64_t free = 0;                   // clean copies of hotter pages included
  int64_t evictable = 0;              // pages that may leave the level
  int64_t pending = 0;                // freed, but a step that is not done may touch them
  [[nodiscard]] int64_t available() const noexcept { return free + evictable; }
  [[nodiscard]] int64_t unavailable() const noexcept { return total - free - evictable; }
  friend bool operator==(const PoolGroupStatistics&, const PoolGroupStatistics&) = default;
};

}  // namespace helicore::kv
