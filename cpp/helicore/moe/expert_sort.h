// Rows of a batch grouped by expert.
#pragma once

#include <cstdint>

namespace helicore::moe {

// The expanded index of (token, slot) is token * top_k + slot. Sorted rows are grouped by ascending
// expert and keep the order of expanded indices inside one (stable), so that the result is the same
// on every run and for every thread count. Arrays are the caller's.
struct ExpertSort {
  int32_t* offsets =
      nullptr;  // [num_experts + 1]: rows of expert e are offsets[e] .. offsets[e + 1]
  int32_t* row_token = nullptr;  // [rows] token of a sorted row
  int32_t* position = nullptr;   // [tokens, top_k] sorted row of an expanded index, or -1
  int32_t* active = nullptr;     // [num_experts] experts that have rows, ascending
  int32_t num_active = 0;
};

// ids [tokens, top_k], all in [0, num_experts), or -1: no row.
void sort_by_expert(const int32_t* ids, int64_t tokens, int32_t top_k, int32_t num_experts,
                    ExpertSort* sort);

}  // namespace helicore::moe
