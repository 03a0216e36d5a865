#include "helicore/kv/eviction_queue.h"

#include <bit>

namespace helicore::kv {

PageId EvictionQueue::first_from(size_t bucket) const noexcept {
  for (size_t half = bucket >> 6; half < 2; ++half) {
    uint64_t occupied = occupied_[half];
    if (half == bucket >> 6) occupied &= ~uint64_t{0} << (bucket & 63);
    if (occupied != 0) return heads_[half * 64 + static_cast<size_t>(std::countr_zero(occupied))];
  }
  return kNoPage;
}

PageId EvictionQueue::after(const PageSlab& pages, PageId id) const noexcept {
  const PageRecord& page = pages[id];
  if (page.next != kNoPage) return page.next;
  const size_t next = rank(page) + 1;
  return next < kNumBuckets ? first_from(next) : kNoPage;
}

void EvictionQueue::push_back(PageSlab& pages, PageId id) noexcept {
  PageRecord& page = pages[id];
  const size_t bucket = rank(page);
  page.prev = tails_[bucket];
  page.next = kNoPage;
  page.queued = true;
  if (page.prev == kNoPage) {
    heads_[bucket] = id;
    occupied_[bucket >> 6] |= uint64_t{1} << (bucket & 63);
  } else {
    pages[page.prev].next = id;
  }
  tails_[bucket] = id;
  ++count_;
}

void EvictionQueue::remove(PageSlab& pages, PageId id) noexcept {
  PageRecord& page = pages[id];
  const size_t bucket = rank(page);
  (page.prev == kNoPage ? heads_[bucket] : pages[page.prev].next) = page.next;
  (page.next == kNoPage ? tails_[bucket] : pages[page.next].prev) = page.prev;
  if (heads_[bucket] == kNoPage) occupied_[bucket >> 6] &= ~(uint64_t{1} << (bucket & 63));
  page.prev = kNoPage;
  page.next = kNoPage;
  page.queued = false;
  --count_;
}

}  // namespace helicore::kv
