#include "helicore/quant/norm_epilogue.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "helicore/core/error.h"
#include "helicore/core/thread_pool.h"

namespace helicore::quant {
namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kRowsPerTask = 4;

const void* at(const void* base, int64_t element, DType dtype) {
  return static_cast<const std::byte*>(base) + element * static_cast<int64_t>(size_of(dtype));
}
void* at(void* base, int64_t element, DType dtype) {
  return static_cast<std::byte*>(base) + element * static_cast<int64_t>(size_of(dtype));
}

float value(const void* base, int64_t i, DType dtype) {
  return dtype == DType::kFloat32 ? static_cast<const float*>(base)[i]
                                  : static_cast<float>(static_cast<const BFloat16*>(base)[i]);
}

float round_to(float x, DType dtype) {
  return dtype == DType::kFloat32 ? x : static_cast<float>(BFloat16(x));
}

// `values` are of T already.
void store(void* base, const float* values, int64_t size, DType dtype) {
  if (dtype == DType::kFloat32) {
    std::copy_n(values, size, static_cast<float*>(base));
  } else {
    std::transform(values, values + size, static_cast<BFloat16*>(base),
                   [](float x) { return BFloat16(x); });
  }
}

float inverse_rms(const float* s, int64_t width, float eps) {
  std::array<float, kLanes> sums{};
  for (int64_t begin = 0; begin < width; begin += kLanes) {
    const int64_t size = std::min(kLanes, width - begin);
    for (int64_t i = 0; i < size; ++i) sums[i] += s[begin + i] * s[begin + i];
  }
  float total = 0.0f;
  for (float sum : sums) total += sum;
  return 1.0f / std::sqrt(total / static_cast<float>(width) + eps);
}

void check_part(const TensorView* t, bool is_used, const TensorView* like, const char* where,
                const char* name) {
  HELICORE_CHECK((t != nullptr) == is_used, where, name,
                 is_used ? " is needed by this fusion" : " is not used by this fusion");
  if (t == nullptr || like == nullptr) return;
  check_shape(*t, {like->size(0), like->size(1)}, where, name);
  check_dtype(*t, like->dtype, where, name);
  check_contiguous(*t, where, name);
  HELICORE_CHECK(t->device == like->device, where, name, " must be on the device of x, got ",
                 t->describe(), " and ", like->describe());
}

}  // namespace

const FusionTraits& traits_of(AllReduceFusion fusion) noexcept {
  using enum ScaleLayout;
  static const std::array<FusionTraits, kNumAllReduceFusions> kTraits = {{
      {"none", false, false, {}, kRows},
      {"rms_norm", true, false, {}, kRows},
      {"residual_rms_norm", true, true, {}, kRows},
      {"residual_rms_norm_fp8", true, true, RowFormat::kFp8Tensor, kRows},
      {"residual_rms_norm_fp8_token", true, true, RowFormat::kFp8Token, kRows},
      {"residual_rms_norm_fp8_block", true, true, RowFormat::kFp8Group, kColumns},
      {"residual_rms_norm_fp8_packed", true, true, RowFormat::kFp8GroupPacked, kColumns},
      {"residual_rms_norm_nvfp4", true, true, RowFormat::kNvFp4, kSwizzled},
      {"residual_rms_norm_nvfp4_rows", true, true, RowFormat::kNvFp4, kRows},
      {"residual_rms_norm_mxfp8", true, true, RowFormat::kMxFp8, kSwizzled},
  }};
  return kTraits[static_cast<size_t>(fusion)];
}

void NormEpilogue::apply(int64_t row, const void* x, float* scratch) const noexcept {
  float* s = scratch;
  const int64_t begin = row * width;
  if (residual != nullptr) {
    const void* other = at(residual, begin, dtype);
    for (int64_t i = 0; i < width; ++i) {
      s[i] = round_to(value(x, i, dtype) + value(other, i, dtype), dtype);
    }
    store(at(residual_out, begin, dtype), s, width, dtype);
  } else {
    for (int64_t i = 0; i < width; ++i) s[i] = value(x, i, dtype);
  }
  const float inverse = inverse_rms(s, width, eps);
  float* normed = scratch + width;
  for (int64_t i = 0; i < width; ++i) {
    normed[i] = round_to(s[i] * inverse * value(weight, i, dtype), dtype);
  }
  if (norm != nullptr) store(at(norm, begin, dtype), normed, width, dtype);
  if (quantizer) quantizer->quantize(row, normed);
}

NormEpilogue make_epilogue(AllReduceFusion fusion, const TensorView& x,
                           const NormEpilogueTensors& tensors, const char* where) {
  const FusionTraits& traits = traits_of(fusion);
  check_shape(x, {-1, -1}, where, "x");
  check_contiguous(x, where, "x");
  HELICORE_CHECK(x.dtype == DType::kFloat32 || x.dtype == DType::kBFloat16, where,
                 "x must be float32 or bfloat16, got ", x.describe());
  check_part(tensors.residual, traits.has_residual, &x, where, "residual");
  check_part(tensors.residual_out, traits.has_residual, &x, where, "residual_out");
  check_part(tensors.weight, traits.has_norm, nullptr, where, "weight");
  const bool has_codes = traits.format.has_value();
  check_part(tensors.codes, has_codes, nullptr, where, "codes");
  const bool has_scales = has_codes && *traits.format != RowFormat::kFp8Tensor;
  check_part(tensors.scales, has_scales, nullptr, where, "scales");
  HELICORE_CHECK(tensors.norm != nullptr || has_codes || !traits.has_norm, where,
                 "norm is needed by a fusion without codes");
  if (tensors.norm != nullptr) check_part(tensors.norm, traits.has_norm, &x, where, "norm");
  NormEpilogue epilogue;
  epilogue.dtype = x.dtype;
  epilogue.width = x.size(1);
  epilogue.eps = tensors.eps;
  if (!traits.has_norm) return epilogue;
  HELICORE_CHECK(std::isfinite(tensors.eps) && tensors.eps >= 0, where, "eps must be >= 0, got ",
                 tensors.eps);
  check_shape(*tensors.weight, {x.size(1)}, where, "weight");
  check_dtype(*tensors.weight, x.dtype, where, "weight");
  check_contiguous(*tensors.weight, where, "weight");
  HELICORE_CHECK(tensors.weight->device == x.device, where,
                 "weight must be on the device of x, got ", tensors.weight->describe());
  epilogue.weight = tensors.weight->data;
  if (traits.has_residual) {
    epilogue.residual = tensors.residual->data;
    epilogue.residual_out = tensors.residual_out->data;
  }
  if (tensors.norm != nullptr) epilogue.norm = tensors.norm->data;
  if (has_codes) {
    const RowCoding coding{*traits.format, traits.layout, tensors.scale, tensors.leading_dim};
    epilogue.quantizer = make_row_quantizer(x, coding, *tensors.codes, tensors.scales, where);
  }
  return epilogue;
}

void apply_epilogue(const NormEpilogue& epilogue, const TensorView& x) {
  HELICORE_CHECK(x.device.type == DeviceType::kCpu, "quant.norm_quantize",
                 "x must be on the CPU, got ", x.describe());
  if (epilogue.weight == nullptr) return;
  if (epilogue.quantizer) epilogue.quantizer->clear_scales();
  const int64_t rows = x.size(0);
  default_pool().parallel_for((rows + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task) {
    std::vector<float> scratch(static_cast<size_t>(2 * epilogue.width));
    for (int64_t r = task * kRowsPerTask; r < std::min(rows, (task + 1) * kRowsPerTask); ++r) {
      epilogue.apply(r, at(x.data, r * epilogue.width, x.dtype), scratch.data());
    }
  });
}

}  // namespace helicore::quant
