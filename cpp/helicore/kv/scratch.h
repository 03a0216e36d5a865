// Scratch slots of one sequence: storage for the blocks of a long prefill step that no later step
// reads. Their rows are needed only while one layer runs, so all layers share a few slots: a layer
// uses the whole of each, the next layer writes over it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "helicore/kv/config.h"
#include "helicore/kv/layout.h"
#include "helicore/kv/page_slab.h"
#include "helicore/kv/types.h"

namespace helicore::kv {

class KVCache;

// What a step is about, in tokens: rows [history, capacity) are written.
struct StepCursors {
  int32_t capacity = 0;
  int32_t history = 0;
};

// A member of its cache. Which blocks are scratch follows from the cursors alone
// (LifeCycle::scratch_range); while the cache is active it has ceil(blocks * scratch_fraction)
// pages per life cycle for them, held and locked, that belong to no block. Without
// config.swa_scratch_reuse nothing is scratch.
//
//   rows of a step:   [ history ......... scratch ........ | window | max_rewind_len ] capacity
//   page table:         own pages, if any BAD BAD BAD BAD    own pages
//
// While there are scratch blocks the history stays or moves to where all of them are stale, which
// they are at capacity - max_rewind_len at the latest. Threads: as the cache.
class ScratchSlots {
 public:
  // `cache` outlives it.
  ScratchSlots(KVCache& cache, bool is_enabled);
  ScratchSlots(const ScratchSlots&) = delete;
  ScratchSlots& operator=(const ScratchSlots&) = delete;

  [[nodiscard]] bool is_enabled() const noexcept { return is_enabled_; }
  // Throws LogicError while the cursors are those of a step that has scratch blocks, or would have
  // them, and when the cache is closed; InvalidArgument for true without config.swa_scratch_reuse.
  void set_enabled(bool is_enabled);
  // The scratch blocks of a life cycle and their slots; none while there are none or the cache is
  // not active. Valid until the next call that sets the cursors, suspends or closes.
  [[nodiscard]] std::optional<ScratchDesc> desc(LifeCycleId group) const;
  [[nodiscard]] bool has_slots() const noexcept;
  // PER_LAYER always; SHARED when there can be no scratch blocks.
  [[nodiscard]] bool supports(PageIndexMode mode) const noexcept {
    return mode == PageIndexMode::kPerLayer || !is_enabled_;
  }

 private:
  friend class KVCache;
  friend struct Introspection;

  [[nodiscard]] HalfOpenRange<int32_t> range(size_t life_cycle,
                                             const StepCursors& cursors) const noexcept;
  // The same, whether enabled or not.
  [[nodiscard]] HalfOpenRange<int32_t> possible_range(size_t life_cycle,
                                                      const StepCursors& cursors) const noexcept;
  [[nodiscard]] bool is_scratch(int32_t ordinal, size_t life_cycle,
                                const StepCursors& cursors) const noexcept;
  // Some life cycle has scratch blocks.
  [[nodiscard]] bool any(const StepCursors& cursors) const noexcept;
  // A step with these cursors has, or ends, scratch blocks.
  [[nodiscard]] bool concerns(const StepCursors& cursors) const noexcept;
  // Slots for the scratch blocks of such a step, those that are missing, and the pages that it
  // gives up: slots beyond that number and own pages of blocks that become scratch, without those
  // whose slots nobody gets because the level shrinks.
  [[nodiscard]] int32_t num_wanted(size_t life_cycle, const StepCursors& cursors) const noexcept;
  [[nodiscard]] int32_t num_missing(size_t life_cycle, const StepCursors& cursors) const noexcept;
  [[nodiscard]] int32_t num_given_up(size_t life_cycle, const StepCursors& cursors) const noexcept;

  // InvalidArgument when the cursors may not become these.
  void check_resize(const char* where, const StepCursors& next) const;
  void check_history(const char* where, int32_t history) const;
  void check_truncate(const char* where, int32_t num_tokens) const;

  // With the lock held. reserve() may throw, the others need nothing that can fail.
  void reserve(const StepCursors& cursors);
  void give_up(const StepCursors& cursors);
  void fill(const StepCursors& cursors);
  void release_all();
  void release_last(size_t life_cycle);

  [[nodiscard]] std::span<const PageHandle> pages(size_t life_cycle) const noexcept;

  KVCache& cache_;
  bool is_enabled_;
  std::vector<std::vector<PageHandle>> pages_;  // [life cycle]; empty until first used
};

}  // namespace helicore::kv
