#include "helicore/kv/prefix_store_index.h"

#include <algorithm>

#include "helicore/core/error.h"

namespace helicore::kv::store {

PrefixIndex::PrefixIndex(int64_t num_slots, int32_t tokens_per_block)
    : tokens_per_block_(tokens_per_block),
      slots_(static_cast<size_t>(num_slots)),
      tokens_(static_cast<size_t>(num_slots) * static_cast<size_t>(tokens_per_block)) {
  rebuild_free_list();
}

void PrefixIndex::rebuild_free_list() {
  free_.clear();
  for (size_t slot = slots_.size(); slot-- > 0;) {
    if (slots_[slot].state == SlotState::kFree) free_.push_back(static_cast<uint32_t>(slot));
  }
}

std::span<const TokenId> PrefixIndex::tokens(uint32_t slot) const noexcept {
  return {tokens_.data() + static_cast<size_t>(slot) * static_cast<size_t>(tokens_per_block_),
          static_cast<size_t>(slots_[slot].num_tokens)};
}

std::optional<uint32_t> PrefixIndex::find(const Digest& key) const {
  const auto it = by_key_.find(key);
  return it == by_key_.end() ? std::nullopt : std::optional(it->second);
}

bool PrefixIndex::holds(uint32_t slot, uint64_t sequence) const noexcept {
  return slot < slots_.size() && slots_[slot].state == SlotState::kLive &&
         slots_[slot].sequence == sequence;
}

void PrefixIndex::fill(uint32_t slot, const PutRecord& block, const Digest& key) {
  Slot& s = slots_[slot];
  s = Slot{};
  s.key = key;
  s.parent = block.parent;
  s.sequence = block.sequence;
  s.data_crc = block.data_crc;
  s.ordinal = block.ordinal;
  s.num_tokens = static_cast<int32_t>(block.tokens.size());
  std::copy(block.tokens.begin(), block.tokens.end(),
            tokens_.begin() + static_cast<ptrdiff_t>(slot) * tokens_per_block_);
  if (block.ordinal > 0) {
    s.parent_slot = by_key_.at(block.parent);
    ++slots_[s.parent_slot].num_children;
  }
  by_key_.emplace(key, slot);
}

uint32_t PrefixIndex::begin_write(const PutRecord& block, const Digest& key) {
  HELICORE_ASSERT(!free_.empty(), "kv.prefix_index", "no free slot");
  const uint32_t slot = free_.back();
  free_.pop_back();
  fill(slot, block, key);
  Slot& s = slots_[slot];
  s.sequence = ++last_sequence_;
  s.state = SlotState::kWriting;
  s.num_pins = 1;
  link_after(slot, s.parent_slot);
  return slot;
}

bool PrefixIndex::publish(uint32_t slot, uint32_t data_crc) {
  Slot& s = slots_[slot];
  const bool alive = s.state == SlotState::kWriting;
  if (alive) {
    s.state = SlotState::kLive;
    s.data_crc = data_crc;
  } else {
    // The journal has its put record by now, so it needs a tombstone like any other.
    s.buried = false;
    dead_.push_back({slot, s.sequence});
  }
  unpin(slot);
  return alive;
}

void PrefixIndex::abort(uint32_t slot) {
  if (slots_[slot].state == SlotState::kWriting) remove(slot);
  unpin(slot);
}

std::optional<uint32_t> PrefixIndex::victim() const {
  for (uint32_t slot = oldest_; slot != kNoSlot; slot = slots_[slot].newer) {
    const Slot& s = slots_[slot];
    if (s.num_children == 0 && s.num_pins == 0 && s.state == SlotState::kLive) return slot;
  }
  return std::nullopt;
}

void PrefixIndex::remove(uint32_t slot) {
  // Descendants are behind their ancestors; parents are marked before children are met.
  const uint32_t behind = slots_[slot].older;
  const bool has_children = slots_[slot].num_children > 0;
  kill(slot);
  if (!has_children) return;
  for (uint32_t at = behind; at != kNoSlot;) {
    const uint32_t next = slots_[at].older;
    const uint32_t parent = slots_[at].parent_slot;
    if (parent != kNoSlot && slots_[parent].state == SlotState::kDead) kill(at);
    at = next;
  }
}

void PrefixIndex::kill(uint32_t slot) {
  Slot& s = slots_[slot];
  by_key_.erase(s.key);
  unlink(slot);
  // A dead parent's count is kept right too: its slot must not be reused under a living child.
  if (s.parent_slot != kNoSlot) --slots_[s.parent_slot].num_children;
  s.buried = s.state == SlotState::kWriting;
  if (s.state == SlotState::kLive) dead_.push_back({slot, s.sequence});
  s.state = SlotState::kDead;
  free_if_done(slot);
}

std::vector<TombstoneRecord> PrefixIndex::take_dead() {
  std::vector<TombstoneRecord> taken;
  taken.swap(dead_);
  return taken;
}

void PrefixIndex::bury(uint32_t slot) {
  slots_[slot].buried = true;
  free_if_done(slot);
}

void PrefixIndex::unpin(uint32_t slot) {
  --slots_[slot].num_pins;
  free_if_done(slot);
}

void PrefixIndex::free_if_done(uint32_t slot) {
  Slot& s = slots_[slot];
  if (s.state != SlotState::kDead || !s.buried || s.num_pins > 0) return;
  s = Slot{};
  free_.push_back(slot);
}

void PrefixIndex::touch(uint32_t slot) {
  for (uint32_t at = slot; at != kNoSlot; at = slots_[at].parent_slot) {
    unlink(at);
    link_after(at, kNoSlot);
  }
}

void PrefixIndex::link_after(uint32_t slot, uint32_t newer) {
  Slot& s = slots_[slot];
  s.newer = newer;
  s.older = newer == kNoSlot ? newest_ : slots_[newer].older;
  (newer == kNoSlot ? newest_ : slots_[newer].older) = slot;
  (s.older == kNoSlot ? oldest_ : slots_[s.older].newer) = slot;
}

void PrefixIndex::unlink(uint32_t slot) {
  Slot& s = slots_[slot];
  (s.newer == kNoSlot ? newest_ : slots_[s.newer].older) = s.older;
  (s.older == kNoSlot ? oldest_ : slots_[s.older].newer) = s.newer;
  s.newer = s.older = kNoSlot;
}

bool PrefixIndex::replay(const PutRecord& record, bool in_snapshot) {
  last_sequence_ = std::max(last_sequence_, record.sequence);
  if (record.slot >= slots_.size() || slots_[record.slot].state != SlotState::kFree) return false;
  if (record.ordinal < 0 || (record.ordinal > 0 && !by_key_.contains(record.parent))) return false;
  if (record.ordinal > 0 && slots_[by_key_.at(record.parent)].ordinal + 1 != record.ordinal) {
    return false;
  }
  const Digest key = block_key(record.parent, record.tokens);
  if (by_key_.contains(key)) return false;
  fill(record.slot, record, key);
  slots_[record.slot].state = SlotState::kLive;
  link_after(record.slot, in_snapshot ? oldest_ : slots_[record.slot].parent_slot);
  return true;
}

void PrefixIndex::replay(const TombstoneRecord& record) {
  if (!holds(record.slot, record.sequence)) return;
  remove(record.slot);
  for (const TombstoneRecord& dead : take_dead()) bury(dead.slot);
}

std::vector<PutRecord> PrefixIndex::snapshot() const {
  std::vector<PutRecord> records;
  records.reserve(by_key_.size());
  for (uint32_t slot = newest_; slot != kNoSlot; slot = slots_[slot].older) {
    const Slot& s = slots_[slot];
    if (s.state != SlotState::kLive) continue;
    const auto span = tokens(slot);
    records.push_back(
        {slot, s.ordinal, s.sequence, s.data_crc, s.parent, {span.begin(), span.end()}});
  }
  return records;
}

void PrefixIndex::check_invariants() const {
  const char* where = "kv.prefix_index";
  std::vector<int32_t> num_children(slots_.size(), 0);
  std::vector<uint8_t> seen(slots_.size(), 0);
  size_t num_linked = 0;
  uint32_t newer = kNoSlot;
  for (uint32_t slot = newest_; slot != kNoSlot; newer = slot, slot = slots_[slot].older) {
    const Slot& s = slots_[slot];
    HELICORE_ASSERT(seen[slot] == 0 && s.newer == newer, where, "the list is broken at ", slot);
    HELICORE_ASSERT(s.state == SlotState::kLive || s.state == SlotState::kWriting, where, "slot ",
                    slot, " is linked and dead");
    HELICORE_ASSERT(find(s.key) == slot, where, "slot ", slot, " is not found by its key");
    HELICORE_ASSERT(s.key == block_key(s.parent, tokens(slot)), where, "key of ", slot);
    seen[slot] = 1;
    ++num_linked;
    if (s.parent_slot == kNoSlot) continue;
    HELICORE_ASSERT(seen[s.parent_slot] == 1, where, "slot ", slot, " precedes its parent");
    HELICORE_ASSERT(slots_[s.parent_slot].key == s.parent, where, "parent of ", slot);
    ++num_children[s.parent_slot];
  }
  HELICORE_ASSERT(newer == oldest_ && num_linked == by_key_.size(), where, "list and map differ");
  size_t num_free = 0;
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    HELICORE_ASSERT(slots_[slot].num_pins >= 0, where, "pins of ", slot);
    HELICORE_ASSERT(seen[slot] == 0 || slots_[slot].num_children == num_children[slot], where,
                    "children of ", slot);
    num_free += slots_[slot].state == SlotState::kFree ? 1 : 0;
  }
  HELICORE_ASSERT(num_free == free_.size(), where, "free list");
}

}  // namespace helicore::kv::store
