#include "helicore/kv/point_tracker.h"

#include <gtest/gtest.h>

#include <random>

#include "helicore/core/error.h"

namespace helicore::kv::testing {
namespace {

class PointTrackerTest : public ::testing::Test {
 protected:
  TimePoint take(std::vector<TimePoint> after = {}) { return tracker_.take(after); }
  TimePoint submit(int64_t stream) {
    tracker_.submit_step(stream);
    return tracker_.newest_step(stream);
  }
  Timelines timelines_;
  PointTracker tracker_{timelines_};
};

TEST_F(PointTrackerTest, work_under_way_never_shares_a_timeline) {
  const TimePoint a = take(), b = take(), c = take();
  EXPECT_NE(a.timeline(), b.timeline());
  EXPECT_NE(c.timeline(), b.timeline());
  timelines_.advance(b);
  const TimePoint d = take();
  EXPECT_EQ(d, TimePoint(b.timeline(), 2)) << "an idle timeline must be used again";
  EXPECT_TRUE(timelines_.reached(b));
  EXPECT_FALSE(timelines_.reached(d));
}

TEST_F(PointTrackerTest, timelines_are_as_many_as_ever_were_under_way) {
  for (int round = 0; round < 1000; ++round) {
    const TimePoint a = take(), b = take();
    timelines_.advance(a);
    timelines_.advance(b);
  }
  EXPECT_EQ(timelines_.size(), 2U);
}

TEST_F(PointTrackerTest, a_point_given_back_is_given_out_again) {
  const TimePoint a = take();
  tracker_.give_back(a);
  EXPECT_EQ(take(), a);
}

TEST_F(PointTrackerTest, what_hangs_on_a_step_is_not_waitable_until_the_step_ends) {
  const int64_t steps = tracker_.make_step_stream();
  EXPECT_LT(steps, 0);
  const TimePoint one = submit(steps), two = submit(steps);
  const TimePoint free = take();
  const TimePoint first = take({one, free});
  const TimePoint chained = take({first});
  const TimePoint second = take({two, chained});
  EXPECT_FALSE(tracker_.is_waitable(one));
  EXPECT_TRUE(tracker_.is_waitable(free));
  EXPECT_FALSE(tracker_.is_waitable(first));
  EXPECT_FALSE(tracker_.is_waitable(chained));
  timelines_.advance(one);
  EXPECT_TRUE(tracker_.is_waitable(one));
  EXPECT_TRUE(tracker_.is_waitable(chained));
  EXPECT_FALSE(tracker_.is_waitable(second));
  timelines_.advance(two);
  EXPECT_TRUE(tracker_.is_waitable(second));
}

TEST_F(PointTrackerTest, a_stream_that_waited_for_a_step_hangs_on_it) {
  const int64_t steps = tracker_.make_step_stream();
  const uint32_t stream = timelines_.make();
  EXPECT_TRUE(tracker_.is_waitable({stream, 1}));
  const TimePoint step = submit(steps);
  tracker_.depend(stream, {{take({step})}});
  EXPECT_FALSE(tracker_.is_waitable({stream, 1}));
  timelines_.advance(step);
  EXPECT_TRUE(tracker_.is_waitable({stream, 1}));
}

TEST_F(PointTrackerTest, unreached_points_are_the_latest_of_each_timeline) {
  const int64_t steps = tracker_.make_step_stream();
  const TimePoint one = submit(steps), two = submit(steps), lane = take();
  EXPECT_EQ(tracker_.unreached({{two, one, {}, lane, lane}}), (std::vector<TimePoint>{two, lane}));
  timelines_.advance(two);
  EXPECT_EQ(tracker_.unreached({{one, lane}}), std::vector<TimePoint>{lane});
}

TEST_F(PointTrackerTest, misuse_of_step_streams_is_told) {
  const int64_t steps = tracker_.make_step_stream();
  const TimePoint lane = take();
  EXPECT_TRUE(tracker_.newest_step(steps).is_none());
  EXPECT_THROW(static_cast<void>(tracker_.step_point(steps, 1)), InvalidArgument);
  EXPECT_THROW(tracker_.submit_step(-int64_t{lane.timeline()} - 1), InvalidArgument);
  EXPECT_THROW(tracker_.submit_step(-999), InvalidArgument);
  EXPECT_THROW(tracker_.submit_step(0), InvalidArgument);
  EXPECT_THROW(tracker_.submit_step(INT64_MIN), InvalidArgument);
  EXPECT_EQ(tracker_.submit_step(steps), 1U);
  EXPECT_EQ(tracker_.step_point(steps, 1), tracker_.newest_step(steps));
}

// Against a model that walks the whole graph of what comes after what.
TEST_F(PointTrackerTest, waitable_is_what_a_walk_over_all_predecessors_says) {
  struct Work {
    TimePoint point;
    std::vector<size_t> after;
    bool is_step;
  };
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    std::mt19937_64 random(seed);
    Timelines timelines;
    PointTracker tracker(timelines);
    const int64_t streams[2] = {tracker.make_step_stream(), tracker.make_step_stream()};
    std::vector<Work> all;
    const auto waitable = [&](auto&& self, size_t i) -> bool {
      if (timelines.reached(all[i].point)) return true;
      return !all[i].is_step && std::all_of(all[i].after.begin(), all[i].after.end(),
                                            [&](size_t j) { return self(self, j); });
    };
    for (int round = 0; round < 200; ++round) {
      const uint64_t what = random() % 10;
      if (what < 2) {
        const int64_t stream = streams[random() % 2];
        tracker.submit_step(stream);
        all.push_back({tracker.newest_step(stream), {}, true});
      } else if (what < 7) {
        Work work{};
        std::vector<TimePoint> points;
        for (uint64_t i = random() % 4; i > 0 && !all.empty(); --i) {
          work.after.push_back(random() % all.size());
          points.push_back(all[work.after.back()].point);
        }
        work.point = tracker.take(points);
        all.push_back(work);
      } else if (!all.empty()) {
        // Something ends, as soon as what it comes after has.
        const Work& work = all[random() % all.size()];
        if (std::all_of(work.after.begin(), work.after.end(),
                        [&](size_t j) { return timelines.reached(all[j].point); })) {
          timelines.advance(work.point);
        }
      }
      for (size_t i = 0; i < all.size(); ++i) {
        ASSERT_EQ(tracker.is_waitable(all[i].point), waitable(waitable, i))
            << "seed " << seed << ", round " << round << ", work " << i;
      }
    }
  }
}

}  // namespace
}  // namespace helicore::kv::testing
