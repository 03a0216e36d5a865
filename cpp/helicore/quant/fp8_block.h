// FP8 E4M3 weights with one fp32 scale for each 128 x 128 block ("weight_scale_inv" of checkpoints:
// it multiplies).
#pragma once

#include "helicore/core/tensor_view.h"

namespace helicore::quant {

// out[n, k] = round(w[n, k] * scale_inv[n / 128, k / 128]): the product in fp32, one rounding to
// bfloat16 when out is bfloat16. w float8_e4m3 (or uint8 codes) [N, K], scale_inv float32
// [ceil(N/128), ceil(K/128)], out bfloat16 or float32 [N, K]; rows may be strided. In parallel over
// rows. Throws InvalidArgument on a wrong shape or dtype.
void dequantize_fp8_block(const TensorView& w, const TensorView& scale_inv, const TensorView& out);

// The way back, for tools and tests: scale = max|w| / 448 in each block (1 for a block of zeros),
// codes = nearest e4m3 of w / scale. w bfloat16 or float32 [N, K], codes float8_e4m3 or uint8,
// scale_inv float32.
void quantize_fp8_block(const TensorView& w, const TensorView& codes, const TensorView& scale_inv);

}  // namespace helicore::quant
