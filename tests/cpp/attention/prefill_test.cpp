#include <gtest/gtest.h>

#include <cmath>

#include "attention/problem.h"
#include "helicore/attention/mla.h"
#include "helicore/core/error.h"
#include "helicore/core/thread_pool.h"
#include "helicore/nn/linear.h"

namespace helicore::attention {
namespace {

using testing::for_each_isa;
using testing::kNaN;
using testing::Problem;
using testing::Request;
using testing::Values;

// The expanded form of a Problem: queries of width nope + rope, one W_UK and W_UV per head.
struct Expanded {
  int64_t nope;
  int64_t v_dim;
  Problem base;  // its q is not used
  Values q;
  Values w_uk;
  Values w_uv;
  Values w_absorb;
  Values packed_uk;
  Values packed_uv;
  Values packed_absorb;
  Values out;
  std::vector<float> stats;

  Expanded(const testing::Shape& shape, std::vector<Request> requests, int64_t nope_dim, int64_t v)
      : nope(nope_dim), v_dim(v), base(shape, std::move(requests), 4) {
    std::mt19937 rng(11);
    const int64_t heads = shape.heads;
    auto random = [&](int64_t count, float deviation) {
      Values x(shape.dtype, count);
      x.randomize(rng, 0, count, deviation);
      return x;
    };
    q = random(base.num_tokens * heads * (nope + shape.rope), 1.0f);
    const float deviation = 1.0f / std::sqrt(static_cast<float>(shape.rank));
    w_uk = random(heads * nope * shape.rank, deviation);
    w_uv = random(heads * v_dim * shape.rank, deviation);
    w_absorb = Values(shape.dtype, heads * shape.rank * nope);
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t r = 0; r < shape.rank; ++r) {
        for (int64_t n = 0; n < nope; ++n) {
          w_absorb.set((h * shape.rank + r) * nope + n, w_uk.get((h * nope + n) * shape.rank + r));
        }
      }
    }
    packed_uk = pack(w_uk, nope, shape.rank);
    packed_uv = pack(w_uv, v_dim, shape.rank);
    packed_absorb = pack(w_absorb, shape.rank, nope);
    out = Values(shape.dtype, base.num_tokens * heads * v_dim);
    stats.assign(static_cast<size_t>(base.num_tokens * heads * 2), kNaN);
  }

  TensorView packed_view(Values& packed, int64_t n, int64_t k) {
    const int64_t heads = base.shape.heads;
    return base.shape.dtype == DType::kBFloat16 ? packed.view({heads, (n + 15) / 16, k / 2, 16, 2})
                                                : packed.view({heads, (n + 15) / 16, k, 16});
  }

  Values pack(Values& weight, int64_t n, int64_t k) {
    Values packed(base.shape.dtype, base.shape.heads * ((n + 15) / 16) * 16 * k);
    nn::pack_linear(weight.view({base.shape.heads, n, k}), packed_view(packed, n, k));
    return packed;
  }

  void prefill() {
    const auto b = static_cast<int64_t>(base.requests.size());
    const testing::Shape& s = base.shape;
    const TensorView stats_view =
        make_view(stats.data(), DType::kFloat32, {base.num_tokens, s.heads, 2});
    mla_prefill({.q = q.view({base.num_tokens, s.heads, nope + s.rope}),
                 .cache = base.cache.view({base.num_pages, s.page_size, base.width()}),
                 .block_table = make_view(base.table.data(), DType::kInt32, {b, base.max_pages}),
                 .cu_q = make_view(base.cu_q.data(), DType::kInt32, {b + 1}),
                 .kv_len = make_view(base.kv_len.data(), DType::kInt32, {b}),
                 .w_uk = packed_view(packed_uk, nope, s.rank),
                 .w_uv = packed_view(packed_uv, v_dim, s.rank),
                 .kv_lora_rank = s.rank,
                 .scale = base.scale,
                 .out = out.view({base.num_tokens, s.heads * v_dim}),
                 .stats = &stats_view});
  }

  // The same through absorb, decode and the value projection.
  Values absorbed() {
    const testing::Shape& s = base.shape;
    mla_absorb({.q = q.view({base.num_tokens, s.heads, nope + s.rope}),
                .w_absorb = packed_view(packed_absorb, s.rank, nope),
                .fused_q = base.q.view({base.num_tokens, s.heads, base.width()}),
                .kv_lora_rank = s.rank});
    base.decode();
    Values result(s.dtype, base.num_tokens * s.heads * v_dim);
    mla_project_v(base.out.view({base.num_tokens, s.heads, s.rank}),
                  packed_view(packed_uv, v_dim, s.rank),
                  result.view({base.num_tokens, s.heads * v_dim}));
    return result;
  }

  double difference(const Values& other) const {
    double worst = 0.0;
    for (int64_t i = 0; i < base.num_tokens * base.shape.heads * v_dim; ++i) {
      const double d = std::abs(out.get(i) - other.get(i));
      worst = std::isnan(d) ? 1e9 : std::max(worst, d);
    }
    return worst;
  }
};

TEST(MlaPrefill, agrees_with_the_absorbed_form_over_ragged_batches) {
  const std::vector<Request> requests{{5, 5}, {33, 200}, {1, 17}, {0, 3}, {4, 2}, {2, 0}};
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (int64_t page_size : {1, 16, 64}) {
      Expanded x({.heads = 3, .rank = 36, .rope = 12, .page_size = page_size, .dtype = dtype},
                 requests, 20, 12);
      for_each_isa([&](Isa isa) {
        x.prefill();
        EXPECT_LE(x.difference(x.absorbed()), dtype == DType::kFloat32 ? 2e-5 : 3e-2)
            << name_of(isa) << " page " << page_size << " " << name_of(dtype);
        for (size_t i = 0; i < x.stats.size(); i += 2) {
          EXPECT_TRUE(x.stats[i] == x.base.stats[i] ||
                      std::abs(x.stats[i] - x.base.stats[i]) < 0.1);
        }
      });
    }
  }
}

TEST(MlaPrefill, agrees_with_the_absorbed_form_on_random_shapes) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    std::mt19937 rng(seed);
    auto pick = [&](std::vector<int64_t> values) { return values[rng() % values.size()]; };
    std::vector<Request> requests(1 + rng() % 3);
    for (Request& r : requests) {
      r.num_q = static_cast<int64_t>(rng() % 50);
      r.kv_len = static_cast<int64_t>(rng() % static_cast<uint32_t>(pick({4, 70, 200})));
    }
    const DType dtype = rng() % 2 == 0 ? DType::kFloat32 : DType::kBFloat16;
    Expanded x({.heads = pick({1, 2, 5}),
                .rank = 4 * static_cast<int64_t>(1 + rng() % 20),
                .rope = 4 * static_cast<int64_t>(rng() % 5),
                .page_size = pick({1, 3, 16, 48, 64}),
                .dtype = dtype},
               requests, 4 * static_cast<int64_t>(1 + rng() % 12),
               4 * static_cast<int64_t>(1 + rng() % 12));
    set_isa(static_cast<Isa>(rng() % (static_cast<uint32_t>(detected_isa()) + 1)));
    x.prefill();
    ASSERT_LE(x.difference(x.absorbed()), dtype == DType::kFloat32 ? 3e-5 : 4e-2)
        << "seed " << seed << " on " << name_of(active_isa());
  }
  set_isa(detected_isa());
}

TEST(MlaPrefill, the_comparison_sees_a_shifted_causal_edge) {
  Expanded x({.heads = 2, .dtype = DType::kBFloat16}, {{20, 40}}, 16, 16);
  const Values want = x.absorbed();
  x.prefill();
  EXPECT_LE(x.difference(want), 3e-2);
  x.base.kv_len[0] = 39;
  x.prefill();
  EXPECT_GT(x.difference(want), 3e-2);
}

TEST(MlaPrefill, bits_do_not_depend_on_threads_and_chunk_edges_are_seamless) {
  Expanded x({.heads = 2, .rank = 64, .page_size = 64, .dtype = DType::kBFloat16},
             {{700, 1500}, {9, 9}}, 128, 128);
  set_num_threads(1);
  x.prefill();
  const Values want = x.out;
  const std::vector<float> want_stats = x.stats;
  EXPECT_LE(x.difference(x.absorbed()), 3e-2);
  for (int threads : {2, 5}) {
    set_num_threads(threads);
    x.prefill();
    EXPECT_EQ(x.difference(want), 0.0);
    EXPECT_EQ(x.stats, want_stats);
  }
  set_num_threads(2);
}

}  // namespace
}  // namespace helicore::attention
