// Rewinding and forking.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "helicore/core/error.h"
#include "helicore/kv/introspection.h"
#include "helicore/kv/kv_cache_manager.h"
#include "kv/fake_engine.h"
#include "kv/kv_configs.h"
#include "kv/page_tables.h"

namespace helicore::kv::testing {
namespace {

using ::testing::HasSubstr;

constexpr LifeCycleId kGroup{0};

// An active cache with `committed` of `tokens` committed and all of them written as history.
std::unique_ptr<KVCache> start(KVCacheManager& manager, const std::vector<TokenId>& tokens,
                               size_t committed) {
  auto cache = manager.create_kv_cache();
  const auto length = static_cast<int64_t>(tokens.size());
  EXPECT_TRUE(cache->resume() && cache->resize(length));
  FakeEngine(manager).write(*cache, tokens, 0);
  EXPECT_TRUE(cache->resize(length, length));
  cache->commit(std::span(tokens).first(committed));
  return cache;
}

// Writes and commits `suffix` behind `tokens`, as a step does.
void go_on(KVCacheManager& manager, KVCache& cache, std::vector<TokenId>& tokens,
           const std::vector<TokenId>& suffix) {
  const size_t done = tokens.size();
  tokens.insert(tokens.end(), suffix.begin(), suffix.end());
  ASSERT_TRUE(cache.resize(static_cast<int64_t>(tokens.size())));
  FakeEngine(manager).write(cache, tokens, done);
  const auto committed = static_cast<size_t>(cache.num_committed_tokens());
  cache.commit(std::span(tokens).subspan(committed));
}

TEST(Truncate, rejected_tokens_give_their_blocks_back_across_page_borders) {
  KVCacheManager manager(attention_config(4, 8));
  for (int32_t end = 6; end <= 19; ++end) {
    std::vector<int32_t> row(6, 777);
    auto cache = start(manager, iota_tokens(19), 6);
    cache->set_base_page_index_buf(0, kGroup, std::span(row).first(5));
    const auto before = row;
    cache->truncate(end);
    EXPECT_EQ(cache->capacity(), end);
    EXPECT_EQ(cache->history_length(), end);
    EXPECT_EQ(cache->num_committed_tokens(), 6);
    const auto blocks = static_cast<size_t>((end + 3) / 4);
    EXPECT_EQ(slots_in_use(manager), static_cast<int64_t>(blocks));
    for (size_t b = 0; b < 5; ++b) {
      EXPECT_EQ(row[b], b < blocks ? before[b] : kBadPageIndex) << "end " << end;
    }
    EXPECT_EQ(row[5], 777) << "nothing is written past the row";
    Introspection::check(manager);
    cache->set_base_page_index_buf(0, kGroup, std::nullopt);
    std::vector<TokenId> tokens = iota_tokens(end);
    go_on(manager, *cache, tokens, {500, 501, 502});
    EXPECT_EQ(FakeEngine(manager).check(*cache, tokens), std::nullopt);
  }
}

TEST(Truncate, keeps_a_history_that_is_shorter_and_works_while_suspended) {
  KVCacheManager manager(attention_config(4, 8));
  auto cache = manager.create_kv_cache();
  ASSERT_TRUE(cache->resume() && cache->resize(20, 5));
  cache->truncate(9);
  EXPECT_EQ(cache->history_length(), 5);
  cache->suspend();
  cache->truncate(4);
  EXPECT_EQ(cache->history_length(), 4);
  EXPECT_EQ(slots_in_use(manager), 1);
  cache->truncate(0);
  EXPECT_EQ(slots_in_use(manager), 0);
  ASSERT_TRUE(cache->resume());
  EXPECT_TRUE(table_of(*cache).empty());
}

TEST(Truncate, refuses_committed_tokens_and_growth_and_names_the_argument) {
  KVCacheManager manager(attention_config(4, 8));
  auto cache = start(manager, iota_tokens(10), 6);
  for (int64_t bad : {int64_t{-1}, int64_t{5}, int64_t{11}, int64_t{1} << 32}) {
    try {
      cache->truncate(bad);
      FAIL() << bad;
    } catch (const InvalidArgument& error) {
      EXPECT_THAT(error.what(), HasSubstr("num_tokens must be in"));
      EXPECT_THAT(error.what(), HasSubstr("[6, 10], got " + std::to_string(bad)));
    }
  }
  EXPECT_EQ(cache->capacity(), 10);
  cache->close();
  EXPECT_THROW(cache->truncate(0), LogicError);
}

TEST(Truncate, many_at_once_is_all_or_nothing) {
  KVCacheManager manager(attention_config(4, 16));
  auto a = start(manager, iota_tokens(10), 2);
  auto b = start(manager, iota_tokens(12, 100), 8);
  const std::vector<KVCache*> caches{a.get(), b.get()};
  EXPECT_THROW(manager.truncate_many(caches, std::vector<int32_t>{3, 7}), InvalidArgument);
  EXPECT_THROW(manager.truncate_many(caches, std::vector<int32_t>{3}), InvalidArgument);
  EXPECT_THROW(
      manager.truncate_many(std::vector<KVCache*>{a.get(), a.get()}, std::vector<int32_t>{3, 3}),
      InvalidArgument);
  EXPECT_EQ(a->capacity(), 10);
  manager.truncate_many(caches, std::vector<int32_t>{3, 8});
  EXPECT_EQ(a->capacity(), 3);
  EXPECT_EQ(b->capacity(), 8);
  EXPECT_EQ(slots_in_use(manager), 3);
  manager.truncate_many({}, {});
}

TEST(Fork, shares_every_page_and_copies_the_tail_when_one_writes) {
  KVCacheManager manager(attention_config(4, 16, 2));
  const FakeEngine engine(manager);
  std::vector<TokenId> left = iota_tokens(10);
  std::vector<TokenId> right = left;
  auto parent = start(manager, left, 10);
  ASSERT_TRUE(parent->resize(13)) << "a reserved block is not shared";
  auto child = parent->fork(99);
  EXPECT_EQ(child->id(), 99);
  EXPECT_EQ(child->status(), CacheStatus::kSuspended);
  EXPECT_EQ(child->committed_tokens(), left);
  EXPECT_EQ(child->capacity(), 10);
  EXPECT_EQ(slots_in_use(manager), 4) << "a fork takes no page";
  Introspection::check(manager);
  ASSERT_TRUE(child->resume());
  EXPECT_EQ(slots_in_use(manager), 5) << "the tail was copied";
  EXPECT_EQ(table_of(*child)[0], table_of(*parent)[0]);
  EXPECT_NE(table_of(*child)[2], table_of(*parent)[2]);
  const auto before = table_of(*parent);
  go_on(manager, *parent, left, {50, 51, 52});
  EXPECT_EQ(table_of(*parent), before) << "the last holder writes in place";
  go_on(manager, *child, right, {60, 61, 62});
  EXPECT_EQ(engine.check(*parent, left), std::nullopt);
  EXPECT_EQ(engine.check(*child, right), std::nullopt);
  EXPECT_EQ(manager.stats().copied_blocks, 1u);
  EXPECT_EQ(manager.stats().num_forks, 1u);
  parent->close();
  child->close();
  EXPECT_EQ(slots_in_use(manager), 0);
  EXPECT_EQ(manager.probe_reuse(left), 13);
  EXPECT_EQ(manager.probe_reuse(right), 13);
  Introspection::check(manager);
}

TEST(Fork, an_active_parent_gets_a_copy_at_its_next_resize_and_its_table_follows) {
  KVCacheManager manager(attention_config(4, 16));
  std::vector<TokenId> tokens = iota_tokens(6);
  std::vector<int32_t> row(4);
  auto parent = start(manager, tokens, 6);
  parent->set_base_page_index_buf(0, kGroup, row);
  const auto before = row;
  auto child = parent->fork();
  ASSERT_TRUE(parent->resize(7)) << "inside the block";
  EXPECT_EQ(row[0], before[0]);
  EXPECT_NE(row[1], before[1]);
  ASSERT_TRUE(child->resume());
  EXPECT_EQ(table_of(*child)[1], before[1]);
  EXPECT_EQ(FakeEngine(manager).check(*parent, tokens), std::nullopt);
  EXPECT_EQ(FakeEngine(manager).check(*child, tokens), std::nullopt);
}

TEST(Fork, uncommitted_blocks_are_shared_by_count_and_either_may_commit_them) {
  KVCacheManager manager(attention_config(4, 16));
  const FakeEngine engine(manager);
  std::vector<TokenId> tokens = iota_tokens(13);
  auto parent = start(manager, tokens, 2);
  auto child = parent->fork();
  ASSERT_TRUE(child->resume());
  EXPECT_EQ(slots_in_use(manager), 5) << "only the tail differs";
  child->commit(std::span(tokens).subspan(2));
  EXPECT_EQ(manager.probe_reuse(tokens), 12);
  const auto mine = table_of(*parent), theirs = table_of(*child);
  EXPECT_TRUE(std::equal(mine.begin(), mine.begin() + 3, theirs.begin()));
  parent->commit(std::span(tokens).subspan(2));
  EXPECT_EQ(manager.stats().rebased_blocks, 0u) << "they are the same pages";
  child->close();
  Introspection::check(manager);
  std::vector<TokenId> longer = tokens;
  go_on(manager, *parent, longer, {70, 71, 72, 73});
  EXPECT_EQ(engine.check(*parent, longer), std::nullopt);
}

TEST(Fork, rows_that_a_fork_shares_are_not_committed_unwritten_nor_with_other_tokens) {
  KVCacheManager manager(attention_config(4, 16));
  const auto tokens = iota_tokens(9);
  auto parent = start(manager, tokens, 2);
  ASSERT_TRUE(parent->resize(12));
  auto child = parent->fork();
  EXPECT_THROW(parent->commit(iota_tokens(8, 2)), LogicError) << "row 9 is shared";
  EXPECT_EQ(parent->num_committed_tokens(), 2);
  parent->commit(std::span(tokens).subspan(2));
  ASSERT_TRUE(child->resume());
  EXPECT_THROW(child->commit(iota_tokens(6, 40)), InvalidArgument);
  EXPECT_EQ(child->num_committed_tokens(), 2);
  std::vector<TokenId> second_block = {2, 3, 90, 91, 92, 93};
  EXPECT_THROW(child->commit(second_block), InvalidArgument);
  const std::vector<KVCache*> caches{child.get()};
  EXPECT_THROW(manager.commit_many(caches, second_block, std::vector<int32_t>{6}), InvalidArgument);
  child->commit(std::span(tokens).subspan(2));
  EXPECT_EQ(child->committed_tokens(), tokens);
  Introspection::check(manager);
}

TEST(Fork, a_rewound_sibling_writes_its_own_copies_of_full_blocks) {
  KVCacheManager manager(attention_config(4, 16));
  const FakeEngine engine(manager);
  const auto tokens = iota_tokens(12);
  auto parent = start(manager, tokens, 2);
  auto child = parent->fork();
  ASSERT_TRUE(child->resume());
  EXPECT_EQ(slots_in_use(manager), 3) << "nothing partial, nothing to copy";
  child->truncate(5);
  std::vector<TokenId> other = iota_tokens(5);
  go_on(manager, *child, other, {80, 81, 82, 83});
  EXPECT_EQ(engine.check(*child, other), std::nullopt);
  EXPECT_EQ(engine.check(*parent, tokens), std::nullopt);
  parent->commit(std::span(tokens).subspan(2));
  EXPECT_EQ(table_of(*parent)[0], table_of(*child)[0]);
  EXPECT_NE(table_of(*parent)[1], table_of(*child)[1]);
  Introspection::check(manager);
}

TEST(Fork, no_room_for_the_copy_is_a_value_and_changes_nothing) {
  KVCacheManager manager(attention_config(4, 2));
  const auto tokens = iota_tokens(6);
  auto parent = start(manager, tokens, 6);
  auto child = parent->fork();
  EXPECT_FALSE(child->resume());
  EXPECT_EQ(*child->last_failure(), (NoRoom{.needed = 1, .free = 0, .evictable = 0}));
  const auto before = table_of(*parent);
  EXPECT_FALSE(parent->resize(7));
  EXPECT_EQ(table_of(*parent), before);
  EXPECT_EQ(parent->capacity(), 6);
  Introspection::check(manager);
  child->close();
  EXPECT_TRUE(parent->resize(7)) << "alone again";
  EXPECT_EQ(table_of(*parent), before) << "it writes behind what the fork published";
  parent->commit(iota_tokens(1, 6));
  parent->close();
  EXPECT_EQ(manager.probe_reuse(iota_tokens(8)), 7) << "a longer part replaced the fork's";
  Introspection::check(manager);
}

TEST(Fork, rows_that_a_closed_fork_published_are_copied_before_they_are_rewritten) {
  KVCacheManager manager(attention_config(4, 8));
  const FakeEngine engine(manager);
  const auto tokens = iota_tokens(3);
  auto parent = start(manager, tokens, 1);
  auto child = parent->fork();
  parent->commit(std::span(tokens).subspan(1));
  parent->close();
  ASSERT_TRUE(child->resume());
  child->truncate(2);
  std::vector<TokenId> other = iota_tokens(2);
  go_on(manager, *child, other, {90, 91});
  EXPECT_EQ(engine.check(*child, other), std::nullopt);
  auto reader = manager.create_kv_cache({.input_tokens = tokens});
  ASSERT_EQ(reader->num_committed_tokens(), 3);
  ASSERT_TRUE(reader->resume());
  EXPECT_EQ(engine.check(*reader, tokens), std::nullopt);
}

TEST(Fork, forks_of_forks_close_in_any_order) {
  std::vector<size_t> order{0, 1, 2, 3};
  do {
    KVCacheManager manager(attention_config(4, 24));
    std::vector<std::vector<TokenId>> tokens(4, iota_tokens(7));
    std::vector<std::unique_ptr<KVCache>> caches;
    caches.push_back(start(manager, tokens[0], 3));
    caches.push_back(caches[0]->fork());
    caches.push_back(caches[1]->fork());  // of a suspended one
    caches.push_back(caches[0]->fork());
    EXPECT_EQ(slots_in_use(manager), 2);
    for (size_t i : order) {
      KVCache& cache = *caches[i];
      ASSERT_TRUE(cache.is_active() || cache.resume());
      go_on(manager, cache, tokens[i], iota_tokens(3, static_cast<int32_t>(100 * (i + 1))));
      EXPECT_EQ(FakeEngine(manager).check(cache, tokens[i]), std::nullopt);
      Introspection::check(manager);
      if (i % 2 == 0) cache.close();
    }
    for (size_t i : order) caches[i]->close();
    EXPECT_EQ(slots_in_use(manager), 0);
    Introspection::check(manager);
    for (const auto& each : tokens) EXPECT_EQ(manager.probe_reuse(each), 10);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(Fork, of_a_fresh_match_copies_once_each_and_carries_scope_priority_and_state) {
  KVCacheManager manager(attention_config(4, 16));
  const auto tokens = iota_tokens(6);
  const ReuseScope scope{.lora_id = 3};
  {
    auto owner = manager.create_kv_cache({.reuse_scope = scope});
    ASSERT_TRUE(owner->resume() && owner->resize(6));
    FakeEngine(manager).write(*owner, tokens, 0);
    owner->commit(tokens);
  }
  auto match =
      manager.create_kv_cache({.reuse_scope = scope, .input_tokens = tokens, .priority = 70});
  auto child = match->fork();
  EXPECT_EQ(child->reuse_scope(), scope);
  EXPECT_EQ(child->priority(), 70);
  EXPECT_EQ(child->num_reused_tokens(), 6);
  ASSERT_TRUE(match->resume(5) && child->resume());
  EXPECT_NE(table_of(*match)[1], table_of(*child)[1]);
  EXPECT_EQ(FakeEngine(manager).check(*child, tokens), std::nullopt);
  match->stop_committing();
  auto late = match->fork();
  EXPECT_EQ(late->commit_state(), CommitState::kUserStop);
  EXPECT_EQ(late->stream(), 5);
  EXPECT_EQ(late->manager(), &manager);
  match->close();
  EXPECT_THROW((void)match->fork(), LogicError);
  Introspection::check(manager);
}

TEST(Fork, a_prefix_that_is_evicted_above_a_forks_block_leaves_the_fork_its_data) {
  KVCacheManager manager(attention_config(4, 6));
  const FakeEngine engine(manager);
  const auto tokens = iota_tokens(8);
  auto parent = start(manager, tokens, 0);
  auto child = parent->fork();
  start(manager, iota_tokens(4), 4)->close();  // the same first block, from elsewhere
  parent->commit(tokens);                      // adopts it; the second block is shown as it is
  parent->close();
  Introspection::check(manager);
  auto other = manager.create_kv_cache();
  ASSERT_TRUE(other->resume() && other->resize(16)) << "takes the adopted block";
  EXPECT_EQ(manager.probe_reuse(tokens), 0);
  Introspection::check(manager);
  ASSERT_TRUE(child->resume());
  child->commit(tokens);
  EXPECT_EQ(engine.check(*child, tokens), std::nullopt);
  EXPECT_EQ(manager.probe_reuse(tokens), 8);
  Introspection::check(manager);
}

}  // namespace
}  // namespace helicore::kv::testing
