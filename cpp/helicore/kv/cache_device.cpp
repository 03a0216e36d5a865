#include "helicore/kv/cache_device.h"

#include <algorithm>
#include <bit>

#include "helicore/core/error.h"
#include "helicore/kv/cpu_device.h"
#include "helicore/kv/cuda/cuda_device.h"

namespace helicore::kv {

void CacheDeviceConfig::validate() const {
  const char* where = "kv.cache_device";
  HELICORE_CHECK(index >= 0, where, "index must be >= 0, got ", index);
  HELICORE_CHECK(type == DeviceType::kCuda || index == 0, where,
                 "index must be 0 for the CPU, got ", index);
  HELICORE_CHECK(num_copy_threads >= 0 && num_copy_threads <= 256, where,
                 "num_copy_threads must be in 0..256, got ", num_copy_threads);
  HELICORE_CHECK(num_file_lanes >= 1 && num_file_lanes <= 64, where,
                 "num_file_lanes must be in 1..64, got ", num_file_lanes);
  HELICORE_CHECK(num_io_threads >= 1 && num_io_threads <= 256, where,
                 "num_io_threads must be in 1..256, got ", num_io_threads);
  HELICORE_CHECK(num_fault_threads >= 0 && num_fault_threads <= 256, where,
                 "num_fault_threads must be in 0..256, got ", num_fault_threads);
  HELICORE_CHECK(staging_bytes >= int64_t{1} << 20, where, "staging_bytes must be >= 1 MiB, got ",
                 staging_bytes);
}

int64_t default_grain(CacheTier tier, int64_t quota) noexcept {
  constexpr int64_t kMiB = int64_t{1} << 20;
  if (tier == CacheTier::kHostMem) return 4096;
  if (tier == CacheTier::kDisk) return 2 * kMiB;
  const auto num_gib = static_cast<uint64_t>(std::max<int64_t>(quota, 0) >> 30);
  return 2 * kMiB << std::clamp(static_cast<int>(std::bit_width(num_gib)) - 1, 0, 4);
}

std::unique_ptr<CacheDevice> make_cache_device(const CacheDeviceConfig& config) {
  config.validate();
  if (config.type == DeviceType::kCpu) return std::make_unique<CpuDevice>(config);
  return make_cuda_device(config);
}

}  // namespace helicore::kv
