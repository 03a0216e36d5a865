#include "helicore/kv/radix_tree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "kv/tree_bench.h"

namespace helicore::kv::testing {
namespace {

// A tree with one life cycle.
struct Bench : TreeBench {
  explicit Bench(int32_t tokens_per_block) : TreeBench(tokens_per_block, {full_layer()}) {}
  InsertResult insert(NodeId parent, const std::vector<TokenId>& tokens) {
    return TreeBench::insert(parent, tokens, {0});
  }
  int32_t match(const std::vector<TokenId>& tokens, bool partial = true) {
    return depth(tokens, {.partial = partial});
  }
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
        EXPECT_EQ(b.tree.drop(victim), 1);
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

TEST(RadixTree, an_endpoint_survives_a_longer_sibling_that_comes_after_it) {
  TreeBench b(8, {full_layer(), window_layer(4)});
  b.insert(b.root, iota_tokens(3), {0, 1});
  const NodeId longer = b.insert(b.root, iota_tokens(6), {0}).node;
  EXPECT_EQ(b.coverage(longer, 1), 3) << "the window page is adopted with its count";
  EXPECT_EQ(b.coverage(longer, 0), 6);
  EXPECT_EQ(b.depth(iota_tokens(8)), 3) << "the endpoint is still there";
  const NodeId whole = b.insert(b.root, iota_tokens(8), {0}).node;
  EXPECT_EQ(b.coverage(whole, 1), 3);
  EXPECT_EQ(b.tree.num_nodes(), 1u);
  EXPECT_EQ(b.store.pages().num_in_use(), 2u) << "the shorter full attention pages are free";
  EXPECT_TRUE(b.is_told());
}

TEST(RadixTree, an_endpoint_survives_a_longer_sibling_that_came_before_it) {
  TreeBench b(8, {full_layer(), window_layer(4)});
  const NodeId longer = b.insert(b.root, iota_tokens(8), {0}).node;
  EXPECT_EQ(b.depth(iota_tokens(8)), 0);
  const InsertResult result = b.insert(b.root, iota_tokens(3), {0, 1});
  EXPECT_EQ(result.outcome, InsertOutcome::kCovered);
  EXPECT_EQ(result.node, longer);
  EXPECT_TRUE(b.attach(longer, 1, 3));
  EXPECT_FALSE(b.attach(longer, 0, 3)) << "the block has a longer page";
  EXPECT_EQ(b.depth(iota_tokens(8)), 3);
  EXPECT_TRUE(b.is_told());
}

TEST(RadixTree, a_replaced_page_does_not_outlive_its_block) {
  TreeBench b(8, {full_layer(), window_layer(4)});
  const NodeId node = b.insert(b.root, iota_tokens(8), {0}).node;
  b.attach(node, 1, 3);
  const PageId partial = b.page_of(node, 1);
  b.store.hold(partial, kPriorityDefault);
  const PageHandle held = b.store.pages().handle(partial);
  EXPECT_TRUE(b.attach(node, 1, 8));
  EXPECT_EQ(b.store.page(partial).node, kNoNode) << "a held page becomes private";
  b.store.unhold(held);
  EXPECT_FALSE(b.store.pages().is_current(held)) << "and goes with its last holder";
  b.attach(node, 1, 5);
  EXPECT_EQ(b.store.pages().num_in_use(), 2u) << "a page that was refused is free";
  b.tree.drop(b.page_of(node, 0));
  EXPECT_EQ(b.store.pages().num_in_use(), 0u);
  EXPECT_EQ(b.tree.num_nodes(), 0u);
}

TEST(RadixTree, a_depth_inside_a_page_that_covers_a_part_and_one_behind_it_differ) {
  TreeBench b(8, {full_layer(), window_layer(8)});
  const auto nodes = b.insert_chain(iota_tokens(16), {0});
  b.attach(nodes[0], 1, 8);
  b.attach(nodes[1], 1, 5);
  EXPECT_EQ(b.depth(iota_tokens(13)), 13);
  EXPECT_EQ(b.depth(iota_tokens(16)), 13) << "truncated inside the block";
  EXPECT_EQ(b.depth(iota_tokens(16), {.partial = false}), 8) << "an exact boundary ignores it";
}

TEST(RadixTree, a_dropped_page_takes_along_what_needs_it_and_nothing_else) {
  TreeBench b(4, {full_layer(), window_layer(4, 4), ssm_layer()});
  const auto nodes = b.insert_chain(iota_tokens(16), {0, 1});
  b.attach(nodes[3], 2, 4);
  EXPECT_EQ(b.tree.drop(b.page_of(nodes[2], 1)), 0);
  EXPECT_EQ(b.tree.drop(b.page_of(nodes[3], 2)), 0);
  EXPECT_EQ(b.tree.num_nodes(), 4u);
  EXPECT_TRUE(b.is_told());
  EXPECT_EQ(b.tree.drop(b.page_of(nodes[2], 0)), 2) << "full attention: the subtree";
  EXPECT_EQ(b.tree.drop(b.page_of(nodes[0], 1)), 2) << "a sink: the subtree";
  EXPECT_EQ(b.store.pages().num_in_use(), 0u);
  EXPECT_TRUE(b.is_told());
}

TEST(RadixTree, a_block_goes_when_its_last_page_goes_and_takes_empty_ancestors_along) {
  TreeBench b(4, {window_layer(4), ssm_layer()});
  const NodeId first = b.insert(b.root, iota_tokens(4), {0}).node;
  const NodeId second = b.insert(first, iota_tokens(4, 4), {0}).node;
  const NodeId third = b.insert(second, iota_tokens(4, 8), {}).node;
  b.attach(third, 1, 4);
  EXPECT_EQ(b.tree.drop(b.page_of(second, 0)), 0) << "something below lives";
  EXPECT_EQ(b.tree.drop(b.page_of(third, 1)), 2) << "the block and the empty one above it";
  EXPECT_EQ(b.tree.num_nodes(), 1u);
  EXPECT_TRUE(b.is_told());
  b.tree.pin(first);
  EXPECT_EQ(b.tree.drop(b.page_of(first, 0)), 0) << "a pinned block stays";
  b.tree.unpin(first);
  EXPECT_EQ(b.tree.num_nodes(), 0u);
  EXPECT_TRUE(b.is_told());
}

TEST(RadixTree, a_lost_snapshot_under_a_sleeping_sequence_leaves_its_lineage) {
  for (bool is_hybrid : {true, false}) {
    auto layers = std::vector<LayerConfig>{ssm_layer()};
    if (is_hybrid) layers.push_back(full_layer());
    TreeBench b(4, layers);
    b.tree.reserve_nodes(2);
    std::vector<PageHandle> own(b.num_life_cycles());
    if (is_hybrid) own[1] = b.page(1);
    const NodeId node = b.tree.insert(b.root, iota_tokens(4), own).node;
    b.tree.pin(node);
    EXPECT_TRUE(b.attach(node, 0, 4));
    EXPECT_EQ(b.tree.drop(b.page_of(node, 0)), 0);
    std::vector<PageHandle> next(b.num_life_cycles());
    if (is_hybrid) next[1] = b.page(1);
    const NodeId tail = b.tree.insert(node, iota_tokens(4, 4), next).node;
    b.tree.pin(tail);
    b.tree.unpin(node);
    EXPECT_EQ(b.tree.node(tail).parent, node) << "the sequence goes on committing below it";
    EXPECT_TRUE(b.attach(tail, 0, 4));
    EXPECT_EQ(b.depth(iota_tokens(8)), 8);
    EXPECT_TRUE(b.is_told());
    b.tree.unpin(tail);
    for (PageHandle page : {own.back(), next.back()}) {
      if (is_hybrid) b.store.unhold(page);
    }
    b.tree.evict_all();
    EXPECT_EQ(b.tree.num_nodes(), 0u);
  }
}

TEST(RadixTree, lost_data_leaves_the_tree_though_it_is_held_and_pinned) {
  TreeBench b(2, {full_layer(), window_layer(3)});
  const auto nodes = b.insert_chain(iota_tokens(8), {0, 1});
  const NodeId side = b.insert(nodes[1], {90, 91}, {0, 1}).node;
  for (NodeId node : nodes) b.store.hold(b.page_of(node, 0), kPriorityDefault);
  std::vector<PageHandle> held;
  for (NodeId node : nodes) held.push_back(b.store.pages().handle(b.page_of(node, 0)));
  b.tree.pin(nodes[2]);
  EXPECT_EQ(b.tree.drop_node(nodes[1]), 2) << "the last block and the side branch";
  EXPECT_EQ(b.tree.num_nodes(), 3u) << "the pinned one and those above it stay";
  EXPECT_FALSE(b.tree.node(side).in_use);
  EXPECT_EQ(b.depth(iota_tokens(8)), 2) << "what has no pages serves nothing";
  EXPECT_EQ(b.match(iota_tokens(8)).num_tokens_raw, 6);
  EXPECT_EQ(b.store.page(held[2].id).node, kNoNode) << "held pages are private now";
  EXPECT_TRUE(b.is_told());
  EXPECT_TRUE(b.attach(nodes[1], 0, 2) && b.attach(nodes[1], 1, 2)) << "a twin brings them back";
  EXPECT_EQ(b.depth(iota_tokens(8)), 4);
  b.tree.unpin(nodes[2]);
  EXPECT_EQ(b.tree.num_nodes(), 2u);
  for (PageHandle page : held) b.store.unhold(page);
  EXPECT_EQ(b.store.pages().num_in_use(), 4u);
  EXPECT_TRUE(b.is_told());
}

TEST(RadixTree, a_page_that_another_block_shows_is_not_attached) {
  Bench b(4);
  const NodeId first = b.insert(b.root, {1, 2}).node;
  const NodeId second = b.insert(b.root, {3, 4}).node;
  const PageHandle page = b.store.pages().handle(b.page_of(first, 0));
  EXPECT_FALSE(b.tree.attach(second, LifeCycleId(0), page, 2));
  EXPECT_FALSE(b.tree.attach(second, LifeCycleId(0), PageHandle{}, 2));
  EXPECT_TRUE(b.is_told());
}

TEST(RadixTree, priorities_are_told_when_they_rise_whichever_page_brought_them) {
  TreeBench b(4, {full_layer(), window_layer(4)});
  const NodeId node = b.insert(b.root, iota_tokens(4), {0}).node;
  b.tree.priority_raised(node, 20);
  EXPECT_EQ(b.tree.node(node).priority, kPriorityDefault);
  b.tree.priority_raised(node, 50);
  const PageHandle page = b.page(1, 80);
  EXPECT_TRUE(b.tree.attach(node, LifeCycleId(1), page, 4));
  b.store.unhold(page);
  EXPECT_TRUE(b.is_told());
  EXPECT_EQ(b.listener.num_seen(EventKind::kUpdated), 2u);
}

TEST(RadixTree, wide_and_deep_subtrees_go_without_recursion) {
  Bench b(1);
  NodeId tail = b.insert(b.root, {0}).node;
  const NodeId top = tail;
  for (TokenId i = 0; i < 2000; ++i) b.insert(top, {i});
  for (TokenId i = 0; i < 2000; ++i) tail = b.insert(tail, {5000 + i}).node;
  EXPECT_EQ(b.tree.drop(b.page_of(top, 0)), 4001);
  EXPECT_EQ(b.store.pages().num_in_use(), 0u);
  EXPECT_TRUE(b.is_told());
}

TEST(RadixTree, a_snapshot_tells_pages_that_cover_a_part) {
  TreeBench b(4, {full_layer(), window_layer(4), ssm_layer()});
  const auto nodes = b.insert_chain(iota_tokens(8), {0});
  b.attach(nodes[0], 1, 3);
  b.attach(nodes[1], 1, 4);
  b.attach(nodes[1], 2, 4);
  EXPECT_TRUE(b.is_told());
  EventListener late;
  late.restart(b.tree.snapshot());
  EXPECT_EQ(late.compare(b.tree, b.store), std::nullopt);
  EXPECT_EQ(b.tree.snapshot().size(), 5u) << "a root, two blocks, a part and a state";
}

}  // namespace
}  // namespace helicore::kv::testing
