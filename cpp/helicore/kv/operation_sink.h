// Where the public calls of a manager and its caches go when someone wants to see them: the
// recorder of an operation log, the comparer of a replay. Internal.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <thread>

#include "helicore/kv/operation.h"
#include "helicore/kv/slot_allocator.h"

namespace helicore::kv {

struct ManagerState;
class KVCache;

// Runs calls one after the other, whatever the threads they come from: its mutex is held for the
// whole of a call, outside the manager's lock, so that the order seen here is the order in which
// things happened, fast paths that take no lock included. A call runs with is_inside() true on its
// thread and then takes its ordinary way.
class OperationSink : public SlotChooser {
 public:
  // Every `state_every`-th operation gets a digest of the whole state; 0: none does.
  OperationSink(const ManagerState& state, int32_t state_every)
      : state_(state), state_every_(state_every) {}
  ~OperationSink() override = default;
  OperationSink(const OperationSink&) = delete;
  OperationSink& operator=(const OperationSink&) = delete;

  // Runs `call`, which adds its results to `operation`, and adds the outcome and the digests. What
  // the call throws goes on to the caller, noted. `caches` are those concerned; entries may be null
  // or of another manager.
  void run(Operation& operation, std::span<KVCache* const> caches,
           const std::function<void()>& call);
  // Nothing is noted any more; returns when no call is being noted.
  void stop();
  [[nodiscard]] bool is_inside() const noexcept {
    return owner_.load(std::memory_order_relaxed) == std::this_thread::get_id();
  }

  // For the call that is running, from inside it. What reaches it from elsewhere:
  void note(OperationField field, std::span<const int64_t> values) noexcept;
  void note(OperationField field, int64_t value) noexcept { note(field, std::span(&value, 1)); }
  // What it was in the call that is being replayed, one value after the other; nothing elsewhere.
  // Who asks notes the answer too.
  [[nodiscard]] virtual std::optional<int64_t> given(OperationField) noexcept {
    return std::nullopt;
  }
  // Which of the free slots a page gets depends on the copies that are done by then.
  [[nodiscard]] SlotId hand_out(SlotAllocator& slots) noexcept override;
  // A call takes in failed copies in stages: 0 under its lock, then each time it looks again after
  // it has waited for copies.
  void next_stage() noexcept { ++stage_; }
  [[nodiscard]] int64_t stage() const noexcept { return stage_; }
  // A call that changes things has come past the sink.
  void saw_unknown_call() noexcept { saw_unknown_call_.store(true, std::memory_order_relaxed); }

 protected:
  // Under the mutex. They may not throw.
  virtual void begun(const Operation& operation) noexcept = 0;
  virtual void finished(const Operation& operation) noexcept = 0;
  virtual void stopped() noexcept {}
  [[nodiscard]] bool has_unknown_call() const noexcept {
    return saw_unknown_call_.load(std::memory_order_relaxed);
  }

  std::mutex mutex_;

 private:
  void add_noted(Operation& operation);
  void add_digests(Operation& operation, std::span<KVCache* const> caches) noexcept;

  const ManagerState& state_;
  int32_t state_every_;
  uint64_t num_operations_ = 0;
  bool is_stopped_ = false;
  std::optional<Operation> noted_;  // by the call that is running
  int64_t stage_ = 0;
  std::atomic<bool> saw_unknown_call_{false};
  std::atomic<std::thread::id> owner_{};
};

}  // namespace helicore::kv
