// The pages of one pool group that may be evicted: one doubly linked list per priority, oldest
// first, with a bit mask of the lists in use. Every operation is O(1); the links live in the page
// records.
#pragma once

#include <array>
#include <cstdint>

#include "helicore/kv/page_slab.h"

namespace helicore::kv {

class EvictionQueue {
 public:
  EvictionQueue() { heads_.fill(kNoPage), tails_.fill(kNoPage); }

  [[nodiscard]] int32_t count() const noexcept { return count_; }
  // The page to evict next: lowest priority, then least recently queued. kNoPage when empty.
  [[nodiscard]] PageId front() const noexcept;
  [[nodiscard]] PageId front_of(int priority) const noexcept {
    return heads_[static_cast<size_t>(priority)];
  }
  // The page must not be queued.
  void push_back(PageSlab& pages, PageId id) noexcept;
  // The page must be queued here.
  void remove(PageSlab& pages, PageId id) noexcept;

 private:
  static constexpr size_t kNumBuckets = kPriorityMax + 1;
  std::array<PageId, kNumBuckets> heads_;
  std::array<PageId, kNumBuckets> tails_;
  std::array<uint64_t, 2> occupied_{};  // bit p: list p is not empty
  int32_t count_ = 0;
};

}  // namespace helicore::kv
