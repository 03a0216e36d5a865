#include "helicore/kv/kv_cache.h"

#include <gtest/gtest.h>

#include "helicore/core/error.h"
#include "helicore/kv/introspection.h"
#include "helicore/kv/kv_cache_manager.h"
#include "kv/fake_engine.h"
#include "kv/kv_configs.h"
#include "kv/page_tables.h"

namespace helicore::kv::testing {
namespace {

constexpr LifeCycleId kGroup{0};

// Runs `tokens` through a fresh sequence: match, resume, write what is missing, commit.
std::unique_ptr<KVCache> run_sequence(KVCacheManager& manager, const std::vector<TokenId>& tokens,
                                      const ReuseScope& scope = {}) {
  auto cache = manager.create_kv_cache({.reuse_scope = scope, .input_tokens = tokens});
  const auto start = static_cast<size_t>(cache->num_committed_tokens());
  EXPECT_TRUE(cache->resume());
  EXPECT_TRUE(cache->resize(static_cast<int64_t>(tokens.size())));
  FakeEngine(manager).write(*cache, tokens, start);
  cache->commit(std::span(tokens).subspan(start));
  return cache;
}

TEST(KVCache, goes_through_its_states_and_refuses_calls_of_other_states) {
  KVCacheManager manager(attention_config(4, 8));
  auto cache = manager.create_kv_cache();
  EXPECT_EQ(cache->status(), CacheStatus::kSuspended);
  EXPECT_THROW((void)cache->resize(4), LogicError);
  EXPECT_THROW(cache->suspend(), LogicError);
  EXPECT_THROW(cache->commit({}), LogicError);
  ASSERT_TRUE(cache->resume(42));
  EXPECT_EQ(cache->stream(), 42);
  EXPECT_THROW((void)cache->resume(), LogicError);
  cache->suspend();
  ASSERT_TRUE(cache->resume());
  EXPECT_EQ(cache->stream(), 42) << "a stream is kept";
  cache->stop_committing();
  cache->stop_committing();
  EXPECT_THROW(cache->commit({}), LogicError);
  cache->close();
  cache->close();
  EXPECT_EQ(cache->status(), CacheStatus::kClosed);
  EXPECT_EQ(cache->num_blocks(), 0);
  EXPECT_THROW((void)cache->resume(), LogicError);
  EXPECT_THROW(cache->stop_committing(), LogicError);
  EXPECT_TRUE(cache->base_page_indices(kGroup).empty());
}

TEST(KVCache, resize_checks_its_cursors_and_leaves_them_on_error) {
  KVCacheManager manager(attention_config(4, 8));
  auto cache = manager.create_kv_cache();
  ASSERT_TRUE(cache->resume());
  ASSERT_TRUE(cache->resize(10, 6));
  EXPECT_EQ(cache->num_blocks(), 3);
  EXPECT_THROW((void)cache->resize(10, 5), InvalidArgument) << "history never shrinks";
  EXPECT_THROW((void)cache->resize(5), InvalidArgument) << "capacity below history";
  EXPECT_THROW((void)cache->resize(-1), InvalidArgument);
  EXPECT_THROW((void)cache->resize(int64_t{1} << 31), InvalidArgument);
  EXPECT_EQ(cache->capacity(), 10);
  EXPECT_EQ(cache->history_length(), 6);
  ASSERT_TRUE(cache->resize(6));
  EXPECT_EQ(cache->num_blocks(), 2);
  ASSERT_TRUE(cache->resize(std::nullopt, 6));
}

TEST(KVCache, capacity_shrinks_one_token_at_a_time_and_frees_whole_blocks) {
  KVCacheManager manager(attention_config(4, 8));
  auto cache = manager.create_kv_cache();
  ASSERT_TRUE(cache->resume());
  ASSERT_TRUE(cache->resize(17));
  for (int32_t capacity = 16; capacity >= 0; --capacity) {
    ASSERT_TRUE(cache->resize(capacity));
    ASSERT_EQ(slots_in_use(manager), (capacity + 3) / 4);
    Introspection::check(manager);
  }
}

TEST(KVCache, no_room_is_a_value_with_a_reason_and_changes_nothing) {
  KVCacheManager manager(attention_config(4, 3));
  auto cache = manager.create_kv_cache();
  ASSERT_TRUE(cache->resume());
  ASSERT_TRUE(cache->resize(8));
  const auto before = table_of(*cache);
  EXPECT_FALSE(cache->resize(17));
  ASSERT_TRUE(cache->last_failure().has_value());
  EXPECT_EQ(*cache->last_failure(), (NoRoom{.needed = 3, .free = 1, .evictable = 0}));
  EXPECT_EQ(cache->capacity(), 8);
  EXPECT_EQ(table_of(*cache), before);
  ASSERT_TRUE(cache->resize(12));
  EXPECT_FALSE(cache->last_failure().has_value());
  Introspection::check(manager);
}

TEST(KVCache, try_resize_does_what_resize_does_when_nothing_can_block) {
  KVCacheManager manager(attention_config(4, 3));
  auto cache = manager.create_kv_cache();
  EXPECT_THROW((void)cache->try_resize(4), LogicError);
  ASSERT_TRUE(cache->resume());
  EXPECT_EQ(cache->try_resize(5), true);
  EXPECT_EQ(cache->num_blocks(), 2);
  EXPECT_EQ(cache->try_resize(8, 3), true) << "within the last block";
  EXPECT_EQ(cache->history_length(), 3);
  EXPECT_EQ(cache->try_resize(17), false);
  EXPECT_EQ(*cache->last_failure(), (NoRoom{.needed = 3, .free = 1, .evictable = 0}));
  EXPECT_EQ(cache->capacity(), 8);
  EXPECT_THROW((void)cache->try_resize(2), InvalidArgument);
  EXPECT_EQ(cache->try_resize(12), true);
  EXPECT_FALSE(cache->last_failure().has_value());
  Introspection::check(manager);
}

TEST(KVCache, try_resize_leaves_pages_that_a_step_still_writes_to_resize) {
  KVCacheManager manager(attention_config(4, 2));
  const StreamHandle steps = manager.make_step_stream();
  auto first = manager.create_kv_cache();
  ASSERT_TRUE(first->resume(steps) && first->resize(8));
  const uint64_t step = manager.submit_step(steps);
  first->close();
  auto second = manager.create_kv_cache();
  ASSERT_TRUE(second->resume());
  EXPECT_EQ(second->try_resize(4), false) << "nothing is free until the step ends";
  manager.complete_step(steps, step);
  EXPECT_TRUE(second->try_resize(4).value_or(true) && second->resize(4));
  EXPECT_EQ(second->num_blocks(), 1);
}

TEST(KVCache, commit_must_fit_into_the_capacity_and_refuses_negative_tokens) {
  KVCacheManager manager(attention_config(4, 8));
  auto cache = manager.create_kv_cache();
  ASSERT_TRUE(cache->resume());
  ASSERT_TRUE(cache->resize(5));
  EXPECT_THROW(cache->commit(iota_tokens(6)), InvalidArgument);
  EXPECT_THROW(cache->commit(std::vector<TokenId>{1, 2, -3}), InvalidArgument);
  EXPECT_EQ(cache->num_committed_tokens(), 0);
  cache->commit(iota_tokens(5));
  EXPECT_EQ(cache->history_length(), 5) << "history follows the committed length";
  EXPECT_EQ(cache->committed_tokens(), iota_tokens(5));
  cache->commit({});
  EXPECT_EQ(cache->num_committed_tokens(), 5);
}

TEST(KVCache, commits_of_any_piece_size_make_the_same_tree) {
  const auto tokens = iota_tokens(23);
  for (size_t piece : {1u, 2u, 3u, 4u, 5u, 8u, 23u}) {
    KVCacheManager manager(attention_config(4, 16));
    auto cache = manager.create_kv_cache();
    ASSERT_TRUE(cache->resume());
    ASSERT_TRUE(cache->resize(23));
    FakeEngine(manager).write(*cache, tokens, 0);
    for (size_t at = 0; at < tokens.size(); at += piece) {
      cache->commit(std::span(tokens).subspan(at, std::min(piece, tokens.size() - at)));
      ASSERT_EQ(manager.probe_reuse(tokens),
                static_cast<int32_t>((at + piece > 23 ? 23 : at + piece) / 4 * 4));
    }
    EXPECT_EQ(cache->committed_tokens(), tokens);
    cache->close();
    EXPECT_EQ(manager.probe_reuse(tokens), 23) << "close publishes the partial tail";
    Introspection::check(manager);
  }
}

TEST(KVCache, a_full_block_that_matches_in_part_is_copied_and_never_written) {
  KVCacheManager manager(attention_config(4, 8, 2));
  const FakeEngine engine(manager);
  const std::vector<TokenId> first{1, 2, 3, 4};
  auto owner = run_sequence(manager, first);
  const int32_t shared = table_of(*owner)[0];

  const std::vector<TokenId> second{1, 2, 9};
  auto other = manager.create_kv_cache({.input_tokens = second});
  EXPECT_EQ(other->num_committed_tokens(), 2);
  ASSERT_TRUE(other->resume());
  EXPECT_NE(table_of(*other)[0], shared);
  ASSERT_TRUE(other->resize(4));
  engine.write(*other, second, 2);
  other->commit(std::span(second).subspan(2));
  EXPECT_EQ(engine.check(*other, second), std::nullopt) << "the copied rows";
  EXPECT_EQ(engine.check(*owner, first), std::nullopt) << "the shared block was written";

  // The same with nobody holding the block.
  owner->close();
  other->close();
  auto again = manager.create_kv_cache({.input_tokens = first});
  EXPECT_EQ(again->num_committed_tokens(), 4);
  ASSERT_TRUE(again->resume());
  EXPECT_EQ(engine.check(*again, first), std::nullopt);
}

TEST(KVCache, growing_while_committing_never_evicts_the_own_lineage) {
  KVCacheManager manager(attention_config(1, 3, 1, 4096));
  ASSERT_EQ(manager.num_total_blocks(), 3);
  const FakeEngine engine(manager);
  run_sequence(manager, {50, 51})->close();  // evictable neighbours
  auto cache = manager.create_kv_cache();
  ASSERT_TRUE(cache->resume());
  std::vector<TokenId> tokens;
  int32_t refused = 0;
  for (TokenId token = 0; token < 8; ++token) {
    if (!cache->resize(token + 1)) {
      ++refused;
      continue;
    }
    tokens.push_back(token);
    engine.write(*cache, tokens, tokens.size() - 1);
    cache->commit(std::span(tokens).last(1));
    ASSERT_EQ(engine.check(*cache, tokens), std::nullopt);
    Introspection::check(manager);
  }
  EXPECT_EQ(tokens.size(), 3u);
  EXPECT_EQ(refused, 5);
  EXPECT_EQ(manager.probe_reuse(tokens), 3);
  EXPECT_EQ(manager.probe_reuse(std::vector<TokenId>{50, 51}), 0) << "the neighbours went";
}

TEST(KVCache, suspended_sequences_keep_their_pages_and_all_resume_without_another_level) {
  KVCacheManager manager(attention_config(4, 4));
  const FakeEngine engine(manager);
  auto a = run_sequence(manager, iota_tokens(8));
  auto b = run_sequence(manager, iota_tokens(8, 100));
  a->suspend();
  b->suspend();
  EXPECT_EQ(table_of(*a), (std::vector<int32_t>{kBadPageIndex, kBadPageIndex}));
  EXPECT_EQ(manager.storage_statistics()[0].available(), 0) << "held pages are not given away";
  ASSERT_TRUE(b->resume());
  ASSERT_TRUE(a->resume());
  EXPECT_EQ(engine.check(*a, iota_tokens(8)), std::nullopt);
  EXPECT_EQ(engine.check(*b, iota_tokens(8, 100)), std::nullopt);
}

TEST(KVCache, a_twin_adopts_the_first_block_and_gives_its_own_back) {
  KVCacheManager manager(attention_config(4, 8));
  const FakeEngine engine(manager);
  const auto tokens = iota_tokens(4);
  auto a = manager.create_kv_cache({.input_tokens = tokens});
  auto b = manager.create_kv_cache({.input_tokens = tokens});
  for (KVCache* cache : {a.get(), b.get()}) {
    ASSERT_TRUE(cache->resume());
    ASSERT_TRUE(cache->resize(5));
    engine.write(*cache, tokens, 0);
  }
  a->commit(tokens);
  EXPECT_NE(table_of(*a), table_of(*b));
  const int32_t tail = table_of(*b)[1];
  b->commit(tokens);
  EXPECT_EQ(table_of(*a)[0], table_of(*b)[0]);
  EXPECT_EQ(table_of(*b)[1], tail);
  EXPECT_EQ(manager.stats().rebased_blocks, 1u);
  EXPECT_EQ(slots_in_use(manager), 3);
  a->close();
  EXPECT_EQ(engine.check(*b, tokens), std::nullopt);
  Introspection::check(manager);
}

TEST(KVCache, the_owner_may_go_on_writing_behind_a_published_tail) {
  KVCacheManager manager(attention_config(4, 8));
  const FakeEngine engine(manager);
  const auto tokens = iota_tokens(6);
  auto owner = run_sequence(manager, tokens);
  owner->stop_committing();
  EXPECT_EQ(manager.probe_reuse(iota_tokens(9)), 6);
  auto reader = manager.create_kv_cache({.input_tokens = tokens});
  ASSERT_TRUE(owner->resize(8));
  std::vector<TokenId> longer = tokens;
  longer.insert(longer.end(), {77, 78});
  engine.write(*owner, longer, 6);
  ASSERT_TRUE(reader->resume());
  EXPECT_EQ(engine.check(*reader, tokens), std::nullopt);
}

TEST(KVCache, a_longer_block_replaces_the_partial_one_that_others_still_hold) {
  KVCacheManager manager(attention_config(4, 8));
  const FakeEngine engine(manager);
  const std::vector<TokenId> part{1, 2};
  run_sequence(manager, part)->close();
  auto holder = manager.create_kv_cache({.input_tokens = part});
  auto longer = run_sequence(manager, {1, 2, 3, 4});
  Introspection::check(manager);
  EXPECT_EQ(manager.probe_reuse(std::vector<TokenId>{1, 2, 3, 4}), 4);
  ASSERT_TRUE(holder->resume());
  EXPECT_EQ(engine.check(*holder, part), std::nullopt);
  holder->close();
  longer->close();
  Introspection::check(manager);
  EXPECT_EQ(slots_in_use(manager), 0);
}

TEST(KVCache, page_tables_may_live_in_a_row_of_the_caller) {
  KVCacheManager manager(attention_config(4, 8));
  auto cache = manager.create_kv_cache();
  ASSERT_TRUE(cache->resume());
  ASSERT_TRUE(cache->resize(6));
  const auto own = table_of(*cache);
  std::vector<int32_t> row(5, 12345);
  cache->set_base_page_index_buf(0, kGroup, std::span(row).first(4));
  EXPECT_EQ(row, (std::vector<int32_t>{own[0], own[1], kBadPageIndex, kBadPageIndex, 12345}));
  ASSERT_TRUE(cache->resize(16));
  EXPECT_EQ(std::count(row.begin(), row.begin() + 4, kBadPageIndex), 0);
  ASSERT_TRUE(cache->resize(5));
  EXPECT_EQ(row[2], kBadPageIndex);
  EXPECT_EQ(row[3], kBadPageIndex);
  EXPECT_EQ(row[4], 12345) << "nothing is written past the row";
  cache->suspend();
  EXPECT_EQ(row[0], kBadPageIndex);
  ASSERT_TRUE(cache->resume());
  EXPECT_EQ(row[0], kBadPageIndex) << "a suspended cache lets the row go";
  EXPECT_EQ(table_of(*cache), own);
}

TEST(KVCache, a_row_that_is_too_short_is_refused_before_anything_happens) {
  KVCacheManager manager(attention_config(4, 8));
  auto cache = manager.create_kv_cache();
  ASSERT_TRUE(cache->resume());
  ASSERT_TRUE(cache->resize(8));
  std::vector<int32_t> row(3);
  EXPECT_THROW(cache->set_base_page_index_buf(0, kGroup, std::span(row).first(1)), InvalidArgument);
  cache->set_base_page_index_buf(0, kGroup, row);
  EXPECT_THROW((void)cache->resize(13), InvalidArgument);
  EXPECT_EQ(cache->capacity(), 8);
  cache->set_base_page_index_buf(0, kGroup, std::nullopt);
  EXPECT_TRUE(cache->resize(13));
  EXPECT_THROW((void)cache->base_page_indices(kGroup, 1), InvalidArgument);
  EXPECT_THROW((void)cache->base_page_indices(LifeCycleId(1)), InvalidArgument);
  EXPECT_THROW((void)cache->base_page_indices(LifeCycleId(-1)), InvalidArgument);
}

TEST(KVCache, aggregated_indices_are_there_while_suspended) {
  KVCacheManager manager(attention_config(4, 8));
  auto cache = run_sequence(manager, iota_tokens(8));
  const auto active = table_of(*cache);
  cache->suspend();
  EXPECT_EQ(cache->aggregated_page_indices(kGroup, 0, true), active);
}

TEST(KVCache, creation_with_no_tokens_or_one_token_is_an_empty_match) {
  KVCacheManager manager(attention_config(4, 8));
  run_sequence(manager, {7})->close();
  EXPECT_EQ(manager.create_kv_cache()->num_committed_tokens(), 0);
  EXPECT_EQ(manager.create_kv_cache({.input_tokens = iota_tokens(1)})->capacity(), 0);
  const std::vector<TokenId> seven{7};
  auto hit = manager.create_kv_cache({.input_tokens = seven});
  EXPECT_EQ(hit->num_committed_tokens(), 1);
  EXPECT_EQ(hit->num_blocks(), 1);
}

TEST(KVCache, a_cache_that_was_never_resumed_closes_without_publishing) {
  KVCacheManager manager(attention_config(4, 8));
  run_sequence(manager, iota_tokens(6))->close();
  const auto before = manager.storage_statistics();
  manager.create_kv_cache({.input_tokens = iota_tokens(5)})->close();
  EXPECT_EQ(manager.storage_statistics(), before);
  Introspection::check(manager);
}

TEST(KVCache, is_end_stops_committing_and_publishes_the_tail) {
  KVCacheManager manager(attention_config(4, 8));
  auto cache = manager.create_kv_cache();
  ASSERT_TRUE(cache->resume());
  ASSERT_TRUE(cache->resize(6));
  cache->commit(iota_tokens(6), true);
  EXPECT_EQ(cache->commit_state(), CommitState::kUserStop);
  EXPECT_EQ(manager.probe_reuse(iota_tokens(6)), 6);
}

TEST(KVCache, the_worked_example_of_the_design_document) {
  KVCacheManager manager(attention_config(4, 6));
  ASSERT_EQ(manager.num_total_blocks(), 6);
  auto a = manager.create_kv_cache({.input_tokens = iota_tokens(10)});
  EXPECT_EQ(a->num_committed_tokens(), 0);
  ASSERT_TRUE(a->resume() && a->resize(11));
  EXPECT_EQ(table_of(*a), (std::vector<int32_t>{0, 1, 2}));
  a->commit(iota_tokens(10));
  ASSERT_TRUE(a->resize(12));
  a->commit(iota_tokens(1, 10));
  a->close();
  EXPECT_EQ(manager.storage_statistics()[0].free, 3);
  EXPECT_EQ(manager.storage_statistics()[0].evictable, 3);

  std::vector<TokenId> prompt = iota_tokens(7);
  prompt.push_back(99);
  auto b = manager.create_kv_cache({.input_tokens = prompt});
  EXPECT_EQ(b->num_committed_tokens(), 7);
  ASSERT_TRUE(b->resume());
  EXPECT_EQ(table_of(*b), (std::vector<int32_t>{0, 3}));
  ASSERT_TRUE(b->resize(8));
  b->commit(std::span(prompt).last(1));

  auto c = manager.create_kv_cache();
  ASSERT_TRUE(c->resume() && c->resize(16));
  EXPECT_EQ(table_of(*c), (std::vector<int32_t>{2, 1, 4, 5}));
  EXPECT_FALSE(c->resize(17));
  EXPECT_EQ(*c->last_failure(), (NoRoom{.needed = 1, .free = 0, .evictable = 0}));
}

TEST(KVCacheStream, changes_only_when_no_step_of_the_old_one_runs) {
  KVCacheManager manager(attention_config(4, 64));
  const StreamHandle steps = manager.make_step_stream();
  auto cache = manager.create_kv_cache();
  cache->set_stream(7);
  ASSERT_TRUE(cache->resume(steps));
  const uint64_t step = manager.submit_step(steps);
  EXPECT_THROW(cache->set_stream(0), LogicError);
  EXPECT_EQ(cache->stream(), steps);
  cache->set_stream(steps);
  manager.complete_step(steps, step);
  cache->set_stream(0);
  EXPECT_EQ(cache->stream(), 0);
  cache->set_stream(steps);
  (void)manager.submit_step(steps);
  cache->suspend();
  cache->set_stream(0);
  EXPECT_EQ(cache->stream(), 0) << "suspended pages have their fence";
}

}  // namespace
}  // namespace helicore::kv::testing
