#include "helicore/kv/event_log.h"

#include <gtest/gtest.h>

#include "helicore/core/error.h"
#include "helicore/kv/kv_cache_manager.h"
#include "kv/event_listener.h"
#include "kv/kv_configs.h"

namespace helicore::kv::testing {
namespace {

KVCacheManagerConfig config_with_events(int32_t num_blocks, int32_t event_buffer_size) {
  auto config = attention_config(4, num_blocks);
  config.event_buffer_size = event_buffer_size;
  return config;
}

void commit_sequence(KVCacheManager& manager, const std::vector<TokenId>& tokens,
                     const ReuseScope& scope = {}, int priority = kPriorityDefault) {
  auto cache =
      manager.create_kv_cache({.reuse_scope = scope, .input_tokens = tokens, .priority = priority});
  const auto found = static_cast<size_t>(cache->num_committed_tokens());
  ASSERT_TRUE(cache->resume() && cache->resize(static_cast<int64_t>(tokens.size())));
  cache->commit(std::span(tokens).subspan(found));
}

TEST(EventLog, keeps_the_latest_and_counts_what_it_dropped) {
  EventLog log(3, 4);
  Digest key{};
  for (uint8_t i = 0; i < 5; ++i) {
    key[0] = i;
    log.stored(key, {}, i, 35, iota_tokens(i % 4));
  }
  EXPECT_EQ(log.count(), 3u);
  EXPECT_EQ(log.num_dropped(), 2u);
  const auto first = log.drain(2);
  ASSERT_EQ(first.size(), 2u);
  EXPECT_EQ(first[0].id, 2u);
  EXPECT_EQ(first[0].key[0], 2);
  EXPECT_EQ(first[1].tokens, iota_tokens(3));
  log.removed(key);
  const auto rest = log.drain(SIZE_MAX);
  ASSERT_EQ(rest.size(), 2u);
  EXPECT_EQ(rest[0].id, 4u);
  EXPECT_EQ(rest[1].kind, EventKind::kRemoved);
  EXPECT_TRUE(rest[1].tokens.empty()) << "a reused record keeps nothing of the old event";
  EXPECT_TRUE(log.drain(SIZE_MAX).empty());
  EXPECT_EQ(log.num_dropped(), 2u);
}

TEST(EventLog, without_a_buffer_nothing_is_recorded) {
  KVCacheManager manager(attention_config(4, 8));
  commit_sequence(manager, iota_tokens(8));
  EXPECT_TRUE(manager.drain_events().empty());
  EXPECT_EQ(manager.num_dropped_events(), 0u);
  EXPECT_EQ(manager.snapshot_events().size(), 3u) << "a root and two blocks";
  auto bad = attention_config(4, 8);
  bad.event_buffer_size = -1;
  EXPECT_THROW(KVCacheManager{bad}, InvalidArgument);
}

TEST(EventLog, tells_a_sequence_in_order_with_the_keys_of_the_chain) {
  KVCacheManager manager(config_with_events(8, 64));
  const ReuseScope scope{.lora_id = 3, .salt = std::string("tenant with a long salt, on the heap")};
  commit_sequence(manager, iota_tokens(10), scope);
  const auto keys = manager.chain_keys(iota_tokens(10), scope);
  const auto events = manager.drain_events();
  ASSERT_EQ(events.size(), 4u);
  EXPECT_EQ(events[0].kind, EventKind::kCreated);
  EXPECT_EQ(events[0].scope, scope);
  EXPECT_EQ(events[0].key, root_key(scope));
  EXPECT_EQ(events[1].kind, EventKind::kStored);
  EXPECT_EQ(events[1].parent_key, events[0].key);
  EXPECT_EQ(events[1].key, keys[0]);
  EXPECT_EQ(events[1].tokens, iota_tokens(4));
  EXPECT_EQ(events[1].priority, kPriorityDefault);
  EXPECT_EQ(events[2].key, keys[1]);
  EXPECT_EQ(events[2].ordinal, 1);
  EXPECT_EQ(events[3].tokens, iota_tokens(2, 8)) << "the part that close() published";
  for (size_t i = 0; i < events.size(); ++i) EXPECT_EQ(events[i].id, i);

  commit_sequence(manager, iota_tokens(11), scope, 80);
  const auto more = manager.drain_events();
  ASSERT_EQ(more.size(), 5u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(more[i].kind, EventKind::kUpdated);
    EXPECT_EQ(more[i].priority, 80);
  }
  EXPECT_EQ(more[3].kind, EventKind::kStored) << "the longer part";
  EXPECT_EQ(more[4].kind, EventKind::kRemoved) << "the shorter one";
  EXPECT_EQ(more[4].key, events[3].key);

  manager.clear_reusable_blocks();
  const auto last = manager.drain_events();
  ASSERT_EQ(last.size(), 4u);
  EXPECT_EQ(last[2].key, keys[0]) << "suffix before prefix";
  EXPECT_EQ(last[3].key, root_key(scope));
}

TEST(EventLog, a_listener_that_missed_events_is_set_right_by_a_snapshot) {
  KVCacheManager manager(config_with_events(40, 4));
  EventListener listener;
  for (int32_t i = 0; i < 5; ++i) commit_sequence(manager, iota_tokens(9, 100 * i), {.lora_id = i});
  EXPECT_EQ(manager.num_dropped_events(), 16u);
  EventListener late;
  late.apply(manager.drain_events());
  EXPECT_TRUE(late.compare(manager).has_value()) << "a gap is noticed";
  listener.restart(manager.snapshot_events());
  EXPECT_EQ(listener.compare(manager), std::nullopt);
  EXPECT_EQ(listener.num_blocks(), 20u);
  EXPECT_TRUE(manager.drain_events().empty()) << "the snapshot holds what was recorded";
  commit_sequence(manager, iota_tokens(9), {.lora_id = 9});
  listener.apply(manager.drain_events());
  EXPECT_EQ(listener.compare(manager), std::nullopt) << "and the log goes on from it";
}

TEST(EventLog, a_snapshot_of_a_long_chain_needs_no_deep_recursion) {
  KVCacheManager manager(attention_config(1, 20000, 1, 64));
  commit_sequence(manager, iota_tokens(20000));
  EventListener listener;
  listener.restart(manager.snapshot_events());
  EXPECT_EQ(listener.compare(manager), std::nullopt);
}

}  // namespace
}  // namespace helicore::kv::testing
