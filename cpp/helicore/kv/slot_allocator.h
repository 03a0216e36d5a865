// Slot ids of one pool group: a ring of recycled ids and a high-water mark. Holds no memory and no
// page.
#pragma once

#include <cstdint>
#include <vector>

#include "helicore/kv/types.h"

namespace helicore::kv {

// The free set is a set by construction: every slot has one in-use bit, so an id can't be handed
// out twice and can't be freed twice. A second release throws InternalError in builds with
// HELICORE_DEBUG_CHECKS; elsewhere it is counted and ignored. Invariant: free + in use == capacity.
// Not thread-safe.
class SlotAllocator {
 public:
  explicit SlotAllocator(int32_t capacity);

  [[nodiscard]] int32_t capacity() const noexcept { return capacity_; }
  [[nodiscard]] int32_t num_free() const noexcept {
    return num_recycled_ + (capacity_ - high_water_);
  }
  [[nodiscard]] bool in_use(SlotId slot) const noexcept {
    return (in_use_[word(slot)] >> bit(slot) & 1u) != 0;
  }
  [[nodiscard]] uint64_t num_double_releases() const noexcept { return num_double_releases_; }

  // Recycled ids first (oldest release first), then ids never used. Needs num_free() > 0.
  [[nodiscard]] SlotId allocate() noexcept;
  void release(SlotId slot);

 private:
  static size_t word(SlotId slot) noexcept { return static_cast<size_t>(slot.value()) >> 6; }
  static unsigned bit(SlotId slot) noexcept { return static_cast<unsigned>(slot.value()) & 63u; }

  int32_t capacity_;
  int32_t high_water_ = 0;  // ids >= this were never handed out
  int32_t head_ = 0;        // oldest recycled id in ring_
  int32_t num_recycled_ = 0;
  uint64_t num_double_releases_ = 0;
  std::vector<int32_t> ring_;
  std::vector<uint64_t> in_use_;
};

}  // namespace helicore::kv
