#include "helicore/kv/event_log.h"

#include <algorithm>
#include <utility>

namespace helicore::kv {

std::string_view name_of(EventKind kind) noexcept {
  switch (kind) {
    case EventKind::kCreated:
      return "CREATED";
    case EventKind::kStored:
      return "STORED";
    case EventKind::kRemoved:
      return "REMOVED";
    case EventKind::kUpdated:
      return "UPDATED";
  }
  return "?";
}

EventLog::EventLog(int32_t capacity, int32_t tokens_per_block, size_t num_life_cycles)
    : tokens_per_block_(static_cast<size_t>(tokens_per_block)),
      ring_(static_cast<size_t>(capacity)),
      tokens_(ring_.size() * tokens_per_block_),
      num_life_cycles_(num_life_cycles),
      has_page_(ring_.size() * num_life_cycles) {}

EventLog::Record& EventLog::push(EventKind kind, const Digest& key) noexcept {
  Record& record = ring_[next_id_++ % ring_.size()];
  if (count_ == ring_.size()) {
    ++num_dropped_;
  } else {
    ++count_;
  }
  record.kind = kind;
  record.key = key;
  record.parent_key = {};
  record.ordinal = -1;
  record.priority = 0;
  record.num_tokens = 0;
  record.life_cycle = KVEvent::kWholeBlock;
  record.scope.reset();
  return record;
}

void EventLog::created(const Digest& key, ReuseScope scope) noexcept {
  if (is_enabled()) push(EventKind::kCreated, key).scope = std::move(scope);
}

void EventLog::stored(const Digest& key, const Digest& parent_key, int32_t ordinal,
                      int32_t priority, std::span<const TokenId> tokens) noexcept {
  if (!is_enabled()) return;
  const size_t at = next_id_ % ring_.size() * tokens_per_block_;
  Record& record = push(EventKind::kStored, key);
  record.parent_key = parent_key;
  record.ordinal = ordinal;
  record.priority = priority;
  record.num_tokens = static_cast<int32_t>(tokens.size());
  std::copy(tokens.begin(), tokens.end(), tokens_.begin() + static_cast<std::ptrdiff_t>(at));
  const size_t first = (next_id_ - 1) % ring_.size() * num_life_cycles_;
  for (size_t i = 0; i < num_life_cycles_; ++i) has_page_[first + i] = false;
}

void EventLog::add_life_cycle(LifeCycleId life_cycle) noexcept {
  if (!is_enabled()) return;
  const size_t first = (next_id_ - 1) % ring_.size() * num_life_cycles_;
  has_page_[first + static_cast<size_t>(life_cycle.value())] = true;
}

void EventLog::page_stored(const Digest& key, LifeCycleId life_cycle, int32_t num_tokens) noexcept {
  if (!is_enabled()) return;
  Record& record = push(EventKind::kStored, key);
  record.life_cycle = life_cycle.value();
  record.num_tokens = num_tokens;
}

void EventLog::page_removed(const Digest& key, LifeCycleId life_cycle) noexcept {
  if (is_enabled()) push(EventKind::kRemoved, key).life_cycle = life_cycle.value();
}

void EventLog::removed(const Digest& key) noexcept {
  if (is_enabled()) push(EventKind::kRemoved, key);
}

void EventLog::updated(const Digest& key, int32_t priority) noexcept {
  if (is_enabled()) push(EventKind::kUpdated, key).priority = priority;
}

std::vector<KVEvent> EventLog::drain(size_t max_events) {
  const size_t taken = std::min(count_, max_events);
  std::vector<KVEvent> events(taken);
  for (size_t i = 0; i < taken; ++i) {
    KVEvent& event = events[i];
    event.id = next_id_ - count_ + i;
    const size_t at = event.id % ring_.size();
    const Record& record = ring_[at];
    event.kind = record.kind;
    event.key = record.key;
    event.parent_key = record.parent_key;
    event.ordinal = record.ordinal;
    event.priority = record.priority;
    const auto begin = tokens_.begin() + static_cast<std::ptrdiff_t>(at * tokens_per_block_);
    event.scope = record.scope;
    event.life_cycle = record.life_cycle;
    if (record.life_cycle != KVEvent::kWholeBlock) {
      event.num_tokens = record.num_tokens;
      continue;
    }
    event.tokens.assign(begin, begin + record.num_tokens);
    if (record.kind != EventKind::kStored) continue;
    for (size_t lc = 0; lc < num_life_cycles_; ++lc) {
      if (has_page_[at * num_life_cycles_ + lc]) event.life_cycles.push_back(static_cast<int>(lc));
    }
  }
  count_ -= taken;
  return events;
}

}  // namespace helicore::kv
