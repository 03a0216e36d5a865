// The counters behind points in time: an array of 64-bit values that never moves, so that a GPU, an
// I/O thread and the caller's step loop can move one each while others read it with one load.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "helicore/kv/timeline.h"

namespace helicore::kv {

// Threads: every call from any thread.
class Timelines {
 public:
  static constexpr int64_t kNumBytes = int64_t{TimePoint::kMaxTimelines} * sizeof(uint64_t);

  // Counters in memory of its own. Throws OutOfMemory.
  Timelines();
  // Counters in `counters`: kMaxTimelines zeros that outlive this and that something which can't
  // wake a thread, such as a GPU, may raise: wait() looks at them every few microseconds.
  explicit Timelines(uint64_t* counters) noexcept : counters_(counters), polled_(true) {}
  ~Timelines();
  Timelines(const Timelines&) = delete;
  Timelines& operator=(const Timelines&) = delete;

  // A new timeline at 0. Throws OutOfMemory when kMaxTimelines are in use.
  [[nodiscard]] uint32_t make();
  [[nodiscard]] uint32_t size() const noexcept { return size_.load(std::memory_order_acquire); }
  [[nodiscard]] bool polled() const noexcept { return polled_; }

  [[nodiscard]] uint64_t value(uint32_t timeline) const noexcept {
    return std::atomic_ref(counters_[timeline]).load();
  }
  [[nodiscard]] bool reached(TimePoint point) const noexcept {
    return value(point.timeline()) >= point.value();
  }
  // Raises the timeline to at least the point's value and wakes who waits.
  void advance(TimePoint point) noexcept;
  // Blocks until the point is reached.
  void wait(TimePoint point);
  // Where the counter of a timeline lies.
  [[nodiscard]] uint64_t* counter(uint32_t timeline) const noexcept { return counters_ + timeline; }

 private:
  uint64_t* counters_ = nullptr;
  const bool polled_;
  bool owned_ = false;
  std::atomic<uint32_t> size_{0};
  std::atomic<int> num_waiting_{0};
  std::mutex mutex_;
  std::condition_variable advanced_;
};

}  // namespace helicore::kv
