#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <optional>
#include <string>
#include <tuple>

#include "casters.h"
#include "helicore/quant/cuda/norm_quantize.h"
#include "helicore/quant/formats.h"
#include "helicore/quant/fp8_block.h"
#include "helicore/quant/norm_epilogue.h"
#include "helicore/quant/row_quantize.h"
#include "norm_arguments.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace helicore::bindings {
namespace {

using quant::AllReduceFusion;
using quant::RowFormat;
using quant::ScaleLayout;

const TensorView* pointer(OptionalTensor t) { return t ? &*t : nullptr; }

void bind_formats(nb::module_& m) {
  nb::enum_<RowFormat>(m, "RowFormat", "How rows of activations are quantised.")
      .value("FP8_TENSOR", RowFormat::kFp8Tensor)
      .value("FP8_TOKEN", RowFormat::kFp8Token)
      .value("FP8_GROUP", RowFormat::kFp8Group)
      .value("FP8_GROUP_PACKED", RowFormat::kFp8GroupPacked)
      .value("NVFP4", RowFormat::kNvFp4)
      .value("MXFP8", RowFormat::kMxFp8);
  nb::enum_<ScaleLayout>(m, "ScaleLayout", "Where the scales of rows lie.")
      .value("ROWS", ScaleLayout::kRows)
      .value("COLUMNS", ScaleLayout::kColumns)
      .value("SWIZZLED", ScaleLayout::kSwizzled);
  m.def(
      "scale_shape",
      [](RowFormat format, ScaleLayout layout, int64_t rows, int64_t width, int64_t leading_dim) {
        const quant::ScaleShape s =
            quant::scale_shape({format, layout, 1.0f, leading_dim}, rows, width);
        return std::tuple(s.shape, s.strides, s.num_elements, std::string(name_of(s.dtype)));
      },
      "format"_a, "layout"_a, "rows"_a, "width"_a, "leading_dim"_a = 0,
      "(shape, strides, elements to allocate, dtype) of the scales of [rows, width].");
  m.def(
      "quantize_rows",
      [](const TensorView& x, RowFormat format, ScaleLayout layout, float scale,
         int64_t leading_dim, const TensorView& codes, OptionalTensor scales) {
        const nb::gil_scoped_release release;
        quant::quantize_rows(x, {format, layout, scale, leading_dim}, codes, pointer(scales));
      },
      "x"_a, "format"_a, "layout"_a, "scale"_a, "leading_dim"_a, "codes"_a, "scales"_a.none(),
      "See helicore.ops.quantize_rows.");
  m.def(
      "dequantize_rows",
      [](const TensorView& codes, OptionalTensor scales, RowFormat format, ScaleLayout layout,
         float scale, int64_t leading_dim, const TensorView& out) {
        const nb::gil_scoped_release release;
        quant::dequantize_rows(codes, pointer(scales), {format, layout, scale, leading_dim}, out);
      },
      "codes"_a, "scales"_a.none(), "format"_a, "layout"_a, "scale"_a, "leading_dim"_a, "out"_a,
      "See helicore.ops.dequantize_rows.");
}

void bind_fusions(nb::module_& m) {
  nb::enum_<AllReduceFusion> fusions(m, "AllReduceFusion",
                                     "What follows a sum over ranks in the same call.");
  for (int i = 0; i < quant::kNumAllReduceFusions; ++i) {
    const auto fusion = static_cast<AllReduceFusion>(i);
    std::string name(traits_of(fusion).name);
    for (char& c : name) c = static_cast<char>(c >= 'a' && c <= 'z' ? c - 'a' + 'A' : c);
    fusions.value(name.c_str(), fusion);
  }
  m.def(
      "fusion_traits",
      [](AllReduceFusion fusion) {
        const quant::FusionTraits& t = traits_of(fusion);
        return std::tuple(t.has_norm, t.has_residual, t.format, t.layout);
      },
      "fusion"_a, "(has a norm, has a residual, format of its codes or None, layout of scales).");
  m.def(
      "norm_quantize",
      [](AllReduceFusion fusion, const TensorView& x, OptionalTensor residual,
         OptionalTensor residual_out, OptionalTensor weight, OptionalTensor norm,
         OptionalTensor codes, OptionalTensor scales, float scale, float eps, int64_t leading_dim) {
        const NormArguments arguments{residual, residual_out, weight, norm,       codes,
                                      scales,   scale,        eps,    leading_dim};
        if (x.device.type == DeviceType::kCuda) {
          return quant::cuda::norm_quantize(fusion, x, arguments.tensors(),
                                            current_cuda_stream(x.device));
        }
        const auto epilogue =
            quant::make_epilogue(fusion, x, arguments.tensors(), "quant.norm_quantize");
        const nb::gil_scoped_release release;
        quant::apply_epilogue(epilogue, x);
      },
      "fusion"_a, "x"_a, "residual"_a = nb::none(), "residual_out"_a = nb::none(),
      "weight"_a = nb::none(), "norm"_a = nb::none(), "codes"_a = nb::none(),
      "scales"_a = nb::none(), "scale"_a = 1.0f, "eps"_a = 1e-6f, "leading_dim"_a = 0,
      "See helicore.ops.fused_norm_quantize.");
}

}  // namespace

void bind_quant(nb::module_& m) {
  m.attr("FP8_BLOCK_SIZE") = quant::kFp8BlockSize;
  m.def("decode_e4m3", &quant::decode_e4m3, "code"_a, "Value of one FP8 E4M3 code (0..255).");
  m.def("encode_e4m3", &quant::encode_e4m3, "value"_a,
        "Nearest FP8 E4M3 code, ties to even, saturating at 448.");
  m.def("dequantize_fp8_block", &quant::dequantize_fp8_block, "w"_a, "scale_inv"_a, "out"_a,
        nb::call_guard<nb::gil_scoped_release>(),
        "out = w * scale of its 128 x 128 block. See helicore.ops.dequantize_fp8_block.");
  m.def("quantize_fp8_block", &quant::quantize_fp8_block, "w"_a, "codes"_a, "scale_inv"_a,
        nb::call_guard<nb::gil_scoped_release>(),
        "Codes and scales of w. See helicore.ops.quantize_fp8_block.");
  bind_formats(m);
  bind_fusions(m);
}

}  // namespace helicore::bindings
