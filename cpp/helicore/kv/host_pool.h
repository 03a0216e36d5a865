// One pool of host memory: an anonymous private mapping. Its address never moves and pages are
// touched on first use.
#pragma once

#include <cstddef>
#include <cstdint>

namespace helicore::kv {

// RAII over mmap. 4096-byte aligned, zero until first written.
class HostPool {
 public:
  // Throws OutOfMemory naming the size when the system refuses.
  explicit HostPool(int64_t num_bytes);
  ~HostPool();
  HostPool(HostPool&& other) noexcept;
  HostPool& operator=(HostPool&&) = delete;
  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] int64_t num_bytes() const noexcept { return num_bytes_; }

 private:
  std::byte* data_ = nullptr;
  int64_t num_bytes_ = 0;
};

}  // namespace helicore::kv
