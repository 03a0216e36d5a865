#include "helicore/kv/copy_engine.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "helicore/core/error.h"

namespace helicore::kv {
namespace {

constexpr int64_t kSliceBytes = int64_t{1} << 20;  // that a copy thread takes at once
constexpr size_t kSliceTasks = 256;
constexpr auto kPollPeriod = std::chrono::microseconds(20);

bool is_file(const MemoryPool* pool) noexcept { return pool->fd() >= 0; }

}  // namespace

CopyEngine::CopyEngine(Timelines& timelines, const CopyEngineOptions& options,
                       std::unique_ptr<AsyncIo> io)
    : timelines_(&timelines), options_(options), io_(std::move(io)) {}

void CopyEngine::drain() {
  std::unique_lock lock(mutex_);
  promote();
  changed_.wait(lock, [this] {
    return memory_ready_.empty() && memory_running_.empty() && reads_ready_.empty() &&
           writes_ready_.empty() && files_running_.empty();
  });
}

CopyEngine::~CopyEngine() {
  drain();
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
  }
  memory_work_.notify_all();
  file_work_.notify_all();
  changed_.notify_all();
  for (std::thread& thread : memory_threads_) thread.join();
  for (std::thread& thread : file_threads_) thread.join();
  if (poller_.joinable()) poller_.join();
}

void CopyEngine::start_threads(Route route) {
  if (route == Route::kMemory) {
    while (memory_threads_.size() < static_cast<size_t>(options_.num_copy_threads)) {
      memory_threads_.emplace_back([this] { run_memory(); });
    }
  } else {
    if (io_ == nullptr) {
      AsyncIoConfig config = options_.io;
      config.queue_capacity = options_.num_file_lanes * FileCopies::kRequestsPerLane;
      io_ = make_async_io(config);
    }
    if (files_ == nullptr) {
      files_ = std::make_unique<FileCopies>(*io_, options_.staging, options_.num_file_lanes);
    }
    while (file_threads_.size() < static_cast<size_t>(options_.num_file_lanes)) {
      file_threads_.emplace_back(
          [this, lane = static_cast<int>(file_threads_.size())] { run_files(lane); });
    }
  }
}

void CopyEngine::submit(TimePoint done, std::span<const CopyTask> tasks,
                        std::vector<TimePoint> after) {
  BatchList added(1);
  Batch& batch = added.front();
  batch.done = done;
  batch.tasks.assign(tasks.begin(), tasks.end());
  batch.after = std::move(after);
  for (const CopyTask& task : tasks) {
    if (!is_file(task.dst) && !is_file(task.src)) continue;
    batch.file_bytes += task.num_bytes;
    if (is_file(task.dst)) batch.route = Route::kToFile;
    if (batch.route == Route::kMemory) batch.route = Route::kFromFile;
  }
  const std::scoped_lock lock(mutex_);
  if (!tasks.empty()) start_threads(batch.route);
  enter(added);
}

void CopyEngine::submit_call(std::function<void()> call, std::vector<TimePoint> after) {
  BatchList added(1);
  added.front().call = std::move(call);
  added.front().after = std::move(after);
  const std::scoped_lock lock(mutex_);
  start_threads(Route::kMemory);
  enter(added);
}

void CopyEngine::enter(BatchList& added) {
  if (timelines_->polled() && !poller_.joinable()) {
    poller_ = std::thread([this] { run_poller(); });
  }
  bytes_in_flight_ += added.front().file_bytes;
  waiting_.splice(waiting_.end(), added);
  promote();
  if (!waiting_.empty()) changed_.notify_all();
}

void CopyEngine::poke() {
  const std::scoped_lock lock(mutex_);
  promote();
}

void CopyEngine::advance(TimePoint done) {
  const std::scoped_lock lock(mutex_);
  timelines_->advance(done);
  promote();
}

void CopyEngine::report_failure(uint64_t tag) {
  const std::scoped_lock lock(mutex_);
  failures_.push_back(tag);
  ++num_failures_;
}

std::vector<uint64_t> CopyEngine::take_failures() {
  const std::scoped_lock lock(mutex_);
  return std::exchange(failures_, {});
}

int64_t CopyEngine::num_waiting() const {
  const std::scoped_lock lock(mutex_);
  return static_cast<int64_t>(waiting_.size());
}

void CopyEngine::promote() {
  bool again = true;
  while (again) {  // a join that ends may let others begin
    again = false;
    for (auto it = waiting_.begin(); it != waiting_.end();) {
      const auto batch = it++;
      auto& after = batch->after;
      while (!after.empty() && timelines_->reached(after.back())) after.pop_back();
      if (!after.empty()) continue;
      if (batch->tasks.empty() && !batch->call) {
        timelines_->advance(batch->done);
        waiting_.erase(batch);
        again = true;
      } else if (batch->route == Route::kMemory) {
        memory_ready_.splice(memory_ready_.end(), waiting_, batch);
        memory_work_.notify_all();
      } else {
        BatchList& ready = batch->route == Route::kToFile ? writes_ready_ : reads_ready_;
        ready.splice(ready.end(), waiting_, batch);
        file_work_.notify_all();
      }
    }
  }
}

void CopyEngine::finish(BatchList& from, BatchList::iterator batch,
                        const std::vector<uint64_t>& failed) {
  failures_.insert(failures_.end(), failed.begin(), failed.end());
  num_failures_ += failed.size();
  bytes_in_flight_ -= batch->file_bytes;
  if (!batch->call) timelines_->advance(batch->done);
  from.erase(batch);
  promote();
  changed_.notify_all();
}

CopyEngine::Slice CopyEngine::take_slice(Batch& batch) {
  Slice slice;
  int64_t room = kSliceBytes;
  while (!batch.handed_out() && room > 0 && slice.size() < kSliceTasks) {
    CopyTask part = batch.tasks[batch.next_task];
    part.dst_offset += batch.next_offset;
    part.src_offset += batch.next_offset;
    part.num_bytes = std::min(part.num_bytes - batch.next_offset, room);
    room -= part.num_bytes;
    batch.next_offset += part.num_bytes;
    if (batch.next_offset == batch.tasks[batch.next_task].num_bytes) {
      ++batch.next_task;
      batch.next_offset = 0;
    }
    slice.push_back(part);
  }
  return slice;
}

void CopyEngine::run_memory() noexcept {
  std::unique_lock lock(mutex_);
  while (true) {
    memory_work_.wait(lock, [this] { return stopping_ || !memory_ready_.empty(); });
    if (memory_ready_.empty()) return;
    const auto batch = memory_ready_.begin();
    const Slice slice = take_slice(*batch);
    ++batch->num_running;
    if (batch->handed_out()) {
      memory_running_.splice(memory_running_.end(), memory_ready_, batch);
    }
    lock.unlock();
    if (batch->call) batch->call();
    for (const CopyTask& part : slice) {
      std::memmove(part.dst->data() + part.dst_offset, part.src->data() + part.src_offset,
                   static_cast<size_t>(part.num_bytes));
    }
    lock.lock();
    if (--batch->num_running == 0 && batch->handed_out()) finish(memory_running_, batch, {});
  }
}

void CopyEngine::run_files(int lane) noexcept {
  const auto may_write = [this] {
    return !writes_ready_.empty() &&
           (num_writes_running_ + 1 < options_.num_file_lanes || options_.num_file_lanes == 1);
  };
  std::unique_lock lock(mutex_);
  while (true) {
    file_work_.wait(lock, [&] { return stopping_ || !reads_ready_.empty() || may_write(); });
    if (reads_ready_.empty() && !may_write()) return;
    const bool writes = reads_ready_.empty();
    BatchList& ready = writes ? writes_ready_ : reads_ready_;
    const auto batch = ready.begin();
    files_running_.splice(files_running_.end(), ready, batch);
    num_writes_running_ += writes ? 1 : 0;
    lock.unlock();
    const std::vector<uint64_t> failed = files_->run(lane, batch->tasks);
    lock.lock();
    num_writes_running_ -= writes ? 1 : 0;
    finish(files_running_, batch, failed);
    if (writes) file_work_.notify_all();
  }
}

void CopyEngine::run_poller() noexcept {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
    if (stopping_) return;
    lock.unlock();
    std::this_thread::sleep_for(kPollPeriod);
    lock.lock();
    promote();
  }
}

}  // namespace helicore::kv
