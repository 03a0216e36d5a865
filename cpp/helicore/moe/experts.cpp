#include "helicore/moe/experts.h"

#include <algorithm>

#include "helicore/core/error.h"
#include "helicore/core/thread_pool.h"
#include "helicore/moe/cpu/finalize_kernels.h"
#include "helicore/moe/expert_sort.h"
#include "helicore/moe/workspace.h"
#include "helicore/nn/checks.h"
#include "helicore/nn/linear.h"
#include "helicore/nn/parallel.h"

namespace helicore::moe {
namespace {

constexpr int64_t kChunkRows = 2048;  // expanded rows of one chunk of tokens
constexpr int64_t kRowsPerTask = 96;  // rows of one expert in one task of the first product
constexpr int64_t kGroup = 4;         // blocks of 16 columns in one task
constexpr int64_t kColumns = kGroup * nn::kPackBlock;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One chunk of tokens and its memory.
struct Chunk {
  const void* x = nullptr;
  int64_t x_stride = 0;
  int64_t tokens = 0;
  const float* weights = nullptr;
  char* hidden = nullptr;         // [tokens * top_k, I] in dtype
  char* shared_hidden = nullptr;  // [tokens, I_shared] in dtype
  void* out = nullptr;
  int64_t out_stride = 0;
  DType dtype = DType::kBFloat16;
  ExpertSort sort;
};

// The packed matrices of all experts, one after the other.
struct Stack {
  nn::PackedWeight first;
  int64_t stride = 0;  // elements from expert to expert

  [[nodiscard]] nn::PackedWeight of(int64_t expert) const {
    nn::PackedWeight w = first;
    w.data =
        static_cast<const char*>(w.data) + expert * stride * static_cast<int64_t>(size_of(w.dtype));
    return w;
  }
};

// `packed` without its leading dimension, the experts.
TensorView first_of(const TensorView& packed, const char* where, const char* name) {
  HELICORE_CHECK(packed.ndim >= 1, where, name, " must be stacked over experts, got ",
                 packed.describe());
  check_contiguous(packed, where, name);
  TensorView one = packed;
  one.ndim -= 1;
  for (int d = 0; d < one.ndim; ++d) {
    one.shape[d] = packed.shape[d + 1];
    one.strides[d] = packed.strides[d + 1];
  }
  return one;
}

// A layer with its shapes checked; plain pointers from here on.
struct Layer {
  Stack w13, w2;
  nn::PackedWeight shared_w13, shared_w2;
  int64_t width = 0;  // D
  int64_t intermediate = 0, shared_intermediate = 0;
  int32_t num_experts = 0, top_k = 0;
};

Layer check_layer(const TensorView& x, const ExpertTensors& t, const TensorView& out,
                  const char* where) {
  check_shape(x, {-1, -1}, where, "x");
  nn::check_float_rows(x, where, "x");
  check_shape(out, {x.size(0), x.size(1)}, where, "out");
  nn::check_float_rows(out, where, "out");
  check_dtype(out, x.dtype, where, "out");
  HELICORE_CHECK(t.intermediate > 0, where, "intermediate must be > 0, got ", t.intermediate);
  Layer layer;
  layer.width = x.size(1);
  layer.intermediate = t.intermediate;
  const TensorView w13 = first_of(t.w13, where, "w13");
  const TensorView w2 = first_of(t.w2, where, "w2");
  layer.w13 = {nn::packed_weight(w13, 2 * t.intermediate, layer.width, where, "w13", 2),
               w13.numel()};
  layer.w2 = {nn::packed_weight(w2, layer.width, t.intermediate, where, "w2"), w2.numel()};
  layer.num_experts = static_cast<int32_t>(t.w13.size(0));
  HELICORE_CHECK(layer.num_experts >= 1 && layer.num_experts <= kMaxExperts &&
                     t.w2.size(0) == layer.num_experts,
                 where, "w13 and w2 must hold the same 1..", kMaxExperts, " experts, got ",
                 t.w13.size(0), " and ", t.w2.size(0));
  HELICORE_CHECK((t.shared_w13 != nullptr) == (t.shared_w2 != nullptr), where,
                 "shared_w13 and shared_w2 must be given together");
  if (t.shared_w13 != nullptr) {
    HELICORE_CHECK(t.shared_intermediate > 0, where, "shared_intermediate must be > 0, got ",
                   t.shared_intermediate);
    layer.shared_intermediate = t.shared_intermediate;
    layer.shared_w13 = nn::packed_weight(*t.shared_w13, 2 * t.shared_intermediate, layer.width,
                                         where, "shared_w13", 2);
    layer.shared_w2 =
        nn::packed_weight(*t.shared_w2, layer.width, t.shared_intermediate, where, "shared_w2");
  }
  return layer;
}

// A range of rows and the block of 16 columns that a task begins with.
struct Part {
  int64_t begin;
  int64_t end;
  int64_t block;
};

// The first product over rows of x (through `index` when given) into `hidden`.
void first_product(const Chunk& c, const nn::PackedWeight& weight, const int32_t* index,
                   char* hidden, const Part& part) {
  const auto element = static_cast<int64_t>(size_of(c.dtype));
  const int64_t intermediate = weight.out_features / 2;
  nn::LinearParams p;
  p.x = index != nullptr ? c.x : static_cast<const char*>(c.x) + part.begin * c.x_stride * element;
  p.x_stride = c.x_stride;
  p.row_index = index != nullptr ? index + part.begin : nullptr;
  p.num_rows = part.end - part.begin;
  p.weight = weight;
  p.out = hidden + part.begin * intermediate * element;
  p.out_stride = intermediate;
  p.x_dtype = c.dtype;
  p.out_dtype = c.dtype;
  p.activation = nn::Activation::kSiluMul;
  const int64_t blocks = ceil_div(intermediate, nn::kPackBlock);
  nn::linear_blocks(p, part.block, std::min(part.block + kGroup, blocks));
}

// Rough time of all second products on one thread.
double products_ns(const Layer& layer, const Chunk& c) {
  const int64_t rows = c.tokens * layer.top_k / std::max(1, c.sort.num_active);
  return c.sort.num_active * nn::product_ns(rows, layer.width, layer.intermediate) +
         nn::product_ns(c.tokens, layer.width, layer.shared_intermediate);
}

// Region 1: tasks are (active expert, group of blocks) and, for the shared expert, (rows, group of
// blocks).
void run_first(const Layer& layer, const Chunk& c) {
  const int64_t groups = ceil_div(layer.intermediate, kColumns);
  const int64_t shared_groups = ceil_div(layer.shared_intermediate, kColumns);
  const int64_t shared_rows = ceil_div(c.tokens, kRowsPerTask);
  const int64_t shared_tasks = shared_groups * shared_rows;
  const int64_t num_tasks = shared_tasks + groups * c.sort.num_active;
  nn::parallel_tasks(num_tasks, 2.0 * products_ns(layer, c), [&](int64_t task, int /*worker*/) {
    if (task < shared_tasks) {
      const int64_t begin = task % shared_rows * kRowsPerTask;
      return first_product(
          c, layer.shared_w13, nullptr, c.shared_hidden,
          {begin, std::min(c.tokens, begin + kRowsPerTask), task / shared_rows * kGroup});
    }
    task -= shared_tasks;
    const int32_t expert = c.sort.active[task / groups];
    first_product(c, layer.w13.of(expert), c.sort.row_token, c.hidden,
                  {c.sort.offsets[expert], c.sort.offsets[expert + 1], task % groups * kGroup});
  });
}

// The second product of rows [begin, end) of `hidden` for `columns` columns from part.block on, as
// fp32 rows of `results` that are kColumns apart.
void second_product(const nn::PackedWeight& weight, const Chunk& c, const char* hidden,
                    const Part& part, int64_t columns, float* results) {
  const auto element = static_cast<int64_t>(size_of(c.dtype));
  nn::LinearParams p;
  p.x = hidden + part.begin * weight.in_features * element;
  p.x_stride = weight.in_features;
  p.num_rows = part.end - part.begin;
  p.weight = weight;
  p.weight.data = static_cast<const char*>(weight.data) +
                  part.block * weight.block_stride() * static_cast<int64_t>(size_of(weight.dtype));
  p.weight.out_features = columns;
  p.out = results + part.begin * kColumns;
  p.out_stride = kColumns;
  p.x_dtype = c.dtype;
  p.out_dtype = DType::kFloat32;
  nn::linear_blocks(p, 0, ceil_div(columns, nn::kPackBlock));
}

// The sum over slots for a group of output columns.
void finalize(const Layer& layer, const Chunk& c, int64_t first, const float* results,
              const float* shared) {
  FinalizeParams f;
  f.rows = results;
  f.shared = shared;
  f.stride = kColumns;
  f.position = c.sort.position;
  f.weights = c.weights;
  f.tokens = c.tokens;
  f.top_k = layer.top_k;
  f.columns = std::min(kColumns, layer.width - first);
  f.out = static_cast<char*>(c.out) + first * static_cast<int64_t>(size_of(c.dtype));
  f.out_stride = c.out_stride;
  f.out_dtype = c.dtype;
  HELICORE_DISPATCH_ISA(finalize_kernel(f));
}

// Region 2: one task per group of output columns: all experts' second products, then the sum over
// slots.
void run_second(const Layer& layer, const Chunk& c) {
  const int64_t rows = c.tokens * layer.top_k;
  const bool has_shared = layer.shared_intermediate > 0;
  ThreadPool& pool = default_pool();
  const auto bytes =
      static_cast<size_t>((rows + (has_shared ? c.tokens : 0)) * kColumns) * sizeof(float);
  const int64_t num_tasks = ceil_div(layer.width, kColumns);
  nn::parallel_tasks(num_tasks, products_ns(layer, c), [&](int64_t task, int worker) {
    auto* results = static_cast<float*>(pool.scratch(worker, bytes));
    float* shared = has_shared ? results + rows * kColumns : nullptr;
    const int64_t columns = std::min(kColumns, layer.width - task * kColumns);
    for (int32_t i = 0; i < c.sort.num_active; ++i) {
      const int32_t expert = c.sort.active[i];
      second_product(layer.w2.of(expert), c, c.hidden,
                     {c.sort.offsets[expert], c.sort.offsets[expert + 1], task * kGroup}, columns,
                     results);
    }
    if (has_shared) {
      second_product(layer.shared_w2, c, c.shared_hidden, {0, c.tokens, task * kGroup}, columns,
                     shared);
    }
    finalize(layer, c, task * kColumns, results, shared);
  });
}

int64_t chunk_tokens(const Layer& layer, int64_t tokens) {
  return std::min(tokens, std::max<int64_t>(1, kChunkRows / layer.top_k));
}

// The memory of one chunk, taken from `carver`.
void carve_chunk(const Layer& layer, int64_t tokens, DType dtype, Carver* carver, Chunk* c) {
  const int64_t rows = tokens * layer.top_k;
  const int64_t element = static_cast<int64_t>(size_of(dtype));
  c->sort.offsets = carver->take<int32_t>(layer.num_experts + 1);
  c->sort.active = carver->take<int32_t>(layer.num_experts);
  c->sort.row_token = carver->take<int32_t>(rows);
  c->sort.position = carver->take<int32_t>(rows);
  c->hidden = carver->take<char>(rows * layer.intermediate * element);
  c->shared_hidden = carver->take<char>(tokens * layer.shared_intermediate * element);
}

void run_experts(const Layer& layer, const TensorView& x, const int32_t* ids, const float* weights,
                 const TensorView& out, Carver* carver) {
  const int64_t step = chunk_tokens(layer, x.size(0));
  const int64_t element = static_cast<int64_t>(size_of(x.dtype));
  Chunk c;
  carve_chunk(layer, step, x.dtype, carver, &c);
  c.x_stride = x.stride(0);
  c.out_stride = out.stride(0);
  c.dtype = x.dtype;
  for (int64_t begin = 0; begin < x.size(0); begin += step) {
    c.tokens = std::min(step, x.size(0) - begin);
    c.x = x.ptr<char>() + begin * c.x_stride * element;
    c.out = out.ptr<char>() + begin * c.out_stride * element;
    c.weights = weights + begin * layer.top_k;
    sort_by_expert(ids + begin * layer.top_k, c.tokens, layer.top_k, layer.num_experts, &c.sort);
    run_first(layer, c);
    run_second(layer, c);
  }
}

size_t experts_bytes(const Layer& layer, int64_t tokens, DType dtype) {
  Carver measure(nullptr);
  Chunk c;
  carve_chunk(layer, chunk_tokens(layer, tokens), dtype, &measure, &c);
  return measure.used();
}

}  // namespace

void moe_forward(const TensorView& x, const TensorView& ids, const TensorView& weights,
                 const ExpertTensors& experts, const TensorView& out) {
  constexpr const char* kWhere = "moe.moe_forward";
  Layer layer = check_layer(x, experts, out, kWhere);
  check_shape(ids, {x.size(0), -1}, kWhere, "ids");
  nn::check_plain(ids, DType::kInt32, kWhere, "ids");
  HELICORE_CHECK(ids.size(1) >= 1 && ids.size(1) <= kMaxTopK, kWhere, "ids must have 1..", kMaxTopK,
                 " columns, got ", ids.describe());
  check_shape(weights, {x.size(0), ids.size(1)}, kWhere, "weights");
  nn::check_plain(weights, DType::kFloat32, kWhere, "weights");
  layer.top_k = static_cast<int32_t>(ids.size(1));
  for (int64_t i = 0; i < ids.numel(); ++i) {
    const int32_t id = ids.ptr<int32_t>()[i];
    HELICORE_CHECK(id >= -1 && id < layer.num_experts, kWhere, "ids[", i / layer.top_k, ", ",
                   i % layer.top_k, "] must be in 0..", layer.num_experts - 1, ", got ", id);
  }
  if (x.size(0) == 0) return;
  ThreadPool& pool = default_pool();
  ThreadPool::Lease lease(pool);
  Carver carver(pool.shared_scratch(experts_bytes(layer, x.size(0), x.dtype) + 64));
  run_experts(layer, x, ids.ptr<int32_t>(), weights.ptr<float>(), out, &carver);
}

void moe_block(const TensorView& x, const MoeBlock& block, const TensorView& out) {
  constexpr const char* kWhere = "moe.moe_block";
  Layer layer = check_layer(x, block.experts, out, kWhere);
  check_route(x, block.gate, block.bias, block.router, kWhere);
  HELICORE_CHECK(block.router.num_experts == layer.num_experts, kWhere,
                 "w13 must hold the router's ", block.router.num_experts, " experts, got ",
                 layer.num_experts);
  layer.top_k = block.router.top_k;
  const int64_t tokens = x.size(0);
  if (tokens == 0) return;
  ThreadPool& pool = default_pool();
  ThreadPool::Lease lease(pool);
  const size_t experts = experts_bytes(layer, tokens, x.dtype);
  const auto routing = static_cast<size_t>(tokens * (2 * layer.top_k + layer.num_experts)) * 4;
  Carver carver(pool.shared_scratch(experts + routing + 512));
  auto* ids = carver.take<int32_t>(tokens * layer.top_k);
  auto* weights = carver.take<float>(tokens * layer.top_k);
  auto* logits = carver.take<float>(tokens * layer.num_experts);
  route_with(RouteArgs{&x, &block.gate, block.bias, &block.router, ids, weights}, logits);
  run_experts(layer, x, ids, weights, out, &carver);
}

}  // namespace helicore::moe
