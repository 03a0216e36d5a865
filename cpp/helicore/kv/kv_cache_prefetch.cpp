// Bringing the pages of a suspended cache up before it is resumed.
#include <algorithm>
#include <mutex>

#include "helicore/core/error.h"
#include "helicore/kv/kv_cache.h"
#include "helicore/kv/manager_state.h"
#include "helicore/kv/recorded_calls.h"

namespace helicore::kv {
namespace {

// Bytes of a batch, and of file copies under way beyond which no batch is started.
constexpr int64_t kBatchBytes = int64_t{32} << 20;
constexpr int64_t kMaxBytesInFlight = int64_t{256} << 20;

}  // namespace

PrefetchTicket KVCache::prefetch(int level) {
  if (auto* sink = recording(state_)) return recorded::prefetch(*sink, *this, level);
  HELICORE_KV_STATE(status_ == CacheStatus::kSuspended, "kv.prefetch", "cache ", id_, " is ",
                    name_of(status_), ", must be SUSPENDED");
  HELICORE_CHECK(level >= 0 && level < state_->store.num_levels(), "kv.prefetch",
                 "level must be in [0, ", state_->store.num_levels(), "), got ", level);
  const std::unique_lock lock(state_->mutex);
  state_->begin_operation();
  prefetch_ = {.serial = prefetch_.serial + 1, .level = level, .pages = {}, .arrival = {}};
  std::vector<PageHandle>& pages = prefetch_.pages;
  pages.reserve(pages_.size() + 1);
  const auto add = [&](PageHandle handle) {
    if (!handle.is_null() && state_->store.page(handle.id).level > level) pages.push_back(handle);
  };
  for (int32_t b = num_blocks_ - 1; b >= 0; --b) {
    for (size_t lc = 0; lc < tables_.size(); ++lc) {
      if (!stale(lc, history_length_).contains(b)) add(page(b, lc));
    }
  }
  add(state_page_);
  pump_prefetch();
  state_->verify();
  return {this, prefetch_.serial};
}

void KVCache::pump_prefetch() {
  ManagerState& state = *state_;
  std::vector<PageHandle>& left = prefetch_.pages;
  if (left.empty() || !state.device->reached(prefetch_.arrival)) return;
  if (status_ != CacheStatus::kSuspended || is_lost_) {
    left.clear();
    return;
  }
  if (state.device->bytes_in_flight() > kMaxBytesInFlight) {
    constexpr int64_t kYes = 1;
    if (auto* sink = noting(state)) sink->note(OperationField::kHeldBack, std::span(&kYes, 1));
    return;
  }
  std::vector<PageId>& pages = state.pages_scratch;
  pages.clear();
  // What is there already is not to make room for the rest.
  for (PageHandle handle : pages_) {
    if (!handle.is_null() && state.store.page(handle.id).level <= prefetch_.level) {
      pages.push_back(handle.id);
    }
  }
  const size_t first = pages.size();
  int64_t bytes = 0;
  while (!left.empty() && bytes < kBatchBytes) {
    const PageHandle handle = left.back();
    left.pop_back();
    if (!state.store.pages().is_current(handle)) continue;
    pages.push_back(handle.id);
    bytes +=
        state.layout.groups()[PoolGroupId(state.store.page(handle.id).pool_group)].slot_bytes();
  }
  bool has_room = false;
  try {
    has_room = !state.migrator.make_room({.level = prefetch_.level, .pages = pages});
  } catch (const std::exception&) {  // the device refused; the pages are where a resume finds them
  }
  if (!has_room) {
    prefetch_.is_short = true;
    left.clear();
    return;
  }
  for (size_t i = first; i < pages.size(); ++i) {
    const TimePoint point = state.store.filled(pages[i]);
    if (state.device->reached(point)) continue;
    prefetch_.arrival = prefetch_.arrival.is_none() || state.device->reached(prefetch_.arrival)
                            ? point
                            : state.device->join(prefetch_.arrival, point);
  }
}

bool PrefetchTicket::is_done() {
  if (cache_ == nullptr || cache_->prefetch_.serial != serial_ || cache_->state_ == nullptr) {
    return true;
  }
  const PrefetchState& own = cache_->prefetch_;
  CacheDevice& device = *cache_->state_->device;
  if (!device.reached(own.arrival)) return false;
  if (own.pages.empty()) return true;
  if (auto* sink = recording(cache_->state_)) {
    return recorded::poll_prefetch(*sink, *cache_, *this);
  }
  const std::unique_lock lock(cache_->state_->mutex);
  cache_->state_->begin_operation();
  cache_->pump_prefetch();
  cache_->state_->verify();
  return own.pages.empty() && device.reached(own.arrival);
}

void PrefetchTicket::cancel() {
  if (cache_ == nullptr || cache_->prefetch_.serial != serial_) return;
  if (cache_->prefetch_.pages.empty()) return;
  if (auto* sink = recording(cache_->state_)) {
    return recorded::cancel_prefetch(*sink, *cache_, *this);
  }
  cache_->prefetch_.pages.clear();
  cache_->prefetch_.is_short = true;
}

bool PrefetchTicket::is_complete() const noexcept {
  if (cache_ == nullptr || cache_->prefetch_.serial != serial_ || cache_->state_ == nullptr) {
    return false;
  }
  const PrefetchState& own = cache_->prefetch_;
  return own.pages.empty() && !own.is_short && cache_->state_->device->reached(own.arrival);
}

}  // namespace helicore::kv
