// Memory of GPUs that several ranks read and write.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "helicore/comm/symmetric_memory.h"

namespace helicore::comm::cuda {

// Ranks that are streams of one process on one GPU. Zeroed. Throws InvalidArgument naming the
// argument, CudaError when the device has no such memory, NotSupported in a build without CUDA.
[[nodiscard]] std::vector<std::unique_ptr<SymmetricMemory>> make_local_device_memory(
    int device, int world_size, size_t num_bytes);

// A word that a GPU writes and the host reads without a call.
class HostWord {
 public:
  HostWord();
  ~HostWord();
  HostWord(const HostWord&) = delete;
  HostWord& operator=(const HostWord&) = delete;
  [[nodiscard]] uint32_t value() const noexcept;
  [[nodiscard]] uint32_t* device_address() const noexcept { return address_; }

 private:
  uint32_t* address_ = nullptr;
};

}  // namespace helicore::comm::cuda
