#include "helicore/kv/page_store.h"

#include <gtest/gtest.h>

#include <cstring>

#include "helicore/core/error.h"
#include "kv/kv_configs.h"
#include "kv/one_level_store.h"

namespace helicore::kv::testing {
namespace {

struct Bench {
  Bench()
      : config(make_config()),
        registry(config),
        layout(config, registry),
        owner(layout, TypedVec<PoolGroupId, int32_t>(1, 4)),
        store(*owner) {}
  static KVCacheManagerConfig make_config() {
    auto config = attention_config(4, 4);
    config.layers = {AttentionLayerConfig{0, {{"k", 64}, {"scale", 8}}}};
    return config;
  }
  std::byte* piece(int32_t pool, PageHandle page) {
    const int64_t bytes = pool == 0 ? 64 : 8;
    return store.pool_address(PoolGroupId(0), PoolIndex(pool)) +
           store.page(page.id).slot.value() * bytes;
  }
  KVCacheManagerConfig config;
  LifeCycleRegistry registry;
  StorageLayout layout;
  OneLevelStore owner;
  PageStore& store;
};

TEST(PageStore, a_private_page_is_freed_by_its_last_unhold) {
  Bench b;
  const PageHandle page = allocate_held(b.store, LifeCycleId(0), 35);
  b.store.hold(page.id, 35);
  b.store.unhold(page);
  EXPECT_EQ(b.store.counts(PoolGroupId(0)).free, 3);
  b.store.unhold(page);
  EXPECT_EQ(b.store.counts(PoolGroupId(0)).free, 4);
  EXPECT_FALSE(b.store.pages().is_current(page));
}

// Lets go of `page` once too often; what must happen depends on the build.
void unhold_again(PageStore& store, PageHandle page) {
#ifdef HELICORE_DEBUG_CHECKS
  EXPECT_THROW(store.unhold(page), InternalError);
#else
  const uint64_t before = store.num_double_releases();
  store.unhold(page);
  EXPECT_EQ(store.num_double_releases(), before + 1);
#endif
}

TEST(PageStore, a_page_released_twice_in_one_list_is_free_once) {
  Bench b;
  const PageHandle page = allocate_held(b.store, LifeCycleId(0), 35);
  const PageHandle shown = allocate_held(b.store, LifeCycleId(0), 35);
  b.store.publish(shown, NodeId(1), 4);
  for (const PageHandle& handle : {page, shown}) b.store.unhold(handle);
  for (const PageHandle& handle : {page, shown}) unhold_again(b.store, handle);
  EXPECT_EQ(b.store.counts(PoolGroupId(0)).free, 3);
  EXPECT_EQ(b.store.counts(PoolGroupId(0)).evictable, 1);
  const PageHandle next =
      allocate_held(b.store, LifeCycleId(0), 35);  // the record and slot of `page`
  unhold_again(b.store, page);
  EXPECT_EQ(b.store.page(next.id).hold_count, 1u) << "the new owner lost its page";
}

TEST(PageStore, a_shown_page_is_queued_while_nobody_holds_it) {
  Bench b;
  const PageHandle page = allocate_held(b.store, LifeCycleId(0), 35);
  b.store.publish(page, NodeId(7), 4);
  b.store.unhold(page);
  EXPECT_EQ(b.store.counts(PoolGroupId(0)).evictable, 1);
  EXPECT_EQ(b.store.queue(PoolGroupId(0)).front(), page.id);
  b.store.hold(page.id, 80);
  EXPECT_EQ(b.store.counts(PoolGroupId(0)).evictable, 0);
  EXPECT_EQ(b.store.page(page.id).priority, 80) << "raised, never lowered";
  b.store.hold(page.id, 3);
  EXPECT_EQ(b.store.page(page.id).priority, 80);
}

TEST(PageStore, a_held_page_outlives_its_node_and_a_queued_one_does_not) {
  Bench b;
  const PageHandle held = allocate_held(b.store, LifeCycleId(0), 35);
  const PageHandle queued = allocate_held(b.store, LifeCycleId(0), 35);
  for (const PageHandle& page : {held, queued}) b.store.publish(page, NodeId(1), 4);
  b.store.unhold(queued);
  b.store.detach(held.id);
  b.store.detach(queued.id);
  EXPECT_TRUE(b.store.pages().is_current(held));
  EXPECT_FALSE(b.store.pages().is_current(queued));
  b.store.unhold(held);
  EXPECT_EQ(b.store.counts(PoolGroupId(0)).free, 4);
}

TEST(PageStore, a_copy_takes_every_pool) {
  Bench b;
  const PageHandle from = allocate_held(b.store, LifeCycleId(0), 35);
  const PageHandle to = allocate_held(b.store, LifeCycleId(0), 35);
  const PageHandle other = allocate_held(b.store, LifeCycleId(0), 35);
  std::memset(b.piece(0, from), 1, 64);
  std::memset(b.piece(1, from), 2, 8);
  b.store.copy_page(from, to, 0);
  EXPECT_EQ(std::memcmp(b.piece(0, from), b.piece(0, to), 64), 0);
  EXPECT_EQ(std::memcmp(b.piece(1, from), b.piece(1, to), 8), 0);
  EXPECT_EQ(b.piece(0, other)[0], std::byte{0});
  EXPECT_EQ(b.piece(1, other)[0], std::byte{0});
}

}  // namespace
}  // namespace helicore::kv::testing
