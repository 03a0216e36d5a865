#include "helicore/kv/point_tracker.h"

#include <algorithm>

#include "helicore/core/error.h"

namespace helicore::kv {
namespace {

constexpr int kLanesToLookAt = 8;  // for an idle one, before another is made

void add_point(std::vector<TimePoint>& points, TimePoint point) {
  const auto same = std::find_if(points.begin(), points.end(), [&](TimePoint other) {
    return other.timeline() == point.timeline();
  });
  if (same == points.end()) {
    points.push_back(point);
  } else if (same->value() < point.value()) {
    *same = point;
  }
}

}  // namespace

PointTracker::Entry& PointTracker::entry(uint32_t timeline) {
  if (timeline >= entries_.size()) entries_.resize(timeline + 1);
  return entries_[timeline];
}

std::vector<TimePoint> PointTracker::unreached(std::span<const TimePoint> points) const {
  std::vector<TimePoint> out;
  for (const TimePoint point : points) {
    if (!timelines_->reached(point)) add_point(out, point);
  }
  return out;
}

std::vector<TimePoint> PointTracker::roots(std::span<const TimePoint> points) const {
  std::vector<TimePoint> out;
  for (const TimePoint point : points) {
    if (timelines_->reached(point) || point.timeline() >= entries_.size()) continue;
    const Entry& e = entries_[point.timeline()];
    if (e.by_host) add_point(out, point);
    for (const TimePoint root : e.roots) {
      if (!timelines_->reached(root)) add_point(out, root);
    }
  }
  return out;
}

TimePoint PointTracker::take(std::span<const TimePoint> after, bool by_host) {
  std::vector<TimePoint> hangs_on = roots(after);
  uint32_t lane = TimePoint::kMaxTimelines;
  const int num_looks = std::min(kLanesToLookAt, static_cast<int>(lanes_.size()));
  for (int i = 0; i < num_looks && lane == TimePoint::kMaxTimelines; ++i) {
    const uint32_t candidate = lanes_.front();
    lanes_.pop_front();
    lanes_.push_back(candidate);
    if (timelines_->value(candidate) >= entries_[candidate].value) lane = candidate;
  }
  if (lane == TimePoint::kMaxTimelines) {
    lane = timelines_->make();
    lanes_.push_back(lane);
  }
  Entry& e = entry(lane);
  e.roots = std::move(hangs_on);
  e.by_host = by_host;
  return {lane, ++e.value};
}

void PointTracker::give_back(TimePoint point) {
  Entry& e = entry(point.timeline());
  e.roots.clear();
  --e.value;
}

void PointTracker::depend(uint32_t timeline, std::span<const TimePoint> after) {
  const std::vector<TimePoint> more = roots(after);
  std::vector<TimePoint>& mine = entry(timeline).roots;
  std::erase_if(mine, [this](TimePoint root) { return timelines_->reached(root); });
  for (const TimePoint root : more) add_point(mine, root);
}

bool PointTracker::is_waitable(TimePoint point) const noexcept {
  if (timelines_->reached(point) || point.timeline() >= entries_.size()) return true;
  const Entry& e = entries_[point.timeline()];
  return !e.is_step && std::all_of(e.roots.begin(), e.roots.end(), [this](TimePoint root) {
    return !entries_[root.timeline()].is_step || timelines_->reached(root);
  });
}

int64_t PointTracker::make_step_stream() {
  const uint32_t timeline = timelines_->make();
  entry(timeline).is_step = true;
  entry(timeline).by_host = true;
  return -int64_t{timeline} - 1;
}

uint32_t PointTracker::step_timeline(int64_t stream) const {
  const int64_t index = -(stream + 1);
  HELICORE_CHECK(stream < 0 && index < static_cast<int64_t>(entries_.size()) &&
                     entries_[static_cast<size_t>(index)].is_step,
                 "kv.step_stream", "stream must come from make_step_stream(), got ", stream);
  return static_cast<uint32_t>(index);
}

uint64_t PointTracker::submit_step(int64_t stream) { return ++entry(step_timeline(stream)).value; }

TimePoint PointTracker::newest_step(int64_t stream) const {
  const uint32_t timeline = step_timeline(stream);
  return {timeline, entries_[timeline].value};
}

TimePoint PointTracker::step_point(int64_t stream, uint64_t step) const {
  const uint32_t timeline = step_timeline(stream);
  HELICORE_CHECK(step <= entries_[timeline].value, "kv.step_stream",
                 "step must be at most the newest submitted one, ", entries_[timeline].value,
                 ", got ", step);
  return {timeline, step};
}

}  // namespace helicore::kv
