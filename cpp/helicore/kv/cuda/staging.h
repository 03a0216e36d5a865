// Pinned buffers between GPU memory and files. Included by CUDA sources only.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "helicore/kv/cuda/page_copy.h"
#include "helicore/kv/file_copies.h"

namespace helicore::kv {

// Threads: as StagingPort; open() before any lane works.
class GpuStaging final : public StagingPort {
 public:
  static constexpr int kSlotsPerLane = 8;

  GpuStaging(int device, int64_t num_bytes, int num_lanes) noexcept;
  ~GpuStaging() override;
  // Gets buffers, streams and events; further calls do nothing. Throws CudaError, OutOfMemory.
  void open();

  [[nodiscard]] bool owns(const MemoryPool& pool) const noexcept override;
  [[nodiscard]] int num_slots() const noexcept override { return kSlotsPerLane; }
  [[nodiscard]] int64_t slot_bytes() const noexcept override { return slot_bytes_; }
  [[nodiscard]] std::byte* slot(int lane, int index) const noexcept override;
  [[nodiscard]] bool copy(int lane, std::byte* dst, const std::byte* src,
                          int64_t num_bytes) noexcept override;
  [[nodiscard]] bool mark(int lane, int index) noexcept override;
  [[nodiscard]] bool wait(int lane, int index) noexcept override;

 private:
  struct Lane {
    cudaStream_t stream = nullptr;
    std::vector<cudaEvent_t> marks{};      // by slot
    std::vector<PageCopyTask> gathered{};  // since the last mark
  };
  void close() noexcept;

  int device_;
  int num_lanes_;
  int64_t slot_bytes_;
  std::byte* buffer_ = nullptr;
  std::vector<Lane> lanes_;
};

}  // namespace helicore::kv
