// What a cache remembers. Internal: the members of KVCache, apart from what it does.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "helicore/core/types.h"
#include "helicore/kv/index_table.h"
#include "helicore/kv/page_slab.h"
#include "helicore/kv/prefetch.h"
#include "helicore/kv/rebalance.h"
#include "helicore/kv/retention.h"
#include "helicore/kv/reuse_status.h"
#include "helicore/kv/timeline.h"
#include "helicore/kv/types.h"

namespace helicore::kv {

struct ManagerState;

class alignas(64) KVCacheFields {
 protected:
  struct CreateArgs {
    ReuseScope scope;
    std::span<const TokenId> tokens;
    std::optional<int64_t> id;
    Retention retention;
  };

  KVCacheFields(ManagerState& state, const CreateArgs& args);
  // Of a fork of `parent`: no blocks, no cursors yet.
  KVCacheFields(const KVCacheFields& parent, std::optional<int64_t> id);
  KVCacheFields(const KVCacheFields&) = delete;
  KVCacheFields& operator=(const KVCacheFields&) = delete;
  ~KVCacheFields() = default;

  // What most calls of a decode step come to: full attention, nothing shared, lost or on its way,
  // and the last block goes on. Then there is nothing to check but the arguments, nothing to lock,
  // and only cursors change.
  [[nodiscard]] bool is_quiet() const noexcept {
    return is_plain_ && status_ == CacheStatus::kActive && !may_share_ && !has_waits_ &&
           !is_lost_.load(std::memory_order_relaxed);
  }
  [[nodiscard]] bool grows_quietly(int64_t capacity, int32_t tokens_per_block) const noexcept {
    const int64_t end = int64_t{num_blocks_} * tokens_per_block;
    return is_quiet() && capacity >= history_length_ && capacity <= end &&
           capacity > end - tokens_per_block;
  }
  [[nodiscard]] bool commits_quietly(size_t num_tokens, int32_t tokens_per_block) const noexcept {
    return is_quiet() && commit_state_ == CommitState::kAllowed &&
           num_tokens <= static_cast<size_t>(capacity_ - num_committed_) &&
           static_cast<size_t>(num_tail_) + num_tokens < static_cast<size_t>(tokens_per_block);
  }
  void set_capacity_quietly(int32_t capacity) noexcept {
    capacity_ = capacity;
    lengths_.add(capacity_, history_length_);
    if (has_failed_) forget_failure();
  }
  void commit_into_tail(std::span<const TokenId> tokens) {
    append_to_tail(tokens);
    num_committed_ += static_cast<int32_t>(tokens.size());
    history_length_ = std::max(history_length_, num_committed_);
  }
  // Committed tokens past the last full block; there is room for a block of them.
  [[nodiscard]] std::span<const TokenId> tail_tokens() const noexcept {
    return {tail_.get(), static_cast<size_t>(num_tail_)};
  }
  void prefetch_tail() const noexcept {
    constexpr int32_t kLine = 64 / sizeof(TokenId);
    for (int32_t i = 0; i < num_tail_; i += kLine) __builtin_prefetch(tail_.get() + i);
  }
  void append_to_tail(std::span<const TokenId> tokens) noexcept {
    TokenId* const end = tail_.get() + num_tail_;
    for (size_t i = 0; i < tokens.size(); ++i) end[i] = tokens[i];
    num_tail_ += static_cast<int32_t>(tokens.size());
  }
  void forget_failure() noexcept {
    last_failure_.reset();
    has_failed_ = false;
  }

  // What decode steps touch lies together, in the first cache line.
  ManagerState* state_;  // null once the manager is gone
  std::unique_ptr<TokenId[]> tail_;
  [[no_unique_address]] LengthMeans lengths_{};  // over its resizes
  uint32_t batch_ = 0;                           // serial of the last batch call that saw it
  int32_t capacity_ = 0;
  int32_t history_length_ = 0;
  int32_t num_committed_ = 0;
  int32_t num_blocks_ = 0;
  int32_t num_tail_ = 0;
  CacheStatus status_ = CacheStatus::kSuspended;
  CommitState commit_state_ = CommitState::kAllowed;
  // Set under the lock, by whoever takes in a failure; looked at without.
  std::atomic<bool> is_lost_{false};
  bool is_plain_ : 1 = true;       // full attention only: no block ever becomes stale
  bool may_share_ : 1 = false;     // forks may hold blocks that are not yet committed here
  bool has_waits_ : 1 = false;     // waits_ has entries
  bool has_failed_ : 1 = false;    // last_failure_ is set
  bool goes_quietly_ : 1 = false;  // what it found: grows_quietly(), commits_quietly()

  int32_t tokens_per_block_;
  int32_t max_blocks_ = INT32_MAX;  // entries of the shortest caller-owned row
  bool needs_copy_ = false;     // the last block is a shared page, to be copied at the first resume
  bool needs_state_ = false;    // the recurrent state is still to be made, from state_page_ if any
  bool has_duplicate_ = false;  // kept its own page of a block that the tree has from another
  bool owns_rows_ = false;      // a resize or resume since the last fork or rewind made rows from
                                // history_length() on ours; whoever else holds them only reads
  bool was_resumed_ = false;
  NodeId tail_node_ = kNoNode;    // last full committed block, or the root; pinned
  std::vector<TimePoint> waits_;  // what the stream waits for before it goes on
  Retention retention_;
  std::vector<PageHandle> pages_;   // [num_blocks][life cycle]; null: stale, or none
  PageHandle state_page_;           // the recurrent state
  std::vector<IndexTable> tables_;  // [life cycle]
  std::vector<PageHandle> stale_released_;
  std::vector<Replacement> replacements_;
  PrefetchState prefetch_;
  std::optional<NoRoom> last_failure_;
  std::optional<int64_t> stream_;
  int64_t id_;
  int64_t serial_;
  int32_t num_reused_ = 0;
  int32_t known_rows_ = 0;  // tokens that reuse_status() tells about
  MissingRows missing_{};   // of OPTIONAL and PRIVATE groups
  std::vector<int32_t> reused_by_level_;
  size_t registry_index_ = 0;  // in the manager's list of open caches
  ReuseScope scope_;
};

}  // namespace helicore::kv
