#include "helicore/kv/planned_drop.h"

#include <algorithm>
#include <mutex>

#include "helicore/core/error.h"
#include "helicore/kv/kv_cache.h"
#include "helicore/kv/manager_state.h"
#include "helicore/kv/recorded_calls.h"

namespace helicore::kv {

PlannedDrop::PlannedDrop(ManagerState& state, std::vector<PageHandle> pages)
    : state_(&state), serial_(state.next_plan), pages_(std::move(pages)) {
  state.plans.reserve(state.plans.size() + 1);
  for (PageHandle page : pages_) ++state.planned_drops[page.tag()];
  state.plans.push_back(this);
  ++state.next_plan;
}

PlannedDrop::~PlannedDrop() {
  if (is_dropped_ || state_ == nullptr) return;
  try {
    drop();
  } catch (const std::exception& error) {
    log_error(detail::concat("kv.PlannedDrop: ", error.what()));
  }
}

void PlannedDrop::drop() {
  if (auto* sink = recording(state_)) return recorded::drop(*sink, *this);
  HELICORE_KV_STATE(!is_dropped_, "kv.PlannedDrop", "drop() was called before");
  is_dropped_ = true;
  if (state_ == nullptr) return;
  const std::unique_lock lock(state_->mutex);
  state_->begin_operation();
  drop_locked();
  state_->verify();
}

void PlannedDrop::drop_locked() {
  std::erase(state_->plans, this);
  for (PageHandle page : pages_) {
    const auto count = state_->planned_drops.find(page.tag());
    if (--count->second > 0) continue;
    state_->planned_drops.erase(count);
    state_->migrator.drop(page);
  }
}

std::unique_ptr<PlannedDrop> KVCache::plan_committed_block_drop() {
  if (auto* sink = recording(state_)) return recorded::plan_drop(*sink, *this);
  HELICORE_KV_STATE(status_ != CacheStatus::kClosed, "kv.plan_committed_block_drop", "cache ", id_,
                    " is CLOSED");
  HELICORE_KV_STATE(commit_state_ != CommitState::kAllowed, "kv.plan_committed_block_drop",
                    "cache ", id_, " may still commit; call stop_committing() first");
  const std::vector<TokenId> tokens = committed_tokens();
  const std::unique_lock lock(state_->mutex);
  state_->begin_operation();
  ManagerState& state = *state_;
  std::vector<NodeId> path;
  const NodeId root = state.tree.find_root(scope_);
  const PrefixMatch match =
      state.tree.match(root, tokens, {.partial = state.config.enable_partial_reuse}, &path);
  const auto length = static_cast<int32_t>(tokens.size());
  if (length == 0 || match.num_tokens < length) return nullptr;
  std::vector<PageHandle> pages;
  const auto add = [&](NodeId node, size_t lc) {
    const PageId page = state.tree.pages(node)[lc];
    if (page != kNoPage) pages.push_back(state.store.pages().handle(page));
  };
  for (size_t lc = 0; lc < tables_.size(); ++lc) {
    const LifeCycle& life_cycle = state.life_cycle(lc);
    if (state.is_ssm(lc) && match.ssm_node != kNoNode) add(match.ssm_node, lc);
    if (!life_cycle.window || life_cycle.policy == ReusePolicy::kPrivate) continue;
    const auto begin = std::max(stale(lc, length).end, life_cycle.num_sink_blocks);
    for (auto b = static_cast<size_t>(begin); b < path.size(); ++b) add(path[b], lc);
  }
  return std::make_unique<PlannedDrop>(state, std::move(pages));
}

}  // namespace helicore::kv
