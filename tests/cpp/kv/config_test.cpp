#include "helicore/kv/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "helicore/core/error.h"
#include "helicore/kv/kv_cache_manager.h"
#include "kv/kv_configs.h"

namespace helicore::kv::testing {
namespace {

using ::testing::HasSubstr;

template <typename Error>
std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

std::string invalid(const std::function<void(KVCacheManagerConfig&)>& change) {
  auto config = attention_config(4, 8);
  change(config);
  return message_of<InvalidArgument>([&] { config.validate(); });
}

TEST(Config, a_small_attention_config_is_valid) {
  EXPECT_NO_THROW(attention_config(1, 1).validate());
  EXPECT_NO_THROW(attention_config(128, 3, 5).validate());
}

TEST(Config, every_rule_names_its_field_and_the_value_seen) {
  using C = KVCacheManagerConfig;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto expect = [](const std::string& message, const char* field, const char* value) {
    EXPECT_THAT(message, HasSubstr(field));
    EXPECT_THAT(message, HasSubstr(value));
  };
  expect(invalid([](C& c) { c.tokens_per_block = 0; }), "tokens_per_block", "got 0");
  expect(invalid([](C& c) { c.tokens_per_block = -4; }), "tokens_per_block", "got -4");
  expect(invalid([](C& c) { c.cache_tiers.clear(); }), "cache_tiers", "empty");
  expect(invalid([](C& c) { c.cache_tiers = {HostCacheTierConfig{0}}; }), "quota", "got 0");
  expect(invalid([](C& c) { c.cache_tiers = {DiskCacheTierConfig{1, "/nowhere"}}; }), "path",
         "/nowhere");
  expect(invalid([](C& c) { c.cache_tiers = {DiskCacheTierConfig{1, "/"}}; }), "cache_tiers[0]",
         "DISK");
  expect(invalid([](C& c) { c.layers.clear(); }), "layers", "empty");
  expect(invalid([](C& c) { c.layers.push_back(c.layers[0]); }), "layer_id", "got 0 twice");
  expect(invalid([](C& c) {
           c.layers = {AttentionLayerConfig{.layer_id = -2, .buffers = {BufferConfig{"k", 1}}}};
         }),
         "layer_id", "got -2");
  expect(invalid([](C& c) { c.layers = {AttentionLayerConfig{.layer_id = 3}}; }), "layer 3",
         "buffers");
  expect(invalid([](C& c) { c.layers = {AttentionLayerConfig{1, {{"k", 8}, {"k", 8}}}}; }), "roles",
         "'k'");
  expect(invalid([](C& c) { c.layers = {AttentionLayerConfig{1, {{"k", 0}}}}; }), "size", "got 0");
  expect(invalid([](C& c) { c.layers = {AttentionLayerConfig{1, {{"k", 8, 3}}}}; }),
         "tokens_per_block_override", "got 3");
  expect(invalid([](C& c) { c.layers = {AttentionLayerConfig{1, {{"k", 8, 0}}}}; }),
         "tokens_per_block_override", "got 0");
  expect(invalid([](C& c) { c.layers = {AttentionLayerConfig{1, {{"k", 8}}, 0}}; }),
         "sliding_window_size", "got 0");
  expect(invalid([](C& c) { c.layers = {AttentionLayerConfig{1, {{"k", 8}}, {}, 4}}; }),
         "num_sink_tokens", "got 4");
  expect(invalid([](C& c) { c.layers = {SsmLayerConfig{1, {{"s", 8}}}}; }), "commit_min_snapshot",
         "layer 1");
  expect(invalid([](C& c) {
           c.commit_min_snapshot = true;
           c.layers = {SsmLayerConfig{1, {{"s", 8, 2}}}};
         }),
         "tokens_per_block_override", "got 2");
  for (double value : {0.0, -0.5, 1.5, nan}) {
    expect(invalid([&](C& c) { c.max_util_for_resume = value; }), "max_util_for_resume", "got ");
  }
  expect(invalid([](C& c) { c.reuse_match_backoff = -1; }), "reuse_match_backoff", "got -1");
  expect(invalid([](C& c) { c.constraints = {{{{4, 5}}}}; }), "history_length", "5 > 4");
  expect(invalid([](C& c) { c.typical_step = BatchDesc{{}, -1}; }), "system_prompt_length",
         "got -1");
  expect(invalid([&](C& c) { c.initial_pool_ratio = {nan}; }), "initial_pool_ratio", "positive");
  expect(invalid([](C& c) { c.initial_pool_ratio = {0.4, 0.4}; }), "initial_pool_ratio", "got 0.8");
  expect(invalid([](C& c) { c.swa_scratch_reuse = SwaScratchReuseConfig{-2}; }), "max_rewind_len",
         "got -2");
  expect(invalid([](C& c) { c.rebalance_ratio_threshold = 1.0; }), "rebalance_ratio_threshold",
         "got 1");
  expect(invalid([](C& c) { c.rebalance_moving_average_decay = 1.0; }),
         "rebalance_moving_average_decay", "got 1");
  expect(invalid([](C& c) { c.rebalance_cooldown_secs = INFINITY; }), "rebalance_cooldown_secs",
         "inf");
}

TEST(Config, a_ratio_of_the_wrong_length_is_refused_by_the_manager) {
  auto config = attention_config(4, 8);
  config.initial_pool_ratio = {0.5, 0.5};
  EXPECT_THAT(message_of<InvalidArgument>([&] { KVCacheManager manager(config); }),
              HasSubstr("initial_pool_ratio must have one share per layer group (1), got 2"));
}

TEST(Config, the_manager_keeps_a_copy) {
  auto config = attention_config(4, 8);
  KVCacheManager manager(config);
  config.tokens_per_block = 99;
  EXPECT_EQ(manager.init_config().tokens_per_block, 4);
}

TEST(Config, descriptions_compare_by_value) {
  EXPECT_EQ((BatchDesc{{{4, 2}}, 1}), (BatchDesc{{{4, 2}}, 1}));
  EXPECT_NE((BatchDesc{{{4, 2}}, 1}), (BatchDesc{{{4, 3}}, 1}));
}

TEST(Config, a_generation_without_an_adapter_is_refused) {
  EXPECT_THROW((ReuseScope{.lora_generation = 1}.validate()), InvalidArgument);
  EXPECT_THROW((ReuseScope{.lora_id = -1}.validate()), InvalidArgument);
  EXPECT_NO_THROW((ReuseScope{.lora_id = 0, .lora_generation = 1}.validate()));
}

}  // namespace
}  // namespace helicore::kv::testing
