// Random sizes under load: sequences grow, sleep, share prefixes and end while every level is
// resized, adjusted and maintained, copies are late and memory is refused. The oracle of bytes must
// agree after every step, and what is counted must be what is there.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "kv/sizing_bench.h"

namespace helicore::kv::testing {
namespace {

using ::testing::IsEmpty;

struct Setup {
  const char* name = "";
  std::vector<int64_t> units{40, 30, 30};
  int32_t window = 0;
  bool with_state = false;  // a recurrent layer as well
  bool with_steps = false;  // sequences run on a stream of steps that end late
  bool corrupt = false;     // the device writes half of a copy now and then: must be found
  bool refuse = false;      // memory and copies are refused now and then
};

class Load {
 public:
  Load(const Setup& setup, uint32_t seed)
      : setup_(setup), random_(seed), bench_(config_of(setup), {.any_order = true, .seed = seed}) {
    if (setup.with_steps) stream_ = bench_.device().make_step_stream();
    if (setup.corrupt) bench_.device().inject_rate(FakeFault::kCorruptTask, 0.05);
    for (int level = 0; level < manager().num_levels(); ++level) {
      first_quota_.push_back(manager().quota(level));
    }
  }

  // What is wrong after at most `count` operations, or nothing.
  std::string run(int count) {
    for (int i = 0; i < count && wrong_.empty(); ++i) {
      if (setup_.refuse && i % 50 == 0) refuse_some(i % 100 == 0);
      operation();
      check();
      if (!wrong_.empty()) wrong_ += " (operation " + std::to_string(i) + ")";
    }
    if (wrong_.empty()) finish();
    return wrong_;
  }
  SizingBench& bench() { return bench_; }
  int num_shrinks() const { return num_shrinks_; }
  int num_growths() const { return num_growths_; }
  int64_t num_maintained() const { return num_maintained_; }
  int num_adjusted() const { return num_adjusted_; }

 private:
  struct Sequence {
    std::unique_ptr<KVCache> cache;
    int number = 0;
  };

  static KVCacheManagerConfig config_of(const Setup& setup) {
    auto config = sizing_config(setup.units, setup.window);
    config.rebalance_min_sampled_kv_caches = 3;
    config.rebalance_cooldown_secs = 0;
    config.rebalance_target_ratio_update_interval = 1;
    config.rebalance_moving_average_decay = 0.3;
    if (setup.with_state) {
      config.layers.push_back(SsmLayerConfig{2, {{"state", kUnit / 4}}});
      config.commit_min_snapshot = true;
      return config;
    }
    config.initial_pool_ratio =
        std::vector<double>(setup.window > 0 ? 2 : 1, setup.window > 0 ? 0.5 : 1.0);
    return config;
  }
  KVCacheManager& manager() { return bench_.manager(); }
  int below(int bound) { return std::uniform_int_distribution<int>(0, bound - 1)(random_); }
  void refuse_some(bool on) {
    bench_.device().inject_rate(FakeFault::kAllocation, on ? 0.5 : 0);
    bench_.device().inject_rate(FakeFault::kRefusedCopy, on ? 0.2 : 0);
  }

  void operation() {
    const int dice = below(100);
    if (sequences_.size() < 2 || (dice < 12 && sequences_.size() < 7)) return create();
    if (dice < 20) return resize_level();
    if (dice < 32) {
      num_maintained_ += manager().maintain(1 + below(6));
      return;
    }
    if (dice < 36) {
      num_adjusted_ += manager().adjust() ? 1 : 0;
      return;
    }
    if (dice < 44) {
      for (int i = below(4); i > 0; --i) (void)bench_.device().run_one();
      return;
    }
    if (dice < 48) return end_steps(below(2) == 0 ? submitted_ : ended_ + 1);
    const auto at = static_cast<size_t>(below(static_cast<int>(sequences_.size())));
    Sequence& sequence = sequences_[at];
    if (dice < 56) return close(at);
    if (!sequence.cache->is_active()) return resume(sequence);
    if (dice < 66) return suspend(sequence);
    grow(sequence);
  }

  void create() {
    Sequence sequence;
    sequence.number = 1 + below(5);
    const auto tokens = SizingBench::tokens(sequence.number, 4 * below(12));
    sequence.cache = manager().create_kv_cache({.input_tokens = tokens});
    resume(sequence);
    sequences_.push_back(std::move(sequence));
  }
  template <typename Call>
  bool unless_refused(const Call& call) {
    try {
      return call();
    } catch (const OutOfMemory&) {
      if (!setup_.refuse) throw;
      return false;
    }
  }
  void resume(Sequence& sequence) {
    const auto stream = setup_.with_steps ? std::optional<int64_t>(stream_) : std::nullopt;
    if (unless_refused([&] { return sequence.cache->resume(stream); })) verify(sequence);
  }
  void suspend(Sequence& sequence) {
    verify(sequence);
    if (setup_.with_steps && below(2) == 0) submitted_ = bench_.device().submit_step(stream_);
    sequence.cache->suspend();
  }
  void close(size_t at) {
    if (sequences_[at].cache->is_active()) verify(sequences_[at]);
    if (setup_.with_steps && below(2) == 0) submitted_ = bench_.device().submit_step(stream_);
    sequences_[at].cache->close();
    sequences_.erase(sequences_.begin() + static_cast<std::ptrdiff_t>(at));
  }
  void end_steps(uint64_t step) {
    if (!setup_.with_steps || step > submitted_ || step <= ended_) return;
    bench_.device().complete_step(stream_, step);
    ended_ = step;
  }
  // A step: more room, its rows written, and what is full committed.
  void grow(Sequence& sequence) {
    KVCache& cache = *sequence.cache;
    const int32_t old_blocks = cache.num_blocks();
    const int32_t capacity = cache.capacity() + 1 + below(9);
    if (!unless_refused([&] { return cache.resize(capacity, cache.capacity()); })) return;
    if (setup_.with_steps) submitted_ = bench_.device().submit_step(stream_);
    bench_.fill(cache, sequence.number, old_blocks);
    if (below(3) > 0) {
      const int32_t done = cache.num_committed_tokens();
      const int32_t count = capacity / 4 * 4 - done;
      const auto tokens = SizingBench::tokens(sequence.number, capacity);
      if (count > 0) {
        cache.commit(
            std::span(tokens).subspan(static_cast<size_t>(done), static_cast<size_t>(count)));
      }
    }
    verify(sequence);
  }

  void resize_level() {
    const int level = below(manager().num_levels());
    const auto first = first_quota_[static_cast<size_t>(level)];
    const int64_t quota = first * (1 + below(40)) / 20;
    const bool best_effort = below(2) == 0;
    // Without best effort it waits for streams, which steps do not end by themselves.
    const int64_t before = manager().quota(level);
    const int64_t bytes = bench_.ledger().num_bytes;
    ResizeResult result;
    try {
      result = manager().resize(level, quota, best_effort);
    } catch (const OutOfMemory&) {
      if (!setup_.refuse) throw;
      // A shrink may end half way; growing is all or nothing.
      expect(bench_.ledger().num_bytes <= bytes, "memory grew in a resize that failed");
      expect(quota < before || bench_.ledger().num_bytes == bytes, "growth that failed");
      return;
    }
    if (result.done) {
      expect(result.quota == (quota + kUnit - 1) / kUnit * kUnit, "quota of a resize that is done");
      ++(result.quota < before ? num_shrinks_ : num_growths_);
    } else if (!best_effort) {
      expect(result.quota == before, "quota of a resize that was refused");
      expect(result.reason.has_value() || quota <= result.minimum, "reason of a refusal");
    }
  }

  void verify(Sequence& sequence) {
    if (!wrong_.empty()) return;
    // A page that a commit adopted may be on its way; the next resize() waits for it.
    if (!sequence.cache->resize(std::nullopt)) return;
    wrong_ = bench_.wrong(*sequence.cache, sequence.number);
  }
  void expect(bool condition, const char* what) {
    if (!condition && wrong_.empty()) wrong_ = what;
  }

  // Memory is what the splits say, and no level has more than its quota.
  void check() {
    if (!wrong_.empty()) return;
    int64_t bytes = 0;
    const ManagerState& state = Introspection::state(manager());
    for (const LevelState& level : state.levels) {
      int64_t used = 0;
      for (size_t g = 0; g < state.store.num_groups(); ++g) {
        const PoolGroupId group(static_cast<int32_t>(g));
        const PoolGroupLayout& shape = state.layout.groups()[group];
        used += bytes_for_slots(shape, level.split.num_slots[group], level.grain);
        bytes += level.split.num_slots[group] * shape.slot_bytes();
      }
      expect(used <= level.split.quota && used == level.split.used, "bytes of a level");
    }
    expect(bytes == bench_.ledger().num_bytes, "bytes of all pools");
    Introspection::check(manager());
  }

  // Everything ends; every level can be had at any size again.
  void finish() {
    bench_.device().heal();
    end_steps(submitted_);
    while (!sequences_.empty()) close(sequences_.size() - 1);
    end_steps(submitted_);
    for (int i = 0; i < 1000 && manager().is_resizing(); ++i) {
      bench_.device().run_all();
      (void)manager().maintain(5);
    }
    expect(!manager().is_resizing(), "a resize that never ends");
    manager().clear_reusable_blocks();
    for (int level = 0; level < manager().num_levels(); ++level) {
      const int64_t least = manager().resize(level, 1).minimum;
      expect(manager().resize(level, least).done, "the least quota");
    }
    for (int level = 0; level < manager().num_levels(); ++level) {
      const auto first = first_quota_[static_cast<size_t>(level)];
      expect(manager().resize(level, first).done, "the first quota");
    }
    check();
  }

  Setup setup_;
  std::mt19937 random_;
  SizingBench bench_;
  std::vector<Sequence> sequences_;
  std::vector<int64_t> first_quota_;
  StreamHandle stream_ = 0;
  uint64_t submitted_ = 0;
  uint64_t ended_ = 0;
  std::string wrong_;
  int num_shrinks_ = 0;
  int num_growths_ = 0;
  int num_adjusted_ = 0;
  int64_t num_maintained_ = 0;
};

class SizesUnderLoad : public ::testing::TestWithParam<Setup> {};

TEST_P(SizesUnderLoad, bytes_and_counts_agree_with_the_oracle) {
  int shrinks = 0;
  int growths = 0;
  int adjusted = 0;
  int64_t maintained = 0;
  for (uint32_t seed = 1; seed <= 12; ++seed) {
    Load load(GetParam(), seed);
    ASSERT_EQ(load.run(600), "") << "seed " << seed;
    ASSERT_THAT(load.bench().device().violations(), IsEmpty()) << "seed " << seed;
    shrinks += load.num_shrinks();
    growths += load.num_growths();
    maintained += load.num_maintained();
    adjusted += load.num_adjusted();
  }
  EXPECT_GT(shrinks, 30) << "the test must see what it is about";
  EXPECT_GT(growths, 30);
  EXPECT_GT(maintained, 30);
  EXPECT_TRUE(GetParam().window == 0 || adjusted > 10) << adjusted;
}

INSTANTIATE_TEST_SUITE_P(
    Setups, SizesUnderLoad,
    ::testing::Values(Setup{.name = "one_level", .units = {40}},
                      Setup{.name = "two_levels", .units = {30, 40}}, Setup{.name = "three_levels"},
                      Setup{.name = "windows_one_level", .units = {40}, .window = 8},
                      Setup{.name = "windows", .window = 8},
                      Setup{.name = "steps", .window = 8, .with_steps = true},
                      Setup{.name = "states", .window = 8, .with_state = true},
                      Setup{.name = "refusals", .window = 8, .refuse = true}),
    [](const auto& info) { return info.param.name; });

TEST(SizesUnderLoadControl, a_device_that_tears_copies_is_found_out) {
  int found = 0;
  for (uint32_t seed = 1; seed <= 10; ++seed) {
    Load load({.name = "corrupt", .window = 8, .corrupt = true}, seed);
    found += load.run(600).find("layer") != std::string::npos ? 1 : 0;
  }
  EXPECT_GE(found, 8);
}

}  // namespace
}  // namespace helicore::kv::testing
