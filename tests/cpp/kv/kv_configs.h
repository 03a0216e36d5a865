// Small manager configurations for tests.
#pragma once

#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "helicore/kv/config.h"

namespace helicore::kv::testing {

// Full attention layers of one latent buffer each; the quota holds about `num_blocks` blocks (more
// by rounding).
inline KVCacheManagerConfig attention_config(int32_t tokens_per_block, int32_t num_blocks,
                                             int32_t num_layers = 1, int64_t row_bytes = 1024) {
  KVCacheManagerConfig config;
  config.tokens_per_block = tokens_per_block;
  const int64_t block_bytes = row_bytes * tokens_per_block;
  config.cache_tiers = {HostCacheTierConfig{block_bytes * num_layers * num_blocks}};
  for (int32_t i = 0; i < num_layers; ++i) {
    config.layers.push_back(
        AttentionLayerConfig{.layer_id = i, .buffers = {{"latent", block_bytes}}});
  }
  config.max_util_for_resume = 1.0;
  return config;
}

inline std::vector<TokenId> iota_tokens(int32_t count, int32_t first = 0) {
  std::vector<TokenId> tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

}  // namespace helicore::kv::testing
