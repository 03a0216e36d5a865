// Kernels over runs of codes: every code, every instruction set, against the scalar functions.
#include "helicore/quant/cpu/row_kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "helicore/quant/formats.h"

namespace helicore::quant {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

class RowKernels : public ::testing::Test {
 protected:
  void TearDown() override { set_isa(detected_isa()); }
  template <class Fn>
  void for_each_isa(Fn&& fn) {
    for (int level = 0; level <= static_cast<int>(detected_isa()); ++level) {
      set_isa(static_cast<Isa>(level));
      SCOPED_TRACE(name_of(active_isa()));
      fn();
    }
  }
  std::mt19937 rng_{5};
};

std::vector<uint8_t> all_codes() {
  std::vector<uint8_t> codes(256);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i);
  return codes;
}

::testing::AssertionResult same(float got, float want) {
  if (std::isnan(want) ? std::isnan(got) : got == want && std::signbit(got) == std::signbit(want)) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << "got " << got << ", want " << want;
}

TEST_F(RowKernels, every_e4m3_code_decodes_at_every_scale_offset_and_length) {
  const std::vector<uint8_t> codes = all_codes();
  for_each_isa([&] {
    for (float scale : {1.0f, 0x1p-7f, 0x1p60f, 0x1p-60f, 0x1p-118f, 0.37f, 448.0f / 3.0f}) {
      for (int64_t begin : {0, 1, 5, 120}) {
        for (int64_t size : {int64_t{0}, int64_t{1}, int64_t{15}, int64_t{33}, 256 - begin}) {
          if (begin + size > 256) continue;
          std::vector<float> f32(static_cast<size_t>(size) + 1, 77.0f);
          std::vector<BFloat16> bf16(static_cast<size_t>(size) + 1, BFloat16(77.0f));
          HELICORE_DISPATCH_ISA(
              dequantize_kernel(codes.data() + begin, size, scale, f32.data(), DType::kFloat32));
          HELICORE_DISPATCH_ISA(
              dequantize_kernel(codes.data() + begin, size, scale, bf16.data(), DType::kBFloat16));
          for (int64_t i = 0; i < size; ++i) {
            const auto at = static_cast<size_t>(i);
            const float want = decode_e4m3(static_cast<uint8_t>(begin + i)) * scale;
            ASSERT_TRUE(same(f32[at], want)) << begin + i << " scale " << scale;
            ASSERT_TRUE(same(static_cast<float>(bf16[at]), static_cast<float>(BFloat16(want))))
                << begin + i << " scale " << scale;
          }
          ASSERT_EQ(f32.back(), 77.0f);
          ASSERT_EQ(static_cast<float>(bf16.back()), 77.0f);
        }
      }
    }
  });
}

TEST_F(RowKernels, every_e2m1_code_under_every_scale_code_decodes_and_is_exact_in_bfloat16) {
  // Group g has scale code g and, in its bytes, every pair of nibbles over sixteen rotations.
  constexpr int64_t kSize = 256 * kNvFp4Group;
  const std::vector<uint8_t> scales = all_codes();
  for_each_isa([&] {
    for (float scale : {1.0f, 0x1p-6f, 0x1p10f}) {
      for (int rotation = 0; rotation < 32; ++rotation) {
        std::vector<uint8_t> codes(kSize / 2);
        for (size_t i = 0; i < codes.size(); ++i) {
          codes[i] = static_cast<uint8_t>(i % 8 * 32 + static_cast<size_t>(rotation));
        }
        for (int64_t size : {int64_t{32}, int64_t{512}, int64_t{96}, kSize}) {
          std::vector<float> f32(static_cast<size_t>(size) + 1, 77.0f);
          std::vector<BFloat16> bf16(static_cast<size_t>(size) + 1, BFloat16(77.0f));
          HELICORE_DISPATCH_ISA(dequantize_nvfp4(codes.data(), scales.data(), size, scale,
                                                 f32.data(), DType::kFloat32));
          HELICORE_DISPATCH_ISA(dequantize_nvfp4(codes.data(), scales.data(), size, scale,
                                                 bf16.data(), DType::kBFloat16));
          for (int64_t i = 0; i < size; ++i) {
            const auto at = static_cast<size_t>(i);
            const auto code = static_cast<uint8_t>(codes[at / 2] >> (i % 2 * 4));
            const double want = static_cast<double>(decode_e2m1(code)) *
                                static_cast<double>(decode_e4m3(scales[at / kNvFp4Group])) *
                                static_cast<double>(scale);
            ASSERT_TRUE(same(f32[at], static_cast<float>(want))) << i;
            ASSERT_TRUE(same(static_cast<float>(bf16[at]), static_cast<float>(want))) << i;
          }
          ASSERT_EQ(f32.back(), 77.0f);
          ASSERT_EQ(static_cast<float>(bf16.back()), 77.0f);
        }
      }
    }
  });
}

// Codes, midpoints between them and their neighbours, all signs, what saturates, what is no number.
std::vector<float> hard_values() {
  std::vector<float> x{0.0f, -0.0f, kInf, -kInf, kNaN, -kNaN, 1e30f, -1e30f, 1e-30f, -1e-42f};
  for (int code = 0; code < 0x7f; ++code) {
    const float low = decode_e4m3(static_cast<uint8_t>(code));
    const float high = code < 0x7e ? decode_e4m3(static_cast<uint8_t>(code + 1)) : 480.0f;
    for (float v : {low, (low + high) / 2}) {
      for (float w : {v, std::nextafter(v, 0.0f), std::nextafter(v, 1e9f)}) {
        x.push_back(w);
        x.push_back(-w);
      }
    }
  }
  return x;
}

TEST_F(RowKernels, e4m3_codes_are_those_of_the_scalar_function_and_never_nan) {
  std::vector<float> x = hard_values();
  std::normal_distribution<float> normal(0.0f, 60.0f);
  while (x.size() % 16 != 3) x.push_back(normal(rng_));
  for_each_isa([&] {
    for (float inverse : {1.0f, 0.125f, 3.7f}) {
      std::vector<uint8_t> codes(x.size());
      HELICORE_DISPATCH_ISA(
          quantize_e4m3(x.data(), static_cast<int64_t>(x.size()), inverse, codes.data()));
      for (size_t i = 0; i < x.size(); ++i) {
        ASSERT_EQ(codes[i], encode_e4m3_finite(x[i] * inverse)) << x[i];
        ASSERT_NE(codes[i] & 0x7f, 0x7f) << x[i];
      }
    }
  });
}

TEST_F(RowKernels, a_group_scale_is_the_least_power_of_two_that_holds_the_largest_value) {
  for_each_isa([&] {
    for (float largest : {0.0f, 1e-9f, 1e-4f, 1.0f, 448.0f, 448.5f, 896.0f, 1e30f, kInf}) {
      std::vector<float> x(128, largest / 3.0f);
      x[77] = -largest;
      x[3] = kNaN;
      std::vector<uint8_t> codes(x.size());
      const float scale = HELICORE_DISPATCH_ISA(quantize_e4m3_group(x.data(), 128, codes.data()));
      const float held = std::clamp(largest, kLeastGroupMax, kLargestInput);
      int exponent = 0;
      ASSERT_EQ(std::frexp(scale, &exponent), 0.5f);
      ASSERT_LE(held, 448.0f * scale);
      ASSERT_GT(held, 224.0f * scale * 0.999f);
      ASSERT_EQ(codes[3], 0);
      const float back = decode_e4m3(codes[77]) * scale;
      if (largest >= kLeastGroupMax && largest < kLargestInput) {
        ASSERT_NEAR(back / -largest, 1.0f, 1.0f / 16.0f);
      }
      ASSERT_TRUE(std::isfinite(back));
    }
  });
}

TEST_F(RowKernels, nvfp4_codes_are_those_of_the_scalar_functions) {
  std::vector<float> x = hard_values();
  std::normal_distribution<float> normal(0.0f, 1.0f);
  while (x.size() % 64 != 0) x.push_back(normal(rng_));
  for (int i = 0; i < 512; ++i)
    x.push_back(normal(rng_) * std::exp2(static_cast<float>(i / 16 - 20)));
  const auto size = static_cast<int64_t>(x.size());
  for_each_isa([&] {
    for (float scale : {1.0f, 0x1p-6f}) {
      std::vector<uint8_t> codes(x.size() / 2);
      std::vector<uint8_t> scales(x.size() / kNvFp4Group);
      HELICORE_DISPATCH_ISA(quantize_nvfp4(x.data(), size, scale, codes.data(), scales.data()));
      for (size_t g = 0; g < scales.size(); ++g) {
        float largest = 0.0f;
        for (size_t i = g * kNvFp4Group; i < (g + 1) * kNvFp4Group; ++i) {
          if (!std::isnan(x[i])) largest = std::max(largest, std::min(std::fabs(x[i]), 0x1p127f));
        }
        ASSERT_EQ(scales[g], encode_e4m3(largest / 6.0f / scale)) << g;
        const float inverse = scales[g] == 0 ? 0.0f : 1.0f / (decode_e4m3(scales[g]) * scale);
        for (size_t i = g * kNvFp4Group; i < (g + 1) * kNvFp4Group; ++i) {
          ASSERT_EQ(codes[i / 2] >> (i % 2 * 4) & 15, encode_e2m1(x[i] * inverse)) << x[i];
        }
      }
    }
  });
}

}  // namespace
}  // namespace helicore::quant
