// The pages of one pool group on one level that may leave it: one doubly linked list per priority,
// oldest first, with a bit mask of the lists in use, and a list in front of them for pages that are
// of no use any more. Every operation is O(1); the links live in the page records.
#pragma once

#include <array>
#include <cstdint>

#include "helicore/kv/page_slab.h"

namespace helicore::kv {

class EvictionQueue {
 public:
  EvictionQueue() { heads_.fill(kNoPage), tails_.fill(kNoPage); }

  [[nodiscard]] int32_t count() const noexcept { return count_; }
  // The page to evict next: useless ones, then lowest priority, then least recently queued. kNoPage
  // when empty.
  [[nodiscard]] PageId front() const noexcept { return first_from(0); }
  // The page that follows `id` in that order.
  [[nodiscard]] PageId after(const PageSlab& pages, PageId id) const noexcept;
  // Order of pages between queues: smaller leaves first.
  [[nodiscard]] static size_t rank(const PageRecord& page) noexcept {
    return page.useless ? 0 : size_t{page.priority} + 1;
  }
  // The page must not be queued.
  void push_back(PageSlab& pages, PageId id) noexcept;
  // The page must be queued here.
  void remove(PageSlab& pages, PageId id) noexcept;

 private:
  static constexpr size_t kNumBuckets = kPriorityMax + 2;  // bucket 0: useless pages
  [[nodiscard]] PageId first_from(size_t bucket) const noexcept;

  std::array<PageId, kNumBuckets> heads_;
  std::array<PageId, kNumBuckets> tails_;
  std::array<uint64_t, 2> occupied_{};  // bit b: list b is not empty
  int32_t count_ = 0;
};

}  // namespace helicore::kv
