// The machine below a replay: it has no memory, for nobody reads the bytes, and every copy is done
// when someone asks. What the recorded calls met of a device that was busy, or that failed, comes
// from the log, so that a replay needs neither the memory nor the disks of the original. Internal.
#pragma once

#include <memory>
#include <vector>

#include "helicore/kv/cache_device.h"
#include "helicore/kv/operation_sink.h"

namespace helicore::kv {

class ReplayDevice final : public CacheDevice {
 public:
  // `type`: of the original, whose bookkeeping differs in what a failed copy takes along. `grains`
  // of the levels, hot first; of levels beyond them the default.
  ReplayDevice(DeviceType type, std::vector<int64_t> grains);

  void set_sink(const OperationSink* sink) noexcept { sink_ = sink; }
  // For the next operation: stage, count, tags; and again.
  void prepare(std::vector<int64_t> lost, bool is_held_back) noexcept;

  [[nodiscard]] DeviceType type() const noexcept override { return type_; }
  [[nodiscard]] bool supports(CacheTier, int) const noexcept override { return true; }
  // Levels ask once each, hot first.
  [[nodiscard]] int64_t grain(CacheTier tier, int64_t quota) const noexcept override;
  [[nodiscard]] std::unique_ptr<MemoryPool> make_pool(const PoolSpec& spec) override;

  [[nodiscard]] TimePoint record(StreamHandle stream) override;
  void wait(StreamHandle stream, std::span<const TimePoint> points) override;
  // Waits for what ends by itself.
  [[nodiscard]] bool reached(TimePoint point) const noexcept override;
  [[nodiscard]] bool is_waitable(TimePoint point) const noexcept override;
  void synchronize(TimePoint point) override;
  [[nodiscard]] TimePoint join(TimePoint a, TimePoint b) override;
  [[nodiscard]] TimePoint copy(std::span<const CopyTask> tasks,
                               std::span<const TimePoint> after) override;
  void copy_on(StreamHandle stream, std::span<const CopyTask> tasks) override;

  [[nodiscard]] uint64_t num_failures() const noexcept override;
  [[nodiscard]] std::vector<uint64_t> take_failures() override;
  [[nodiscard]] CopyCounters counters() const override { return {}; }
  [[nodiscard]] int64_t bytes_in_flight() const noexcept override {
    return is_held_back_ ? INT64_MAX : 0;
  }
  [[nodiscard]] StreamHandle make_step_stream() override;
  uint64_t submit_step(StreamHandle stream) override;
  void complete_step(StreamHandle stream, uint64_t step) override;

 private:
  [[nodiscard]] bool is_due() const noexcept;

  DeviceType type_;
  std::unique_ptr<CacheDevice> order_;  // points, joins and step streams
  std::vector<int64_t> grains_;
  mutable size_t num_grains_ = 0;  // that were asked for
  const OperationSink* sink_ = nullptr;
  std::vector<int64_t> lost_;
  uint64_t num_taken_ = 0;
  bool is_held_back_ = false;
};

}  // namespace helicore::kv
