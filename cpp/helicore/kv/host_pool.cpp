#include "helicore/kv/host_pool.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "helicore/core/error.h"

namespace helicore::kv {

HostPool::HostPool(int64_t num_bytes) : num_bytes_(num_bytes) {
  if (num_bytes == 0) return;
  void* address = ::mmap(nullptr, static_cast<size_t>(num_bytes), PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) {
    throw OutOfMemory(detail::concat("[kv.host_pool] mmap of ", num_bytes,
                                     " bytes for the host tier failed: ", std::strerror(errno)));
  }
  data_ = static_cast<std::byte*>(address);
}

HostPool::~HostPool() {
  if (data_ != nullptr && ::munmap(data_, static_cast<size_t>(num_bytes_)) != 0) {
    log_error("kv.host_pool: munmap failed");
  }
}

HostPool::HostPool(HostPool&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), num_bytes_(std::exchange(other.num_bytes_, 0)) {}

}  // namespace helicore::kv
