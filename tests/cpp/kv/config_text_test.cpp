#include "helicore/kv/config_text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "helicore/core/error.h"
#include "kv/kv_configs.h"

namespace helicore::kv::testing {
namespace {

using ::testing::HasSubstr;

// Every field differs from its default.
KVCacheManagerConfig full_config() {
  KVCacheManagerConfig config;
  config.tokens_per_block = 32;
  config.cache_tiers = {GpuCacheTierConfig{1 << 30}, HostCacheTierConfig{int64_t{1} << 40},
                        DiskCacheTierConfig{7, "/a folder\\with = odd\nname\xff"}};
  config.layers = {
      AttentionLayerConfig{.layer_id = -3,
                           .buffers = {{"k", 4096, 16}, {"v", 512}},
                           .sliding_window_size = 128,
                           .num_sink_tokens = 0,
                           .cache_domain = CacheDomain::kDraft,
                           .reuse_policy = ReusePolicy::kOptional},
      SsmLayerConfig{.layer_id = 8, .buffers = {{"state = 1", 99}}},
  };
  config.max_util_for_resume = 0.1 + 0.2;  // needs all its digits
  config.enable_partial_reuse = false;
  config.reuse_match_backoff = 3;
  config.draft_reuse_match_backoff = 5;
  config.constraints = {BatchDesc{{{5, 2}, {9, 9}}, 4}, BatchDesc{{}, 1}};
  config.typical_step = BatchDesc{{{70, 60}}, 7};
  config.initial_pool_ratio = std::vector<double>{1.0 / 3, 2.0 / 3};
  config.swa_scratch_reuse = SwaScratchReuseConfig{11};
  config.commit_min_snapshot = true;
  config.enable_stats = false;
  config.text_only = true;
  config.rebalance_min_sampled_kv_caches = 1;
  config.rebalance_cooldown_secs = 1e-300;
  config.rebalance_target_ratio_update_interval = 2;
  config.rebalance_ratio_threshold = 1e300;
  config.rebalance_moving_average_decay = 0.5;
  config.device_index = 2;
  config.event_buffer_size = 17;
  return config;
}

TEST(ConfigText, every_field_comes_back) {
  EXPECT_EQ(config_from_text(config_to_text(full_config())), full_config());
  const auto plain = attention_config(4, 10, 3);
  EXPECT_EQ(config_from_text(config_to_text(plain)), plain);
}

TEST(ConfigText, each_line_but_kinds_and_counts_matters) {
  const std::string text = config_to_text(full_config());
  size_t num_lines = 0;
  for (size_t begin = 0; begin < text.size(); ++num_lines) {
    const size_t end = text.find('\n', begin) + 1;
    const std::string line = text.substr(begin, end - begin);
    const std::string rest = text.substr(0, begin) + text.substr(end);
    begin = end;
    if (line.find("tiers.0.kind") != std::string::npos ||  // the first alternative by default
        line.find("layers.0.kind") != std::string::npos ||
        line.find("num_sink_tokens") != std::string::npos ||
        line.find("constraints.1.kv_caches.count") != std::string::npos ||
        line.find("layers.0.buffers.1.tokens_per_block_override") != std::string::npos ||
        line.find("layers.1.buffers.0.tokens_per_block_override") != std::string::npos) {
      continue;
    }
    try {
      EXPECT_NE(config_from_text(rest), full_config()) << line;
    } catch (const std::exception&) {
      // A list without its count leaves lines over.
    }
  }
  EXPECT_GT(num_lines, 50u);
}

TEST(ConfigText, what_an_older_text_does_not_name_keeps_its_default) {
  const auto config = config_from_text("tokens_per_block = 8\n");
  EXPECT_EQ(config.tokens_per_block, 8);
  EXPECT_EQ(config.max_util_for_resume, KVCacheManagerConfig{}.max_util_for_resume);
  EXPECT_FALSE(config.typical_step.has_value());
}

TEST(ConfigText, a_field_of_a_later_build_is_named) {
  try {
    (void)config_from_text("tokens_per_block = 8\nwarp_drive = 1\n");
    FAIL() << "accepted";
  } catch (const NotSupported& error) {
    EXPECT_THAT(error.what(), HasSubstr("'warp_drive'"));
  }
}

TEST(ConfigText, bad_text_is_refused_with_the_name_of_the_field) {
  for (const char* bad :
       {"tokens_per_block = many\n", "tokens_per_block = 99999999999\n", "tokens_per_block = \n",
        "tokens_per_block\n", "cache_tiers.count = 1\ncache_tiers.0.kind = 7\n",
        "layers.count = 1000000000\n",
        "cache_tiers.count = 1\ncache_tiers.0.kind = 2\ncache_tiers.0.path = \\q\n"}) {
    EXPECT_THROW((void)config_from_text(bad), InvalidArgument) << bad;
  }
}

}  // namespace
}  // namespace helicore::kv::testing
