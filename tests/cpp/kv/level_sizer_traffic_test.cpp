// Memory that moves between pool groups as the traffic asks, and what fits: plans and forecasts of
// a whole manager.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kv/sizing_bench.h"

namespace helicore::kv::testing {
namespace {

using ::testing::IsEmpty;

constexpr int64_t kSecond = 1'000'000'000;

// Full attention and a window of 8 tokens; a clock that is moved by hand.
class Traffic : public SizingBench {
 public:
  Traffic() : Traffic(eager({64})) {}
  explicit Traffic(const KVCacheManagerConfig& config) : SizingBench(config) {
    ManagerState& state = Introspection::state(manager());
    state.now_ns = [this] { return now; };
    sizer().tracker().adjusted(now);
  }
  static KVCacheManagerConfig eager(const std::vector<int64_t>& units) {
    auto config = sizing_config(units, 8);
    config.rebalance_min_sampled_kv_caches = 4;
    config.rebalance_cooldown_secs = 10;
    config.rebalance_target_ratio_update_interval = 2;
    config.rebalance_moving_average_decay = 0.5;
    return config;
  }
  void close_some(int count, int32_t tokens, std::optional<int64_t> id = {}) {
    for (int i = 0; i < count; ++i) start(tokens, 1000 + i, id)->close();
  }
  void settle() {
    for (int i = 0; i < 200 && manager().is_resizing(); ++i) {
      (void)manager().maintain(2);
      device().run_all();
    }
  }

  int64_t now = 0;
};

TEST(Rebalancing, moves_slots_to_the_group_that_the_traffic_wants_and_back) {
  Traffic b;
  const int64_t full = b.total(0, 0);
  const int64_t windowed = b.total(0, 1);
  EXPECT_FALSE(b.manager().target_ratios(0));
  b.close_some(4, 8);  // as many blocks of the window as of full attention
  b.now += 10 * kSecond;
  ASSERT_TRUE(b.manager().need_adjustment());
  const auto target = b.manager().target_ratios(0);
  ASSERT_TRUE(target);
  EXPECT_GT((*target)[0], b.manager().pool_ratios(0)[0]);
  EXPECT_TRUE(b.manager().adjust());
  EXPECT_FALSE(b.manager().need_adjustment()) << "while one is under way";
  b.settle();
  EXPECT_FALSE(b.manager().is_resizing());
  EXPECT_GT(b.total(0, 1), windowed);
  EXPECT_LT(b.total(0, 0), full);
  EXPECT_EQ(b.manager().pool_ratios(0), *target);
  EXPECT_EQ(b.manager().quota(0), 64 * kUnit);
  EXPECT_LE(b.ledger().num_bytes, 64 * kUnit);

  for (int i = 0; i < 4; ++i) b.close_some(8, 120);
  b.now += 10 * kSecond;
  ASSERT_TRUE(b.manager().need_adjustment());
  EXPECT_TRUE(b.manager().adjust());
  b.settle();
  EXPECT_GT(b.total(0, 0), full - 8);
  EXPECT_LT(b.total(0, 1), windowed + 8);
  b.now += 10 * kSecond;
  b.close_some(8, 120);
  EXPECT_FALSE(b.manager().need_adjustment()) << "it is where the traffic wants it";
}

TEST(Rebalancing, each_gate_alone_holds_it_back) {
  Traffic few;
  few.close_some(3, 8);
  few.now += 100 * kSecond;
  EXPECT_FALSE(few.manager().need_adjustment()) << "too few samples";
  few.close_some(1, 8);
  EXPECT_TRUE(few.manager().need_adjustment());

  Traffic hot;
  hot.close_some(8, 8);
  hot.now += 10 * kSecond - 1;
  EXPECT_FALSE(hot.manager().need_adjustment()) << "not cooled down";
  hot.now += 1;
  EXPECT_TRUE(hot.manager().need_adjustment());

  auto config = Traffic::eager({64});
  config.rebalance_ratio_threshold = 1000;
  Traffic tolerant(config);
  tolerant.close_some(8, 8);
  tolerant.now += 100 * kSecond;
  EXPECT_FALSE(tolerant.manager().need_adjustment()) << "near enough";
  EXPECT_FALSE(tolerant.manager().adjust());
}

TEST(Rebalancing, excluded_caches_count_for_nothing) {
  Traffic b;
  b.manager().mark_stats_excluded(77);
  EXPECT_TRUE(b.manager().is_stats_excluded(77));
  b.close_some(8, 8, 77);
  b.now += 100 * kSecond;
  EXPECT_FALSE(b.manager().need_adjustment());
  EXPECT_EQ(b.sizer().tracker().num_samples(), 0);
  b.close_some(8, 8, 78);
  EXPECT_TRUE(b.manager().need_adjustment()) << "the same caches under another id do";
}

TEST(Rebalancing, active_and_suspended_caches_keep_their_bytes) {
  Traffic b(Traffic::eager({64, 64}));
  b.close_some(4, 8);
  auto a = b.start(80, 1);
  auto c = b.start(100, 2);
  c->suspend();
  b.now += 10 * kSecond;
  const int64_t full = b.total(0, 0);
  ASSERT_TRUE(b.manager().adjust());
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(b.wrong(*a, 1), "");
    EXPECT_LE(b.manager().maintain(2), 2);
    b.device().run_all();
  }
  EXPECT_FALSE(b.manager().is_resizing());
  EXPECT_LT(b.total(0, 0), full);
  EXPECT_GE(b.total(0, 0), 25) << "the largest cache must fit";
  EXPECT_EQ(b.wrong(*a, 1), "");
  a->close();
  ASSERT_TRUE(c->resume()) << describe(*c->last_failure());
  EXPECT_EQ(b.wrong(*c, 2), "");
  EXPECT_THAT(b.device().violations(), IsEmpty());
}

TEST(Rebalancing, cached_prefixes_keep_their_bytes_both_ways) {
  Traffic b(Traffic::eager({64, 64}));
  for (int sequence : {1, 2, 3}) {
    auto cache = b.start(40, sequence);
    cache->commit(SizingBench::tokens(sequence, 40));
  }
  int64_t found = 0;
  for (int32_t length : {8, 120}) {  // few tokens, then many
    for (int i = 0; i < 6; ++i) b.close_some(4, length);
    b.now += 10 * kSecond;
    const int64_t full = b.total(0, 0);
    ASSERT_TRUE(b.manager().adjust());
    b.settle();
    EXPECT_NE(b.total(0, 0), full) << "slots moved";
    for (int sequence : {1, 2, 3}) {
      auto cache = b.manager().create_kv_cache({.input_tokens = SizingBench::tokens(sequence, 40)});
      ASSERT_TRUE(cache->resume()) << describe(*cache->last_failure());
      EXPECT_EQ(b.wrong(*cache, sequence), "") << "length " << length;
      EXPECT_EQ(b.wrong(*cache, 9) != "", cache->num_committed_tokens() > 0);
      found += cache->num_committed_tokens();
    }
  }
  EXPECT_GE(found, 3 * 40) << "at least the first move keeps them";
  EXPECT_THAT(b.device().violations(), IsEmpty());
}

TEST(Rebalancing, a_later_resize_keeps_the_shares_that_were_learnt) {
  Traffic b;
  b.close_some(4, 8);
  b.now += 10 * kSecond;
  ASSERT_TRUE(b.manager().adjust());
  b.settle();
  const double share = b.manager().pool_ratios(0)[0];
  ASSERT_TRUE(b.manager().resize(0, 32 * kUnit).done);
  EXPECT_NEAR(b.manager().pool_ratios(0)[0], share, 0.05);
}

TEST(Rebalancing, colder_levels_follow_too) {
  Traffic b(Traffic::eager({64, 64}));
  const int64_t windowed = b.total(1, 1);
  b.close_some(4, 8);
  b.now += 10 * kSecond;
  ASSERT_TRUE(b.manager().adjust());
  b.settle();
  EXPECT_GT(b.total(1, 1), windowed);
}

// ---------------------------------------------------------------------------- what fits

TEST(Sizing, the_longest_sequence_follows_the_sizes) {
  SizingBench b(sizing_config({8}));
  EXPECT_EQ(b.manager().clamp_max_seq_len_for_mem(1, 1000), 32);
  EXPECT_EQ(b.manager().clamp_max_seq_len_for_mem(3, 1000), 24);
  EXPECT_EQ(b.manager().clamp_max_seq_len_for_mem(1, 0), 0);
  EXPECT_EQ(b.manager().clamp_max_seq_len_for_mem(9, 1000), 0);
  EXPECT_EQ(b.manager().clamp_max_seq_len_for_mem(1, 7), 7);
  EXPECT_THROW((void)b.manager().clamp_max_seq_len_for_mem(0, 7), InvalidArgument);
  auto a = b.start(24, 1);
  (void)b.manager().resize(0, 4 * kUnit, true);
  EXPECT_EQ(b.manager().clamp_max_seq_len_for_mem(1, 1000), 16) << "as it will be";
  (void)b.manager().resize(0, 16 * kUnit);
  const auto most = static_cast<int32_t>(b.manager().clamp_max_seq_len_for_mem(1, 1000));
  EXPECT_EQ(most, 64);
  EXPECT_TRUE(a->resize(most));
  EXPECT_FALSE(a->resize(most + 1));
}

// Beside others of one token a sequence of the longest length grows token by token, and no further.
TEST(Sizing, the_longest_sequence_truly_runs_beside_the_others) {
  int num_bounded = 0;
  for (int64_t units : {1, 2, 3, 5, 8, 13}) {
    for (int32_t window : {0, 1, 4, 9, 40}) {
      for (int64_t batch : {1, 2, 4}) {
        auto config = sizing_config({units}, window);
        SizingBench b(config);
        constexpr int64_t kUpper = 90;
        const auto most =
            static_cast<int32_t>(b.manager().clamp_max_seq_len_for_mem(batch, kUpper));
        std::vector<std::unique_ptr<KVCache>> others;
        bool all_run = true;
        for (int64_t i = 1; i < batch; ++i) {
          others.push_back(b.manager().create_kv_cache());
          all_run = all_run && others.back()->resume() && others.back()->resize(1);
        }
        auto longest = b.manager().create_kv_cache();
        all_run = all_run && longest->resume();
        int32_t length = 0;
        const auto tokens = SizingBench::tokens(1, kUpper);
        while (all_run && length < kUpper && longest->resize(length + 1, length)) {
          longest->commit(std::span(tokens).subspan(static_cast<size_t>(length++), 1));
        }
        ASSERT_EQ(length, most) << units << " units, window " << window << ", batch " << batch;
        num_bounded += most < kUpper && most > 0 ? 1 : 0;
      }
    }
  }
  EXPECT_GT(num_bounded, 20) << "the test must see what it is about";
}

TEST(Sizing, a_batch_of_the_constraints_truly_runs) {
  for (int32_t prompt : {0, 64, 50, 256}) {
    auto config = sizing_config({1}, 32);
    config.max_util_for_resume = 0.9;
    BatchDesc batch{{}, prompt};
    for (int32_t extra : {8, 40, 90}) batch.kv_caches.push_back({prompt + extra, prompt});
    config.constraints = {batch};
    SizingBench b(config);
    // Whoever comes first computes the system prompt, the others find its full blocks.
    const auto shared = SizingBench::tokens(1, prompt / 4 * 4);
    if (prompt > 0) {
      auto first = b.manager().create_kv_cache();
      ASSERT_TRUE(first->resume());
      for (int32_t end = 4; end <= static_cast<int32_t>(shared.size()); end += 4) {
        ASSERT_TRUE(first->resize(end)) << describe(*first->last_failure());
        first->commit(std::span(shared).subspan(static_cast<size_t>(end) - 4, 4));
      }
    }
    std::vector<std::unique_ptr<KVCache>> caches;
    for (const KVCacheDesc& desc : batch.kv_caches) {
      auto cache = b.manager().create_kv_cache({.input_tokens = shared});
      ASSERT_EQ(cache->num_committed_tokens(), static_cast<int32_t>(shared.size()));
      ASSERT_TRUE(cache->resume()) << "prompt " << prompt << describe(*cache->last_failure());
      ASSERT_TRUE(cache->resize(desc.capacity, desc.history_length))
          << "prompt " << prompt << describe(*cache->last_failure());
      caches.push_back(std::move(cache));
    }
    const ResizeResult least = b.manager().resize(0, 1);
    EXPECT_EQ(least.minimum, b.manager().quota(0)) << "and nothing less would do";
  }
}

TEST(Sizing, a_sequence_of_no_tokens_takes_a_state_and_nothing_else) {
  KVCacheManagerConfig config = sizing_config({32});
  config.layers.push_back(SsmLayerConfig{5, {{"state", 512}}});
  config.commit_min_snapshot = true;
  config.constraints = {BatchDesc{{{0, 0}, {0, 0}, {0, 0}}, 0}};
  SizingBench b(config);
  const size_t state =
      static_cast<size_t>(b.manager().pool_group_of(b.manager().layer_group_id(5)).value());
  std::vector<std::unique_ptr<KVCache>> caches;
  const auto before = b.manager().storage_statistics();
  for (int i = 0; i < 3; ++i) {
    caches.push_back(b.manager().create_kv_cache());
    ASSERT_TRUE(caches.back()->resume());
  }
  const auto after = b.manager().storage_statistics();
  EXPECT_EQ(before[state].free - after[state].free, 3);
  EXPECT_EQ(before[1 - state].free, after[1 - state].free);
}

TEST(Sizing, a_forecast_tells_when_a_request_fits) {
  SizingBench b(sizing_config({8}));
  auto a = b.start(16, 1);
  auto c = b.start(16, 2);
  const ExpectedLength both[] = {{a.get(), 18}, {c.get(), 20}};
  const SequencePlan request = plan_of_request(8, 4, 0, 4);
  auto answer = b.manager().forecast_admission({both, 1}, request);
  EXPECT_FALSE(answer.fits_now);
  EXPECT_FALSE(b.manager().forecast_admission({}, request).steps_until_fits)
      << "caches that are not named stay";
  ASSERT_TRUE(answer.steps_until_fits);
  EXPECT_EQ(*answer.steps_until_fits, 3) << "after steps 0, 1 and 2 of the first";
  a->close();
  const ExpectedLength one[] = {{c.get(), 20}};
  EXPECT_TRUE(b.manager().forecast_admission(one, request).fits_now);
  EXPECT_THROW((void)b.manager().forecast_admission({both, 1}, request), InvalidArgument);
  // Slots that are to be given back come back to nobody.
  (void)b.manager().resize(0, 4 * kUnit, true);
  EXPECT_FALSE(b.manager().forecast_admission(one, plan_of_request(17, 1, 0, 4)).steps_until_fits);
}

}  // namespace
}  // namespace helicore::kv::testing
