// The tree as events, for listeners that start late.
#include "helicore/kv/radix_tree.h"

namespace helicore::kv {

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
    KVEvent& stored = events.emplace_back(KVEvent{.id = id,
                                                  .kind = EventKind::kStored,
                                                  .key = keys_[node.value()],
                                                  .parent_key = keys_[record.parent.value()],
                                                  .ordinal = record.ordinal,
                                                  .priority = record.priority,
                                                  .tokens = {own.begin(), own.end()}});
    for (LifeCycleId lc{0}; lc < life_cycles_.size(); ++lc) {
      if (is_whole(node, lc)) stored.life_cycles.push_back(lc.value());
    }
    for (LifeCycleId lc{0}; lc < life_cycles_.size(); ++lc) {
      const int32_t covered = coverage(node, lc);
      if (covered == 0 || is_whole(node, lc)) continue;
      events.push_back({.id = id,
                        .kind = EventKind::kStored,
                        .key = keys_[node.value()],
                        .life_cycle = lc.value(),
                        .num_tokens = covered});
    }
    open.insert(open.end(), {record.right, record.left, record.child_root});
  }
}

}  // namespace helicore::kv
