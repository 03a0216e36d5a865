// Latent attention on the CPU: decode and prefill, with the floor of each in its counters.
//
// Counters: "GFLOP/s" of the form computed (absorbed 2 (2R + dr), expanded 2 (dn + dr + dv) per
// visible pair plus the expansion), "GB/s" of cache rows read once. Run with
// --benchmark_filter=decode or =prefill.
#include <benchmark/benchmark.h>

#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "helicore/attention/mla.h"
#include "helicore/core/cpu/isa.h"
#include "helicore/core/thread_pool.h"
#include "helicore/nn/linear.h"

namespace helicore::attention {
namespace {

struct Shape {
  int64_t heads;
  int64_t rank;
  int64_t rope;
  int64_t nope;
  int64_t v;
};
constexpr Shape kTiny{12, 128, 16, 32, 32};
constexpr Shape kTinyQuarter{3, 128, 16, 32, 32};
constexpr Shape kOneHead{1, 512, 64, 128, 128};
constexpr Shape kSmallHeads{16, 512, 64, 128, 128};
constexpr Shape kFull{128, 512, 64, 128, 128};

// Random tensor of bfloat16 or float32.
struct Buffer {
  std::vector<float> f32;
  std::vector<BFloat16> bf16;
  TensorView view;
};

Buffer random_buffer(DType dtype, std::initializer_list<int64_t> shape, float scale) {
  Buffer b;
  int64_t n = 1;
  for (int64_t s : shape) n *= s;
  std::mt19937 rng(1);
  std::uniform_real_distribution<float> uniform(-scale, scale);
  if (dtype == DType::kFloat32) {
    b.f32.resize(static_cast<size_t>(n));
    for (float& x : b.f32) x = uniform(rng);
    b.view = make_view(b.f32.data(), dtype, shape);
  } else {
    b.bf16.resize(static_cast<size_t>(n));
    for (BFloat16& x : b.bf16) x = BFloat16(uniform(rng));
    b.view = make_view(b.bf16.data(), dtype, shape);
  }
  return b;
}

// B requests of `kv` cached tokens and `q` new ones in pages of 64.
struct Batch {
  std::vector<int32_t> table;
  std::vector<int32_t> cu_q;
  std::vector<int32_t> kv_len;
  TensorView table_view;
  TensorView cu_q_view;
  TensorView kv_len_view;
  int64_t num_pages = 0;
};

Batch make_batch(int64_t requests, int64_t q, int64_t kv) {
  Batch b;
  const int64_t pages = (kv + 63) / 64;
  b.num_pages = requests * pages;
  for (int64_t i = 0; i < b.num_pages; ++i) b.table.push_back(static_cast<int32_t>(i));
  for (int64_t i = 0; i <= requests; ++i) b.cu_q.push_back(static_cast<int32_t>(i * q));
  b.kv_len.assign(static_cast<size_t>(requests), static_cast<int32_t>(kv));
  b.table_view = make_view(b.table.data(), DType::kInt32, {requests, pages});
  b.cu_q_view = make_view(b.cu_q.data(), DType::kInt32, {requests + 1});
  b.kv_len_view = make_view(b.kv_len.data(), DType::kInt32, {requests});
  return b;
}

double visible_pairs(int64_t q, int64_t kv) {
  return static_cast<double>(q) * (static_cast<double>(kv) - 0.5 * static_cast<double>(q - 1));
}

void set_rates(benchmark::State& state, double flop, double bytes) {
  state.counters["GFLOP/s"] =
      benchmark::Counter(flop * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
  state.counters["GB/s"] =
      benchmark::Counter(bytes * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
  state.counters["threads"] = num_threads();
}

// False, with the benchmark skipped, where the CPU lacks `isa`.
bool use_isa(benchmark::State& state, Isa isa) {
  if (isa <= detected_isa()) {
    set_isa(isa);
    return true;
  }
  state.SkipWithError("instruction set not available");
  return false;
}

void decode(benchmark::State& state, Shape s, DType dtype, Isa isa) {
  if (!use_isa(state, isa)) return;
  const int64_t requests = state.range(0);
  const int64_t q_len = state.range(1);
  const int64_t kv = state.range(2);
  Batch b = make_batch(requests, q_len, kv);
  Buffer cache = random_buffer(dtype, {b.num_pages, 64, s.rank + s.rope}, 1.0f);
  Buffer q = random_buffer(dtype, {requests * q_len, s.heads, s.rank + s.rope}, 1.0f);
  Buffer out = random_buffer(dtype, {requests * q_len, s.heads, s.rank}, 0.0f);
  const MlaDecodeArgs args{.q = q.view,
                           .cache = cache.view,
                           .block_table = b.table_view,
                           .cu_q = b.cu_q_view,
                           .kv_len = b.kv_len_view,
                           .scale = 0.07f,
                           .out = out.view};
  for (auto _ : state) mla_decode(args);
  const double rows = static_cast<double>(requests * s.heads) * visible_pairs(q_len, kv);
  set_rates(
      state, rows * 2.0 * static_cast<double>(2 * s.rank + s.rope),
      static_cast<double>(requests * kv * (s.rank + s.rope)) * static_cast<double>(size_of(dtype)));
}

// The same over rows of a quantised format; queries are bfloat16.
void decode_quantised(benchmark::State& state, Shape s, CacheFormat format, Isa isa) {
  if (!use_isa(state, isa)) return;
  const int64_t requests = state.range(0);
  const int64_t q_len = state.range(1);
  const int64_t kv = state.range(2);
  const int64_t row = row_bytes(format, s.rank, s.rope);
  Batch b = make_batch(requests, q_len, kv);
  std::vector<uint8_t> cache(static_cast<size_t>(b.num_pages * 64 * row));
  const TensorView pages = make_view(cache.data(), DType::kUInt8, {b.num_pages, 64, row});
  Buffer rows = random_buffer(DType::kBFloat16, {b.num_pages * 64, s.rank + s.rope}, 1.0f);
  std::vector<int64_t> slots(static_cast<size_t>(b.num_pages * 64));
  std::iota(slots.begin(), slots.end(), 0);
  mla_append({.kv_a = rows.view,
              .cache = pages,
              .slots = make_view(slots.data(), DType::kInt64, {b.num_pages * 64}),
              .kv_lora_rank = s.rank,
              .coding = {.format = format}});
  Buffer q = random_buffer(DType::kBFloat16, {requests * q_len, s.heads, s.rank + s.rope}, 1.0f);
  Buffer out = random_buffer(DType::kBFloat16, {requests * q_len, s.heads, s.rank}, 0.0f);
  const MlaDecodeArgs args{.q = q.view,
                           .cache = pages,
                           .block_table = b.table_view,
                           .cu_q = b.cu_q_view,
                           .kv_len = b.kv_len_view,
                           .scale = 0.07f,
                           .out = out.view,
                           .coding = {.format = format}};
  for (auto _ : state) mla_decode(args);
  const double pairs = static_cast<double>(requests * s.heads) * visible_pairs(q_len, kv);
  set_rates(state, pairs * 2.0 * static_cast<double>(2 * s.rank + s.rope),
            static_cast<double>(requests * kv * row));
}

void append_quantised(benchmark::State& state, Shape s, CacheFormat format) {
  set_isa(detected_isa());
  const int64_t tokens = state.range(0);
  const int64_t row = row_bytes(format, s.rank, s.rope);
  std::vector<uint8_t> cache(static_cast<size_t>((tokens + 63) / 64 * 64 * row));
  Buffer rows = random_buffer(DType::kBFloat16, {tokens, s.rank + s.rope}, 1.0f);
  std::vector<int64_t> slots(static_cast<size_t>(tokens));
  std::iota(slots.begin(), slots.end(), 0);
  const MlaAppendArgs args{
      .kv_a = rows.view,
      .cache = make_view(cache.data(), DType::kUInt8, {(tokens + 63) / 64, 64, row}),
      .slots = make_view(slots.data(), DType::kInt64, {tokens}),
      .kv_lora_rank = s.rank,
      .coding = {.format = format}};
  for (auto _ : state) mla_append(args);
  set_rates(state, 0.0, static_cast<double>(tokens * (row + 2 * (s.rank + s.rope))));
}

void prefill(benchmark::State& state, Shape s, DType dtype, Isa isa) {
  if (!use_isa(state, isa)) return;
  const int64_t requests = state.range(0);
  const int64_t q_len = state.range(1);
  const int64_t kv = state.range(2);
  Batch b = make_batch(requests, q_len, kv);
  Buffer cache = random_buffer(dtype, {b.num_pages, 64, s.rank + s.rope}, 1.0f);
  Buffer q = random_buffer(dtype, {requests * q_len, s.heads, s.nope + s.rope}, 1.0f);
  Buffer out = random_buffer(dtype, {requests * q_len, s.heads * s.v}, 0.0f);
  const bool bf16 = dtype == DType::kBFloat16;
  auto packed = [&](int64_t n) {
    return bf16 ? random_buffer(dtype, {s.heads, (n + 15) / 16, s.rank / 2, 16, 2}, 0.1f)
                : random_buffer(dtype, {s.heads, (n + 15) / 16, s.rank, 16}, 0.1f);
  };
  Buffer w_uk = packed(s.nope);
  Buffer w_uv = packed(s.v);
  const MlaPrefillArgs args{.q = q.view,
                            .cache = cache.view,
                            .block_table = b.table_view,
                            .cu_q = b.cu_q_view,
                            .kv_len = b.kv_len_view,
                            .w_uk = w_uk.view,
                            .w_uv = w_uv.view,
                            .kv_lora_rank = s.rank,
                            .scale = 0.14f,
                            .out = out.view};
  for (auto _ : state) mla_prefill(args);
  const double heads = static_cast<double>(requests * s.heads);
  const double attend = visible_pairs(q_len, kv) * 2.0 * static_cast<double>(s.nope + s.rope + s.v);
  const double expand = static_cast<double>(kv * 2 * s.rank * (s.nope + s.v));
  set_rates(
      state, heads * (attend + expand),
      static_cast<double>(requests * kv * (s.rank + s.rope)) * static_cast<double>(size_of(dtype)));
}

void append(benchmark::State& state) {
  set_isa(detected_isa());
  const int64_t tokens = state.range(0);
  const Shape s = kTiny;
  Buffer cache = random_buffer(DType::kBFloat16, {tokens / 64 + 1, 64, s.rank + s.rope}, 1.0f);
  Buffer kv_a = random_buffer(DType::kBFloat16, {tokens, s.rank + s.rope}, 1.0f);
  Buffer weight = random_buffer(DType::kBFloat16, {s.rank}, 1.0f);
  Buffer table = random_buffer(DType::kFloat32, {tokens, s.rope}, 1.0f);
  std::vector<int64_t> slots(static_cast<size_t>(tokens));
  std::vector<int32_t> positions(static_cast<size_t>(tokens));
  for (int64_t t = 0; t < tokens; ++t) {
    slots[static_cast<size_t>(t)] = t;
    positions[static_cast<size_t>(t)] = static_cast<int32_t>(t);
  }
  const TensorView positions_view = make_view(positions.data(), DType::kInt32, {tokens});
  const MlaAppendArgs args{.kv_a = kv_a.view,
                           .cache = cache.view,
                           .slots = make_view(slots.data(), DType::kInt64, {tokens}),
                           .kv_lora_rank = s.rank,
                           .positions = &positions_view,
                           .cos_sin = &table.view,
                           .norm_weight = &weight.view};
  for (auto _ : state) mla_append(args);
  set_rates(state, 0.0, static_cast<double>(tokens * (s.rank + s.rope) * 4));
}

void rope(benchmark::State& state) {
  set_isa(detected_isa());
  const int64_t tokens = state.range(0);
  const Shape s = kTiny;
  Buffer q = random_buffer(DType::kBFloat16, {tokens, s.heads, s.nope + s.rope}, 1.0f);
  Buffer table = random_buffer(DType::kFloat32, {tokens, s.rope}, 0.7f);
  std::vector<int32_t> positions(static_cast<size_t>(tokens));
  for (int64_t t = 0; t < tokens; ++t) positions[static_cast<size_t>(t)] = static_cast<int32_t>(t);
  const TensorView positions_view = make_view(positions.data(), DType::kInt32, {tokens});
  for (auto _ : state) rope_q(q.view, positions_view, table.view, true);
  set_rates(state, 0.0, static_cast<double>(tokens * s.heads * s.rope * 4));
}

// requests, query tokens each, cached tokens each
constexpr DType kBf16 = DType::kBFloat16;
constexpr DType kF32 = DType::kFloat32;
BENCHMARK_CAPTURE(decode, tiny_bf16, kTiny, kBf16, Isa::kAvx512Bf16)
    ->Args({1, 1, 128})
    ->Args({1, 1, 1024})
    ->Args({1, 1, 4096})
    ->Args({16, 1, 512})
    ->Args({64, 1, 512})
    ->Args({1, 4, 1024})
    ->UseRealTime();
BENCHMARK_CAPTURE(decode, tiny_bf16_avx512, kTiny, kBf16, Isa::kAvx512)
    ->Args({1, 1, 1024})
    ->UseRealTime();
BENCHMARK_CAPTURE(decode, tiny_bf16_avx2, kTiny, kBf16, Isa::kAvx2)
    ->Args({1, 1, 1024})
    ->UseRealTime();
BENCHMARK_CAPTURE(decode, tiny_f32, kTiny, kF32, Isa::kAvx512)->Args({1, 1, 1024})->UseRealTime();
BENCHMARK_CAPTURE(decode, h1_bf16, kOneHead, kBf16, Isa::kAvx512Bf16)
    ->Args({1, 1, 4096})
    ->UseRealTime();
BENCHMARK_CAPTURE(decode, tiny_h3_bf16, kTinyQuarter, kBf16, Isa::kAvx512Bf16)
    ->Args({1, 1, 1024})
    ->UseRealTime();
BENCHMARK_CAPTURE(decode, h16_bf16, kSmallHeads, kBf16, Isa::kAvx512Bf16)
    ->Args({1, 1, 4096})
    ->Args({1, 1, 65536})
    ->UseRealTime();
BENCHMARK_CAPTURE(decode, h128_bf16, kFull, kBf16, Isa::kAvx512Bf16)
    ->Args({1, 1, 4096})
    ->UseRealTime();
BENCHMARK_CAPTURE(decode, h128_f32, kFull, kF32, Isa::kAvx512)->Args({1, 1, 4096})->UseRealTime();
BENCHMARK_CAPTURE(decode, h128_f32_avx2, kFull, kF32, Isa::kAvx2)
    ->Args({1, 1, 4096})
    ->UseRealTime();
#define HELICORE_BENCH_FORMAT(name, format)                                              \
  BENCHMARK_CAPTURE(decode_quantised, h1_##name, kOneHead, format, Isa::kAvx512Bf16)     \
      ->Args({1, 1, 4096})                                                               \
      ->UseRealTime();                                                                   \
  BENCHMARK_CAPTURE(decode_quantised, h16_##name, kSmallHeads, format, Isa::kAvx512Bf16) \
      ->Args({1, 1, 4096})                                                               \
      ->Args({1, 1, 65536})                                                              \
      ->UseRealTime();                                                                   \
  BENCHMARK_CAPTURE(decode_quantised, h16_avx2_##name, kSmallHeads, format, Isa::kAvx2)  \
      ->Args({1, 1, 4096})                                                               \
      ->UseRealTime();                                                                   \
  BENCHMARK_CAPTURE(decode_quantised, h128_##name, kFull, format, Isa::kAvx512Bf16)      \
      ->Args({1, 1, 4096})                                                               \
      ->UseRealTime();                                                                   \
  BENCHMARK_CAPTURE(append_quantised, name, kSmallHeads, format)->Arg(1)->Arg(4096)->UseRealTime()
HELICORE_BENCH_FORMAT(fp8, CacheFormat::kFp8);
HELICORE_BENCH_FORMAT(fp8_ds_mla, CacheFormat::kFp8DsMla);
HELICORE_BENCH_FORMAT(nvfp4, CacheFormat::kNvFp4);
#undef HELICORE_BENCH_FORMAT
BENCHMARK_CAPTURE(decode, h16_bf16_avx2, kSmallHeads, kBf16, Isa::kAvx2)
    ->Args({1, 1, 4096})
    ->UseRealTime();
BENCHMARK_CAPTURE(prefill, tiny_bf16, kTiny, kBf16, Isa::kAvx512Bf16)
    ->Args({1, 4096, 4096})
    ->Args({1, 512, 4096})
    ->Args({16, 256, 256})
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(prefill, tiny_bf16_avx512, kTiny, kBf16, Isa::kAvx512)
    ->Args({1, 4096, 4096})
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(prefill, tiny_bf16_avx2, kTiny, kBf16, Isa::kAvx2)
    ->Args({1, 4096, 4096})
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(prefill, tiny_f32, kTiny, kF32, Isa::kAvx512)
    ->Args({1, 4096, 4096})
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(prefill, h16_bf16, kSmallHeads, kBf16, Isa::kAvx512Bf16)
    ->Args({1, 2048, 2048})
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK(append)->Arg(1)->Arg(4096)->UseRealTime();
BENCHMARK(rope)->Arg(1)->Arg(4096)->UseRealTime();

}  // namespace
}  // namespace helicore::attention

BENCHMARK_MAIN();
