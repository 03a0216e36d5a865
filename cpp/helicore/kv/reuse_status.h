// What a sequence has of each layer group: the rows it found in the tree, and those it misses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "helicore/kv/types.h"

namespace helicore::kv {

using TokenRange = HalfOpenRange<int32_t>;

// One layer group of a cache. Of tokens that no later step reads nothing is said.
struct ReuseStatus {
  LifeCycleId group{0};
  ReusePolicy policy = ReusePolicy::kRequired;
  int32_t endpoint = 0;                // tokens: where the last covered range ends, 0 without any
  bool complete = false;               // the group has the rows of all tokens that later steps read
  std::vector<TokenRange> coverage{};  // tokens whose rows it has, ascending
};

// Tokens that are history although a layer group does not have their rows: nothing was found for
// them, they were not selected, or they were lost. Their pages are never shown to others. Not
// thread-safe: the manager's lock guards it.
class MissingRows {
 public:
  // Room for `count` more ranges, so that add() can't fail.
  void reserve(size_t count) { entries_.reserve(entries_.size() + count); }
  void add(size_t life_cycle, TokenRange tokens);
  // They are there now. `tokens` is a block.
  void remove(size_t life_cycle, TokenRange tokens) noexcept;
  // Tokens from `num_tokens` on are no history any more.
  void cut(int32_t num_tokens) noexcept;
  [[nodiscard]] bool overlaps(size_t life_cycle, TokenRange tokens) const noexcept;
  // What is left of `tokens`, ascending.
  [[nodiscard]] std::vector<TokenRange> remaining(size_t life_cycle, TokenRange tokens) const;

 private:
  struct Entry {
    size_t life_cycle = 0;
    TokenRange tokens{};  // inside one block
  };
  std::vector<Entry> entries_;
};

}  // namespace helicore::kv
