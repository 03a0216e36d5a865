// How much of a matched prefix can be reused: which life cycles constrain it, and the longest depth
// that all of them serve.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "helicore/kv/life_cycle.h"
#include "helicore/kv/page_store.h"

namespace helicore::kv {

// Tokens, >= 0, of the matched prefix that each domain must compute again. Without `partial` every
// depth is a whole number of blocks.
struct MatchRules {
  bool partial = true;
  int32_t backoff_target = 0;
  int32_t backoff_draft = 0;
};

// Depths in tokens: num_tokens <= num_tokens_hybrid <= num_tokens_raw <= num_tokens_lookup.
struct PrefixMatch {
  int32_t num_tokens = 0;         // what can be reused: every required life cycle serves it
  int32_t num_tokens_hybrid = 0;  // what the attention life cycles would serve, had the recurrent
                                  // state been kept everywhere
  int32_t num_tokens_raw = 0;     // tokens that the tree knows, before back-off: where a fork began
  int32_t num_tokens_lookup = 0;  // tokens asked for
  // What each domain alone could serve, indexed by CacheDomain; num_tokens_raw where the domain has
  // no required life cycle.
  std::array<int32_t, 2> num_tokens_of{};
  NodeId ssm_node = kNoNode;  // shows the recurrent state at num_tokens; none without SSM layers

  [[nodiscard]] int32_t depth_of(CacheDomain domain) const noexcept {
    return num_tokens_of[static_cast<size_t>(domain)];
  }
};

// The blocks that a prompt matched, and how far their pages reach.
struct MatchedBlocks {
  const PageStore& store;
  const PageId* pages;  // [node][life cycle]
  size_t num_life_cycles;
  std::span<const NodeId> path;  // node of each block

  // Tokens of the block that the page covers; 0 without a page.
  [[nodiscard]] int32_t coverage(int32_t block, LifeCycleId life_cycle) const noexcept {
    const size_t node = path[static_cast<size_t>(block)].value();
    const PageId page = pages[node * num_life_cycles + static_cast<size_t>(life_cycle.value())];
    return page == kNoPage ? 0 : store.page(page).num_tokens;
  }
};

// The required life cycles of a config and what each needs for a prefix of n tokens to be reused:
//   attention  every block outside stale_range(n) covers its tokens of the prefix;
//   SSM        a snapshot taken after exactly n tokens (n > 0).
// The longest such n is found by cutting: a rule that fails at n tells a shorter depth such that
// nothing between the two can satisfy it, so the cuts of all rules, repeated until none applies,
// end at the longest depth. A cut at block b that covers c tokens goes to b's first token + c: for
// any n' between, b still lies outside stale_range(n'), whose end never shrinks as n' grows and
// whose begin leaves out no sink in front of n'. Immutable.
class ReuseConstraints {
 public:
  ReuseConstraints(const LifeCycleRegistry& registry, int32_t tokens_per_block);

  // No windows and no recurrent state: blocks with complete pages serve every depth.
  [[nodiscard]] bool only_full_attention() const noexcept {
    return windows_.empty() && !ssm_.has_value();
  }
  [[nodiscard]] const std::vector<LifeCycleId>& full_attention() const noexcept { return full_; }
  // Fills the depths of `match` from num_tokens_raw. Where no life cycle is required nothing is
  // reused. `check_full`: pages of full attention may be missing or cover a part.
  void apply(const MatchedBlocks& blocks, const MatchRules& rules, bool check_full,
             PrefixMatch& match) const;
  // The same when every depth is served: only back-off applies.
  void apply_backoff(const MatchRules& rules, PrefixMatch& match) const noexcept;

 private:
  using Domains = uint32_t;  // bit CacheDomain
  struct Query {
    const MatchedBlocks& blocks;
    Domains domains = 0;
    bool partial = true;
    bool with_ssm = true;
    bool check_full = false;
  };
  [[nodiscard]] int32_t servable(const Query& query, int32_t depth, NodeId* ssm_node) const;
  [[nodiscard]] int32_t cut_full(const Query& query, LifeCycleId lc, int32_t depth) const noexcept;
  [[nodiscard]] int32_t cut_sinks(const Query& query, LifeCycleId lc, int32_t depth) const noexcept;
  // Blocks from `low` to the last of `depth` are known to serve.
  [[nodiscard]] int32_t cut_window(const Query& query, LifeCycleId lc, int32_t depth,
                                   int32_t& low) const noexcept;
  [[nodiscard]] int32_t cut_ssm(const Query& query, int32_t depth, NodeId* node) const noexcept;
  // The depth at which block `block` covers `covered` tokens.
  [[nodiscard]] int32_t depth_at(const Query& query, int32_t block, int32_t covered) const noexcept;
  [[nodiscard]] int32_t needed(int32_t block, int32_t depth) const noexcept {
    return std::min(tokens_per_block_, depth - block * tokens_per_block_);
  }
  [[nodiscard]] bool covers(const Query& query, LifeCycleId lc) const noexcept {
    return (query.domains >> static_cast<uint32_t>(life_cycles_[lc].domain) & 1u) != 0;
  }

  int32_t tokens_per_block_;
  TypedVec<LifeCycleId, LifeCycle> life_cycles_;
  std::vector<LifeCycleId> full_;     // required, full attention
  std::vector<LifeCycleId> windows_;  // required, with a window
  std::optional<LifeCycleId> ssm_;
  Domains required_ = 0;  // domains with a required life cycle
};

}  // namespace helicore::kv
