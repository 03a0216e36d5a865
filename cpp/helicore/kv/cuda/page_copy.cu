#include <cuda_runtime.h>

#include <algorithm>

#include "helicore/kv/cuda/page_copy.h"

namespace helicore::kv {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 8;  // loads of 16 bytes that a thread has on the way
constexpr int64_t kSegmentBytes = int64_t{kThreads} * kUnroll * sizeof(uint4);  // of one turn
constexpr int kMaxTasks = 256;  // of a launch; they travel as its parameters
constexpr int kFewTasks = 16;   // parameters cost too: a small launch for few
// Bytes on the way that keep the link to the host busy, several times over what its latency asks.
constexpr int64_t kLinkBytesInFlight = int64_t{1} << 20;
constexpr int kMinLinkBlocks = 16;
constexpr int kMaxLinkBlocks = 64;
constexpr int kMaxGpuBlocks = 264;

// From these sizes on the copy engines do as well as the kernel.
constexpr int64_t kLinkEngineBytes = int64_t{4} << 20;
constexpr int64_t kGpuEngineBytes = int64_t{4} << 20;

template <int kTasks>
struct PageCopyBatch {
  int num_tasks;
  int segments_per_task;  // of the longest one
  PageCopyTask tasks[kTasks];
};

__device__ void copy_vectors(uint4* dst, const uint4* src, int64_t count) {
  for (int64_t base = threadIdx.x; base < count; base += int64_t{kThreads} * kUnroll) {
    uint4 held[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int64_t at = base + int64_t{i} * kThreads;
      if (at < count) held[i] = __ldcs(src + at);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int64_t at = base + int64_t{i} * kThreads;
      if (at < count) __stcs(dst + at, held[i]);
    }
  }
}

// One block takes segments of tasks in turn; consecutive blocks get consecutive segments.
template <int kTasks>
__global__ void __launch_bounds__(kThreads)
    page_copy_kernel(const __grid_constant__ PageCopyBatch<kTasks> batch) {
  const int num_items = batch.num_tasks * batch.segments_per_task;
  for (int item = blockIdx.x; item < num_items; item += gridDim.x) {
    const PageCopyTask& task = batch.tasks[item / batch.segments_per_task];
    const int64_t from = item % batch.segments_per_task * kSegmentBytes;
    if (from >= task.num_bytes) continue;
    const int64_t left = task.num_bytes - from;
    const int64_t num_bytes = left < kSegmentBytes ? left : kSegmentBytes;
    std::byte* dst = task.dst + from;
    const std::byte* src = task.src + from;
    int64_t tail = 0;  // where bytes that are no whole vectors begin
    if ((reinterpret_cast<uintptr_t>(dst) | reinterpret_cast<uintptr_t>(src)) % sizeof(uint4) ==
        0) {
      const int64_t count = num_bytes / static_cast<int64_t>(sizeof(uint4));
      copy_vectors(reinterpret_cast<uint4*>(dst), reinterpret_cast<const uint4*>(src), count);
      tail = count * static_cast<int64_t>(sizeof(uint4));
    }
    for (int64_t i = tail + threadIdx.x; i < num_bytes; i += kThreads) dst[i] = src[i];
  }
}

template <int kTasks>
cudaError_t launch(std::span<const PageCopyTask> tasks, CopyDirection direction,
                   cudaStream_t stream) noexcept {
  PageCopyBatch<kTasks> batch;
  batch.num_tasks = static_cast<int>(tasks.size());
  int64_t max_bytes = 1;
  for (size_t i = 0; i < tasks.size(); ++i) {
    batch.tasks[i] = tasks[i];
    max_bytes = std::max(max_bytes, tasks[i].num_bytes);
  }
  batch.segments_per_task = static_cast<int>((max_bytes + kSegmentBytes - 1) / kSegmentBytes);
  const int64_t num_items = int64_t{batch.num_tasks} * batch.segments_per_task;
  int64_t num_blocks = kMaxGpuBlocks;
  if (direction != CopyDirection::kInGpu) {
    num_blocks = std::clamp<int64_t>(kLinkBytesInFlight / std::min(max_bytes, kSegmentBytes),
                                     kMinLinkBlocks, kMaxLinkBlocks);
  }
  num_blocks = std::min(num_blocks, num_items);
  page_copy_kernel<kTasks><<<static_cast<unsigned>(num_blocks), kThreads, 0, stream>>>(batch);
  return cudaGetLastError();
}

}  // namespace

int64_t copy_engine_bytes(CopyDirection direction) noexcept {
  return direction == CopyDirection::kInGpu ? kGpuEngineBytes : kLinkEngineBytes;
}

cudaError_t load_page_copy() noexcept {
  cudaFuncAttributes ignored;
  const cudaError_t code = cudaFuncGetAttributes(&ignored, page_copy_kernel<kFewTasks>);
  return code != cudaSuccess ? code : cudaFuncGetAttributes(&ignored, page_copy_kernel<kMaxTasks>);
}

cudaError_t launch_page_copy(std::span<const PageCopyTask> tasks, CopyDirection direction,
                             cudaStream_t stream) noexcept {
  while (!tasks.empty()) {
    const auto now = tasks.first(std::min<size_t>(tasks.size(), kMaxTasks));
    tasks = tasks.subspan(now.size());
    const cudaError_t code = now.size() <= kFewTasks ? launch<kFewTasks>(now, direction, stream)
                                                     : launch<kMaxTasks>(now, direction, stream);
    if (code != cudaSuccess) return code;
  }
  return cudaSuccess;
}

cudaError_t copy_pages(std::span<const PageCopyTask> tasks, CopyDirection direction,
                       cudaStream_t stream) noexcept {
  const int64_t engine_bytes = copy_engine_bytes(direction);
  const auto small = [&](const PageCopyTask& task) { return task.num_bytes < engine_bytes; };
  while (!tasks.empty()) {
    // A stretch of small ones is one kernel.
    const auto end = std::find_if_not(tasks.begin(), tasks.end(), small);
    const auto count = static_cast<size_t>(end - tasks.begin());
    if (count > 0) {
      const cudaError_t code = launch_page_copy(tasks.first(count), direction, stream);
      if (code != cudaSuccess) return code;
      tasks = tasks.subspan(count);
      continue;
    }
    const PageCopyTask& task = tasks.front();
    const cudaError_t code = cudaMemcpyAsync(
        task.dst, task.src, static_cast<size_t>(task.num_bytes), cudaMemcpyDefault, stream);
    if (code != cudaSuccess) {
      (void)cudaGetLastError();
      return code;
    }
    tasks = tasks.subspan(1);
  }
  return cudaSuccess;
}

}  // namespace helicore::kv
