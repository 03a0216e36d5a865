// Recorded calls that need a setting of their own: sizes and statistics, prefetches of more than a
// batch. operation_replay_test.cpp has random ones.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "helicore/core/error.h"
#include "helicore/kv/introspection.h"
#include "helicore/kv/operation_log.h"
#include "helicore/kv/operation_replay.h"
#include "helicore/kv/state_digest.h"
#include "kv/fake_device.h"
#include "kv/kv_configs.h"

namespace helicore::kv::testing {
namespace {

using ::testing::HasSubstr;

// Two pool groups, a level below, and targets after every closed sequence.
KVCacheManagerConfig config_of_two_groups() {
  KVCacheManagerConfig config = attention_config(4, 64);
  config.layers.push_back(AttentionLayerConfig{
      .layer_id = 1, .buffers = {{"latent", 8 * 1024}}, .sliding_window_size = 8});
  config.cache_tiers = {HostCacheTierConfig{256 << 10}, HostCacheTierConfig{512 << 10}};
  config.rebalance_target_ratio_update_interval = 1;
  config.rebalance_min_sampled_kv_caches = 1;
  config.rebalance_cooldown_secs = 0;
  config.rebalance_ratio_threshold = 1.01;
  return config;
}

// A REQUIRED layer and an OPTIONAL one, in pool groups of their own; four blocks of four tokens on
// the hot level, nine below it.
KVCacheManagerConfig config_of_policies(const CacheTierConfig& hot) {
  KVCacheManagerConfig config;
  config.tokens_per_block = 4;
  config.layers = {
      AttentionLayerConfig{.layer_id = 0, .buffers = {{"k", 2048}}},
      AttentionLayerConfig{
          .layer_id = 1, .buffers = {{"k", 512}}, .reuse_policy = ReusePolicy::kOptional}};
  config.initial_pool_ratio = {0.8, 0.2};
  config.max_util_for_resume = 1.0;
  config.cache_tiers = {hot, HostCacheTierConfig{9 * 2560}};
  return config;
}

struct Machine {
  FakeDevice* device = nullptr;
  std::unique_ptr<KVCacheManager> manager{};
};

Machine make_machine(const KVCacheManagerConfig& config, DeviceType type = DeviceType::kCpu) {
  auto device = std::make_unique<FakeDevice>(FakeOptions{.type = type});
  device->set_grain(512);
  FakeDevice* fake = device.get();
  return {fake, std::make_unique<KVCacheManager>(config, std::move(device))};
}

void run_sequence(KVCacheManager& manager, int32_t length, std::optional<int64_t> id = {}) {
  auto cache = manager.create_kv_cache({.id = id});
  ASSERT_TRUE(cache->resume());
  ASSERT_TRUE(cache->resize(length, length - 1));
  cache->commit(iota_tokens(length - 1), true);
}

OperationLog log_of(KVCacheManager& manager) {
  return OperationLog::parse(manager.stop_recording().bytes);
}

void expect_same(const OperationLog& log, KVCacheManager& manager) {
  Replayer replayer(log, {.check_every = 1});
  const auto report = replayer.run();
  EXPECT_FALSE(report.difference.has_value()) << describe(report);
  EXPECT_EQ(sizes_digest(Introspection::state(replayer.manager())),
            sizes_digest(Introspection::state(manager)));
  EXPECT_EQ(replayer.manager().pool_ratios(), manager.pool_ratios());
}

void erase_field(OperationLog& log, OperationField field) {
  for (Operation& operation : log.operations) {
    std::erase_if(operation.entries, [&](const auto& entry) { return entry.field == field; });
  }
}

TEST(RecordedCalls, a_level_that_shrinks_behind_copies_goes_the_same_steps_again) {
  Machine machine = make_machine(config_of_two_groups());
  KVCacheManager& manager = *machine.manager;
  manager.start_recording({.state_every = 1});
  run_sequence(manager, 100);
  const int64_t quota = manager.quota(kHotLevel);
  EXPECT_FALSE(manager.resize(kHotLevel, quota / 4, true).done) << "copies are under way";
  EXPECT_GT(machine.device->num_pending(), 0);
  (void)manager.maintain(2);
  EXPECT_TRUE(manager.is_resizing());
  (void)machine.device->run_all();
  while (manager.is_resizing()) {
    (void)manager.maintain(2);
    (void)machine.device->run_all();
  }
  EXPECT_TRUE(manager.resize(kHotLevel, quota).done);
  EXPECT_TRUE(manager.resize(1, quota).done) << "waits for its copies";
  OperationLog log = log_of(manager);
  expect_same(log, manager);
  erase_field(log, OperationField::kGaveBack);
  const auto report = Replayer(log).run();
  ASSERT_TRUE(report.difference.has_value()) << "here no copy is under way";
  EXPECT_THAT(report.difference->operation, HasSubstr("KVCacheManager.resize(level=0, quota="));
}

TEST(RecordedCalls, memory_that_was_not_to_be_had_is_not_had_again) {
  Machine machine = make_machine(config_of_two_groups());
  KVCacheManager& manager = *machine.manager;
  manager.start_recording({.state_every = 1});
  machine.device->inject(FakeFault::kAllocation, 1);
  EXPECT_THROW((void)manager.resize(kHotLevel, 2 * manager.quota(kHotLevel)), OutOfMemory);
  run_sequence(manager, 50);
  const OperationLog log = log_of(manager);
  EXPECT_THAT(describe(log.operations[0]), HasSubstr("had_memory=0"));
  expect_same(log, manager);
}

TEST(RecordedCalls, an_adjustment_follows_the_same_traffic) {
  for (const bool anonymise : {false, true}) {
    SCOPED_TRACE(anonymise);
    Machine machine = make_machine(config_of_two_groups());
    KVCacheManager& manager = *machine.manager;
    machine.device->set_automatic(true);
    int64_t now = 7;
    Introspection::state(manager).now_ns = [&] { return now; };
    manager.mark_stats_excluded(700);  // before the log begins: it begins with it
    manager.start_recording({.state_every = 1, .anonymise = anonymise});
    manager.mark_stats_excluded(1);
    run_sequence(manager, 9);
    run_sequence(manager, 140, 700);
    run_sequence(manager, 9);
    run_sequence(manager, 150);
    now += 1000;
    EXPECT_TRUE(manager.adjust());
    while (manager.is_resizing()) (void)manager.maintain(3);
    run_sequence(manager, 60, 1);
    const OperationLog log = log_of(manager);
    EXPECT_EQ(log.operations[0].kind, OperationKind::kExcludeStats);
    EXPECT_EQ(log.operations[0].get(OperationField::kId), anonymise ? -1 : 700);
    expect_same(log, manager);
    // An id that was not excluded teaches other lengths.
    OperationLog other = log;
    std::erase_if(other.operations, [](const Operation& operation) {
      return operation.kind == OperationKind::kExcludeStats;
    });
    EXPECT_TRUE(Replayer(other).run().difference.has_value());
  }
}

// Pages of 20 MiB, of which a batch has two.
TEST(RecordedCalls, a_prefetch_in_batches_is_polled_and_cancelled_as_recorded) {
  KVCacheManagerConfig config = attention_config(4, 3, 1, int64_t{5} << 20);
  config.cache_tiers.push_back(
      HostCacheTierConfig{2 * quota_of(config.cache_tiers[0])});  // room for pages in passing
  KVCacheManager manager(config);
  manager.start_recording({.state_every = 1});
  auto cache = manager.create_kv_cache();
  ASSERT_TRUE(cache->resume());
  ASSERT_TRUE(cache->resize(12));
  cache->commit(iota_tokens(12));
  cache->suspend();
  const auto push_down = [&] {
    auto other = manager.create_kv_cache();
    ASSERT_TRUE(other->resume());
    ASSERT_TRUE(other->resize(12));
  };
  push_down();
  PrefetchTicket ticket = cache->prefetch();
  while (!ticket.is_done()) {
  }
  EXPECT_TRUE(ticket.is_complete());
  push_down();
  ticket = cache->prefetch();
  ticket.cancel();
  while (!ticket.is_done()) {
  }
  EXPECT_FALSE(ticket.is_complete());
  OperationLog log = log_of(manager);
  expect_same(log, manager);
  const auto count = [&](OperationKind kind) {
    return std::count_if(log.operations.begin(), log.operations.end(),
                         [&](const Operation& operation) { return operation.kind == kind; });
  };
  EXPECT_EQ(count(OperationKind::kPollPrefetch), 1);
  EXPECT_EQ(count(OperationKind::kCancelPrefetch), 1);
  std::erase_if(log.operations, [](const Operation& operation) {
    return operation.kind == OperationKind::kPollPrefetch;
  });
  EXPECT_TRUE(Replayer(log).run().difference.has_value());
}

TEST(RecordedCalls, a_maintain_with_nothing_to_do_is_not_noted) {
  KVCacheManager manager(attention_config(4, 8));
  manager.start_recording({});
  EXPECT_EQ(manager.maintain(5), 0);
  EXPECT_TRUE(manager.drain_events().empty()) << "there is no buffer";
  EXPECT_EQ(manager.stop_recording().num_operations, 0u);
}

TEST(RecordedCalls, scratch_slots_are_switched_as_recorded) {
  KVCacheManagerConfig config = attention_config(4, 64);
  config.layers.push_back(
      AttentionLayerConfig{.layer_id = 1, .buffers = {{"latent", 4096}}, .sliding_window_size = 8});
  config.swa_scratch_reuse = SwaScratchReuseConfig{.max_rewind_len = 0};
  KVCacheManager manager(config);
  manager.start_recording({.state_every = 1});
  auto cache = manager.create_kv_cache();
  ASSERT_TRUE(cache->resume());
  cache->scratch().set_enabled(false);
  ASSERT_TRUE(cache->resize(64, 0));
  EXPECT_THROW(cache->scratch().set_enabled(true), LogicError);
  cache->close();
  OperationLog log = log_of(manager);
  EXPECT_THAT(describe(log.operations[2]),
              HasSubstr("enable_swa_scratch_reuse(cache=0, is_enabled=0) -> done"));
  EXPECT_FALSE(Replayer(log).run().difference.has_value());
  log.operations.erase(log.operations.begin() + 2);
  EXPECT_TRUE(Replayer(log).run().difference.has_value()) << "else fewer pages are needed";
}

TEST(RecordedCalls, a_selection_among_optional_groups_is_made_again) {
  Machine machine = make_machine(config_of_policies(HostCacheTierConfig{4 * 2560}));
  KVCacheManager& manager = *machine.manager;
  machine.device->set_automatic(true);
  manager.start_recording({.state_every = 1});
  run_sequence(manager, 9);
  const auto prompt = iota_tokens(8);
  auto cache = manager.create_kv_cache({.input_tokens = prompt});
  EXPECT_THROW(cache->select_optional_reuse(std::vector{LifeCycleId(0)}), InvalidArgument);
  cache->select_optional_reuse(std::vector{LifeCycleId(1)});
  EXPECT_TRUE(cache->reuse_status()[1].complete);
  cache->select_optional_reuse({});
  ASSERT_TRUE(cache->resume());
  EXPECT_THROW(cache->select_optional_reuse({}), LogicError);
  OperationLog log = log_of(manager);
  expect_same(log, manager);
  std::vector<std::string> shown;
  for (const Operation& operation : log.operations) {
    if (operation.kind == OperationKind::kSelectOptionalReuse) shown.push_back(describe(operation));
  }
  ASSERT_EQ(shown.size(), 4u);
  EXPECT_THAT(shown[0], HasSubstr("select_optional_reuse(cache=1, group=0) -> threw"));
  EXPECT_THAT(shown[1], HasSubstr("select_optional_reuse(cache=1, group=1) -> done"));
  EXPECT_THAT(shown[2], HasSubstr("select_optional_reuse(cache=1, group=[]) -> done"));
  EXPECT_THAT(shown[3], HasSubstr("error=LogicError"));
  Replayer replayer(log);
  while (replayer.next() + 2 < log.operations.size()) {
    EXPECT_FALSE(replayer.step().has_value());
  }
  EXPECT_THAT(replayer.cache(1)->reuse_status()[1].coverage, ::testing::IsEmpty());
  std::erase_if(log.operations, [](const Operation& operation) {
    return operation.kind == OperationKind::kSelectOptionalReuse;
  });
  EXPECT_TRUE(Replayer(log).run().difference.has_value()) << "fewer pages are taken";
}

// What is lost with an OPTIONAL page depends on the machine.
TEST(RecordedCalls, a_load_that_fails_in_a_resume_fails_again) {
  for (const DeviceType type : {DeviceType::kCpu, DeviceType::kCuda}) {
    SCOPED_TRACE(name_of(type));
    const bool is_gpu = type == DeviceType::kCuda;
    const CacheTierConfig hot = is_gpu ? CacheTierConfig(GpuCacheTierConfig{4 * 2560})
                                       : CacheTierConfig(HostCacheTierConfig{4 * 2560});
    Machine machine = make_machine(config_of_policies(hot), type);
    KVCacheManager& manager = *machine.manager;
    machine.device->set_automatic(true);
    manager.start_recording({.state_every = 1});
    run_sequence(manager, 9);
    auto other = manager.create_kv_cache();
    ASSERT_TRUE(other->resume());
    ASSERT_TRUE(other->resize(16)) << "sends the first one down";
    other->close();
    const auto prompt = iota_tokens(8);
    auto cache = manager.create_kv_cache({.input_tokens = prompt});
    ASSERT_EQ(cache->cached_tokens_by_level()[1], 8);
    machine.device->set_failing_tag(Introspection::pages(*cache)[1].tag());
    ASSERT_TRUE(cache->resume());
    EXPECT_THAT(cache->reuse_status()[1].coverage, ::testing::ElementsAre(TokenRange{4, 8}));
    EXPECT_EQ(manager.probe_reuse(prompt), is_gpu ? 0 : 8) << "it may have been read on a GPU";
    cache->close();
    const OperationLog log = log_of(manager);
    expect_same(log, manager);
  }
}

}  // namespace
}  // namespace helicore::kv::testing
