// The fused norm and quantiser of quant/norm_epilogue.h on CUDA tensors: the same roundings, the
// sum of squares in another order. Work is queued on `stream`; nothing allocates or synchronises.
// In a build without CUDA it throws NotSupported.
#pragma once

#include "helicore/quant/cuda/epilogue_params.h"

namespace helicore::quant::cuda {

using Stream = void*;  // a cudaStream_t; null is the default stream

inline constexpr int64_t kMaxRowBytes = 65536;  // of x: what a block holds in registers

// As make_epilogue() and apply_epilogue(); x [T, H] may be the norm or residual_out. Throws
// InvalidArgument naming the tensor, or `x` for a row of more than kMaxRowBytes.
void norm_quantize(AllReduceFusion fusion, const TensorView& x, const NormEpilogueTensors& tensors,
                   Stream stream);

// Throws InvalidArgument naming `x` when its rows are too long, or it is not on a GPU.
void check_rows(const TensorView& x, const char* where);

// How a row is spread.
struct RowShape {
  int threads = 0;  // of a block
  int packets = 0;  // that a thread holds: 1, 2 or 8
  int cluster = 1;  // blocks of a row: 1, 2, 4 or 8; 1 unless `packets` is 1
};
// For `rows` rows at once, with `max_blocks` multiprocessors to spread them over.
[[nodiscard]] RowShape row_shape(const EpilogueParams& params, DType dtype, int64_t rows,
                                 int max_blocks) noexcept;

void launch_norm_quantize(const EpilogueParams& params, const void* x, DType dtype,
                          const RowShape& shape, Stream stream);

}  // namespace helicore::quant::cuda
