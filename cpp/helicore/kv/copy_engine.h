// Runs copies that the CPU does: between host memory by copy threads, to and from files by lanes
// that wait for the I/O. A batch begins when everything that it comes after is reached, in no order
// with other batches.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "helicore/kv/async_io.h"
#include "helicore/kv/cache_device.h"
#include "helicore/kv/file_copies.h"
#include "helicore/kv/timelines.h"

namespace helicore::kv {

struct CopyEngineOptions {
  int num_copy_threads = 1;
  int num_file_lanes = 4;
  AsyncIoConfig io{};              // queue_capacity is the engine's affair
  StagingPort* staging = nullptr;  // outlives the engine
};

//   submit() -> waiting -> (all of `after` reached) -> ready -> running -> done: timeline advanced
//
// Batches that write files leave one lane to those that only read, for which somebody may wait.
// Threads: every call from any thread. Threads of its own start with the first batch that needs
// them. An exception on one of them ends the process: nobody could say what is still being written.
class CopyEngine {
 public:
  // `timelines` outlives this. `io` moves bytes to and from files and takes num_file_lanes *
  // FileCopies::kRequestsPerLane requests at once or more; null: made from options.io by the first
  // batch that needs it.
  CopyEngine(Timelines& timelines, const CopyEngineOptions& options, std::unique_ptr<AsyncIo> io);
  // Runs what may still run. Batches that come after a point which nothing moves any more, such as
  // a step that was never completed, are dropped.
  ~CopyEngine();
  CopyEngine(const CopyEngine&) = delete;
  CopyEngine& operator=(const CopyEngine&) = delete;

  // Advances `done` when the tasks have ended, well or not. No tasks: as soon as all of `after` is
  // reached. Throws (std::system_error, bad_alloc) only before anything has started.
  void submit(TimePoint done, std::span<const CopyTask> tasks, std::vector<TimePoint> after);
  // Calls `call` on a copy thread once all of `after` is reached, and advances nothing: the call,
  // or what it starts, does. It must not throw, nor wait for this engine.
  void submit_call(std::function<void()> call, std::vector<TimePoint> after);
  // Looks again at batches that wait; whoever advances a timeline from outside calls it.
  void poke();
  // Blocks until everything that may run has ended; batches that wait stay.
  void drain();
  // Ends for `done` something that was not the engine's: advances and pokes.
  void advance(TimePoint done);
  // A task that somebody else ran has failed.
  void report_failure(uint64_t tag);

  [[nodiscard]] uint64_t num_failures() const noexcept { return num_failures_.load(); }
  [[nodiscard]] std::vector<uint64_t> take_failures();
  [[nodiscard]] int64_t bytes_in_flight() const noexcept { return bytes_in_flight_.load(); }
  [[nodiscard]] int64_t num_waiting() const;  // batches that have not begun

 private:
  enum class Route : uint8_t { kMemory, kFromFile, kToFile };
  struct Batch {
    TimePoint done;
    std::vector<CopyTask> tasks;
    std::function<void()> call;  // instead of tasks
    std::vector<TimePoint> after;
    Route route = Route::kMemory;
    int64_t file_bytes = 0;
    // kMemory: what has not been handed to a thread yet, and the threads at work.
    size_t next_task = 0;
    int64_t next_offset = 0;
    int num_running = 0;
    [[nodiscard]] bool handed_out() const noexcept { return next_task == tasks.size(); }
  };
  using BatchList = std::list<Batch>;
  using Slice = std::vector<CopyTask>;

  void start_threads(Route route);  // lock held
  void enter(BatchList& added);     // lock held
  void promote();                   // lock held: waiting -> ready
  void finish(BatchList& from, BatchList::iterator batch,
              const std::vector<uint64_t>& failed);  // lock held
  [[nodiscard]] static Slice take_slice(Batch& batch);
  void run_memory() noexcept;
  void run_files(int lane) noexcept;
  void run_poller() noexcept;

  Timelines* timelines_;
  const CopyEngineOptions options_;
  std::unique_ptr<AsyncIo> io_;
  std::unique_ptr<FileCopies> files_;

  mutable std::mutex mutex_;
  std::condition_variable memory_work_;
  std::condition_variable file_work_;
  std::condition_variable changed_;  // a batch ended or began to wait
  BatchList waiting_;
  BatchList memory_ready_;  // the front is being handed out
  BatchList memory_running_;
  BatchList reads_ready_;
  BatchList writes_ready_;
  BatchList files_running_;
  int num_writes_running_ = 0;
  bool stopping_ = false;
  std::vector<uint64_t> failures_;
  std::atomic<uint64_t> num_failures_{0};
  std::atomic<int64_t> bytes_in_flight_{0};
  std::vector<std::thread> memory_threads_;
  std::vector<std::thread> file_threads_;
  std::thread poller_;  // where timelines are moved by something that can't poke
};

}  // namespace helicore::kv
