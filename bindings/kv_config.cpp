// Enums and configuration types of helicore._core.kv.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "helicore/kv/config.h"
#include "helicore/kv/retention.h"
#include "helicore/kv/types.h"
#include "kv_values.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace helicore::bindings {
namespace {

using namespace helicore::kv;

void bind_enums(nb::module_& m) {
  nb::enum_<CacheTier>(m, "CacheTier", nb::is_arithmetic(), "Kind of memory of a cache level.")
      .value("GPU_MEM", CacheTier::kGpuMem)
      .value("HOST_MEM", CacheTier::kHostMem)
      .value("DISK", CacheTier::kDisk);
  nb::enum_<CacheDomain>(m, "CacheDomain", nb::is_arithmetic(),
                         "Whose pages: pool groups are never shared between domains.")
      .value("TARGET", CacheDomain::kTarget)
      .value("DRAFT", CacheDomain::kDraft);
  nb::enum_<ReusePolicy>(m, "AttentionReusePolicy", "What prefix reuse means for a layer's pages.")
      .value("REQUIRED", ReusePolicy::kRequired, "Reuse needs them.")
      .value("PRIVATE", ReusePolicy::kPrivate, "Never shared; a reused prefix gets fresh pages.")
      .value("OPTIONAL", ReusePolicy::kOptional,
             "Shared where they are; reuse does not need them.");
  nb::enum_<LayerType>(m, "LayerType", nb::is_arithmetic(), "Kind of a layer's state.")
      .value("ATTENTION", LayerType::kAttention)
      .value("SSM", LayerType::kSsm);
  nb::enum_<PageStatus>(m, "PageStatus", nb::is_arithmetic(), "What holds a page.")
      .value("LOCKED", PageStatus::kLocked)
      .value("HELD", PageStatus::kHeld)
      .value("DROPPABLE", PageStatus::kDroppable);
  nb::enum_<PageIndexMode>(m, "PageIndexMode", nb::is_arithmetic(),
                           "Which base address page indices count from.")
      .value("SHARED", PageIndexMode::kShared)
      .value("PER_LAYER", PageIndexMode::kPerLayer);
  nb::enum_<CacheStatus>(m, "CacheStatus", nb::is_arithmetic(), "State of a KVCache.")
      .value("ACTIVE", CacheStatus::kActive)
      .value("SUSPENDED", CacheStatus::kSuspended)
      .value("CLOSED", CacheStatus::kClosed);
  nb::enum_<CommitState>(m, "CommitState", nb::is_arithmetic(), "Whether a KVCache may commit.")
      .value("ALLOWED", CommitState::kAllowed)
      .value("VIRTUAL_STOP", CommitState::kVirtualStop)
      .value("USER_STOP", CommitState::kUserStop);
}

template <typename Tier>
nb::class_<Tier> bind_tier(nb::module_& m, const char* name, const char* doc) {
  nb::class_<Tier> cls(m, name, doc);
  cls.def_ro("quota", &Tier::quota, "Bytes.")
      .def_prop_ro("tier", [](const Tier&) { return Tier::kTier; })
      .def("assert_valid", &Tier::validate, "Raises ValueError naming the field that is wrong.");
  return cls;
}

void bind_tiers(nb::module_& m) {
  auto gpu = bind_tier<GpuCacheTierConfig>(m, "GpuCacheTierConfig", "Memory of a GPU.");
  gpu.def(
      "__init__",
      [](GpuCacheTierConfig* self, int64_t quota) {
        construct_checked(self, GpuCacheTierConfig{quota});
      },
      "quota"_a);
  add_value_semantics(gpu, "GpuCacheTierConfig", {"quota"});
  auto host = bind_tier<HostCacheTierConfig>(
      m, "HostCacheTierConfig", "Host memory; as the first tier, the hot level of a CPU manager.");
  host.def(
      "__init__",
      [](HostCacheTierConfig* self, int64_t quota) {
        construct_checked(self, HostCacheTierConfig{quota});
      },
      "quota"_a);
  add_value_semantics(host, "HostCacheTierConfig", {"quota"});
  auto disk =
      bind_tier<DiskCacheTierConfig>(m, "DiskCacheTierConfig", "Files in an existing directory.");
  disk.def(
          "__init__",
          [](DiskCacheTierConfig* self, int64_t quota, std::string path) {
            construct_checked(self, DiskCacheTierConfig{quota, std::move(path)});
          },
          "quota"_a, "path"_a)
      .def_ro("path", &DiskCacheTierConfig::path);
  add_value_semantics(disk, "DiskCacheTierConfig", {"quota", "path"});
}

void bind_layers(nb::module_& m) {
  nb::class_<BufferConfig> buffer(m, "BufferConfig",
                                  "One buffer of a layer: `size` bytes per block.");
  buffer
      .def(
          "__init__",
          [](BufferConfig* self, std::string role, int64_t size, std::optional<int32_t> tpb) {
            construct_checked(self, BufferConfig{std::move(role), size, tpb});
          },
          "role"_a, "size"_a, "tokens_per_block_override"_a = nb::none())
      .def_ro("role", &BufferConfig::role)
      .def_ro("size", &BufferConfig::size)
      .def_ro("tokens_per_block_override", &BufferConfig::tokens_per_block_override);
  add_value_semantics(buffer, "BufferConfig", {"role", "size", "tokens_per_block_override"});

  using Attention = AttentionLayerConfig;
  nb::class_<Attention> attention(m, "AttentionLayerConfig", "An attention layer's buffers.");
  attention
      .def(
          "__init__",
          [](Attention* self, int32_t layer_id, std::vector<BufferConfig> buffers,
             std::optional<int32_t> window, std::optional<int32_t> sinks, CacheDomain domain,
             ReusePolicy policy) {
            construct_checked(
                self, Attention{layer_id, std::move(buffers), window, sinks, domain, policy});
          },
          "layer_id"_a, "buffers"_a, "sliding_window_size"_a = nb::none(),
          "num_sink_tokens"_a = nb::none(), "cache_domain"_a = CacheDomain::kTarget,
          "reuse_policy"_a = ReusePolicy::kRequired)
      .def_ro("layer_id", &Attention::layer_id)
      .def_ro("buffers", &Attention::buffers)
      .def_ro("sliding_window_size", &Attention::sliding_window_size)
      .def_ro("window_size", &Attention::sliding_window_size)
      .def_ro("num_sink_tokens", &Attention::num_sink_tokens)
      .def_ro("cache_domain", &Attention::cache_domain)
      .def_ro("reuse_policy", &Attention::reuse_policy);
  add_value_semantics(attention, "AttentionLayerConfig",
                      {"layer_id", "buffers", "sliding_window_size", "num_sink_tokens",
                       "cache_domain", "reuse_policy"});

  nb::class_<SsmLayerConfig> ssm(m, "SsmLayerConfig", "A recurrent layer's state buffers.");
  ssm.def(
         "__init__",
         [](SsmLayerConfig* self, int32_t layer_id, std::vector<BufferConfig> buffers) {
           construct_checked(self, SsmLayerConfig{layer_id, std::move(buffers)});
         },
         "layer_id"_a, "buffers"_a)
      .def_ro("layer_id", &SsmLayerConfig::layer_id)
      .def_ro("buffers", &SsmLayerConfig::buffers);
  add_value_semantics(ssm, "SsmLayerConfig", {"layer_id", "buffers"});
}

void bind_hints(nb::module_& m) {
  nb::class_<KVCacheDesc> desc(m, "KVCacheDesc", "One sequence of a planned batch, in tokens.");
  desc.def(
          "__init__",
          [](KVCacheDesc* self, int32_t capacity, int32_t history_length) {
            construct_checked(self, KVCacheDesc{capacity, history_length});
          },
          "capacity"_a, "history_length"_a)
      .def_ro("capacity", &KVCacheDesc::capacity)
      .def_ro("history_length", &KVCacheDesc::history_length);
  add_value_semantics(desc, "KVCacheDesc", {"capacity", "history_length"});

  nb::class_<BatchDesc> batch(m, "BatchDesc", "A planned batch with a shared system prompt.");
  batch
      .def(
          "__init__",
          [](BatchDesc* self, std::vector<KVCacheDesc> caches, int32_t system_prompt_length) {
            construct_checked(self, BatchDesc{std::move(caches), system_prompt_length});
          },
          "kv_caches"_a, "system_prompt_length"_a = 0)
      .def_ro("kv_caches", &BatchDesc::kv_caches)
      .def_ro("system_prompt_length", &BatchDesc::system_prompt_length);
  add_value_semantics(batch, "BatchDesc", {"kv_caches", "system_prompt_length"});

  nb::class_<SwaScratchReuseConfig> scratch(m, "SwaScratchReuseConfig",
                                            "Scratch blocks for windowed prefill.");
  scratch
      .def(
          "__init__",
          [](SwaScratchReuseConfig* self, int32_t max_rewind_len) {
            construct_checked(self, SwaScratchReuseConfig{max_rewind_len});
          },
          "max_rewind_len"_a = 0)
      .def_ro("max_rewind_len", &SwaScratchReuseConfig::max_rewind_len);
  add_value_semantics(scratch, "SwaScratchReuseConfig", {"max_rewind_len"});

  nb::class_<ReuseScope> scope(
      m, "ReuseScope", "Namespace of prefix matching; pages are shared only between equal scopes.");
  scope
      .def(
          "__init__",
          [](ReuseScope* self, std::optional<int64_t> lora_id,
             std::variant<std::monostate, int64_t, std::string> salt, int64_t lora_generation) {
            construct_checked(self, ReuseScope{lora_id, std::move(salt), lora_generation});
          },
          "lora_id"_a = nb::none(), "salt"_a = nb::none(), "lora_generation"_a = 0)
      .def_ro("lora_id", &ReuseScope::lora_id)
      .def_ro("salt", &ReuseScope::salt)
      .def_ro("lora_generation", &ReuseScope::lora_generation);
  add_value_semantics(scope, "ReuseScope", {"lora_id", "salt", "lora_generation"});
}

void bind_retention(nb::module_& m) {
  nb::class_<RetentionRange> range(
      m, "RetentionRange",
      "Tokens [begin, end) have `priority` from their commit on, for duration_ms or for ever; what "
      "comes before them gets at least that.");
  range
      .def(
          "__init__",
          [](RetentionRange* self, int32_t begin, std::optional<int32_t> end, int priority,
             std::optional<int64_t> duration_ms) {
            construct_checked(self, RetentionRange{begin, end, priority, duration_ms});
          },
          "begin"_a, "end"_a.none(), "priority"_a, "duration_ms"_a = nb::none())
      .def_ro("begin", &RetentionRange::begin)
      .def_ro("end", &RetentionRange::end)
      .def_ro("priority", &RetentionRange::priority)
      .def_ro("duration_ms", &RetentionRange::duration_ms);
  add_value_semantics(range, "RetentionRange", {"begin", "end", "priority", "duration_ms"});
}

void bind_manager_config(nb::module_& m) {
  using Config = KVCacheManagerConfig;
  nb::class_<Config> cls(m, "KVCacheManagerConfig",
                         "Everything a KVCacheManager is made from; checked at construction.");
  const Config defaults;
  cls.def(
      "__init__",
      [](Config* self, int32_t tokens_per_block, std::vector<CacheTierConfig> cache_tiers,
         std::vector<LayerConfig> layers, double max_util_for_resume, bool enable_partial_reuse,
         int32_t reuse_match_backoff, std::vector<BatchDesc> constraints,
         std::optional<BatchDesc> typical_step,
         std::optional<std::vector<double>> initial_pool_ratio,
         std::optional<SwaScratchReuseConfig> swa_scratch_reuse, bool commit_min_snapshot,
         bool enable_stats, bool text_only, int32_t min_sampled, double cooldown_secs,
         int32_t update_interval, double ratio_threshold, double moving_average_decay,
         int32_t event_buffer_size, std::optional<int32_t> draft_reuse_match_backoff,
         int32_t device_index) {
        construct_checked(self, Config{.tokens_per_block = tokens_per_block,
                                       .cache_tiers = std::move(cache_tiers),
                                       .layers = std::move(layers),
                                       .max_util_for_resume = max_util_for_resume,
                                       .enable_partial_reuse = enable_partial_reuse,
                                       .reuse_match_backoff = reuse_match_backoff,
                                       .draft_reuse_match_backoff = draft_reuse_match_backoff,
                                       .constraints = std::move(constraints),
                                       .typical_step = std::move(typical_step),
                                       .initial_pool_ratio = std::move(initial_pool_ratio),
                                       .swa_scratch_reuse = swa_scratch_reuse,
                                       .commit_min_snapshot = commit_min_snapshot,
                                       .enable_stats = enable_stats,
                                       .text_only = text_only,
                                       .rebalance_min_sampled_kv_caches = min_sampled,
                                       .rebalance_cooldown_secs = cooldown_secs,
                                       .rebalance_target_ratio_update_interval = update_interval,
                                       .rebalance_ratio_threshold = ratio_threshold,
                                       .rebalance_moving_average_decay = moving_average_decay,
                                       .device_index = device_index,
                                       .event_buffer_size = event_buffer_size});
      },
      "tokens_per_block"_a, "cache_tiers"_a, "layers"_a, nb::kw_only(),
      "max_util_for_resume"_a = defaults.max_util_for_resume,
      "enable_partial_reuse"_a = defaults.enable_partial_reuse, "reuse_match_backoff"_a = 0,
      "constraints"_a = std::vector<BatchDesc>(), "typical_step"_a = nb::none(),
      "initial_pool_ratio"_a = nb::none(), "swa_scratch_reuse"_a = nb::none(),
      "commit_min_snapshot"_a = false, "enable_stats"_a = true, "text_only"_a = false,
      "rebalance_min_sampled_kv_caches"_a = defaults.rebalance_min_sampled_kv_caches,
      "rebalance_cooldown_secs"_a = defaults.rebalance_cooldown_secs,
      "rebalance_target_ratio_update_interval"_a = defaults.rebalance_target_ratio_update_interval,
      "rebalance_ratio_threshold"_a = defaults.rebalance_ratio_threshold,
      "rebalance_moving_average_decay"_a = defaults.rebalance_moving_average_decay,
      "event_buffer_size"_a = 0, "draft_reuse_match_backoff"_a = nb::none(), "device_index"_a = 0);
  cls.def_ro("tokens_per_block", &Config::tokens_per_block)
      .def_ro("cache_tiers", &Config::cache_tiers)
      .def_ro("layers", &Config::layers)
      .def_ro("max_util_for_resume", &Config::max_util_for_resume)
      .def_ro("enable_partial_reuse", &Config::enable_partial_reuse)
      .def_ro("reuse_match_backoff", &Config::reuse_match_backoff)
      .def_ro("draft_reuse_match_backoff", &Config::draft_reuse_match_backoff)
      .def_ro("device_index", &Config::device_index)
      .def_ro("constraints", &Config::constraints)
      .def_ro("typical_step", &Config::typical_step)
      .def_ro("initial_pool_ratio", &Config::initial_pool_ratio)
      .def_ro("swa_scratch_reuse", &Config::swa_scratch_reuse)
      .def_prop_ro("enable_swa_scratch_reuse", &Config::enable_swa_scratch_reuse)
      .def_ro("commit_min_snapshot", &Config::commit_min_snapshot)
      .def_ro("enable_stats", &Config::enable_stats)
      .def_ro("text_only", &Config::text_only)
      .def_ro("rebalance_min_sampled_kv_caches", &Config::rebalance_min_sampled_kv_caches)
      .def_ro("rebalance_cooldown_secs", &Config::rebalance_cooldown_secs)
      .def_ro("rebalance_target_ratio_update_interval",
              &Config::rebalance_target_ratio_update_interval)
      .def_ro("event_buffer_size", &Config::event_buffer_size)
      .def_ro("rebalance_ratio_threshold", &Config::rebalance_ratio_threshold)
      .def_ro("rebalance_moving_average_decay", &Config::rebalance_moving_average_decay);
  add_value_semantics(
      cls, "KVCacheManagerConfig",
      {"tokens_per_block", "cache_tiers", "layers", "max_util_for_resume", "enable_partial_reuse",
       "reuse_match_backoff", "constraints", "typical_step", "initial_pool_ratio",
       "swa_scratch_reuse", "commit_min_snapshot", "enable_stats", "text_only", "event_buffer_size",
       "draft_reuse_match_backoff", "device_index"});
}

}  // namespace

void bind_kv_config(nb::module_& m) {
  bind_enums(m);
  bind_tiers(m);
  bind_layers(m);
  bind_hints(m);
  bind_retention(m);
  bind_manager_config(m);
}

}  // namespace helicore::bindings
