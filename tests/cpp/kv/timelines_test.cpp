#include "helicore/kv/timelines.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "helicore/core/error.h"

namespace helicore::kv::testing {
namespace {

TEST(TimelinesTest, the_default_point_is_reached_on_any_timeline) {
  Timelines timelines;
  EXPECT_TRUE(timelines.reached({}));
  EXPECT_TRUE(timelines.reached({7, 0}));
  timelines.wait({});
}

TEST(TimelinesTest, counters_only_grow) {
  Timelines timelines;
  const uint32_t a = timelines.make(), b = timelines.make();
  EXPECT_NE(a, b);
  timelines.advance({a, 5});
  timelines.advance({a, 3});
  EXPECT_EQ(timelines.value(a), 5U);
  EXPECT_TRUE(timelines.reached({a, 5}));
  EXPECT_FALSE(timelines.reached({a, 6}));
  EXPECT_FALSE(timelines.reached({b, 1}));
}

TEST(TimelinesTest, points_keep_their_extremes) {
  Timelines timelines;
  const TimePoint last(TimePoint::kMaxTimelines - 1, TimePoint::kMaxValue);
  EXPECT_EQ(last.timeline(), TimePoint::kMaxTimelines - 1);
  EXPECT_EQ(last.value(), TimePoint::kMaxValue);
  timelines.advance(last);
  EXPECT_TRUE(timelines.reached(last));
  EXPECT_FALSE(timelines.reached({TimePoint::kMaxTimelines - 2, 1}));
}

TEST(TimelinesTest, running_out_of_timelines_is_told) {
  Timelines timelines;
  uint64_t* const first = timelines.counter(0);
  for (uint32_t i = 0; i < TimePoint::kMaxTimelines; ++i) EXPECT_EQ(timelines.make(), i);
  EXPECT_EQ(timelines.counter(0), first) << "counters must never move";
  EXPECT_THROW(static_cast<void>(timelines.make()), OutOfMemory);
}

// Every waiter passes when its point is reached, none earlier, and no wake-up is lost.
void waiters_pass_in_order(Timelines& timelines) {
  constexpr uint64_t kRounds = 300;
  constexpr int kWaiters = 3;
  const uint32_t there = timelines.make();
  std::vector<uint32_t> back;
  uint64_t plain = 0;  // ordered by the timelines alone: for the thread sanitizer
  for (int i = 0; i < kWaiters; ++i) back.push_back(timelines.make());
  std::vector<std::thread> waiters;
  for (int i = 0; i < kWaiters; ++i) {
    waiters.emplace_back([&, i] {
      for (uint64_t round = 1; round <= kRounds; ++round) {
        timelines.wait({there, round});
        EXPECT_EQ(plain, round);
        timelines.advance({back[static_cast<size_t>(i)], round});
      }
    });
  }
  for (uint64_t round = 1; round <= kRounds; ++round) {
    plain = round;
    timelines.advance({there, round});
    for (const uint32_t timeline : back) timelines.wait({timeline, round});
  }
  for (auto& waiter : waiters) waiter.join();
}

TEST(TimelinesTest, waiters_pass_when_their_point_is_reached) {
  Timelines timelines;
  waiters_pass_in_order(timelines);
}

TEST(TimelinesTest, waiters_look_by_themselves_where_nothing_wakes_them) {
  std::vector<uint64_t> counters(TimePoint::kMaxTimelines);
  Timelines timelines(counters.data());
  EXPECT_TRUE(timelines.polled());
  waiters_pass_in_order(timelines);
  const uint32_t timeline = timelines.make();
  std::thread writer([&] { std::atomic_ref(*timelines.counter(timeline)).store(1); });
  timelines.wait({timeline, 1});
  writer.join();
}

}  // namespace
}  // namespace helicore::kv::testing
