// The rows of a fused call as a kernel takes them.
#pragma once

#include <cstdint>

#include "helicore/quant/norm_epilogue.h"
#include "helicore/quant/row_quantize.h"

namespace helicore::quant::cuda {

// Pointers are null where the fusion has no such tensor.
struct EpilogueParams {
  const void* residual = nullptr;
  void* residual_out = nullptr;
  const void* weight = nullptr;
  void* norm = nullptr;
  uint8_t* codes = nullptr;
  void* scales = nullptr;
  int64_t codes_stride = 0;  // bytes
  int64_t scale_ld = 0;      // of columns
  int64_t num_scales = 0;    // elements, of packed scales bytes, padding included
  int64_t num_rows = 0;
  int32_t num_groups = 0;
  int32_t width = 0;
  float scale = 1.0f;
  float eps = 0.0f;
  RowFormat format = RowFormat::kFp8Tensor;
  ScaleLayout layout = ScaleLayout::kRows;
  bool has_codes = false;
  bool has_byte_scales = false;
  bool has_padding = false;
  bool is_whole = false;  // rows are whole packets of 16 aligned bytes in every tensor
};

// Of an epilogue over [rows, width] tensors of the GPU.
[[nodiscard]] EpilogueParams make_params(const NormEpilogue& epilogue, int64_t rows);

}  // namespace helicore::quant::cuda
