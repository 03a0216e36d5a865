// Quantised caches: where bytes lie, and attention over them against attention over what they hold.
#include "helicore/attention/cache_format.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "attention/problem.h"
#include "helicore/core/error.h"
#include "helicore/core/thread_pool.h"
#include "helicore/quant/formats.h"

namespace helicore::attention {
namespace {

using testing::for_each_isa;
using testing::Problem;
using testing::Shape;
using testing::Values;

const CacheCoding kCodings[] = {{CacheFormat::kFp8, 1.0f},
                                {CacheFormat::kFp8, 0.25f},
                                {CacheFormat::kFp8DsMla, 1.0f},
                                {CacheFormat::kNvFp4, 0x1p-6f}};

// One value of a quantised page, by the comment of cache_format.h alone.
float value_at(const uint8_t* page, const CacheCoding& coding, const Shape& s, int64_t token,
               int64_t i) {
  const int64_t rank = s.rank;
  const auto bf16 = [](const uint8_t* at) {
    BFloat16 x;
    std::memcpy(&x, at, sizeof(x));
    return static_cast<float>(x);
  };
  switch (coding.format) {
    case CacheFormat::kFp8:
      return quant::decode_e4m3(page[token * (rank + s.rope) + i]) * coding.scale;
    case CacheFormat::kFp8DsMla: {
      const uint8_t* row = page + token * (rank + rank / 32 + 2 * s.rope);
      if (i >= rank) return bf16(row + rank + rank / 32 + 2 * (i - rank));
      float scale;
      std::memcpy(&scale, row + rank + i / 128 * 4, sizeof(scale));
      return quant::decode_e4m3(row[i]) * scale;
    }
    default: {
      const int64_t n = s.page_size;
      if (i >= rank) {
        return bf16(page + n * (rank / 2 + rank / 16) + token * 2 * s.rope + 2 * (i - rank));
      }
      const int code = page[token * (rank / 2) + i / 2] >> (i % 2 * 4) & 15;
      const uint8_t scale = page[n * (rank / 2) + token * (rank / 16) + i / 16];
      return quant::decode_e2m1(static_cast<uint8_t>(code)) * quant::decode_e4m3(scale) *
             coding.scale;
    }
  }
}

// The twin of a problem: its rows quantised by append, and the problem's rows replaced by what the
// twin holds. Bytes that no row owns are 0xff: NaN as e4m3, as a scale and as bfloat16.
struct Twin {
  Problem& problem;
  CacheCoding coding;
  int64_t row = 0;
  std::vector<uint8_t> bytes;
  Values out;
  std::vector<float> stats;

  Twin(Problem& p, const CacheCoding& c) : problem(p), coding(c) {
    const Shape& s = p.shape;
    row = row_bytes(c.format, s.rank, s.rope);
    bytes.assign(static_cast<size_t>(p.num_pages * s.page_size * row), 0xff);
    std::vector<int64_t> slots;
    Values rows(s.dtype, 0);
    std::vector<int64_t> at;
    for (size_t b = 0; b < p.requests.size(); ++b) {
      for (int64_t t = 0; t < p.requests[b].kv_len; ++t) at.push_back(p.row_of(b, t));
    }
    rows = Values(s.dtype, static_cast<int64_t>(at.size()) * p.width());
    for (size_t i = 0; i < at.size(); ++i) {
      slots.push_back(at[i] / p.width());
      for (int64_t k = 0; k < p.width(); ++k) {
        rows.set(static_cast<int64_t>(i) * p.width() + k, p.cache.get(at[i] + k));
      }
    }
    const auto n = static_cast<int64_t>(at.size());
    mla_append({.kv_a = rows.view({n, p.width()}),
                .cache = view(),
                .slots = make_view(slots.data(), DType::kInt64, {n}),
                .kv_lora_rank = s.rank,
                .coding = c});
    for (int64_t first : at) {
      const int64_t slot = first / p.width();
      for (int64_t k = 0; k < p.width(); ++k) p.cache.set(first + k, value(slot, k));
    }
    out = Values(s.dtype, p.num_tokens * s.heads * s.rank);
    stats.assign(p.stats.size(), testing::kNaN);
  }
  [[nodiscard]] TensorView view() {
    return make_view(bytes.data(), DType::kUInt8,
                     {problem.num_pages, problem.shape.page_size, row});
  }
  [[nodiscard]] float value(int64_t slot, int64_t i) const {
    const int64_t page_size = problem.shape.page_size;
    return value_at(bytes.data() + slot / page_size * page_size * row, coding, problem.shape,
                    slot % page_size, i);
  }
  void decode() {
    Problem& p = problem;
    const auto b = static_cast<int64_t>(p.requests.size());
    const TensorView stats_view =
        make_view(stats.data(), DType::kFloat32, {p.num_tokens, p.shape.heads, 2});
    mla_decode({.q = p.q.view({p.num_tokens, p.shape.heads, p.width()}),
                .cache = view(),
                .block_table = make_view(p.table.data(), DType::kInt32, {b, p.max_pages}),
                .cu_q = make_view(p.cu_q.data(), DType::kInt32, {b + 1}),
                .kv_len = make_view(p.kv_len.data(), DType::kInt32, {b}),
                .scale = p.scale,
                .out = out.view({p.num_tokens, p.shape.heads, p.shape.rank}),
                .stats = &stats_view,
                .coding = coding});
  }
};

TEST(CacheFormat, row_bytes_and_names_are_the_published_ones) {
  EXPECT_EQ(row_bytes(CacheFormat::kDense, 512, 64, 2), 1152);
  EXPECT_EQ(row_bytes(CacheFormat::kFp8, 128, 16), 144);
  EXPECT_EQ(row_bytes(CacheFormat::kFp8DsMla, 128, 0), 132);
  EXPECT_EQ(row_bytes(CacheFormat::kNvFp4, 128, 16), 64 + 8 + 32);
  for (CacheFormat f :
       {CacheFormat::kDense, CacheFormat::kFp8, CacheFormat::kFp8DsMla, CacheFormat::kNvFp4}) {
    EXPECT_EQ(parse_cache_format(name_of(f), "test"), f);
  }
  EXPECT_THROW((void)parse_cache_format("fp16", "test"), InvalidArgument);
}

// Rows that the format holds exactly are read as a dense cache of them is, bit for bit: every page
// size, ragged requests, an empty one, NaN in all bytes that no visible token owns.
TEST(CacheFormat, decode_has_the_bits_of_a_dense_cache_of_the_same_values) {
  for (const CacheCoding& coding : kCodings) {
    for (int64_t page_size : {1, 2, 16, 48, 64, 128}) {
      for (DType dtype : {DType::kBFloat16, DType::kFloat32}) {
        const Shape shape{
            .heads = 5, .rank = 128, .rope = 8, .page_size = page_size, .dtype = dtype};
        Problem p(shape, {{1, 200}, {3, 131}, {1, 0}, {2, 1}}, 7);
        for_each_isa([&](Isa) {
          Twin twin(p, coding);
          p.decode();
          twin.decode();
          for (int64_t i = 0; i < p.num_tokens * shape.heads * shape.rank; ++i) {
            ASSERT_FALSE(std::isnan(p.out.get(i)));
            ASSERT_EQ(twin.out.get(i), p.out.get(i)) << name_of(coding.format) << " " << page_size;
          }
          ASSERT_EQ(twin.stats, p.stats);
        });
      }
    }
  }
}

// Append keeps what the format can say: the error of a value is at most half a step.
TEST(CacheFormat, append_rounds_to_the_nearest_value_of_the_format) {
  for (const CacheCoding& coding : kCodings) {
    for_each_isa([&](Isa) {
      Problem p({.rank = 256, .rope = 8, .page_size = 16}, {{1, 40}}, 3);
      const Values before = p.cache;
      Twin twin(p, coding);
      const bool is_fp4 = coding.format == CacheFormat::kNvFp4;
      for (int64_t t = 0; t < 40; ++t) {
        for (int64_t k = 0; k < p.width(); ++k) {
          const float want = before.get(p.row_of(0, t) + k);
          const float got = p.cache.get(p.row_of(0, t) + k);
          float bound = std::fabs(want) / 16.0f + coding.scale * 0x1p-10f;
          if (is_fp4) {  // 1/2 of the step, of a scale that is off by up to 1/16
            float largest = 0.0f;
            const int64_t first = p.row_of(0, t) + k / 16 * 16;
            for (int64_t i = 0; i < 16; ++i) {
              largest = std::max(largest, std::fabs(before.get(first + i)));
            }
            bound = largest / 6.0f * 1.07f;
          }
          if (k >= 256 && coding.format != CacheFormat::kFp8) {
            bound = std::fabs(want) * 0x1p-8f;
          }
          ASSERT_LE(std::fabs(got - want), bound) << name_of(coding.format) << " " << k;
        }
      }
    });
  }
}

TEST(CacheFormat, infinite_and_nan_latents_are_stored_as_finite_values) {
  for (const CacheCoding& coding : kCodings) {
    Problem p({.rank = 128, .rope = 0, .page_size = 16}, {{1, 3}}, 3);
    p.cache.set(p.row_of(0, 0) + 5, std::numeric_limits<float>::infinity());
    p.cache.set(p.row_of(0, 1) + 5, -std::numeric_limits<float>::infinity());
    p.cache.set(p.row_of(0, 2) + 5, testing::kNaN);
    Twin twin(p, coding);
    EXPECT_GT(p.cache.get(p.row_of(0, 0) + 5), 100.0f * coding.scale);
    EXPECT_LT(p.cache.get(p.row_of(0, 1) + 5), -100.0f * coding.scale);
    EXPECT_EQ(p.cache.get(p.row_of(0, 2) + 5), 0.0f);
    for (int64_t t = 0; t < 3; ++t) {
      for (int64_t k = 0; k < 128; ++k) ASSERT_TRUE(std::isfinite(p.cache.get(p.row_of(0, t) + k)));
    }
  }
}

std::string refusal(const CacheCoding& coding, int64_t rank, int64_t width,
                    DType dtype = DType::kUInt8) {
  std::vector<uint8_t> bytes(static_cast<size_t>(4 * 16 * width * 4));
  try {
    (void)make_mla_cache(make_view(bytes.data(), dtype, {4, 16, width}), rank, "test", coding);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

TEST(CacheFormat, wrong_widths_types_and_scales_are_named) {
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  const CacheCoding fp8{CacheFormat::kFp8, 1.0f};
  const CacheCoding ds{CacheFormat::kFp8DsMla, 1.0f};
  const CacheCoding fp4{CacheFormat::kNvFp4, 1.0f};
  EXPECT_EQ(refusal(fp8, 512, 576), "");
  EXPECT_EQ(refusal(ds, 512, 656), "");
  EXPECT_EQ(refusal(fp4, 512, 416), "");
  EXPECT_EQ(refusal(fp4, 64, 36), "");
  EXPECT_TRUE(has(refusal(ds, 96, 112), "kv_lora_rank must be a multiple of 128"));
  EXPECT_TRUE(has(refusal(fp4, 96, 112), "kv_lora_rank must be a multiple of 64"));
  EXPECT_TRUE(has(refusal(fp8, 512, 508), "cache rows must have 512 bytes"));
  EXPECT_TRUE(has(refusal(ds, 512, 532), "cache rows must have 528 bytes"));
  EXPECT_TRUE(has(refusal(fp8, 512, 576, DType::kBFloat16), "cache must be uint8"));
  EXPECT_TRUE(has(refusal({}, 512, 576), "cache must be bfloat16 or float32"));
  EXPECT_TRUE(has(refusal({CacheFormat::kFp8, 0.0f}, 512, 576), "cache_scale must be in"));
  EXPECT_TRUE(has(refusal({CacheFormat::kFp8, testing::kNaN}, 512, 576), "cache_scale must be in"));
  EXPECT_TRUE(has(refusal({CacheFormat::kFp8DsMla, 2.0f}, 512, 656), "cache_scale must be 1"));
  EXPECT_TRUE(has(refusal({CacheFormat::kNvFp4, 0.3f}, 512, 416), "power of two"));
  EXPECT_TRUE(has(refusal({CacheFormat::kDense, 0.5f}, 128, 144, DType::kBFloat16),
                  "cache_scale must be 1"));
}

}  // namespace
}  // namespace helicore::attention
