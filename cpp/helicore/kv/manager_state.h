// What a manager and its caches share: the config, the layout, the store, the tree and the lock
// that guards them. Internal: users include kv_cache_manager.h.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <vector>

#include "helicore/kv/config.h"
#include "helicore/kv/layout.h"
#include "helicore/kv/life_cycle.h"
#include "helicore/kv/operation_sink.h"
#include "helicore/kv/page_store.h"
#include "helicore/kv/quota.h"
#include "helicore/kv/radix_tree.h"
#include "helicore/kv/stats.h"

namespace helicore::kv {

class KVCache;
class KVCacheManager;
class OperationRecorder;

// Builds that check invariants after each operation look at every cache under the lock, so there
// the lock-free fast paths of a cache take the lock too.
#ifdef HELICORE_DEBUG_CHECKS
inline constexpr bool kDebugChecks = true;
#else
inline constexpr bool kDebugChecks = false;
#endif

struct ManagerState {
  explicit ManagerState(KVCacheManagerConfig config_in);

  // Construction-time facts, read without the lock.
  const KVCacheManagerConfig config;
  const LifeCycleRegistry registry;
  const StorageLayout layout;
  const QuotaSplit quota;
  TypedVec<PoolGroupId, int32_t> slots_per_block;  // life cycles of each group
  size_t num_life_cycles = 0;

  // Guards everything below: exclusive for changes, shared for probes and statistics.
  mutable std::shared_mutex mutex;
  PageStore store;
  EventLog events;
  RadixTree tree;
  KVCacheStats stats;
  std::vector<KVCache*> caches;  // the open ones; not owned
  KVCacheManager* owner = nullptr;
  int64_t next_id = 0;
  int32_t num_active = 0;
  bool is_shut_down = false;
  std::vector<NodeId> path_scratch;

  // Why `num_blocks` more blocks don't fit; nullopt when they do. Changes nothing.
  [[nodiscard]] std::optional<NoRoom> plan(int32_t num_blocks) const noexcept;
  // Evicts until `num_blocks` blocks are free. Call after plan() said yes.
  void make_room(int32_t num_blocks);
  // The fullest group above max_util_for_resume, when other sequences are active.
  [[nodiscard]] std::optional<NoRoom> utilisation_gate() const noexcept;
  // Runs check_invariants() in builds with HELICORE_DEBUG_CHECKS.
  void verify() const;

  // Who sees the public calls; null: nobody. Sinks stay until the end, for a call may be on its way
  // to one that was stopped.
  std::atomic<OperationSink*> sink{nullptr};
  OperationRecorder* recorder = nullptr;  // the one that start_recording() made
  std::vector<std::unique_ptr<OperationSink>> sinks;
};

// The sink that a public call goes to first; null when there is none or the call comes from it.
[[nodiscard]] inline OperationSink* recording(const ManagerState* state) noexcept {
  if (state == nullptr) return nullptr;
  OperationSink* sink = state->sink.load(std::memory_order_acquire);
  return sink == nullptr || sink->is_inside() ? nullptr : sink;
}

}  // namespace helicore::kv
