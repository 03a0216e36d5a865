#include "helicore/kv/scratch.h"

#include <gmock/gmock.h>

#include <algorithm>

#include "helicore/core/error.h"
#include "helicore/kv/introspection.h"
#include "kv/fake_device.h"
#include "kv/kv_configs.h"
#include "kv/scratch_engine.h"

namespace helicore::kv::testing {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr LifeCycleId kWindowed{0};
constexpr LifeCycleId kFull{1};

// Layers [0, num_windowed) have a window, the rest attend to all.
KVCacheManagerConfig scratch_config(int32_t tpb, int32_t num_slots, int32_t num_windowed,
                                    int32_t window, int32_t num_full = 0, int32_t rewind = 0) {
  auto config = attention_config(tpb, num_slots, num_windowed + num_full, 64);
  for (int32_t i = 0; i < num_windowed; ++i) {
    std::get<AttentionLayerConfig>(config.layers[static_cast<size_t>(i)]).sliding_window_size =
        window;
  }
  config.swa_scratch_reuse = SwaScratchReuseConfig{rewind};
  return config;
}

int32_t used(const KVCacheManager& manager, LifeCycleId group = kWindowed) {
  const auto index = static_cast<size_t>(manager.pool_group_of(group).value());
  return manager.storage_statistics()[index].unavailable();
}

std::string invalid(const std::function<void()>& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "nothing was thrown";
}

std::vector<bool> has_page(const KVCache& cache, LifeCycleId group = kWindowed) {
  std::vector<bool> result;
  for (int32_t index : cache.base_page_indices(group)) result.push_back(index != kBadPageIndex);
  return result;
}

TEST(ScratchSlots, a_prefill_of_many_layers_takes_the_slots_that_the_formula_gives) {
  KVCacheManager manager(scratch_config(32, 60, 32, 128));
  auto cache = manager.create_kv_cache();
  ASSERT_TRUE(cache->resume());
  ASSERT_TRUE(cache->resize(1025, 0));
  // 33 blocks. Once 1025 tokens are history, queries read from token 1025 + 1 - 128 = 898 on, and
  // blocks before 898 / 32 = 28 are stale: 28 scratch blocks of 32 layers in ceil(28 / 32) = 1
  // slot, and blocks 28..32 in slots of their own. At 1024 tokens it is token 897, the same block
  // 28, of 32 blocks: 1 + 4 slots.
  EXPECT_EQ(used(manager), 1 + 5);
  const auto scratch = cache->scratch().desc(kWindowed);
  ASSERT_TRUE(scratch);
  EXPECT_EQ(scratch->range, (HalfOpenRange<int32_t>{0, 28}));
  EXPECT_EQ(scratch->slot_ids.size(), 1u);
  const auto pages = has_page(*cache);
  EXPECT_EQ(std::count(pages.begin(), pages.end(), true), 5);
  EXPECT_EQ(std::count(pages.begin(), pages.begin() + 28, true), 0) << "scratch blocks read BAD";

  cache->commit(iota_tokens(1024));
  EXPECT_FALSE(cache->scratch().has_slots()) << "released with the step";
  EXPECT_FALSE(cache->scratch().desc(kWindowed));
  EXPECT_EQ(used(manager), 5);

  auto other = manager.create_kv_cache();
  ASSERT_TRUE(other->resume());
  ASSERT_TRUE(other->resize(1024, 0));
  EXPECT_EQ(used(manager), 5 + 1 + 4);
}

TEST(ScratchSlots, without_the_config_a_prefill_has_a_page_for_every_block) {
  auto config = scratch_config(32, 60, 32, 128);
  config.swa_scratch_reuse.reset();
  KVCacheManager manager(config);
  auto cache = manager.create_kv_cache();
  ASSERT_TRUE(cache->resume());
  ASSERT_TRUE(cache->resize(1025, 0));
  EXPECT_EQ(used(manager), 33);
  EXPECT_FALSE(cache->scratch().desc(kWindowed));
  EXPECT_TRUE(cache->scratch().supports(PageIndexMode::kShared));
}

TEST(ScratchSlots, the_tail_that_may_be_rewound_keeps_its_own_pages) {
  KVCacheManager manager(scratch_config(4, 60, 2, 8, 0, 5));
  auto cache = manager.create_kv_cache();
  ASSERT_TRUE(cache->resume());
  ASSERT_TRUE(cache->resize(44, 0));
  // Back to 39 tokens the window begins at 39 + 1 - 8 = 32: block 8. Without the rewind it would
  // begin at 37: block 9.
  EXPECT_EQ(cache->scratch().desc(kWindowed)->range, (HalfOpenRange<int32_t>{0, 8}));
  EXPECT_EQ(used(manager), 4 + 3);
  LayerwiseEngine engine(manager);
  const auto tokens = iota_tokens(60);
  EXPECT_EQ(engine.run(*cache, tokens), std::nullopt);
  ASSERT_TRUE(cache->resize(std::nullopt, 39)) << "5 tokens were rejected";
  ASSERT_TRUE(cache->resize(46, 39));
  EXPECT_EQ(engine.run(*cache, tokens), std::nullopt) << "the window of token 39 is there";
}

TEST(ScratchSlots, blocks_of_a_rewound_tail_that_become_scratch_give_up_their_pages) {
  KVCacheManager manager(scratch_config(4, 60, 2, 8, 0, 16));
  auto cache = manager.create_kv_cache();
  ASSERT_TRUE(cache->resume());
  LayerwiseEngine engine(manager);
  ASSERT_TRUE(cache->resize(24, 0));
  EXPECT_EQ(engine.run(*cache, iota_tokens(80)), std::nullopt);
  ASSERT_TRUE(cache->resize(80, 8));  // 16 tokens were rejected; blocks 2..5 are written again
  // Back to 64 tokens the window begins at 57: block 14. Blocks 2..13 are scratch: 6 slots.
  EXPECT_EQ(cache->scratch().desc(kWindowed)->range, (HalfOpenRange<int32_t>{2, 14}));
  EXPECT_EQ(used(manager), 2 + 6 + 6);
  EXPECT_EQ(engine.run(*cache, iota_tokens(80)), std::nullopt);
  Introspection::check(manager);
}

TEST(ScratchSlots, only_the_difference_is_allocated_and_freed) {
  KVCacheManager manager(scratch_config(4, 60, 2, 8));
  auto cache = manager.create_kv_cache();
  ASSERT_TRUE(cache->resume());
  ASSERT_TRUE(cache->resize(44, 0));
  const auto first = cache->scratch().desc(kWindowed)->slot_ids;
  EXPECT_EQ(first.size(), 5u) << "9 blocks";
  const auto before = manager.life_cycle_stats()[0].allocated_pages;
  ASSERT_TRUE(cache->resize(96, 44));  // blocks 11..21 are scratch, 22 and 23 are not
  const auto second = cache->scratch().desc(kWindowed)->slot_ids;
  EXPECT_EQ(second.size(), 6u);
  EXPECT_TRUE(std::equal(first.begin(), first.end(), second.begin())) << "they stay";
  EXPECT_EQ(manager.life_cycle_stats()[0].allocated_pages - before, 2u + 1u);
  ASSERT_TRUE(cache->resize(97, 96));
  EXPECT_FALSE(cache->scratch().has_slots());
}

TEST(ScratchSlots, a_resize_without_room_changes_nothing_and_excess_slots_become_pages) {
  KVCacheManager manager(scratch_config(4, 8, 2, 8));
  ASSERT_EQ(manager.num_total_blocks(), 8);
  auto cache = manager.create_kv_cache();
  ASSERT_TRUE(cache->resume());
  ASSERT_TRUE(cache->resize(44, 0));
  EXPECT_EQ(used(manager), 7);
  const auto desc = cache->scratch().desc(kWindowed);
  EXPECT_FALSE(cache->resize(200, 44)) << "36 scratch blocks need 18 slots";
  EXPECT_EQ(cache->scratch().desc(kWindowed), desc);
  EXPECT_EQ(cache->capacity(), 44);
  EXPECT_EQ(cache->history_length(), 0);
  Introspection::check(manager);
  // 2 free slots would not do: the 5 scratch slots serve the new blocks. 3 new blocks, no scratch.
  auto other = manager.create_kv_cache();
  ASSERT_TRUE(other->resume());
  ASSERT_TRUE(other->resize(4, 0));
  EXPECT_EQ(used(manager), 8);
  ASSERT_TRUE(cache->resize(48, 44)) << "from an excess slot";
  EXPECT_EQ(used(manager), 1 + 3);
}

TEST(ScratchSlots, suspending_frees_them_and_resuming_takes_them_again_or_fails_whole) {
  KVCacheManager manager(scratch_config(4, 8, 2, 8));
  auto cache = manager.create_kv_cache();
  ASSERT_TRUE(cache->resume());
  ASSERT_TRUE(cache->resize(44, 0));
  cache->suspend();
  EXPECT_FALSE(cache->scratch().has_slots());
  EXPECT_FALSE(cache->scratch().desc(kWindowed));
  EXPECT_EQ(used(manager), 2);
  auto other = manager.create_kv_cache();
  ASSERT_TRUE(other->resume());
  ASSERT_TRUE(other->resize(8, 0));
  EXPECT_FALSE(cache->resume()) << "4 slots are free, 5 are needed";
  EXPECT_EQ(cache->last_failure()->needed, 5);
  EXPECT_FALSE(cache->scratch().has_slots());
  EXPECT_EQ(used(manager), 4);
  other->close();
  ASSERT_TRUE(cache->resume());
  EXPECT_EQ(cache->scratch().desc(kWindowed)->slot_ids.size(), 5u);
  EXPECT_EQ(LayerwiseEngine(manager).run(*cache, iota_tokens(44)), std::nullopt);
  cache->close();
  EXPECT_EQ(used(manager), 0);
}

TEST(ScratchSlots, a_commit_shows_no_scratch_block_and_reuse_goes_round_them) {
  KVCacheManager manager(scratch_config(4, 60, 2, 8, 1));
  const auto tokens = iota_tokens(50);
  LayerwiseEngine engine(manager);
  auto cache = manager.create_kv_cache();
  ASSERT_TRUE(cache->resume());
  ASSERT_TRUE(cache->resize(44, 0));
  EXPECT_FALSE(cache->scratch().desc(kFull)) << "nothing of full attention is scratch";
  EXPECT_THAT(has_page(*cache, kFull), Each(true));
  EXPECT_EQ(engine.run(*cache, tokens), std::nullopt);
  cache->commit(std::span(tokens).first(44));
  cache->close();
  EXPECT_EQ(manager.life_cycle_stats()[0].committed_pages, 2u) << "the window";
  EXPECT_EQ(manager.life_cycle_stats()[1].committed_pages, 11u);
  EXPECT_EQ(manager.probe_reuse(tokens), 44);
  EXPECT_EQ(manager.probe_reuse(std::span(tokens).first(32)), 0) << "its window was scratch";
  auto next = manager.create_kv_cache({.input_tokens = tokens});
  ASSERT_TRUE(next->resume());
  ASSERT_EQ(next->num_committed_tokens(), 44);
  ASSERT_TRUE(next->resize(50, 44));
  EXPECT_EQ(engine.run(*next, tokens), std::nullopt) << "the window of 44 tokens is right";
}

TEST(ScratchSlots, over_turns_only_the_window_lives_and_the_whole_prefix_is_reused) {
  KVCacheManager manager(scratch_config(4, 20, 2, 8));
  const auto tokens = iota_tokens(400);
  LayerwiseEngine engine(manager);
  for (int32_t turn = 1; turn <= 10; ++turn) {
    const auto prompt = std::span(tokens).first(static_cast<size_t>(turn) * 40);
    auto cache = manager.create_kv_cache({.input_tokens = prompt});
    ASSERT_TRUE(cache->resume());
    const int32_t matched = cache->num_committed_tokens();
    EXPECT_EQ(matched, (turn - 1) * 40);
    ASSERT_TRUE(cache->resize(turn * 40, matched));
    ASSERT_EQ(engine.run(*cache, tokens), std::nullopt);
    cache->commit(prompt.subspan(static_cast<size_t>(matched)));
    EXPECT_LE(used(manager), 3);
  }
}

TEST(ScratchSlots, live_data_survives_chunks_and_decoding_and_one_slot_too_few_is_seen) {
  for (const bool is_broken : {false, true}) {
    auto config = scratch_config(4, 400, 3, 10, 1);
    config.initial_pool_ratio = {0.5, 0.5};
    KVCacheManager manager(config);
    LayerwiseEngine engine(manager);
    engine.drops_last_slot = is_broken;
    const auto tokens = iota_tokens(300, 7);
    auto cache = manager.create_kv_cache();
    auto neighbour = manager.create_kv_cache();
    ASSERT_TRUE(cache->resume());
    ASSERT_TRUE(neighbour->resume());
    std::optional<std::string> wrong;
    int32_t at = 0;
    for (int32_t chunk : {61, 50, 1, 1, 1, 77, 1, 1, 30, 1}) {
      ASSERT_TRUE(cache->resize(at + chunk, at));
      ASSERT_TRUE(neighbour->resize(at + chunk, at));
      for (const auto& each : {&cache, &neighbour}) {
        if (!wrong) wrong = engine.run(**each, tokens);
      }
      at += chunk;
      ASSERT_TRUE(cache->resize(std::nullopt, at));
    }
    EXPECT_EQ(wrong.has_value(), is_broken) << wrong.value_or("");
  }
}

TEST(ScratchSlots, layers_of_unequal_size_do_not_meet_themselves_around_the_end_of_a_slot) {
  for (const bool is_broken : {false, true}) {
    auto config = scratch_config(4, 60, 2, 8);
    auto& first = std::get<AttentionLayerConfig>(config.layers[0]);
    first.buffers = {{"k", 256}, {"v", 64, 1}};  // of the same size, four kernel pages
    KVCacheManager manager(config);
    ASSERT_EQ(manager.page_index_scale(0, "k"), 3) << "two pages a block in slots of three";
    LayerwiseEngine engine(manager);
    engine.forgets_scratch_page = is_broken;
    auto cache = manager.create_kv_cache();
    ASSERT_TRUE(cache->resume());
    ASSERT_TRUE(cache->resize(90, 0));
    EXPECT_EQ(cache->scratch().desc(kWindowed)->slot_ids.size(), 14u) << "ceil(20 * 2 / 3)";
    EXPECT_EQ(engine.run(*cache, iota_tokens(90)).has_value(), is_broken);
  }
}

TEST(ScratchSlots, cursors_that_would_need_rows_of_scratch_blocks_are_refused) {
  KVCacheManager manager(scratch_config(4, 60, 2, 8, 0, 4));
  auto cache = manager.create_kv_cache();
  ASSERT_TRUE(cache->resume());
  const auto resize = [&](std::optional<int64_t> capacity, std::optional<int64_t> history) {
    return invalid([&] { (void)cache->resize(capacity, history); });
  };
  EXPECT_THAT(resize(44, 20), HasSubstr("history_length must be in [old capacity - max_rewind_len"
                                        ", old capacity] = [-4, 0]"));
  ASSERT_TRUE(cache->resize(44, 0));
  EXPECT_THAT(resize(60, std::nullopt), HasSubstr("= [40, 44]"));
  EXPECT_THAT(resize(60, 39), HasSubstr("history_length must be in"));
  EXPECT_THAT(resize(std::nullopt, 20),
              HasSubstr("history_length must stay 0 or move to at least 39"));
  EXPECT_THAT(resize(43, 40), HasSubstr("capacity must not shrink while there are scratch blocks"));
  EXPECT_THAT(invalid([&] { cache->commit(iota_tokens(38)); }), HasSubstr("history_length"));
  EXPECT_THAT(invalid([&] { cache->truncate(20); }), HasSubstr("num_tokens must be capacity 44"));
  const std::vector<KVCache*> caches{cache.get()};
  const std::vector<int32_t> lengths{20};
  EXPECT_THAT(invalid([&] { manager.truncate_many(caches, lengths); }), HasSubstr("num_tokens"));
  EXPECT_EQ(cache->capacity(), 44);
  EXPECT_EQ(cache->history_length(), 0);
  cache->truncate(44);
  cache->commit(iota_tokens(40));
  EXPECT_EQ(cache->history_length(), 40);
  ASSERT_TRUE(cache->resize(42, 40)) << "no scratch block is left";
}

TEST(ScratchSlots, the_switch_moves_only_between_steps_with_no_scratch_either_way) {
  KVCacheManager manager(scratch_config(4, 60, 2, 8));
  auto cache = manager.create_kv_cache();
  ScratchSlots& scratch = cache->scratch();
  ASSERT_TRUE(cache->resume());
  int32_t at = 0;
  for (int round = 0; round < 2; ++round) {
    EXPECT_TRUE(scratch.is_enabled());
    EXPECT_FALSE(scratch.supports(PageIndexMode::kShared));
    EXPECT_TRUE(scratch.supports(PageIndexMode::kPerLayer));
    ASSERT_TRUE(cache->resize(at + 44, at));
    EXPECT_TRUE(scratch.has_slots());
    EXPECT_THROW(scratch.set_enabled(false), LogicError) << "it has scratch blocks";
    scratch.set_enabled(true);
    at += 44;
    ASSERT_TRUE(cache->resize(std::nullopt, at));
    scratch.set_enabled(false);
    EXPECT_TRUE(scratch.supports(PageIndexMode::kShared));
    ASSERT_TRUE(cache->resize(at + 44, at));
    EXPECT_FALSE(scratch.has_slots());
    const auto pages = has_page(*cache);
    EXPECT_EQ(std::count(pages.end() - 11, pages.end(), true), 11) << "pages of their own";
    EXPECT_THROW(scratch.set_enabled(true), LogicError) << "it would have scratch blocks";
    at += 44;
    ASSERT_TRUE(cache->resize(std::nullopt, at));
    scratch.set_enabled(true);
  }
  cache->close();
  EXPECT_THROW(scratch.set_enabled(false), LogicError);

  auto config = scratch_config(4, 60, 2, 8);
  config.swa_scratch_reuse.reset();
  KVCacheManager plain(config);
  auto other = plain.create_kv_cache();
  EXPECT_THAT(invalid([&] { other->scratch().set_enabled(true); }),
              HasSubstr("config.swa_scratch_reuse"));
}

TEST(ScratchSlots, a_fork_in_the_middle_of_a_step_takes_the_switch_and_no_slot) {
  KVCacheManager manager(scratch_config(4, 60, 2, 8));
  const auto tokens = iota_tokens(100);
  LayerwiseEngine engine(manager);
  auto cache = manager.create_kv_cache();
  ASSERT_TRUE(cache->resume());
  ASSERT_TRUE(cache->resize(30, 0));
  ASSERT_EQ(engine.run(*cache, tokens), std::nullopt);
  ASSERT_TRUE(cache->resize(74, 30));
  auto twin = cache->fork();
  EXPECT_TRUE(twin->scratch().is_enabled());
  ASSERT_TRUE(twin->resume());
  EXPECT_FALSE(twin->scratch().has_slots());
  ASSERT_TRUE(twin->resize(80, 30));
  EXPECT_EQ(engine.run(*twin, tokens), std::nullopt);
  EXPECT_EQ(engine.run(*cache, tokens), std::nullopt);
  ASSERT_TRUE(twin->resize(std::nullopt, 80));
  ASSERT_TRUE(twin->resize(81, 80));
  EXPECT_EQ(engine.run(*twin, tokens), std::nullopt);
}

TEST(ScratchSlots, the_index_mode_must_be_said_when_there_may_be_scratch_blocks) {
  KVCacheManager manager(scratch_config(4, 60, 2, 8));
  EXPECT_THAT(invalid([&] { (void)manager.mem_pool_base_address(1, "latent"); }),
              HasSubstr("index_mode must be given"));
  EXPECT_EQ(manager.mem_pool_base_address(1, "latent", PageIndexMode::kShared),
            manager.mem_pool_base_address(1, "latent", PageIndexMode::kPerLayer) + 256);
  EXPECT_EQ(manager.supports_index_mode(PageIndexMode::kPerLayer), true);
  EXPECT_EQ(manager.supports_index_mode(PageIndexMode::kShared), std::nullopt);
  const std::vector<int32_t> base(3, kBadPageIndex);
  std::vector<int32_t> out(3);
  const PageIndexConverter converter = manager.page_index_converter(1, "latent");
  const ScratchDesc scratch{{0, 3}, {5, 9}};
  EXPECT_THAT(invalid([&] { converter.convert(base, out, PageIndexMode::kShared, scratch); }),
              HasSubstr("PER_LAYER"));
  EXPECT_THAT(
      invalid([&] { converter.convert(base, out, PageIndexMode::kPerLayer, {{0, 3}, {5}}); }),
      HasSubstr("slot_ids must have 2 entries"));
  converter.convert(base, out, PageIndexMode::kPerLayer, scratch);
  EXPECT_EQ(out, (std::vector<int32_t>{5 * 2 + 1, 5 * 2 + 0, 9 * 2 + 1}));
}

// 8 slots on a device whose streams are held by hand.
class ScratchOrderTest : public ::testing::Test {
 protected:
  static std::unique_ptr<FakeDevice> made() {
    auto device = std::make_unique<FakeDevice>(FakeOptions{.automatic = true});
    device->set_grain(256);
    return device;
  }
  static KVCacheManagerConfig config() {
    auto config = scratch_config(4, 7, 2, 8);
    config.cache_tiers = {GpuCacheTierConfig{quota_of(config.cache_tiers[0])}};
    return config;
  }
  // Whether a kernel on the stream runs now.
  bool runs(StreamHandle stream) {
    auto ran = std::make_shared<bool>(false);
    device_->launch(stream, [ran] { *ran = true; });
    return *ran;
  }

  std::unique_ptr<FakeDevice> owned_ = made();
  FakeDevice* device_ = owned_.get();
  KVCacheManager manager_{config(), std::move(owned_)};
};

TEST_F(ScratchOrderTest, an_excess_slot_waits_for_its_former_owner_on_a_new_stream) {
  ASSERT_EQ(manager_.num_total_blocks(), 7);
  const StreamHandle first = device_->make_stream();
  const StreamHandle second = device_->make_stream();
  const StreamHandle third = device_->make_stream();
  auto before = manager_.create_kv_cache();
  ASSERT_TRUE(before->resume(first));
  ASSERT_TRUE(before->resize(44, 0));
  device_->hold(first);  // its work on all 7 slots is not done
  before->close();
  auto cache = manager_.create_kv_cache();
  ASSERT_TRUE(cache->resume(second));
  ASSERT_TRUE(cache->resize(44, 0));
  ASSERT_EQ(cache->scratch().desc(kWindowed)->slot_ids.size(), 5u);
  EXPECT_FALSE(runs(second));
  EXPECT_TRUE(runs(third)) << "nothing holds it yet";
  cache->set_stream(third);
  ASSERT_TRUE(cache->resize(48, 44)) << "a scratch slot becomes a page";
  EXPECT_FALSE(runs(third)) << "the page is still somebody else's";
  EXPECT_TRUE(runs(device_->make_stream()));
  device_->release(first);
  EXPECT_TRUE(runs(third));
  EXPECT_THAT(device_->violations(), IsEmpty());
}

TEST_F(ScratchOrderTest, an_excess_slot_that_another_cache_takes_waits_for_the_step_that_used_it) {
  const StreamHandle first = device_->make_stream();
  const StreamHandle second = device_->make_stream();
  auto cache = manager_.create_kv_cache();
  ASSERT_TRUE(cache->resume(first));
  ASSERT_TRUE(cache->resize(44, 0));
  device_->hold(first);
  ASSERT_TRUE(cache->resize(std::nullopt, 44));
  auto other = manager_.create_kv_cache();
  ASSERT_TRUE(other->resume(second));
  EXPECT_TRUE(runs(second));
  ASSERT_TRUE(other->resize(4, 0));
  EXPECT_FALSE(runs(second));
  device_->release(first);
  EXPECT_TRUE(runs(second));
}

TEST(ScratchSlots, slots_of_a_step_that_only_the_caller_can_end_are_not_given_on) {
  KVCacheManager manager(scratch_config(4, 8, 2, 8));
  ASSERT_EQ(manager.num_total_blocks(), 8);
  auto other = manager.create_kv_cache();
  ASSERT_TRUE(other->resume());
  ASSERT_TRUE(other->resize(4, 0));
  const StreamHandle steps = manager.make_step_stream();
  auto cache = manager.create_kv_cache();
  ASSERT_TRUE(cache->resume(steps));
  ASSERT_TRUE(cache->resize(44, 0));
  const uint64_t step = manager.submit_step(steps);
  EXPECT_FALSE(cache->resize(48, 44)) << "every slot is in the step";
  EXPECT_EQ(cache->scratch().desc(kWindowed)->slot_ids.size(), 5u) << "nothing changed";
  manager.complete_step(steps, step);
  ASSERT_TRUE(cache->resize(48, 44));
  EXPECT_EQ(used(manager), 1 + 3);
}

}  // namespace
}  // namespace helicore::kv::testing
