#include "helicore/core/types.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "helicore/core/typed_index.h"

namespace helicore {
namespace {

TEST(BFloat16Test, rounds_to_nearest_even_for_every_upper_half) {
  for (uint32_t hi = 0; hi < 0x10000; ++hi) {
    float exact = std::bit_cast<float>(hi << 16);
    if (std::isnan(exact)) continue;
    EXPECT_EQ(BFloat16(exact).bits, hi);
    if (std::isinf(exact)) continue;
    uint16_t tie = BFloat16(std::bit_cast<float>((hi << 16) | 0x8000u)).bits;
    EXPECT_EQ(tie, (hi & 1u) ? hi + 1 : hi);
    EXPECT_EQ(BFloat16(std::bit_cast<float>((hi << 16) | 0x8001u)).bits, hi + 1);
  }
}

TEST(BFloat16Test, keeps_nan_and_infinity) {
  EXPECT_TRUE(std::isnan(static_cast<float>(BFloat16(std::bit_cast<float>(0x7f800001u)))));
  EXPECT_TRUE(std::isinf(static_cast<float>(BFloat16(std::numeric_limits<float>::infinity()))));
}

TEST(StrongIndexTest, compares_and_prints_its_value) {
  using Slot = StrongIndex<struct SlotTag>;
  EXPECT_LT(Slot(1), Slot(2));
  TypedVec<Slot, int> v(3, 7);
  v[Slot(1)] = 9;
  EXPECT_EQ(v[Slot(1)], 9);
  EXPECT_TRUE((HalfOpenRange<Slot>{Slot(3), Slot(2)}.empty()));
}

}  // namespace
}  // namespace helicore
