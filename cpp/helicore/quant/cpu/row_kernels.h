// Kernels over runs of codes, one set per instruction set; all sets give the same bits. Runs may
// have any length and alignment unless said otherwise.
#pragma once

#include <cstdint>

#include "helicore/core/cpu/isa.h"
#include "helicore/core/types.h"
#include "helicore/quant/formats.h"

namespace helicore::quant {

HELICORE_DECLARE_ISA(
    // out[i] = round(decode_e4m3(codes[i]) * scale), the product in float32; out_dtype float32 or
    // bfloat16.
    void dequantize_kernel(const uint8_t* codes, int64_t size, float scale, void* out,
                           DType out_dtype);
    // codes[i] = encode_e4m3_finite(x[i] * inverse).
    void quantize_e4m3(const float* x, int64_t size, float inverse, uint8_t* codes);
    // One power of two for the run, the least with max|x| <= 448 * scale (NaN not counted, max|x|
    // at least 1e-4), and quantize_e4m3 with its inverse. Returns the scale. size a multiple of 16.
    float quantize_e4m3_group(const float* x, int64_t size, uint8_t* codes);
    // out[i] = decode_e2m1(code i) * (decode_e4m3(scales[i / 16]) * scale). size a multiple of 32;
    // a bfloat16 result is exact for a power of two.
    void dequantize_nvfp4(const uint8_t* codes, const uint8_t* scales, int64_t size, float scale,
                          void* out, DType out_dtype);
    // scales[g] = encode_e4m3(max|x| / 6 / scale) over 16 values (NaN not counted), codes =
    // encode_e2m1(x / (decode_e4m3(scales[g]) * scale)) by one reciprocal; 0 where scales[g] is 0.
    // scale a power of two, size a multiple of 16.
    void quantize_nvfp4(const float* x, int64_t size, float scale, uint8_t* codes,
                        uint8_t* scales);)

}  // namespace helicore::quant
