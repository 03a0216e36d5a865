// Several levels, the cases that need a certain order of things.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kv/level_rig.h"

namespace helicore::kv::testing {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr FakeOptions kGpu{.type = DeviceType::kCuda};
constexpr LifeCycleId kFull{0};

TEST(LevelsCpu, pages_of_a_suspended_cache_are_never_dropped) {
  LevelRig rig({.blocks = {4, 4}});
  auto a = rig.started(16, 1);
  a->suspend();
  auto b = rig.started(12, 2);
  EXPECT_FALSE(b->resize(64)) << "nothing that a holds may go";
  b->suspend();
  auto c = rig->create_kv_cache();
  ASSERT_TRUE(c->resume());
  EXPECT_FALSE(c->resize(16)) << "7 pages are held, 1 slot is left beside the one for passing";
  c->close();
  ASSERT_TRUE(a->resume()) << LevelRig::why(*a);
  EXPECT_THAT(*rig.read(*a, 0, 16), AllOf(SizeIs(16), Each(1)));
}

TEST(LevelsCpu, pages_change_places_one_by_one_when_three_levels_are_full) {
  LevelRig rig({.blocks = {4, 3, 3}});
  auto a = rig.started(16, 1);
  a->suspend();
  auto b = rig.started(16, 2);
  b->suspend();
  for (int round = 0; round < 3; ++round) {
    ASSERT_TRUE(a->resume()) << LevelRig::why(*a);
    EXPECT_THAT(*rig.read(*a, 0, 16), AllOf(SizeIs(16), Each(1)));
    a->suspend();
    ASSERT_TRUE(b->resume()) << LevelRig::why(*b);
    EXPECT_THAT(*rig.read(*b, 0, 16), AllOf(SizeIs(16), Each(2)));
    b->suspend();
  }
  for (int level : {1, 2}) EXPECT_EQ(rig->storage_statistics(level)[0].free, 1) << level;
}

TEST(LevelsCpu, a_load_does_not_displace_into_its_own_source) {
  LevelRig rig({.blocks = {2, 2}});  // one slot of the host level is for passing
  rig.put(4, 1, 0);
  auto b = rig.started(8, 2);  // sends the block down
  b->suspend();
  const auto prompt = LevelRig::tokens_from(0, 4);
  auto c = rig->create_kv_cache({.input_tokens = prompt});
  ASSERT_EQ(c->cached_tokens_by_level(), (std::vector<int32_t>{0, 4}));
  ASSERT_TRUE(c->resume()) << LevelRig::why(*c);
  EXPECT_THAT(*rig.read(*c, 0, 4), Each(1));
  c->close();
  ASSERT_TRUE(b->resume()) << LevelRig::why(*b);
  EXPECT_THAT(*rig.read(*b, 0, 8), AllOf(SizeIs(8), Each(2)));
}

TEST(LevelsGpu, a_slot_is_written_again_only_after_its_old_bytes_were_stored) {
  LevelRig rig({.blocks = {1, 3}, .device = kGpu});
  const StreamHandle stream = rig.device().make_stream();
  rig.put(4, 1, 0, stream);
  auto b = rig.started(4, 2, stream);  // takes the slot; the block's way down has not begun
  ASSERT_EQ(rig.device().num_pending(), 1);
  b->close();
  rig.device().run_all();
  const auto prompt = LevelRig::tokens_from(0, 4);
  auto c = rig->create_kv_cache({.input_tokens = prompt});
  ASSERT_EQ(c->num_committed_tokens(), 4);
  ASSERT_TRUE(c->resume(stream));
  const auto found = rig.read(*c, 0, 4);
  rig.device().run_all();
  EXPECT_THAT(*found, AllOf(SizeIs(4), Each(1)));
  EXPECT_THAT(rig.device().violations(), IsEmpty());
}

TEST(LevelsCpu, a_window_keeps_a_block_that_the_token_in_flight_reads) {
  LevelRig rig({.blocks = {12}, .tokens_per_block = 32, .window = 128});
  auto cache = rig->create_kv_cache();
  ASSERT_TRUE(cache->resume());
  const LifeCycleId window = rig->layer_group_id(1);
  ASSERT_TRUE(cache->resize(160, 158));  // 158 settled, tokens 158 and 159 in flight
  EXPECT_GE(cache->base_page_indices(window)[0], 0) << "token 158 reads 31..158";
  ASSERT_TRUE(cache->resize(161, 159));
  EXPECT_GE(cache->base_page_indices(kFull)[0], 0);
  EXPECT_EQ(cache->base_page_indices(window)[0], kBadPageIndex) << "token 159 reads 32..159";
}

TEST(LevelsCpu, a_slot_that_a_step_may_still_write_is_not_handed_out) {
  LevelRig rig({.blocks = {2}});
  const StreamHandle steps = rig->make_step_stream();
  auto r = rig->create_kv_cache();
  ASSERT_TRUE(r->resume(steps));
  ASSERT_TRUE(r->resize(8));
  auto* base = reinterpret_cast<std::byte*>(rig->mem_pool_base_address(0, "k"));
  const auto table = r->base_page_indices(kFull);
  const std::vector<int32_t> slots(table.begin(), table.end());
  const uint64_t step = rig->submit_step(steps);
  r->close();  // finished, with a step that runs ahead
  auto s = rig->create_kv_cache();
  ASSERT_TRUE(s->resume());
  EXPECT_FALSE(s->resize(4));
  EXPECT_EQ(s->last_failure()->pending, 2);
  for (int32_t slot : slots) std::memset(base + int64_t{slot} * 64, 0x55, 64);  // late
  rig->complete_step(steps, step);
  ASSERT_TRUE(s->resize(8));
  rig.write(*s, 0, 8, 7);
  EXPECT_THAT(*rig.read(*s, 0, 8), Each(7));
}

TEST(LevelsCpu, two_half_loaded_requests_do_not_block_each_other) {
  LevelRig rig({.blocks = {10, 12}});
  rig.put(16, 1, 0);
  rig.put(16, 2, 1000);
  rig.started(40, 3)->close();  // sends both prefixes down
  const auto first = LevelRig::tokens_from(0, 16);
  const auto second = LevelRig::tokens_from(1000, 16);
  auto a = rig->create_kv_cache({.input_tokens = first});
  auto b = rig->create_kv_cache({.input_tokens = second});
  for (KVCache* cache : {a.get(), b.get()}) {
    ASSERT_EQ(cache->num_committed_tokens(), 16);
    auto ticket = cache->prefetch();
    rig.device().run_all();
    EXPECT_TRUE(ticket.is_done());
    EXPECT_TRUE(ticket.is_complete());
  }
  ASSERT_TRUE(a->resume());
  ASSERT_TRUE(a->resize(32)) << LevelRig::why(*a);
  EXPECT_THAT(*rig.read(*a, 0, 16), Each(1));
  EXPECT_FALSE(b->resume() && b->resize(32));
  a->close();
  ASSERT_TRUE(b->is_active() || b->resume());
  ASSERT_TRUE(b->resize(32)) << LevelRig::why(*b);
  EXPECT_THAT(*rig.read(*b, 0, 16), Each(2));
}

TEST(LevelsCpu, what_slots_held_before_is_never_seen_through_a_window) {
  std::vector<std::vector<int>> seen;
  for (const int garbage : {0x00, 0xFF}) {
    LevelRig rig({.blocks = {10}, .window = 6});
    for (const PoolGroupDesc& group : rig->pool_group_descs()) {
      for (const PoolDesc& pool : group.pools) {
        std::memset(reinterpret_cast<void*>(pool.base_address), garbage,
                    static_cast<size_t>(pool.slot_bytes) * static_cast<size_t>(group.num_slots));
      }
    }
    auto cache = rig->create_kv_cache();
    ASSERT_TRUE(cache->resume());
    std::vector<int> all;
    for (int32_t t = 0; t < 17; ++t) {
      ASSERT_TRUE(cache->resize(t + 1)) << LevelRig::why(*cache);
      rig.write(*cache, t, t + 1, 10 + t, 0);
      rig.write(*cache, t, t + 1, 50 + t, 1);
      cache->commit(std::vector<TokenId>{t});
      for (int32_t layer : {0, 1}) {
        const auto rows = rig.read(*cache, layer == 0 ? 0 : std::max(0, t - 4), t + 1, layer);
        all.insert(all.end(), rows->begin(), rows->end());
      }
    }
    seen.push_back(all);
  }
  EXPECT_EQ(seen[0], seen[1]);
}

TEST(LevelsCpu, snapshots_of_each_token_in_a_tiny_pool_leave_the_lineage_alone) {
  LevelRig rig({.blocks = {8}, .tokens_per_block = 1, .with_state = true});
  auto cache = rig->create_kv_cache();
  ASSERT_TRUE(cache->resume());
  std::vector<TokenId> tokens;
  for (int32_t t = 0; t < 8; ++t) {
    if (!cache->resize(t + 1)) break;
    rig.write(*cache, t, t + 1, t + 1);
    std::memset(rig.state(*cache), t + 1, 64);
    cache->commit(std::vector<TokenId>{t});
    tokens.push_back(t);
    EXPECT_EQ(cache->committed_tokens(), tokens);
    Introspection::check(*rig);
  }
  EXPECT_GE(tokens.size(), 3u);
  const size_t depth = Introspection::state(*rig).tree.num_nodes();
  EXPECT_EQ(depth, tokens.size()) << "every committed block is still in the tree";
}

TEST(LevelsGpu, what_one_stream_wrote_is_awaited_after_a_suspension_by_another) {
  LevelRig rig({.blocks = {4, 3}, .device = kGpu});
  const StreamHandle first = rig.device().make_stream();
  const StreamHandle second = rig.device().make_stream();
  rig.device().hold(first);
  auto cache = rig.started(8, 1, first);
  cache->suspend();
  ASSERT_TRUE(cache->resume(second));
  const auto found = rig.read(*cache, 0, 8);
  rig.device().release(first);
  rig.device().run_all();
  EXPECT_THAT(*found, AllOf(SizeIs(8), Each(1)));
}

TEST(LevelsGpu, a_fork_on_another_stream_waits_for_the_rows_of_its_parent) {
  LevelRig rig({.blocks = {6, 3}, .device = kGpu});
  const StreamHandle first = rig.device().make_stream();
  const StreamHandle second = rig.device().make_stream();
  rig.device().hold(first);
  auto parent = rig.started(6, 1, first);
  ASSERT_TRUE(parent->resize(6, 6));
  auto child = parent->fork();
  ASSERT_TRUE(child->resume(second));
  const auto found = rig.read(*child, 0, 6);
  rig.device().release(first);
  rig.device().run_all();
  EXPECT_THAT(*found, AllOf(SizeIs(6), Each(1)));
}

TEST(LevelsGpu, a_block_that_its_commit_makes_stale_is_awaited_by_its_readers) {
  LevelRig rig({.blocks = {8, 3}, .window = 2, .device = kGpu});
  const StreamHandle first = rig.device().make_stream();
  const StreamHandle second = rig.device().make_stream();
  rig.device().hold(first);
  auto writer = rig.started(12, 1, first);
  rig.write(*writer, 0, 12, 5, 1);
  const auto tokens = LevelRig::tokens_from(0, 12);
  writer->commit(tokens);
  auto reader = rig->create_kv_cache({.input_tokens = std::span(tokens).first(4)});
  ASSERT_EQ(reader->num_committed_tokens(), 4);
  ASSERT_TRUE(reader->resume(second));
  const auto found = rig.read(*reader, 0, 4, 1);
  rig.device().release(first);
  rig.device().run_all();
  EXPECT_THAT(*found, AllOf(SizeIs(4), Each(5)));
}

TEST(LevelsGpu, a_recurrent_state_is_not_overwritten_while_a_fork_copies_it) {
  LevelRig rig({.blocks = {4, 3}, .with_state = true, .device = kGpu});
  const StreamHandle first = rig.device().make_stream();
  const StreamHandle second = rig.device().make_stream();
  auto parent = rig.started(2, 1, first);
  rig.device().launch(first, [at = rig.state(*parent)] { std::memset(at, 1, 64); });
  ASSERT_TRUE(parent->resize(2, 2));
  auto child = parent->fork();
  rig.device().hold(second);
  ASSERT_TRUE(child->resume(second));  // the copy waits in the stream
  int found = -1;
  rig.device().launch(second, [&found, at = rig.state(*child)] { found = int(at[0]); });
  ASSERT_TRUE(parent->resize(4));
  rig.device().launch(first, [at = rig.state(*parent)] { std::memset(at, 2, 64); });
  rig.device().release(second);
  rig.device().run_all();
  EXPECT_EQ(found, 1);
}

TEST(LevelsCpu, pages_that_nobody_holds_leave_before_held_ones_find_no_place) {
  LevelRig rig({.blocks = {3, 2}});
  auto low = rig->create_kv_cache({.priority = 1});  // leaves first, and is held
  ASSERT_TRUE(low->resume());
  ASSERT_TRUE(low->resize(8));
  rig.write(*low, 0, 8, 4);
  low->suspend();
  auto kept = rig->create_kv_cache({.priority = 90});
  ASSERT_TRUE(kept->resume());
  ASSERT_TRUE(kept->resize(4));
  kept->commit(LevelRig::tokens_from(0, 4));
  kept->close();  // droppable, worth more than what is held
  auto c = rig->create_kv_cache();
  ASSERT_TRUE(c->resume());
  ASSERT_TRUE(c->resize(8)) << LevelRig::why(*c);
  EXPECT_EQ(rig->probe_reuse(LevelRig::tokens_from(0, 4)), 0);
  c->close();
  ASSERT_TRUE(low->resume());
  EXPECT_THAT(*rig.read(*low, 0, 8), AllOf(SizeIs(8), Each(4)));
}

TEST(LevelsCpu, a_cache_that_fits_is_resumed_though_it_copies_from_a_page_beside_it) {
  LevelRig rig({.blocks = {2, 3}});
  auto cache = rig.started(6, 1);
  cache->commit(LevelRig::tokens_from(0, 6), true);
  cache->close();
  const auto prompt = LevelRig::tokens_from(0, 6);
  auto next = rig->create_kv_cache({.input_tokens = prompt});
  ASSERT_EQ(next->num_committed_tokens(), 6);
  ASSERT_TRUE(next->resume()) << LevelRig::why(*next);  // two blocks, and the source of the second
  EXPECT_THAT(*rig.read(*next, 0, 6), AllOf(SizeIs(6), Each(1)));
}

TEST(LevelsCpu, a_reader_of_a_shown_tail_does_not_keep_its_owner_from_committing) {
  LevelRig rig({.blocks = {8, 3}});
  auto owner = rig.started(8, 1);
  owner->commit(LevelRig::tokens_from(0, 2));
  auto twin = owner->fork();
  twin->close();  // shows the tail
  ASSERT_TRUE(owner->resize(8));
  rig.write(*owner, 2, 8, 3);
  const auto prompt = LevelRig::tokens_from(0, 2);
  auto reader = rig->create_kv_cache({.input_tokens = prompt});
  ASSERT_EQ(reader->num_committed_tokens(), 2);
  EXPECT_NO_THROW(owner->commit(LevelRig::tokens_from(2, 6)));
  ASSERT_TRUE(reader->resume());
  EXPECT_THAT(*rig.read(*reader, 0, 2), ElementsAre(1, 1));
}

TEST(LevelsGpu, a_batch_that_throws_leaves_the_caches_before_in_order) {
  LevelRig rig({.blocks = {3, 4}, .device = kGpu});
  const StreamHandle stream = rig.device().make_stream();
  auto full = rig.started(12, 9, stream);
  full->suspend();
  auto held = rig.started(4, 1, stream);
  held->suspend();
  auto a = rig->create_kv_cache();
  auto b = rig->create_kv_cache();
  ASSERT_TRUE(a->resume(stream));
  ASSERT_TRUE(b->resume(stream));
  rig.device().inject(FakeFault::kRefusedCopy, 1, 1);
  std::vector<KVCache*> caches{a.get(), b.get()};
  std::vector<uint8_t> results(2, 7);
  EXPECT_THROW(rig->resize_many(caches, std::vector<int32_t>{4, 4}, {}, results), OutOfMemory);
  EXPECT_THAT(results, ElementsAre(1, 0));
  EXPECT_EQ(a->capacity(), 4);
  EXPECT_EQ(b->capacity(), 0);
  rig.device().run_all();
}

TEST(LevelsCpu, a_prefetch_that_the_device_refuses_ends_and_is_not_complete) {
  LevelRig rig({.blocks = {4, 5}});
  auto a = rig.started(16, 1);
  a->suspend();
  rig.started(16, 2)->close();  // sends a down
  rig.device().inject(FakeFault::kRefusedCopy, 1);
  auto ticket = a->prefetch();
  EXPECT_TRUE(ticket.is_done());
  EXPECT_FALSE(ticket.is_complete());
  ASSERT_TRUE(a->resume());
  EXPECT_THAT(*rig.read(*a, 0, 16), AllOf(SizeIs(16), Each(1)));
}

TEST(LevelsCpu, a_copy_of_a_page_that_never_arrived_is_lost_too) {
  LevelRig rig({.blocks = {4, 5}, .device = {.type = DeviceType::kCuda}});
  const StreamHandle stream = rig.device().make_stream();
  auto parent = rig.started(2, 1, stream);
  ASSERT_TRUE(parent->resize(2, 2));
  parent->suspend();
  auto other = rig.started(16, 2, stream);  // sends the page down
  other->close();
  auto child = parent->fork();
  rig.device().inject(FakeFault::kFailedTask, 1);
  ASSERT_TRUE(child->resume(stream));  // copies it from where it has not arrived
  parent->close();
  rig.device().run_all();
  EXPECT_FALSE(child->resize(4));
  EXPECT_TRUE(child->is_lost());
}

}  // namespace
}  // namespace helicore::kv::testing
