// The radix tree of committed blocks: one root per reuse scope, one node per block, matched by
// comparing tokens. A node shows at most one page per life cycle and observes it (the page store
// owns pages); the tree decides what is evicted with what.
//
// Nodes are records in flat arrays addressed by 32-bit ids; tokens, keys and page ids lie in arrays
// of their own, so that a walk along a prompt committed in one go streams through memory. The
// children of a node form a treap ordered by tokens, linked through the records: search, longest
// common prefix and insertion cost O(log fan-out) and no allocation, whatever the fan-out.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "helicore/kv/block_key.h"
#include "helicore/kv/event_log.h"
#include "helicore/kv/life_cycle.h"
#include "helicore/kv/page_store.h"
#include "helicore/kv/prefix_match.h"

namespace helicore::kv {

struct NodeRecord {
  NodeId parent = kNoNode;      // kNoNode for a root
  NodeId child_root = kNoNode;  // top of the treap of children
  NodeId left = kNoNode;        // siblings that come before
  NodeId right = kNoNode;       // siblings that come after
  uint64_t prefix = 0;          // the first two tokens, in comparing order
  int32_t num_tokens = 0;       // 0 for a root; below tokens_per_block only in leaves
  int32_t ordinal = -1;         // block ordinal; -1 for a root
  uint32_t num_pins = 0;        // live sequences whose last committed block this is
  bool in_use = false;
  bool has_gap = false;  // a required full attention page is missing or covers a part
  uint8_t priority = 0;  // highest so far, what listeners were told
};
static_assert(sizeof(NodeRecord) <= 40, "budget of a node record");

enum class InsertOutcome : uint8_t {
  kInserted,  // a new node shows the pages
  kExisting,  // a node with the same tokens was there; the pages stay private
  kCovered,   // a longer block begins with the tokens; nothing to show
};

struct InsertResult {
  InsertOutcome outcome = InsertOutcome::kInserted;
  NodeId node = kNoNode;  // for kCovered the covering node
};

// The page of an attention life cycle covers the first PageRecord::num_tokens tokens of the block,
// all of them unless it was adopted from a shorter block. The page of the SSM life cycle is the
// state after exactly num_tokens of its tokens (1..tokens_per_block). A page gives way to one with
// a larger count only.
//
// The backbone of a block are its pages of required full attention, and of required windows where
// the block is a sink: without one of them nothing below can be reused, so it takes the subtree
// along. Every other page goes alone.
//
// Invariants: a node with children is full; a leaf that nobody pins has a page; a page is shown by
// at most one node. A pinned node and its ancestors are never removed. Not thread-safe: the
// manager's lock guards it; const methods may run side by side.
class RadixTree {
 public:
  // Changes are recorded in `events` when it is given.
  RadixTree(PageStore& store, const LifeCycleRegistry& registry, int32_t tokens_per_block,
            EventLog* events = nullptr);

  [[nodiscard]] NodeId find_root(const ReuseScope& scope) const;
  [[nodiscard]] NodeId find_or_create_root(const ReuseScope& scope);

  // The longest prefix of `tokens` below `root` that can be reused: the blocks with these tokens,
  // less back-off, cut to what every required life cycle serves. `path`, when not null, receives
  // the nodes of that depth, the partly matched one last.
  PrefixMatch match(NodeId root, std::span<const TokenId> tokens, const MatchRules& rules,
                    std::vector<NodeId>* path) const;

  // The child of `parent` with exactly these tokens; kNoNode when there is none.
  [[nodiscard]] NodeId find_child(NodeId parent, std::span<const TokenId> tokens) const noexcept {
    return search(parent, tokens).exact;
  }

  // The child that begins with these tokens, or has just them; kNoNode when there is none.
  [[nodiscard]] NodeId find_cover(NodeId parent, std::span<const TokenId> tokens) const noexcept {
    const Search found = search(parent, tokens);
    return found.exact != kNoNode ? found.exact : found.longer;
  }

  // Makes room for `count` more nodes; the only step of insert() that can fail.
  void reserve_nodes(size_t count);
  // Shows `pages` (one per life cycle, held; null where there is none to show, always so for SSM
  // and private life cycles) as the block of `tokens` below `parent`. A shorter leaf that is a
  // prefix of the new block is replaced: the new block adopts its pages, with their counts, where
  // it brings none; the others lose their node. Needs reserve_nodes(). A node inserted without any
  // page must be pinned or pruned.
  InsertResult insert(NodeId parent, std::span<const TokenId> tokens,
                      std::span<const PageHandle> pages);
  // Gives `node` a page that it lacks or has with a smaller count; that one is detached. False, and
  // nothing changes, when the node's page is as good or the life cycle is private. `num_tokens`:
  // 1..the node's tokens.
  bool attach(NodeId node, LifeCycleId life_cycle, PageHandle page, int32_t num_tokens);

  // The highest priority of a page of the life cycle in the children of the node; 0 without any.
  [[nodiscard]] uint8_t highest_priority_below(NodeId node, size_t life_cycle) const;
  // Pages in front of the node's become worth as much as it, where retention had run out for them;
  // adds them to `raised`.
  void raise_above(NodeId node, std::vector<PageHandle>& raised);
  // Tells listeners that a page of the node has `priority` now, when none was that high before.
  void priority_raised(NodeId node, uint8_t priority) noexcept;
  void pin(NodeId node) noexcept { ++nodes_[node.value()].num_pins; }
  // Removes what that leaves without use, as prune() does.
  void unpin(NodeId node);
  // Removes `node` and then its ancestors as long as each is an unpinned leaf without pages; a root
  // that has become empty and unpinned goes as well. Returns the number of nodes removed.
  int64_t prune(NodeId node);

  // The nodes from the first block down to `node`, which may be a root: then none.
  void path_to(NodeId node, std::vector<NodeId>* path) const;

  // A droppable page leaves the tree: a backbone page with its node and everything below, any other
  // page alone; then prune() from there. What somebody still holds below leaves the tree too and
  // becomes private. Returns the number of nodes removed.
  int64_t drop(PageId page);
  // For lost data: takes every page of the node and of its subtree out of the tree, held ones
  // included, which become private. Nodes that are pinned, and those above them, stay without pages
  // until they are unpinned. Returns the number of nodes removed.
  int64_t drop_node(NodeId node);
  // Pages of a windowed life cycle that, once `node` has no page of it, belong to no complete
  // window at any depth: no match can need them. Looks at the run of pages above `node`, and at the
  // run below it, as far as the tree does not branch. Appended last block first; sinks are never
  // among them. Call it before drop(), which may remove the node.
  void collect_useless(NodeId node, LifeCycleId life_cycle, std::vector<PageId>& out) const;

  // Drops everything that nobody holds.
  int64_t evict_all();

  // Created and stored events that make the tree as it is, each block behind its parent and in
  // front of its pages that cover a part. All carry the id that the next event will have.
  [[nodiscard]] std::vector<KVEvent> snapshot() const;

  [[nodiscard]] const NodeRecord& node(NodeId id) const noexcept { return nodes_[id.value()]; }
  [[nodiscard]] std::span<const TokenId> tokens(NodeId id) const noexcept;
  // One per life cycle, kNoPage where there is none.
  [[nodiscard]] std::span<const PageId> pages(NodeId id) const noexcept;
  [[nodiscard]] const Digest& key(NodeId id) const noexcept { return keys_[id.value()]; }
  // What removing the node will touch.
  void prefetch(NodeId id) const noexcept {
    __builtin_prefetch(&nodes_[id.value()]);
    __builtin_prefetch(&pages_[id.value() * num_life_cycles_]);
  }
  [[nodiscard]] size_t num_nodes() const noexcept { return num_nodes_; }  // roots not counted
  [[nodiscard]] bool has_window(LifeCycleId id) const {
    return life_cycles_[id].window.has_value();
  }
  [[nodiscard]] size_t num_roots() const noexcept { return roots_.size(); }
  [[nodiscard]] size_t num_records() const noexcept { return nodes_.size(); }

 private:
  struct Search {
    NodeId exact = kNoNode;
    NodeId best = kNoNode;  // child with the longest common prefix
    int32_t best_length = 0;
    NodeId shorter = kNoNode;  // child that is a proper prefix of the tokens
    NodeId longer = kNoNode;   // child of which the tokens are a proper prefix
  };
  [[nodiscard]] Search search(NodeId parent, std::span<const TokenId> tokens) const noexcept;
  // Common prefix length of `tokens` and the node's; `order` < 0, 0, > 0 compares them.
  int32_t compare(std::span<const TokenId> tokens, uint64_t prefix, NodeId id,
                  int& order) const noexcept;
  [[nodiscard]] bool is_before(NodeId a, NodeId b) const noexcept;
  void link_child(NodeId parent, NodeId child) noexcept;
  void unlink_child(NodeId child) noexcept;
  [[nodiscard]] NodeId allocate_node() noexcept;
  void free_node(NodeId id) noexcept;
  [[nodiscard]] size_t walk(NodeId root, std::span<const TokenId> tokens, bool partial,
                            std::vector<NodeId>* path) const;
  // Copies tokens and key and links the node.
  [[nodiscard]] NodeId add_node(NodeId parent, std::span<const TokenId> tokens) noexcept;
  void show(NodeId node, LifeCycleId life_cycle, PageHandle page, int32_t num_tokens) noexcept;
  // Another node shows its page from now on: one that goes on with other tokens behind those that
  // the page covers.
  void take_from(NodeId node, LifeCycleId life_cycle);
  void hide(NodeId node, LifeCycleId life_cycle);
  void hide_all(NodeId node);
  void tell_stored(NodeId node) noexcept;
  [[nodiscard]] bool is_backbone(NodeId node, LifeCycleId life_cycle) const noexcept;
  [[nodiscard]] bool is_removable(NodeId node) const noexcept;
  [[nodiscard]] PageId page_of(NodeId node, LifeCycleId life_cycle) const noexcept {
    return pages_[node.value() * num_life_cycles_ + static_cast<size_t>(life_cycle.value())];
  }
  [[nodiscard]] int32_t coverage(NodeId node, LifeCycleId life_cycle) const noexcept;
  // An attention page that covers all tokens of the block.
  [[nodiscard]] bool is_whole(NodeId node, LifeCycleId life_cycle) const noexcept;
  void update_gap(NodeId node) noexcept;
  // A run of pages of a window that begins at block `first` is complete at `depth`.
  [[nodiscard]] bool serves_at(const LifeCycle& life_cycle, int32_t depth,
                               int32_t first) const noexcept;
  [[nodiscard]] bool is_only_child(NodeId node) const noexcept;
  void collect_below(NodeId node, LifeCycleId life_cycle, std::vector<PageId>& out) const;
  void collect_above(NodeId node, LifeCycleId life_cycle, std::vector<PageId>& out) const;
  // Walk over a subtree, children first, without memory of its own.
  [[nodiscard]] NodeId first_in_subtree(NodeId node) const noexcept;
  [[nodiscard]] NodeId next_sibling(NodeId node) const noexcept;
  int64_t remove_subtree(NodeId node);
  void remove_leaf(NodeId id);
  void erase_root_if_unused(NodeId id);

  void add_children(NodeId parent, uint64_t id, std::vector<KVEvent>& events) const;

  PageStore& store_;
  EventLog* events_;
  TypedVec<LifeCycleId, LifeCycle> life_cycles_;
  ReuseConstraints constraints_;
  TypedVec<LifeCycleId, int32_t> backbone_end_;  // blocks in front of it have a backbone page
  size_t num_life_cycles_;
  size_t tokens_per_block_;
  std::vector<NodeRecord> nodes_;
  std::vector<TokenId> tokens_;  // [node][tokens_per_block]
  std::vector<PageId> pages_;    // [node][life cycle]
  std::vector<Digest> keys_;     // [node]
  NodeId free_head_ = kNoNode;   // chained through NodeRecord::right
  size_t num_free_records_ = 0;
  size_t num_nodes_ = 0;
  size_t num_gaps_ = 0;  // nodes with has_gap
  struct Root {
    NodeId node = kNoNode;
    ReuseScope scope{};
  };
  std::map<std::string, Root> roots_;  // by encoded scope
  std::unordered_map<NodeId, std::map<std::string, Root>::iterator> scope_of_root_;
};

}  // namespace helicore::kv
