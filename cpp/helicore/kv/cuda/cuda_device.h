// The device of a GPU: the hot level is its memory, below it are pinned host memory and disk.
// Callable in every build: without CUDA it refuses (no_cuda.cpp).
#pragma once

#include <memory>

#include "helicore/kv/cache_device.h"

namespace helicore::kv {

// Throws NotSupported without CUDA or a GPU that can do it, InvalidArgument for an index out of
// range, CudaError.
[[nodiscard]] std::unique_ptr<CacheDevice> make_cuda_device(const CacheDeviceConfig& config);

}  // namespace helicore::kv
