// What the bytes of a driven manager stand for at their beginning: a configuration and a machine.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "helicore/core/error.h"
#include "helicore/kv/config.h"
#include "helicore/kv/retention.h"
#include "kv/fake_device.h"

namespace helicore::kv::testing {

// Zeros after its end.
class ByteSource {
 public:
  explicit ByteSource(std::span<const uint8_t> bytes) : bytes_(bytes) {}
  [[nodiscard]] bool is_empty() const { return bytes_.empty(); }
  uint8_t byte() {
    if (bytes_.empty()) return 0;
    const uint8_t value = bytes_[0];
    bytes_ = bytes_.subspan(1);
    return value;
  }
  int below(int bound) { return bound <= 1 ? 0 : byte() % bound; }
  bool one_in(int n) { return below(n) == n - 1; }
  // Mostly small, sometimes at the edges of 32 and 64 bits.
  int64_t wild() {
    switch (below(8)) {
      case 0:
        return -1 - below(4);
      case 1:
        return INT32_MAX - below(4);
      case 2:
        return INT64_MAX - below(4);
      case 3:
        return INT64_MIN + below(4);
      default:
        return below(256);
    }
  }

 private:
  std::span<const uint8_t> bytes_;
};

// One of three.
inline ReuseScope scope_of(int scope) {
  ReuseScope result;
  if (scope == 1) result.salt = std::string("tenant");
  if (scope == 2) result.lora_id = 3;
  return result;
}

inline RetentionRange some_range(ByteSource& source, int block) {
  RetentionRange range{.begin = source.one_in(8) ? -1 : source.below(3 * block),
                       .priority = source.below(102)};
  if (source.one_in(2)) range.end = range.begin + source.below(3 * block);
  if (!source.one_in(3)) range.duration_ms = source.below(64);
  return range;
}

// What the driver found wrong.
class DriverFailure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct DriverConfig {
  KVCacheManagerConfig config{};
  bool is_plain = true;  // one level of full attention: what was committed and not evicted is found
  bool has_fake = false;  // the machine is a FakeDevice
  FakeOptions fake{};
  bool may_fail = false;  // which fails now and then
};

struct DriverDevice {
  std::unique_ptr<CacheDevice> device{};  // null: the default one
  FakeDevice* fake = nullptr;
};
// With a small grain, so that lower levels fill.
inline DriverDevice driver_device(const DriverConfig& config) {
  if (!config.has_fake) return {};
  auto device = std::make_unique<FakeDevice>(config.fake);
  device->set_grain(512);
  FakeDevice* fake = device.get();
  return {std::move(device), fake};
}
// Once the manager is made. Refused copies are in no log: not for what is to be replayed.
inline void inject_faults(FakeDevice& fake, bool may_refuse) {
  fake.inject_rate(FakeFault::kFailedTask, 0.02);
  fake.inject_rate(FakeFault::kTornTask, 0.01);
  fake.inject_rate(FakeFault::kSlowBatch, 0.2);
  fake.inject_rate(FakeFault::kAllocation, 0.1);
  if (may_refuse) fake.inject_rate(FakeFault::kRefusedCopy, 0.02);
}

// Asks for more than a build may support and takes the nearest configuration that it accepts.
inline DriverConfig driver_config(ByteSource& source) {
  constexpr int32_t kBlockSizes[] = {1, 2, 3, 4, 8, 16};
  constexpr double kUtils[] = {1.0, 0.97, 0.5};
  const int32_t tpb = kBlockSizes[source.below(6)];
  const int num_blocks = 2 + source.below(30);
  const int num_layers = 1 + source.below(3);
  const int wishes = source.byte();
  const int window = 1 + source.below(40);
  const int sinks = source.below(4);
  const int policy = source.byte() % 6 < 3 ? 0 : source.below(3);
  const auto build = [&](bool levels, bool ssm, bool windows, bool scratch) {
    KVCacheManagerConfig config;
    config.tokens_per_block = tpb;
    int64_t bytes = 0;
    for (int i = 0; i < num_layers; ++i) {
      AttentionLayerConfig layer{.layer_id = i, .buffers = {{"k", int64_t{512} * tpb}}};
      if (wishes >> i & 1) layer.buffers.push_back({"v", int64_t{512} * tpb});
      if (i > 0 && (wishes & 8) != 0) layer.cache_domain = CacheDomain::kDraft;
      if (windows && i % 2 == 1) {
        layer.sliding_window_size = window;
        layer.num_sink_tokens = sinks;
      }
      // Layers of one life cycle share a policy.
      if (i == 1) layer.reuse_policy = static_cast<ReusePolicy>(policy);
      bytes += 512 * tpb * static_cast<int64_t>(layer.buffers.size());
      config.layers.push_back(std::move(layer));
    }
    if (ssm) {
      config.layers.push_back(SsmLayerConfig{.layer_id = 9, .buffers = {{"state", 1024}}});
      config.commit_min_snapshot = true;
    }
    if (scratch) config.swa_scratch_reuse = SwaScratchReuseConfig{.max_rewind_len = sinks};
    config.cache_tiers = {HostCacheTierConfig{bytes * num_blocks}};
    if (levels) {
      config.cache_tiers.push_back(HostCacheTierConfig{bytes * num_blocks * 2});
      if ((wishes & 32) != 0) {
        config.cache_tiers.push_back(DiskCacheTierConfig{
            bytes * num_blocks * 3, std::filesystem::temp_directory_path().string()});
      }
    }
    return config;
  };
  DriverConfig result;
  const bool levels = (wishes & 16) != 0, ssm = (wishes & 64) != 0, windows = (wishes & 128) != 0;
  result.config = build(levels, ssm, windows, windows && sinks == 3);
  result.is_plain = !levels && !ssm && !windows && policy == 0;
  const int flags = source.byte();
  result.config.enable_partial_reuse = (flags & 1) == 0;
  result.config.reuse_match_backoff = (flags & 2) != 0 ? 1 + (flags >> 6) : 0;
  result.config.max_util_for_resume = kUtils[(flags >> 2) % 3];
  result.config.event_buffer_size = (flags & 16) != 0 ? 16 : 0;
  result.config.enable_stats = (flags & 32) == 0;
  result.config.rebalance_target_ratio_update_interval = 1 + (flags >> 5);
  result.config.rebalance_ratio_threshold = 1.1;
  const int machine = source.byte();
  if ((machine & 7) == 7) result.config.draft_reuse_match_backoff = machine >> 6;
  result.has_fake = machine % 3 == 1;
  result.fake = {.type = DeviceType::kCpu,
                 .automatic = (machine & 64) != 0,
                 .any_order = (machine & 128) != 0,
                 .seed = static_cast<uint64_t>(machine)};
  result.may_fail = result.has_fake && (machine & 24) == 8;
  result.is_plain = result.is_plain && (machine & 7) != 7 && !result.may_fail;
  return result;
}

}  // namespace helicore::kv::testing
