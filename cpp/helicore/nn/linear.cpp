#include "helicore/nn/linear.h"

#include <algorithm>

#include "helicore/core/error.h"
#include "helicore/core/thread_pool.h"
#include "helicore/nn/checks.h"
#include "helicore/nn/cpu/linear_kernels.h"
#include "helicore/nn/parallel.h"

namespace helicore::nn {
namespace {

constexpr int64_t kRowsPerTask = 96;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Output blocks of a product: with a fused activation, those of one half.
int64_t output_blocks(const LinearParams& p) {
  const bool gated = p.activation == Activation::kSiluMul;
  return ceil_div(gated ? p.weight.out_features / 2 : p.weight.out_features, kPackBlock);
}

void run_blocks(const LinearParams& p, int64_t begin, int64_t end) {
  HELICORE_DISPATCH_ISA(linear_blocks_kernel(p, begin, end));
}

// A copy of `p` that computes rows [begin, end).
LinearParams rows_of(const LinearParams& p, int64_t begin, int64_t end) {
  LinearParams part = p;
  part.num_rows = end - begin;
  if (p.row_index != nullptr) {
    part.row_index = p.row_index + begin;
  } else {
    part.x = static_cast<const char*>(p.x) +
             begin * p.x_stride * static_cast<int64_t>(size_of(p.x_dtype));
  }
  const int64_t out_size = static_cast<int64_t>(size_of(p.out_dtype));
  part.out = static_cast<char*>(p.out) + begin * p.out_stride * out_size;
  if (p.residual != nullptr) {
    part.residual = static_cast<const char*>(p.residual) + begin * p.residual_stride * out_size;
  }
  return part;
}

}  // namespace

void linear_blocks(const LinearParams& params, int64_t block_begin, int64_t block_end) {
  run_blocks(params, block_begin, block_end);
}

void linear(const LinearParams& p) {
  if (p.num_rows == 0 || p.weight.out_features == 0) return;
  const int64_t blocks = output_blocks(p);
  if (!worth_a_region(product_ns(p.num_rows, p.weight.out_features, p.weight.in_features))) {
    return run_blocks(p, 0, blocks);
  }
  ThreadPool& pool = default_pool();
  const int threads = pool.num_threads();
  const int64_t row_tasks = ceil_div(p.num_rows, kRowsPerTask);
  const int64_t wanted = row_tasks >= 4 * threads ? 1 : ceil_div(4 * threads, row_tasks);
  // Whole groups of four blocks; few rows: one task per thread.
  const int64_t pieces = p.num_rows <= 8 ? threads : wanted;
  const int64_t step = std::max<int64_t>(4, ceil_div(ceil_div(blocks, pieces), 4) * 4);
  const int64_t block_tasks = ceil_div(blocks, step);
  pool.parallel_for(row_tasks * block_tasks, [&](int64_t task) {
    const int64_t row = task % row_tasks * kRowsPerTask;
    const int64_t block = task / row_tasks * step;
    const LinearParams part = rows_of(p, row, std::min(p.num_rows, row + kRowsPerTask));
    run_blocks(part, block, std::min(blocks, block + step));
  });
}

void batched_linear_head(const BatchedLinearParams& p, int64_t head) {
  LinearParams one;
  one.x = static_cast<const char*>(p.x) +
          head * p.x_head_stride * static_cast<int64_t>(size_of(p.x_dtype));
  one.x_stride = p.x_row_stride;
  one.num_rows = p.num_rows;
  one.weight = p.weight;
  one.weight.data = static_cast<const char*>(p.weight.data) +
                    head * p.weight_head_stride * static_cast<int64_t>(size_of(p.weight.dtype));
  one.out = static_cast<char*>(p.out) +
            head * p.out_head_stride * static_cast<int64_t>(size_of(p.out_dtype));
  one.out_stride = p.out_row_stride;
  one.x_dtype = p.x_dtype;
  one.out_dtype = p.out_dtype;
  run_blocks(one, 0, p.weight.num_blocks());
}

void batched_linear(const BatchedLinearParams& p) {
  if (p.num_rows == 0 || p.num_heads == 0) return;
  const int64_t out = p.num_heads * p.weight.out_features;
  if (!worth_a_region(product_ns(p.num_rows, out, p.weight.in_features))) {
    for (int64_t h = 0; h < p.num_heads; ++h) batched_linear_head(p, h);
    return;
  }
  const int64_t row_tasks = ceil_div(p.num_rows, kRowsPerTask);
  const int64_t x_size = static_cast<int64_t>(size_of(p.x_dtype));
  const int64_t out_size = static_cast<int64_t>(size_of(p.out_dtype));
  default_pool().parallel_for(p.num_heads * row_tasks, [&](int64_t task) {
    const int64_t row = task % row_tasks * kRowsPerTask;
    BatchedLinearParams part = p;
    part.num_rows = std::min(kRowsPerTask, p.num_rows - row);
    part.x = static_cast<const char*>(p.x) + row * p.x_row_stride * x_size;
    part.out = static_cast<char*>(p.out) + row * p.out_row_stride * out_size;
    batched_linear_head(part, task / row_tasks);
  });
}

void linear(const LinearTensors& t) {
  constexpr const char* kWhere = "nn.linear";
  check_shape(t.x, {-1, -1}, kWhere, "x");
  check_float_rows(t.x, kWhere, "x");
  const bool gated = t.activation == Activation::kSiluMul;
  const int64_t rows = t.x.size(0);
  const int64_t columns = gated ? t.out_features / 2 : t.out_features;
  check_shape(t.out, {rows, columns}, kWhere, "out");
  check_float_rows(t.out, kWhere, "out");
  LinearParams p;
  p.x = t.x.data;
  p.x_dtype = t.x.dtype;
  p.x_stride = t.x.stride(0);
  p.num_rows = rows;
  p.weight = packed_weight(t.packed, t.out_features, t.x.size(1), kWhere, "packed", gated ? 2 : 1);
  p.out = t.out.data;
  p.out_dtype = t.out.dtype;
  p.out_stride = t.out.stride(0);
  p.activation = t.activation;
  if (t.bias != nullptr) {
    HELICORE_CHECK(!gated, kWhere, "bias can't be combined with activation silu_mul");
    check_shape(*t.bias, {t.out_features}, kWhere, "bias");
    check_float_rows(*t.bias, kWhere, "bias");
    check_contiguous(*t.bias, kWhere, "bias");
    p.bias = t.bias->data;
    p.bias_dtype = t.bias->dtype;
  }
  if (t.residual != nullptr) {
    check_shape(*t.residual, {rows, columns}, kWhere, "residual");
    check_dtype(*t.residual, t.out.dtype, kWhere, "residual");
    check_cpu(*t.residual, kWhere, "residual");
    check_row_major(*t.residual, kWhere, "residual");
    p.residual = t.residual->data;
    p.residual_stride = t.residual->stride(0);
  }
  linear(p);
}

void batched_linear(const TensorView& x, const TensorView& packed, const TensorView& out) {
  constexpr const char* kWhere = "nn.batched_linear";
  check_shape(x, {-1, -1, -1}, kWhere, "x");
  check_float_rows(x, kWhere, "x");
  check_shape(out, {x.size(0), x.size(1), -1}, kWhere, "out");
  check_float_rows(out, kWhere, "out");
  check_contiguous(packed, kWhere, "packed");
  check_cpu(packed, kWhere, "packed");
  HELICORE_CHECK(packed.ndim >= 4 && packed.size(0) == x.size(1), kWhere,
                 "packed must have one matrix for each of ", x.size(1), " heads, got ",
                 packed.describe());
  TensorView head = packed;
  head.ndim -= 1;
  for (int d = 0; d < head.ndim; ++d) {
    head.shape[d] = packed.shape[d + 1];
    head.strides[d] = packed.strides[d + 1];
  }
  BatchedLinearParams p;
  p.x = x.data;
  p.x_dtype = x.dtype;
  p.x_row_stride = x.stride(0);
  p.x_head_stride = x.stride(1);
  p.num_rows = x.size(0);
  p.num_heads = x.size(1);
  p.weight = packed_weight(head, out.size(2), x.size(2), kWhere, "packed");
  p.weight_head_stride = packed.size(1) * p.weight.block_stride();
  p.out = out.data;
  p.out_dtype = out.dtype;
  p.out_row_stride = out.stride(0);
  p.out_head_stride = out.stride(1);
  batched_linear(p);
}

}  // namespace helicore::nn
