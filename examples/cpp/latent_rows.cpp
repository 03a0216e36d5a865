#include "latent_rows.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace example {
namespace {

// A number in [-1, 1) that depends on all four arguments.
float noise(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
  uint64_t x = a * 0x9e3779b97f4a7c15u + b * 0xbf58476d1ce4e5b9u + c * 0x94d049bb133111ebu + d;
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9u;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebu;
  x ^= x >> 31;
  return static_cast<float>(x >> 40) / static_cast<float>(1 << 23) - 1.0f;
}

}  // namespace

std::vector<float> latent_rows(int32_t layer, const int32_t* tokens, int32_t first, int32_t count) {
  std::vector<float> rows;
  rows.reserve(static_cast<size_t>(count) * kRowDim);
  for (int32_t i = 0; i < count; ++i) {
    const auto token = static_cast<uint64_t>(tokens[i]);
    const auto position = static_cast<uint64_t>(first + i);
    for (uint64_t column = 0; column < kRowDim; ++column) {
      rows.push_back(noise(static_cast<uint64_t>(layer), token, position, column));
    }
  }
  return rows;
}

std::vector<float> queries(int32_t layer, int32_t count) {
  std::vector<float> result;
  const uint64_t size = static_cast<uint64_t>(count) * kNumHeads * kRowDim;
  for (uint64_t i = 0; i < size; ++i) {
    result.push_back(noise(7, static_cast<uint64_t>(layer), i, 1));
  }
  return result;
}

std::vector<double> plain_attention(const float* query, const std::vector<float>& rows,
                                    double scale) {
  const size_t num_rows = rows.size() / kRowDim;
  std::vector<double> out(size_t{kNumHeads} * kLatentDim, 0.0);
  for (size_t head = 0; head < kNumHeads; ++head) {
    std::vector<double> scores(num_rows, 0.0);
    for (size_t row = 0; row < num_rows; ++row) {
      for (size_t i = 0; i < kRowDim; ++i) {
        scores[row] += double{query[head * kRowDim + i]} * double{rows[row * kRowDim + i]};
      }
      scores[row] *= scale;
    }
    const double highest = *std::max_element(scores.begin(), scores.end());
    double sum = 0.0;
    for (double& score : scores) {
      score = std::exp(score - highest);
      sum += score;
    }
    for (size_t row = 0; row < num_rows; ++row) {
      for (size_t i = 0; i < kLatentDim; ++i) {
        out[head * kLatentDim + i] += scores[row] / sum * double{rows[row * kRowDim + i]};
      }
    }
  }
  return out;
}

}  // namespace example
