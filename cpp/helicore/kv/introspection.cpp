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

void check_cache_page(const ManagerState& state, const KVCache& cache, size_t index, int32_t full,
                      std::unordered_map<PageId, Uses>& uses) {
  const size_t lcs = state.num_life_cycles;
  const auto ordinal = static_cast<int32_t>(index / lcs);
  const size_t lc = index % lcs;
  const PageHandle handle = Introspection::pages(cache)[index];
  const int32_t entry = Introspection::table(cache, lc)[ordinal];
  const LifeCycle& life_cycle = state.life_cycle(lc);
  const bool is_stale =
      life_cycle.stale_range(cache.history_length(), cache.tokens_per_block()).contains(ordinal);
  const bool is_scratch = Introspection::is_scratch(cache, ordinal, lc);
  HELICORE_ASSERT(!is_scratch || handle.is_null(), kWhere, "scratch block ", ordinal, " of cache ",
                  cache.id(), " has a page");
  if (handle.is_null()) {
    HELICORE_ASSERT(entry == kBadPageIndex, kWhere, "page table of cache ", cache.id(),
                    " at block ", ordinal, " where there is no page");
    HELICORE_ASSERT(is_stale || life_cycle.kind == LayerType::kSsm || is_scratch ||
                        (!cache.is_active() && life_cycle.policy != ReusePolicy::kRequired),
                    kWhere, "cache ", cache.id(), " has no page for block ", ordinal);
    return;
  }
  HELICORE_ASSERT(state.store.pages().is_current(handle), kWhere, "cache ", cache.id(),
                  " refers to a freed page");
  const PageRecord& page = state.store.page(handle.id);
  const bool is_live = cache.is_active() && !is_stale;
  Uses& use = uses[handle.id];
  ++use.holds;
  use.locks += is_live ? 1 : 0;
  if (ordinal >= full && !is_stale && !Introspection::needs_copy(cache)) {
    ++(Introspection::may_share(cache) ? use.forks : use.may_write);
  }
  HELICORE_ASSERT(page.life_cycle == lc, kWhere, "life cycle of page ", handle.id);
  HELICORE_ASSERT(entry == (is_live ? page.slot.value() : kBadPageIndex), kWhere,
                  "page table of cache ", cache.id(), " at block ", ordinal);
}

void check_scratch(const ManagerState& state, const KVCache& cache,
                   std::unordered_map<PageId, Uses>& uses) {
  for (size_t lc = 0; lc < state.num_life_cycles; ++lc) {
    const auto pages = Introspection::scratch_pages(cache, lc);
    const int32_t wanted = cache.is_active() ? Introspection::num_scratch_wanted(cache, lc) : 0;
    HELICORE_ASSERT(pages.size() == static_cast<size_t>(wanted), kWhere, "cache ", cache.id(),
                    " has ", pages.size(), " scratch slots of layer group ", lc, ", needs ",
                    wanted);
    for (PageHandle handle : pages) {
      HELICORE_ASSERT(state.store.pages().is_current(handle), kWhere, "scratch slot of cache ",
                      cache.id(), " was freed");
      const PageRecord& page = state.store.page(handle.id);
      HELICORE_ASSERT(page.life_cycle == lc && page.node == kNoNode && page.hold_count == 1, kWhere,
                      "scratch page ", handle.id, " of cache ", cache.id());
      ++uses[handle.id].holds;
      ++uses[handle.id].locks;
    }
  }
}

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
    check_cache_page(state, cache, i, full, uses);
  }
  check_scratch(state, cache, uses);
  if (const PageHandle held = Introspection::state_page(cache); !held.is_null()) {
    HELICORE_ASSERT(state.store.pages().is_current(held), kWhere, "state of cache ", cache.id());
    ++uses[held.id].holds;
    uses[held.id].locks += cache.is_active() ? 1 : 0;
  }
  NodeId node = tail;
  for (int32_t b = full - 1; b >= 0; --b, node = state.tree.node(node).parent) {
    HELICORE_ASSERT(state.tree.node(node).ordinal == b && state.tree.node(node).in_use, kWhere,
                    "lineage of cache ", cache.id(), " at block ", b);
    for (size_t lc = 0; lc < lcs; ++lc) {
      const PageHandle own = pages[static_cast<size_t>(b) * lcs + lc];
      if (own.is_null()) continue;
      const NodeId shown_by = state.store.page(own.id).node;
      HELICORE_ASSERT(shown_by == kNoNode || shown_by == node, kWhere, "committed block ", b,
                      " of cache ", cache.id());
    }
  }
}

// Slots of one pool group on one level as the pages use them.
struct SlotUse {
  int32_t in_use = 0;  // below the limit
  int32_t clean = 0;
  int32_t queued = 0;
  int32_t limit = 0;
  std::vector<bool> taken;  // [capacity]
};

void take(SlotUse& use, SlotId slot) {
  const auto index = static_cast<size_t>(slot.value());
  HELICORE_ASSERT(index < use.taken.size() && !use.taken[index], kWhere, "slot ", slot,
                  " has two pages");
  use.taken[index] = true;
  use.in_use += slot.value() < use.limit ? 1 : 0;
}

void check_page(const ManagerState& state, PageId id, const Uses& use) {
  const PageRecord& page = state.store.page(id);
  HELICORE_ASSERT(page.hold_count == use.holds && page.lock_count == use.locks, kWhere, "page ", id,
                  " has ", page.hold_count, " holds and ", page.lock_count, " locks, found ",
                  use.holds, " and ", use.locks);
  HELICORE_ASSERT(use.may_write == 0 || use.may_write + use.forks == 1, kWhere, "page ", id,
                  " may be written by more than one cache");
  const bool may_leave =
      page.lock_count == 0 && (page.hold_count == 0 || page.level != state.store.last_level());
  HELICORE_ASSERT(page.queued == may_leave, kWhere, "queue state of page ", id);
  HELICORE_ASSERT(page.hold_count > 0 || page.node != kNoNode, kWhere, "page ", id, " leaked");
  HELICORE_ASSERT(page.lock_count == 0 || page.level == kHotLevel, kWhere, "page ", id,
                  " is locked on level ", int{page.level});
  HELICORE_ASSERT(!page.marked && !page.to_copy, kWhere, "page ", id, " is still in a plan");
  if (page.node == kNoNode) return;
  HELICORE_ASSERT(state.tree.pages(page.node)[page.life_cycle] == id, kWhere, "node of page ", id);
}

void check_pages(const ManagerState& state, const std::unordered_map<PageId, Uses>& uses) {
  const PageStore& store = state.store;
  std::vector<std::vector<SlotUse>> slots(static_cast<size_t>(store.num_levels()));
  for (size_t level = 0; level < slots.size(); ++level) {
    for (size_t g = 0; g < store.num_groups(); ++g) {
      const PoolGroupId group(static_cast<int32_t>(g));
      const SlotAllocator& allocator = store.slots(group, static_cast<int>(level));
      slots[level].emplace_back();
      slots[level][g].limit = allocator.limit();
      slots[level][g].taken.resize(static_cast<size_t>(allocator.capacity()));
    }
  }
  for (size_t i = 0; i < store.pages().num_records(); ++i) {
    const PageId id(static_cast<uint32_t>(i));
    const PageRecord& page = store.page(id);
    if (!page.in_use) continue;
    const auto it = uses.find(id);
    check_page(state, id, it == uses.end() ? Uses{} : it->second);
    SlotUse& home = slots[page.level][page.pool_group];
    take(home, page.slot);
    home.queued += page.queued && page.slot.value() < home.limit ? 1 : 0;
    if (page.copy_slot.value() < 0) continue;
    HELICORE_ASSERT(page.copy_level > page.level, kWhere, "copy of page ", id);
    take(slots[page.copy_level][page.pool_group], page.copy_slot);
    ++slots[page.copy_level][page.pool_group].clean;
  }
  HELICORE_ASSERT(store.num_double_releases() == 0, kWhere, "pages released twice");
  for (size_t level = 0; level < slots.size(); ++level) {
    for (size_t g = 0; g < store.num_groups(); ++g) {
      const PoolGroupId group(static_cast<int32_t>(g));
      const PoolGroupCounts counts = store.counts(group, static_cast<int>(level));
      const SlotUse& use = slots[level][g];
      const SlotAllocator& allocator = store.slots(group, static_cast<int>(level));
      HELICORE_ASSERT(counts.free + counts.pending + use.in_use == counts.total, kWhere,
                      "slots of group ", group, " on level ", level, ": ", counts.free, " free + ",
                      counts.pending, " pending + ", use.in_use, " in use != ", counts.total);
      HELICORE_ASSERT(allocator.capacity() == state.levels[level].split.num_slots[group], kWhere,
                      "split of group ", group, " on level ", level);
      HELICORE_ASSERT(counts.clean == use.clean, kWhere, "copies of group ", group);
      HELICORE_ASSERT(counts.evictable == use.queued, kWhere, "queue length of group ", group);
      HELICORE_ASSERT(allocator.num_double_releases() == 0, kWhere, "double release in group ",
                      group);
    }
  }
}

// Position of each queued page in its eviction order.
std::vector<int64_t> eviction_ranks(const ManagerState& state) {
  std::vector<int64_t> rank(state.store.pages().num_records(), -1);
  for (size_t g = 0; g < state.store.num_groups(); ++g) {
    const EvictionQueue& queue = state.store.queue(PoolGroupId(static_cast<int32_t>(g)));
    int64_t next = 0;
    for (PageId id = queue.front(); id != kNoPage; id = queue.after(state.store.pages(), id)) {
      rank[id.value()] = next++;
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
  // With one level of full attention, what is below a page always goes before it.
  const bool is_plain = state.store.num_levels() == 1 && !state.has_windows && !state.ssm;
  for (size_t lc = 0; lc < state.num_life_cycles; ++lc) {
    const PageId page_id = tree.pages(id)[lc];
    if (page_id == kNoPage) continue;
    const PageRecord& page = state.store.page(page_id);
    HELICORE_ASSERT(page.in_use && page.node == id && page.life_cycle == lc &&
                        page.num_tokens > 0 && page.num_tokens <= node.num_tokens,
                    kWhere, "page of node ", id);
    const LifeCycle& life_cycle = state.life_cycle(lc);
    if (!is_plain || life_cycle.policy != ReusePolicy::kRequired || parent.ordinal < 0) continue;
    HELICORE_ASSERT(node.num_pins == 0 || page.hold_count > 0 || page.forked, kWhere, "node ", id,
                    " is pinned but not held");
    const PageId above_id = tree.pages(node.parent)[lc];
    if (above_id == kNoPage) continue;
    const PageRecord& above = state.store.page(above_id);
    HELICORE_ASSERT(above.priority >= page.priority, kWhere, "priority of node ", id);
    if (!above.queued || page.forked) continue;
    HELICORE_ASSERT(page.queued && rank[page_id.value()] < rank[above_id.value()], kWhere, "node ",
                    id, " would be evicted after its parent");
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

std::vector<TokenRange> Introspection::missing(const KVCache& cache, size_t life_cycle) {
  const TokenRange history{0, cache.history_length_};
  std::vector<TokenRange> missing;
  int32_t end = history.begin;
  for (const TokenRange& range : cache.missing_.remaining(life_cycle, history)) {
    if (range.begin > end) missing.push_back({end, range.begin});
    end = range.end;
  }
  if (end < history.end) missing.push_back({end, history.end});
  return missing;
}

}  // namespace helicore::kv
