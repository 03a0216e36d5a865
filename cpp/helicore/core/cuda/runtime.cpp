#include "helicore/core/cuda/runtime.h"

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>

#include "helicore/core/cuda/check.h"
#include "helicore/core/error.h"

namespace helicore::cuda {

bool compiled() noexcept { return true; }

int device_count() noexcept {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    (void)cudaGetLastError();  // no GPU or no driver is a normal answer, not an error to carry on
    return 0;
  }
  return count;
}

DeviceProperties device_properties(int index) {
  HELICORE_CHECK(index >= 0 && index < device_count(), "core.cuda", "device index must be in [0, ",
                 device_count(), "), got ", index);
  cudaDeviceProp prop;
  check(cudaGetDeviceProperties(&prop, index), "cudaGetDeviceProperties");
  DeviceProperties out;
  out.name = prop.name;
  out.compute_major = prop.major;
  out.compute_minor = prop.minor;
  out.num_sms = prop.multiProcessorCount;
  out.total_bytes = static_cast<int64_t>(prop.totalGlobalMem);
  out.l2_bytes = prop.l2CacheSize;
  out.max_shared_bytes_per_block = static_cast<int>(prop.sharedMemPerBlockOptin);
  return out;
}

int num_multiprocessors(int index) {
  static std::array<std::atomic<int>, 64> known{};
  if (index < 0 || static_cast<size_t>(index) >= known.size()) {
    return device_properties(index).num_sms;
  }
  std::atomic<int>& count = known[static_cast<size_t>(index)];
  int found = count.load(std::memory_order_relaxed);
  if (found == 0) {
    found = device_properties(index).num_sms;
    count.store(found, std::memory_order_relaxed);
  }
  return found;
}

void check(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  throw CudaError(static_cast<int>(code), detail::concat(call, " failed: ", cudaGetErrorName(code),
                                                         ": ", cudaGetErrorString(code)));
}

void check_launch(const char* kernel) { check(cudaGetLastError(), kernel); }

}  // namespace helicore::cuda
