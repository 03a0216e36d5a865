// Slot ids of one pool group on one level: which are free, which will be once a point in time is
// reached, and which may still be touched by a step that the caller has not declared done. Holds no
// memory and no page.
#pragma once

#include <cstdint>
#include <vector>

#include "helicore/kv/cache_device.h"
#include "helicore/kv/types.h"

namespace helicore::kv {

// A released slot carries the point after which it may be written again and waits in one of three
// lists: ready (reached), in flight (a copy or a stream will reach it: may be handed out, the next
// owner waits) and parked (a step of the caller's: not handed out before). Every slot has one
// in-use bit, so an id can't be handed out twice and can't be freed twice; a second release throws
// InternalError in builds with HELICORE_DEBUG_CHECKS; elsewhere it is counted and ignored.
// Invariant: in use + ready + in flight + parked + retired + untouched == capacity. Not
// thread-safe.
class SlotAllocator {
 public:
  explicit SlotAllocator(int32_t capacity);

  [[nodiscard]] int32_t capacity() const noexcept { return capacity_; }
  // Slots that allocate() can hand out.
  [[nodiscard]] int32_t num_free() const noexcept {
    return ready_.count + in_flight_.count + num_untouched();
  }
  [[nodiscard]] int32_t num_parked() const noexcept { return parked_.count; }
  [[nodiscard]] bool in_use(SlotId slot) const noexcept {
    return (in_use_[word(slot)] >> bit(slot) & 1u) != 0;
  }
  [[nodiscard]] uint64_t num_double_releases() const noexcept { return num_double_releases_; }

  // Ready ids first (oldest release first), then ids never used, then those in flight. Needs
  // num_free() > 0.
  [[nodiscard]] SlotId allocate() noexcept;
  // Hands out this id, which a replay knows from the original. False when it is not one of those
  // that allocate() could give next or later. O(num_free()).
  [[nodiscard]] bool take(SlotId slot) noexcept;
  // `after` tells when the slot may be written again.
  void release(SlotId slot, TimePoint after, const CacheDevice& device);
  // Moves what has been reached to the ready list.
  void settle(const CacheDevice& device) noexcept;
  // What the owner of an allocated slot has to wait for before it writes.
  [[nodiscard]] TimePoint after(SlotId slot) const noexcept {
    return after_[static_cast<size_t>(slot.value())];
  }

  // From now on ids >= limit are not handed out; free ones are retired. limit <= capacity(). A
  // higher limit than before brings retired ids back, each with the point that it waits for.
  void set_limit(int32_t limit, const CacheDevice& device) noexcept;
  [[nodiscard]] int32_t limit() const noexcept { return limit_; }
  [[nodiscard]] int32_t num_in_use_beyond_limit() const noexcept;
  // Nobody uses an id >= limit and every point of theirs is reached: trim() may follow.
  [[nodiscard]] bool is_tail_free(const CacheDevice& device) const noexcept;
  // The points of retired ids that are not reached, one per timeline: when the tail is free as far
  // as its users are gone. False when one of them is a step of the caller's.
  [[nodiscard]] bool collect_tail_points(const CacheDevice& device,
                                         std::vector<TimePoint>& points) const;
  // capacity() becomes limit(). Needs is_tail_free().
  void trim();
  // More slots; the limit becomes the capacity. Needs limit() == capacity(). Throws std::bad_alloc,
  // nothing changed.
  void grow(int32_t capacity);

 private:
  struct List {
    int32_t head = -1;
    int32_t tail = -1;
    int32_t count = 0;
  };
  static size_t word(SlotId slot) noexcept { return static_cast<size_t>(slot.value()) >> 6; }
  static unsigned bit(SlotId slot) noexcept { return static_cast<unsigned>(slot.value()) & 63u; }
  [[nodiscard]] int32_t num_untouched() const noexcept {
    return high_water_ < limit_ ? limit_ - high_water_ : 0;
  }
  // The list of a free slot that waits for `after`.
  [[nodiscard]] List& list_for(TimePoint after, const CacheDevice& device) noexcept;
  void push(List& list, int32_t slot) noexcept;
  int32_t pop(List& list) noexcept;
  bool remove(List& list, int32_t slot) noexcept;
  void settle(List& list, const CacheDevice& device) noexcept;
  void retire_from(List& list) noexcept;

  int32_t capacity_;
  int32_t limit_;
  int32_t high_water_ = 0;  // ids >= this were never handed out
  List ready_;
  List in_flight_;
  List parked_;
  uint64_t num_double_releases_ = 0;
  std::vector<int32_t> next_;     // links of the lists
  std::vector<TimePoint> after_;  // [slot]
  std::vector<uint64_t> in_use_;
};

// Who has a say in which slot is handed out: a recording of the calls, a replay.
class SlotChooser {
 public:
  virtual ~SlotChooser() = default;
  // Needs num_free() > 0.
  [[nodiscard]] virtual SlotId hand_out(SlotAllocator& slots) noexcept = 0;
};

}  // namespace helicore::kv
