#include "helicore/quant/norm_epilogue.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <set>
#include <vector>

#include "helicore/core/error.h"

namespace helicore::quant {
namespace {

constexpr int64_t kRows = 9, kWidth = 256;

std::vector<float> random_values(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

TensorView matrix(std::vector<float>& values) {
  return make_view(values.data(), DType::kFloat32, {kRows, kWidth});
}

TEST(NormEpilogueTest, a_norm_with_a_residual_is_that_of_float64) {
  auto x = random_values(kRows * kWidth, 1);
  auto residual = random_values(kRows * kWidth, 2);
  auto weight = random_values(kWidth, 3);
  std::vector<float> norm(x.size());
  std::vector<float> sum(x.size());
  const TensorView x_view = matrix(x);
  const TensorView residual_view = matrix(residual);
  const TensorView weight_view = make_view(weight.data(), DType::kFloat32, {kWidth});
  const TensorView norm_view = matrix(norm);
  const TensorView sum_view = matrix(sum);
  apply_epilogue(make_epilogue(AllReduceFusion::kResidualRmsNorm, x_view,
                               {.residual = &residual_view,
                                .residual_out = &sum_view,
                                .weight = &weight_view,
                                .norm = &norm_view},
                               "test"),
                 x_view);
  for (int64_t r = 0; r < kRows; ++r) {
    double squares = 0;
    for (int64_t i = 0; i < kWidth; ++i) {
      const int64_t at = r * kWidth + i;
      EXPECT_EQ(sum[at], x[at] + residual[at]);
      squares += double{sum[at]} * sum[at];
    }
    const double inverse = 1 / std::sqrt(squares / kWidth + 1e-6);
    for (int64_t i = 0; i < kWidth; ++i) {
      const int64_t at = r * kWidth + i;
      EXPECT_NEAR(norm[at], sum[at] * inverse * weight[i], 1e-5);
    }
  }
}

TEST(NormEpilogueTest, the_residual_and_the_norm_may_be_written_over_their_inputs) {
  auto x = random_values(kRows * kWidth, 1);
  auto residual = random_values(kRows * kWidth, 2);
  auto weight = random_values(kWidth, 3);
  const TensorView weight_view = make_view(weight.data(), DType::kFloat32, {kWidth});
  auto x2 = x;
  auto residual2 = residual;
  std::vector<float> norm(x.size());
  std::vector<float> sum(x.size());
  const auto run = [&](std::vector<float>& in, std::vector<float>& other, std::vector<float>& out,
                       std::vector<float>& other_out) {
    const TensorView a = matrix(in), b = matrix(other), c = matrix(out), d = matrix(other_out);
    apply_epilogue(
        make_epilogue(AllReduceFusion::kResidualRmsNorm, a,
                      {.residual = &b, .residual_out = &d, .weight = &weight_view, .norm = &c},
                      "test"),
        a);
  };
  run(x, residual, norm, sum);
  run(x2, residual2, x2, residual2);
  EXPECT_EQ(x2, norm);
  EXPECT_EQ(residual2, sum);
}

TEST(NormEpilogueTest, every_fusion_has_a_name_and_takes_what_its_traits_say) {
  std::set<std::string_view> names;
  auto x = random_values(kRows * kWidth, 1);
  auto weight = random_values(kWidth, 3);
  std::vector<float> norm(x.size());
  const TensorView x_view = matrix(x);
  const TensorView norm_view = matrix(norm);
  const TensorView weight_view = make_view(weight.data(), DType::kFloat32, {kWidth});
  for (int i = 0; i < kNumAllReduceFusions; ++i) {
    const auto fusion = static_cast<AllReduceFusion>(i);
    const FusionTraits& traits = traits_of(fusion);
    EXPECT_TRUE(names.insert(traits.name).second);
    const NormEpilogueTensors without_residual{.weight = &weight_view, .norm = &norm_view};
    if (fusion == AllReduceFusion::kRmsNorm) {
      EXPECT_NO_THROW((void)make_epilogue(fusion, x_view, without_residual, "test"));
    } else {
      EXPECT_THROW((void)make_epilogue(fusion, x_view, without_residual, "test"), InvalidArgument);
    }
  }
}

}  // namespace
}  // namespace helicore::quant
