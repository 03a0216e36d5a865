// Ragged paged problems and their answer in double precision, for the attention tests.
//
// Pages lie in random order; rows without a token are NaN and page ids past the end are absurd.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "helicore/attention/mla.h"
#include "helicore/core/cpu/isa.h"

namespace helicore::attention::testing {

inline constexpr int32_t kAbsurdPage = 2147480000;
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Values of bfloat16 or float32 with a view on them.
class Values {
 public:
  Values() = default;
  Values(DType dtype, int64_t count, float fill = kNaN) : dtype_(dtype) {
    if (dtype == DType::kFloat32) {
      f32_.assign(static_cast<size_t>(count), fill);
    } else {
      bf16_.assign(static_cast<size_t>(count), BFloat16(fill));
    }
  }
  [[nodiscard]] float get(int64_t i) const {
    return dtype_ == DType::kFloat32 ? f32_[static_cast<size_t>(i)]
                                     : static_cast<float>(bf16_[static_cast<size_t>(i)]);
  }
  void set(int64_t i, float value) {
    if (dtype_ == DType::kFloat32) {
      f32_[static_cast<size_t>(i)] = value;
    } else {
      bf16_[static_cast<size_t>(i)] = BFloat16(value);
    }
  }
  void randomize(std::mt19937& rng, int64_t begin, int64_t count, float deviation = 1.0f) {
    std::normal_distribution<float> normal(0.0f, deviation);
    for (int64_t i = 0; i < count; ++i) set(begin + i, normal(rng));
  }
  [[nodiscard]] TensorView view(std::initializer_list<int64_t> shape) {
    void* data = dtype_ == DType::kFloat32 ? static_cast<void*>(f32_.data()) : bf16_.data();
    return make_view(data, dtype_, shape);
  }

 private:
  DType dtype_ = DType::kFloat32;
  std::vector<float> f32_;
  std::vector<BFloat16> bf16_;
};

struct Request {
  int64_t num_q = 1;
  int64_t kv_len = 1;
};

struct Shape {
  int64_t heads = 4;
  int64_t rank = 32;
  int64_t rope = 8;
  int64_t page_size = 16;
  DType dtype = DType::kFloat32;
};

// Queries of width rank + rope (absorbed form) over a paged cache.
struct Problem {
  Shape shape;
  std::vector<Request> requests;
  std::vector<int32_t> table;
  std::vector<int32_t> cu_q{0};
  std::vector<int32_t> kv_len;
  int64_t max_pages = 2;
  int64_t num_pages = 3;
  int64_t num_tokens = 0;
  float scale = 0.2f;
  Values cache;
  Values q;
  Values out;
  std::vector<float> stats;

  [[nodiscard]] int64_t width() const { return shape.rank + shape.rope; }

  Problem(const Shape& s, std::vector<Request> list, uint32_t seed)
      : shape(s), requests(std::move(list)) {
    std::mt19937 rng(seed);
    for (const Request& r : requests) {
      const int64_t pages = (r.kv_len + s.page_size - 1) / s.page_size;
      max_pages = std::max(max_pages, pages + 2);
      num_pages += pages;
      num_tokens += r.num_q;
      cu_q.push_back(static_cast<int32_t>(num_tokens));
      kv_len.push_back(static_cast<int32_t>(r.kv_len));
    }
    std::vector<int32_t> order(static_cast<size_t>(num_pages));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), rng);
    table.assign(requests.size() * static_cast<size_t>(max_pages), kAbsurdPage);
    cache = Values(s.dtype, num_pages * s.page_size * width());
    size_t used = 0;
    for (size_t b = 0; b < requests.size(); ++b) {
      for (int64_t t = 0; t < requests[b].kv_len; ++t) {
        int32_t& page =
            table[b * static_cast<size_t>(max_pages) + static_cast<size_t>(t / s.page_size)];
        if (t % s.page_size == 0) page = order[used++];
        cache.randomize(rng, (page * s.page_size + t % s.page_size) * width(), width());
      }
    }
    q = Values(s.dtype, num_tokens * s.heads * width());
    q.randomize(rng, 0, num_tokens * s.heads * width());
    out = Values(s.dtype, num_tokens * s.heads * s.rank);
    stats.assign(static_cast<size_t>(num_tokens * s.heads * 2), kNaN);
  }

  [[nodiscard]] int64_t row_of(size_t request, int64_t token) const {
    const int32_t page = table[request * static_cast<size_t>(max_pages) +
                               static_cast<size_t>(token / shape.page_size)];
    return (page * shape.page_size + token % shape.page_size) * width();
  }

  void decode() {
    const auto b = static_cast<int64_t>(requests.size());
    const TensorView stats_view =
        make_view(stats.data(), DType::kFloat32, {num_tokens, shape.heads, 2});
    mla_decode({.q = q.view({num_tokens, shape.heads, width()}),
                .cache = cache.view({num_pages, shape.page_size, width()}),
                .block_table = make_view(table.data(), DType::kInt32, {b, max_pages}),
                .cu_q = make_view(cu_q.data(), DType::kInt32, {b + 1}),
                .kv_len = make_view(kv_len.data(), DType::kInt32, {b}),
                .scale = scale,
                .out = out.view({num_tokens, shape.heads, shape.rank}),
                .stats = &stats_view});
  }

  // Expected out[token, head, :] in double; the visible tokens of query i of a request are causal.
  [[nodiscard]] std::vector<double> expected(size_t request, int64_t i, int64_t head) const {
    const int64_t bound =
        std::max<int64_t>(0, requests[request].kv_len - requests[request].num_q + i + 1);
    const int64_t row = ((cu_q[request] + i) * shape.heads + head) * width();
    std::vector<double> score(static_cast<size_t>(bound));
    double top = -std::numeric_limits<double>::infinity();
    for (int64_t t = 0; t < bound; ++t) {
      double dot = 0.0;
      for (int64_t k = 0; k < width(); ++k) {
        dot += static_cast<double>(q.get(row + k)) *
               static_cast<double>(cache.get(row_of(request, t) + k));
      }
      score[static_cast<size_t>(t)] = dot * static_cast<double>(scale);
      top = std::max(top, score[static_cast<size_t>(t)]);
    }
    std::vector<double> o(static_cast<size_t>(shape.rank), 0.0);
    double total = 0.0;
    for (int64_t t = 0; t < bound; ++t) {
      const double p = std::exp(score[static_cast<size_t>(t)] - top);
      total += p;
      for (int64_t c = 0; c < shape.rank; ++c) {
        o[static_cast<size_t>(c)] += p * static_cast<double>(cache.get(row_of(request, t) + c));
      }
    }
    for (double& x : o) x = total > 0.0 ? x / total : 0.0;
    return o;
  }
};

// Runs `fn` at every instruction set that this CPU has, then restores the best one.
template <typename Fn>
void for_each_isa(Fn&& fn) {
  for (int level = 0; level <= static_cast<int>(detected_isa()); ++level) {
    set_isa(static_cast<Isa>(level));
    fn(static_cast<Isa>(level));
  }
  set_isa(detected_isa());
}

}  // namespace helicore::attention::testing
