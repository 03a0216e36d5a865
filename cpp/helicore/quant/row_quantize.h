// Quantising rows of activations: FP8 with a scale for the tensor, the token or a group of 128,
// NVFP4 and MXFP8, with the scale layouts that GEMMs read. docs/design/quantisers.md has the table.
//
// Every value is multiplied by the float32 reciprocal of its scale and rounded to the nearest code,
// ties to even; magnitudes beyond the largest code saturate, infinities too, and for a scale none
// counts as more than 2^127. NaN does not count for a scale; its FP8 code is NaN, its FP4 code 0.
// The bits do not depend on instruction set, threads or other rows.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "helicore/core/tensor_view.h"
#include "helicore/core/types.h"

namespace helicore::quant {

enum class RowFormat : uint8_t {
  kFp8Tensor = 0,       // e4m3, one scale that is given
  kFp8Token = 1,        // e4m3, float32 scale max(absmax, 2^-9) / 448 of each row
  kFp8Group = 2,        // e4m3, float32 scale max(absmax, 1e-4) / 448 of each 128 columns
  kFp8GroupPacked = 3,  // e4m3, the least power of two >= max(absmax / 448, 1e-10) of each 128
                        // columns; four exponents (UE8M0) in an int32
  kNvFp4 = 4,           // e2m1, e4m3 scale of each 16 columns, one float32 scale that is given
  kMxFp8 = 5,           // e4m3, the least power of two >= absmax / 448 of each 32 columns (E8M0)
};
[[nodiscard]] std::string_view name_of(RowFormat format) noexcept;

enum class ScaleLayout : uint8_t {
  kRows = 0,     // [T, groups], contiguous
  kColumns = 1,  // [T, groups] with strides (1, leading dimension); groups or words of four
  kSwizzled =
      2,  // 128 rows x 4 groups at a time, 512 bytes each; rows and groups padded with zeros
};
[[nodiscard]] std::string_view name_of(ScaleLayout layout) noexcept;

// How the rows of a matrix are coded.
struct RowCoding {
  RowFormat format = RowFormat::kFp8Token;
  ScaleLayout layout = ScaleLayout::kRows;
  // kFp8Tensor: a code times this is the value. kNvFp4: the global scale g, by convention 448 * 6 /
  // absmax of the tensor.
  float scale = 1.0f;
  // Of kColumns, at least T; 0 takes T rounded up to 4 (16 bytes). The last column is not padded.
  int64_t leading_dim = 0;
};

// Columns of a group; `width` for one scale of the row.
[[nodiscard]] int64_t group_size(RowFormat format, int64_t width) noexcept;

// Where the scales of T rows lie.
struct ScaleShape {
  DType dtype = DType::kFloat32;
  std::array<int64_t, 2> shape{};    // [T, groups], of kFp8GroupPacked [T, ceil(groups / 4)]
  std::array<int64_t, 2> strides{};  // in elements; of kSwizzled (0, 0): see swizzled_offset()
  int64_t num_elements = 0;          // to be allocated, padding included
};

// Throws InvalidArgument for a layout that the format does not have, a leading dimension below T,
// or a width that is no multiple of the group of kNvFp4 and kMxFp8.
[[nodiscard]] ScaleShape scale_shape(const RowCoding& coding, int64_t rows, int64_t width);

// Byte of row m, group k of K groups.
[[nodiscard]] constexpr int64_t swizzled_offset(int64_t m, int64_t k, int64_t num_groups) noexcept {
  const int64_t tile = m / 128 * ((num_groups + 3) / 4) + k / 4;
  return tile * 512 + m % 32 * 16 + m % 128 / 32 * 4 + k % 4;
}

// One matrix to be quantised, row by row, by any number of threads.
struct RowQuantizer {
  RowCoding coding;
  int64_t width = 0;         // H
  uint8_t* codes = nullptr;  // [T, H], of kNvFp4 [T, H / 2] with the first value in the low bits
  int64_t codes_stride = 0;  // bytes
  void* scales = nullptr;    // as scale_shape() says; null for kFp8Tensor
  ScaleShape scale_shape;

  // Zeros in all scales, padding included. Before the first row.
  void clear_scales() const noexcept;
  // x [H]
  void quantize(int64_t row, const float* x) const noexcept;
};

// Checks the tensors of a call on values [T, H], and takes their pointers.
[[nodiscard]] RowQuantizer make_row_quantizer(const TensorView& values, const RowCoding& coding,
                                              const TensorView& codes, const TensorView* scales,
                                              const char* where);

// codes uint8 or float8_e4m3 [T, H] (uint8 [T, H / 2]) and scales of x [T, H], float32 or bfloat16;
// rows of x may be strided. `scales` is one-dimensional with scale_shape().num_elements elements,
// or null for kFp8Tensor. Throws InvalidArgument naming the tensor. In parallel over rows.
void quantize_rows(const TensorView& x, const RowCoding& coding, const TensorView& codes,
                   const TensorView* scales);

// The way back, for checks and for tools: out [T, H] float32 = value of each code.
void dequantize_rows(const TensorView& codes, const TensorView* scales, const RowCoding& coding,
                     const TensorView& out);

}  // namespace helicore::quant
