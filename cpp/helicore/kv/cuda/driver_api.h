// The calls of the CUDA driver that the cache needs, found at run time: nothing links the driver,
// so that one binary runs with and without it. Included by CUDA sources only.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>

namespace helicore::kv {

struct DriverApi {
  PFN_cuGetErrorName_v6000 get_error_name = nullptr;
  PFN_cuMemGetAllocationGranularity_v10020 get_granularity = nullptr;
  PFN_cuMemCreate_v10020 create = nullptr;
  PFN_cuMemRelease_v10020 release = nullptr;
  PFN_cuMemAddressReserve_v10020 reserve = nullptr;
  PFN_cuMemAddressFree_v10020 free_addresses = nullptr;
  PFN_cuMemMap_v10020 map = nullptr;
  PFN_cuMemUnmap_v10020 unmap = nullptr;
  PFN_cuMemSetAccess_v10020 set_access = nullptr;
  PFN_cuStreamWriteValue64_v11070 write_value = nullptr;
  PFN_cuStreamWaitValue64_v11070 wait_value = nullptr;
  PFN_cuDeviceGetAttribute_v2000 get_attribute = nullptr;
};

// Throws NotSupported naming the call that the driver lacks.
[[nodiscard]] const DriverApi& driver_api();
// Throws OutOfMemory for a lack of memory, else CudaError naming `call`, unless `code` is success.
void check_driver(CUresult code, const char* call);
// For destructors: logs instead.
void log_driver(CUresult code, const char* call) noexcept;

// Makes a device the calling thread's current one for a scope.
class DeviceScope {
 public:
  explicit DeviceScope(int index);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int previous_ = -1;  // to be restored; -1: nothing to do
};

}  // namespace helicore::kv
