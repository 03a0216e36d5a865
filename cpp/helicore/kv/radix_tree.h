// The radix tree of committed blocks: one root per reuse scope, one node per block, matched by
// comparing tokens. It observes pages (the page store owns them) and decides what is evicted with
// what.
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
#include "helicore/kv/page_store.h"

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
};

enum class InsertOutcome : uint8_t {
  kInserted,  // a new node shows the pages
  kExisting,  // a node with the same tokens was there; the pages stay private
  kCovered,   // a longer block begins with the tokens; nothing to show
};

struct InsertResult {
  InsertOutcome outcome = InsertOutcome::kInserted;
  NodeId node = kNoNode;  // for kCovered the covering node
};

// Invariants: every node but a root has one page per life cycle; a node with children is full; when
// a page is queued for eviction, so are the pages of every node below it, and each of those is
// evicted before it. A pinned node and its ancestors are never removed: their pages are held by the
// sequence that pins. Not thread-safe: the manager's lock guards it; const methods may run side by
// side.
class RadixTree {
 public:
  // Changes are recorded in `events` when it is given.
  RadixTree(PageStore& store, size_t num_life_cycles, int32_t tokens_per_block,
            EventLog* events = nullptr);

  [[nodiscard]] NodeId find_root(const ReuseScope& scope) const;
  [[nodiscard]] NodeId find_or_create_root(const ReuseScope& scope);

  // Longest prefix of `tokens` below `root`, in tokens. With `partial`, the last block may match in
  // part. `path`, when not null, receives the nodes, the partly matched one last.
  int32_t match(NodeId root, std::span<const TokenId> tokens, bool partial,
                std::vector<NodeId>* path) const;

  // The child of `parent` with exactly these tokens; kNoNode when there is none.
  [[nodiscard]] NodeId find_child(NodeId parent, std::span<const TokenId> tokens) const noexcept {
    return search(parent, tokens).exact;
  }

  // Makes room for `count` more nodes; the only step of insert() that can fail.
  void reserve_nodes(size_t count);
  // Shows `pages` (one per life cycle, private) as the block of `tokens` below `parent`. A shorter
  // leaf that is a prefix of the new block is replaced: its pages lose their node. Needs
  // reserve_nodes().
  InsertResult insert(NodeId parent, std::span<const TokenId> tokens,
                      std::span<const PageHandle> pages);

  // Holds the block's pages and raises their priority to `priority`.
  void hold(NodeId node, uint8_t priority) noexcept;
  void pin(NodeId node) noexcept { ++nodes_[node.value()].num_pins; }
  // A root that has become empty and unpinned goes.
  void unpin(NodeId node);

  // Drops pages in eviction order, suffix before prefix, until the group has `num_free` free slots.
  // What a fork still holds below a dropped block leaves the tree with it and stays the fork's.
  // Needs counts(group).available() >= num_free. Returns the number of nodes removed.
  int64_t evict_until_free(PoolGroupId group, int32_t num_free);
  // Drops everything that nobody holds.
  int64_t evict_all();

  // Created and stored events that make the tree as it is, each block behind its parent. All carry
  // the id that the next event will have.
  [[nodiscard]] std::vector<KVEvent> snapshot() const;

  [[nodiscard]] const NodeRecord& node(NodeId id) const noexcept { return nodes_[id.value()]; }
  [[nodiscard]] std::span<const TokenId> tokens(NodeId id) const noexcept;
  [[nodiscard]] std::span<const PageId> pages(NodeId id) const noexcept;
  [[nodiscard]] const Digest& key(NodeId id) const noexcept { return keys_[id.value()]; }
  [[nodiscard]] size_t num_nodes() const noexcept { return num_nodes_; }  // roots not counted
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
  void remove_leaf(NodeId id);
  void erase_root_if_unused(NodeId id);

  void add_children(NodeId parent, uint64_t id, std::vector<KVEvent>& events) const;

  PageStore& store_;
  EventLog* events_;
  size_t num_life_cycles_;
  size_t tokens_per_block_;
  std::vector<NodeRecord> nodes_;
  std::vector<TokenId> tokens_;  // [node][tokens_per_block]
  std::vector<PageId> pages_;    // [node][life cycle]
  std::vector<Digest> keys_;     // [node]
  NodeId free_head_ = kNoNode;   // chained through NodeRecord::right
  size_t num_free_records_ = 0;
  size_t num_nodes_ = 0;
  struct Root {
    NodeId node = kNoNode;
    ReuseScope scope{};
  };
  std::map<std::string, Root> roots_;  // by encoded scope
  std::unordered_map<NodeId, std::map<std::string, Root>::iterator> scope_of_root_;
};

}  // namespace helicore::kv
