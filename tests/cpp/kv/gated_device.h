// A device around another one that stops whoever copies or waits on the caller's own thread, until
// the test opens the gate. While it is shut no copy is done, as if the device were slow.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>

#include "kv/forwarding_device.h"

namespace helicore::kv::testing {

class Gate {
 public:
  void shut() {
    const std::scoped_lock lock(mutex_);
    shut_ = true;
  }
  void open() {
    const std::scoped_lock lock(mutex_);
    shut_ = false;
    changed_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    if (!shut_) return;
    ++num_stopped_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return !shut_; });
    --num_stopped_;
  }
  [[nodiscard]] bool is_shut() {
    const std::scoped_lock lock(mutex_);
    return shut_;
  }
  // A thread that may have come to it has ended.
  void leave() {
    const std::scoped_lock lock(mutex_);
    ++num_left_;
    changed_.notify_all();
  }
  // Blocks until so many threads stand before it or have left; how many stand there.
  int await(int num_threads) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return num_stopped_ + num_left_ >= num_threads; });
    return num_stopped_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool shut_ = false;
  int num_stopped_ = 0;
  int num_left_ = 0;
};

class GatedDevice final : public ForwardingDevice {
 public:
  GatedDevice(std::unique_ptr<CacheDevice> inner, Gate& gate)
      : ForwardingDevice(std::move(inner)), gate_(gate) {}

  [[nodiscard]] bool reached(TimePoint point) const noexcept override {
    return !gate_.is_shut() && inner_->reached(point);
  }
  void wait(StreamHandle stream, std::span<const TimePoint> points) override {
    gate_.pass();
    inner_->wait(stream, points);
  }
  void synchronize(TimePoint point) override {
    gate_.pass();
    inner_->synchronize(point);
  }
  void copy_on(StreamHandle stream, std::span<const CopyTask> tasks) override {
    gate_.pass();
    inner_->copy_on(stream, tasks);
  }

 private:
  Gate& gate_;
};

}  // namespace helicore::kv::testing
