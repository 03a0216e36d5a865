// The device of a GPU. Without CUDA it must refuse; without a GPU the rest is skipped.
#include "helicore/kv/cuda/cuda_device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "helicore/core/cuda/runtime.h"
#include "helicore/core/error.h"

#ifndef HELICORE_WITH_CUDA

TEST(CudaDeviceTest, a_build_without_cuda_refuses) {
  using helicore::kv::make_cache_device;
  EXPECT_THROW(static_cast<void>(make_cache_device({.type = helicore::DeviceType::kCuda})),
               helicore::NotSupported);
}

#else

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "helicore/kv/cuda/driver_api.h"
#include "kv/temp_dir.h"

namespace helicore::kv::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr int64_t kMiB = int64_t{1} << 20;
using Bytes = std::vector<std::byte>;

void ok(cudaError_t code) { ASSERT_EQ(code, cudaSuccess) << cudaGetErrorString(code); }

Bytes random_bytes(int64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes out(static_cast<size_t>(count));
  for (auto& byte : out) byte = static_cast<std::byte>(random());
  return out;
}

// A stream of the caller's, with a gate: what is enqueued after hold() runs after release().
class Stream {
 public:
  Stream() {
    ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    void* memory = nullptr;
    ok(cudaHostAlloc(&memory, sizeof(uint64_t), cudaHostAllocMapped));
    gate_ = static_cast<uint64_t*>(memory);
    *gate_ = 0;
  }
  ~Stream() {
    release();
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
    EXPECT_EQ(cudaFreeHost(gate_), cudaSuccess);
  }
  [[nodiscard]] StreamHandle handle() const { return reinterpret_cast<StreamHandle>(stream_); }
  [[nodiscard]] cudaStream_t get() const { return stream_; }
  void hold() {
    ASSERT_EQ(driver_api().wait_value(stream_, reinterpret_cast<CUdeviceptr>(gate_), ++held_,
                                      CU_STREAM_WAIT_VALUE_GEQ),
              CUDA_SUCCESS);
  }
  void release() { std::atomic_ref(*gate_).store(held_); }
  void fill(std::byte* gpu, int value, int64_t count) {
    ok(cudaMemsetAsync(gpu, value, static_cast<size_t>(count), stream_));
  }

 private:
  cudaStream_t stream_ = nullptr;
  uint64_t* gate_ = nullptr;  // pinned
  uint64_t held_ = 0;
};

class CudaDeviceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda::device_count() == 0) {
      EXPECT_THROW(static_cast<void>(make_cache_device({.type = DeviceType::kCuda})), NotSupported);
      GTEST_SKIP() << "no CUDA device";
    }
    make({});
  }
  void make(CacheDeviceConfig config) {
    config.type = DeviceType::kCuda;
    pools_.clear();
    device_ = make_cache_device(config);
  }
  MemoryPool* pool(CacheTier tier, int64_t num_bytes = 8 * kMiB, int64_t max_bytes = 0) {
    pools_.push_back(device_->make_pool({.tier = tier,
                                         .num_bytes = num_bytes,
                                         .max_bytes = std::max(num_bytes, max_bytes),
                                         .directory = dir_.path().string()}));
    return pools_.back().get();
  }
  static Bytes contents(const MemoryPool& pool) {
    Bytes out(static_cast<size_t>(pool.num_bytes()));
    if (pool.fd() >= 0) {
      EXPECT_EQ(::pread(pool.fd(), out.data(), out.size(), 0), pool.num_bytes());
    } else if (pool.on_gpu()) {
      ok(cudaMemcpy(out.data(), pool.data(), out.size(), cudaMemcpyDefault));
    } else {  // pinned in pieces, which one cudaMemcpy must not cross
      std::memcpy(out.data(), pool.data(), out.size());
    }
    return out;
  }
  static void set(const MemoryPool& pool, const Bytes& bytes) {
    if (pool.fd() >= 0) {
      EXPECT_EQ(::pwrite(pool.fd(), bytes.data(), bytes.size(), 0),
                static_cast<ssize_t>(bytes.size()));
    } else if (pool.on_gpu()) {
      ok(cudaMemcpy(pool.data(), bytes.data(), bytes.size(), cudaMemcpyDefault));
      ok(cudaStreamSynchronize(nullptr));
    } else {
      std::memcpy(pool.data(), bytes.data(), bytes.size());
    }
  }
  static void fill(const MemoryPool& gpu, int value) {
    if (!gpu.on_gpu()) {
      std::memset(gpu.data(), value, static_cast<size_t>(gpu.num_bytes()));
      return;
    }
    ok(cudaMemset(gpu.data(), value, static_cast<size_t>(gpu.num_bytes())));
    ok(cudaStreamSynchronize(nullptr));  // and no other stream, which a test may hold
  }
  TimePoint copy(const MemoryPool* dst, const MemoryPool* src, std::vector<TimePoint> after = {},
                 int64_t num_bytes = 8 * kMiB, uint64_t tag = 0) {
    return device_->copy({{{dst, src, 0, 0, num_bytes, tag}}}, after);
  }

  TempDir dir_;
  std::vector<std::unique_ptr<MemoryPool> > pools_;
  std::unique_ptr<CacheDevice> device_;
};

TEST_F(CudaDeviceTest, tiers_are_those_of_a_gpu) {
  EXPECT_EQ(device_->type(), DeviceType::kCuda);
  EXPECT_TRUE(device_->supports(CacheTier::kGpuMem, 0));
  EXPECT_FALSE(device_->supports(CacheTier::kHostMem, 0));
  EXPECT_TRUE(device_->supports(CacheTier::kHostMem, 1));
  EXPECT_TRUE(device_->supports(CacheTier::kDisk, 2));
  EXPECT_FALSE(device_->supports(CacheTier::kGpuMem, 1));
  EXPECT_THROW(static_cast<void>(make_cache_device({.type = DeviceType::kCuda, .index = 99})),
               InvalidArgument);
}

TEST_F(CudaDeviceTest, pools_keep_address_and_data_when_they_grow_and_shrink) {
  for (const CacheTier tier : {CacheTier::kGpuMem, CacheTier::kHostMem}) {
    MemoryPool* grown = pool(tier, 2 * kMiB, 64 * kMiB);
    std::byte* const data = grown->data();
    const Bytes want = random_bytes(2 * kMiB, 1);
    set(*grown, want);
    for (const int64_t size : {32 * kMiB, 3 * kMiB, 64 * kMiB, 5 * kMiB + 4096, 2 * kMiB}) {
      grown->resize(size);
      EXPECT_EQ(grown->num_bytes(), size);
      EXPECT_EQ(grown->data(), data);
      Bytes all = contents(*grown);
      all.resize(want.size());
      EXPECT_TRUE(all == want) << size;
      fill(*grown, 0);  // all of it can be reached
      set(*grown, want);
    }
    grown->resize(0);
    grown->resize(2 * kMiB);
    EXPECT_THROW(grown->resize(65 * kMiB), InvalidArgument);
  }
  device_->trim();
}

TEST_F(CudaDeviceTest, more_than_there_is_is_out_of_memory_and_changes_nothing) {
  const int64_t total = cuda::device_properties(0).total_bytes;
  MemoryPool* small = pool(CacheTier::kGpuMem, 4 * kMiB);
  const Bytes want = random_bytes(4 * kMiB, 2);
  set(*small, want);
  pools_.push_back(device_->make_pool({.tier = CacheTier::kGpuMem,
                                       .num_bytes = 2 * kMiB,
                                       .max_bytes = total * 2,
                                       .grain = 512 * kMiB}));
  MemoryPool* large = pools_.back().get();
  EXPECT_THROW(large->resize(total + 1024 * kMiB), OutOfMemory);
  EXPECT_EQ(large->num_bytes(), 2 * kMiB);
  EXPECT_TRUE(contents(*small) == want);
  device_->trim();
  large->resize(1024 * kMiB);
  fill(*large, 1);
}

TEST_F(CudaDeviceTest, a_page_goes_through_every_tier_and_comes_back) {
  MemoryPool *gpu = pool(CacheTier::kGpuMem), *host = pool(CacheTier::kHostMem),
             *disk = pool(CacheTier::kDisk), *other = pool(CacheTier::kGpuMem);
  const Bytes want = random_bytes(8 * kMiB, 3);
  set(*gpu, want);
  TimePoint point = copy(host, gpu);
  point = copy(disk, host, {point});
  point = copy(other, disk, {point});  // staged
  device_->synchronize(point);
  EXPECT_TRUE(contents(*host) == want);
  EXPECT_TRUE(contents(*other) == want);
  fill(*gpu, 0);
  point = copy(disk, other, {point});
  point = copy(host, disk, {point});
  point = copy(gpu, host, {point});
  device_->synchronize(point);
  EXPECT_TRUE(contents(*gpu) == want);
  EXPECT_THAT(device_->take_failures(), IsEmpty());
  EXPECT_EQ(device_->counters(), (CopyCounters{6, 6, 48 * kMiB, 0}));
  EXPECT_EQ(device_->bytes_in_flight(), 0);
}

TEST_F(CudaDeviceTest, copies_come_after_the_work_of_a_stream_and_streams_after_copies) {
  MemoryPool *gpu = pool(CacheTier::kGpuMem), *host = pool(CacheTier::kHostMem),
             *disk = pool(CacheTier::kDisk), *control = pool(CacheTier::kHostMem);
  set(*gpu, Bytes(static_cast<size_t>(8 * kMiB)));
  Stream stream;
  stream.hold();
  stream.fill(gpu->data(), 7, 8 * kMiB);
  const TimePoint written = device_->record(stream.handle());
  const TimePoint down = copy(host, gpu, {written});
  const TimePoint to_disk = copy(disk, gpu, {written});
  device_->wait(stream.handle(), {{down, to_disk}});
  stream.fill(gpu->data(), 9, 8 * kMiB);
  const TimePoint overwritten = device_->record(stream.handle());
  // Without an order it runs at once, and sees what was there before.
  device_->synchronize(copy(control, gpu));
  EXPECT_EQ(control->data()[0], std::byte{0});
  EXPECT_FALSE(device_->reached(written));
  EXPECT_FALSE(device_->reached(down));
  EXPECT_TRUE(device_->is_waitable(down));
  stream.release();
  device_->synchronize(overwritten);
  EXPECT_TRUE(device_->reached(down));
  EXPECT_EQ(contents(*host), Bytes(static_cast<size_t>(8 * kMiB), std::byte{7}));
  EXPECT_EQ(contents(*disk), Bytes(static_cast<size_t>(8 * kMiB), std::byte{7}));
  EXPECT_EQ(contents(*gpu), Bytes(static_cast<size_t>(8 * kMiB), std::byte{9}));
}

TEST_F(CudaDeviceTest, a_copy_that_waits_for_a_step_holds_up_no_other) {
  MemoryPool *gpu = pool(CacheTier::kGpuMem), *host = pool(CacheTier::kHostMem),
             *disk = pool(CacheTier::kDisk), *other = pool(CacheTier::kHostMem);
  set(*gpu, Bytes(static_cast<size_t>(8 * kMiB), std::byte{1}));
  const StreamHandle steps = device_->make_step_stream();
  device_->submit_step(steps);
  const TimePoint step = device_->record(steps);
  const TimePoint blocked = copy(host, gpu, {step});
  const TimePoint blocked_file = copy(disk, gpu, {step});
  const TimePoint chained = copy(disk, host, {blocked, blocked_file});
  Stream stream;
  device_->wait(stream.handle(), {{blocked}});
  const TimePoint on_stream = device_->record(stream.handle());
  const TimePoint both = device_->join(chained, on_stream);
  for (const TimePoint point : {step, blocked, blocked_file, chained, on_stream, both}) {
    EXPECT_FALSE(device_->is_waitable(point));
  }
  device_->synchronize(copy(other, gpu));
  device_->synchronize(copy(other, disk));
  EXPECT_FALSE(device_->reached(blocked));
  fill(*gpu, 2);  // what the step writes
  device_->complete_step(steps, 1);
  EXPECT_TRUE(device_->is_waitable(both));
  device_->synchronize(both);
  EXPECT_EQ(host->data()[8 * kMiB - 1], std::byte{2});
  EXPECT_EQ(contents(*disk)[0], std::byte{2});
}

TEST_F(CudaDeviceTest, joins_are_reached_when_both_are) {
  Stream left, right;
  left.hold();
  right.hold();
  const TimePoint a = device_->record(left.handle()), b = device_->record(right.handle());
  const TimePoint later = device_->record(left.handle());
  EXPECT_EQ(device_->join(a, later), later);
  EXPECT_EQ(device_->join({}, a), a);
  const TimePoint both = device_->join(a, b);
  left.release();
  device_->synchronize(a);
  EXPECT_FALSE(device_->reached(both));
  right.release();
  device_->synchronize(both);
  EXPECT_TRUE(device_->reached(b));
}

TEST_F(CudaDeviceTest, copies_on_a_stream_keep_its_order) {
  MemoryPool* gpu = pool(CacheTier::kGpuMem);
  Stream stream;
  stream.hold();
  stream.fill(gpu->data(), 3, 1024);
  device_->copy_on(stream.handle(), {{{gpu, gpu, 4096, 0, 1024, 0}, {gpu, gpu, 9000, 7, 100, 0}}});
  stream.fill(gpu->data(), 4, 1024);
  const TimePoint done = device_->record(stream.handle());
  stream.release();
  device_->synchronize(done);
  const Bytes got = contents(*gpu);
  EXPECT_EQ(got[0], std::byte{4});
  EXPECT_EQ(got[4096], std::byte{3});
  EXPECT_EQ(got[4096 + 1023], std::byte{3});
  EXPECT_EQ(got[9099], std::byte{3});
  EXPECT_THROW(device_->copy_on(-1, {}), InvalidArgument);
  MemoryPool* host = pool(CacheTier::kHostMem);
  EXPECT_THROW(device_->copy_on(0, {{{gpu, host, 0, 0, 1, 0}}}), InvalidArgument);
}

TEST_F(CudaDeviceTest, failed_pages_are_named_and_their_points_are_reached) {
  MemoryPool *gpu = pool(CacheTier::kGpuMem), *disk = pool(CacheTier::kDisk);
  ASSERT_EQ(::ftruncate(disk->fd(), 3 * kMiB), 0);
  const TimePoint done =
      device_->copy({{{gpu, disk, 0, 0, kMiB, 1}, {gpu, disk, 5 * kMiB, 5 * kMiB, kMiB, 2}}}, {});
  device_->synchronize(done);
  EXPECT_EQ(device_->num_failures(), 1U);
  EXPECT_THAT(device_->take_failures(), ElementsAre(2));
}

TEST_F(CudaDeviceTest, the_end_waits_for_copies) {
  MemoryPool *gpu = pool(CacheTier::kGpuMem), *host = pool(CacheTier::kHostMem),
             *disk = pool(CacheTier::kDisk);
  set(*gpu, Bytes(static_cast<size_t>(8 * kMiB), std::byte{5}));
  static_cast<void>(copy(disk, host, {copy(host, gpu)}));
  device_.reset();
  EXPECT_EQ(contents(*disk), Bytes(static_cast<size_t>(8 * kMiB), std::byte{5}));
}

TEST_F(CudaDeviceTest, pages_of_any_size_and_place_are_copied_whole_and_nothing_else) {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    std::mt19937_64 random(seed);
    MemoryPool *gpu = pool(CacheTier::kGpuMem), *host = pool(CacheTier::kHostMem);
    const bool up = seed % 2 == 0;
    MemoryPool *dst = up ? gpu : host, *src = up ? host : gpu;
    set(*src, random_bytes(8 * kMiB, seed));
    set(*dst, random_bytes(8 * kMiB, seed + 100));
    const Bytes from = contents(*src);
    Bytes want = contents(*dst);
    const int64_t unit = seed <= 4 ? 16 : 1;
    std::vector<CopyTask> tasks;
    for (int64_t at = 0; tasks.size() < 700;) {
      const int64_t size =
          static_cast<int64_t>(random() % (random() % 50 == 0 ? 600000 : 5000)) / unit * unit;
      if (at + size > 8 * kMiB) break;
      const int64_t src_at =
          static_cast<int64_t>(random() % static_cast<uint64_t>(8 * kMiB - size + 1)) / unit * unit;
      tasks.push_back({dst, src, at, src_at, size, 0});
      std::memcpy(want.data() + at, from.data() + src_at, static_cast<size_t>(size));
      at += size + static_cast<int64_t>(random() % 3) * unit;
    }
    device_->synchronize(device_->copy(tasks, {}));
    EXPECT_TRUE(contents(*dst) == want) << "seed " << seed;
  }
}

// Random graphs over all tiers and two streams, against a model that runs them one by one.
TEST_F(CudaDeviceTest, copies_in_order_give_what_copies_one_by_one_give) {
  constexpr int64_t kSlots = 4;
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    std::mt19937_64 random(seed);
    const int64_t slot_bytes = seed % 2 == 0 ? 65536 : 700000;
    make({.staging_bytes = seed % 3 == 0 ? kMiB : 64 * kMiB, .use_io_uring = seed % 2 == 0});
    std::vector<MemoryPool*> pools_of;
    std::vector<Bytes> model;
    for (const CacheTier tier : {CacheTier::kGpuMem, CacheTier::kGpuMem, CacheTier::kHostMem,
                                 CacheTier::kHostMem, CacheTier::kDisk, CacheTier::kDisk}) {
      pools_of.push_back(pool(tier, kSlots * slot_bytes));
      model.push_back(random_bytes(kSlots * slot_bytes, seed * 10 + model.size()));
      set(*pools_of.back(), model.back());
    }
    Stream streams[2];
    const StreamHandle steps = device_->make_step_stream();
    uint64_t submitted = 0;
    std::vector<TimePoint> written(6 * kSlots);
    std::vector<std::vector<TimePoint> > used(6 * kSlots);
    for (int i = 0; i < 150; ++i) {
      const size_t dst = random() % written.size(), src = random() % written.size();
      const size_t dst_pool = dst / kSlots, src_pool = src / kSlots;
      if (dst == src) continue;
      const auto offset = [&](size_t slot) {
        return static_cast<int64_t>(slot % kSlots) * slot_bytes;
      };
      std::vector<TimePoint> after = used[dst];
      after.push_back(written[src]);
      TimePoint done;
      if (dst_pool < 2 && random() % 3 == 0) {  // a kernel
        Stream& stream = streams[random() % 2];
        device_->wait(stream.handle(), after);
        const int value = static_cast<int>(random() % 256);
        stream.fill(pools_of[dst_pool]->data() + offset(dst), value, slot_bytes);
        std::memset(model[dst_pool].data() + offset(dst), value, static_cast<size_t>(slot_bytes));
        done = device_->record(stream.handle());
      } else {
        if (random() % 5 == 0) {
          submitted = device_->submit_step(steps);
          after.push_back(device_->record(steps));
        }
        const int64_t size = random() % 3 == 0 ? 1024 : slot_bytes;
        done = device_->copy(
            {{{pools_of[dst_pool], pools_of[src_pool], offset(dst), offset(src), size, 0}}}, after);
        std::memcpy(model[dst_pool].data() + offset(dst), model[src_pool].data() + offset(src),
                    static_cast<size_t>(size));
        used[src].push_back(done);
      }
      written[dst] = done;
      used[dst] = {done};
      if (submitted > 0 && random() % 2 == 0) device_->complete_step(steps, submitted);
    }
    if (submitted > 0) device_->complete_step(steps, submitted);
    for (const auto& points : used) {
      for (const TimePoint point : points) device_->synchronize(point);
    }
    for (size_t i = 0; i < model.size(); ++i) {
      ASSERT_TRUE(contents(*pools_of[i]) == model[i]) << "seed " << seed << ", pool " << i;
    }
    EXPECT_EQ(device_->num_failures(), 0U);
  }
}

}  // namespace
}  // namespace helicore::kv::testing

#endif
