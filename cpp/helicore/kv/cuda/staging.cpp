#include "helicore/kv/cuda/staging.h"

#include <algorithm>

#include "helicore/core/cuda/check.h"
#include "helicore/core/error.h"
#include "helicore/kv/cuda/driver_api.h"
#include "helicore/kv/cuda/gpu_memory.h"

namespace helicore::kv {
namespace {

constexpr int64_t kPageBytes = 4096;

bool ok(cudaError_t code) noexcept {
  if (code != cudaSuccess) (void)cudaGetLastError();
  return code == cudaSuccess;
}

}  // namespace

GpuStaging::GpuStaging(int device, int64_t num_bytes, int num_lanes) noexcept
    : device_(device),
      num_lanes_(num_lanes),
      slot_bytes_(std::clamp(num_bytes / num_lanes / kSlotsPerLane / kPageBytes * kPageBytes,
                             kPageBytes, FileCopies::kMaxRequestBytes)) {}

GpuStaging::~GpuStaging() { close(); }

void GpuStaging::close() noexcept {
  for (Lane& lane : lanes_) {
    for (const cudaEvent_t event : lane.marks) (void)cudaEventDestroy(event);
    if (lane.stream != nullptr) (void)cudaStreamDestroy(lane.stream);
  }
  lanes_.clear();
  if (buffer_ != nullptr) (void)cudaFreeHost(buffer_);
  buffer_ = nullptr;
}

void GpuStaging::open() {
  if (buffer_ != nullptr) return;
  const DeviceScope scope(device_);
  try {
    void* memory = nullptr;
    cuda::check(
        cudaHostAlloc(&memory, static_cast<size_t>(slot_bytes_ * kSlotsPerLane * num_lanes_),
                      cudaHostAllocPortable | cudaHostAllocMapped),
        "cudaHostAlloc of staging buffers");
    buffer_ = static_cast<std::byte*>(memory);
    int least = 0, greatest = 0;
    cuda::check(cudaDeviceGetStreamPriorityRange(&least, &greatest),
                "cudaDeviceGetStreamPriorityRange");
    lanes_.resize(static_cast<size_t>(num_lanes_));
    for (Lane& lane : lanes_) {
      cuda::check(cudaStreamCreateWithPriority(&lane.stream, cudaStreamNonBlocking, greatest),
                  "cudaStreamCreateWithPriority");
      for (int i = 0; i < kSlotsPerLane; ++i) {
        cudaEvent_t event = nullptr;
        cuda::check(
            cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync),
            "cudaEventCreateWithFlags");
        lane.marks.push_back(event);
      }
    }
  } catch (...) {
    close();
    throw;
  }
}

bool GpuStaging::owns(const MemoryPool& pool) const noexcept {
  return dynamic_cast<const GpuMemoryPool*>(&pool) != nullptr;
}

std::byte* GpuStaging::slot(int lane, int index) const noexcept {
  return buffer_ + (int64_t{lane} * kSlotsPerLane + index) * slot_bytes_;
}

bool GpuStaging::copy(int lane, std::byte* dst, const std::byte* src, int64_t num_bytes) noexcept {
  lanes_[static_cast<size_t>(lane)].gathered.push_back({dst, src, num_bytes});
  return true;
}

bool GpuStaging::mark(int lane, int index) noexcept {
  Lane& mine = lanes_[static_cast<size_t>(lane)];
  bool good = ok(cudaSetDevice(device_));
  if (!mine.gathered.empty()) {
    const std::byte* first = buffer_;
    const std::byte* last = slot(num_lanes_, 0);
    const std::byte* src = mine.gathered.front().src;
    const auto direction =
        src >= first && src < last ? CopyDirection::kToGpu : CopyDirection::kFromGpu;
    good = good && ok(copy_pages(mine.gathered, direction, mine.stream));
    mine.gathered.clear();
  }
  return ok(cudaEventRecord(mine.marks[static_cast<size_t>(index)], mine.stream)) && good;
}

bool GpuStaging::wait(int lane, int index) noexcept {
  return ok(cudaSetDevice(device_)) &&
         ok(cudaEventSynchronize(
             lanes_[static_cast<size_t>(lane)].marks[static_cast<size_t>(index)]));
}

}  // namespace helicore::kv
