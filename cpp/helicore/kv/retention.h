// How long committed blocks are worth keeping, by ranges of tokens.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "helicore/kv/page_slab.h"
#include "helicore/kv/types.h"

namespace helicore::kv {

// Tokens [begin, end) of a sequence, prompt and output, have `priority` from the time when their
// block is committed, for `duration_ms` or for ever. What comes before them is needed to reuse
// them, so it gets at least their priority and their time.
struct RetentionRange {
  int32_t begin = 0;                                  // >= 0
  std::optional<int32_t> end = std::nullopt;          // > begin; none: everything that follows
  int priority = kPriorityDefault;                    // 0..100
  std::optional<int64_t> duration_ms = std::nullopt;  // > 0; none: for ever
  // Throws InvalidArgument.
  void validate() const;
  friend bool operator==(const RetentionRange&, const RetentionRange&) = default;
};

// The ranges of one sequence.
class Retention {
 public:
  Retention() = default;
  Retention(std::span<const RetentionRange> ranges, int base_priority);

  struct Worth {
    uint8_t priority = kPriorityDefault;
    // Then it falls to the base priority, as if it had just been used. 0: never.
    int64_t duration_ms = 0;
  };
  // Of the block that begins at token `begin`.
  [[nodiscard]] Worth of_block(int32_t begin) const noexcept;
  [[nodiscard]] uint8_t base() const noexcept { return base_; }
  [[nodiscard]] bool expires() const noexcept { return expires_; }

 private:
  std::vector<RetentionRange> ranges_;
  uint8_t base_ = kPriorityDefault;
  bool expires_ = false;
};

// Pages whose priority falls at a given time, soonest first; of those of one time the last added
// first, which is the deepest of a sequence.
class RetentionTimers {
 public:
  void add(int64_t at_ns, PageHandle page, uint8_t priority);
  [[nodiscard]] bool any_due(int64_t now_ns) const noexcept {
    return !timers_.empty() && timers_.front().at_ns <= now_ns;
  }
  [[nodiscard]] bool empty() const noexcept { return timers_.empty(); }
  struct Timer {
    int64_t at_ns = 0;
    PageHandle page;
    uint8_t priority = 0;  // afterwards
    uint64_t order = 0;
  };
  // The soonest, which leaves. Needs any_due().
  Timer pop() noexcept;

 private:
  std::vector<Timer> timers_;  // a heap
  uint64_t num_added_ = 0;
};

}  // namespace helicore::kv
