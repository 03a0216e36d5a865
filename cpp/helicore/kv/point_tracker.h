// Gives out points in time: lanes for work that ends by itself and in any order, and step streams
// that the caller moves. Knows which points hang on a step of the caller's, so that nobody waits
// for what only he can end, and which hang on the host at all, so that no GPU stream does.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "helicore/kv/timeline.h"
#include "helicore/kv/timelines.h"

namespace helicore::kv {

// Threads: one at a time; the manager's lock.
class PointTracker {
 public:
  explicit PointTracker(Timelines& timelines) : timelines_(&timelines) {}

  // A point for work that begins after `after`, on a timeline where nothing else is under way: no
  // work ever waits for other work only because both share a timeline. `by_host`: a thread ends it,
  // not a GPU.
  [[nodiscard]] TimePoint take(std::span<const TimePoint> after, bool by_host = false);
  // Whoever took the point did not start its work after all.
  void give_back(TimePoint point);
  // `point`, of a timeline that take() does not give out, hangs on what `after` hangs on. For
  // streams of a GPU, where every later point hangs on it too.
  void depend(uint32_t timeline, std::span<const TimePoint> after);

  // The ones of `points` that are not reached, at most one of a timeline.
  [[nodiscard]] std::vector<TimePoint> unreached(std::span<const TimePoint> points) const;
  // Unreached steps and points ended by the host that `points` are or hang on.
  [[nodiscard]] std::vector<TimePoint> roots(std::span<const TimePoint> points) const;
  // Whether the point is reached or ends without a step of the caller's.
  [[nodiscard]] bool is_waitable(TimePoint point) const noexcept;

  // Step streams, as in CacheDevice; handles are negative. Throws InvalidArgument.
  [[nodiscard]] int64_t make_step_stream();
  uint64_t submit_step(int64_t stream);
  [[nodiscard]] TimePoint newest_step(int64_t stream) const;
  // The point that completing `step` reaches.
  [[nodiscard]] TimePoint step_point(int64_t stream, uint64_t step) const;

 private:
  struct Entry {
    bool is_step = false;
    bool by_host = false;            // the newest; true for steps
    uint64_t value = 0;              // newest given out
    std::vector<TimePoint> roots{};  // that the newest hangs on, reached ones perhaps among them
  };

  Entry& entry(uint32_t timeline);
  [[nodiscard]] uint32_t step_timeline(int64_t stream) const;

  Timelines* timelines_;
  std::vector<Entry> entries_;  // by timeline
  std::deque<uint32_t> lanes_;  // the one unused for longest first
};

}  // namespace helicore::kv
