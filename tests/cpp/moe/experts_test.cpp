// Experts against a loop in double precision.
#include "helicore/moe/experts.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "helicore/core/error.h"
#include "helicore/core/thread_pool.h"
#include "nn/matrix.h"

namespace helicore::moe {
namespace {

using nn::testing::available_isas;
using nn::testing::Matrix;

// Weights of a layer: experts are stacked along the rows of one matrix.
struct Layer {
  int64_t experts, width, inter, shared;
  Matrix w13, w2, s13, s2, gate;
  std::vector<float> p13, p2, ps13, ps2;
  TensorView v13, v2, vs13, vs2;

  Layer(int64_t e, int64_t d, int64_t i, int64_t s, DType dtype, std::mt19937& rng)
      : experts(e),
        width(d),
        inter(i),
        shared(s),
        w13(e * 2 * i, d, dtype, rng),
        w2(e * d, i, dtype, rng),
        s13(2 * s, d, dtype, rng),
        s2(d, s, dtype, rng),
        gate(e, d, DType::kFloat32, rng) {
    v13 = pack(w13, {e, 2 * i, d}, 2, &p13);
    v2 = pack(w2, {e, d, i}, 1, &p2);
    if (s > 0) {
      vs13 = pack(s13, {2 * s, d}, 2, &ps13);
      vs2 = pack(s2, {d, s}, 1, &ps2);
    }
  }
  static TensorView pack(Matrix& m, std::initializer_list<int64_t> shape, int64_t groups,
                         std::vector<float>* storage) {
    const TensorView plain = make_view(m.view().data, m.dtype, shape);
    const int64_t n = plain.size(-2), k = plain.size(-1);
    const int64_t lead = plain.ndim == 3 ? plain.size(0) : 1;
    storage->resize(static_cast<size_t>(lead * nn::packed_numel(m.dtype, n, k, groups)));
    const int64_t blocks = groups * ((n / groups + 15) / 16);
    const bool half = m.dtype == DType::kBFloat16;
    TensorView out = half ? make_view(storage->data(), m.dtype, {lead, blocks, (k + 1) / 2, 16, 2})
                          : make_view(storage->data(), m.dtype, {lead, blocks, k, 16});
    nn::pack_linear(plain, out, groups);
    if (plain.ndim == 3) return out;
    for (int d = 1; d < out.ndim; ++d) {
      out.shape[static_cast<size_t>(d) - 1] = out.shape[static_cast<size_t>(d)];
      out.strides[static_cast<size_t>(d) - 1] = out.strides[static_cast<size_t>(d)];
    }
    out.ndim -= 1;
    return out;
  }
  ExpertTensors tensors() const {
    return {.w13 = v13,
            .w2 = v2,
            .shared_w13 = shared > 0 ? &vs13 : nullptr,
            .shared_w2 = shared > 0 ? &vs2 : nullptr,
            .intermediate = inter,
            .shared_intermediate = shared};
  }
};

// y += scale * down(silu(gate x) * up x) for the matrices whose rows begin at row13 and row2.
void naive_mlp(const Matrix& x, int64_t t, const Matrix& w13, int64_t row13, const Matrix& w2,
               int64_t row2, int64_t inter, double scale, std::vector<double>* y) {
  for (int64_t n = 0; n < inter; ++n) {
    double g = 0, u = 0;
    for (int64_t k = 0; k < x.cols; ++k) {
      g += double(x.at(t, k)) * w13.at(row13 + n, k);
      u += double(x.at(t, k)) * w13.at(row13 + inter + n, k);
    }
    const double h = g / (1 + std::exp(-g)) * u * scale;
    for (int64_t d = 0; d < x.cols; ++d) (*y)[static_cast<size_t>(d)] += h * w2.at(row2 + d, n);
  }
}

struct Assignment {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

Assignment random_assignment(int64_t tokens, int64_t k, int64_t experts, std::mt19937& rng) {
  Assignment a;
  std::uniform_real_distribution<float> uniform(0.0f, 1.0f);
  for (int64_t t = 0; t < tokens; ++t) {
    std::vector<int32_t> order(static_cast<size_t>(experts));
    for (int64_t e = 0; e < experts; ++e) order[static_cast<size_t>(e)] = static_cast<int32_t>(e);
    std::shuffle(order.begin(), order.end(), rng);
    a.ids.insert(a.ids.end(), order.begin(), order.begin() + k);
    for (int64_t s = 0; s < k; ++s) a.weights.push_back(uniform(rng));
  }
  return a;
}

void forward(Matrix& x, Assignment& a, const Layer& layer, Matrix& out) {
  const int64_t k = x.rows == 0 ? 2 : static_cast<int64_t>(a.ids.size()) / x.rows;
  moe_forward(x.view(), make_view(a.ids.data(), DType::kInt32, {x.rows, k}),
              make_view(a.weights.data(), DType::kFloat32, {x.rows, k}), layer.tensors(),
              out.view());
}

class ExpertsTest : public ::testing::Test {
 protected:
  void TearDown() override {
    set_isa(detected_isa());
    set_num_threads(2);
  }
  std::mt19937 rng_{31};
};

TEST_F(ExpertsTest, output_equals_the_double_precision_loop) {
  for (Isa isa : available_isas()) {
    set_isa(isa);
    for (DType dtype : {DType::kBFloat16, DType::kFloat32}) {
      for (int64_t tokens : {0, 1, 2, 5, 33}) {
        for (auto [e, d, i, s] :
             {std::array<int64_t, 4>{4, 33, 10, 0}, {6, 96, 32, 17}, {3, 16, 1, 3}}) {
          Layer layer(e, d, i, s, dtype, rng_);
          Matrix x(tokens, d, dtype, rng_), out(tokens, d, dtype, rng_, true);
          Assignment a = random_assignment(tokens, 2, e, rng_);
          forward(x, a, layer, out);
          for (int64_t t = 0; t < tokens; ++t) {
            std::vector<double> y(static_cast<size_t>(d));
            for (int64_t j = 2 * t; j < 2 * t + 2; ++j) {
              const int32_t id = a.ids[static_cast<size_t>(j)];
              naive_mlp(x, t, layer.w13, id * 2 * i, layer.w2, id * d, i,
                        a.weights[static_cast<size_t>(j)], &y);
            }
            if (s > 0) naive_mlp(x, t, layer.s13, 0, layer.s2, 0, s, 1.0, &y);
            double largest = 1e-3;
            for (double v : y) largest = std::max(largest, std::abs(v));
            for (int64_t c = 0; c < d; ++c) {
              ASSERT_NEAR(out.at(t, c), y[static_cast<size_t>(c)],
                          largest * (dtype == DType::kBFloat16 ? 1.0 / 128 : 2e-5))
                  << name_of(isa) << " tokens " << tokens << " width " << d;
            }
          }
        }
      }
    }
  }
}

TEST_F(ExpertsTest, forgetting_the_shared_expert_is_outside_the_tolerance) {
  Layer with(4, 32, 16, 8, DType::kFloat32, rng_);
  Matrix x(3, 32, DType::kFloat32, rng_), a_out(3, 32, DType::kFloat32, rng_),
      b_out(3, 32, DType::kFloat32, rng_);
  Assignment a = random_assignment(3, 2, 4, rng_);
  forward(x, a, with, a_out);
  with.shared = 0;
  forward(x, a, with, b_out);
  double largest = 0, difference = 0;
  for (int64_t c = 0; c < 32; ++c) {
    largest = std::max<double>(largest, std::abs(a_out.at(0, c)));
    difference = std::max<double>(difference, std::abs(a_out.at(0, c) - b_out.at(0, c)));
  }
  EXPECT_GT(difference, largest * 2e-5);
}

TEST_F(ExpertsTest, bits_of_a_token_do_not_depend_on_batch_chunks_or_threads) {
  for (Isa isa : available_isas()) {
    set_isa(isa);
    for (DType dtype : {DType::kBFloat16, DType::kFloat32}) {
      const int64_t tokens = 1100, d = 40, k = 4;  // 4400 rows: three chunks
      Layer layer(8, d, 24, 16, dtype, rng_);
      Matrix x(tokens, d, dtype, rng_), all(tokens, d, dtype, rng_, true);
      Assignment a = random_assignment(tokens, k, 8, rng_);
      set_num_threads(3);
      forward(x, a, layer, all);
      const size_t row_bytes = static_cast<size_t>(d) * size_of(dtype);
      for (int64_t t : {0, 1, 511, 512, 700, 1099}) {
        set_num_threads(t % 2 == 0 ? 1 : 2);
        Matrix one(1, d, dtype, rng_), out(1, d, dtype, rng_, true);
        std::memcpy(one.view().data, x.view().ptr<char>() + static_cast<size_t>(t) * row_bytes,
                    row_bytes);
        Assignment part{{a.ids.begin() + t * k, a.ids.begin() + (t + 1) * k},
                        {a.weights.begin() + t * k, a.weights.begin() + (t + 1) * k}};
        forward(one, part, layer, out);
        ASSERT_EQ(
            std::memcmp(out.view().data,
                        all.view().ptr<char>() + static_cast<size_t>(t) * row_bytes, row_bytes),
            0)
            << name_of(isa) << " token " << t;
      }
    }
  }
}

TEST_F(ExpertsTest, all_tokens_on_one_expert_work) {
  Layer layer(4, 32, 16, 0, DType::kFloat32, rng_);
  Matrix x(200, 32, DType::kFloat32, rng_), out(200, 32, DType::kFloat32, rng_, true);
  Assignment a{std::vector<int32_t>(200, 3), std::vector<float>(200, 1.0f)};
  forward(x, a, layer, out);
  std::vector<double> y(32);
  naive_mlp(x, 199, layer.w13, 3 * 32, layer.w2, 3 * 32, 16, 1.0, &y);
  for (int64_t c = 0; c < 32; ++c) EXPECT_NEAR(out.at(199, c), y[static_cast<size_t>(c)], 1e-2);
}

TEST_F(ExpertsTest, a_nan_token_leaves_other_tokens_alone) {
  Layer layer(4, 32, 16, 8, DType::kBFloat16, rng_);
  Matrix x(9, 32, DType::kBFloat16, rng_), clean(9, 32, DType::kBFloat16, rng_, true),
      out(9, 32, DType::kBFloat16, rng_, true);
  Assignment a = random_assignment(9, 2, 4, rng_);
  forward(x, a, layer, clean);
  x.h[4 * 32 + 7] = BFloat16(NAN);
  forward(x, a, layer, out);
  for (int64_t t = 0; t < 9; ++t) {
    for (int64_t c = 0; c < 32; ++c) {
      if (t == 4) {
        EXPECT_TRUE(std::isnan(out.at(t, c)));
      } else {
        EXPECT_EQ(out.at(t, c), clean.at(t, c));
      }
    }
  }
}

TEST_F(ExpertsTest, block_equals_route_then_forward) {
  Layer layer(8, 48, 16, 8, DType::kBFloat16, rng_);
  const RouterConfig config{.num_experts = 8,
                            .top_k = 3,
                            .n_group = 2,
                            .topk_group = 1,
                            .group_score = GroupScore::kTop2Sum,
                            .norm_topk_prob = true,
                            .scaling = 1.5f};
  for (int64_t tokens : {0, 1, 7, 64}) {
    Matrix x(tokens, 48, DType::kBFloat16, rng_), fused(tokens, 48, DType::kBFloat16, rng_, true),
        apart(tokens, 48, DType::kBFloat16, rng_, true);
    moe_block(x.view(),
              MoeBlock{.gate = layer.gate.view(), .router = config, .experts = layer.tensors()},
              fused.view());
    Assignment a{std::vector<int32_t>(static_cast<size_t>(tokens * 3)),
                 std::vector<float>(static_cast<size_t>(tokens * 3))};
    const TensorView ids = make_view(a.ids.data(), DType::kInt32, {tokens, 3});
    const TensorView weights = make_view(a.weights.data(), DType::kFloat32, {tokens, 3});
    route(x.view(), layer.gate.view(), nullptr, config, ids, weights);
    moe_forward(x.view(), ids, weights, layer.tensors(), apart.view());
    EXPECT_EQ(std::memcmp(fused.h.data(), apart.h.data(), fused.h.size() * 2), 0);
  }
}

TEST_F(ExpertsTest, experts_of_another_rank_add_nothing) {
  Layer layer(8, 48, 16, 0, DType::kFloat32, rng_);
  constexpr int64_t kTokens = 21, kTopK = 2;
  Matrix x(kTokens, 48, DType::kFloat32, rng_), whole(kTokens, 48, DType::kFloat32, rng_, true);
  Assignment all{{}, {}};
  for (int64_t i = 0; i < kTokens * kTopK; ++i) {
    all.ids.push_back(static_cast<int32_t>((i * 5 + i / 3) % 8));
    all.weights.push_back(0.25f + 0.5f * static_cast<float>(i % 3));
  }
  forward(x, all, layer, whole);
  std::vector<float> sum(whole.f.size(), 0.0f);
  for (int32_t rank = 0; rank < 3; ++rank) {  // ranks 0 and 1 have four experts each, rank 2 none
    Assignment own = all;
    for (int32_t& id : own.ids) id = id / 4 == rank ? id : -1;
    Matrix part(kTokens, 48, DType::kFloat32, rng_, true);
    forward(x, own, layer, part);
    for (size_t i = 0; i < sum.size(); ++i) {
      sum[i] += part.f[i];
      if (rank == 2) {
        EXPECT_EQ(part.f[i], 0.0f);
      }
    }
  }
  for (size_t i = 0; i < sum.size(); ++i) EXPECT_NEAR(sum[i], whole.f[i], 1e-4f);
}

TEST_F(ExpertsTest, ids_out_of_range_and_wrong_shapes_are_refused) {
  Layer layer(4, 32, 16, 0, DType::kFloat32, rng_);
  Matrix x(2, 32, DType::kFloat32, rng_), out(2, 32, DType::kFloat32, rng_),
      narrow(2, 31, DType::kFloat32, rng_);
  for (int32_t bad : {4, -2, 2000000000}) {
    Assignment a{{0, 1, bad, 2}, {1, 1, 1, 1}};
    EXPECT_THROW(forward(x, a, layer, out), InvalidArgument);
  }
  Assignment good{{0, 1, 3, 2}, {1, 1, 1, 1}};
  EXPECT_THROW(forward(x, good, layer, narrow), InvalidArgument);
  layer.inter = 15;
  EXPECT_THROW(forward(x, good, layer, out), InvalidArgument);
}

}  // namespace
}  // namespace helicore::moe
