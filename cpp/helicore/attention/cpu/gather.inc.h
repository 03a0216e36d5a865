// Where the latent rows of a block lie: in the pages as they are, or copied to scratch when the
// page is smaller than a segment or the arithmetic needs another type. Internal to *.inc.cpp; page
// ids are read only for tokens asked for.
#pragma once

#include "helicore/attention/cpu/tiles.inc.h"
#include "helicore/attention/mla_params.h"

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
