// Rewinding and forking a sequence, and the private copies that its next writer needs.
#include <algorithm>
#include <mutex>

#include "helicore/core/error.h"
#include "helicore/kv/kv_cache.h"
#include "helicore/kv/manager_state.h"
#include "helicore/kv/recorded_calls.h"

namespace helicore::kv {

void KVCache::truncate(int64_t num_tokens) {
  if (auto* sink = recording(state_)) return recorded::truncate(*sink, *this, num_tokens);
  const int32_t end = check_truncate("kv.truncate", num_tokens);
  if (!kDebugChecks && truncate_within_blocks(end)) return;
  const std::unique_lock lock(state_->mutex);
  truncate_locked(end);
  state_->verify();
}

int32_t KVCache::check_truncate(const char* where, int64_t num_tokens) const {
  HELICORE_KV_STATE(status_ != CacheStatus::kClosed, where, "cache ", id_, " is CLOSED");
  HELICORE_CHECK(num_tokens >= num_committed_ && num_tokens <= capacity_, where,
                 "num_tokens must be in [num_committed_tokens, capacity] = [", num_committed_, ", ",
                 capacity_, "], got ", num_tokens);
  return static_cast<int32_t>(num_tokens);
}

bool KVCache::truncate_within_blocks(int32_t num_tokens) noexcept {
  if (ceil_div(num_tokens, tokens_per_block_) != num_blocks_) return false;
  capacity_ = num_tokens;
  history_length_ = std::min(history_length_, num_tokens);
  return true;
}

void KVCache::truncate_locked(int32_t num_tokens) {
  shrink_locked(ceil_div(num_tokens, tokens_per_block_));
  capacity_ = num_tokens;
  history_length_ = std::min(history_length_, num_tokens);
}

std::unique_ptr<KVCache> KVCache::fork(std::optional<int64_t> id) {
  if (auto* sink = recording(state_)) return recorded::fork(*sink, *this, id);
  HELICORE_KV_STATE(status_ != CacheStatus::kClosed, "kv.fork", "cache ", id_, " is CLOSED");
  const std::unique_lock lock(state_->mutex);
  std::unique_ptr<KVCache> child(new KVCache(*this, id));
  may_share_ = may_share_ || child->may_share_;
  ++state_->stats.num_forks;
  state_->verify();
  return child;
}

KVCache::KVCache(const KVCache& parent, std::optional<int64_t> id)
    : state_(parent.state_),
      tokens_per_block_(parent.tokens_per_block_),
      commit_state_(parent.commit_state_),
      needs_copy_(parent.needs_copy_),
      priority_(parent.priority_),
      tables_(parent.tables_.size()),
      stream_(parent.stream_),
      id_(id.value_or(parent.state_->next_id)),
      serial_(parent.state_->next_id),
      num_reused_(parent.num_reused_),
      scope_(parent.scope_) {
  ManagerState& state = *state_;
  const int32_t num_blocks = ceil_div(parent.history_length_, tokens_per_block_);
  tail_tokens_.reserve(static_cast<size_t>(tokens_per_block_));
  pages_.reserve(static_cast<size_t>(num_blocks) * tables_.size());
  reserve_tables(num_blocks);
  state.caches.reserve(state.caches.size() + 1);

  // Nothing fails from here on.
  tail_tokens_.assign(parent.tail_tokens_.begin(), parent.tail_tokens_.end());
  pages_.assign(parent.pages_.begin(),
                parent.pages_.begin() +
                    static_cast<std::ptrdiff_t>(static_cast<size_t>(num_blocks) * tables_.size()));
  const int32_t first_shared = parent.num_committed_ / tokens_per_block_;
  for (int32_t b = 0; b < num_blocks; ++b) {
    for (size_t lc = 0; lc < tables_.size(); ++lc) {
      state.store.hold(page(b, lc).id, priority_);
      if (b >= first_shared && !needs_copy_) state.store.mark_forked(page(b, lc));
    }
  }
  may_share_ = first_shared < num_blocks && !needs_copy_;
  tail_node_ = parent.tail_node_;
  state.tree.pin(tail_node_);
  num_blocks_ = num_blocks;
  num_committed_ = parent.num_committed_;
  history_length_ = capacity_ = parent.history_length_;
  ++state.next_id;
  registry_index_ = state.caches.size();
  state.caches.push_back(this);
}

KVCacheManager* KVCache::manager() const noexcept {
  return state_ == nullptr ? nullptr : state_->owner;
}

bool KVCache::is_shared(int32_t ordinal) const noexcept {
  const PageRecord& record = state_->store.page(page(ordinal, 0).id);
  return record.hold_count > 1 || record.node != kNoNode;
}

bool KVCache::any_shared(int32_t begin, int32_t end) const noexcept {
  for (int32_t b = begin; b < end; ++b) {
    if (is_shared(b)) return true;
  }
  return false;
}

bool KVCache::must_copy(int32_t ordinal) const noexcept {
  if (needs_copy_) return ordinal == num_blocks_ - 1;
  if (!may_share_) return false;
  const PageRecord& record = state_->store.page(page(ordinal, 0).id);
  if (record.hold_count > 1) return true;
  // Alone: rows behind those that the tree shows may be written in place.
  return record.node != kNoNode &&
         ordinal * tokens_per_block_ + record.num_tokens > history_length_;
}

int32_t KVCache::count_copies(int32_t end) const noexcept {
  if (!needs_copy_ && !may_share_) return 0;
  int32_t count = 0;
  for (int32_t b = history_length_ / tokens_per_block_; b < end; ++b) count += must_copy(b) ? 1 : 0;
  return count;
}

void KVCache::copy_blocks_locked(int32_t end) {
  PageStore& store = state_->store;
  const int32_t begin = history_length_ / tokens_per_block_;
  // Last block first: a block is queued for eviction before the one in front of it.
  for (int32_t b = end - 1; b >= begin; --b) {
    if (!must_copy(b)) continue;
    for (size_t lc = 0; lc < tables_.size(); ++lc) {
      const PageHandle shared = page(b, lc);
      const PageHandle fresh = store.allocate(LifeCycleId(static_cast<int32_t>(lc)), priority_);
      store.copy_page(shared, fresh);
      page(b, lc) = fresh;
      if (is_active()) {
        store.lock(fresh);
        store.unlock(shared);
        tables_[lc].data[b] = store.page(fresh.id).slot.value();
      }
      store.unhold(shared);
    }
    ++state_->stats.allocated_blocks;
    ++state_->stats.copied_blocks;
  }
  needs_copy_ = false;
  may_share_ = may_share_ && any_shared(num_committed_ / tokens_per_block_, end);
}

void KVCache::check_forked_commit(std::span<const TokenId> tokens) const {
  const RadixTree& tree = state_->tree;
  const auto end = num_committed_ + static_cast<int32_t>(tokens.size());
  if (end > history_length_) {
    HELICORE_KV_STATE(count_copies(ceil_div(end, tokens_per_block_)) == 0, "kv.commit", "cache ",
                      id_, " shares the rows from history_length ", history_length_,
                      " on with a fork; call resize() before writing them");
  }
  // Rows that forks share hold the same tokens; whoever comes second must name the same ones.
  const auto block = static_cast<size_t>(tokens_per_block_);
  std::vector<TokenId> next = tail_tokens_;
  NodeId parent = tail_node_;
  for (int32_t b = num_committed_ / tokens_per_block_; next.size() + tokens.size() >= block; ++b) {
    const size_t taken = block - next.size();
    next.insert(next.end(), tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(taken));
    tokens = tokens.subspan(taken);
    const NodeId shown = state_->store.page(page(b, 0).id).node;
    if (shown != kNoNode) {
      const auto theirs = tree.tokens(shown);
      HELICORE_CHECK(parent != kNoNode && tree.node(shown).parent == parent &&
                         std::equal(theirs.begin(), theirs.end(), next.begin()),
                     "kv.commit", "tokens of block ", b,
                     " must be those that a fork committed for the same rows");
    }
    if (parent != kNoNode) parent = tree.find_child(parent, next);
    next.clear();
  }
}

}  // namespace helicore::kv
