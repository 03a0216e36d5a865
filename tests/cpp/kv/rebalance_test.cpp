#include "helicore/kv/rebalance.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "helicore/core/error.h"
#include "kv/kv_configs.h"
#include "kv/planning_configs.h"

namespace helicore::kv::testing {
namespace {

constexpr int64_t kSecond = 1'000'000'000;

RebalancePolicy eager() {
  return {.min_samples = 0, .cooldown_ns = 0, .update_interval = 1, .new_weight_q32 = 1 << 30};
}

LengthMeans lengths_of(int32_t capacity, int32_t history_length) {
  LengthMeans lengths;
  lengths.add(capacity, history_length);
  return lengths;
}

GroupSlots slots(std::vector<int64_t> counts) {
  GroupSlots result;
  result.raw() = std::move(counts);
  return result;
}

TEST(LengthMeans, are_arithmetic_means_over_resizes) {
  LengthMeans lengths;
  EXPECT_EQ(lengths.capacity(), 0);
  for (int32_t capacity : {10, 20, 31}) lengths.add(capacity, capacity - 10);
  EXPECT_EQ(lengths.count(), 3);
  EXPECT_EQ(lengths.capacity(), 20);
  EXPECT_EQ(lengths.history_length(), 10);
  LengthMeans longest;
  for (int i = 0; i < 3; ++i) longest.add(INT32_MAX, INT32_MAX);
  EXPECT_EQ(longest.capacity(), INT32_MAX) << "sums must not overflow";
}

TEST(MovingAverage, counts_first_samples_alike_and_then_forgets) {
  MovingAverage average;
  for (int64_t value : {10, 20, 30, 40}) average.add(value, 1 << 20);
  EXPECT_EQ(average.value(), 25);
  MovingAverage quick;  // weight 1/4 from the fourth sample on
  for (int i = 0; i < 4; ++i) quick.add(100, 1 << 30);
  quick.add(500, 1 << 30);
  EXPECT_EQ(quick.value(), 200);
  for (int i = 0; i < 200; ++i) quick.add(7, 1 << 30);
  EXPECT_EQ(quick.value(), 7);
}

TEST(MovingAverage, agrees_with_floating_point_and_does_not_overflow) {
  Dice dice(5);
  MovingAverage average;
  double expected = 0.0;
  constexpr int64_t kWeight = 429'497;  // 1e-4
  for (int n = 1; n <= 30'000; ++n) {
    const int64_t value = dice.below(int64_t{1} << (2 + n % 60));
    average.add(value, kWeight);
    expected += (static_cast<double>(value) - expected) * std::max(1.0 / n, kWeight / 4294967296.0);
  }
  EXPECT_NEAR(static_cast<double>(average.value()) / expected, 1.0, 1e-4);
  for (int n = 0; n < 100; ++n) average.add((int64_t{1} << 62) - 1, 1);
  EXPECT_GT(average.value(), 0);
}

TEST(Rebalance, targets_are_root_mean_squares_so_that_long_sequences_count_more) {
  RebalancePolicy policy = eager();
  policy.new_weight_q32 = 1;
  policy.update_interval = 2;
  RebalanceTracker tracker(policy, 0);
  tracker.on_create(64);
  tracker.on_create(0);
  tracker.on_close(lengths_of(100, 80));
  EXPECT_FALSE(tracker.targets().has_value()) << "one sample of two";
  tracker.on_close(lengths_of(700, 560));
  ASSERT_TRUE(tracker.targets().has_value());
  EXPECT_EQ(*tracker.targets(), (TargetLengths{500, 400, 32}));
}

TEST(Rebalance, target_batches_are_whole_blocks) {
  const TargetLengths lengths{500, 400, 33};
  EXPECT_EQ(lengths.hot_batch(4), (BatchDesc{{{500, 400}}, 0}));
  EXPECT_EQ(lengths.hot_batch(64), (BatchDesc{{{512, 384}}, 0}));
  EXPECT_EQ(lengths.hot_batch(600), (BatchDesc{{{600, 0}}, 0}));
  EXPECT_EQ(lengths.cold_batch(32), (BatchDesc{{{64, 64}}, 0}));
  EXPECT_EQ(TargetLengths{}.hot_batch(32), (BatchDesc{{{0, 0}}, 0}));
  const int32_t most = INT32_MAX / 64 * 64;
  EXPECT_EQ((TargetLengths{INT32_MAX, INT32_MAX - 1, 0}).hot_batch(64),
            (BatchDesc{{{most, most - 64}}, 0}));
}

TEST(Rebalance, where_a_window_lies_over_the_blocks_does_not_move_the_target) {
  const LifeCycle window{.window = 128};
  for (int32_t capacity = 200; capacity < 400; ++capacity) {
    const TargetLengths lengths{capacity, capacity - 1, 0};
    ASSERT_EQ(slots_for_batch(lengths.hot_batch(32), window, {32}), 5) << capacity;
  }
}

TEST(Rebalance, targets_change_only_every_interval_of_samples) {
  RebalancePolicy policy = eager();
  policy.update_interval = 10;
  RebalanceTracker tracker(policy, 0);
  for (int i = 0; i < 10; ++i) tracker.on_close(lengths_of(10, 5));
  for (int i = 0; i < 9; ++i) tracker.on_close(lengths_of(9999, 5));
  EXPECT_EQ(tracker.targets()->capacity, 10);
  tracker.on_close(lengths_of(9999, 5));
  EXPECT_GT(tracker.targets()->capacity, 9000);
}

TEST(Rebalance, the_longest_sequences_do_not_overflow) {
  RebalanceTracker tracker(eager(), 0);
  tracker.on_create(INT32_MAX);
  tracker.on_close(lengths_of(INT32_MAX, INT32_MAX));
  EXPECT_EQ(*tracker.targets(), (TargetLengths{INT32_MAX, INT32_MAX - 1, INT32_MAX}));
}

TEST(Rebalance, sequences_that_held_nothing_are_no_samples) {
  RebalanceTracker tracker(eager(), 0);
  tracker.on_close(LengthMeans{});
  tracker.on_close(lengths_of(0, 0));
  EXPECT_EQ(tracker.num_samples(), 0);
  EXPECT_FALSE(tracker.targets().has_value());
  tracker.on_close(lengths_of(1, 0));
  EXPECT_EQ(tracker.num_samples(), 1);
}

TEST(Rebalance, the_gate_of_samples_alone_decides) {
  RebalancePolicy policy = eager();
  policy.min_samples = 3;
  RebalanceTracker tracker(policy, 0);
  for (int i = 0; i < 3; ++i) {
    EXPECT_FALSE(tracker.has_enough_samples()) << i;
    EXPECT_FALSE(tracker.need_adjustment(0, slots({1, 9}), slots({5, 5})));
    tracker.on_close(lengths_of(10, 5));
  }
  EXPECT_TRUE(tracker.has_enough_samples());
  EXPECT_TRUE(tracker.need_adjustment(0, slots({1, 9}), slots({5, 5})));
}

TEST(Rebalance, without_targets_there_is_nothing_to_adjust_to) {
  const RebalanceTracker tracker(eager(), 0);
  EXPECT_FALSE(tracker.has_enough_samples());
}

TEST(Rebalance, the_gate_of_cooldown_alone_decides) {
  RebalancePolicy policy = eager();
  policy.cooldown_ns = 120 * kSecond;
  RebalanceTracker tracker(policy, 7);
  tracker.on_close(lengths_of(10, 5));
  EXPECT_FALSE(tracker.has_cooled_down(7 + 120 * kSecond - 1));
  EXPECT_FALSE(tracker.need_adjustment(7 + 120 * kSecond - 1, slots({1, 9}), slots({5, 5})));
  EXPECT_TRUE(tracker.has_cooled_down(7 + 120 * kSecond));
  EXPECT_TRUE(tracker.need_adjustment(7 + 120 * kSecond, slots({1, 9}), slots({5, 5})));
}

TEST(Rebalance, the_gate_of_the_threshold_is_exact_on_both_sides) {
  RebalanceTracker tracker(eager(), 0);
  tracker.on_close(lengths_of(10, 5));
  EXPECT_FALSE(tracker.need_adjustment(0, slots({100, 100}), slots({124, 81})));
  EXPECT_TRUE(tracker.need_adjustment(0, slots({100, 100}), slots({125, 100})));
  EXPECT_TRUE(tracker.need_adjustment(0, slots({100, 100}), slots({100, 80})));
  EXPECT_FALSE(tracker.is_off_target(slots({0, 3}), slots({0, 3})));
  EXPECT_TRUE(tracker.is_off_target(slots({0, 3}), slots({1, 3})));
  EXPECT_TRUE(tracker.is_off_target(slots({1, 3}), slots({0, 3})));
  const int64_t most = std::numeric_limits<int64_t>::max();
  EXPECT_FALSE(tracker.is_off_target(slots({most}), slots({most - 1})));
  EXPECT_THROW((void)tracker.is_off_target(slots({1}), slots({1, 2})), InvalidArgument);
}

TEST(Rebalance, an_adjustment_starts_cooldown_and_samples_again_and_keeps_what_was_learnt) {
  RebalancePolicy policy = eager();
  policy.min_samples = 2;
  policy.cooldown_ns = 10;
  RebalanceTracker tracker(policy, 0);
  for (int i = 0; i < 2; ++i) tracker.on_close(lengths_of(300, 200));
  ASSERT_TRUE(tracker.need_adjustment(10, slots({1, 9}), slots({5, 5})));
  tracker.adjusted(10);
  EXPECT_FALSE(tracker.has_cooled_down(19));
  EXPECT_FALSE(tracker.has_enough_samples());
  EXPECT_EQ(tracker.targets()->capacity, 300);
  for (int i = 0; i < 2; ++i) tracker.on_close(lengths_of(300, 200));
  EXPECT_TRUE(tracker.need_adjustment(20, slots({1, 9}), slots({5, 5})));
}

// Full attention and a window: what traffic of one length asks for at one quota.
struct TwoGroups {
  TwoGroups() : planned(config()) {}
  static KVCacheManagerConfig config() {
    auto config = attention_config(4, 1);
    config.layers = {AttentionLayerConfig{0, {{"k", 4096}}},
                     AttentionLayerConfig{1, {{"k", 8192}}, 8}};
    return config;
  }
  GroupSlots target(const TargetLengths& lengths) const {
    const BatchDesc batch = lengths.hot_batch(4);
    const GroupSlots weights =
        weights_of_batches({&batch, 1}, planned.config, planned.registry, planned.layout);
    const QuotaSplit split = split_quota(planned.config, planned.registry, planned.layout, 1 << 24,
                                         kHostGrainBytes, {.weights = weights});
    GroupSlots counts;
    for (int32_t count : split.num_slots) counts.push_back(count);
    return counts;
  }
  Planned planned;
};

TEST(Rebalance, adjusting_to_the_target_ends_the_wish_to_adjust) {
  const TwoGroups pools;
  RebalanceTracker tracker(eager(), 0);
  GroupSlots current = pools.target({.capacity = 16, .history_length = 15});
  int num_adjusted = 0;
  for (int i = 0; i < 2000; ++i) {
    const int32_t capacity = i % 2 == 0 ? 700 : 900;  // traffic that varies about a mean
    tracker.on_close(lengths_of(capacity, capacity - 1));
    const GroupSlots target = pools.target(*tracker.targets());
    if (!tracker.need_adjustment(i, current, target)) continue;
    current = target;
    tracker.adjusted(i);
    ++num_adjusted;
  }
  EXPECT_EQ(num_adjusted, 1) << "from short to long sequences once, then no swinging";
}

TEST(Rebalance, a_policy_is_the_config_in_integers) {
  KVCacheManagerConfig config = attention_config(4, 8);
  const RebalancePolicy policy = RebalancePolicy::of(config);
  EXPECT_EQ(policy.min_samples, 2000);
  EXPECT_EQ(policy.cooldown_ns, 120 * kSecond);
  EXPECT_EQ(policy.update_interval, 100);
  EXPECT_EQ(policy.threshold, (Fraction{1'250'000, 1'000'000}));
  EXPECT_EQ(policy.new_weight_q32, RebalancePolicy{}.new_weight_q32);
  config.rebalance_cooldown_secs = 1e300;
  config.rebalance_ratio_threshold = 1.0 + 1e-15;
  config.rebalance_moving_average_decay = 1.0 - 1e-16;
  EXPECT_NO_THROW(RebalanceTracker(RebalancePolicy::of(config), 0));
  config.rebalance_ratio_threshold = 1e300;
  config.rebalance_moving_average_decay = 1e-300;
  EXPECT_NO_THROW(RebalanceTracker(RebalancePolicy::of(config), 0));
}

TEST(Rebalance, bad_policies_are_refused) {
  const auto refused = [](RebalancePolicy policy) {
    EXPECT_THROW(RebalanceTracker(policy, 0), InvalidArgument);
  };
  refused({.min_samples = -1});
  refused({.cooldown_ns = -1});
  refused({.update_interval = 0});
  refused({.threshold = {1, 1}});
  refused({.new_weight_q32 = 0});
  refused({.new_weight_q32 = int64_t{1} << 32});
  RebalanceTracker tracker(eager(), 0);
  EXPECT_THROW(tracker.on_create(-1), InvalidArgument);
}

}  // namespace
}  // namespace helicore::kv::testing
