// Linear layers on the CPU over packed weights: y = x W^T (+ bias) (+ residual), fp32 accumulation.
//
// Packed format. The N output features are cut into blocks of 16; K is the number of input
// features:
//   bfloat16: [ceil(N/16)][ceil(K/2)][16][2]  two consecutive k of one output feature side by side
//   float32:  [ceil(N/16)][K][16]
// Rows past N and the odd k past K are zero. A weight of two halves (gate rows, then up rows) is
// packed with groups = 2: each half is padded to whole blocks by itself, so that block j of gate
// meets block j of up. Leading dimensions (experts, heads) are kept in front.
//
// Every output element is one chain of products in ascending k, whatever the number of rows, the
// number of threads or the tile: the bits of a row do not depend on the rows computed with it.
#pragma once

#include <cstdint>

#include "helicore/core/tensor_view.h"
#include "helicore/core/types.h"

namespace helicore::nn {

inline constexpr int64_t kPackBlock = 16;  // output features of one packed block

// One packed matrix of N output and K input features; `data` is its first block.
struct PackedWeight {
  const void* data = nullptr;
  DType dtype = DType::kBFloat16;  // bfloat16 or float32
  int64_t out_features = 0;        // N
  int64_t in_features = 0;         // K

  // Elements from one block of 16 output features to the next.
  [[nodiscard]] int64_t block_stride() const noexcept {
    return dtype == DType::kBFloat16 ? (in_features + 1) / 2 * 32 : in_features * 16;
  }
  [[nodiscard]] int64_t num_blocks() const noexcept {
    return (out_features + kPackBlock - 1) / kPackBlock;
  }
};

// Elements of the packed form of one [N, K] matrix whose rows come in `groups` equal parts.
[[nodiscard]] int64_t packed_numel(DType dtype, int64_t out_features, int64_t in_features,
                                   int64_t groups = 1);

// Packs weight [..., N, K] (rows may be strided) into packed [..., blocks, pairs of k, 16, 2] or
// [..., blocks, K, 16]; both of one dtype, N divisible by `groups`. In parallel over matrices and
// blocks.
void pack_linear(const TensorView& weight, const TensorView& packed, int64_t groups = 1);

// The inverse: packed -> weight [..., N, K]. For checks and for models that need the plain matrix
// again.
void unpack_linear(const TensorView& packed, const TensorView& weight, int64_t groups = 1);

// Describes `packed` (as pack_linear writes it, no leading dimensions) for N outputs and K inputs;
// throws InvalidArgument naming `name` when the shape does not fit.
[[nodiscard]] PackedWeight packed_weight(const TensorView& packed, int64_t out_features,
                                         int64_t in_features, const char* where, const char* name,
                                         int64_t groups = 1);

enum class Activation : uint8_t {
  kNone = 0,
  kSiluMul =
      1,  // out = silu(gate) * up; the weight is packed with groups = 2 and N counts both halves
};

// One matrix product. x and out rows are contiguous in their last dimension; strides are in
// elements.
struct LinearParams {
  const void* x = nullptr;  // [num_rows, K], bfloat16 or float32
  int64_t x_stride = 0;
  const int32_t* row_index = nullptr;  // [num_rows] rows of x to read, or null for 0, 1, 2, ...
  int64_t num_rows = 0;                // T
  PackedWeight weight;                 // [N, K]
  const void* bias = nullptr;          // [N] bias_dtype, or null; not with kSiluMul
  const void* residual = nullptr;  // [num_rows, N] in out_dtype, added last, may be `out`; or null
  int64_t residual_stride = 0;
  void* out = nullptr;  // [num_rows, N], or [num_rows, N/2] with kSiluMul
  int64_t out_stride = 0;
  DType x_dtype = DType::kBFloat16;
  DType out_dtype = DType::kBFloat16;  // bfloat16 or float32; one rounding
  DType bias_dtype = DType::kFloat32;
  Activation activation = Activation::kNone;
};

// In parallel on default_pool(): over blocks of N for few rows, over (rows, blocks) tiles for many.
void linear(const LinearParams& params);

// The same on the calling thread only, for output blocks [block_begin, block_end) (blocks of 16
// columns of `out`): the piece that other kernels call from within their own parallel regions. No
// checks.
void linear_blocks(const LinearParams& params, int64_t block_begin, int64_t block_end);

// One product per head: out[t, h] = x[t, h] W[h]^T.
struct BatchedLinearParams {
  const void* x = nullptr;  // [num_rows, num_heads, K]
  int64_t x_row_stride = 0;
  int64_t x_head_stride = 0;
  int64_t num_rows = 0;
  int64_t num_heads = 0;
  PackedWeight weight;  // head 0; head h lies h * weight_head_stride elements further
  int64_t weight_head_stride = 0;
  void* out = nullptr;  // [num_rows, num_heads, N]
  int64_t out_row_stride = 0;
  int64_t out_head_stride = 0;
  DType x_dtype = DType::kBFloat16;
  DType out_dtype = DType::kBFloat16;
};

// In parallel over heads and row chunks.
void batched_linear(const BatchedLinearParams& params);

// One head of it on the calling thread, all rows. No checks.
void batched_linear_head(const BatchedLinearParams& params, int64_t head);

// Public entries over tensors; check shapes and dtypes, then call the above.
// x [T, K], packed, out [T, N] (or [T, N/2]), bias [N] or null, residual like out or null.
struct LinearTensors {
  TensorView x;
  TensorView packed;
  TensorView out;
  const TensorView* bias = nullptr;
  const TensorView* residual = nullptr;
  int64_t out_features = 0;
  Activation activation = Activation::kNone;
};
void linear(const LinearTensors& tensors);

// x [T, H, K], packed [H, ...], out [T, H, N].
void batched_linear(const TensorView& x, const TensorView& packed, const TensorView& out);

}  // namespace helicore::nn
