#include "helicore/kv/operation_sink.h"

#include <exception>
#include <shared_mutex>
#include <utility>

#include "helicore/kv/manager_state.h"
#include "helicore/kv/state_digest.h"

namespace helicore::kv {
namespace {

bool is_about_sizes(OperationKind kind) {
  return kind == OperationKind::kResizeLevel || kind == OperationKind::kMaintain ||
         kind == OperationKind::kAdjust;
}

}  // namespace

void OperationSink::run(Operation& operation, std::span<KVCache* const> caches,
                        const std::function<void()>& call) {
  const std::lock_guard lock(mutex_);
  struct Inside {
    std::atomic<std::thread::id>& owner;
    explicit Inside(std::atomic<std::thread::id>& o) : owner(o) {
      owner.store(std::this_thread::get_id(), std::memory_order_relaxed);
    }
    ~Inside() { owner.store(std::thread::id(), std::memory_order_relaxed); }
  };
  if (is_stopped_) {
    const Inside inside(owner_);
    return call();
  }
  begun(operation);
  noted_.emplace(Operation{operation.kind, {}});
  stage_ = 0;
  try {
    const Inside inside(owner_);
    call();
  } catch (...) {
    operation.set(OperationField::kOutcome, static_cast<int64_t>(OperationOutcome::kThrew));
    operation.set(OperationField::kError, static_cast<int64_t>(current_error()));
    add_noted(operation);
    add_digests(operation, {});
    finished(operation);
    throw;
  }
  if (operation.find(OperationField::kOutcome) == nullptr) {
    operation.set(OperationField::kOutcome, static_cast<int64_t>(OperationOutcome::kDone));
  }
  add_noted(operation);
  add_digests(operation, caches);
  finished(operation);
}

void OperationSink::note(OperationField field, std::span<const int64_t> values) noexcept {
  if (!noted_) return;  // stopped
  try {
    auto& all = noted_->list(field);
    all.insert(all.end(), values.begin(), values.end());
  } catch (const std::exception&) {
    saw_unknown_call();  // the log would not replay
  }
}

void OperationSink::add_noted(Operation& operation) {
  for (Operation::Entry& entry : noted_->entries) operation.entries.push_back(std::move(entry));
  noted_.reset();
}

SlotId OperationSink::hand_out(SlotAllocator& slots) noexcept {
  if (!is_inside()) return slots.allocate();
  const auto slot = given(OperationField::kSlots);
  if (slot && *slot >= 0 && *slot < slots.capacity()) {
    const SlotId known(static_cast<int32_t>(*slot));
    if (slots.take(known)) {
      note(OperationField::kSlots, known.value());
      return known;
    }
  }
  const SlotId own = slots.allocate();
  note(OperationField::kSlots, own.value());
  return own;
}

void OperationSink::add_digests(Operation& operation, std::span<KVCache* const> caches) noexcept {
  try {
    const std::shared_lock lock(state_.mutex);
    operation.set(OperationField::kCounters, static_cast<int64_t>(counters_digest(state_, caches)));
    ++num_operations_;
    if (state_every_ > 0 && num_operations_ % static_cast<uint64_t>(state_every_) == 0) {
      operation.set(OperationField::kState, static_cast<int64_t>(state_digest(state_)));
    }
    if (operation.find(OperationField::kState) != nullptr || is_about_sizes(operation.kind)) {
      operation.set(OperationField::kSizes, static_cast<int64_t>(sizes_digest(state_)));
    }
  } catch (const std::exception&) {
    // Without memory there is no digest: the operation is noted without one.
  }
}

void OperationSink::stop() {
  const std::lock_guard lock(mutex_);
  if (is_stopped_) return;
  is_stopped_ = true;
  stopped();
}

}  // namespace helicore::kv
