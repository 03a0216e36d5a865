// The page table of one life cycle of one sequence.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace helicore::kv {

// A page table: its own memory or a row of the caller's. Memory that a view may show stays until
// the cache is gone: a view that is out of date reads old entries, never freed memory.
struct IndexTable {
  std::vector<int32_t> own;
  std::vector<std::vector<int32_t>> retired;  // what `own` was before it grew
  int32_t* data = nullptr;
  size_t capacity = 0;
  bool is_external = false;
  // Moves into own memory of at least `size` entries: the first `count` as they are, the rest
  // BAD.
  void move_to_own(size_t size, size_t count);
};

}  // namespace helicore::kv
