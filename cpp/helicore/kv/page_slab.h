// The slab of page records: flat, index-based, 44 bytes each. No ownership by pointers: a page
// lives while its slot is taken, and its state follows from its counters.
#pragma once

#include <cstdint>
#include <vector>

#include "helicore/core/error.h"
#include "helicore/kv/types.h"

namespace helicore::kv {

// A page id that can be checked for reuse: the generation changes each time the record is freed.
struct PageHandle {
  PageId id = kNoPage;
  uint32_t generation = 0;
  // The handle as the tag of a copy, and back.
  [[nodiscard]] uint64_t tag() const noexcept { return uint64_t{generation} << 32 | id.value(); }
  [[nodiscard]] static PageHandle of_tag(uint64_t tag) noexcept {
    return {PageId(static_cast<uint32_t>(tag)), static_cast<uint32_t>(tag >> 32)};
  }
  [[nodiscard]] bool is_null() const noexcept { return id == kNoPage; }
  friend bool operator==(const PageHandle&, const PageHandle&) = default;
};

// A page that takes the place of one that others see too.
struct Replacement {
  int32_t ordinal = 0;  // block; -1: the recurrent state
  size_t life_cycle = 0;
  PageHandle fresh{};
};

// Slots per pool group that a growing history gives up.
struct Yield {
  int32_t freed = 0;      // private pages
  int32_t droppable = 0;  // pages that the tree shows and nobody else holds
};

struct PageRecord {
  SlotId slot{kBadPageIndex};
  uint32_t generation = 0;
  PageId prev = kNoPage;  // eviction queue links; `next` also chains free records
  PageId next = kNoPage;
  NodeId node = kNoNode;    // the tree node that shows this page; none: private to one sequence
  uint32_t hold_count = 0;  // must not be dropped
  uint32_t lock_count = 0;  // must stay in the hot level; each lock is on top of a hold
  int32_t num_tokens = 0;   // committed tokens in it
  SlotId copy_slot{kBadPageIndex};  // an equal copy on `copy_level`, colder than `level`
  uint16_t life_cycle = 0;
  uint16_t pool_group = 0;
  uint8_t level = kHotLevel;
  uint8_t copy_level = 0;
  uint8_t priority = kPriorityDefault;
  bool queued : 1 = false;  // in an eviction queue
  bool in_use : 1 = false;
  bool forked : 1 = false;   // a holder need not hold what is above it in the tree: it was shared
                             // before it was committed, or comes after a private duplicate
  bool marked : 1 = false;   // by the plan in the making
  bool to_copy : 1 = false;  // the plan moves it to its copy, which must stay
  bool useless : 1 = false;  // a window page that can't be part of a match any more: goes first
  bool lost : 1 = false;     // a copy of it failed: its bytes are not to be used
  bool timed : 1 = false;    // its slot's entry of points counts; else there are none

  [[nodiscard]] PageStatus status() const noexcept {
    if (lock_count > 0) return PageStatus::kLocked;
    return hold_count > 0 ? PageStatus::kHeld : PageStatus::kDroppable;
  }
};
static_assert(sizeof(PageRecord) <= 48, "budget of a page record");

// Storage for `capacity` records is reserved in advance and touched when first used.
class PageSlab {
 public:
  explicit PageSlab(size_t capacity) { records_.reserve(capacity); }

  [[nodiscard]] PageRecord& operator[](PageId id) noexcept { return records_[id.value()]; }
  [[nodiscard]] const PageRecord& operator[](PageId id) const noexcept {
    return records_[id.value()];
  }
  // Checks the generation in builds with HELICORE_DEBUG_CHECKS.
  [[nodiscard]] PageRecord& operator[](PageHandle handle) {
#ifdef HELICORE_DEBUG_CHECKS
    HELICORE_ASSERT(is_current(handle), "kv.page_slab", "page ", handle.id, " was freed");
#endif
    return records_[handle.id.value()];
  }
  [[nodiscard]] bool is_current(PageHandle handle) const noexcept {
    return handle.id.value() < records_.size() && records_[handle.id.value()].in_use &&
           records_[handle.id.value()].generation == handle.generation;
  }
  [[nodiscard]] PageHandle handle(PageId id) const noexcept {
    return {id, records_[id.value()].generation};
  }
  void prefetch(PageId id) const noexcept {  // a record may lie across two cache lines
    const char* const record = reinterpret_cast<const char*>(&records_[id.value()]);
    __builtin_prefetch(record);
    __builtin_prefetch(record + sizeof(PageRecord) - 1);
  }
  // Room for `capacity` records; records may move.
  void reserve(size_t capacity) { records_.reserve(capacity); }
  [[nodiscard]] size_t num_records() const noexcept { return records_.size(); }
  [[nodiscard]] const std::vector<PageRecord>& records() const noexcept { return records_; }
  [[nodiscard]] size_t num_in_use() const noexcept { return num_in_use_; }

  // Needs fewer than `capacity` records in use, which one record per slot guarantees.
  [[nodiscard]] PageId allocate() noexcept;
  void free(PageId id) noexcept;

 private:
  std::vector<PageRecord> records_;
  PageId free_head_ = kNoPage;
  size_t num_in_use_ = 0;
};

}  // namespace helicore::kv
