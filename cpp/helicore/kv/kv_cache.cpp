#include "helicore/kv/kv_cache.h"

#include <algorithm>
#include <mutex>

#include "helicore/core/error.h"
#include "helicore/kv/manager_state.h"
#include "helicore/kv/recorded_calls.h"

namespace helicore::kv {
namespace {

// Room for `count` elements in all, growing by half at least: repeated calls cost amortised O(1)
// per element.
template <typename T>
void reserve_amortised(std::vector<T>& values, size_t count) {
  if (count > values.capacity()) {
    values.reserve(std::max(count, values.capacity() + values.capacity() / 2));
  }
}

}  // namespace

KVCacheFields::KVCacheFields(ManagerState& state, const CreateArgs& args)
    : state_(&state),
      tail_(std::make_unique<TokenId[]>(static_cast<size_t>(state.config.tokens_per_block))),
      is_plain_(!state.ssm && !state.has_windows),
      tokens_per_block_(state.config.tokens_per_block),
      needs_state_(state.ssm.has_value()),
      retention_(args.retention),
      tables_(state.num_life_cycles),
      id_(args.id.value_or(state.next_id)),
      serial_(state.next_id),
      reused_by_level_(static_cast<size_t>(state.store.num_levels()), 0),
      scope_(args.scope) {}

KVCache::KVCache(ManagerState& state, const CreateArgs& args)
    : KVCacheFields(state, args), scratch_(*this, state.config.enable_swa_scratch_reuse()) {
  const NodeId root = state.tree.find_or_create_root(scope_);
  std::vector<NodeId>& path = state.path_scratch;
  path.clear();
  const PrefixMatch found = state.tree.match(root, args.tokens, state.match_rules(), &path);
  const int32_t matched = found.num_tokens;
  const int32_t num_blocks = ceil_div(matched, tokens_per_block_);
  pages_.resize(static_cast<size_t>(num_blocks) * tables_.size());
  reserve_tables(num_blocks);
  reserve_amortised(state.caches, state.caches.size() + 1);
  if (state.has_optional) missing_.reserve(pages_.size());

  // Nothing fails from here on.
  num_blocks_ = num_blocks;
  num_reused_ = known_rows_ = num_committed_ = history_length_ = capacity_ = matched;
  tail_node_ = root;
  for (int32_t b = num_blocks - 1; b >= 0; --b) hold_block(path[static_cast<size_t>(b)], b);
  if (found.ssm_node != kNoNode) {
    const PageId page = state.tree.pages(found.ssm_node)[static_cast<size_t>(state.ssm->value())];
    state.store.hold(page, priority_of(num_blocks - 1));
    state_page_ = state.store.pages().handle(page);
  }
  const int32_t num_full = matched / tokens_per_block_;
  if (num_full > 0) tail_node_ = path[static_cast<size_t>(num_full) - 1];
  state.tree.pin(tail_node_);
  const auto tail = static_cast<size_t>(matched % tokens_per_block_);
  needs_copy_ = tail > 0;
  const auto committed = args.tokens.first(static_cast<size_t>(matched));
  append_to_tail(committed.last(tail));
  for (IndexTable& table : tables_) {
    std::fill_n(table.data, static_cast<size_t>(num_blocks), kBadPageIndex);
  }
  ++state.next_id;
  registry_index_ = state.caches.size();
  state.caches.push_back(this);
}

void KVCache::hold_block(NodeId node, int32_t ordinal) {
  ManagerState& state = *state_;
  const int32_t num_tokens =
      std::min(tokens_per_block_, history_length_ - ordinal * tokens_per_block_);
  const auto shown = state.tree.pages(node);
  const uint8_t priority = priority_of(ordinal);
  int coldest = kHotLevel;
  for (size_t lc = 0; lc < tables_.size(); ++lc) {
    if (state.is_ssm(lc) || stale(lc, history_length_).contains(ordinal)) continue;
    if (shown[lc] == kNoPage || state.store.page(shown[lc]).num_tokens < num_tokens) {
      if (state.life_cycle(lc).policy == ReusePolicy::kOptional) {
        missing_.add(lc, rows_of(ordinal));
      }
      continue;
    }
    const PageRecord& record = state.store.page(shown[lc]);
    coldest = std::max(coldest, int{record.level});
    state.store.hold(shown[lc], priority);
    LifeCycleStats& stats = state.life_cycle_stats[LifeCycleId(static_cast<int32_t>(lc))];
    ++stats.reused_pages;
    stats.reused_tokens += static_cast<uint64_t>(num_tokens);
    page(ordinal, lc) = state.store.pages().handle(shown[lc]);
  }
  state.tree.priority_raised(node, priority);
  reused_by_level_[static_cast<size_t>(coldest)] += num_tokens;
}

KVCache::~KVCache() {
  try {
    close();
  } catch (const std::exception& error) {
    log_error(detail::concat("kv.KVCache: closing cache ", id_, " failed: ", error.what()));
  }
}

bool KVCache::resume(std::optional<int64_t> stream) {
  if (auto* sink = recording(state_)) return recorded::resume(*sink, *this, stream);
  HELICORE_KV_STATE(status_ == CacheStatus::kSuspended, "kv.resume", "cache ", id_, " is ",
                    name_of(status_), ", must be SUSPENDED");
  {
    const std::unique_lock lock(state_->mutex);
    state_->begin_operation();
    state_->check_stream(stream);
    const bool resumed = resume_locked(stream);
    state_->verify();
    if (!resumed) return false;
  }
  return finish_resume();
}

void KVCache::suspend() {
  if (auto* sink = recording(state_)) return recorded::suspend(*sink, *this);
  HELICORE_KV_STATE(is_active(), "kv.suspend", "cache ", id_, " is ", name_of(status_),
                    ", must be ACTIVE");
  const std::unique_lock lock(state_->mutex);
  state_->begin_operation();
  suspend_locked();
  state_->verify();
}

bool KVCache::resize(std::optional<int64_t> capacity, std::optional<int64_t> history_length) {
  if (auto* sink = recording(state_))
    return recorded::resize(*sink, *this, capacity, history_length);
  const Cursors cursors = check_resize(capacity, history_length);
  if (!kDebugChecks && !state_->has_new_failures() && resize_within_blocks(cursors)) return true;
  {
    const std::unique_lock lock(state_->mutex);
    state_->begin_operation();
    const bool resized = resize_locked(cursors);
    state_->verify();
    if (!resized) return false;
  }
  return finish_waits(state_->stats.failed_resizes);
}

std::optional<bool> KVCache::try_resize(std::optional<int64_t> capacity,
                                        std::optional<int64_t> history_length) {
  if (recording(state_) != nullptr) return std::nullopt;
  const Cursors cursors = check_resize(capacity, history_length);
  if (!kDebugChecks && !state_->has_new_failures() && resize_within_blocks(cursors)) return true;
  if (!is_plain_ || may_share_ || has_waits_ || state_->store.num_levels() > 1 ||
      state_->device->type() != DeviceType::kCpu) {
    return std::nullopt;
  }
  const std::unique_lock lock(state_->mutex, std::try_to_lock);
  if (!lock.owns_lock()) return std::nullopt;
  state_->begin_operation();
  const bool resized = resize_locked(cursors);
  state_->verify();
  return has_waits_ ? std::nullopt : std::optional(resized);
}

void KVCache::commit(std::span<const TokenId> tokens, bool is_end) {
  if (auto* sink = recording(state_)) return recorded::commit(*sink, *this, tokens, is_end);
  check_commit(tokens.size());
  check_tokens(tokens);
  if (!kDebugChecks && !state_->has_new_failures() && fills_no_block(tokens.size()) && !is_end) {
    commit_into_tail(tokens);
    return;
  }
  {
    const std::unique_lock lock(state_->mutex);
    state_->begin_operation();
    check_intact("kv.commit");
    state_->tree.reserve_nodes(tokens.size() / static_cast<size_t>(tokens_per_block_) + 2);
    commit_locked(tokens, is_end);
    state_->verify();
  }
  flush_waits();
}

void KVCache::stop_committing() {
  if (auto* sink = recording(state_)) return recorded::stop_committing(*sink, *this);
  HELICORE_KV_STATE(status_ != CacheStatus::kClosed, "kv.stop_committing", "cache ", id_,
                    " is CLOSED");
  {
    const std::unique_lock lock(state_->mutex);
    state_->begin_operation();
    state_->tree.reserve_nodes(2);
    stop_committing_locked(false);
    state_->verify();
  }
  if (is_active()) flush_waits();
}

void KVCache::close() {
  if (status_ == CacheStatus::kClosed) return;
  if (auto* sink = recording(state_)) return recorded::close(*sink, *this);
  const std::unique_lock lock(state_->mutex);
  state_->begin_operation();
  close_locked();
  state_->verify();
}

void KVCache::check_intact(const char* where) const {
  if (is_lost_) {
    throw DataLost(detail::concat("[", where, "] pages of cache ", id_,
                                  " could not be read back; close it and compute them again"));
  }
}

void KVCache::flush_waits() {
  if (!has_waits_) return;
  CacheDevice& device = *state_->device;
  const StreamHandle stream = device_stream();
  {
    const std::unique_lock lock(state_->mutex);
    const TimePoint own = device.record(stream);
    if (!own.is_none()) {
      std::erase_if(waits_, [&](TimePoint p) { return p.timeline() == own.timeline(); });
    }
  }
  if (!waits_.empty()) device.wait(stream, waits_);
  waits_.clear();
  has_waits_ = false;
}

bool KVCache::finish_waits(uint64_t& failure_counter) {
  if (!look_after_waits()) return true;
  const std::unique_lock lock(state_->mutex);
  state_->begin_operation();
  if (!is_lost_) return true;
  suspend_locked();
  return fail({.data_lost = true}, failure_counter);
}

bool KVCache::look_after_waits() {
  if (auto* sink = noting(*state_)) sink->next_stage();
  flush_waits();
  // Another thread may have taken the failure in.
  return is_lost_ || state_->has_new_failures();
}

bool KVCache::finish_resume() {
  while (look_after_waits()) {
    const std::unique_lock lock(state_->mutex);
    state_->begin_operation();
    if (!is_lost_) break;
    suspend_locked();
    if (lost_required()) return fail({.data_lost = true}, state_->stats.failed_resumes);
    // NOTE: nothing was started on the pages yet. Each turn lets go of one at least.
    is_lost_ = false;
    look_for_lost_pages();
    const bool resumed = resume_locked(stream_);
    state_->verify();
    if (!resumed) return false;
  }
  was_resumed_ = true;
  return true;
}

KVCache::Cursors KVCache::check_resize(std::optional<int64_t> capacity,
                                       std::optional<int64_t> history) const {
  HELICORE_KV_STATE(is_active(), "kv.resize", "cache ", id_, " is ", name_of(status_),
                    ", must be ACTIVE");
  const int64_t new_capacity = capacity.value_or(capacity_);
  const int64_t new_history = history.value_or(history_length_);
  HELICORE_CHECK(new_history >= history_length_, "kv.resize",
                 "history_length must not shrink, got ", new_history, " < ", history_length_);
  HELICORE_CHECK(new_capacity >= new_history, "kv.resize",
                 "capacity must be >= history_length, got ", new_capacity, " < ", new_history);
  HELICORE_CHECK(new_capacity <= INT32_MAX - tokens_per_block_, "kv.resize",
                 "capacity must be < 2^31 - tokens_per_block, got ", new_capacity);
  if (!has_blocks_for(new_capacity)) {
    const int32_t blocks = ceil_div(static_cast<int32_t>(new_capacity), tokens_per_block_);
    HELICORE_CHECK(blocks <= max_blocks_, "kv.resize", "capacity needs ", blocks,
                   " page table entries, the row set by set_base_page_index_buf has ", max_blocks_);
  }
  const Cursors next{static_cast<int32_t>(new_capacity), static_cast<int32_t>(new_history)};
  if (!is_plain_) scratch_.check_resize("kv.resize", next);
  return next;
}

void KVCache::check_commit(size_t num_tokens) const {
  HELICORE_KV_STATE(is_active(), "kv.commit", "cache ", id_, " is ", name_of(status_),
                    ", must be ACTIVE");
  HELICORE_KV_STATE(commit_state_ == CommitState::kAllowed, "kv.commit", "cache ", id_,
                    " has stopped committing");
  HELICORE_CHECK(num_tokens <= static_cast<size_t>(capacity_ - num_committed_), "kv.commit",
                 "tokens must fit into the capacity: ", num_committed_, " committed + ", num_tokens,
                 " > capacity ", capacity_);
  if (is_plain_) return;
  scratch_.check_history(
      "kv.commit", std::max(history_length_, num_committed_ + static_cast<int32_t>(num_tokens)));
}

void KVCache::check_tokens(std::span<const TokenId> tokens) const {
  TokenId lowest = 0;
  for (TokenId token : tokens) lowest = std::min(lowest, token);
  HELICORE_CHECK(lowest >= 0, "kv.commit", "tokens must be >= 0, got ", lowest);
}

bool KVCache::resize_within_blocks(const Cursors& cursors) noexcept {
  // A commit may have adopted a page that is still on its way: the stream has yet to wait for it.
  if (may_share_ || is_lost_ || has_waits_ || !has_blocks_for(cursors.capacity) ||
      cursors.capacity <= int64_t{num_blocks_ - 1} * tokens_per_block_ ||
      (!is_plain_ && (makes_stale(cursors.history) || scratch_.concerns(cursors)))) {
    return false;
  }
  history_length_ = cursors.history;
  set_capacity_quietly(cursors.capacity);
  return true;
}

bool KVCache::fills_no_block(size_t num_tokens) const noexcept {
  return !may_share_ && !is_lost_ &&
         static_cast<size_t>(num_tail_) + num_tokens < static_cast<size_t>(tokens_per_block_) &&
         (is_plain_ || (!state_->ssm &&
                        !makes_stale(std::max(history_length_,
                                              num_committed_ + static_cast<int32_t>(num_tokens)))));
}

bool KVCache::makes_stale(int32_t history) const noexcept {
  if (!state_->has_windows || history == history_length_) return false;
  for (size_t lc = 0; lc < tables_.size(); ++lc) {
    if (stale(lc, history).end != stale(lc, history_length_).end) return true;
  }
  return false;
}

HalfOpenRange<int32_t> KVCache::stale(size_t life_cycle, int32_t history) const noexcept {
  return state_->life_cycle(life_cycle).stale_range(history, tokens_per_block_);
}

bool KVCache::is_live(int32_t ordinal, size_t life_cycle) const noexcept {
  return is_active() && !page(ordinal, life_cycle).is_null() &&
         !stale(life_cycle, history_length_).contains(ordinal);
}

NodeId KVCache::shown_node(int32_t ordinal) const noexcept {
  for (size_t lc = 0; lc < tables_.size(); ++lc) {
    const PageHandle handle = page(ordinal, lc);
    if (handle.is_null()) continue;
    const NodeId node = state_->store.page(handle.id).node;
    if (node != kNoNode) return node;
  }
  return kNoNode;
}

uint8_t KVCache::priority_of(int32_t ordinal) const noexcept {
  return retention_.of_block(ordinal * tokens_per_block_).priority;
}

StreamHandle KVCache::device_stream() const noexcept {
  const StreamHandle stream = stream_.value_or(0);
  return stream > 0 && state_->device->type() == DeviceType::kCpu ? 0 : stream;
}

void KVCache::set_stream(int64_t stream) {
  if (auto* sink = recording(state_)) return recorded::set_stream(*sink, *this, stream);
  if (stream < 0 && state_ != nullptr) {
    const std::unique_lock lock(state_->mutex);
    state_->check_stream(stream);
  }
  if (!is_active() || stream_.value_or(stream) == stream) {
    stream_ = stream;
    return;
  }
  CacheDevice& device = *state_->device;
  const TimePoint before = device.record(device_stream());
  const bool is_done = before.is_none() || device.reached(before);
  HELICORE_KV_STATE(is_done || device.is_waitable(before), "kv.cuda_stream", "cache ", id_,
                    " has a step that is not complete; complete it or suspend first");
  stream_ = stream;
  if (!is_done) device.wait(device_stream(), {&before, 1});
}

TimePoint KVCache::fence() const {
  return is_active() ? state_->fence(device_stream()) : TimePoint();
}

void KVCache::wait_for(TimePoint point) {
  if (point.is_none() || state_->device->reached(point)) return;
  for (TimePoint& known : waits_) {
    if (known.timeline() != point.timeline()) continue;
    if (known.value() < point.value()) known = point;
    return;
  }
  waits_.push_back(point);
  has_waits_ = true;
}

void KVCache::reserve_tables(int32_t num_blocks) {
  const auto needed = static_cast<size_t>(num_blocks);
  for (IndexTable& table : tables_) {
    if (table.is_external || needed <= table.capacity) continue;
    table.move_to_own(std::max(needed, table.capacity + table.capacity / 2 + 4), table.capacity);
  }
}

void IndexTable::move_to_own(size_t size, size_t count) {
  if (size > own.size()) {
    std::vector<int32_t> grown(size, kBadPageIndex);
    retired.reserve(retired.size() + 1);
    if (count > 0) std::copy_n(data, count, grown.data());
    if (!own.empty()) retired.push_back(std::move(own));
    own = std::move(grown);
  } else {
    if (count > 0 && data != own.data()) std::copy_n(data, count, own.data());
    std::fill(own.begin() + static_cast<std::ptrdiff_t>(count), own.end(), kBadPageIndex);
  }
  data = own.data();
  capacity = own.size();
  is_external = false;
}

bool KVCache::fail(const NoRoom& reason, uint64_t& counter) noexcept {
  last_failure_ = reason;
  has_failed_ = true;
  ++counter;
  return false;
}

const IndexTable& KVCache::table(LifeCycleId group, int beam) const {
  HELICORE_CHECK(beam == kDefaultBeamIndex, "kv.page_table", "beam must be 0, got ", beam);
  HELICORE_CHECK(group.value() >= 0 && static_cast<size_t>(group.value()) < tables_.size(),
                 "kv.page_table", "layer group must be in [0, ", tables_.size(), "), got ", group);
  return tables_[static_cast<size_t>(group.value())];
}

std::span<const int32_t> KVCache::base_page_indices(LifeCycleId group, int beam) const {
  const IndexTable& entry = table(group, beam);
  return {entry.data, status_ == CacheStatus::kClosed ? 0 : static_cast<size_t>(num_blocks_)};
}

void KVCache::set_base_page_index_buf(int beam, LifeCycleId group,
                                      std::optional<std::span<int32_t>> row) {
  if (auto* sink = recording(state_)) {
    return recorded::set_index_row(*sink, *this, beam, group, row);
  }
  IndexTable& entry = const_cast<IndexTable&>(table(group, beam));
  HELICORE_KV_STATE(status_ != CacheStatus::kClosed, "kv.set_base_page_index_buf", "cache ", id_,
                    " is CLOSED");
  const std::unique_lock lock(state_->mutex);
  const auto count = static_cast<size_t>(num_blocks_);
  if (row) {
    HELICORE_CHECK(row->size() >= count, "kv.set_base_page_index_buf", "buf must have at least ",
                   count, " entries (num_blocks), got ", row->size());
    std::copy_n(entry.data, count, row->data());
    std::fill(row->begin() + static_cast<std::ptrdiff_t>(count), row->end(), kBadPageIndex);
    entry.data = row->data();
    entry.capacity = row->size();
    entry.is_external = true;
  } else if (entry.is_external) {
    entry.move_to_own(count, count);
  }
  max_blocks_ = INT32_MAX;
  for (const IndexTable& each : tables_) {
    if (each.is_external && each.capacity < static_cast<size_t>(max_blocks_)) {
      max_blocks_ = static_cast<int32_t>(each.capacity);
    }
  }
}

std::vector<int32_t> KVCache::aggregated_page_indices(LifeCycleId group, int beam,
                                                      bool valid_only) const {
  (void)table(group, beam);
  std::vector<int32_t> slots;
  if (status_ == CacheStatus::kClosed) return slots;
  const std::shared_lock lock(state_->mutex);
  for (int32_t b = 0; b < num_blocks_; ++b) {
    const PageHandle handle = page(b, static_cast<size_t>(group.value()));
    const bool is_hot = !handle.is_null() && state_->store.page(handle.id).level == kHotLevel;
    if (is_hot) {
      slots.push_back(state_->store.page(handle.id).slot.value());
    } else if (!valid_only) {
      slots.push_back(kBadPageIndex);
    }
  }
  return slots;
}

int32_t KVCache::ssm_base_index() const {
  HELICORE_CHECK(state_ != nullptr && state_->ssm, "kv.ssm_base_index",
                 "the config must have an SsmLayerConfig");
  if (!is_active() || state_page_.is_null()) return kBadPageIndex;
  const std::shared_lock lock(state_->mutex);
  return state_->store.page(state_page_.id).slot.value();
}

std::vector<TokenId> KVCache::committed_tokens() const {
  if (status_ == CacheStatus::kClosed) return {};
  const std::shared_lock lock(state_->mutex);
  std::vector<TokenId> tokens(static_cast<size_t>(num_committed_));
  auto end = tokens.end() - num_tail_;
  std::ranges::copy(tail_tokens(), end);
  for (NodeId id = tail_node_; state_->tree.node(id).parent != kNoNode;
       id = state_->tree.node(id).parent) {
    const auto block = state_->tree.tokens(id);
    end -= static_cast<std::ptrdiff_t>(block.size());
    std::copy(block.begin(), block.end(), end);
  }
  return tokens;
}

}  // namespace helicore::kv
