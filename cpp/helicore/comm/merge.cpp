#include "helicore/comm/merge.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace helicore::comm {
namespace {

constexpr int64_t kChunk = 1024;  // elements summed at a time: they stay in the first cache

// `count` elements as float32. Memory of other ranks may be unaligned for its type.
void load(const std::byte* from, int64_t count, DType dtype, float* to) {
  if (dtype == DType::kFloat32) {
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    uint16_t bits;
    std::memcpy(&bits, from + 2 * i, sizeof bits);
    to[i] = std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  }
}

void store(const float* from, int64_t count, DType dtype, std::byte* to) {
  if (dtype == DType::kFloat32) {
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const BFloat16 value = BFloat16(from[i]);
    std::memcpy(to + 2 * i, &value, sizeof value);
  }
}

// Weights of the ranks' partials of one row; they sum to 1, or are all 0.
void row_weights(const MergeParams& p, int64_t row, std::span<float> weights) {
  float most = -std::numeric_limits<float>::infinity();
  std::array<float, 2> stats;
  const auto read = [&](size_t r) {
    std::memcpy(stats.data(), static_cast<const std::byte*>(p.parts[r].stats) + row * 8, 8);
  };
  for (size_t r = 0; r < p.parts.size(); ++r) {
    read(r);
    if (stats[1] > 0.0f) most = std::max(most, stats[0]);
  }
  float sum = 0.0f;
  for (size_t r = 0; r < p.parts.size(); ++r) {
    read(r);
    weights[r] = stats[1] > 0.0f ? stats[1] * std::exp2(stats[0] - most) : 0.0f;
    sum += weights[r];
  }
  for (float& weight : weights) weight = sum > 0.0f ? weight / sum : 0.0f;
}

}  // namespace

void sum_parts(std::span<const void* const> parts, void* out, int64_t count, DType dtype) {
  std::array<float, kChunk> sum;
  std::array<float, kChunk> next;
  const auto element = static_cast<int64_t>(size_of(dtype));
  for (int64_t begin = 0; begin < count; begin += kChunk) {
    const int64_t n = std::min(kChunk, count - begin);
    const int64_t offset = begin * element;
    load(static_cast<const std::byte*>(parts[0]) + offset, n, dtype, sum.data());
    for (size_t r = 1; r < parts.size(); ++r) {
      load(static_cast<const std::byte*>(parts[r]) + offset, n, dtype, next.data());
      for (int64_t i = 0; i < n; ++i) sum[i] += next[i];
    }
    store(sum.data(), n, dtype, static_cast<std::byte*>(out) + offset);
  }
}

void merge_parts(const MergeParams& p) {
  const auto element = static_cast<int64_t>(size_of(p.dtype));
  std::vector<float> weights(p.parts.size());
  std::vector<float> sum(p.width);
  std::vector<float> next(p.width);
  auto* out = static_cast<std::byte*>(p.out);
  for (int64_t t = 0; t < p.tokens; ++t) {
    for (int64_t h = 0; h < p.own_heads; ++h) {
      const int64_t row = t * p.heads + p.first_head + h;
      row_weights(p, row, weights);
      std::fill(sum.begin(), sum.end(), 0.0f);
      for (size_t r = 0; r < p.parts.size(); ++r) {
        if (weights[r] == 0.0f) continue;  // its o may be NaN
        load(static_cast<const std::byte*>(p.parts[r].o) + row * p.width * element, p.width,
             p.dtype, next.data());
        for (int64_t i = 0; i < p.width; ++i) sum[i] += weights[r] * next[i];
      }
      store(sum.data(), p.width, p.dtype, out + (t * p.own_heads + h) * p.width * element);
    }
  }
}

}  // namespace helicore::comm
