// Row-wise entries (append, rope, absorb, project, merge); decode.cpp and prefill.cpp hold the
// attention proper.
#include "helicore/attention/mla.h"

#include "helicore/attention/checks.h"
#include "helicore/attention/cpu/kernels.h"
#include "helicore/nn/linear.h"
#include "helicore/nn/parallel.h"

namespace helicore::attention {
namespace {

// Columns [begin, begin + size) of the last dimension.
TensorView columns(const TensorView& t, int64_t begin, int64_t size) {
  TensorView part = t;
  part.data = static_cast<char*>(t.data) + begin * static_cast<int64_t>(size_of(t.dtype));
  part.shape[t.ndim - 1] = size;
  return part;
}

void check_queries(const TensorView& q, const char* where, const char* name) {
  check_shape(q, {-1, -1, -1}, where, name);
  nn::check_float_rows(q, where, name);
  HELICORE_CHECK(q.size(1) >= 1 && q.size(1) <= 4096, where, name,
                 " must have 1 to 4096 heads, got ", q.describe());
}

void run_rope(const TensorView& in, const TensorView& out, const RopeTable& rope,
              const TensorView* positions) {
  RopeRowsParams p;
  p.in = in.data;
  p.out = out.data;
  p.in_row_stride = in.stride(0);
  p.in_head_stride = in.stride(1);
  p.out_row_stride = out.stride(0);
  p.out_head_stride = out.stride(1);
  p.dtype = in.dtype;
  p.rope = rope;
  p.positions = positions == nullptr ? nullptr : positions->ptr<const int32_t>();
  p.num_tokens = in.size(0);
  p.num_heads = static_cast<int32_t>(in.size(1));
  nn::for_row_chunks(p.num_tokens, 1.0 * p.num_heads * rope.dim, [&](int64_t begin, int64_t end) {
    HELICORE_DISPATCH_ISA(rope_rows(p, begin, end));
  });
}

}  // namespace

void mla_append(const MlaAppendArgs& args) {
  constexpr const char* kWhere = "attention.mla_append";
  MlaAppendParams p;
  p.cache = make_mla_cache(args.cache, args.kv_lora_rank, kWhere, args.coding);
  nn::check_float_rows(args.kv_a, kWhere, "kv_a");
  check_shape(args.kv_a, {-1, p.cache.width()}, kWhere, "kv_a");
  p.num_tokens = args.kv_a.size(0);
  if (p.num_tokens == 0) return;
  p.kv_a = args.kv_a.data;
  p.kv_a_stride = args.kv_a.stride(0);
  p.kv_a_dtype = args.kv_a.dtype;
  if (args.norm_weight != nullptr) {
    nn::check_float_rows(*args.norm_weight, kWhere, "norm_weight");
    check_shape(*args.norm_weight, {args.kv_lora_rank}, kWhere, "norm_weight");
    p.norm_weight = args.norm_weight->data;
    p.norm_dtype = args.norm_weight->dtype;
    HELICORE_CHECK(args.eps >= 0.0f && args.eps < 1.0f, kWhere, "eps must be in [0, 1), got ",
                   args.eps);
    p.eps = args.eps;
  }
  p.rope = check_rope(args.cos_sin, args.positions, p.num_tokens, p.cache.rope_dim,
                      args.interleaved, kWhere);
  if (p.rope.cos_sin != nullptr) p.positions = args.positions->ptr<const int32_t>();
  nn::check_plain(args.slots, DType::kInt64, kWhere, "slots");
  check_shape(args.slots, {p.num_tokens}, kWhere, "slots");
  p.slots = args.slots.ptr<const int64_t>();
  const int64_t num_slots = p.cache.num_pages * p.cache.page_size;
  for (int64_t t = 0; t < p.num_tokens; ++t) {
    HELICORE_CHECK(p.slots[t] >= -1 && p.slots[t] < num_slots, kWhere, "slots must be in -1..",
                   num_slots - 1, ", got ", p.slots[t], " at token ", t);
  }
  const double row_ns = 20.0 + 0.2 * static_cast<double>(p.cache.width());
  nn::for_row_chunks(p.num_tokens, row_ns, [&](int64_t begin, int64_t end) {
    HELICORE_DISPATCH_ISA(mla_append_rows(p, begin, end));
  });
}

void mla_absorb(const MlaAbsorbArgs& args) {
  constexpr const char* kWhere = "attention.mla_absorb";
  check_queries(args.q, kWhere, "q");
  check_queries(args.fused_q, kWhere, "fused_q");
  const int64_t rank = args.kv_lora_rank;
  check_width(rank, 4, kWhere, "kv_lora_rank");
  const int64_t rope_dim = args.fused_q.size(2) - rank;
  const int64_t nope_dim = args.q.size(2) - rope_dim;
  check_width(rope_dim, 0, kWhere, "rope width (fused_q width - kv_lora_rank)");
  check_width(nope_dim, 4, kWhere, "nope width (q width - rope width)");
  check_shape(args.fused_q, {args.q.size(0), args.q.size(1), rank + rope_dim}, kWhere, "fused_q");
  check_dtype(args.fused_q, args.q.dtype, kWhere, "fused_q");
  const RopeTable rope =
      check_rope(args.cos_sin, args.positions, args.q.size(0), rope_dim, args.interleaved, kWhere);
  if (args.q.size(0) == 0) return;
  nn::batched_linear(columns(args.q, 0, nope_dim), args.w_absorb, columns(args.fused_q, 0, rank));
  if (rope_dim > 0) {
    run_rope(columns(args.q, nope_dim, rope_dim), columns(args.fused_q, rank, rope_dim), rope,
             args.positions);
  }
}

void mla_project_v(const TensorView& o_lat, const TensorView& w_uv, const TensorView& out) {
  constexpr const char* kWhere = "attention.mla_project_v";
  check_queries(o_lat, kWhere, "o_lat");
  const int64_t heads = o_lat.size(1);
  check_shape(out, {o_lat.size(0), -1}, kWhere, "out");
  nn::check_float_rows(out, kWhere, "out");
  HELICORE_CHECK(out.size(1) % heads == 0, kWhere, "out must have a multiple of ", heads,
                 " columns, got ", out.describe());
  if (o_lat.size(0) == 0) return;
  TensorView per_head = out;
  per_head.ndim = 3;
  per_head.shape = {out.size(0), heads, out.size(1) / heads};
  per_head.strides = {out.stride(0), out.size(1) / heads, 1};
  nn::batched_linear(o_lat, w_uv, per_head);
}

void rope_q(const TensorView& q, const TensorView& positions, const TensorView& cos_sin,
            bool interleaved) {
  constexpr const char* kWhere = "attention.rope_q";
  check_queries(q, kWhere, "q");
  check_shape(cos_sin, {-1, -1}, kWhere, "cos_sin");
  const int64_t rope_dim = cos_sin.size(1);
  HELICORE_CHECK(rope_dim % 4 == 0 && rope_dim <= q.size(2), kWhere,
                 "cos_sin must have a multiple of 4 columns, at most the width of q, got ",
                 cos_sin.describe(), " for q ", q.describe());
  const RopeTable rope = check_rope(&cos_sin, &positions, q.size(0), rope_dim, interleaved, kWhere);
  if (q.size(0) == 0 || rope_dim == 0) return;
  const TensorView part = columns(q, q.size(2) - rope_dim, rope_dim);
  run_rope(part, part, rope, &positions);
}

void merge_states(const MergeStatesArgs& args) {
  constexpr const char* kWhere = "attention.merge_states";
  nn::check_float_rows(args.o_a, kWhere, "o_a");
  HELICORE_CHECK(args.o_a.ndim >= 1, kWhere, "o_a must have at least one dimension, got ",
                 args.o_a.describe());
  MergeStatesParams p;
  p.dtype = args.o_a.dtype;
  p.width = args.o_a.size(-1);
  p.num_rows = p.width == 0 ? 0 : args.o_a.numel() / p.width;
  const TensorView* outputs[] = {&args.o_a, &args.o_b, &args.out};
  const char* output_names[] = {"o_a", "o_b", "out"};
  for (int i = 0; i < 3; ++i) {
    nn::check_plain(*outputs[i], p.dtype, kWhere, output_names[i]);
    HELICORE_CHECK(outputs[i]->ndim == args.o_a.ndim && outputs[i]->shape == args.o_a.shape, kWhere,
                   output_names[i], " must have the shape of o_a ", args.o_a.describe(), ", got ",
                   outputs[i]->describe());
  }
  const TensorView* stats[] = {&args.stats_a, &args.stats_b, &args.stats};
  const char* stats_names[] = {"stats_a", "stats_b", "stats"};
  for (int i = 0; i < 3; ++i) {
    nn::check_plain(*stats[i], DType::kFloat32, kWhere, stats_names[i]);
    HELICORE_CHECK(
        stats[i]->ndim >= 1 && stats[i]->size(-1) == 2 && stats[i]->numel() == p.num_rows * 2,
        kWhere, stats_names[i], " must be [", p.num_rows, " rows, 2], got ", stats[i]->describe());
  }
  if (p.num_rows == 0) return;
  p.o_a = args.o_a.data;
  p.o_b = args.o_b.data;
  p.out = args.out.data;
  p.stats_a = args.stats_a.ptr<const float>();
  p.stats_b = args.stats_b.ptr<const float>();
  p.stats = args.stats.ptr<float>();
  const double row_ns = 10.0 + 0.1 * static_cast<double>(p.width);
  nn::for_row_chunks(p.num_rows, row_ns, [&](int64_t begin, int64_t end) {
    HELICORE_DISPATCH_ISA(merge_state_rows(p, begin, end));
  });
}

}  // namespace helicore::attention
