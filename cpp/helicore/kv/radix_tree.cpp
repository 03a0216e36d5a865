#include "helicore/kv/radix_tree.h"

#include <algorithm>
#include <cstring>
#include <memory>
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

RadixTree::RadixTree(PageStore& store, const LifeCycleRegistry& registry, int32_t tokens_per_block,
                     EventLog* events)
    : store_(store),
      events_(events != nullptr && events->is_enabled() ? events : nullptr),
      life_cycles_(registry.all()),
      constraints_(registry, tokens_per_block),
      num_life_cycles_(registry.count()),
      tokens_per_block_(static_cast<size_t>(tokens_per_block)) {
  for (const LifeCycle& lc : life_cycles_) {
    int32_t end = lc.window ? lc.num_sink_blocks : INT32_MAX;
    if (lc.policy != ReusePolicy::kRequired || lc.kind == LayerType::kSsm) end = 0;
    backbone_end_.push_back(end);
  }
}

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

PrefixMatch RadixTree::match(NodeId root, std::span<const TokenId> tokens, const MatchRules& rules,
                             std::vector<NodeId>* path) const {
  const bool is_cut = !constraints_.only_full_attention() || num_gaps_ > 0;
  std::vector<NodeId> own;
  if (path == nullptr && is_cut) path = &own;
  if (path != nullptr) path->clear();
  PrefixMatch match;
  match.num_tokens_lookup = static_cast<int32_t>(tokens.size());
  match.num_tokens_raw = static_cast<int32_t>(walk(root, tokens, rules.partial, path));
  if (is_cut) {
    const MatchedBlocks blocks{store_, pages_.data(), num_life_cycles_, *path};
    constraints_.apply(blocks, rules, num_gaps_ > 0, match);
  } else {
    constraints_.apply_backoff(rules, match);
  }
  if (path != nullptr) {
    const int32_t num_blocks = ceil_div(match.num_tokens, static_cast<int32_t>(tokens_per_block_));
    path->resize(static_cast<size_t>(num_blocks));
  }
  return match;
}

size_t RadixTree::walk(NodeId root, std::span<const TokenId> tokens, bool partial,
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
  return matched;
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
    std::construct_at(&nodes_[id.value()]);
    std::fill_n(pages_.begin() + static_cast<std::ptrdiff_t>(id.value() * num_life_cycles_),
                num_life_cycles_, kNoPage);
  }
  nodes_[id.value()].in_use = true;
  return id;
}

void RadixTree::free_node(NodeId id) noexcept {
  std::construct_at(&nodes_[id.value()])->right = free_head_;
  free_head_ = id;
  ++num_free_records_;
}

InsertResult RadixTree::insert(NodeId parent, std::span<const TokenId> tokens,
                               std::span<const PageHandle> pages) {
  const Search found = search(parent, tokens);
  if (found.exact != kNoNode) return {InsertOutcome::kExisting, found.exact};
  if (found.longer != kNoNode) return {InsertOutcome::kCovered, found.longer};
  const NodeId id = add_node(parent, tokens);
  NodeRecord& node = nodes_[id.value()];
  bool is_complete = true;
  for (LifeCycleId lc{0}; lc < life_cycles_.size(); ++lc) {
    PageHandle page = pages[static_cast<size_t>(lc.value())];
    int32_t num_tokens = node.num_tokens;
    if (page.is_null() || life_cycles_[lc].policy == ReusePolicy::kPrivate) {
      is_complete = false;
      if (found.shorter == kNoNode || coverage(found.shorter, lc) == 0) continue;
      page = store_.pages().handle(page_of(found.shorter, lc));
      num_tokens = store_.page(page.id).num_tokens;
    }
    const NodeId before = store_.page(page.id).node;
    show(id, lc, page, num_tokens);
    node.priority = std::max(node.priority, store_.page(page.id).priority);
    if (before != kNoNode && before != found.shorter) take_from(before, lc);
  }
  if (!is_complete) update_gap(id);
  tell_stored(id);
  if (found.shorter != kNoNode) remove_leaf(found.shorter);
  return {InsertOutcome::kInserted, id};
}

NodeId RadixTree::add_node(NodeId parent, std::span<const TokenId> tokens) noexcept {
  const NodeId id = allocate_node();
  NodeRecord& node = nodes_[id.value()];
  node.parent = parent;
  node.ordinal = nodes_[parent.value()].ordinal + 1;
  node.num_tokens = static_cast<int32_t>(tokens.size());
  node.prefix = prefix_of(tokens);
  std::copy(tokens.begin(), tokens.end(),
            tokens_.begin() + static_cast<std::ptrdiff_t>(id.value() * tokens_per_block_));
  keys_[id.value()] = block_key(keys_[parent.value()], tokens);
  ++num_nodes_;
  link_child(parent, id);
  return id;
}

bool RadixTree::attach(NodeId node, LifeCycleId life_cycle, PageHandle page, int32_t num_tokens) {
  if (page.is_null() || life_cycles_[life_cycle].policy == ReusePolicy::kPrivate) return false;
  HELICORE_ASSERT(num_tokens > 0 && num_tokens <= nodes_[node.value()].num_tokens, "kv.radix_tree",
                  "a page of node ", node, " can't cover ", num_tokens, " tokens");
  const NodeId shown = store_.page(page.id).node;
  if (shown != kNoNode && shown != node) return false;
  if (coverage(node, life_cycle) >= num_tokens) return false;
  if (shown != node) hide(node, life_cycle);
  show(node, life_cycle, page, num_tokens);
  update_gap(node);
  if (events_ != nullptr) events_->page_stored(keys_[node.value()], life_cycle, num_tokens);
  priority_raised(node, store_.page(page.id).priority);
  return true;
}

void RadixTree::show(NodeId node, LifeCycleId life_cycle, PageHandle page,
                     int32_t num_tokens) noexcept {
  pages_[node.value() * num_life_cycles_ + static_cast<size_t>(life_cycle.value())] = page.id;
  store_.publish(page, node, num_tokens);
}

void RadixTree::hide(NodeId node, LifeCycleId life_cycle) {
  PageId& place = pages_[node.value() * num_life_cycles_ + static_cast<size_t>(life_cycle.value())];
  const PageId page = std::exchange(place, kNoPage);
  // A block that replaces this one may show the page by now.
  if (page != kNoPage && store_.page(page).node == node) store_.detach(page);
}

int32_t RadixTree::coverage(NodeId node, LifeCycleId life_cycle) const noexcept {
  const PageId page = page_of(node, life_cycle);
  return page == kNoPage ? 0 : store_.page(page).num_tokens;
}

void RadixTree::update_gap(NodeId node) noexcept {
  NodeRecord& record = nodes_[node.value()];
  bool has_gap = false;
  for (LifeCycleId lc : constraints_.full_attention()) {
    has_gap = has_gap || coverage(node, lc) < record.num_tokens;
  }
  num_gaps_ += (has_gap ? 1u : 0u) - (record.has_gap ? 1u : 0u);
  record.has_gap = has_gap;
}

void RadixTree::tell_stored(NodeId node) noexcept {
  if (events_ == nullptr) return;
  const NodeRecord& record = nodes_[node.value()];
  const Digest& key = keys_[node.value()];
  events_->stored(key, keys_[record.parent.value()], record.ordinal, record.priority, tokens(node));
  for (LifeCycleId lc{0}; lc < life_cycles_.size(); ++lc) {
    if (is_whole(node, lc)) events_->add_life_cycle(lc);
  }
  for (LifeCycleId lc{0}; lc < life_cycles_.size(); ++lc) {
    const int32_t covered = coverage(node, lc);
    if (covered > 0 && !is_whole(node, lc)) events_->page_stored(key, lc, covered);
  }
}

bool RadixTree::is_whole(NodeId node, LifeCycleId life_cycle) const noexcept {
  return life_cycles_[life_cycle].kind == LayerType::kAttention &&
         coverage(node, life_cycle) == nodes_[node.value()].num_tokens;
}

void RadixTree::priority_raised(NodeId node, uint8_t priority) noexcept {
  NodeRecord& record = nodes_[node.value()];
  if (record.priority >= priority) return;
  record.priority = priority;
  if (events_ != nullptr) events_->updated(keys_[node.value()], priority);
}

void RadixTree::path_to(NodeId node, std::vector<NodeId>* path) const {
  path->resize(static_cast<size_t>(nodes_[node.value()].ordinal + 1));
  for (auto it = path->rbegin(); it != path->rend(); ++it) {
    *it = node;
    node = nodes_[node.value()].parent;
  }
}

void RadixTree::unpin(NodeId node) {
  --nodes_[node.value()].num_pins;
  prune(node);
}

bool RadixTree::is_removable(NodeId node) const noexcept {
  const NodeRecord& record = nodes_[node.value()];
  if (record.child_root != kNoNode || record.num_pins > 0) return false;
  const auto shown = pages(node);
  return std::all_of(shown.begin(), shown.end(), [](PageId page) { return page == kNoPage; });
}

int64_t RadixTree::prune(NodeId node) {
  int64_t removed = 0;
  while (nodes_[node.value()].parent != kNoNode && is_removable(node)) {
    const NodeId parent = nodes_[node.value()].parent;
    remove_leaf(node);
    ++removed;
    node = parent;
  }
  if (nodes_[node.value()].parent == kNoNode) erase_root_if_unused(node);
  return removed;
}

bool RadixTree::is_backbone(NodeId node, LifeCycleId life_cycle) const noexcept {
  return nodes_[node.value()].ordinal < backbone_end_[life_cycle];
}

int64_t RadixTree::drop(PageId page) {
  const NodeId node = store_.page(page).node;
  const LifeCycleId lc(store_.page(page).life_cycle);
  if (is_backbone(node, lc)) return drop_node(node);
  hide(node, lc);
  if (is_removable(node)) return prune(node);
  if (events_ != nullptr) events_->page_removed(keys_[node.value()], lc);
  return 0;
}

int64_t RadixTree::drop_node(NodeId node) {
  const NodeRecord& record = nodes_[node.value()];
  const NodeId parent = record.parent;
  int64_t removed = 1;
  if (record.child_root == kNoNode && record.num_pins == 0) {
    remove_leaf(node);
  } else {
    removed = remove_subtree(node);
  }
  if (nodes_[parent.value()].child_root == kNoNode) removed += prune(parent);
  return removed;
}

int64_t RadixTree::remove_subtree(NodeId node) {
  int64_t removed = 0;
  NodeId current = first_in_subtree(node);
  for (bool is_last = false; !is_last;) {
    is_last = current == node;
    NodeId next = kNoNode;
    if (!is_last) {
      const NodeId sibling = next_sibling(current);
      next = sibling == kNoNode ? nodes_[current.value()].parent : first_in_subtree(sibling);
    }
    if (nodes_[current.value()].child_root == kNoNode && nodes_[current.value()].num_pins == 0) {
      remove_leaf(current);
      ++removed;
    } else {
      hide_all(current);
    }
    current = next;
  }
  return removed;
}

void RadixTree::hide_all(NodeId node) {
  for (LifeCycleId lc{0}; lc < life_cycles_.size(); ++lc) {
    if (coverage(node, lc) == 0) continue;
    hide(node, lc);
    if (events_ != nullptr) events_->page_removed(keys_[node.value()], lc);
  }
  update_gap(node);
}

NodeId RadixTree::first_in_subtree(NodeId node) const noexcept {
  for (NodeId child = nodes_[node.value()].child_root; child != kNoNode;
       child = nodes_[node.value()].child_root) {
    node = child;
    while (nodes_[node.value()].left != kNoNode) node = nodes_[node.value()].left;
  }
  return node;
}

NodeId RadixTree::next_sibling(NodeId node) const noexcept {
  NodeId next = kNoNode;
  for (NodeId id = nodes_[nodes_[node.value()].parent.value()].child_root; id != kNoNode;) {
    if (is_before(node, id)) {
      next = id;
      id = nodes_[id.value()].left;
    } else {
      id = nodes_[id.value()].right;
    }
  }
  return next;
}

int64_t RadixTree::evict_all() {
  int64_t removed = 0;
  for (int level = 0; level < store_.num_levels(); ++level) {
    for (size_t g = 0; g < store_.num_groups(); ++g) {
      const EvictionQueue& queue = store_.queue(PoolGroupId(static_cast<int32_t>(g)), level);
      while (queue.count() > 0) removed += drop(queue.front());
    }
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
  HELICORE_ASSERT(nodes_[id.value()].child_root == kNoNode && nodes_[id.value()].num_pins == 0,
                  "kv.radix_tree", "node ", id, " is still in use");
  unlink_child(id);
  for (PageId page : pages(id)) {
    if (page != kNoPage && store_.page(page).node == id) store_.detach(page);
  }
  if (events_ != nullptr) events_->removed(keys_[id.value()]);
  num_gaps_ -= nodes_[id.value()].has_gap ? 1 : 0;
  free_node(id);
  --num_nodes_;
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
