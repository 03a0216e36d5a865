// Expanded causal attention: one task is a range of query rows of one head; keys and values of that
// head are made from the latents chunk by chunk into the worker's scratch, so memory is bounded at
// any context length.
#include "helicore/attention/cpu/gather.inc.h"
#include "helicore/attention/cpu/kernels.h"

namespace helicore::attention::HELICORE_ISA_NS {
namespace {

inline constexpr int kExpandVecs = 2;  // packed panels (of 16 output columns) expanded at a time

template <class C>
struct Expanded {
  using Elem = typename C::Elem;
  Elem* k = nullptr;         // [chunk_tokens][dn + dr]
  Elem* v = nullptr;         // [chunk_tokens][dv]
  Elem* latents = nullptr;   // [16][E], used when latents can't be read in place
  float* product = nullptr;  // [16][16 * kExpandVecs]
};

// out[t][0 : n] = latents[t] . W[n]^T for num_tokens rows, n output columns, rows ldo apart.
template <class Mul, class Elem>
void expand(const typename Mul::A* latents, int64_t lda, int num_tokens, const void* packed,
            int64_t rank, int n, float* product, Elem* out, int64_t ldo) {
  const auto* w = static_cast<const typename Mul::B*>(packed);
  const int64_t panel = rank * 16;
  constexpr int64_t kLdp = 16 * kExpandVecs;
  for (int col = 0; col < n; col += kLdp) {
    const int vecs = static_cast<int>(min64(kExpandVecs, (n - col + 15) / 16));
    dot_rows<Mul>(latents, lda, num_tokens, w + col / 16 * panel, panel, vecs, rank, product, kLdp);
    for (int v = 0; v < vecs; ++v) {
      const int left = static_cast<int>(min64(16, n - col - v * 16));
      for (int t = 0; t < num_tokens; ++t) {
        Elem* row = out + t * ldo + col + v * 16;
        const VF x = load(product + t * kLdp + v * 16);
        if (left == 16) {
          store(row, x);
        } else {
          store_n(row, x, left);
        }
      }
    }
  }
}

template <class C, class Mul, class CacheElem>
void expand_chunk(const MlaPrefillParams& p, const PrefillTask& task, int64_t begin, int64_t end,
                  const Expanded<C>& x) {
  using Elem = typename C::Elem;
  using B = typename Mul::B;
  const int32_t* pages = p.block_table + task.request * p.block_table_stride;
  const int64_t rank = p.cache.kv_lora_rank;
  const int64_t width = p.cache.width();
  const int64_t dqk = int64_t{p.nope_dim} + p.cache.rope_dim;
  const B* w_uk = static_cast<const B*>(p.w_uk) + task.head * p.w_uk_head_stride;
  const B* w_uv = static_cast<const B*>(p.w_uv) + task.head * p.w_uv_head_stride;
  for (int64_t first = begin; first < end; first += kSegmentTokens) {
    const int n = static_cast<int>(min64(kSegmentTokens, end - first));
    const Elem* rows = latent_segment<CacheElem>(p.cache, pages, first, n, x.latents);
    Elem* k = x.k + (first - begin) * dqk;
    Elem* v = x.v + (first - begin) * p.v_dim;
    expand<Mul>(rows, width, n, w_uk, rank, p.nope_dim, x.product, k, dqk);
    expand<Mul>(rows, width, n, w_uv, rank, p.v_dim, x.product, v, p.v_dim);
    for (int t = 0; t < n; ++t) {
      convert_row(rows + t * width + rank, p.cache.rope_dim, k + t * dqk + p.nope_dim);
    }
  }
}

// Attends query rows [tile_begin, tile_begin + tile.num_rows) over the expanded tokens [begin,
// end).
template <class C>
void attend_chunk(AttendTile<C>& tile, SoftmaxState& state, const Expanded<C>& x, int64_t begin,
                  int64_t end) {
  for (int64_t t = begin; t < end; t += kBlockTokens) {
    TokenBlock<typename C::Elem> block;
    block.first_token = static_cast<int32_t>(t);
    block.num_tokens = static_cast<int>(min64(kBlockTokens, end - t));
    block.ldk = tile.depth;
    block.ldv = tile.width;
    for (int s = 0; s < kSegments; ++s) {
      block.k[s] = x.k + (t - begin + s * kSegmentTokens) * block.ldk;
      block.v[s] = x.v + (t - begin + s * kSegmentTokens) * block.ldv;
    }
    attend_block(block, tile, state);
  }
}

template <class C, class T>
void write_task(const MlaPrefillParams& p, const PrefillTask& task, const SoftmaxState& all,
                int64_t ldo) {
  for (int32_t i = task.q_begin; i < task.q_end; ++i) {
    const int64_t r = i - task.q_begin;
    const int64_t row = (int64_t{p.cu_q[task.request]} + i) * p.num_heads + task.head;
    // A row that saw nothing has l = 0, whether or not its o was ever written.
    write_row<C>(all.o + r * ldo, all.l[r], row_factor(p.cache), p.v_dim,
                 static_cast<T*>(p.out) + row * p.v_dim);
    if (p.stats != nullptr) {
      const float l = all.l[r];
      p.stats[row * 2] = l == 0.0f ? -std::numeric_limits<float>::infinity() : all.m[r];
      p.stats[row * 2 + 1] = l;
    }
  }
}

template <class C, class Mul, class CacheElem, class T>
void prefill_task(const MlaPrefillParams& p, const PrefillTask& task, int64_t chunk_tokens,
                  void* scratch) {
  using Elem = typename C::Elem;
  const int64_t dqk = int64_t{p.nope_dim} + p.cache.rope_dim;
  const int64_t ldo = round_up(p.v_dim, kDecodeStripColumns);
  const int64_t rows16 = round_up(task.q_end - task.q_begin, 16);
  Carver carver{static_cast<char*>(scratch)};
  Expanded<C> x;
  x.k = carver.take<Elem>((chunk_tokens + kBlockTokens) * dqk);
  x.v = carver.take<Elem>((chunk_tokens + kBlockTokens) * p.v_dim);
  x.latents = carver.take<Elem>(kSegmentTokens * p.cache.width());
  x.product = carver.take<float>(kSegmentTokens * 16 * kExpandVecs);
  AttendTile<C> tile;
  tile.q = carver.take<Elem>(kPrefillTileRows * dqk);
  tile.scores = carver.take<float>(kPrefillTileRows * kBlockTokens);
  tile.p = carver.take<Elem>(kPrefillTileRows * kBlockTokens);
  tile.alpha = carver.take<float>(kPrefillTileRows);
  int32_t* bounds = carver.take<int32_t>(kPrefillTileRows);
  SoftmaxState all;
  all.m = carver.take<float>(rows16);
  all.l = carver.take<float>(rows16);
  all.o = carver.take<float>(rows16 * ldo);
  reset(all, static_cast<int>(rows16 / 16));
  tile.depth = static_cast<int>(dqk);
  tile.width = p.v_dim;
  tile.ldo = ldo;
  tile.scale_log2 = p.scale * row_factor(p.cache) * 1.44269504088896340736f;
  tile.bound = bounds;

  const int64_t num_q = p.cu_q[task.request + 1] - p.cu_q[task.request];
  const int64_t history = p.kv_len[task.request] - num_q;  // row i sees history + i + 1 tokens
  const int64_t kv_end = max64(0, history + task.q_end);
  const int64_t q_stride = p.num_heads * dqk;
  const T* q =
      static_cast<const T*>(p.q) + int64_t{p.cu_q[task.request]} * q_stride + task.head * dqk;
  for (int64_t begin = 0; begin < kv_end; begin += chunk_tokens) {
    const int64_t end = min64(kv_end, begin + chunk_tokens);
    expand_chunk<C, Mul, CacheElem>(p, task, begin, end, x);
    for (int32_t i = task.q_begin; i < task.q_end; i += kPrefillTileRows) {
      tile.num_rows = static_cast<int>(min64(kPrefillTileRows, task.q_end - i));
      const int64_t tile_end = min64(end, history + i + tile.num_rows);
      if (tile_end <= begin) continue;
      tile.num_vecs = (tile.num_rows + 15) / 16;
      for (int r = 0; r < tile.num_rows; ++r) {
        bounds[r] = static_cast<int32_t>(max64(0, history + i + r + 1));
      }
      tile.min_bound = bounds[0];
      pack_queries<C>(q + i * q_stride, q_stride, tile);
      const int64_t r = i - task.q_begin;
      SoftmaxState state{all.m + r, all.l + r, all.o + r * ldo, begin == 0};
      attend_chunk(tile, state, x, begin, tile_end);
    }
  }
  write_task<C, T>(p, task, all, ldo);
}

template <class CacheElem>
void prefill_f32(const MlaPrefillParams& p, const PrefillTask& task, int64_t chunk_tokens,
                 void* scratch) {
  const auto with = [&](auto mul, auto query) {
    prefill_task<ComputeF32, decltype(mul), CacheElem, decltype(query)>(p, task, chunk_tokens,
                                                                        scratch);
  };
  const bool bf16_q = p.q_dtype == DType::kBFloat16;
  if (p.w_dtype == DType::kBFloat16)
    return bf16_q ? with(MulF32Bf16{}, BFloat16{}) : with(MulF32Bf16{}, float{});
  return bf16_q ? with(MulF32{}, BFloat16{}) : with(MulF32{}, float{});
}

}  // namespace

void mla_prefill_task(const MlaPrefillParams& params, const PrefillTask& task, int64_t chunk_tokens,
                      void* scratch) {
  const bool is_dense = params.cache.format == CacheFormat::kDense;
  const bool bf16_rows = params.cache.dtype == DType::kBFloat16;
#if defined(HELICORE_SIMD_BF16)
  if (params.w_dtype == DType::kBFloat16 && params.q_dtype == DType::kBFloat16) {
    if (!is_dense) {
      return prefill_task<ComputeBf16, MulBf16, QuantizedRow, BFloat16>(params, task, chunk_tokens,
                                                                        scratch);
    }
    if (bf16_rows) {
      return prefill_task<ComputeBf16, MulBf16, BFloat16, BFloat16>(params, task, chunk_tokens,
                                                                    scratch);
    }
  }
#endif
  if (!is_dense) return prefill_f32<QuantizedRow>(params, task, chunk_tokens, scratch);
  if (bf16_rows) return prefill_f32<BFloat16>(params, task, chunk_tokens, scratch);
  return prefill_f32<float>(params, task, chunk_tokens, scratch);
}

}  // namespace helicore::attention::HELICORE_ISA_NS
