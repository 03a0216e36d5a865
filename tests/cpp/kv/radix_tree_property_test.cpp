// Random histories of a tree with every kind of life cycle against a sorted map, and matching
// against the definition tried at every depth.
#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <set>

#include "kv/naive_tree.h"
#include "kv/tree_bench.h"

namespace helicore::kv::testing {
namespace {

using Tokens = NaiveTree::Tokens;
constexpr CacheDomain kTarget = CacheDomain::kTarget;
constexpr CacheDomain kDraft = CacheDomain::kDraft;

std::vector<std::vector<LayerConfig>> mixes() {
  return {
      {full_layer()},
      {full_layer(), window_layer(5, 2), window_layer(9)},
      {full_layer(), ssm_layer()},
      {window_layer(4, 3), ssm_layer(), window_layer(1)},
      {full_layer(), full_layer(kDraft), window_layer(6, 0, kDraft)},
      {full_layer(), full_layer(kTarget, ReusePolicy::kOptional),
       full_layer(kDraft, ReusePolicy::kPrivate),
       window_layer(5, 4, kTarget, ReusePolicy::kOptional), window_layer(3, 0, kDraft)},
      {ssm_layer()},
      {window_layer(7, 2, kDraft), full_layer(kDraft)},
  };
}

class Driver {
 public:
  Driver(uint32_t seed, std::vector<LayerConfig> layers, int32_t block, int lose_every = 0)
      : random_(seed),
        bench_(block, std::move(layers), 2048, lose_every),
        model_(bench_.registry, block),
        block_(static_cast<size_t>(block)) {}

  // What differs after one random change and one random match, in words.
  std::optional<std::string> step(Mistake mistake = Mistake::kNone) {
    switch (below(12)) {
      case 0:
      case 1:
        drop_a_page();
        break;
      case 2:
        if (below(4) == 0) drop_a_block();
        break;
      case 3:
        pin_or_unpin();
        break;
      case 4:
      case 5:
      case 6:
        attach_to(any_block(), below(bench_.num_life_cycles()));
        break;
      case 7:
        let_go();
        break;
      default:
        insert();
    }
    if (!problem_) compare();
    if (!problem_) compare_match(mistake);
    return problem_;
  }

  void finish() {
    for (auto& [path, block] : model_.blocks()) {
      for (; block.pins > 0; --block.pins) {
        ASSERT_GT(bench_.tree.node(find(path)).num_pins, 0u);
        unpinned_.push_back(find(path));
      }
    }
    for (NodeId node : unpinned_) bench_.tree.unpin(node);
    for (PageHandle page : held_) bench_.store.unhold(page);
    bench_.tree.evict_all();
    ASSERT_EQ(bench_.tree.num_nodes(), 0u);
    ASSERT_EQ(bench_.store.pages().num_in_use(), 0u);
    ASSERT_EQ(bench_.store.num_double_releases(), 0u);
    ASSERT_TRUE(bench_.is_told());
    bench_.tree.unpin(bench_.root);
    ASSERT_EQ(bench_.tree.num_roots(), 0u);
  }
  TreeBench& bench() { return bench_; }

 private:
  size_t below(size_t n) { return random_() % n; }
  void require(bool condition, const std::string& what) {
    if (!condition && !problem_) problem_ = what;
  }

  NodeId find(const Tokens& path) const {
    NodeId node = bench_.root;
    for (size_t at = 0; at < path.size(); at += block_) {
      node = bench_.tree.find_child(
          node, std::span(path).subspan(at, std::min(block_, path.size() - at)));
    }
    return node;
  }
  Tokens path_of(NodeId node) const {
    std::vector<NodeId> nodes;
    bench_.tree.path_to(node, &nodes);
    Tokens path;
    for (NodeId id : nodes) {
      const auto own = bench_.tree.tokens(id);
      path.insert(path.end(), own.begin(), own.end());
    }
    return path;
  }
  // Empty when there is none.
  Tokens any_block() {
    if (model_.blocks().empty()) return {};
    auto it = model_.blocks().begin();
    std::advance(it, below(model_.blocks().size()));
    return it->first;
  }
  Tokens extend(Tokens path, size_t count) {
    for (size_t i = 0; i < count; ++i) path.push_back(static_cast<TokenId>(below(2)));
    return path;
  }

  void insert() {
    Tokens parent = below(6) == 0 ? Tokens{} : any_block();
    parent.resize(parent.size() / block_ * block_);
    const Tokens path = extend(parent, below(3) > 0 ? block_ : 1 + below(block_));
    std::vector<bool> brings(bench_.num_life_cycles());
    std::vector<PageHandle> pages(brings.size());
    for (size_t lc = 0; lc < brings.size(); ++lc) {
      const LifeCycle& cycle = bench_.registry[LifeCycleId(static_cast<int32_t>(lc))];
      brings[lc] = cycle.kind != LayerType::kSsm && below(cycle.is_full_attention() ? 40 : 4) > 0;
      if (brings[lc]) pages[lc] = new_page(lc);
    }
    bench_.tree.reserve_nodes(1);
    const InsertResult result =
        bench_.tree.insert(find(parent), std::span(path).subspan(parent.size()), pages);
    const auto [outcome, shown] = model_.insert(path, brings);
    require(result.outcome == outcome, "the outcome of an insert");
    require(find(shown) == result.node, "the node of an insert");
    for (size_t lc = 0; lc < pages.size(); ++lc) {
      if (pages[lc].is_null()) continue;
      if (outcome != InsertOutcome::kInserted) {  // a twin donates what the block lacks
        const auto own = static_cast<int32_t>(path.size() - parent.size());
        const LifeCycleId id(static_cast<int32_t>(lc));
        require(
            bench_.tree.attach(result.node, id, pages[lc], own) == model_.attach(shown, lc, own),
            "a donated page");
      }
      keep_or_let_go(pages[lc]);
    }
    bench_.tree.prune(result.node);
    model_.prune(shown);
  }
  void attach_to(const Tokens& path, size_t lc) {
    if (path.empty()) return;
    const size_t length = path.size() - model_.parent_length(path);
    const auto num_tokens = static_cast<int32_t>(1 + below(length));
    const PageHandle page = new_page(lc);
    const LifeCycleId id(static_cast<int32_t>(lc));
    require(
        bench_.tree.attach(find(path), id, page, num_tokens) == model_.attach(path, lc, num_tokens),
        "an attached page");
    keep_or_let_go(page);
  }
  PageHandle new_page(size_t lc) { return bench_.page(lc, static_cast<uint8_t>(30 + below(3))); }
  void keep_or_let_go(PageHandle page) {
    if (below(4) == 0 && held_.size() < 200) {
      held_.push_back(page);
    } else {
      bench_.store.unhold(page);
    }
  }
  void let_go() {
    for (size_t i = below(20); i > 0 && !held_.empty(); --i) {
      std::swap(held_[below(held_.size())], held_.back());
      bench_.store.unhold(held_.back());
      held_.pop_back();
    }
  }
  void drop_a_page() {
    std::vector<PageId> queued;
    for (size_t i = 0; i < bench_.store.pages().num_records(); ++i) {
      const PageId id(static_cast<uint32_t>(i));
      if (bench_.store.page(id).in_use && bench_.store.page(id).queued) queued.push_back(id);
    }
    if (queued.empty()) return;
    const PageId page = queued[below(queued.size())];
    const size_t lc = bench_.store.page(page).life_cycle;
    const Tokens path = path_of(bench_.store.page(page).node);
    const size_t before = model_.blocks().size();
    model_.drop(path, lc);
    require(static_cast<size_t>(bench_.tree.drop(page)) == before - model_.blocks().size(),
            "the number of dropped blocks");
  }
  void drop_a_block() {
    const Tokens path = any_block();
    if (path.empty()) return;
    bench_.tree.drop_node(find(path));
    model_.drop_block(path);
  }
  void pin_or_unpin() {
    const Tokens path = any_block();
    if (path.size() % block_ != 0 || path.empty()) return;
    int& pins = model_.blocks().at(path).pins;
    if (pins == 0 || below(4) == 0) {
      ++pins;
      bench_.tree.pin(find(path));
    } else {
      --pins;
      bench_.tree.unpin(find(path));
      model_.prune(path);
    }
  }

  void compare() {
    require(bench_.tree.num_nodes() == model_.blocks().size(), "the number of blocks");
    size_t num_pages = 0;
    for (const auto& [path, block] : model_.blocks()) {
      const NodeId node = find(path);
      for (size_t lc = 0; lc < bench_.num_life_cycles(); ++lc) {
        const auto it = block.coverage.find(lc);
        const int32_t covered = it == block.coverage.end() ? 0 : it->second;
        require(bench_.coverage(node, lc) == covered, "what a page covers");
        if (covered == 0) continue;
        ++num_pages;
        require(bench_.store.page(bench_.page_of(node, lc)).node == node, "the node of a page");
      }
    }
    for (PageHandle page : held_) num_pages += bench_.store.page(page.id).node == kNoNode ? 1 : 0;
    require(num_pages == bench_.store.pages().num_in_use(), "a page leaked or outlives its block");
    if (const auto problem = bench_.listen()) require(false, *problem);
  }

  void compare_match(Mistake mistake) {
    const MatchRules rules{below(4) > 0, static_cast<int32_t>(below(4)),
                           static_cast<int32_t>(below(4))};
    Tokens prompt = any_block();
    prompt.resize(prompt.size() - std::min(prompt.size(), below(3)));
    prompt = extend(prompt, below(block_ + 2));
    std::vector<NodeId> path;
    const PrefixMatch match = bench_.match(prompt, rules, &path);
    require(match.num_tokens == bench_.depth(prompt, rules), "a match without a path differs");
    const auto [raw, candidates] = model_.raw(prompt, rules.partial);
    require(match.num_tokens_raw == raw, "the raw depth");
    require(path.size() * block_ < static_cast<size_t>(match.num_tokens) + block_ &&
                path.size() * block_ >= static_cast<size_t>(match.num_tokens),
            "the length of the path");
    require(match.num_tokens <= match.num_tokens_hybrid &&
                match.num_tokens_hybrid <= match.num_tokens_raw &&
                match.num_tokens_raw <= match.num_tokens_lookup,
            "the order of the depths");
    // Several blocks may share the last tokens; the path tells which one was taken.
    bool is_found = raw == 0;
    for (const Tokens& last : candidates) {
      if (path.size() == last.size() / block_ + (last.size() % block_ > 0) &&
          path_of(path.back()) != last) {
        continue;
      }
      is_found = is_found || agrees(match, prompt, rules, last, mistake);
    }
    require(is_found, "a depth that the definition does not give");
    if (!path.empty()) check_path(match, prompt, path);
  }
  void check_path(const PrefixMatch& match, const Tokens& prompt, const std::vector<NodeId>& path) {
    const Tokens last = path_of(path.back());
    const auto reused = static_cast<size_t>(match.num_tokens);
    require(last.size() >= reused &&
                std::equal(last.begin(), last.begin() + match.num_tokens, prompt.begin()),
            "the tokens of the path");
    const auto ssm = bench_.registry.ssm_life_cycle_id();
    if (!ssm) return;
    const auto lc = static_cast<size_t>(ssm->value());
    require(match.ssm_node == path.back() &&
                bench_.coverage(match.ssm_node, lc) ==
                    match.num_tokens - static_cast<int32_t>(model_.parent_length(last)),
            "the node of the snapshot");
  }
  bool agrees(const PrefixMatch& match, const Tokens& prompt, const MatchRules& rules,
              const Tokens& last, Mistake mistake) const {
    uint32_t required = 0;
    for (const LifeCycle& lc : bench_.registry.all()) {
      if (lc.policy == ReusePolicy::kRequired) required |= 1u << static_cast<uint32_t>(lc.domain);
    }
    int32_t limit = match.num_tokens_raw;
    for (uint32_t d = 0; d < 2; ++d) {
      int32_t own = match.num_tokens_raw;
      if ((required >> d & 1u) != 0) {
        const int32_t backoff = d == 0 ? rules.backoff_target : rules.backoff_draft;
        own = std::max(0, own - backoff);
        limit = std::min(limit, own);
        own = model_.longest(prompt, own, last, 1u << d, rules.partial, true, mistake);
      }
      if (match.num_tokens_of[d] != own) return false;
    }
    int32_t joint = model_.longest(prompt, limit, last, required, rules.partial, true, mistake);
    if (mistake == Mistake::kLateBackoff) {
      joint = model_.longest(prompt, match.num_tokens_raw, last, required, rules.partial, true);
      joint = std::max(0, joint - rules.backoff_target);
    }
    const int32_t hybrid =
        model_.longest(prompt, limit, last, required, rules.partial, false, mistake);
    return match.num_tokens == joint && match.num_tokens_hybrid == hybrid;
  }

  std::mt19937 random_;
  TreeBench bench_;
  NaiveTree model_;
  size_t block_;
  std::vector<PageHandle> held_;
  std::vector<NodeId> unpinned_;
  std::optional<std::string> problem_;
};

class TreeProperty : public ::testing::TestWithParam<size_t> {};

TEST_P(TreeProperty, agrees_with_a_map_and_with_matching_by_definition) {
  for (uint32_t seed = 0; seed < 8; ++seed) {
    for (int32_t block : {1, 2, 3, 4}) {
      Driver driver(seed * 10 + static_cast<uint32_t>(block), mixes()[GetParam()], block);
      for (int i = 0; i < 400; ++i) {
        const auto problem = driver.step();
        ASSERT_EQ(problem, std::nullopt) << "seed " << seed << " block " << block << " step " << i;
      }
      driver.finish();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Mixes, TreeProperty, ::testing::Range(size_t{0}, mixes().size()));

bool notices(Mistake mistake, size_t mix, int lose_every = 0) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    Driver driver(seed, mixes()[mix], 3, lose_every);
    for (int i = 0; i < 400; ++i) {
      if (driver.step(mistake)) return true;
    }
  }
  return false;
}

TEST(TreePropertyControl, wrong_readings_of_the_rules_are_noticed) {
  EXPECT_TRUE(notices(Mistake::kNoSinks, 1));
  EXPECT_TRUE(notices(Mistake::kShortWindow, 1));
  EXPECT_TRUE(notices(Mistake::kNoSnapshot, 2));
  EXPECT_TRUE(notices(Mistake::kLateBackoff, 1));
  EXPECT_TRUE(notices(Mistake::kOptionalCounts, 5));
  EXPECT_TRUE(notices(Mistake::kNone, 1, 5)) << "a lost removal";
  EXPECT_FALSE(notices(Mistake::kNone, 1));
}

}  // namespace
}  // namespace helicore::kv::testing
