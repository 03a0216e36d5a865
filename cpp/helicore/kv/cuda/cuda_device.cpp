#include "helicore/kv/cuda/cuda_device.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "helicore/core/cuda/check.h"
#include "helicore/core/cuda/runtime.h"
#include "helicore/core/error.h"
#include "helicore/kv/copy_engine.h"
#include "helicore/kv/cpu_device.h"
#include "helicore/kv/cuda/driver_api.h"
#include "helicore/kv/cuda/gpu_memory.h"
#include "helicore/kv/cuda/page_copy.h"
#include "helicore/kv/cuda/pinned_memory.h"
#include "helicore/kv/cuda/staging.h"
#include "helicore/kv/memory_pools.h"
#include "helicore/kv/point_tracker.h"
#include "helicore/kv/timelines.h"

namespace helicore::kv {
namespace {

// Counters of timelines in pinned memory, which streams write and wait for.
class PinnedCounters {
 public:
  PinnedCounters() {
    void* memory = nullptr;
    cuda::check(
        cudaHostAlloc(&memory, Timelines::kNumBytes, cudaHostAllocPortable | cudaHostAllocMapped),
        "cudaHostAlloc of timelines");
    std::memset(memory, 0, Timelines::kNumBytes);
    data_ = static_cast<uint64_t*>(memory);
  }
  ~PinnedCounters() { (void)cudaFreeHost(data_); }
  PinnedCounters(const PinnedCounters&) = delete;
  PinnedCounters& operator=(const PinnedCounters&) = delete;
  [[nodiscard]] uint64_t* data() const noexcept { return data_; }

 private:
  uint64_t* data_ = nullptr;
};

// A stream of the device's own. NOTE: of the highest priority, which has hardware queues of its
// own: a caller's stream that waits for a point in the queue of default streams can't be in front
// of the work that reaches it.
class OwnStream {
 public:
  OwnStream() {
    int least = 0, greatest = 0;
    cuda::check(cudaDeviceGetStreamPriorityRange(&least, &greatest),
                "cudaDeviceGetStreamPriorityRange");
    cuda::check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest),
                "cudaStreamCreateWithPriority");
  }
  ~OwnStream() { (void)cudaStreamDestroy(stream_); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  [[nodiscard]] cudaStream_t get() const noexcept { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

enum Route : uint8_t { kToGpu, kFromGpu, kInGpu, kInHost, kFiles, kNumRoutes };
// Streams of the device's own: of each direction one for batches that may begin at once and two for
// those that have to wait, behind which no other should stand; then one for joins.
constexpr size_t kStreamsPerDirection = 3;
constexpr size_t kJoins = 3 * kStreamsPerDirection;
constexpr size_t kNumStreams = kJoins + 1;

cudaStream_t as_stream(StreamHandle handle) noexcept {
  return reinterpret_cast<cudaStream_t>(handle);
}

bool is_gpu(const MemoryPool* pool) noexcept { return pool->on_gpu(); }

Route route_of(const CopyTask& task) noexcept {
  if (task.dst->fd() >= 0 || task.src->fd() >= 0) return kFiles;
  const bool to_gpu = is_gpu(task.dst), from_gpu = is_gpu(task.src);
  if (to_gpu) return from_gpu ? kInGpu : kToGpu;
  return from_gpu ? kFromGpu : kInHost;
}

// A batch of one direction, ready for its stream.
struct GpuBatch {
  CopyDirection direction = CopyDirection::kInGpu;
  std::vector<PageCopyTask> tasks{};
  std::vector<uint64_t> tags{};
  std::vector<TimePoint> after{};
  TimePoint done{};
  bool pinned = true;
};

cudaError_t copy_pageable(std::span<const PageCopyTask> tasks, cudaStream_t stream) noexcept {
  for (const PageCopyTask& task : tasks) {
    const cudaError_t code = cudaMemcpyAsync(
        task.dst, task.src, static_cast<size_t>(task.num_bytes), cudaMemcpyDefault, stream);
    if (code != cudaSuccess) return code;
  }
  return cudaSuccess;
}

class CudaDevice final : public CacheDevice {
 public:
  explicit CudaDevice(const CacheDeviceConfig& config)
      : config_(config),
        chunks_(std::make_shared<ChunkCache>(config.index)),
        staging_(config.index, config.staging_bytes, config.num_file_lanes),
        engine_(std::make_unique<CopyEngine>(timelines_, engine_options(), nullptr)) {}

  ~CudaDevice() override {
    int previous = 0;
    (void)cudaGetDevice(&previous);
    (void)cudaSetDevice(config_.index);
    // Work of the engine may start work on streams and the other way round; what still waits once
    // both are idle hangs on steps that nobody completed.
    int64_t before = -1;
    while (engine_->num_waiting() != before) {
      before = engine_->num_waiting();
      engine_->drain();
      (void)cudaDeviceSynchronize();
      engine_->poke();
    }
    engine_.reset();
    if (cudaDeviceSynchronize() != cudaSuccess) log_error("kv.cache_device: the device failed");
    (void)cudaSetDevice(previous);
  }

  DeviceType type() const noexcept override { return DeviceType::kCuda; }
  bool supports(CacheTier tier, int level) const noexcept override {
    return (tier == CacheTier::kGpuMem) == (level == kHotLevel);
  }
  int64_t grain(CacheTier tier, int64_t quota) const noexcept override {
    return default_grain(tier, quota);
  }

  std::unique_ptr<MemoryPool> make_pool(const PoolSpec& spec) override {
    const DeviceScope scope(config_.index);
    if (spec.tier == CacheTier::kGpuMem) return std::make_unique<GpuMemoryPool>(spec, chunks_);
    if (spec.tier == CacheTier::kDisk) {
      staging_.open();
      return std::make_unique<DiskFilePool>(spec);
    }
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    HostMemoryOptions options{.num_fault_threads = config_.num_fault_threads,
                              .huge_pages = config_.huge_pages};
    if (options.num_fault_threads == 0) options.num_fault_threads = std::clamp(cores / 2, 1, 16);
    if (cudaDeviceGetAttribute(&options.numa_node, cudaDevAttrHostNumaId, config_.index) !=
        cudaSuccess) {
      (void)cudaGetLastError();
      options.numa_node = -1;
    }
    return std::make_unique<PinnedMemoryPool>(spec, options, config_.index, issuing_);
  }
  void trim() noexcept override { chunks_->trim(); }

  TimePoint record(StreamHandle handle) override {
    if (handle < 0) return tracker_.newest_step(handle);
    const DeviceScope scope(config_.index);
    Caller& caller = caller_of(handle);
    const TimePoint point(caller.timeline, caller.recorded + 1);
    check_driver(write_value(as_stream(handle), point), "cuStreamWriteValue64");
    ++caller.recorded;
    return point;
  }

  void wait(StreamHandle handle, std::span<const TimePoint> points) override {
    if (handle < 0) {
      for (const TimePoint point : points) timelines_.wait(point);
      return;
    }
    const DeviceScope scope(config_.index);
    const uint32_t own = caller_of(handle).timeline;
    const std::vector<TimePoint> left = tracker_.unreached(points);
    tracker_.depend(own, left);
    for (const TimePoint point : left) {
      if (point.timeline() == own) continue;
      check_driver(wait_value(as_stream(handle), point), "cuStreamWaitValue64");
    }
  }

  bool reached(TimePoint point) const noexcept override { return timelines_.reached(point); }
  bool is_waitable(TimePoint point) const noexcept override { return tracker_.is_waitable(point); }
  void synchronize(TimePoint point) override { timelines_.wait(point); }

  TimePoint join(TimePoint a, TimePoint b) override {
    if (reached(a)) return b;
    if (reached(b) || a == b) return a;
    if (a.timeline() == b.timeline()) return a.value() > b.value() ? a : b;
    const DeviceScope scope(config_.index);
    const std::array<TimePoint, 2> both{a, b};
    return join_all(tracker_.unreached(both));
  }

  TimePoint copy(std::span<const CopyTask> tasks, std::span<const TimePoint> after) override;
  void copy_on(StreamHandle handle, std::span<const CopyTask> tasks) override;

  uint64_t num_failures() const noexcept override { return engine_->num_failures(); }
  std::vector<uint64_t> take_failures() override { return engine_->take_failures(); }
  CopyCounters counters() const override {
    CopyCounters out = counters_;
    out.num_failed = static_cast<int64_t>(engine_->num_failures());
    return out;
  }
  int64_t bytes_in_flight() const noexcept override { return engine_->bytes_in_flight(); }

  StreamHandle make_step_stream() override { return tracker_.make_step_stream(); }
  uint64_t submit_step(StreamHandle stream) override { return tracker_.submit_step(stream); }
  void complete_step(StreamHandle stream, uint64_t step) override {
    engine_->advance(tracker_.step_point(stream, step));
  }

 private:
  struct Caller {
    uint32_t timeline = 0;
    uint64_t recorded = 0;
  };

  CopyEngineOptions engine_options() noexcept {
    CopyEngineOptions options = copy_engine_options(config_);
    options.staging = &staging_;
    return options;
  }
  Caller& caller_of(StreamHandle handle) {
    const auto found = callers_.find(handle);
    if (found != callers_.end()) return found->second;
    return callers_.emplace(handle, Caller{timelines_.make(), 0}).first->second;
  }
  CUdeviceptr address_of(TimePoint point) const noexcept {
    return reinterpret_cast<CUdeviceptr>(timelines_.counter(point.timeline()));
  }
  CUresult write_value(cudaStream_t stream, TimePoint point) const noexcept {
    return driver_api().write_value(stream, address_of(point), point.value(),
                                    CU_STREAM_WRITE_VALUE_DEFAULT);
  }
  CUresult wait_value(cudaStream_t stream, TimePoint point) const noexcept {
    return driver_api().wait_value(stream, address_of(point), point.value(),
                                   CU_STREAM_WAIT_VALUE_GEQ);
  }

  [[nodiscard]] TimePoint join_all(std::vector<TimePoint> points);
  [[nodiscard]] TimePoint copy_by_engine(std::span<const CopyTask> tasks,
                                         std::vector<TimePoint> after);
  [[nodiscard]] TimePoint copy_by_gpu(CopyDirection direction, std::span<const CopyTask> tasks,
                                      std::vector<TimePoint> after);
  [[nodiscard]] size_t stream_for(const GpuBatch& batch) const noexcept;
  void issue(const GpuBatch& batch) noexcept;  // on a thread whose device is this one

  const CacheDeviceConfig config_;
  PinnedCounters pinned_counters_;
  Timelines timelines_{pinned_counters_.data()};
  PointTracker tracker_{timelines_};
  std::shared_ptr<ChunkCache> chunks_;  // with the pools
  GpuStaging staging_;
  std::array<OwnStream, kNumStreams> streams_;
  std::array<TimePoint, kNumStreams> newest_;  // of each stream; under issuing_
  std::unordered_map<StreamHandle, Caller> callers_;
  // Held while copies are handed to streams_; with the pools of host memory.
  std::shared_ptr<std::mutex> issuing_ = std::make_shared<std::mutex>();
  CopyCounters counters_;
  std::unique_ptr<CopyEngine> engine_;
};

// A point of the GPU when all are points of the GPU: nothing but a stream has to see them then.
TimePoint CudaDevice::join_all(std::vector<TimePoint> points) {
  if (points.empty()) return {};
  if (points.size() == 1) return points.front();
  if (!tracker_.roots(points).empty()) return copy_by_engine({}, std::move(points));
  GpuBatch batch{.after = std::move(points)};
  batch.done = tracker_.take(batch.after);
  issue(batch);
  return batch.done;
}

TimePoint CudaDevice::copy(std::span<const CopyTask> tasks, std::span<const TimePoint> after) {
  std::array<std::vector<CopyTask>, kNumRoutes> by_route;
  int64_t num_bytes = 0;
  for (const CopyTask& task : tasks) {
    check_copy_task(task);
    num_bytes += task.num_bytes;
    if (task.num_bytes > 0) by_route[route_of(task)].push_back(task);
  }
  const DeviceScope scope(config_.index);
  const std::vector<TimePoint> left = tracker_.unreached(after);
  std::vector<TimePoint> points;
  for (const Route route : {kFiles, kInHost}) {
    if (!by_route[route].empty()) points.push_back(copy_by_engine(by_route[route], left));
  }
  for (const auto& [route, direction] :
       {std::pair{kToGpu, CopyDirection::kToGpu}, std::pair{kFromGpu, CopyDirection::kFromGpu},
        std::pair{kInGpu, CopyDirection::kInGpu}}) {
    if (!by_route[route].empty()) points.push_back(copy_by_gpu(direction, by_route[route], left));
  }
  if (!tasks.empty()) {
    ++counters_.num_batches;
    counters_.num_tasks += static_cast<int64_t>(tasks.size());
    counters_.num_bytes += num_bytes;
  }
  return join_all(points.empty() ? left : tracker_.unreached(points));
}

TimePoint CudaDevice::copy_by_engine(std::span<const CopyTask> tasks,
                                     std::vector<TimePoint> after) {
  const TimePoint done = tracker_.take(after, true);
  try {
    engine_->submit(done, tasks, std::move(after));
  } catch (...) {
    tracker_.give_back(done);
    throw;
  }
  return done;
}

TimePoint CudaDevice::copy_by_gpu(CopyDirection direction, std::span<const CopyTask> tasks,
                                  std::vector<TimePoint> after) {
  GpuBatch batch{.direction = direction, .after = std::move(after)};
  for (const CopyTask& task : tasks) {
    batch.tags.push_back(task.tag);
    std::byte* dst = task.dst->data() + task.dst_offset;
    const std::byte* src = task.src->data() + task.src_offset;
    const auto* host = direction == CopyDirection::kInGpu
                           ? nullptr
                           : static_cast<const PinnedMemoryPool*>(
                                 direction == CopyDirection::kToGpu ? task.src : task.dst);
    const int64_t offset = direction == CopyDirection::kToGpu ? task.src_offset : task.dst_offset;
    batch.pinned &= host == nullptr || host->pinned();
    for (int64_t at = 0; at < task.num_bytes;) {
      const int64_t end = host == nullptr || !host->pinned()
                              ? task.num_bytes
                              : std::min(task.num_bytes, host->piece_end(offset + at) - offset);
      batch.tasks.push_back({dst + at, src + at, end - at});
      at = end;
    }
  }
  // NOTE: a stream that waited for the host would hold up every later copy of its direction, and
  // with them perhaps what the host waits for. So the host comes first.
  std::vector<TimePoint> host_first = tracker_.roots(batch.after);
  if (!batch.pinned) host_first = batch.after;  // such copies block the thread that asks for them
  if (host_first.empty() && batch.pinned) {
    batch.done = tracker_.take(batch.after);
    issue(batch);
    return batch.done;
  }
  const TimePoint done = batch.done = tracker_.take(batch.after, true);
  try {
    engine_->submit_call(
        [this, batch = std::move(batch)] {
          (void)cudaSetDevice(config_.index);  // a thread of the engine's
          issue(batch);
        },
        std::move(host_first));
  } catch (...) {
    tracker_.give_back(done);
    throw;
  }
  return done;
}

size_t CudaDevice::stream_for(const GpuBatch& batch) const noexcept {
  if (batch.tasks.empty()) return kJoins;
  const size_t first = static_cast<size_t>(batch.direction) * kStreamsPerDirection;
  const bool ready = std::all_of(batch.after.begin(), batch.after.end(),
                                 [this](TimePoint point) { return timelines_.reached(point); });
  if (ready) return first;
  return timelines_.reached(newest_[first + 1]) ? first + 1 : first + 2;
}

void CudaDevice::issue(const GpuBatch& batch) noexcept {
  std::unique_lock lock(*issuing_);
  const size_t index = stream_for(batch);
  const cudaStream_t stream = streams_[index].get();
  newest_[index] = batch.done;
  CUresult driver_code = CUDA_SUCCESS;
  for (const TimePoint point : batch.after) {
    if (driver_code != CUDA_SUCCESS || timelines_.reached(point)) continue;
    driver_code = wait_value(stream, point);
  }
  cudaError_t code = cudaSuccess;
  if (driver_code == CUDA_SUCCESS && batch.pinned) {
    code = copy_pages(batch.tasks, batch.direction, stream);
  } else if (driver_code == CUDA_SUCCESS) {
    lock.unlock();  // it blocks this thread, but nobody else
    code = copy_pageable(batch.tasks, stream);
  }
  if (code == cudaSuccess && driver_code == CUDA_SUCCESS) {
    driver_code = write_value(stream, batch.done);
  }
  if (code == cudaSuccess && driver_code == CUDA_SUCCESS) return;
  // Nothing on the stream will reach the point any more.
  (void)cudaGetLastError();
  log_error(detail::concat("kv.cache_device: a copy failed: ", cudaGetErrorName(code),
                           ", driver code ", static_cast<int>(driver_code)));
  (void)cudaStreamSynchronize(stream);
  for (const uint64_t tag : batch.tags) engine_->report_failure(tag);
  engine_->advance(batch.done);
}

void CudaDevice::copy_on(StreamHandle handle, std::span<const CopyTask> tasks) {
  HELICORE_CHECK(handle >= 0, "kv.copy_on", "stream must be one of the GPU, got ", handle);
  std::vector<PageCopyTask> pages;
  for (const CopyTask& task : tasks) {
    check_copy_task(task);
    HELICORE_CHECK(is_gpu(task.dst) && is_gpu(task.src), "kv.copy_on",
                   "dst and src must be in GPU memory");
    if (task.num_bytes == 0) continue;
    pages.push_back(
        {task.dst->data() + task.dst_offset, task.src->data() + task.src_offset, task.num_bytes});
  }
  const DeviceScope scope(config_.index);
  cuda::check(copy_pages(pages, CopyDirection::kInGpu, as_stream(handle)), "copy of pages");
}

}  // namespace

std::unique_ptr<CacheDevice> make_cuda_device(const CacheDeviceConfig& config) {
  config.validate();
  const int count = cuda::device_count();
  if (count == 0) throw NotSupported("[kv.cache_device] there is no CUDA device");
  HELICORE_CHECK(config.index < count, "kv.cache_device", "index must be in [0, ", count, "), got ",
                 config.index);
  const DeviceScope scope(config.index);
  cuda::check(cudaFree(nullptr), "cudaFree");  // makes the context that driver calls need
  cuda::check(load_page_copy(), "loading the copy kernels");
  int can_wait = 0;
  check_driver(driver_api().get_attribute(
                   &can_wait, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, config.index),
               "cuDeviceGetAttribute");
  if (can_wait == 0) {
    throw NotSupported("[kv.cache_device] streams of this GPU can't wait for 64-bit values");
  }
  return std::make_unique<CudaDevice>(config);
}

}  // namespace helicore::kv
