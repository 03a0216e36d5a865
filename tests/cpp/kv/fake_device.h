// A device whose clock is moved by hand. Copies are queued and run when the test says so, streams
// can be held, allocations and copies can be made to fail, and everything moves real bytes, so that
// tests with data oracles see what a wrong order does.
//
//   FakeDevice device({.type = DeviceType::kCuda});
//   const StreamHandle stream = device.make_stream();
//   device.hold(stream);                       // work on the stream stays queued ...
//   device.launch(stream, [&] { ... });        // ... such as this "kernel"
//   const TimePoint point = device.copy(tasks, after);
//   device.run_one();                          // the oldest batch of some direction that may run
//   device.release(stream);
//   EXPECT_THAT(device.violations(), IsEmpty());
//
// Every access of copy() and copy_on() is also checked against what is under way: two that touch
// the same bytes, one of them writing, with no order between them, are a violation, whatever the
// clock does.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <random>

#include "helicore/kv/point_tracker.h"
#include "helicore/kv/timelines.h"
#include "kv/fake_memory.h"

namespace helicore::kv::testing {

struct FakeOptions {
  // kCuda: streams of any handle >= 0 are queues that run by themselves unless held. kCpu: the
  // caller's thread is the stream; wait() and synchronize() run the clock until they are through.
  DeviceType type = DeviceType::kCuda;
  bool automatic = false;     // whatever may run does so at once
  bool any_order = false;     // batches of one direction overtake each other
  bool ignore_after = false;  // a broken device: copies don't wait
  // A wait that nothing queued can end throws std::logic_error; else it blocks, for tests in which
  // another thread ends it.
  bool stuck_throws = true;
  uint64_t seed = 1;
};

enum class FakeFault {
  kAllocation,   // make_pool() or a growing resize() throws OutOfMemory
  kRefusedCopy,  // copy() or copy_on() throws OutOfMemory before anything
  kFailedTask,   // reported, nothing written
  kTornTask,     // reported, the first half written
  kCorruptTask,  // the first half written and not reported: for negative controls
  kSlowBatch,    // takes two turns: the first half of every task in each
};

class FakeDevice final : public CacheDevice, private FakeUsers {
 public:
  explicit FakeDevice(FakeOptions options = {}) : options_(options), random_(options.seed) {
    ledger_->users = this;
  }
  ~FakeDevice() override { ledger_->users = nullptr; }

  // ---- the clock ----
  // One batch, chosen by the seed among the oldest of each direction that may run. False when none.
  bool run_one() {
    const std::scoped_lock lock(mutex_);
    const bool ran = run_some_batch();
    settle();
    return ran;
  }
  // Everything that may run; how many turns.
  int run_all() {
    int count = 0;
    while (run_one()) ++count;
    return count;
  }
  [[nodiscard]] int num_pending() const {
    const std::scoped_lock lock(mutex_);
    return static_cast<int>(std::count_if(batches_.begin(), batches_.end(),
                                          [](const Batch& b) { return !b.tasks.empty(); }));
  }
  void set_automatic(bool automatic) {
    const std::scoped_lock lock(mutex_);
    options_.automatic = automatic;
    settle();
  }

  // What stands for other threads: called when a wait has nothing to run; true when it did
  // something.
  void set_on_stuck(std::function<bool()> on_stuck) { on_stuck_ = std::move(on_stuck); }

  // ---- streams of a GPU ----
  [[nodiscard]] StreamHandle make_stream() {
    const std::scoped_lock lock(mutex_);
    return ++last_stream_;
  }
  void hold(StreamHandle stream) {
    const std::scoped_lock lock(mutex_);
    stream_of(stream).held = true;
  }
  void release(StreamHandle stream) {
    const std::scoped_lock lock(mutex_);
    stream_of(stream).held = false;
    settle();
  }
  // A kernel of the caller's; kCpu: runs now.
  void launch(StreamHandle stream, std::function<void()> kernel) {
    const std::scoped_lock lock(mutex_);
    if (options_.type == DeviceType::kCpu) return kernel();
    stream_of(stream).ops.push_back({.run = std::move(kernel)});
    settle();
  }

  // ---- faults ----
  // The `count` occasions after the next `skip` ones.
  void inject(FakeFault fault, int count, int skip = 0) {
    const std::scoped_lock lock(mutex_);
    fault_of(fault).skip = skip;
    fault_of(fault).count = count;
  }
  // The next task with this tag fails.
  void set_failing_tag(uint64_t tag) {
    const std::scoped_lock lock(mutex_);
    failing_tag_ = tag;
  }
  void inject_rate(FakeFault fault, double rate) {
    const std::scoped_lock lock(mutex_);
    fault_of(fault).rate = rate;
  }
  void heal() {
    const std::scoped_lock lock(mutex_);
    faults_ = {};
  }
  void set_memory_limit(int64_t max_bytes) {
    const std::scoped_lock lock(mutex_);
    ledger_->max_bytes = max_bytes;
  }

  // ---- what tests look at ----
  [[nodiscard]] std::vector<std::string> violations() const {
    const std::scoped_lock lock(mutex_);
    return ledger_->violations;
  }
  // Outlives the device: bytes and pools must be 0 once everything is closed.
  [[nodiscard]] std::shared_ptr<const FakeLedger> ledger() const { return ledger_; }

  // ---- CacheDevice ----
  DeviceType type() const noexcept override { return options_.type; }
  bool supports(CacheTier tier, int level) const noexcept override {
    const bool gpu = options_.type == DeviceType::kCuda;
    if (level == kHotLevel) return tier == (gpu ? CacheTier::kGpuMem : CacheTier::kHostMem);
    return tier != CacheTier::kGpuMem;
  }
  int64_t grain(CacheTier tier, int64_t quota) const noexcept override {
    if (small_grain_ > 0) return small_grain_;
    return default_grain(tier, quota);
  }
  // One grain for every tier, so that tests stay small; 0: as real devices.
  void set_grain(int64_t num_bytes) { small_grain_ = num_bytes; }

  void trim() noexcept override { ++num_trims_; }
  [[nodiscard]] int num_trims() const noexcept { return num_trims_; }

  std::unique_ptr<MemoryPool> make_pool(const PoolSpec& spec) override {
    const std::scoped_lock lock(mutex_);
    return std::make_unique<FakePool>(spec, ledger_);
  }

  TimePoint record(StreamHandle handle) override {
    const std::scoped_lock lock(mutex_);
    if (handle < 0) return tracker_.newest_step(handle);
    check_stream(handle);
    if (options_.type == DeviceType::kCpu) return {};
    Stream& stream = stream_of(handle);
    const TimePoint point{stream.timeline, ++stream.recorded};
    order_[key(point)] = stream.after;
    tracker_.depend(stream.timeline, stream.after);
    stream.ops.push_back({.record = point});
    settle();
    return point;
  }

  void wait(StreamHandle handle, std::span<const TimePoint> points) override {
    check_stream(handle);
    if (options_.type == DeviceType::kCpu || handle < 0) {
      for (const TimePoint point : points) synchronize(point);
      return;
    }
    const std::scoped_lock lock(mutex_);
    Stream& stream = stream_of(handle);
    add_order(stream.after, points);
    tracker_.depend(stream.timeline, points);
    stream.ops.push_back({.wait = {points.begin(), points.end()}});
    settle();
  }

  bool reached(TimePoint point) const noexcept override { return timelines_.reached(point); }
  bool is_waitable(TimePoint point) const noexcept override {
    const std::scoped_lock lock(mutex_);
    return tracker_.is_waitable(point);
  }
  void synchronize(TimePoint point) override {
    while (!reached(point) && (run_one() || (on_stuck_ && on_stuck_()))) {
    }
    if (reached(point)) return;
    if (options_.stuck_throws) throw std::logic_error("[fake] waits for what nothing queued ends");
    timelines_.wait(point);
  }
  TimePoint join(TimePoint a, TimePoint b) override {
    if (reached(a)) return b;
    if (reached(b)) return a;
    const std::array<TimePoint, 2> both{a, b};
    return enqueue({}, both);
  }

  TimePoint copy(std::span<const CopyTask> tasks, std::span<const TimePoint> after) override {
    refuse_copy();
    return enqueue(tasks, after);
  }
  void copy_on(StreamHandle handle, std::span<const CopyTask> tasks) override {
    check_stream(handle);
    refuse_copy();
    const std::scoped_lock lock(mutex_);
    for (const CopyTask& task : tasks) check_bounds(task);
    if (options_.type == DeviceType::kCpu) {
      check_races(tasks, {}, TimePoint::kMaxTimelines);
      for (const CopyTask& task : tasks) move_bytes(task, 0, task.num_bytes);
      return;
    }
    Stream& stream = stream_of(handle);
    check_races(tasks, stream.after, stream.timeline);
    stream.ops.push_back({.tasks = {tasks.begin(), tasks.end()},
                          .record = {},
                          .access = {stream.timeline, stream.recorded + 1}});
    settle();
  }

  uint64_t num_failures() const noexcept override { return num_failures_.load(); }
  std::vector<uint64_t> take_failures() override {
    const std::scoped_lock lock(mutex_);
    return std::exchange(failures_, {});
  }
  CopyCounters counters() const override {
    const std::scoped_lock lock(mutex_);
    return counters_;
  }
  int64_t bytes_in_flight() const noexcept override { return bytes_in_flight_.load(); }

  StreamHandle make_step_stream() override {
    const std::scoped_lock lock(mutex_);
    return tracker_.make_step_stream();
  }
  uint64_t submit_step(StreamHandle stream) override {
    const std::scoped_lock lock(mutex_);
    return tracker_.submit_step(stream);
  }
  void complete_step(StreamHandle stream, uint64_t step) override {
    const std::scoped_lock lock(mutex_);
    timelines_.advance(tracker_.step_point(stream, step));
    settle();
  }

 private:
  struct Batch {
    TimePoint done{};
    std::vector<CopyTask> tasks{};  // none: a join
    std::vector<TimePoint> after{};
    int direction = 0;
    bool slow = false;
    bool half_done = false;
  };
  // Exactly one of its parts.
  struct Op {
    std::vector<TimePoint> wait{};
    std::function<void()> run{};
    std::vector<CopyTask> tasks{};
    TimePoint record{};
    TimePoint access{};  // of tasks: reached when they are done
  };
  struct Stream {
    uint32_t timeline = 0;
    uint64_t recorded = 0;
    bool held = false;
    std::deque<Op> ops{};
    std::vector<TimePoint> after{};  // everything that its next operation comes after
  };
  struct Fault {
    int skip = 0;
    int count = 0;
    double rate = 0;
  };
  using Key = std::pair<uint32_t, uint64_t>;

  static Key key(TimePoint point) { return {point.timeline(), point.value()}; }
  static bool touches_file(const CopyTask& task) {
    return fake_pool(*task.dst).tier() == CacheTier::kDisk ||
           fake_pool(*task.src).tier() == CacheTier::kDisk;
  }
  static int64_t file_bytes(const std::vector<CopyTask>& tasks) {
    int64_t sum = 0;
    for (const CopyTask& task : tasks) sum += touches_file(task) ? task.num_bytes : 0;
    return sum;
  }

  // ---- faults ----
  Fault& fault_of(FakeFault fault) { return faults_[static_cast<size_t>(fault)]; }
  bool strikes(FakeFault which) {
    Fault& fault = fault_of(which);
    if (fault.count > 0) {
      if (fault.skip-- > 0) return false;
      fault.skip = 0;
      --fault.count;
      return true;
    }
    return fault.rate > 0 && std::uniform_real_distribution<>(0, 1)(random_) < fault.rate;
  }
  bool refuse_allocation() override {
    const std::scoped_lock lock(mutex_);
    return strikes(FakeFault::kAllocation);
  }
  void refuse_copy() {
    const std::scoped_lock lock(mutex_);
    if (strikes(FakeFault::kRefusedCopy)) throw OutOfMemory("[fake] copy refused");
  }
  void violate(const std::string& what) { ledger_->violations.push_back(what); }

  // ---- order ----
  // What comes before `points`, and they themselves; reached ones left out.
  void add_order(std::vector<TimePoint>& out, std::span<const TimePoint> points) const {
    const auto add = [&](TimePoint point) {
      if (!timelines_.reached(point) && std::find(out.begin(), out.end(), point) == out.end()) {
        out.push_back(point);
      }
    };
    for (const TimePoint point : points) {
      add(point);
      // A later point of a stream carries what earlier ones carry; its own entry says it all.
      const auto found = order_.find(key(point));
      if (found == order_.end()) continue;
      for (const TimePoint earlier : found->second) add(earlier);
    }
  }
  static bool is_ordered(TimePoint access, const std::vector<TimePoint>& after) {
    return std::any_of(after.begin(), after.end(), [&](TimePoint point) {
      return point.timeline() == access.timeline() && point.value() >= access.value();
    });
  }
  static bool overlap(const MemoryPool* a, int64_t from_a, int64_t size_a, const MemoryPool* b,
                      int64_t from_b, int64_t size_b) {
    return a == b && from_a < from_b + size_b && from_b < from_a + size_a;
  }
  static bool conflict(const CopyTask& a, const CopyTask& b) {
    return overlap(a.dst, a.dst_offset, a.num_bytes, b.dst, b.dst_offset, b.num_bytes) ||
           overlap(a.dst, a.dst_offset, a.num_bytes, b.src, b.src_offset, b.num_bytes) ||
           overlap(a.src, a.src_offset, a.num_bytes, b.dst, b.dst_offset, b.num_bytes);
  }
  // `own`: the timeline whose accesses are ordered by themselves.
  void check_races(std::span<const CopyTask> tasks, const std::vector<TimePoint>& after,
                   uint32_t own) {
    const auto check = [&](const std::vector<CopyTask>& others, TimePoint access) {
      if (access.timeline() == own || is_ordered(access, after)) return;
      for (const CopyTask& task : tasks) {
        for (const CopyTask& other : others) {
          if (!conflict(task, other)) continue;
          violate(
              detail::concat("no order between the copies tagged ", other.tag, " and ", task.tag));
        }
      }
    };
    for (const Batch& batch : batches_) check(batch.tasks, batch.done);
    for (const auto& [handle, stream] : streams_) {
      for (const Op& op : stream.ops) check(op.tasks, op.access);
    }
  }
  bool in_use(const MemoryPool& pool, int64_t from, int64_t to) const override {
    const std::scoped_lock lock(mutex_);
    const auto touches = [&](const CopyTask& task) {
      return overlap(&pool, from, to - from, task.dst, task.dst_offset, task.num_bytes) ||
             overlap(&pool, from, to - from, task.src, task.src_offset, task.num_bytes);
    };
    const auto any = [&](const std::vector<CopyTask>& tasks) {
      return std::any_of(tasks.begin(), tasks.end(), touches);
    };
    return std::any_of(batches_.begin(), batches_.end(),
                       [&](const Batch& b) { return any(b.tasks); }) ||
           std::any_of(streams_.begin(), streams_.end(), [&](const auto& entry) {
             const auto& ops = entry.second.ops;
             return std::any_of(ops.begin(), ops.end(),
                                [&](const Op& op) { return any(op.tasks); });
           });
  }

  void forget(const MemoryPool& pool) override {
    const std::scoped_lock lock(mutex_);
    const auto touches = [&](const CopyTask& task) {
      return task.dst == &pool || task.src == &pool;
    };
    for (Batch& batch : batches_) std::erase_if(batch.tasks, touches);
    for (auto& [handle, stream] : streams_) {
      for (Op& op : stream.ops) std::erase_if(op.tasks, touches);
    }
  }

  // ---- running ----
  void check_stream(StreamHandle handle) const {
    HELICORE_CHECK(handle <= 0 || options_.type == DeviceType::kCuda, "fake.stream",
                   "stream must be 0 or a step stream on the CPU, got ", handle);
  }
  void check_bounds(const CopyTask& task) const {
    HELICORE_CHECK(task.dst != nullptr && task.src != nullptr, "fake.copy", "pools must be given");
    HELICORE_CHECK(task.num_bytes >= 0 && task.dst_offset >= 0 && task.src_offset >= 0 &&
                       task.dst_offset + task.num_bytes <= task.dst->num_bytes() &&
                       task.src_offset + task.num_bytes <= task.src->num_bytes(),
                   "fake.copy", "the copy tagged ", task.tag, " leaves its pools");
  }
  TimePoint enqueue(std::span<const CopyTask> tasks, std::span<const TimePoint> after) {
    const std::scoped_lock lock(mutex_);
    for (const CopyTask& task : tasks) check_bounds(task);
    Batch batch{.tasks = {tasks.begin(), tasks.end()}, .after = tracker_.unreached(after)};
    if (tasks.empty() && batch.after.empty()) return {};
    std::vector<TimePoint> order;
    add_order(order, batch.after);
    check_races(tasks, order, TimePoint::kMaxTimelines);
    if (!tasks.empty()) {
      batch.direction = static_cast<int>(fake_pool(*tasks[0].src).tier()) * 3 +
                        static_cast<int>(fake_pool(*tasks[0].dst).tier());
      batch.slow = strikes(FakeFault::kSlowBatch);
      ++counters_.num_batches;
      counters_.num_tasks += static_cast<int64_t>(tasks.size());
      for (const CopyTask& task : tasks) counters_.num_bytes += task.num_bytes;
      bytes_in_flight_ += file_bytes(batch.tasks);
    }
    batch.done = tracker_.take(batch.after);
    const TimePoint done = batch.done;
    order_[key(done)] = std::move(order);
    batches_.push_back(std::move(batch));
    settle();
    return done;
  }
  bool may_run(const Batch& batch) const {
    return options_.ignore_after || tracker_.unreached(batch.after).empty();
  }
  bool run_some_batch() {
    std::vector<size_t> choices;
    std::vector<int> directions;
    for (size_t i = 0; i < batches_.size(); ++i) {
      const int direction = batches_[i].direction;
      if (batches_[i].tasks.empty() || !may_run(batches_[i])) continue;
      if (!options_.any_order &&
          std::find(directions.begin(), directions.end(), direction) != directions.end()) {
        continue;
      }
      choices.push_back(i);
      directions.push_back(direction);
    }
    if (choices.empty()) return false;
    const size_t pick = std::uniform_int_distribution<size_t>(0, choices.size() - 1)(random_);
    run_batch(choices[pick]);
    return true;
  }
  void run_batch(size_t index) {
    Batch& batch = batches_[index];
    for (const CopyTask& task : batch.tasks) {
      const int64_t half = task.num_bytes / 2;
      if (batch.slow && !batch.half_done) {
        move_bytes(task, 0, half);
      } else if (failing_tag_ == task.tag || strikes(FakeFault::kFailedTask)) {
        if (failing_tag_ == task.tag) failing_tag_.reset();
        fail(task);
      } else if (strikes(FakeFault::kTornTask)) {
        move_bytes(task, 0, half);
        fail(task);
      } else if (strikes(FakeFault::kCorruptTask)) {
        move_bytes(task, 0, half);
      } else {
        move_bytes(task, 0, task.num_bytes);
      }
    }
    if (batch.slow && !std::exchange(batch.half_done, true)) return;
    bytes_in_flight_ -= file_bytes(batch.tasks);
    finish(index);
  }
  void finish(size_t index) {
    const TimePoint done = batches_[index].done;
    batches_.erase(batches_.begin() + static_cast<std::ptrdiff_t>(index));
    order_.erase(key(done));
    timelines_.advance(done);
  }
  void fail(const CopyTask& task) {
    failures_.push_back(task.tag);
    ++counters_.num_failed;
    ++num_failures_;
  }
  static void move_bytes(const CopyTask& task, int64_t from, int64_t to) {
    std::memmove(fake_pool(*task.dst).bytes() + task.dst_offset + from,
                 fake_pool(*task.src).bytes() + task.src_offset + from,
                 static_cast<size_t>(to - from));
  }
  // Streams and joins run by themselves as far as they can; in automatic mode copies too.
  void settle() {
    bool again = true;
    while (again) {
      again = false;
      for (size_t i = 0; i < batches_.size();) {
        if (batches_[i].tasks.empty() && tracker_.unreached(batches_[i].after).empty()) {
          finish(i);
          again = true;
        } else {
          ++i;
        }
      }
      for (auto& [handle, stream] : streams_) again |= run_stream(stream);
      if (options_.automatic) again |= run_some_batch();
    }
  }
  bool run_stream(Stream& stream) {
    bool ran = false;
    while (!stream.held && !stream.ops.empty()) {
      Op& op = stream.ops.front();
      if (!op.wait.empty() && !tracker_.unreached(op.wait).empty()) break;
      if (op.run) op.run();
      for (const CopyTask& task : op.tasks) move_bytes(task, 0, task.num_bytes);
      if (!op.record.is_none()) {
        order_.erase(key(op.record));
        timelines_.advance(op.record);
      }
      stream.ops.pop_front();
      ran = true;
    }
    return ran;
  }
  Stream& stream_of(StreamHandle handle) {
    HELICORE_CHECK(options_.type == DeviceType::kCuda && handle >= 0, "fake.stream",
                   "stream must be one of a GPU, got ", handle);
    const auto [it, added] = streams_.try_emplace(handle);
    if (added) it->second.timeline = timelines_.make();
    return it->second;
  }

  mutable std::recursive_mutex mutex_;
  FakeOptions options_;
  std::mt19937_64 random_;
  Timelines timelines_;
  PointTracker tracker_{timelines_};
  std::shared_ptr<FakeLedger> ledger_ = std::make_shared<FakeLedger>();
  std::deque<Batch> batches_;
  std::map<StreamHandle, Stream> streams_;
  StreamHandle last_stream_ = 0;
  std::function<bool()> on_stuck_;
  std::map<Key, std::vector<TimePoint>> order_;  // of unreached points: what they come after
  std::array<Fault, 6> faults_{};
  std::optional<uint64_t> failing_tag_;
  std::vector<uint64_t> failures_;
  std::atomic<uint64_t> num_failures_{0};
  std::atomic<int64_t> bytes_in_flight_{0};
  CopyCounters counters_;
  int64_t small_grain_ = 0;
  int num_trims_ = 0;
};

}  // namespace helicore::kv::testing
