// A listener that knows nothing but events: it keeps the tree that they describe and compares it
// with the manager's.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>

#include "helicore/kv/block_key.h"
#include "helicore/kv/introspection.h"

namespace helicore::kv::testing {

class EventListener {
 public:
  // Loses every n-th removal; a mistake for negative controls. 0: none.
  explicit EventListener(int lose_every = 0) : lose_every_(lose_every) {}

  void apply(std::span<const KVEvent> events) {
    for (const KVEvent& event : events) apply(event);
  }
  void restart(std::span<const KVEvent> snapshot) {
    auto seen = std::move(seen_);
    *this = EventListener(lose_every_);
    seen_ = std::move(seen);
    next_id_.reset();  // an empty tree tells no id
    for (const KVEvent& event : snapshot) {
      next_id_ = event.id;  // a snapshot is one moment
      apply(event);
      next_id_ = event.id;
    }
  }

  // What is wrong, in words: an event that made no sense, or a tree unlike the manager's.
  std::optional<std::string> compare(KVCacheManager& manager) const {
    return compare(Introspection::state(manager).tree, Introspection::state(manager).store);
  }
  std::optional<std::string> compare(const RadixTree& tree, const PageStore& store) const {
    if (problem_) return problem_;
    size_t num_found = 0;
    for (size_t i = 0; i < tree.num_records(); ++i) {
      const NodeId id(static_cast<uint32_t>(i));
      if (!tree.node(id).in_use) continue;
      const auto it = blocks_.find(tree.key(id));
      if (it == blocks_.end()) return "a block of the tree was never reported";
      ++num_found;
      const Block& block = it->second;
      const auto tokens = tree.tokens(id);
      const bool is_root = tree.node(id).parent == kNoNode;
      if (block.tokens != std::vector<TokenId>(tokens.begin(), tokens.end()) ||
          block.ordinal != tree.node(id).ordinal) {
        return "a block has other tokens";
      }
      if (is_root != !block.parent) return "a root is taken for a block or the reverse";
      if (is_root) continue;
      if (*block.parent != tree.key(tree.node(id).parent)) return "a block has another parent";
      if (block.priority != tree.node(id).priority) return "a block has another priority";
      if (block.coverage != coverage_of(tree, store, id)) return "a block has other pages";
    }
    if (num_found != blocks_.size()) return "a block that is gone was not reported as removed";
    return std::nullopt;
  }
  size_t num_blocks() const { return blocks_.size(); }
  size_t num_seen(EventKind kind) const { return seen_.count(kind) ? seen_.at(kind) : 0; }

 private:
  using Coverage = std::map<int32_t, int32_t>;  // by life cycle; those with a page
  struct Block {
    std::optional<Digest> parent;  // none for a root
    int32_t ordinal = -1;
    int priority = 0;
    std::vector<TokenId> tokens;
    int num_children = 0;
    Coverage coverage{};
  };

  static Coverage coverage_of(const RadixTree& tree, const PageStore& store, NodeId node) {
    Coverage coverage;
    for (size_t lc = 0; lc < tree.pages(node).size(); ++lc) {
      const PageId page = tree.pages(node)[lc];
      if (page != kNoPage) coverage[static_cast<int32_t>(lc)] = store.page(page).num_tokens;
    }
    return coverage;
  }

  void require(bool condition, const char* what) {
    if (!condition && !problem_) problem_ = what;
  }

  void apply(const KVEvent& event) {
    require(!next_id_ || event.id == *next_id_, "a gap in the ids");
    next_id_ = event.id + 1;
    ++seen_[event.kind];
    switch (event.kind) {
      case EventKind::kCreated:
        require(event.scope && event.key == root_key(*event.scope), "the key of a root");
        require(blocks_.emplace(event.key, Block{}).second, "a root was created twice");
        return;
      case EventKind::kStored:
        return event.life_cycle == KVEvent::kWholeBlock ? store(event) : store_page(event);
      case EventKind::kRemoved:
        return event.life_cycle == KVEvent::kWholeBlock ? remove(event.key) : remove_page(event);
      case EventKind::kUpdated:
        require(blocks_.count(event.key) > 0, "an unknown block was updated");
        require(blocks_[event.key].priority < event.priority, "a priority did not rise");
        blocks_[event.key].priority = event.priority;
    }
  }

  void store(const KVEvent& event) {
    const auto parent = blocks_.find(event.parent_key);
    require(parent != blocks_.end(), "a block was stored below an unknown parent");
    if (problem_) return;
    require(event.key == block_key(event.parent_key, event.tokens), "the key of a block");
    require(event.ordinal == parent->second.ordinal + 1, "the ordinal of a block");
    ++parent->second.num_children;
    Block block{event.parent_key, event.ordinal, event.priority, event.tokens};
    for (int32_t lc : event.life_cycles) {
      block.coverage[lc] = static_cast<int32_t>(event.tokens.size());
    }
    require(blocks_.emplace(event.key, block).second, "a block was stored twice");
  }

  void store_page(const KVEvent& event) {
    require(blocks_.count(event.key) > 0, "a page was stored in an unknown block");
    int32_t& coverage = blocks_[event.key].coverage[event.life_cycle];
    require(coverage < event.num_tokens, "a page gave way to one that covers no more");
    coverage = event.num_tokens;
  }

  void remove_page(const KVEvent& event) {
    require(blocks_.count(event.key) > 0, "a page was removed from an unknown block");
    require(blocks_[event.key].coverage.erase(event.life_cycle) == 1, "an unknown page went");
  }

  void remove(const Digest& key) {
    if (lose_every_ > 0 && ++num_removals_ % lose_every_ == 0) return;
    const auto it = blocks_.find(key);
    require(it != blocks_.end(), "an unknown block was removed");
    if (problem_) return;
    require(it->second.num_children == 0, "a block was removed before what is below it");
    if (it->second.parent) --blocks_[*it->second.parent].num_children;
    blocks_.erase(it);
  }

  int lose_every_;
  int num_removals_ = 0;
  std::optional<uint64_t> next_id_ = 0;
  std::map<Digest, Block> blocks_;
  std::map<EventKind, size_t> seen_;
  std::optional<std::string> problem_;
};

}  // namespace helicore::kv::testing
