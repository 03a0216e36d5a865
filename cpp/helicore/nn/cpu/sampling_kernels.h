// Entry points of sampling_kernels.inc.cpp, one set per instruction set.
#pragma once

#include <cstdint>

#include "helicore/core/cpu/isa.h"

namespace helicore::nn {

struct RowMax {
  float value = 0.0f;
  int32_t id = -1;  // lowest id of the greatest logit; -1 when the row has a NaN or only -inf
};

inline constexpr int64_t kSumBlock = 256;  // values of one partial sum

HELICORE_DECLARE_ISA(
    RowMax row_max_kernel(const float* row, int64_t size);
    // sum of e^(row - top), top finite.
    double exp_sum_kernel(const float* row, int64_t size, float top);
    // weights[i] = e^((row[i] - top) / temperature), 0 where below min_weight;
    // block_sums[j] = sum of block j. Both may be read up to whole blocks.
    void exp_weights_kernel(const float* row, int64_t size, float top, float temperature,
                            float min_weight, float* weights, double* block_sums);
    // buckets[i] = min(63, floor(2 (top - row[i]) / temperature)): ascending as logits fall.
    void bucket_kernel(const float* row, int64_t size, float top, float temperature,
                       uint8_t* buckets);
    int64_t count_greater_kernel(const float* row, int64_t size, float value);)

}  // namespace helicore::nn
