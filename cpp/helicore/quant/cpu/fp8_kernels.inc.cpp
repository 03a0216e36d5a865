// Decoding runs of FP8 codes that share one scale. Plain loops that the compiler vectorises for
// each instruction set.
#include <cstdint>
#include <cstring>

#include "helicore/core/cpu/simd.h"
#include "helicore/quant/cpu/fp8_kernels.h"

namespace helicore::quant::HELICORE_ISA_NS {

using namespace ::helicore::HELICORE_ISA_NS;  // NOLINT: the vector types of this variant

namespace {

// Same values as decode_e4m3(), without branches.
inline float decode(uint8_t code) {
  const uint32_t magnitude = code & 0x7fu;
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
  const uint32_t normal = (magnitude << 20) + (120u << 23);
  const uint32_t small =
      __builtin_bit_cast(uint32_t, static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f);
  uint32_t bits = magnitude < 8u ? small : normal;
  bits = magnitude == 0x7fu ? 0x7fc00000u : bits;
  return __builtin_bit_cast(float, bits | sign);
}

}  // namespace

void dequantize_kernel(const uint8_t* codes, int64_t size, float scale, void* out,
                       DType out_dtype) {
  float values[128];
  for (int64_t begin = 0; begin < size; begin += 128) {
    const int n = size - begin < 128 ? static_cast<int>(size - begin) : 128;
    for (int i = 0; i < n; ++i) values[i] = decode(codes[begin + i]) * scale;
    if (out_dtype == DType::kFloat32) {
      std::memcpy(static_cast<float*>(out) + begin, values, sizeof(float) * static_cast<size_t>(n));
      continue;
    }
    BFloat16* to = static_cast<BFloat16*>(out) + begin;
    for (int i = 0; i < n; i += 16) {
      if (n - i >= 16) {
        store(to + i, load(values + i));
      } else {
        store_n(to + i, load_n(values + i, n - i), n - i);
      }
    }
  }
}

}  // namespace helicore::quant::HELICORE_ISA_NS
