// The CPU build's twin: whatever would make device memory refuses.
#include "helicore/comm/cuda/all_reduce.h"
#include "helicore/comm/cuda/device_memory.h"
#include "helicore/core/error.h"

namespace helicore::comm::cuda {
namespace {

[[noreturn]] void refuse() {
  throw NotSupported(
      "[comm.DeviceCommunicator] this build has no CUDA kernels; build with nvcc on PATH (CMake "
      "option HELICORE_CUDA=ON)");
}

}  // namespace

std::vector<std::unique_ptr<SymmetricMemory>> make_local_device_memory(int /*device*/,
                                                                       int /*world_size*/,
                                                                       size_t /*num_bytes*/) {
  refuse();
}

HostWord::HostWord() { refuse(); }
HostWord::~HostWord() = default;
uint32_t HostWord::value() const noexcept { return 0; }

void launch_all_reduce(const AllReduceParams& /*params*/,
                       const quant::cuda::EpilogueParams& /*epilogue*/, DType /*dtype*/,
                       const quant::cuda::RowShape& /*shape*/, Stream /*stream*/) {
  refuse();
}
void launch_clear(int /*device*/, std::byte* /*rank*/, int64_t /*num_packets*/) { refuse(); }

}  // namespace helicore::comm::cuda
