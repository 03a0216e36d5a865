// How bindings name the format of cached rows.
#pragma once

#include "helicore/attention/cache_format.h"

namespace helicore::bindings {

// InvalidArgument naming cache_format for a format that there is not.
inline attention::CacheCoding cache_coding(const char* format, float scale) {
  return {.format = attention::parse_cache_format(format, "attention.cache_format"),
          .scale = scale};
}

}  // namespace helicore::bindings
