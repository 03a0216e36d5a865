// Pages of windowed life cycles that a gap has made useless.
//
// A run is a maximal chain of blocks a..z with pages, all of them whole but the last, whose page
// may cover a part; let m be the depth where z's page ends. A match that ends inside the run reads
// at depth n <= m the blocks from stale_range(n).end on, so it is served when that is >= a (sinks
// aside, which are always there). stale_range(n).end does not shrink as n grows:
//   - if stale_range(m).end >= a, the run is a complete window at m; every block x of it is needed
//     by one: at n = m when stale_range(m).end <= x, else at the last n with
//     stale_range(n).end == x, which is below m;
//   - if stale_range(m).end < a, then stale_range(n).end < a for every n <= m: no depth in the run
//     is served, and every page of it is useless.
// So a run is useless as a whole or not at all, and m decides. Where the tree branches below a
// block, m depends on the branch; such blocks are left alone.
#include <algorithm>

#include "helicore/kv/radix_tree.h"

namespace helicore::kv {

void RadixTree::take_from(NodeId node, LifeCycleId life_cycle) {
  pages_[node.value() * num_life_cycles_ + static_cast<size_t>(life_cycle.value())] = kNoPage;
  update_gap(node);
  if (is_removable(node)) {
    prune(node);
  } else if (events_ != nullptr) {
    events_->page_removed(keys_[node.value()], life_cycle);
  }
}

bool RadixTree::serves_at(const LifeCycle& life_cycle, int32_t depth,
                          int32_t first) const noexcept {
  const auto block = static_cast<int32_t>(tokens_per_block_);
  return std::max(life_cycle.stale_range(depth, block).end, life_cycle.num_sink_blocks) >= first;
}

bool RadixTree::is_only_child(NodeId node) const noexcept {
  const NodeRecord& record = nodes_[node.value()];
  return nodes_[record.parent.value()].child_root == node && record.left == kNoNode &&
         record.right == kNoNode;
}

void RadixTree::collect_useless(NodeId node, LifeCycleId life_cycle,
                                std::vector<PageId>& out) const {
  const LifeCycle& lc = life_cycles_[life_cycle];
  if (lc.kind != LayerType::kAttention || !lc.window) return;
  if (nodes_[node.value()].ordinal < lc.num_sink_blocks) return;
  collect_below(node, life_cycle, out);
  collect_above(node, life_cycle, out);
}

void RadixTree::collect_below(NodeId node, LifeCycleId life_cycle, std::vector<PageId>& out) const {
  const LifeCycle& lc = life_cycles_[life_cycle];
  const auto block = static_cast<int32_t>(tokens_per_block_);
  const int32_t first = nodes_[node.value()].ordinal + 1;
  const size_t begin = out.size();
  for (NodeId id = nodes_[node.value()].child_root; id != kNoNode;
       id = nodes_[id.value()].child_root) {
    const int32_t covered = coverage(id, life_cycle);
    const bool serves =
        covered > 0 && serves_at(lc, nodes_[id.value()].ordinal * block + covered, first);
    if (serves || !is_only_child(id)) {
      out.resize(begin);
      return;
    }
    if (covered == 0) break;
    out.push_back(page_of(id, life_cycle));
    if (covered < block) break;
  }
  std::reverse(out.begin() + static_cast<std::ptrdiff_t>(begin), out.end());
}

void RadixTree::collect_above(NodeId node, LifeCycleId life_cycle, std::vector<PageId>& out) const {
  const LifeCycle& lc = life_cycles_[life_cycle];
  const auto block = static_cast<int32_t>(tokens_per_block_);
  const NodeId last = nodes_[node.value()].parent;
  const int32_t covered =
      last == kNoNode || nodes_[last.value()].parent == kNoNode ? 0 : coverage(last, life_cycle);
  if (covered == 0) return;
  const int32_t depth = nodes_[last.value()].ordinal * block + covered;
  const size_t begin = out.size();
  bool is_chain = is_only_child(node);
  for (NodeId id = last; nodes_[id.value()].parent != kNoNode; id = nodes_[id.value()].parent) {
    if (id != last && coverage(id, life_cycle) < block) break;
    if (serves_at(lc, depth, nodes_[id.value()].ordinal)) {
      out.resize(begin);
      return;
    }
    if (is_chain) out.push_back(page_of(id, life_cycle));
    is_chain = is_chain && is_only_child(id);
  }
}

uint8_t RadixTree::highest_priority_below(NodeId node, size_t life_cycle) const {
  uint8_t highest = 0;
  std::vector<NodeId> open{nodes_[node.value()].child_root};
  while (!open.empty()) {
    const NodeId child = open.back();
    open.pop_back();
    if (child == kNoNode) continue;
    const PageId page = pages(child)[life_cycle];
    if (page != kNoPage) highest = std::max(highest, store_.page(page).priority);
    open.insert(open.end(), {nodes_[child.value()].left, nodes_[child.value()].right});
  }
  return highest;
}

void RadixTree::raise_above(NodeId node, std::vector<PageHandle>& raised) {
  for (size_t lc = 0; lc < num_life_cycles_; ++lc) {
    const PageId page = pages(node)[lc];
    if (page == kNoPage) continue;
    const uint8_t priority = store_.page(page).priority;
    for (NodeId above = nodes_[node.value()].parent; nodes_[above.value()].parent != kNoNode;
         above = nodes_[above.value()].parent) {
      const PageId needed = pages(above)[lc];
      if (needed == kNoPage || store_.page(needed).priority >= priority) break;
      store_.set_priority(needed, priority);
      priority_raised(above, priority);
      raised.push_back(store_.pages().handle(needed));
    }
  }
}

}  // namespace helicore::kv
