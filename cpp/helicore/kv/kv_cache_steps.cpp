// What a cache does with the lock held: growing, letting go, suspending and coming back.
#include <algorithm>

#include "helicore/core/error.h"
#include "helicore/kv/kv_cache.h"
#include "helicore/kv/manager_state.h"

namespace helicore::kv {
namespace {

template <typename T>
void reserve_amortised(std::vector<T>& values, size_t count) {
  if (count > values.capacity()) {
    values.reserve(std::max(count, values.capacity() + values.capacity() / 2));
  }
}

}  // namespace

bool KVCache::resize_locked(const Cursors& cursors) {
  ManagerState& state = *state_;
  if (is_lost_) return fail({.data_lost = true}, state.stats.failed_resizes);
  const int32_t num_blocks = ceil_div(cursors.capacity, tokens_per_block_);
  if (const auto reason = make_room_to_resize(cursors, num_blocks)) {
    return fail(*reason, state.stats.failed_resizes);
  }
  if (may_share_) {
    copy_blocks_locked(std::min(num_blocks, num_blocks_));
    wait_for_readers();
  }
  // The state is written in place, and forks may still copy from it. Rows of blocks don't care:
  // those that a fork reads are not written again.
  if (!state_page_.is_null()) wait_for(state.store.last_use(state_page_.id));
  scratch_.give_up(cursors);
  if (makes_stale(cursors.history)) {
    advance_history(cursors.history);
    drop_stale_until(cursors);
  }
  if (num_blocks > num_blocks_) {
    grow_locked(num_blocks, cursors);
  } else {
    shrink_locked(num_blocks);
  }
  scratch_.fill(cursors);
  capacity_ = cursors.capacity;
  history_length_ = cursors.history;
  owns_rows_ = true;
  lengths_.add(capacity_, history_length_);
  forget_failure();
  return true;
}

void KVCache::wait_for_readers() {
  // A GPU may copy rows that are being written: nobody reads those of the copy. For threads of a
  // CPU that is a race.
  if (state_->device->type() != DeviceType::kCpu) return;
  for (int32_t b = history_length_ / tokens_per_block_; b < num_blocks_; ++b) {
    for (size_t lc = 0; lc < tables_.size(); ++lc) {
      if (page(b, lc).is_null()) continue;
      const TimePoint use = state_->store.last_use(page(b, lc).id);
      if (!use.is_none() && state_->device->is_waitable(use)) wait_for(use);
    }
  }
}

int32_t KVCache::count_growth(size_t life_cycle, const Cursors& cursors) const {
  if (state_->is_ssm(life_cycle)) return 0;
  const int32_t num_blocks = ceil_div(cursors.capacity, tokens_per_block_);
  const int32_t scratch = scratch_.num_missing(life_cycle, cursors);
  if (num_blocks <= num_blocks_) return scratch;
  const auto new_blocks_in = [&](const HalfOpenRange<int32_t>& range) {
    return std::clamp(range.end, num_blocks_, num_blocks) -
           std::clamp(range.begin, num_blocks_, num_blocks);
  };
  return num_blocks - num_blocks_ - new_blocks_in(stale(life_cycle, cursors.history)) -
         new_blocks_in(scratch_.range(life_cycle, cursors)) + scratch;
}

std::optional<NoRoom> KVCache::make_room_to_resize(const Cursors& cursors, int32_t num_blocks) {
  ManagerState& state = *state_;
  std::vector<int32_t>& need = state.need_scratch;
  need.assign(state.slots_per_block.count(), 0);
  const bool copies = add_copies(std::min(num_blocks, num_blocks_), need);
  const bool has_scratch = scratch_.concerns(cursors);
  if (num_blocks <= num_blocks_ && !copies && !has_scratch) return std::nullopt;
  std::vector<int32_t> least;
  if (copies) least = need;
  for (size_t lc = 0; lc < tables_.size(); ++lc) {
    const size_t group = state.group_of(lc);
    const int64_t needed = int64_t{need[group]} + count_growth(lc, cursors);
    // More than there will ever be: no memory is taken for tables of that size.
    if (const auto reason = state.exceeds_total(group, needed)) return reason;
    need[group] = static_cast<int32_t>(needed);
  }
  reserve_amortised(pages_, static_cast<size_t>(num_blocks) * tables_.size());
  reserve_tables(num_blocks);
  scratch_.reserve(cursors);
  if (!makes_stale(cursors.history) && !has_scratch) {
    return state.migrator.make_room({.fresh = need});
  }
  // Blocks that this resize makes stale give their slots. Private ones are free at once; what the
  // tree shows is dropped when nothing else will do.
  std::vector<Yield> yields = count_yields(cursors);
  const auto less = [&](const auto& give) {
    for (size_t g = 0; g < need.size(); ++g) {
      need[g] = std::max(copies ? least[g] : 0, need[g] - give(yields[g]));
    }
  };
  less([](const Yield& y) { return y.freed; });
  auto reason = state.migrator.make_room({.fresh = need});
  if (!reason) return reason;
  less([](const Yield& y) { return y.droppable; });
  return state.migrator.make_room({.fresh = need}) ? reason : std::nullopt;
}

std::vector<Yield> KVCache::count_yields(const Cursors& cursors) const {
  const ManagerState& state = *state_;
  std::vector<Yield> yields(state.slots_per_block.count());
  const TimePoint point = fence();
  if (!point.is_none() && !state.device->is_waitable(point)) return yields;
  for (size_t lc = 0; lc < tables_.size(); ++lc) {
    const auto before = stale(lc, history_length_);
    const auto after = stale(lc, cursors.history);
    const int32_t end = std::min(after.end, num_blocks_);
    if (scratch_.is_enabled()) {
      yields[state.group_of(lc)].freed += scratch_.num_given_up(lc, cursors);
    }
    for (int32_t b = std::max(after.begin, before.end); b < end; ++b) {
      if (page(b, lc).is_null() || keeps_stale_until_commit(b, lc)) continue;
      const PageRecord& record = state.store.page(page(b, lc).id);
      if (record.hold_count > 1 || state.store.is_beyond_limit(page(b, lc).id)) continue;
      Yield& yield = yields[state.group_of(lc)];
      ++(record.node == kNoNode ? yield.freed : yield.droppable);
    }
  }
  return yields;
}

void KVCache::drop_stale_until(const Cursors& cursors) {
  ManagerState& state = *state_;
  std::vector<int32_t>& need = state.need_scratch;
  need.assign(state.slots_per_block.count(), 0);
  for (size_t lc = 0; lc < tables_.size(); ++lc) {
    need[state.group_of(lc)] += count_growth(lc, cursors);
  }
  for (PageHandle handle : stale_released_) {
    if (!state.store.pages().is_current(handle)) continue;
    const PoolGroupId group(state.store.page(handle.id).pool_group);
    if (state.store.slots(group).num_free() < need[static_cast<size_t>(group.value())]) {
      state.migrator.drop(handle);
    }
  }
  stale_released_.clear();
}

void KVCache::advance_history(int32_t history) {
  stale_released_.clear();
  for (size_t lc = 0; lc < tables_.size(); ++lc) {
    if (state_->is_ssm(lc)) continue;
    const auto before = stale(lc, history_length_);
    const auto after = stale(lc, history);
    const int32_t begin = std::max(after.begin, before.end);
    for (int32_t b = std::min(after.end, num_blocks_) - 1; b >= begin; --b) let_go_stale(b, lc);
  }
  history_length_ = history;
}

void KVCache::let_go_stale(int32_t ordinal, size_t life_cycle) {
  PageHandle& handle = page(ordinal, life_cycle);
  if (handle.is_null()) return;
  if (is_active()) {
    if (ordinal >= num_full_blocks()) state_->store.set_written(handle.id, fence());
    state_->store.unlock(handle, fence());
    tables_[life_cycle].data[ordinal] = kBadPageIndex;
  }
  if (keeps_stale_until_commit(ordinal, life_cycle)) return;
  ++state_->life_cycle_stats[LifeCycleId(static_cast<int32_t>(life_cycle))].released_pages;
  if (state_->store.page(handle.id).node != kNoNode) stale_released_.push_back(handle);
  state_->store.unhold(handle);
  handle = PageHandle();
}

bool KVCache::keeps_stale_until_commit(int32_t ordinal, size_t life_cycle) const noexcept {
  return commit_state_ == CommitState::kAllowed && ordinal >= num_full_blocks() &&
         !state_->config.commit_min_snapshot &&
         state_->life_cycle(life_cycle).policy != ReusePolicy::kPrivate;
}

PageHandle KVCache::fresh_page(int32_t ordinal, size_t life_cycle) {
  const LifeCycleId id(static_cast<int32_t>(life_cycle));
  const PageHandle handle = state_->store.allocate(id, priority_of(ordinal));
  ++state_->life_cycle_stats[id].allocated_pages;
  wait_for(state_->store.filled(handle.id));
  return handle;
}

void KVCache::grow_locked(int32_t num_blocks, const Cursors& cursors) {
  ManagerState& state = *state_;
  const auto added = static_cast<size_t>(num_blocks - num_blocks_);
  pages_.resize(static_cast<size_t>(num_blocks) * tables_.size());
  for (size_t lc = 0; lc < tables_.size(); ++lc) {
    const auto dead = stale(lc, cursors.history);
    const auto scratch = scratch_.range(lc, cursors);
    const bool has_pages = !state.is_ssm(lc);
    for (int32_t b = num_blocks_; b < num_blocks; ++b) {
      tables_[lc].data[b] = kBadPageIndex;
      if (!has_pages || dead.contains(b) || scratch.contains(b)) continue;
      const PageHandle handle = fresh_page(b, lc);
      page(b, lc) = handle;
      tables_[lc].data[b] = state.store.page(handle.id).slot.value();
    }
  }
  num_blocks_ = num_blocks;
  state.stats.allocated_blocks += added;
}

void KVCache::shrink_locked(int32_t num_blocks) {
  for (int32_t b = num_blocks_ - 1; b >= num_blocks; --b) release_block_locked(b);
  pages_.resize(static_cast<size_t>(num_blocks) * tables_.size());
  num_blocks_ = num_blocks;
}

void KVCache::release_block_locked(int32_t ordinal) {
  for (size_t lc = 0; lc < tables_.size(); ++lc) release_page(ordinal, lc);
}

void KVCache::release_page(int32_t ordinal, size_t life_cycle) {
  PageHandle& handle = page(ordinal, life_cycle);
  if (handle.is_null()) return;
  if (is_live(ordinal, life_cycle)) {
    state_->store.unlock(handle, fence());
    tables_[life_cycle].data[ordinal] = kBadPageIndex;
  }
  state_->store.unhold(handle);
  handle = PageHandle();
}

void KVCache::release_state() {
  if (state_page_.is_null()) return;
  if (is_active()) state_->store.unlock(state_page_, fence());
  state_->store.unhold(state_page_);
  state_page_ = PageHandle();
}

std::optional<NoRoom> KVCache::make_room_to_resume(bool keep_sources) {
  ManagerState& state = *state_;
  std::vector<int32_t>& need = state.need_scratch;
  need.assign(state.slots_per_block.count(), 0);
  (void)add_copies(num_blocks_, need);
  std::vector<PageId>& pages = state.pages_scratch;
  pages.clear();
  for (size_t lc = 0; lc < tables_.size(); ++lc) {
    if (state.is_ssm(lc)) continue;
    const auto dead = stale(lc, history_length_);
    const auto scratch = scratch_.range(lc, cursors());
    need[state.group_of(lc)] += scratch_.num_wanted(lc, cursors());
    for (int32_t b = 0; b < num_blocks_; ++b) {
      const PageHandle handle = page(b, lc);
      if (dead.contains(b) || scratch.contains(b)) continue;
      if (handle.is_null()) {
        ++need[state.group_of(lc)];  // not reused: a page of its own
        continue;
      }
      const bool is_hot = state.store.page(handle.id).level == kHotLevel;
      if (!must_copy(b, lc) || (keep_sources && is_hot)) pages.push_back(handle.id);
    }
  }
  if (!state_page_.is_null() && !must_copy_state()) pages.push_back(state_page_.id);
  scratch_.reserve(cursors());
  return state.migrator.make_room({.fresh = need, .pages = pages});
}

bool KVCache::resume_locked(std::optional<int64_t> stream) {
  ManagerState& state = *state_;
  if (is_lost_) return fail({.data_lost = true}, state.stats.failed_resumes);
  if (const auto reason = state.utilisation_gate()) {
    return fail(*reason, state.stats.failed_resumes);
  }
  auto reason = make_room_to_resume(true);
  // A page that is only copied from may leave the level too, if nothing else will do.
  if (reason && (needs_copy_ || may_share_)) {
    if (!make_room_to_resume(false)) reason.reset();
  }
  if (reason) return fail(*reason, state.stats.failed_resumes);
  if (stream) stream_ = stream;
  if (needs_copy_ || may_share_ || needs_state_) copy_blocks_locked(num_blocks_);
  status_ = CacheStatus::kActive;
  owns_rows_ = true;
  lock_pages();
  forget_failure();
  ++state.num_active;
  ++state.stats.num_resumes;
  return true;
}

void KVCache::lock_pages() {
  PageStore& store = state_->store;
  for (size_t lc = 0; lc < tables_.size(); ++lc) {
    if (state_->is_ssm(lc)) continue;
    const auto dead = stale(lc, history_length_);
    const auto scratch = scratch_.range(lc, cursors());
    for (int32_t b = 0; b < num_blocks_; ++b) {
      if (dead.contains(b) || scratch.contains(b)) continue;
      PageHandle& handle = page(b, lc);
      if (handle.is_null()) {
        handle = fresh_page(b, lc);
      } else {
        store.lock(handle);
        wait_for(store.filled(handle.id));
      }
      tables_[lc].data[b] = store.page(handle.id).slot.value();
    }
  }
  wait_for_readers();
  scratch_.fill(cursors());
  if (state_page_.is_null()) return;
  store.lock(state_page_);
  wait_for(store.filled(state_page_.id));
  wait_for(store.last_use(state_page_.id));  // see resize_locked()
}

void KVCache::set_written_locked() {
  if (!is_active()) return;
  if (!state_page_.is_null()) state_->store.set_written(state_page_.id, fence());
  for (int32_t b = 0; b < num_blocks_; ++b) {
    for (size_t lc = 0; lc < tables_.size(); ++lc) {
      if (!is_live(b, lc)) continue;
      const PageId id = page(b, lc).id;
      const bool is_final = b < num_full_blocks() && state_->store.page(id).node != kNoNode;
      if (!is_final) state_->store.set_written(id, fence());
    }
  }
}

void KVCache::suspend_locked() {
  PageStore& store = state_->store;
  set_written_locked();
  scratch_.release_all();
  if (!state_page_.is_null()) store.unlock(state_page_, fence());
  // Last block first: it leaves the level before those in front of it.
  for (int32_t b = num_blocks_ - 1; b >= 0; --b) {
    for (size_t lc = 0; lc < tables_.size(); ++lc) {
      if (is_live(b, lc)) store.unlock(page(b, lc), fence());
    }
  }
  for (IndexTable& table : tables_) {
    std::fill_n(table.data, static_cast<size_t>(num_blocks_), kBadPageIndex);
    if (table.is_external) table.move_to_own(static_cast<size_t>(num_blocks_), 0);
  }
  max_blocks_ = INT32_MAX;
  status_ = CacheStatus::kSuspended;
  --state_->num_active;
  ++state_->stats.num_suspends;
}

void KVCache::close_locked() {
  if (commit_state_ == CommitState::kAllowed && !is_lost_) {
    try {
      state_->tree.reserve_nodes(2);
      stop_committing_locked(true);
    } catch (const std::exception&) {
      commit_state_ = CommitState::kUserStop;  // the partial block is not offered for reuse
    }
  }
  commit_state_ = CommitState::kUserStop;
  state_->sizer.on_close(id_, lengths_);
  release_state();
  scratch_.release_all();
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

}  // namespace helicore::kv
