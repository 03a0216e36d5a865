#include "helicore/kv/kv_cache.h"

#include <algorithm>
#include <mutex>

#include "helicore/core/error.h"
#include "helicore/kv/manager_state.h"
#include "helicore/kv/recorded_calls.h"

namespace helicore::kv {
namespace {

// Room for `count` elements in all, growing by half at least: repeated calls cost amortised O(1)
// per element.
template <typename T>
void reserve_amortised(std::vector<T>& values, size_t count) {
  if (count > values.capacity()) {
    values.reserve(std::max(count, values.capacity() + values.capacity() / 2));
  }
}

}  // namespace

KVCache::KVCache(ManagerState& state, const CreateArgs& args)
    : state_(&state),
      tokens_per_block_(state.config.tokens_per_block),
      priority_(static_cast<uint8_t>(args.priority)),
      tables_(state.num_life_cycles),
      id_(args.id.value_or(state.next_id)),
      serial_(state.next_id),
      scope_(args.scope) {
  tail_tokens_.reserve(static_cast<size_t>(tokens_per_block_));
  const bool partial = state.config.enable_partial_reuse;
  const NodeId root = state.tree.find_or_create_root(scope_);
  std::vector<NodeId>& path = state.path_scratch;
  path.clear();
  int32_t matched = state.tree.match(root, args.tokens, partial, &path);
  matched = std::max(0, matched - state.config.reuse_match_backoff);
  if (!partial) matched -= matched % tokens_per_block_;
  const int32_t num_blocks = ceil_div(matched, tokens_per_block_);
  pages_.reserve(static_cast<size_t>(num_blocks) * tables_.size());
  reserve_tables(num_blocks);
  reserve_amortised(state.caches, state.caches.size() + 1);

  // Nothing fails from here on.
  tail_node_ = root;
  for (int32_t b = 0; b < num_blocks; ++b) {
    const NodeId node = path[static_cast<size_t>(b)];
    state.tree.hold(node, priority_);
    for (PageId id : state.tree.pages(node)) {
      pages_.push_back(state.store.pages().handle(id));
    }
    if ((b + 1) * tokens_per_block_ <= matched) tail_node_ = node;
  }
  state.tree.pin(tail_node_);
  num_blocks_ = num_blocks;
  num_reused_ = num_committed_ = history_length_ = capacity_ = matched;
  const auto tail = static_cast<size_t>(matched % tokens_per_block_);
  needs_copy_ = tail > 0;
  const auto committed = args.tokens.first(static_cast<size_t>(matched));
  tail_tokens_.assign(committed.end() - static_cast<std::ptrdiff_t>(tail), committed.end());
  for (IndexTable& table : tables_) {
    std::fill_n(table.data, static_cast<size_t>(num_blocks), kBadPageIndex);
  }
  ++state.next_id;
  registry_index_ = state.caches.size();
  state.caches.push_back(this);
}

KVCache::~KVCache() {
  try {
    close();
  } catch (const std::exception& error) {
    log_error(detail::concat("kv.KVCache: closing cache ", id_, " failed: ", error.what()));
  }
}

bool KVCache::resume(std::optional<int64_t> stream) {
  if (auto* sink = recording(state_)) return recorded::resume(*sink, *this, stream);
  HELICORE_KV_STATE(status_ == CacheStatus::kSuspended, "kv.resume", "cache ", id_, " is ",
                    name_of(status_), ", must be SUSPENDED");
  const std::unique_lock lock(state_->mutex);
  const bool resumed = resume_locked(stream);
  state_->verify();
  return resumed;
}

void KVCache::suspend() {
  if (auto* sink = recording(state_)) return recorded::suspend(*sink, *this);
  HELICORE_KV_STATE(is_active(), "kv.suspend", "cache ", id_, " is ", name_of(status_),
                    ", must be ACTIVE");
  const std::unique_lock lock(state_->mutex);
  suspend_locked();
  state_->verify();
}

bool KVCache::resize(std::optional<int64_t> capacity, std::optional<int64_t> history_length) {
  if (auto* sink = recording(state_))
    return recorded::resize(*sink, *this, capacity, history_length);
  const Cursors cursors = check_resize(capacity, history_length);
  if (!kDebugChecks && resize_within_blocks(cursors)) return true;
  const std::unique_lock lock(state_->mutex);
  const bool resized = resize_locked(cursors);
  state_->verify();
  return resized;
}

void KVCache::commit(std::span<const TokenId> tokens, bool is_end) {
  if (auto* sink = recording(state_)) return recorded::commit(*sink, *this, tokens, is_end);
  check_commit(tokens.size());
  check_tokens(tokens);
  if (!kDebugChecks && fills_no_block(tokens.size()) && !is_end) {
    commit_into_tail(tokens);
    return;
  }
  const std::unique_lock lock(state_->mutex);
  state_->tree.reserve_nodes(tokens.size() / static_cast<size_t>(tokens_per_block_) + 2);
  commit_locked(tokens);
  if (is_end) stop_committing_locked();
  state_->verify();
}

void KVCache::stop_committing() {
  if (auto* sink = recording(state_)) return recorded::stop_committing(*sink, *this);
  HELICORE_KV_STATE(status_ != CacheStatus::kClosed, "kv.stop_committing", "cache ", id_,
                    " is CLOSED");
  const std::unique_lock lock(state_->mutex);
  state_->tree.reserve_nodes(1);
  stop_committing_locked();
  state_->verify();
}

void KVCache::close() {
  if (status_ == CacheStatus::kClosed) return;
  if (auto* sink = recording(state_)) return recorded::close(*sink, *this);
  const std::unique_lock lock(state_->mutex);
  close_locked();
  state_->verify();
}

KVCache::Cursors KVCache::check_resize(std::optional<int64_t> capacity,
                                       std::optional<int64_t> history) const {
  HELICORE_KV_STATE(is_active(), "kv.resize", "cache ", id_, " is ", name_of(status_),
                    ", must be ACTIVE");
  const int64_t new_capacity = capacity.value_or(capacity_);
  const int64_t new_history = history.value_or(history_length_);
  HELICORE_CHECK(new_history >= history_length_, "kv.resize",
                 "history_length must not shrink, got ", new_history, " < ", history_length_);
  HELICORE_CHECK(new_capacity >= new_history, "kv.resize",
                 "capacity must be >= history_length, got ", new_capacity, " < ", new_history);
  HELICORE_CHECK(new_capacity <= INT32_MAX - tokens_per_block_, "kv.resize",
                 "capacity must be < 2^31 - tokens_per_block, got ", new_capacity);
  const int32_t blocks = ceil_div(static_cast<int32_t>(new_capacity), tokens_per_block_);
  HELICORE_CHECK(blocks <= max_blocks_, "kv.resize", "capacity needs ", blocks,
                 " page table entries, the row set by set_base_page_index_buf has ", max_blocks_);
  return {static_cast<int32_t>(new_capacity), static_cast<int32_t>(new_history)};
}

void KVCache::check_commit(size_t num_tokens) const {
  HELICORE_KV_STATE(is_active(), "kv.commit", "cache ", id_, " is ", name_of(status_),
                    ", must be ACTIVE");
  HELICORE_KV_STATE(commit_state_ == CommitState::kAllowed, "kv.commit", "cache ", id_,
                    " has stopped committing");
  HELICORE_CHECK(num_tokens <= static_cast<size_t>(capacity_ - num_committed_), "kv.commit",
                 "tokens must fit into the capacity: ", num_committed_, " committed + ", num_tokens,
                 " > capacity ", capacity_);
}

void KVCache::check_tokens(std::span<const TokenId> tokens) const {
  TokenId lowest = 0;
  for (TokenId token : tokens) lowest = std::min(lowest, token);
  HELICORE_CHECK(lowest >= 0, "kv.commit", "tokens must be >= 0, got ", lowest);
}

bool KVCache::resize_within_blocks(const Cursors& cursors) noexcept {
  if (may_share_ || ceil_div(cursors.capacity, tokens_per_block_) != num_blocks_) return false;
  capacity_ = cursors.capacity;
  history_length_ = cursors.history;
  last_failure_.reset();
  return true;
}

bool KVCache::fills_no_block(size_t num_tokens) const noexcept {
  return !may_share_ && tail_tokens_.size() + num_tokens < static_cast<size_t>(tokens_per_block_);
}

void KVCache::commit_into_tail(std::span<const TokenId> tokens) {
  tail_tokens_.insert(tail_tokens_.end(), tokens.begin(), tokens.end());
  num_committed_ += static_cast<int32_t>(tokens.size());
  history_length_ = std::max(history_length_, num_committed_);
}

bool KVCache::resize_locked(const Cursors& cursors) {
  ManagerState& state = *state_;
  const int32_t num_blocks = ceil_div(cursors.capacity, tokens_per_block_);
  const int32_t copies = count_copies(std::min(num_blocks, num_blocks_));
  const int32_t needed = std::max(0, num_blocks - num_blocks_) + copies;
  if (needed > 0) {
    if (const auto reason = state.plan(needed)) return fail(*reason, state.stats.failed_resizes);
    reserve_amortised(pages_, static_cast<size_t>(num_blocks) * tables_.size());
    reserve_tables(num_blocks);
    state.make_room(needed);
  }
  if (may_share_) copy_blocks_locked(std::min(num_blocks, num_blocks_));
  if (num_blocks > num_blocks_) {
    grow_locked(num_blocks);
  } else {
    shrink_locked(num_blocks);
  }
  capacity_ = cursors.capacity;
  history_length_ = cursors.history;
  last_failure_.reset();
  return true;
}

void KVCache::grow_locked(int32_t num_blocks) {
  ManagerState& state = *state_;
  const int32_t added = num_blocks - num_blocks_;
  for (int32_t b = num_blocks_; b < num_blocks; ++b) {
    for (size_t lc = 0; lc < tables_.size(); ++lc) {
      const PageHandle handle =
          state.store.allocate(LifeCycleId(static_cast<int32_t>(lc)), priority_);
      state.store.lock(handle);
      pages_.push_back(handle);
      tables_[lc].data[b] = state.store.page(handle.id).slot.value();
    }
  }
  num_blocks_ = num_blocks;
  state.stats.allocated_blocks += static_cast<uint64_t>(added);
}

void KVCache::shrink_locked(int32_t num_blocks) {
  for (int32_t b = num_blocks_ - 1; b >= num_blocks; --b) release_block_locked(b);
  pages_.resize(static_cast<size_t>(num_blocks) * tables_.size());
  num_blocks_ = num_blocks;
}

void KVCache::release_block_locked(int32_t ordinal) {
  for (size_t lc = 0; lc < tables_.size(); ++lc) {
    const PageHandle handle = page(ordinal, lc);
    if (is_active()) {
      state_->store.unlock(handle);
      tables_[lc].data[ordinal] = kBadPageIndex;
    }
    state_->store.unhold(handle);
  }
}

bool KVCache::resume_locked(std::optional<int64_t> stream) {
  ManagerState& state = *state_;
  auto reason = state.utilisation_gate();
  const int32_t copies = count_copies(num_blocks_);
  if (!reason && copies > 0) reason = state.plan(copies);
  if (reason) return fail(*reason, state.stats.failed_resumes);
  if (copies > 0) state.make_room(copies);
  if (needs_copy_ || may_share_) copy_blocks_locked(num_blocks_);
  for (int32_t b = 0; b < num_blocks_; ++b) {
    for (size_t lc = 0; lc < tables_.size(); ++lc) {
      const PageHandle handle = page(b, lc);
      state.store.lock(handle);
      tables_[lc].data[b] = state.store.page(handle.id).slot.value();
    }
  }
  if (stream) stream_ = stream;
  status_ = CacheStatus::kActive;
  last_failure_.reset();
  ++state.num_active;
  ++state.stats.num_resumes;
  return true;
}

void KVCache::suspend_locked() {
  for (int32_t b = 0; b < num_blocks_; ++b) {
    for (size_t lc = 0; lc < tables_.size(); ++lc) state_->store.unlock(page(b, lc));
  }
  for (IndexTable& table : tables_) {
    std::fill_n(table.data, static_cast<size_t>(num_blocks_), kBadPageIndex);
    if (!table.is_external) continue;
    table.move_to_own(static_cast<size_t>(num_blocks_), 0);
  }
  max_blocks_ = INT32_MAX;
  status_ = CacheStatus::kSuspended;
  --state_->num_active;
  ++state_->stats.num_suspends;
}

void KVCache::commit_locked(std::span<const TokenId> tokens) {
  if (may_share_) check_forked_commit(tokens);
  const auto block = static_cast<size_t>(tokens_per_block_);
  while (tail_tokens_.size() + tokens.size() >= block) {
    const size_t taken = block - tail_tokens_.size();
    if (tail_tokens_.empty()) {
      commit_full_block(tokens.first(block));
    } else {
      tail_tokens_.insert(tail_tokens_.end(), tokens.begin(),
                          tokens.begin() + static_cast<std::ptrdiff_t>(taken));
      commit_full_block(tail_tokens_);
      tail_tokens_.clear();
    }
    num_committed_ += static_cast<int32_t>(taken);
    tokens = tokens.subspan(taken);
  }
  commit_into_tail(tokens);
}

void KVCache::commit_full_block(std::span<const TokenId> tokens) {
  ManagerState& state = *state_;
  const int32_t ordinal = state.tree.node(tail_node_).ordinal + 1;
  const std::span<const PageHandle> own(&page(ordinal, 0), tables_.size());
  const InsertResult result = state.tree.insert(tail_node_, tokens, own);
  if (result.outcome == InsertOutcome::kExisting) {
    const std::span<const PageId> shown = state.tree.pages(result.node);
    const bool is_rebase = shown[0] != own[0].id;  // else a fork showed the page that we share
    state.tree.hold(result.node, priority_);
    for (size_t lc = 0; lc < tables_.size(); ++lc) {
      const PageHandle adopted = state.store.pages().handle(shown[lc]);
      state.store.lock(adopted);
      state.store.unlock(own[lc]);
      state.store.unhold(own[lc]);
      page(ordinal, lc) = adopted;
      tables_[lc].data[ordinal] = state.store.page(adopted.id).slot.value();
    }
    state.stats.rebased_blocks += is_rebase ? 1 : 0;
  }
  ++state.stats.committed_blocks;
  state.tree.pin(result.node);
  state.tree.unpin(tail_node_);
  tail_node_ = result.node;
}

void KVCache::stop_committing_locked() {
  if (commit_state_ != CommitState::kAllowed) return;
  commit_state_ = CommitState::kUserStop;
  if (tail_tokens_.empty() || needs_copy_ || !state_->config.enable_partial_reuse) return;
  const int32_t ordinal = state_->tree.node(tail_node_).ordinal + 1;
  const std::span<const PageHandle> own(&page(ordinal, 0), tables_.size());
  const NodeId shown = state_->store.page(own[0].id).node;
  if (shown != kNoNode) {  // by a fork; a longer part may replace it
    const auto theirs = state_->tree.tokens(shown);
    if (state_->tree.node(shown).parent != tail_node_ || theirs.size() > tail_tokens_.size() ||
        !std::equal(theirs.begin(), theirs.end(), tail_tokens_.begin())) {
      return;
    }
  }
  (void)state_->tree.insert(tail_node_, tail_tokens_, own);
}

void KVCache::close_locked() {
  if (commit_state_ == CommitState::kAllowed) {
    try {
      state_->tree.reserve_nodes(1);
      stop_committing_locked();
    } catch (const std::bad_alloc&) {
      commit_state_ = CommitState::kUserStop;  // the partial block is not offered for reuse
    }
  }
  shrink_locked(0);
  state_->tree.unpin(tail_node_);
  tail_node_ = kNoNode;
  if (is_active()) --state_->num_active;
  status_ = CacheStatus::kClosed;
  for (IndexTable& table : tables_) {
    table.data = table.own.data();
    table.is_external = false;
  }
  unregister();
}

void KVCache::unregister() noexcept {
  std::vector<KVCache*>& caches = state_->caches;
  caches[registry_index_] = caches.back();
  caches[registry_index_]->registry_index_ = registry_index_;
  caches.pop_back();
}

void KVCache::reserve_tables(int32_t num_blocks) {
  const auto needed = static_cast<size_t>(num_blocks);
  for (IndexTable& table : tables_) {
    if (table.is_external || needed <= table.capacity) continue;
    table.move_to_own(std::max(needed, table.capacity + table.capacity / 2 + 4), table.capacity);
  }
}

void KVCache::IndexTable::move_to_own(size_t size, size_t count) {
  if (size > own.size()) {
    std::vector<int32_t> grown(size, kBadPageIndex);
    retired.reserve(retired.size() + 1);
    if (count > 0) std::copy_n(data, count, grown.data());
    if (!own.empty()) retired.push_back(std::move(own));
    own = std::move(grown);
  } else {
    if (count > 0 && data != own.data()) std::copy_n(data, count, own.data());
    std::fill(own.begin() + static_cast<std::ptrdiff_t>(count), own.end(), kBadPageIndex);
  }
  data = own.data();
  capacity = own.size();
  is_external = false;
}

bool KVCache::fail(const NoRoom& reason, uint64_t& counter) noexcept {
  last_failure_ = reason;
  ++counter;
  return false;
}

const KVCache::IndexTable& KVCache::table(LifeCycleId group, int beam) const {
  HELICORE_CHECK(beam == kDefaultBeamIndex, "kv.page_table", "beam must be 0, got ", beam);
  HELICORE_CHECK(group.value() >= 0 && static_cast<size_t>(group.value()) < tables_.size(),
                 "kv.page_table", "layer group must be in [0, ", tables_.size(), "), got ", group);
  return tables_[static_cast<size_t>(group.value())];
}

std::span<const int32_t> KVCache::base_page_indices(LifeCycleId group, int beam) const {
  const IndexTable& entry = table(group, beam);
  return {entry.data, status_ == CacheStatus::kClosed ? 0 : static_cast<size_t>(num_blocks_)};
}

void KVCache::set_base_page_index_buf(int beam, LifeCycleId group,
                                      std::optional<std::span<int32_t>> row) {
  if (auto* sink = recording(state_)) {
    return recorded::set_index_row(*sink, *this, beam, group, row);
  }
  IndexTable& entry = const_cast<IndexTable&>(table(group, beam));
  HELICORE_KV_STATE(status_ != CacheStatus::kClosed, "kv.set_base_page_index_buf", "cache ", id_,
                    " is CLOSED");
  const std::unique_lock lock(state_->mutex);
  const auto count = static_cast<size_t>(num_blocks_);
  if (row) {
    HELICORE_CHECK(row->size() >= count, "kv.set_base_page_index_buf", "buf must have at least ",
                   count, " entries (num_blocks), got ", row->size());
    std::copy_n(entry.data, count, row->data());
    std::fill(row->begin() + static_cast<std::ptrdiff_t>(count), row->end(), kBadPageIndex);
    entry.data = row->data();
    entry.capacity = row->size();
    entry.is_external = true;
  } else if (entry.is_external) {
    entry.move_to_own(count, count);
  }
  max_blocks_ = INT32_MAX;
  for (const IndexTable& each : tables_) {
    if (each.is_external && each.capacity < static_cast<size_t>(max_blocks_)) {
      max_blocks_ = static_cast<int32_t>(each.capacity);
    }
  }
}

std::vector<int32_t> KVCache::aggregated_page_indices(LifeCycleId group, int beam,
                                                      bool valid_only) const {
  (void)table(group, beam);
  (void)valid_only;  // full attention has a page for every block
  std::vector<int32_t> slots;
  if (status_ == CacheStatus::kClosed) return slots;
  const std::shared_lock lock(state_->mutex);
  for (int32_t b = 0; b < num_blocks_; ++b) {
    const size_t at = static_cast<size_t>(b) * tables_.size() + static_cast<size_t>(group.value());
    slots.push_back(state_->store.page(pages_[at].id).slot.value());
  }
  return slots;
}

std::vector<TokenId> KVCache::committed_tokens() const {
  if (status_ == CacheStatus::kClosed) return {};
  const std::shared_lock lock(state_->mutex);
  std::vector<TokenId> tokens(static_cast<size_t>(num_committed_));
  auto end = tokens.end() - static_cast<std::ptrdiff_t>(tail_tokens_.size());
  std::copy(tail_tokens_.begin(), tail_tokens_.end(), end);
  for (NodeId id = tail_node_; state_->tree.node(id).parent != kNoNode;
       id = state_->tree.node(id).parent) {
    const auto block = state_->tree.tokens(id);
    end -= static_cast<std::ptrdiff_t>(block.size());
    std::copy(block.begin(), block.end(), end);
  }
  return tokens;
}

}  // namespace helicore::kv
