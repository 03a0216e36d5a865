#include "helicore/attention/cuda/entries.h"

#include <array>
#include <atomic>
#include <initializer_list>

#include "helicore/attention/checks.h"
#include "helicore/core/cuda/runtime.h"
#include "helicore/core/error.h"

namespace helicore::attention::cuda {
namespace {

struct NamedTensor {
  const TensorView* tensor;  // null is skipped
  const char* name;
};

// All tensors on the CUDA device of the first.
void check_device(std::initializer_list<NamedTensor> tensors, const char* where) {
  const NamedTensor& first = *tensors.begin();
  for (const NamedTensor& t : tensors) {
    if (t.tensor == nullptr) continue;
    HELICORE_CHECK(
        t.tensor->device.type == DeviceType::kCuda && t.tensor->device == first.tensor->device,
        where, t.name, " must be on the CUDA device of ", first.name, ", got ",
        t.tensor->describe(), " beside ", first.tensor->describe());
  }
}

// The same tensor with a CPU label, for shape checks that are shared with the CPU entries and read
// no element.
TensorView shape_of(const TensorView& t) {
  TensorView shape = t;
  shape.device = {};
  return shape;
}

void check_int32(const TensorView& t, std::initializer_list<int64_t> shape, const char* where,
                 const char* name) {
  check_dtype(t, DType::kInt32, where, name);
  check_shape(t, shape, where, name);
  check_row_major(t, where, name);
}

RopeTable rope_table(const TensorView* cos_sin, const TensorView* positions, int64_t num_tokens,
                     int64_t rope_dim, bool interleaved, const char* where) {
  RopeTable rope;
  if (rope_dim == 0) return rope;
  HELICORE_CHECK(cos_sin != nullptr && positions != nullptr, where,
                 "cos_sin and positions are needed when the rope width is ", rope_dim);
  check_dtype(*cos_sin, DType::kFloat32, where, "cos_sin");
  check_shape(*cos_sin, {-1, rope_dim}, where, "cos_sin");
  check_contiguous(*cos_sin, where, "cos_sin");
  check_int32(*positions, {num_tokens}, where, "positions");
  rope.cos_sin = cos_sin->ptr<const float>();
  rope.max_pos = cos_sin->size(0);
  rope.dim = static_cast<int32_t>(rope_dim);
  rope.interleaved = interleaved;
  return rope;
}

// What the choice of kernel and splits depends on; looked up once per device.
DecodeDevice decode_device(Device device) {
  constexpr int kMaxDevices = 64;
  constexpr int kMajorShift = 16;
  static std::array<std::atomic<int32_t>, kMaxDevices> known{};
  std::atomic<int32_t>& entry = known[static_cast<size_t>(device.index % kMaxDevices)];
  int32_t packed = entry.load(std::memory_order_relaxed);
  if (packed == 0) {
    const auto properties = helicore::cuda::device_properties(device.index);
    packed = properties.compute_major << kMajorShift | properties.num_sms;
    entry.store(packed, std::memory_order_relaxed);
  }
  return {.num_sms = packed & ((1 << kMajorShift) - 1), .compute_major = packed >> kMajorShift};
}

struct PreparedDecode {
  MlaDecodeParams params;
  int64_t max_kv_len = 0;
};

PreparedDecode prepare(const MlaDecodeArgs& args) {
  constexpr const char* kWhere = "attention.mla_decode";
  PreparedDecode out;
  MlaDecodeParams& p = out.params;
  check_shape(args.out, {-1, -1, -1}, kWhere, "out");
  const int64_t rank = args.out.size(2);
  check_device({{&args.q, "q"},
                {&args.cache, "cache"},
                {&args.block_table, "block_table"},
                {&args.cu_q, "cu_q"},
                {&args.kv_len, "kv_len"},
                {&args.out, "out"},
                {args.kv_bound, "kv_bound"},
                {args.stats, "stats"}},
               kWhere);
  p.cache = make_mla_cache(shape_of(args.cache), rank, kWhere, args.coding);
  check_shape(args.q, {-1, -1, p.cache.width()}, kWhere, "q");
  check_contiguous(args.q, kWhere, "q");
  p.num_tokens = args.q.size(0);
  p.num_heads = static_cast<int32_t>(args.q.size(1));
  check_shape(args.out, {p.num_tokens, p.num_heads, rank}, kWhere, "out");
  check_dtype(args.out, args.q.dtype, kWhere, "out");
  check_contiguous(args.out, kWhere, "out");
  check_scale(args.scale, kWhere);
  check_int32(args.kv_len, {-1}, kWhere, "kv_len");
  p.num_requests = static_cast<int32_t>(args.kv_len.size(0));
  check_int32(args.block_table, {p.num_requests, -1}, kWhere, "block_table");
  check_int32(args.cu_q, {int64_t{p.num_requests} + 1}, kWhere, "cu_q");
  if (args.kv_bound != nullptr) {
    check_int32(*args.kv_bound, {p.num_tokens}, kWhere, "kv_bound");
    p.kv_bound = args.kv_bound->ptr<const int32_t>();
  }
  if (args.stats != nullptr) {
    const TensorView stats = shape_of(*args.stats);
    p.stats = check_stats(&stats, p.num_tokens, p.num_heads, kWhere);
  }
  p.q = args.q.data;
  p.q_dtype = args.q.dtype;
  p.block_table = args.block_table.ptr<const int32_t>();
  p.block_table_stride = args.block_table.stride(0);
  p.cu_q = args.cu_q.ptr<const int32_t>();
  p.kv_len = args.kv_len.ptr<const int32_t>();
  p.scale = args.scale;
  p.out = args.out.data;
  out.max_kv_len = args.block_table.size(1) * p.cache.page_size;
  return out;
}

}  // namespace

void mla_append(const MlaAppendArgs& args, Stream stream) {
  constexpr const char* kWhere = "attention.mla_append";
  MlaAppendParams p;
  check_device({{&args.kv_a, "kv_a"},
                {&args.cache, "cache"},
                {&args.slots, "slots"},
                {args.positions, "positions"},
                {args.cos_sin, "cos_sin"},
                {args.norm_weight, "norm_weight"}},
               kWhere);
  p.cache = make_mla_cache(shape_of(args.cache), args.kv_lora_rank, kWhere, args.coding);
  check_shape(args.kv_a, {-1, p.cache.width()}, kWhere, "kv_a");
  check_row_major(args.kv_a, kWhere, "kv_a");
  p.num_tokens = args.kv_a.size(0);
  p.kv_a = args.kv_a.data;
  p.kv_a_stride = args.kv_a.stride(0);
  p.kv_a_dtype = args.kv_a.dtype;
  if (args.norm_weight != nullptr) {
    check_shape(*args.norm_weight, {args.kv_lora_rank}, kWhere, "norm_weight");
    check_contiguous(*args.norm_weight, kWhere, "norm_weight");
    p.norm_weight = args.norm_weight->data;
    p.norm_dtype = args.norm_weight->dtype;
    p.eps = args.eps;
  }
  HELICORE_CHECK(p.cache.rope_dim == 0 || args.cos_sin != nullptr, kWhere,
                 "cos_sin is needed on CUDA when the rope width is ", p.cache.rope_dim);
  p.rope = rope_table(args.cos_sin, args.positions, p.num_tokens, p.cache.rope_dim,
                      args.interleaved, kWhere);
  if (p.rope.cos_sin != nullptr) p.positions = args.positions->ptr<const int32_t>();
  check_dtype(args.slots, DType::kInt64, kWhere, "slots");
  check_shape(args.slots, {p.num_tokens}, kWhere, "slots");
  check_contiguous(args.slots, kWhere, "slots");
  p.slots = args.slots.ptr<const int64_t>();
  launch_mla_append(p, stream);
}

void gather_rows(const GatherRowsArgs& args, Stream stream) {
  constexpr const char* kWhere = "attention.gather_rows";
  check_device({{&args.out, "out"}, {&args.cache, "cache"}, {&args.pages, "pages"}}, kWhere);
  GatherRowsParams p;
  p.cache = make_mla_cache(shape_of(args.cache), args.kv_lora_rank, kWhere, args.coding);
  HELICORE_CHECK(p.cache.format != CacheFormat::kDense, kWhere,
                 "cache must be of a quantised format, got auto");
  check_shape(args.out, {-1, p.cache.width()}, kWhere, "out");
  check_contiguous(args.out, kWhere, "out");
  p.num_tokens = args.out.size(0);
  check_int32(args.pages, {-1}, kWhere, "pages");
  HELICORE_CHECK(args.pages.size(0) * p.cache.page_size >= p.num_tokens, kWhere, "pages must hold ",
                 p.num_tokens, " tokens, got ", args.pages.describe());
  p.pages = args.pages.ptr<const int32_t>();
  p.out = args.out.data;
  p.out_dtype = args.out.dtype;
  launch_gather_rows(p, stream);
}

void rope_q(const TensorView& q, const TensorView& positions, const TensorView& cos_sin,
            bool interleaved, Stream stream) {
  constexpr const char* kWhere = "attention.rope_q";
  check_device({{&q, "q"}, {&positions, "positions"}, {&cos_sin, "cos_sin"}}, kWhere);
  check_shape(q, {-1, -1, -1}, kWhere, "q");
  check_row_major(q, kWhere, "q");
  check_shape(cos_sin, {-1, -1}, kWhere, "cos_sin");
  const int64_t rope_dim = cos_sin.size(1);
  HELICORE_CHECK(rope_dim % 4 == 0 && rope_dim <= q.size(2), kWhere,
                 "cos_sin must have a multiple of 4 columns, at most the width of q, got ",
                 cos_sin.describe(), " for q ", q.describe());
  RopeRowsParams p;
  p.rope = rope_table(&cos_sin, &positions, q.size(0), rope_dim, interleaved, kWhere);
  p.in =
      static_cast<char*>(q.data) + (q.size(2) - rope_dim) * static_cast<int64_t>(size_of(q.dtype));
  p.out = const_cast<void*>(p.in);
  p.in_row_stride = p.out_row_stride = q.stride(0);
  p.in_head_stride = p.out_head_stride = q.stride(1);
  p.dtype = q.dtype;
  p.positions = positions.ptr<const int32_t>();
  p.num_tokens = q.size(0);
  p.num_heads = static_cast<int32_t>(q.size(1));
  launch_rope_rows(p, stream);
}

void merge_states(const MergeStatesArgs& args, Stream stream) {
  constexpr const char* kWhere = "attention.merge_states";
  MergeStatesParams p;
  p.dtype = args.o_a.dtype;
  HELICORE_CHECK(args.o_a.ndim >= 1, kWhere, "o_a must have at least one dimension, got ",
                 args.o_a.describe());
  p.width = args.o_a.size(-1);
  p.num_rows = p.width == 0 ? 0 : args.o_a.numel() / p.width;
  for (const NamedTensor& t :
       {NamedTensor{&args.o_a, "o_a"}, {&args.o_b, "o_b"}, {&args.out, "out"}}) {
    check_device({{&args.o_a, "o_a"}, t}, kWhere);
    check_dtype(*t.tensor, p.dtype, kWhere, t.name);
    check_contiguous(*t.tensor, kWhere, t.name);
    HELICORE_CHECK(t.tensor->numel() == args.o_a.numel() && t.tensor->size(-1) == p.width, kWhere,
                   t.name, " must have the shape of o_a ", args.o_a.describe(), ", got ",
                   t.tensor->describe());
  }
  for (const NamedTensor& t : {NamedTensor{&args.stats_a, "stats_a"},
                               {&args.stats_b, "stats_b"},
                               {&args.stats, "stats"}}) {
    check_device({{&args.o_a, "o_a"}, t}, kWhere);
    check_dtype(*t.tensor, DType::kFloat32, kWhere, t.name);
    check_contiguous(*t.tensor, kWhere, t.name);
    HELICORE_CHECK(t.tensor->numel() == p.num_rows * 2, kWhere, t.name, " must be [", p.num_rows,
                   " rows, 2], got ", t.tensor->describe());
  }
  p.o_a = args.o_a.data;
  p.o_b = args.o_b.data;
  p.out = args.out.data;
  p.stats_a = args.stats_a.ptr<const float>();
  p.stats_b = args.stats_b.ptr<const float>();
  p.stats = args.stats.ptr<float>();
  launch_merge_states(p, stream);
}

size_t decode_workspace_bytes(const MlaDecodeArgs& args, int32_t fixed_splits) {
  const PreparedDecode d = prepare(args);
  return plan_decode_splits(d.params, d.max_kv_len, decode_device(args.q.device), fixed_splits)
      .workspace_bytes;
}

void mla_decode(const MlaDecodeArgs& args, int32_t fixed_splits, const TensorView* workspace,
                Stream stream) {
  constexpr const char* kWhere = "attention.mla_decode";
  const PreparedDecode d = prepare(args);
  const DecodeSplits splits =
      plan_decode_splits(d.params, d.max_kv_len, decode_device(args.q.device), fixed_splits);
  void* memory = nullptr;
  if (splits.workspace_bytes > 0) {
    HELICORE_CHECK(workspace != nullptr, kWhere, "workspace of ", splits.workspace_bytes,
                   " bytes is needed for ", splits.num_splits, " splits");
    check_device({{&args.q, "q"}, {workspace, "workspace"}}, kWhere);
    check_dtype(*workspace, DType::kUInt8, kWhere, "workspace");
    check_contiguous(*workspace, kWhere, "workspace");
    HELICORE_CHECK(workspace->numel() >= static_cast<int64_t>(splits.workspace_bytes), kWhere,
                   "workspace must have at least ", splits.workspace_bytes, " bytes, got ",
                   workspace->describe());
    memory = workspace->data;
  }
  launch_mla_decode(d.params, splits, memory, stream);
}

}  // namespace helicore::attention::cuda
