// Sizes: quotas that change while sequences run, slots that move between pool groups, and what
// fits.
#include <algorithm>
#include <mutex>

#include "helicore/core/error.h"
#include "helicore/kv/kv_cache_manager.h"
#include "helicore/kv/manager_state.h"
#include "helicore/kv/recorded_calls.h"

namespace helicore::kv {

ResizeResult KVCacheManager::resize(int level, int64_t quota, bool best_effort) {
  if (auto* sink = recording(state_.get())) {
    return recorded::resize_level(*sink, *this, level, quota, best_effort);
  }
  check_level("kv.resize_level", level);
  std::unique_lock lock(state_->mutex);
  state_->begin_operation();
  check_open("kv.resize_level");
  LevelSizer& sizer = state_->sizer;
  const uint64_t before = sizer.serial(level);
  ResizeResult result = sizer.resize(level, quota, best_effort);
  state_->verify();
  if (best_effort || sizer.serial(level) == before) return result;
  const uint64_t own = sizer.serial(level);
  // What is left are copies and streams; both end by themselves.
  while (!result.done && !result.reason) {
    const std::vector<TimePoint> points = sizer.tail_points(level);
    lock.unlock();
    for (TimePoint point : points) state_->device->synchronize(point);
    if (auto* sink = noting(*state_)) sink->next_stage();
    lock.lock();
    state_->begin_operation();
    if (sizer.serial(level) != own) return result;  // another call has a new target
    result = sizer.proceed(level);
    state_->verify();
  }
  return result;
}

int64_t KVCacheManager::maintain(int64_t max_pages) {
  HELICORE_CHECK(max_pages >= 1, "kv.maintain", "max_pages must be >= 1, got ", max_pages);
  if (!state_->sizer.is_busy()) return 0;
  if (auto* sink = recording(state_.get())) return recorded::maintain(*sink, *this, max_pages);
  const std::unique_lock lock(state_->mutex);
  state_->begin_operation();
  const int64_t moved = state_->sizer.work(max_pages);
  state_->verify();
  return moved;
}

bool KVCacheManager::is_resizing() const noexcept { return state_->sizer.is_busy(); }

bool KVCacheManager::need_adjustment() const {
  const std::shared_lock lock(state_->mutex);
  return state_->sizer.need_adjustment();
}

bool KVCacheManager::adjust() {
  if (auto* sink = recording(state_.get())) return recorded::adjust(*sink, *this);
  const std::unique_lock lock(state_->mutex);
  state_->begin_operation();
  check_open("kv.adjust");
  const bool started = state_->sizer.adjust();
  state_->verify();
  return started;
}

std::vector<double> KVCacheManager::pool_ratios(int level) const {
  check_level("kv.pool_ratios", level);
  const std::shared_lock lock(state_->mutex);
  return state_->sizer.ratios(level);
}

std::optional<std::vector<double>> KVCacheManager::target_ratios(int level) const {
  check_level("kv.target_ratios", level);
  const std::shared_lock lock(state_->mutex);
  return state_->sizer.target_ratios(level);
}

void KVCacheManager::mark_stats_excluded(int64_t id) {
  if (auto* sink = recording(state_.get())) return recorded::exclude_stats(*sink, *this, id);
  const std::unique_lock lock(state_->mutex);
  state_->sizer.exclude(id);
}

bool KVCacheManager::is_stats_excluded(int64_t id) const {
  const std::shared_lock lock(state_->mutex);
  return state_->sizer.is_excluded(id);
}

int64_t KVCacheManager::clamp_max_seq_len_for_mem(int64_t batch_size, int64_t upper) const {
  const std::shared_lock lock(state_->mutex);
  ClampRequest request{.num_slots = {},
                       .tokens_per_block = state_->config.tokens_per_block,
                       .batch_size = batch_size,
                       .upper = upper};
  for (size_t g = 0; g < state_->store.num_groups(); ++g) {
    request.num_slots.push_back(state_->store.slots(PoolGroupId(static_cast<int32_t>(g))).limit());
  }
  return clamp_max_seq_len(state_->registry, state_->layout, request);
}

int32_t KVCacheManager::count_shared_prefix(const KVCache& cache) const noexcept {
  for (int32_t block = 0; block < cache.num_blocks_; ++block) {
    bool any = false;
    for (size_t lc = 0; lc < state_->num_life_cycles; ++lc) {
      if (cache.page(block, lc).is_null()) continue;
      if (state_->store.page(cache.page(block, lc).id).hold_count == 1) return block;
      any = true;
    }
    if (!any) return block;
  }
  return cache.num_blocks_;
}

AdmissionForecast KVCacheManager::forecast_admission(std::span<const ExpectedLength> running,
                                                     const SequencePlan& request) const {
  constexpr const char* kWhere = "kv.forecast_admission";
  const std::shared_lock lock(state_->mutex);
  std::vector<SequencePlan> plans;
  for (const ExpectedLength& expected : running) {
    const KVCache* cache = expected.cache;
    HELICORE_CHECK(cache != nullptr && cache->state_ == state_.get(), kWhere,
                   "running caches must belong to this manager");
    HELICORE_CHECK(cache->is_active(), kWhere, "running cache ", cache->id(), " is ",
                   name_of(cache->status()), ", must be ACTIVE");
    plans.push_back({.capacity = cache->capacity(),
                     .history_length = cache->history_length(),
                     .final_capacity = std::max(expected.final_capacity, cache->capacity()),
                     .tokens_per_step = expected.tokens_per_step,
                     .lookahead = expected.lookahead,
                     .shared_blocks = count_shared_prefix(*cache)});
  }
  GroupSlots available(state_->store.num_groups(), 0);
  for (size_t g = 0; g < available.count(); ++g) {
    const PoolGroupId group(static_cast<int32_t>(g));
    const SlotAllocator& slots = state_->store.slots(group);
    // A step that is under way ends before the next. Slots that are to be given back are held by
    // someone, but won't be there for anyone else.
    available[group] = state_->migrator.num_available(group, kHotLevel) +
                       state_->store.counts(group).pending - slots.num_in_use_beyond_limit();
  }
  const ForecastShape shape{&state_->registry, &state_->layout, state_->config.tokens_per_block};
  return Forecast(shape, plans, available).admission(request);
}

}  // namespace helicore::kv
