// Stand-ins for a model: what its layers would compute, made up but repeatable.
#pragma once

#include <cstdint>
#include <vector>

namespace example {

inline constexpr int32_t kNumLayers = 2;
inline constexpr int32_t kNumHeads = 8;
inline constexpr int32_t kLatentDim = 64;  // kv_lora_rank
inline constexpr int32_t kRopeDim = 16;
inline constexpr int32_t kRowDim = kLatentDim + kRopeDim;

// Rows [count, kRowDim] of tokens at positions first, first + 1, ... of one layer. A row depends on
// the token and its position alone, as it does where equal prefixes have equal rows.
std::vector<float> latent_rows(int32_t layer, const int32_t* tokens, int32_t first, int32_t count);

// Queries [count, kNumHeads, kRowDim].
std::vector<float> queries(int32_t layer, int32_t count);

// Attention of one query [kNumHeads, kRowDim] over rows [num_rows, kRowDim], written as plainly as
// possible: the first kLatentDim columns are the values. Returns [kNumHeads, kLatentDim].
std::vector<double> plain_attention(const float* query, const std::vector<float>& rows,
                                    double scale);

}  // namespace example
