// Device twins of the codes of quantised cache rows (attention/cache_format.h, quant/formats.h).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "helicore/attention/mla_params.h"
#include "helicore/quant/cuda/codes.cuh"

namespace helicore::attention::cuda {

using quant::cuda::decode_e4m3;
using quant::cuda::encode_e2m1;

// Of the low byte and of the high one.
__device__ inline float2 decode_e4m3x2(uint16_t codes) {
  return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(codes, __NV_E4M3)));
}

// The nearest code, ties to even; out of range saturates, NaN gives 0.
__device__ inline uint8_t encode_e4m3(float x) {
  return isnan(x) ? uint8_t{0} : __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
}

// Of the low four bits and of the high ones, times 2^-14: a code shifted to its place in a half is
// the value with the exponent too small by 14, subnormal or not.
__device__ inline float2 decode_e2m1x2(uint32_t codes) {
  const uint32_t bits =
      (codes & 0x7u) << 9 | (codes & 0x8u) << 12 | (codes & 0x70u) << 21 | (codes & 0x80u) << 24;
  return __half22float2(*reinterpret_cast<const __half2*>(&bits));
}
inline constexpr float kE2M1Exponent = 0x1p14f;

// The parts of a row of a quantised cache.
struct CodedRow {
  const uint8_t* codes;
  const uint8_t* scales;
  const uint8_t* rope;
};

__device__ inline CodedRow coded_row(const MlaCache& cache, int64_t page, int64_t offset) {
  const uint8_t* const begin = static_cast<const uint8_t*>(cache.data) + page * cache.page_stride;
  const CacheLayout& at = cache.layout;
  return {begin + offset * at.code_stride, begin + at.scale_begin + offset * at.scale_stride,
          begin + at.rope_begin + offset * at.rope_stride};
}

// Value d of a row.
__device__ inline float coded_value(const MlaCache& cache, const CodedRow& row, int d) {
  const int rank = cache.kv_lora_rank;
  if (cache.format == CacheFormat::kFp8) return decode_e4m3(row.codes[d]) * cache.scale;
  if (d >= rank) {
    return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(row.rope)[d - rank]);
  }
  if (cache.format == CacheFormat::kFp8DsMla) {
    return decode_e4m3(row.codes[d]) *
           reinterpret_cast<const float*>(row.scales)[d / static_cast<int>(kFp8DsMlaGroup)];
  }
  const float2 pair = decode_e2m1x2(row.codes[d / 2]);
  const float factor =
      decode_e4m3(row.scales[d / static_cast<int>(kNvFp4Group)]) * cache.scale * kE2M1Exponent;
  return (d % 2 == 0 ? pair.x : pair.y) * factor;
}

}  // namespace helicore::attention::cuda
