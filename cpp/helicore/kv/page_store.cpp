#include "helicore/kv/page_store.h"

#include <cstring>
#include <numeric>

#include "helicore/core/error.h"

namespace helicore::kv {

PageStore::PageStore(const StorageLayout& layout, const TypedVec<PoolGroupId, int32_t>& num_slots)
    : pages_(std::accumulate(num_slots.begin(), num_slots.end(), size_t{0})) {
  size_t num_life_cycles = 0;
  for (size_t g = 0; g < layout.groups().count(); ++g) {
    const PoolGroupId id(static_cast<int32_t>(g));
    const PoolGroupLayout& shape = layout.groups()[id];
    num_life_cycles += shape.variants.size();
    Group group{SlotAllocator(num_slots[id]), EvictionQueue(), shape.piece_bytes, {}};
    for (int64_t piece : shape.piece_bytes) group.pools.emplace_back(piece * num_slots[id]);
    groups_.push_back(std::move(group));
  }
  group_of_.resize(num_life_cycles);
  for (size_t i = 0; i < num_life_cycles; ++i) {
    const LifeCycleId id(static_cast<int32_t>(i));
    group_of_[id] = layout.group_of(id);
  }
}

PoolGroupCounts PageStore::counts(PoolGroupId group) const noexcept {
  const Group& g = groups_[group];
  return {g.slots.capacity(), g.slots.num_free(), g.queue.count()};
}

std::byte* PageStore::pool_address(PoolGroupId group, PoolIndex pool) const {
  return groups_[group].pools.at(static_cast<size_t>(pool.value())).data();
}

PageHandle PageStore::allocate(LifeCycleId life_cycle, uint8_t priority) noexcept {
  const PoolGroupId group = group_of_[life_cycle];
  const PageId id = pages_.allocate();
  PageRecord& page = pages_[id];
  page.slot = groups_[group].slots.allocate();
  page.life_cycle = static_cast<uint16_t>(life_cycle.value());
  page.pool_group = static_cast<uint16_t>(group.value());
  page.priority = priority;
  page.hold_count = 1;
  return pages_.handle(id);
}

void PageStore::hold(PageId id, uint8_t priority) noexcept {
  PageRecord& page = pages_[id];
  if (page.queued) groups_[PoolGroupId(page.pool_group)].queue.remove(pages_, id);
  if (page.priority < priority) page.priority = priority;
  ++page.hold_count;
}

void PageStore::unhold(PageHandle handle) {
  if (!pages_.is_current(handle) || pages_[handle.id].hold_count == 0) [[unlikely]] {
    ++num_double_releases_;
#ifdef HELICORE_DEBUG_CHECKS
    HELICORE_ASSERT(false, "kv.page_store", "page ", handle.id, " released but not held");
#endif
    return;
  }
  PageRecord& page = pages_[handle.id];
  if (--page.hold_count > 0) return;
  if (page.node == kNoNode) {
    free_page(handle.id);
  } else {
    groups_[PoolGroupId(page.pool_group)].queue.push_back(pages_, handle.id);
  }
}

void PageStore::publish(PageHandle handle, NodeId node, int32_t num_tokens) noexcept {
  PageRecord& page = pages_[handle];
  page.node = node;
  page.num_tokens = num_tokens;
}

void PageStore::detach(PageId id) {
  PageRecord& page = pages_[id];
  page.node = kNoNode;
  page.num_tokens = 0;
  if (page.hold_count > 0) return;
  if (page.queued) groups_[PoolGroupId(page.pool_group)].queue.remove(pages_, id);
  free_page(id);
}

void PageStore::copy_page(PageHandle from, PageHandle to) noexcept {
  const Group& group = groups_[PoolGroupId(pages_[from].pool_group)];
  for (size_t p = 0; p < group.pools.size(); ++p) {
    const int64_t bytes = group.piece_bytes[p];
    std::byte* base = group.pools[p].data();
    std::memcpy(base + pages_[to].slot.value() * bytes, base + pages_[from].slot.value() * bytes,
                static_cast<size_t>(bytes));
  }
}

void PageStore::free_page(PageId id) {
  const PageRecord& page = pages_[id];
  groups_[PoolGroupId(page.pool_group)].slots.release(page.slot);
  pages_.free(id);
}

}  // namespace helicore::kv
