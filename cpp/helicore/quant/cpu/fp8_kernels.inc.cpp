// Runs of FP8 codes that share one scale.
#include "helicore/quant/cpu/e4m3.inc.h"
#include "helicore/quant/cpu/row_kernels.h"

namespace helicore::quant::HELICORE_ISA_NS {
namespace {

template <class T>
void dequantize(const uint8_t* codes, int64_t size, float scale, T* out) {
  const VF factor = set1(scale);
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) store(out + i, mul(decode_e4m3x16(codes + i), factor));
  const int left = static_cast<int>(size - i);
  if (left > 0) store_n(out + i, mul(decode_e4m3_n(codes + i, left), factor), left);
}

#if defined(HELICORE_SIMD_BF16)
// Whether every product with `scale` only moves the exponent and stays normal.
inline bool is_exact(float scale) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, scale);
  const uint32_t exponent = bits >> 23;  // with the sign
  return (bits & 0x7fffffu) == 0 && exponent >= 27 && exponent <= 227;
}

// Codes times a power of two, 32 at a time, as integers: a magnitude has the mantissa of a bfloat16
// in place and takes another exponent; the eight subnormal ones come from a table.
void dequantize_exact(const uint8_t* codes, int64_t size, float scale, BFloat16* out) {
  const auto exponent = static_cast<int>(__builtin_bit_cast(uint32_t, scale) >> 23);
  const __m512i bias = _mm512_set1_epi16(static_cast<int16_t>((exponent - 7) << 7));
  // i * 2^-9 as bfloat16, with another exponent where it is not zero.
  alignas(64) static constexpr uint16_t kSmall[32] = {0,      0x3b00, 0x3b80, 0x3bc0,
                                                      0x3c00, 0x3c20, 0x3c40, 0x3c60};
  __m512i table = _mm512_load_si512(kSmall);
  const auto shift = static_cast<int16_t>((exponent - 127) * 128);
  table = _mm512_mask_add_epi16(table, 0xfe, table, _mm512_set1_epi16(shift));
  const __m512i low = _mm512_set1_epi16(0x7f);
  const __m512i sign_bit = _mm512_set1_epi16(static_cast<int16_t>(0x8000));
  for (int64_t i = 0; i < size; i += 32) {
    const int64_t left = size - i;
    const __mmask32 mask = left >= 32 ? 0xffffffffu : static_cast<__mmask32>((1u << left) - 1u);
    const __m512i w = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(mask, codes + i));
    const __m512i magnitude = _mm512_and_si512(w, low);
    __m512i bits = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), bias);
    const __mmask32 is_small = _mm512_cmplt_epi16_mask(magnitude, _mm512_set1_epi16(8));
    bits = _mm512_mask_permutexvar_epi16(bits, is_small, magnitude, table);
    const __mmask32 is_nan = _mm512_cmpeq_epi16_mask(magnitude, low);
    bits = _mm512_mask_mov_epi16(bits, is_nan, _mm512_set1_epi16(0x7fc0));
    // bits | (w << 8 & sign_bit)
    bits = _mm512_ternarylogic_epi32(bits, _mm512_slli_epi16(w, 8), sign_bit, 0xf8);
    _mm512_mask_storeu_epi16(out + i, mask, bits);
  }
}
#endif

}  // namespace

void dequantize_kernel(const uint8_t* codes, int64_t size, float scale, void* out,
                       DType out_dtype) {
  if (out_dtype == DType::kFloat32) {
    return dequantize(codes, size, scale, static_cast<float*>(out));
  }
#if defined(HELICORE_SIMD_BF16)
  if (is_exact(scale)) return dequantize_exact(codes, size, scale, static_cast<BFloat16*>(out));
#endif
  dequantize(codes, size, scale, static_cast<BFloat16*>(out));
}

void quantize_e4m3(const float* x, int64_t size, float inverse, uint8_t* codes) {
  for (int64_t i = 0; i < size; ++i) codes[i] = encode_e4m3_one(x[i] * inverse);
}

float quantize_e4m3_group(const float* x, int64_t size, uint8_t* codes) {
  const float largest = largest_magnitude(x, size);
  const float wanted = (largest > kLeastGroupMax ? largest : kLeastGroupMax) / 448.0f;
  const uint32_t up = (__builtin_bit_cast(uint32_t, wanted) + 0x7fffffu) & 0x7f800000u;
  const float scale = __builtin_bit_cast(float, up);
  quantize_e4m3(x, size, 1.0f / scale, codes);
  return scale;
}

}  // namespace helicore::quant::HELICORE_ISA_NS
