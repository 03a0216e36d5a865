// CUDA twins in helicore._core.attention; helicore.ops picks them by the device of its tensors.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <cstdint>
#include <optional>

#include "cache_coding.h"
#include "casters.h"
#include "helicore/attention/cuda/entries.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace helicore::bindings {
namespace {

using OptionalTensor = std::optional<TensorView>;

const TensorView* pointer(const OptionalTensor& t) { return t ? &*t : nullptr; }

attention::MlaDecodeArgs decode_args(const TensorView& q, const TensorView& cache,
                                     const TensorView& block_table, const TensorView& cu_q,
                                     const TensorView& kv_len, const TensorView& out,
                                     const attention::CacheCoding& coding) {
  return {.q = q,
          .cache = cache,
          .block_table = block_table,
          .cu_q = cu_q,
          .kv_len = kv_len,
          .scale = 1.0f,
          .out = out,
          .coding = coding};
}

void bind_decode(nb::module_& m) {
  m.def(
      "cuda_decode_workspace_bytes",
      [](const TensorView& q, const TensorView& cache, const TensorView& block_table,
         const TensorView& cu_q, const TensorView& kv_len, const TensorView& out,
         int32_t fixed_splits, const char* cache_format, float cache_scale) {
        return attention::cuda::decode_workspace_bytes(
            decode_args(q, cache, block_table, cu_q, kv_len, out,
                        cache_coding(cache_format, cache_scale)),
            fixed_splits);
      },
      "q"_a, "cache"_a, "block_table"_a, "cu_q"_a, "kv_len"_a, "out"_a, "fixed_splits"_a = 0,
      "cache_format"_a = "auto", "cache_scale"_a = 1.0f,
      "Bytes of workspace that cuda_mla_decode needs for tensors of these shapes.");
  m.def(
      "cuda_mla_decode",
      [](const TensorView& q, const TensorView& cache, const TensorView& block_table,
         const TensorView& cu_q, const TensorView& kv_len, float scale, const TensorView& out,
         const OptionalTensor& kv_bound, const OptionalTensor& stats,
         const OptionalTensor& workspace, int32_t fixed_splits, const char* cache_format,
         float cache_scale) {
        attention::MlaDecodeArgs args = decode_args(q, cache, block_table, cu_q, kv_len, out,
                                                    cache_coding(cache_format, cache_scale));
        args.scale = scale;
        args.kv_bound = pointer(kv_bound);
        args.stats = pointer(stats);
        attention::cuda::mla_decode(args, fixed_splits, pointer(workspace),
                                    current_cuda_stream(q.device));
      },
      "q"_a, "cache"_a, "block_table"_a, "cu_q"_a, "kv_len"_a, "scale"_a, "out"_a,
      "kv_bound"_a = nb::none(), "stats"_a = nb::none(), "workspace"_a = nb::none(),
      "fixed_splits"_a = 0, "cache_format"_a = "auto", "cache_scale"_a = 1.0f,
      "Absorbed paged attention on CUDA tensors, on torch's current stream.\n\n"
      "fixed_splits > 0 makes a row's bits independent of its batch.");
}

}  // namespace

void bind_attention_cuda(nb::module_& m) {
  bind_decode(m);
  m.def(
      "cuda_mla_append",
      [](const TensorView& kv_a, const TensorView& cache, const TensorView& slots,
         int64_t kv_lora_rank, const OptionalTensor& positions, const OptionalTensor& cos_sin,
         const OptionalTensor& norm_weight, float eps, bool interleaved, const char* cache_format,
         float cache_scale) {
        attention::cuda::mla_append({.kv_a = kv_a,
                                     .cache = cache,
                                     .slots = slots,
                                     .kv_lora_rank = kv_lora_rank,
                                     .positions = pointer(positions),
                                     .cos_sin = pointer(cos_sin),
                                     .norm_weight = pointer(norm_weight),
                                     .eps = eps,
                                     .interleaved = interleaved,
                                     .coding = cache_coding(cache_format, cache_scale)},
                                    current_cuda_stream(kv_a.device));
      },
      "kv_a"_a, "cache"_a, "slots"_a, "kv_lora_rank"_a, "positions"_a = nb::none(),
      "cos_sin"_a = nb::none(), "norm_weight"_a = nb::none(), "eps"_a = 1e-6f,
      "interleaved"_a = true, "cache_format"_a = "auto", "cache_scale"_a = 1.0f,
      "mla_append on CUDA tensors, on torch's current stream.");
  m.def(
      "cuda_gather_rows",
      [](const TensorView& cache, const TensorView& pages, const TensorView& out,
         int64_t kv_lora_rank, const char* cache_format, float cache_scale) {
        attention::cuda::gather_rows({.cache = cache,
                                      .pages = pages,
                                      .out = out,
                                      .kv_lora_rank = kv_lora_rank,
                                      .coding = cache_coding(cache_format, cache_scale)},
                                     current_cuda_stream(out.device));
      },
      "cache"_a, "pages"_a, "out"_a, "kv_lora_rank"_a, "cache_format"_a, "cache_scale"_a,
      "out[i] = the row of token i of a request whose pages are given, of a quantised cache.");
  m.def(
      "cuda_rope_q",
      [](const TensorView& q, const TensorView& positions, const TensorView& cos_sin,
         bool interleaved) {
        attention::cuda::rope_q(q, positions, cos_sin, interleaved, current_cuda_stream(q.device));
      },
      "q"_a, "positions"_a, "cos_sin"_a, "interleaved"_a = true,
      "rope_q on CUDA tensors, on torch's current stream.");
  m.def(
      "cuda_merge_states",
      [](const TensorView& o_a, const TensorView& stats_a, const TensorView& o_b,
         const TensorView& stats_b, const TensorView& out, const TensorView& stats) {
        attention::cuda::merge_states({.o_a = o_a,
                                       .stats_a = stats_a,
                                       .o_b = o_b,
                                       .stats_b = stats_b,
                                       .out = out,
                                       .stats = stats},
                                      current_cuda_stream(o_a.device));
      },
      "o_a"_a, "stats_a"_a, "o_b"_a, "stats_b"_a, "out"_a, "stats"_a,
      "merge_states on CUDA tensors, on torch's current stream.");
}

}  // namespace helicore::bindings
