// The device of a CPU: the hot level is host memory, below it are host memory and disk. The
// caller's own thread is the default stream.
#pragma once

#include <memory>
#include <vector>

#include "helicore/kv/cache_device.h"
#include "helicore/kv/copy_engine.h"
#include "helicore/kv/point_tracker.h"
#include "helicore/kv/timelines.h"

namespace helicore::kv {

// Threads: as CacheDevice says.
class CpuDevice final : public CacheDevice {
 public:
  // Batches in memory are copied by the caller's thread, which holds the manager's lock, when
  // nothing has to be waited for: so many bytes in an operation at most.
  static constexpr int64_t kInlineBytes = int64_t{256} << 10;

  // `io`: what moves bytes to and from files, for num_file_lanes * FileCopies::kRequestsPerLane
  // requests at once; null: made as the config says.
  explicit CpuDevice(const CacheDeviceConfig& config, std::unique_ptr<AsyncIo> io = nullptr);
  ~CpuDevice() override = default;

  [[nodiscard]] DeviceType type() const noexcept override { return DeviceType::kCpu; }
  [[nodiscard]] bool supports(CacheTier tier, int level) const noexcept override;
  [[nodiscard]] int64_t grain(CacheTier tier, int64_t quota) const noexcept override;
  [[nodiscard]] std::unique_ptr<MemoryPool> make_pool(const PoolSpec& spec) override;

  void begin_operation() noexcept override { inline_bytes_left_ = kInlineBytes; }
  [[nodiscard]] TimePoint record(StreamHandle stream) override;
  void wait(StreamHandle stream, std::span<const TimePoint> points) override;
  [[nodiscard]] bool reached(TimePoint point) const noexcept override;
  [[nodiscard]] bool is_waitable(TimePoint point) const noexcept override;
  void synchronize(TimePoint point) override;
  [[nodiscard]] TimePoint join(TimePoint a, TimePoint b) override;

  [[nodiscard]] TimePoint copy(std::span<const CopyTask> tasks,
                               std::span<const TimePoint> after) override;
  void copy_on(StreamHandle stream, std::span<const CopyTask> tasks) override;

  [[nodiscard]] uint64_t num_failures() const noexcept override;
  [[nodiscard]] std::vector<uint64_t> take_failures() override;
  [[nodiscard]] CopyCounters counters() const override;
  [[nodiscard]] int64_t bytes_in_flight() const noexcept override;

  [[nodiscard]] StreamHandle make_step_stream() override;
  uint64_t submit_step(StreamHandle stream) override;
  void complete_step(StreamHandle stream, uint64_t step) override;

 private:
  [[nodiscard]] TimePoint submit(std::span<const CopyTask> tasks, std::vector<TimePoint> after);

  const CacheDeviceConfig config_;
  Timelines timelines_;
  PointTracker tracker_{timelines_};
  CopyCounters counters_;
  int64_t inline_bytes_left_ = kInlineBytes;  // of this operation
  CopyEngine engine_;                         // last: its threads end first
};

// What every device checks of a task. Throws InvalidArgument.
void check_copy_task(const CopyTask& task);
// The engine that a config asks for.
[[nodiscard]] CopyEngineOptions copy_engine_options(const CacheDeviceConfig& config) noexcept;

}  // namespace helicore::kv
