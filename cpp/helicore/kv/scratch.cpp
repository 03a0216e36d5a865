#include "helicore/kv/scratch.h"

#include <algorithm>
#include <mutex>

#include "helicore/core/error.h"
#include "helicore/kv/kv_cache.h"
#include "helicore/kv/manager_state.h"
#include "helicore/kv/recorded_calls.h"

namespace helicore::kv {

ScratchSlots::ScratchSlots(KVCache& cache, bool is_enabled)
    : cache_(cache), is_enabled_(is_enabled) {}

void ScratchSlots::set_enabled(bool is_enabled) {
  if (auto* sink = recording(cache_.state_)) {
    return recorded::set_scratch_reuse(*sink, cache_, is_enabled);
  }
  constexpr const char* kWhere = "kv.enable_swa_scratch_reuse";
  HELICORE_KV_STATE(cache_.status_ != CacheStatus::kClosed, kWhere, "cache ", cache_.id_,
                    " is CLOSED");
  if (is_enabled == is_enabled_) return;
  const ManagerState& state = *cache_.state_;
  HELICORE_CHECK(state.config.swa_scratch_reuse, kWhere,
                 "enable_swa_scratch_reuse can be True only with config.swa_scratch_reuse");
  const std::unique_lock lock(state.mutex);
  for (size_t lc = 0; lc < state.num_life_cycles; ++lc) {
    const auto blocks = possible_range(lc, cache_.cursors());
    HELICORE_KV_STATE(blocks.empty(), kWhere, "cache ", cache_.id_, ": blocks [", blocks.begin,
                      ", ", blocks.end, ") of layer group ", lc,
                      " are scratch, or would be: set it between steps");
  }
  is_enabled_ = is_enabled;
}

std::optional<ScratchDesc> ScratchSlots::desc(LifeCycleId group) const {
  (void)cache_.table(group, kDefaultBeamIndex);
  const auto lc = static_cast<size_t>(group.value());
  if (pages(lc).empty()) return std::nullopt;
  const std::shared_lock lock(cache_.state_->mutex);
  ScratchDesc result{range(lc, cache_.cursors()), {}};
  for (PageHandle page : pages(lc)) {
    result.slot_ids.push_back(cache_.state_->store.page(page.id).slot.value());
  }
  return result;
}

bool ScratchSlots::has_slots() const noexcept {
  return std::any_of(pages_.begin(), pages_.end(), [](const auto& own) { return !own.empty(); });
}

std::span<const PageHandle> ScratchSlots::pages(size_t life_cycle) const noexcept {
  if (life_cycle >= pages_.size()) return {};
  return pages_[life_cycle];
}

HalfOpenRange<int32_t> ScratchSlots::possible_range(size_t life_cycle,
                                                    const StepCursors& cursors) const noexcept {
  const ManagerState& state = *cache_.state_;
  if (!state.config.swa_scratch_reuse) return {0, 0};
  return state.life_cycle(life_cycle)
      .scratch_range(cursors.history, cursors.capacity,
                     state.config.swa_scratch_reuse->max_rewind_len, cache_.tokens_per_block_);
}

HalfOpenRange<int32_t> ScratchSlots::range(size_t life_cycle,
                                           const StepCursors& cursors) const noexcept {
  return is_enabled_ ? possible_range(life_cycle, cursors) : HalfOpenRange<int32_t>{0, 0};
}

bool ScratchSlots::is_scratch(int32_t ordinal, size_t life_cycle,
                              const StepCursors& cursors) const noexcept {
  return range(life_cycle, cursors).contains(ordinal);
}

bool ScratchSlots::any(const StepCursors& cursors) const noexcept {
  if (!is_enabled_) return false;
  for (size_t lc = 0; lc < cache_.tables_.size(); ++lc) {
    if (!range(lc, cursors).empty()) return true;
  }
  return false;
}

bool ScratchSlots::concerns(const StepCursors& cursors) const noexcept {
  return is_enabled_ && (has_slots() || any(cursors));
}

int32_t ScratchSlots::num_wanted(size_t life_cycle, const StepCursors& cursors) const noexcept {
  const auto blocks = range(life_cycle, cursors);
  if (blocks.empty()) return 0;
  const Fraction part = cache_.state_->scratch_parts[LifeCycleId(static_cast<int32_t>(life_cycle))];
  const int64_t pages = (blocks.end - blocks.begin) * part.num;
  return static_cast<int32_t>((pages + part.den - 1) / part.den);
}

int32_t ScratchSlots::num_missing(size_t life_cycle, const StepCursors& cursors) const noexcept {
  const auto present = static_cast<int32_t>(pages(life_cycle).size());
  return std::max(0, num_wanted(life_cycle, cursors) - present);
}

int32_t ScratchSlots::num_given_up(size_t life_cycle, const StepCursors& cursors) const noexcept {
  const PageStore& store = cache_.state_->store;
  int32_t count = 0;
  const auto present = pages(life_cycle);
  for (auto i = static_cast<size_t>(num_wanted(life_cycle, cursors)); i < present.size(); ++i) {
    count += store.is_beyond_limit(present[i].id) ? 0 : 1;
  }
  const auto blocks = range(life_cycle, cursors);
  for (int32_t b = blocks.begin; b < std::min(blocks.end, cache_.num_blocks_); ++b) {
    const PageHandle page = cache_.page(b, life_cycle);
    count += page.is_null() || store.is_beyond_limit(page.id) ? 0 : 1;
  }
  return count;
}

void ScratchSlots::check_resize(const char* where, const StepCursors& next) const {
  if (!is_enabled_) return;
  const StepCursors now = cache_.cursors();
  check_history(where, next.history);
  HELICORE_CHECK(next.capacity >= now.capacity || !any(now), where,
                 "capacity must not shrink while there are scratch blocks, got ", next.capacity,
                 " < ", now.capacity);
  const int32_t rewind = cache_.state_->config.swa_scratch_reuse->max_rewind_len;
  HELICORE_CHECK(next.capacity == now.capacity ||
                     (next.history >= now.capacity - rewind && next.history <= now.capacity),
                 where,
                 "history_length must be in [old capacity - max_rewind_len, old capacity] = [",
                 now.capacity - rewind, ", ", now.capacity,
                 "] when capacity changes with swa_scratch_reuse, got ", next.history);
}

void ScratchSlots::check_history(const char* where, int32_t history) const {
  const StepCursors now = cache_.cursors();
  if (!is_enabled_ || history == now.history) return;
  for (size_t lc = 0; lc < cache_.tables_.size(); ++lc) {
    const auto blocks = range(lc, now);
    if (blocks.empty()) continue;
    // From here on no token of them is in the window.
    const int32_t least = blocks.end * cache_.tokens_per_block_ +
                          cache_.state_->life_cycle(lc).window.value_or(1) - 1;
    HELICORE_CHECK(history >= least, where, "history_length must stay ", now.history,
                   " or move to at least ", least, " while blocks [", blocks.begin, ", ",
                   blocks.end, ") of layer group ", lc, " are scratch: their rows are gone, got ",
                   history);
  }
}

void ScratchSlots::check_truncate(const char* where, int32_t num_tokens) const {
  HELICORE_CHECK(num_tokens == cache_.capacity_ || !any(cache_.cursors()), where,
                 "num_tokens must be capacity ", cache_.capacity_,
                 " while there are scratch blocks, got ", num_tokens);
}

void ScratchSlots::reserve(const StepCursors& cursors) {
  if (!is_enabled_) return;
  pages_.resize(cache_.tables_.size());
  for (size_t lc = 0; lc < pages_.size(); ++lc) {
    pages_[lc].reserve(static_cast<size_t>(num_wanted(lc, cursors)));
  }
}

void ScratchSlots::release_last(size_t life_cycle) {
  PageStore& store = cache_.state_->store;
  const PageHandle page = pages_[life_cycle].back();
  pages_[life_cycle].pop_back();
  store.unlock(page, cache_.fence());
  store.unhold(page);
  ++cache_.state_->life_cycle_stats[LifeCycleId(static_cast<int32_t>(life_cycle))].released_pages;
}

void ScratchSlots::give_up(const StepCursors& cursors) {
  if (!is_enabled_) return;
  for (size_t lc = 0; lc < cache_.tables_.size(); ++lc) {
    const auto wanted = static_cast<size_t>(num_wanted(lc, cursors));
    while (pages(lc).size() > wanted) release_last(lc);
    const auto blocks = range(lc, cursors);
    for (int32_t b = std::min(blocks.end, cache_.num_blocks_) - 1; b >= blocks.begin; --b) {
      cache_.release_page(b, lc);
    }
  }
}

void ScratchSlots::fill(const StepCursors& cursors) {
  if (!is_enabled_) return;
  for (size_t lc = 0; lc < pages_.size(); ++lc) {
    const int32_t first = range(lc, cursors).begin;
    for (int32_t count = num_missing(lc, cursors); count > 0; --count) {
      pages_[lc].push_back(cache_.fresh_page(first, lc));
    }
  }
}

void ScratchSlots::release_all() {
  for (size_t lc = 0; lc < pages_.size(); ++lc) {
    while (!pages_[lc].empty()) release_last(lc);
  }
}

}  // namespace helicore::kv
