#include "helicore/kv/eviction_queue.h"

#include <bit>

namespace helicore::kv {

PageId EvictionQueue::front() const noexcept {
  if (occupied_[0] != 0) return heads_[static_cast<size_t>(std::countr_zero(occupied_[0]))];
  if (occupied_[1] != 0) return heads_[64 + static_cast<size_t>(std::countr_zero(occupied_[1]))];
  return kNoPage;
}

void EvictionQueue::push_back(PageSlab& pages, PageId id) noexcept {
  PageRecord& page = pages[id];
  const size_t bucket = page.priority;
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
  const size_t bucket = page.priority;
  (page.prev == kNoPage ? heads_[bucket] : pages[page.prev].next) = page.next;
  (page.next == kNoPage ? tails_[bucket] : pages[page.next].prev) = page.prev;
  if (heads_[bucket] == kNoPage) occupied_[bucket >> 6] &= ~(uint64_t{1} << (bucket & 63));
  page.prev = kNoPage;
  page.next = kNoPage;
  page.queued = false;
  --count_;
}

}  // namespace helicore::kv
