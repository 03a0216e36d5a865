// Argument checks shared by the attention entries. Indices that a kernel will follow are checked
// here, once per call.
#pragma once

#include <algorithm>
#include <cstdint>

#include "helicore/attention/mla_params.h"
#include "helicore/attention/planner.h"
#include "helicore/core/error.h"
#include "helicore/core/tensor_view.h"
#include "helicore/core/thread_pool.h"
#include "helicore/nn/checks.h"

namespace helicore::attention {

// Absorbed and expanded kernels count rows (tokens * heads of a request) in 32 bits.
inline constexpr int64_t kMaxRows = int64_t{1} << 30;

inline void check_width(int64_t width, int64_t least, const char* where, const char* name) {
  HELICORE_CHECK(width >= least && width % 4 == 0 && width <= 65536, where, name,
                 " must be a multiple of 4 from ", least, " to 65536, got ", width);
}

inline void check_scale(float scale, const char* where) {
  HELICORE_CHECK(scale > 0.0f && scale < 1e30f, where, "scale must be positive and finite, got ",
                 scale);
}

// The largest of [0, n) below zero or at `limit` and above, as an index; -1 when all are inside.
inline int64_t first_outside(const int32_t* ids, int64_t n, int64_t limit) {
  const auto bound = static_cast<uint32_t>(std::min<int64_t>(limit, int64_t{1} << 31));
  uint32_t most = 0;
  for (int64_t i = 0; i < n; ++i) most = std::max(most, static_cast<uint32_t>(ids[i]));
  if (n == 0 || most < bound) return -1;
  for (int64_t i = 0; i < n; ++i) {
    if (static_cast<uint32_t>(ids[i]) >= bound) return i;
  }
  return -1;
}

// Requests of a ragged batch: pointers checked for shape, lengths for consistency.
struct RaggedBatch {
  const int32_t* block_table = nullptr;
  int64_t block_table_stride = 0;
  int64_t max_pages = 0;
  const int32_t* cu_q = nullptr;
  const int32_t* kv_len = nullptr;
  int32_t num_requests = 0;
};

[[nodiscard]] RaggedBatch check_batch(const TensorView& block_table, const TensorView& cu_q,
                                      const TensorView& kv_len, int64_t num_tokens,
                                      const char* where);
// The first `num_tokens` cached tokens of `request` lie in pages that exist.
void check_pages(const RaggedBatch& batch, const MlaCache& cache, int32_t request,
                 int64_t num_tokens, const char* where);
// stats [T, H, 2] float32, or null.
[[nodiscard]] float* check_stats(const TensorView* stats, int64_t num_tokens, int64_t num_heads,
                                 const char* where);
// cos_sin [max_pos, dr] and positions [T] in range; an empty table when cos_sin is null.
[[nodiscard]] RopeTable check_rope(const TensorView* cos_sin, const TensorView* positions,
                                   int64_t num_tokens, int64_t rope_dim, bool interleaved,
                                   const char* where);

}  // namespace helicore::attention
