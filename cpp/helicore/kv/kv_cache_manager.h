// The door to the KV cache manager: owns the pools, the pages and the radix tree; creates the
// per-sequence caches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "helicore/kv/block_key.h"
#include "helicore/kv/cache_device.h"
#include "helicore/kv/config.h"
#include "helicore/kv/event_log.h"
#include "helicore/kv/forecast.h"
#include "helicore/kv/kv_cache.h"
#include "helicore/kv/layout.h"
#include "helicore/kv/level_sizer.h"
#include "helicore/kv/life_cycle.h"
#include "helicore/kv/stats.h"

namespace helicore::kv {

struct RecordingOptions;
struct RecordingSummary;

struct PoolDesc {
  PoolIndex pool_index{0};
  uint64_t base_address = 0;
  int64_t slot_bytes = 0;  // bytes of one slot's piece in this pool
};

// Everything about one pool group: `variants` tell the memory order of buffers per life cycle.
struct PoolGroupDesc {
  PoolGroupId pool_group{0};
  CacheDomain domain = CacheDomain::kTarget;
  int32_t num_slots = 0;
  std::vector<PoolDesc> pools{};
  std::vector<SlotDescVariant> variants{};
};

// What create_kv_cache() may be told.
struct CreateOptions {
  ReuseScope reuse_scope{};
  std::span<const TokenId> input_tokens{};   // matched against the tree; may be empty
  std::optional<int64_t> id = std::nullopt;  // default: a running number
  int priority = kPriorityDefault;           // of the pages it makes, 0..100, lower goes first
  std::optional<int64_t> expected_prompt_length = std::nullopt;  // tokens, for the miss counters
  std::span<const RetentionRange> retention{};  // what is worth more than `priority`, and how long
};

// How far an active cache will go, for a forecast.
struct ExpectedLength {
  const KVCache* cache = nullptr;
  int32_t final_capacity = 0;   // tokens of its last step; at least its capacity is assumed
  int32_t tokens_per_step = 1;  // by which capacity grows, >= 1
  int32_t lookahead = 0;        // at the end of capacity that never become history: draft tokens
};

// One lock guards all shared state: mutating calls and the caches' slow paths take it exclusively,
// probe_reuse() and the statistics take it shared. Layout queries read construction-time facts and
// take none. Owner of everything but the caches, which it must outlive; a cache that is open when
// the manager is destroyed is closed and an error is logged.
class KVCacheManager {
 public:
  // `device` is what memory and copies come from; by default the one that cache_tiers[0] names.
  // Throws InvalidArgument, NotSupported or OutOfMemory.
  explicit KVCacheManager(KVCacheManagerConfig config,
                          std::unique_ptr<CacheDevice> device = nullptr);
  ~KVCacheManager();
  KVCacheManager(const KVCacheManager&) = delete;
  KVCacheManager& operator=(const KVCacheManager&) = delete;

  // A SUSPENDED cache that holds the longest cached prefix of the tokens: num_committed == history
  // == capacity == its length. A caller that needs logits of the last prompt token leaves it out of
  // `input_tokens`.
  [[nodiscard]] std::unique_ptr<KVCache> create_kv_cache(const CreateOptions& options = {});
  // How many tokens create_kv_cache() would find. Advisory: holds nothing. Any thread.
  [[nodiscard]] int32_t probe_reuse(std::span<const TokenId> tokens,
                                    const ReuseScope& scope = {}) const;
  // Keeps the longest cached prefix of the tokens, on whatever level, until the pin is closed or
  // destroyed: a SUSPENDED cache with the highest priority that is counted in no statistics.
  [[nodiscard]] std::unique_ptr<KVCache> pin(std::span<const TokenId> tokens,
                                             const ReuseScope& scope = {});
  // Work that the device can't see, such as the steps of an executor that runs ahead: caches that
  // were resumed with a step stream free pages only once the newest step submitted at that time is
  // complete. Steps count from 1 and complete in order.
  [[nodiscard]] StreamHandle make_step_stream();
  uint64_t submit_step(StreamHandle stream);
  void complete_step(StreamHandle stream, uint64_t step);
  // Forgets every cached prefix. Throws ResourceBusy, changing nothing, while caches are open.
  void clear_reusable_blocks();
  // Refuses further use. Throws ResourceBusy, changing nothing, while caches are open. Idempotent.
  void shutdown();

  // One call per step. Entry i concerns caches[i]; results[i] is 1 or 0 and
  // caches[i]->last_failure() says why. Arguments are checked first: InvalidArgument and LogicError
  // mean that nothing was done. Then caches are served in order; one that finds no room does not
  // stop the next. What the device throws does: results tell which were served before. Each cache
  // may occur once.
  void resize_many(std::span<KVCache* const> caches, std::span<const int32_t> capacities,
                   std::span<const int32_t> history_lengths,  // may be empty: keep
                   std::span<uint8_t> results);
  // counts[i] tokens for caches[i], concatenated in `tokens`; empty `counts` means one each.
  void commit_many(std::span<KVCache* const> caches, std::span<const TokenId> tokens,
                   std::span<const int32_t> counts);
  // caches[i]->truncate(num_tokens[i]); a throw means that nothing was done.
  void truncate_many(std::span<KVCache* const> caches, std::span<const int32_t> num_tokens);
  void resume_many(std::span<KVCache* const> caches, std::optional<int64_t> stream,
                   std::span<uint8_t> results);

  // Sizes; bodies in kv_cache_manager_sizing.cpp. All of it works while sequences are active, and
  // no address changes; page_index_upper_bound() and num_slots follow what is there.
  //
  // Takes a level to `quota` bytes, rounded up. Growing: at once, or throws OutOfMemory and nothing
  // changed. Shrinking waits for copies, not for sequences: when locked pages or pages that have
  // nowhere to go are in the way, nothing changes and the result has the reason; with `best_effort`
  // it returns without waiting, the slots that are to go are not handed out any more, and
  // maintain() goes on. Below the least quota nothing changes. A later call takes the place of what
  // was pending. Throws InvalidArgument for a quota of more than 8 times the first one,
  // or 16 TiB over all pool groups.
  [[nodiscard]] ResizeResult resize(int level, int64_t quota, bool best_effort = false);
  // Work on levels that are on their way to other sizes, at most `max_pages` pages (>= 1); returns
  // how many moved. To be called between steps; nothing but one load when nothing is pending.
  int64_t maintain(int64_t max_pages);
  [[nodiscard]] bool is_resizing() const noexcept;
  // Whether the lengths of closed sequences ask for other shares of the pool groups, on the hot or
  // the coldest level: see the rebalance_... fields of the config.
  [[nodiscard]] bool need_adjustment() const;
  // Starts to move memory between the pool groups of every level that is far enough off; maintain()
  // goes on with it. False when there is nothing to do. Starts the cooldown in any case.
  bool adjust();
  // Shares of the level's bytes per pool group; targets: none before the first were learnt.
  [[nodiscard]] std::vector<double> pool_ratios(int level = kHotLevel) const;
  [[nodiscard]] std::optional<std::vector<double>> target_ratios(int level = kHotLevel) const;
  // Caches of this id, which serve warm-up or captures, count for nothing in adjust().
  void mark_stats_excluded(int64_t id);
  [[nodiscard]] bool is_stats_excluded(int64_t id) const;
  // The most tokens, <= upper, that one sequence can have next to batch_size - 1 of one token.
  [[nodiscard]] int64_t clamp_max_seq_len_for_mem(int64_t batch_size, int64_t upper) const;
  // When a request can run to its end without preempting anyone. `running`: active caches; those
  // that are left out are taken to keep what they have for ever. No other thread may drive them
  // meanwhile. Throws InvalidArgument.
  [[nodiscard]] AdmissionForecast forecast_admission(std::span<const ExpectedLength> running,
                                                     const SequencePlan& request) const;

  // Layout. Unknown layers, roles and groups throw InvalidArgument.
  // What page indices of the buffer count from. No mode means SHARED, and is refused with
  // InvalidArgument when config.swa_scratch_reuse is set: scratch blocks exist in PER_LAYER alone.
  [[nodiscard]] uint64_t mem_pool_base_address(
      int32_t layer_id, const std::string& role,
      std::optional<PageIndexMode> mode = std::nullopt) const;
  // Nothing: it depends on the cache (ScratchSlots::supports).
  [[nodiscard]] std::optional<bool> supports_index_mode(PageIndexMode mode) const noexcept;
  [[nodiscard]] const BufferAttr& buffer_attr(int32_t layer_id, const std::string& role) const;
  [[nodiscard]] int64_t page_stride(int32_t layer_id, const std::string& role) const;
  [[nodiscard]] int32_t page_index_scale(int32_t layer_id, const std::string& role) const;
  [[nodiscard]] int64_t page_index_upper_bound(int32_t layer_id, const std::string& role) const;
  [[nodiscard]] PageIndexConverter page_index_converter(int32_t layer_id,
                                                        const std::string& role) const;
  [[nodiscard]] LifeCycleId layer_group_id(int32_t layer_id) const;
  [[nodiscard]] const LifeCycle& life_cycle(LifeCycleId group) const;
  [[nodiscard]] PoolGroupId pool_group_of(LifeCycleId group) const;
  [[nodiscard]] std::vector<std::vector<int32_t>> layer_grouping() const;  // [layer group][..]
  [[nodiscard]] std::vector<PoolGroupDesc> pool_group_descs() const;
  [[nodiscard]] size_t num_layer_groups() const noexcept;
  [[nodiscard]] int32_t tokens_per_block() const noexcept;
  [[nodiscard]] const KVCacheManagerConfig& init_config() const noexcept;
  // Bytes in effect at `level`: the request rounded up, raised when the floors needed it.
  [[nodiscard]] int64_t quota(int level) const;

  [[nodiscard]] std::vector<PoolGroupStatistics> storage_statistics(int level = kHotLevel) const;
  [[nodiscard]] KVCacheStats stats() const;
  [[nodiscard]] std::vector<LifeCycleStats> life_cycle_stats() const;
  [[nodiscard]] MigrationStats migration_stats() const;
  [[nodiscard]] int num_levels() const noexcept;
  [[nodiscard]] CacheTier tier(int level) const;
  // The oldest recorded changes of the tree of reusable blocks, at most `max_events`; they leave
  // the buffer of config.event_buffer_size. When it overflows the oldest events are dropped, which
  // num_dropped_events() and a gap in the ids tell; snapshot_events() sets a listener right.
  [[nodiscard]] std::vector<KVEvent> drain_events(size_t max_events = SIZE_MAX);
  // Created and stored events that make the tree as it is now, parents first; the buffer is
  // emptied, so that drain_events() goes on from here. All carry the id that the next event will
  // have. Works without a buffer too.
  [[nodiscard]] std::vector<KVEvent> snapshot_events();
  [[nodiscard]] uint64_t num_dropped_events() const;
  [[nodiscard]] size_t num_open_caches() const;
  // Blocks that sequences of any length can still get, and the most the pools can ever give.
  [[nodiscard]] int64_t num_available_blocks() const;
  [[nodiscard]] int64_t num_total_blocks() const;
  // The chain keys of the full blocks of `tokens`, as they would be committed.
  [[nodiscard]] std::vector<Digest> chain_keys(std::span<const TokenId> tokens,
                                               const ReuseScope& scope = {}) const;

  // From now on every call is written to an operation log (operation_log.h), with its results,
  // until stop_recording() or the end of the manager. Calls are then run one after the other.
  // Throws LogicError when a cache was made or a level resized before, when a recording is running
  // or after shutdown(); InvalidArgument for bad options or a file that can't be made, changing
  // nothing. No other thread may be inside a call when it begins.
  void start_recording(const RecordingOptions& options);
  // Throws LogicError when no recording is running.
  RecordingSummary stop_recording();
  [[nodiscard]] bool is_recording() const;

 private:
  friend struct Introspection;
  void check_open(const char* where) const;
  // Blocks from the start that other caches hold as well.
  [[nodiscard]] int32_t count_shared_prefix(const KVCache& cache) const noexcept;
  void check_level(const char* where, int level) const;
  class Batch;

  std::unique_ptr<ManagerState> state_;
};

}  // namespace helicore::kv
