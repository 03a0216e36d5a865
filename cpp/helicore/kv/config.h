// Configuration of a KV cache manager: value types with the rules that each field obeys. The
// manager copies its config; later changes have no effect. validate() throws InvalidArgument naming
// the field, the value and the rule.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "helicore/kv/types.h"

namespace helicore::kv {

// Quotas are bytes, > 0.
struct GpuCacheTierConfig {
  int64_t quota = 0;
  static constexpr CacheTier kTier = CacheTier::kGpuMem;
  void validate() const;
  friend bool operator==(const GpuCacheTierConfig&, const GpuCacheTierConfig&) = default;
};

struct HostCacheTierConfig {
  int64_t quota = 0;
  static constexpr CacheTier kTier = CacheTier::kHostMem;
  void validate() const;
  friend bool operator==(const HostCacheTierConfig&, const HostCacheTierConfig&) = default;
};

struct DiskCacheTierConfig {
  int64_t quota = 0;
  std::string path{};  // an existing directory
  static constexpr CacheTier kTier = CacheTier::kDisk;
  void validate() const;
  friend bool operator==(const DiskCacheTierConfig&, const DiskCacheTierConfig&) = default;
};

using CacheTierConfig = std::variant<GpuCacheTierConfig, HostCacheTierConfig, DiskCacheTierConfig>;
[[nodiscard]] CacheTier tier_of(const CacheTierConfig& config) noexcept;
[[nodiscard]] int64_t quota_of(const CacheTierConfig& config) noexcept;

// One buffer of a layer: `size` bytes hold `tokens_per_block_override` tokens (default:
// tokens_per_block).
struct BufferConfig {
  std::string role{};                                               // unique inside its layer
  int64_t size = 0;                                                 // bytes of one block, > 0
  std::optional<int32_t> tokens_per_block_override = std::nullopt;  // divides tokens_per_block
  void validate() const;
  friend bool operator==(const BufferConfig&, const BufferConfig&) = default;
};

struct AttentionLayerConfig {
  int32_t layer_id = 0;
  std::vector<BufferConfig> buffers{};  // at least one
  // Tokens, > 0, sinks not counted; none is full attention.
  std::optional<int32_t> sliding_window_size = std::nullopt;
  std::optional<int32_t> num_sink_tokens = std::nullopt;  // >= 0; > 0 needs a window
  CacheDomain cache_domain = CacheDomain::kTarget;
  ReusePolicy reuse_policy = ReusePolicy::kRequired;
  void validate() const;
  friend bool operator==(const AttentionLayerConfig&, const AttentionLayerConfig&) = default;
};

struct SsmLayerConfig {
  int32_t layer_id = 0;
  std::vector<BufferConfig> buffers{};  // no overrides
  void validate() const;
  friend bool operator==(const SsmLayerConfig&, const SsmLayerConfig&) = default;
};

using LayerConfig = std::variant<AttentionLayerConfig, SsmLayerConfig>;
[[nodiscard]] int32_t layer_id_of(const LayerConfig& config) noexcept;
[[nodiscard]] const std::vector<BufferConfig>& buffers_of(const LayerConfig& config) noexcept;

// One sequence of a planned batch: 0 <= history_length <= capacity, in tokens.
struct KVCacheDesc {
  int32_t capacity = 0;
  int32_t history_length = 0;
  void validate() const;
  friend bool operator==(const KVCacheDesc&, const KVCacheDesc&) = default;
};

// A planned batch; `system_prompt_length` tokens are shared by every sequence.
struct BatchDesc {
  std::vector<KVCacheDesc> kv_caches{};
  int32_t system_prompt_length = 0;
  void validate() const;
  friend bool operator==(const BatchDesc&, const BatchDesc&) = default;
};

struct SwaScratchReuseConfig {
  int32_t max_rewind_len = 0;  // tokens, >= 0
  void validate() const;
  friend bool operator==(const SwaScratchReuseConfig&, const SwaScratchReuseConfig&) = default;
};

struct KVCacheManagerConfig {
  int32_t tokens_per_block = 0;                // > 0
  std::vector<CacheTierConfig> cache_tiers{};  // hot first; the first is GPU or HOST
  std::vector<LayerConfig> layers{};           // unique layer_id
  double max_util_for_resume = 0.97;           // in (0, 1]
  bool enable_partial_reuse = true;
  int32_t reuse_match_backoff = 0;  // tokens, >= 0
  // The same for layers of the DRAFT domain; none: as reuse_match_backoff. >= 0
  std::optional<int32_t> draft_reuse_match_backoff = std::nullopt;
  std::vector<BatchDesc> constraints{};  // batches that must always fit
  std::optional<BatchDesc> typical_step = std::nullopt;
  // One positive share per layer group, sum 1 +- 1e-6.
  std::optional<std::vector<double>> initial_pool_ratio = std::nullopt;
  std::optional<SwaScratchReuseConfig> swa_scratch_reuse = std::nullopt;
  bool commit_min_snapshot = false;  // must be true with SSM layers
  bool enable_stats = true;
  bool text_only = false;
  int32_t rebalance_min_sampled_kv_caches = 2000;        // >= 0
  double rebalance_cooldown_secs = 120.0;                // finite, >= 0
  int32_t rebalance_target_ratio_update_interval = 100;  // > 0
  double rebalance_ratio_threshold = 1.25;               // finite, > 1
  double rebalance_moving_average_decay = 0.9999;        // in (0, 1)
  int32_t device_index = 0;                              // CUDA ordinal when level 0 is GPU
  int32_t event_buffer_size = 0;                         // events kept for drain_events(), >= 0

  void validate() const;
  [[nodiscard]] bool enable_swa_scratch_reuse() const noexcept {
    return swa_scratch_reuse.has_value();
  }
  friend bool operator==(const KVCacheManagerConfig&, const KVCacheManagerConfig&) = default;
};

}  // namespace helicore::kv
