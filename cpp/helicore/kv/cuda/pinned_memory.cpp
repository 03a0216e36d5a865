#include "helicore/kv/cuda/pinned_memory.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <string>

#include "helicore/core/cuda/check.h"
#include "helicore/core/error.h"
#include "helicore/kv/cuda/driver_api.h"

namespace helicore::kv {
namespace {

constexpr int64_t kPageBytes = 4096;

int64_t round_up(int64_t value) noexcept {
  return (value + kPageBytes - 1) / kPageBytes * kPageBytes;
}

// True when kernels can use the host's own address.
bool try_register(std::byte* data, int64_t num_bytes) noexcept {
  const cudaError_t code = cudaHostRegister(data, static_cast<size_t>(num_bytes),
                                            cudaHostRegisterPortable | cudaHostRegisterMapped);
  if (code != cudaSuccess) {
    (void)cudaGetLastError();
    return false;
  }
  void* seen = nullptr;
  if (cudaHostGetDevicePointer(&seen, data, 0) == cudaSuccess && seen == data) return true;
  (void)cudaGetLastError();
  (void)cudaHostUnregister(data);
  return false;
}

void tell_once() noexcept {
  static std::atomic<bool> told{false};
  if (!told.exchange(true)) {
    log_error("kv.pinned_memory: the driver refuses to pin host memory; copies will be slower");
  }
}

}  // namespace

PinnedMemoryPool::PinnedMemoryPool(const PoolSpec& spec, const HostMemoryOptions& options,
                                   int device, std::shared_ptr<std::mutex> issuing)
    : memory_(spec, options), device_(device), issuing_(std::move(issuing)) {
  const DeviceScope scope(device_);
  register_up_to(round_up(spec.num_bytes));
}

PinnedMemoryPool::~PinnedMemoryPool() { unregister_down_to(0); }

int64_t PinnedMemoryPool::piece_end(int64_t offset) const noexcept {
  const auto after = std::upper_bound(
      pieces_.begin(), pieces_.end(), offset,
      [](int64_t value, const std::pair<int64_t, int64_t>& piece) { return value < piece.second; });
  return after == pieces_.end() ? num_bytes() : after->second;
}

void PinnedMemoryPool::resize(int64_t num_bytes) {
  const DeviceScope scope(device_);
  const int64_t old_end = round_up(memory_.num_bytes());
  const int64_t new_end = round_up(num_bytes);
  if (new_end >= old_end) {
    memory_.resize(num_bytes);
    register_up_to(new_end);
    return;
  }
  HELICORE_CHECK(num_bytes >= 0, "kv.pinned_memory", "num_bytes must be >= 0, got ", num_bytes);
  // Registered memory can't be given back, and a piece is registered as a whole.
  const std::scoped_lock lock(*issuing_);
  cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  unregister_down_to(new_end);
  memory_.resize(num_bytes);
  register_up_to(new_end);
}

void PinnedMemoryPool::register_up_to(int64_t end) {
  int64_t from = pieces_.empty() ? 0 : pieces_.back().second;
  while (pinned_ && from < end) {
    const int64_t to = std::min(end, from + kMaxPieceBytes);
    pinned_ = try_register(memory_.data() + from, to - from);
    if (pinned_) pieces_.emplace_back(from, to);
    from = to;
  }
  if (!pinned_) tell_once();
}

void PinnedMemoryPool::unregister_down_to(int64_t end) noexcept {
  while (!pieces_.empty() && pieces_.back().second > end) {
    const cudaError_t code = cudaHostUnregister(memory_.data() + pieces_.back().first);
    if (code != cudaSuccess && code != cudaErrorCudartUnloading) {
      (void)cudaGetLastError();
      log_error("kv.pinned_memory: cudaHostUnregister failed");
    }
    pieces_.pop_back();
  }
}

}  // namespace helicore::kv
