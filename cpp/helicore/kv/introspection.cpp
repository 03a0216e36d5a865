#include "helicore/kv/introspection.h"

#include <string>
#include <unordered_map>

#include "helicore/core/error.h"

namespace helicore::kv {
namespace {

constexpr const char* kWhere = "kv.check_invariants";

struct Uses {
  uint32_t holds = 0;
  uint32_t locks = 0;
  uint32_t may_write = 0;  // holders that may write it without a copy
  uint32_t forks = 0;      // holders that copy it first if it is shared
};

void check_cache(const ManagerState& state, const KVCache& cache,
                 std::unordered_map<PageId, Uses>& uses) {
  const int32_t block = cache.tokens_per_block();
  const auto pages = Introspection::pages(cache);
  const size_t lcs = state.num_life_cycles;
  HELICORE_ASSERT(cache.num_committed_tokens() <= cache.history_length() &&
                      cache.history_length() <= cache.capacity(),
                  kWhere, "cursors of cache ", cache.id());
  HELICORE_ASSERT(cache.num_blocks() == ceil_div(cache.capacity(), block), kWhere,
                  "block count of cache ", cache.id());
  HELICORE_ASSERT(pages.size() == static_cast<size_t>(cache.num_blocks()) * lcs, kWhere,
                  "page count of cache ", cache.id());
  const NodeId tail = Introspection::tail_node(cache);
  const int32_t full = state.tree.node(tail).ordinal + 1;
  HELICORE_ASSERT(full * block + static_cast<int32_t>(Introspection::tail_tokens(cache).size()) ==
                      cache.num_committed_tokens(),
                  kWhere, "committed length of cache ", cache.id());
  for (size_t i = 0; i < pages.size(); ++i) {
    const PageHandle handle = pages[i];
    HELICORE_ASSERT(state.store.pages().is_current(handle), kWhere, "cache ", cache.id(),
                    " refers to a freed page");
    const PageRecord& page = state.store.page(handle.id);
    Uses& use = uses[handle.id];
    ++use.holds;
    use.locks += cache.is_active() ? 1 : 0;
    const size_t ordinal = i / lcs;
    if (static_cast<int32_t>(ordinal) >= full && !Introspection::needs_copy(cache)) {
      ++(Introspection::may_share(cache) ? use.forks : use.may_write);
    }
    HELICORE_ASSERT(page.life_cycle == i % lcs, kWhere, "life cycle of page ", handle.id);
    const int32_t entry = Introspection::table(cache, i % lcs)[ordinal];
    HELICORE_ASSERT(entry == (cache.is_active() ? page.slot.value() : kBadPageIndex), kWhere,
                    "page table of cache ", cache.id(), " at block ", ordinal);
  }
  NodeId node = tail;
  for (int32_t b = full - 1; b >= 0; --b, node = state.tree.node(node).parent) {
    HELICORE_ASSERT(state.tree.node(node).ordinal == b && state.tree.node(node).in_use, kWhere,
                    "lineage of cache ", cache.id(), " at block ", b);
    for (size_t lc = 0; lc < lcs; ++lc) {
      HELICORE_ASSERT(pages[static_cast<size_t>(b) * lcs + lc].id == state.tree.pages(node)[lc],
                      kWhere, "committed block ", b, " of cache ", cache.id());
    }
  }
}

void check_pages(const ManagerState& state, const std::unordered_map<PageId, Uses>& uses) {
  const PageSlab& pages = state.store.pages();
  std::vector<int32_t> in_use(state.store.num_groups());
  std::vector<int32_t> queued(state.store.num_groups());
  std::vector<std::vector<bool>> taken;
  for (size_t g = 0; g < state.store.num_groups(); ++g) {
    taken.emplace_back(
        static_cast<size_t>(state.quota.num_slots[PoolGroupId(static_cast<int32_t>(g))]));
  }
  for (size_t i = 0; i < pages.num_records(); ++i) {
    const PageId id(static_cast<uint32_t>(i));
    const PageRecord& page = pages[id];
    if (!page.in_use) continue;
    const auto it = uses.find(id);
    const Uses use = it == uses.end() ? Uses{} : it->second;
    HELICORE_ASSERT(page.hold_count == use.holds && page.lock_count == use.locks, kWhere, "page ",
                    id, " has ", page.hold_count, " holds and ", page.lock_count, " locks, found ",
                    use.holds, " and ", use.locks);
    HELICORE_ASSERT(use.may_write == 0 || use.may_write + use.forks == 1, kWhere, "page ", id,
                    " may be written by more than one cache");
    HELICORE_ASSERT(page.queued == (page.hold_count == 0), kWhere, "queue state of page ", id);
    HELICORE_ASSERT(page.hold_count > 0 || page.node != kNoNode, kWhere, "page ", id, " leaked");
    ++in_use[page.pool_group];
    queued[page.pool_group] += page.queued ? 1 : 0;
    const auto slot = static_cast<size_t>(page.slot.value());
    HELICORE_ASSERT(!taken[page.pool_group][slot], kWhere, "slot ", page.slot, " has two pages");
    taken[page.pool_group][slot] = true;
  }
  HELICORE_ASSERT(state.store.num_double_releases() == 0, kWhere, "pages released twice");
  for (size_t g = 0; g < in_use.size(); ++g) {
    const PoolGroupId group(static_cast<int32_t>(g));
    const PoolGroupCounts counts = state.store.counts(group);
    HELICORE_ASSERT(counts.free + in_use[g] == counts.total, kWhere, "slots of group ", group, ": ",
                    counts.free, " free + ", in_use[g], " in use != ", counts.total);
    HELICORE_ASSERT(counts.evictable == queued[g], kWhere, "queue length of group ", group);
    HELICORE_ASSERT(state.store.slots(group).num_double_releases() == 0, kWhere,
                    "double release in group ", group);
  }
}

// Position of each queued page in its eviction order.
std::vector<int64_t> eviction_ranks(const ManagerState& state) {
  std::vector<int64_t> rank(state.store.pages().num_records(), -1);
  for (size_t g = 0; g < state.store.num_groups(); ++g) {
    const EvictionQueue& queue = state.store.queue(PoolGroupId(static_cast<int32_t>(g)));
    int64_t next = 0;
    for (int priority = 0; priority <= kPriorityMax; ++priority) {
      for (PageId id = queue.front_of(priority); id != kNoPage; id = state.store.page(id).next) {
        rank[id.value()] = next++;
      }
    }
    HELICORE_ASSERT(next == queue.count(), kWhere, "chains of queue ", g);
  }
  return rank;
}

void check_node(const ManagerState& state, NodeId id, const std::vector<int64_t>& rank) {
  const RadixTree& tree = state.tree;
  const NodeRecord& node = tree.node(id);
  const NodeRecord& parent = tree.node(node.parent);
  HELICORE_ASSERT(parent.in_use && node.ordinal == parent.ordinal + 1, kWhere, "parent of node ",
                  id);
  HELICORE_ASSERT(node.num_tokens > 0 && node.num_tokens <= state.config.tokens_per_block, kWhere,
                  "token count of node ", id);
  HELICORE_ASSERT(node.child_root == kNoNode || node.num_tokens == state.config.tokens_per_block,
                  kWhere, "node ", id, " has children but is not full");
  HELICORE_ASSERT(tree.key(id) == block_key(tree.key(node.parent), tree.tokens(id)), kWhere,
                  "key of node ", id);
  for (size_t lc = 0; lc < state.num_life_cycles; ++lc) {
    const PageRecord& page = state.store.page(tree.pages(id)[lc]);
    HELICORE_ASSERT(page.in_use && page.node == id && page.life_cycle == lc &&
                        page.num_tokens == node.num_tokens,
                    kWhere, "page of node ", id);
    HELICORE_ASSERT(node.num_pins == 0 || page.hold_count > 0, kWhere, "node ", id,
                    " is pinned but not held");
    if (parent.ordinal < 0) continue;
    const PageId above_id = tree.pages(node.parent)[lc];
    const PageRecord& above = state.store.page(above_id);
    HELICORE_ASSERT(above.priority >= page.priority, kWhere, "priority of node ", id);
    if (!above.queued || page.forked) continue;
    HELICORE_ASSERT(page.queued && rank[tree.pages(id)[lc].value()] < rank[above_id.value()],
                    kWhere, "node ", id, " would be evicted after its parent");
  }
}

// Visits the treap below `top` in order; returns the number of nodes in it.
size_t check_siblings(const ManagerState& state, NodeId top, NodeId parent, NodeId& previous) {
  if (top == kNoNode) return 0;
  const NodeRecord& node = state.tree.node(top);
  HELICORE_ASSERT(node.in_use && node.parent == parent, kWhere, "sibling ", top);
  size_t count = check_siblings(state, node.left, parent, previous);
  if (previous != kNoNode) {
    const auto a = state.tree.tokens(previous);
    const auto b = state.tree.tokens(top);
    HELICORE_ASSERT(std::lexicographical_compare(a.begin(), a.end(), b.begin(), b.end()), kWhere,
                    "order of siblings ", previous, " and ", top);
    HELICORE_ASSERT(a.size() >= b.size() || !std::equal(a.begin(), a.end(), b.begin()), kWhere,
                    "node ", previous, " is a prefix of its sibling ", top);
  }
  previous = top;
  count += 1 + check_siblings(state, node.right, parent, previous);
  return count;
}

void check_tree(const ManagerState& state) {
  const RadixTree& tree = state.tree;
  const std::vector<int64_t> rank = eviction_ranks(state);
  size_t num_nodes = 0;
  size_t num_roots = 0;
  size_t num_linked = 0;
  uint64_t num_pins = 0;
  for (size_t i = 0; i < tree.num_records(); ++i) {
    const NodeId id(static_cast<uint32_t>(i));
    const NodeRecord& node = tree.node(id);
    if (!node.in_use) continue;
    num_pins += node.num_pins;
    NodeId previous = kNoNode;
    num_linked += check_siblings(state, node.child_root, id, previous);
    if (node.parent == kNoNode) {
      ++num_roots;
      HELICORE_ASSERT(node.child_root != kNoNode || node.num_pins > 0, kWhere, "empty root ", id);
      continue;
    }
    ++num_nodes;
    check_node(state, id, rank);
  }
  HELICORE_ASSERT(num_nodes == tree.num_nodes() && num_roots == tree.num_roots(), kWhere,
                  "node counts: ", num_nodes, " nodes, ", num_roots, " roots");
  HELICORE_ASSERT(num_linked == num_nodes, kWhere, num_nodes - num_linked, " nodes not linked");
  HELICORE_ASSERT(num_pins == state.caches.size(), kWhere, num_pins, " pins for ",
                  state.caches.size(), " caches");
}

}  // namespace

void check_invariants(const ManagerState& state) {
  std::unordered_map<PageId, Uses> uses;
  int32_t num_active = 0;
  for (const KVCache* cache : state.caches) {
    check_cache(state, *cache, uses);
    num_active += cache->is_active() ? 1 : 0;
  }
  HELICORE_ASSERT(num_active == state.num_active, kWhere, "active caches: ", num_active, " found, ",
                  state.num_active, " counted");
  check_pages(state, uses);
  check_tree(state);
}

}  // namespace helicore::kv
