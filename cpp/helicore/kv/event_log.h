// What happened to the tree of reusable blocks, in order, for a listener outside: a router, a
// second index. Bounded; drained by the caller, never called back.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "helicore/core/types.h"
#include "helicore/kv/sha256.h"
#include "helicore/kv/types.h"

namespace helicore::kv {

enum class EventKind : uint8_t {
  kCreated = 0,  // a scope's root appeared: key, scope
  // A block became reusable: key, parent_key, ordinal, priority, tokens and the life cycles whose
  // pages cover all of them. With `life_cycle`: a block got a page, or a longer one, for it: key,
  // num_tokens.
  kStored = 1,
  // A block, or a scope's root, is gone: key; what was below it went before, its pages go with it.
  // With `life_cycle`: only the block's page for it is gone: key.
  kRemoved = 2,
  kUpdated = 3,  // a block's priority rose: key, priority
};
[[nodiscard]] std::string_view name_of(EventKind kind) noexcept;

// Fields that the kind does not name keep their defaults.
struct KVEvent {
  uint64_t id = 0;  // consecutive from 0; a gap tells that events were dropped
  EventKind kind = EventKind::kCreated;
  Digest key{};         // the chain key: what get_chain_keys() gives, the root key of a scope
  Digest parent_key{};  // of the block in front, or the scope's root
  int32_t ordinal = -1;
  int32_t priority = 0;
  std::vector<TokenId> tokens{};  // fewer than tokens_per_block for the last part of a sequence
  std::optional<ReuseScope> scope = std::nullopt;
  int32_t life_cycle = kWholeBlock;
  // Tokens of the block that the page of `life_cycle` covers; for recurrent state the tokens after
  // which it was taken.
  int32_t num_tokens = 0;
  std::vector<int32_t> life_cycles{};  // ascending
  static constexpr int32_t kWholeBlock = -1;
  friend bool operator==(const KVEvent&, const KVEvent&) = default;
};

// A ring of the latest events. Its memory is taken at construction: recording can't fail and
// allocates nothing. When it is full the oldest event is dropped and counted. Not thread-safe: the
// manager's lock guards it.
class EventLog {
 public:
  // `capacity` events; 0 records nothing.
  EventLog(int32_t capacity, int32_t tokens_per_block, size_t num_life_cycles = 1);

  [[nodiscard]] bool is_enabled() const noexcept { return !ring_.empty(); }
  void created(const Digest& key, ReuseScope scope) noexcept;
  void stored(const Digest& key, const Digest& parent_key, int32_t ordinal, int32_t priority,
              std::span<const TokenId> tokens) noexcept;
  // Adds a life cycle to the block that the latest event stored.
  void add_life_cycle(LifeCycleId life_cycle) noexcept;
  void page_stored(const Digest& key, LifeCycleId life_cycle, int32_t num_tokens) noexcept;
  void removed(const Digest& key) noexcept;
  void page_removed(const Digest& key, LifeCycleId life_cycle) noexcept;
  void updated(const Digest& key, int32_t priority) noexcept;

  // The oldest events, at most `max_events`, which leave the log.
  [[nodiscard]] std::vector<KVEvent> drain(size_t max_events);
  void clear() noexcept { count_ = 0; }
  [[nodiscard]] size_t count() const noexcept { return count_; }
  [[nodiscard]] uint64_t next_id() const noexcept { return next_id_; }
  [[nodiscard]] uint64_t num_dropped() const noexcept { return num_dropped_; }

 private:
  struct Record {
    EventKind kind = EventKind::kCreated;
    int32_t ordinal = -1;
    int32_t priority = 0;
    int32_t num_tokens = 0;
    int32_t life_cycle = KVEvent::kWholeBlock;
    Digest key{};
    Digest parent_key{};
    std::optional<ReuseScope> scope;
  };
  Record& push(EventKind kind, const Digest& key) noexcept;

  size_t tokens_per_block_;
  std::vector<Record> ring_;     // event `id` lies at id % capacity
  std::vector<TokenId> tokens_;  // [capacity][tokens_per_block]
  size_t num_life_cycles_;
  std::vector<bool> has_page_;  // [capacity][life cycle]
  size_t count_ = 0;
  uint64_t next_id_ = 0;
  uint64_t num_dropped_ = 0;
};

}  // namespace helicore::kv
