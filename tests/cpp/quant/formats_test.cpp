// FP8 E4M3 codes, all 256 of them, and the sixteen of FP4 E2M1.
#include "helicore/quant/formats.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace helicore::quant {
namespace {

// The value of a code from the definition of the format.
double by_definition(int code) {
  const int exponent = (code >> 3) & 15, mantissa = code & 7;
  const double sign = code & 0x80 ? -1.0 : 1.0;
  if (exponent == 0) return sign * mantissa / 8.0 * std::exp2(-6);
  return sign * (1.0 + mantissa / 8.0) * std::exp2(exponent - 7);
}

TEST(FormatsE4M3, every_code_decodes_to_its_definition) {
  for (int code = 0; code < 256; ++code) {
    const float value = decode_e4m3(static_cast<uint8_t>(code));
    if ((code & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(value)) << code;
      continue;
    }
    EXPECT_EQ(value, static_cast<float>(by_definition(code))) << code;
    EXPECT_EQ(std::signbit(value), (code & 0x80) != 0) << code;
  }
}

TEST(FormatsE4M3, every_code_survives_a_round_trip) {
  for (int code = 0; code < 256; ++code) {
    const float value = decode_e4m3(static_cast<uint8_t>(code));
    if (std::isnan(value)) {
      EXPECT_EQ(encode_e4m3(value) & 0x7f, 0x7f);
    } else {
      EXPECT_EQ(encode_e4m3(value), code);
    }
  }
}

TEST(FormatsE4M3, encoding_takes_the_nearest_code_and_ties_go_to_even) {
  for (int code = 0; code < 0x7e; ++code) {
    const float low = decode_e4m3(static_cast<uint8_t>(code));
    const float high = decode_e4m3(static_cast<uint8_t>(code + 1));
    const float middle = (low + high) / 2;
    EXPECT_EQ(encode_e4m3(middle), code % 2 == 0 ? code : code + 1) << code;
    EXPECT_EQ(encode_e4m3(std::nextafter(middle, 0.0f)), code) << code;
    EXPECT_EQ(encode_e4m3(std::nextafter(middle, 1e9f)), code + 1) << code;
    EXPECT_EQ(encode_e4m3(-std::nextafter(middle, 1e9f)), (code + 1) | 0x80) << code;
  }
}

TEST(FormatsE4M3, large_values_saturate_and_nan_stays_nan) {
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(encode_e4m3(448.0f), 0x7e);
  EXPECT_EQ(encode_e4m3(447.0f), 0x7e);
  EXPECT_EQ(encode_e4m3(1e30f), 0x7e);
  EXPECT_EQ(encode_e4m3(-inf), 0xfe);
  EXPECT_EQ(encode_e4m3(NAN) & 0x7f, 0x7f);
  EXPECT_EQ(encode_e4m3(1e-30f), 0);
  EXPECT_EQ(encode_e4m3(-0.0f), 0x80);
}

TEST(FormatsE4M3, the_finite_encoding_differs_for_nan_alone) {
  EXPECT_EQ(encode_e4m3_finite(NAN), 0);
  EXPECT_EQ(encode_e4m3_finite(-NAN), 0);
  for (float x : {0.0f, -0.0f, 3.3f, -1e9f, 1e-5f})
    EXPECT_EQ(encode_e4m3_finite(x), encode_e4m3(x));
}

TEST(FormatsE2M1, codes_survive_a_round_trip_and_ties_go_to_even) {
  constexpr float kMagnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  for (int code = 0; code < 16; ++code) {
    const float value = decode_e2m1(static_cast<uint8_t>(code));
    EXPECT_EQ(std::fabs(value), kMagnitudes[code & 7]);
    EXPECT_EQ(std::signbit(value), code >= 8);
    EXPECT_EQ(encode_e2m1(value), code);
  }
  for (int code = 0; code < 7; ++code) {
    const float middle = (kMagnitudes[code] + kMagnitudes[code + 1]) / 2;
    EXPECT_EQ(encode_e2m1(middle), code % 2 == 0 ? code : code + 1) << code;
    EXPECT_EQ(encode_e2m1(std::nextafter(middle, 0.0f)), code) << code;
    EXPECT_EQ(encode_e2m1(-std::nextafter(middle, 9.0f)), (code + 1) | 8) << code;
  }
  EXPECT_EQ(encode_e2m1(1e30f), 7);
  EXPECT_EQ(encode_e2m1(-std::numeric_limits<float>::infinity()), 15);
  EXPECT_EQ(encode_e2m1(NAN), 0);
}

}  // namespace
}  // namespace helicore::quant
