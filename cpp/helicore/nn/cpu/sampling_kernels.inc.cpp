// Passes over one row of logits.
#include <array>
#include <cstdint>

#include "helicore/core/cpu/simd.h"
#include "helicore/nn/cpu/sampling_kernels.h"

namespace helicore::nn::HELICORE_ISA_NS {

using namespace ::helicore::HELICORE_ISA_NS;  // NOLINT: the vector types of this variant

namespace {

constexpr float kInfinity = __builtin_inff();

bool any_nan(const float* row, int64_t size) {
  int bad = 0;
  for (int64_t i = 0; i < size; ++i) bad |= row[i] != row[i];
  return bad != 0;
}

bool contains(const float* row, int64_t size, float value) {
  int found = 0;
  for (int64_t i = 0; i < size; ++i) found |= row[i] == value;
  return found != 0;
}

// The next 16 values of a row that has `left` more; lanes past its end are -inf.
VF load_or_low(const float* row, int64_t left) {
  if (left >= kLanes) return load(row);
  static constexpr auto kBounds = [] {
    std::array<float, 2 * kLanes> bounds{};
    for (int i = 0; i < 2 * kLanes; ++i) bounds[i] = i < kLanes ? kInfinity : -kInfinity;
    return bounds;
  }();
  const int kept = static_cast<int>(left);
  return min(load_n(row, kept), load(kBounds.data() + kLanes - kept));
}

}  // namespace

RowMax row_max_kernel(const float* row, int64_t size) {
  RowMax result;
  if (any_nan(row, size)) return result;
  VF a = set1(-kInfinity), b = a, c = a, d = a;
  int64_t i = 0;
  for (; i + 64 <= size; i += 64) {
    a = max(a, load(row + i));
    b = max(b, load(row + i + 16));
    c = max(c, load(row + i + 32));
    d = max(d, load(row + i + 48));
  }
  for (; i < size; i += 16) a = max(a, load_or_low(row + i, size - i));
  result.value = reduce_max(max(max(a, b), max(c, d)));
  if (result.value == -kInfinity) return result;
  int64_t at = 0;
  while (at + kSumBlock <= size && !contains(row + at, kSumBlock, result.value)) at += kSumBlock;
  while (row[at] != result.value) ++at;
  result.id = static_cast<int32_t>(at);
  return result;
}

double exp_sum_kernel(const float* row, int64_t size, float top) {
  double total = 0.0;
  const VF shift = set1(top);
  for (int64_t begin = 0; begin < size; begin += kSumBlock) {
    const int64_t end = begin + kSumBlock < size ? begin + kSumBlock : size;
    VF sum = zero();
    for (int64_t i = begin; i < end; i += 16) {
      sum = add(sum, exp(sub(load_or_low(row + i, end - i), shift)));
    }
    total += static_cast<double>(reduce_add(sum));
  }
  return total;
}

void exp_weights_kernel(const float* row, int64_t size, float top, float temperature,
                        float min_weight, float* weights, double* block_sums) {
  const VF shift = set1(top), scale = set1(temperature);
  for (int64_t begin = 0; begin < size; begin += kSumBlock) {
    const int64_t end = begin + kSumBlock < size ? begin + kSumBlock : size;
    for (int64_t i = begin; i < end; i += 16) {
      VF v = load_or_low(row + i, end - i);
      store(weights + i, exp(div(sub(v, shift), scale)));
    }
    if (top == kInfinity) {  // infinite logits share everything
      for (int64_t i = begin; i < end; ++i) weights[i] = row[i] == kInfinity ? 1.0f : 0.0f;
    }
    if (min_weight > 0.0f) {
      for (int64_t i = begin; i < end; ++i)
        weights[i] = weights[i] < min_weight ? 0.0f : weights[i];
    }
    VF sum = zero();
    for (int64_t i = begin; i < end; i += 16) sum = add(sum, load(weights + i));
    block_sums[begin / kSumBlock] = static_cast<double>(reduce_add(sum));
  }
}

void bucket_kernel(const float* row, int64_t size, float top, float temperature, uint8_t* buckets) {
  for (int64_t i = 0; i < size; ++i) {
    const float distance = 2.0f * ((top - row[i]) / temperature);
    buckets[i] = static_cast<uint8_t>(static_cast<int32_t>(distance < 63.0f ? distance : 63.0f));
  }
}

int64_t count_greater_kernel(const float* row, int64_t size, float value) {
  int64_t count = 0;
  for (int64_t begin = 0; begin < size; begin += kSumBlock) {
    const int64_t end = begin + kSumBlock < size ? begin + kSumBlock : size;
    int32_t part = 0;
    for (int64_t i = begin; i < end; ++i) part += row[i] > value ? 1 : 0;
    count += part;
  }
  return count;
}

}  // namespace helicore::nn::HELICORE_ISA_NS
