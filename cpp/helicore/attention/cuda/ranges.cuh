// Which cached tokens a block of a decode kernel reads.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "helicore/attention/mla_params.h"

namespace helicore::attention::cuda {

// The request of query token t: the last b with cu_q[b] <= t. All lanes of a warp ask for the same
// t; they look at 32 places at a time, because each look costs a latency.
__device__ inline int request_of(const int32_t* cu_q, int num_requests, int64_t t) {
  constexpr int kLanes = 32;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  int lo = 0;
  int count = num_requests;
  while (count > 1) {
    const int step = (count + kLanes - 1) / kLanes;
    const int at = lane * step;
    const unsigned reached = __ballot_sync(0xffffffffu, at < count && cu_q[lo + at] <= t);
    const int last = reached == 0 ? 0 : kLanes - 1 - __clz(static_cast<int>(reached));
    lo += last * step;
    count = min(step, count - last * step);
  }
  return lo;
}

// Tokens that query token t sees.
__device__ inline int visible_tokens(const MlaDecodeParams& p, int request, int64_t t) {
  if (p.kv_bound != nullptr) return p.kv_bound[t];
  return max(0, p.kv_len[request] - (p.cu_q[request + 1] - static_cast<int>(t)) + 1);
}

// [begin, end) of a split: equal ranges, cut at multiples of the kernel's token tile. Depends on
// the row's own length alone.
__device__ inline int2 split_range(int visible, int split, int num_splits, int token_tile) {
  const int tiles = (visible + token_tile - 1) / token_tile;
  const int per_split = (tiles + num_splits - 1) / num_splits * token_tile;
  return {min(visible, split * per_split), min(visible, (split + 1) * per_split)};
}

}  // namespace helicore::attention::cuda
