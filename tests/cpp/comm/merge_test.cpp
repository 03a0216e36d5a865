#include "helicore/comm/merge.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "helicore/core/cpu/isa.h"

namespace helicore::comm {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Partial {
  std::vector<float> o, stats;
};

constexpr int64_t kTokens = 3, kHeads = 4, kWidth = 5;

std::vector<Partial> random_partials(int ranks, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<Partial> partials(ranks);
  for (Partial& p : partials) {
    for (int64_t i = 0; i < kTokens * kHeads * kWidth; ++i) p.o.push_back(normal(random));
    for (int64_t i = 0; i < kTokens * kHeads; ++i) {
      p.stats.push_back(20 * normal(random));
      p.stats.push_back(1 + std::abs(normal(random)));
    }
  }
  return partials;
}

void make_empty(Partial& p, int64_t row) {
  p.stats[2 * row] = -kInfinity;
  p.stats[2 * row + 1] = 0.0f;
  for (int64_t i = 0; i < kWidth; ++i) p.o[row * kWidth + i] = kNan;
}

std::vector<float> merged(const std::vector<Partial>& partials, int64_t first, int64_t own) {
  std::vector<PartialView> views;
  for (const Partial& p : partials) views.push_back({p.o.data(), p.stats.data()});
  std::vector<float> out(kTokens * own * kWidth, kNan);
  merge_parts({.parts = views,
               .tokens = kTokens,
               .heads = kHeads,
               .width = kWidth,
               .first_head = first,
               .own_heads = own,
               .dtype = DType::kFloat32,
               .out = out.data()});
  return out;
}

double expected(const std::vector<Partial>& partials, int64_t row, int64_t i) {
  double most = -kInfinity;
  for (const Partial& p : partials) {
    if (p.stats[2 * row + 1] > 0) most = std::max<double>(most, p.stats[2 * row]);
  }
  double sum = 0;
  double total = 0;
  for (const Partial& p : partials) {
    if (!(p.stats[2 * row + 1] > 0)) continue;
    const double weight = p.stats[2 * row + 1] * std::exp2(p.stats[2 * row] - most);
    sum += weight * p.o[row * kWidth + i];
    total += weight;
  }
  return total > 0 ? sum / total : 0.0;
}

double worst_error(const std::vector<Partial>& partials, const std::vector<float>& out,
                   int64_t first, int64_t own) {
  double worst = 0;
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t h = 0; h < own; ++h) {
      for (int64_t i = 0; i < kWidth; ++i) {
        const double want = expected(partials, t * kHeads + first + h, i);
        const double error = std::abs(out[(t * own + h) * kWidth + i] - want);
        worst = std::isnan(error) ? kInfinity : std::max(worst, error);
      }
    }
  }
  return worst;
}

TEST(MergeTest, partials_of_any_number_of_ranks_give_the_whole) {
  for (int ranks : {1, 2, 3, 8}) {
    const auto partials = random_partials(ranks, 7);
    EXPECT_LT(worst_error(partials, merged(partials, 1, 2), 1, 2), 2e-6) << ranks;
  }
}

TEST(MergeTest, a_partial_without_keys_is_not_read) {
  auto partials = random_partials(3, 9);
  for (int64_t row : {0, 5, 11}) make_empty(partials[1], row);
  EXPECT_LT(worst_error(partials, merged(partials, 0, 4), 0, 4), 2e-6);
}

TEST(MergeTest, a_row_without_keys_anywhere_is_zero) {
  auto partials = random_partials(2, 3);
  for (Partial& p : partials) make_empty(p, 6);
  const auto out = merged(partials, 0, 4);
  for (int64_t i = 0; i < kWidth; ++i) EXPECT_EQ(out[6 * kWidth + i], 0.0f);
}

TEST(MergeTest, a_partial_that_underflows_is_not_read) {
  auto partials = random_partials(2, 4);
  for (int64_t row = 0; row < kTokens * kHeads; ++row) {
    partials[0].stats[2 * row] = 1000.0f;
    partials[1].stats[2 * row] = 1000.0f - 200.0f;
    for (int64_t i = 0; i < kWidth; ++i) partials[1].o[row * kWidth + i] = kNan;
  }
  const auto out = merged(partials, 0, 4);
  for (size_t i = 0; i < out.size(); ++i) EXPECT_EQ(out[i], partials[0].o[i]);
}

TEST(MergeTest, swapped_heads_are_no_match) {
  auto partials = random_partials(2, 5);
  const auto out = merged(partials, 0, 2);
  EXPECT_GT(worst_error(partials, out, 1, 2), 0.1);
}

TEST(SumTest, parts_are_added_in_order_and_rounded_once) {
  const std::vector<float> a = {1e8f, 1.0f, -0.0f, 1e-40f, kNan};
  const std::vector<float> b = {1.0f, 2.0f, -0.0f, 1e-40f, 1.0f};
  const std::vector<float> c = {-1e8f, 3.0f, -0.0f, -3e-40f, 1.0f};
  std::vector<float> out(5);
  const std::vector<const void*> parts = {a.data(), b.data(), c.data()};
  sum_parts(parts, out.data(), 5, DType::kFloat32);
  EXPECT_EQ(out[0], (1e8f + 1.0f) - 1e8f);
  EXPECT_EQ(out[1], 6.0f);
  EXPECT_EQ(out[2], 0.0f);
  EXPECT_EQ(out[3], (1e-40f + 1e-40f) + -3e-40f);
  EXPECT_TRUE(std::isnan(out[4]));
}

TEST(SumTest, every_instruction_set_gives_the_same_bits) {
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  const Isa best = detected_isa();
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (int64_t count : {1, 15, 16, 17, 100}) {
      std::vector<std::vector<uint32_t>> parts(3, std::vector<uint32_t>(100));
      for (auto& part : parts) {
        for (int64_t i = 0; i < count; ++i) {
          if (dtype == DType::kFloat32) {
            part[i] = std::bit_cast<uint32_t>(normal(random));
          } else {
            reinterpret_cast<BFloat16*>(part.data())[i] = BFloat16(normal(random));
          }
        }
      }
      const std::vector<const void*> views = {parts[0].data(), parts[1].data(), parts[2].data()};
      std::vector<uint32_t> want;
      for (Isa isa : {Isa::kGeneric, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16}) {
        if (isa > best) continue;
        set_isa(isa);
        std::vector<uint32_t> out(100, 0);
        sum_parts(views, out.data(), count, dtype);
        if (want.empty()) want = out;
        EXPECT_EQ(out, want) << name_of(isa);
      }
      set_isa(best);
    }
  }
}

TEST(SumTest, bfloat16_is_summed_in_float32) {
  const std::vector<BFloat16> big(1500, BFloat16(256.0f));
  const std::vector<BFloat16> small(1500, BFloat16(0.75f));
  std::vector<BFloat16> out(1500);
  const std::vector<const void*> parts = {big.data(), small.data(), small.data()};
  sum_parts(parts, out.data(), 1500, DType::kBFloat16);
  // 256 + 0.75 would round to 256 or 258 each time: 257.5 rounds to 258.
  for (BFloat16 value : out) EXPECT_EQ(static_cast<float>(value), 258.0f);
}

}  // namespace
}  // namespace helicore::comm
