// What the cache manager needs of the machine below it: memory of every tier, copies between
// tiers, and the order of both against the work of the caller's streams. One implementation for
// the CPU, one for CUDA and, in the tests, one whose clock is moved by hand; the manager's logic is
// the same over all of them.
//
// Nothing here is called with a promise that it returns at once except where a comment says so; the
// manager calls what may block (wait, synchronize) without its lock.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "helicore/core/types.h"
#include "helicore/kv/timeline.h"
#include "helicore/kv/types.h"

namespace helicore::kv {

// A stream of the caller's: a cudaStream_t as an integer for CUDA, a step stream for the CPU. 0 is
// the default: on the CPU work that is done when the call that did it returns.
using StreamHandle = int64_t;

// `num_bytes` consecutive bytes of one pool of one level, growable in place: the address (or file)
// never changes, so page tables and captured graphs stay valid through a resize.
class MemoryPool {
 public:
  virtual ~MemoryPool() = default;
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;

  // Bytes that may be used now.
  [[nodiscard]] virtual int64_t num_bytes() const noexcept = 0;
  // Grows or shrinks to `num_bytes`, at most the `max_bytes` it was made with. All or nothing.
  // Shrinking gives the tail back; nothing may use it any more. Throws OutOfMemory.
  virtual void resize(int64_t num_bytes) = 0;
  // Start of the memory; null for a file.
  [[nodiscard]] virtual std::byte* data() const noexcept = 0;
  // The memory is a GPU's.
  [[nodiscard]] virtual bool on_gpu() const noexcept { return false; }
  // Descriptor of the file; -1 for memory.
  [[nodiscard]] virtual int fd() const noexcept { return -1; }

 protected:
  MemoryPool() = default;
};

struct PoolSpec {
  CacheTier tier = CacheTier::kHostMem;
  int64_t num_bytes = 0;    // to begin with
  int64_t max_bytes = 0;    // the most that resize() may ask for: reserved as addresses only
  std::string directory{};  // kDisk: where the anonymous file is made
  int64_t grain = 0;        // kGpuMem: what it grows by, grain(); 0: the least that the GPU can
};

// One piece of a page on its way: `num_bytes` from `src` at `src_offset` to `dst` at `dst_offset`.
// `tag` names the page in failures(). Both pools outlive the copy.
struct CopyTask {
  const MemoryPool* dst = nullptr;
  const MemoryPool* src = nullptr;
  int64_t dst_offset = 0;
  int64_t src_offset = 0;
  int64_t num_bytes = 0;
  uint64_t tag = 0;
};

struct CopyCounters {
  int64_t num_batches = 0;
  int64_t num_tasks = 0;
  int64_t num_bytes = 0;
  int64_t num_failed = 0;  // tasks
  friend bool operator==(const CopyCounters&, const CopyCounters&) = default;
};

// Threads: reached() and num_failures() from any thread; the rest under the manager's lock, except
// wait() and synchronize(), which are called without it.
class CacheDevice {
 public:
  virtual ~CacheDevice() = default;  // waits for every copy that was started
  CacheDevice(const CacheDevice&) = delete;
  CacheDevice& operator=(const CacheDevice&) = delete;

  [[nodiscard]] virtual DeviceType type() const noexcept = 0;
  // Tiers that level 0 may have here, and tiers below it.
  [[nodiscard]] virtual bool supports(CacheTier tier, int level) const noexcept = 0;
  // Bytes by which pools of a tier grow when the level has `quota` bytes: GPU 2 MiB << clamp(
  // floor(log2(quota / 1 GiB)), 0, 4), host 4 KiB, disk 2 MiB.
  [[nodiscard]] virtual int64_t grain(CacheTier tier, int64_t quota) const noexcept = 0;
  // Throws OutOfMemory.
  [[nodiscard]] virtual std::unique_ptr<MemoryPool> make_pool(const PoolSpec& spec) = 0;
  // Pools that shrink may leave up to 1 GiB with the device for pools that grow next; this gives it
  // to the system.
  virtual void trim() noexcept {}
  // The manager begins to hold its lock: what the device may do on the caller's thread is counted
  // from here.
  virtual void begin_operation() noexcept {}

  // A point that is reached once everything submitted to `stream` so far is done. Cheap: calls
  // without new work in between may return the same point. Never blocks.
  [[nodiscard]] virtual TimePoint record(StreamHandle stream) = 0;
  // What `stream` does from now on happens after `points`. CUDA: enqueues the wait and returns.
  // CPU: the caller's own thread is the stream, so it blocks until they are reached.
  virtual void wait(StreamHandle stream, std::span<const TimePoint> points) = 0;
  // One load and one compare. Never blocks.
  [[nodiscard]] virtual bool reached(TimePoint point) const noexcept = 0;
  // True when wait() for the point is bound to end by itself: copies and streams. False for a step
  // of the caller's, which ends when the caller says so.
  [[nodiscard]] virtual bool is_waitable(TimePoint point) const noexcept = 0;
  // Blocks the calling thread until the point is reached.
  virtual void synchronize(TimePoint point) = 0;
  // A point that is reached when both are. Never blocks.
  [[nodiscard]] virtual TimePoint join(TimePoint a, TimePoint b) = 0;

  // Copies the batch after every point of `after`, by the device's own streams and threads; the
  // result is reached when all of it is done, whether it worked or not. Tasks of one batch are
  // independent of each other. Throws (CudaError, OutOfMemory, ...) only before it has started
  // anything. Never blocks on the copies.
  [[nodiscard]] virtual TimePoint copy(std::span<const CopyTask> tasks,
                                       std::span<const TimePoint> after) = 0;
  // Copies inside memory of the hot level in the order of `stream`. CPU: done on return, so it is
  // not to be called under a lock; copy() is. Throws only before it has started anything.
  virtual void copy_on(StreamHandle stream, std::span<const CopyTask> tasks) = 0;

  // How many tasks have failed so far; one load.
  [[nodiscard]] virtual uint64_t num_failures() const noexcept = 0;
  // Tags of the tasks that failed since the last call.
  [[nodiscard]] virtual std::vector<uint64_t> take_failures() = 0;
  [[nodiscard]] virtual CopyCounters counters() const = 0;
  // Bytes of the batches that copy() has accepted and that are not done, to or from files: what
  // back-pressure looks at.
  [[nodiscard]] virtual int64_t bytes_in_flight() const noexcept = 0;

  // Step streams: work of a caller that the device can't see, such as the steps of a pipelined
  // executor. Handles are negative. record() of one gives the newest submitted step.
  [[nodiscard]] virtual StreamHandle make_step_stream() = 0;
  // A step that may touch pages begins; its number, counted from 1.
  virtual uint64_t submit_step(StreamHandle stream) = 0;
  // Steps up to `step` are done. Steps end in order. Throws InvalidArgument for a step that was not
  // submitted.
  virtual void complete_step(StreamHandle stream, uint64_t step) = 0;

 protected:
  CacheDevice() = default;
};

struct CacheDeviceConfig {
  DeviceType type = DeviceType::kCpu;
  int32_t index = 0;             // CUDA ordinal; 0 for the CPU
  int32_t num_copy_threads = 0;  // for copies in host memory; 0: min(4, cores / 2), at least 1
  int32_t num_file_lanes = 4;    // batches to or from files that run at once; > 0
  int32_t num_io_threads = 4;    // of the thread back end of asynchronous file I/O; > 0
  // That touch new host memory in advance. 0: for CUDA min(16, cores / 2), for the CPU none: memory
  // is then had from the system page by page, on first use.
  int32_t num_fault_threads = 0;
  int64_t staging_bytes = int64_t{64} << 20;  // pinned memory between GPU and disk; >= 1 MiB
  bool use_io_uring = true;                   // else threads
  bool huge_pages = false;                    // asks for 2 MiB pages of host memory
  // Throws InvalidArgument.
  void validate() const;
};

// grain() as every device has it.
[[nodiscard]] int64_t default_grain(CacheTier tier, int64_t quota) noexcept;

// Throws InvalidArgument, or NotSupported for CUDA where there is none.
[[nodiscard]] std::unique_ptr<CacheDevice> make_cache_device(const CacheDeviceConfig& config);

}  // namespace helicore::kv
