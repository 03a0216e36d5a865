// The CPU build's twin of runtime.cpp: no devices.
#include "helicore/core/cuda/runtime.h"
#include "helicore/core/error.h"

namespace helicore::cuda {

bool compiled() noexcept { return false; }

int device_count() noexcept { return 0; }

DeviceProperties device_properties(int index) {
  detail::throw_invalid("core.cuda", detail::concat("device index ", index,
                                                    " asked for, but this build has no CUDA"));
}

int num_multiprocessors(int index) { return device_properties(index).num_sms; }

}  // namespace helicore::cuda
