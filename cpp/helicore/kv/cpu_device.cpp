#include "helicore/kv/cpu_device.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <thread>

#include "helicore/core/error.h"
#include "helicore/kv/memory_pools.h"

namespace helicore::kv {
namespace {

void check_stream(StreamHandle stream) {
  HELICORE_CHECK(stream <= 0, "kv.cpu_device", "stream must be 0 or a step stream on the CPU, got ",
                 stream);
}

}  // namespace

void check_copy_task(const CopyTask& task) {
  const char* where = "kv.copy";
  HELICORE_CHECK(task.dst != nullptr && task.src != nullptr, where, "dst and src must be given");
  HELICORE_CHECK(task.num_bytes >= 0, where, "num_bytes must be >= 0, got ", task.num_bytes);
  HELICORE_CHECK(task.dst_offset >= 0 && task.dst_offset <= task.dst->num_bytes() - task.num_bytes,
                 where, "dst_offset must leave room for ", task.num_bytes, " bytes in a pool of ",
                 task.dst->num_bytes(), ", got ", task.dst_offset);
  HELICORE_CHECK(task.src_offset >= 0 && task.src_offset <= task.src->num_bytes() - task.num_bytes,
                 where, "src_offset must leave room for ", task.num_bytes, " bytes in a pool of ",
                 task.src->num_bytes(), ", got ", task.src_offset);
}

CopyEngineOptions copy_engine_options(const CacheDeviceConfig& config) noexcept {
  const int num_cores = static_cast<int>(std::thread::hardware_concurrency());
  return {.num_copy_threads = config.num_copy_threads > 0 ? config.num_copy_threads
                                                          : std::clamp(num_cores / 2, 1, 4),
          .num_file_lanes = config.num_file_lanes,
          .io = {.backend = config.use_io_uring ? IoBackend::kAuto : IoBackend::kThreads,
                 .num_threads = config.num_io_threads}};
}

CpuDevice::CpuDevice(const CacheDeviceConfig& config, std::unique_ptr<AsyncIo> io)
    : config_((config.validate(), config)),
      engine_(timelines_, copy_engine_options(config), std::move(io)) {}

bool CpuDevice::supports(CacheTier tier, int level) const noexcept {
  return tier == CacheTier::kHostMem || (tier == CacheTier::kDisk && level > kHotLevel);
}

int64_t CpuDevice::grain(CacheTier tier, int64_t quota) const noexcept {
  return default_grain(tier, quota);
}

std::unique_ptr<MemoryPool> CpuDevice::make_pool(const PoolSpec& spec) {
  HELICORE_CHECK(spec.tier != CacheTier::kGpuMem, "kv.cpu_device",
                 "tier must be HOST_MEM or DISK on the CPU, got ", name_of(spec.tier));
  if (spec.tier == CacheTier::kDisk) return std::make_unique<DiskFilePool>(spec);
  return std::make_unique<HostMemoryPool>(
      spec, HostMemoryOptions{.num_fault_threads = config_.num_fault_threads,
                              .huge_pages = config_.huge_pages});
}

TimePoint CpuDevice::record(StreamHandle stream) {
  check_stream(stream);
  return stream == 0 ? TimePoint() : tracker_.newest_step(stream);
}

void CpuDevice::wait(StreamHandle stream, std::span<const TimePoint> points) {
  check_stream(stream);
  for (const TimePoint point : points) timelines_.wait(point);
}

bool CpuDevice::reached(TimePoint point) const noexcept { return timelines_.reached(point); }

bool CpuDevice::is_waitable(TimePoint point) const noexcept { return tracker_.is_waitable(point); }

void CpuDevice::synchronize(TimePoint point) { timelines_.wait(point); }

TimePoint CpuDevice::join(TimePoint a, TimePoint b) {
  if (reached(a)) return b;
  if (reached(b) || a == b) return a;
  const std::array<TimePoint, 2> both{a, b};
  return submit({}, tracker_.unreached(both));
}

TimePoint CpuDevice::submit(std::span<const CopyTask> tasks, std::vector<TimePoint> after) {
  const TimePoint done = tracker_.take(after);
  try {
    engine_.submit(done, tasks, std::move(after));
  } catch (...) {
    tracker_.give_back(done);
    throw;
  }
  return done;
}

TimePoint CpuDevice::copy(std::span<const CopyTask> tasks, std::span<const TimePoint> after) {
  int64_t num_bytes = 0;
  bool in_memory = true;
  for (const CopyTask& task : tasks) {
    check_copy_task(task);
    num_bytes += task.num_bytes;
    in_memory &= task.dst->fd() < 0 && task.src->fd() < 0;
  }
  std::vector<TimePoint> left = tracker_.unreached(after);
  TimePoint done;
  if (left.empty() && in_memory && num_bytes <= inline_bytes_left_) {
    inline_bytes_left_ -= num_bytes;
    copy_on(0, tasks);
  } else if (tasks.empty() && left.size() == 1) {
    done = left.front();
  } else {
    done = submit(tasks, std::move(left));
  }
  if (tasks.empty()) return done;
  ++counters_.num_batches;
  counters_.num_tasks += static_cast<int64_t>(tasks.size());
  counters_.num_bytes += num_bytes;
  return done;
}

void CpuDevice::copy_on(StreamHandle stream, std::span<const CopyTask> tasks) {
  check_stream(stream);
  for (const CopyTask& task : tasks) {
    check_copy_task(task);
    HELICORE_CHECK(task.dst->fd() < 0 && task.src->fd() < 0, "kv.copy_on",
                   "dst and src must be in memory");
  }
  for (const CopyTask& task : tasks) {
    std::memmove(task.dst->data() + task.dst_offset, task.src->data() + task.src_offset,
                 static_cast<size_t>(task.num_bytes));
  }
}

uint64_t CpuDevice::num_failures() const noexcept { return engine_.num_failures(); }

std::vector<uint64_t> CpuDevice::take_failures() { return engine_.take_failures(); }

CopyCounters CpuDevice::counters() const {
  CopyCounters out = counters_;
  out.num_failed = static_cast<int64_t>(engine_.num_failures());
  return out;
}

int64_t CpuDevice::bytes_in_flight() const noexcept { return engine_.bytes_in_flight(); }

StreamHandle CpuDevice::make_step_stream() { return tracker_.make_step_stream(); }

uint64_t CpuDevice::submit_step(StreamHandle stream) { return tracker_.submit_step(stream); }

void CpuDevice::complete_step(StreamHandle stream, uint64_t step) {
  engine_.advance(tracker_.step_point(stream, step));
}

}  // namespace helicore::kv
