// What the process knows about CUDA, callable in every build: without CUDA there are zero devices
// (no_cuda.cpp).
#pragma once

#include <cstdint>
#include <string>

namespace helicore::cuda {

// True when this build holds CUDA kernels.
[[nodiscard]] bool compiled() noexcept;

// Devices that a kernel could run on now; 0 without a GPU, without a driver or in a CPU build.
// Never throws.
[[nodiscard]] int device_count() noexcept;

struct DeviceProperties {
  std::string name;
  int compute_major = 0;
  int compute_minor = 0;
  int num_sms = 0;
  int64_t total_bytes = 0;
  int64_t l2_bytes = 0;
  int max_shared_bytes_per_block = 0;  // opt-in limit
};

// Throws InvalidArgument for an index outside [0, device_count()).
[[nodiscard]] DeviceProperties device_properties(int index);

// num_sms of them, remembered: for every call of a kernel.
[[nodiscard]] int num_multiprocessors(int index);

}  // namespace helicore::cuda
