#include "helicore/comm/cuda/device_memory.h"

#include <cuda_runtime_api.h>

#include <atomic>

#include "helicore/core/cuda/check.h"
#include "helicore/core/cuda/device_guard.h"
#include "helicore/core/error.h"

namespace helicore::comm::cuda {
namespace {

using helicore::cuda::check;

class Allocation {
 public:
  Allocation(int device, size_t num_bytes) : device_(device) {
    const helicore::cuda::DeviceGuard guard(device);
    check(cudaMalloc(&data_, num_bytes), "cudaMalloc of memory that ranks share");
    check(cudaMemset(data_, 0, num_bytes), "cudaMemset");
  }
  ~Allocation() {
    int before = 0;
    (void)cudaGetDevice(&before);
    (void)cudaSetDevice(device_);
    (void)cudaFree(data_);
    (void)cudaSetDevice(before);
  }
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;
  [[nodiscard]] std::byte* bytes() const noexcept { return static_cast<std::byte*>(data_); }

 private:
  int device_;
  void* data_ = nullptr;
};

class LocalDeviceMemory final : public SymmetricMemory {
 public:
  LocalDeviceMemory(int rank, int world_size, size_t num_bytes, std::shared_ptr<Allocation> all)
      : rank_(rank), world_(world_size), num_bytes_(num_bytes), all_(std::move(all)) {}

  [[nodiscard]] int rank() const noexcept override { return rank_; }
  [[nodiscard]] int world_size() const noexcept override { return world_; }
  [[nodiscard]] size_t num_bytes() const noexcept override { return num_bytes_; }
  [[nodiscard]] std::byte* bytes(int rank) const noexcept override {
    return all_->bytes() + static_cast<size_t>(rank) * num_bytes_;
  }
  [[nodiscard]] std::string why_gone(int /*rank*/) const override { return {}; }

 private:
  int rank_;
  int world_;
  size_t num_bytes_;
  std::shared_ptr<Allocation> all_;
};

}  // namespace

std::vector<std::unique_ptr<SymmetricMemory>> make_local_device_memory(int device, int world_size,
                                                                       size_t num_bytes) {
  constexpr const char* kWhere = "comm.make_local_device_memory";
  constexpr size_t kAlignment = 4096;
  HELICORE_CHECK(world_size >= 1, kWhere, "world_size must be >= 1, got ", world_size);
  HELICORE_CHECK(num_bytes >= 1, kWhere, "num_bytes must be >= 1, got ", num_bytes);
  const size_t each = (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
  auto all = std::make_shared<Allocation>(device, each * static_cast<size_t>(world_size));
  std::vector<std::unique_ptr<SymmetricMemory>> ranks;
  for (int r = 0; r < world_size; ++r) {
    ranks.push_back(std::make_unique<LocalDeviceMemory>(r, world_size, each, all));
  }
  return ranks;
}

HostWord::HostWord() {
  void* memory = nullptr;
  check(cudaHostAlloc(&memory, sizeof(uint32_t), cudaHostAllocMapped | cudaHostAllocPortable),
        "cudaHostAlloc");
  address_ = static_cast<uint32_t*>(memory);
  *address_ = 0;
}

HostWord::~HostWord() { (void)cudaFreeHost(address_); }

uint32_t HostWord::value() const noexcept {
  return std::atomic_ref(*address_).load(std::memory_order_acquire);
}

}  // namespace helicore::comm::cuda
