#include "helicore/kv/cpu_device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <optional>
#include <random>
#include <thread>

#include "helicore/core/error.h"
#include "kv/flaky_io.h"
#include "kv/temp_dir.h"

namespace helicore::kv::testing {
namespace {

using ::testing::IsEmpty;

constexpr int64_t kMiB = int64_t{1} << 20;

class CpuDeviceTest : public ::testing::Test {
 protected:
  void make(CacheDeviceConfig config = {}, std::unique_ptr<AsyncIo> io = nullptr) {
    pools_.clear();
    device_.emplace(config, std::move(io));
  }
  const MemoryPool* pool(CacheTier tier, int64_t num_bytes = 4 * kMiB) {
    pools_.push_back(device_->make_pool({tier, num_bytes, num_bytes, dir_.path().string()}));
    return pools_.back().get();
  }
  static std::vector<std::byte> contents(const MemoryPool& pool) {
    std::vector<std::byte> out(static_cast<size_t>(pool.num_bytes()));
    if (pool.fd() < 0) {
      std::memcpy(out.data(), pool.data(), out.size());
    } else {
      EXPECT_EQ(::pread(pool.fd(), out.data(), out.size(), 0), pool.num_bytes());
    }
    return out;
  }
  TimePoint copy(const MemoryPool* dst, const MemoryPool* src, std::vector<TimePoint> after = {},
                 int64_t num_bytes = 4 * kMiB) {
    return device_->copy({{{dst, src, 0, 0, num_bytes, 0}}}, after);
  }

  TempDir dir_;
  std::vector<std::unique_ptr<MemoryPool>> pools_;
  std::optional<CpuDevice> device_;
};

TEST_F(CpuDeviceTest, tiers_and_grains_are_those_of_a_cpu) {
  make();
  EXPECT_EQ(device_->type(), DeviceType::kCpu);
  EXPECT_TRUE(device_->supports(CacheTier::kHostMem, 0));
  EXPECT_TRUE(device_->supports(CacheTier::kHostMem, 1));
  EXPECT_TRUE(device_->supports(CacheTier::kDisk, 2));
  EXPECT_FALSE(device_->supports(CacheTier::kDisk, 0));
  EXPECT_FALSE(device_->supports(CacheTier::kGpuMem, 0));
  const int64_t gib = int64_t{1} << 30;
  EXPECT_EQ(device_->grain(CacheTier::kHostMem, 100 * gib), 4096);
  EXPECT_EQ(device_->grain(CacheTier::kDisk, 100 * gib), 2 * kMiB);
  EXPECT_EQ(device_->grain(CacheTier::kGpuMem, 0), 2 * kMiB);
  EXPECT_EQ(device_->grain(CacheTier::kGpuMem, 2 * gib - 1), 2 * kMiB);
  EXPECT_EQ(device_->grain(CacheTier::kGpuMem, 2 * gib), 4 * kMiB);
  EXPECT_EQ(device_->grain(CacheTier::kGpuMem, 9 * gib), 16 * kMiB);
  EXPECT_EQ(device_->grain(CacheTier::kGpuMem, 500 * gib), 32 * kMiB);
  EXPECT_THROW(static_cast<void>(pool(CacheTier::kGpuMem)), InvalidArgument);
}

TEST_F(CpuDeviceTest, small_copies_are_done_on_return) {
  make();
  const MemoryPool *a = pool(CacheTier::kHostMem), *b = pool(CacheTier::kHostMem);
  a->data()[CpuDevice::kInlineBytes - 1] = std::byte{3};
  const TimePoint done = copy(b, a, {}, CpuDevice::kInlineBytes);
  EXPECT_TRUE(done.is_none());
  EXPECT_EQ(b->data()[CpuDevice::kInlineBytes - 1], std::byte{3});
  EXPECT_TRUE(device_->record(0).is_none());
}

TEST_F(CpuDeviceTest, the_callers_thread_copies_so_much_in_an_operation_and_no_more) {
  make();
  const MemoryPool *a = pool(CacheTier::kHostMem), *b = pool(CacheTier::kHostMem);
  constexpr int64_t kMost = CpuDevice::kInlineBytes;
  for (int operation = 0; operation < 2; ++operation) {
    device_->begin_operation();
    EXPECT_TRUE(copy(b, a, {}, kMost / 2).is_none());
    EXPECT_TRUE(copy(b, a, {}, kMost / 2).is_none());
    const TimePoint rest = copy(b, a, {}, 1);
    EXPECT_FALSE(rest.is_none()) << "others wait for the lock that it holds";
    device_->synchronize(rest);
  }
}

TEST_F(CpuDeviceTest, a_small_copy_waits_for_what_it_comes_after) {
  make();
  const MemoryPool *a = pool(CacheTier::kHostMem), *b = pool(CacheTier::kHostMem);
  const StreamHandle steps = device_->make_step_stream();
  device_->submit_step(steps);
  a->data()[0] = std::byte{1};
  const TimePoint done = copy(b, a, {device_->record(steps)}, 1);
  EXPECT_FALSE(device_->reached(done));
  EXPECT_FALSE(device_->is_waitable(done));
  a->data()[0] = std::byte{2};  // the step's own write
  EXPECT_EQ(b->data()[0], std::byte{0});
  device_->complete_step(steps, 1);
  EXPECT_TRUE(device_->is_waitable(done));
  device_->synchronize(done);
  EXPECT_EQ(b->data()[0], std::byte{2});
}

TEST_F(CpuDeviceTest, a_page_goes_down_to_disk_and_comes_back) {
  make();
  const MemoryPool *hot = pool(CacheTier::kHostMem), *cold = pool(CacheTier::kHostMem),
                   *disk = pool(CacheTier::kDisk), *deeper = pool(CacheTier::kDisk);
  std::mt19937_64 random(1);
  for (int64_t i = 0; i < hot->num_bytes(); ++i) hot->data()[i] = static_cast<std::byte>(random());
  const auto want = contents(*hot);
  TimePoint point = copy(cold, hot);
  point = copy(disk, cold, {point});
  point = copy(deeper, disk, {point});
  const TimePoint cleared = copy(hot, pool(CacheTier::kHostMem), {point});
  device_->wait(0, {{copy(hot, deeper, {cleared})}});
  EXPECT_EQ(contents(*hot), want);
  EXPECT_THAT(device_->take_failures(), IsEmpty());
  EXPECT_EQ(device_->counters(), (CopyCounters{5, 5, 20 * kMiB, 0}));
  EXPECT_EQ(device_->bytes_in_flight(), 0);
}

TEST_F(CpuDeviceTest, joins_are_reached_when_both_are) {
  make();
  const StreamHandle left = device_->make_step_stream(), right = device_->make_step_stream();
  device_->submit_step(left);
  device_->submit_step(right);
  const TimePoint a = device_->record(left), b = device_->record(right);
  EXPECT_EQ(device_->join(a, {}), a);
  EXPECT_EQ(device_->join({}, b), b);
  EXPECT_EQ(device_->join(a, a), a);
  const TimePoint both = device_->join(a, b);
  EXPECT_FALSE(device_->is_waitable(both));
  device_->complete_step(left, 1);
  EXPECT_FALSE(device_->reached(both));
  device_->complete_step(right, 1);
  EXPECT_TRUE(device_->reached(both));
  EXPECT_EQ(device_->copy({}, {{a, b}}), TimePoint());
}

TEST_F(CpuDeviceTest, the_caller_blocks_until_another_thread_ends_the_step) {
  make();
  const StreamHandle steps = device_->make_step_stream();
  device_->submit_step(steps);
  const TimePoint point = device_->record(steps);
  int plain = 0;
  std::thread other([&] {
    plain = 1;
    device_->complete_step(steps, 1);
  });
  device_->wait(steps, {{point}});
  EXPECT_EQ(plain, 1);
  other.join();
}

TEST_F(CpuDeviceTest, misuse_is_told_and_starts_nothing) {
  make();
  const MemoryPool *a = pool(CacheTier::kHostMem, 100), *b = pool(CacheTier::kDisk, 100);
  const auto try_copy = [&](CopyTask task) {
    static_cast<void>(device_->copy({{{a, a, 0, 50, 10, 0}, task}}, {}));
  };
  a->data()[50] = std::byte{9};
  EXPECT_THROW(try_copy({b, nullptr, 0, 0, 1, 0}), InvalidArgument);
  EXPECT_THROW(try_copy({b, a, 0, 0, -1, 0}), InvalidArgument);
  EXPECT_THROW(try_copy({b, a, 91, 0, 10, 0}), InvalidArgument);
  EXPECT_THROW(try_copy({b, a, 0, -1, 10, 0}), InvalidArgument);
  EXPECT_THROW(try_copy({b, a, INT64_MAX, 0, 10, 0}), InvalidArgument);
  EXPECT_THROW(device_->copy_on(0, {{{b, a, 0, 0, 10, 0}}}), InvalidArgument);
  EXPECT_THROW(device_->copy_on(5, {}), InvalidArgument);
  EXPECT_THROW(static_cast<void>(device_->record(5)), InvalidArgument);
  EXPECT_THROW(static_cast<void>(device_->record(-77)), InvalidArgument);
  EXPECT_EQ(a->data()[0], std::byte{0});
  EXPECT_EQ(device_->counters(), CopyCounters());
  EXPECT_NO_THROW(try_copy({b, a, 90, 0, 10, 0}));
}

TEST_F(CpuDeviceTest, failed_pages_are_named_and_their_points_are_reached) {
  FlakyPlan plan{.fail_rate = 0.3, .tear_rate = 0.2, .seed = 3};
  make({.num_file_lanes = 2},
       std::make_unique<FlakyIo>(make_async_io({.num_threads = 2}), std::move(plan)));
  const int64_t size = 8192;
  const MemoryPool *a = pool(CacheTier::kHostMem), *disk = pool(CacheTier::kDisk);
  std::vector<TimePoint> points;
  for (uint64_t i = 0; i < 100; ++i) {
    const auto offset = static_cast<int64_t>(i) * size;
    std::memset(a->data() + offset, static_cast<int>(i + 1), static_cast<size_t>(size));
    points.push_back(device_->copy({{{disk, a, offset, offset, size, i}}}, {}));
  }
  for (const TimePoint point : points) device_->synchronize(point);
  const uint64_t num_failures = device_->num_failures();
  auto failed = device_->take_failures();
  std::sort(failed.begin(), failed.end());
  EXPECT_EQ(failed.size(), num_failures);
  EXPECT_EQ(std::adjacent_find(failed.begin(), failed.end()), failed.end());
  EXPECT_EQ(device_->counters().num_failed, static_cast<int64_t>(num_failures));
  EXPECT_GT(failed.size(), 20U);
  EXPECT_LT(failed.size(), 80U);
  const auto on_disk = contents(*disk);
  for (uint64_t i = 0; i < 100; ++i) {
    const bool whole = std::memcmp(on_disk.data() + i * size, a->data() + i * size, size) == 0;
    EXPECT_EQ(whole, !std::binary_search(failed.begin(), failed.end(), i)) << i;
  }
}

// Random graphs of copies over all tiers, in two threads under one lock as the manager's, against a
// model that runs them in the order of submission.
TEST_F(CpuDeviceTest, copies_in_order_give_what_copies_one_by_one_give) {
  constexpr int64_t kSlots = 6, kSlotBytes = 300000;  // larger than what is copied inline
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    make({.num_copy_threads = 2, .num_file_lanes = 2, .use_io_uring = seed % 2 == 0});
    std::mt19937_64 random(seed);
    std::vector<const MemoryPool*> slots_of;
    std::vector<std::vector<std::byte>> model;
    for (const CacheTier tier :
         {CacheTier::kHostMem, CacheTier::kHostMem, CacheTier::kDisk, CacheTier::kDisk}) {
      slots_of.push_back(pool(tier, kSlots * kSlotBytes));
      if (tier == CacheTier::kHostMem) {
        for (int64_t i = 0; i < kSlots * kSlotBytes; ++i) {
          slots_of.back()->data()[i] = static_cast<std::byte>(random());
        }
      }
      model.push_back(contents(*slots_of.back()));
    }
    // What must be over before a slot is read (its writer) and before it is written (all users).
    std::vector<TimePoint> written(4 * kSlots);
    std::vector<std::vector<TimePoint>> used(4 * kSlots);
    std::mutex manager;
    const StreamHandle steps = device_->make_step_stream();
    uint64_t submitted = 0;
    const auto work = [&](int count) {
      for (int i = 0; i < count; ++i) {
        const std::scoped_lock lock(manager);
        const size_t dst = random() % written.size(), src = random() % written.size();
        if (dst == src) continue;
        std::vector<TimePoint> after = used[dst];
        after.push_back(written[src]);
        if (random() % 4 == 0) {
          submitted = device_->submit_step(steps);
          after.push_back(device_->record(steps));
        }
        const int64_t size = random() % 3 == 0 ? 1000 : kSlotBytes;
        const auto pool_of = [&](size_t slot) { return slot / kSlots; };
        const auto offset_of = [&](size_t slot) {
          return static_cast<int64_t>(slot % kSlots) * kSlotBytes;
        };
        const TimePoint done = device_->copy({{{slots_of[pool_of(dst)], slots_of[pool_of(src)],
                                                offset_of(dst), offset_of(src), size, 0}}},
                                             after);
        std::memmove(model[pool_of(dst)].data() + offset_of(dst),
                     model[pool_of(src)].data() + offset_of(src), static_cast<size_t>(size));
        written[dst] = done;
        used[dst] = {done};
        used[src].push_back(done);
        if (submitted > 0 && random() % 3 == 0) {
          device_->complete_step(steps, submitted - random() % std::min<uint64_t>(submitted, 2));
        }
      }
    };
    std::thread other(work, 60);
    work(60);
    other.join();
    if (submitted > 0) device_->complete_step(steps, submitted);
    for (const auto& points : used) {
      for (const TimePoint point : points) device_->synchronize(point);
    }
    for (size_t i = 0; i < 4; ++i) {
      ASSERT_TRUE(contents(*slots_of[i]) == model[i]) << "seed " << seed << ", pool " << i;
    }
    EXPECT_EQ(device_->num_failures(), 0U);
  }
}

TEST(CacheDeviceTest, configs_are_checked) {
  EXPECT_NO_THROW(CacheDeviceConfig().validate());
  EXPECT_THROW(CacheDeviceConfig{.index = 1}.validate(), InvalidArgument);
  EXPECT_THROW(CacheDeviceConfig{.num_copy_threads = -1}.validate(), InvalidArgument);
  EXPECT_THROW(CacheDeviceConfig{.num_file_lanes = 0}.validate(), InvalidArgument);
  EXPECT_THROW(CacheDeviceConfig{.num_io_threads = 0}.validate(), InvalidArgument);
  EXPECT_THROW(CacheDeviceConfig{.num_fault_threads = 257}.validate(), InvalidArgument);
  EXPECT_THROW(CacheDeviceConfig{.staging_bytes = 1000}.validate(), InvalidArgument);
  EXPECT_EQ(make_cache_device({})->type(), DeviceType::kCpu);
}

}  // namespace
}  // namespace helicore::kv::testing
