// The draw for one row; used by sampling.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

namespace helicore::nn {

struct RowSettings {
  float temperature = 1.0f;  // > 0
  int32_t top_k = 0;
  float top_p = 1.0f;
  float min_p = 0.0f;
  uint64_t seed = 0;
  uint64_t position = 0;
};

// Bytes of scratch that draw_token() needs for rows of `size` logits.
[[nodiscard]] size_t draw_scratch_bytes(int64_t size);

// A token of the row, whose greatest logit is `top` (> -inf, no NaN in the row).
[[nodiscard]] int32_t draw_token(const float* row, int64_t size, float top,
                                 const RowSettings& settings, void* scratch);

}  // namespace helicore::nn
