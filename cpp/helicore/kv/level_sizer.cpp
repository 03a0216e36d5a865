#include "helicore/kv/level_sizer.h"

#include <algorithm>

#include "helicore/core/error.h"
#include "helicore/kv/kv_cache.h"
#include "helicore/kv/manager_state.h"

namespace helicore::kv {
namespace {

constexpr int64_t kAllPages = INT64_MAX;
// An adjustment takes this many steps, so that a group never lacks more than a part of what moves.
constexpr int64_t kAdjustSteps = 8;

PoolGroupId group_at(size_t index) { return PoolGroupId(static_cast<int32_t>(index)); }
int64_t round_up(int64_t value, int64_t grain) { return (value + grain - 1) / grain * grain; }

}  // namespace

LevelSizer::LevelSizer(ManagerState& state)
    : state_(state),
      plans_(state.levels.size()),
      tracker_(RebalancePolicy::of(state.config), state.now_ns()) {}

size_t LevelSizer::num_groups() const noexcept { return state_.store.num_groups(); }

// ---------------------------------------------------------------------------- to another quota

ResizeResult LevelSizer::resize(int level, int64_t quota, bool best_effort) {
  const LevelState& own = state_.levels[static_cast<size_t>(level)];
  HELICORE_CHECK(quota > 0 && quota <= own.max_quota, "kv.resize_level", "quota must be in 1..",
                 own.max_quota, " bytes: level ", level, " has reserved no more addresses, got ",
                 quota);
  state_.store.settle();
  const int64_t rounded = round_up(quota, own.grain);
  if (rounded < own.split.minimum) {
    ResizeResult result = report(level);
    result.done = false;
    return result;
  }
  const GroupSlots held = capacities(level);
  const bool grows = min_quota(state_.layout, held, own.grain) <= rounded;
  QuotaSplit target = solve(level, rounded, plan(level).weights,
                            grows ? std::optional<GroupSlots>(held) : std::nullopt);
  HELICORE_CHECK(fits_addresses(level, target), "kv.resize_level", "quota gives level ", level,
                 " more slots than 32-bit page indices address, got ", quota);
  return grows ? grow(level, std::move(target)) : shrink(level, std::move(target), best_effort);
}

ResizeResult LevelSizer::grow(int level, QuotaSplit target) {
  PageStore& store = state_.store;
  const GroupSlots before = capacities(level);
  const GroupSlots old_limits = limits(level);
  set_limits(level, before);
  try {
    for (size_t g = 0; g < num_groups(); ++g) {
      const PoolGroupId group = group_at(g);
      if (target.num_slots[group] == before[group]) continue;
      grow_group(level, group, target.num_slots[group]);
    }
  } catch (...) {
    set_limits(level, before);
    for (size_t g = 0; g < num_groups(); ++g) (void)store.finish_shrink(level, group_at(g));
    set_limits(level, old_limits);
    throw;
  }
  plan(level).transition.reset();
  ++plan(level).serial;
  state_.levels[static_cast<size_t>(level)].split = std::move(target);
  update_busy();
  return report(level);
}

ResizeResult LevelSizer::shrink(int level, QuotaSplit target, bool best_effort) {
  if (!best_effort) {
    const GroupSlots old_limits = limits(level);
    GroupSlots trial = capacities(level);
    for (size_t g = 0; g < trial.count(); ++g) {
      trial[group_at(g)] = std::min<int64_t>(trial[group_at(g)], target.num_slots[group_at(g)]);
    }
    set_limits(level, trial);
    auto reason = find_obstacle(level);
    set_limits(level, old_limits);
    if (reason) {
      ResizeResult result = report(level);
      result.done = false;
      result.reason = reason;
      return result;
    }
  }
  start(level, std::move(target), 1);
  try {
    return proceed(level);
  } catch (...) {
    if (!best_effort) cancel(level);
    throw;
  }
}

ResizeResult LevelSizer::proceed(int level) {
  if (plan(level).transition) (void)advance(level, kAllPages);
  ResizeResult result = report(level);
  if (!result.done) result.reason = find_obstacle(level);
  return result;
}

std::optional<NoRoom> LevelSizer::find_obstacle(int level) {
  for (size_t g = 0; g < num_groups(); ++g) {
    if (auto reason = find_obstacle(level, group_at(g))) return reason;
  }
  return std::nullopt;
}

std::optional<NoRoom> LevelSizer::find_obstacle(int level, PoolGroupId group) {
  PageStore& store = state_.store;
  const SlotAllocator& slots = store.slots(group, level);
  if (slots.limit() == slots.capacity()) return std::nullopt;
  std::vector<PageHandle> tail;
  for (PageId id : store.pages_beyond_limit(level, group)) tail.push_back(store.pages().handle(id));
  const GroupRoom room = {level, group,
                          int64_t{slots.num_free()} + store.num_clean_below_limit(level, group) -
                              state_.migrator.bounce(group, level)};
  Evacuation way = plan_evacuation(tail, room, kAllPages, false);
  std::vector<TimePoint> points;
  const bool is_stepped_on = !slots.collect_tail_points(*state_.device, points);
  if (way.stuck + way.missing > 0 || is_stepped_on) {
    NoRoom reason = state_.migrator.no_room(group, level, way.stuck + way.missing);
    reason.pending += is_stepped_on ? 1 : 0;
    return reason;
  }
  const auto reason = state_.migrator.check_push_down(way.victims);
  if (!reason) return std::nullopt;
  way = plan_evacuation(tail, room, kAllPages, true);
  return state_.migrator.check_push_down(way.victims) ? reason : std::nullopt;
}

// ---------------------------------------------------------------------------- on the way there

void LevelSizer::start(int level, QuotaSplit target, int64_t num_steps) {
  Transition next{.target = std::move(target),
                  .step = GroupSlots(num_groups(), 1),
                  .tails = TypedVec<PoolGroupId, std::vector<PageHandle>>(num_groups()),
                  .next = TypedVec<PoolGroupId, size_t>(num_groups(), 0)};
  const GroupSlots held = capacities(level);
  for (size_t g = 0; g < num_groups(); ++g) {
    const int64_t less = held[group_at(g)] - next.target.num_slots[group_at(g)];
    next.step[group_at(g)] = std::max<int64_t>(1, (less + num_steps - 1) / num_steps);
  }
  plan(level).transition = std::move(next);
  ++plan(level).serial;
  set_limits(level, held);
  update_busy();
}

void LevelSizer::cancel(int level) {
  plan(level).transition.reset();
  ++plan(level).serial;
  set_limits(level, capacities(level));
  update_busy();
}

int64_t LevelSizer::work(int64_t max_pages) {
  int64_t moved = 0;
  state_.store.settle();
  for (int level = 0; level < state_.store.num_levels() && moved < max_pages; ++level) {
    if (!plan(level).transition) continue;
    try {
      moved += advance(level, max_pages - moved);
    } catch (const OutOfMemory&) {
      break;  // the device refused a copy: another time
    }
  }
  return moved;
}

int64_t LevelSizer::advance(int level, int64_t max_pages) {
  int64_t moved = 0;
  for (size_t g = 0; g < num_groups(); ++g) {
    moved += shrink_group(level, group_at(g), max_pages - moved);
  }
  grow_groups(level);
  finish_if_reached(level);
  return moved;
}

int64_t LevelSizer::shrink_group(int level, PoolGroupId group, int64_t max_pages) {
  PageStore& store = state_.store;
  const SlotAllocator& slots = store.slots(group, level);
  Transition& way = *plan(level).transition;
  int64_t moved = 0;
  while (slots.capacity() > way.target.num_slots[group]) {
    if (slots.limit() == slots.capacity()) begin_step(level, group);
    moved += evacuate(level, group, max_pages - moved);
    // A page that took over the slot of a locked one is not on the list yet.
    if (way.tails[group].empty() && slots.num_in_use_beyond_limit() > 0) {
      collect_tail(level, group);
    }
    // A level that is left without a slot for pages in passing could strand what is below it.
    const bool is_done = way.tails[group].empty() && room_of(level, group).count >= 0;
    if (!is_done || !finish_shrink(level, group)) break;
    update_split(level);
  }
  return moved;
}

void LevelSizer::begin_step(int level, PoolGroupId group) {
  PageStore& store = state_.store;
  Transition& way = *plan(level).transition;
  const int64_t limit = std::max<int64_t>(way.target.num_slots[group],
                                          store.slots(group, level).capacity() - way.step[group]);
  store.set_limit(level, group, static_cast<int32_t>(limit));
  store.drop_copies_beyond_limit(level, group);
  collect_tail(level, group);
}

void LevelSizer::collect_tail(int level, PoolGroupId group) {
  Transition& way = *plan(level).transition;
  way.tails[group].clear();
  way.next[group] = 0;
  for (PageId id : state_.store.pages_beyond_limit(level, group)) {
    way.tails[group].push_back(state_.store.pages().handle(id));
  }
}

int64_t LevelSizer::evacuate(int level, PoolGroupId group, int64_t max_pages) {
  PageStore& store = state_.store;
  const size_t from = max_pages == kAllPages ? 0 : plan(level).transition->next[group];
  const std::vector<PageHandle> tail = look_at_tail(level, group, max_pages);
  Evacuation way = plan_evacuation(tail, room_of(level, group), max_pages, false);
  int64_t moved = 0;
  if (!way.victims.empty() && state_.migrator.push_down(way.victims)) {
    way = plan_evacuation(tail, room_of(level, group), max_pages, true);
    moved = push_some_down(way.victims);
  } else {
    moved = static_cast<int64_t>(way.victims.size());
  }
  std::vector<PageId> pages;
  for (PageHandle page : way.pages) {
    const auto count = static_cast<int64_t>(pages.size());
    if (moved + count >= max_pages || count >= room_of(level, group).count) break;
    if (is_in_tail(page, level)) pages.push_back(page.id);
  }
  store.defragment(pages);
  moved += static_cast<int64_t>(pages.size());
  // Takes the pages that left off the list.
  plan(level).transition->next[group] = from;
  (void)look_at_tail(level, group, max_pages);
  return moved;
}

LevelSizer::GroupRoom LevelSizer::room_of(int level, PoolGroupId group) const {
  return {level, group,
          int64_t{state_.store.room(level, group)} - state_.migrator.bounce(group, level)};
}

std::vector<PageHandle> LevelSizer::look_at_tail(int level, PoolGroupId group, int64_t max_pages) {
  std::vector<PageHandle>& tail = plan(level).transition->tails[group];
  size_t& next = plan(level).transition->next[group];
  if (max_pages == kAllPages || next >= tail.size()) next = 0;
  // Enough to find pages that can be moved between those that are locked.
  constexpr int64_t kLookAhead = 4;
  constexpr int64_t kLeast = 64;
  const int64_t look =
      max_pages > kAllPages / kLookAhead ? kAllPages : std::max(kLeast, kLookAhead * max_pages);
  std::vector<PageHandle> found;
  for (int64_t i = 0; i < look && next < tail.size(); ++i) {
    if (is_in_tail(tail[next], level)) {
      found.push_back(tail[next++]);
    } else {
      tail[next] = tail.back();
      tail.pop_back();
    }
  }
  return found;
}

bool LevelSizer::is_in_tail(PageHandle page, int level) const {
  const PageStore& store = state_.store;
  return store.pages().is_current(page) && store.page(page.id).level == level &&
         store.is_beyond_limit(page.id);
}

LevelSizer::Evacuation LevelSizer::plan_evacuation(std::span<const PageHandle> tail,
                                                   const GroupRoom& room, int64_t max_pages,
                                                   bool spare_held) const {
  const PageStore& store = state_.store;
  Evacuation way;
  for (PageHandle page : tail) {
    if (store.page(page.id).lock_count > 0 || store.is_fenced(page.id)) {
      ++way.stuck;
    } else if (static_cast<int64_t>(way.pages.size()) < max_pages) {
      way.pages.push_back(page);
    }
  }
  const int64_t excess = std::min(static_cast<int64_t>(way.pages.size()) - room.count, max_pages);
  if (excess <= 0) return way;
  way.victims = state_.migrator.next_victims(room.group, room.level, excess, spare_held);
  way.missing = excess - static_cast<int64_t>(way.victims.size());
  return way;
}

int64_t LevelSizer::push_some_down(std::span<const PageId> victims) {
  for (size_t count = victims.size(); count > 0; count /= 2) {
    if (!state_.migrator.push_down(victims.first(count))) return static_cast<int64_t>(count);
  }
  return 0;
}

void LevelSizer::grow_groups(int level) {
  const LevelState& own = state_.levels[static_cast<size_t>(level)];
  Transition& way = *plan(level).transition;
  for (size_t g = 0; g < num_groups(); ++g) {
    const PoolGroupId group = group_at(g);
    const int32_t held = state_.store.slots(group, level).capacity();
    if (held >= way.target.num_slots[group]) continue;
    const PoolGroupLayout& shape = state_.layout.groups()[group];
    const int64_t others = min_quota(state_.layout, capacities(level), own.grain) -
                           bytes_for_slots(shape, held, own.grain);
    const int64_t most = slots_for_bytes(shape, way.target.quota - others, own.grain);
    const auto count = static_cast<int32_t>(std::min<int64_t>(most, way.target.num_slots[group]));
    if (count <= held) continue;
    try {
      grow_group(level, group, count);
    } catch (const OutOfMemory&) {
      way.target.num_slots[group] = held;  // the system has given the memory to others
    }
    update_split(level);
  }
}

void LevelSizer::grow_group(int level, PoolGroupId group, int32_t num_slots) {
  OperationSink* sink = noting(state_);
  if (sink == nullptr) return state_.store.grow_group(level, group, num_slots);
  const bool is_refused = sink->given(OperationField::kHadMemory) == 0;
  try {
    if (is_refused) throw OutOfMemory("[kv.replay] there was no memory for the level");
    state_.store.grow_group(level, group, num_slots);
  } catch (const OutOfMemory&) {
    sink->note(OperationField::kHadMemory, 0);
    throw;
  }
  sink->note(OperationField::kHadMemory, 1);
}

bool LevelSizer::finish_shrink(int level, PoolGroupId group) {
  OperationSink* sink = noting(state_);
  if (sink == nullptr) return state_.store.finish_shrink(level, group);
  bool done = false;
  if (sink->given(OperationField::kGaveBack) == 0) {
    state_.store.drop_copies_beyond_limit(level, group);
  } else {
    done = state_.store.finish_shrink(level, group);
  }
  sink->note(OperationField::kGaveBack, done ? 1 : 0);
  return done;
}

void LevelSizer::finish_if_reached(int level) {
  Transition& way = *plan(level).transition;
  for (size_t g = 0; g < num_groups(); ++g) {
    const SlotAllocator& slots = state_.store.slots(group_at(g), level);
    if (slots.capacity() != way.target.num_slots[group_at(g)]) return;
  }
  state_.levels[static_cast<size_t>(level)].split = std::move(way.target);
  update_split(level);
  plan(level).transition.reset();
  update_busy();
  // Until now what one group gave back was for another to take.
  state_.device->trim();
}

std::vector<TimePoint> LevelSizer::tail_points(int level) const {
  std::vector<TimePoint> points;
  for (size_t g = 0; g < num_groups(); ++g) {
    (void)state_.store.slots(group_at(g), level).collect_tail_points(*state_.device, points);
  }
  return points;
}

// ---------------------------------------------------------------------------- what there is

ResizeResult LevelSizer::report(int level) const {
  const QuotaSplit& split = state_.levels[static_cast<size_t>(level)].split;
  const auto& way = plan(level).transition;
  ResizeResult result{.done = !way.has_value(),
                      .quota = split.quota,
                      .minimum = split.minimum,
                      .slots = limits(level),
                      .pending = GroupSlots(num_groups(), 0)};
  if (!way) return result;
  const GroupSlots held = capacities(level);
  for (size_t g = 0; g < num_groups(); ++g) {
    result.pending[group_at(g)] = held[group_at(g)] - way->target.num_slots[group_at(g)];
  }
  return result;
}

GroupSlots LevelSizer::capacities(int level) const {
  GroupSlots counts(num_groups(), 0);
  for (size_t g = 0; g < counts.count(); ++g) {
    counts[group_at(g)] = state_.store.slots(group_at(g), level).capacity();
  }
  return counts;
}

GroupSlots LevelSizer::limits(int level) const {
  GroupSlots counts(num_groups(), 0);
  for (size_t g = 0; g < counts.count(); ++g) {
    counts[group_at(g)] = state_.store.slots(group_at(g), level).limit();
  }
  return counts;
}

void LevelSizer::set_limits(int level, const GroupSlots& limits) {
  for (size_t g = 0; g < limits.count(); ++g) {
    if (state_.store.slots(group_at(g), level).limit() == limits[group_at(g)]) continue;
    state_.store.set_limit(level, group_at(g), static_cast<int32_t>(limits[group_at(g)]));
  }
}

void LevelSizer::update_split(int level) {
  LevelState& own = state_.levels[static_cast<size_t>(level)];
  const GroupSlots held = capacities(level);
  for (size_t g = 0; g < held.count(); ++g) {
    own.split.num_slots[group_at(g)] = static_cast<int32_t>(held[group_at(g)]);
  }
  own.split.used = min_quota(state_.layout, held, own.grain);
}

void LevelSizer::update_busy() noexcept {
  is_busy_ = std::any_of(plans_.begin(), plans_.end(),
                         [](const LevelPlan& each) { return each.transition.has_value(); });
}

QuotaSplit LevelSizer::solve(int level, int64_t quota, const std::optional<GroupSlots>& weights,
                             const std::optional<GroupSlots>& keep) const {
  const int64_t grain = state_.levels[static_cast<size_t>(level)].grain;
  if (level == kHotLevel) {
    return split_quota(state_.config, state_.registry, state_.layout, quota, grain,
                       {.weights = weights, .keep = keep});
  }
  GroupSlots slots = weights ? *weights : capacities(kHotLevel);
  if (const auto& way = plan(kHotLevel).transition; way && !weights) {
    for (size_t g = 0; g < slots.count(); ++g) {
      slots[group_at(g)] = way->target.num_slots[group_at(g)];
    }
  }
  return split_cold_quota(state_.layout, slots, quota, grain, keep);
}

bool LevelSizer::fits_addresses(int level, const QuotaSplit& split) const {
  const auto& most = state_.levels[static_cast<size_t>(level)].max_slots;
  for (size_t g = 0; g < num_groups(); ++g) {
    if (split.num_slots[group_at(g)] > most[group_at(g)]) return false;
  }
  return true;
}

// ---------------------------------------------------------------------------- as the traffic asks

void LevelSizer::on_create(int64_t id, int32_t reused_tokens) {
  if (!is_excluded(id)) tracker_.on_create(reused_tokens);
}

void LevelSizer::on_close(int64_t id, const LengthMeans& lengths) {
  if (!is_excluded(id)) tracker_.on_close(lengths);
}

std::optional<GroupSlots> LevelSizer::traffic_weights(int level) const {
  const auto& targets = tracker_.targets();
  if (!targets) return std::nullopt;
  const int32_t block = state_.config.tokens_per_block;
  if (level == kHotLevel) {
    const BatchDesc batch = targets->hot_batch(block);
    return weights_of_batches({&batch, 1}, state_.config, state_.registry, state_.layout);
  }
  // Without reuse a colder level keeps suspended sequences.
  const BatchDesc batch =
      targets->reused > 0 ? targets->cold_batch(block) : targets->hot_batch(block);
  return slots_per_group(batch, state_.config, state_.registry, state_.layout);
}

GroupSlots LevelSizer::largest_cache() const {
  GroupSlots most(num_groups(), 0);
  for (const KVCache* cache : state_.caches) {
    GroupSlots held(num_groups(), 0);
    const size_t num_life_cycles = state_.num_life_cycles;
    for (size_t i = 0; i < cache->pages_.size(); ++i) {
      const size_t g = state_.group_of(i % num_life_cycles);
      held[group_at(g)] += cache->pages_[i].is_null() ? 0 : 1;
    }
    if (state_.ssm) ++held[state_.layout.group_of(*state_.ssm)];
    for (size_t g = 0; g < most.count(); ++g) {
      most[group_at(g)] = std::max(most[group_at(g)], held[group_at(g)]);
    }
  }
  return most;
}

std::optional<QuotaSplit> LevelSizer::traffic_split(int level) const {
  const auto weights = traffic_weights(level);
  if (!weights) return std::nullopt;
  const int64_t quota = state_.levels[static_cast<size_t>(level)].split.quota;
  // No sequence that is there may come to be too large to be resumed.
  const auto keep = level == kHotLevel ? std::optional(largest_cache()) : std::nullopt;
  QuotaSplit split = solve(level, quota, weights, keep);
  if (!fits_addresses(level, split)) return std::nullopt;
  return split;
}

bool LevelSizer::is_off_target(int level) const {
  if (plan(level).transition) return false;
  const auto target = traffic_split(level);
  if (!target) return false;
  GroupSlots slots(num_groups(), 0);
  for (size_t g = 0; g < slots.count(); ++g) slots[group_at(g)] = target->num_slots[group_at(g)];
  return tracker_.is_off_target(capacities(level), slots);
}

bool LevelSizer::need_adjustment() const {
  if (!tracker_.has_enough_samples() || !tracker_.has_cooled_down(state_.now_ns())) return false;
  if (is_off_target(kHotLevel)) return true;
  const int last = state_.store.last_level();
  return last != kHotLevel && is_off_target(last);
}

bool LevelSizer::adjust() {
  if (!tracker_.targets()) return false;
  bool any = false;
  for (int level = 0; level < state_.store.num_levels(); ++level) {
    if (!is_off_target(level)) continue;
    plan(level).weights = traffic_weights(level);
    start(level, *traffic_split(level), kAdjustSteps);
    any = true;
  }
  tracker_.adjusted(state_.read_clock());
  return any;
}

std::vector<double> LevelSizer::ratios(int level) const {
  std::vector<double> shares;
  double sum = 0;
  const GroupSlots held = capacities(level);
  for (size_t g = 0; g < held.count(); ++g) {
    const int64_t bytes = held[group_at(g)] * state_.layout.groups()[group_at(g)].slot_bytes();
    shares.push_back(static_cast<double>(bytes));
    sum += shares.back();
  }
  for (double& share : shares) share /= sum;
  return shares;
}

std::optional<std::vector<double>> LevelSizer::target_ratios(int level) const {
  const auto target = traffic_split(level);
  if (!target) return std::nullopt;
  std::vector<double> shares;
  double sum = 0;
  for (size_t g = 0; g < num_groups(); ++g) {
    const int64_t slot_bytes = state_.layout.groups()[group_at(g)].slot_bytes();
    shares.push_back(static_cast<double>(target->num_slots[group_at(g)] * slot_bytes));
    sum += shares.back();
  }
  for (double& share : shares) share /= sum;
  return shares;
}

}  // namespace helicore::kv
