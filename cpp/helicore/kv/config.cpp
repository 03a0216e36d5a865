#include "helicore/kv/config.h"

#include <cmath>
#include <filesystem>
#include <set>

#include "helicore/core/error.h"

namespace helicore::kv {
namespace {

constexpr const char* kWhere = "kv.config";
constexpr int64_t kMaxBytes = int64_t{1}
                              << 56;  // far above any machine; sums of it do not overflow

void check_quota(const char* type, int64_t quota) {
  HELICORE_CHECK(quota > 0 && quota <= kMaxBytes, kWhere, type, ".quota must be in 1..", kMaxBytes,
                 " bytes, got ", quota);
}

void check_buffers(int32_t layer_id, const std::vector<BufferConfig>& buffers) {
  HELICORE_CHECK(layer_id >= 0, kWhere, "layer_id must be >= 0, got ", layer_id);
  HELICORE_CHECK(!buffers.empty(), kWhere, "layer ", layer_id, ": buffers must not be empty");
  std::set<std::string> roles;
  for (const BufferConfig& buffer : buffers) {
    buffer.validate();
    HELICORE_CHECK(roles.insert(buffer.role).second, kWhere, "layer ", layer_id,
                   ": buffer roles must be unique, got '", buffer.role, "' twice");
  }
}

}  // namespace

void GpuCacheTierConfig::validate() const { check_quota("GpuCacheTierConfig", quota); }
void HostCacheTierConfig::validate() const { check_quota("HostCacheTierConfig", quota); }

void DiskCacheTierConfig::validate() const {
  check_quota("DiskCacheTierConfig", quota);
  std::error_code ignored;
  HELICORE_CHECK(std::filesystem::is_directory(path, ignored), kWhere,
                 "DiskCacheTierConfig.path must be an existing directory, got '", path, "'");
}

CacheTier tier_of(const CacheTierConfig& config) noexcept {
  return std::visit([](const auto& tier) { return tier.kTier; }, config);
}

int64_t quota_of(const CacheTierConfig& config) noexcept {
  return std::visit([](const auto& tier) { return tier.quota; }, config);
}

int32_t layer_id_of(const LayerConfig& config) noexcept {
  return std::visit([](const auto& layer) { return layer.layer_id; }, config);
}

const std::vector<BufferConfig>& buffers_of(const LayerConfig& config) noexcept {
  return std::visit([](const auto& layer) -> const auto& { return layer.buffers; }, config);
}

void BufferConfig::validate() const {
  HELICORE_CHECK(!role.empty(), kWhere, "BufferConfig.role must not be empty");
  HELICORE_CHECK(size > 0 && size <= kMaxBytes >> 16, kWhere, "BufferConfig.size must be in 1..",
                 kMaxBytes >> 16, " bytes, got ", size, " for role '", role, "'");
  HELICORE_CHECK(!tokens_per_block_override || *tokens_per_block_override > 0, kWhere,
                 "BufferConfig.tokens_per_block_override must be > 0, got ",
                 *tokens_per_block_override, " for role '", role, "'");
}

void AttentionLayerConfig::validate() const {
  check_buffers(layer_id, buffers);
  HELICORE_CHECK(!sliding_window_size || *sliding_window_size > 0, kWhere, "layer ", layer_id,
                 ": sliding_window_size must be > 0 or None, got ", *sliding_window_size);
  HELICORE_CHECK(!num_sink_tokens || *num_sink_tokens >= 0, kWhere, "layer ", layer_id,
                 ": num_sink_tokens must be >= 0 or None, got ", *num_sink_tokens);
  HELICORE_CHECK(sliding_window_size || num_sink_tokens.value_or(0) == 0, kWhere, "layer ",
                 layer_id, ": num_sink_tokens needs a sliding_window_size, got ",
                 num_sink_tokens.value_or(0), " with full attention");
}

void SsmLayerConfig::validate() const {
  check_buffers(layer_id, buffers);
  for (const BufferConfig& buffer : buffers) {
    HELICORE_CHECK(!buffer.tokens_per_block_override, kWhere, "layer ", layer_id,
                   ": tokens_per_block_override is not allowed in an SSM layer, got ",
                   *buffer.tokens_per_block_override, " for role '", buffer.role, "'");
  }
}

void KVCacheDesc::validate() const {
  HELICORE_CHECK(history_length >= 0, kWhere, "KVCacheDesc.history_length must be >= 0, got ",
                 history_length);
  HELICORE_CHECK(history_length <= capacity, kWhere,
                 "KVCacheDesc.history_length must be <= capacity, got ", history_length, " > ",
                 capacity);
}

void BatchDesc::validate() const {
  for (const KVCacheDesc& desc : kv_caches) desc.validate();
  HELICORE_CHECK(system_prompt_length >= 0, kWhere,
                 "BatchDesc.system_prompt_length must be >= 0, got ", system_prompt_length);
}

void SwaScratchReuseConfig::validate() const {
  HELICORE_CHECK(max_rewind_len >= 0, kWhere,
                 "SwaScratchReuseConfig.max_rewind_len must be >= 0, got ", max_rewind_len);
}

namespace {

void check_layers(const KVCacheManagerConfig& config) {
  HELICORE_CHECK(!config.layers.empty(), kWhere, "layers must not be empty");
  std::set<int32_t> ids;
  for (const LayerConfig& layer : config.layers) {
    std::visit([](const auto& value) { value.validate(); }, layer);
    const int32_t id = layer_id_of(layer);
    HELICORE_CHECK(ids.insert(id).second, kWhere, "layers: layer_id must be unique, got ", id,
                   " twice");
    for (const BufferConfig& buffer : buffers_of(layer)) {
      const int32_t unit = buffer.tokens_per_block_override.value_or(config.tokens_per_block);
      HELICORE_CHECK(config.tokens_per_block % unit == 0, kWhere, "layer ", id, ", role '",
                     buffer.role, "': tokens_per_block_override must divide tokens_per_block ",
                     config.tokens_per_block, ", got ", unit);
    }
    HELICORE_CHECK(
        std::holds_alternative<AttentionLayerConfig>(layer) || config.commit_min_snapshot, kWhere,
        "commit_min_snapshot must be True when there are SSM layers (layer ", id, ")");
  }
}

void check_tiers(const KVCacheManagerConfig& config) {
  HELICORE_CHECK(!config.cache_tiers.empty(), kWhere, "cache_tiers must not be empty");
  for (const CacheTierConfig& tier : config.cache_tiers) {
    std::visit([](const auto& value) { value.validate(); }, tier);
  }
  HELICORE_CHECK(tier_of(config.cache_tiers[0]) != CacheTier::kDisk, kWhere,
                 "cache_tiers[0] must be a GpuCacheTierConfig or a HostCacheTierConfig, got DISK");
}

void check_ratio(const std::vector<double>& ratio) {
  double sum = 0.0;
  for (double share : ratio) {
    HELICORE_CHECK(std::isfinite(share) && share > 0.0, kWhere,
                   "initial_pool_ratio: shares must be positive and finite, got ", share);
    sum += share;
  }
  HELICORE_CHECK(std::abs(sum - 1.0) <= 1e-6, kWhere,
                 "initial_pool_ratio: the sum must be 1 within 1e-6, got ", sum);
}

void check_rebalance(const KVCacheManagerConfig& c) {
  HELICORE_CHECK(c.rebalance_min_sampled_kv_caches >= 0, kWhere,
                 "rebalance_min_sampled_kv_caches must be >= 0, got ",
                 c.rebalance_min_sampled_kv_caches);
  HELICORE_CHECK(std::isfinite(c.rebalance_cooldown_secs) && c.rebalance_cooldown_secs >= 0.0,
                 kWhere, "rebalance_cooldown_secs must be finite and >= 0, got ",
                 c.rebalance_cooldown_secs);
  HELICORE_CHECK(c.rebalance_target_ratio_update_interval > 0, kWhere,
                 "rebalance_target_ratio_update_interval must be > 0, got ",
                 c.rebalance_target_ratio_update_interval);
  HELICORE_CHECK(std::isfinite(c.rebalance_ratio_threshold) && c.rebalance_ratio_threshold > 1.0,
                 kWhere, "rebalance_ratio_threshold must be finite and > 1, got ",
                 c.rebalance_ratio_threshold);
  const double decay = c.rebalance_moving_average_decay;
  HELICORE_CHECK(decay > 0.0 && decay < 1.0, kWhere,
                 "rebalance_moving_average_decay must lie in (0, 1), got ", decay);
}

}  // namespace

void KVCacheManagerConfig::validate() const {
  HELICORE_CHECK(tokens_per_block > 0, kWhere, "tokens_per_block must be > 0, got ",
                 tokens_per_block);
  check_tiers(*this);
  check_layers(*this);
  HELICORE_CHECK(max_util_for_resume > 0.0 && max_util_for_resume <= 1.0, kWhere,
                 "max_util_for_resume must lie in (0, 1], got ", max_util_for_resume);
  HELICORE_CHECK(reuse_match_backoff >= 0, kWhere, "reuse_match_backoff must be >= 0, got ",
                 reuse_match_backoff);
  HELICORE_CHECK(draft_reuse_match_backoff.value_or(0) >= 0, kWhere,
                 "draft_reuse_match_backoff must be >= 0 or None, got ",
                 draft_reuse_match_backoff.value_or(0));
  HELICORE_CHECK(device_index >= 0, kWhere, "device_index must be >= 0, got ", device_index);
  for (const BatchDesc& batch : constraints) batch.validate();
  if (typical_step) typical_step->validate();
  if (initial_pool_ratio) check_ratio(*initial_pool_ratio);
  if (swa_scratch_reuse) swa_scratch_reuse->validate();
  HELICORE_CHECK(event_buffer_size >= 0, kWhere, "event_buffer_size must be >= 0, got ",
                 event_buffer_size);
  check_rebalance(*this);
}

}  // namespace helicore::kv
