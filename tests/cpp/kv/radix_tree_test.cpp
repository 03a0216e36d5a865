#include "helicore/kv/radix_tree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "helicore/kv/layout.h"
#include "kv/kv_configs.h"
#include "kv/one_level_store.h"

namespace helicore::kv::testing {
namespace {

// A tree over a store of its own, with one life cycle.
struct Bench {
  explicit Bench(int32_t tokens_per_block, int32_t num_slots = 4096)
      : config(attention_config(tokens_per_block, 1, 1, 1)),
        registry(config),
        layout(config, registry),
        owner(layout, TypedVec<PoolGroupId, int32_t>(1, num_slots)),
        store(*owner),
        tree(store, registry, tokens_per_block),
        root(tree.find_or_create_root({})) {
    tree.pin(root);
  }
  InsertResult insert(NodeId parent, const std::vector<TokenId>& tokens) {
    tree.reserve_nodes(1);
    const PageHandle page = allocate_held(store, LifeCycleId(0), kPriorityDefault);
    const InsertResult result = tree.insert(parent, tokens, std::span(&page, 1));
    store.unhold(page);
    return result;
  }
  int32_t match(const std::vector<TokenId>& tokens, bool partial = true) {
    return tree.match(root, tokens, {.partial = partial}, nullptr).num_tokens;
  }
  KVCacheManagerConfig config;
  LifeCycleRegistry registry;
  StorageLayout layout;
  OneLevelStore owner;
  PageStore& store;
  RadixTree tree;
  NodeId root;
};

TEST(RadixTree, finds_what_was_inserted_and_the_longest_common_prefix) {
  Bench b(4);
  const NodeId first = b.insert(b.root, {1, 2, 3, 4}).node;
  b.insert(first, {5, 6, 7, 8});
  EXPECT_EQ(b.match({1, 2, 3, 4, 5, 6, 7, 8, 9}), 8);
  EXPECT_EQ(b.match({1, 2, 3, 4, 5, 6, 9, 9}), 6);
  EXPECT_EQ(b.match({1, 2, 3, 4, 5, 6, 9, 9}, false), 4);
  EXPECT_EQ(b.match({1, 2, 3}), 3);
  EXPECT_EQ(b.match({2}), 0);
  EXPECT_EQ(b.match({}), 0);
  EXPECT_EQ(b.tree.match(kNoNode, iota_tokens(4), {}, nullptr).num_tokens, 0);
}

TEST(RadixTree, a_block_inserted_twice_is_one_node) {
  Bench b(2);
  const InsertResult first = b.insert(b.root, {1, 2});
  const InsertResult second = b.insert(b.root, {1, 2});
  EXPECT_EQ(second.outcome, InsertOutcome::kExisting);
  EXPECT_EQ(second.node, first.node);
  EXPECT_EQ(b.tree.num_nodes(), 1u);
  EXPECT_EQ(b.store.pages().num_in_use(), 1u);
}

TEST(RadixTree, a_partial_block_is_covered_by_a_longer_one_and_replaced_by_it) {
  Bench b(4);
  EXPECT_EQ(b.insert(b.root, {1, 2}).outcome, InsertOutcome::kInserted);
  EXPECT_EQ(b.insert(b.root, {1}).outcome, InsertOutcome::kCovered);
  EXPECT_EQ(b.insert(b.root, {1, 2, 3}).outcome, InsertOutcome::kInserted);
  EXPECT_EQ(b.tree.num_nodes(), 1u);
  EXPECT_EQ(b.insert(b.root, {1, 2, 9, 9}).outcome, InsertOutcome::kInserted);
  EXPECT_EQ(b.tree.num_nodes(), 2u);
  EXPECT_EQ(b.insert(b.root, {1, 2, 3, 4}).outcome, InsertOutcome::kInserted);
  EXPECT_EQ(b.tree.num_nodes(), 2u);
  EXPECT_EQ(b.insert(b.root, {1, 2}).outcome, InsertOutcome::kCovered);
  EXPECT_EQ(b.store.pages().num_in_use(), 2u) << "replaced pages are free";
}

TEST(RadixTree, partial_matching_has_no_fan_out_limit) {
  Bench b(4);
  for (TokenId i = 0; i < 1000; ++i) b.insert(b.root, {7, i, 2 * i, 3 * i});
  for (TokenId i = 0; i < 1000; i += 37) {
    EXPECT_EQ(b.match({7, i, 2 * i, 5}), i == 0 ? 3 : 3);
    EXPECT_EQ(b.match({7, i, 2 * i, 3 * i}), 4);
    EXPECT_EQ(b.match({7, i, 1999}), 2);
  }
  EXPECT_EQ(b.match({7, 5000}), 1);
}

TEST(RadixTree, tokens_at_the_ends_of_the_range_are_ordered_and_found) {
  Bench b(2);
  const TokenId top = INT32_MAX;
  for (const auto& tokens :
       std::vector<std::vector<TokenId>>{{0, 0}, {0, top}, {top, 0}, {top, top}, {1, 0}, {0, 1}}) {
    b.insert(b.root, tokens);
    EXPECT_EQ(b.match(tokens), 2);
  }
  EXPECT_EQ(b.match({top, 5}), 1);
}

TEST(RadixTree, roots_come_and_go_with_their_use) {
  Bench b(2);
  const ReuseScope scope{.lora_id = 5};
  const NodeId root = b.tree.find_or_create_root(scope);
  EXPECT_EQ(b.tree.find_or_create_root(scope), root);
  b.tree.pin(root);
  EXPECT_EQ(b.tree.num_roots(), 2u);
  b.insert(root, {1, 2});
  b.tree.unpin(root);
  EXPECT_EQ(b.tree.num_roots(), 2u) << "it still has a block";
  b.tree.evict_all();
  EXPECT_EQ(b.tree.num_roots(), 1u);
  EXPECT_EQ(b.tree.find_root(scope), kNoNode);
}

TEST(RadixTree, random_children_agree_with_a_sorted_set) {
  std::mt19937 random(13);
  for (int32_t width : {1, 2, 3, 5}) {
    Bench b(width);
    std::map<std::vector<TokenId>, NodeId> model;
    for (int i = 0; i < 4000; ++i) {
      std::vector<TokenId> tokens(static_cast<size_t>(width));
      for (TokenId& token : tokens) token = static_cast<TokenId>(random() % 6);
      if (random() % 3 != 0) {
        const InsertResult result = b.insert(b.root, tokens);
        ASSERT_EQ(result.outcome == InsertOutcome::kExisting, model.count(tokens) > 0);
        model[tokens] = result.node;
      } else if (b.store.queue(PoolGroupId(0)).count() > 0 && random() % 4 == 0) {
        const PageId victim = b.store.queue(PoolGroupId(0)).front();
        const auto gone = b.tree.tokens(b.store.page(victim).node);
        model.erase(std::vector<TokenId>(gone.begin(), gone.end()));
        b.tree.evict_until_free(PoolGroupId(0), b.store.counts(PoolGroupId(0)).free + 1);
      }
      int32_t best = 0;
      for (const auto& [key, node] : model) {
        const auto end = std::mismatch(key.begin(), key.end(), tokens.begin()).first;
        best = std::max(best, static_cast<int32_t>(end - key.begin()));
      }
      ASSERT_EQ(b.match(tokens), best);
      ASSERT_EQ(b.tree.num_nodes(), model.size());
    }
  }
}

TEST(RadixTree, the_memory_of_a_node_stays_within_its_budget) {
  const size_t tokens_per_block = 16;
  const size_t bytes = sizeof(NodeRecord) + sizeof(Digest) + sizeof(PageId) +
                       tokens_per_block * sizeof(TokenId) + sizeof(PageRecord);
  EXPECT_LE(bytes, 256u);
}

}  // namespace
}  // namespace helicore::kv::testing
