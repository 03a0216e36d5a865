// Pages that belong to no complete window any more.
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

#include "kv/tree_bench.h"

namespace helicore::kv::testing {
namespace {

constexpr size_t kWindow = 1;  // life cycle

struct WindowBench : TreeBench {
  WindowBench(int32_t block, int32_t window, int32_t sinks = 0)
      : TreeBench(block, {full_layer(), window_layer(window, sinks)}),
        lc(registry[LifeCycleId(kWindow)]) {}

  std::vector<NodeId> useless(NodeId node) const {
    std::vector<PageId> pages;
    tree.collect_useless(node, LifeCycleId(kWindow), pages);
    std::vector<NodeId> nodes;
    for (PageId page : pages) nodes.push_back(store.page(page).node);
    return nodes;
  }
  // By definition: blocks whose page no served depth of any branch reads, `gone` having no page.
  std::set<NodeId> useless_by_definition(NodeId gone, int32_t window) const {
    std::set<NodeId> result;
    std::set<NodeId> used;
    const int32_t block = config.tokens_per_block;
    for (size_t i = 0; i < tree.num_records(); ++i) {
      const NodeId last(static_cast<uint32_t>(i));
      if (!tree.node(last).in_use || tree.node(last).parent == kNoNode) continue;
      if (last != gone && page_of(last, kWindow) != kNoPage) result.insert(last);
      std::vector<NodeId> path;
      tree.path_to(last, &path);
      const int32_t begin = tree.node(last).ordinal * block;
      for (int32_t n = begin + 1; n <= begin + tree.node(last).num_tokens; ++n) {
        std::vector<NodeId> read;
        bool is_served = true;
        for (int32_t b = 0; b * block < n; ++b) {
          const bool is_sink = b < lc.num_sink_blocks;
          if (!is_sink && (b + 1) * block <= n + 1 - window) continue;
          const NodeId node = path[static_cast<size_t>(b)];
          const int32_t covered = node == gone ? 0 : coverage(node, kWindow);
          is_served = is_served && covered >= std::min(block, n - b * block);
          read.push_back(node);
        }
        if (is_served) used.insert(read.begin(), read.end());
      }
    }
    for (NodeId node : used) result.erase(node);
    return result;
  }
  const LifeCycle lc;
};

TEST(RadixTreeWindows, a_gap_makes_a_run_useless_that_is_shorter_than_the_window) {
  WindowBench b(4, 9);  // 8 tokens of history: 2 whole blocks, or 3 when the end is ragged
  const auto nodes = b.insert_chain(iota_tokens(28), {0, kWindow});
  EXPECT_EQ(b.useless(nodes[3]), std::vector<NodeId>{}) << "both sides are long enough";
  b.tree.drop(b.page_of(nodes[3], kWindow));
  EXPECT_EQ(b.useless(nodes[5]), (std::vector<NodeId>{nodes[6], nodes[4]}));
  EXPECT_EQ(b.useless(nodes[2]), std::vector<NodeId>{}) << "blocks 0 and 1 begin the sequence";
  b.tree.drop(b.page_of(nodes[0], kWindow));
  EXPECT_EQ(b.useless(nodes[2]), std::vector<NodeId>{nodes[1]});
  EXPECT_TRUE(b.is_told());
}

TEST(RadixTreeWindows, sinks_are_never_useless_and_count_as_part_of_the_window) {
  WindowBench b(4, 9, 4);
  const auto nodes = b.insert_chain(iota_tokens(16), {0, kWindow});
  EXPECT_EQ(b.useless(nodes[2]), std::vector<NodeId>{nodes[3]}) << "block 1 follows the sink";
  EXPECT_EQ(b.useless(nodes[1]), std::vector<NodeId>{}) << "blocks 2 and 3 are a window";
  EXPECT_EQ(b.useless(nodes[0]), std::vector<NodeId>{}) << "a sink takes everything along";
}

TEST(RadixTreeWindows, a_branch_that_may_complete_a_window_is_left_alone) {
  WindowBench b(2, 5);
  const auto nodes = b.insert_chain(iota_tokens(14), {0, kWindow});
  b.tree.drop(b.page_of(nodes[2], kWindow));
  const auto other = b.insert(nodes[3], {90, 91}, {0, kWindow}).node;
  b.insert(other, {92, 93}, {0, kWindow});
  EXPECT_EQ(b.useless(nodes[4]), std::vector<NodeId>{}) << "block 3 serves the other branch";
  b.insert(nodes[5], {94, 95}, {0, kWindow});
  EXPECT_EQ(b.useless(nodes[4]), std::vector<NodeId>{});
}

// Random chains with side branches, pages that cover a part, and gaps.
void fill(WindowBench& b, std::mt19937& random, bool branches) {
  const int32_t block = b.config.tokens_per_block;
  const auto nodes = b.insert_chain(iota_tokens(block * 12), {0});
  std::vector<NodeId> all = nodes;
  for (size_t i = 0; branches && i < 3; ++i) {
    NodeId at = nodes[random() % nodes.size()];
    for (size_t depth = 1 + random() % 4; depth > 0; --depth) {
      const auto first = static_cast<TokenId>(1000 * (i + 1));
      at = b.insert(at, iota_tokens(block, first), {0}).node;
      all.push_back(at);
    }
  }
  for (NodeId node : all) {
    const bool is_sink = b.tree.node(node).ordinal < b.lc.num_sink_blocks;
    if (!is_sink && random() % 5 == 0) continue;
    const bool is_whole = is_sink || random() % 8 > 0;
    b.attach(node, kWindow,
             is_whole ? block : 1 + static_cast<int32_t>(random() % static_cast<uint32_t>(block)));
  }
}

std::vector<NodeId> windowed_blocks(const WindowBench& b) {
  std::vector<NodeId> nodes;
  for (size_t i = 0; i < b.tree.num_records(); ++i) {
    const NodeId node(static_cast<uint32_t>(i));
    if (!b.tree.node(node).in_use || b.tree.node(node).ordinal < b.lc.num_sink_blocks) continue;
    if (b.tree.node(node).parent == kNoNode || b.page_of(node, kWindow) == kNoPage) continue;
    nodes.push_back(node);
  }
  return nodes;
}

TEST(RadixTreeWindows, random_runs_are_reported_exactly_when_no_depth_reads_them) {
  std::mt19937 random(5);
  size_t num_reported = 0;
  size_t num_differences = 0;
  for (int i = 0; i < 400; ++i) {
    const auto block = static_cast<int32_t>(1 + random() % 4);
    const auto window = static_cast<int32_t>(2 + random() % 14);
    WindowBench b(block, window, random() % 3 == 0 ? block : 0);
    const bool branches = i % 2 == 1;
    fill(b, random, branches);
    for (NodeId gone : windowed_blocks(b)) {
      const auto before = b.useless_by_definition(kNoNode, window);
      const auto after = b.useless_by_definition(gone, window);
      const auto reported = b.useless(gone);
      const std::set<NodeId> unique(reported.begin(), reported.end());
      ASSERT_EQ(unique.size(), reported.size()) << "no page twice";
      for (NodeId node : reported) ASSERT_TRUE(after.count(node)) << "a useful page was reported";
      num_reported += reported.size();
      for (NodeId node : after) {
        if (before.count(node) || unique.count(node)) continue;
        ASSERT_TRUE(branches) << "in a chain none is missed";
      }
      // Negative control: a window of one token more.
      const auto wrong = b.useless_by_definition(gone, window + 1);
      for (NodeId node : unique) num_differences += wrong.count(node) == 0;
      for (NodeId node : wrong) num_differences += after.count(node) == 0;
    }
  }
  EXPECT_GT(num_reported, 2000u);
  EXPECT_GT(num_differences, 100u) << "a rule that is off by one token is noticed";
}

}  // namespace
}  // namespace helicore::kv::testing
