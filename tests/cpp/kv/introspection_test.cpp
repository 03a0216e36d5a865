// Controls of the invariant checker: each planted fault must be found.
#include "helicore/kv/introspection.h"

#include <gtest/gtest.h>

#include <functional>

#include "helicore/core/error.h"
#include "kv/kv_configs.h"

namespace helicore::kv::testing {
namespace {

class Checker : public ::testing::Test {
 protected:
  Checker() : manager_(attention_config(4, 16)) {
    cache_ = manager_.create_kv_cache();
    EXPECT_TRUE(cache_->resume());
    EXPECT_TRUE(cache_->resize(10));
    cache_->commit(iota_tokens(9));
    auto other = manager_.create_kv_cache({.input_tokens = iota_tokens(4)});
    EXPECT_TRUE(other->resume());
    EXPECT_TRUE(other->resize(8));
    other->commit(iota_tokens(4, 50));
    other->close();
  }
  ManagerState& state() { return Introspection::state(manager_); }
  PageRecord& page(size_t i) {
    return const_cast<PageRecord&>(state().store.page(Introspection::pages(*cache_)[i].id));
  }
  void expect_found() { EXPECT_THROW(check_invariants(state()), InternalError); }

  KVCacheManager manager_;
  std::unique_ptr<KVCache> cache_;
};

TEST_F(Checker, accepts_a_sound_state) { EXPECT_NO_THROW(check_invariants(state())); }

TEST_F(Checker, finds_a_wrong_hold_count) {
  ++page(0).hold_count;
  expect_found();
  --page(0).hold_count;
}

TEST_F(Checker, finds_a_wrong_lock_count) {
  ++page(2).lock_count;
  expect_found();
  --page(2).lock_count;
}

TEST_F(Checker, finds_two_pages_on_one_slot) {
  const SlotId slot = page(0).slot;
  page(0).slot = page(1).slot;
  expect_found();
  page(0).slot = slot;
}

TEST_F(Checker, finds_a_stale_page_table_entry) {
  auto& entry = const_cast<int32_t&>(cache_->base_page_indices(LifeCycleId(0))[1]);
  const int32_t right = entry;
  entry = 99;
  expect_found();
  entry = right;
}

TEST_F(Checker, finds_a_page_that_lost_its_node) {
  const NodeId node = page(0).node;
  page(0).node = kNoNode;
  expect_found();
  page(0).node = node;
}

TEST_F(Checker, finds_tokens_that_do_not_fit_their_key) {
  const NodeId node = page(0).node;
  auto& token = const_cast<TokenId&>(state().tree.tokens(node)[2]);
  token += 1;
  expect_found();
  token -= 1;
}

TEST_F(Checker, finds_a_priority_that_rises_towards_the_leaves) {
  page(1).priority = 99;
  expect_found();
  page(1).priority = kPriorityDefault;
}

TEST_F(Checker, finds_a_forgotten_pin) {
  const NodeId tail = Introspection::tail_node(*cache_);
  state().tree.pin(tail);
  expect_found();
  state().tree.unpin(tail);
}

}  // namespace
}  // namespace helicore::kv::testing
