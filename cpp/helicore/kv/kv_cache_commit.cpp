// Committing: what becomes final, what the tree shows of it, and snapshots of recurrent state.
#include <algorithm>

#include "helicore/core/error.h"
#include "helicore/kv/kv_cache.h"
#include "helicore/kv/manager_state.h"

namespace helicore::kv {
namespace {

// Who pins the node may not hold its pages, but duplicates of them.
void mark_shown(ManagerState& state, NodeId node) noexcept {
  for (const PageId page : state.tree.pages(node)) {
    if (page != kNoPage) state.store.mark_forked(state.store.pages().handle(page));
  }
}

}  // namespace

void KVCache::commit_locked(std::span<const TokenId> tokens, bool is_end) {
  if (may_share_) check_forked_commit(tokens);
  const auto block = static_cast<size_t>(tokens_per_block_);
  const int32_t history =
      std::max(history_length_, num_committed_ + static_cast<int32_t>(tokens.size()));
  scratch_.give_up({capacity_, history});
  if (makes_stale(history)) advance_history(history);
  history_length_ = history;
  while (static_cast<size_t>(num_tail_) + tokens.size() >= block) {
    const size_t taken = block - static_cast<size_t>(num_tail_);
    if (num_tail_ == 0) {
      commit_full_block(tokens.first(block));
    } else {
      append_to_tail(tokens.first(taken));
      commit_full_block(tail_tokens());
      num_tail_ = 0;
    }
    num_committed_ += static_cast<int32_t>(taken);
    tokens = tokens.subspan(taken);
  }
  commit_into_tail(tokens);
  if (is_end) {
    stop_committing_locked(true);
  } else if (state_->ssm) {
    (void)snapshot_state(false);
  }
}

void KVCache::commit_full_block(std::span<const TokenId> tokens) {
  ManagerState& state = *state_;
  const int32_t ordinal = state.tree.node(tail_node_).ordinal + 1;
  std::vector<PageHandle>& shown = state.handles_scratch;
  shown.assign(tables_.size(), PageHandle());
  for (size_t lc = 0; lc < tables_.size(); ++lc) {
    const PageHandle own = page(ordinal, lc);
    if (own.is_null() || !may_show(ordinal, lc)) continue;
    if (is_live(ordinal, lc)) state.store.set_written(own.id, fence());
    shown[lc] = own;
    ++state.life_cycle_stats[LifeCycleId(static_cast<int32_t>(lc))].committed_pages;
  }
  const InsertResult result = state.tree.insert(tail_node_, tokens, shown);
  if (result.outcome == InsertOutcome::kExisting) adopt_block(result.node, ordinal);
  if (has_duplicate_) {
    mark_block(ordinal);
    mark_shown(state, result.node);
  }
  for (size_t lc = 0; lc < tables_.size(); ++lc) {
    // Kept until now only to be shown.
    if (is_live(ordinal, lc) || page(ordinal, lc).is_null() || !is_active()) continue;
    state.store.unhold(page(ordinal, lc));
    page(ordinal, lc) = PageHandle();
    ++state.life_cycle_stats[LifeCycleId(static_cast<int32_t>(lc))].released_pages;
  }
  raise_above(result.node);
  if (retention_.expires()) start_retention(result.node, ordinal);
  ++state.stats.committed_blocks;
  state.tree.pin(result.node);
  state.tree.unpin(tail_node_);
  tail_node_ = result.node;
}

void KVCache::mark_block(int32_t ordinal) {
  for (size_t lc = 0; lc < tables_.size(); ++lc) {
    if (!page(ordinal, lc).is_null()) state_->store.mark_forked(page(ordinal, lc));
  }
}

void KVCache::raise_above(NodeId node) {
  std::vector<PageHandle>& raised = state_->handles_scratch;
  raised.clear();
  state_->tree.raise_above(node, raised);
}

void KVCache::start_retention(NodeId node, int32_t ordinal) {
  const Retention::Worth worth = retention_.of_block(ordinal * tokens_per_block_);
  if (worth.duration_ms == 0) return;
  const int64_t at = state_->read_clock() + worth.duration_ms * 1'000'000;
  // Raised ones first, from the front: of one time the deepest falls first.
  const std::vector<PageHandle>& raised = state_->handles_scratch;
  for (size_t i = raised.size(); i-- > 0;) state_->timers.add(at, raised[i], retention_.base());
  for (PageId page : state_->tree.pages(node)) {
    if (page != kNoPage) {
      state_->timers.add(at, state_->store.pages().handle(page), retention_.base());
    }
  }
}

void KVCache::adopt_block(NodeId node, int32_t ordinal) {
  bool is_rebase = false;
  for (size_t lc = 0; lc < tables_.size(); ++lc) {
    if (state_->is_ssm(lc) || state_->life_cycle(lc).policy == ReusePolicy::kPrivate) continue;
    is_rebase |= adopt_page(node, ordinal, lc);
  }
  state_->tree.priority_raised(node, priority_of(ordinal));
  state_->stats.rebased_blocks += is_rebase ? 1 : 0;
}

bool KVCache::adopt_page(NodeId node, int32_t ordinal, size_t life_cycle) {
  PageStore& store = state_->store;
  PageHandle& own = page(ordinal, life_cycle);
  if (own.is_null()) return false;
  const PageId theirs = state_->tree.pages(node)[life_cycle];
  if (theirs == own.id) return false;  // a fork showed the page that we share
  const PageRecord& mine = store.page(own.id);
  if (theirs == kNoPage || store.page(theirs).num_tokens < tokens_per_block_) {
    if (mine.node == kNoNode && has_all_rows(ordinal, life_cycle)) {
      (void)state_->tree.attach(node, LifeCycleId(static_cast<int32_t>(life_cycle)), own,
                                tokens_per_block_);
    }
    return false;
  }
  if (!is_live(ordinal, life_cycle)) return true;  // the tree has it: ours goes
  if (store.page(theirs).level == kHotLevel) {
    // A step of another stream that is not done: only the caller can end it.
    const TimePoint filled = store.filled(theirs);
    if (!state_->device->is_waitable(filled) && filled.timeline() != fence().timeline()) {
      has_duplicate_ = true;
      return false;
    }
    const PageHandle adopted = store.pages().handle(theirs);
    store.hold(theirs, priority_of(ordinal));
    store.lock(adopted);
    wait_for(store.filled(theirs));
    store.unlock(own, fence());
    store.unhold(own);
    own = adopted;
    missing_.remove(life_cycle, rows_of(ordinal));
    tables_[life_cycle].data[ordinal] = store.page(theirs).slot.value();
    return true;
  }
  if (mine.hold_count > 1 || mine.node != kNoNode) {
    has_duplicate_ = true;
    return false;
  }
  // Theirs is on a colder level: it moves into our slot without a copy.
  state_->note_copy(own, store.pages().handle(theirs));
  store.promote(theirs, own, priority_of(ordinal));
  own = store.pages().handle(theirs);
  missing_.remove(life_cycle, rows_of(ordinal));
  return true;
}

void KVCache::stop_committing_locked(bool may_move_state) {
  if (commit_state_ != CommitState::kAllowed) return;
  if (state_->ssm) (void)snapshot_state(may_move_state);
  publish_tail();
  commit_state_ = CommitState::kUserStop;
  for (size_t lc = 0; lc < tables_.size(); ++lc) {
    if (!state_->has_windows) break;
    const auto dead = stale(lc, history_length_);
    for (int32_t b = std::min(dead.end, num_blocks_) - 1; b >= dead.begin; --b) {
      PageHandle& handle = page(b, lc);
      if (handle.is_null()) continue;
      state_->store.unhold(handle);
      handle = PageHandle();
      ++state_->life_cycle_stats[LifeCycleId(static_cast<int32_t>(lc))].released_pages;
    }
  }
}

void KVCache::publish_tail() {
  if (num_tail_ == 0 || needs_copy_ || !state_->config.enable_partial_reuse) return;
  const int32_t ordinal = state_->tree.node(tail_node_).ordinal + 1;
  if (const NodeId shown = shown_node(ordinal); shown != kNoNode) {
    // Shown by a fork; a longer part may replace it.
    const auto theirs = state_->tree.tokens(shown);
    if (state_->tree.node(shown).parent != tail_node_ || theirs.size() > tail_tokens().size() ||
        !std::equal(theirs.begin(), theirs.end(), tail_tokens().begin())) {
      return;
    }
  }
  std::vector<PageHandle>& pages = state_->handles_scratch;
  pages.assign(tables_.size(), PageHandle());
  bool any = false;
  for (size_t lc = 0; lc < tables_.size(); ++lc) {
    const PageHandle own = page(ordinal, lc);
    if (own.is_null() || !may_show(ordinal, lc)) continue;
    if (is_live(ordinal, lc)) state_->store.set_written(own.id, fence());
    pages[lc] = own;
    any = true;
  }
  if (!any) return;
  raise_above(state_->tree.insert(tail_node_, tail_tokens(), pages).node);
  if (has_duplicate_) mark_block(ordinal);
}

NodeId KVCache::insert_tail_copies() {
  // The sequence goes on writing into its own tail: what is shown is a copy.
  ManagerState& state = *state_;
  const int32_t ordinal = state.tree.node(tail_node_).ordinal + 1;
  std::vector<PageHandle> copies(tables_.size());
  const auto give_up = [&] {
    for (PageHandle copy : copies) {
      if (copy.is_null()) continue;
      state.store.unlock(copy, fence());
      state.store.unhold(copy);
    }
  };
  try {
    for (size_t lc = 0; lc < tables_.size(); ++lc) {
      if (!is_tail_copied(ordinal, lc)) continue;
      copies[lc] =
          state.store.allocate(LifeCycleId(static_cast<int32_t>(lc)), priority_of(ordinal));
      copy_page(page(ordinal, lc), copies[lc]);
    }
  } catch (...) {
    give_up();
    throw;
  }
  const NodeId node = state.tree.insert(tail_node_, tail_tokens(), copies).node;
  for (size_t lc = 0; lc < tables_.size() && has_duplicate_; ++lc) {
    if (!copies[lc].is_null()) state.store.mark_forked(copies[lc]);
  }
  raise_above(node);
  give_up();  // to the tree
  return node;
}

bool KVCache::is_tail_copied(int32_t ordinal, size_t life_cycle) const noexcept {
  return is_live(ordinal, life_cycle) && may_show(ordinal, life_cycle);
}

bool KVCache::may_show(int32_t ordinal, size_t life_cycle) const noexcept {
  return state_->life_cycle(life_cycle).policy != ReusePolicy::kPrivate &&
         has_all_rows(ordinal, life_cycle);
}

bool KVCache::snapshot_state(bool may_move) {
  ManagerState& state = *state_;
  const size_t ssm = static_cast<size_t>(state.ssm->value());
  const bool has_state = !needs_state_ && !state_page_.is_null();
  if (!has_state || num_committed_ == 0 || history_length_ != num_committed_) return false;
  const bool moves = may_move && state.store.page(state_page_.id).hold_count == 1;
  const bool is_aligned = num_tail_ == 0;
  if (!is_aligned && (needs_copy_ || !state.config.enable_partial_reuse)) return false;
  if (!is_active() && !moves) return false;
  std::vector<int32_t>& need = state.need_scratch;
  need.assign(state.slots_per_block.count(), 0);
  if (!moves) ++need[state.group_of(ssm)];
  const int32_t ordinal = state.tree.node(tail_node_).ordinal + 1;
  for (size_t lc = 0; lc < tables_.size() && !is_aligned && !moves; ++lc) {
    need[state.group_of(lc)] += !state.is_ssm(lc) && is_tail_copied(ordinal, lc) ? 1 : 0;
  }
  PageHandle snapshot = state_page_;
  NodeId node = tail_node_;
  try {
    if (state.migrator.make_room({.fresh = need})) {
      ++state.stats.skipped_snapshots;
      return false;
    }
    if (!moves) {
      snapshot = state.store.allocate(*state.ssm, priority_of(ordinal));
      copy_page(state_page_, snapshot);
    }
    if (!is_aligned) node = moves ? tail_node_with_own_pages() : insert_tail_copies();
  } catch (const std::exception&) {  // the device refused: reuse is lost, nothing else
    if (!moves && snapshot != state_page_) {
      state.store.unlock(snapshot, TimePoint());
      state.store.unhold(snapshot);
    }
    ++state.stats.skipped_snapshots;
    return false;
  }
  // A copy on a CPU is there at its own point, whatever the stream does.
  const bool in_stream = moves || state.device->type() != DeviceType::kCpu;
  if (is_active() && in_stream) state.store.set_written(snapshot.id, fence());
  const int32_t position = is_aligned ? tokens_per_block_ : num_tail_;
  if (node != kNoNode) (void)state.tree.attach(node, *state.ssm, snapshot, position);
  if (is_active()) state.store.unlock(snapshot, fence());
  state.store.unhold(snapshot);
  if (moves) state_page_ = PageHandle();
  if (node != kNoNode && node != tail_node_) (void)state.tree.prune(node);
  return true;
}

NodeId KVCache::tail_node_with_own_pages() {
  publish_tail();
  return state_->tree.find_cover(tail_node_, tail_tokens());
}

void KVCache::check_forked_commit(std::span<const TokenId> tokens) const {
  const RadixTree& tree = state_->tree;
  const auto end = num_committed_ + static_cast<int32_t>(tokens.size());
  if (end > history_length_) {
    std::vector<int32_t> need(state_->slots_per_block.count());
    HELICORE_KV_STATE(!add_copies(ceil_div(end, tokens_per_block_), need), "kv.commit", "cache ",
                      id_, " shares the rows from history_length ", history_length_,
                      " on with a fork; call resize() before writing them");
  }
  // Rows that forks share hold the same tokens; whoever comes second must name the same ones.
  const auto agrees = [&](PageHandle handle, NodeId parent, std::span<const TokenId> own) {
    const NodeId shown = handle.is_null() ? kNoNode : state_->store.page(handle.id).node;
    if (shown == kNoNode) return true;
    const auto covered = static_cast<size_t>(state_->store.page(handle.id).num_tokens);
    const auto theirs = tree.tokens(shown).first(covered);
    return parent != kNoNode && tree.node(shown).parent == parent &&
           std::equal(theirs.begin(), theirs.end(), own.begin());
  };
  const auto block = static_cast<size_t>(tokens_per_block_);
  std::vector<TokenId> next(tail_tokens().begin(), tail_tokens().end());
  NodeId parent = tail_node_;
  for (int32_t b = num_full_blocks(); next.size() + tokens.size() >= block; ++b) {
    const size_t taken = block - next.size();
    next.insert(next.end(), tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(taken));
    tokens = tokens.subspan(taken);
    for (size_t lc = 0; lc < tables_.size(); ++lc) {
      HELICORE_CHECK(agrees(page(b, lc), parent, next), "kv.commit", "tokens of block ", b,
                     " must be those that a fork committed for the same rows");
    }
    if (parent != kNoNode) parent = tree.find_child(parent, next);
    next.clear();
  }
}

}  // namespace helicore::kv
