#include "helicore/kv/rebalance.h"

#include <algorithm>
#include <cmath>

#include "helicore/core/error.h"

namespace helicore::kv {
namespace {

constexpr int kValueBits = 24;                 // fraction bits of a moving average
constexpr int64_t kOneQ32 = int64_t{1} << 32;  // a weight of 1
constexpr double kMaxThreshold = 1e12;         // above any ratio of slot counts
constexpr double kMaxCooldownSecs = 4e9;       // more than a century; fits in nanoseconds

// Square root of a value in [0, 2^62], rounded to nearest.
int32_t root(int64_t value) {
  int64_t low = 0;
  int64_t high = (int64_t{1} << 31) + 1;
  while (low + 1 < high) {
    const int64_t middle = low + (high - low) / 2;
    (middle * middle <= value ? low : high) = middle;
  }
  const int64_t nearest = value - low * low > low ? low + 1 : low;
  return static_cast<int32_t>(std::min<int64_t>(nearest, INT32_MAX));
}

// Up to whole blocks, or down where int32 ends.
int32_t whole_blocks(int32_t tokens, int32_t tokens_per_block) {
  const int32_t most = INT32_MAX / tokens_per_block;
  return std::min(ceil_div(tokens, tokens_per_block), most) * tokens_per_block;
}

int64_t square(int32_t value) { return int64_t{value} * value; }

}  // namespace

BatchDesc TargetLengths::hot_batch(int32_t tokens_per_block) const {
  const int32_t end = whole_blocks(capacity, tokens_per_block);
  const int32_t step = whole_blocks(capacity - history_length, tokens_per_block);
  return {{{end, std::max(0, end - step)}}, 0};
}

BatchDesc TargetLengths::cold_batch(int32_t tokens_per_block) const {
  const int32_t end = whole_blocks(reused, tokens_per_block);
  return {{{end, end}}, 0};
}

RebalancePolicy RebalancePolicy::of(const KVCacheManagerConfig& config) {
  RebalancePolicy policy;
  policy.min_samples = config.rebalance_min_sampled_kv_caches;
  policy.cooldown_ns =
      std::llround(std::min(config.rebalance_cooldown_secs, kMaxCooldownSecs) * 1e9);
  policy.update_interval = config.rebalance_target_ratio_update_interval;
  const double threshold = std::min(config.rebalance_ratio_threshold, kMaxThreshold);
  policy.threshold = {
      std::max(kPartsPerMillion + 1,
               int64_t{std::llround(threshold * static_cast<double>(kPartsPerMillion))}),
      kPartsPerMillion};
  const double new_weight = 1.0 - config.rebalance_moving_average_decay;
  policy.new_weight_q32 =
      std::clamp<int64_t>(std::llround(new_weight * static_cast<double>(kOneQ32)), 1, kOneQ32 - 1);
  return policy;
}

void MovingAverage::add(int64_t value, int64_t new_weight_q32) noexcept {
  ++count_;
  const __int128 weight = std::max(new_weight_q32, kOneQ32 / count_);
  value_q24_ += (((static_cast<__int128>(value) << kValueBits) - value_q24_) * weight) / kOneQ32;
}

int64_t MovingAverage::value() const noexcept {
  return static_cast<int64_t>((value_q24_ + (1 << (kValueBits - 1))) >> kValueBits);
}

RebalanceTracker::RebalanceTracker(const RebalancePolicy& policy, int64_t now_ns)
    : policy_(policy), last_adjusted_ns_(now_ns) {
  constexpr const char* kWhere = "kv.rebalance";
  HELICORE_CHECK(policy.min_samples >= 0, kWhere, "min_samples must be >= 0, got ",
                 policy.min_samples);
  HELICORE_CHECK(policy.cooldown_ns >= 0, kWhere, "cooldown_ns must be >= 0, got ",
                 policy.cooldown_ns);
  HELICORE_CHECK(policy.update_interval > 0, kWhere, "update_interval must be > 0, got ",
                 policy.update_interval);
  HELICORE_CHECK(policy.threshold.den > 0 && policy.threshold.num > policy.threshold.den, kWhere,
                 "threshold must be > 1, got ", policy.threshold.num, " / ", policy.threshold.den);
  HELICORE_CHECK(policy.new_weight_q32 >= 1 && policy.new_weight_q32 < kOneQ32, kWhere,
                 "new_weight_q32 must be in 1..", kOneQ32 - 1, ", got ", policy.new_weight_q32);
}

void RebalanceTracker::on_create(int32_t reused) {
  HELICORE_CHECK(reused >= 0, "kv.rebalance", "reused must be >= 0 tokens, got ", reused);
  reused_.add(reused, policy_.new_weight_q32);
}

void RebalanceTracker::on_close(const LengthMeans& lengths) {
  if (lengths.capacity() == 0) return;
  square_capacity_.add(square(lengths.capacity()), policy_.new_weight_q32);
  square_history_.add(square(lengths.history_length()), policy_.new_weight_q32);
  ++num_samples_;
  if (square_capacity_.count() % policy_.update_interval != 0) return;
  TargetLengths targets{.capacity = root(square_capacity_.value()),
                        .history_length = root(square_history_.value()),
                        .reused = static_cast<int32_t>(reused_.value())};
  // A step has a token of its own, whatever the roots round to.
  targets.history_length = std::clamp(targets.capacity - 1, 0, targets.history_length);
  targets_ = targets;
}

bool RebalanceTracker::has_enough_samples() const noexcept {
  return targets_.has_value() && num_samples_ >= policy_.min_samples;
}

bool RebalanceTracker::has_cooled_down(int64_t now_ns) const noexcept {
  return now_ns - last_adjusted_ns_ >= policy_.cooldown_ns;
}

bool RebalanceTracker::is_off_target(const GroupSlots& current, const GroupSlots& target) const {
  HELICORE_CHECK(current.count() == target.count(), "kv.rebalance",
                 "target must have one count per group (", current.count(), "), got ",
                 target.count());
  const auto far_above = [&](int64_t more, int64_t less) {
    return static_cast<__int128>(more) * policy_.threshold.den >=
           static_cast<__int128>(less) * policy_.threshold.num;
  };
  for (size_t i = 0; i < current.count(); ++i) {
    const PoolGroupId g(static_cast<int32_t>(i));
    if (current[g] == target[g]) continue;
    if (far_above(target[g], current[g]) || far_above(current[g], target[g])) return true;
  }
  return false;
}

bool RebalanceTracker::need_adjustment(int64_t now_ns, const GroupSlots& current,
                                       const GroupSlots& target) const {
  return has_enough_samples() && has_cooled_down(now_ns) && is_off_target(current, target);
}

void RebalanceTracker::adjusted(int64_t now_ns) noexcept {
  last_adjusted_ns_ = now_ns;
  num_samples_ = 0;
}

}  // namespace helicore::kv
