// A CPU that copies nothing on the caller's thread: all copies are made by its own threads, and
// those to and from files fail now and then.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>

#include "helicore/kv/cpu_device.h"
#include "kv/flaky_io.h"
#include "kv/forwarding_device.h"

namespace helicore::kv::testing {

class ThreadedDevice final : public ForwardingDevice {
 public:
  explicit ThreadedDevice(const FlakyPlan& plan) : ForwardingDevice(make(plan)) {
    constexpr int64_t kBytes = CpuDevice::kInlineBytes;
    const PoolSpec spec{.num_bytes = kBytes, .max_bytes = kBytes};
    const auto from = make_pool(spec);
    const auto to = make_pool(spec);
    const CopyTask task{.dst = to.get(), .src = from.get(), .num_bytes = kBytes};
    synchronize(inner_->copy({&task, 1}, {}));
  }
  // What the inner one may copy on the caller's thread was used up above.
  void begin_operation() noexcept override {}
  // Small, so that lower levels fill.
  int64_t grain(CacheTier, int64_t) const noexcept override { return 4096; }

 private:
  static std::unique_ptr<CacheDevice> make(const FlakyPlan& plan) {
    const CacheDeviceConfig config{.num_copy_threads = 2, .use_io_uring = false};
    auto io = make_async_io({.backend = IoBackend::kThreads});
    return std::make_unique<CpuDevice>(config, std::make_unique<FlakyIo>(std::move(io), plan));
  }
};

}  // namespace helicore::kv::testing
