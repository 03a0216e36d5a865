#include "helicore/kv/copy_engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <optional>

#include "helicore/kv/memory_pools.h"
#include "kv/flaky_io.h"
#include "kv/temp_dir.h"

namespace helicore::kv::testing {
namespace {

using ::testing::ElementsAre;

class CopyEngineTest : public ::testing::Test {
 protected:
  static constexpr int64_t kBytes = int64_t{5} << 20;

  CopyEngineTest() {
    for (auto* pool : {&a_, &b_}) {
      *pool = std::make_unique<HostMemoryPool>(PoolSpec{CacheTier::kHostMem, kBytes, kBytes},
                                               HostMemoryOptions{});
    }
    file_ = std::make_unique<DiskFilePool>(
        PoolSpec{CacheTier::kDisk, kBytes, kBytes, dir_.path().string()});
    std::memset(a_->data(), 7, kBytes);
    gate_ = {timelines_.make(), 1};
    engine_.emplace(timelines_, CopyEngineOptions{.num_copy_threads = 2, .num_file_lanes = 2},
                    nullptr);
  }
  TimePoint submit(const MemoryPool& dst, const MemoryPool& src, std::vector<TimePoint> after = {},
                   int64_t num_bytes = kBytes, uint64_t tag = 0) {
    const TimePoint done{timelines_.make(), 1};
    engine_->submit(done, {{{&dst, &src, 0, 0, num_bytes, tag}}}, std::move(after));
    return done;
  }

  TempDir dir_;
  Timelines timelines_;
  std::unique_ptr<MemoryPool> a_, b_, file_;
  TimePoint gate_;
  std::optional<CopyEngine> engine_;
};

TEST_F(CopyEngineTest, a_batch_begins_only_after_its_points) {
  const TimePoint first = submit(*b_, *a_, {gate_});
  const TimePoint second = submit(*file_, *b_, {first});
  EXPECT_EQ(engine_->num_waiting(), 2);
  EXPECT_EQ(engine_->bytes_in_flight(), kBytes);
  EXPECT_EQ(b_->data()[0], std::byte{0});
  EXPECT_FALSE(timelines_.reached(first));
  engine_->advance(gate_);
  timelines_.wait(second);
  EXPECT_TRUE(timelines_.reached(first));
  EXPECT_EQ(engine_->bytes_in_flight(), 0);
  std::byte last{};
  ASSERT_EQ(::pread(file_->fd(), &last, 1, kBytes - 1), 1);
  EXPECT_EQ(last, std::byte{7});
}

TEST_F(CopyEngineTest, what_waits_holds_up_nothing_else) {
  const TimePoint blocked = submit(*file_, *a_, {gate_});
  const TimePoint other_blocked = submit(*b_, *a_, {gate_}, 10);
  timelines_.wait(submit(*file_, *a_));
  timelines_.wait(submit(*b_, *a_));
  EXPECT_FALSE(timelines_.reached(blocked));
  EXPECT_FALSE(timelines_.reached(other_blocked));
  engine_->advance(gate_);
  timelines_.wait(blocked);
  timelines_.wait(other_blocked);
}

TEST_F(CopyEngineTest, joins_of_joins_end_at_once_when_their_last_point_does) {
  std::vector<TimePoint> chain{gate_};
  for (int i = 0; i < 100; ++i) {
    const TimePoint done{timelines_.make(), 1};
    engine_->submit(done, {}, {chain.back(), gate_});
    chain.push_back(done);
  }
  EXPECT_EQ(engine_->num_waiting(), 100);
  engine_->advance(gate_);
  for (const TimePoint point : chain) EXPECT_TRUE(timelines_.reached(point));
}

TEST_F(CopyEngineTest, a_timeline_moved_behind_its_back_counts_once_poked) {
  const TimePoint done = submit(*b_, *a_, {gate_});
  timelines_.advance(gate_);
  engine_->poke();
  timelines_.wait(done);
}

TEST_F(CopyEngineTest, failures_are_known_when_the_point_is_reached) {
  ASSERT_EQ(::ftruncate(file_->fd(), 100), 0);
  const TimePoint bad = submit(*a_, *file_, {}, kBytes, 42);
  timelines_.wait(bad);
  EXPECT_EQ(engine_->num_failures(), 1U);
  engine_->report_failure(43);
  EXPECT_THAT(engine_->take_failures(), ElementsAre(42, 43));
  EXPECT_THAT(engine_->take_failures(), ElementsAre());
  EXPECT_EQ(engine_->num_failures(), 2U);
}

TEST_F(CopyEngineTest, the_end_runs_what_was_submitted_and_drops_what_nobody_can_start) {
  std::vector<TimePoint> points;
  for (int i = 0; i < 20; ++i) {
    std::vector<TimePoint> after;
    if (i >= 2) after.push_back(points[points.size() - 2]);
    points.push_back(submit(i % 2 == 0 ? *b_ : *file_, *a_, after));
  }
  const TimePoint dropped = submit(*b_, *a_, {gate_});
  engine_.reset();
  for (const TimePoint point : points) EXPECT_TRUE(timelines_.reached(point));
  EXPECT_FALSE(timelines_.reached(dropped));
  EXPECT_EQ(b_->data()[kBytes - 1], std::byte{7});
}

TEST_F(CopyEngineTest, a_read_overtakes_writes_that_hold_every_other_lane) {
  // Writes that end only when asked about: the lanes they are on stay busy.
  class Slow final : public AsyncIo {
   public:
    explicit Slow(Timelines& timelines, TimePoint gate) : timelines_(&timelines), gate_(gate) {}
    std::optional<IoToken> submit(std::vector<IoRequest> batch, WhenFull when) override {
      if (batch[0].op == IoOp::kWrite) timelines_->wait(gate_);
      return io_->submit(std::move(batch), when);
    }
    int64_t cancel(IoToken token) override { return io_->cancel(token); }
    std::optional<IoResult> poll(IoToken token) override { return io_->poll(token); }
    IoResult wait(IoToken token) override { return io_->wait(token); }
    IoCounters counters() const override { return io_->counters(); }
    std::string_view name() const noexcept override { return "slow"; }

   private:
    Timelines* timelines_;
    TimePoint gate_;
    std::unique_ptr<AsyncIo> io_ = make_async_io();
  };
  engine_.emplace(timelines_, CopyEngineOptions{.num_file_lanes = 3},
                  std::make_unique<Slow>(timelines_, gate_));
  std::vector<TimePoint> writes;
  for (int i = 0; i < 5; ++i) writes.push_back(submit(*file_, *a_));
  timelines_.wait(submit(*b_, *file_));
  for (const TimePoint point : writes) EXPECT_FALSE(timelines_.reached(point));
  timelines_.advance(gate_);
  for (const TimePoint point : writes) timelines_.wait(point);
}

TEST_F(CopyEngineTest, timelines_of_a_gpu_are_looked_at_without_a_poke) {
  std::vector<uint64_t> counters(TimePoint::kMaxTimelines);
  Timelines timelines(counters.data());
  CopyEngine engine(timelines, {}, nullptr);
  const TimePoint gate{timelines.make(), 1}, done{timelines.make(), 1};
  engine.submit(done, {{{b_.get(), a_.get(), 0, 0, kBytes, 0}}}, {gate});
  std::atomic_ref(counters[gate.timeline()]).store(1);
  timelines.wait(done);
  EXPECT_EQ(b_->data()[0], std::byte{7});
}

}  // namespace
}  // namespace helicore::kv::testing
