#include "helicore/kv/memory_pools.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <vector>

#include "helicore/core/error.h"
#include "kv/temp_dir.h"

namespace helicore::kv::testing {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

PoolSpec host(int64_t num_bytes, int64_t max_bytes) {
  return {.tier = CacheTier::kHostMem, .num_bytes = num_bytes, .max_bytes = max_bytes};
}

// Pages of [data, data + num_bytes) that are in memory.
int64_t resident(const std::byte* data, int64_t num_bytes) {
  std::vector<unsigned char> pages(static_cast<size_t>((num_bytes + 4095) / 4096));
  if (::mincore(const_cast<std::byte*>(data), static_cast<size_t>(num_bytes), pages.data()) != 0) {
    return -1;
  }
  return std::count_if(pages.begin(), pages.end(), [](unsigned char p) { return p & 1; });
}

TEST(HostMemoryPoolTest, growing_and_shrinking_keep_address_and_data) {
  HostMemoryPool pool(host(4096, 64 * kMiB), {});
  std::byte* const data = pool.data();
  ASSERT_NE(data, nullptr);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % 4096, 0U);
  std::memset(data, 1, 4096);
  pool.resize(10 * kMiB);
  EXPECT_EQ(pool.data(), data);
  EXPECT_EQ(pool.num_bytes(), 10 * kMiB);
  EXPECT_EQ(data[4095], std::byte{1});
  EXPECT_EQ(data[4096], std::byte{0});
  std::memset(data, 2, static_cast<size_t>(10 * kMiB));
  pool.resize(4096);
  EXPECT_EQ(data[4095], std::byte{2});
  pool.resize(64 * kMiB);
  EXPECT_EQ(pool.data(), data);
  EXPECT_EQ(data[0], std::byte{2});
  EXPECT_EQ(data[4096], std::byte{0}) << "memory that was given back must not come back as it was";
}

TEST(HostMemoryPoolTest, addresses_are_reserved_without_memory) {
  const int64_t huge = int64_t{64} << 30;
  HostMemoryPool pool(host(kMiB, huge), {});
  pool.data()[kMiB - 1] = std::byte{1};
  EXPECT_EQ(resident(pool.data(), kMiB), 1);
}

TEST(HostMemoryPoolTest, shrinking_gives_memory_back) {
  HostMemoryPool pool(host(kMiB, kMiB), {});
  std::memset(pool.data(), 1, static_cast<size_t>(kMiB));
  EXPECT_EQ(resident(pool.data(), kMiB), 256);
  pool.resize(4096);
  EXPECT_EQ(resident(pool.data(), kMiB), 1);
}

TEST(HostMemoryPoolTest, memory_is_touched_in_advance_when_asked) {
  const int64_t size = 40 * kMiB;
  for (const int num_threads : {1, 3}) {
    HostMemoryPool pool(host(size / 2, size), {.num_fault_threads = num_threads});
    EXPECT_EQ(resident(pool.data(), size / 2), size / 2 / 4096);
    std::memset(pool.data(), 9, static_cast<size_t>(size / 2));
    pool.resize(size);
    EXPECT_EQ(resident(pool.data(), size), size / 4096);
    EXPECT_EQ(pool.data()[size / 2 - 1], std::byte{9});
  }
}

TEST(HostMemoryPoolTest, sizes_that_are_no_pages_work) {
  HostMemoryPool pool(host(1, 10001), {});
  pool.data()[0] = std::byte{7};
  pool.resize(10001);
  pool.data()[10000] = std::byte{8};
  pool.resize(0);
  pool.resize(1);
  EXPECT_EQ(pool.data()[0], std::byte{0});
  HostMemoryPool empty(host(0, 0), {});
  EXPECT_EQ(empty.num_bytes(), 0);
  EXPECT_NO_THROW(empty.resize(0));
}

TEST(HostMemoryPoolTest, options_of_placement_are_hints) {
  HostMemoryPool pool(host(4 * kMiB, 4 * kMiB),
                      {.num_fault_threads = 2, .huge_pages = true, .numa_node = 0});
  pool.data()[4 * kMiB - 1] = std::byte{1};
  EXPECT_GE(num_numa_nodes(), 1);
}

TEST(HostMemoryPoolTest, sizes_out_of_range_are_told) {
  HostMemoryPool pool(host(0, 100), {});
  EXPECT_THROW(pool.resize(101), InvalidArgument);
  EXPECT_THROW(pool.resize(-1), InvalidArgument);
  EXPECT_THROW(HostMemoryPool(host(101, 100), {}), InvalidArgument);
}

TEST(HostMemoryPoolTest, no_addresses_left_is_out_of_memory) {
  EXPECT_THROW(HostMemoryPool(host(0, int64_t{1} << 60), {}), OutOfMemory);
}

TEST(HostMemoryPoolTest, touching_beyond_the_end_does_not_go_unseen) {
  HostMemoryPool pool(host(8192, 8192), {});
  pool.resize(4096);
  EXPECT_DEATH(pool.data()[4096] = std::byte{1}, "");
}

class DiskFilePoolTest : public ::testing::Test {
 protected:
  PoolSpec disk(int64_t num_bytes, int64_t max_bytes) const {
    return {CacheTier::kDisk, num_bytes, max_bytes, dir_.path().string()};
  }
  static int64_t file_bytes(int fd) {
    struct ::stat info{};
    return ::fstat(fd, &info) == 0 ? info.st_size : -1;
  }
  static int64_t allocated_bytes(int fd) {
    struct ::stat info{};
    return ::fstat(fd, &info) == 0 ? info.st_blocks * 512 : -1;
  }
  TempDir dir_;
};

TEST_F(DiskFilePoolTest, the_file_has_no_name_and_its_blocks_are_allocated) {
  DiskFilePool pool(disk(3 * kMiB, 8 * kMiB));
  EXPECT_GE(pool.fd(), 0);
  EXPECT_EQ(pool.data(), nullptr);
  EXPECT_TRUE(std::filesystem::is_empty(dir_.path()));
  EXPECT_EQ(file_bytes(pool.fd()), 3 * kMiB);
  EXPECT_GE(allocated_bytes(pool.fd()), 3 * kMiB);
}

TEST_F(DiskFilePoolTest, growing_and_shrinking_keep_descriptor_and_data) {
  DiskFilePool pool(disk(4096, 8 * kMiB));
  const int fd = pool.fd();
  ASSERT_EQ(::pwrite(fd, "abc", 3, 4093), 3);
  pool.resize(8 * kMiB);
  EXPECT_EQ(pool.fd(), fd);
  char out[4] = {};
  ASSERT_EQ(::pread(fd, out, 4, 4093), 4);
  EXPECT_EQ(std::memcmp(out, "abc\0", 4), 0);
  pool.resize(4095);
  EXPECT_EQ(file_bytes(fd), 4095);
  pool.resize(4096);
  ASSERT_EQ(::pread(fd, out, 3, 4093), 3);
  EXPECT_EQ(std::memcmp(out, "ab\0", 3), 0);
  pool.resize(0);
  EXPECT_EQ(allocated_bytes(fd), 0);
}

TEST_F(DiskFilePoolTest, a_full_disk_is_out_of_memory_and_changes_nothing) {
  DiskFilePool pool(disk(kMiB, 64 * kMiB));
  ::rlimit old{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old), 0);
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  const ::rlimit limit{static_cast<rlim_t>(2 * kMiB), old.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  EXPECT_THROW(pool.resize(3 * kMiB), OutOfMemory);
  EXPECT_THROW(DiskFilePool(disk(3 * kMiB, 3 * kMiB)), OutOfMemory);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old), 0);
  ::signal(SIGXFSZ, handler);
  EXPECT_EQ(pool.num_bytes(), kMiB);
  EXPECT_EQ(file_bytes(pool.fd()), kMiB);
  EXPECT_NO_THROW(pool.resize(3 * kMiB));
}

// Blocks run out in the middle, unlike with a limit on the file's size.
TEST_F(DiskFilePoolTest, a_file_system_that_fills_up_gets_its_blocks_back) {
  if (::mount("none", dir_.path().c_str(), "tmpfs", 0, "size=4m") != 0) {
    GTEST_SKIP() << "no right to mount a small file system";
  }
  {
    DiskFilePool pool(disk(kMiB, 64 * kMiB));
    DiskFilePool other(disk(2 * kMiB, 64 * kMiB));
    EXPECT_THROW(pool.resize(8 * kMiB), OutOfMemory);
    EXPECT_EQ(pool.num_bytes(), kMiB);
    EXPECT_LE(allocated_bytes(pool.fd()), kMiB);
    EXPECT_NO_THROW(other.resize(3 * kMiB));
  }
  ::umount(dir_.path().c_str());
}

TEST_F(DiskFilePoolTest, misuse_is_told) {
  PoolSpec nowhere = disk(1, 1);
  nowhere.directory = dir_.file("missing");
  EXPECT_THROW(DiskFilePool{nowhere}, InvalidArgument);
  nowhere.directory = "";
  EXPECT_THROW(DiskFilePool{nowhere}, InvalidArgument);
  EXPECT_THROW(DiskFilePool{disk(2, 1)}, InvalidArgument);
  DiskFilePool pool(disk(0, 10));
  EXPECT_THROW(pool.resize(11), InvalidArgument);
}

}  // namespace
}  // namespace helicore::kv::testing
