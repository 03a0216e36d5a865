// The tree of blocks as a sorted map, and matching by the definition: every depth is tried.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "helicore/kv/life_cycle.h"
#include "helicore/kv/prefix_match.h"
#include "helicore/kv/radix_tree.h"

namespace helicore::kv::testing {

// Wrong readings of the rules, for negative controls.
enum class Mistake { kNone, kNoSinks, kShortWindow, kNoSnapshot, kLateBackoff, kOptionalCounts };

class NaiveTree {
 public:
  using Tokens = std::vector<TokenId>;         // a block: all tokens from the root to its end
  using Coverage = std::map<size_t, int32_t>;  // by life cycle
  struct Block {
    Coverage coverage;
    int pins = 0;
  };

  NaiveTree(const LifeCycleRegistry& registry, int32_t tokens_per_block)
      : registry_(registry), block_(static_cast<size_t>(tokens_per_block)) {}

  const std::map<Tokens, Block>& blocks() const { return blocks_; }
  std::map<Tokens, Block>& blocks() { return blocks_; }
  size_t parent_length(const Tokens& path) const { return (path.size() - 1) / block_ * block_; }

  std::pair<InsertOutcome, Tokens> insert(const Tokens& path, const std::vector<bool>& brings) {
    if (blocks_.count(path) > 0) return {InsertOutcome::kExisting, path};
    const auto own = static_cast<int32_t>(path.size() - parent_length(path));
    Tokens shorter;
    for (const auto& [other, block] : blocks_) {
      if (parent_length(other) != parent_length(path)) continue;
      if (starts_with(other, path)) return {InsertOutcome::kCovered, other};
      if (starts_with(path, other)) shorter = other;
    }
    Block added;
    if (!shorter.empty()) {
      added.coverage = blocks_[shorter].coverage;
      blocks_.erase(shorter);
    }
    for (size_t lc = 0; lc < registry_.count(); ++lc) {
      if (brings[lc] && life_cycle(lc).policy != ReusePolicy::kPrivate) added.coverage[lc] = own;
    }
    blocks_[path] = added;
    return {InsertOutcome::kInserted, path};
  }

  bool attach(const Tokens& path, size_t lc, int32_t num_tokens) {
    if (life_cycle(lc).policy == ReusePolicy::kPrivate) return false;
    int32_t& now = blocks_[path].coverage[lc];
    if (now >= num_tokens) return false;
    now = num_tokens;
    return true;
  }

  void drop(Tokens path, size_t lc) {
    const LifeCycle& cycle = life_cycle(lc);
    const bool is_sink = parent_length(path) / block_ < static_cast<size_t>(cycle.num_sink_blocks);
    if (cycle.policy == ReusePolicy::kRequired && cycle.kind == LayerType::kAttention &&
        (!cycle.window || is_sink)) {
      return drop_block(path);
    }
    blocks_[path].coverage.erase(lc);
    prune(path);
  }

  void drop_block(const Tokens& path) {
    std::vector<Tokens> below;
    for (const auto& [other, block] : blocks_) {
      if (starts_with(other, path)) below.push_back(other);
    }
    std::reverse(below.begin(), below.end());
    for (const Tokens& other : below) {
      blocks_[other].coverage.clear();
      if (is_removable(other)) blocks_.erase(other);
    }
    prune({path.begin(), path.begin() + static_cast<std::ptrdiff_t>(parent_length(path))});
  }

  void prune(Tokens path) {
    while (blocks_.count(path) > 0 && is_removable(path)) {
      blocks_.erase(path);
      path.resize(parent_length(path));
    }
  }

  // The block of `path` that holds its last token may be any of several; `last` names the one.
  int32_t longest(const Tokens& prompt, int32_t limit, const Tokens& last, uint32_t domains,
                  bool partial, bool with_ssm, Mistake mistake = Mistake::kNone) const {
    for (int32_t n = limit; n > 0; --n) {
      if (!partial && static_cast<size_t>(n) % block_ != 0) continue;
      if (serves(prompt, n, last, domains, with_ssm, mistake)) return n;
    }
    return 0;
  }

  // Length of the longest known prefix and the blocks that hold its end.
  std::pair<int32_t, std::vector<Tokens>> raw(const Tokens& prompt, bool partial) const {
    size_t best = 0;
    std::vector<Tokens> last;
    for (const auto& [path, block] : blocks_) {
      const auto end = std::mismatch(path.begin(), path.end(), prompt.begin(), prompt.end()).first;
      auto common = static_cast<size_t>(end - path.begin());
      if (!partial) common -= common % block_;
      if (common <= parent_length(path)) continue;  // ends in a block above
      if (common > best) last.clear();
      if (common >= best) last.push_back(path);
      best = std::max(best, common);
    }
    return {static_cast<int32_t>(best), last};
  }

 private:
  static bool starts_with(const Tokens& tokens, const Tokens& prefix) {
    return tokens.size() >= prefix.size() &&
           std::equal(prefix.begin(), prefix.end(), tokens.begin());
  }
  const LifeCycle& life_cycle(size_t lc) const {
    return registry_[LifeCycleId(static_cast<int32_t>(lc))];
  }
  bool is_removable(const Tokens& path) const {
    const auto it = blocks_.find(path);
    const auto next = std::next(it);
    const bool has_child = next != blocks_.end() && starts_with(next->first, path);
    return it->second.coverage.empty() && it->second.pins == 0 && !has_child;
  }

  bool serves(const Tokens& prompt, int32_t n, const Tokens& last, uint32_t domains, bool with_ssm,
              Mistake mistake) const {
    const auto block = static_cast<int32_t>(block_);
    for (size_t lc = 0; lc < registry_.count(); ++lc) {
      const LifeCycle& cycle = life_cycle(lc);
      const bool counts =
          cycle.policy == ReusePolicy::kRequired ||
          (mistake == Mistake::kOptionalCounts && cycle.policy == ReusePolicy::kOptional);
      if (!counts || (domains >> static_cast<uint32_t>(cycle.domain) & 1u) == 0) continue;
      if (cycle.kind == LayerType::kSsm) {
        if (!with_ssm || mistake == Mistake::kNoSnapshot) continue;
        const int32_t b = (n - 1) / block;
        if (covered(prompt, b, last, lc) != n - b * block) return false;
        continue;
      }
      for (int32_t b = 0; b * block < n; ++b) {
        const bool is_sink = b < cycle.num_sink_blocks && mistake != Mistake::kNoSinks;
        const int32_t window = cycle.window.value_or(0) - (mistake == Mistake::kShortWindow);
        const bool is_read = !cycle.window || is_sink || (b + 1) * block > n + 1 - window;
        if (is_read && covered(prompt, b, last, lc) < std::min(block, n - b * block)) return false;
      }
    }
    return true;
  }
  int32_t covered(const Tokens& prompt, int32_t b, const Tokens& last, size_t lc) const {
    const size_t end = (static_cast<size_t>(b) + 1) * block_;
    Tokens path = last;
    if (parent_length(last) != static_cast<size_t>(b) * block_) {
      path.assign(prompt.begin(), prompt.begin() + static_cast<std::ptrdiff_t>(end));
    }
    const Coverage& coverage = blocks_.at(path).coverage;
    const auto it = coverage.find(lc);
    return it == coverage.end() ? 0 : it->second;
  }

  const LifeCycleRegistry& registry_;
  size_t block_;
  std::map<Tokens, Block> blocks_;
};

}  // namespace helicore::kv::testing
