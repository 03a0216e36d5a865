// When the split between pool groups should follow the traffic, and to what. The tracker learns the
// lengths of closed sequences; it knows neither pools nor locks. Integer arithmetic, and time comes
// in as an argument, so that a replay decides as the original did.
//
//   every closed sequence -> means of squares -> every `update_interval` samples: TargetLengths
//   target lengths -> weights_of_batches() -> split_quota() -> target slots
//   need_adjustment(now, current slots, target slots) -> the manager moves slots -> adjusted(now)
//
// Three gates, all of which must be open, keep it from swinging: samples since the last adjustment,
// time since the last adjustment, and a group whose target and current count differ by more than
// the threshold. Targets are counts that the solver gives for this very quota, so once they are
// reached the third gate is shut until the traffic changes.
#pragma once

#include <cstdint>
#include <optional>

#include "helicore/kv/config.h"
#include "helicore/kv/quota.h"

namespace helicore::kv {

// Mean length of one sequence over its resizes. Two additions per resize.
class LengthMeans {
 public:
  void add(int32_t capacity, int32_t history_length) noexcept {
    capacity_ += capacity;
    history_ += history_length;
    ++count_;
  }
  [[nodiscard]] int64_t count() const noexcept { return count_; }
  // Tokens, rounded down; 0 before the first add().
  [[nodiscard]] int32_t capacity() const noexcept { return mean(capacity_); }
  [[nodiscard]] int32_t history_length() const noexcept { return mean(history_); }

 private:
  [[nodiscard]] int32_t mean(int64_t sum) const noexcept {
    return count_ == 0 ? 0 : static_cast<int32_t>(sum / count_);
  }
  int64_t capacity_ = 0;
  int64_t history_ = 0;
  int32_t count_ = 0;
};

struct RebalancePolicy {
  int64_t min_samples = 2000;                // closed sequences, >= 0
  int64_t cooldown_ns = 120'000'000'000;     // >= 0
  int64_t update_interval = 100;             // closed sequences, > 0
  Fraction threshold{1'250'000, 1'000'000};  // > 1
  int64_t new_weight_q32 = 429'497;          // weight of a new sample, times 2^32, in [1, 2^32)

  [[nodiscard]] static RebalancePolicy of(const KVCacheManagerConfig& config);
};

// The sequence that stands for the traffic: tokens.
struct TargetLengths {
  int32_t capacity = 0;        // root mean square of mean capacities
  int32_t history_length = 0;  // likewise of histories, < capacity
  int32_t reused = 0;          // mean length found in the cache at creation

  // What the hot level should be split for, and what the coldest: a sequence of the reused length.
  // Lengths are rounded up to whole blocks (history so that the step keeps its blocks): how a
  // window happens to lie over the blocks must not move the target.
  [[nodiscard]] BatchDesc hot_batch(int32_t tokens_per_block) const;
  [[nodiscard]] BatchDesc cold_batch(int32_t tokens_per_block) const;
  friend bool operator==(const TargetLengths&, const TargetLengths&) = default;
};

// A mean that forgets: the first samples count alike, later ones with the policy's weight. Values
// are integers in [0, 2^62).
class MovingAverage {
 public:
  void add(int64_t value, int64_t new_weight_q32) noexcept;
  [[nodiscard]] int64_t value() const noexcept;  // rounded to nearest
  [[nodiscard]] int64_t count() const noexcept { return count_; }

 private:
  __int128 value_q24_ = 0;
  int64_t count_ = 0;
};

class RebalanceTracker {
 public:
  // Times are nanoseconds of one monotonic clock. Throws InvalidArgument for a bad policy.
  RebalanceTracker(const RebalancePolicy& policy, int64_t now_ns);

  // A sequence was created; `reused` tokens of it were found in the cache. Not to be called for
  // sequences kept out of the statistics (warm-up, captures).
  void on_create(int32_t reused);
  // A sequence was closed. Sequences that were never resized, or never held a token, are no
  // samples.
  void on_close(const LengthMeans& lengths);

  // Sequences that stand for real traffic were seen: samples since construction or adjusted().
  [[nodiscard]] int64_t num_samples() const noexcept { return num_samples_; }
  // The latest targets; none before the first `update_interval` samples.
  [[nodiscard]] const std::optional<TargetLengths>& targets() const noexcept { return targets_; }

  // The three gates.
  [[nodiscard]] bool has_enough_samples() const noexcept;
  [[nodiscard]] bool has_cooled_down(int64_t now_ns) const noexcept;
  // Some group's target / current lies outside (1 / threshold, threshold). Counts are slots per
  // group of one level, or bytes. Throws InvalidArgument when the numbers of groups differ.
  [[nodiscard]] bool is_off_target(const GroupSlots& current, const GroupSlots& target) const;

  // All gates, for one level. Ask once for the hot and once for the coldest level.
  [[nodiscard]] bool need_adjustment(int64_t now_ns, const GroupSlots& current,
                                     const GroupSlots& target) const;
  // The levels were adjusted: cooldown and sample count start again; what was learnt is kept.
  void adjusted(int64_t now_ns) noexcept;

 private:
  RebalancePolicy policy_;
  int64_t last_adjusted_ns_;
  int64_t num_samples_ = 0;
  MovingAverage square_capacity_;
  MovingAverage square_history_;
  MovingAverage reused_;
  std::optional<TargetLengths> targets_;
};

}  // namespace helicore::kv
