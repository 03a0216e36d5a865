// Making room: which pages leave which level, and who comes in, planned with counts before anything
// moves.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "helicore/kv/page_store.h"
#include "helicore/kv/radix_tree.h"
#include "helicore/kv/stats.h"

namespace helicore::kv {

// What an operation needs of one level.
struct RoomRequest {
  int level = kHotLevel;
  // Empty slots per pool group at `level`; may be empty: none.
  std::span<const int32_t> fresh{};
  // Pages that must be on `level` or hotter afterwards: colder ones come up, and none of them is
  // pushed down.
  std::span<const PageId> pages{};
};

// Pages leave a level in the order of its eviction queue, for the next colder level, and the last
// level drops what nobody holds. Counts decide first, for every level at once, so that an operation
// either has all it needs or has changed nothing. One slot per pool group of each colder level is
// kept for pages in passing: with it, pages can change places one by one when every level is full,
// so that a cache can be resumed whenever the memory of all levels together suffices. Not
// thread-safe: the manager's lock guards it.
class Migrator {
 public:
  Migrator(PageStore& store, RadixTree& tree, const StorageLayout& layout, MigrationStats& stats);

  // Why there is no room; nullopt after making it. When there is none, nothing has changed. Throws
  // what the device throws; pages may then be on other levels than before, which nobody notices.
  [[nodiscard]] std::optional<NoRoom> make_room(const RoomRequest& request);
  // Drops a page that nobody holds, with what depends on it.
  void drop(PageHandle page);
  // What dropping the next page to leave will touch.
  void prefetch_front(PoolGroupId group, int level) const noexcept;
  // Slots that one level can give to new pages, whatever is evicted.
  [[nodiscard]] int32_t num_available(PoolGroupId group, int level) const noexcept;
  // Sends pages of one group and level to colder levels, or drops them on the last one. When that
  // can't be done for all of them nothing has changed.
  [[nodiscard]] std::optional<NoRoom> push_down(std::span<const PageId> pages);
  // The same question without doing anything.
  [[nodiscard]] std::optional<NoRoom> check_push_down(std::span<const PageId> pages);
  // The next pages of the level's queue that may leave it, in that order, at most `count`; with
  // `spare_held` those that nobody holds come first.
  [[nodiscard]] std::vector<PageId> next_victims(PoolGroupId group, int level, int64_t count,
                                                 bool spare_held) const;
  // Slots that a level keeps for pages in passing.
  [[nodiscard]] int32_t bounce(PoolGroupId group, int level) const noexcept;
  // Why `needed` slots can't be had, as it is now.
  [[nodiscard]] NoRoom no_room(PoolGroupId group, int level, int64_t needed) const;

 private:
  struct GroupPlan {
    std::vector<std::vector<PageHandle>> down;  // [level where they go], coldest first
    std::vector<PageHandle> up;                 // pages that come to the request's level
    std::vector<PageHandle> drops;
    int32_t fresh = 0;
    void clear();
  };
  // Takes the marks off the pages of the plan when it ends, however it ends.
  class Marks;

  [[nodiscard]] std::optional<NoRoom> plan(const RoomRequest& request);
  [[nodiscard]] std::optional<NoRoom> plan_push_down(std::span<const PageId> pages);
  [[nodiscard]] std::optional<NoRoom> plan_group(PoolGroupId group, int level);
  // Finds places below `level` for victims_.
  [[nodiscard]] std::optional<NoRoom> place_victims(PoolGroupId group, int level);
  // Takes victims_ into `level`; what leaves in their stead stays in victims_. Returns how many
  // slots are missing.
  [[nodiscard]] int32_t absorb(PoolGroupId group, int level);
  // The next `count` pages of the level's queue into victims_; how many it found.
  int32_t pick_victims(PoolGroupId group, int level, int32_t count);
  // Pages of `level`, or of those that come in, leave it until the excess is gone; returns what is
  // left of it.
  struct Excess {
    int32_t count = 0;
    bool droppable_only = false;
  };
  int32_t expel(std::vector<PageHandle>& incoming, PoolGroupId group, int level, Excess excess);
  // The first page from `id` on that the plan may take.
  [[nodiscard]] PageId next_victim(PoolGroupId group, int level, PageId id,
                                   bool droppable_only) const noexcept;
  void mark(PageId id);
  void execute(int level);
  void execute_group(PoolGroupId group, int level);
  // Moves pages from the front of the list while there is room; true when it did something.
  bool move_some(std::vector<PageHandle>& pages, size_t& done, PoolGroupId group, int level);

  PageStore& store_;
  RadixTree& tree_;
  const StorageLayout& layout_;
  MigrationStats& stats_;
  TypedVec<PoolGroupId, GroupPlan> plans_;
  std::vector<PageHandle> victims_;  // leaving the level that is being planned, in order
  std::vector<PageHandle> marked_;
  std::vector<PageId> batch_;
  std::vector<PageId> useless_;
  // The second way to make a plan, when the order of the queues does not lead to room: pages that
  // nobody holds leave first, whatever their priority, so that held ones always find a place.
  bool spare_held_ = false;
};

}  // namespace helicore::kv
