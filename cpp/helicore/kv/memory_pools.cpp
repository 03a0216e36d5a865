#include "helicore/kv/memory_pools.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <thread>
#include <vector>

#include "helicore/core/error.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace helicore::kv {
namespace {

constexpr int64_t kPageBytes = 4096;
constexpr int64_t kFaultStepBytes = int64_t{16} << 20;  // that a thread touches before the next
constexpr int kPolicyPreferred = 1;                     // of mbind()
constexpr int kPolicyInterleave = 3;
constexpr int kMaxNodes = 64;

int64_t round_up(int64_t value, int64_t unit) noexcept { return (value + unit - 1) / unit * unit; }

void check_size(const char* where, int64_t num_bytes, int64_t max_bytes) {
  HELICORE_CHECK(num_bytes >= 0 && num_bytes <= max_bytes, where, "num_bytes must be in [0, ",
                 max_bytes, "], got ", num_bytes);
}

void spread(std::byte* data, int64_t num_bytes, int node) noexcept {
  const int num_nodes = num_numa_nodes();
  if (num_nodes <= 1 || num_bytes == 0) return;
  const unsigned long all = num_nodes == kMaxNodes ? ~0UL : (1UL << num_nodes) - 1;
  const unsigned long mask = node >= 0 && node < num_nodes ? 1UL << node : all;
  const int policy = node >= 0 ? kPolicyPreferred : kPolicyInterleave;
  if (::syscall(SYS_mbind, data, static_cast<size_t>(num_bytes), policy, &mask, kMaxNodes + 1, 0) !=
      0) {
    static std::atomic<bool> told{
        false};  // containers often forbid it; the memory works all the same
    if (!told.exchange(true)) {
      log_error(std::string("kv.host_memory: mbind: ") + std::strerror(errno));
    }
  }
}

// 0 or an errno.
int touch(std::byte* data, int64_t num_bytes) noexcept {
  if (::madvise(data, static_cast<size_t>(num_bytes), MADV_POPULATE_WRITE) == 0) return 0;
  if (errno != EINVAL) return errno;
  for (int64_t at = 0; at < num_bytes; at += kPageBytes) {
    // A plain store could overwrite what another thread wrote; adding nothing can't.
    std::atomic_ref(*reinterpret_cast<uint8_t*>(data + at)).fetch_or(0);
  }
  return 0;
}

int touch_by_threads(std::byte* data, int64_t num_bytes, int num_threads) {
  std::atomic<int64_t> next{0};
  std::atomic<int> error{0};
  const auto work = [&] {
    int64_t at = 0;
    while (error == 0 && (at = next.fetch_add(kFaultStepBytes)) < num_bytes) {
      const int failed = touch(data + at, std::min(kFaultStepBytes, num_bytes - at));
      if (failed != 0) error = failed;
    }
  };
  const int64_t num_steps = (num_bytes + kFaultStepBytes - 1) / kFaultStepBytes;
  std::vector<std::thread> threads;
  for (int i = 1; i < std::min<int64_t>(num_threads, num_steps); ++i) {
    try {
      threads.emplace_back(work);
    } catch (const std::system_error&) {
      break;  // fewer threads do it too
    }
  }
  work();
  for (std::thread& thread : threads) thread.join();
  return error;
}

int open_nameless(const std::string& directory) {
  const int fd = ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_EXCL | O_CLOEXEC, 0600);
  if (fd >= 0) return fd;
  // Not every file system has files without a name.
  std::string path = directory + "/helicore-kv-XXXXXX";
  const int named = ::mkostemp(path.data(), O_CLOEXEC);
  if (named >= 0) ::unlink(path.c_str());
  return named;
}

}  // namespace

int num_numa_nodes() noexcept {
  static const int count = [] {
    // "0" or "0-3" or "0,2-5": the highest node is the last number.
    std::ifstream file("/sys/devices/system/node/has_memory");
    std::string text;
    if (!std::getline(file, text)) return 1;
    const size_t at = text.find_last_of(",-");
    const int last = std::atoi(text.c_str() + (at == std::string::npos ? 0 : at + 1));
    return std::clamp(last + 1, 1, kMaxNodes);
  }();
  return count;
}

HostMemoryPool::HostMemoryPool(const PoolSpec& spec, const HostMemoryOptions& options)
    : options_(options), max_bytes_(spec.max_bytes) {
  check_size("kv.host_memory", spec.num_bytes, max_bytes_);
  if (max_bytes_ == 0) return;
  void* address = ::mmap(nullptr, static_cast<size_t>(round_up(max_bytes_, kPageBytes)), PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) {
    throw OutOfMemory(detail::concat("[kv.host_memory] reserving addresses for ", max_bytes_,
                                     " bytes failed: ", std::strerror(errno)));
  }
  data_ = static_cast<std::byte*>(address);
  spread(data_, round_up(max_bytes_, kPageBytes), options_.numa_node);
  ::madvise(data_, static_cast<size_t>(round_up(max_bytes_, kPageBytes)),
            options_.huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  try {
    resize(spec.num_bytes);
  } catch (...) {
    ::munmap(data_, static_cast<size_t>(round_up(max_bytes_, kPageBytes)));
    throw;
  }
}

HostMemoryPool::~HostMemoryPool() {
  if (data_ == nullptr) return;
  if (::munmap(data_, static_cast<size_t>(round_up(max_bytes_, kPageBytes))) != 0) {
    log_error("kv.host_memory: munmap failed");
  }
}

void HostMemoryPool::resize(int64_t num_bytes) {
  check_size("kv.host_memory", num_bytes, max_bytes_);
  const int64_t old_end = round_up(num_bytes_, kPageBytes);
  const int64_t new_end = round_up(num_bytes, kPageBytes);
  if (new_end > old_end) grow(old_end, new_end);
  if (new_end < old_end) give_back(new_end, old_end);
  num_bytes_ = num_bytes;
}

void HostMemoryPool::grow(int64_t from, int64_t to) {
  int error = 0;
  if (::mprotect(data_ + from, static_cast<size_t>(to - from), PROT_READ | PROT_WRITE) != 0) {
    error = errno;
  } else if (options_.num_fault_threads > 0) {
    error = touch_by_threads(data_ + from, to - from, options_.num_fault_threads);
  }
  if (error == 0) return;
  give_back(from, to);
  throw OutOfMemory(detail::concat("[kv.host_memory] growing a pool of host memory from ", from,
                                   " to ", to, " bytes failed: ", std::strerror(error)));
}

void HostMemoryPool::give_back(int64_t from, int64_t to) noexcept {
  // Touching it from now on is a bug that must not go unseen.
  const auto size = static_cast<size_t>(to - from);
  if (::madvise(data_ + from, size, MADV_DONTNEED) != 0 ||
      ::mprotect(data_ + from, size, PROT_NONE) != 0) {
    log_error(std::string("kv.host_memory: giving memory back: ") + std::strerror(errno));
  }
}

DiskFilePool::DiskFilePool(const PoolSpec& spec)
    : directory_(spec.directory), max_bytes_(spec.max_bytes) {
  check_size("kv.disk_file", spec.num_bytes, max_bytes_);
  HELICORE_CHECK(!directory_.empty(), "kv.disk_file", "directory must be given");
  fd_ = open_nameless(directory_);
  HELICORE_CHECK(fd_ >= 0, "kv.disk_file", "directory must be one that files can be made in, got '",
                 directory_, "': ", std::strerror(errno));
  try {
    resize(spec.num_bytes);
  } catch (...) {
    ::close(fd_);
    throw;
  }
}

DiskFilePool::~DiskFilePool() {
  if (::close(fd_) != 0) log_error("kv.disk_file: close failed");
}

void DiskFilePool::resize(int64_t num_bytes) {
  check_size("kv.disk_file", num_bytes, max_bytes_);
  int error = 0;
  if (num_bytes > num_bytes_) {
    do {
      error = ::posix_fallocate(fd_, num_bytes_, num_bytes - num_bytes_);
    } while (error == EINTR);
  } else if (num_bytes < num_bytes_ && ::ftruncate(fd_, num_bytes) != 0) {
    error = errno;
  }
  if (error != 0) {
    // Blocks that were allocated before it failed.
    if (::ftruncate(fd_, num_bytes_) != 0) log_error("kv.disk_file: ftruncate failed");
    throw OutOfMemory(detail::concat("[kv.disk_file] resizing a file in '", directory_, "' from ",
                                     num_bytes_, " to ", num_bytes,
                                     " bytes failed: ", std::strerror(error)));
  }
  num_bytes_ = num_bytes;
}

}  // namespace helicore::kv
