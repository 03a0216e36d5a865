#include "helicore/kv/prefix_match.h"

#include <algorithm>

namespace helicore::kv {
namespace {

constexpr std::array<CacheDomain, 2> kDomains{CacheDomain::kTarget, CacheDomain::kDraft};

constexpr uint32_t bit(CacheDomain domain) { return 1u << static_cast<uint32_t>(domain); }

}  // namespace

ReuseConstraints::ReuseConstraints(const LifeCycleRegistry& registry, int32_t tokens_per_block)
    : tokens_per_block_(tokens_per_block), life_cycles_(registry.all()) {
  for (size_t i = 0; i < life_cycles_.count(); ++i) {
    const LifeCycleId id(static_cast<int32_t>(i));
    const LifeCycle& lc = life_cycles_[id];
    if (lc.policy != ReusePolicy::kRequired) continue;
    required_ |= bit(lc.domain);
    if (lc.kind == LayerType::kSsm) {
      ssm_ = id;
    } else if (lc.window) {
      windows_.push_back(id);
    } else {
      full_.push_back(id);
    }
  }
}

void ReuseConstraints::apply_backoff(const MatchRules& rules, PrefixMatch& match) const noexcept {
  const int32_t raw = match.num_tokens_raw;
  int32_t depth = required_ == 0 ? 0 : raw;
  for (CacheDomain domain : kDomains) {
    int32_t& own = match.num_tokens_of[static_cast<size_t>(domain)];
    own = raw;
    if ((required_ & bit(domain)) == 0) continue;
    const int32_t backoff =
        domain == CacheDomain::kTarget ? rules.backoff_target : rules.backoff_draft;
    own = std::max(0, raw - backoff);
    if (!rules.partial) own -= own % tokens_per_block_;
    depth = std::min(depth, own);
  }
  match.num_tokens = match.num_tokens_hybrid = depth;
}

void ReuseConstraints::apply(const MatchedBlocks& blocks, const MatchRules& rules, bool check_full,
                             PrefixMatch& match) const {
  apply_backoff(rules, match);
  Query query{.blocks = blocks, .partial = rules.partial, .check_full = check_full};
  const bool both = required_ == (bit(CacheDomain::kTarget) | bit(CacheDomain::kDraft));
  int32_t depth = match.num_tokens;
  if (both) {
    for (CacheDomain domain : kDomains) {
      int32_t& own = match.num_tokens_of[static_cast<size_t>(domain)];
      query.domains = bit(domain);
      own = servable(query, own, nullptr);
      depth = std::min(depth, own);
    }
  }
  query.domains = required_;
  if (ssm_) {
    query.with_ssm = false;
    match.num_tokens_hybrid = servable(query, match.num_tokens, nullptr);
    query.with_ssm = true;
    depth = std::min(depth, match.num_tokens_hybrid);
  }
  match.num_tokens = servable(query, depth, &match.ssm_node);
  if (!ssm_) match.num_tokens_hybrid = match.num_tokens;
  if (both) return;
  for (CacheDomain domain : kDomains) {  // one domain alone serves what all serve
    if (required_ == bit(domain))
      match.num_tokens_of[static_cast<size_t>(domain)] = match.num_tokens;
  }
}

int32_t ReuseConstraints::servable(const Query& query, int32_t depth, NodeId* ssm_node) const {
  for (LifeCycleId lc : full_) {
    if (query.check_full && covers(query, lc)) depth = cut_full(query, lc, depth);
  }
  for (LifeCycleId lc : windows_) {
    if (covers(query, lc)) depth = cut_sinks(query, lc, depth);
  }
  const bool with_ssm = query.with_ssm && ssm_ && covers(query, *ssm_);
  if (!with_ssm && windows_.empty()) return depth;
  std::vector<int32_t> low(windows_.size(), INT32_MAX);
  for (int32_t before = -1; before != depth;) {
    before = depth;
    if (with_ssm) depth = cut_ssm(query, depth, ssm_node);
    for (size_t i = 0; i < windows_.size(); ++i) {
      if (covers(query, windows_[i])) depth = cut_window(query, windows_[i], depth, low[i]);
    }
  }
  return depth;
}

int32_t ReuseConstraints::depth_at(const Query& query, int32_t block,
                                   int32_t covered) const noexcept {
  const bool reaches = query.partial || covered == tokens_per_block_;
  return block * tokens_per_block_ + (reaches ? covered : 0);
}

int32_t ReuseConstraints::cut_full(const Query& query, LifeCycleId lc,
                                   int32_t depth) const noexcept {
  for (int32_t b = 0; b * tokens_per_block_ < depth; ++b) {
    const int32_t covered = query.blocks.coverage(b, lc);
    if (covered < needed(b, depth)) return depth_at(query, b, covered);
  }
  return depth;
}

int32_t ReuseConstraints::cut_sinks(const Query& query, LifeCycleId lc,
                                    int32_t depth) const noexcept {
  const int32_t end = life_cycles_[lc].stale_range(depth, tokens_per_block_).begin;
  for (int32_t b = 0; b < end; ++b) {
    const int32_t covered = query.blocks.coverage(b, lc);
    if (covered < needed(b, depth)) return depth_at(query, b, covered);
  }
  return depth;
}

int32_t ReuseConstraints::cut_window(const Query& query, LifeCycleId lc, int32_t depth,
                                     int32_t& low) const noexcept {
  low = std::min(low, ceil_div(depth, tokens_per_block_));
  int32_t end = life_cycles_[lc].stale_range(depth, tokens_per_block_).end;
  while (low > end) {
    const int32_t block = low - 1;
    const int32_t covered = query.blocks.coverage(block, lc);
    if (covered < needed(block, depth)) {
      depth = depth_at(query, block, covered);
      end = life_cycles_[lc].stale_range(depth, tokens_per_block_).end;
    }
    low = block;
  }
  return depth;
}

int32_t ReuseConstraints::cut_ssm(const Query& query, int32_t depth, NodeId* node) const noexcept {
  for (int32_t b = ceil_div(depth, tokens_per_block_) - 1; b >= 0; --b) {
    const int32_t position = query.blocks.coverage(b, *ssm_);
    if (position == 0 || position > depth - b * tokens_per_block_) continue;
    if (!query.partial && position != tokens_per_block_) continue;
    if (node != nullptr) *node = query.blocks.path[static_cast<size_t>(b)];
    return b * tokens_per_block_ + position;
  }
  if (node != nullptr) *node = kNoNode;
  return 0;
}

}  // namespace helicore::kv
