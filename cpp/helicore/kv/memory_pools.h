// Pools of host memory and of disk that grow in place. A host pool reserves its addresses once and
// takes memory as it grows; a disk pool is a file without a name.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "helicore/kv/cache_device.h"

namespace helicore::kv {

struct HostMemoryOptions {
  int32_t num_fault_threads = 0;  // that touch new memory in advance; 0: first use does
  bool huge_pages = false;
  int32_t numa_node = -1;  // where the memory should lie; -1: spread over all nodes
};

// Anonymous private memory at a fixed address, 4096-byte aligned, zero until first written. Beyond
// num_bytes() it can't be touched.
class HostMemoryPool final : public MemoryPool {
 public:
  // Throws OutOfMemory, InvalidArgument.
  HostMemoryPool(const PoolSpec& spec, const HostMemoryOptions& options);
  ~HostMemoryPool() override;

  [[nodiscard]] int64_t num_bytes() const noexcept override { return num_bytes_; }
  void resize(int64_t num_bytes) override;
  [[nodiscard]] std::byte* data() const noexcept override { return data_; }

 private:
  void grow(int64_t from, int64_t to);
  void give_back(int64_t from, int64_t to) noexcept;

  HostMemoryOptions options_;
  int64_t max_bytes_;
  int64_t num_bytes_ = 0;
  std::byte* data_ = nullptr;
};

// A file in a directory, without a name: it goes with the process. Its blocks are allocated when it
// grows, so that a full disk is OutOfMemory then and no failed write later.
class DiskFilePool final : public MemoryPool {
 public:
  // Throws OutOfMemory; InvalidArgument when the directory can't hold a file.
  explicit DiskFilePool(const PoolSpec& spec);
  ~DiskFilePool() override;

  [[nodiscard]] int64_t num_bytes() const noexcept override { return num_bytes_; }
  void resize(int64_t num_bytes) override;
  [[nodiscard]] std::byte* data() const noexcept override { return nullptr; }
  [[nodiscard]] int fd() const noexcept override { return fd_; }

 private:
  std::string directory_;
  int64_t max_bytes_;
  int64_t num_bytes_ = 0;
  int fd_ = -1;
};

// How many NUMA nodes have memory; 1 where that can't be found out.
[[nodiscard]] int num_numa_nodes() noexcept;

}  // namespace helicore::kv
