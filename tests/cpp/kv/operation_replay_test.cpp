#include "helicore/kv/operation_replay.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <new>
#include <random>
#include <set>
#include <thread>

#include "helicore/core/error.h"
#include "helicore/kv/errors.h"
#include "helicore/kv/introspection.h"
#include "helicore/kv/state_digest.h"
#include "kv/kv_configs.h"
#include "kv/operation_driver.h"
#include "kv/threaded_device.h"

namespace {
thread_local int64_t num_allocations = 0;
}  // namespace

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
[[gnu::noinline]] void* operator new(size_t num_bytes) {
  ++num_allocations;
  if (void* p = std::malloc(num_bytes)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }
#endif

namespace helicore::kv::testing {
namespace {

using ::testing::HasSubstr;

std::vector<uint8_t> random_bytes(uint64_t seed, size_t count) {
  std::mt19937_64 random(seed);
  std::vector<uint8_t> bytes(count);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

struct Driven {
  RecordingSummary summary;
  int num_refused = 0;
  int num_no_room = 0;
  int num_hits = 0;
  uint64_t state = 0;
  uint64_t sizes = 0;
  KVCacheStats stats{};
};

Driven drive_on(DriverConfig config, ByteSource& source, const RecordingOptions& options,
                std::unique_ptr<CacheDevice> device, FakeDevice* fake) {
  KVCacheManager manager(config.config, std::move(device));
  if (fake != nullptr && config.may_fail) inject_faults(*fake, false);
  manager.start_recording(options);
  OperationDriver driver(manager, config, fake, source);
  driver.run(100000);
  const ManagerState& state = Introspection::state(manager);
  return {manager.stop_recording(), driver.num_refused(), driver.num_no_room(), driver.num_hits(),
          state_digest(state),      sizes_digest(state),  manager.stats()};
}

Driven drive(uint64_t seed, const RecordingOptions& options) {
  const auto bytes = random_bytes(seed, 4000);
  ByteSource source(bytes);
  const DriverConfig config = driver_config(source);
  auto [device, fake] = driver_device(config);
  return drive_on(config, source, options, std::move(device), fake);
}

// Three levels, a layer of each reuse policy, copies on threads; those to and from files fail now
// and then.
Driven drive_on_threads(uint64_t seed, const RecordingOptions& options) {
  const auto bytes = random_bytes(seed, 4000);
  ByteSource source(bytes);
  DriverConfig config = driver_config(source);
  const int32_t tpb = config.config.tokens_per_block;
  config.is_plain = config.has_fake = false;
  config.may_fail = true;
  config.config.layers.clear();
  for (const ReusePolicy policy :
       {ReusePolicy::kRequired, ReusePolicy::kOptional, ReusePolicy::kPrivate}) {
    const int id = static_cast<int>(config.config.layers.size());
    AttentionLayerConfig layer{
        .layer_id = id, .buffers = {{"k", int64_t{512} * tpb}}, .reuse_policy = policy};
    if (seed % 3 == 0 && id == 1) layer.sliding_window_size = 2 * tpb;
    config.config.layers.push_back(std::move(layer));
  }
  const int64_t quota = int64_t{512} * 3 * tpb * (4 + static_cast<int64_t>(seed % 12));
  config.config.cache_tiers = {
      HostCacheTierConfig{quota}, HostCacheTierConfig{quota},
      DiskCacheTierConfig{2 * quota, std::filesystem::temp_directory_path().string()}};
  config.config.commit_min_snapshot = seed % 2 == 0;
  config.config.swa_scratch_reuse.reset();
  auto device = std::make_unique<ThreadedDevice>(
      FlakyPlan{.fail_rate = 0.1, .delay_rate = 0.2, .seed = seed});
  return drive_on(config, source, options, std::move(device), nullptr);
}

#ifdef HELICORE_DEBUG_CHECKS
constexpr uint64_t kNumSeeds = 40;
#else
constexpr uint64_t kNumSeeds = 150;
#endif

void expect_same(const OperationLog& log, const Driven& run) {
  Replayer replayer(log, {.check_every = 16});
  const auto report = replayer.run();
  ASSERT_FALSE(report.difference.has_value()) << describe(report);
  ASSERT_EQ(report.num_replayed, log.operations.size());
  ASSERT_EQ(state_digest(Introspection::state(replayer.manager())), run.state);
  ASSERT_EQ(sizes_digest(Introspection::state(replayer.manager())), run.sizes);
}

// Over every call, and on machines whose copies are slow, fail, or find no memory.
TEST(Replay, random_operations_run_again_as_recorded) {
  Driven total;
  std::map<OperationKind, std::map<OperationOutcome, int>> kinds;
  std::map<OperationField, std::set<int64_t>> answers;
  for (uint64_t seed = 1; seed <= kNumSeeds; ++seed) {
    SCOPED_TRACE(seed);
    Driven run;
    ASSERT_NO_THROW(run = drive(seed, {.state_every = 1}));
    const auto log = OperationLog::parse(run.summary.bytes);
    ASSERT_EQ(log.operations.size(), run.summary.num_operations);
    ASSERT_NO_FATAL_FAILURE(expect_same(log, run));
    for (const Operation& operation : log.operations) {
      ++kinds[operation.kind][operation.outcome()];
      for (const OperationField field : {OperationField::kHadMemory, OperationField::kGaveBack}) {
        const auto* values = operation.find(field);
        if (values != nullptr) answers[field].insert(values->begin(), values->end());
      }
    }
    total.num_refused += run.num_refused;
    total.num_no_room += run.num_no_room;
    total.num_hits += run.num_hits;
  }
  constexpr int kSeeds = static_cast<int>(kNumSeeds);
  EXPECT_GT(total.num_refused, 10 * kSeeds) << "the runs never misused the manager";
  EXPECT_GT(total.num_no_room, kSeeds / 2) << "the runs never filled the pools";
  EXPECT_GT(total.num_hits, 3 * kSeeds);
  for (int kind = 1; name_of(OperationKind(kind)) != "unknown"; ++kind) {
    // Of prefetches that are larger than a batch, these are not: recorded_calls_test.cpp.
    if (OperationKind(kind) == OperationKind::kPollPrefetch ||
        OperationKind(kind) == OperationKind::kCancelPrefetch) {
      continue;
    }
    EXPECT_TRUE(kinds.contains(OperationKind(kind))) << name_of(OperationKind(kind));
  }
  auto& sizes = kinds[OperationKind::kResizeLevel];
  EXPECT_GT(sizes[OperationOutcome::kDone], kSeeds);
  EXPECT_GT(sizes[OperationOutcome::kNoRoom], kSeeds);
  EXPECT_GT(sizes[OperationOutcome::kThrew], 5);
  EXPECT_EQ(answers[OperationField::kHadMemory].size(), 2u);
  EXPECT_EQ(answers[OperationField::kGaveBack].size(), 2u);
}

TEST(Replay, random_operations_with_copies_on_threads_run_again_as_recorded) {
  uint64_t lost = 0, resumes = 0, selections = 0, late = 0;
  for (uint64_t seed = 1; seed <= kNumSeeds / 2; ++seed) {
    SCOPED_TRACE(seed);
    Driven run;
    ASSERT_NO_THROW(run = drive_on_threads(seed, {.state_every = 1}));
    ASSERT_EQ(run.summary.problem, "");
    const auto log = OperationLog::parse(run.summary.bytes);
    ASSERT_NO_FATAL_FAILURE(expect_same(log, run));
    lost += run.stats.lost_pages;
    resumes += run.stats.num_resumes;
    for (const Operation& operation : log.operations) {
      const bool is_done = operation.outcome() == OperationOutcome::kDone;
      selections += is_done && operation.kind == OperationKind::kSelectOptionalReuse ? 1 : 0;
      const auto* failed = operation.find(OperationField::kLost);
      late += failed != nullptr && operation.kind == OperationKind::kResume && failed->at(0) > 0;
    }
  }
  EXPECT_GT(lost, kNumSeeds / 10);
  EXPECT_GT(late, 0u) << "no resume took in a failure after it had waited";
  EXPECT_GT(resumes, kNumSeeds);
  EXPECT_GT(selections, kNumSeeds / 2);
}

// A log in which every operation does something that can be told.
OperationLog small_log() {
  KVCacheManagerConfig config = attention_config(4, 8);
  config.event_buffer_size = 2;
  KVCacheManager manager(config);
  manager.start_recording({.state_every = 1});
  const auto tokens = iota_tokens(12);
  auto first = manager.create_kv_cache();
  EXPECT_TRUE(first->resume());
  EXPECT_TRUE(first->resize(12));
  first->commit(tokens);
  auto second = manager.create_kv_cache({.input_tokens = std::span(tokens).first(9)});
  EXPECT_TRUE(second->resume());
  EXPECT_FALSE(second->resize(200));
  EXPECT_THROW(second->truncate(300), InvalidArgument);
  KVCache* const caches[] = {first.get(), second.get()};
  const int32_t capacities[] = {16, 99};
  uint8_t results[2];
  manager.resize_many(caches, capacities, {}, results);
  second->suspend();
  first->close();
  second->close();
  manager.clear_reusable_blocks();
  (void)manager.drain_events(1);
  (void)manager.snapshot_events();
  manager.mark_stats_excluded(4);
  auto held = manager.create_kv_cache();
  EXPECT_TRUE(held->resume());
  EXPECT_TRUE(held->resize(28));
  const int64_t quota = manager.quota(kHotLevel);
  EXPECT_FALSE(manager.resize(kHotLevel, quota / 2, true).done);
  EXPECT_EQ(manager.maintain(3), 0);  // its pages are locked
  held->suspend();
  held->truncate(0);
  (void)manager.maintain(3);
  EXPECT_FALSE(manager.is_resizing());
  EXPECT_TRUE(manager.resize(kHotLevel, 2 * quota).done);
  EXPECT_FALSE(manager.adjust());
  held->close();
  return OperationLog::parse(manager.stop_recording().bytes);
}

// Steps, prefetches, plans, pins and the clock: what a call meets is in the log.
TEST(Replay, of_every_kind_of_call_agrees) {
  KVCacheManagerConfig config = attention_config(4, 8);
  config.cache_tiers.push_back(config.cache_tiers[0]);
  KVCacheManager manager(config);
  int64_t now = 5;
  Introspection::state(manager).now_ns = [&] { return now; };
  manager.start_recording({.state_every = 1});
  const StreamHandle steps = manager.make_step_stream();
  const std::vector<RetentionRange> kept{{0, 4, 80, 1}};
  auto cache = manager.create_kv_cache({.retention = kept});
  EXPECT_TRUE(cache->resume(steps));
  EXPECT_TRUE(cache->resize(12));
  EXPECT_EQ(manager.submit_step(steps), 1u);
  cache->commit(iota_tokens(12), true);
  auto plan = cache->plan_committed_block_drop();
  now += 2'000'000;
  cache->suspend();
  manager.complete_step(steps, 1);
  EXPECT_THROW(manager.complete_step(steps, 9), InvalidArgument);
  auto other = manager.create_kv_cache();
  other->set_stream(steps);
  EXPECT_TRUE(other->resume());
  EXPECT_TRUE(other->resize(30));  // pushes the first down
  other->close();
  auto ticket = cache->prefetch();
  while (!ticket.is_done()) {
  }
  auto pin = manager.pin(iota_tokens(8));
  EXPECT_EQ(pin->num_committed_tokens(), 8);
  if (plan != nullptr) plan->drop();
  pin->close();
  cache->close();
  const auto log = OperationLog::parse(manager.stop_recording().bytes);
  std::set<OperationKind> kinds;
  bool has_times = false;
  for (const Operation& operation : log.operations) {
    kinds.insert(operation.kind);
    has_times |= operation.find(OperationField::kTimes) != nullptr;
  }
  for (const OperationKind kind :
       {OperationKind::kPin, OperationKind::kPrefetch, OperationKind::kPlanDrop,
        OperationKind::kMakeStepStream, OperationKind::kSubmitStep, OperationKind::kCompleteStep,
        OperationKind::kSetStream}) {
    EXPECT_TRUE(kinds.contains(kind)) << name_of(kind);
  }
  EXPECT_TRUE(has_times);
  const auto report = Replayer(log).run();
  EXPECT_FALSE(report.difference.has_value()) << describe(report);
  // Without its time the log tells another story.
  OperationLog timeless = log;
  for (Operation& operation : timeless.operations) {
    std::erase_if(operation.entries,
                  [](const auto& entry) { return entry.field == OperationField::kTimes; });
  }
  EXPECT_TRUE(Replayer(timeless).run().difference.has_value());
}

TEST(Replay, pages_that_a_failed_copy_lost_are_lost_again) {
  KVCacheManagerConfig config = attention_config(4, 8);
  config.cache_tiers.push_back(config.cache_tiers[0]);
  auto device = std::make_unique<FakeDevice>(FakeOptions{.type = DeviceType::kCpu});
  FakeDevice& machine = *device;
  KVCacheManager manager(config, std::move(device));
  manager.start_recording({.state_every = 1});
  auto cache = manager.create_kv_cache();
  EXPECT_TRUE(cache->resume());
  EXPECT_TRUE(cache->resize(12));
  cache->commit(iota_tokens(12));
  cache->suspend();
  machine.inject(FakeFault::kFailedTask, 1);
  auto other = manager.create_kv_cache();
  EXPECT_TRUE(other->resume());
  EXPECT_TRUE(other->resize(32));
  (void)machine.run_all();
  other->close();
  EXPECT_FALSE(cache->resume());
  EXPECT_TRUE(cache->is_lost());
  cache->close();
  OperationLog log = OperationLog::parse(manager.stop_recording().bytes);
  const auto report = Replayer(log).run();
  EXPECT_FALSE(report.difference.has_value()) << describe(report);
  for (Operation& operation : log.operations) {
    std::erase_if(operation.entries,
                  [](const auto& entry) { return entry.field == OperationField::kLost; });
  }
  EXPECT_TRUE(Replayer(log).run().difference.has_value());
}

TEST(Recording, ends_at_a_call_that_it_does_not_know_and_says_so) {
  KVCacheManager manager(attention_config(4, 8));
  manager.start_recording({});
  (void)manager.create_kv_cache();
  Introspection::state(manager).begin_operation();  // what a new call would do first
  (void)manager.create_kv_cache();
  const auto summary = manager.stop_recording();
  EXPECT_THAT(summary.problem, HasSubstr("a call that operation logs do not know"));
  EXPECT_EQ(summary.num_operations, 2u);
  EXPECT_FALSE(Replayer(OperationLog::parse(summary.bytes)).run().difference.has_value());
}

TEST(Replay, a_changed_argument_or_result_is_found_at_its_operation) {
  const OperationLog log = small_log();
  ASSERT_FALSE(Replayer(log).run().difference.has_value());
  size_t num_changed = 0;
  for (size_t index = 0; index < log.operations.size(); ++index) {
    for (size_t entry = 0; entry < log.operations[index].entries.size(); ++entry) {
      OperationLog tampered = log;
      auto& values = tampered.operations[index].entries[entry].values;
      if (values.empty()) continue;
      values.back() += 1;
      const auto field = log.operations[index].entries[entry].field;
      tampered = OperationLog::parse(tampered.serialise());
      const auto report = Replayer(tampered).run();
      // What may change without a trace: tokens that nobody looks at, capacities that are refused,
      // the clock, a slot in place of another that is free.
      const bool is_given = field == OperationField::kTimes || field == OperationField::kSlots;
      const bool matters = (is_result(field) && !is_given) || field == OperationField::kCaches;
      if (!matters && !report.difference) continue;
      ASSERT_TRUE(report.difference.has_value()) << index << ' ' << name_of(field);
      if (matters) {
        EXPECT_EQ(report.difference->index, index) << name_of(field);
      }
      EXPECT_GE(report.difference->index, index);
      ++num_changed;
    }
  }
  EXPECT_GT(num_changed, 150u);
}

TEST(Replay, says_what_differs_in_words) {
  OperationLog log = small_log();
  for (Operation& operation : log.operations) {
    if (operation.outcome() != OperationOutcome::kNoRoom) continue;
    operation.set(OperationField::kOutcome, 0);
    break;
  }
  const auto report = Replayer(log).run();
  ASSERT_TRUE(report.difference.has_value());
  EXPECT_EQ(report.difference->index, 6u);
  EXPECT_EQ(report.difference->what, "outcome: recorded done, replayed no room");
  EXPECT_THAT(describe(report), HasSubstr("resize(cache=1, capacity=200) -> done"));
}

TEST(Replay, a_record_that_makes_no_sense_is_a_difference_and_no_crash) {
  for (const OperationKind kind : {OperationKind::kResize, OperationKind::kCommitMany,
                                   OperationKind::kCreate, OperationKind{99}}) {
    OperationLog log = small_log();
    log.operations.insert(log.operations.begin() + 3, Operation{kind, {}});
    const auto report = Replayer(log).run();
    ASSERT_TRUE(report.difference.has_value());
    EXPECT_EQ(report.difference->index, 3u);
  }
}

TEST(Replay, another_number_of_slots_is_told_before_anything_runs) {
  OperationLog log = small_log();
  log.slots[0].num_slots += 1;
  const auto report = Replayer(log).run();
  ASSERT_TRUE(report.difference.has_value());
  EXPECT_EQ(report.num_replayed, 0u);
  EXPECT_THAT(report.difference->what, HasSubstr("had 9 slots, here it has 8"));
}

TEST(Replay, needs_neither_the_memory_nor_the_levels_of_the_original) {
  OperationLog log = small_log();
  constexpr int64_t kTimes = int64_t{1} << 20;  // levels of some 32 GiB
  std::erase_if(log.operations, [](const Operation& operation) {
    return operation.kind == OperationKind::kResizeLevel ||
           operation.kind == OperationKind::kMaintain;  // bytes, and what follows from them
  });
  std::get<AttentionLayerConfig>(log.config.layers[0]).buffers[0].size *= kTimes;
  log.config.cache_tiers[0] = GpuCacheTierConfig{quota_of(log.config.cache_tiers[0]) * kTimes};
  for (Operation& operation : log.operations) {
    std::erase_if(operation.entries,
                  [](const auto& entry) { return entry.field == OperationField::kSizes; });
  }
  const size_t cut = log.operations.size() - 5;  // the sequence that the sizes were in the way of
  log.operations.resize(cut);
  Replayer replayer(log);
  EXPECT_EQ(replayer.manager().quota(0), int64_t{32} << 30);
  const auto report = replayer.run();
  EXPECT_FALSE(report.difference.has_value()) << describe(report);
  EXPECT_EQ(report.num_replayed, cut);
}

TEST(Replay, a_call_that_never_returned_runs_last) {
  OperationLog log = small_log();
  log.operations.resize(4);
  log.end = LogEnd::kOpen;
  std::erase_if(log.operations[3].entries,
                [](const auto& entry) { return is_result(entry.field); });
  Replayer replayer(log);
  const auto report = replayer.run();
  EXPECT_FALSE(report.difference.has_value());
  EXPECT_EQ(replayer.cache(0)->num_committed_tokens(), 12);
  EXPECT_THAT(describe(log.operations[3]), HasSubstr("never returned"));
  EXPECT_THAT(describe(report), HasSubstr("writer went away"));
}

// With distinct endings no two blocks share a beginning by chance, so that the order of token ids
// decides nothing.
TEST(Replay, anonymised_tokens_keep_their_hits) {
  const auto record = [](bool anonymise) {
    KVCacheManager manager(attention_config(4, 30));
    manager.start_recording({.state_every = 1, .anonymise = anonymise});
    std::mt19937 random(5);
    std::vector<std::vector<TokenId>> past = {{}};
    TokenId fresh = 100000;
    for (int i = 0; i < 400; ++i) {
      auto tokens = past[random() % past.size()];
      tokens.resize(tokens.size() - random() % (tokens.size() + 1));
      for (auto n = random() % 9; n > 0; --n) tokens.push_back(fresh -= 7);
      auto cache = manager.create_kv_cache({.input_tokens = tokens});
      if (!cache->resume() || !cache->resize(static_cast<int64_t>(tokens.size()))) continue;
      cache->commit(std::span(tokens).subspan(static_cast<size_t>(cache->num_committed_tokens())),
                    true);
      if (tokens.size() < 60) past.push_back(tokens);
    }
    EXPECT_GT(manager.stats().evicted_blocks, 100u);
    EXPECT_GT(manager.stats().hit_tokens, 300u);
    return OperationLog::parse(manager.stop_recording().bytes);
  };
  const auto raw = record(false);
  const auto anonymous = record(true);
  ASSERT_EQ(raw.operations.size(), anonymous.operations.size());
  for (size_t i = 0; i < raw.operations.size(); ++i) {
    ASSERT_EQ(raw.operations[i].get(OperationField::kMatched),
              anonymous.operations[i].get(OperationField::kMatched));
  }
  const auto report = Replayer(anonymous).run();
  EXPECT_FALSE(report.difference.has_value()) << describe(report);
}

TEST(Recording, threads_are_recorded_in_the_order_in_which_things_happened) {
  KVCacheManager manager(attention_config(4, 40));
  manager.start_recording({.state_every = 1});
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&manager, t] {
      std::mt19937 random(static_cast<uint32_t>(t));
      for (int i = 0; i < 60; ++i) {
        std::vector<TokenId> tokens(random() % 20);
        for (TokenId& token : tokens) token = static_cast<TokenId>(random() % 2);
        auto cache = manager.create_kv_cache({.input_tokens = tokens});
        (void)manager.probe_reuse(tokens);
        if (!cache->resume() || !cache->resize(cache->capacity() + 9)) continue;
        for (int k = 0; k < 9; ++k) {  // most of these take no lock when nobody records
          const TokenId token = static_cast<TokenId>(random() % 2);
          cache->commit(std::span(&token, 1));
          (void)cache->resize(cache->capacity() + 1);
        }
        (void)manager.storage_statistics();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  const auto log = OperationLog::parse(manager.stop_recording().bytes);
  EXPECT_GT(log.operations.size(), 240u * 10);
  const auto report = Replayer(log).run();
  EXPECT_FALSE(report.difference.has_value()) << describe(report);
}

TEST(Recording, may_stop_while_other_threads_call) {
  for (int round = 0; round < 20; ++round) {
    KVCacheManager manager(attention_config(4, 40));
    manager.start_recording({.state_every = 1});
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&manager] {
        for (int i = 0; i < 30; ++i) {
          auto cache = manager.create_kv_cache();
          EXPECT_TRUE(cache->resume());
          (void)cache->resize(9);
        }
      });
    }
    std::this_thread::yield();
    const auto log = OperationLog::parse(manager.stop_recording().bytes);
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(log.end, LogEnd::kComplete);
    EXPECT_FALSE(Replayer(log).run().difference.has_value());
  }
}

TEST(Recording, that_is_off_costs_no_allocation) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || defined(HELICORE_DEBUG_CHECKS)
  GTEST_SKIP() << "allocations are counted in plain builds";
#else
  KVCacheManager manager(attention_config(64, 40));
  const auto count = [&](bool record) {
    if (record) manager.start_recording({});
    auto cache = manager.create_kv_cache();
    EXPECT_TRUE(cache->resume());
    EXPECT_TRUE(cache->resize(10));
    const TokenId token = 7;
    const int64_t before = num_allocations;
    for (int i = 0; i < 10; ++i) {
      EXPECT_TRUE(cache->resize(20 + i));
      cache->commit(std::span(&token, 1));
      cache->truncate(15);
      cache->suspend();
      EXPECT_TRUE(cache->resume());
    }
    return num_allocations - before;
  };
  EXPECT_GT(count(true), 0) << "the counter counts nothing";
  (void)manager.stop_recording();
  EXPECT_EQ(count(false), 0);
#endif
}

}  // namespace
}  // namespace helicore::kv::testing
