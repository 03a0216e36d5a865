// A device around another one that stops whoever copies or waits on the caller's own thread, until
// the test opens the gate.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "helicore/kv/cache_device.h"

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

class GatedDevice final : public CacheDevice {
 public:
  GatedDevice(std::unique_ptr<CacheDevice> inner, Gate& gate)
      : inner_(std::move(inner)), gate_(gate) {}

  DeviceType type() const noexcept override { return inner_->type(); }
  bool supports(CacheTier tier, int level) const noexcept override {
    return inner_->supports(tier, level);
  }
  int64_t grain(CacheTier tier, int64_t quota) const noexcept override {
    return inner_->grain(tier, quota);
  }
  std::unique_ptr<MemoryPool> make_pool(const PoolSpec& spec) override {
    return inner_->make_pool(spec);
  }
  void begin_operation() noexcept override { inner_->begin_operation(); }
  TimePoint record(StreamHandle stream) override { return inner_->record(stream); }
  void wait(StreamHandle stream, std::span<const TimePoint> points) override {
    gate_.pass();
    inner_->wait(stream, points);
  }
  bool reached(TimePoint point) const noexcept override { return inner_->reached(point); }
  bool is_waitable(TimePoint point) const noexcept override { return inner_->is_waitable(point); }
  void synchronize(TimePoint point) override {
    gate_.pass();
    inner_->synchronize(point);
  }
  TimePoint join(TimePoint a, TimePoint b) override { return inner_->join(a, b); }
  TimePoint copy(std::span<const CopyTask> tasks, std::span<const TimePoint> after) override {
    return inner_->copy(tasks, after);
  }
  void copy_on(StreamHandle stream, std::span<const CopyTask> tasks) override {
    gate_.pass();
    inner_->copy_on(stream, tasks);
  }
  uint64_t num_failures() const noexcept override { return inner_->num_failures(); }
  std::vector<uint64_t> take_failures() override { return inner_->take_failures(); }
  CopyCounters counters() const override { return inner_->counters(); }
  int64_t bytes_in_flight() const noexcept override { return inner_->bytes_in_flight(); }
  StreamHandle make_step_stream() override { return inner_->make_step_stream(); }
  uint64_t submit_step(StreamHandle stream) override { return inner_->submit_step(stream); }
  void complete_step(StreamHandle stream, uint64_t step) override {
    inner_->complete_step(stream, step);
  }

 private:
  std::unique_ptr<CacheDevice> inner_;
  Gate& gate_;
};

}  // namespace helicore::kv::testing
