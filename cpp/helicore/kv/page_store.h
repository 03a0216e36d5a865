// Memory, slots and pages of the hot level: pools, slot allocators, the page slab and the eviction
// queues, moved together so that their counts always agree. Knows nothing of sequences; the radix
// tree tells it what is committed.
#pragma once

#include <cstdint>
#include <vector>

#include "helicore/kv/eviction_queue.h"
#include "helicore/kv/host_pool.h"
#include "helicore/kv/layout.h"
#include "helicore/kv/page_slab.h"
#include "helicore/kv/slot_allocator.h"

namespace helicore::kv {

struct PoolGroupCounts {
  int32_t total = 0;
  int32_t free = 0;
  int32_t evictable = 0;
  [[nodiscard]] int32_t available() const noexcept { return free + evictable; }
  [[nodiscard]] int32_t unavailable() const noexcept { return total - free - evictable; }
};

// Page life:
//
//   allocate()          publish()             unhold() to 0
//   -------> private --------------> shown ------------------> queued (droppable)
//             |  hold_count >= 1      | ^                        |  |
//             |                       | '------- hold() ---------'  | drop() by the tree
//             | unhold() to 0         | detach(): its node went     v
//             '-----------------------'---------------------------> free
//
// A page is queued exactly when it is shown and nobody holds it. With one level, held pages are
// never evictable. Not thread-safe: the manager's lock guards it.
class PageStore {
 public:
  // Throws OutOfMemory when the pools can't be mapped.
  PageStore(const StorageLayout& layout, const TypedVec<PoolGroupId, int32_t>& num_slots);

  [[nodiscard]] size_t num_groups() const noexcept { return groups_.count(); }
  [[nodiscard]] PoolGroupCounts counts(PoolGroupId group) const noexcept;
  [[nodiscard]] std::byte* pool_address(PoolGroupId group, PoolIndex pool) const;
  [[nodiscard]] const PageSlab& pages() const noexcept { return pages_; }
  [[nodiscard]] const PageRecord& page(PageId id) const noexcept { return pages_[id]; }
  [[nodiscard]] const EvictionQueue& queue(PoolGroupId group) const { return groups_[group].queue; }
  [[nodiscard]] const SlotAllocator& slots(PoolGroupId group) const { return groups_[group].slots; }

  // A private page with one hold. Needs a free slot in the life cycle's group.
  [[nodiscard]] PageHandle allocate(LifeCycleId life_cycle, uint8_t priority) noexcept;
  // Takes the page out of its queue when this is the first hold; raises its priority to `priority`.
  void hold(PageId id, uint8_t priority) noexcept;
  // The last unhold queues a shown page and frees a private one. Letting go of a page that was
  // freed or that nobody holds throws InternalError in builds with HELICORE_DEBUG_CHECKS; elsewhere
  // it is counted and ignored.
  void unhold(PageHandle handle);
  void lock(PageHandle handle) noexcept { ++pages_[handle].lock_count; }
  void unlock(PageHandle handle) noexcept { --pages_[handle].lock_count; }
  void mark_forked(PageHandle handle) noexcept { pages_[handle].forked = true; }
  [[nodiscard]] uint64_t num_double_releases() const noexcept { return num_double_releases_; }
  // A private page becomes the page of `node`.
  void publish(PageHandle handle, NodeId node, int32_t num_tokens) noexcept;
  // The node is gone: a droppable page is freed, a held one becomes private.
  void detach(PageId id);
  // Copies every pool's piece of `from` into `to`; both pages belong to one group.
  void copy_page(PageHandle from, PageHandle to) noexcept;

 private:
  struct Group {
    SlotAllocator slots;
    EvictionQueue queue;
    std::vector<int64_t> piece_bytes;
    std::vector<HostPool> pools;
  };
  void free_page(PageId id);

  TypedVec<PoolGroupId, Group> groups_;
  TypedVec<LifeCycleId, PoolGroupId> group_of_;
  PageSlab pages_;
  uint64_t num_double_releases_ = 0;
};

}  // namespace helicore::kv
