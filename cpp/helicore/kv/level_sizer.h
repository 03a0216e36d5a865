// Sizes of the levels while they are in use: quotas that change, and slots that move between pool
// groups as the traffic asks. Decides what each group is to have and drives the way there in small
// steps; memory, slots and pages are the page store's, places for pages the migrator's.
//
//   resize / adjust --> Transition of a level: the split to reach
//     a group that is to shrink   limit goes down: no slot beyond it is handed out
//                                 pages there move into lower slots, or down, or are dropped
//                                 tail free and its points reached: memory goes back
//     a group that is to grow     takes what the level's bytes allow, memory first
//   until every group has its count
//
// Pages that an active sequence has locked stay where they are until it lets go.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_set>
#include <vector>

#include "helicore/kv/page_slab.h"
#include "helicore/kv/quota.h"
#include "helicore/kv/rebalance.h"
#include "helicore/kv/timeline.h"

namespace helicore::kv {

struct ManagerState;
[[nodiscard]] uint64_t sizes_digest(const ManagerState& state);

// What became of a resize.
struct ResizeResult {
  bool done = false;     // every group has the slots of the new quota
  int64_t quota = 0;     // bytes in effect: the old ones until the memory is back
  int64_t minimum = 0;   // bytes: the least that the level can have
  GroupSlots slots{};    // that each group hands out now
  GroupSlots pending{};  // slots still to be given back (> 0) or to be had (< 0)
  // What is in the way, when it is not only time: pages that are locked or have nowhere to go
  // (`needed` of them), or a step of the caller's that may touch them (`pending`).
  std::optional<NoRoom> reason = std::nullopt;
  friend bool operator==(const ResizeResult&, const ResizeResult&) = default;
};

// All of it with the manager's lock, except is_busy().
class LevelSizer {
 public:
  // Refers to the state, of which it is a part; levels and store must be there.
  explicit LevelSizer(ManagerState& state);

  // Some level is on its way to other counts: work() has something to do. Any thread.
  [[nodiscard]] bool is_busy() const noexcept { return is_busy_.load(std::memory_order_relaxed); }

  // Takes the level to `quota` bytes, as far as it can be done now. Below the minimum nothing
  // happens. Growing happens at once or throws OutOfMemory, nothing changed. Shrinking: when pages
  // are in the way that can't be moved, nothing changes and `reason` says so; with `best_effort`
  // the target stays and work() goes on. Without a reason only copies are awaited. Takes the place
  // of what the level was on its way to. Throws InvalidArgument for a quota out of range, and what
  // the device throws: the level then stays as large as it is.
  [[nodiscard]] ResizeResult resize(int level, int64_t quota, bool best_effort);
  // The state of the level's transition, after another attempt to end it.
  [[nodiscard]] ResizeResult proceed(int level);
  // Points that end by themselves and that the level's transition waits for.
  [[nodiscard]] std::vector<TimePoint> tail_points(int level) const;
  // Changes whenever a level gets a new target.
  [[nodiscard]] uint64_t serial(int level) const { return plan(level).serial; }

  // Moves at most `max_pages` pages of the levels that are on their way; how many it moved.
  int64_t work(int64_t max_pages);

  // Live traffic, for adjust(). Ids that are excluded count for nothing.
  void on_create(int64_t id, int32_t reused_tokens);
  void on_close(int64_t id, const LengthMeans& lengths);
  void exclude(int64_t id) { excluded_.insert(id); }
  [[nodiscard]] bool is_excluded(int64_t id) const { return excluded_.contains(id); }
  [[nodiscard]] const std::unordered_set<int64_t>& excluded() const noexcept { return excluded_; }
  [[nodiscard]] RebalanceTracker& tracker() noexcept { return tracker_; }

  // The traffic asks for other counts on the hot or the coldest level: enough samples, cooled down,
  // far enough off, and nothing under way there.
  [[nodiscard]] bool need_adjustment() const;
  // Sends every level that is far enough off to its target, in steps; work() goes them. Starts the
  // cooldown. False when there are no targets yet or no level is off.
  bool adjust();

  // Shares of the level's bytes per pool group: as they are, and as the traffic asks for (none
  // before the first targets).
  [[nodiscard]] std::vector<double> ratios(int level) const;
  [[nodiscard]] std::optional<std::vector<double>> target_ratios(int level) const;

 private:
  friend uint64_t sizes_digest(const ManagerState& state);
  struct Transition {
    QuotaSplit target;
    GroupSlots step;  // slots by which a group shrinks at a time
    // Pages beyond the limit when it was set; those that left are taken off. A page comes in only
    // by taking over the slot of one that is there.
    TypedVec<PoolGroupId, std::vector<PageHandle>> tails;
    TypedVec<PoolGroupId, size_t> next;  // where to look next in `tails`
  };
  struct LevelPlan {
    std::optional<Transition> transition = std::nullopt;
    std::optional<GroupSlots> weights = std::nullopt;  // of the last adjustment
    uint64_t serial = 0;
  };
  // Pages of one group that must leave their slots, and the way out for some of them.
  // Slots below the limit that pages may move to; negative when those kept for pages in passing are
  // taken.
  struct GroupRoom {
    int level = 0;
    PoolGroupId group;
    int64_t count = 0;
  };
  struct Evacuation {
    std::vector<PageHandle> pages;  // beyond the limit, that can be moved
    std::vector<PageId> victims;    // to push down first
    int64_t missing = 0;            // victims that were not found
    int64_t stuck = 0;              // pages that can't be moved now
  };

  // `weights`: of the hot level bytes, of colder ones slots; none: as configured.
  [[nodiscard]] QuotaSplit solve(int level, int64_t quota, const std::optional<GroupSlots>& weights,
                                 const std::optional<GroupSlots>& keep) const;
  [[nodiscard]] bool fits_addresses(int level, const QuotaSplit& split) const;
  [[nodiscard]] ResizeResult grow(int level, QuotaSplit target);
  [[nodiscard]] ResizeResult shrink(int level, QuotaSplit target, bool best_effort);
  // Why the level can't come below the limits that are set, now or by waiting for copies.
  [[nodiscard]] std::optional<NoRoom> find_obstacle(int level);
  [[nodiscard]] std::optional<NoRoom> find_obstacle(int level, PoolGroupId group);

  void start(int level, QuotaSplit target, int64_t num_steps);
  void cancel(int level);
  void begin_step(int level, PoolGroupId group);
  void collect_tail(int level, PoolGroupId group);
  // One round over the groups; how many pages moved. Ends the transition when it is reached.
  int64_t advance(int level, int64_t max_pages);
  int64_t shrink_group(int level, PoolGroupId group, int64_t max_pages);
  int64_t evacuate(int level, PoolGroupId group, int64_t max_pages);
  int64_t push_some_down(std::span<const PageId> victims);
  void grow_groups(int level);
  // The store's, where a replay answers for the machine of the original.
  void grow_group(int level, PoolGroupId group, int32_t num_slots);
  [[nodiscard]] bool finish_shrink(int level, PoolGroupId group);
  void finish_if_reached(int level);
  // Pages that are still in the tail, from a part of it whose size follows from `max_pages`; takes
  // those that left off the list.
  [[nodiscard]] std::vector<PageHandle> look_at_tail(int level, PoolGroupId group,
                                                     int64_t max_pages);
  [[nodiscard]] bool is_in_tail(PageHandle page, int level) const;
  // `room`: slots below the limit that pages can move to. `spare_held`: pages that nobody holds are
  // the first victims.
  [[nodiscard]] Evacuation plan_evacuation(std::span<const PageHandle> tail, const GroupRoom& room,
                                           int64_t max_pages, bool spare_held) const;
  [[nodiscard]] GroupRoom room_of(int level, PoolGroupId group) const;

  [[nodiscard]] ResizeResult report(int level) const;
  [[nodiscard]] GroupSlots capacities(int level) const;
  [[nodiscard]] GroupSlots limits(int level) const;
  void set_limits(int level, const GroupSlots& limits);
  void update_split(int level);
  void update_busy() noexcept;
  [[nodiscard]] std::optional<GroupSlots> traffic_weights(int level) const;
  [[nodiscard]] std::optional<QuotaSplit> traffic_split(int level) const;
  // Slots of each group that some open cache needs to be active.
  [[nodiscard]] GroupSlots largest_cache() const;
  [[nodiscard]] bool is_off_target(int level) const;
  [[nodiscard]] LevelPlan& plan(int level) { return plans_[static_cast<size_t>(level)]; }
  [[nodiscard]] const LevelPlan& plan(int level) const {
    return plans_[static_cast<size_t>(level)];
  }
  [[nodiscard]] size_t num_groups() const noexcept;

  ManagerState& state_;
  std::vector<LevelPlan> plans_;  // [level]
  RebalanceTracker tracker_;
  std::unordered_set<int64_t> excluded_;
  std::atomic<bool> is_busy_{false};
};

}  // namespace helicore::kv
