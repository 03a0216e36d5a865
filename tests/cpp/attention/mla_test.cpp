#include "helicore/attention/mla.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "attention/problem.h"
#include "helicore/core/error.h"
#include "helicore/core/softmax_stats.h"

namespace helicore::attention {
namespace {

using testing::for_each_isa;
using testing::kNaN;
using testing::Values;

TEST(MlaAppend, writes_only_its_slots_between_guard_rows) {
  constexpr int64_t kRank = 20;
  constexpr int64_t kRope = 8;
  constexpr int64_t kWidth = kRank + kRope;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for_each_isa([&](Isa) {
      Values cache(dtype, 3 * 4 * kWidth);
      Values kv_a(dtype, 3 * kWidth);
      std::mt19937 rng(1);
      kv_a.randomize(rng, 0, 3 * kWidth);
      Values weight(dtype, kRank, 2.0f);
      std::vector<float> table(10 * kRope);
      for (size_t p = 0; p < 10; ++p) {
        for (size_t i = 0; i < kRope / 2; ++i) {
          table[p * kRope + i] = std::cos(static_cast<float>(p) / static_cast<float>(i + 1));
          table[p * kRope + kRope / 2 + i] =
              std::sin(static_cast<float>(p) / static_cast<float>(i + 1));
        }
      }
      std::vector<int64_t> slots{5, -1, 11};
      std::vector<int32_t> positions{9, 3, 0};
      const TensorView positions_view = make_view(positions.data(), DType::kInt32, {3});
      const TensorView table_view = make_view(table.data(), DType::kFloat32, {10, kRope});
      const TensorView weight_view = weight.view({kRank});
      mla_append({.kv_a = kv_a.view({3, kWidth}),
                  .cache = cache.view({3, 4, kWidth}),
                  .slots = make_view(slots.data(), DType::kInt64, {3}),
                  .kv_lora_rank = kRank,
                  .positions = &positions_view,
                  .cos_sin = &table_view,
                  .norm_weight = &weight_view});
      for (int64_t slot = 0; slot < 12; ++slot) {
        const bool written = slot == 5 || slot == 11;
        for (int64_t k = 0; k < kWidth; ++k) {
          ASSERT_EQ(std::isnan(cache.get(slot * kWidth + k)), !written) << slot << " " << k;
        }
      }
      double sum = 0.0;
      for (int64_t k = 0; k < kRank; ++k) sum += std::pow(cache.get(5 * kWidth + k), 2);
      EXPECT_NEAR(sum / kRank, 4.0, 0.05);  // normalised to 1, times weight 2
      const float x0 = kv_a.get(kRank);
      const float x1 = kv_a.get(kRank + 1);
      EXPECT_NEAR(cache.get(5 * kWidth + kRank), x0 * std::cos(9.0f) - x1 * std::sin(9.0f), 2e-2);
      EXPECT_NEAR(cache.get(5 * kWidth + kRank + kRope / 2),
                  x1 * std::cos(9.0f) + x0 * std::sin(9.0f), 2e-2);
    });
  }
}

struct States {
  Values o_a{DType::kFloat32, 40, 1.0f};
  Values o_b{DType::kFloat32, 40, 3.0f};
  std::vector<float> stats_a{0.0f, 1.0f, 2.0f, 1.0f};
  std::vector<float> stats_b{0.0f, 1.0f, 0.0f, 4.0f};
  Values out{DType::kFloat32, 40};
  std::vector<float> stats{kNaN, kNaN, kNaN, kNaN};

  void merge() {
    merge_states({.o_a = o_a.view({2, 20}),
                  .stats_a = make_view(stats_a.data(), DType::kFloat32, {2, 2}),
                  .o_b = o_b.view({2, 20}),
                  .stats_b = make_view(stats_b.data(), DType::kFloat32, {2, 2}),
                  .out = out.view({2, 20}),
                  .stats = make_view(stats.data(), DType::kFloat32, {2, 2})});
  }
};

TEST(MergeStates, weights_partials_as_softmax_stats_do) {
  for_each_isa([&](Isa) {
    States s;
    s.merge();
    for (int64_t r = 0; r < 2; ++r) {
      const auto i = static_cast<size_t>(r) * 2;
      const MergeWeights want =
          merge_weights({s.stats_a[i], s.stats_a[i + 1]}, {s.stats_b[i], s.stats_b[i + 1]});
      EXPECT_NEAR(s.out.get(r * 20 + 19), want.a * 1.0f + want.b * 3.0f, 1e-6);
      EXPECT_FLOAT_EQ(s.stats[i], want.stats.m);
      EXPECT_FLOAT_EQ(s.stats[i + 1], want.stats.l);
    }
  });
}

TEST(MergeStates, skips_an_empty_side_whose_output_is_nan) {
  for_each_isa([&](Isa) {
    States s;
    s.o_b = Values(DType::kFloat32, 40, kNaN);
    s.stats_b = {-INFINITY, 0.0f, 7.0f, 0.0f};
    s.merge();
    for (int64_t i = 0; i < 40; ++i) EXPECT_EQ(s.out.get(i), 1.0f);
    EXPECT_EQ(s.stats, s.stats_a);
  });
}

TEST(MergeStates, names_a_wrong_shape) {
  States s;
  try {
    merge_states({.o_a = s.o_a.view({2, 20}),
                  .stats_a = make_view(s.stats_a.data(), DType::kFloat32, {2, 2}),
                  .o_b = s.o_b.view({1, 40}),
                  .stats_b = make_view(s.stats_b.data(), DType::kFloat32, {2, 2}),
                  .out = s.out.view({2, 20}),
                  .stats = make_view(s.stats.data(), DType::kFloat32, {2, 2})});
    FAIL() << "accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("o_b must have the shape of o_a"), std::string::npos);
  }
}

}  // namespace
}  // namespace helicore::attention
