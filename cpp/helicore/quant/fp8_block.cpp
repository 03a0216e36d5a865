#include "helicore/quant/fp8_block.h"

#include <algorithm>
#include <cmath>

#include "helicore/core/error.h"
#include "helicore/core/thread_pool.h"
#include "helicore/quant/cpu/row_kernels.h"
#include "helicore/quant/formats.h"

namespace helicore::quant {
namespace {

constexpr int64_t kRowsPerTask = 16;  // divides the block

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

void check_cpu(const TensorView& t, const char* where, const char* name) {
  HELICORE_CHECK(t.device.type == DeviceType::kCpu, where, name, " must be on the CPU, got ",
                 t.describe());
  check_row_major(t, where, name);
}

// codes, scales and values of one weight agree in shape and types.
void check_block_tensors(const TensorView& codes, const TensorView& scale_inv,
                         const TensorView& values, const char* where, const char* values_name) {
  check_shape(codes, {-1, -1}, where, "codes");
  check_cpu(codes, where, "codes");
  HELICORE_CHECK(codes.dtype == DType::kFloat8E4M3 || codes.dtype == DType::kUInt8, where,
                 "codes must be float8_e4m3fn or uint8, got ", codes.describe());
  const int64_t rows = codes.size(0);
  const int64_t columns = codes.size(1);
  check_shape(scale_inv, {ceil_div(rows, kFp8BlockSize), ceil_div(columns, kFp8BlockSize)}, where,
              "scale_inv");
  check_cpu(scale_inv, where, "scale_inv");
  check_dtype(scale_inv, DType::kFloat32, where, "scale_inv");
  check_shape(values, {rows, columns}, where, values_name);
  check_cpu(values, where, values_name);
  HELICORE_CHECK(values.dtype == DType::kFloat32 || values.dtype == DType::kBFloat16, where,
                 values_name, " must be float32 or bfloat16, got ", values.describe());
}

float value_at(const TensorView& w, int64_t row, int64_t column) {
  const int64_t i = row * w.stride(0) + column;
  return w.dtype == DType::kFloat32 ? w.ptr<float>()[i] : static_cast<float>(w.ptr<BFloat16>()[i]);
}

}  // namespace

void dequantize_fp8_block(const TensorView& w, const TensorView& scale_inv, const TensorView& out) {
  check_block_tensors(w, scale_inv, out, "quant.dequantize_fp8_block", "out");
  const int64_t rows = w.size(0);
  const int64_t columns = w.size(1);
  const auto out_size = static_cast<int64_t>(size_of(out.dtype));
  default_pool().parallel_for(ceil_div(rows, kRowsPerTask), [&](int64_t task) {
    for (int64_t r = task * kRowsPerTask; r < std::min(rows, (task + 1) * kRowsPerTask); ++r) {
      const float* scales = scale_inv.ptr<float>() + r / kFp8BlockSize * scale_inv.stride(0);
      const uint8_t* codes = w.ptr<uint8_t>() + r * w.stride(0);
      char* to = out.ptr<char>() + r * out.stride(0) * out_size;
      for (int64_t c = 0; c < columns; c += kFp8BlockSize) {
        const int64_t n = std::min(kFp8BlockSize, columns - c);
        HELICORE_DISPATCH_ISA(dequantize_kernel(codes + c, n, scales[c / kFp8BlockSize],
                                                to + c * out_size, out.dtype));
      }
    }
  });
}

void quantize_fp8_block(const TensorView& w, const TensorView& codes, const TensorView& scale_inv) {
  check_block_tensors(codes, scale_inv, w, "quant.quantize_fp8_block", "w");
  const int64_t block_columns = scale_inv.size(1);
  default_pool().parallel_for(scale_inv.size(0) * block_columns, [&](int64_t task) {
    const int64_t row = task / block_columns * kFp8BlockSize;
    const int64_t column = task % block_columns * kFp8BlockSize;
    const int64_t row_end = std::min(w.size(0), row + kFp8BlockSize);
    const int64_t column_end = std::min(w.size(1), column + kFp8BlockSize);
    float largest = 0.0f;
    for (int64_t r = row; r < row_end; ++r) {
      for (int64_t c = column; c < column_end; ++c) {
        largest = std::max(largest, std::abs(value_at(w, r, c)));
      }
    }
    const float scale = largest > 0.0f ? largest / kE4M3Max : 1.0f;
    scale_inv.ptr<float>()[task / block_columns * scale_inv.stride(0) + task % block_columns] =
        scale;
    for (int64_t r = row; r < row_end; ++r) {
      uint8_t* to = codes.ptr<uint8_t>() + r * codes.stride(0);
      for (int64_t c = column; c < column_end; ++c) {
        to[c] = encode_e4m3(value_at(w, r, c) / scale);
      }
    }
  });
}

}  // namespace helicore::quant
