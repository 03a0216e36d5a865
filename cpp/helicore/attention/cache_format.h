// Formats of the cached latent rows: what a token costs and where its parts lie in a page.
//
// A row is c[R], the normalised latent, and k_r[dr], the rotated key. Offsets are in bytes from the
// first byte of the page; token t of the page has
//
//   kDense      c and k_r as elements of the cache's dtype, row after row
//   kFp8        R + dr e4m3 codes;                       value = code * scale
//   kFp8DsMla   R e4m3 codes, R / 128 float32 scales, dr bfloat16;
//               value = code * scale of its 128 values;  k_r as it is
//   kNvFp4      three planes of the page, each token after token: R / 2 bytes of e2m1 codes (value
//               2 i in the low nibble of byte i), R / 16 e4m3 scales, dr bfloat16;
//               value = code * scale of its 16 values * scale, exact in bfloat16
//
// `scale` is the one number per layer in MlaCache (kFp8: any; kNvFp4: a power of two; kFp8DsMla:
// none). Kernels read MlaCache::layout, or constants made of these functions at namespace scope:
// device code can't call them. Codes are those of quant/formats.h. Append writes no NaN code; NaN
// codes of other writers decode to NaN here, and may decode to +-480 in a kernel that shifts bits.
#pragma once

#include <cstdint>
#include <string_view>

namespace helicore::attention {

enum class CacheFormat : uint8_t { kDense = 0, kFp8 = 1, kFp8DsMla = 2, kNvFp4 = 3 };

inline constexpr int64_t kFp8DsMlaGroup = 128;  // values that share one float32 scale
inline constexpr int64_t kNvFp4Group = 16;      // values that share one e4m3 scale

// How the rows of one layer are coded.
struct CacheCoding {
  CacheFormat format = CacheFormat::kDense;
  float scale = 1.0f;  // of kFp8 and kNvFp4
};

// Of R in each format; row bytes, scale offsets and strides are then multiples of 4.
[[nodiscard]] constexpr int64_t rank_multiple(CacheFormat format) noexcept {
  if (format == CacheFormat::kFp8DsMla) return kFp8DsMlaGroup;
  return format == CacheFormat::kNvFp4 ? 4 * kNvFp4Group : 4;
}

// Bytes of the codes of c (of c and k_r for kFp8).
[[nodiscard]] constexpr int64_t code_bytes(CacheFormat format, int64_t rank,
                                           int64_t rope_dim) noexcept {
  if (format == CacheFormat::kNvFp4) return rank / 2;
  return format == CacheFormat::kFp8 ? rank + rope_dim : rank;
}

// Bytes of the group scales of a row.
[[nodiscard]] constexpr int64_t scale_bytes(CacheFormat format, int64_t rank) noexcept {
  if (format == CacheFormat::kFp8DsMla) return rank / kFp8DsMlaGroup * 4;
  return format == CacheFormat::kNvFp4 ? rank / kNvFp4Group : 0;
}

// Bytes of a token's row; element_size is that of the dtype and counts for kDense alone.
[[nodiscard]] constexpr int64_t row_bytes(CacheFormat format, int64_t rank, int64_t rope_dim,
                                          int64_t element_size = 1) noexcept {
  if (format == CacheFormat::kDense) return (rank + rope_dim) * element_size;
  const int64_t rope_bytes = format == CacheFormat::kFp8 ? 0 : rope_dim * 2;
  return code_bytes(format, rank, rope_dim) + scale_bytes(format, rank) + rope_bytes;
}

// Where the parts of token t lie in a page of a quantised format, in bytes.
struct CacheLayout {
  int64_t code_stride = 0;  // codes of c at t * code_stride
  int64_t scale_begin = 0;  // group scales at scale_begin + t * scale_stride
  int64_t scale_stride = 0;
  int64_t rope_begin = 0;  // k_r at rope_begin + t * rope_stride
  int64_t rope_stride = 0;
};

[[nodiscard]] constexpr CacheLayout cache_layout(CacheFormat format, int64_t rank, int64_t rope_dim,
                                                 int64_t page_size) noexcept {
  const int64_t codes = code_bytes(format, rank, rope_dim);
  const int64_t scales = scale_bytes(format, rank);
  if (format == CacheFormat::kNvFp4) {
    return {.code_stride = codes,
            .scale_begin = page_size * codes,
            .scale_stride = scales,
            .rope_begin = page_size * (codes + scales),
            .rope_stride = rope_dim * 2};
  }
  const int64_t row = row_bytes(format, rank, rope_dim);
  return {.code_stride = row,
          .scale_begin = rank,
          .scale_stride = row,
          .rope_begin = rank + scales,
          .rope_stride = row};
}

static_assert(row_bytes(CacheFormat::kFp8, 512, 64) == 576);
static_assert(row_bytes(CacheFormat::kFp8DsMla, 512, 64) == 656);
static_assert(row_bytes(CacheFormat::kNvFp4, 512, 64) == 416);
static_assert(cache_layout(CacheFormat::kFp8DsMla, 512, 64, 64).rope_begin == 528);
static_assert(cache_layout(CacheFormat::kNvFp4, 512, 64, 64).rope_begin == 64 * 288);

// "auto" (kDense), "fp8", "fp8_ds_mla", "nvfp4"; InvalidArgument with `where` as prefix for others.
[[nodiscard]] CacheFormat parse_cache_format(std::string_view name, const char* where);
[[nodiscard]] std::string_view name_of(CacheFormat format) noexcept;
// InvalidArgument when rows of these widths have no such form.
void check_cache_widths(CacheFormat format, int64_t rank, int64_t rope_dim, const char* where);

}  // namespace helicore::attention
