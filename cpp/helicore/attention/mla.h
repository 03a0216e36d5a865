// Latent attention (MLA) over a paged cache: the checked entries.
//
// Each function checks shapes, dtypes and every index that it will follow (page ids below a
// request's length, slots, positions), throws InvalidArgument naming the argument, and runs the
// kernel on default_pool(). Tensors are contiguous unless said otherwise; symbols are those of
// mla_params.h. Zero tokens or requests return at once.
//
// Results do not depend on the number of threads, nor on which other requests share the call: a
// row's bits are the same alone and in a batch.
#pragma once

#include <cstdint>

#include "helicore/attention/mla_params.h"
#include "helicore/attention/planner.h"
#include "helicore/core/tensor_view.h"

namespace helicore::attention {

// Describes `pages` [num_pages, page_size, R + dr], bfloat16 or float32, or uint8 [num_pages,
// page_size, row_bytes] of a quantised format; the first dimension may be strided (pages of one
// layer inside a pool slot). Throws InvalidArgument with `where` as prefix.
[[nodiscard]] MlaCache make_mla_cache(const TensorView& pages, int64_t kv_lora_rank,
                                      const char* where, const CacheCoding& coding = {});

struct MlaAppendArgs {
  TensorView kv_a;                          // [T, R + dr], bfloat16 or float32; rows may be strided
  TensorView cache;                         // [num_pages, page_size, R + dr], or as the coding says
  TensorView slots;                         // [T] int64; -1 = write nothing
  int64_t kv_lora_rank = 0;                 // R
  const TensorView* positions = nullptr;    // [T] int32; needed with cos_sin
  const TensorView* cos_sin = nullptr;      // [max_pos, dr] float32; null: k_r is copied as it is
  const TensorView* norm_weight = nullptr;  // [R]; null: c is copied as it is
  float eps = 1e-6f;
  bool interleaved = true;  // order of the raw k_r (RopeTable)
  CacheCoding coding = {};
};
// RMS norm of c, rope of k_r, write to the slot of each token, quantised where the cache is: from
// float32, saturating, NaN as 0. Two tokens must not share a slot.
void mla_append(const MlaAppendArgs& args);

struct MlaAbsorbArgs {
  TensorView q;                           // [T, H, dn + dr], rope part not rotated
  TensorView w_absorb;                    // per head W_UK^T [R, dn], packed (nn/linear.h): [H, ...]
  TensorView fused_q;                     // [T, H, R + dr], written
  const TensorView* positions = nullptr;  // [T] int32
  const TensorView* cos_sin = nullptr;    // [max_pos, dr] float32; null: q_r is copied as it is
  bool interleaved = true;
  int64_t kv_lora_rank = 0;  // R
};
// fused_q = concat(q_n W_UK[h], rope(q_r)): the query of absorbed attention.
void mla_absorb(const MlaAbsorbArgs& args);

// out [T, H * dv] = o_lat [T, H, R] times W_UV[h]^T, packed [H, ...] per head.
void mla_project_v(const TensorView& o_lat, const TensorView& w_uv, const TensorView& out);

// Rotates q[t, h, dn:] in place: the query of mla_prefill. q [T, H, dn + dr], cos_sin [max_pos,
// dr].
void rope_q(const TensorView& q, const TensorView& positions, const TensorView& cos_sin,
            bool interleaved);

struct MlaDecodeArgs {
  TensorView q;                          // [T, H, R + dr], bfloat16 or float32
  TensorView cache;                      // [num_pages, page_size, R + dr], or as the coding says
  TensorView block_table;                // [B, max_pages] int32; rows may be strided
  TensorView cu_q;                       // [B + 1] int32, cu_q[0] = 0, cu_q[B] = T
  TensorView kv_len;                     // [B] int32
  float scale = 0.0f;                    // sigma > 0
  TensorView out;                        // [T, H, R], dtype of q, written
  const TensorView* kv_bound = nullptr;  // [T] int32: tokens each query sees; null: causal
  const TensorView* stats = nullptr;     // [T, H, 2] float32, written
  CacheCoding coding = {};
};
// Absorbed attention with packed ragged queries; see MlaDecodeParams.
void mla_decode(const MlaDecodeArgs& args);

struct MlaPrefillArgs {
  TensorView q;              // [T, H, dn + dr], rope part rotated (rope_q)
  TensorView cache;          // [num_pages, page_size, R + dr], holds all kv_len tokens
  TensorView block_table;    // [B, max_pages] int32; rows may be strided
  TensorView cu_q;           // [B + 1] int32
  TensorView kv_len;         // [B] int32
  TensorView w_uk;           // per head W_UK [dn, R], packed: [H, ...]
  TensorView w_uv;           // per head W_UV [dv, R], packed: [H, ...]
  int64_t kv_lora_rank = 0;  // R
  float scale = 0.0f;
  TensorView out;                     // [T, H * dv], dtype of q, written
  const TensorView* stats = nullptr;  // [T, H, 2] float32, written
  CacheCoding coding = {};
};
// Expanded causal attention of query tokens whose latents, and all before them, are in the cache.
void mla_prefill(const MlaPrefillArgs& args);

struct MergeStatesArgs {
  TensorView o_a;      // [..., width], bfloat16 or float32
  TensorView stats_a;  // [..., 2] float32
  TensorView o_b;
  TensorView stats_b;
  TensorView out;    // written; may be o_a or o_b
  TensorView stats;  // written; may be stats_a or stats_b
};
// The state of the union of two disjoint sets of keys. Both empty: (0, -inf, 0).
void merge_states(const MergeStatesArgs& args);

}  // namespace helicore::attention
