// FP8 block scaling: exact values, tails, every instruction set.
#include "helicore/quant/fp8_block.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "helicore/core/cpu/isa.h"
#include "helicore/core/error.h"
#include "helicore/core/thread_pool.h"
#include "helicore/quant/formats.h"

namespace helicore::quant {
namespace {

class Fp8BlockTest : public ::testing::Test {
 protected:
  void TearDown() override {
    set_isa(detected_isa());
    set_num_threads(2);
  }
  std::mt19937 rng_{41};
};

int64_t blocks(int64_t n) { return (n + 127) / 128; }

TEST_F(Fp8BlockTest, dequantising_is_exact_for_all_codes_shapes_and_instruction_sets) {
  for (int level = 0; level <= static_cast<int>(detected_isa()); ++level) {
    set_isa(static_cast<Isa>(level));
    for (auto [n, k] : {std::pair<int64_t, int64_t>{1, 1},
                        {128, 128},
                        {129, 257},
                        {5, 300},
                        {576, 100},
                        {0, 5}}) {
      std::vector<uint8_t> codes(static_cast<size_t>(n * k));
      for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i * 37 + i / 256);
      std::vector<float> scales(static_cast<size_t>(blocks(n) * blocks(k)));
      for (float& s : scales) s = std::ldexp(1.0f + 0.001f * static_cast<float>(rng_() % 999), -8);
      std::vector<float> f32(codes.size(), -1.0f);
      std::vector<BFloat16> bf16(codes.size());
      const TensorView w = make_view(codes.data(), DType::kFloat8E4M3, {n, k});
      const TensorView s = make_view(scales.data(), DType::kFloat32, {blocks(n), blocks(k)});
      dequantize_fp8_block(w, s, make_view(f32.data(), DType::kFloat32, {n, k}));
      dequantize_fp8_block(w, s, make_view(bf16.data(), DType::kBFloat16, {n, k}));
      for (int64_t r = 0; r < n; ++r) {
        for (int64_t c = 0; c < k; ++c) {
          const auto i = static_cast<size_t>(r * k + c);
          const float want =
              decode_e4m3(codes[i]) * scales[static_cast<size_t>(r / 128 * blocks(k) + c / 128)];
          if (std::isnan(want)) {
            ASSERT_TRUE(std::isnan(f32[i]) && std::isnan(static_cast<float>(bf16[i])));
            continue;
          }
          ASSERT_EQ(f32[i], want) << n << "x" << k << " at " << i;
          ASSERT_EQ(bf16[i].bits, BFloat16(want).bits);
        }
      }
    }
  }
}

TEST_F(Fp8BlockTest, quantising_keeps_half_a_step_and_the_largest_value) {
  const int64_t n = 200, k = 140;
  std::normal_distribution<float> normal;
  std::vector<float> w(static_cast<size_t>(n * k)), back(w.size());
  for (float& v : w) v = normal(rng_);
  for (int64_t r = 128; r < n; ++r) {
    for (int64_t c = 128; c < k; ++c) w[static_cast<size_t>(r * k + c)] = 0.0f;  // a block of zeros
  }
  std::vector<uint8_t> codes(w.size());
  std::vector<float> scales(4, -1.0f);
  const TensorView c = make_view(codes.data(), DType::kUInt8, {n, k});
  const TensorView s = make_view(scales.data(), DType::kFloat32, {2, 2});
  quantize_fp8_block(make_view(w.data(), DType::kFloat32, {n, k}), c, s);
  dequantize_fp8_block(c, s, make_view(back.data(), DType::kFloat32, {n, k}));
  EXPECT_EQ(scales[3], 1.0f);
  double worst = 0;
  for (size_t i = 0; i < w.size(); ++i) {
    const auto block = i / static_cast<size_t>(k) / 128 * 2 + i % static_cast<size_t>(k) / 128;
    const double step = std::max(std::abs(w[i]) / 16.0, scales[block] * std::exp2(-10) * 1.01);
    ASSERT_LE(std::abs(back[i] - w[i]), step * 1.0001) << i;
    worst = std::max<double>(worst, std::abs(back[i] - w[i]));
  }
  EXPECT_GT(worst, 0.0);
}

TEST_F(Fp8BlockTest, wrong_scale_shape_and_dtype_are_refused) {
  std::vector<uint8_t> codes(200 * 3);
  std::vector<float> scales(4), out(codes.size());
  const TensorView w = make_view(codes.data(), DType::kUInt8, {200, 3});
  const TensorView o = make_view(out.data(), DType::kFloat32, {200, 3});
  EXPECT_THROW(dequantize_fp8_block(w, make_view(scales.data(), DType::kFloat32, {1, 1}), o),
               InvalidArgument);
  EXPECT_THROW(dequantize_fp8_block(o, make_view(scales.data(), DType::kFloat32, {2, 1}), o),
               InvalidArgument);
  EXPECT_NO_THROW(dequantize_fp8_block(w, make_view(scales.data(), DType::kFloat32, {2, 1}), o));
}

}  // namespace
}  // namespace helicore::quant
