// Levels that change their sizes while sequences use them.
#include "helicore/kv/level_sizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "kv/page_tables.h"
#include "kv/sizing_bench.h"

namespace helicore::kv::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(LevelSizer, growing_works_under_an_active_cache_and_moves_no_address) {
  SizingBench b(sizing_config({4}));
  auto a = b.start(16, 1);
  EXPECT_FALSE(a->resize(17));
  const uint64_t address = b.manager().mem_pool_base_address(0, "k");
  const ResizeResult result = b.manager().resize(0, 9 * kUnit);
  EXPECT_TRUE(result.done);
  EXPECT_EQ(result.quota, 9 * kUnit);
  EXPECT_THAT(result.slots.raw(), ElementsAre(9));
  EXPECT_EQ(b.manager().quota(0), 9 * kUnit);
  EXPECT_EQ(b.manager().mem_pool_base_address(0, "k"), address);
  EXPECT_EQ(b.manager().page_index_upper_bound(0, "k"), 9);
  EXPECT_EQ(b.manager().pool_group_descs()[0].num_slots, 9);
  ASSERT_TRUE(a->resize(36));
  EXPECT_EQ(b.wrong(*a, 1), "cache 0 layer 0 block 8") << "new blocks are not written yet";
  b.fill(*a, 1, 4);
  EXPECT_EQ(b.wrong(*a, 1), "");
}

TEST(LevelSizer, a_tail_that_was_never_used_goes_at_once) {
  SizingBench b(sizing_config({16}));
  auto a = b.start(8, 1);
  const ResizeResult result = b.manager().resize(0, 8 * kUnit);
  EXPECT_TRUE(result.done);
  EXPECT_EQ(b.ledger().num_bytes, 8 * kUnit);
  EXPECT_EQ(b.manager().page_index_upper_bound(0, "k"), 8);
  EXPECT_TRUE(a->resize(32));
  EXPECT_FALSE(a->resize(33));
}

TEST(LevelSizer, a_tail_that_was_used_and_left_goes_at_once) {
  SizingBench b(sizing_config({16}));
  auto a = b.start(8, 1);
  auto c = b.start(56, 2);
  c->close();
  EXPECT_TRUE(b.manager().resize(0, 4 * kUnit).done);
  EXPECT_EQ(b.ledger().num_bytes, 4 * kUnit);
  EXPECT_TRUE(a->resize(16));
  EXPECT_FALSE(a->resize(17));
  EXPECT_TRUE(b.manager().resize(0, 16 * kUnit).done);
  EXPECT_TRUE(a->resize(64)) << "slots that were given back come again";
}

TEST(LevelSizer, locked_pages_refuse_a_shrink_and_nothing_changes) {
  SizingBench b(sizing_config({8}));
  auto a = b.start(24, 1);
  const ResizeResult result = b.manager().resize(0, 4 * kUnit);
  EXPECT_FALSE(result.done);
  ASSERT_TRUE(result.reason);
  EXPECT_EQ(result.reason->needed, 2) << "two pages are in the way";
  EXPECT_THAT(result.slots.raw(), ElementsAre(8));
  EXPECT_EQ(result.quota, 8 * kUnit);
  EXPECT_FALSE(b.manager().is_resizing());
  EXPECT_TRUE(a->resize(32)) << "the old limit holds again";
  EXPECT_EQ(b.ledger().num_bytes, 8 * kUnit);
}

TEST(LevelSizer, best_effort_waits_for_locked_pages_and_hands_out_none_of_the_tail) {
  SizingBench b(sizing_config({8}));
  auto a = b.start(12, 1);
  auto c = b.start(12, 2);  // slots 3, 4, 5
  const ResizeResult result = b.manager().resize(0, 4 * kUnit, true);
  EXPECT_FALSE(result.done);
  EXPECT_THAT(result.slots.raw(), ElementsAre(4));
  EXPECT_THAT(result.pending.raw(), ElementsAre(4));
  EXPECT_EQ(result.quota, 8 * kUnit);
  ASSERT_TRUE(result.reason);
  EXPECT_TRUE(b.manager().is_resizing());
  EXPECT_EQ(b.manager().page_index_upper_bound(0, "k"), 8) << "slots 4 and 5 are in page tables";
  EXPECT_EQ(b.total(0), 4);
  EXPECT_FALSE(a->resize(16)) << "slots 6 and 7 are free, but on their way out";
  EXPECT_EQ(b.manager().maintain(100), 0);
  EXPECT_EQ(b.wrong(*c, 2), "");
  c->close();
  EXPECT_EQ(b.manager().maintain(100), 0) << "nothing was left to move";
  EXPECT_FALSE(b.manager().is_resizing());
  EXPECT_EQ(b.manager().quota(0), 4 * kUnit);
  EXPECT_EQ(b.ledger().num_bytes, 4 * kUnit);
  EXPECT_TRUE(a->resize(16));
  EXPECT_FALSE(a->resize(17));
}

TEST(LevelSizer, what_the_device_keeps_of_a_smaller_level_goes_back_to_the_system) {
  SizingBench b(sizing_config({8}));
  auto a = b.start(24, 1);
  EXPECT_FALSE(b.manager().resize(0, 4 * kUnit, true).done);
  EXPECT_EQ(b.device().num_trims(), 0) << "not while other groups may take it";
  a->close();
  (void)b.manager().maintain(100);
  EXPECT_FALSE(b.manager().is_resizing());
  EXPECT_EQ(b.device().num_trims(), 1);
}

TEST(LevelSizer, a_suspended_cache_moves_into_lower_slots_with_its_bytes) {
  SizingBench b(sizing_config({8}));
  auto a = b.start(16, 1);
  auto c = b.start(16, 2);
  EXPECT_THAT(table_of(*c), ElementsAre(4, 5, 6, 7));
  c->suspend();
  a->close();
  const ResizeResult result = b.manager().resize(0, 4 * kUnit);
  EXPECT_TRUE(result.done) << "waits for its own copies";
  ASSERT_TRUE(c->resume());
  for (int32_t slot : table_of(*c)) EXPECT_LT(slot, 4);
  EXPECT_EQ(b.wrong(*c, 2), "");
  EXPECT_THAT(b.device().violations(), IsEmpty());
}

TEST(LevelSizer, cached_pages_go_in_eviction_order_wherever_they_are) {
  SizingBench b(sizing_config({8}));
  for (int sequence : {1, 2}) {  // slots 0-3, then 4-7; sequence 1 is the older one
    auto cache = b.start(16, sequence);
    cache->commit(SizingBench::tokens(sequence, 16));
  }
  EXPECT_TRUE(b.manager().resize(0, 4 * kUnit).done);
  EXPECT_EQ(b.manager().probe_reuse(SizingBench::tokens(1, 16)), 0);
  EXPECT_EQ(b.manager().probe_reuse(SizingBench::tokens(2, 16)), 16) << "the newer one was moved";
  auto cache = b.manager().create_kv_cache({.input_tokens = SizingBench::tokens(2, 16)});
  ASSERT_TRUE(cache->resume());
  EXPECT_EQ(b.wrong(*cache, 2), "");
  EXPECT_THAT(b.device().violations(), IsEmpty());
}

TEST(LevelSizer, pages_in_the_middle_of_a_prefix_keep_their_places_in_the_queue) {
  SizingBench b(sizing_config({12}));
  auto a = b.start(8, 1);
  auto c = b.start(24, 2);
  c->commit(SizingBench::tokens(2, 24));
  c->close();
  a->close();
  EXPECT_TRUE(b.manager().resize(0, 6 * kUnit).done);
  EXPECT_EQ(b.manager().probe_reuse(SizingBench::tokens(2, 24)), 24);
  auto d = b.start(8, 3);  // takes the two oldest: the end of the prefix
  EXPECT_EQ(b.manager().probe_reuse(SizingBench::tokens(2, 24)), 16);
}

TEST(LevelSizer, held_pages_that_have_nowhere_to_go_refuse) {
  SizingBench b(sizing_config({8, 5}));
  auto a = b.start(32, 1);
  a->suspend();
  const ResizeResult result = b.manager().resize(0, 3 * kUnit);
  EXPECT_FALSE(result.done);
  ASSERT_TRUE(result.reason);
  EXPECT_EQ(result.reason->level, 1);
  EXPECT_FALSE(b.manager().is_resizing());
  EXPECT_EQ(b.manager().migration_stats().levels[1][LifeCycleId(0)].offloaded_pages, 0);
  EXPECT_TRUE(b.manager().resize(0, 4 * kUnit).done) << "four fit below, with one for passing";
  EXPECT_TRUE(b.manager().resize(0, 8 * kUnit).done);
  ASSERT_TRUE(a->resume());
  EXPECT_EQ(b.wrong(*a, 1), "");
}

TEST(LevelSizer, a_shrink_does_not_take_the_slot_through_which_pages_change_places) {
  SizingBench b(sizing_config({8, 5}));
  auto below = b.start(16, 1);
  below->suspend();
  auto above = b.start(32, 2);
  above->suspend();
  ASSERT_EQ(b.manager().storage_statistics(1)[0].free, 1) << "four are held there";
  const ResizeResult result = b.manager().resize(1, 4 * kUnit);
  EXPECT_FALSE(result.done) << "no page is beyond the new end, but no slot would be free";
  ASSERT_TRUE(result.reason);
  EXPECT_EQ(result.reason->level, 1);
  ASSERT_TRUE(below->resume());
  EXPECT_EQ(b.wrong(*below, 1), "");
}

TEST(LevelSizer, cached_pages_make_way_for_older_ones_that_are_held) {
  SizingBench b(sizing_config({8, 5}));
  auto below = b.start(16, 1);
  below->suspend();
  auto held = b.start(16, 2);
  held->suspend();
  auto cached = b.start(32 - 16, 3);  // pushes the first one down
  cached->commit(SizingBench::tokens(3, 16));
  cached->close();
  EXPECT_TRUE(b.manager().resize(0, 4 * kUnit).done);
  ASSERT_TRUE(held->resume());
  EXPECT_EQ(b.wrong(*held, 2), "");
  held->close();
  ASSERT_TRUE(below->resume());
  EXPECT_EQ(b.wrong(*below, 1), "");
}

TEST(LevelSizer, a_quota_below_the_floors_is_refused_with_the_least_one) {
  SizingBench b(sizing_config({8, 8}));
  const ResizeResult refused = b.manager().resize(1, kUnit);
  EXPECT_FALSE(refused.done);
  EXPECT_FALSE(refused.reason);
  EXPECT_EQ(refused.minimum, 2 * kUnit);
  EXPECT_EQ(refused.quota, 8 * kUnit);
  EXPECT_TRUE(b.manager().resize(1, kUnit + 1).done) << "quotas are rounded up";
  EXPECT_THROW((void)b.manager().resize(0, 0), InvalidArgument);
  EXPECT_THROW((void)b.manager().resize(0, 65 * kUnit), InvalidArgument);
  EXPECT_THROW((void)b.manager().resize(2, kUnit), InvalidArgument);
}

TEST(LevelSizer, below_the_floors_of_a_window_nothing_happens) {
  SizingBench b(sizing_config({16}, 8));
  const ResizeResult result = b.manager().resize(0, kUnit);
  EXPECT_FALSE(result.done);
  EXPECT_FALSE(result.reason);
  EXPECT_GT(result.minimum, kUnit);
  EXPECT_EQ(result.quota, 16 * kUnit);
  const ResizeResult least = b.manager().resize(0, result.minimum);
  EXPECT_TRUE(least.done);
  EXPECT_EQ(least.quota, result.minimum);
}

TEST(LevelSizer, a_step_that_may_touch_the_tail_is_waited_for) {
  SizingBench b(sizing_config({8}));
  const StreamHandle stream = b.device().make_step_stream();
  auto a = b.start(16, 1);
  auto c = b.manager().create_kv_cache();
  ASSERT_TRUE(c->resume(stream));
  ASSERT_TRUE(c->resize(16));
  const uint64_t step = b.device().submit_step(stream);
  c->close();
  const ResizeResult refused = b.manager().resize(0, 4 * kUnit);
  EXPECT_FALSE(refused.done);
  ASSERT_TRUE(refused.reason);
  EXPECT_GT(refused.reason->pending, 0);
  EXPECT_EQ(b.manager().storage_statistics(0)[0].pending, 4) << "they came back to the list";
  EXPECT_FALSE(b.manager().resize(0, 4 * kUnit, true).done);
  (void)b.manager().maintain(10);
  EXPECT_EQ(b.ledger().num_bytes, 8 * kUnit) << "memory was given back under a step";
  // Back to what it was: the slots of the step are not for anyone yet.
  EXPECT_TRUE(b.manager().resize(0, 8 * kUnit).done);
  EXPECT_FALSE(a->resize(20));
  EXPECT_EQ(a->last_failure()->pending, 4);
  EXPECT_FALSE(b.manager().resize(0, 4 * kUnit, true).done);
  b.device().complete_step(stream, step);
  (void)b.manager().maintain(10);
  EXPECT_FALSE(b.manager().is_resizing());
  EXPECT_EQ(b.ledger().num_bytes, 4 * kUnit);
}

TEST(LevelSizer, a_page_that_a_step_may_touch_is_not_moved_under_it) {
  SizingBench b(sizing_config({8}));
  const StreamHandle stream = b.device().make_step_stream();
  auto a = b.start(16, 1);
  auto c = b.manager().create_kv_cache();
  ASSERT_TRUE(c->resume(stream));
  ASSERT_TRUE(c->resize(16));
  b.fill(*c, 2, 0);
  const uint64_t step = b.device().submit_step(stream);
  c->suspend();
  a->close();
  EXPECT_FALSE(b.manager().resize(0, 4 * kUnit).done);
  EXPECT_FALSE(b.manager().resize(0, 4 * kUnit, true).done);
  EXPECT_EQ(b.manager().maintain(10), 0);
  b.device().complete_step(stream, step);
  EXPECT_EQ(b.manager().maintain(10), 4);
  b.device().run_all();
  (void)b.manager().maintain(10);
  EXPECT_FALSE(b.manager().is_resizing());
  ASSERT_TRUE(c->resume());
  EXPECT_EQ(b.wrong(*c, 2), "");
}

TEST(LevelSizer, copies_of_hotter_pages_in_the_tail_are_given_up) {
  SizingBench b(sizing_config({4, 9}));
  auto a = b.start(16, 1);
  a->commit(SizingBench::tokens(1, 16));
  a->suspend();
  auto c = b.start(16, 2);  // a goes down
  c->close();
  ASSERT_TRUE(a->resume());  // and up; copies stay
  EXPECT_EQ(b.manager().storage_statistics(1)[0].free, 9);
  EXPECT_TRUE(b.manager().resize(1, 2 * kUnit).done);
  EXPECT_EQ(b.ledger().num_bytes, 6 * kUnit);
  EXPECT_EQ(b.manager().storage_statistics(1)[0].total, 2);
  a->suspend();
  auto d = b.start(4, 3);
  EXPECT_FALSE(d->resize(8)) << "one slot of two is for pages in passing";
  d->close();
  ASSERT_TRUE(a->resume());
  EXPECT_EQ(b.wrong(*a, 1), "");
}

TEST(LevelSizer, memory_that_is_refused_changes_nothing) {
  for (int skip : {0, 1}) {
    auto config = sizing_config({16}, 8);
    config.initial_pool_ratio = {0.5, 0.5};
    SizingBench b(config);
    auto a = b.start(16, 1);
    const int64_t before = b.ledger().num_bytes;
    const int64_t full = b.total(0, 0);
    const int64_t windowed = b.total(0, 1);
    b.device().inject(FakeFault::kAllocation, 1, skip);
    EXPECT_THROW((void)b.manager().resize(0, 64 * kUnit), OutOfMemory);
    EXPECT_EQ(b.ledger().num_bytes, before) << "the pool that had grown was not rolled back";
    EXPECT_EQ(b.total(0, 0), full);
    EXPECT_EQ(b.total(0, 1), windowed);
    EXPECT_EQ(b.manager().quota(0), 16 * kUnit);
    EXPECT_EQ(b.wrong(*a, 1), "");
    EXPECT_TRUE(b.manager().resize(0, 64 * kUnit).done);
    EXPECT_GT(b.total(0, 0), full);
  }
}

TEST(LevelSizer, a_refused_copy_ends_the_shrink_and_the_level_stays) {
  SizingBench b(sizing_config({8}));
  auto a = b.start(16, 1);
  auto c = b.start(16, 2);
  c->suspend();
  a->close();
  b.device().inject(FakeFault::kRefusedCopy, 1);
  EXPECT_THROW((void)b.manager().resize(0, 4 * kUnit), OutOfMemory);
  EXPECT_FALSE(b.manager().is_resizing());
  EXPECT_EQ(b.total(0), 8);
  ASSERT_TRUE(c->resume());
  EXPECT_EQ(b.wrong(*c, 2), "");
  ASSERT_TRUE(c->resize(32));
}

TEST(LevelSizer, a_lost_copy_of_a_moved_page_is_told_to_its_owner) {
  SizingBench b(sizing_config({8}));
  auto a = b.start(16, 1);
  auto c = b.start(16, 2);
  c->suspend();
  a->close();
  b.device().inject(FakeFault::kFailedTask, 1);
  EXPECT_TRUE(b.manager().resize(0, 4 * kUnit).done);
  EXPECT_FALSE(c->resume());
  EXPECT_TRUE(c->is_lost());
}

TEST(LevelSizer, maintain_moves_no_more_pages_than_it_may) {
  SizingBench b(sizing_config({32}));
  auto a = b.start(16 * 4, 1);
  auto c = b.start(16 * 4, 2);
  EXPECT_FALSE(b.manager().resize(0, 16 * kUnit, true).done);
  a->close();
  EXPECT_EQ(b.manager().maintain(3), 0) << "all of them are locked";
  c->suspend();
  for (int moved : {3, 3, 3, 3, 3, 1, 0}) {
    EXPECT_EQ(b.manager().maintain(3), moved);
    b.device().run_all();
  }
  EXPECT_FALSE(b.manager().is_resizing());
  EXPECT_EQ(b.manager().maintain(3), 0);
  EXPECT_THROW((void)b.manager().maintain(0), InvalidArgument);
  ASSERT_TRUE(c->resume());
  EXPECT_EQ(b.wrong(*c, 2), "");
}

TEST(LevelSizer, maintain_pushes_pages_down_within_the_same_bound) {
  SizingBench b(sizing_config({16, 32}));
  auto a = b.start(64, 1);
  EXPECT_FALSE(b.manager().resize(0, 4 * kUnit, true).done);
  a->suspend();
  int64_t moved = 0;
  for (int i = 0; i < 40 && b.manager().is_resizing(); ++i) {
    const int64_t count = b.manager().maintain(2);
    EXPECT_LE(count, 2);
    moved += count;
    b.device().run_all();
  }
  EXPECT_FALSE(b.manager().is_resizing());
  EXPECT_GE(moved, 12);
  EXPECT_FALSE(a->resume());
  EXPECT_TRUE(b.manager().resize(0, 16 * kUnit).done);
  ASSERT_TRUE(a->resume());
  EXPECT_EQ(b.wrong(*a, 1), "");
}

TEST(LevelSizer, a_later_resize_takes_the_place_of_a_pending_one) {
  SizingBench b(sizing_config({8}));
  auto a = b.start(32, 1);
  EXPECT_FALSE(b.manager().resize(0, 2 * kUnit, true).done);
  const ResizeResult between = b.manager().resize(0, 6 * kUnit, true);
  EXPECT_THAT(between.slots.raw(), ElementsAre(6));
  EXPECT_FALSE(b.manager().resize(0, 3 * kUnit).done) << "without best effort it is refused";
  EXPECT_EQ(b.total(0), 6) << "and what was pending goes on";
  EXPECT_TRUE(b.manager().is_resizing());
  EXPECT_TRUE(b.manager().resize(0, 8 * kUnit).done);
  EXPECT_FALSE(b.manager().is_resizing());
  a->truncate(24);
  EXPECT_TRUE(b.manager().resize(0, 6 * kUnit).done);
  EXPECT_EQ(b.wrong(*a, 1), "");
}

// Three levels full of two suspended caches; every level shrinks; one of them fits; all comes back.
TEST(LevelSizer, every_level_shrinks_under_suspended_caches_and_comes_back) {
  SizingBench b(sizing_config({8, 5, 13}));
  auto a = b.start(32, 1);
  a->suspend();
  auto c = b.start(32, 2);
  c->suspend();
  auto d = b.start(32, 3);
  EXPECT_EQ(b.manager().storage_statistics(1)[0].free, 1);
  EXPECT_EQ(b.manager().storage_statistics(2)[0].free, 1);
  d->close();
  EXPECT_FALSE(b.manager().resize(1, 3 * kUnit).done) << "the disk is full";
  ASSERT_TRUE(c->resume());
  c->suspend();
  EXPECT_TRUE(b.manager().resize(1, 3 * kUnit).done);
  EXPECT_TRUE(b.manager().resize(0, 6 * kUnit).done);
  EXPECT_TRUE(b.manager().resize(2, 9 * kUnit).done);
  EXPECT_EQ(b.ledger().num_bytes, 18 * kUnit);
  EXPECT_FALSE(a->resume()) << "eight pages, six slots";
  EXPECT_FALSE(c->resume());
  EXPECT_TRUE(b.manager().resize(0, 8 * kUnit).done);
  ASSERT_TRUE(a->resume());
  EXPECT_EQ(b.wrong(*a, 1), "");
  EXPECT_FALSE(c->resume()) << "only one at a time";
  a->suspend();
  EXPECT_TRUE(b.manager().resize(0, 16 * kUnit).done);
  EXPECT_TRUE(b.manager().resize(1, 18 * kUnit).done);
  EXPECT_TRUE(b.manager().resize(2, 13 * kUnit).done);
  const auto before = b.manager().migration_stats().levels[2][LifeCycleId(0)].onboarded_pages;
  const auto on_disk = 13 - b.manager().storage_statistics(2)[0].free;
  PrefetchTicket first = a->prefetch(1);
  PrefetchTicket second = c->prefetch(1);
  for (int i = 0; i < 10; ++i) {
    b.device().run_all();
    (void)first.is_done();
    (void)second.is_done();
  }
  EXPECT_TRUE(first.is_complete());
  EXPECT_TRUE(second.is_complete());
  const auto after = b.manager().migration_stats().levels[2][LifeCycleId(0)].onboarded_pages;
  EXPECT_EQ(after - before, on_disk);
  ASSERT_TRUE(a->resume());
  ASSERT_TRUE(c->resume());
  EXPECT_EQ(b.wrong(*a, 1), "");
  EXPECT_EQ(b.wrong(*c, 2), "");
  EXPECT_THAT(b.device().violations(), IsEmpty());
}

// Under the thread sanitizer: sizes change in one thread while another one drives sequences.
TEST(LevelSizer, another_thread_may_resize) {
  KVCacheManager manager(sizing_config({64, 64}));
  std::atomic<bool> is_over{false};
  std::thread sizer([&] {
    for (int i = 0; !is_over; ++i) {
      (void)manager.resize(i % 2, (16 + 16 * (i % 5)) * kUnit, i % 3 > 0);
      (void)manager.maintain(4);
      (void)manager.page_index_upper_bound(0, "k");
      (void)manager.pool_group_descs();
      (void)manager.clamp_max_seq_len_for_mem(1, 1000);
    }
  });
  for (int i = 0; i < 300; ++i) {
    auto cache = manager.create_kv_cache({.input_tokens = SizingBench::tokens(i % 7, 16)});
    if (!cache->resume() || !cache->resize(40)) continue;
    const int32_t done = cache->num_committed_tokens();
    const auto tokens = SizingBench::tokens(i % 7, 40);
    cache->commit(std::span(tokens).subspan(static_cast<size_t>(done)));
    if (i % 2 == 0) cache->suspend();
  }
  is_over = true;
  sizer.join();
  Introspection::check(manager);
}

}  // namespace
}  // namespace helicore::kv::testing
