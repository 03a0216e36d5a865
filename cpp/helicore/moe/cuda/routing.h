// Routing on CUDA tensors: which experts a token goes to, rows in the order of experts, and their
// weighted sum. Twins of moe/router.h and of the sort and the sum inside moe/experts.h.
//
// All tensors of a call are on one device and contiguous. Work is queued on `stream`; nothing
// allocates, synchronises or reads back, so a graph may capture it. In a build without CUDA each
// throws NotSupported.
#pragma once

#include <cstdint>

#include "helicore/core/tensor_view.h"
#include "helicore/moe/router.h"

namespace helicore::moe::cuda {

using Stream = void*;  // a cudaStream_t; null is the default stream

// As moe::select_experts: logits float32 [T, E] -> ids int32 [T, k], weights float32 [T, k].
void select_experts(const TensorView& logits, const TensorView* bias, const RouterConfig& config,
                    const TensorView& ids, const TensorView& weights, Stream stream);

// ids int32 [T, k] in [0, E) -> ends int32 [E], where the rows of each expert end; tokens int32
// [T * k], the token of each row; rows int32 [T, k], the row of each choice. The order of rows
// within an expert is arbitrary.
void sort_by_expert(const TensorView& ids, const TensorView& ends, const TensorView& tokens,
                    const TensorView& rows, Stream stream);

// out[t] = sum over j of weights[t, j] * y[rows[t, j]] (+ shared[t]), in float32, one rounding. y
// [T * k, D] and shared [T, D] in the dtype of out [T, D].
void combine(const TensorView& y, const TensorView& rows, const TensorView& weights,
             const TensorView* shared, const TensorView& out, Stream stream);

// The launches, with checked arguments.
struct SelectParams {
  const float* logits = nullptr;
  const float* bias = nullptr;  // or null
  int32_t* ids = nullptr;
  float* weights = nullptr;
  int64_t num_tokens = 0;
  RouterConfig config;
};
void launch_select(const SelectParams& params, Stream stream);

struct SortParams {
  const int32_t* ids = nullptr;
  int32_t* ends = nullptr;
  int32_t* tokens = nullptr;
  int32_t* rows = nullptr;
  int64_t num_choices = 0;  // T * k
  int32_t top_k = 0;
  int32_t num_experts = 0;
};
void launch_sort(const SortParams& params, Stream stream);

struct CombineParams {
  const void* y = nullptr;
  const int32_t* rows = nullptr;
  const float* weights = nullptr;
  const void* shared = nullptr;  // or null
  void* out = nullptr;
  int64_t num_tokens = 0;
  int32_t top_k = 0;
  int32_t width = 0;
  DType dtype = DType::kFloat32;
};
void launch_combine(const CombineParams& params, Stream stream);

}  // namespace helicore::moe::cuda
