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
  {
    const std::unique_lock lock(state_->mutex);
    state_->begin_operation();
    check_rewind("kv.truncate", end);
    truncate_locked(end);
    state_->verify();
  }
  flush_waits();
}

int32_t KVCache::check_truncate(const char* where, int64_t num_tokens) const {
  HELICORE_KV_STATE(status_ != CacheStatus::kClosed, where, "cache ", id_, " is CLOSED");
  HELICORE_CHECK(num_tokens >= num_committed_ && num_tokens <= capacity_, where,
                 "num_tokens must be in [num_committed_tokens, capacity] = [", num_committed_, ", ",
                 capacity_, "], got ", num_tokens);
  HELICORE_CHECK(!state_->ssm || num_tokens >= history_length_, where,
                 "num_tokens must be >= history_length ", history_length_,
                 ": a recurrent state can't be rewound, got ", num_tokens);
  scratch_.check_truncate(where, static_cast<int32_t>(num_tokens));
  return static_cast<int32_t>(num_tokens);
}

void KVCache::check_rewind(const char* where, int32_t num_tokens) const {
  if (num_tokens >= history_length_ || !state_->has_windows) return;
  for (size_t lc = 0; lc < tables_.size(); ++lc) {
    const auto now = stale(lc, history_length_);
    const auto then = stale(lc, num_tokens);
    const int32_t end = std::min(now.end, ceil_div(num_tokens, tokens_per_block_));
    for (int32_t b = std::max(then.end, now.begin); b < end; ++b) {
      const PageHandle handle = page(b, lc);
      HELICORE_CHECK(
          !handle.is_null() && (!is_active() || state_->store.page(handle.id).level == kHotLevel),
          where, "num_tokens must not reach back behind what the window of layer group ", lc,
          " still has: block ", b, " is gone, got ", num_tokens);
    }
  }
}

bool KVCache::truncate_within_blocks(int32_t num_tokens) noexcept {
  if (ceil_div(num_tokens, tokens_per_block_) != num_blocks_) return false;
  const int32_t history = std::min(history_length_, num_tokens);
  if (makes_stale(history) || (state_->has_optional && history < history_length_)) return false;
  owns_rows_ = owns_rows_ && history == history_length_;
  capacity_ = num_tokens;
  history_length_ = history;
  return true;
}

void KVCache::truncate_locked(int32_t num_tokens) {
  owns_rows_ = owns_rows_ && num_tokens >= history_length_;
  shrink_locked(ceil_div(num_tokens, tokens_per_block_));
  const int32_t history = std::min(history_length_, num_tokens);
  for (size_t lc = 0; lc < tables_.size() && makes_stale(history); ++lc) {
    const auto now = stale(lc, history_length_);
    const int32_t end = std::min(now.end, num_blocks_);
    for (int32_t b = std::max(stale(lc, history).end, now.begin); b < end; ++b) {
      if (!is_active()) continue;
      state_->store.lock(page(b, lc));
      wait_for(state_->store.filled(page(b, lc).id));
      tables_[lc].data[b] = state_->store.page(page(b, lc).id).slot.value();
    }
  }
  capacity_ = num_tokens;
  history_length_ = history;
  known_rows_ = std::min(known_rows_, history);
  missing_.cut(history);
}

std::unique_ptr<KVCache> KVCache::fork(std::optional<int64_t> id) {
  if (auto* sink = recording(state_)) return recorded::fork(*sink, *this, id);
  HELICORE_KV_STATE(status_ != CacheStatus::kClosed, "kv.fork", "cache ", id_, " is CLOSED");
  const std::unique_lock lock(state_->mutex);
  state_->begin_operation();
  check_intact("kv.fork");
  set_written_locked();
  std::unique_ptr<KVCache> child(new KVCache(*this, id));
  may_share_ = may_share_ || child->may_share_;
  owns_rows_ = false;
  ++state_->stats.num_forks;
  state_->verify();
  return child;
}

KVCacheFields::KVCacheFields(const KVCacheFields& parent, std::optional<int64_t> id)
    : state_(parent.state_),
      tail_(std::make_unique<TokenId[]>(static_cast<size_t>(parent.tokens_per_block_))),
      commit_state_(parent.commit_state_),
      is_plain_(parent.is_plain_),
      tokens_per_block_(parent.tokens_per_block_),
      needs_copy_(parent.needs_copy_),
      needs_state_(parent.needs_state_),
      has_duplicate_(parent.has_duplicate_),
      was_resumed_(parent.was_resumed_),
      retention_(parent.retention_),
      tables_(parent.tables_.size()),
      stream_(parent.stream_),
      id_(id.value_or(state_->next_id)),
      serial_(state_->next_id),
      num_reused_(parent.num_reused_),
      known_rows_(parent.known_rows_),
      missing_(parent.missing_),
      reused_by_level_(parent.reused_by_level_),
      scope_(parent.scope_) {}

KVCache::KVCache(const KVCache& parent, std::optional<int64_t> id)
    : KVCacheFields(parent, id), scratch_(*this, parent.scratch_.is_enabled()) {
  ManagerState& state = *state_;
  const int32_t num_blocks = ceil_div(parent.history_length_, tokens_per_block_);
  pages_.reserve(static_cast<size_t>(num_blocks) * tables_.size());
  reserve_tables(num_blocks);
  state.caches.reserve(state.caches.size() + 1);

  // Nothing fails from here on.
  append_to_tail(parent.tail_tokens());
  pages_.assign(parent.pages_.begin(),
                parent.pages_.begin() +
                    static_cast<std::ptrdiff_t>(static_cast<size_t>(num_blocks) * tables_.size()));
  const int32_t first_shared = parent.num_committed_ / tokens_per_block_;
  for (int32_t b = 0; b < num_blocks; ++b) {
    for (size_t lc = 0; lc < tables_.size(); ++lc) {
      if (page(b, lc).is_null()) continue;
      state.store.hold(page(b, lc).id, priority_of(b));
      if (b >= first_shared && !needs_copy_) state.store.mark_forked(page(b, lc));
    }
  }
  state_page_ = parent.state_page_;
  if (!state_page_.is_null()) state.store.hold(state_page_.id, retention_.base());
  may_share_ = (first_shared < num_blocks && !needs_copy_) || (state.ssm && !needs_state_);
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
  for (size_t lc = 0; lc < tables_.size(); ++lc) {
    if (page(ordinal, lc).is_null()) continue;
    const PageRecord& record = state_->store.page(page(ordinal, lc).id);
    if (record.hold_count > 1 || record.node != kNoNode) return true;
  }
  return false;
}

bool KVCache::any_shared(int32_t begin, int32_t end) const noexcept {
  for (int32_t b = begin; b < end; ++b) {
    if (is_shared(b)) return true;
  }
  return false;
}

bool KVCache::must_copy(int32_t ordinal, size_t life_cycle) const noexcept {
  if (!needs_copy_ && !may_share_) return false;
  if (page(ordinal, life_cycle).is_null()) return false;
  if (needs_copy_) return ordinal == num_blocks_ - 1;
  if (owns_rows_ || ordinal < history_length_ / tokens_per_block_) return false;
  const PageRecord& record = state_->store.page(page(ordinal, life_cycle).id);
  if (record.hold_count > 1) return true;
  // Alone: rows behind those that the tree shows may be written in place.
  return record.node != kNoNode &&
         ordinal * tokens_per_block_ + record.num_tokens > history_length_;
}

bool KVCache::must_copy_state() const noexcept {
  if (!state_->ssm) return false;
  if (needs_state_) return true;
  if (state_page_.is_null()) return false;
  const PageRecord& record = state_->store.page(state_page_.id);
  return record.hold_count > 1 || record.node != kNoNode;
}

bool KVCache::add_copies(int32_t end, std::span<int32_t> need) const {
  if (!needs_copy_ && !may_share_ && !needs_state_) return false;
  bool any = false;
  for (int32_t b = history_length_ / tokens_per_block_; b < end; ++b) {
    for (size_t lc = 0; lc < tables_.size(); ++lc) {
      if (!must_copy(b, lc)) continue;
      ++need[state_->group_of(lc)];
      any = true;
    }
  }
  if (must_copy_state()) {
    ++need[state_->group_of(static_cast<size_t>(state_->ssm->value()))];
    any = true;
  }
  return any;
}

void KVCache::copy_blocks_locked(int32_t end) {
  PageStore& store = state_->store;
  replacements_.clear();
  const auto copy = [&](int32_t ordinal, size_t lc, PageHandle from) {
    replacements_.push_back({ordinal, lc, PageHandle()});
    const PageHandle fresh =
        store.allocate(LifeCycleId(static_cast<int32_t>(lc)), priority_of(ordinal));
    replacements_.back().fresh = fresh;
    if (!from.is_null()) copy_page(from, fresh);
  };
  try {
    // Last block first: a block is queued for eviction before the one in front of it.
    for (int32_t b = end - 1; b >= history_length_ / tokens_per_block_; --b) {
      for (size_t lc = 0; lc < tables_.size(); ++lc) {
        if (must_copy(b, lc)) copy(b, lc, page(b, lc));
      }
    }
    if (must_copy_state()) copy(-1, static_cast<size_t>(state_->ssm->value()), state_page_);
  } catch (...) {
    for (const Replacement& each : replacements_) {
      if (each.fresh.is_null()) continue;
      store.unlock(each.fresh, TimePoint());
      store.unhold(each.fresh);
    }
    throw;
  }
  int32_t last = -1;
  for (const Replacement& each : replacements_) {
    install_page(each);
    LifeCycleStats& stats =
        state_->life_cycle_stats[LifeCycleId(static_cast<int32_t>(each.life_cycle))];
    ++stats.allocated_pages;
    ++stats.copied_pages;
    if (each.ordinal < 0 || each.ordinal == last) continue;
    last = each.ordinal;
    ++state_->stats.allocated_blocks;
    ++state_->stats.copied_blocks;
  }
  needs_copy_ = false;
  needs_state_ = false;
  may_share_ = may_share_ && (any_shared(num_full_blocks(), end) || must_copy_state());
}

void KVCache::copy_page(PageHandle from, PageHandle to) {
  const bool is_load = state_->store.page(from.id).level != kHotLevel;
  if (!is_load) state_->note_copy(from, to);
  const TimePoint done = state_->store.copy_page(from, to, device_stream());
  if (is_load) state_->note_load(from, to, done);
  wait_for(done);
}

void KVCache::install_page(const Replacement& replacement) {
  PageStore& store = state_->store;
  const bool is_state = replacement.ordinal < 0;
  PageHandle& place = is_state ? state_page_ : page(replacement.ordinal, replacement.life_cycle);
  wait_for(store.filled(replacement.fresh.id));
  if (!is_active()) {
    store.unlock(replacement.fresh, TimePoint());  // until the resume locks everything
  } else {
    store.unlock(place, fence());
    if (!is_state) {
      tables_[replacement.life_cycle].data[replacement.ordinal] =
          store.page(replacement.fresh.id).slot.value();
    }
  }
  if (!place.is_null()) store.unhold(place);
  place = replacement.fresh;
}

}  // namespace helicore::kv
