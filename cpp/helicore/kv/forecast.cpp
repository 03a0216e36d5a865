#include "helicore/kv/forecast.h"

#include <algorithm>

#include "helicore/core/error.h"

namespace helicore::kv {
namespace {

constexpr const char* kWhere = "kv.forecast";
constexpr int64_t kForever = INT64_MAX;

PoolGroupId group_at(size_t index) { return PoolGroupId(static_cast<int32_t>(index)); }

void check(const SequencePlan& plan) {
  HELICORE_CHECK(plan.history_length >= 0 && plan.history_length <= plan.capacity, kWhere,
                 "history_length must be in 0..capacity (", plan.capacity, "), got ",
                 plan.history_length);
  HELICORE_CHECK(plan.final_capacity >= plan.capacity, kWhere,
                 "final_capacity must be >= capacity (", plan.capacity, "), got ",
                 plan.final_capacity);
  HELICORE_CHECK(plan.tokens_per_step >= 1, kWhere, "tokens_per_step must be >= 1, got ",
                 plan.tokens_per_step);
  HELICORE_CHECK(plan.lookahead >= 0, kWhere, "lookahead must be >= 0, got ", plan.lookahead);
  HELICORE_CHECK(plan.shared_blocks >= 0, kWhere, "shared_blocks must be >= 0, got ",
                 plan.shared_blocks);
}

struct Change {
  int64_t step = 0;  // > 0
  int64_t delta = 0;
};

// What one sequence holds of one life cycle: slots at step 0 and every change after it. O(1) per
// change.
class SequenceChanges {
 public:
  SequenceChanges(const SequencePlan& plan, int32_t tokens_per_block)
      : plan_(plan), tpb_(tokens_per_block), last_step_(first_step_with(plan.final_capacity)) {}

  // Appends the changes, the release of all at the end included, and returns the slots at step 0.
  int64_t add(const LifeCycle& life_cycle, std::vector<Change>& changes) const {
    const int64_t at_first = slots_at_first(life_cycle);
    int64_t held = at_first;
    if (life_cycle.kind == LayerType::kAttention) {
      held += add_opened(changes);
      if (life_cycle.window) held -= add_lost(life_cycle, changes);
    }
    if (held != 0) changes.push_back({last_step_ + 1, -held});
    return at_first;
  }

 private:
  [[nodiscard]] int64_t slots_at_first(const LifeCycle& life_cycle) const {
    if (life_cycle.kind == LayerType::kSsm) return 1;
    const int32_t blocks = ceil_div(plan_.capacity, tpb_);
    const int32_t begin = std::min(plan_.shared_blocks, blocks);
    const auto stale = life_cycle.stale_range(plan_.history_length, tpb_);
    return blocks - begin - std::max(0, std::min(stale.end, blocks) - std::max(stale.begin, begin));
  }

  // Blocks that the capacity enters.
  int64_t add_opened(std::vector<Change>& changes) const {
    int64_t count = 0;
    int64_t block = std::max(ceil_div(plan_.capacity, tpb_), plan_.shared_blocks);
    for (; block * tpb_ < plan_.final_capacity; ++block, ++count) {
      changes.push_back({first_step_with(block * tpb_ + 1), 1});
    }
    return count;
  }

  // Blocks that the window leaves: block b at the first history of (b + 1) * tpb + window - 1, a
  // step after the capacity less the lookahead reaches that. It is open by then. A block lost in
  // the step after the last is part of the release at the end.
  int64_t add_lost(const LifeCycle& life_cycle, std::vector<Change>& changes) const {
    const int64_t offset = tpb_ + int64_t{*life_cycle.window} - 1 + plan_.lookahead;
    const auto stale = life_cycle.stale_range(plan_.history_length, tpb_);
    int64_t count = 0;
    int64_t block = std::max({stale.end, life_cycle.num_sink_blocks, plan_.shared_blocks});
    for (; block * tpb_ + offset <= plan_.final_capacity; ++block, ++count) {
      changes.push_back({first_step_with(block * tpb_ + offset) + 1, -1});
    }
    return count;
  }

  // The first step whose capacity is at least `tokens`, which is at most the final one.
  [[nodiscard]] int64_t first_step_with(int64_t tokens) const {
    const int64_t more = tokens - plan_.capacity;
    return more <= 0 ? 0 : (more + plan_.tokens_per_step - 1) / plan_.tokens_per_step;
  }

  const SequencePlan& plan_;
  int32_t tpb_;
  int64_t last_step_;
};

// The sum of `sign` times the changes from `start` on. In the time of a sort, or less when steps
// are about as many as changes.
StepFunction sum_of(int64_t start, std::vector<Change> changes, int64_t sign) {
  StepFunction sum{{0}, {start}};
  int64_t value = start;
  const auto add = [&](int64_t step, int64_t delta) {
    if (delta == 0) return;
    value += sign * delta;
    sum.steps.push_back(step);
    sum.values.push_back(value);
  };
  int64_t last = 0;
  for (const Change& change : changes) last = std::max(last, change.step);
  if (last <= 4 * static_cast<int64_t>(changes.size())) {
    std::vector<int64_t> deltas(static_cast<size_t>(last) + 1, 0);
    for (const Change& change : changes) deltas[static_cast<size_t>(change.step)] += change.delta;
    for (int64_t step = 1; step <= last; ++step) add(step, deltas[static_cast<size_t>(step)]);
    return sum;
  }
  std::sort(changes.begin(), changes.end(),
            [](const Change& a, const Change& b) { return a.step < b.step; });
  for (size_t i = 0; i < changes.size();) {
    const int64_t step = changes[i].step;
    int64_t delta = 0;
    for (; i < changes.size() && changes[i].step == step; ++i) delta += changes[i].delta;
    add(step, delta);
  }
  return sum;
}

struct GroupChanges {
  int64_t at_first = 0;
  std::vector<Change> changes{};
};

TypedVec<PoolGroupId, GroupChanges> changes_of(std::span<const SequencePlan> plans,
                                               const ForecastShape& shape) {
  TypedVec<PoolGroupId, GroupChanges> groups(shape.layout->groups().count());
  for (const SequencePlan& plan : plans) {
    check(plan);
    const SequenceChanges sequence(plan, shape.tokens_per_block);
    for (size_t i = 0; i < shape.registry->count(); ++i) {
      const LifeCycleId id(static_cast<int32_t>(i));
      GroupChanges& group = groups[shape.layout->group_of(id)];
      group.at_first += sequence.add((*shape.registry)[id], group.changes);
    }
  }
  return groups;
}

int64_t end_of(const StepFunction& function, size_t i) {
  return i + 1 < function.steps.size() ? function.steps[i + 1] : kForever;
}

size_t index_at(const StepFunction& function, int64_t step) {
  const auto after = std::upper_bound(function.steps.begin(), function.steps.end(), step);
  return static_cast<size_t>(after - function.steps.begin()) - 1;
}

// Visits every pair (piece of need, piece of available) that meets when the need starts at `start`.
template <typename Visitor>
void for_each_meeting(const StepFunction& need, const StepFunction& available, int64_t start,
                      const Visitor& visit) {
  size_t a = index_at(available, start);
  for (size_t n = 0; n + 1 < need.steps.size();) {  // the last piece needs nothing
    if (need.values[n] > 0) visit(n, a);
    const int64_t need_end = start + need.steps[n + 1];
    const int64_t available_end = end_of(available, a);
    if (need_end <= available_end) ++n;
    if (available_end <= need_end) ++a;
  }
}

// The first start >= `start` from which the need is met to its end; none when there is no such.
std::optional<int64_t> first_fit(const StepFunction& need, const StepFunction& available,
                                 int64_t start) {
  for (;;) {
    int64_t next = start;
    for_each_meeting(need, available, start, [&](size_t n, size_t a) {
      if (need.values[n] <= available.values[a]) return;
      // While the two pieces meet there is no fit, and every start up to here makes them meet.
      const int64_t end = end_of(available, a);
      next = std::max(next, end == kForever ? kForever : end - need.steps[n]);
    });
    if (next == kForever) return std::nullopt;
    if (next == start) return start;
    start = next;
  }
}

int64_t least_spare(const StepFunction& need, const StepFunction& available) {
  int64_t spare = kForever;
  for_each_meeting(need, available, 0, [&](size_t n, size_t a) {
    spare = std::min(spare, available.values[a] - need.values[n]);
  });
  return spare;
}

}  // namespace

int64_t StepFunction::at(int64_t step) const {
  HELICORE_CHECK(step >= 0, kWhere, "step must be >= 0, got ", step);
  return values[index_at(*this, step)];
}

SequencePlan plan_of_request(int32_t prompt_length, int32_t output_tokens, int32_t reused_blocks,
                             int32_t tokens_per_block) {
  HELICORE_CHECK(tokens_per_block >= 1, kWhere, "tokens_per_block must be >= 1, got ",
                 tokens_per_block);
  HELICORE_CHECK(prompt_length >= 1, kWhere, "prompt_length must be >= 1, got ", prompt_length);
  HELICORE_CHECK(output_tokens >= 1 && output_tokens - 1 <= INT32_MAX - prompt_length, kWhere,
                 "output_tokens must be in 1..", INT32_MAX - prompt_length, ", got ",
                 output_tokens);
  HELICORE_CHECK(reused_blocks >= 0 && reused_blocks <= prompt_length / tokens_per_block, kWhere,
                 "reused_blocks must be in 0..", prompt_length / tokens_per_block, ", got ",
                 reused_blocks);
  return {.capacity = prompt_length,
          .history_length = reused_blocks * tokens_per_block,
          .final_capacity = prompt_length + output_tokens - 1,
          .shared_blocks = reused_blocks};
}

SlotTimeline slots_over_time(const SequencePlan& plan, const ForecastShape& shape) {
  SlotTimeline timeline;
  for (GroupChanges& group : changes_of({&plan, 1}, shape)) {
    timeline.push_back(sum_of(group.at_first, std::move(group.changes), 1));
  }
  return timeline;
}

Forecast::Forecast(const ForecastShape& shape, std::span<const SequencePlan> running,
                   const GroupSlots& available)
    : shape_(shape) {
  const size_t num_groups = shape.layout->groups().count();
  HELICORE_CHECK(available.count() == num_groups, kWhere,
                 "available must have one count per group (", num_groups, "), got ",
                 available.count());
  auto groups = changes_of(running, shape);
  for (size_t g = 0; g < num_groups; ++g) {
    available_.push_back(
        sum_of(available[group_at(g)], std::move(groups[group_at(g)].changes), -1));
  }
}

GroupSlots Forecast::needed_within(int64_t num_steps) const {
  HELICORE_CHECK(num_steps >= 0, kWhere, "num_steps must be >= 0, got ", num_steps);
  GroupSlots needed(available_.count(), 0);
  for (size_t g = 0; g < needed.count(); ++g) {
    const StepFunction& function = available_[group_at(g)];
    for (size_t i = 0; i < function.steps.size() && function.steps[i] <= num_steps; ++i) {
      const int64_t more = function.values[0] - function.values[i];
      needed[group_at(g)] = std::max(needed[group_at(g)], more);
    }
  }
  return needed;
}

std::optional<Shortage> Forecast::first_shortage() const {
  std::optional<Shortage> first;
  for (size_t g = 0; g < available_.count(); ++g) {
    const StepFunction& function = available_[group_at(g)];
    const auto it = std::find_if(function.values.begin(), function.values.end(),
                                 [](int64_t value) { return value < 0; });
    if (it == function.values.end()) continue;
    const int64_t step = function.steps[static_cast<size_t>(it - function.values.begin())];
    if (!first || step < first->step) first = {step, group_at(g), -*it};
  }
  return first;
}

AdmissionForecast Forecast::admission(const SequencePlan& request) const {
  const SlotTimeline need = slots_over_time(request, shape_);
  AdmissionForecast answer{.fits_now = true, .steps_until_fits = 0};
  int64_t latest = 0;
  for (size_t g = 0; g < need.count(); ++g) {
    const auto fit = first_fit(need[group_at(g)], available_[group_at(g)], 0);
    if (fit.value_or(kForever) <= latest) continue;
    latest = fit.value_or(kForever);
    answer.fits_now = false;
    answer.limiting_group = group_at(g);
  }
  if (answer.fits_now) {
    int64_t least = kForever;
    for (size_t g = 0; g < need.count(); ++g) {
      const int64_t spare = least_spare(need[group_at(g)], available_[group_at(g)]);
      if (spare < least) answer.limiting_group = group_at(g);
      least = std::min(least, spare);
    }
  }
  const auto& needed = need[answer.limiting_group].values;
  answer.peak_needed = *std::max_element(needed.begin(), needed.end());
  // A later start of one group may be too late for another: go on until all agree.
  for (int64_t start = -1; answer.steps_until_fits && start != *answer.steps_until_fits;) {
    start = *answer.steps_until_fits;
    for (size_t g = 0; g < need.count() && answer.steps_until_fits; ++g) {
      answer.steps_until_fits =
          first_fit(need[group_at(g)], available_[group_at(g)], *answer.steps_until_fits);
    }
  }
  return answer;
}

}  // namespace helicore::kv
