// What follows a sum over ranks, row by row: residual, RMS norm, quantisation. The members of
// AllReduceFusion are described by traits; nothing else lists them.
//
// Rounding, T being float32 or bfloat16: x is a sum that was rounded to T;
//   s = round_T(x + residual)               residual_out = s
//   r = 1 / sqrt(sum_i s_i^2 / H + eps)     squares and sum in float32, 16 running sums by column
//                                           modulo 16, added in ascending order
//   norm = round_T(s * r * weight)          the products from left to right
// and codes are those of the rounded norm. The bits do not depend on threads or other rows.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

#include "helicore/core/tensor_view.h"
#include "helicore/quant/row_quantize.h"

namespace helicore::quant {

enum class AllReduceFusion : uint8_t {
  kNone = 0,
  kRmsNorm,
  kResidualRmsNorm,
  kResidualRmsNormFp8,        // one scale, given
  kResidualRmsNormFp8Token,   // a scale for each token
  kResidualRmsNormFp8Block,   // 1 x 128 float32 scales, in columns
  kResidualRmsNormFp8Packed,  // 1 x 128 UE8M0 scales, in columns
  kResidualRmsNormNvFp4,      // scales swizzled
  kResidualRmsNormNvFp4Rows,  // scales in rows
  kResidualRmsNormMxFp8,      // scales swizzled
};
inline constexpr int kNumAllReduceFusions = 10;

struct FusionTraits {
  std::string_view name;  // snake_case, as Python spells it
  bool has_norm = false;
  bool has_residual = false;  // needed exactly then
  std::optional<RowFormat> format;
  ScaleLayout layout = ScaleLayout::kRows;
};
[[nodiscard]] const FusionTraits& traits_of(AllReduceFusion fusion) noexcept;

// Rows of one call. Pointers as the traits say; the rest null.
struct NormEpilogue {
  DType dtype = DType::kBFloat16;  // T: of x, residual, weight and norm
  int64_t width = 0;               // H
  const void* residual = nullptr;  // [T, H]
  void* residual_out = nullptr;    // [T, H], may be `residual`
  const void* weight = nullptr;    // [H]
  float eps = 1e-6f;
  void* norm = nullptr;  // [T, H], or null where only codes are wanted
  std::optional<RowQuantizer> quantizer;

  // x [H], the row's sum; may be the row of `norm` or `residual_out`. scratch: 2 H floats.
  void apply(int64_t row, const void* x, float* scratch) const noexcept;
};

// Tensors of a call; all [T, H] are contiguous. Those that the fusion does not use are null.
struct NormEpilogueTensors {
  const TensorView* residual = nullptr;
  const TensorView* residual_out = nullptr;
  const TensorView* weight = nullptr;
  const TensorView* norm = nullptr;
  const TensorView* codes = nullptr;
  const TensorView* scales = nullptr;  // one-dimensional
  float scale = 1.0f;
  float eps = 1e-6f;
  int64_t leading_dim = 0;
};

// Checks tensors against the traits; throws InvalidArgument naming the one that is missing, not
// used, or misshapen. `x` is the sum, [T, H].
[[nodiscard]] NormEpilogue make_epilogue(AllReduceFusion fusion, const TensorView& x,
                                         const NormEpilogueTensors& tensors, const char* where);

// The epilogue of all rows of x. In parallel over rows.
void apply_epilogue(const NormEpilogue& epilogue, const TensorView& x);

}  // namespace helicore::quant
