// Memory of the device whose clock is moved by hand: real bytes for every tier, with a limit, and a
// ledger of what went wrong.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "helicore/core/error.h"
#include "helicore/kv/cache_device.h"

namespace helicore::kv::testing {

inline constexpr int kFakePoison = 0xDB;  // bytes that nothing wrote yet, or that were given back

class FakeUsers;

// What outlives the device: pools may.
struct FakeLedger {
  FakeUsers* users = nullptr;  // null once the device is gone
  int64_t num_bytes = 0;       // in use by all pools
  int64_t max_bytes = INT64_MAX;
  int num_pools = 0;
  std::vector<std::string> violations{};  // what no caller may do
};

// Asks whether a copy that is under way touches [from, to) of a pool.
class FakeUsers {
 public:
  virtual ~FakeUsers() = default;
  [[nodiscard]] virtual bool in_use(const MemoryPool& pool, int64_t from, int64_t to) const = 0;
  // The pool is gone.
  virtual void forget(const MemoryPool& pool) = 0;
  // Whether the next allocation is to fail.
  [[nodiscard]] virtual bool refuse_allocation() = 0;
};

class FakePool final : public MemoryPool {
 public:
  FakePool(const PoolSpec& spec, std::shared_ptr<FakeLedger> ledger)
      : spec_(spec), ledger_(std::move(ledger)) {
    const auto reserved = static_cast<size_t>(std::max<int64_t>(spec.max_bytes, 1));
    void* memory = ::mmap(nullptr, reserved, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw OutOfMemory("[fake] mmap failed");
    bytes_ = static_cast<std::byte*>(memory);
    try {
      resize(spec.num_bytes);
    } catch (...) {
      ::munmap(memory, reserved);
      throw;
    }
    ++ledger_->num_pools;
  }
  ~FakePool() override {
    if (busy(0, num_bytes_)) ledger_->violations.emplace_back("a pool died under a copy");
    if (ledger_->users != nullptr) ledger_->users->forget(*this);
    ledger_->num_bytes -= num_bytes_;
    --ledger_->num_pools;
    ::munmap(bytes_, static_cast<size_t>(std::max<int64_t>(spec_.max_bytes, 1)));
  }

  int64_t num_bytes() const noexcept override { return num_bytes_; }
  void resize(int64_t num_bytes) override {
    HELICORE_CHECK(num_bytes >= 0 && num_bytes <= spec_.max_bytes, "fake.resize",
                   "num_bytes must be in [0, ", spec_.max_bytes, "], got ", num_bytes);
    const int64_t more = num_bytes - num_bytes_;
    if (more > 0) {
      if ((ledger_->users != nullptr && ledger_->users->refuse_allocation()) ||
          ledger_->num_bytes + more > ledger_->max_bytes) {
        throw OutOfMemory(detail::concat("[fake] no memory for ", more, " bytes"));
      }
    } else if (busy(num_bytes, num_bytes_)) {
      ledger_->violations.emplace_back("a pool shrank under a copy");
    }
    std::memset(bytes_ + std::min(num_bytes, num_bytes_), kFakePoison,
                static_cast<size_t>(std::abs(more)));
    ledger_->num_bytes += more;
    num_bytes_ = num_bytes;
  }
  std::byte* data() const noexcept override {
    return spec_.tier == CacheTier::kDisk ? nullptr : bytes_;
  }
  // Of every tier, files too: for oracles.
  [[nodiscard]] std::byte* bytes() const noexcept { return bytes_; }
  [[nodiscard]] const PoolSpec& spec() const noexcept { return spec_; }
  [[nodiscard]] CacheTier tier() const noexcept { return spec_.tier; }

 private:
  [[nodiscard]] bool busy(int64_t from, int64_t to) const {
    return ledger_->users != nullptr && ledger_->users->in_use(*this, from, to);
  }

  PoolSpec spec_;
  std::shared_ptr<FakeLedger> ledger_;
  std::byte* bytes_ = nullptr;
  int64_t num_bytes_ = 0;
};

[[nodiscard]] inline const FakePool& fake_pool(const MemoryPool& pool) {
  return static_cast<const FakePool&>(pool);
}

}  // namespace helicore::kv::testing
