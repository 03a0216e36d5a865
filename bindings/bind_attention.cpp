#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <cstdint>
#include <optional>

#include "cache_coding.h"
#include "casters.h"
#include "gil.h"
#include "helicore/attention/mla.h"
#include "helicore/core/error.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace helicore::bindings {
namespace {

using OptionalTensor = std::optional<TensorView>;

const TensorView* pointer(const OptionalTensor& t) { return t ? &*t : nullptr; }

int64_t rows_of(const TensorView& t) { return t.ndim > 0 ? t.shape[0] : 0; }

// Rough time of attention over all cached tokens, for the GIL only: `flop` per (row, token) pair,
// of q [T, H, ...] shared out evenly over the requests.
double attend_ns(const TensorView& q, const TensorView& kv_len, double flop) {
  if (q.ndim != 3 || kv_len.ndim != 1 || kv_len.dtype != DType::kInt32 ||
      kv_len.device.type != DeviceType::kCpu || !kv_len.is_contiguous() || kv_len.shape[0] == 0) {
    return 0.0;  // the call will be refused
  }
  double tokens = 0.0;
  for (int64_t b = 0; b < kv_len.shape[0]; ++b) tokens += kv_len.ptr<const int32_t>()[b];
  const double rows = static_cast<double>(q.shape[0] * q.shape[1]);
  return tokens * rows / static_cast<double>(kv_len.shape[0]) * flop / 200.0;
}

void bind_rows(nb::module_& m) {
  m.def(
      "mla_append",
      [](const TensorView& kv_a, const TensorView& cache, const TensorView& slots,
         int64_t kv_lora_rank, const OptionalTensor& positions, const OptionalTensor& cos_sin,
         const OptionalTensor& norm_weight, float eps, bool interleaved, const char* cache_format,
         float cache_scale) {
        const attention::CacheCoding rows = cache_coding(cache_format, cache_scale);
        ReleaseGilForRows release(rows_of(kv_a));
        attention::mla_append({.kv_a = kv_a,
                               .cache = cache,
                               .slots = slots,
                               .kv_lora_rank = kv_lora_rank,
                               .positions = pointer(positions),
                               .cos_sin = pointer(cos_sin),
                               .norm_weight = pointer(norm_weight),
                               .eps = eps,
                               .interleaved = interleaved,
                               .coding = rows});
      },
      "kv_a"_a, "cache"_a, "slots"_a, "kv_lora_rank"_a, "positions"_a = nb::none(),
      "cos_sin"_a = nb::none(), "norm_weight"_a = nb::none(), "eps"_a = 1e-6f,
      "interleaved"_a = true, "cache_format"_a = "auto", "cache_scale"_a = 1.0f,
      "Write latent rows to the cache. See helicore.ops.mla_append.");
  m.def(
      "mla_absorb",
      [](const TensorView& q, const TensorView& w_absorb, const TensorView& fused_q,
         int64_t kv_lora_rank, const OptionalTensor& positions, const OptionalTensor& cos_sin,
         bool interleaved) {
        ReleaseGilForRows release(rows_of(q));
        attention::mla_absorb({.q = q,
                               .w_absorb = w_absorb,
                               .fused_q = fused_q,
                               .positions = pointer(positions),
                               .cos_sin = pointer(cos_sin),
                               .interleaved = interleaved,
                               .kv_lora_rank = kv_lora_rank});
      },
      "q"_a, "w_absorb"_a, "fused_q"_a, "kv_lora_rank"_a, "positions"_a = nb::none(),
      "cos_sin"_a = nb::none(), "interleaved"_a = true,
      "Query of absorbed attention. See helicore.ops.mla_absorb.");
  m.def(
      "mla_project_v",
      [](const TensorView& o_lat, const TensorView& w_uv, const TensorView& out) {
        ReleaseGilForRows release(rows_of(o_lat));
        attention::mla_project_v(o_lat, w_uv, out);
      },
      "o_lat"_a, "w_uv"_a, "out"_a, "Latent output to values. See helicore.ops.mla_project_v.");
  m.def(
      "rope_q",
      [](const TensorView& q, const TensorView& positions, const TensorView& cos_sin,
         bool interleaved) {
        ReleaseGilForRows release(rows_of(q));
        attention::rope_q(q, positions, cos_sin, interleaved);
      },
      "q"_a, "positions"_a, "cos_sin"_a, "interleaved"_a = true,
      "Rotate the rope part of q in place. See helicore.ops.rope_q.");
  m.def(
      "merge_states",
      [](const TensorView& o_a, const TensorView& stats_a, const TensorView& o_b,
         const TensorView& stats_b, const TensorView& out, const TensorView& stats) {
        ReleaseGilForRows release(rows_of(o_a));
        attention::merge_states({.o_a = o_a,
                                 .stats_a = stats_a,
                                 .o_b = o_b,
                                 .stats_b = stats_b,
                                 .out = out,
                                 .stats = stats});
      },
      "o_a"_a, "stats_a"_a, "o_b"_a, "stats_b"_a, "out"_a, "stats"_a,
      "Merge two partial results. See helicore.ops.merge_states.");
}

void bind_format(nb::module_& m) {
  m.def(
      "cache_row_bytes",
      [](const char* cache_format, int64_t kv_lora_rank, int64_t rope_dim) {
        constexpr const char* kWhere = "attention.cache_row_bytes";
        const auto format = attention::parse_cache_format(cache_format, kWhere);
        HELICORE_CHECK(format != attention::CacheFormat::kDense, kWhere,
                       "cache_format must be a quantised one, got auto");
        attention::check_cache_widths(format, kv_lora_rank, rope_dim, kWhere);
        return attention::row_bytes(format, kv_lora_rank, rope_dim);
      },
      "cache_format"_a, "kv_lora_rank"_a, "rope_dim"_a,
      "Bytes of a token's row in a quantised format. See helicore.ops.cache_row_bytes.");
}

void bind_attend(nb::module_& m) {
  m.def(
      "mla_decode",
      [](const TensorView& q, const TensorView& cache, const TensorView& block_table,
         const TensorView& cu_q, const TensorView& kv_len, float scale, const TensorView& out,
         const OptionalTensor& kv_bound, const OptionalTensor& stats, const char* cache_format,
         float cache_scale) {
        const attention::CacheCoding rows = cache_coding(cache_format, cache_scale);
        ReleaseGilIfLong release(
            attend_ns(q, kv_len, q.ndim == 3 ? 4.0 * static_cast<double>(q.shape[2]) : 0.0));
        attention::mla_decode({.q = q,
                               .cache = cache,
                               .block_table = block_table,
                               .cu_q = cu_q,
                               .kv_len = kv_len,
                               .scale = scale,
                               .out = out,
                               .kv_bound = pointer(kv_bound),
                               .stats = pointer(stats),
                               .coding = rows});
      },
      "q"_a, "cache"_a, "block_table"_a, "cu_q"_a, "kv_len"_a, "scale"_a, "out"_a,
      "kv_bound"_a = nb::none(), "stats"_a = nb::none(), "cache_format"_a = "auto",
      "cache_scale"_a = 1.0f, "Absorbed paged attention. See helicore.ops.mla_decode.");
  m.def(
      "mla_prefill",
      [](const TensorView& q, const TensorView& cache, const TensorView& block_table,
         const TensorView& cu_q, const TensorView& kv_len, const TensorView& w_uk,
         const TensorView& w_uv, int64_t kv_lora_rank, float scale, const TensorView& out,
         const OptionalTensor& stats, const char* cache_format, float cache_scale) {
        const attention::CacheCoding rows = cache_coding(cache_format, cache_scale);
        ReleaseGilIfLong release(
            attend_ns(q, kv_len, q.ndim == 3 ? 4.0 * static_cast<double>(q.shape[2]) : 0.0));
        attention::mla_prefill({.q = q,
                                .cache = cache,
                                .block_table = block_table,
                                .cu_q = cu_q,
                                .kv_len = kv_len,
                                .w_uk = w_uk,
                                .w_uv = w_uv,
                                .kv_lora_rank = kv_lora_rank,
                                .scale = scale,
                                .out = out,
                                .stats = pointer(stats),
                                .coding = rows});
      },
      "q"_a, "cache"_a, "block_table"_a, "cu_q"_a, "kv_len"_a, "w_uk"_a, "w_uv"_a, "kv_lora_rank"_a,
      "scale"_a, "out"_a, "stats"_a = nb::none(), "cache_format"_a = "auto", "cache_scale"_a = 1.0f,
      "Expanded paged attention. See helicore.ops.mla_prefill.");
  m.def(
      "absorbed_is_cheaper",
      [](int64_t num_q_tokens, int64_t kv_len, int32_t kv_lora_rank, int32_t nope_dim,
         int32_t rope_dim, int32_t v_dim) {
        return attention::absorbed_is_cheaper(num_q_tokens, kv_len,
                                              {.kv_lora_rank = kv_lora_rank,
                                               .nope_dim = nope_dim,
                                               .rope_dim = rope_dim,
                                               .v_dim = v_dim});
      },
      "num_q_tokens"_a, "kv_len"_a, "kv_lora_rank"_a, "nope_dim"_a, "rope_dim"_a, "v_dim"_a,
      "Whether mla_decode costs less than mla_prefill for one request.");
}

}  // namespace

void bind_attention(nb::module_& m) {
  bind_rows(m);
  bind_attend(m);
  bind_format(m);
}

}  // namespace helicore::bindings
