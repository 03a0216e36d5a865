#include "helicore/kv/migration.h"

#include <algorithm>

#include "helicore/core/error.h"

namespace helicore::kv {

void Migrator::GroupPlan::clear() {
  for (auto& pages : down) pages.clear();
  up.clear();
  drops.clear();
  fresh = 0;
}

class Migrator::Marks {
 public:
  explicit Marks(Migrator& owner) : owner_(owner) {}
  ~Marks() {
    for (PageHandle page : owner_.marked_) {
      if (!owner_.store_.pages().is_current(page)) continue;
      owner_.store_.set_marked(page.id, false);
      owner_.store_.set_to_copy(page.id, false);
    }
    owner_.marked_.clear();
    owner_.victims_.clear();
    for (GroupPlan& plan : owner_.plans_) plan.clear();
  }
  Marks(const Marks&) = delete;
  Marks& operator=(const Marks&) = delete;

 private:
  Migrator& owner_;
};

Migrator::Migrator(PageStore& store, RadixTree& tree, const StorageLayout& layout,
                   MigrationStats& stats)
    : store_(store), tree_(tree), layout_(layout), stats_(stats), plans_(store.num_groups()) {
  for (GroupPlan& plan : plans_) plan.down.resize(static_cast<size_t>(store.num_levels()));
  size_t num_life_cycles = 0;
  for (const PoolGroupLayout& group : layout.groups()) num_life_cycles += group.variants.size();
  stats_.levels.assign(static_cast<size_t>(store.num_levels()),
                       TypedVec<LifeCycleId, MigrationCounters>(num_life_cycles));
}

std::optional<NoRoom> Migrator::make_room(const RoomRequest& request) {
  std::optional<NoRoom> reason;
  for (const bool spare_held : {false, true}) {
    const Marks marks(*this);
    spare_held_ = spare_held;
    reason = plan(request);
    if (reason) continue;
    execute(request.level);
    return std::nullopt;
  }
  return reason;
}

std::optional<NoRoom> Migrator::push_down(std::span<const PageId> pages) {
  if (pages.empty()) return std::nullopt;
  const Marks marks(*this);
  spare_held_ = true;
  const PoolGroupId group(store_.page(pages.front()).pool_group);
  const int level = store_.page(pages.front()).level;
  if (auto reason = plan_push_down(pages)) return reason;
  execute_group(group, level);
  return std::nullopt;
}

std::optional<NoRoom> Migrator::check_push_down(std::span<const PageId> pages) {
  if (pages.empty()) return std::nullopt;
  const Marks marks(*this);
  spare_held_ = true;
  return plan_push_down(pages);
}

std::optional<NoRoom> Migrator::plan_push_down(std::span<const PageId> pages) {
  store_.settle();
  for (PageId id : pages) {
    mark(id);
    victims_.push_back(store_.pages().handle(id));
  }
  const PageRecord& first = store_.page(pages.front());
  return place_victims(PoolGroupId(first.pool_group), first.level);
}

std::vector<PageId> Migrator::next_victims(PoolGroupId group, int level, int64_t count,
                                           bool spare_held) const {
  std::vector<PageId> found;
  const EvictionQueue& queue = store_.queue(group, level);
  for (int pass = spare_held ? 0 : 1; pass < 2; ++pass) {
    for (PageId id = queue.front(); id != kNoPage && static_cast<int64_t>(found.size()) < count;
         id = queue.after(store_.pages(), id)) {
      const bool is_held = store_.page(id).hold_count > 0;
      if (store_.is_fenced(id) || (spare_held && is_held != (pass == 1))) continue;
      found.push_back(id);
    }
  }
  return found;
}

int32_t Migrator::num_available(PoolGroupId group, int level) const noexcept {
  return store_.counts(group, level).available() - bounce(group, level);
}

int32_t Migrator::bounce(PoolGroupId group, int level) const noexcept {
  return level > kHotLevel && store_.slots(group, level).limit() > 1 ? 1 : 0;
}

NoRoom Migrator::no_room(PoolGroupId group, int level, int64_t needed) const {
  const PoolGroupCounts counts = store_.counts(group, level);
  int64_t pending = counts.pending;
  for (PageId id = store_.queue(group, level).front(); id != kNoPage;
       id = store_.queue(group, level).after(store_.pages(), id)) {
    pending += store_.is_fenced(id) ? 1 : 0;
  }
  return {.domain = layout_.groups()[group].domain,
          .pool_group = group,
          .level = level,
          .needed = needed,
          .free = counts.free + counts.clean,
          .evictable = counts.evictable,
          .pending = pending};
}

void Migrator::mark(PageId id) {
  marked_.push_back(store_.pages().handle(id));
  store_.set_marked(id, true);
}

std::optional<NoRoom> Migrator::plan(const RoomRequest& request) {
  store_.settle();
  for (PageId id : request.pages) {
    const PageRecord& page = store_.page(id);
    if (page.marked) continue;
    mark(id);
    if (page.level > request.level) {
      plans_[PoolGroupId(page.pool_group)].up.push_back(store_.pages().handle(id));
    }
  }
  for (size_t g = 0; g < request.fresh.size(); ++g) {
    plans_[PoolGroupId(static_cast<int32_t>(g))].fresh = request.fresh[g];
  }
  for (size_t g = 0; g < plans_.count(); ++g) {
    if (auto reason = plan_group(PoolGroupId(static_cast<int32_t>(g)), request.level)) {
      return reason;
    }
  }
  return std::nullopt;
}

std::optional<NoRoom> Migrator::plan_group(PoolGroupId group, int level) {
  GroupPlan& plan = plans_[group];
  const int64_t needed = int64_t{plan.fresh} + static_cast<int64_t>(plan.up.size());
  if (needed == 0) return std::nullopt;
  const int64_t deficit = needed - (store_.room(level, group) - bounce(group, level));
  if (deficit <= 0) return std::nullopt;
  if (deficit > store_.counts(group, level).evictable) return no_room(group, level, needed);
  victims_.clear();
  const auto count = static_cast<int32_t>(deficit);
  if (pick_victims(group, level, count) < count) return no_room(group, level, needed);
  if (auto reason = place_victims(group, level)) return reason;
  return std::nullopt;
}

std::optional<NoRoom> Migrator::place_victims(PoolGroupId group, int level) {
  const int last = store_.last_level();
  if (level == last) {
    for (PageHandle page : victims_) {
      if (store_.page(page.id).hold_count > 0) return no_room(group, level, 1);
    }
    auto& drops = plans_[group].drops;
    drops.insert(drops.end(), victims_.begin(), victims_.end());
    victims_.clear();
    return std::nullopt;
  }
  for (int below = level + 1; below <= last && !victims_.empty(); ++below) {
    const auto incoming = static_cast<int64_t>(victims_.size());
    if (absorb(group, below) > 0) return no_room(group, below, incoming);
  }
  return std::nullopt;
}

PageId Migrator::next_victim(PoolGroupId group, int level, PageId id,
                             bool droppable_only) const noexcept {
  const EvictionQueue& queue = store_.queue(group, level);
  // A page beyond the limit leaves no slot that can be used.
  const auto is_passed = [&](PageId page) {
    return store_.page(page).marked || (droppable_only && store_.page(page).hold_count > 0) ||
           store_.is_beyond_limit(page) || store_.is_fenced(page);
  };
  while (id != kNoPage && is_passed(id)) {
    id = queue.after(store_.pages(), id);
  }
  return id;
}

int32_t Migrator::pick_victims(PoolGroupId group, int level, int32_t count) {
  const EvictionQueue& queue = store_.queue(group, level);
  int32_t found = 0;
  for (int pass = spare_held_ ? 0 : 1; pass < 2; ++pass) {
    const bool droppable_only = pass == 0;
    for (PageId id = next_victim(group, level, queue.front(), droppable_only);
         id != kNoPage && found < count;
         id = next_victim(group, level, queue.after(store_.pages(), id), droppable_only)) {
      mark(id);
      victims_.push_back(store_.pages().handle(id));
      ++found;
    }
  }
  return found;
}

int32_t Migrator::absorb(PoolGroupId group, int level) {
  GroupPlan& plan = plans_[group];
  std::vector<PageHandle>& arrivals = plan.down[static_cast<size_t>(level)];
  std::vector<PageHandle> incoming;
  incoming.swap(victims_);
  const int32_t passing = bounce(group, level);
  int32_t room = store_.room(level, group) - passing;
  // Pages can only change places through a free slot, and not through one that is to go.
  for (PageHandle page : plan.up) {
    room += passing > 0 && store_.page(page.id).level == level && !store_.is_beyond_limit(page.id);
  }
  std::erase_if(incoming, [&](PageHandle page) {
    const PageRecord& record = store_.page(page.id);
    if (record.copy_slot.value() < 0 || record.copy_level != level) return false;
    if (spare_held_ && record.hold_count == 0) return false;
    store_.set_to_copy(page.id, true);
    --room;  // its copy is not to be given up
    arrivals.push_back(page);
    return true;
  });
  auto overflow = static_cast<int32_t>(incoming.size()) - room;
  if (spare_held_) overflow = expel(incoming, group, level, {overflow, true});
  overflow = expel(incoming, group, level, {overflow, level == store_.last_level()});
  arrivals.insert(arrivals.end(), incoming.begin(), incoming.end());
  return std::max(0, overflow);
}

int32_t Migrator::expel(std::vector<PageHandle>& incoming, PoolGroupId group, int level,
                        Excess excess) {
  const EvictionQueue& queue = store_.queue(group, level);
  const bool is_last = level == store_.last_level();
  const auto stays = [&](size_t i) {
    return excess.droppable_only && store_.page(incoming[i].id).hold_count > 0;
  };
  PageId resident = kNoPage;
  if (excess.count > 0) resident = next_victim(group, level, queue.front(), excess.droppable_only);
  size_t at = 0;
  size_t kept = 0;
  while (excess.count > 0) {
    while (at < incoming.size() && stays(at)) incoming[kept++] = incoming[at++];
    const bool have = at < incoming.size();
    if (!have && resident == kNoPage) break;
    PageHandle leaving;
    if (resident != kNoPage && (!have || EvictionQueue::rank(store_.page(resident)) <=
                                             EvictionQueue::rank(store_.page(incoming[at].id)))) {
      leaving = store_.pages().handle(resident);
      mark(resident);
      resident =
          next_victim(group, level, queue.after(store_.pages(), resident), excess.droppable_only);
    } else {
      leaving = incoming[at++];
    }
    (is_last ? plans_[group].drops : victims_).push_back(leaving);
    --excess.count;
  }
  while (at < incoming.size()) incoming[kept++] = incoming[at++];
  incoming.resize(kept);
  return excess.count;
}

void Migrator::execute(int level) {
  for (size_t g = 0; g < plans_.count(); ++g) {
    execute_group(PoolGroupId(static_cast<int32_t>(g)), level);
  }
}

void Migrator::execute_group(PoolGroupId group, int level) {
  GroupPlan& plan = plans_[group];
  const bool is_idle =
      plan.drops.empty() && plan.up.empty() &&
      std::all_of(plan.down.begin(), plan.down.end(), [](const auto& p) { return p.empty(); });
  if (is_idle) return;
  for (PageHandle page : plan.drops) drop(page);
  if (!plan.drops.empty()) prefetch_front(group, store_.last_level());
  const auto num_levels = static_cast<size_t>(store_.num_levels());
  std::vector<size_t> done(num_levels + 1, 0);
  for (bool busy = true; busy;) {
    busy = false;
    bool left = false;
    for (size_t below = num_levels - 1; below > static_cast<size_t>(level); --below) {
      busy |= move_some(plan.down[below], done[below], group, static_cast<int>(below));
      left |= done[below] < plan.down[below].size();
    }
    busy |= move_some(plan.up, done[num_levels], group, level);
    left |= done[num_levels] < plan.up.size();
    HELICORE_ASSERT(busy || !left, "kv.migration", "pages of pool group ", group,
                    " have nowhere to go");
  }
}

void Migrator::prefetch_front(PoolGroupId group, int level) const noexcept {
  const PageId next = store_.queue(group, level).front();
  if (next == kNoPage) return;
  const PageRecord& record = store_.page(next);  // at hand: its link was just changed
  if (record.next != kNoPage) store_.pages().prefetch(record.next);
  if (record.node != kNoNode) tree_.prefetch(record.node);
}

bool Migrator::move_some(std::vector<PageHandle>& pages, size_t& done, PoolGroupId group,
                         int level) {
  const size_t begin = done;
  const auto is_kept = [&](PageHandle page) {  // its copy at `level` is not room for others
    if (!store_.pages().is_current(page)) return false;
    const PageRecord& record = store_.page(page.id);
    return record.to_copy && record.copy_slot.value() >= 0 && record.copy_level == level;
  };
  while (done < pages.size()) {
    const auto rest = pages.begin() + static_cast<std::ptrdiff_t>(done);
    int32_t room =
        store_.room(level, group) - static_cast<int32_t>(std::count_if(rest, pages.end(), is_kept));
    batch_.clear();
    int source = -1;
    for (; done < pages.size(); ++done) {
      if (!store_.pages().is_current(pages[done])) continue;  // went with a page that was dropped
      const PageRecord& page = store_.page(pages[done].id);
      if (source >= 0 && page.level != source) break;
      if (!is_kept(pages[done]) && room-- <= 0) break;
      source = page.level;
      batch_.push_back(pages[done].id);
    }
    if (batch_.empty()) break;
    const bool is_up = level < source;
    auto& counters = stats_.levels[static_cast<size_t>(is_up ? source : level)];
    for (PageId id : batch_) {
      const PageRecord& page = store_.page(id);
      MigrationCounters& counter = counters[LifeCycleId(page.life_cycle)];
      const int64_t bytes = page.to_copy ? 0 : layout_.groups()[group].slot_bytes();
      (is_up ? counter.onboarded_pages : counter.offloaded_pages) += 1;
      (is_up ? counter.onboarded_bytes : counter.offloaded_bytes) += bytes;
      counter.unwritten_pages += page.to_copy ? 1 : 0;
    }
    store_.move(batch_, level);
  }
  return done > begin;
}

void Migrator::drop(PageHandle page) {
  if (!store_.pages().is_current(page) || store_.page(page.id).hold_count > 0) return;
  const PageRecord& record = store_.page(page.id);
  const LifeCycleId life_cycle(record.life_cycle);
  ++stats_.levels[record.level][life_cycle].dropped_pages;
  if (record.node != kNoNode && tree_.has_window(life_cycle)) {
    useless_.clear();
    tree_.collect_useless(record.node, life_cycle, useless_);
    for (PageId id : useless_) store_.set_useless(id);
  }
  stats_.dropped_nodes += tree_.drop(page.id);
}

}  // namespace helicore::kv
