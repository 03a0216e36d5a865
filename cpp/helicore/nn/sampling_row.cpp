// Filters and draw for one row.
//
// Sorting a whole vocabulary is avoided: tokens fall into 64 buckets by their distance from the
// best logit (half a nat of the tempered logit wide), a cut by count or by mass falls into one
// bucket, and only that bucket is sorted. Bucket order agrees with logit order, as subtraction and
// division round monotonically.
#include "helicore/nn/sampling_row.h"

#include <algorithm>
#include <array>

#include "helicore/nn/cpu/sampling_kernels.h"
#include "helicore/nn/philox.h"

namespace helicore::nn {
namespace {

constexpr int kBuckets = 64;

struct Candidate {
  float logit;
  float weight;
  int32_t id;
};

bool ranks_before(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

struct Scratch {
  float* weights;         // [size], padded to whole blocks
  double* block_sums;     // [blocks]
  Candidate* candidates;  // [size]
  uint8_t* buckets;       // [size]
};

int64_t padded(int64_t size) { return (size + kSumBlock - 1) / kSumBlock * kSumBlock; }

Scratch carve(void* memory, int64_t size) {
  const auto n = static_cast<size_t>(padded(size));
  char* p = static_cast<char*>(memory);
  Scratch s{};
  s.block_sums = reinterpret_cast<double*>(p);
  p += n / kSumBlock * sizeof(double);
  s.weights = reinterpret_cast<float*>(p);
  p += n * sizeof(float);
  s.candidates = reinterpret_cast<Candidate*>(p);
  p += n * sizeof(Candidate);
  s.buckets = reinterpret_cast<uint8_t*>(p);
  return s;
}

// Inverse of the cumulative sum over all tokens in id order.
int32_t draw_from_all(const Scratch& s, int64_t size, double uniform) {
  const int64_t blocks = padded(size) / kSumBlock;
  double total = 0.0;
  for (int64_t b = 0; b < blocks; ++b) total += s.block_sums[b];
  const double target = uniform * total;
  double sum = 0.0;
  int64_t block = 0;
  while (block + 1 < blocks && sum + s.block_sums[block] <= target) sum += s.block_sums[block++];
  // Rounding may let the walk pass the end of its block; it then goes on into the next.
  int32_t last = -1;
  for (int64_t i = block * kSumBlock; i < size; ++i) {
    if (s.weights[i] == 0.0f) continue;
    last = static_cast<int32_t>(i);
    sum += static_cast<double>(s.weights[i]);
    if (sum > target) return last;
  }
  for (int64_t i = block * kSumBlock; last < 0 && i > 0; --i) {
    if (s.weights[i - 1] > 0.0f) last = static_cast<int32_t>(i - 1);
  }
  return last;
}

int32_t draw_from(const Candidate* c, int64_t count, double uniform) {
  double total = 0.0;
  for (int64_t i = 0; i < count; ++i) total += static_cast<double>(c[i].weight);
  const double target = uniform * total;
  double sum = 0.0;
  int32_t last = c[0].id;
  for (int64_t i = 0; i < count; ++i) {
    if (c[i].weight == 0.0f) continue;
    last = c[i].id;
    sum += static_cast<double>(c[i].weight);
    if (sum > target) break;
  }
  return last;
}

struct Histogram {
  std::array<int64_t, kBuckets> count{};
  std::array<double, kBuckets> mass{};
};

Histogram count_buckets(const Scratch& s, int64_t size) {
  // Four interleaved copies, so that runs of one bucket do not wait for each other.
  std::array<Histogram, 4> part{};
  for (int64_t i = 0; i < size; ++i) {
    if (s.weights[i] == 0.0f) continue;
    Histogram& h = part[static_cast<size_t>(i % 4)];
    ++h.count[s.buckets[i]];
    h.mass[s.buckets[i]] += static_cast<double>(s.weights[i]);
  }
  Histogram sum = part[0];
  for (int b = 0; b < kBuckets; ++b) {
    const auto i = static_cast<size_t>(b);
    sum.count[i] += part[1].count[i] + part[2].count[i] + part[3].count[i];
    sum.mass[i] += part[1].mass[i] + part[2].mass[i] + part[3].mass[i];
  }
  return sum;
}

// Moves tokens of non-zero weight in buckets up to `last` to the candidates, those of bucket `last`
// behind the others. Returns their number and, in `split`, where bucket `last` begins.
int64_t gather(const float* row, const Scratch& s, int64_t size, int last, int64_t* split) {
  int64_t front = 0;
  int64_t back = size;
  for (int64_t i = 0; i < size; ++i) {
    if (s.buckets[i] > last || s.weights[i] == 0.0f) continue;
    Candidate& c = s.buckets[i] < last ? s.candidates[front++] : s.candidates[--back];
    c = {row[i], s.weights[i], static_cast<int32_t>(i)};
  }
  *split = front;
  std::copy(s.candidates + back, s.candidates + size, s.candidates + front);
  return front + size - back;
}

// The candidates that top_k leaves.
int64_t keep_top_k(const float* row, const Scratch& s, int64_t size, const Histogram& h,
                   int64_t k) {
  int last = 0;
  for (int64_t seen = h.count[0]; seen < k && last + 1 < kBuckets;) {
    seen += h.count[static_cast<size_t>(++last)];
  }
  int64_t split = 0;
  const int64_t count = gather(row, s, size, last, &split);
  if (count <= k) return count;
  std::nth_element(s.candidates + split, s.candidates + k, s.candidates + count, ranks_before);
  return k;
}

// Cuts sorted candidates [begin, count) where the mass reaches `wanted`, `sum` being that of those
// before.
int64_t cut_by_mass(const Candidate* c, int64_t begin, int64_t count, double sum, double wanted) {
  for (int64_t i = begin; i < count; ++i) {
    sum += static_cast<double>(c[i].weight);
    if (sum >= wanted) return i + 1;
  }
  return count;
}

int64_t keep_top_p(const float* row, const Scratch& s, int64_t size, const Histogram& h,
                   double top_p) {
  double total = 0.0;
  for (double mass : h.mass) total += mass;
  const double wanted = top_p * total;
  int last = 0;
  double before = 0.0;
  while (last + 1 < kBuckets && before + h.mass[static_cast<size_t>(last)] < wanted) {
    before += h.mass[static_cast<size_t>(last++)];
  }
  int64_t split = 0;
  const int64_t count = gather(row, s, size, last, &split);
  std::sort(s.candidates + split, s.candidates + count, ranks_before);
  return std::max<int64_t>(1, cut_by_mass(s.candidates, split, count, before, wanted));
}

}  // namespace

size_t draw_scratch_bytes(int64_t size) {
  const auto n = static_cast<size_t>(padded(size));
  return n / kSumBlock * sizeof(double) + n * (sizeof(float) + sizeof(Candidate) + 1);
}

int32_t draw_token(const float* row, int64_t size, float top, const RowSettings& settings,
                   void* scratch) {
  const Scratch s = carve(scratch, size);
  HELICORE_DISPATCH_ISA(exp_weights_kernel(row, size, top, settings.temperature, settings.min_p,
                                           s.weights, s.block_sums));
  const double uniform = philox_uniform(settings.seed, settings.position);
  const bool by_count = settings.top_k > 0 && settings.top_k < size;
  const bool by_mass = settings.top_p < 1.0f;
  if (!by_count && !by_mass) return draw_from_all(s, size, uniform);
  HELICORE_DISPATCH_ISA(bucket_kernel(row, size, top, settings.temperature, s.buckets));
  const Histogram h = count_buckets(s, size);
  int64_t count;
  if (by_count) {
    count = keep_top_k(row, s, size, h, settings.top_k);
    if (by_mass) {
      std::sort(s.candidates, s.candidates + count, ranks_before);
      double total = 0.0;
      for (int64_t i = 0; i < count; ++i) total += static_cast<double>(s.candidates[i].weight);
      count = cut_by_mass(s.candidates, 0, count, 0.0, total * settings.top_p);
    }
  } else {
    count = keep_top_p(row, s, size, h, settings.top_p);
  }
  return draw_from(s.candidates, count, uniform);
}

}  // namespace helicore::nn
