#include "helicore/kv/cuda/gpu_memory.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "helicore/core/cuda/check.h"
#include "helicore/core/error.h"
#include "helicore/kv/cuda/driver_api.h"

namespace helicore::kv {
namespace {

int64_t round_up(int64_t value, int64_t unit) noexcept { return (value + unit - 1) / unit * unit; }

bool means_unsupported(CUresult code) noexcept {
  return code == CUDA_ERROR_NOT_PERMITTED || code == CUDA_ERROR_NOT_SUPPORTED ||
         code == CUDA_ERROR_INVALID_DEVICE || code == CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

ChunkCache::ChunkCache(int device) : device_(device) {
  int can_rdma = 0;
  check_driver(driver_api().get_attribute(
                   &can_rdma, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, device),
               "cuDeviceGetAttribute");
  // The most that others can import first.
  for (const auto kind : {CU_MEM_HANDLE_TYPE_FABRIC, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                          CU_MEM_HANDLE_TYPE_NONE}) {
    for (const bool rdma : {true, false}) {
      if (rdma && can_rdma == 0) continue;
      if (try_kind(kind, rdma)) return;
    }
  }
  throw NotSupported(detail::concat("[kv.cache_device] CUDA device ", device,
                                    " has no virtual memory management"));
}

bool ChunkCache::try_kind(CUmemAllocationHandleType kind, bool rdma) {
  const DriverApi& api = driver_api();
  prop_ = {};
  prop_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop_.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device_};
  prop_.requestedHandleTypes = kind;
  prop_.allocFlags.gpuDirectRDMACapable = rdma ? 1 : 0;
  size_t granularity = 0;
  CUresult code = api.get_granularity(&granularity, &prop_, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  CUmemGenericAllocationHandle chunk = 0;
  if (code == CUDA_SUCCESS) code = api.create(&chunk, granularity, &prop_, 0);
  if (means_unsupported(code)) return false;
  check_driver(code, "cuMemCreate");
  granularity_ = static_cast<int64_t>(granularity);
  give_back(chunk, granularity_);
  return true;
}

ChunkCache::~ChunkCache() { trim(); }

CUmemGenericAllocationHandle ChunkCache::take(int64_t num_bytes) {
  auto& kept = free_[num_bytes];
  if (!kept.empty()) {
    const CUmemGenericAllocationHandle chunk = kept.back();
    kept.pop_back();
    cached_bytes_ -= num_bytes;
    return chunk;
  }
  CUmemGenericAllocationHandle chunk = 0;
  const auto create = [&] {
    return driver_api().create(&chunk, static_cast<size_t>(num_bytes), &prop_, 0);
  };
  CUresult code = create();
  if (code == CUDA_ERROR_OUT_OF_MEMORY && cached_bytes_ > 0) {
    trim();  // chunks of other sizes
    code = create();
  }
  check_driver(code, "cuMemCreate");
  return chunk;
}

void ChunkCache::give_back(CUmemGenericAllocationHandle chunk, int64_t num_bytes) noexcept {
  if (cached_bytes_ + num_bytes > kMaxCachedBytes) {
    log_driver(driver_api().release(chunk), "cuMemRelease");
    return;
  }
  free_[num_bytes].push_back(chunk);
  cached_bytes_ += num_bytes;
}

void ChunkCache::trim() noexcept {
  for (auto& [size, chunks] : free_) {
    for (const auto chunk : chunks) log_driver(driver_api().release(chunk), "cuMemRelease");
    chunks.clear();
  }
  cached_bytes_ = 0;
}

GpuMemoryPool::GpuMemoryPool(const PoolSpec& spec, std::shared_ptr<ChunkCache> cache)
    : cache_(std::move(cache)),
      max_bytes_(spec.max_bytes),
      chunk_bytes_(round_up(std::max<int64_t>(spec.grain, 1), cache_->granularity())),
      reserved_bytes_(round_up(std::max<int64_t>(spec.max_bytes, 1), chunk_bytes_)) {
  HELICORE_CHECK(max_bytes_ >= 0, "kv.gpu_memory", "max_bytes must be >= 0, got ", max_bytes_);
  check_driver(driver_api().reserve(&address_, static_cast<size_t>(reserved_bytes_), 0, 0, 0),
               "cuMemAddressReserve");
  try {
    resize(spec.num_bytes);
  } catch (...) {
    log_driver(driver_api().free_addresses(address_, static_cast<size_t>(reserved_bytes_)),
               "cuMemAddressFree");
    throw;
  }
}

GpuMemoryPool::~GpuMemoryPool() {
  try {
    const DeviceScope scope(cache_->device());
    if (!chunks_.empty()) cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  } catch (const std::exception& error) {
    log_error(std::string("kv.gpu_memory: ") + error.what());
  }
  unmap_down_to(0);
  log_driver(driver_api().free_addresses(address_, static_cast<size_t>(reserved_bytes_)),
             "cuMemAddressFree");
}

void GpuMemoryPool::resize(int64_t num_bytes) {
  HELICORE_CHECK(num_bytes >= 0 && num_bytes <= max_bytes_, "kv.gpu_memory",
                 "num_bytes must be in [0, ", max_bytes_, "], got ", num_bytes);
  const auto num_chunks = static_cast<size_t>((num_bytes + chunk_bytes_ - 1) / chunk_bytes_);
  const DeviceScope scope(cache_->device());
  if (num_chunks > chunks_.size()) map_up_to(num_chunks);
  if (num_chunks < chunks_.size()) {
    cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    unmap_down_to(num_chunks);
  }
  num_bytes_ = num_bytes;
}

void GpuMemoryPool::map_up_to(size_t num_chunks) {
  const DriverApi& api = driver_api();
  const size_t before = chunks_.size();
  const auto size = static_cast<size_t>(chunk_bytes_);
  chunks_.reserve(num_chunks);
  try {
    while (chunks_.size() < num_chunks) {
      const CUmemGenericAllocationHandle chunk = cache_->take(chunk_bytes_);
      const CUresult code = api.map(address_ + chunks_.size() * size, size, 0, chunk, 0);
      if (code != CUDA_SUCCESS) cache_->give_back(chunk, chunk_bytes_);
      check_driver(code, "cuMemMap");
      chunks_.push_back(chunk);
    }
    CUmemAccessDesc access{};
    access.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = cache_->device()};
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    check_driver(api.set_access(address_ + before * size, (num_chunks - before) * size, &access, 1),
                 "cuMemSetAccess");
  } catch (...) {
    unmap_down_to(before);
    throw;
  }
}

void GpuMemoryPool::unmap_down_to(size_t num_chunks) noexcept {
  const auto size = static_cast<size_t>(chunk_bytes_);
  while (chunks_.size() > num_chunks) {
    log_driver(driver_api().unmap(address_ + (chunks_.size() - 1) * size, size), "cuMemUnmap");
    cache_->give_back(chunks_.back(), chunk_bytes_);
    chunks_.pop_back();
  }
}

}  // namespace helicore::kv
