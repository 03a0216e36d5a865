#include "helicore/kv/slot_allocator.h"

#include <algorithm>

#include "helicore/core/error.h"

namespace helicore::kv {

SlotAllocator::SlotAllocator(int32_t capacity) : capacity_(0), limit_(0) {
  HELICORE_CHECK(capacity >= 0, "kv.slot_allocator", "capacity must be >= 0, got ", capacity);
  grow(capacity);
}

void SlotAllocator::grow(int32_t capacity) {
  HELICORE_CHECK(capacity >= capacity_, "kv.slot_allocator", "capacity must be >= ", capacity_,
                 ", got ", capacity);
  HELICORE_ASSERT(limit_ == capacity_, "kv.slot_allocator", "limit ", limit_, " < capacity ",
                  capacity_);
  const auto count = static_cast<size_t>(capacity);
  next_.reserve(count);
  after_.reserve(count);
  in_use_.reserve((count + 63) / 64);
  next_.resize(count, -1);
  after_.resize(count);
  in_use_.resize((count + 63) / 64);
  capacity_ = limit_ = capacity;
}

SlotAllocator::List& SlotAllocator::list_for(TimePoint after, const CacheDevice& device) noexcept {
  if (after.is_none() || device.reached(after)) return ready_;
  return device.is_waitable(after) ? in_flight_ : parked_;
}

void SlotAllocator::push(List& list, int32_t slot) noexcept {
  next_[static_cast<size_t>(slot)] = -1;
  if (list.tail < 0) {
    list.head = slot;
  } else {
    next_[static_cast<size_t>(list.tail)] = slot;
  }
  list.tail = slot;
  ++list.count;
}

int32_t SlotAllocator::pop(List& list) noexcept {
  const int32_t slot = list.head;
  list.head = next_[static_cast<size_t>(slot)];
  if (list.head < 0) list.tail = -1;
  --list.count;
  return slot;
}

SlotId SlotAllocator::allocate() noexcept {
  SlotId slot(high_water_);
  if (ready_.count > 0) {
    slot = SlotId(pop(ready_));
  } else if (num_untouched() > 0) {
    ++high_water_;
  } else {
    slot = SlotId(pop(in_flight_));
  }
  in_use_[word(slot)] |= uint64_t{1} << bit(slot);
  return slot;
}

bool SlotAllocator::remove(List& list, int32_t slot) noexcept {
  if (list.count > 0 && list.head == slot) return pop(list) == slot;
  bool found = false;
  for (int32_t left = list.count; left > 0; --left) {
    const int32_t other = pop(list);
    if (other == slot) {
      found = true;
    } else {
      push(list, other);
    }
  }
  return found;
}

bool SlotAllocator::take(SlotId slot) noexcept {
  if (slot.value() < 0 || slot.value() >= limit_ || slot.value() > high_water_ || in_use(slot)) {
    return false;
  }
  if (slot.value() == high_water_) {
    ++high_water_;
  } else if (!remove(ready_, slot.value()) && !remove(in_flight_, slot.value())) {
    return false;
  }
  in_use_[word(slot)] |= uint64_t{1} << bit(slot);
  return true;
}

void SlotAllocator::release(SlotId slot, TimePoint after, const CacheDevice& device) {
  if (slot.value() < 0 || slot.value() >= capacity_ || !in_use(slot)) [[unlikely]] {
    ++num_double_releases_;
#ifdef HELICORE_DEBUG_CHECKS
    HELICORE_ASSERT(false, "kv.slot_allocator", "slot ", slot, " released but not in use");
#endif
    return;
  }
  in_use_[word(slot)] &= ~(uint64_t{1} << bit(slot));
  List& list = list_for(after, device);
  after_[static_cast<size_t>(slot.value())] = &list == &ready_ ? TimePoint() : after;
  if (slot.value() >= limit_) return;  // retired
  push(list, slot.value());
}

void SlotAllocator::settle(const CacheDevice& device) noexcept {
  if (in_flight_.count > 0) settle(in_flight_, device);
  // As soon as the steps are done, whatever copies do after them: how many slots can be handed out
  // is a matter of what the caller did, never of how fast copies are.
  while (parked_.count > 0) {
    TimePoint& after = after_[static_cast<size_t>(parked_.head)];
    if (!device.is_waitable(after)) return;
    const bool ready = device.reached(after);
    if (ready) after = TimePoint();
    push(ready ? ready_ : in_flight_, pop(parked_));
  }
}

void SlotAllocator::settle(List& list, const CacheDevice& device) noexcept {
  while (list.count > 0) {
    TimePoint& after = after_[static_cast<size_t>(list.head)];
    if (!after.is_none() && !device.reached(after)) return;
    after = TimePoint();
    push(ready_, pop(list));
  }
}

void SlotAllocator::set_limit(int32_t limit, const CacheDevice& device) noexcept {
  const int32_t before = limit_;
  limit_ = std::clamp(limit, 0, capacity_);
  for (int32_t slot = before; slot < std::min(limit_, high_water_); ++slot) {
    if (!in_use(SlotId(slot))) push(list_for(after_[static_cast<size_t>(slot)], device), slot);
  }
  if (limit_ >= before) return;
  retire_from(ready_);
  retire_from(in_flight_);
  retire_from(parked_);
}

void SlotAllocator::retire_from(List& list) noexcept {
  for (int32_t left = list.count; left > 0; --left) {
    const int32_t slot = pop(list);
    if (slot < limit_) push(list, slot);
  }
}

int32_t SlotAllocator::num_in_use_beyond_limit() const noexcept {
  int32_t count = 0;
  for (int32_t slot = limit_; slot < high_water_; ++slot) count += in_use(SlotId(slot)) ? 1 : 0;
  return count;
}

bool SlotAllocator::is_tail_free(const CacheDevice& device) const noexcept {
  for (int32_t slot = limit_; slot < high_water_; ++slot) {
    if (in_use(SlotId(slot))) return false;
    const TimePoint point = after_[static_cast<size_t>(slot)];
    if (!point.is_none() && !device.reached(point)) return false;
  }
  return true;
}

bool SlotAllocator::collect_tail_points(const CacheDevice& device,
                                        std::vector<TimePoint>& points) const {
  for (int32_t slot = limit_; slot < high_water_; ++slot) {
    const TimePoint point = after_[static_cast<size_t>(slot)];
    if (in_use(SlotId(slot)) || point.is_none() || device.reached(point)) continue;
    if (!device.is_waitable(point)) return false;
    const auto known = std::find_if(points.begin(), points.end(), [&](TimePoint other) {
      return other.timeline() == point.timeline();
    });
    if (known == points.end()) {
      points.push_back(point);
    } else if (known->value() < point.value()) {
      *known = point;
    }
  }
  return true;
}

void SlotAllocator::trim() {
  for (int32_t slot = limit_; slot < high_water_; ++slot) {
    HELICORE_ASSERT(!in_use(SlotId(slot)), "kv.slot_allocator", "slot ", slot, " is in use");
  }
  capacity_ = limit_;
  high_water_ = std::min(high_water_, limit_);
  next_.resize(static_cast<size_t>(capacity_));
  after_.resize(static_cast<size_t>(capacity_));
  in_use_.resize((static_cast<size_t>(capacity_) + 63) / 64);
}

}  // namespace helicore::kv
