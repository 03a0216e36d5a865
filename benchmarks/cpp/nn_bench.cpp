// Linear layers, norms, experts and sampling on the CPU.
//
//   nn_bench --benchmark_filter=linear --benchmark_repetitions=5
//
// `threads` is the last argument of each case. Rates: GB/s of weights for few rows, GFLOP/s for
// many.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <random>
#include <vector>

#include "helicore/core/cpu/isa.h"
#include "helicore/core/thread_pool.h"
#include "helicore/moe/experts.h"
#include "helicore/nn/elementwise.h"
#include "helicore/nn/linear.h"
#include "helicore/nn/sampling.h"

namespace helicore {
namespace {

// A tensor that owns its memory, filled with small normal values.
class Tensor {
 public:
  Tensor(DType dtype, std::initializer_list<int64_t> shape) {
    int64_t numel = 1;
    for (int64_t s : shape) numel *= s;
    storage_.resize(static_cast<size_t>(numel) * size_of(dtype) + 64);
    auto* base =
        reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(storage_.data()) + 63) / 64 * 64);
    view = make_view(base, dtype, shape);
    std::mt19937 rng(1);
    std::normal_distribution<float> normal(0.0f, 0.1f);
    for (int64_t i = 0; i < numel; ++i) {
      if (dtype == DType::kFloat32) view.ptr<float>()[i] = normal(rng);
      if (dtype == DType::kBFloat16) view.ptr<BFloat16>()[i] = BFloat16(normal(rng));
    }
  }
  TensorView view;

 private:
  std::vector<char> storage_;
};

Tensor packed(DType dtype, std::initializer_list<int64_t> lead, int64_t n, int64_t k) {
  const int64_t blocks = (n + 15) / 16;
  int64_t experts = 1;
  for (int64_t s : lead) experts *= s;
  if (dtype == DType::kFloat32) {
    return lead.size() == 0 ? Tensor(dtype, {blocks, k, 16})
                            : Tensor(dtype, {experts, blocks, k, 16});
  }
  return lead.size() == 0 ? Tensor(dtype, {blocks, (k + 1) / 2, 16, 2})
                          : Tensor(dtype, {experts, blocks, (k + 1) / 2, 16, 2});
}

// Arguments: rows, N, K, 1 for float32, threads.
void bm_linear(benchmark::State& state) {
  const int64_t t = state.range(0), n = state.range(1), k = state.range(2);
  const DType dtype = state.range(3) != 0 ? DType::kFloat32 : DType::kBFloat16;
  set_num_threads(static_cast<int>(state.range(4)));
  Tensor x(dtype, {t, k}), out(dtype, {t, n}), w = packed(dtype, {}, n, k);
  for (auto _ : state) {
    nn::linear(
        nn::LinearTensors{.x = x.view, .packed = w.view, .out = out.view, .out_features = n});
    benchmark::ClobberMemory();
  }
  const auto runs = static_cast<double>(state.iterations());
  state.counters["GB/s"] = benchmark::Counter(
      runs * static_cast<double>(n * k) * static_cast<double>(size_of(dtype)) * 1e-9,
      benchmark::Counter::kIsRate);
  state.counters["GFLOP/s"] =
      benchmark::Counter(runs * 2e-9 * static_cast<double>(t * n * k), benchmark::Counter::kIsRate);
}
BENCHMARK(bm_linear)
    ->Name("linear")
    ->ArgNames({"rows", "n", "k", "fp32", "threads"})
    ->ArgsProduct({{1, 4, 16}, {256, 1024}, {256}, {0}, {1, 2}})
    ->ArgsProduct({{1}, {4096}, {256, 1024}, {0}, {1, 2}})
    ->ArgsProduct({{512, 4096}, {256, 1024}, {256}, {0, 1}, {1, 2}})
    ->ArgsProduct({{512}, {2048}, {2048}, {0, 1}, {1}})
    ->UseRealTime();

// Arguments: rows, instruction set (0 generic, 1 AVX2, 2 AVX-512, 3 AVX512-BF16). K 256, N 1024,
// bfloat16.
void bm_linear_isa(benchmark::State& state) {
  const auto isa = static_cast<Isa>(state.range(1));
  if (isa > detected_isa()) return state.SkipWithError("this CPU lacks the instruction set");
  set_isa(isa);
  set_num_threads(1);
  const int64_t t = state.range(0), n = 1024, k = 256;
  Tensor x(DType::kBFloat16, {t, k}), out(DType::kBFloat16, {t, n});
  Tensor w = packed(DType::kBFloat16, {}, n, k);
  for (auto _ : state) {
    nn::linear(
        nn::LinearTensors{.x = x.view, .packed = w.view, .out = out.view, .out_features = n});
    benchmark::ClobberMemory();
  }
  set_isa(detected_isa());
  state.counters["GFLOP/s"] = benchmark::Counter(
      static_cast<double>(state.iterations()) * 2e-9 * static_cast<double>(t * n * k),
      benchmark::Counter::kIsRate);
}
BENCHMARK(bm_linear_isa)
    ->Name("linear_isa")
    ->ArgNames({"rows", "isa"})
    ->ArgsProduct({{1, 16, 512}, {0, 1, 2, 3}});

// A product whose operands stay in the first-level cache, without the parallel frame.
void bm_peak(benchmark::State& state) {
  set_num_threads(1);
  const int64_t t = 6, n = 64, k = 64;
  Tensor x(DType::kBFloat16, {t, k}), out(DType::kFloat32, {t, n});
  Tensor w = packed(DType::kBFloat16, {}, n, k);
  nn::LinearParams p;
  p.x = x.view.data;
  p.x_stride = k;
  p.num_rows = t;
  p.weight = nn::PackedWeight{w.view.data, DType::kBFloat16, n, k};
  p.out = out.view.data;
  p.out_stride = n;
  p.out_dtype = DType::kFloat32;
  for (auto _ : state) {
    nn::linear_blocks(p, 0, n / 16);
    benchmark::ClobberMemory();
  }
  state.counters["GFLOP/s"] = benchmark::Counter(
      static_cast<double>(state.iterations()) * 2e-9 * static_cast<double>(t * n * k),
      benchmark::Counter::kIsRate);
}
BENCHMARK(bm_peak)->Name("linear_in_l1");

// Arguments: tokens, threads. The layer of the bundled model's shape: 16 experts of width 64, top
// 4, shared 128.
void bm_moe_block(benchmark::State& state) {
  const int64_t t = state.range(0), e = 16, d = 256, i = 64, s = 128;
  set_num_threads(static_cast<int>(state.range(1)));
  Tensor x(DType::kBFloat16, {t, d}), out(DType::kBFloat16, {t, d});
  Tensor gate(DType::kFloat32, {e, d}), bias(DType::kFloat32, {e});
  Tensor w13 = packed(DType::kBFloat16, {e}, 2 * i, d), w2 = packed(DType::kBFloat16, {e}, d, i);
  Tensor s13 = packed(DType::kBFloat16, {}, 2 * s, d), s2 = packed(DType::kBFloat16, {}, d, s);
  moe::MoeBlock block;
  block.gate = gate.view;
  block.bias = &bias.view;
  block.router = {.num_experts = 16,
                  .top_k = 4,
                  .n_group = 4,
                  .topk_group = 2,
                  .scoring = moe::Scoring::kSigmoid,
                  .group_score = moe::GroupScore::kTop2Sum,
                  .norm_topk_prob = true,
                  .scaling = 2.0f};
  block.experts = {.w13 = w13.view,
                   .w2 = w2.view,
                   .shared_w13 = &s13.view,
                   .shared_w2 = &s2.view,
                   .intermediate = i,
                   .shared_intermediate = s};
  for (auto _ : state) {
    moe::moe_block(x.view, block, out.view);
    benchmark::ClobberMemory();
  }
  state.counters["GFLOP/s"] = benchmark::Counter(
      static_cast<double>(state.iterations()) * 6e-9 * static_cast<double>(t * d * (4 * i + s)),
      benchmark::Counter::kIsRate);
}
BENCHMARK(bm_moe_block)
    ->Name("moe_block")
    ->ArgNames({"tokens", "threads"})
    ->ArgsProduct({{1, 4, 16, 64, 512, 4096}, {1, 2}})
    ->UseRealTime();

void bm_mlp(benchmark::State& state) {
  const int64_t t = state.range(0), d = 256, i = 640;
  set_num_threads(static_cast<int>(state.range(1)));
  Tensor x(DType::kBFloat16, {t, d}), out(DType::kBFloat16, {t, d});
  Tensor w13 = packed(DType::kBFloat16, {}, 2 * i, d), w2 = packed(DType::kBFloat16, {}, d, i);
  for (auto _ : state) {
    nn::mlp(nn::MlpTensors{.x = x.view,
                           .packed_gate_up = w13.view,
                           .packed_down = w2.view,
                           .out = out.view,
                           .intermediate = i});
    benchmark::ClobberMemory();
  }
}
BENCHMARK(bm_mlp)
    ->Name("mlp")
    ->ArgNames({"tokens", "threads"})
    ->ArgsProduct({{1, 16, 512}, {1, 2}})
    ->UseRealTime();

void bm_rms_norm(benchmark::State& state) {
  const int64_t t = state.range(0), d = 256;
  set_num_threads(static_cast<int>(state.range(1)));
  Tensor x(DType::kBFloat16, {t, d}), out(DType::kBFloat16, {t, d});
  Tensor residual(DType::kBFloat16, {t, d}), weight(DType::kBFloat16, {d});
  for (auto _ : state) {
    nn::add_rms_norm(x.view, residual.view, weight.view, 1e-6f, out.view);
    benchmark::ClobberMemory();
  }
}
BENCHMARK(bm_rms_norm)
    ->Name("add_rms_norm")
    ->ArgNames({"tokens", "threads"})
    ->ArgsProduct({{1, 16, 4096}, {1}})
    ->UseRealTime();

// Arguments: rows, vocabulary, mode (0 greedy, 1 temperature, 2 top-p, 3 top-k and top-p), threads.
void bm_sample(benchmark::State& state) {
  const int64_t b = state.range(0), v = state.range(1), mode = state.range(2);
  set_num_threads(static_cast<int>(state.range(3)));
  Tensor logits(DType::kFloat32, {b, v});
  std::mt19937 rng(1);
  std::normal_distribution<float> normal(0.0f, 3.0f);
  for (int64_t i = 0; i < b * v; ++i) logits.view.ptr<float>()[i] = normal(rng);
  const auto n = static_cast<size_t>(b);
  std::vector<float> temperature(n, mode == 0 ? 0.0f : 0.8f), top_p(n, mode >= 2 ? 0.95f : 1.0f),
      min_p(n, 0.0f);
  std::vector<int32_t> top_k(n, mode == 3 ? 50 : 0), ids(n);
  std::vector<int64_t> seed(n, 1), position(n, 2);
  const nn::SampleTensors t{.logits = logits.view,
                            .temperature = make_view(temperature.data(), DType::kFloat32, {b}),
                            .top_k = make_view(top_k.data(), DType::kInt32, {b}),
                            .top_p = make_view(top_p.data(), DType::kFloat32, {b}),
                            .min_p = make_view(min_p.data(), DType::kFloat32, {b}),
                            .seed = make_view(seed.data(), DType::kInt64, {b}),
                            .position = make_view(position.data(), DType::kInt64, {b}),
                            .ids = make_view(ids.data(), DType::kInt32, {b})};
  for (auto _ : state) {
    ++position[0];
    nn::sample(t);
    benchmark::ClobberMemory();
  }
}
BENCHMARK(bm_sample)
    ->Name("sample")
    ->ArgNames({"rows", "vocab", "mode", "threads"})
    ->ArgsProduct({{1, 16}, {4096}, {0, 1, 2, 3}, {1}})
    ->ArgsProduct({{1}, {129280}, {0, 1, 2, 3}, {1}})
    ->UseRealTime();

}  // namespace
}  // namespace helicore

BENCHMARK_MAIN();
