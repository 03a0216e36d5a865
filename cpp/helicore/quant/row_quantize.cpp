#include "helicore/quant/row_quantize.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "helicore/core/error.h"
#include "helicore/core/thread_pool.h"
#include "helicore/quant/cpu/row_kernels.h"
#include "helicore/quant/formats.h"

namespace helicore::quant {
namespace {

constexpr int64_t kRowsPerTask = 8;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The largest magnitude, NaN not counted, and at most kLargestInput: 448 times a scale is finite.
float largest_of(const float* x, int64_t size) {
  float largest = 0.0f;
  for (int64_t i = 0; i < size; ++i) {
    const float magnitude = std::fabs(x[i]);
    largest = magnitude > largest ? magnitude : largest;
  }
  return std::min(largest, kLargestInput);
}

// Biased exponent of the least power of two that is not below `value`, in 0..254.
uint8_t exponent_up(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t exponent = (bits >> 23) + ((bits & 0x7fffffu) != 0 ? 1 : 0);
  return static_cast<uint8_t>(std::min(exponent, 254u));
}

// 2^-(exponent - 127), so that a product with it is a division by the scale.
float inverse_power(uint8_t exponent) { return std::ldexp(1.0f, 127 - exponent); }
float power(uint8_t exponent) { return std::ldexp(1.0f, exponent - 127); }

void encode_fp8(const float* x, int64_t size, float inverse, uint8_t* codes) {
  HELICORE_DISPATCH_ISA(quantize_e4m3(x, size, inverse, codes));
  for (int64_t i = 0; i < size; ++i) {
    if (std::isnan(x[i])) codes[i] = kE4M3Nan;
  }
}

bool has_layout(RowFormat format, ScaleLayout layout) {
  switch (format) {
    case RowFormat::kFp8Tensor:
    case RowFormat::kFp8Token:
      return layout == ScaleLayout::kRows;
    case RowFormat::kFp8Group:
      return layout != ScaleLayout::kSwizzled;
    case RowFormat::kFp8GroupPacked:
      return layout == ScaleLayout::kColumns;
    case RowFormat::kNvFp4:
    case RowFormat::kMxFp8:
      return layout != ScaleLayout::kColumns;
  }
  return false;
}

// Element of the scale of a group; of kFp8GroupPacked the byte.
int64_t scale_index(const ScaleShape& shape, const RowCoding& coding, int64_t row, int64_t group) {
  if (coding.layout == ScaleLayout::kSwizzled) return swizzled_offset(row, group, shape.shape[1]);
  if (coding.format == RowFormat::kFp8GroupPacked) {
    return (row + group / 4 * shape.strides[1]) * 4 + group % 4;
  }
  return row * shape.strides[0] + group * shape.strides[1];
}

bool is_byte_scale(RowFormat format) {
  return format == RowFormat::kNvFp4 || format == RowFormat::kMxFp8 ||
         format == RowFormat::kFp8GroupPacked;
}

// The value that a group's codes are multiplied by.
float group_scale(const RowCoding& coding, const void* scales, int64_t index) {
  switch (coding.format) {
    case RowFormat::kFp8Tensor:
      return coding.scale;
    case RowFormat::kFp8Token:
    case RowFormat::kFp8Group:
      return static_cast<const float*>(scales)[index];
    case RowFormat::kNvFp4:
      return decode_e4m3(static_cast<const uint8_t*>(scales)[index]) / coding.scale;
    case RowFormat::kFp8GroupPacked:
    case RowFormat::kMxFp8:
      return power(static_cast<const uint8_t*>(scales)[index]);
  }
  return 0.0f;
}

int64_t code_bytes(RowFormat format, int64_t width) {
  return format == RowFormat::kNvFp4 ? width / 2 : width;
}

void check_on_cpu(const TensorView& t, const char* where, const char* name) {
  HELICORE_CHECK(t.device.type == DeviceType::kCpu, where, name, " must be on the CPU, got ",
                 t.describe());
}

// Shapes, types and devices of a call; -> the shape of the scales.
ScaleShape check_call(const TensorView& values, const RowCoding& coding, const TensorView& codes,
                      const TensorView* scales, const char* where, const char* values_name) {
  const RowFormat format = coding.format;
  check_shape(values, {-1, -1}, where, values_name);
  check_row_major(values, where, values_name);
  const int64_t rows = values.size(0);
  const int64_t width = values.size(1);
  const ScaleShape shape = scale_shape(coding, rows, width);
  check_shape(codes, {rows, code_bytes(format, width)}, where, "codes");
  check_row_major(codes, where, "codes");
  HELICORE_CHECK(codes.dtype == DType::kUInt8 ||
                     (codes.dtype == DType::kFloat8E4M3 && format != RowFormat::kNvFp4),
                 where, "codes must be uint8, or float8_e4m3fn for FP8, got ", codes.describe());
  HELICORE_CHECK(std::isfinite(coding.scale) && coding.scale > 0, where, "scale must be > 0, got ",
                 coding.scale);
  HELICORE_CHECK((scales != nullptr) == (format != RowFormat::kFp8Tensor), where,
                 "scales must be given, except for fp8_tensor");
  if (scales != nullptr) {
    check_shape(*scales, {shape.num_elements}, where, "scales");
    check_dtype(*scales, shape.dtype, where, "scales");
    check_contiguous(*scales, where, "scales");
  }
  for (const TensorView* t : {&values, &codes, scales}) {
    if (t == nullptr) continue;
    HELICORE_CHECK(t->device == values.device, where, "tensors must be on one device, got ",
                   values.describe(), " and ", t->describe());
  }
  return shape;
}

}  // namespace

std::string_view name_of(RowFormat format) noexcept {
  constexpr std::array<std::string_view, 6> kNames = {"fp8_tensor",       "fp8_token", "fp8_group",
                                                      "fp8_group_packed", "nvfp4",     "mxfp8"};
  return kNames[static_cast<size_t>(format)];
}

std::string_view name_of(ScaleLayout layout) noexcept {
  constexpr std::array<std::string_view, 3> kNames = {"rows", "columns", "swizzled"};
  return kNames[static_cast<size_t>(layout)];
}

int64_t group_size(RowFormat format, int64_t width) noexcept {
  switch (format) {
    case RowFormat::kFp8Tensor:
    case RowFormat::kFp8Token:
      return width;
    case RowFormat::kFp8Group:
    case RowFormat::kFp8GroupPacked:
      return kFp8BlockSize;
    case RowFormat::kNvFp4:
      return kNvFp4Group;
    case RowFormat::kMxFp8:
      return kMxGroup;
  }
  return width;
}

ScaleShape scale_shape(const RowCoding& coding, int64_t rows, int64_t width) {
  constexpr const char* kWhere = "quant.scale_shape";
  const auto [format, layout, scale, leading_dim] = coding;
  HELICORE_CHECK(has_layout(format, layout), kWhere, name_of(format), " has no layout '",
                 name_of(layout), "'");
  HELICORE_CHECK(rows >= 0, kWhere, "rows must be >= 0, got ", rows);
  HELICORE_CHECK(width >= 1, kWhere, "width must be >= 1, got ", width);
  const int64_t group = group_size(format, width);
  HELICORE_CHECK((format != RowFormat::kNvFp4 && format != RowFormat::kMxFp8) || width % group == 0,
                 kWhere, "width must be a multiple of ", group, " for ", name_of(format), ", got ",
                 width);
  const int64_t ld = leading_dim == 0 ? ceil_div(rows, 4) * 4 : leading_dim;
  HELICORE_CHECK(layout != ScaleLayout::kColumns || ld >= rows, kWhere,
                 "leading_dim must be at least the ", rows, " rows, got ", leading_dim);
  const bool is_packed = format == RowFormat::kFp8GroupPacked;
  const int64_t groups = ceil_div(width, group);
  ScaleShape shape;
  shape.dtype = is_packed ? DType::kInt32 : is_byte_scale(format) ? DType::kUInt8 : DType::kFloat32;
  shape.shape = {rows, is_packed ? ceil_div(groups, 4) : groups};
  switch (layout) {
    case ScaleLayout::kRows:
      shape.strides = {groups, 1};
      shape.num_elements = format == RowFormat::kFp8Tensor ? 0 : rows * groups;
      break;
    case ScaleLayout::kColumns:
      shape.strides = {1, ld};
      shape.num_elements = rows == 0 ? 0 : rows + (shape.shape[1] - 1) * ld;
      break;
    case ScaleLayout::kSwizzled:
      shape.num_elements = ceil_div(rows, 128) * 128 * (ceil_div(groups, 4) * 4);
      break;
  }
  return shape;
}

void RowQuantizer::clear_scales() const noexcept {
  if (scales == nullptr) return;
  std::memset(scales, 0,
              static_cast<size_t>(scale_shape.num_elements) * size_of(scale_shape.dtype));
}

void RowQuantizer::quantize(int64_t row, const float* x) const noexcept {
  const RowFormat format = coding.format;
  const float scale = coding.scale;
  uint8_t* to = codes + row * codes_stride;
  if (format == RowFormat::kFp8Tensor) return encode_fp8(x, width, 1.0f / scale, to);
  const int64_t group = group_size(format, width);
  auto* bytes = static_cast<uint8_t*>(scales);
  auto* floats = static_cast<float*>(scales);
  for (int64_t g = 0, begin = 0; begin < width; ++g, begin += group) {
    const int64_t size = std::min(group, width - begin);
    const float largest = largest_of(x + begin, size);
    const int64_t at = scale_index(scale_shape, coding, row, g);
    if (format == RowFormat::kNvFp4) {
      const uint8_t code = encode_e4m3(largest / kE2M1Max * scale);
      const float value = decode_e4m3(code);
      const float inverse = value == 0.0f ? 0.0f : scale / value;
      bytes[at] = code;
      for (int64_t i = 0; i < size; i += 2) {
        const uint8_t low = encode_e2m1(x[begin + i] * inverse);
        const uint8_t high = encode_e2m1(x[begin + i + 1] * inverse);
        to[(begin + i) / 2] = static_cast<uint8_t>(low | high << 4);
      }
      continue;
    }
    float inverse = 0.0f;
    if (is_byte_scale(format)) {
      const bool is_packed = format == RowFormat::kFp8GroupPacked;
      const float least = is_packed ? kLeastPackedScale : 0.0f;
      bytes[at] = exponent_up(std::max(largest / kE4M3Max, least));
      inverse = inverse_power(bytes[at]);
    } else {
      const float least = format == RowFormat::kFp8Token ? kLeastTokenMax : kLeastGroupMax;
      floats[at] = std::max(largest, least) / kE4M3Max;
      inverse = 1.0f / floats[at];
    }
    encode_fp8(x + begin, size, inverse, to + begin);
  }
}

RowQuantizer make_row_quantizer(const TensorView& values, const RowCoding& coding,
                                const TensorView& codes, const TensorView* scales,
                                const char* where) {
  RowQuantizer quantizer;
  quantizer.scale_shape = check_call(values, coding, codes, scales, where, "x");
  quantizer.coding = coding;
  quantizer.width = values.size(1);
  quantizer.codes = codes.ptr<uint8_t>();
  quantizer.codes_stride = codes.stride(0);
  quantizer.scales = scales == nullptr ? nullptr : scales->data;
  return quantizer;
}

void quantize_rows(const TensorView& x, const RowCoding& coding, const TensorView& codes,
                   const TensorView* scales) {
  constexpr const char* kWhere = "quant.quantize_rows";
  HELICORE_CHECK(x.dtype == DType::kFloat32 || x.dtype == DType::kBFloat16, kWhere,
                 "x must be float32 or bfloat16, got ", x.describe());
  check_on_cpu(x, kWhere, "x");
  const RowQuantizer quantizer = make_row_quantizer(x, coding, codes, scales, kWhere);
  quantizer.clear_scales();
  const int64_t rows = x.size(0);
  default_pool().parallel_for(ceil_div(rows, kRowsPerTask), [&](int64_t task) {
    std::vector<float> values(x.dtype == DType::kBFloat16 ? quantizer.width : 0);
    for (int64_t r = task * kRowsPerTask; r < std::min(rows, (task + 1) * kRowsPerTask); ++r) {
      const float* row = x.ptr<float>() + r * x.stride(0);
      if (!values.empty()) {
        const BFloat16* from = x.ptr<BFloat16>() + r * x.stride(0);
        std::transform(from, from + quantizer.width, values.begin(),
                       [](BFloat16 v) { return static_cast<float>(v); });
        row = values.data();
      }
      quantizer.quantize(r, row);
    }
  });
}

void dequantize_rows(const TensorView& codes, const TensorView* scales, const RowCoding& coding,
                     const TensorView& out) {
  constexpr const char* kWhere = "quant.dequantize_rows";
  check_dtype(out, DType::kFloat32, kWhere, "out");
  check_on_cpu(out, kWhere, "out");
  const ScaleShape shape = check_call(out, coding, codes, scales, kWhere, "out");
  const int64_t width = out.size(1);
  const int64_t group = group_size(coding.format, width);
  for (int64_t r = 0; r < out.size(0); ++r) {
    const uint8_t* from = codes.ptr<uint8_t>() + r * codes.stride(0);
    float* to = out.ptr<float>() + r * out.stride(0);
    for (int64_t i = 0; i < width; ++i) {
      const int64_t at = scale_index(shape, coding, r, i / group);
      const float factor = group_scale(coding, scales == nullptr ? nullptr : scales->data, at);
      to[i] = coding.format == RowFormat::kNvFp4
                  ? decode_e2m1(static_cast<uint8_t>(from[i / 2] >> (i % 2 * 4))) * factor
                  : decode_e4m3(from[i]) * factor;
    }
  }
}

}  // namespace helicore::quant
