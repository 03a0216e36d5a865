// Where the latent rows of a block lie: in the pages as they are, or copied to scratch when the
// page is smaller than a segment, the arithmetic needs another type or the rows are quantised.
// Internal to *.inc.cpp; page ids are read only for tokens asked for.
#pragma once

#include <type_traits>

#include "helicore/attention/cpu/tiles.inc.h"
#include "helicore/attention/mla_params.h"
#include "helicore/quant/cpu/row_kernels.h"

namespace helicore::attention::HELICORE_ISA_NS {

static inline void convert_row(const float* in, int64_t n, float* out) {
  std::memcpy(out, in, sizeof(float) * static_cast<size_t>(n));
}
static inline void convert_row(const BFloat16* in, int64_t n, BFloat16* out) {
  std::memcpy(out, in, sizeof(BFloat16) * static_cast<size_t>(n));
}
static inline void convert_row(const BFloat16* in, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store(out + i, load(in + i));
  if (i < n) store_n(out + i, load_n(in + i, static_cast<int>(n - i)), static_cast<int>(n - i));
}

// Stands for the cache element where MlaCache::format says what a row is.
struct QuantizedRow {};

static inline constexpr DType dtype_of(float*) { return DType::kFloat32; }
static inline constexpr DType dtype_of(BFloat16*) { return DType::kBFloat16; }

// What every value of a row still has to be multiplied by: kFp8's scale goes into the scores and
// the output, so that codes alone are decoded, exactly.
static inline float row_factor(const MlaCache& cache) {
  return cache.format == CacheFormat::kFp8 ? cache.scale : 1.0f;
}

// The row of token `offset` of a page of a quantised cache, but for row_factor().
template <class Elem>
static inline void dequantize_row(const MlaCache& cache, const uint8_t* page, int64_t offset,
                                  Elem* out) {
  const CacheLayout& at = cache.layout;
  const DType dtype = dtype_of(out);
  const int64_t rank = cache.kv_lora_rank;
  const uint8_t* codes = page + offset * at.code_stride;
  const uint8_t* scales = page + at.scale_begin + offset * at.scale_stride;
  if (cache.format == CacheFormat::kFp8) {
    quant::HELICORE_ISA_NS::dequantize_kernel(codes, cache.width(), 1.0f, out, dtype);
    return;
  }
  if (cache.format == CacheFormat::kNvFp4) {
    quant::HELICORE_ISA_NS::dequantize_nvfp4(codes, scales, rank, cache.scale, out, dtype);
  } else {
    for (int64_t c = 0; c < rank; c += kFp8DsMlaGroup) {
      float scale;
      std::memcpy(&scale, scales + c / kFp8DsMlaGroup * 4, sizeof(scale));
      quant::HELICORE_ISA_NS::dequantize_kernel(codes + c, kFp8DsMlaGroup, scale, out + c, dtype);
    }
  }
  const uint8_t* rope = page + at.rope_begin + offset * at.rope_stride;
  convert_row(reinterpret_cast<const BFloat16*>(rope), cache.rope_dim, out + rank);
}

template <class CacheElem>
static inline const CacheElem* latent_row(const MlaCache& cache, const int32_t* pages,
                                          int64_t token) {
  const int64_t page = pages[token / cache.page_size];
  return static_cast<const CacheElem*>(cache.data) + page * cache.page_stride +
         token % cache.page_size * cache.width();
}

// Rows of tokens [first, first + num_tokens), num_tokens <= 16 and first a multiple of 16.
// `scratch` has 16 rows.
template <class CacheElem, class Elem>
static inline const Elem* latent_segment(const MlaCache& cache, const int32_t* pages, int64_t first,
                                         int num_tokens, Elem* scratch) {
  const int64_t width = cache.width();
  if constexpr (std::is_same_v<CacheElem, QuantizedRow>) {
    for (int t = 0; t < num_tokens; ++t) {
      const int64_t token = first + t;
      const auto* page = static_cast<const uint8_t*>(cache.data) +
                         pages[token / cache.page_size] * cache.page_stride;
      dequantize_row(cache, page, token % cache.page_size, scratch + t * width);
    }
    return scratch;
  } else {
    if (cache.page_size % kSegmentTokens == 0) {
      const CacheElem* rows = latent_row<CacheElem>(cache, pages, first);
      if constexpr (sizeof(CacheElem) == sizeof(Elem)) {
        return rows;
      } else {
        convert_row(rows, num_tokens * width, scratch);
        return scratch;
      }
    }
    for (int t = 0; t < num_tokens; ++t) {
      convert_row(latent_row<CacheElem>(cache, pages, first + t), width, scratch + t * width);
    }
    return scratch;
  }
}

// Hands out 64-byte aligned pieces of one scratch buffer.
struct Carver {
  char* next;
  template <class T>
  T* take(int64_t count) {
    T* out = reinterpret_cast<T*>(next);
    next += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return out;
  }
};

}  // namespace helicore::attention::HELICORE_ISA_NS
