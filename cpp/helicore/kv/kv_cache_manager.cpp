#include "helicore/kv/kv_cache_manager.h"

#include <algorithm>
#include <exception>
#include <mutex>
#include <numeric>

#include "helicore/core/error.h"
#include "helicore/kv/manager_state.h"
#include "helicore/kv/recorded_calls.h"

namespace helicore::kv {
namespace {

// A resize that took pages, whose stream may have to wait for them.
constexpr uint8_t kMayWait = 2;

uint64_t address_of(const std::byte* p) { return reinterpret_cast<uint64_t>(p); }

}  // namespace

KVCacheManager::KVCacheManager(KVCacheManagerConfig config, std::unique_ptr<CacheDevice> device)
    : state_(std::make_unique<ManagerState>(std::move(config), std::move(device))) {
  state_->owner = this;
}

KVCacheManager::~KVCacheManager() {
  const std::unique_lock lock(state_->mutex);
  for (PlannedDrop* plan : state_->plans) plan->state_ = nullptr;
  if (state_->caches.empty()) return;
  log_error(detail::concat("kv.KVCacheManager: destroyed with ", state_->caches.size(),
                           " open caches; closing them"));
  while (!state_->caches.empty()) {
    KVCache* cache = state_->caches.back();
    try {
      cache->close_locked();
    } catch (const std::exception& error) {
      log_error(detail::concat("kv.KVCacheManager: ", error.what()));
      cache->unregister();
      cache->status_ = CacheStatus::kClosed;
    }
    cache->state_ = nullptr;
  }
}

void KVCacheManager::check_open(const char* where) const {
  HELICORE_KV_STATE(!state_->is_shut_down, where, "the manager is shut down");
}

std::unique_ptr<KVCache> KVCacheManager::create_kv_cache(const CreateOptions& options) {
  if (auto* sink = recording(state_.get())) {
    return recorded::create(*sink, *this, options);
  }
  options.reuse_scope.validate();
  HELICORE_CHECK(options.priority >= kPriorityMin && options.priority <= kPriorityMax,
                 "kv.create_kv_cache", "priority must be in [", kPriorityMin, ", ", kPriorityMax,
                 "], got ", options.priority);
  HELICORE_CHECK(options.input_tokens.size() <=
                     static_cast<size_t>(INT32_MAX - state_->config.tokens_per_block),
                 "kv.create_kv_cache", "input_tokens is too long: ", options.input_tokens.size());
  const std::unique_lock lock(state_->mutex);
  state_->begin_operation();
  check_open("kv.create_kv_cache");
  std::unique_ptr<KVCache> cache(
      new KVCache(*state_, {options.reuse_scope, options.input_tokens, options.id,
                            Retention(options.retention, options.priority)}));
  state_->sizer.on_create(cache->id(), cache->num_reused_tokens());
  if (state_->config.enable_stats && !options.input_tokens.empty()) {
    KVCacheStats& stats = state_->stats;
    const int32_t block = state_->config.tokens_per_block;
    const int32_t reused = cache->num_committed_tokens();
    const auto expected = std::max<int64_t>(
        0,
        options.expected_prompt_length.value_or(static_cast<int64_t>(options.input_tokens.size())));
    ++stats.num_lookups;
    stats.lookup_tokens += options.input_tokens.size();
    stats.hit_tokens += static_cast<uint64_t>(reused);
    stats.full_reused_blocks += static_cast<uint64_t>(reused / block);
    stats.partial_reused_blocks += reused % block > 0 ? 1 : 0;
    const int64_t missed = (expected + block - 1) / block - ceil_div(reused, block);
    stats.missed_blocks += static_cast<uint64_t>(std::max<int64_t>(0, missed));
  }
  state_->verify();
  return cache;
}

std::unique_ptr<KVCache> KVCacheManager::pin(std::span<const TokenId> tokens,
                                             const ReuseScope& scope) {
  if (auto* sink = recording(state_.get())) return recorded::pin(*sink, *this, tokens, scope);
  scope.validate();
  const std::unique_lock lock(state_->mutex);
  state_->begin_operation();
  check_open("kv.pin");
  std::unique_ptr<KVCache> cache(
      new KVCache(*state_, {scope, tokens, std::nullopt, Retention({}, kPriorityMax)}));
  state_->verify();
  return cache;
}

StreamHandle KVCacheManager::make_step_stream() {
  if (auto* sink = recording(state_.get())) return recorded::make_step_stream(*sink, *this);
  const std::unique_lock lock(state_->mutex);
  return state_->device->make_step_stream();
}

uint64_t KVCacheManager::submit_step(StreamHandle stream) {
  if (auto* sink = recording(state_.get())) return recorded::submit_step(*sink, *this, stream);
  const std::unique_lock lock(state_->mutex);
  return state_->device->submit_step(stream);
}

void KVCacheManager::complete_step(StreamHandle stream, uint64_t step) {
  if (auto* sink = recording(state_.get())) {
    return recorded::complete_step(*sink, *this, stream, step);
  }
  const std::unique_lock lock(state_->mutex);
  state_->device->complete_step(stream, step);
}

int32_t KVCacheManager::probe_reuse(std::span<const TokenId> tokens,
                                    const ReuseScope& scope) const {
  scope.validate();
  const std::shared_lock lock(state_->mutex);
  check_open("kv.probe_reuse");
  const NodeId root = state_->tree.find_root(scope);
  return state_->tree.match(root, tokens, state_->match_rules(), nullptr).num_tokens;
}

void KVCacheManager::clear_reusable_blocks() {
  if (auto* sink = recording(state_.get())) {
    return recorded::clear_reusable_blocks(*sink, *this);
  }
  const std::unique_lock lock(state_->mutex);
  state_->begin_operation();
  check_open("kv.clear_reusable_blocks");
  if (!state_->caches.empty()) {
    throw ResourceBusy(detail::concat("[kv.clear_reusable_blocks] ", state_->caches.size(),
                                      " caches are open; close them first"));
  }
  (void)state_->tree.evict_all();
  state_->verify();
}

void KVCacheManager::shutdown() {
  if (auto* sink = recording(state_.get())) {
    return recorded::shutdown(*sink, *this);
  }
  const std::unique_lock lock(state_->mutex);
  if (!state_->caches.empty()) {
    throw ResourceBusy(detail::concat("[kv.shutdown] ", state_->caches.size(),
                                      " caches are open; close them first"));
  }
  if (state_->is_shut_down) return;
  (void)state_->tree.evict_all();
  state_->is_shut_down = true;
}

// The caches of a batch call: each one of this manager's, and there once. A cache remembers the
// serial of the last batch that saw it.
class KVCacheManager::Batch {
 public:
  Batch(const char* where, ManagerState& state, size_t num_caches, size_t num_entries)
      : where_(where), state_(&state), serial_(++state.num_batches) {
    if (serial_ == 0) serial_ = ++state.num_batches;  // 0 is that of caches that no batch saw
    HELICORE_CHECK(num_entries == num_caches, where, "one entry per cache is needed: ", num_caches,
                   " caches, got ", num_entries);
  }
  void check(KVCache* cache) const {
    HELICORE_CHECK(cache != nullptr && cache->state_ == state_, where_,
                   "caches must belong to this manager");
    HELICORE_CHECK(cache->batch_ != serial_, where_, "cache ", cache->id(), " occurs twice");
    cache->batch_ = serial_;
  }
  void check(std::span<KVCache* const> caches) const {
    for (KVCache* cache : caches) check(cache);
  }

 private:
  const char* where_;
  ManagerState* state_;
  uint32_t serial_;
};

void KVCacheManager::resize_many(std::span<KVCache* const> caches,
                                 std::span<const int32_t> capacities,
                                 std::span<const int32_t> history_lengths,
                                 std::span<uint8_t> results) {
  if (auto* sink = recording(state_.get())) {
    return recorded::resize_many(*sink, *this, caches, capacities, history_lengths, results);
  }
  constexpr const char* kWhere = "kv.resize_many";
  const Batch batch(kWhere, *state_, caches.size(), capacities.size());
  HELICORE_CHECK(history_lengths.empty() || history_lengths.size() == caches.size(), kWhere,
                 "history_lengths must be empty or one per cache, got ", history_lengths.size());
  HELICORE_CHECK(results.size() == caches.size(), kWhere, "results must be one per cache, got ",
                 results.size());
  const auto history = [&](size_t i) {
    return history_lengths.empty() ? std::nullopt : std::optional<int64_t>(history_lengths[i]);
  };
  const bool keeps_history = history_lengths.empty();
  const int32_t block = tokens_per_block();
  for (size_t i = 0; i < caches.size(); ++i) {
    batch.check(caches[i]);
    caches[i]->goes_quietly_ = keeps_history && caches[i]->grows_quietly(capacities[i], block);
    if (caches[i]->goes_quietly_) continue;
    (void)caches[i]->check_resize(capacities[i], history(i));
  }
  std::fill(results.begin(), results.end(), uint8_t{0});
  std::exception_ptr error;
  try {
    std::unique_lock lock(state_->mutex, std::defer_lock);
    const auto take_lock = [&] {
      lock.lock();
      state_->begin_operation();
    };
    if (kDebugChecks || state_->has_new_failures()) take_lock();
    for (size_t i = 0; i < caches.size(); ++i) {
      // Whoever takes the lock takes in failures, of any cache.
      if (caches[i]->goes_quietly_ && !caches[i]->is_lost_.load(std::memory_order_relaxed)) {
        caches[i]->set_capacity_quietly(capacities[i]);
        results[i] = 1;
        continue;
      }
      const KVCache::Cursors cursors{
          capacities[i], static_cast<int32_t>(history(i).value_or(caches[i]->history_length_))};
      if (caches[i]->resize_within_blocks(cursors)) {
        results[i] = 1;
        continue;
      }
      if (!lock.owns_lock()) take_lock();
      results[i] = caches[i]->resize_locked(cursors) ? kMayWait : 0;
    }
    if (!lock.owns_lock()) return;
    state_->verify();
  } catch (...) {  // those that were served still have to wait for their pages
    error = std::current_exception();
  }
  for (size_t i = 0; i < caches.size(); ++i) {
    if (results[i] != kMayWait) continue;
    results[i] = caches[i]->finish_waits(state_->stats.failed_resizes) ? 1 : 0;
  }
  if (error) std::rethrow_exception(error);
}

void KVCacheManager::commit_many(std::span<KVCache* const> caches, std::span<const TokenId> tokens,
                                 std::span<const int32_t> counts) {
  if (auto* sink = recording(state_.get())) {
    return recorded::commit_many(*sink, *this, caches, tokens, counts);
  }
  constexpr const char* kWhere = "kv.commit_many";
  const Batch batch(kWhere, *state_, caches.size(), counts.empty() ? caches.size() : counts.size());
  size_t total = 0;
  const int32_t block = tokens_per_block();
  bool fills_block = kDebugChecks || state_->has_new_failures();
  for (size_t i = 0; i < caches.size(); ++i) {
    batch.check(caches[i]);
    const int32_t count = counts.empty() ? 1 : counts[i];
    HELICORE_CHECK(count >= 0, kWhere, "counts must be >= 0, got ", count);
    total += static_cast<size_t>(count);
    caches[i]->goes_quietly_ = caches[i]->commits_quietly(static_cast<size_t>(count), block);
    if (caches[i]->goes_quietly_) continue;
    caches[i]->check_commit(static_cast<size_t>(count));
    if (caches[i]->fills_no_block(static_cast<size_t>(count))) continue;
    fills_block = true;
    caches[i]->prefetch_tail();
  }
  HELICORE_CHECK(total == tokens.size(), kWhere, "tokens must have ", total,
                 " entries (the sum of counts), got ", tokens.size());
  if (!caches.empty()) caches[0]->check_tokens(tokens);

  std::unique_lock lock(state_->mutex, std::defer_lock);
  if (fills_block) {
    lock.lock();
    state_->begin_operation();
    for (size_t i = 0, at = 0; i < caches.size(); ++i) {
      const auto count = static_cast<size_t>(counts.empty() ? 1 : counts[i]);
      if (caches[i]->is_lost_) caches[i]->check_intact(kWhere);
      if (caches[i]->may_share_) caches[i]->check_forked_commit(tokens.subspan(at, count));
      at += count;
    }
    state_->tree.reserve_nodes(total / static_cast<size_t>(tokens_per_block()) + 2 * caches.size());
  }
  for (size_t i = 0, at = 0; i < caches.size(); ++i) {
    const auto count = static_cast<size_t>(counts.empty() ? 1 : counts[i]);
    const auto own = tokens.subspan(at, count);
    at += count;
    if (caches[i]->goes_quietly_ || caches[i]->fills_no_block(count)) {
      caches[i]->commit_into_tail(own);
    } else {
      caches[i]->commit_locked(own, false);
    }
  }
  if (!lock.owns_lock()) return;
  state_->verify();
  lock.unlock();
  for (KVCache* cache : caches) {
    if (cache->has_waits_) cache->flush_waits();
  }
}

void KVCacheManager::truncate_many(std::span<KVCache* const> caches,
                                   std::span<const int32_t> num_tokens) {
  if (auto* sink = recording(state_.get())) {
    return recorded::truncate_many(*sink, *this, caches, num_tokens);
  }
  constexpr const char* kWhere = "kv.truncate_many";
  Batch(kWhere, *state_, caches.size(), num_tokens.size()).check(caches);
  for (size_t i = 0; i < caches.size(); ++i) {
    (void)caches[i]->check_truncate(kWhere, num_tokens[i]);
  }
  std::unique_lock lock(state_->mutex, std::defer_lock);
  if (kDebugChecks || state_->has_windows) {
    lock.lock();
    state_->begin_operation();
    for (size_t i = 0; i < caches.size(); ++i) caches[i]->check_rewind(kWhere, num_tokens[i]);
  }
  for (size_t i = 0; i < caches.size(); ++i) {
    if (caches[i]->truncate_within_blocks(num_tokens[i])) continue;
    if (!lock.owns_lock()) {
      lock.lock();
      state_->begin_operation();
    }
    caches[i]->truncate_locked(num_tokens[i]);
  }
  if (!lock.owns_lock()) return;
  state_->verify();
  lock.unlock();
  for (KVCache* cache : caches) cache->flush_waits();
}

void KVCacheManager::resume_many(std::span<KVCache* const> caches, std::optional<int64_t> stream,
                                 std::span<uint8_t> results) {
  if (auto* sink = recording(state_.get())) {
    return recorded::resume_many(*sink, *this, caches, stream, results);
  }
  constexpr const char* kWhere = "kv.resume_many";
  Batch(kWhere, *state_, caches.size(), results.size()).check(caches);
  for (KVCache* cache : caches) {
    HELICORE_KV_STATE(cache->status() == CacheStatus::kSuspended, kWhere, "cache ", cache->id(),
                      " is ", name_of(cache->status()), ", must be SUSPENDED");
  }
  std::fill(results.begin(), results.end(), uint8_t{0});
  std::exception_ptr error;
  try {
    const std::unique_lock lock(state_->mutex);
    state_->begin_operation();
    state_->check_stream(stream);
    for (size_t i = 0; i < caches.size(); ++i) {
      results[i] = caches[i]->resume_locked(stream) ? 1 : 0;
    }
    state_->verify();
  } catch (...) {  // those that were served still have to wait for their pages
    error = std::current_exception();
  }
  for (size_t i = 0; i < caches.size(); ++i) {
    if (results[i] == 0) continue;
    results[i] = caches[i]->finish_resume() ? 1 : 0;
  }
  if (error) std::rethrow_exception(error);
}

uint64_t KVCacheManager::mem_pool_base_address(int32_t layer_id, const std::string& role,
                                               std::optional<PageIndexMode> mode) const {
  const BufferAttr& buffer = buffer_attr(layer_id, role);
  HELICORE_CHECK(mode || !state_->config.swa_scratch_reuse, "kv.mem_pool_base_address",
                 "index_mode must be given with config.swa_scratch_reuse, got None");
  const uint64_t base = address_of(state_->store.pool_address(buffer.group, buffer.pool));
  const bool is_shared = mode.value_or(PageIndexMode::kShared) == PageIndexMode::kShared;
  return is_shared ? base + static_cast<uint64_t>(buffer.offset) : base;
}

std::optional<bool> KVCacheManager::supports_index_mode(PageIndexMode mode) const noexcept {
  if (mode == PageIndexMode::kShared && state_->config.swa_scratch_reuse) return std::nullopt;
  return true;
}

const BufferAttr& KVCacheManager::buffer_attr(int32_t layer_id, const std::string& role) const {
  return state_->layout.buffer(layer_id, role);
}

int64_t KVCacheManager::page_stride(int32_t layer_id, const std::string& role) const {
  return buffer_attr(layer_id, role).page_stride();
}

int32_t KVCacheManager::page_index_scale(int32_t layer_id, const std::string& role) const {
  return buffer_attr(layer_id, role).scale;
}

int64_t KVCacheManager::page_index_upper_bound(int32_t layer_id, const std::string& role) const {
  const BufferAttr& buffer = buffer_attr(layer_id, role);
  const std::shared_lock lock(state_->mutex);
  return buffer.page_index_upper_bound(state_->levels[0].split.num_slots[buffer.group]);
}

PageIndexConverter KVCacheManager::page_index_converter(int32_t layer_id,
                                                        const std::string& role) const {
  const BufferAttr& buffer = buffer_attr(layer_id, role);
  return {buffer.scale, buffer.expansion, buffer.layer_offset(), buffer.layer_slot_util,
          buffer.layer_slot_index};
}

LifeCycleId KVCacheManager::layer_group_id(int32_t layer_id) const {
  return state_->registry.of_layer(layer_id);
}

const LifeCycle& KVCacheManager::life_cycle(LifeCycleId group) const {
  HELICORE_CHECK(group.value() >= 0 && static_cast<size_t>(group.value()) < num_layer_groups(),
                 "kv.life_cycle", "layer group must be in [0, ", num_layer_groups(), "), got ",
                 group);
  return state_->registry[group];
}

PoolGroupId KVCacheManager::pool_group_of(LifeCycleId group) const {
  (void)life_cycle(group);
  return state_->layout.group_of(group);
}

std::vector<std::vector<int32_t>> KVCacheManager::layer_grouping() const {
  std::vector<std::vector<int32_t>> groups(num_layer_groups());
  for (const LayerConfig& layer : state_->config.layers) {
    const int32_t id = layer_id_of(layer);
    groups[static_cast<size_t>(layer_group_id(id).value())].push_back(id);
  }
  return groups;
}

std::vector<PoolGroupDesc> KVCacheManager::pool_group_descs() const {
  std::vector<PoolGroupDesc> descs;
  const std::shared_lock lock(state_->mutex);
  for (size_t g = 0; g < state_->layout.groups().count(); ++g) {
    const PoolGroupId group(static_cast<int32_t>(g));
    const PoolGroupLayout& shape = state_->layout.groups()[group];
    PoolGroupDesc desc{
        group, shape.domain, state_->levels[0].split.num_slots[group], {}, shape.variants};
    for (size_t p = 0; p < shape.piece_bytes.size(); ++p) {
      const PoolIndex pool(static_cast<int32_t>(p));
      desc.pools.push_back(
          {pool, address_of(state_->store.pool_address(group, pool)), shape.piece_bytes[p]});
    }
    descs.push_back(std::move(desc));
  }
  return descs;
}

size_t KVCacheManager::num_layer_groups() const noexcept { return state_->num_life_cycles; }
int32_t KVCacheManager::tokens_per_block() const noexcept {
  return state_->config.tokens_per_block;
}
const KVCacheManagerConfig& KVCacheManager::init_config() const noexcept { return state_->config; }

void KVCacheManager::check_level(const char* where, int level) const {
  HELICORE_CHECK(level >= 0 && level < num_levels(), where, "level must be in [0, ", num_levels(),
                 "), got ", level);
}

int KVCacheManager::num_levels() const noexcept { return state_->store.num_levels(); }

CacheTier KVCacheManager::tier(int level) const {
  check_level("kv.tier", level);
  return state_->store.tier(level);
}

int64_t KVCacheManager::quota(int level) const {
  check_level("kv.get_quota", level);
  const std::shared_lock lock(state_->mutex);
  return state_->levels[static_cast<size_t>(level)].split.quota;
}

std::vector<PoolGroupStatistics> KVCacheManager::storage_statistics(int level) const {
  check_level("kv.get_storage_statistics", level);
  const std::shared_lock lock(state_->mutex);
  std::vector<PoolGroupStatistics> result;
  for (size_t g = 0; g < state_->layout.groups().count(); ++g) {
    const PoolGroupId group(static_cast<int32_t>(g));
    const PoolGroupLayout& shape = state_->layout.groups()[group];
    const PoolGroupCounts counts = state_->store.counts(group, level);
    result.push_back({.pool_group = group,
                      .domain = shape.domain,
                      .slot_sizes = shape.piece_bytes,
                      .total = counts.total,
                      .free = counts.free + counts.clean,
                      .evictable = counts.evictable,
                      .pending = counts.pending});
  }
  return result;
}

std::vector<LifeCycleStats> KVCacheManager::life_cycle_stats() const {
  const std::shared_lock lock(state_->mutex);
  return state_->life_cycle_stats.raw();
}

MigrationStats KVCacheManager::migration_stats() const {
  const std::shared_lock lock(state_->mutex);
  return state_->migration_stats;
}

KVCacheStats KVCacheManager::stats() const {
  const std::shared_lock lock(state_->mutex);
  KVCacheStats stats = state_->stats;
  stats.evicted_blocks = static_cast<uint64_t>(state_->migration_stats.dropped_nodes);
  return stats;
}

std::vector<KVEvent> KVCacheManager::drain_events(size_t max_events) {
  if (!state_->events.is_enabled()) return {};
  if (auto* sink = recording(state_.get())) {
    return recorded::drain_events(*sink, *this, max_events);
  }
  const std::unique_lock lock(state_->mutex);
  return state_->events.drain(max_events);
}

std::vector<KVEvent> KVCacheManager::snapshot_events() {
  auto* sink = state_->events.is_enabled() ? recording(state_.get()) : nullptr;
  if (sink != nullptr) return recorded::snapshot_events(*sink, *this);
  const std::unique_lock lock(state_->mutex);
  std::vector<KVEvent> events = state_->tree.snapshot();
  state_->events.clear();
  return events;
}

uint64_t KVCacheManager::num_dropped_events() const {
  const std::shared_lock lock(state_->mutex);
  return state_->events.num_dropped();
}

size_t KVCacheManager::num_open_caches() const {
  const std::shared_lock lock(state_->mutex);
  return state_->caches.size();
}

int64_t KVCacheManager::num_available_blocks() const {
  const std::shared_lock lock(state_->mutex);
  int64_t least = INT64_MAX;
  for (size_t g = 0; g < state_->slots_per_block.count(); ++g) {
    const PoolGroupId group(static_cast<int32_t>(g));
    if (state_->slots_per_block[group] == 0) continue;
    least = std::min<int64_t>(
        least, state_->store.counts(group).available() / state_->slots_per_block[group]);
  }
  return least == INT64_MAX ? 0 : least;
}

int64_t KVCacheManager::num_total_blocks() const {
  const std::shared_lock lock(state_->mutex);
  int64_t least = INT64_MAX;
  for (size_t g = 0; g < state_->slots_per_block.count(); ++g) {
    const PoolGroupId group(static_cast<int32_t>(g));
    if (state_->slots_per_block[group] == 0) continue;
    least = std::min<int64_t>(least,
                              state_->store.counts(group).total / state_->slots_per_block[group]);
  }
  return least == INT64_MAX ? 0 : least;
}

std::vector<Digest> KVCacheManager::chain_keys(std::span<const TokenId> tokens,
                                               const ReuseScope& scope) const {
  scope.validate();
  const auto block = static_cast<size_t>(state_->config.tokens_per_block);
  std::vector<Digest> keys;
  Digest parent = root_key(scope);
  for (; tokens.size() >= block; tokens = tokens.subspan(block)) {
    parent = block_key(parent, tokens.first(block));
    keys.push_back(parent);
  }
  return keys;
}

}  // namespace helicore::kv
