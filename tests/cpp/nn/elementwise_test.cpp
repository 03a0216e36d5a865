// Norms, gating, MLP and embedding against double precision.
#include "helicore/nn/elementwise.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "helicore/core/error.h"
#include "helicore/core/thread_pool.h"
#include "nn/matrix.h"

namespace helicore::nn {
namespace {

using testing::available_isas;
using testing::Matrix;
using testing::Packed;

constexpr DType kBf16 = DType::kBFloat16;
constexpr DType kF32 = DType::kFloat32;

class ElementwiseTest : public ::testing::Test {
 protected:
  void TearDown() override {
    set_isa(detected_isa());
    set_num_threads(2);
  }
  std::mt19937 rng_{11};
};

double normalised(const Matrix& x, int64_t r, int64_t c, double eps) {
  double sum = 0;
  for (int64_t i = 0; i < x.cols; ++i) sum += double(x.at(r, i)) * x.at(r, i);
  return x.at(r, c) / std::sqrt(sum / static_cast<double>(x.cols) + eps);
}

TensorView vector_view(Matrix& m) {
  TensorView v = m.view();
  v.ndim = 1;
  v.shape[0] = m.cols;
  v.strides[0] = 1;
  return v;
}

TEST_F(ElementwiseTest, rms_norm_equals_double_precision_at_every_instruction_set) {
  for (Isa isa : available_isas()) {
    set_isa(isa);
    for (DType dtype : {kBf16, kF32}) {
      for (int64_t width : {1, 4, 16, 33, 100, 256}) {
        Matrix x(5, width, dtype, rng_), w(1, width, dtype, rng_), out(5, width, dtype, rng_, true);
        rms_norm(x.view(), vector_view(w), 1e-5f, out.view());
        for (int64_t r = 0; r < 5; ++r) {
          for (int64_t c = 0; c < width; ++c) {
            const double expected = normalised(x, r, c, 1e-5) * w.at(0, c);
            const double relative = dtype == kBf16 ? 0.009 : 2e-6;
            ASSERT_NEAR(out.at(r, c), expected, std::abs(expected) * relative + 1e-30)
                << name_of(isa) << " width " << width;
          }
        }
      }
    }
  }
}

TEST_F(ElementwiseTest, leaving_out_eps_is_outside_the_tolerance) {
  Matrix x(1, 64, kF32, rng_), w(1, 64, kF32, rng_), out(1, 64, kF32, rng_, true);
  for (float& v : x.f) v *= 1e-3f;
  rms_norm(x.view(), vector_view(w), 1e-5f, out.view());
  const double wrong = normalised(x, 0, 3, 0.0) * w.at(0, 3);
  EXPECT_GT(std::abs(out.at(0, 3) - wrong), std::abs(wrong) * 2e-6);
}

TEST_F(ElementwiseTest, add_rms_norm_updates_the_residual_and_normalises_the_sum) {
  for (Isa isa : available_isas()) {
    set_isa(isa);
    for (DType dtype : {kBf16, kF32}) {
      Matrix x(3, 40, dtype, rng_), w(1, 40, dtype, rng_), residual(3, 40, dtype, rng_);
      Matrix sum(3, 40, dtype, rng_), out(3, 40, dtype, rng_, true),
          direct(3, 40, dtype, rng_, true);
      for (int64_t r = 0; r < 3; ++r) {
        for (int64_t c = 0; c < 40; ++c) {
          const auto i = static_cast<size_t>(r * 40 + c);
          const float value = x.at(r, c) + residual.at(r, c);
          sum.f[i] = value;
          sum.h[i] = BFloat16(value);
        }
      }
      add_rms_norm(x.view(), residual.view(), vector_view(w), 1e-6f, out.view());
      rms_norm(sum.view(), vector_view(w), 1e-6f, direct.view());
      const size_t bytes = 3 * 40 * size_of(dtype);
      EXPECT_EQ(std::memcmp(residual.view().data, sum.view().data, bytes), 0);
      EXPECT_EQ(std::memcmp(out.view().data, direct.view().data, bytes), 0);
    }
  }
}

TEST_F(ElementwiseTest, norm_of_a_row_does_not_depend_on_batch_or_threads) {
  Matrix x(2000, 96, kBf16, rng_), w(1, 96, kBf16, rng_);
  Matrix all(2000, 96, kBf16, rng_, true), one(1, 96, kBf16, rng_, true);
  set_num_threads(3);
  rms_norm(x.view(), vector_view(w), 1e-6f, all.view());
  set_num_threads(1);
  for (int64_t r = 0; r < 2000; r += 131) {
    TensorView row = x.view();
    row.data = row.ptr<BFloat16>() + r * 96;
    row.shape[0] = 1;
    rms_norm(row, vector_view(w), 1e-6f, one.view());
    ASSERT_EQ(std::memcmp(one.h.data(), all.h.data() + r * 96, 96 * 2), 0);
  }
}

TEST_F(ElementwiseTest, strided_rows_leave_the_gap_alone) {
  Matrix wide(4, 50, kBf16, rng_), w(1, 20, kBf16, rng_);
  const std::vector<BFloat16> before = wide.h;
  TensorView part = wide.view();
  part.shape[1] = 20;
  rms_norm(part, vector_view(w), 1e-6f, part);
  for (int64_t r = 0; r < 4; ++r) {
    for (int64_t c = 20; c < 50; ++c) {
      EXPECT_EQ(wide.h[static_cast<size_t>(r * 50 + c)].bits,
                before[static_cast<size_t>(r * 50 + c)].bits);
    }
  }
}

TEST_F(ElementwiseTest, silu_mul_is_right_for_extreme_gates) {
  const std::vector<float> gates = {0.0f, 1.0f, -1.0f, 200.0f, -200.0f, 1e-20f, -88.5f, NAN};
  for (Isa isa : available_isas()) {
    set_isa(isa);
    std::vector<float> gate_up(16, 2.0f), out(8);
    std::copy(gates.begin(), gates.end(), gate_up.begin());
    silu_mul(make_view(gate_up.data(), kF32, {1, 16}), make_view(out.data(), kF32, {1, 8}));
    for (size_t i = 0; i < 7; ++i) {
      const double expected = 2.0 * gates[i] / (1.0 + std::exp(-double(gates[i])));
      EXPECT_NEAR(out[i], expected, std::abs(expected) * 3e-6 + 1e-30) << name_of(isa) << gates[i];
    }
    EXPECT_TRUE(std::isnan(out[7])) << name_of(isa);
  }
}

TEST_F(ElementwiseTest, mlp_equals_two_products_with_gating_between) {
  for (Isa isa : available_isas()) {
    set_isa(isa);
    for (int64_t t : {0, 1, 3, 17, 64}) {
      const int64_t d = 36, i = 20;
      Matrix x(t, d, kF32, rng_), w13(2 * i, d, kF32, rng_), w2(d, i, kF32, rng_);
      Matrix out(t, d, kF32, rng_, true), res(t, d, kF32, rng_);
      Packed p13(w13.view(), 2), p2(w2.view());
      TensorView residual = res.view();
      mlp(MlpTensors{.x = x.view(),
                     .packed_gate_up = p13.view,
                     .packed_down = p2.view,
                     .out = out.view(),
                     .residual = &residual,
                     .intermediate = i});
      for (int64_t r = 0; r < t; ++r) {
        std::vector<double> h(i);
        for (int64_t n = 0; n < i; ++n) {
          double g = 0, u = 0;
          for (int64_t k = 0; k < d; ++k) {
            g += double(x.at(r, k)) * w13.at(n, k);
            u += double(x.at(r, k)) * w13.at(i + n, k);
          }
          h[static_cast<size_t>(n)] = g / (1 + std::exp(-g)) * u;
        }
        for (int64_t c = 0; c < d; ++c) {
          double y = res.at(r, c);
          for (int64_t n = 0; n < i; ++n) y += h[static_cast<size_t>(n)] * w2.at(c, n);
          ASSERT_NEAR(out.at(r, c), y, 2e-2) << name_of(isa);
        }
      }
    }
  }
}

TEST_F(ElementwiseTest, embedding_copies_rows_and_refuses_other_ids) {
  Matrix table(7, 5, kBf16, rng_), out(3, 5, kBf16, rng_, true);
  std::vector<int32_t> ids = {6, 0, 6};
  embedding(make_view(ids.data(), DType::kInt32, {3}), table.view(), out.view());
  for (int64_t r = 0; r < 3; ++r) {
    for (int64_t c = 0; c < 5; ++c) {
      EXPECT_EQ(out.at(r, c), table.at(ids[static_cast<size_t>(r)], c));
    }
  }
  for (int64_t bad : {int64_t{7}, int64_t{-1}, int64_t{1} << 40}) {
    std::vector<int64_t> wrong = {0, bad, 0};
    EXPECT_THROW(embedding(make_view(wrong.data(), DType::kInt64, {3}), table.view(), out.view()),
                 InvalidArgument);
  }
}

TEST_F(ElementwiseTest, mixed_dtypes_are_refused) {
  Matrix x(2, 8, kBf16, rng_), w(1, 8, kF32, rng_), out(2, 8, kBf16, rng_);
  EXPECT_THROW(rms_norm(x.view(), vector_view(w), 1e-6f, out.view()), InvalidArgument);
  EXPECT_THROW(silu_mul(x.view(), out.view()), InvalidArgument);
}

}  // namespace
}  // namespace helicore::nn
