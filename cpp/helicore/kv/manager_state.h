// Shared state of a manager and its caches. Internal: not part of the embedding API, which is
// kv_cache_manager.h.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "helicore/kv/config.h"
#include "helicore/kv/layout.h"
#include "helicore/kv/level_sizer.h"
#include "helicore/kv/life_cycle.h"
#include "helicore/kv/migration.h"
#include "helicore/kv/operation_sink.h"
#include "helicore/kv/page_store.h"
#include "helicore/kv/planned_drop.h"
#include "helicore/kv/quota.h"
#include "helicore/kv/radix_tree.h"
#include "helicore/kv/retention.h"
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

// What was decided about each level at construction, or by the last resize.
struct LevelState {
  CacheTier tier = CacheTier::kHostMem;
  int64_t grain = 0;                           // bytes
  QuotaSplit split{};                          // slots whose memory is there, kept up to date
  int64_t max_quota = 0;                       // bytes: the most that a resize may ask for
  TypedVec<PoolGroupId, int32_t> max_slots{};  // for which addresses are reserved
};

struct ManagerState {
  ManagerState(KVCacheManagerConfig config_in, std::unique_ptr<CacheDevice> device_in);

  // Construction-time facts, read without the lock.
  const KVCacheManagerConfig config;
  const LifeCycleRegistry registry;
  const StorageLayout layout;
  const std::unique_ptr<CacheDevice> device;
  const std::optional<LifeCycleId> ssm;
  const bool has_windows;
  const bool has_optional;  // life cycles whose reuse is OPTIONAL
  const int64_t max_util_ppm;
  TypedVec<PoolGroupId, int32_t> slots_per_block;  // attention life cycles of each group
  TypedVec<LifeCycleId, Fraction> scratch_parts;   // scratch_fraction() of each
  size_t num_life_cycles = 0;

  // Guards everything below: exclusive for changes, shared for probes and statistics.
  mutable std::shared_mutex mutex;
  std::vector<LevelState> levels;
  PageStore store;
  EventLog events;
  RadixTree tree;
  MigrationStats migration_stats;
  Migrator migrator;
  KVCacheStats stats;
  std::vector<KVCache*> caches;  // the open ones; not owned
  TypedVec<LifeCycleId, LifeCycleStats> life_cycle_stats;
  std::vector<PlannedDrop*> plans;                       // not owned
  std::unordered_map<uint64_t, uint32_t> planned_drops;  // page tag -> plans that name it
  RetentionTimers timers;
  std::function<int64_t()> now_ns;  // a monotonic clock; see read_clock()
  LevelSizer sizer;
  int64_t next_plan = 0;
  KVCacheManager* owner = nullptr;
  int64_t next_id = 0;
  std::atomic<uint32_t> num_batches = 0;  // batch calls so far
  int32_t num_active = 0;
  bool is_shut_down = false;
  std::atomic<uint64_t> num_failures_seen{0};
  std::vector<NodeId> path_scratch;
  std::vector<int32_t> need_scratch;  // slots per pool group
  std::vector<PageId> pages_scratch;
  std::vector<PageHandle> handles_scratch;
  struct Fence {
    StreamHandle stream = 0;
    TimePoint point;
  };
  std::vector<Fence> fences;  // of this operation
  // A copy of a page whose own bytes may not have arrived: lost if they are. A load is a copy that
  // brings a page of a colder level up: if it fails, that page can't be read and is lost as well.
  struct DerivedCopy {
    PageHandle from{};
    PageHandle to{};
    TimePoint arrival{};
    bool is_load = false;
    bool has_arrived = false;
  };
  std::vector<DerivedCopy> derived;

  [[nodiscard]] bool is_ssm(size_t life_cycle) const noexcept {
    return ssm && static_cast<size_t>(ssm->value()) == life_cycle;
  }
  [[nodiscard]] const LifeCycle& life_cycle(size_t index) const {
    return registry[LifeCycleId(static_cast<int32_t>(index))];
  }
  [[nodiscard]] size_t group_of(size_t life_cycle) const {
    return static_cast<size_t>(
        layout.group_of(LifeCycleId(static_cast<int32_t>(life_cycle))).value());
  }
  [[nodiscard]] MatchRules match_rules() const noexcept;
  // Why `needed` slots of a group could never be had on the hot level.
  [[nodiscard]] std::optional<NoRoom> exceeds_total(size_t group, int64_t needed) const noexcept;
  // The fullest group above max_util_for_resume, when other sequences are active.
  [[nodiscard]] std::optional<NoRoom> utilisation_gate() const noexcept;
  // First thing with the lock: forgets the fence of the operation before, takes in failed copies
  // and retention that has run out.
  void begin_operation();
  // Inside an operation: now_ns(), noted where calls are recorded.
  [[nodiscard]] int64_t read_clock();
  // Throws InvalidArgument for a negative number that is no step stream.
  void check_stream(std::optional<int64_t> stream) const;
  // The point when the work that `stream` has by now is done; one per stream and operation.
  [[nodiscard]] TimePoint fence(StreamHandle stream);
  // To be called before a page is copied: a failure of `from` that comes to light later concerns
  // `to` as well.
  void note_copy(PageHandle from, PageHandle to);
  // The same for a copy that reads `from` on a colder level and is there at `done`.
  void note_load(PageHandle from, PageHandle to, TimePoint done);
  // Pages whose copies have failed leave the tree; their holders see them as lost.
  void absorb_failures();
  [[nodiscard]] bool has_new_failures() const noexcept {
    return device->num_failures() != num_failures_seen.load(std::memory_order_relaxed);
  }
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

// The sink that wants to know what the call that is running meets; null when there is none.
[[nodiscard]] inline OperationSink* noting(const ManagerState& state) noexcept {
  OperationSink* sink = state.sink.load(std::memory_order_acquire);
  return sink != nullptr && sink->is_inside() ? sink : nullptr;
}

}  // namespace helicore::kv
