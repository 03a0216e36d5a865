// The in-memory half of a prefix store: which block lies in which slot, who is whose parent, who
// may be evicted. No I/O and no lock.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "helicore/kv/prefix_store_format.h"

namespace helicore::kv::store {

inline constexpr uint32_t kNoSlot = UINT32_MAX;

enum class SlotState : uint8_t {
  kFree,     // in the free list
  kWriting,  // found as a duplicate, not readable; its writer pins it
  kLive,     // readable
  kDead,     // forgotten; free once its tombstone is written and nobody pins it
};

struct Slot {
  Digest key{};
  Digest parent{};
  uint64_t sequence = 0;
  uint32_t data_crc = 0;
  uint32_t parent_slot = kNoSlot;  // none for ordinal 0
  int32_t ordinal = 0;
  int32_t num_tokens = 0;
  int32_t num_children = 0;
  int32_t num_pins = 0;
  uint32_t newer = kNoSlot;
  uint32_t older = kNoSlot;
  SlotState state = SlotState::kFree;
  bool buried = false;  // dead, and the journal says so
};

// One list orders all blocks by last use. Invariant: a block is nearer to its front than its
// children, because a use of a block is a use of its ancestors, and a new block is linked right
// behind its parent. So the first block from the back without children and pins is the least
// recently used leaf, and one pass from a block to the back finds all its descendants.
class PrefixIndex {
 public:
  PrefixIndex(int64_t num_slots, int32_t tokens_per_block);

  [[nodiscard]] int64_t num_slots() const noexcept { return static_cast<int64_t>(slots_.size()); }
  [[nodiscard]] int64_t num_free() const noexcept { return static_cast<int64_t>(free_.size()); }
  [[nodiscard]] int64_t num_blocks() const noexcept { return static_cast<int64_t>(by_key_.size()); }
  [[nodiscard]] const Slot& at(uint32_t slot) const { return slots_.at(slot); }
  [[nodiscard]] std::span<const TokenId> tokens(uint32_t slot) const noexcept;

  // Live or being written.
  [[nodiscard]] std::optional<uint32_t> find(const Digest& key) const;
  // The live block that was put under this sequence number is still in the slot.
  [[nodiscard]] bool holds(uint32_t slot, uint64_t sequence) const noexcept;

  // Takes a free slot for the block, pinned and kWriting. The caller has checked that one is free,
  // that the key is new and that the parent of an ordinal > 0 is there.
  uint32_t begin_write(const PutRecord& block, const Digest& key);
  // Makes it live and drops the writer's pin; false when it died meanwhile with an ancestor.
  bool publish(uint32_t slot, uint32_t data_crc);
  // Forgets a block that was never published, with everything that hangs on it.
  void abort(uint32_t slot);

  // The least recently used leaf that nobody pins.
  [[nodiscard]] std::optional<uint32_t> victim() const;
  // Forgets a block and its descendants. Each awaits a tombstone unless it was never published.
  void remove(uint32_t slot);
  // Blocks that died and whose tombstones are not written yet; take_dead() empties the list.
  [[nodiscard]] size_t num_dead() const noexcept { return dead_.size(); }
  [[nodiscard]] std::vector<TombstoneRecord> take_dead();
  void bury(uint32_t slot);

  void pin(uint32_t slot) { ++slots_[slot].num_pins; }
  void unpin(uint32_t slot);
  // A use of the block: it and its ancestors move to the front.
  void touch(uint32_t slot);

  // Reading a journal. A snapshot's records come most recently used first, others oldest first.
  // False when the record can't be taken: no such slot, no parent, or a slot or key in use.
  bool replay(const PutRecord& record, bool in_snapshot);
  void replay(const TombstoneRecord& record);
  // Every live block, most recently used first.
  [[nodiscard]] std::vector<PutRecord> snapshot() const;
  [[nodiscard]] uint64_t last_sequence() const noexcept { return last_sequence_; }
  void rebuild_free_list();

  // Throws InternalError when an invariant is broken; for tests and debug builds. O(slots).
  void check_invariants() const;

 private:
  struct KeyHash {
    size_t operator()(const Digest& key) const noexcept {
      size_t head = 0;
      std::memcpy(&head, key.data(), sizeof(head));
      return head;
    }
  };

  void fill(uint32_t slot, const PutRecord& block, const Digest& key);
  void link_after(uint32_t slot, uint32_t newer);  // kNoSlot: at the front
  void unlink(uint32_t slot);
  void kill(uint32_t slot);
  void free_if_done(uint32_t slot);

  int32_t tokens_per_block_;
  std::vector<Slot> slots_;
  std::vector<TokenId> tokens_;
  std::vector<uint32_t> free_;  // taken from the back, so that a new file fills in order
  std::vector<TombstoneRecord> dead_;
  std::unordered_map<Digest, uint32_t, KeyHash> by_key_;
  uint32_t newest_ = kNoSlot;
  uint32_t oldest_ = kNoSlot;
  uint64_t last_sequence_ = 0;
};

}  // namespace helicore::kv::store
