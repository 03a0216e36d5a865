// White-box view of a manager for tests and for the invariant checker. Not installed; nothing else
// includes it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "helicore/kv/kv_cache_manager.h"
#include "helicore/kv/manager_state.h"

namespace helicore::kv {

// Walks everything: counters against the sequences that hold, queues against page states, the
// tree's shape, order and keys, slots against pages. Throws InternalError naming the first broken
// invariant. Call with the lock held or while no other thread uses the manager.
void check_invariants(const ManagerState& state);

struct Introspection {
  static void check(const KVCacheManager& manager) { check_invariants(*manager.state_); }
  static ManagerState& state(KVCacheManager& manager) { return *manager.state_; }
  static std::span<const PageHandle> pages(const KVCache& cache) { return cache.pages_; }
  static PageHandle state_page(const KVCache& cache) { return cache.state_page_; }
  static NodeId tail_node(const KVCache& cache) { return cache.tail_node_; }
  static std::span<const TokenId> tail_tokens(const KVCache& cache) { return cache.tail_tokens(); }
  static const PrefetchState& prefetch(const KVCache& cache) { return cache.prefetch_; }
  // Rows of the history that the layer group does not have.
  static std::vector<TokenRange> missing(const KVCache& cache, size_t life_cycle);
  static bool may_share(const KVCache& cache) { return cache.may_share_; }
  static std::span<const PageHandle> scratch_pages(const KVCache& cache, size_t life_cycle) {
    return cache.scratch_.pages(life_cycle);
  }
  static int32_t num_scratch_wanted(const KVCache& cache, size_t life_cycle) {
    return cache.scratch_.num_wanted(life_cycle, cache.cursors());
  }
  static bool is_scratch(const KVCache& cache, int32_t ordinal, size_t life_cycle) {
    return cache.scratch_.is_scratch(ordinal, life_cycle, cache.cursors());
  }
  static bool needs_copy(const KVCache& cache) { return cache.needs_copy_; }
  static const int32_t* table(const KVCache& cache, size_t life_cycle) {
    return cache.tables_[life_cycle].data;
  }
};

}  // namespace helicore::kv
