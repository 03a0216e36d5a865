#include "helicore/kv/manager_state.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "helicore/core/error.h"
#include "helicore/kv/introspection.h"
#include "helicore/kv/kv_cache.h"

namespace helicore::kv {
namespace {

// How far a level may be resized: addresses that each of its pools reserves, in times of the quota.
constexpr int64_t kGrowthLimit = 8;
// Addresses that one level reserves beyond its quota: there are some 2^47 bytes of them.
constexpr int64_t kMaxReservedBytes = int64_t{16} << 40;

KVCacheManagerConfig checked(KVCacheManagerConfig config) {
  config.validate();
  return config;
}

std::unique_ptr<CacheDevice> device_for(const KVCacheManagerConfig& config,
                                        std::unique_ptr<CacheDevice> given) {
  if (given == nullptr) {
    const bool on_gpu = tier_of(config.cache_tiers[0]) == CacheTier::kGpuMem;
    try {
      given = make_cache_device({.type = on_gpu ? DeviceType::kCuda : DeviceType::kCpu,
                                 .index = on_gpu ? config.device_index : 0});
    } catch (const NotSupported& error) {
      throw NotSupported(detail::concat("[kv.config] cache_tiers[0]: ", error.what()));
    }
  }
  for (size_t level = 0; level < config.cache_tiers.size(); ++level) {
    const CacheTier tier = tier_of(config.cache_tiers[level]);
    if (given->supports(tier, static_cast<int>(level))) continue;
    throw NotSupported(detail::concat("[kv.config] cache_tiers[", level, "]: ", name_of(tier),
                                      " is not supported there by the ", name_of(given->type()),
                                      " back end"));
  }
  return given;
}

GroupSlots slots_of(const QuotaSplit& split) {
  GroupSlots slots(split.num_slots.count(), 0);
  for (size_t g = 0; g < slots.count(); ++g) {
    const PoolGroupId group(static_cast<int32_t>(g));
    slots[group] = split.num_slots[group];
  }
  return slots;
}

// Page indices are 32-bit: how many slots of a group they can address.
int64_t addressable_slots(const StorageLayout& layout, PoolGroupId group) {
  int64_t most = INT32_MAX - 1;
  for (const auto& [id, buffer] : layout.buffers()) {
    if (buffer.group != group) continue;
    most = std::min(most, INT32_MAX / (int64_t{buffer.scale} * buffer.expansion));
  }
  return most;
}

// Any group may come to have nearly all of the level, so each reserves addresses for that.
void set_maxima(const StorageLayout& layout, bool is_hot, LevelState& level) {
  const int64_t share = kMaxReservedBytes / static_cast<int64_t>(layout.groups().count());
  level.max_quota = std::max(level.split.quota, std::min(kGrowthLimit * level.split.quota, share));
  for (size_t g = 0; g < layout.groups().count(); ++g) {
    const PoolGroupId group(static_cast<int32_t>(g));
    const int64_t limit = is_hot ? addressable_slots(layout, group) : INT32_MAX - 1;
    const int64_t most = level.max_quota / layout.groups()[group].slot_bytes();
    level.max_slots.push_back(static_cast<int32_t>(std::min(limit, most)));
  }
}

std::vector<LevelState> split_levels(const KVCacheManagerConfig& config,
                                     const LifeCycleRegistry& registry, const StorageLayout& layout,
                                     const CacheDevice& device) {
  std::vector<LevelState> levels;
  for (const CacheTierConfig& tier : config.cache_tiers) {
    const int64_t bytes = quota_of(tier);
    LevelState level{.tier = tier_of(tier), .grain = device.grain(tier_of(tier), bytes)};
    level.split = levels.empty()
                      ? split_quota(config, registry, layout, bytes, level.grain)
                      : split_cold_quota(layout, slots_of(levels[0].split), bytes, level.grain);
    set_maxima(layout, levels.empty(), level);
    levels.push_back(std::move(level));
  }
  return levels;
}

std::vector<LevelSpec> specs_of(const KVCacheManagerConfig& config,
                                const std::vector<LevelState>& levels) {
  std::vector<LevelSpec> specs;
  for (size_t i = 0; i < levels.size(); ++i) {
    LevelSpec spec{
        levels[i].tier, levels[i].split.num_slots, levels[i].max_slots, {}, levels[i].grain};
    if (const auto* disk = std::get_if<DiskCacheTierConfig>(&config.cache_tiers[i])) {
      spec.directory = disk->path;
    }
    for (size_t g = 0; g < spec.num_slots.count(); ++g) {
      const PoolGroupId group(static_cast<int32_t>(g));
      HELICORE_CHECK(spec.num_slots[group] <= spec.max_slots[group], "kv.config", "cache_tiers[", i,
                     "].quota gives ", spec.num_slots[group], " slots in pool group ", group,
                     "; 32-bit page indices address ", spec.max_slots[group]);
    }
    specs.push_back(std::move(spec));
  }
  return specs;
}

bool is_among(const std::vector<PageHandle>& pages, PageHandle page) {
  return std::find(pages.begin(), pages.end(), page) != pages.end();
}

bool any_optional(const LifeCycleRegistry& registry) {
  return std::any_of(registry.all().begin(), registry.all().end(),
                     [](const LifeCycle& lc) { return lc.policy == ReusePolicy::kOptional; });
}

bool any_window(const LifeCycleRegistry& registry) {
  return std::any_of(registry.all().begin(), registry.all().end(),
                     [](const LifeCycle& lc) { return lc.window.has_value(); });
}

}  // namespace

ManagerState::ManagerState(KVCacheManagerConfig config_in, std::unique_ptr<CacheDevice> device_in)
    : config(checked(std::move(config_in))),
      registry(config),
      layout(config, registry),
      device(device_for(config, std::move(device_in))),
      ssm(registry.ssm_life_cycle_id()),
      has_windows(any_window(registry)),
      has_optional(any_optional(registry)),
      max_util_ppm(util_ppm(config.max_util_for_resume)),
      slots_per_block(layout.groups().count(), 0),
      scratch_parts(registry.count()),
      num_life_cycles(registry.count()),
      levels(split_levels(config, registry, layout, *device)),
      store(layout, *device, specs_of(config, levels), ssm),
      events(config.event_buffer_size, config.tokens_per_block, registry.count()),
      tree(store, registry, config.tokens_per_block, &events),
      migrator(store, tree, layout, migration_stats),
      life_cycle_stats(registry.count()),
      now_ns([] {
        const auto now = std::chrono::steady_clock::now().time_since_epoch();
        return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
      }),
      sizer(*this) {
  for (size_t i = 0; i < num_life_cycles; ++i) {
    const LifeCycleId id(static_cast<int32_t>(i));
    life_cycle_stats[id].domain = registry[id].domain;
    life_cycle_stats[id].pool_group = layout.group_of(id);
    scratch_parts[id] = scratch_fraction(layout, id);
  }
  for (size_t i = 0; i < num_life_cycles; ++i) {
    if (is_ssm(i)) continue;
    ++slots_per_block[layout.group_of(LifeCycleId(static_cast<int32_t>(i)))];
  }
  int32_t largest = 0;
  for (int32_t slots : levels[0].split.num_slots) largest = std::max(largest, slots);
  tree.reserve_nodes(static_cast<size_t>(largest));
}

MatchRules ManagerState::match_rules() const noexcept {
  return {.partial = config.enable_partial_reuse,
          .backoff_target = config.reuse_match_backoff,
          .backoff_draft = config.draft_reuse_match_backoff.value_or(config.reuse_match_backoff)};
}

std::optional<NoRoom> ManagerState::exceeds_total(size_t group, int64_t needed) const noexcept {
  const PoolGroupId id(static_cast<int32_t>(group));
  const PoolGroupCounts counts = store.counts(id);
  if (needed <= counts.total) return std::nullopt;
  return NoRoom{.domain = layout.groups()[id].domain,
                .pool_group = id,
                .needed = needed,
                .free = counts.free,
                .evictable = counts.evictable,
                .pending = counts.pending};
}

std::optional<NoRoom> ManagerState::utilisation_gate() const noexcept {
  if (num_active == 0) return std::nullopt;
  for (size_t g = 0; g < slots_per_block.count(); ++g) {
    const PoolGroupId group(static_cast<int32_t>(g));
    if (slots_per_block[group] == 0) continue;  // recurrent state does not grow
    const PoolGroupCounts counts = store.counts(group);
    if (!exceeds_util(counts.unavailable(), counts.total, max_util_ppm)) continue;
    return NoRoom{.domain = layout.groups()[group].domain,
                  .pool_group = group,
                  .free = counts.free,
                  .evictable = counts.evictable,
                  .pending = counts.pending,
                  .over_utilisation = true};
  }
  return std::nullopt;
}

void ManagerState::begin_operation() {
  fences.clear();
  device->begin_operation();
  if (auto* passed = recording(this)) passed->saw_unknown_call();
  // NOTE: a device reports a failure before the point is reached, so what has arrived by now is
  // among the failures that are looked for next.
  for (DerivedCopy& copy : derived) copy.has_arrived = device->reached(copy.arrival);
  if (has_new_failures()) absorb_failures();
  std::erase_if(derived, [](const DerivedCopy& copy) { return copy.has_arrived; });
  if (timers.empty()) return;
  for (const int64_t now = read_clock(); timers.any_due(now);) {
    const RetentionTimers::Timer timer = timers.pop();
    if (!store.pages().is_current(timer.page)) continue;
    const PageRecord& page = store.page(timer.page.id);
    // What needs this block may be worth more by somebody else's word.
    const uint8_t floor =
        page.node == kNoNode ? uint8_t{0} : tree.highest_priority_below(page.node, page.life_cycle);
    const uint8_t priority = std::max(timer.priority, floor);
    if (page.priority > priority) store.set_priority(timer.page.id, priority);
  }
}

int64_t ManagerState::read_clock() {
  const int64_t now = now_ns();
  if (auto* sink = noting(*this)) sink->note(OperationField::kTimes, std::span(&now, 1));
  return now;
}

void ManagerState::check_stream(std::optional<int64_t> stream) const {
  if (stream && *stream < 0) (void)device->record(*stream);
}

void ManagerState::note_copy(PageHandle from, PageHandle to) {
  const TimePoint arrival = store.filled(from.id);
  if (device->reached(arrival) && !has_new_failures()) return;
  derived.push_back({.from = from, .to = to, .arrival = arrival});
}

void ManagerState::note_load(PageHandle from, PageHandle to, TimePoint done) {
  if (device->reached(done) && !has_new_failures()) return;
  derived.push_back({.from = from, .to = to, .arrival = done, .is_load = true});
}

TimePoint ManagerState::fence(StreamHandle stream) {
  for (const Fence& known : fences) {
    if (known.stream == stream) return known.point;
  }
  const TimePoint point = device->record(stream);
  fences.push_back({stream, point});
  return point;
}

void ManagerState::absorb_failures() {
  num_failures_seen = device->num_failures();
  std::vector<PageHandle> failed;
  for (uint64_t tag : device->take_failures()) failed.push_back(PageHandle::of_tag(tag));
  for (size_t i = 0; i < failed.size(); ++i) {
    const PageHandle handle = failed[i];
    for (const DerivedCopy& copy : derived) {
      if (copy.from == handle) failed.push_back(copy.to);
      if (copy.is_load && copy.to == handle && !is_among(failed, copy.from)) {
        failed.push_back(copy.from);
      }
    }
    if (!store.pages().is_current(handle) || store.page(handle.id).lost) continue;
    ++stats.lost_pages;
    store.set_lost(handle.id);
    const PageRecord& page = store.page(handle.id);
    if (page.node == kNoNode) continue;
    // NOTE: work of a GPU may have read the page before the failure was known, and what was
    // committed on top of it is below its node. A CPU waits for a page before it works.
    const bool goes_alone = life_cycle(page.life_cycle).policy == ReusePolicy::kOptional &&
                            device->type() == DeviceType::kCpu;
    (void)(goes_alone ? tree.drop(handle.id) : tree.drop_node(page.node));
  }
  if (auto* sink = noting(*this)) {
    std::vector<int64_t> lost = {sink->stage(), static_cast<int64_t>(failed.size())};
    for (PageHandle handle : failed) lost.push_back(static_cast<int64_t>(handle.tag()));
    sink->note(OperationField::kLost, lost);
  }
  for (KVCache* cache : caches) cache->look_for_lost_pages();
}

void ManagerState::verify() const {
#ifdef HELICORE_DEBUG_CHECKS
  check_invariants(*this);
#endif
}

}  // namespace helicore::kv
