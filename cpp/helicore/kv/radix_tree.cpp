#include "helicore/kv/radix_tree.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "helicore/core/error.h"

namespace helicore::kv {
namespace {

// First two tokens as one number that compares like them; absent ones count as 0.
uint64_t prefix_of(std::span<const TokenId> tokens) noexcept {
  const uint64_t first = static_cast<uint32_t>(tokens[0]);
  const uint64_t second = tokens.size() > 1 ? static_cast<uint32_t>(tokens[1]) : 0u;
  return first << 32 | second;
}

// Treap priority of a node: its id, well mixed.
uint32_t treap_priority(NodeId id) noexcept {
  uint32_t x = id.value() * 0x9e3779b9u + 0x7f4a7c15u;
  x = (x ^ x >> 16) * 0x85ebca6bu;
  x = (x ^ x >> 13) * 0xc2b2ae35u;
  return x ^ x >> 16;
}

int32_t common_prefix(const TokenId* a, const TokenId* b, int32_t count) noexcept {
  constexpr int32_t kChunk = 16;
  int32_t i = 0;
  while (i + kChunk <= count && std::memcmp(a + i, b + i, kChunk * sizeof(TokenId)) == 0) {
    i += kChunk;
  }
  while (i < count && a[i] == b[i]) ++i;
  return i;
}

}  // namespace

RadixTree::RadixTree(PageStore& store, size_t num_life_cycles, int32_t tokens_per_block,
                     EventLog* events)
    : store_(store),
      events_(events != nullptr && events->is_enabled() ? events : nullptr),
      num_life_cycles_(num_life_cycles),
      tokens_per_block_(static_cast<size_t>(tokens_per_block)) {}

std::span<const TokenId> RadixTree::tokens(NodeId id) const noexcept {
  return {tokens_.data() + id.value() * tokens_per_block_,
          static_cast<size_t>(nodes_[id.value()].num_tokens)};
}

std::span<const PageId> RadixTree::pages(NodeId id) const noexcept {
  return {pages_.data() + id.value() * num_life_cycles_, num_life_cycles_};
}

NodeId RadixTree::find_root(const ReuseScope& scope) const {
  const auto it = roots_.find(encode_scope(scope));
  return it == roots_.end() ? kNoNode : it->second.node;
}

NodeId RadixTree::find_or_create_root(const ReuseScope& scope) {
  const std::string encoded = encode_scope(scope);
  const auto it = roots_.find(encoded);
  if (it != roots_.end()) return it->second.node;
  ReuseScope scope_of_event = scope;
  reserve_nodes(1);
  const NodeId id = allocate_node();
  keys_[id.value()] = root_key(scope);
  try {
    const auto place = roots_.emplace(encoded, Root{id, scope}).first;
    scope_of_root_.emplace(id, place);
  } catch (...) {
    roots_.erase(encoded);
    free_node(id);
    throw;
  }
  if (events_ != nullptr) events_->created(keys_[id.value()], std::move(scope_of_event));
  return id;
}

int32_t RadixTree::match(NodeId root, std::span<const TokenId> tokens, bool partial,
                         std::vector<NodeId>* path) const {
  if (root == kNoNode) return 0;
  const size_t block = tokens_per_block_;
  size_t matched = 0;
  NodeId current = root;
  while (matched < tokens.size()) {
    const auto rest = tokens.subspan(matched, std::min(block, tokens.size() - matched));
    const NodeId top = nodes_[current.value()].child_root;
    if (top == kNoNode) break;
    // The common case, a single child that goes on like the prompt, is decided by one comparison.
    const TokenId* stored = tokens_.data() + top.value() * block;
    __builtin_prefetch(&nodes_[top.value()]);
    NodeId next = top;
    if (rest.size() < block || std::memcmp(stored, rest.data(), block * sizeof(TokenId)) != 0 ||
        nodes_[top.value()].num_tokens != static_cast<int32_t>(block)) {
      const Search found = search(current, rest);
      next = rest.size() == block ? found.exact : kNoNode;
      if (next == kNoNode) {
        if (partial && found.best_length > 0) {
          matched += static_cast<size_t>(found.best_length);
          if (path != nullptr) path->push_back(found.best);
        }
        break;
      }
    }
    matched += block;
    if (path != nullptr) path->push_back(next);
    current = next;
  }
  return static_cast<int32_t>(matched);
}

void RadixTree::reserve_nodes(size_t count) {
  if (count <= num_free_records_) return;
  const size_t needed = nodes_.size() + count - num_free_records_;
  HELICORE_CHECK(needed < UINT32_MAX, "kv.radix_tree", "too many blocks: ", needed);
  if (needed <= nodes_.capacity()) return;
  const size_t capacity = std::max(needed, nodes_.capacity() * 2);
  tokens_.reserve(capacity * tokens_per_block_);
  pages_.reserve(capacity * num_life_cycles_);
  keys_.reserve(capacity);
  nodes_.reserve(capacity);
}

NodeId RadixTree::allocate_node() noexcept {
  NodeId id = free_head_;
  if (id == kNoNode) {
    id = NodeId(static_cast<uint32_t>(nodes_.size()));
    nodes_.emplace_back();
    tokens_.resize(nodes_.size() * tokens_per_block_);
    pages_.resize(nodes_.size() * num_life_cycles_, kNoPage);
    keys_.emplace_back();
  } else {
    free_head_ = nodes_[id.value()].right;
    --num_free_records_;
    nodes_[id.value()] = NodeRecord{};
  }
  nodes_[id.value()].in_use = true;
  return id;
}

void RadixTree::free_node(NodeId id) noexcept {
  nodes_[id.value()] = NodeRecord{.right = free_head_};
  free_head_ = id;
  ++num_free_records_;
}

InsertResult RadixTree::insert(NodeId parent, std::span<const TokenId> tokens,
                               std::span<const PageHandle> pages) {
  const Search found = search(parent, tokens);
  if (found.exact != kNoNode) return {InsertOutcome::kExisting, found.exact};
  if (found.longer != kNoNode) return {InsertOutcome::kCovered, found.longer};
  const NodeId id = allocate_node();
  NodeRecord& node = nodes_[id.value()];
  node.parent = parent;
  node.ordinal = nodes_[parent.value()].ordinal + 1;
  node.num_tokens = static_cast<int32_t>(tokens.size());
  node.prefix = prefix_of(tokens);
  std::copy(tokens.begin(), tokens.end(),
            tokens_.begin() + static_cast<std::ptrdiff_t>(id.value() * tokens_per_block_));
  keys_[id.value()] = block_key(keys_[parent.value()], tokens);
  for (size_t i = 0; i < pages.size(); ++i) {
    pages_[id.value() * num_life_cycles_ + i] = pages[i].id;
    store_.publish(pages[i], id, node.num_tokens);
  }
  ++num_nodes_;
  link_child(parent, id);
  if (events_ != nullptr) {
    events_->stored(keys_[id.value()], keys_[parent.value()], node.ordinal,
                    store_.page(pages[0].id).priority, tokens);
  }
  if (found.shorter != kNoNode) remove_leaf(found.shorter);
  return {InsertOutcome::kInserted, id};
}

void RadixTree::hold(NodeId node, uint8_t priority) noexcept {
  const bool rises = store_.page(pages(node)[0]).priority < priority;
  for (PageId page : pages(node)) store_.hold(page, priority);
  if (rises && events_ != nullptr) events_->updated(keys_[node.value()], priority);
}

std::vector<KVEvent> RadixTree::snapshot() const {
  std::vector<KVEvent> events;
  events.reserve(num_nodes_ + roots_.size());
  const uint64_t id = events_ != nullptr ? events_->next_id() : 0;
  for (const auto& [encoded, root] : roots_) {
    events.push_back({.id = id, .key = keys_[root.node.value()], .scope = root.scope});
    add_children(root.node, id, events);
  }
  return events;
}

void RadixTree::add_children(NodeId parent, uint64_t id, std::vector<KVEvent>& events) const {
  // A stack of its own: chains are as long as sequences.
  std::vector<NodeId> open{nodes_[parent.value()].child_root};
  while (!open.empty()) {
    const NodeId node = open.back();
    open.pop_back();
    if (node == kNoNode) continue;
    const NodeRecord& record = nodes_[node.value()];
    const auto own = tokens(node);
    events.push_back({.id = id,
                      .kind = EventKind::kStored,
                      .key = keys_[node.value()],
                      .parent_key = keys_[record.parent.value()],
                      .ordinal = record.ordinal,
                      .priority = store_.page(pages(node)[0]).priority,
                      .tokens = {own.begin(), own.end()}});
    open.insert(open.end(), {record.right, record.left, record.child_root});
  }
}

void RadixTree::unpin(NodeId node) {
  --nodes_[node.value()].num_pins;
  if (nodes_[node.value()].parent == kNoNode) erase_root_if_unused(node);
}

int64_t RadixTree::evict_until_free(PoolGroupId group, int32_t num_free) {
  int64_t removed = 0;
  while (store_.counts(group).free < num_free) {
    const PageId victim = store_.queue(group).front();
    HELICORE_ASSERT(victim != kNoPage, "kv.radix_tree", "nothing left to evict in pool group ",
                    group);
    const NodeId node = store_.page(victim).node;
    // Below an evictable node everything is evictable and older, so the front is a leaf, except
    // where forks held blocks that they had not committed: then the whole subtree goes.
    NodeId leaf = kNoNode;
    do {
      leaf = node;
      while (nodes_[leaf.value()].child_root != kNoNode) leaf = nodes_[leaf.value()].child_root;
      remove_leaf(leaf);
      ++removed;
    } while (leaf != node);
  }
  return removed;
}

int64_t RadixTree::evict_all() {
  int64_t removed = 0;
  for (size_t g = 0; g < store_.num_groups(); ++g) {
    const PoolGroupId group(static_cast<int32_t>(g));
    removed += evict_until_free(group, store_.counts(group).available());
  }
  return removed;
}

RadixTree::Search RadixTree::search(NodeId parent, std::span<const TokenId> tokens) const noexcept {
  Search result;
  const uint64_t prefix = prefix_of(tokens);
  const auto count = static_cast<int32_t>(tokens.size());
  // A binary search passes both neighbours of its target, and one of them has the longest common
  // prefix.
  for (NodeId id = nodes_[parent.value()].child_root; id != kNoNode;) {
    const NodeRecord& node = nodes_[id.value()];
    int order = 0;
    const int32_t common = compare(tokens, prefix, id, order);
    if (common > result.best_length) {
      result.best = id;
      result.best_length = common;
    }
    if (order == 0) {
      result.exact = id;
      return result;
    }
    if (common == count) result.longer = id;
    if (common == node.num_tokens) result.shorter = id;
    id = order < 0 ? node.left : node.right;
  }
  return result;
}

int32_t RadixTree::compare(std::span<const TokenId> tokens, uint64_t prefix, NodeId id,
                           int& order) const noexcept {
  const NodeRecord& node = nodes_[id.value()];
  if (prefix != node.prefix) {
    order = prefix < node.prefix ? -1 : 1;
    return prefix >> 32 == node.prefix >> 32 ? 1 : 0;
  }
  const auto count = static_cast<int32_t>(tokens.size());
  const TokenId* stored = tokens_.data() + id.value() * tokens_per_block_;
  const int32_t shorter = std::min(count, node.num_tokens);
  const int32_t common = common_prefix(tokens.data(), stored, shorter);
  if (common < shorter) {
    order = static_cast<uint32_t>(tokens[static_cast<size_t>(common)]) <
                    static_cast<uint32_t>(stored[common])
                ? -1
                : 1;
  } else {
    order = count < node.num_tokens ? -1 : count > node.num_tokens ? 1 : 0;
  }
  return common;
}

bool RadixTree::is_before(NodeId a, NodeId b) const noexcept {
  int order = 0;
  compare(tokens(a), nodes_[a.value()].prefix, b, order);
  return order < 0;
}

void RadixTree::link_child(NodeId parent, NodeId child) noexcept {
  const uint32_t priority = treap_priority(child);
  NodeId* link = &nodes_[parent.value()].child_root;
  while (*link != kNoNode && treap_priority(*link) >= priority) {
    NodeRecord& node = nodes_[link->value()];
    link = is_before(child, *link) ? &node.left : &node.right;
  }
  NodeId rest = *link;
  *link = child;
  NodeId* before = &nodes_[child.value()].left;
  NodeId* after = &nodes_[child.value()].right;
  while (rest != kNoNode) {
    NodeRecord& node = nodes_[rest.value()];
    if (is_before(rest, child)) {
      *before = rest;
      before = &node.right;
      rest = node.right;
    } else {
      *after = rest;
      after = &node.left;
      rest = node.left;
    }
  }
  *before = kNoNode;
  *after = kNoNode;
}

void RadixTree::unlink_child(NodeId child) noexcept {
  NodeRecord& gone = nodes_[child.value()];
  NodeId* link = &nodes_[gone.parent.value()].child_root;
  while (*link != child) {
    NodeRecord& node = nodes_[link->value()];
    link = is_before(child, *link) ? &node.left : &node.right;
  }
  NodeId left = gone.left;
  NodeId right = gone.right;
  while (left != kNoNode && right != kNoNode) {
    if (treap_priority(left) > treap_priority(right)) {
      *link = left;
      link = &nodes_[left.value()].right;
      left = *link;
    } else {
      *link = right;
      link = &nodes_[right.value()].left;
      right = *link;
    }
  }
  *link = left != kNoNode ? left : right;
}

void RadixTree::remove_leaf(NodeId id) {
  const NodeId parent = nodes_[id.value()].parent;
  HELICORE_ASSERT(nodes_[id.value()].child_root == kNoNode && nodes_[id.value()].num_pins == 0,
                  "kv.radix_tree", "node ", id, " is still in use");
  unlink_child(id);
  for (PageId page : pages(id)) {
    if (store_.page(page).node == id) store_.detach(page);  // else a longer block shows it now
  }
  if (events_ != nullptr) events_->removed(keys_[id.value()]);
  free_node(id);
  --num_nodes_;
  if (nodes_[parent.value()].parent == kNoNode) erase_root_if_unused(parent);
}

void RadixTree::erase_root_if_unused(NodeId id) {
  const NodeRecord& root = nodes_[id.value()];
  if (root.child_root != kNoNode || root.num_pins > 0) return;
  const auto it = scope_of_root_.find(id);
  roots_.erase(it->second);
  scope_of_root_.erase(it);
  if (events_ != nullptr) events_->removed(keys_[id.value()]);
  free_node(id);
}

}  // namespace helicore::kv
