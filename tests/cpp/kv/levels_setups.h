// Configurations for random operations on several levels: what there is in a model, times what the
// machine does.
#pragma once

#include <string>
#include <vector>

#include "kv/levels_operations.h"

namespace helicore::kv::testing {

struct AttentionSpec {
  std::optional<int32_t> window = std::nullopt;
  std::optional<int32_t> sinks = std::nullopt;
  CacheDomain domain = CacheDomain::kTarget;
  ReusePolicy policy = ReusePolicy::kRequired;
  int64_t row_bytes = 16;
};

// Layers in the order given; `state_bytes` > 0 adds recurrent ones.
inline std::vector<LayerConfig> layers_of(int32_t block, const std::vector<AttentionSpec>& specs,
                                          int64_t state_bytes = 0) {
  std::vector<LayerConfig> layers;
  for (const AttentionSpec& spec : specs) {
    layers.push_back(AttentionLayerConfig{.layer_id = static_cast<int32_t>(layers.size()),
                                          .buffers = {{"k", spec.row_bytes * block}},
                                          .sliding_window_size = spec.window,
                                          .num_sink_tokens = spec.sinks,
                                          .cache_domain = spec.domain,
                                          .reuse_policy = spec.policy});
  }
  if (state_bytes > 0) {
    layers.push_back(SsmLayerConfig{.layer_id = static_cast<int32_t>(layers.size()),
                                    .buffers = {{"s", state_bytes}}});
  }
  return layers;
}

// Bytes of `blocks` blocks of every layer on each level.
inline std::vector<int64_t> bytes_of(const std::vector<LayerConfig>& layers,
                                     const std::vector<int64_t>& blocks) {
  int64_t sum = 0;
  for (const LayerConfig& layer : layers) {
    for (const BufferConfig& buffer : buffers_of(layer)) sum += buffer.size;
  }
  std::vector<int64_t> bytes;
  for (int64_t count : blocks) bytes.push_back(sum * count);
  return bytes;
}

inline LevelsSetup setup_of(const char* name, int32_t block, std::vector<LayerConfig> layers,
                            const std::vector<int64_t>& blocks) {
  LevelsSetup setup{.name = name, .tokens_per_block = block};
  setup.level_bytes = bytes_of(layers, blocks);
  setup.layers = std::move(layers);
  return setup;
}

// What models have.
inline std::vector<LevelsSetup> model_setups() {
  using Specs = std::vector<AttentionSpec>;
  constexpr auto kDraft = CacheDomain::kDraft;
  std::vector<LevelsSetup> out;
  const auto add = [&](const char* name, int32_t block, const Specs& specs, int64_t state,
                       const std::vector<int64_t>& blocks) -> LevelsSetup& {
    out.push_back(setup_of(name, block, layers_of(block, specs, state), blocks));
    out.back().min_snapshot = state > 0;
    return out.back();
  };
  add("full", 4, {{}}, 0, {6, 4, 8});
  add("full_2_levels", 4, {{}}, 0, {5, 6});
  add("full_host_of_one", 4, {{}}, 0, {5, 1, 6});
  add("full_last_of_one", 4, {{}}, 0, {5, 1});
  add("full_block_1", 1, {{}}, 0, {8, 5, 9});
  add("full_block_16", 16, {{}}, 0, {5, 4, 6}).backoff = 3;
  add("whole_blocks", 4, {{}}, 0, {6, 4, 8}).partial = false;
  add("gate", 4, {{}}, 0, {8, 4, 8}).max_util = 0.7;
  add("window", 4, {{.window = 6}}, 0, {6, 4, 8});
  add("window_sinks", 4, {{.window = 6, .sinks = 3}}, 0, {7, 4, 8});
  add("window_block_1", 1, {{.window = 3, .sinks = 2}}, 0, {7, 4, 8});
  add("window_min_snapshot", 4, {{.window = 6}}, 0, {6, 4, 8}).min_snapshot = true;
  add("full_window_one_group", 4, {{}, {.window = 5}}, 0, {6, 4, 8});
  add("full_window_two_groups", 4, {{}, {.window = 9, .sinks = 4, .row_bytes = 32}}, 0, {6, 4, 8});
  add("full_window_min_snapshot", 4, {{}, {.window = 5, .row_bytes = 32}}, 0, {6, 4, 8})
      .min_snapshot = true;
  add("state", 4, {}, 64, {4, 3, 5});
  add("state_full", 4, {{}}, 64, {6, 4, 8});
  add("state_full_block_1", 1, {{}}, 48, {7, 4, 8});
  add("state_window", 4, {{.window = 6}, {}}, 64, {6, 4, 8});
  add("draft", 4, {{}, {.domain = kDraft}}, 0, {6, 4, 8}).draft_backoff = 2;
  add("draft_window", 4, {{}, {.window = 6, .domain = kDraft, .row_bytes = 32}}, 0, {6, 4, 8});
  add("policies", 4,
      {{},
       {.policy = ReusePolicy::kOptional, .row_bytes = 32},
       {.window = 6, .policy = ReusePolicy::kPrivate, .row_bytes = 48}},
      0, {6, 4, 8});
  add("policies_one_group", 4,
      {{}, {.policy = ReusePolicy::kOptional}, {.policy = ReusePolicy::kPrivate}}, 0, {7, 4, 8});
  add("optional_window", 4, {{}, {.window = 5, .policy = ReusePolicy::kOptional}}, 0, {6, 4, 8});
  add("roomy", 4, {{}}, 0, {40, 30, 900}).roomy = true;
  add("roomy_window", 4, {{}, {.window = 6, .sinks = 3}}, 0, {40, 30, 900}).roomy = true;
  return out;
}

// What machines do.
struct MachineSetup {
  const char* name;
  void (*apply)(LevelsSetup&);
};
inline const std::vector<MachineSetup>& machine_setups() {
  static const std::vector<MachineSetup> kMachines{
      {"cpu", [](LevelsSetup&) {}},
      {"cpu_faults", [](LevelsSetup& s) { s.refused = 0.05, s.failed = s.torn = 0.01; }},
      {"gpu", [](LevelsSetup& s) { s.gpu = s.any_order = true, s.slow = 0.2; }},
      {"gpu_refused", [](LevelsSetup& s) { s.gpu = true, s.refused = 0.1; }},
      {"gpu_faults", [](LevelsSetup& s) { s.gpu = s.any_order = true, s.failed = s.torn = 0.01; }},
  };
  return kMachines;
}

inline KVCacheManagerConfig config_of(const LevelsSetup& setup, const std::string& directory = "") {
  KVCacheManagerConfig config;
  config.tokens_per_block = setup.tokens_per_block;
  config.layers = setup.layers;
  for (size_t i = 0; i < setup.level_bytes.size(); ++i) {
    const int64_t bytes = setup.level_bytes[i];
    if (i == 0 && setup.gpu) {
      config.cache_tiers.push_back(GpuCacheTierConfig{bytes});
    } else if (i > 0 && i + 1 == setup.level_bytes.size() && !directory.empty()) {
      config.cache_tiers.push_back(DiskCacheTierConfig{bytes, directory});
    } else {
      config.cache_tiers.push_back(HostCacheTierConfig{bytes});
    }
  }
  config.max_util_for_resume = setup.max_util;
  config.enable_partial_reuse = setup.partial;
  config.reuse_match_backoff = setup.backoff;
  config.draft_reuse_match_backoff = setup.draft_backoff;
  config.commit_min_snapshot = setup.min_snapshot;
  config.event_buffer_size = 8;
  config.rebalance_min_sampled_kv_caches = 3;
  config.rebalance_cooldown_secs = 0;
  config.rebalance_target_ratio_update_interval = 1;
  config.rebalance_moving_average_decay = 0.3;
  return config;
}

// A manager on a device whose clock is moved by hand, and a world on it.
struct FakeLevels {
  FakeLevels(const LevelsSetup& setup, const std::string& directory, uint64_t seed) {
    auto owned = std::make_unique<FakeDevice>(
        FakeOptions{.type = setup.gpu ? DeviceType::kCuda : DeviceType::kCpu,
                    .automatic = setup.automatic,
                    .any_order = setup.any_order,
                    .ignore_after = setup.ignore_after,
                    .seed = seed});
    device = owned.get();
    device->set_grain(16);
    ledger = device->ledger();
    manager = std::make_unique<KVCacheManager>(config_of(setup, directory), std::move(owned));
    world = std::make_unique<LevelsWorld>(setup, *manager, device, seed);
  }
  FakeDevice* device = nullptr;
  std::shared_ptr<const FakeLedger> ledger;
  std::unique_ptr<KVCacheManager> manager;
  std::unique_ptr<LevelsWorld> world;
};

// The first difference of a run from beginning to end, or nothing.
inline std::optional<std::string> run_levels(const LevelsSetup& setup, const std::string& directory,
                                             uint64_t seed, int num_operations,
                                             LevelsWorld::Counts* counts = nullptr) {
  FakeLevels levels(setup, directory, seed);
  auto difference = levels.world->run(num_operations);
  if (!difference) difference = levels.world->finish();
  if (counts != nullptr) *counts = levels.world->counts();
  if (difference) levels.world->abandon();
  const auto ledger = levels.ledger;
  levels.world.reset();
  levels.manager.reset();
  if (!difference && (ledger->num_bytes != 0 || ledger->num_pools != 0)) {
    difference = "memory leaked";
  }
  return difference;
}

}  // namespace helicore::kv::testing
