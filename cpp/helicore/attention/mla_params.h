// Parameter structs of the latent-attention (MLA) kernels: plain data, no tensor type, no
// ownership.
//
// CPU and CUDA kernels of one name take the same struct and keep the same contract. Symbols in
// shape comments:
//   T query tokens of the step, packed over requests   B requests         H heads
//   R kv_lora_rank   dr rope width (may be 0)   dn nope width   dv value width   E = R + dr
// Rows are contiguous in their last dimension. All widths are multiples of 4. Products accumulate
// in float32. `out`, `fused_q` and `q` have the model's dtype; the cache has its own format
// (cache_format.h).
#pragma once

#include <cstdint>

#include "helicore/attention/cache_format.h"
#include "helicore/core/types.h"

namespace helicore::attention {

// The latent rows of one layer in the KV pool. Row of token slot s: page s / page_size, offset s %
// page_size; a row is concat(c[R], k_r[dr]), c normalised, k_r rotated and stored half-split (see
// RopeTable). Of a quantised format `data` is bytes, and `layout` says where a row's parts lie in
// its page.
struct MlaCache {
  void* data = nullptr;  // [num_pages, page_size, E], or [num_pages, page_size * row_bytes]
  DType dtype = DType::kBFloat16;  // bfloat16 or float32; uint8 of a quantised format
  CacheFormat format = CacheFormat::kDense;
  int32_t page_size = 0;     // tokens of a page
  int32_t kv_lora_rank = 0;  // R
  int32_t rope_dim = 0;      // dr
  int64_t num_pages = 0;
  int64_t page_stride = 0;  // elements of dtype from page to page, >= page_size * E (or row_bytes)
  int64_t row_bytes = 0;    // of one token
  float scale = 1.0f;       // of kFp8 and kNvFp4: factor of every code
  CacheLayout layout;       // of a quantised format

  [[nodiscard]] int64_t width() const noexcept { return int64_t{kv_lora_rank} + rope_dim; }
};

// Rotation of a rope vector x[dr] at position p: with c = table[p][0 : dr/2], s = table[p][dr/2 :
// dr],
//   out[i] = x0 c_i - x1 s_i,   out[i + dr/2] = x1 c_i + x0 s_i,
// where (x0, x1) = (x[2i], x[2i+1]) if interleaved, else (x[i], x[i + dr/2]). The result is always
// half-split, for queries and keys alike, so their dot products equal those of either storage
// order.
struct RopeTable {
  const float* cos_sin = nullptr;  // [max_pos, dr] float32; null when dr = 0
  int64_t max_pos = 0;
  int32_t dim = 0;  // dr
  bool interleaved = false;
};

// Writes c = norm(raw c) and k_r = rope(raw k_r) of each token to its slot.
struct MlaAppendParams {
  const void* kv_a = nullptr;  // [T, E] raw c and raw k_r, model dtype
  int64_t kv_a_stride = 0;     // elements from row to row
  DType kv_a_dtype = DType::kBFloat16;
  const void* norm_weight = nullptr;  // [R], or null: c is stored as it is
  DType norm_dtype = DType::kBFloat16;
  float eps = 1e-6f;  // of the RMS norm
  RopeTable rope;
  const int32_t* positions = nullptr;  // [T]; may be null when dr = 0
  const int64_t* slots = nullptr;      // [T] page * page_size + offset; -1 = write nothing
  int64_t num_tokens = 0;              // T
  MlaCache cache;
};

// Rotates the last dr of each head's vector: out[t, h, :] = rope(in[t, h, :]). `in` may be `out`.
struct RopeRowsParams {
  const void* in = nullptr;  // [T, H, dr] with strides
  void* out = nullptr;       // [T, H, dr] with strides
  int64_t in_row_stride = 0;
  int64_t in_head_stride = 0;
  int64_t out_row_stride = 0;
  int64_t out_head_stride = 0;
  DType dtype = DType::kBFloat16;
  RopeTable rope;
  const int32_t* positions = nullptr;  // [T]
  int64_t num_tokens = 0;
  int32_t num_heads = 0;
};

// Absorbed attention over the paged latents. Token i of request b (i < S_q = cu_q[b+1] - cu_q[b])
// sees the first kv_len[b] - S_q + i + 1 cached tokens, or kv_bound[t] when given. A row that sees
// nothing gives out 0 and stats (-inf, 0). Page ids are read only for pages below a row's bound.
struct MlaDecodeParams {
  const void* q = nullptr;           // [T, H, E]
  DType q_dtype = DType::kBFloat16;  // also of `out`
  MlaCache cache;
  const int32_t* block_table = nullptr;  // [B, max_pages]
  int64_t block_table_stride = 0;
  const int32_t* cu_q = nullptr;      // [B + 1]
  const int32_t* kv_len = nullptr;    // [B]
  const int32_t* kv_bound = nullptr;  // [T], or null: causal
  int32_t num_requests = 0;
  int64_t num_tokens = 0;  // T
  int32_t num_heads = 0;
  float scale = 0.0f;      // sigma, applied to q . k
  void* out = nullptr;     // [T, H, R]
  float* stats = nullptr;  // [T, H, 2] (m, l) base 2 (core/softmax_stats.h), or null
};

// Expanded causal attention: keys and values of a head are made from the latents chunk by chunk.
// Token visibility as in MlaDecodeParams without kv_bound.
struct MlaPrefillParams {
  const void* q = nullptr;           // [T, H, dn + dr], rope part rotated
  DType q_dtype = DType::kBFloat16;  // also of `out`
  MlaCache cache;
  const int32_t* block_table = nullptr;  // [B, max_pages]
  int64_t block_table_stride = 0;
  const int32_t* cu_q = nullptr;    // [B + 1]
  const int32_t* kv_len = nullptr;  // [B]
  int32_t num_requests = 0;
  int64_t num_tokens = 0;  // T
  int32_t num_heads = 0;
  int32_t nope_dim = 0;  // dn
  int32_t v_dim = 0;     // dv
  // Per head W_UK [dn, R] and W_UV [dv, R], each packed as nn/linear.h describes; head_stride in
  // elements.
  const void* w_uk = nullptr;
  const void* w_uv = nullptr;
  int64_t w_uk_head_stride = 0;
  int64_t w_uv_head_stride = 0;
  DType w_dtype = DType::kBFloat16;
  float scale = 0.0f;
  void* out = nullptr;     // [T, H, dv]
  float* stats = nullptr;  // [T, H, 2], or null
};

// Merges two normalised partials row by row (weights in core/softmax_stats.h); a term of weight 0
// is skipped.
struct MergeStatesParams {
  const void* o_a = nullptr;       // [num_rows, width]
  const void* o_b = nullptr;       // [num_rows, width]
  const float* stats_a = nullptr;  // [num_rows, 2]
  const float* stats_b = nullptr;  // [num_rows, 2]
  void* out = nullptr;             // [num_rows, width]; may be o_a or o_b
  float* stats = nullptr;          // [num_rows, 2]; may be stats_a or stats_b
  DType dtype = DType::kBFloat16;
  int64_t num_rows = 0;
  int64_t width = 0;
};

}  // namespace helicore::attention
