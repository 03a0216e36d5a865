#include "helicore/kv/page_store.h"

#include <algorithm>

#include "helicore/core/error.h"

namespace helicore::kv {

PageStore::PageStore(const StorageLayout& layout, CacheDevice& device,
                     const std::vector<LevelSpec>& levels, std::optional<LifeCycleId> ssm)
    : device_(device), tokens_per_block_(layout.tokens_per_block()), ssm_(ssm), pages_(0) {
  size_t num_life_cycles = 0;
  for (const PoolGroupLayout& shape : layout.groups()) num_life_cycles += shape.variants.size();
  group_of_.resize(num_life_cycles);
  for (size_t i = 0; i < num_life_cycles; ++i) {
    const LifeCycleId id(static_cast<int32_t>(i));
    group_of_[id] = layout.group_of(id);
  }
  size_t num_pages = 0;
  for (const LevelSpec& spec : levels) {
    Level level{spec.tier, {}};
    for (size_t g = 0; g < layout.groups().count(); ++g) {
      const PoolGroupId id(static_cast<int32_t>(g));
      const int32_t count = spec.num_slots[id];
      Group group(count);
      group.piece_bytes = layout.groups()[id].piece_bytes;
      group.times.resize(static_cast<size_t>(count));
      for (int64_t piece : group.piece_bytes) {
        group.pools.push_back(device.make_pool({.tier = spec.tier,
                                                .num_bytes = piece * count,
                                                .max_bytes = piece * spec.max_slots[id],
                                                .directory = spec.directory,
                                                .grain = spec.grain}));
      }
      num_pages += static_cast<size_t>(count);
      level.groups.push_back(std::move(group));
    }
    levels_.push_back(std::move(level));
  }
  pages_.reserve(num_pages);
}

PageStore::~PageStore() {
  const auto wait = [&](TimePoint point) {
    if (!point.is_none() && device_.is_waitable(point)) device_.synchronize(point);
  };
  try {
    for (const Level& level : levels_) {
      for (const Group& group : level.groups) {
        for (size_t slot = 0; slot < group.times.size(); ++slot) {
          wait(group.times[slot].filled);
          wait(group.times[slot].last_use);
          wait(group.slots.after(SlotId(static_cast<int32_t>(slot))));
        }
      }
    }
  } catch (const std::exception& error) {
    log_error(detail::concat("kv.page_store: waiting for copies: ", error.what()));
  }
}

PoolGroupCounts PageStore::counts(PoolGroupId group, int level) const noexcept {
  const Group& g = at(level).groups[group];
  return {g.slots.limit(), g.slots.num_free(), g.slots.num_parked(), g.num_clean,
          g.queue.count() - g.num_queued_beyond};
}

const MemoryPool& PageStore::pool(int level, PoolGroupId group, PoolIndex pool) const {
  return *at(level).groups[group].pools.at(static_cast<size_t>(pool.value()));
}

PageHandle PageStore::allocate(LifeCycleId life_cycle, uint8_t priority) noexcept {
  const PoolGroupId group = group_of_[life_cycle];
  Group& home = levels_[kHotLevel].groups[group];
  const SlotId slot = hand_out(home.slots);
  const PageId id = pages_.allocate();
  PageRecord& page = pages_[id];
  page.slot = slot;
  page.life_cycle = static_cast<uint16_t>(life_cycle.value());
  page.pool_group = static_cast<uint16_t>(group.value());
  page.priority = priority;
  page.hold_count = 1;
  page.lock_count = 1;
  set_filled(id, home.slots.after(slot));
  return pages_.handle(id);
}

void PageStore::dequeue(PageId id) noexcept {
  if (!pages_[id].queued) return;
  Group& group = home(pages_[id]);
  group.queue.remove(pages_, id);
  group.num_queued_beyond -= is_beyond_limit(id) ? 1 : 0;
}

void PageStore::requeue(PageId id) noexcept {
  const PageRecord& page = pages_[id];
  const bool leaves = page.lock_count == 0 &&
                      (page.hold_count > 0 ? page.level != last_level() : page.node != kNoNode);
  if (leaves == page.queued) return;
  if (!leaves) return dequeue(id);
  Group& group = home(page);
  group.queue.push_back(pages_, id);
  group.num_queued_beyond += is_beyond_limit(id) ? 1 : 0;
}

void PageStore::hold(PageId id, uint8_t priority) noexcept {
  dequeue(id);
  PageRecord& page = pages_[id];
  if (page.priority < priority) page.priority = priority;
  page.useless = false;
  ++page.hold_count;
  requeue(id);
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
    requeue(handle.id);
  }
}

void PageStore::lock(PageHandle handle) noexcept {
  dequeue(handle.id);
  ++pages_[handle].lock_count;
}

void PageStore::unlock(PageHandle handle, TimePoint done) {
  if (!done.is_none()) add_use(handle.id, done);
  PageRecord& page = pages_[handle];
  if (--page.lock_count == 0) requeue(handle.id);
}

void PageStore::set_priority(PageId id, uint8_t priority) noexcept {
  if (pages_[id].priority == priority) return;
  dequeue(id);
  pages_[id].priority = priority;
  requeue(id);
}

void PageStore::set_useless(PageId id) noexcept {
  PageRecord& page = pages_[id];
  if (page.useless || page.hold_count > 0) return;
  dequeue(id);
  page.useless = true;
  requeue(id);
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
  if (page.copy_slot.value() >= 0) drop_copy(id);
  if (page.hold_count == 0) free_page(id);
}

TimePoint PageStore::filled(PageId id) const noexcept { return times(id).filled; }

void PageStore::set_filled(PageId id, TimePoint point) noexcept {
  if (!point.is_none() || pages_[id].timed) timed(id).filled = point;
}

void PageStore::set_written(PageId id, TimePoint point) {
  const TimePoint now = filled(id);
  // A copy that the stream made since may come after the point.
  const bool is_later = now.timeline() != point.timeline() || now.value() < point.value();
  if (point.is_none() || !is_later) return;
  // NOTE: a copy that its owner has yet to wait for is not a part of the stream on a CPU.
  if (device_.type() == DeviceType::kCpu && !now.is_none()) add_use(id, now);
  set_filled(id, point);
}

TimePoint PageStore::last_use(PageId id) const noexcept { return times(id).last_use; }

void PageStore::add_use(PageId id, TimePoint point) {
  if (point.is_none()) return;
  TimePoint& use = timed(id).last_use;
  use = join(use, point);
}

bool PageStore::is_fenced(PageId id) const noexcept {
  const TimePoint use = last_use(id);
  return !use.is_none() && !device_.is_waitable(use) && !device_.reached(use);
}

TimePoint PageStore::join(TimePoint a, TimePoint b) const {
  if (a.is_none()) return b;
  if (b.is_none()) return a;
  if (a.timeline() == b.timeline()) return a.value() < b.value() ? b : a;
  if (device_.reached(a)) return b;
  if (device_.reached(b)) return a;
  return device_.join(a, b);
}

void PageStore::free_page(PageId id) {
  dequeue(id);
  const PageRecord page = pages_[id];
  if (page.copy_slot.value() >= 0) drop_copy(id);
  release_slot(page.level, PoolGroupId(page.pool_group), page.slot, end_of(times(id)));
  pages_.free(id);
}

void PageStore::release_slot(int level, PoolGroupId group, SlotId slot, TimePoint after) {
  at(level).groups[group].slots.release(slot, after, device_);
}

void PageStore::settle() noexcept {
  for (Level& level : levels_) {
    for (Group& group : level.groups) group.slots.settle(device_);
  }
}

int32_t PageStore::room(int level, PoolGroupId group) const noexcept {
  const Group& g = at(level).groups[group];
  return g.slots.num_free() + g.num_clean;
}

bool PageStore::is_immutable(const PageRecord& page) const noexcept {
  if (page.node == kNoNode) return false;
  if (ssm_ && page.life_cycle == ssm_->value()) return true;
  return page.num_tokens == tokens_per_block_;
}

bool PageStore::is_current(const CleanCopy& copy, int level) const noexcept {
  if (!pages_.is_current(copy.page)) return false;
  const PageRecord& page = pages_[copy.page.id];
  return page.copy_slot == copy.slot && page.copy_level == level;
}

bool PageStore::keep_copy(PageId id, int level, SlotId slot) {
  PageRecord& page = pages_[id];
  Group& group = at(level).groups[PoolGroupId(page.pool_group)];
  if (slot.value() >= group.slots.limit()) return false;
  try {
    group.clean.push_back({pages_.handle(id), slot});
  } catch (const std::bad_alloc&) {
    return false;
  }
  page.copy_slot = slot;
  page.copy_level = static_cast<uint8_t>(level);
  ++group.num_clean;
  if (group.clean.size() > 64 + 2 * static_cast<size_t>(group.num_clean)) {
    std::erase_if(group.clean, [&](const CleanCopy& copy) { return !is_current(copy, level); });
  }
  return true;
}

void PageStore::drop_copy(PageId id) {
  PageRecord& page = pages_[id];
  const int level = page.copy_level;
  const PoolGroupId group_id(page.pool_group);
  Group& group = at(level).groups[group_id];
  const auto slot = static_cast<size_t>(page.copy_slot.value());
  --group.num_clean;
  release_slot(level, group_id, page.copy_slot, end_of(group.times[slot]));
  page.copy_slot = SlotId(kBadPageIndex);
}

SlotId PageStore::take_slot(int level, PoolGroupId group_id) {
  Group& group = at(level).groups[group_id];
  // Pages that a plan sends to their copies need them.
  for (size_t left = group.clean.size(); group.slots.num_free() == 0 && left > 0; --left) {
    const CleanCopy oldest = group.clean.front();
    group.clean.pop_front();
    if (!is_current(oldest, level)) continue;
    if (pages_[oldest.page.id].to_copy) {
      group.clean.push_back(oldest);
    } else {
      drop_copy(oldest.page.id);
    }
  }
  HELICORE_ASSERT(group.slots.num_free() > 0, "kv.page_store", "no slot on level ", level,
                  " of pool group ", group_id);
  return hand_out(group.slots);
}

}  // namespace helicore::kv
