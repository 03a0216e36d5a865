#include "helicore/kv/timelines.h"

#include <sys/mman.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "helicore/core/error.h"

namespace helicore::kv {
namespace {

constexpr int kSpins = 200;  // looks at a counter that a GPU moves before the thread sleeps
constexpr auto kPollPeriod = std::chrono::microseconds(20);

}  // namespace

Timelines::Timelines() : polled_(false), owned_(true) {
  void* memory = ::mmap(nullptr, kNumBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw OutOfMemory(detail::concat("[kv.timelines] mmap of ", kNumBytes,
                                     " bytes failed: ", std::strerror(errno)));
  }
  counters_ = static_cast<uint64_t*>(memory);
}

Timelines::~Timelines() {
  if (owned_) ::munmap(counters_, kNumBytes);
}

uint32_t Timelines::make() {
  const std::scoped_lock lock(mutex_);
  const uint32_t timeline = size_.load(std::memory_order_relaxed);
  if (timeline == TimePoint::kMaxTimelines) {
    throw OutOfMemory(detail::concat("[kv.timelines] all ", timeline, " timelines are in use"));
  }
  size_.store(timeline + 1, std::memory_order_release);
  return timeline;
}

void Timelines::advance(TimePoint point) noexcept {
  std::atomic_ref counter(counters_[point.timeline()]);
  uint64_t now = counter.load();
  while (now < point.value() && !counter.compare_exchange_weak(now, point.value())) {
  }
  // NOTE: a waiter counts itself before it looks at the counter, so either it sees the new value
  // or this sees the waiter.
  if (num_waiting_.load() == 0) return;
  {
    const std::scoped_lock lock(mutex_);
  }
  advanced_.notify_all();
}

void Timelines::wait(TimePoint point) {
  if (reached(point)) return;
  if (polled_) {
    for (int i = 0; i < kSpins; ++i) {
      if (reached(point)) return;
      std::this_thread::yield();
    }
    while (!reached(point)) std::this_thread::sleep_for(kPollPeriod);
    return;
  }
  num_waiting_.fetch_add(1);
  {
    std::unique_lock lock(mutex_);
    advanced_.wait(lock, [&] { return reached(point); });
  }
  num_waiting_.fetch_sub(1);
}

}  // namespace helicore::kv
