#include "helicore/kv/reuse_status.h"

#include <algorithm>
#include <mutex>

#include "helicore/core/error.h"
#include "helicore/kv/kv_cache.h"
#include "helicore/kv/manager_state.h"
#include "helicore/kv/recorded_calls.h"

namespace helicore::kv {
namespace {

bool overlap(TokenRange a, TokenRange b) noexcept { return a.begin < b.end && b.begin < a.end; }

}  // namespace

void MissingRows::add(size_t life_cycle, TokenRange tokens) {
  if (!tokens.empty()) entries_.push_back({life_cycle, tokens});
}

void MissingRows::remove(size_t life_cycle, TokenRange tokens) noexcept {
  std::erase_if(entries_, [&](const Entry& entry) {
    return entry.life_cycle == life_cycle && overlap(entry.tokens, tokens);
  });
}

void MissingRows::cut(int32_t num_tokens) noexcept {
  for (Entry& entry : entries_) entry.tokens.end = std::min(entry.tokens.end, num_tokens);
  std::erase_if(entries_, [](const Entry& entry) { return entry.tokens.empty(); });
}

bool MissingRows::overlaps(size_t life_cycle, TokenRange tokens) const noexcept {
  return std::any_of(entries_.begin(), entries_.end(), [&](const Entry& entry) {
    return entry.life_cycle == life_cycle && overlap(entry.tokens, tokens);
  });
}

std::vector<TokenRange> MissingRows::remaining(size_t life_cycle, TokenRange tokens) const {
  std::vector<TokenRange> gaps;
  for (const Entry& entry : entries_) {
    if (entry.life_cycle == life_cycle && overlap(entry.tokens, tokens)) {
      gaps.push_back(entry.tokens);
    }
  }
  std::sort(gaps.begin(), gaps.end(),
            [](const TokenRange& a, const TokenRange& b) { return a.begin < b.begin; });
  std::vector<TokenRange> left;
  if (tokens.empty()) return left;
  for (const TokenRange& gap : gaps) {
    if (gap.begin > tokens.begin) left.push_back({tokens.begin, gap.begin});
    tokens.begin = std::max(tokens.begin, gap.end);
  }
  if (!tokens.empty()) left.push_back(tokens);
  return left;
}

std::vector<ReuseStatus> KVCache::reuse_status() const {
  std::vector<ReuseStatus> all;
  if (status_ == CacheStatus::kClosed) return all;
  const std::shared_lock lock(state_->mutex);
  for (size_t lc = 0; lc < tables_.size(); ++lc) {
    const LifeCycle& life_cycle = state_->life_cycle(lc);
    ReuseStatus status{.group = LifeCycleId(static_cast<int32_t>(lc)), .policy = life_cycle.policy};
    const auto dead = stale(lc, known_rows_);
    // A recurrent state stands for all tokens in front of it.
    std::vector<TokenRange> read{{0, known_rows_}};
    if (!state_->is_ssm(lc) && !dead.empty()) {
      read = {{0, dead.begin * tokens_per_block_},
              {std::min(known_rows_, dead.end * tokens_per_block_), known_rows_}};
    }
    status.complete = true;
    for (const TokenRange& range : read) {
      if (range.empty()) continue;
      TokenRange own = range;
      if (life_cycle.policy == ReusePolicy::kPrivate) own.begin = std::max(own.begin, num_reused_);
      const auto left = missing_.remaining(lc, own);
      status.complete = status.complete && left == std::vector<TokenRange>{range};
      status.coverage.insert(status.coverage.end(), left.begin(), left.end());
    }
    if (!status.coverage.empty()) status.endpoint = status.coverage.back().end;
    all.push_back(std::move(status));
  }
  return all;
}

void KVCache::select_optional_reuse(std::span<const LifeCycleId> groups) {
  if (auto* sink = recording(state_)) {
    return recorded::select_optional_reuse(*sink, *this, groups);
  }
  constexpr const char* kWhere = "kv.select_optional_reuse";
  HELICORE_KV_STATE(status_ == CacheStatus::kSuspended && !was_resumed_, kWhere, "cache ", id_,
                    " was resumed; groups are selected before that");
  for (LifeCycleId group : groups) {
    const bool is_optional = group.value() >= 0 &&
                             static_cast<size_t>(group.value()) < tables_.size() &&
                             state_->registry[group].policy == ReusePolicy::kOptional;
    HELICORE_CHECK(is_optional, kWhere, "groups must be OPTIONAL layer groups, got ", group);
  }
  const std::unique_lock lock(state_->mutex);
  state_->begin_operation();
  for (size_t lc = 0; lc < tables_.size(); ++lc) {
    const LifeCycleId group(static_cast<int32_t>(lc));
    const bool stays = std::find(groups.begin(), groups.end(), group) != groups.end();
    if (stays || state_->life_cycle(lc).policy != ReusePolicy::kOptional) continue;
    missing_.reserve(static_cast<size_t>(num_blocks_));
    for (int32_t b = num_blocks_ - 1; b >= 0; --b) forget_optional(b, lc);
  }
  state_->verify();
}

TokenRange KVCache::rows_of(int32_t ordinal) const noexcept {
  const int32_t begin = ordinal * tokens_per_block_;
  return {std::min(begin, history_length_), std::min(begin + tokens_per_block_, history_length_)};
}

void KVCache::forget_optional(int32_t ordinal, size_t life_cycle) {
  if (page(ordinal, life_cycle).is_null()) return;
  missing_.remove(life_cycle, rows_of(ordinal));
  missing_.add(life_cycle, rows_of(ordinal));
  release_page(ordinal, life_cycle);
}

bool KVCache::has_all_rows(int32_t ordinal, size_t life_cycle) const noexcept {
  const int32_t begin = ordinal * tokens_per_block_;
  return !missing_.overlaps(life_cycle, {begin, begin + tokens_per_block_});
}

bool KVCache::lost_required() const noexcept {
  const auto is_lost = [&](PageHandle handle) {
    return !handle.is_null() && state_->store.page(handle.id).lost;
  };
  if (is_lost(state_page_)) return true;
  for (size_t i = 0; i < pages_.size(); ++i) {
    const auto policy = state_->life_cycle(i % tables_.size()).policy;
    if (policy != ReusePolicy::kOptional && is_lost(pages_[i])) return true;
  }
  return false;
}

void KVCache::look_for_lost_pages() {
  if (is_lost_) return;
  if (lost_required()) {
    is_lost_ = true;
    return;
  }
  if (!state_->has_optional) return;
  for (int32_t b = num_blocks_ - 1; b >= 0; --b) {
    for (size_t lc = 0; lc < tables_.size(); ++lc) {
      const PageHandle handle = page(b, lc);
      if (handle.is_null() || !state_->store.page(handle.id).lost) continue;
      // Work of an active cache may have read it.
      if (is_active()) {
        is_lost_ = true;
        return;
      }
      forget_optional(b, lc);
      known_rows_ = history_length_;
    }
  }
}

}  // namespace helicore::kv
