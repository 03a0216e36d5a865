#include "helicore/kv/state_digest.h"

#include <bit>
#include <type_traits>

#include "helicore/kv/introspection.h"

namespace helicore::kv {
namespace {

// An order-dependent 64-bit mix (the finaliser of splitmix64 per word).
class Mixer {
 public:
  template <typename... T>
  void add(const T&... values) noexcept {
    (add_word(static_cast<uint64_t>(values)), ...);
  }
  [[nodiscard]] uint64_t value() const noexcept { return hash_; }

 private:
  void add_word(uint64_t word) noexcept {
    uint64_t x = hash_ ^ (word + 0x9e3779b97f4a7c15u);
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    hash_ = x ^ x >> 31;
  }
  uint64_t hash_ = 0x68656c69636f7265u;
};

void add_cursors(Mixer& mixer, const KVCache& cache) {
  mixer.add(cache.status(), cache.commit_state(), cache.capacity(), cache.history_length(),
            cache.num_committed_tokens(), cache.num_blocks(), cache.num_reused_tokens(),
            cache.priority());
}

// By its number: which slot it got may depend on which copies were done by then.
void add_page(Mixer& mixer, const ManagerState& state, PageId id) {
  const PageRecord& page = state.store.page(id);
  const bool has_copy = page.copy_slot.value() >= 0;
  mixer.add(id.value(), page.life_cycle, page.pool_group, page.level, page.hold_count,
            page.lock_count, page.priority, page.num_tokens, page.queued, page.useless, page.lost,
            has_copy, has_copy ? page.copy_level : 0);
}

void add_cache(Mixer& mixer, const ManagerState& state, const KVCache& cache) {
  mixer.add(cache.serial());
  add_cursors(mixer, cache);
  const auto add = [&](const PageHandle& handle) {
    mixer.add(handle.is_null());
    if (!handle.is_null()) add_page(mixer, state, handle.id);
  };
  for (const PageHandle& handle : Introspection::pages(cache)) add(handle);
  add(Introspection::state_page(cache));
  const PrefetchState& prefetch = Introspection::prefetch(cache);
  mixer.add(cache.is_lost(), prefetch.level, prefetch.pages.size(), prefetch.is_short);
  mixer.add(cache.scratch().is_enabled());
  for (size_t lc = 0; lc < state.num_life_cycles; ++lc) {
    for (const PageHandle& handle : Introspection::scratch_pages(cache, lc)) add(handle);
    if (!state.has_optional) continue;
    for (const TokenRange& rows : Introspection::missing(cache, lc)) {
      mixer.add(lc, rows.begin, rows.end);
    }
  }
}

// Nodes are summed up: their numbers and the order of siblings do not count, the pages of a node
// and of its parent tell it from the others.
uint64_t tree_digest(const ManagerState& state) {
  uint64_t sum = state.tree.num_roots();
  for (size_t i = 0; i < state.tree.num_records(); ++i) {
    const NodeId id(static_cast<uint32_t>(i));
    const NodeRecord& node = state.tree.node(id);
    if (!node.in_use) continue;
    Mixer mixer;
    mixer.add(node.ordinal, node.num_tokens, node.num_pins);
    if (node.parent != kNoNode) {
      for (PageId page : state.tree.pages(id)) {
        mixer.add(page == kNoPage);
        if (page != kNoPage) add_page(mixer, state, page);
      }
      if (node.ordinal > 0) {
        for (PageId page : state.tree.pages(node.parent)) {
          if (page != kNoPage) mixer.add(page.value());
        }
      }
    }
    sum += mixer.value();
  }
  return sum;
}

}  // namespace

uint64_t counters_digest(const ManagerState& state, std::span<KVCache* const> caches) {
  static_assert(std::has_unique_object_representations_v<KVCacheStats>,
                "counters are hashed as they lie in memory: whole words, none that time decides");
  Mixer mixer;
  const auto counters = std::bit_cast<std::array<uint64_t, sizeof(KVCacheStats) / 8>>(state.stats);
  for (uint64_t counter : counters) mixer.add(counter);
  for (int level = 0; level < state.store.num_levels(); ++level) {
    for (size_t g = 0; g < state.store.num_groups(); ++g) {
      const PoolGroupId group(static_cast<int32_t>(g));
      const PoolGroupCounts counts = state.store.counts(group, level);
      // When a freed slot is taken in again is a matter of time.
      mixer.add(counts.total, counts.free + counts.pending, counts.clean, counts.evictable);
    }
  }
  mixer.add(state.caches.size(), state.num_active, state.tree.num_nodes(), state.is_shut_down);
  for (const KVCache* cache : caches) {
    if (cache != nullptr) add_cursors(mixer, *cache);
  }
  return mixer.value();
}

uint64_t state_digest(const ManagerState& state) {
  Mixer mixer;
  for (const KVCache* cache : state.caches) add_cache(mixer, state, *cache);
  mixer.add(tree_digest(state), state.plans.size(), state.planned_drops.size());
  for (int level = 0; level < state.store.num_levels(); ++level) {
    for (size_t g = 0; g < state.store.num_groups(); ++g) {
      const EvictionQueue& queue = state.store.queue(PoolGroupId(static_cast<int32_t>(g)), level);
      for (PageId id = queue.front(); id != kNoPage; id = queue.after(state.store.pages(), id)) {
        mixer.add(level, id.value());
      }
    }
  }
  return mixer.value();
}

uint64_t sizes_digest(const ManagerState& state) {
  Mixer mixer;
  const LevelSizer& sizer = state.sizer;
  const auto add_all = [&](const auto& counts) {
    for (size_t g = 0; g < counts.count(); ++g) mixer.add(counts[PoolGroupId(static_cast<int>(g))]);
  };
  for (int level = 0; level < state.store.num_levels(); ++level) {
    const QuotaSplit& split = state.levels[static_cast<size_t>(level)].split;
    const LevelSizer::LevelPlan& plan = sizer.plan(level);
    mixer.add(split.quota, split.used, split.minimum, plan.serial, plan.weights.has_value(),
              plan.transition.has_value());
    add_all(sizer.capacities(level));
    add_all(sizer.limits(level));
    if (plan.weights) add_all(*plan.weights);
    if (!plan.transition) continue;
    mixer.add(plan.transition->target.quota);
    add_all(plan.transition->target.num_slots);
    add_all(plan.transition->step);
    add_all(plan.transition->next);
    for (const auto& tail : plan.transition->tails) {
      mixer.add(tail.size());
      for (PageHandle page : tail) mixer.add(page.tag());
    }
  }
  const auto& targets = sizer.tracker_.targets();
  mixer.add(sizer.tracker_.num_samples(), targets.has_value(), sizer.excluded_.size());
  if (targets) mixer.add(targets->capacity, targets->history_length, targets->reused);
  return mixer.value();
}

}  // namespace helicore::kv
