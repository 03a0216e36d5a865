#include "helicore/attention/cache_format.h"

#include "helicore/core/error.h"

namespace helicore::attention {

std::string_view name_of(CacheFormat format) noexcept {
  switch (format) {
    case CacheFormat::kDense:
      return "auto";
    case CacheFormat::kFp8:
      return "fp8";
    case CacheFormat::kFp8DsMla:
      return "fp8_ds_mla";
    case CacheFormat::kNvFp4:
      return "nvfp4";
  }
  return "unknown";
}

CacheFormat parse_cache_format(std::string_view name, const char* where) {
  for (const CacheFormat format :
       {CacheFormat::kDense, CacheFormat::kFp8, CacheFormat::kFp8DsMla, CacheFormat::kNvFp4}) {
    if (name == name_of(format)) return format;
  }
  HELICORE_CHECK(false, where, "cache_format must be one of auto, fp8, fp8_ds_mla, nvfp4, got ",
                 name);
  return CacheFormat::kDense;
}

void check_cache_widths(CacheFormat format, int64_t rank, int64_t rope_dim, const char* where) {
  const int64_t multiple = rank_multiple(format);
  HELICORE_CHECK(rank >= multiple && rank % multiple == 0 && rank <= 65536, where,
                 "kv_lora_rank must be a multiple of ", multiple, " from ", multiple,
                 " to 65536 in cache format ", name_of(format), ", got ", rank);
  HELICORE_CHECK(rope_dim >= 0 && rope_dim % 4 == 0 && rope_dim <= 65536, where,
                 "the rope width must be a multiple of 4 from 0 to 65536, got ", rope_dim);
}

}  // namespace helicore::attention
