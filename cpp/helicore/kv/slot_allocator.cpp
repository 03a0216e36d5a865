#include "helicore/kv/slot_allocator.h"

#include "helicore/core/error.h"

namespace helicore::kv {

SlotAllocator::SlotAllocator(int32_t capacity)
    : capacity_(capacity),
      ring_(static_cast<size_t>(capacity)),
      in_use_((static_cast<size_t>(capacity) + 63) / 64) {
  HELICORE_CHECK(capacity >= 0, "kv.slot_allocator", "capacity must be >= 0, got ", capacity);
}

SlotId SlotAllocator::allocate() noexcept {
  SlotId slot(high_water_);
  if (num_recycled_ > 0) {
    slot = SlotId(ring_[static_cast<size_t>(head_)]);
    head_ = head_ + 1 == capacity_ ? 0 : head_ + 1;
    --num_recycled_;
  } else {
    ++high_water_;
  }
  in_use_[word(slot)] |= uint64_t{1} << bit(slot);
  return slot;
}

void SlotAllocator::release(SlotId slot) {
  if (slot.value() < 0 || slot.value() >= capacity_ || !in_use(slot)) [[unlikely]] {
    ++num_double_releases_;
#ifdef HELICORE_DEBUG_CHECKS
    HELICORE_ASSERT(false, "kv.slot_allocator", "slot ", slot, " released but not in use");
#endif
    return;
  }
  in_use_[word(slot)] &= ~(uint64_t{1} << bit(slot));
  int64_t tail = static_cast<int64_t>(head_) + num_recycled_;
  if (tail >= capacity_) tail -= capacity_;
  ring_[static_cast<size_t>(tail)] = slot.value();
  ++num_recycled_;
}

}  // namespace helicore::kv
