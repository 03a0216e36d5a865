// GPU memory that grows in place: addresses are reserved once per pool, physical chunks are mapped
// behind them. Included by CUDA sources only.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "helicore/kv/cache_device.h"

namespace helicore::kv {

// Physical chunks of one device, shared by its pools: what one gives back another takes without the
// driver. Threads: one at a time.
class ChunkCache {
 public:
  static constexpr int64_t kMaxCachedBytes = int64_t{1} << 30;

  // Finds out what kind of handle the driver gives. Throws NotSupported, CudaError.
  explicit ChunkCache(int device);
  ~ChunkCache();
  ChunkCache(const ChunkCache&) = delete;
  ChunkCache& operator=(const ChunkCache&) = delete;

  // A chunk of `num_bytes`, a multiple of granularity(). Throws OutOfMemory, CudaError.
  [[nodiscard]] CUmemGenericAllocationHandle take(int64_t num_bytes);
  // Keeps it, or releases it when enough is kept.
  void give_back(CUmemGenericAllocationHandle chunk, int64_t num_bytes) noexcept;
  // Releases everything that is kept.
  void trim() noexcept;

  [[nodiscard]] int device() const noexcept { return device_; }
  [[nodiscard]] int64_t granularity() const noexcept { return granularity_; }
  [[nodiscard]] int64_t cached_bytes() const noexcept { return cached_bytes_; }

 private:
  [[nodiscard]] bool try_kind(CUmemAllocationHandleType kind, bool rdma);

  int device_;
  int64_t granularity_ = 0;
  CUmemAllocationProp prop_{};
  std::map<int64_t, std::vector<CUmemGenericAllocationHandle>> free_;  // by size
  int64_t cached_bytes_ = 0;
};

// Threads: one at a time. resize() synchronises the device before it takes memory away.
class GpuMemoryPool final : public MemoryPool {
 public:
  // Shares the cache with the device and its other pools: the last of them ends it. Throws
  // OutOfMemory, CudaError.
  GpuMemoryPool(const PoolSpec& spec, std::shared_ptr<ChunkCache> cache);
  ~GpuMemoryPool() override;

  [[nodiscard]] int64_t num_bytes() const noexcept override { return num_bytes_; }
  void resize(int64_t num_bytes) override;
  [[nodiscard]] bool on_gpu() const noexcept override { return true; }
  [[nodiscard]] std::byte* data() const noexcept override {
    return reinterpret_cast<std::byte*>(address_);
  }

 private:
  void map_up_to(size_t num_chunks);
  void unmap_down_to(size_t num_chunks) noexcept;

  std::shared_ptr<ChunkCache> cache_;
  int64_t max_bytes_;
  int64_t chunk_bytes_;
  int64_t reserved_bytes_;
  int64_t num_bytes_ = 0;
  CUdeviceptr address_ = 0;
  std::vector<CUmemGenericAllocationHandle> chunks_;
};

}  // namespace helicore::kv
