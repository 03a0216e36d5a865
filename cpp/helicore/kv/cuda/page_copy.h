// Copies of many pages at once by a kernel that addresses GPU memory and pinned host memory alike,
// or one by one by the GPU's copy engines. Included by CUDA sources only.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

namespace helicore::kv {

struct PageCopyTask {
  std::byte* dst = nullptr;        // on the GPU or in pinned host memory
  const std::byte* src = nullptr;  // likewise; doesn't overlap dst
  int64_t num_bytes = 0;
};

enum class CopyDirection : uint8_t { kToGpu, kFromGpu, kInGpu };

// From this size on a task is better left to the copy engines: their fixed cost per copy no longer
// shows, and they leave the multiprocessors to others.
[[nodiscard]] int64_t copy_engine_bytes(CopyDirection direction) noexcept;

// Enqueues the tasks by the route that fits each size. Nothing is waited for. cudaSuccess, or the
// code of the first call that failed; some of the tasks may be under way then.
[[nodiscard]] cudaError_t copy_pages(std::span<const PageCopyTask> tasks, CopyDirection direction,
                                     cudaStream_t stream) noexcept;
// Loads the kernels of the calling thread's device: a first launch would do it, which must not
// happen while streams wait for the host.
[[nodiscard]] cudaError_t load_page_copy() noexcept;
// The kernel's route alone. Any addresses and sizes below 64 GiB; those of 16 bytes are fast.
[[nodiscard]] cudaError_t launch_page_copy(std::span<const PageCopyTask> tasks,
                                           CopyDirection direction, cudaStream_t stream) noexcept;

}  // namespace helicore::kv
