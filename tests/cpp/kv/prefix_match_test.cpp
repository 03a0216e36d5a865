#include "helicore/kv/prefix_match.h"

#include <gtest/gtest.h>

#include "kv/tree_bench.h"

namespace helicore::kv::testing {
namespace {

constexpr CacheDomain kTarget = CacheDomain::kTarget;
constexpr CacheDomain kDraft = CacheDomain::kDraft;

TEST(PrefixMatch, back_off_takes_from_the_raw_depth_and_a_shorter_match_serves_nothing) {
  TreeBench b(8, {full_layer()});
  b.insert_chain(iota_tokens(24), {0});
  const PrefixMatch match = b.match(iota_tokens(20), {.backoff_target = 3});
  EXPECT_EQ(match.num_tokens, 17);
  EXPECT_EQ(match.num_tokens_raw, 20);
  EXPECT_EQ(match.num_tokens_lookup, 20);
  EXPECT_EQ(b.depth(iota_tokens(20), {.partial = false, .backoff_target = 1}), 8);
  EXPECT_EQ(b.depth(iota_tokens(2), {.backoff_target = 3}), 0);
  EXPECT_EQ(b.depth(iota_tokens(20), {.backoff_draft = 9}), 20) << "there is no draft";
  std::vector<NodeId> path{kNoNode};
  EXPECT_EQ(b.match(iota_tokens(24), {.backoff_target = 8}, &path).num_tokens, 16);
  EXPECT_EQ(path.size(), 2u) << "the nodes of the final depth";
}

TEST(PrefixMatch, a_lost_window_prunes_to_the_block_and_back_off_is_not_taken_twice) {
  TreeBench b(8, {full_layer(), window_layer(8)});
  const auto nodes = b.insert_chain(iota_tokens(24), {0, 1});
  EXPECT_EQ(b.depth(iota_tokens(24), {.backoff_target = 1}), 23);
  b.tree.drop(b.page_of(nodes[2], 1));
  EXPECT_EQ(b.depth(iota_tokens(24), {.backoff_target = 1}), 16);
  EXPECT_TRUE(b.is_told());
}

TEST(PrefixMatch, a_window_needs_its_sinks_and_its_last_blocks_but_not_the_middle) {
  TreeBench b(4, {full_layer(), window_layer(6, 3)});
  const auto nodes = b.insert_chain(iota_tokens(40), {0, 1});
  for (size_t i = 1; i < 8; ++i) b.tree.drop(b.page_of(nodes[i], 1));
  EXPECT_EQ(b.depth(iota_tokens(40)), 40) << "blocks 0, 8 and 9 are there";
  EXPECT_EQ(b.depth(iota_tokens(36)), 4) << "block 7 would be read at 36";
  EXPECT_EQ(b.depth(iota_tokens(38)), 38) << "token 33 and later are read";
  EXPECT_EQ(b.depth(iota_tokens(37)), 37);
  EXPECT_EQ(b.match(iota_tokens(36)).num_tokens_raw, 36);
}

TEST(PrefixMatch, the_draft_shortens_the_joint_depth_by_no_more_than_what_it_can_serve) {
  TreeBench b(4, {full_layer(), full_layer(kDraft), window_layer(4, 0, kDraft)});
  const auto nodes = b.insert_chain(iota_tokens(24), {0, 1, 2});
  const MatchRules rules{.partial = true, .backoff_target = 0, .backoff_draft = 2};
  PrefixMatch match = b.match(iota_tokens(24), rules);
  EXPECT_EQ(match.num_tokens, 22);
  EXPECT_EQ(match.depth_of(kTarget), 24);
  EXPECT_EQ(match.depth_of(kDraft), 22);
  b.tree.drop(b.page_of(nodes[5], 2));
  match = b.match(iota_tokens(24), rules);
  EXPECT_EQ(match.num_tokens, 20);
  EXPECT_EQ(match.depth_of(kTarget), 24) << "a lost draft page costs the target nothing";
  EXPECT_EQ(match.depth_of(kDraft), 20);
  match = b.match(iota_tokens(24), {.backoff_target = 7, .backoff_draft = 2});
  EXPECT_EQ(match.num_tokens, 17);
  EXPECT_EQ(match.depth_of(kDraft), 20);
}

TEST(PrefixMatch, optional_and_private_layers_shorten_nothing) {
  TreeBench b(
      4, {full_layer(), window_layer(4, 0, kTarget, ReusePolicy::kOptional),
          full_layer(kTarget, ReusePolicy::kPrivate), full_layer(kDraft, ReusePolicy::kOptional)});
  const auto nodes = b.insert_chain(iota_tokens(8), {0, 1, 2, 3});
  EXPECT_EQ(b.page_of(nodes[1], 2), kNoPage) << "private pages are never shown";
  EXPECT_FALSE(b.attach(nodes[1], 2, 4));
  b.tree.drop(b.page_of(nodes[0], 3));
  b.tree.drop(b.page_of(nodes[1], 1));
  const PrefixMatch match = b.match(iota_tokens(8), {.backoff_target = 1, .backoff_draft = 5});
  EXPECT_EQ(match.num_tokens, 7) << "nor does the back-off of an optional domain";
  EXPECT_EQ(b.tree.num_nodes(), 2u) << "a dropped optional page takes no block along";
  EXPECT_TRUE(b.is_told());

  TreeBench none(4, {full_layer(kTarget, ReusePolicy::kOptional)});
  none.insert_chain(iota_tokens(8), {0});
  EXPECT_EQ(none.depth(iota_tokens(8)), 0) << "nothing is required, so nothing is served";
}

TEST(PrefixMatch, snapshots_of_one_block_move_forward_and_serve_only_what_comes_after_them) {
  TreeBench b(32, {full_layer(), ssm_layer()});
  EXPECT_EQ(b.depth(iota_tokens(25)), 0);
  NodeId node = b.insert(b.root, iota_tokens(10), {0}).node;
  EXPECT_EQ(b.depth(iota_tokens(10)), 0) << "no snapshot, no reuse";
  EXPECT_TRUE(b.attach(node, 1, 10));
  EXPECT_EQ(b.depth(iota_tokens(10)), 10);
  EXPECT_EQ(b.depth(iota_tokens(9)), 0) << "the fork is in front of the snapshot";
  node = b.insert(b.root, iota_tokens(20), {0}).node;
  EXPECT_EQ(b.coverage(node, 1), 10) << "the longer block adopts the snapshot";
  EXPECT_EQ(b.depth(iota_tokens(20)), 10);
  EXPECT_TRUE(b.attach(node, 1, 20));
  EXPECT_FALSE(b.attach(node, 1, 15)) << "an earlier snapshot does not replace a later one";
  EXPECT_EQ(b.depth(iota_tokens(20)), 20);
  EXPECT_EQ(b.depth(iota_tokens(15)), 0) << "a later snapshot is useless for an earlier fork";
  node = b.insert(b.root, iota_tokens(25), {0}).node;
  EXPECT_TRUE(b.attach(node, 1, 25));
  const PrefixMatch match = b.match(iota_tokens(40));
  EXPECT_EQ(match.num_tokens, 25);
  EXPECT_EQ(match.ssm_node, node);
  EXPECT_EQ(b.store.pages().num_in_use(), 2u) << "replaced pages are free";
  EXPECT_EQ(b.depth(iota_tokens(40), {.partial = false}), 0) << "it lies inside a block";
  EXPECT_TRUE(b.is_told());
}

TEST(PrefixMatch, depths_tell_where_a_snapshot_would_have_helped) {
  TreeBench b(4, {full_layer(), window_layer(5), ssm_layer()});
  const auto nodes = b.insert_chain(iota_tokens(16), {0, 1});
  b.attach(nodes[0], 2, 4);
  b.tree.drop(b.page_of(nodes[3], 1));
  std::vector<TokenId> fork = iota_tokens(15);
  fork.push_back(99);
  PrefixMatch match = b.match(fork);
  EXPECT_EQ(match.num_tokens, 4);
  EXPECT_EQ(match.num_tokens_hybrid, 12);
  EXPECT_EQ(match.num_tokens_raw, 15) << "where the fork began";
  EXPECT_EQ(match.num_tokens_lookup, 16);
  EXPECT_EQ(match.ssm_node, nodes[0]);
  b.attach(nodes[2], 2, 4);
  EXPECT_EQ(b.depth(fork), 12) << "a snapshot at the branch serves its siblings";
  match = b.match({77, 78});
  EXPECT_EQ(match.num_tokens_raw, 0);
  EXPECT_EQ(match.ssm_node, kNoNode);
}

TEST(PrefixMatch, a_snapshot_and_a_window_must_agree_on_the_depth) {
  TreeBench b(4, {window_layer(4), ssm_layer()});
  const auto nodes = b.insert_chain(iota_tokens(32), {0});
  for (size_t i : {1u, 4u, 6u}) b.attach(nodes[i], 1, 3);
  b.tree.drop(b.page_of(nodes[6], 0));
  b.tree.drop(b.page_of(nodes[4], 0));
  EXPECT_EQ(b.depth(iota_tokens(32)), 7) << "snapshots at 27 and 19 have lost their windows";
  EXPECT_EQ(b.match(iota_tokens(32)).num_tokens_hybrid, 32);
}

TEST(PrefixMatch, a_page_of_full_attention_that_was_never_brought_is_noticed) {
  TreeBench b(4, {full_layer(), full_layer(kDraft)});
  const NodeId first = b.insert(b.root, iota_tokens(4), {0, 1}).node;
  const NodeId second = b.insert(first, iota_tokens(4, 4), {0}).node;
  PrefixMatch match = b.match(iota_tokens(8));
  EXPECT_EQ(match.num_tokens, 4);
  EXPECT_EQ(match.depth_of(kTarget), 8);
  EXPECT_EQ(match.depth_of(kDraft), 4);
  EXPECT_TRUE(b.attach(second, 1, 2));
  EXPECT_EQ(b.depth(iota_tokens(8)), 6);
  EXPECT_EQ(b.depth(iota_tokens(8), {.partial = false}), 4);
  EXPECT_TRUE(b.attach(second, 1, 4));
  EXPECT_EQ(b.depth(iota_tokens(8)), 8);
  EXPECT_TRUE(b.is_told());
}

}  // namespace
}  // namespace helicore::kv::testing
