#include "helicore/kv/cuda/driver_api.h"

#include <cuda_runtime_api.h>

#include <string>

#include "helicore/core/cuda/check.h"
#include "helicore/core/error.h"

namespace helicore::kv {
namespace {

template <typename Fn>
void find(const char* name, unsigned version, Fn& fn) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult status = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t code =
      cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &status);
  if (code != cudaSuccess || status != cudaDriverEntryPointSuccess || found == nullptr) {
    (void)cudaGetLastError();
    throw NotSupported(std::string("[kv.cache_device] the CUDA driver has no ") + name);
  }
  fn = reinterpret_cast<Fn>(found);
}

DriverApi load() {
  DriverApi api;
  find("cuGetErrorName", 6000, api.get_error_name);
  find("cuMemGetAllocationGranularity", 10020, api.get_granularity);
  find("cuMemCreate", 10020, api.create);
  find("cuMemRelease", 10020, api.release);
  find("cuMemAddressReserve", 10020, api.reserve);
  find("cuMemAddressFree", 10020, api.free_addresses);
  find("cuMemMap", 10020, api.map);
  find("cuMemUnmap", 10020, api.unmap);
  find("cuMemSetAccess", 10020, api.set_access);
  find("cuStreamWriteValue64", 11070, api.write_value);
  find("cuStreamWaitValue64", 11070, api.wait_value);
  find("cuDeviceGetAttribute", 2000, api.get_attribute);
  return api;
}

std::string describe(CUresult code, const char* call) {
  const char* name = nullptr;
  if (driver_api().get_error_name(code, &name) != CUDA_SUCCESS || name == nullptr) name = "unknown";
  return detail::concat("[kv.cache_device] ", call, " failed: ", name);
}

}  // namespace

const DriverApi& driver_api() {
  static const DriverApi api = load();
  return api;
}

void check_driver(CUresult code, const char* call) {
  if (code == CUDA_SUCCESS) return;
  if (code == CUDA_ERROR_OUT_OF_MEMORY) throw OutOfMemory(describe(code, call));
  throw CudaError(static_cast<int>(code), describe(code, call));
}

void log_driver(CUresult code, const char* call) noexcept {
  // At the end of the process the driver may have gone before us.
  if (code == CUDA_SUCCESS || code == CUDA_ERROR_DEINITIALIZED) return;
  log_error(std::string("kv.cache_device: ") + call + " failed with code " +
            std::to_string(static_cast<int>(code)));
}

DeviceScope::DeviceScope(int index) {
  int current = 0;
  cuda::check(cudaGetDevice(&current), "cudaGetDevice");
  if (current == index) return;
  cuda::check(cudaSetDevice(index), "cudaSetDevice");
  previous_ = current;
}

DeviceScope::~DeviceScope() {
  if (previous_ >= 0 && cudaSetDevice(previous_) != cudaSuccess) {
    log_error("kv.cache_device: cudaSetDevice failed");
  }
}

}  // namespace helicore::kv
