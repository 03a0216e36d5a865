// The pages of one sequence.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "helicore/core/types.h"
#include "helicore/kv/cache_device.h"
#include "helicore/kv/errors.h"
#include "helicore/kv/index_table.h"
#include "helicore/kv/kv_cache_fields.h"
#include "helicore/kv/page_slab.h"
#include "helicore/kv/planned_drop.h"
#include "helicore/kv/prefetch.h"
#include "helicore/kv/rebalance.h"
#include "helicore/kv/retention.h"
#include "helicore/kv/reuse_status.h"
#include "helicore/kv/scratch.h"
#include "helicore/kv/timeline.h"
#include "helicore/kv/types.h"

namespace helicore::kv {

struct ManagerState;
class KVCacheManager;

// One sequence's blocks, page tables and cursors. Made by KVCacheManager::create_kv_cache().
//
//   create (match held)          resume() true
//   ---------------> SUSPENDED ----------------> ACTIVE   resize, commit, page tables
//                     |   ^  <----------------    |
//                     |   |       suspend()       |
//                     |   '-- resume() false      |
//                     | close()                   | close()
//                     '--------> CLOSED <---------'
//
//   commit state: ALLOWED --- stop_committing(), close(), commit(is_end) ---> USER_STOP
//
// Cursors, in tokens:  num_committed <= history <= capacity; ceil(capacity / tokens_per_block)
// blocks
//   [0, num_committed)        final: full blocks are in the radix tree and may be reused
//   [num_committed, history)  written, still private
//   [history, capacity)       reserved for the next step
//
// Owner: the caller. The manager knows its open caches and must outlive them; destroying one closes
// it. Threads: one thread drives a cache at a time; different caches of a manager may be driven by
// different threads. A call that throws or returns false leaves the cache as it was.
class KVCache : private KVCacheFields {
 public:
  ~KVCache();
  KVCache(const KVCache&) = delete;
  KVCache& operator=(const KVCache&) = delete;

  // SUSPENDED -> ACTIVE: locks the pages and fills the page tables. The first resume after a match
  // that ends inside a block copies that block into a private page. False when there is no room or,
  // with other sequences active, a pool group is used above max_util_for_resume. `stream` is the
  // one whose work touches the pages from now on: a cudaStream_t as an integer, or a step stream;
  // on the CPU any other number stands for work that is done when a call returns.
  [[nodiscard]] bool resume(std::optional<int64_t> stream = std::nullopt);
  // ACTIVE -> SUSPENDED: pages stay held, page tables read BAD, caller-owned rows of them are
  // filled with BAD and let go.
  void suspend();
  // Brings pages colder than `level` up to it, front blocks first, in batches that leave room for
  // other copies; best effort. SUSPENDED only. Never blocks. A second call replaces the first.
  [[nodiscard]] PrefetchTicket prefetch(int level = kHotLevel);
  // Sets the cursors; nullopt keeps one. ACTIVE only. False: no pages for a larger capacity. Throws
  // InvalidArgument when history would shrink, capacity < history, or a caller's row is too short.
  [[nodiscard]] bool resize(std::optional<int64_t> capacity,
                            std::optional<int64_t> history_length = std::nullopt);
  // For callers that must not block. nullopt when resize() might: another thread is inside the
  // manager, pages might move, the stream has to wait. resize() then does what is left.
  [[nodiscard]] std::optional<bool> try_resize(
      std::optional<int64_t> capacity, std::optional<int64_t> history_length = std::nullopt);
  // Rewinds to `num_tokens`, in [num_committed, capacity], tokens that were speculated and
  // rejected: capacity becomes num_tokens, history at most that. Blocks past the end go at once,
  // last first, and their table entries read BAD. Needs no page. ACTIVE or SUSPENDED.
  void truncate(int64_t num_tokens);
  // A SUSPENDED twin: the same committed tokens, scope, priority, stream and commit state; history
  // == capacity == our history. Takes no page: every block before history is shared. Rows from
  // history_length() on are written only after a resize() or resume() that follows the fork: it
  // gives the writer private copies of the blocks there that others hold or the tree shows (false
  // when there is no room). ACTIVE or SUSPENDED; caches close in any order.
  [[nodiscard]] std::unique_ptr<KVCache> fork(std::optional<int64_t> id = std::nullopt);
  // Declares the next tokens final; their rows must be written. Full blocks become reusable. When
  // another sequence committed the same block first, its pages are adopted and ours freed: page
  // tables may change. Needs no page. `is_end` stops committing afterwards. Throws LogicError when
  // the rows are shared with a fork, InvalidArgument when a fork committed other tokens for them.
  void commit(std::span<const TokenId> tokens, bool is_end = false);
  // Publishes the committed part of the last block, when partial reuse is on. Idempotent.
  void stop_committing();
  // A plan to drop, when its caller says so, the pages that only the exact continuation of this
  // sequence would reuse: window pages at its end and its last snapshot. After stop_committing().
  // Null when the committed tokens can't all be reused.
  [[nodiscard]] std::unique_ptr<PlannedDrop> plan_committed_block_drop();
  // Gives every page back, last block first. Idempotent; the destructor calls it.
  void close();

  // Slots of the life cycle's blocks [num_blocks]; BAD while not active. Valid until the next
  // resize, commit, suspend, set_base_page_index_buf or close of this cache.
  [[nodiscard]] std::span<const int32_t> base_page_indices(LifeCycleId group, int beam = 0) const;
  // From now on the table is kept in `row` (entries past num_blocks are BAD); an empty optional
  // goes back to the cache's own memory. The row must live until it is replaced or the cache is
  // suspended or closed.
  void set_base_page_index_buf(int beam, LifeCycleId group, std::optional<std::span<int32_t>> row);
  // Slots of all blocks whether active or not, for transfers; with `valid_only` without BAD
  // entries.
  [[nodiscard]] std::vector<int32_t> aggregated_page_indices(LifeCycleId group, int beam,
                                                             bool valid_only) const;

  // The manager that made it; null once that is gone.
  [[nodiscard]] KVCacheManager* manager() const noexcept;
  [[nodiscard]] int64_t id() const noexcept { return id_; }
  // Its number among the caches that the manager made, from 0.
  [[nodiscard]] int64_t serial() const noexcept { return serial_; }
  [[nodiscard]] CacheStatus status() const noexcept { return status_; }
  [[nodiscard]] CommitState commit_state() const noexcept { return commit_state_; }
  [[nodiscard]] bool is_active() const noexcept { return status_ == CacheStatus::kActive; }
  [[nodiscard]] int32_t capacity() const noexcept { return capacity_; }
  [[nodiscard]] int32_t history_length() const noexcept { return history_length_; }
  [[nodiscard]] int32_t num_committed_tokens() const noexcept { return num_committed_; }
  [[nodiscard]] int32_t num_blocks() const noexcept { return num_blocks_; }
  [[nodiscard]] int32_t tokens_per_block() const noexcept { return tokens_per_block_; }
  // Tokens that creation found in the tree, and how many of them had a page on each level, counted
  // where the coldest page of their block was.
  [[nodiscard]] int32_t num_reused_tokens() const noexcept { return num_reused_; }
  [[nodiscard]] const std::vector<int32_t>& cached_tokens_by_level() const noexcept {
    return reused_by_level_;
  }
  // What creation found for each layer group. A page of an OPTIONAL group that is lost while the
  // cache is suspended does not keep it from being resumed: it gets an empty page in its place, and
  // from then on this tells what all groups have of the history at that time. Empty when closed.
  [[nodiscard]] std::vector<ReuseStatus> reuse_status() const;
  // Before the first resume: of the OPTIONAL groups only `groups` keep what was found for them, the
  // others begin with empty pages. Without this call all keep it. Throws InvalidArgument for
  // another group, LogicError after a resume; nothing changed.
  void select_optional_reuse(std::span<const LifeCycleId> groups);
  // Slot of the recurrent state; BAD while not active or without one.
  [[nodiscard]] int32_t ssm_base_index() const;
  // Pages of the cache were lost by a failed copy: it can only be closed.
  [[nodiscard]] bool is_lost() const noexcept { return is_lost_; }
  [[nodiscard]] std::vector<TokenId> committed_tokens() const;
  [[nodiscard]] const ReuseScope& reuse_scope() const noexcept { return scope_; }
  [[nodiscard]] int priority() const noexcept { return retention_.base(); }
  [[nodiscard]] std::optional<int64_t> stream() const noexcept { return stream_; }
  // Goes on after the old one. Throws LogicError while a step of that runs, InvalidArgument for a
  // negative number that is no step stream.
  void set_stream(int64_t stream);
  // Of prefill steps with swa_scratch_reuse.
  [[nodiscard]] const ScratchSlots& scratch() const noexcept { return scratch_; }
  [[nodiscard]] ScratchSlots& scratch() noexcept { return scratch_; }
  // Why the last resume or resize returned false; nullopt after a success.
  [[nodiscard]] const std::optional<NoRoom>& last_failure() const noexcept { return last_failure_; }

 private:
  friend class KVCacheManager;
  friend class LevelSizer;
  friend class PrefetchTicket;
  friend struct ManagerState;
  friend class ScratchSlots;
  friend struct Introspection;

  // Matches and holds; call with the lock.
  KVCache(ManagerState& state, const CreateArgs& args);
  void hold_block(NodeId node, int32_t ordinal);
  // The fork of `parent`; call with the lock.
  KVCache(const KVCache& parent, std::optional<int64_t> id);

  using Cursors = StepCursors;
  [[nodiscard]] Cursors cursors() const noexcept { return {capacity_, history_length_}; }
  // Validates the arguments of resize; changes nothing.
  [[nodiscard]] Cursors check_resize(std::optional<int64_t> capacity,
                                     std::optional<int64_t> history) const;
  void check_commit(size_t num_tokens) const;
  // The last check of a commit while blocks may be shared with forks; call with the lock.
  void check_forked_commit(std::span<const TokenId> tokens) const;
  [[nodiscard]] int32_t check_truncate(const char* where, int64_t num_tokens) const;
  void check_tokens(std::span<const TokenId> tokens) const;
  void check_intact(const char* where) const;
  // True when the new capacity needs the same blocks: three integers change, no lock needed.
  [[nodiscard]] bool resize_within_blocks(const Cursors& cursors) noexcept;
  [[nodiscard]] bool fills_no_block(size_t num_tokens) const noexcept;
  [[nodiscard]] bool makes_stale(int32_t history) const noexcept;

  // With the lock held, arguments checked.
  [[nodiscard]] bool resize_locked(const Cursors& cursors);
  [[nodiscard]] std::optional<NoRoom> make_room_to_resize(const Cursors& cursors,
                                                          int32_t num_blocks);
  void shrink_locked(int32_t num_blocks);
  void grow_locked(int32_t num_blocks, const Cursors& cursors);
  [[nodiscard]] bool truncate_within_blocks(int32_t num_tokens) noexcept;
  // Throws when a window has let go of blocks that the shorter history needs.
  void check_rewind(const char* where, int32_t num_tokens) const;
  void truncate_locked(int32_t num_tokens);
  // `keep_sources`: hot pages that are to be copied stay where they are.
  [[nodiscard]] std::optional<NoRoom> make_room_to_resume(bool keep_sources);
  [[nodiscard]] bool resume_locked(std::optional<int64_t> stream);
  void lock_pages();
  // Copies of forks that still read the pages which are written next.
  void wait_for_readers();
  // What others read of our pages comes after what our stream has by now.
  void set_written_locked();
  void suspend_locked();
  void commit_locked(std::span<const TokenId> tokens, bool is_end);
  void commit_full_block(std::span<const TokenId> tokens);
  void adopt_block(NodeId node, int32_t ordinal);
  bool adopt_page(NodeId node, int32_t ordinal, size_t life_cycle);
  void stop_committing_locked(bool may_move_state);
  void publish_tail();
  // A recurrent state as of num_committed, in the tree. Best effort: false without room.
  bool snapshot_state(bool may_move);
  // Shows the committed part of the last block: copies of its pages, or the pages themselves.
  [[nodiscard]] NodeId insert_tail_copies();
  [[nodiscard]] NodeId tail_node_with_own_pages();
  // Others may find the block's page of the group.
  [[nodiscard]] bool may_show(int32_t ordinal, size_t life_cycle) const noexcept;
  [[nodiscard]] bool is_tail_copied(int32_t ordinal, size_t life_cycle) const noexcept;
  void close_locked();
  void pump_prefetch();
  // Moves history on; blocks that become stale are let go, or kept until they are committed.
  void advance_history(int32_t history);
  void let_go_stale(int32_t ordinal, size_t life_cycle);
  [[nodiscard]] std::vector<Yield> count_yields(const Cursors& cursors) const;
  // New pages of the life cycle: of blocks, and scratch slots.
  [[nodiscard]] int32_t count_growth(size_t life_cycle, const Cursors& cursors) const;
  // Drops pages that advance_history() made droppable until the blocks to come have slots.
  void drop_stale_until(const Cursors& cursors);
  [[nodiscard]] bool keeps_stale_until_commit(int32_t ordinal, size_t life_cycle) const noexcept;

  // Slots per pool group for the private copies that rows from history_length() on need in blocks
  // below `end`; true when there are any.
  bool add_copies(int32_t end, std::span<int32_t> need) const;
  [[nodiscard]] bool must_copy(int32_t ordinal, size_t life_cycle) const noexcept;
  [[nodiscard]] bool must_copy_state() const noexcept;
  [[nodiscard]] bool is_shared(int32_t ordinal) const noexcept;
  [[nodiscard]] bool any_shared(int32_t begin, int32_t end) const noexcept;
  // Gives the blocks that add_copies() counts private copies; needs the slots. Throws what the
  // device throws, nothing changed.
  void copy_blocks_locked(int32_t end);
  void copy_page(PageHandle from, PageHandle to);
  [[nodiscard]] PageHandle fresh_page(int32_t ordinal, size_t life_cycle);
  [[nodiscard]] uint8_t priority_of(int32_t ordinal) const noexcept;
  // The block's pages have been committed: their retention begins.
  void start_retention(NodeId node, int32_t ordinal);
  void mark_block(int32_t ordinal);  // after a private duplicate
  void raise_above(NodeId node);
  void install_page(const Replacement& replacement);
  void release_block_locked(int32_t ordinal);
  void release_page(int32_t ordinal, size_t life_cycle);
  void release_state();
  void look_for_lost_pages();
  // A page that is lost belongs to a group that is not OPTIONAL, or is the recurrent state.
  [[nodiscard]] bool lost_required() const noexcept;
  // Of history.
  [[nodiscard]] TokenRange rows_of(int32_t ordinal) const noexcept;
  // Suspended: the group's rows of the block are missing from now on.
  void forget_optional(int32_t ordinal, size_t life_cycle);
  // None of the block's tokens is missing in the group.
  [[nodiscard]] bool has_all_rows(int32_t ordinal, size_t life_cycle) const noexcept;
  void reserve_tables(int32_t num_blocks);
  void unregister() noexcept;
  bool fail(const NoRoom& reason, uint64_t& counter) noexcept;
  [[nodiscard]] bool has_blocks_for(int64_t capacity) const noexcept {
    return capacity <= int64_t{num_blocks_} * tokens_per_block_;
  }

  // Order against the work of the cache's stream.
  [[nodiscard]] StreamHandle device_stream() const noexcept;
  [[nodiscard]] TimePoint fence() const;
  void wait_for(TimePoint point);
  // Without the lock: the stream waits for what the last operation has started. False when data
  // were lost on the way; the cache is suspended then.
  [[nodiscard]] bool finish_waits(uint64_t& failure_counter);
  // The stream waits; true when data may have been lost on the way.
  [[nodiscard]] bool look_after_waits();
  // The same after a resume: what OPTIONAL groups lost is left out, and the resume goes on.
  [[nodiscard]] bool finish_resume();
  void flush_waits();

  [[nodiscard]] HalfOpenRange<int32_t> stale(size_t life_cycle, int32_t history) const noexcept;
  // The page is locked by this cache: active, with a page there that is not stale.
  [[nodiscard]] bool is_live(int32_t ordinal, size_t life_cycle) const noexcept;
  [[nodiscard]] NodeId shown_node(int32_t ordinal) const noexcept;
  [[nodiscard]] int32_t num_full_blocks() const noexcept {
    return num_committed_ / tokens_per_block_;
  }
  [[nodiscard]] PageHandle& page(int32_t ordinal, size_t life_cycle) noexcept {
    return pages_[static_cast<size_t>(ordinal) * tables_.size() + life_cycle];
  }
  [[nodiscard]] const PageHandle& page(int32_t ordinal, size_t life_cycle) const noexcept {
    return pages_[static_cast<size_t>(ordinal) * tables_.size() + life_cycle];
  }
  [[nodiscard]] const IndexTable& table(LifeCycleId group, int beam) const;

  ScratchSlots scratch_;
};

}  // namespace helicore::kv
