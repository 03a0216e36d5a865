#include "helicore/kv/retention.h"

#include <algorithm>

#include "helicore/core/error.h"

namespace helicore::kv {
namespace {

constexpr bool is_later(const RetentionTimers::Timer& a, const RetentionTimers::Timer& b) {
  return a.at_ns != b.at_ns ? a.at_ns > b.at_ns : a.order < b.order;
}

}  // namespace

void RetentionRange::validate() const {
  constexpr const char* kWhere = "kv.RetentionRange";
  HELICORE_CHECK(begin >= 0, kWhere, "begin must be >= 0, got ", begin);
  HELICORE_CHECK(!end || *end > begin, kWhere, "end must be > begin ", begin, " or None, got ",
                 end.value_or(0));
  HELICORE_CHECK(priority >= kPriorityMin && priority <= kPriorityMax, kWhere,
                 "priority must be in [", kPriorityMin, ", ", kPriorityMax, "], got ", priority);
  HELICORE_CHECK(!duration_ms || (*duration_ms > 0 && *duration_ms <= INT64_MAX / 2'000'000),
                 kWhere, "duration_ms must be > 0 or None, got ", duration_ms.value_or(0));
}

Retention::Retention(std::span<const RetentionRange> ranges, int base_priority)
    : ranges_(ranges.begin(), ranges.end()), base_(static_cast<uint8_t>(base_priority)) {
  for (const RetentionRange& range : ranges_) {
    range.validate();
    expires_ = expires_ || range.duration_ms.has_value();
  }
}

Retention::Worth Retention::of_block(int32_t begin) const noexcept {
  Worth worth{base_, 0};
  int64_t longest = 0;
  bool for_ever = true;
  for (const RetentionRange& range : ranges_) {
    if (range.end && *range.end <= begin) continue;
    if (range.priority <= base_) continue;
    if (worth.priority == base_) for_ever = false;
    worth.priority = std::max(worth.priority, static_cast<uint8_t>(range.priority));
    for_ever = for_ever || !range.duration_ms;
    longest = std::max(longest, range.duration_ms.value_or(0));
  }
  worth.duration_ms = for_ever ? 0 : longest;
  return worth;
}

void RetentionTimers::add(int64_t at_ns, PageHandle page, uint8_t priority) {
  timers_.push_back({at_ns, page, priority, num_added_++});
  std::push_heap(timers_.begin(), timers_.end(), is_later);
}

RetentionTimers::Timer RetentionTimers::pop() noexcept {
  std::pop_heap(timers_.begin(), timers_.end(), is_later);
  const Timer timer = timers_.back();
  timers_.pop_back();
  return timer;
}

}  // namespace helicore::kv
