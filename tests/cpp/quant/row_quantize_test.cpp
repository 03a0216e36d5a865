#include "helicore/quant/row_quantize.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "helicore/core/cpu/isa.h"
#include "helicore/core/error.h"
#include "helicore/quant/formats.h"

namespace helicore::quant {
namespace {

constexpr size_t kGuard = 64;
constexpr uint8_t kGuardByte = 0xab;

std::vector<float> random_values(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

// Outputs with bytes behind them that must stay.
struct Outputs {
  std::vector<uint8_t> codes, scales;
  void expect_guards(size_t code_bytes, size_t scale_bytes) const {
    for (size_t i = 0; i < kGuard; ++i) {
      EXPECT_EQ(codes[code_bytes + i], kGuardByte);
      EXPECT_EQ(scales[scale_bytes + i], kGuardByte);
    }
  }
};

Outputs run(RowFormat format, ScaleLayout layout, std::vector<float>& x, int64_t rows,
            int64_t width) {
  const ScaleShape shape = scale_shape({format, layout}, rows, width);
  const int64_t code_width = format == RowFormat::kNvFp4 ? width / 2 : width;
  const size_t scale_bytes = static_cast<size_t>(shape.num_elements) * size_of(shape.dtype);
  Outputs out{std::vector<uint8_t>(rows * code_width + kGuard, kGuardByte),
              std::vector<uint8_t>(scale_bytes + kGuard, kGuardByte)};
  const TensorView codes = make_view(out.codes.data(), DType::kUInt8, {rows, code_width});
  const TensorView scales = make_view(out.scales.data(), shape.dtype, {shape.num_elements});
  quantize_rows(make_view(x.data(), DType::kFloat32, {rows, width}), {format, layout}, codes,
                format == RowFormat::kFp8Tensor ? nullptr : &scales);
  out.expect_guards(static_cast<size_t>(rows * code_width), scale_bytes);
  return out;
}

struct Case {
  RowFormat format;
  ScaleLayout layout;
};
constexpr Case kCases[] = {
    {RowFormat::kFp8Tensor, ScaleLayout::kRows},
    {RowFormat::kFp8Token, ScaleLayout::kRows},
    {RowFormat::kFp8Group, ScaleLayout::kRows},
    {RowFormat::kFp8Group, ScaleLayout::kColumns},
    {RowFormat::kFp8GroupPacked, ScaleLayout::kColumns},
    {RowFormat::kNvFp4, ScaleLayout::kRows},
    {RowFormat::kNvFp4, ScaleLayout::kSwizzled},
    {RowFormat::kMxFp8, ScaleLayout::kRows},
    {RowFormat::kMxFp8, ScaleLayout::kSwizzled},
};

TEST(RowQuantizeTest, nothing_is_written_past_the_memory_that_scale_shape_asks_for) {
  for (const Case& c : kCases) {
    for (int64_t rows : {1, 3, 4, 5, 127, 128, 129}) {
      for (int64_t width : {128, 640, 5 * 128 * 4}) {
        auto x = random_values(static_cast<size_t>(rows * width), 3);
        (void)run(c.format, c.layout, x, rows, width);
      }
    }
  }
}

TEST(RowQuantizeTest, the_bits_do_not_depend_on_the_instruction_set) {
  const Isa best = detected_isa();
  for (const Case& c : kCases) {
    auto x = random_values(7 * 640, 5);
    x[11] = std::nanf("");
    x[700] = INFINITY;
    set_isa(Isa::kGeneric);
    const Outputs want = run(c.format, c.layout, x, 7, 640);
    for (Isa isa : {Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16}) {
      if (isa > best) continue;
      set_isa(isa);
      const Outputs found = run(c.format, c.layout, x, 7, 640);
      EXPECT_EQ(found.codes, want.codes) << name_of(c.format) << " " << name_of(isa);
      EXPECT_EQ(found.scales, want.scales) << name_of(c.format) << " " << name_of(isa);
    }
    set_isa(best);
  }
}

TEST(RowQuantizeTest, values_come_back_within_half_a_step) {
  for (const Case& c : kCases) {
    constexpr int64_t kRows = 6, kWidth = 384;
    auto x = random_values(kRows * kWidth, 9);
    Outputs out = run(c.format, c.layout, x, kRows, kWidth);
    const ScaleShape shape = scale_shape({c.format, c.layout}, kRows, kWidth);
    const TensorView scales = make_view(out.scales.data(), shape.dtype, {shape.num_elements});
    const int64_t code_width = c.format == RowFormat::kNvFp4 ? kWidth / 2 : kWidth;
    std::vector<float> back(kRows * kWidth);
    dequantize_rows(make_view(out.codes.data(), DType::kUInt8, {kRows, code_width}),
                    c.format == RowFormat::kFp8Tensor ? nullptr : &scales, {c.format, c.layout},
                    make_view(back.data(), DType::kFloat32, {kRows, kWidth}));
    // E4M3 has steps of 1/8 of a power of two; E2M1 of 1/2, with scales of E4M3.
    const float step = c.format == RowFormat::kNvFp4 ? 0.3f : 0.0626f;
    for (size_t i = 0; i < x.size(); ++i) {
      EXPECT_NEAR(back[i], x[i], step * std::abs(x[i]) + (step > 0.1f ? 0.2f : 0.01f));
    }
  }
}

TEST(RowQuantizeTest, every_byte_of_a_swizzled_tile_has_one_scale) {
  constexpr int64_t kGroups = 7;
  std::vector<int> seen(2 * 128 * 8, 0);
  for (int64_t m = 0; m < 200; ++m) {
    for (int64_t k = 0; k < kGroups; ++k) ++seen[swizzled_offset(m, k, kGroups)];
  }
  for (int count : seen) EXPECT_LE(count, 1);
  EXPECT_EQ(swizzled_offset(33, 1, kGroups), 1 * 16 + 1 * 4 + 1);
  EXPECT_EQ(swizzled_offset(128, 5, kGroups), (1 * 2 + 1) * 512 + 1);
}

TEST(RowQuantizeTest, a_layout_that_a_format_lacks_is_refused) {
  EXPECT_THROW((void)scale_shape({RowFormat::kFp8Token, ScaleLayout::kSwizzled}, 4, 128),
               InvalidArgument);
  EXPECT_THROW((void)scale_shape({RowFormat::kMxFp8, ScaleLayout::kRows}, 4, 40), InvalidArgument);
  EXPECT_THROW((void)scale_shape({RowFormat::kFp8Group, ScaleLayout::kColumns, 1.0f, 3}, 4, 128),
               InvalidArgument);
}

}  // namespace
}  // namespace helicore::quant
