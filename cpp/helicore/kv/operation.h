// One call on a manager or a cache as a value: what was asked and what came of it. The operation
// log stores it, the replayer runs it again, describe() prints it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "helicore/kv/retention.h"
#include "helicore/kv/types.h"

namespace helicore::kv {

// Numbers are part of the file format: new ones are added at the end.
enum class OperationKind : uint8_t {
  kCreate = 1,
  kResume = 2,
  kSuspend = 3,
  kResize = 4,
  kTruncate = 5,
  kFork = 6,
  kCommit = 7,
  kStopCommitting = 8,
  kClose = 9,
  kSetIndexRow = 10,
  kResumeMany = 11,
  kResizeMany = 12,
  kTruncateMany = 13,
  kCommitMany = 14,
  kClearReusableBlocks = 15,
  kShutdown = 16,
  kPin = 17,
  kPrefetch = 18,
  kPollPrefetch = 19,  // one that may start a batch; others change nothing and are not noted
  kCancelPrefetch = 20,
  kPlanDrop = 21,
  kDrop = 22,
  kMakeStepStream = 23,
  kSubmitStep = 24,
  kCompleteStep = 25,
  kSetStream = 26,
  kResizeLevel = 27,
  kMaintain = 28,  // while a level is on its way to another size; elsewhere it changes nothing
  kAdjust = 29,
  kSetScratchReuse = 30,
  kExcludeStats = 31,
  kDrainEvents = 32,  // where there is a buffer, as kSnapshotEvents
  kSnapshotEvents = 33,
  kSelectOptionalReuse = 34,
};
// The name of the method, "unknown" for a number of a later version.
[[nodiscard]] std::string_view name_of(OperationKind kind) noexcept;

// What an operation may carry: each field is a list of integers, a scalar is a list of one. Numbers
// are part of the file format. Fields from kOutcome on are results.
enum class OperationField : uint8_t {
  kCaches = 1,  // in the order of their creation, 0 first; see kNullCache, kForeignCache
  kTokens = 2,
  kPriority = 3,
  kId = 4,
  kExpectedLength = 5,
  kLoraId = 6,
  kLoraGeneration = 7,
  kSaltNumber = 8,
  kSaltText = 9,  // one byte per entry
  kStream = 10,
  kCapacity = 11,  // of each cache
  kHistory = 12,
  kNumTokens = 13,
  kCounts = 14,
  kIsEnd = 15,
  kGroup = 16,  // of layers; those that a selection keeps
  kBeam = 17,
  kRowSize = 18,
  kNumResults = 19,  // of a batch call, when the caller's array does not have one per cache
  kRetention = 20,   // per range: begin, has an end, end, priority, has a duration, ms
  kLevel = 21,
  kPlan = 22,  // in the order of their making, 0 first
  kStep = 23,
  kQuota = 24,  // bytes
  kBestEffort = 25,
  kMaxPages = 26,
  kIsEnabled = 27,
  kMaxEvents = 28,  // INT64_MAX: all
  kOutcome = 64,    // an OperationOutcome
  kError = 65,      // an OperationError, when the call threw
  kResults = 66,    // of a batch call: 1 or 0 per cache
  kReason = 67,     // per failed cache: domain, pool group, level, needed, free, evictable, gate
  kNewCache = 68,   // the cache that was made
  kMatched = 69,    // tokens that creation found
  kCounters = 70,   // counters_digest() after the call
  kState = 71,      // state_digest() after the call, every n-th call
  kNewPlan = 72,    // the plan that was made
  kNumPages = 73,   // that it names
  kNewStream = 74,  // the step stream that was made
  kNewStep = 75,
  // What came to the call from elsewhere; a replay gives it the same.
  kTimes = 76,     // readings of the clock, ns
  kLost = 77,      // failed copies that it took in: stage, count, page tags; see OperationSink
  kHeldBack = 78,  // 1: a prefetch started no batch because of copies under way
  // In the order of asking: the slots that pages got; 1 or 0: whether the memory of a group that
  // grows was to be had; whether the slots that a group is to lose were free and no copy under way
  // in them.
  kSlots = 79,
  kHadMemory = 80,
  kGaveBack = 81,
  // Results again.
  kNewQuota = 82,    // bytes of a level in effect
  kMinimum = 83,     // bytes that a level must have
  kGroupSlots = 84,  // that each pool group of a level hands out
  kPending = 85,     // slots that each is still to give back (> 0) or to get (< 0)
  kNumMoved = 86,    // pages
  kStarted = 87,     // 1 or 0: an adjustment
  kNumEvents = 88,
  kLastEvent = 89,  // the id of the last of them
  kSizes = 90,      // sizes_digest() after the call: each with kState, and of calls about sizes
  kDropped = 91,    // events, in all
};
[[nodiscard]] std::string_view name_of(OperationField field) noexcept;
[[nodiscard]] constexpr bool is_result(OperationField field) noexcept {
  return field >= OperationField::kOutcome;
}

enum class OperationOutcome : uint8_t { kDone = 0, kNoRoom = 1, kThrew = 2 };
enum class OperationError : uint8_t {
  kOther = 0,
  kInvalidArgument = 1,
  kLogicError = 2,
  kResourceBusy = 3,
  kNotSupported = 4,
  kOutOfMemory = 5,
  kInternalError = 6,
  kOutOfPages = 7,
};
[[nodiscard]] std::string_view name_of(OperationError error) noexcept;
// The kind of the exception that is being handled; call inside a catch block.
[[nodiscard]] OperationError current_error() noexcept;

inline constexpr int64_t kNullCache = -1;
inline constexpr int64_t kForeignCache = -2;  // of another manager

struct Operation {
  struct Entry {
    OperationField field{};
    std::vector<int64_t> values{};
    friend bool operator==(const Entry&, const Entry&) = default;
  };
  OperationKind kind{};
  std::vector<Entry> entries{};  // at most one per field

  void set(OperationField field, int64_t value) { list(field).assign(1, value); }
  // Nothing when there is no value.
  void set(OperationField field, const std::optional<int64_t>& value) {
    if (value) set(field, *value);
  }
  template <typename T>
  void set_all(OperationField field, std::span<const T> values) {
    list(field).assign(values.begin(), values.end());
  }
  // The values of a field, which it gets when it has none.
  [[nodiscard]] std::vector<int64_t>& list(OperationField field);
  [[nodiscard]] const std::vector<int64_t>* find(OperationField field) const noexcept;
  // The first value of a field.
  [[nodiscard]] std::optional<int64_t> get(OperationField field) const noexcept;
  [[nodiscard]] OperationOutcome outcome() const noexcept {
    return static_cast<OperationOutcome>(get(OperationField::kOutcome).value_or(0));
  }
  void add_reason(const NoRoom& reason);
  void set_scope(const ReuseScope& scope);
  void set_retention(std::span<const RetentionRange> ranges);
  [[nodiscard]] std::vector<RetentionRange> retention() const;
  [[nodiscard]] ReuseScope scope() const;
  friend bool operator==(const Operation&, const Operation&) = default;
};

// "resize(cache=3, capacity=128) -> NO_ROOM, reason=[...]". Lists are cut after `max_list` entries.
[[nodiscard]] std::string describe(const Operation& operation, size_t max_list = 12);

// The bytes of an operation: kind, then (field, count, values) in variable-length integers, so that
// a reader can step over fields that it does not know.
void encode(const Operation& operation, std::vector<std::byte>& out);
// Nothing when the bytes are no operation.
[[nodiscard]] std::optional<Operation> decode_operation(std::span<const std::byte> bytes);

}  // namespace helicore::kv
