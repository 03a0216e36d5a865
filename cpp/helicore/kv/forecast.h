// What the running sequences will need, step by step, and when there will be room for another one.
//
// The model: sequence i takes one step after another until its last, whose capacity is
// `final_capacity`; after it all its slots come back. Step n (0 is the one at hand, for which slots
// are already held) has
//   capacity(n) = min(capacity + n * tokens_per_step, final_capacity)
//   history(0) = history_length,   history(n) = max(history_length, capacity(n - 1) - lookahead)
// and in every life cycle the sequence holds the blocks of its capacity that are not stale at its
// history. No sequence joins. Blocks that are shared with others are left out of the account: they
// are neither needed nor given back. So the forecast errs late, not early, as long as sequences do
// not outlive their final capacity.
//
// Room for scratch blocks is not forecast: where they are in use, a prefill needs less than this.
//
// The timeline is built from the block crossings alone, never token by token: O(b log b) for b
// blocks that the sequences will still open or lose.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "helicore/kv/quota.h"

namespace helicore::kv {

// One sequence, tokens unless said.
struct SequencePlan {
  int32_t capacity = 0;         // of the step at hand, >= history_length
  int32_t history_length = 0;   // of the step at hand, >= 0
  int32_t final_capacity = 0;   // of the last step, >= capacity
  int32_t tokens_per_step = 1;  // by which capacity grows, >= 1
  int32_t lookahead = 0;  // at the end of capacity that never become history: draft tokens, >= 0
  int32_t shared_blocks = 0;  // blocks from the start that other sequences hold as well, >= 0
};

// A request that needs slots for the prompt at its first step and `output_tokens` - 1 steps more.
// `reused_blocks`: blocks of the prompt that running sequences hold; cached blocks that nobody
// holds are part of what is evictable and cost a slot each.
[[nodiscard]] SequencePlan plan_of_request(int32_t prompt_length, int32_t output_tokens,
                                           int32_t reused_blocks, int32_t tokens_per_block);

// Everything that a forecast knows about pools. Refers to registry and layout, which must outlive
// it.
struct ForecastShape {
  const LifeCycleRegistry* registry = nullptr;
  const StorageLayout* layout = nullptr;
  int32_t tokens_per_block = 1;
};

struct AdmissionForecast {
  bool fits_now = false;
  // Steps to wait until the request can run to its end without preempting anyone; 0 when it fits
  // now, none when it never fits.
  std::optional<int64_t> steps_until_fits = std::nullopt;
  // Where it does not fit now: the group that is short for longest. Where it fits: the group with
  // the fewest slots to spare.
  PoolGroupId limiting_group{0};
  int64_t peak_needed = 0;  // slots: the most that the request holds of the limiting group
  friend bool operator==(const AdmissionForecast&, const AdmissionForecast&) = default;
};

// The first time that the running sequences alone want more than there is.
struct Shortage {
  int64_t step = 0;
  PoolGroupId pool_group{0};
  int64_t missing = 0;  // slots
  friend bool operator==(const Shortage&, const Shortage&) = default;
};

// An integer that changes at some steps: values[i] holds in steps [steps[i], steps[i + 1]), the
// last one for ever.
struct StepFunction {
  std::vector<int64_t> steps;  // ascending; the first is 0
  std::vector<int64_t> values;
  [[nodiscard]] int64_t at(int64_t step) const;  // step >= 0
  friend bool operator==(const StepFunction&, const StepFunction&) = default;
};

using SlotTimeline = TypedVec<PoolGroupId, StepFunction>;  // slots of each group

// The slots that a sequence holds, shared blocks left out; 0 after its last step. Throws
// InvalidArgument for a plan out of range.
[[nodiscard]] SlotTimeline slots_over_time(const SequencePlan& plan, const ForecastShape& shape);

// Immutable once made; any thread may ask it.
class Forecast {
 public:
  // `available`: slots per group that are free or can be evicted at step 0, while every sequence of
  // `running` holds what its step 0 needs. Throws InvalidArgument for a plan out of range.
  Forecast(const ForecastShape& shape, std::span<const SequencePlan> running,
           const GroupSlots& available);

  // Free or evictable slots over time; below 0 where the running sequences will be short.
  [[nodiscard]] const SlotTimeline& available() const noexcept { return available_; }
  // The most slots beyond today's that the running sequences hold together at any of the steps
  // 0..num_steps: what must be free or evictable for them to get there. >= 0.
  [[nodiscard]] GroupSlots needed_within(int64_t num_steps) const;
  [[nodiscard]] std::optional<Shortage> first_shortage() const;
  // Whether and when `request` fits. It is taken to start at the step of the answer.
  [[nodiscard]] AdmissionForecast admission(const SequencePlan& request) const;

 private:
  ForecastShape shape_;
  SlotTimeline available_;
};

}  // namespace helicore::kv
