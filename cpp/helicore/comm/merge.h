// Sums over ranks: plain loops over memory, without any synchronisation.
#pragma once

#include <cstdint>
#include <span>

#include "helicore/core/types.h"

namespace helicore::comm {

// out[i] = parts[0][i] + parts[1][i] + ..., in float32 in this order, rounded once to `dtype`
// (float32 or bfloat16). out may be one of the parts.
void sum_parts(std::span<const void* const> parts, void* out, int64_t count, DType dtype);

// The partial results of one rank: o [T, H, R], stats [T, H, 2] float32.
struct PartialView {
  const void* o = nullptr;
  const void* stats = nullptr;
};

struct MergeParams {
  std::span<const PartialView> parts;  // in order of rank
  int64_t tokens = 0;                  // T
  int64_t heads = 0;                   // H
  int64_t width = 0;                   // R
  int64_t first_head = 0;              // of `own_heads` that are merged
  int64_t own_heads = 0;
  DType dtype = DType::kFloat32;  // of o and out
  void* out = nullptr;            // [T, own_heads, R]
};

// See Communicator::merge_partials.
void merge_parts(const MergeParams& params);

}  // namespace helicore::comm
