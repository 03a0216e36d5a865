// The CPU build's twin of cuda_device.cpp.
#include "helicore/core/error.h"
#include "helicore/kv/cuda/cuda_device.h"

namespace helicore::kv {

std::unique_ptr<CacheDevice> make_cuda_device(const CacheDeviceConfig&) {
  throw NotSupported(
      "[kv.cache_device] this build has no CUDA; build with nvcc on PATH (CMake option "
      "HELICORE_CUDA=ON)");
}

}  // namespace helicore::kv
