#include <gtest/gtest.h>
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <thread>

#include "attention/problem.h"
#include "helicore/attention/mla.h"
#include "helicore/core/error.h"
#include "helicore/core/thread_pool.h"

namespace {
std::atomic<int64_t> num_allocations{0};
}  // namespace

// Counts what the whole process allocates; see a_repeated_call_allocates_nothing.
[[gnu::noinline]] void* operator new(size_t num_bytes) {
  ++num_allocations;
  void* p = std::malloc(num_bytes);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }

namespace helicore::attention {
namespace {

using testing::for_each_isa;
using testing::kNaN;
using testing::Problem;
using testing::Request;
using testing::Shape;
using testing::Values;

// Largest violation of |got - want| <= abs + rel |want| over the whole output; NaN counts as
// infinite.
double excess(const Problem& p) {
  const bool bf16 = p.shape.dtype == DType::kBFloat16;
  const double abs_tolerance = bf16 ? 2.5e-3 : 2e-5;
  const double rel_tolerance = bf16 ? 1.0 / 64 : 2e-5;
  double worst = -1.0;
  for (size_t b = 0; b < p.requests.size(); ++b) {
    for (int64_t i = 0; i < p.requests[b].num_q; ++i) {
      for (int64_t h = 0; h < p.shape.heads; ++h) {
        const std::vector<double> want = p.expected(b, i, h);
        const int64_t row = ((p.cu_q[b] + i) * p.shape.heads + h) * p.shape.rank;
        for (int64_t c = 0; c < p.shape.rank; ++c) {
          const double w = want[static_cast<size_t>(c)];
          const double over =
              std::abs(p.out.get(row + c) - w) - abs_tolerance - rel_tolerance * std::abs(w);
          worst = std::isnan(over) ? 1e9 : std::max(worst, over);
        }
      }
    }
  }
  return worst;
}

TEST(MlaDecode, matches_double_precision_over_ragged_batches_of_every_shape) {
  const std::vector<Request> requests{{1, 1}, {1, 63}, {3, 65}, {0, 9}, {2, 129}, {4, 2}, {1, 0}};
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (int64_t page_size : {1, 16, 64}) {
      for (const auto& [heads, rank, rope] : std::vector<std::array<int64_t, 3>>{
               {1, 4, 0}, {6, 20, 4}, {12, 128, 16}, {17, 36, 12}}) {
        Problem p(
            {.heads = heads, .rank = rank, .rope = rope, .page_size = page_size, .dtype = dtype},
            requests, 3);
        for_each_isa([&](Isa isa) {
          p.decode();
          EXPECT_LE(excess(p), 0.0) << name_of(isa) << " heads " << heads << " rank " << rank
                                    << " page " << page_size << " " << name_of(dtype);
        });
      }
    }
  }
}

TEST(MlaDecode, matches_double_precision_on_random_shapes) {
  for (uint32_t seed = 0; seed < 300; ++seed) {
    std::mt19937 rng(seed);
    auto pick = [&](std::vector<int64_t> values) { return values[rng() % values.size()]; };
    const Shape shape{.heads = pick({1, 2, 3, 4, 5, 7, 12, 13, 24, 40}),
                      .rank = 4 * static_cast<int64_t>(1 + rng() % 40),
                      .rope = 4 * static_cast<int64_t>(rng() % 6),
                      .page_size = pick({1, 3, 16, 32, 48, 64, 128}),
                      .dtype = rng() % 2 == 0 ? DType::kFloat32 : DType::kBFloat16};
    std::vector<Request> requests(1 + rng() % 3);
    for (Request& r : requests) {
      r.num_q = static_cast<int64_t>(rng() % 4);
      r.kv_len = static_cast<int64_t>(rng() % static_cast<uint32_t>(pick({4, 70, 300})));
    }
    Problem p(shape, requests, seed);
    set_isa(static_cast<Isa>(rng() % (static_cast<uint32_t>(detected_isa()) + 1)));
    p.decode();
    ASSERT_LE(excess(p), 0.0) << "seed " << seed << " on " << name_of(active_isa());
  }
  set_isa(detected_isa());
}

TEST(MlaDecode, the_check_sees_one_lost_token) {
  Problem p({.dtype = DType::kBFloat16}, {{1, 40}}, 5);
  p.decode();
  EXPECT_LE(excess(p), 0.0);
  p.requests[0].kv_len = 39;
  EXPECT_GT(excess(p), 0.0);
}

TEST(MlaDecode, empty_request_writes_zero_and_minus_infinity) {
  Problem p({.heads = 2}, {{2, 0}, {1, 3}}, 1);
  p.decode();
  for (int64_t i = 0; i < 2 * 2 * p.shape.rank; ++i) ASSERT_EQ(p.out.get(i), 0.0f);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(p.stats[2 * i], -INFINITY);
    EXPECT_EQ(p.stats[2 * i + 1], 0.0f);
  }
  EXPECT_LE(excess(p), 0.0);
}

TEST(MlaDecode, bits_do_not_depend_on_the_number_of_threads) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    Problem p({.heads = 12, .dtype = dtype}, {{1, 5000}, {2, 300}, {1, 1}}, 9);
    set_num_threads(1);
    p.decode();
    const std::vector<float> want_stats = p.stats;
    Values want = p.out;
    for (int threads : {2, 4, 7}) {
      set_num_threads(threads);
      p.decode();
      EXPECT_EQ(p.stats, want_stats);
      for (int64_t i = 0; i < p.num_tokens * p.shape.heads * p.shape.rank; ++i) {
        ASSERT_EQ(p.out.get(i), want.get(i)) << threads << " threads, element " << i;
      }
    }
  }
  set_num_threads(2);
}

TEST(MlaDecode, page_offsets_past_two_to_the_31_elements_are_reached) {
  const Shape shape{.heads = 2, .rank = 16, .rope = 4, .page_size = 16};
  constexpr int64_t kStride = int64_t{1} << 29;  // elements between pages
  constexpr int64_t kPages = 9;                  // the last one starts at 2^32
  const size_t num_bytes = static_cast<size_t>(kPages * kStride) * sizeof(float);
  void* memory = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no address space for a sparse pool";
  Problem p(shape, {{1, 16}}, 2);
  p.decode();
  Values want = p.out;
  auto* far = static_cast<float*>(memory) + (kPages - 1) * kStride;
  for (int64_t t = 0; t < 16; ++t) {
    for (int64_t k = 0; k < p.width(); ++k)
      far[t * p.width() + k] = p.cache.get(p.row_of(0, t) + k);
  }
  TensorView cache = make_view(memory, DType::kFloat32, {kPages, 16, p.width()});
  cache.strides[0] = kStride;
  p.table[0] = kPages - 1;
  mla_decode({.q = p.q.view({1, 2, p.width()}),
              .cache = cache,
              .block_table = make_view(p.table.data(), DType::kInt32, {1, p.max_pages}),
              .cu_q = make_view(p.cu_q.data(), DType::kInt32, {2}),
              .kv_len = make_view(p.kv_len.data(), DType::kInt32, {1}),
              .scale = p.scale,
              .out = p.out.view({1, 2, 16})});
  for (int64_t i = 0; i < 32; ++i) EXPECT_EQ(p.out.get(i), want.get(i));
  munmap(memory, num_bytes);
}

TEST(MlaDecode, a_page_id_outside_the_pool_is_refused_before_anything_is_read) {
  Problem p({.heads = 2}, {{1, 20}}, 1);
  p.table[1] = static_cast<int32_t>(p.num_pages);
  try {
    p.decode();
    FAIL() << "accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("block_table must hold page ids"), std::string::npos)
        << error.what();
  }
  EXPECT_TRUE(std::isnan(p.out.get(0)));
}

TEST(MlaDecode, a_repeated_call_allocates_nothing) {
  set_num_threads(3);
  Problem p({.heads = 12, .dtype = DType::kBFloat16}, {{1, 3000}, {2, 300}}, 1);
  p.decode();
  const int64_t before = num_allocations;
  p.decode();
  EXPECT_EQ(num_allocations, before);
  const auto control = std::make_unique<int>(1);
  EXPECT_GT(num_allocations, before);
  set_num_threads(2);
}

TEST(MlaDecode, concurrent_callers_do_not_disturb_each_other) {
  Problem a({.heads = 4}, {{1, 700}}, 1);
  Problem b({.heads = 6, .rank = 64}, {{2, 300}}, 2);
  a.decode();
  b.decode();
  Values want_a = a.out;
  Values want_b = b.out;
  std::thread other([&] {
    for (int i = 0; i < 50; ++i) b.decode();
  });
  for (int i = 0; i < 50; ++i) a.decode();
  other.join();
  for (int64_t i = 0; i < 4 * 32; ++i) ASSERT_EQ(a.out.get(i), want_a.get(i));
  for (int64_t i = 0; i < 2 * 6 * 64; ++i) ASSERT_EQ(b.out.get(i), want_b.get(i));
}

}  // namespace
}  // namespace helicore::attention
