#include <nanobind/nanobind.h>

#include "casters.h"
#include "helicore/quant/formats.h"
#include "helicore/quant/fp8_block.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace helicore::bindings {

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
}

}  // namespace helicore::bindings
