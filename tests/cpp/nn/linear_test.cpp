// Packed linear layers against double-precision sums, at every instruction set.
#include "helicore/nn/linear.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "helicore/core/cpu/isa.h"
#include "helicore/core/error.h"
#include "helicore/core/thread_pool.h"
#include "nn/matrix.h"

namespace helicore::nn {
namespace {

using testing::available_isas;
using testing::Matrix;
using testing::Packed;

class LinearTest : public ::testing::Test {
 protected:
  void TearDown() override {
    set_isa(detected_isa());
    set_num_threads(2);
  }
  std::mt19937 rng_{7};
};

double tolerance(const Matrix& x, const Matrix& w, int64_t r, int64_t n, DType out) {
  double sum = 0;
  for (int64_t i = 0; i < x.cols; ++i) sum += std::abs(double(x.at(r, i)) * w.at(n, i));
  return sum * (out == DType::kBFloat16 ? 0.004 : 2e-6) + 1e-6;
}

double exact(const Matrix& x, const Matrix& w, int64_t r, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < x.cols; ++i) sum += double(x.at(r, i)) * w.at(n, i);
  return sum;
}

struct Case {
  int64_t t, n, k;
  DType x, w, out;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  const DType b = DType::kBFloat16, f = DType::kFloat32;
  for (int64_t t : {0, 1, 2, 3, 5, 16, 17, 64, 300}) {
    for (auto [n, k] :
         {std::pair<int64_t, int64_t>{1, 1}, {16, 2}, {17, 7}, {130, 33}, {256, 64}}) {
      all.push_back({t, n, k, b, b, b});
      all.push_back({t, n, k, f, f, f});
      all.push_back({t, n, k, f, b, f});
      all.push_back({t, n, k, b, f, f});
    }
  }
  return all;
}

TEST_F(LinearTest, product_equals_the_double_precision_sum_at_every_instruction_set) {
  for (Isa isa : available_isas()) {
    set_isa(isa);
    for (const Case& c : cases()) {
      Matrix x(c.t, c.k, c.x, rng_), w(c.n, c.k, c.w, rng_), out(c.t, c.n, c.out, rng_, true);
      Packed packed(w.view());
      linear(LinearTensors{
          .x = x.view(), .packed = packed.view, .out = out.view(), .out_features = c.n});
      for (int64_t r = 0; r < c.t; ++r) {
        for (int64_t n = 0; n < c.n; ++n) {
          ASSERT_NEAR(out.at(r, n), exact(x, w, r, n), tolerance(x, w, r, n, c.out))
              << name_of(isa) << " t " << c.t << " n " << c.n << " k " << c.k << " at " << r << ", "
              << n;
        }
      }
    }
  }
}

TEST_F(LinearTest, a_wrong_element_is_outside_the_tolerance) {
  Matrix x(1, 33, DType::kBFloat16, rng_), w(17, 33, DType::kBFloat16, rng_);
  Matrix out(1, 17, DType::kBFloat16, rng_, true);
  Packed packed(w.view());
  linear(
      LinearTensors{.x = x.view(), .packed = packed.view, .out = out.view(), .out_features = 17});
  // Leaving out the last product must show.
  double shorter = exact(x, w, 0, 16) - double(x.at(0, 32)) * w.at(16, 32);
  EXPECT_GT(std::abs(out.at(0, 16) - shorter), tolerance(x, w, 0, 16, DType::kBFloat16));
}

TEST_F(LinearTest, bits_of_a_row_do_not_depend_on_batch_or_threads) {
  for (Isa isa : available_isas()) {
    set_isa(isa);
    for (DType dtype : {DType::kBFloat16, DType::kFloat32}) {
      Matrix x(300, 129, dtype, rng_), w(203, 129, dtype, rng_);
      Packed packed(w.view());
      Matrix all(300, 203, dtype, rng_, true), one(1, 203, dtype, rng_, true);
      for (int threads : {1, 2, 3}) {
        set_num_threads(threads);
        Matrix again(300, 203, dtype, rng_, true);
        TensorView out = threads == 1 ? all.view() : again.view();
        linear(
            LinearTensors{.x = x.view(), .packed = packed.view, .out = out, .out_features = 203});
        const size_t bytes = size_of(dtype) * 300 * 203;
        ASSERT_EQ(std::memcmp(all.view().data, out.data, bytes), 0) << name_of(isa);
        for (int64_t r : {0, 5, 95, 96, 299}) {
          TensorView row = x.view();
          row.data = row.ptr<char>() + static_cast<size_t>(r * 129) * size_of(dtype);
          row.shape[0] = 1;
          linear(LinearTensors{
              .x = row, .packed = packed.view, .out = one.view(), .out_features = 203});
          const char* expected =
              all.view().ptr<char>() + static_cast<size_t>(r * 203) * size_of(dtype);
          ASSERT_EQ(std::memcmp(expected, one.view().data, size_of(dtype) * 203), 0)
              << name_of(isa) << " row " << r;
        }
      }
    }
  }
}

TEST_F(LinearTest, a_nan_row_leaves_other_rows_alone) {
  Matrix x(6, 31, DType::kBFloat16, rng_), w(40, 31, DType::kBFloat16, rng_);
  for (int64_t i = 0; i < 31; ++i) x.h[static_cast<size_t>(2 * 31 + i)] = BFloat16(NAN);
  Packed packed(w.view());
  Matrix out(6, 40, DType::kFloat32, rng_, true);
  linear(
      LinearTensors{.x = x.view(), .packed = packed.view, .out = out.view(), .out_features = 40});
  for (int64_t r = 0; r < 6; ++r) {
    for (int64_t n = 0; n < 40; ++n) EXPECT_EQ(std::isnan(out.at(r, n)), r == 2);
  }
}

TEST_F(LinearTest, unpacking_restores_the_weight) {
  for (DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (int64_t groups : {1, 2}) {
      Matrix w(34, 7, dtype, rng_), back(34, 7, dtype, rng_, true);
      Packed packed(w.view(), groups);
      unpack_linear(packed.view, back.view(), groups);
      EXPECT_EQ(std::memcmp(w.view().data, back.view().data, size_of(dtype) * 34 * 7), 0);
    }
  }
}

TEST_F(LinearTest, silu_mul_bias_and_residual_are_applied_before_one_rounding) {
  for (Isa isa : available_isas()) {
    set_isa(isa);
    Matrix x(9, 50, DType::kFloat32, rng_), w(2 * 20, 50, DType::kFloat32, rng_);
    Matrix out(9, 20, DType::kFloat32, rng_, true), res(9, 20, DType::kFloat32, rng_);
    Packed packed(w.view(), 2);
    TensorView residual = res.view();
    linear(LinearTensors{.x = x.view(),
                         .packed = packed.view,
                         .out = out.view(),
                         .residual = &residual,
                         .out_features = 40,
                         .activation = Activation::kSiluMul});
    for (int64_t r = 0; r < 9; ++r) {
      for (int64_t n = 0; n < 20; ++n) {
        double g = exact(x, w, r, n), u = exact(x, w, r, 20 + n);
        EXPECT_NEAR(out.at(r, n), g / (1 + std::exp(-g)) * u + res.at(r, n), 2e-3);
      }
    }
    Matrix bias(1, 40, DType::kBFloat16, rng_), plain(9, 40, DType::kFloat32, rng_, true);
    Packed whole(w.view());
    TensorView b = make_view(bias.h.data(), DType::kBFloat16, {40});
    linear(LinearTensors{
        .x = x.view(), .packed = whole.view, .out = plain.view(), .bias = &b, .out_features = 40});
    EXPECT_NEAR(plain.at(3, 37), exact(x, w, 3, 37) + bias.at(0, 37), 1e-4);
  }
}

TEST_F(LinearTest, batched_product_uses_each_heads_own_matrix) {
  const int64_t heads = 3, t = 5, n = 20, k = 11;
  Matrix x(t, heads * k, DType::kBFloat16, rng_), w(heads * n, k, DType::kBFloat16, rng_);
  TensorView w3 = make_view(w.h.data(), DType::kBFloat16, {heads, n, k});
  std::vector<BFloat16> storage(static_cast<size_t>(heads * packed_numel(DType::kBFloat16, n, k)));
  TensorView packed = make_view(storage.data(), DType::kBFloat16, {heads, 2, (k + 1) / 2, 16, 2});
  pack_linear(w3, packed);
  Matrix out(t, heads * n, DType::kFloat32, rng_, true);
  batched_linear(make_view(x.h.data(), DType::kBFloat16, {t, heads, k}), packed,
                 make_view(out.f.data(), DType::kFloat32, {t, heads, n}));
  for (int64_t r = 0; r < t; ++r) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t c = 0; c < n; ++c) {
        double sum = 0;
        for (int64_t i = 0; i < k; ++i) sum += double(x.at(r, h * k + i)) * w.at(h * n + c, i);
        EXPECT_NEAR(out.at(r, h * n + c), sum, 1e-4);
      }
    }
  }
}

TEST_F(LinearTest, wrong_shapes_are_refused_by_name) {
  Matrix x(2, 8, DType::kFloat32, rng_), w(16, 8, DType::kFloat32, rng_);
  Matrix out(2, 16, DType::kFloat32, rng_), narrow(2, 15, DType::kFloat32, rng_);
  Packed packed(w.view());
  EXPECT_THROW(linear(LinearTensors{
                   .x = x.view(), .packed = packed.view, .out = narrow.view(), .out_features = 16}),
               InvalidArgument);
  EXPECT_THROW(linear(LinearTensors{
                   .x = x.view(), .packed = packed.view, .out = out.view(), .out_features = 17}),
               InvalidArgument);
  EXPECT_THROW(linear(LinearTensors{
                   .x = out.view(), .packed = packed.view, .out = out.view(), .out_features = 16}),
               InvalidArgument);
}

}  // namespace
}  // namespace helicore::nn
