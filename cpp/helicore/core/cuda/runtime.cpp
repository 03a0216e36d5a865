#include "helicore/core/cuda/runtime.h"

#include <cuda_runtime_api.h>

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

void check(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  throw CudaError(static_cast<int>(code), detail::concat(call, " failed: ", cudaGetErrorName(code),
                                                         ": ", cudaGetErrorString(code)));
}

void check_launch(const char* kernel) { check(cudaGetLastError(), kernel); }

}  // namespace helicore::cuda
