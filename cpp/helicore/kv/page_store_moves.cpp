// Pages on their way between slots and levels.
#include <algorithm>

#include "helicore/core/error.h"
#include "helicore/kv/page_store.h"

namespace helicore::kv {

void PageStore::add_tasks(const Group& from, SlotId src, const Group& to, SlotId dst,
                          uint64_t tag) {
  for (size_t p = 0; p < from.pools.size(); ++p) {
    const int64_t bytes = from.piece_bytes[p];
    tasks_.push_back({.dst = to.pools[p].get(),
                      .src = from.pools[p].get(),
                      .dst_offset = dst.value() * bytes,
                      .src_offset = src.value() * bytes,
                      .num_bytes = bytes,
                      .tag = tag});
  }
}

void PageStore::add_after(TimePoint point) {
  if (!point.is_none() && !device_.reached(point)) after_.push_back(point);
}

void PageStore::move(std::span<const PageId> pages, int level) {
  tasks_.clear();
  after_.clear();
  taken_.clear();
  taken_.reserve(pages.size());
  // A page that returns to its copy needs it, whatever the others of the batch take.
  for (PageId id : pages) {
    PageRecord& page = pages_[id];
    if (page.copy_slot.value() >= 0 && page.copy_level == level) page.to_copy = true;
  }
  for (PageId id : pages) {
    const PageRecord& page = pages_[id];
    const PoolGroupId group_id(page.pool_group);
    if (page.copy_slot.value() >= 0 && page.copy_level == level) {
      taken_.push_back(SlotId(kBadPageIndex));
      continue;
    }
    const SlotId slot = take_slot(level, group_id);
    taken_.push_back(slot);
    const Group& to = at(level).groups[group_id];
    add_tasks(home(page), page.slot, to, slot, pages_.handle(id).tag());
    add_after(filled(id));
    add_after(last_use(id));
    add_after(to.slots.after(slot));
  }
  TimePoint done;
  try {
    if (!tasks_.empty()) done = device_.copy(tasks_, after_);
  } catch (...) {
    for (size_t i = 0; i < pages.size(); ++i) {
      if (taken_[i].value() < 0) continue;
      const PoolGroupId group(pages_[pages[i]].pool_group);
      release_slot(level, group, taken_[i], slots(group, level).after(taken_[i]));
    }
    throw;
  }
  for (size_t i = 0; i < pages.size(); ++i) {
    if (taken_[i].value() < 0) {
      settle_on_copy(pages[i]);
    } else {
      relocate(pages[i], level, taken_[i], done);
    }
  }
}

void PageStore::settle_on_copy(PageId id) {
  dequeue(id);
  PageRecord& page = pages_[id];
  const PoolGroupId group(page.pool_group);
  release_slot(page.level, group, page.slot, end_of(times(id)));
  --at(page.copy_level).groups[group].num_clean;
  page.level = page.copy_level;
  page.slot = page.copy_slot;
  page.timed = true;
  page.copy_slot = SlotId(kBadPageIndex);
  page.to_copy = false;
  requeue(id);
}

void PageStore::relocate(PageId id, int level, SlotId slot, TimePoint done) {
  PageRecord& page = pages_[id];
  const int old_level = page.level;
  // Within its level a page keeps its place in the queue.
  if (old_level != level) dequeue(id);
  if (page.queued && is_beyond_limit(id)) --home(page).num_queued_beyond;
  const SlotId old_slot = page.slot;
  add_use(id, done);
  const TimePoint old_use = end_of(timed(id));
  const bool keeps_old = old_level > level && is_immutable(page);
  // One copy at most, the warmest, and none warmer than the page itself.
  if (page.copy_slot.value() >= 0 && (keeps_old || page.copy_level <= level)) drop_copy(id);
  page.level = static_cast<uint8_t>(level);
  page.slot = slot;
  page.timed = false;
  set_filled(id, done);
  if (!keeps_old || !keep_copy(id, old_level, old_slot)) {
    release_slot(old_level, PoolGroupId(page.pool_group), old_slot, old_use);
  }
  requeue(id);
}

TimePoint PageStore::copy_page(PageHandle from, PageHandle to, StreamHandle stream) {
  tasks_.clear();
  after_.clear();
  const PageRecord& source = pages_[from];
  const PageRecord& target = pages_[to];
  add_tasks(home(source), source.slot, home(target), target.slot, to.tag());
  add_after(filled(from.id));
  add_after(filled(to.id));
  // NOTE: on a CPU the stream is the caller's thread, which holds the lock here. It must neither
  // wait nor copy much: the caller waits for the point once the lock is free.
  const bool in_stream = source.level == kHotLevel && device_.type() != DeviceType::kCpu;
  TimePoint done;
  if (in_stream) {
    if (!after_.empty()) device_.wait(stream, after_);
    device_.copy_on(stream, tasks_);
    done = device_.record(stream);
  } else {
    done = device_.copy(tasks_, after_);
  }
  set_filled(to.id, done);
  add_use(from.id, done);
  return in_stream ? TimePoint() : done;
}

void PageStore::promote(PageId shown, PageHandle own, uint8_t priority) {
  dequeue(shown);
  PageRecord& page = pages_[shown];
  const PageRecord taken = pages_[own];
  const int old_level = page.level;
  const SlotId old_slot = page.slot;
  const TimePoint old_use = end_of(timed(shown));
  if (page.copy_slot.value() >= 0) drop_copy(shown);
  page.level = taken.level;
  page.slot = taken.slot;
  page.timed = taken.timed;
  page.priority = std::max(page.priority, priority);
  ++page.hold_count;
  page.lock_count += taken.lock_count;
  page.useless = false;
  if (!is_immutable(page) || !keep_copy(shown, old_level, old_slot)) {
    release_slot(old_level, PoolGroupId(page.pool_group), old_slot, old_use);
  }
  pages_.free(own.id);
  requeue(shown);
}

void PageStore::grow_group(int level, PoolGroupId group_id, int32_t num_slots) {
  Group& group = at(level).groups[group_id];
  const int32_t before = group.slots.capacity();
  const auto count = static_cast<size_t>(num_slots);
  group.times.reserve(count);
  size_t num_pages = count - static_cast<size_t>(before);
  for (const Level& each : levels_) {
    for (const Group& other : each.groups) num_pages += static_cast<size_t>(other.slots.capacity());
  }
  pages_.reserve(num_pages);
  size_t grown = 0;
  try {
    for (; grown < group.pools.size(); ++grown) {
      group.pools[grown]->resize(group.piece_bytes[grown] * num_slots);
    }
    group.slots.grow(num_slots);
  } catch (...) {
    for (size_t p = 0; p < grown; ++p) group.pools[p]->resize(group.piece_bytes[p] * before);
    throw;
  }
  group.times.resize(count);
}

void PageStore::set_limit(int level, PoolGroupId group_id, int32_t limit) noexcept {
  Group& group = at(level).groups[group_id];
  group.slots.set_limit(limit, device_);
  group.num_queued_beyond = 0;
  for (PageId id = group.queue.front(); id != kNoPage; id = group.queue.after(pages_, id)) {
    group.num_queued_beyond += is_beyond_limit(id) ? 1 : 0;
  }
}

void PageStore::drop_copies_beyond_limit(int level, PoolGroupId group_id) {
  Group& group = at(level).groups[group_id];
  for (const CleanCopy& copy : group.clean) {
    if (copy.slot.value() >= group.slots.limit() && is_current(copy, level)) {
      drop_copy(copy.page.id);
    }
  }
}

int32_t PageStore::num_clean_below_limit(int level, PoolGroupId group_id) const noexcept {
  const Group& group = at(level).groups[group_id];
  if (group.slots.limit() == group.slots.capacity()) return group.num_clean;
  int32_t count = group.num_clean;
  for (const PageRecord& page : pages_.records()) {
    const bool is_beyond = page.in_use && page.copy_slot.value() >= group.slots.limit() &&
                           page.copy_level == level && page.pool_group == group_id.value();
    count -= is_beyond ? 1 : 0;
  }
  return count;
}

bool PageStore::finish_shrink(int level, PoolGroupId group_id) {
  Group& group = at(level).groups[group_id];
  const int32_t limit = group.slots.limit();
  drop_copies_beyond_limit(level, group_id);
  if (limit == group.slots.capacity()) return true;
  if (!group.slots.is_tail_free(device_)) return false;
  for (size_t p = 0; p < group.pools.size(); ++p) {
    group.pools[p]->resize(group.piece_bytes[p] * limit);
  }
  group.slots.trim();
  group.times.resize(static_cast<size_t>(limit));
  return true;
}

std::vector<PageId> PageStore::pages_beyond_limit(int level, PoolGroupId group) const {
  const int32_t limit = at(level).groups[group].slots.limit();
  std::vector<PageId> found;
  for (uint32_t i = 0; i < pages_.num_records(); ++i) {
    const PageRecord& page = pages_[PageId(i)];
    if (page.in_use && page.level == level && page.pool_group == group.value() &&
        page.slot.value() >= limit) {
      found.push_back(PageId(i));
    }
  }
  return found;
}

void PageStore::defragment(std::span<const PageId> pages) {
  if (!pages.empty()) move(pages, pages_[pages.front()].level);
}

}  // namespace helicore::kv
