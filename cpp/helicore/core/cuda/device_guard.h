// The current device of a thread, for a while; included by CUDA sources only.
#pragma once

#include <cuda_runtime_api.h>

#include "helicore/core/cuda/check.h"

namespace helicore::cuda {

class DeviceGuard {
 public:
  // Throws CudaError when there is no such device.
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    check(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceGuard() { (void)cudaSetDevice(before_); }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
};

}  // namespace helicore::cuda
