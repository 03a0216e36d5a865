// Life cycles: classes of layers whose blocks live and die together, and which blocks are stale in
// each.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <unordered_map>

#include "helicore/kv/config.h"
#include "helicore/kv/types.h"

namespace helicore::kv {

// The key of a life cycle. Layers with equal keys share one.
struct LifeCycle {
  LayerType kind = LayerType::kAttention;
  CacheDomain domain = CacheDomain::kTarget;
  std::optional<int32_t> window = std::nullopt;  // tokens; none is full attention
  int32_t num_sink_blocks = 0;                   // ceil(sinks / tokens_per_block)
  ReusePolicy policy = ReusePolicy::kRequired;   // REQUIRED for SSM

  // The blocks [begin, end) that no later step reads once `history_length` tokens are history. A
  // window w keeps tokens [history + 1 - w, history]: the one in flight at `history` attends to w
  // tokens including itself.
  [[nodiscard]] HalfOpenRange<int32_t> stale_range(int32_t history_length,
                                                   int32_t tokens_per_block) const noexcept;
  // The blocks [begin, end) that a step from `history_length` to `capacity` tokens opens and that
  // are stale once all but the last `max_rewind_len` of them are history: no later step reads them,
  // so their layers may share a few slots while the step runs. Empty unless windowed.
  [[nodiscard]] HalfOpenRange<int32_t> scratch_range(int32_t history_length, int32_t capacity,
                                                     int32_t max_rewind_len,
                                                     int32_t tokens_per_block) const noexcept;
  // The most blocks that one sequence keeps while it grows a token at a time, at any length: sinks
  // and every block that a window and the token in flight can touch; 1 for recurrent state. None
  // for full attention, which keeps all.
  [[nodiscard]] std::optional<int64_t> max_live_blocks(int32_t tokens_per_block) const noexcept;
  [[nodiscard]] bool is_full_attention() const noexcept {
    return kind == LayerType::kAttention && !window;
  }
  friend auto operator<=>(const LifeCycle&, const LifeCycle&) = default;
  friend bool operator==(const LifeCycle&, const LifeCycle&) = default;
};

// Numbers the life cycles of a config in the order in which its layers show them. Immutable.
class LifeCycleRegistry {
 public:
  explicit LifeCycleRegistry(const KVCacheManagerConfig& config);

  [[nodiscard]] size_t count() const noexcept { return life_cycles_.count(); }
  [[nodiscard]] const LifeCycle& operator[](LifeCycleId id) const { return life_cycles_[id]; }
  [[nodiscard]] bool contains(const LifeCycle& life_cycle) const noexcept;
  // Throws InvalidArgument when unknown.
  [[nodiscard]] LifeCycleId id_of(const LifeCycle& life_cycle) const;
  [[nodiscard]] LifeCycleId of_layer(int32_t layer_id) const;
  [[nodiscard]] std::optional<LifeCycleId> ssm_life_cycle_id() const noexcept;
  [[nodiscard]] const TypedVec<LifeCycleId, LifeCycle>& all() const noexcept {
    return life_cycles_;
  }

 private:
  TypedVec<LifeCycleId, LifeCycle> life_cycles_;
  std::unordered_map<int32_t, LifeCycleId> of_layer_;
};

[[nodiscard]] LifeCycle life_cycle_of(const LayerConfig& layer, int32_t tokens_per_block) noexcept;

[[nodiscard]] constexpr int32_t ceil_div(int32_t a, int32_t b) noexcept {
  return static_cast<int32_t>((static_cast<int64_t>(a) + b - 1) / b);
}

}  // namespace helicore::kv
