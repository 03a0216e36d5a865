#include "helicore/kv/forecast.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "helicore/core/error.h"
#include "kv/kv_configs.h"
#include "kv/planning_configs.h"

namespace helicore::kv::testing {
namespace {

constexpr PoolGroupId kFirst{0};
constexpr PoolGroupId kSecond{1};

GroupSlots counts(std::vector<int64_t> values) {
  GroupSlots result;
  result.raw() = std::move(values);
  return result;
}

ForecastShape shape_of(const Planned& p) {
  return {&p.registry, &p.layout, p.config.tokens_per_block};
}

// ------------------------------------------------------------------ the slow model

// A sequence that is walked step by step and counted block by block.
class NaiveSequence {
 public:
  NaiveSequence(const SequencePlan& plan, const Planned& p)
      : plan_(plan), p_(p), capacity_(plan.capacity), history_(plan.history_length) {}

  [[nodiscard]] bool done() const { return done_; }
  [[nodiscard]] GroupSlots held() const {
    GroupSlots held(p_.num_groups(), 0);
    if (done_) return held;
    for (size_t i = 0; i < p_.registry.count(); ++i) {
      const LifeCycleId id(static_cast<int32_t>(i));
      held[p_.layout.group_of(id)] += blocks_kept(p_.registry[id], {capacity_, history_},
                                                  plan_.shared_blocks, p_.config.tokens_per_block);
    }
    return held;
  }
  void step() {
    if (capacity_ == plan_.final_capacity) done_ = true;
    history_ = std::max(history_, capacity_ - plan_.lookahead);
    for (int32_t i = 0; i < plan_.tokens_per_step && capacity_ < plan_.final_capacity; ++i) {
      ++capacity_;
    }
  }

 private:
  SequencePlan plan_;
  const Planned& p_;
  int32_t capacity_;
  int32_t history_;
  bool done_ = false;
};

std::vector<GroupSlots> walk(const SequencePlan& plan, const Planned& p) {
  std::vector<GroupSlots> held;
  for (NaiveSequence sequence(plan, p); !sequence.done(); sequence.step()) {
    held.push_back(sequence.held());
  }
  return held;
}

// Available slots at steps 0..; the last entry holds for ever.
std::vector<GroupSlots> walk(const std::vector<SequencePlan>& running, const GroupSlots& available,
                             const Planned& p) {
  std::vector<GroupSlots> left{available};
  std::vector<std::vector<GroupSlots>> all;
  size_t length = 0;
  for (const SequencePlan& plan : running) {
    all.push_back(walk(plan, p));
    length = std::max(length, all.back().size());
  }
  for (size_t step = 1; step <= length; ++step) {
    GroupSlots now = available;
    for (const auto& held : all) {
      for (size_t i = 0; i < now.count(); ++i) {
        const PoolGroupId g(static_cast<int32_t>(i));
        now[g] += held[0][g] - (step < held.size() ? held[step][g] : 0);
      }
    }
    left.push_back(now);
  }
  return left;
}

bool fits(const std::vector<GroupSlots>& need, const std::vector<GroupSlots>& left, size_t start,
          std::optional<PoolGroupId> only = std::nullopt) {
  for (size_t k = 0; k < need.size(); ++k) {
    const GroupSlots& there = left[std::min(start + k, left.size() - 1)];
    for (size_t i = 0; i < there.count(); ++i) {
      const PoolGroupId g(static_cast<int32_t>(i));
      if (only && g != *only) continue;
      if (need[k][g] > 0 && need[k][g] > there[g]) return false;
    }
  }
  return true;
}

std::optional<int64_t> first_start(const std::vector<GroupSlots>& need,
                                   const std::vector<GroupSlots>& left,
                                   std::optional<PoolGroupId> only = std::nullopt) {
  for (size_t start = 0; start < left.size(); ++start) {
    if (fits(need, left, start, only)) return static_cast<int64_t>(start);
  }
  return std::nullopt;
}

SequencePlan random_plan(Dice& dice) {
  SequencePlan plan;
  plan.capacity = dice.in(0, 60);
  plan.history_length = dice.in(0, plan.capacity);
  plan.final_capacity = plan.capacity + (dice.below(5) == 0 ? 0 : dice.in(0, 90));
  plan.tokens_per_step = dice.coin() ? 1 : dice.in(1, 7);
  plan.lookahead = dice.coin() ? 0 : dice.in(0, 6);
  plan.shared_blocks = dice.coin() ? 0 : dice.in(0, 8);
  return plan;
}

struct Scene {
  explicit Scene(Dice& dice) : planned(random_config(dice, 500)) {
    for (int64_t i = dice.below(6); i > 0; --i) running.push_back(random_plan(dice));
    for (size_t g = 0; g < planned.num_groups(); ++g) available.push_back(dice.below(30));
    request = random_plan(dice);
  }
  Planned planned;
  std::vector<SequencePlan> running;
  GroupSlots available;
  SequencePlan request;
};

// ------------------------------------------------------------------ against the slow model

TEST(Forecast, random_timelines_agree_with_a_walk_step_by_step) {
  Dice dice(41);
  for (int round = 0; round < 1500; ++round) {
    const Planned p(random_config(dice, 500));
    const SequencePlan plan = random_plan(dice);
    const SlotTimeline timeline = slots_over_time(plan, shape_of(p));
    const auto held = walk(plan, p);
    for (size_t i = 0; i < p.num_groups(); ++i) {
      const PoolGroupId g(static_cast<int32_t>(i));
      for (size_t step = 0; step < held.size() + 3; ++step) {
        ASSERT_EQ(timeline[g].at(static_cast<int64_t>(step)),
                  step < held.size() ? held[step][g] : 0)
            << "round " << round << " step " << step << " group " << i;
      }
      ASSERT_TRUE(std::is_sorted(timeline[g].steps.begin(), timeline[g].steps.end()));
      ASSERT_EQ(std::adjacent_find(timeline[g].values.begin(), timeline[g].values.end()),
                timeline[g].values.end())
          << "a piece where nothing changes";
    }
  }
}

TEST(Forecast, random_needs_and_shortages_agree_with_a_walk_step_by_step) {
  Dice dice(43);
  int num_short = 0;
  for (int round = 0; round < 400; ++round) {
    const Scene s(dice);
    const Forecast forecast(shape_of(s.planned), s.running, s.available);
    const auto left = walk(s.running, s.available, s.planned);
    GroupSlots most(s.available.count(), 0);
    std::optional<Shortage> expected;
    for (size_t step = 0; step < left.size(); ++step) {
      for (size_t i = 0; i < most.count(); ++i) {
        const PoolGroupId g(static_cast<int32_t>(i));
        ASSERT_EQ(forecast.available()[g].at(static_cast<int64_t>(step)), left[step][g])
            << "round " << round << " step " << step;
        most[g] = std::max(most[g], s.available[g] - left[step][g]);
        if (!expected && left[step][g] < 0) {
          expected = {static_cast<int64_t>(step), g, -left[step][g]};
        }
      }
      ASSERT_EQ(forecast.needed_within(static_cast<int64_t>(step)).raw(), most.raw());
    }
    ASSERT_EQ(forecast.first_shortage(), expected) << "round " << round;
    num_short += expected.has_value();
  }
  EXPECT_GT(num_short, 20);
}

TEST(Forecast, random_admissions_agree_with_trying_every_start) {
  Dice dice(47);
  int64_t num_now = 0;
  int64_t num_later = 0;
  int64_t num_never = 0;
  for (int round = 0; round < 3000; ++round) {
    const Scene s(dice);
    const Forecast forecast(shape_of(s.planned), s.running, s.available);
    const AdmissionForecast answer = forecast.admission(s.request);
    const auto need = walk(s.request, s.planned);
    const auto left = walk(s.running, s.available, s.planned);
    const auto expected = first_start(need, left);
    ASSERT_EQ(answer.steps_until_fits, expected) << "round " << round;
    ASSERT_EQ(answer.fits_now, expected == 0) << "round " << round;

    int64_t peak = 0;
    for (const GroupSlots& held : need) peak = std::max(peak, held[answer.limiting_group]);
    ASSERT_EQ(answer.peak_needed, peak) << "round " << round;
    if (answer.fits_now) {  // no other group has fewer slots to spare
      const auto spare = [&](PoolGroupId g) {
        int64_t least = INT64_MAX;
        for (size_t k = 0; k < need.size(); ++k) {
          const GroupSlots& there = left[std::min(k, left.size() - 1)];
          if (need[k][g] > 0) least = std::min(least, there[g] - need[k][g]);
        }
        return least;
      };
      for (size_t i = 0; i < need[0].count(); ++i) {
        ASSERT_LE(spare(answer.limiting_group), spare(PoolGroupId(static_cast<int32_t>(i))))
            << "round " << round;
      }
    }
    if (!answer.fits_now) {  // no other group alone would hold it back for longer
      const auto own = first_start(need, left, answer.limiting_group);
      for (size_t i = 0; i < need[0].count(); ++i) {
        const auto other = first_start(need, left, PoolGroupId(static_cast<int32_t>(i)));
        ASSERT_TRUE(!own || (other && *other <= *own)) << "round " << round;
      }
    }
    (expected == 0 ? num_now : expected ? num_later : num_never) += 1;
  }
  EXPECT_GT(num_now, 100);
  EXPECT_GT(num_later, 100);
  EXPECT_GT(num_never, 100);
}

TEST(Forecast, the_comparison_sees_a_forecast_without_lookahead_shares_or_windows) {
  Dice dice(53);
  int no_lookahead = 0;
  int no_shares = 0;
  int no_windows = 0;
  for (int round = 0; round < 300; ++round) {
    const Planned p(random_config(dice, 500));
    const SequencePlan plan = random_plan(dice);
    const auto differs = [&](const SequencePlan& other, const Planned& shape) {
      const auto held = walk(plan, p);
      const SlotTimeline timeline = slots_over_time(other, shape_of(shape));
      for (size_t step = 0; step < held.size(); ++step) {
        for (size_t i = 0; i < p.num_groups() && i < shape.num_groups(); ++i) {
          const PoolGroupId g(static_cast<int32_t>(i));
          if (timeline[g].at(static_cast<int64_t>(step)) != held[step][g]) return true;
        }
      }
      return false;
    };
    SequencePlan other = plan;
    other.lookahead = 0;
    no_lookahead += differs(other, p);
    other = plan;
    other.shared_blocks = 0;
    no_shares += differs(other, p);
    KVCacheManagerConfig full = p.config;
    for (LayerConfig& layer : full.layers) {
      if (auto* attention = std::get_if<AttentionLayerConfig>(&layer)) {
        attention->sliding_window_size.reset();
        attention->num_sink_tokens.reset();
      }
    }
    no_windows += differs(plan, Planned(full));
    ASSERT_FALSE(differs(plan, p));
  }
  EXPECT_GT(no_lookahead, 10);
  EXPECT_GT(no_shares, 10);
  EXPECT_GT(no_windows, 10);
}

// ------------------------------------------------------------------ by hand

TEST(Forecast, a_request_waits_for_the_sequence_that_ends) {
  const Planned p(attention_config(4, 1));
  // Holds 2 of 5 slots, grows to 12 tokens in 4 steps, ends after the step at 12.
  const std::vector<SequencePlan> running{
      {.capacity = 8, .history_length = 7, .final_capacity = 12}};
  const Forecast forecast(shape_of(p), running, counts({3}));
  EXPECT_EQ(forecast.available()[kFirst], (StepFunction{{0, 1, 5}, {3, 2, 5}}));
  EXPECT_EQ(forecast.needed_within(0)[kFirst], 0);
  EXPECT_EQ(forecast.needed_within(1)[kFirst], 1);
  EXPECT_FALSE(forecast.first_shortage().has_value());

  const auto ask = [&](int32_t prompt, int32_t output) {
    return forecast.admission(plan_of_request(prompt, output, 0, 4));
  };
  EXPECT_EQ(ask(8, 1), (AdmissionForecast{true, 0, kFirst, 2}));
  EXPECT_EQ(ask(12, 1), (AdmissionForecast{true, 0, kFirst, 3})) << "over before the other grows";
  EXPECT_EQ(ask(12, 2), (AdmissionForecast{false, 5, kFirst, 4}))
      << "its second step needs a fourth slot";
  EXPECT_EQ(ask(8, 6), (AdmissionForecast{false, 4, kFirst, 4}))
      << "two slots do for its first step; the others come back in time for its second";
  EXPECT_EQ(ask(20, 1), (AdmissionForecast{false, 5, kFirst, 5}));
  EXPECT_EQ(ask(21, 1), (AdmissionForecast{false, std::nullopt, kFirst, 6}));
}

TEST(Forecast, a_draft_group_that_is_full_holds_a_request_back) {
  auto config = attention_config(4, 1);
  config.layers = {AttentionLayerConfig{0, {{"k", 64}}},
                   AttentionLayerConfig{1, {{"k", 64}}, {}, {}, CacheDomain::kDraft}};
  const Planned p(config);
  const std::vector<SequencePlan> running{
      {.capacity = 4, .history_length = 3, .final_capacity = 6}};
  const Forecast forecast(shape_of(p), running, counts({100, 1}));
  EXPECT_EQ(forecast.admission(plan_of_request(8, 1, 0, 4)),
            (AdmissionForecast{false, 3, kSecond, 2}));
}

TEST(Forecast, reused_blocks_cost_nothing) {
  const Planned p(attention_config(4, 1));
  const Forecast forecast(shape_of(p), {}, counts({2}));
  EXPECT_TRUE(forecast.admission(plan_of_request(40, 4, 9, 4)).fits_now);
  EXPECT_FALSE(forecast.admission(plan_of_request(40, 4, 8, 4)).steps_until_fits.has_value());
}

TEST(Forecast, running_sequences_that_will_be_short_are_reported) {
  const Planned p(attention_config(4, 1));
  const std::vector<SequencePlan> running(
      3, {.capacity = 8, .history_length = 7, .final_capacity = 99});
  const Forecast forecast(shape_of(p), running, counts({5}));
  EXPECT_EQ(forecast.first_shortage(), (Shortage{5, kFirst, 1}));
}

TEST(Forecast, time_depends_on_blocks_and_not_on_tokens) {
  const Planned p(attention_config(1 << 20, 1, 1, 1));
  const SlotTimeline timeline = slots_over_time(
      {.capacity = 1, .history_length = 0, .final_capacity = INT32_MAX}, shape_of(p));
  EXPECT_EQ(timeline[kFirst].steps.size(), 2049u) << "2048 blocks and the end";
  EXPECT_EQ(timeline[kFirst].at(INT32_MAX - 1), 2048);
  EXPECT_EQ(timeline[kFirst].at(INT32_MAX), 0);
  EXPECT_EQ(timeline[kFirst].at(int64_t{1} << 60), 0);
}

TEST(Forecast, plans_out_of_range_name_the_field) {
  const Planned p(attention_config(4, 1));
  const auto refused = [&](const SequencePlan& plan) {
    EXPECT_THROW((void)slots_over_time(plan, shape_of(p)), InvalidArgument);
  };
  refused({.capacity = 4, .history_length = 5, .final_capacity = 4});
  refused({.capacity = 4, .history_length = -1, .final_capacity = 4});
  refused({.capacity = 4, .history_length = 0, .final_capacity = 3});
  refused({.capacity = 4, .final_capacity = 4, .tokens_per_step = 0});
  refused({.capacity = 4, .final_capacity = 4, .lookahead = -1});
  refused({.capacity = 4, .final_capacity = 4, .shared_blocks = -1});
  EXPECT_THROW((void)plan_of_request(0, 1, 0, 4), InvalidArgument);
  EXPECT_THROW((void)plan_of_request(8, 0, 0, 4), InvalidArgument);
  EXPECT_THROW((void)plan_of_request(8, INT32_MAX, 0, 4), InvalidArgument);
  EXPECT_THROW((void)plan_of_request(8, 1, 3, 4), InvalidArgument);
  EXPECT_THROW((void)plan_of_request(8, 1, 0, 0), InvalidArgument);
  EXPECT_THROW((void)Forecast(shape_of(p), {}, counts({1, 2})), InvalidArgument);
  const Forecast forecast(shape_of(p), {}, counts({1}));
  EXPECT_THROW((void)forecast.available()[kFirst].at(-1), InvalidArgument);
  EXPECT_THROW((void)forecast.needed_within(-1), InvalidArgument);
}

}  // namespace
}  // namespace helicore::kv::testing
