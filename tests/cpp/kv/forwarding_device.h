// A device around another one, for those that change a part of what it does.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "helicore/kv/cache_device.h"

namespace helicore::kv::testing {

// Does what the inner one does.
class ForwardingDevice : public CacheDevice {
 public:
  explicit ForwardingDevice(std::unique_ptr<CacheDevice> inner) : inner_(std::move(inner)) {}

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
    inner_->wait(stream, points);
  }
  bool reached(TimePoint point) const noexcept override { return inner_->reached(point); }
  bool is_waitable(TimePoint point) const noexcept override { return inner_->is_waitable(point); }
  void synchronize(TimePoint point) override { inner_->synchronize(point); }
  TimePoint join(TimePoint a, TimePoint b) override { return inner_->join(a, b); }
  TimePoint copy(std::span<const CopyTask> tasks, std::span<const TimePoint> after) override {
    return inner_->copy(tasks, after);
  }
  void copy_on(StreamHandle stream, std::span<const CopyTask> tasks) override {
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

 protected:
  std::unique_ptr<CacheDevice> inner_;
};

}  // namespace helicore::kv::testing
