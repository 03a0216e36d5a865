// Memory, slots and pages of every level: pools, slot allocators, the page slab and the eviction
// queues, moved together so that their counts always agree. Knows nothing of sequences; the radix
// tree tells it what is committed, the migrator what moves.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "helicore/kv/cache_device.h"
#include "helicore/kv/eviction_queue.h"
#include "helicore/kv/layout.h"
#include "helicore/kv/page_slab.h"
#include "helicore/kv/slot_allocator.h"

namespace helicore::kv {

// While a group shrinks it counts as what it will be: slots beyond the limit, and the pages that
// are still in them, are none of these.
struct PoolGroupCounts {
  int32_t total = 0;      // slots below the limit
  int32_t free = 0;       // slots that can be handed out
  int32_t pending = 0;    // freed, but a step that is not done may still touch them
  int32_t clean = 0;      // copies of pages of hotter levels: given up for free when needed
  int32_t evictable = 0;  // pages in the eviction queue whose slot can be used again
  [[nodiscard]] int32_t available() const noexcept { return free + clean + evictable; }
  [[nodiscard]] int32_t unavailable() const noexcept { return total - available(); }
};

// One level of a store that is to be made.
struct LevelSpec {
  CacheTier tier = CacheTier::kHostMem;
  TypedVec<PoolGroupId, int32_t> num_slots;
  TypedVec<PoolGroupId, int32_t> max_slots;  // what a later resize may ask for
  std::string directory{};                   // of a disk level
  int64_t grain = 0;                         // bytes by which its pools grow; 0: the device's least
};

// Page life:
//
//   allocate()          publish()             unhold() to 0
//   -------> private --------------> shown ------------------> droppable
//             |  hold_count >= 1      | ^                        |  |
//             |                       | '------- hold() ---------'  | dropped by the tree
//             | unhold() to 0         | detach(): its node went     v
//             '-----------------------'---------------------------> free
//
// A page is queued, and may leave its level, exactly when nobody locks it and it is either
// droppable or held on a level that has a colder one below. Held pages move, droppable ones move
// and, on the last level, go. Content of a page is there once filled() is reached; its slot may be
// written by the next owner once the slot's point is. Not thread-safe: the manager's lock guards
// it.
class PageStore {
 public:
  // Throws OutOfMemory when the pools can't be had. `ssm` names the life cycle of snapshots.
  PageStore(const StorageLayout& layout, CacheDevice& device, const std::vector<LevelSpec>& levels,
            std::optional<LifeCycleId> ssm = std::nullopt);
  ~PageStore();  // waits for the copies that touch its memory
  PageStore(const PageStore&) = delete;
  PageStore& operator=(const PageStore&) = delete;

  [[nodiscard]] int num_levels() const noexcept { return static_cast<int>(levels_.size()); }
  [[nodiscard]] int last_level() const noexcept { return num_levels() - 1; }
  [[nodiscard]] CacheTier tier(int level) const { return at(level).tier; }
  [[nodiscard]] size_t num_groups() const noexcept { return levels_[0].groups.count(); }
  [[nodiscard]] PoolGroupCounts counts(PoolGroupId group, int level = kHotLevel) const noexcept;
  [[nodiscard]] const MemoryPool& pool(int level, PoolGroupId group, PoolIndex pool) const;
  [[nodiscard]] std::byte* pool_address(PoolGroupId group, PoolIndex index) const {
    return pool(kHotLevel, group, index).data();
  }
  [[nodiscard]] const PageSlab& pages() const noexcept { return pages_; }
  [[nodiscard]] const PageRecord& page(PageId id) const noexcept { return pages_[id]; }
  [[nodiscard]] const EvictionQueue& queue(PoolGroupId group, int level = kHotLevel) const {
    return at(level).groups[group].queue;
  }
  [[nodiscard]] const SlotAllocator& slots(PoolGroupId group, int level = kHotLevel) const {
    return at(level).groups[group].slots;
  }
  [[nodiscard]] PoolGroupId group_of(LifeCycleId life_cycle) const { return group_of_[life_cycle]; }
  [[nodiscard]] CacheDevice& device() const noexcept { return device_; }

  // A private page on the hot level, held and locked once. Needs a free slot in the life cycle's
  // group. The writer waits for filled() of it: the slot's former owner may not be done.
  [[nodiscard]] PageHandle allocate(LifeCycleId life_cycle, uint8_t priority) noexcept;
  // One more hold; raises the page's priority to `priority` and makes it the newest in its queue.
  void hold(PageId id, uint8_t priority) noexcept;
  // The last unhold makes a shown page droppable and frees a private one. Letting go of a page that
  // was freed or that nobody holds throws InternalError in builds with HELICORE_DEBUG_CHECKS;
  // elsewhere it is counted and ignored.
  void unhold(PageHandle handle);
  // On top of a hold, on the hot level.
  void lock(PageHandle handle) noexcept;
  // `done`: when the locker's work no longer touches the page.
  void unlock(PageHandle handle, TimePoint done);
  void mark_forked(PageHandle handle) noexcept { pages_[handle].forked = true; }
  void set_marked(PageId id, bool marked) noexcept { pages_[id].marked = marked; }
  void set_to_copy(PageId id, bool to_copy) noexcept { pages_[id].to_copy = to_copy; }
  void set_priority(PageId id, uint8_t priority) noexcept;
  void set_useless(PageId id) noexcept;
  void set_lost(PageId id) noexcept { pages_[id].lost = true; }
  [[nodiscard]] uint64_t num_double_releases() const noexcept { return num_double_releases_; }
  // A private page becomes the page of `node`, or more of a shown one does.
  void publish(PageHandle handle, NodeId node, int32_t num_tokens) noexcept;
  // The node is gone: a droppable page is freed, a held one becomes private.
  void detach(PageId id);

  // When the bytes of the page are there.
  [[nodiscard]] TimePoint filled(PageId id) const noexcept;
  void set_filled(PageId id, TimePoint point) noexcept;
  // The owner's work up to `point` wrote the page.
  void set_written(PageId id, TimePoint point);
  // When nobody reads or writes the page's slot any more.
  [[nodiscard]] TimePoint last_use(PageId id) const noexcept;
  void add_use(PageId id, TimePoint point);
  // True when a step that is not done may touch the page and nothing but the caller ends it.
  [[nodiscard]] bool is_fenced(PageId id) const noexcept;

  // It hands out the slots from now on, and must outlive that; null: the allocators do.
  void set_chooser(SlotChooser* chooser) noexcept { chooser_ = chooser; }

  // Moves freed slots whose points were reached to the free ones.
  void settle() noexcept;
  // Slots of the level that a move can take: free ones and clean copies.
  [[nodiscard]] int32_t room(int level, PoolGroupId group) const noexcept;
  // Copies the pages, which share a level, into slots of `level` and makes them live there. A move
  // to a hotter level keeps the old slot of an immutable page as a clean copy; a move to where the
  // page has one takes that and copies nothing. Pages of one group. Needs room(). Throws what the
  // device throws, with nothing changed.
  void move(std::span<const PageId> pages, int level);
  // Copies `from`, on any level, into the slot of the hot page `to`: in the order of `stream` when
  // both are in a GPU, else by the device's threads. Returns what the owner of either has to wait
  // for before it goes on, none when `stream` says it.
  TimePoint copy_page(PageHandle from, PageHandle to, StreamHandle stream);
  // `shown` takes over the slot of `own`, a hot private page with the same content and one hold,
  // and keeps its colder one as a copy. `own` is gone; its hold and lock are with `shown`.
  void promote(PageId shown, PageHandle own, uint8_t priority);

  // Resizing a group of a level. set_limit() stops handing out slots >= limit, or goes on handing
  // them out when it rises; drop_copies_beyond_limit() gives up the clean copies there;
  // finish_shrink() gives the memory back once no page and no copy is there, and says whether it
  // did. grow_group() is all or nothing and needs limit == capacity; it throws OutOfMemory.
  void grow_group(int level, PoolGroupId group, int32_t num_slots);
  void set_limit(int level, PoolGroupId group, int32_t limit) noexcept;
  void drop_copies_beyond_limit(int level, PoolGroupId group);
  [[nodiscard]] bool finish_shrink(int level, PoolGroupId group);
  // Its slot is not handed out again: the group is about to shrink.
  [[nodiscard]] bool is_beyond_limit(PageId id) const noexcept {
    return pages_[id].slot.value() >= home(pages_[id]).slots.limit();
  }
  // Clean copies in slots below the limit.
  [[nodiscard]] int32_t num_clean_below_limit(int level, PoolGroupId group) const noexcept;
  // Pages of the group that live in slots >= the limit.
  [[nodiscard]] std::vector<PageId> pages_beyond_limit(int level, PoolGroupId group) const;
  // Moves pages of one group within their level into slots below the limit; they keep their places
  // in the eviction queue. Needs room().
  void defragment(std::span<const PageId> pages);

 private:
  struct CleanCopy {
    PageHandle page;
    SlotId slot;
  };
  struct SlotTimes {
    TimePoint filled{};
    TimePoint last_use{};
  };
  struct Group {
    explicit Group(int32_t num_slots) : slots(num_slots) {}
    Group(Group&&) noexcept = default;
    Group& operator=(Group&&) noexcept = default;
    SlotAllocator slots;
    EvictionQueue queue;
    std::vector<int64_t> piece_bytes;  // per pool
    std::vector<std::unique_ptr<MemoryPool>> pools;
    std::vector<SlotTimes> times;  // [slot]; of pages that are timed, and of clean copies
    std::deque<CleanCopy> clean;   // oldest first; entries that are out of date are skipped
    int32_t num_clean = 0;
    int32_t num_queued_beyond = 0;  // queued pages in slots >= the limit
  };
  struct Level {
    CacheTier tier = CacheTier::kHostMem;
    TypedVec<PoolGroupId, Group> groups;
  };

  [[nodiscard]] Level& at(int level) { return levels_[static_cast<size_t>(level)]; }
  [[nodiscard]] const Level& at(int level) const { return levels_[static_cast<size_t>(level)]; }
  [[nodiscard]] Group& home(const PageRecord& page) {
    return at(page.level).groups[PoolGroupId(page.pool_group)];
  }
  [[nodiscard]] const Group& home(const PageRecord& page) const {
    return at(page.level).groups[PoolGroupId(page.pool_group)];
  }
  // Pages that no stream touches need no look at their slot's entry, which is far from the record.
  [[nodiscard]] SlotTimes times(PageId id) const {
    const PageRecord& page = pages_[id];
    return page.timed ? home(page).times[static_cast<size_t>(page.slot.value())] : SlotTimes{};
  }
  // The entry, from now on one that counts. A slot that is kept as a copy has one.
  SlotTimes& timed(PageId id) {
    PageRecord& page = pages_[id];
    SlotTimes& entry = home(page).times[static_cast<size_t>(page.slot.value())];
    if (!page.timed) entry = {};
    page.timed = true;
    return entry;
  }
  // When nobody needs the bytes of a slot any more.
  [[nodiscard]] TimePoint end_of(const SlotTimes& slot) const {
    return join(slot.filled, slot.last_use);
  }
  void requeue(PageId id) noexcept;
  void dequeue(PageId id) noexcept;
  [[nodiscard]] bool is_immutable(const PageRecord& page) const noexcept;
  [[nodiscard]] bool is_current(const CleanCopy& copy, int level) const noexcept;
  [[nodiscard]] SlotId take_slot(int level, PoolGroupId group);
  [[nodiscard]] SlotId hand_out(SlotAllocator& slots) noexcept {
    return chooser_ == nullptr ? slots.allocate() : chooser_->hand_out(slots);
  }
  void release_slot(int level, PoolGroupId group, SlotId slot, TimePoint after);
  // False when the slot is to go, or there is no memory to remember it.
  bool keep_copy(PageId id, int level, SlotId slot);
  void drop_copy(PageId id);
  void add_tasks(const Group& from, SlotId src, const Group& to, SlotId dst, uint64_t tag);
  void add_after(TimePoint point);
  void relocate(PageId id, int level, SlotId slot, TimePoint done);
  void settle_on_copy(PageId id);
  void free_page(PageId id);
  [[nodiscard]] TimePoint join(TimePoint a, TimePoint b) const;

  CacheDevice& device_;
  int32_t tokens_per_block_;
  std::optional<LifeCycleId> ssm_;
  std::vector<Level> levels_;
  TypedVec<LifeCycleId, PoolGroupId> group_of_;
  PageSlab pages_;
  uint64_t num_double_releases_ = 0;
  SlotChooser* chooser_ = nullptr;
  std::vector<CopyTask> tasks_;  // of the copy in the making
  std::vector<TimePoint> after_;
  std::vector<SlotId> taken_;
};

}  // namespace helicore::kv
