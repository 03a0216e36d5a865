// The device that other tests lean on must do what it says, or they show nothing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <set>

#include "helicore/core/error.h"
#include "kv/fake_device.h"

namespace helicore::kv::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class FakeDeviceTest : public ::testing::Test {
 protected:
  void make(FakeOptions options = {}) {
    device_.emplace(options);
    hot_ = pool(options.type == DeviceType::kCuda ? CacheTier::kGpuMem : CacheTier::kHostMem);
    cold_ = pool(CacheTier::kHostMem);
    disk_ = pool(CacheTier::kDisk);
  }
  std::unique_ptr<MemoryPool> pool(CacheTier tier) {
    return device_->make_pool({.tier = tier, .num_bytes = 64, .max_bytes = 128});
  }
  static std::byte* bytes(const std::unique_ptr<MemoryPool>& pool) {
    return fake_pool(*pool).bytes();
  }
  static void fill(const std::unique_ptr<MemoryPool>& pool, int value) {
    std::memset(bytes(pool), value, static_cast<size_t>(pool->num_bytes()));
  }
  static int at(const std::unique_ptr<MemoryPool>& pool, int index) {
    return std::to_integer<int>(bytes(pool)[index]);
  }
  TimePoint copy(const std::unique_ptr<MemoryPool>& dst, const std::unique_ptr<MemoryPool>& src,
                 std::vector<TimePoint> after = {}, uint64_t tag = 0, int64_t offset = 0) {
    const std::vector<CopyTask> tasks{{dst.get(), src.get(), offset, offset, 16, tag}};
    return device_->copy(tasks, after);
  }

  std::optional<FakeDevice> device_;
  std::unique_ptr<MemoryPool> hot_, cold_, disk_;
};

TEST_F(FakeDeviceTest, copies_run_only_when_the_clock_moves) {
  make();
  fill(hot_, 1);
  const TimePoint down = copy(cold_, hot_);
  const TimePoint deeper = copy(disk_, cold_, {down});
  EXPECT_EQ(device_->num_pending(), 2);
  EXPECT_EQ(device_->bytes_in_flight(), 16);
  EXPECT_FALSE(device_->reached(down));
  EXPECT_EQ(at(cold_, 0), kFakePoison);
  EXPECT_TRUE(device_->run_one());
  EXPECT_TRUE(device_->reached(down));
  EXPECT_FALSE(device_->reached(deeper));
  EXPECT_EQ(at(cold_, 0), 1);
  EXPECT_EQ(device_->run_all(), 1);
  EXPECT_EQ(at(disk_, 15), 1);
  EXPECT_EQ(at(disk_, 16), kFakePoison);
  EXPECT_EQ(device_->bytes_in_flight(), 0);
  EXPECT_THAT(device_->violations(), IsEmpty());
}

TEST_F(FakeDeviceTest, automatic_mode_runs_everything_at_once) {
  make({.automatic = true});
  fill(hot_, 3);
  EXPECT_TRUE(device_->reached(copy(disk_, cold_, {copy(cold_, hot_)})));
  EXPECT_EQ(at(disk_, 0), 3);
}

TEST_F(FakeDeviceTest, a_held_stream_keeps_its_work_and_what_comes_after_it) {
  make();
  const StreamHandle stream = device_->make_stream();
  device_->hold(stream);
  device_->launch(stream, [&] { fill(hot_, 7); });
  const TimePoint written = device_->record(stream);
  const TimePoint down = copy(cold_, hot_, {written});
  EXPECT_EQ(device_->run_all(), 0);
  EXPECT_TRUE(device_->is_waitable(down));
  device_->release(stream);
  EXPECT_TRUE(device_->reached(written));
  EXPECT_EQ(device_->run_all(), 1);
  EXPECT_EQ(at(cold_, 0), 7);
}

TEST_F(FakeDeviceTest, a_stream_waits_for_copies) {
  make();
  fill(cold_, 5);
  const StreamHandle stream = device_->make_stream();
  const TimePoint up = copy(hot_, cold_);
  device_->wait(stream, {{up}});
  int seen = 0;
  device_->launch(stream, [&] { seen = at(hot_, 0); });
  EXPECT_EQ(seen, 0);
  EXPECT_FALSE(device_->reached(device_->record(stream)));
  device_->run_all();
  EXPECT_EQ(seen, 5);
}

TEST_F(FakeDeviceTest, copies_on_a_stream_keep_its_order) {
  make();
  const StreamHandle stream = device_->make_stream();
  device_->hold(stream);
  device_->launch(stream, [&] { fill(hot_, 9); });
  device_->copy_on(stream, {{{hot_.get(), hot_.get(), 32, 0, 16}}});
  device_->launch(stream, [&] { std::memset(bytes(hot_), 1, 16); });
  EXPECT_EQ(at(hot_, 32), kFakePoison);
  device_->release(stream);
  EXPECT_EQ(at(hot_, 32), 9);
  EXPECT_EQ(at(hot_, 0), 1);
}

TEST_F(FakeDeviceTest, steps_end_when_the_caller_says_so_and_are_not_waited_for) {
  make();
  const StreamHandle steps = device_->make_step_stream();
  EXPECT_LT(steps, 0);
  EXPECT_TRUE(device_->record(steps).is_none());
  EXPECT_EQ(device_->submit_step(steps), 1U);
  const TimePoint first = device_->record(steps);
  EXPECT_EQ(device_->submit_step(steps), 2U);
  const TimePoint down = copy(cold_, hot_, {first});
  const TimePoint both = device_->join(down, device_->record(steps));
  EXPECT_FALSE(device_->is_waitable(first));
  EXPECT_FALSE(device_->is_waitable(down));
  EXPECT_THROW(device_->synchronize(down), std::logic_error);
  device_->complete_step(steps, 1);
  EXPECT_TRUE(device_->is_waitable(down));
  EXPECT_FALSE(device_->is_waitable(both));
  device_->synchronize(down);
  device_->complete_step(steps, 2);
  EXPECT_TRUE(device_->reached(both));
  EXPECT_THROW(device_->complete_step(steps, 3), InvalidArgument);
}

TEST_F(FakeDeviceTest, directions_interleave_by_seed_and_each_keeps_its_order) {
  std::set<std::vector<int>> orders;
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    make({.seed = seed});
    std::vector<TimePoint> points;
    for (int64_t offset = 0; offset < 64; offset += 16) {
      points.push_back(copy(hot_, cold_, {}, 0, offset));
      points.push_back(copy(disk_, cold_, {}, 0, offset));
    }
    std::vector<int> order;
    std::vector<bool> seen(points.size());
    while (device_->run_one()) {
      for (size_t i = 0; i < points.size(); ++i) {
        if (!seen[i] && device_->reached(points[i])) order.push_back(static_cast<int>(i));
        seen[i] = device_->reached(points[i]);
      }
    }
    for (int direction = 0; direction < 2; ++direction) {
      std::vector<int> own;
      for (const int i : order) {
        if (i % 2 == direction) own.push_back(i);
      }
      EXPECT_TRUE(std::is_sorted(own.begin(), own.end())) << "seed " << seed;
    }
    orders.insert(order);
  }
  EXPECT_GT(orders.size(), 10U);
}

TEST_F(FakeDeviceTest, faults_strike_where_they_are_injected) {
  make();
  fill(hot_, 2);
  device_->inject(FakeFault::kAllocation, 1, 1);
  EXPECT_NO_THROW(hot_->resize(96));
  EXPECT_THROW(hot_->resize(128), OutOfMemory);
  EXPECT_EQ(hot_->num_bytes(), 96);
  EXPECT_NO_THROW(hot_->resize(128));
  device_->set_memory_limit(device_->ledger()->num_bytes + 10);
  EXPECT_THROW(cold_->resize(80), OutOfMemory);

  device_->inject(FakeFault::kRefusedCopy, 1);
  EXPECT_THROW(copy(cold_, hot_), OutOfMemory);
  EXPECT_EQ(device_->num_pending(), 0);

  device_->inject(FakeFault::kFailedTask, 1);
  device_->synchronize(copy(cold_, hot_, {}, 77));
  EXPECT_EQ(at(cold_, 0), kFakePoison);
  device_->inject(FakeFault::kTornTask, 1);
  device_->synchronize(copy(cold_, hot_, {}, 78));
  EXPECT_EQ(at(cold_, 7), 2);
  EXPECT_EQ(at(cold_, 8), kFakePoison);
  EXPECT_EQ(device_->num_failures(), 2U);
  EXPECT_THAT(device_->take_failures(), ElementsAre(77, 78));
  EXPECT_THAT(device_->take_failures(), IsEmpty());
  device_->inject(FakeFault::kCorruptTask, 1);
  device_->synchronize(copy(disk_, hot_));
  EXPECT_EQ(at(disk_, 8), kFakePoison);
  EXPECT_THAT(device_->take_failures(), IsEmpty());

  device_->inject(FakeFault::kSlowBatch, 1);
  const TimePoint slow = copy(disk_, hot_);
  EXPECT_TRUE(device_->run_one());
  EXPECT_FALSE(device_->reached(slow));
  EXPECT_EQ(at(disk_, 15), kFakePoison);
  EXPECT_TRUE(device_->run_one());
  EXPECT_TRUE(device_->reached(slow));
  EXPECT_EQ(at(disk_, 15), 2);
}

TEST_F(FakeDeviceTest, copies_without_order_that_touch_the_same_bytes_are_violations) {
  make();
  const TimePoint down = copy(cold_, hot_, {}, 1);
  static_cast<void>(copy(disk_, cold_, {down}, 2));
  static_cast<void>(copy(disk_, cold_, {}, 3, 32));
  EXPECT_THAT(device_->violations(), IsEmpty());
  static_cast<void>(copy(hot_, disk_, {}, 4));
  // 4 reads what 2 writes and writes what 1 reads.
  EXPECT_THAT(device_->violations(), SizeIs(2));
}

TEST_F(FakeDeviceTest, order_goes_through_joins_and_streams) {
  make();
  const StreamHandle stream = device_->make_stream();
  const TimePoint one = copy(cold_, hot_, {}, 1);
  const TimePoint two = copy(cold_, hot_, {}, 2, 32);
  device_->wait(stream, {{device_->join(one, two)}});
  const TimePoint point = device_->record(stream);
  static_cast<void>(copy(disk_, cold_, {point}, 3));
  device_->copy_on(stream, {{{hot_.get(), hot_.get(), 0, 32, 16}}});
  EXPECT_THAT(device_->violations(), IsEmpty());
  static_cast<void>(copy(cold_, hot_, {point}, 4));
  EXPECT_THAT(device_->violations(), SizeIs(2)) << "with 3 and with the copy on the stream";
}

TEST_F(FakeDeviceTest, memory_given_back_under_a_copy_is_a_violation) {
  make();
  static_cast<void>(copy(cold_, hot_, {}, 1, 48));
  cold_->resize(63);
  EXPECT_THAT(device_->violations(), SizeIs(1));
  hot_.reset();
  EXPECT_THAT(device_->violations(), SizeIs(2));
  const auto ledger = device_->ledger();
  EXPECT_EQ(ledger->num_bytes, 63 + 64);
  device_.reset();
  cold_.reset();
  disk_.reset();
  EXPECT_EQ(ledger->num_bytes, 0);
  EXPECT_EQ(ledger->num_pools, 0);
}

TEST_F(FakeDeviceTest, a_device_that_ignores_order_shows_in_the_bytes) {
  for (const bool broken : {false, true}) {
    make({.ignore_after = broken});
    const StreamHandle stream = device_->make_stream();
    device_->hold(stream);
    device_->launch(stream, [&] { fill(hot_, 7); });
    static_cast<void>(copy(cold_, hot_, {device_->record(stream)}));
    device_->run_all();
    device_->release(stream);
    device_->run_all();
    EXPECT_EQ(at(cold_, 0) == 7, !broken);
  }
}

TEST_F(FakeDeviceTest, the_stream_of_a_cpu_is_its_thread) {
  make({.type = DeviceType::kCpu});
  fill(cold_, 4);
  const TimePoint up = copy(hot_, cold_);
  EXPECT_TRUE(device_->record(0).is_none());
  device_->wait(0, {{up}});
  EXPECT_EQ(at(hot_, 0), 4);
  device_->copy_on(0, {{{hot_.get(), hot_.get(), 32, 0, 16}}});
  EXPECT_EQ(at(hot_, 32), 4);
  EXPECT_THROW(static_cast<void>(device_->record(1)), InvalidArgument);
}

TEST_F(FakeDeviceTest, empty_batches_and_points_that_are_reached_cost_nothing) {
  make();
  EXPECT_TRUE(device_->copy({}, {}).is_none());
  const TimePoint down = copy(cold_, hot_);
  const TimePoint empty = device_->copy({}, {{down}});
  EXPECT_FALSE(device_->reached(empty));
  device_->run_all();
  EXPECT_TRUE(device_->reached(empty));
  EXPECT_TRUE(device_->reached(device_->join(down, empty)));
  EXPECT_EQ(device_->counters().num_batches, 1);
}

}  // namespace
}  // namespace helicore::kv::testing
