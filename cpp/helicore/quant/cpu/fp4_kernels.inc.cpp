// Runs of FP4 codes with one e4m3 scale for each 16 values.
#include "helicore/quant/cpu/e4m3.inc.h"
#include "helicore/quant/cpu/row_kernels.h"

namespace helicore::quant::HELICORE_ISA_NS {
namespace {

constexpr int kGroup = 16;   // values of one scale
constexpr int kChunk = 256;  // values whose scales are handled together
static_assert(kChunk / kGroup == 16, "one vector of scales");

#if defined(HELICORE_SIMD_AVX512) || defined(HELICORE_SIMD_AVX2)
// The low and then the high nibble of each of eight bytes.
inline __m128i nibbles(const uint8_t* codes) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
  const __m128i low = _mm_set1_epi8(0x0f);
  return _mm_unpacklo_epi8(_mm_and_si128(bytes, low), _mm_and_si128(_mm_srli_epi16(bytes, 4), low));
}
#endif

// Sixteen values of one scale.
inline VF decode_group(const uint8_t* codes, float scale) {
#if defined(HELICORE_SIMD_AVX512)
  const __m512 table = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f,
                                      -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
  const __m512i index = _mm512_cvtepu8_epi32(nibbles(codes));
  return mul({_mm512_permutexvar_ps(index, table)}, set1(scale));
#elif defined(HELICORE_SIMD_AVX2)
  const __m256 table = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
  const __m128i index = nibbles(codes);
  const auto half = [&](__m128i bytes) {
    const __m256i code = _mm256_cvtepu8_epi32(bytes);
    const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(code, 3), 31);
    return _mm256_xor_ps(_mm256_permutevar8x32_ps(table, code), _mm256_castsi256_ps(sign));
  };
  return mul({half(index), half(_mm_srli_si128(index, 8))}, set1(scale));
#else
  constexpr float kMagnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  VF out;
  for (int i = 0; i < kGroup; ++i) {
    const int code = codes[i / 2] >> (i % 2 * 4) & 15;
    out.v[i] = (code & 8 ? -kMagnitudes[code & 7] : kMagnitudes[code & 7]) * scale;
  }
  return out;
#endif
}

inline void decode_groups(const uint8_t* codes, const float* scales, int num_groups, float* out) {
  for (int g = 0; g < num_groups; ++g) {
    store(out + g * kGroup, decode_group(codes + g * (kGroup / 2), scales[g]));
  }
}

inline void decode_groups(const uint8_t* codes, const float* scales, int num_groups,
                          BFloat16* out) {
#if defined(HELICORE_SIMD_BF16)
  // Two groups at a time: the sixteen values of each, then a look-up.
  const __m512 values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f,
                                       -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
  const __m512i second = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
  for (int g = 0; g + 2 <= num_groups; g += 2) {
    const __m512i table =
        (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(values, _mm512_set1_ps(scales[g + 1])),
                                     _mm512_mul_ps(values, _mm512_set1_ps(scales[g])));
    const uint8_t* from = codes + g * (kGroup / 2);
    const __m256i index = _mm256_set_m128i(nibbles(from + kGroup / 2), nibbles(from));
    const __m512i words = _mm512_or_si512(_mm512_cvtepu8_epi16(index), second);
    _mm512_storeu_si512(out + g * kGroup, _mm512_permutexvar_epi16(words, table));
  }
#else
  for (int g = 0; g < num_groups; ++g) {
    store(out + g * kGroup, decode_group(codes + g * (kGroup / 2), scales[g]));
  }
#endif
}

template <class T>
void dequantize(const uint8_t* codes, const uint8_t* scales, int64_t size, float scale, T* out) {
  float factors[kChunk / kGroup];
  for (int64_t i = 0; i < size; i += kChunk) {
    const int64_t left = (size - i) / kGroup;
    const int num_groups = left < kChunk / kGroup ? static_cast<int>(left) : kChunk / kGroup;
    const VF group = num_groups == kChunk / kGroup ? decode_e4m3x16(scales + i / kGroup)
                                                   : decode_e4m3_n(scales + i / kGroup, num_groups);
    store(factors, mul(group, set1(scale)));
    decode_groups(codes + i / 2, factors, num_groups, out + i);
  }
}

// encode_e2m1() without branches.
inline uint8_t encode_e2m1_one(float x) {
  uint32_t bits = __builtin_bit_cast(uint32_t, x);
  const uint32_t sign = (bits >> 28) & 8u;
  bits &= 0x7fffffffu;
  const uint32_t keep = bits > 0x7f800000u ? 0u : 0xffffffffu;      // NaN gives 0
  bits = bits > 0x40c00000u ? 0x40c00000u : bits;                   // 6
  const uint32_t rounded = bits + 0x1fffffu + ((bits >> 22) & 1u);  // to one bit, ties to even
  const uint32_t normal = (rounded >> 22) - (126u << 1);
  const float shifted = __builtin_bit_cast(float, bits) + 0x1p22f;  // to a multiple of 1/2
  const uint32_t small = __builtin_bit_cast(uint32_t, shifted) & 3u;
  const uint32_t magnitude = bits < 0x3f800000u ? small : normal;  // 1
  return static_cast<uint8_t>((magnitude | sign) & keep);
}

// The codes of the scales of up to kChunk values, and what the values of each are multiplied by.
inline void choose_scales(const float* x, int num_groups, float scale, uint8_t* codes,
                          float* inverses) {
  float wanted[kChunk / kGroup];
  for (int g = 0; g < num_groups; ++g) {
    wanted[g] = largest_magnitude(x + g * kGroup, kGroup) / 6.0f / scale;
  }
  for (int g = 0; g < num_groups; ++g) codes[g] = encode_e4m3_one(wanted[g]);
  store(inverses, div(set1(1.0f), mul(decode_e4m3_n(codes, num_groups), set1(scale))));
  for (int g = 0; g < num_groups; ++g) inverses[g] = codes[g] == 0 ? 0.0f : inverses[g];
}

}  // namespace

void dequantize_nvfp4(const uint8_t* codes, const uint8_t* scales, int64_t size, float scale,
                      void* out, DType out_dtype) {
  if (out_dtype == DType::kFloat32) {
    dequantize(codes, scales, size, scale, static_cast<float*>(out));
  } else {
    dequantize(codes, scales, size, scale, static_cast<BFloat16*>(out));
  }
}

void quantize_nvfp4(const float* x, int64_t size, float scale, uint8_t* codes, uint8_t* scales) {
  alignas(64) float inverses[kChunk / kGroup];
  alignas(64) float scaled[kChunk];
  alignas(64) uint8_t nibbles[kChunk];
  for (int64_t begin = 0; begin < size; begin += kChunk) {
    const int64_t n = size - begin < kChunk ? size - begin : kChunk;
    choose_scales(x + begin, static_cast<int>(n / kGroup), scale, scales + begin / kGroup,
                  inverses);
    for (int64_t i = 0; i < n; i += kGroup) {
      store(scaled + i, mul(load(x + begin + i), set1(inverses[i / kGroup])));
    }
    for (int64_t i = 0; i < n; ++i) nibbles[i] = encode_e2m1_one(scaled[i]);
    uint8_t* out = codes + begin / 2;
    for (int64_t i = 0; i < n / 2; ++i) {
      out[i] = static_cast<uint8_t>(nibbles[2 * i] | nibbles[2 * i + 1] << 4);
    }
  }
}

}  // namespace helicore::quant::HELICORE_ISA_NS
