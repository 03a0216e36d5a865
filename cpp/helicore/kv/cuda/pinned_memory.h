// Host memory that a GPU can reach: grows in place, registered piece by piece. Included by CUDA
// sources only.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "helicore/kv/memory_pools.h"

namespace helicore::kv {

// Threads: one at a time. Shrinking waits for the device: pieces that stay in part are registered
// anew, which no copy may see.
class PinnedMemoryPool final : public MemoryPool {
 public:
  static constexpr int64_t kMaxPieceBytes = int64_t{1} << 30;  // that is registered at once

  // Throws OutOfMemory. Where the driver refuses to register memory, the pool works unpinned.
  // `issuing` is held by whoever hands copies to the device; shared with the device.
  PinnedMemoryPool(const PoolSpec& spec, const HostMemoryOptions& options, int device,
                   std::shared_ptr<std::mutex> issuing);
  ~PinnedMemoryPool() override;

  [[nodiscard]] int64_t num_bytes() const noexcept override { return memory_.num_bytes(); }
  void resize(int64_t num_bytes) override;
  [[nodiscard]] std::byte* data() const noexcept override { return memory_.data(); }
  // Whether kernels may address all of it.
  [[nodiscard]] bool pinned() const noexcept { return pinned_; }
  // The end of the registered piece that holds `offset`: a copy engine's copy must not cross it.
  [[nodiscard]] int64_t piece_end(int64_t offset) const noexcept;

 private:
  void register_up_to(int64_t end);
  void unregister_down_to(int64_t end) noexcept;

  HostMemoryPool memory_;
  int device_;
  std::shared_ptr<std::mutex> issuing_;
  bool pinned_ = true;
  std::vector<std::pair<int64_t, int64_t>> pieces_;  // [from, to), registered, ascending
};

}  // namespace helicore::kv
