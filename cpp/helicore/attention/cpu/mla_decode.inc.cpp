// Paged absorbed attention: one task is a tile of (token, head) rows of a request over a range of
// KV chunks.
#include "helicore/attention/cpu/gather.inc.h"
#include "helicore/attention/cpu/kernels.h"

namespace helicore::attention::HELICORE_ISA_NS {
namespace {

inline int64_t row_bound(const MlaDecodeParams& p, int32_t request, int64_t token) {
  if (p.kv_bound != nullptr) return max64(0, p.kv_bound[p.cu_q[request] + token]);
  const int64_t num_q = p.cu_q[request + 1] - p.cu_q[request];
  return max64(0, p.kv_len[request] - num_q + token + 1);
}

// Folds `part` into `run`, row by row: the one definition of a merge, so that a fold inside a task
// and a fold of stored partials give the same bits.
inline void fold(const SoftmaxState& part, int num_rows, int num_vecs, int64_t ldo,
                 SoftmaxState& run) {
  alignas(64) float weight_run[16];
  alignas(64) float weight_part[16];
  for (int v = 0; v < num_vecs; ++v) {
    const VF m_run = load(run.m + v * 16);
    const VF m_part = load(part.m + v * 16);
    const VF m = max(m_run, m_part);
    const VF safe_m = max(m, set1(-1e30f));
    const VF a = exp2_or_nan(sub(m_run, safe_m));
    const VF b = exp2_or_nan(sub(m_part, safe_m));
    store(weight_run, a);
    store(weight_part, b);
    store(run.l + v * 16, fma(load(part.l + v * 16), b, mul(load(run.l + v * 16), a)));
    store(run.m + v * 16, m);
    for (int lane = 0; lane < 16 && v * 16 + lane < num_rows; ++lane) {
      float* o = run.o + (v * 16 + lane) * ldo;
      const float* x = part.o + (v * 16 + lane) * ldo;
      if (weight_part[lane] == 0.0f && weight_run[lane] == 1.0f) continue;
      const VF w = set1(weight_run[lane]);
      const VF u = set1(weight_part[lane]);
      for (int64_t c = 0; c < ldo; c += 16) {
        store(o + c, fma(load(x + c), u, mul(load(o + c), w)));
      }
    }
  }
}

template <class C, class T>
void write_rows(const MlaDecodeParams& p, int32_t request, int32_t row_begin, int num_rows,
                const SoftmaxState& state, int64_t ldo) {
  const int64_t width = p.cache.kv_lora_rank;
  const int64_t first = int64_t{p.cu_q[request]} * p.num_heads + row_begin;
  const float factor = row_factor(p.cache);
  T* out = static_cast<T*>(p.out) + first * width;
  for (int r = 0; r < num_rows; ++r) {
    const float l = state.empty ? 0.0f : state.l[r];
    write_row<C>(state.o + r * ldo, l, factor, static_cast<int>(width), out + r * width);
    if (p.stats != nullptr) {
      float* stats = p.stats + (first + r) * 2;
      stats[0] = l == 0.0f ? -std::numeric_limits<float>::infinity() : state.m[r];
      stats[1] = l;
    }
  }
}

template <class C, class CacheElem>
void load_block(const MlaDecodeParams& p, const int32_t* pages, int64_t first, int64_t end,
                typename C::Elem* rows, TokenBlock<typename C::Elem>& block) {
  const int64_t width = p.cache.width();
  block.first_token = static_cast<int32_t>(first);
  block.num_tokens = static_cast<int>(min64(kBlockTokens, end - first));
  block.ldk = width;
  block.ldv = width;
  for (int t = 0; t < block.num_tokens; t += kSegmentTokens) {
    const int n = static_cast<int>(min64(kSegmentTokens, block.num_tokens - t));
    block.k[t / kSegmentTokens] =
        latent_segment<CacheElem>(p.cache, pages, first + t, n, rows + t * width);
    block.v[t / kSegmentTokens] = block.k[t / kSegmentTokens];
  }
}

template <class C, class CacheElem, class T>
void decode_task(const MlaDecodeParams& p, const DecodeTask& task, const DecodeScratch& scratch) {
  using Elem = typename C::Elem;
  const int num_rows = task.row_end - task.row_begin;
  const int64_t width = p.cache.width();
  const int64_t ldo = round_up(p.cache.kv_lora_rank, kDecodeStripColumns);
  AttendTile<C> tile;
  tile.num_rows = num_rows;
  tile.num_vecs = (num_rows + 15) / 16;
  tile.depth = static_cast<int>(width);
  tile.width = p.cache.kv_lora_rank;
  tile.ldo = ldo;
  tile.few_heads = p.num_heads <= kFewHeads;  // not by rows: bits must not depend on S_q
  tile.scale_log2 = p.scale * row_factor(p.cache) * 1.44269504088896340736f;
  const int64_t rows16 = int64_t{tile.num_vecs} * 16;
  Carver carver{static_cast<char*>(scratch.worker)};
  tile.q = carver.take<Elem>(rows16 * width);
  tile.scores = carver.take<float>(rows16 * kBlockTokens);
  tile.p = carver.take<Elem>(rows16 * kBlockTokens);
  tile.alpha = carver.take<float>(rows16);
  int32_t* bounds = carver.take<int32_t>(rows16);
  SoftmaxState run;
  SoftmaxState part;
  for (SoftmaxState* s : {&run, &part}) {
    s->m = carver.take<float>(rows16);
    s->l = carver.take<float>(rows16);
    s->o = carver.take<float>(num_rows * ldo);
  }
  Elem* rows = carver.take<Elem>(kBlockTokens * width);

  int64_t max_bound = 0;
  tile.min_bound = std::numeric_limits<int32_t>::max();
  for (int r = 0; r < num_rows; ++r) {
    const int64_t bound = row_bound(p, task.request, (task.row_begin + r) / p.num_heads);
    bounds[r] = static_cast<int32_t>(bound);
    max_bound = max64(max_bound, bound);
    tile.min_bound = static_cast<int32_t>(min64(tile.min_bound, bound));
  }
  tile.bound = bounds;
  const T* q = static_cast<const T*>(p.q) +
               (int64_t{p.cu_q[task.request]} * p.num_heads + task.row_begin) * width;
  pack_queries<C>(q, width, tile);

  const int32_t* pages = p.block_table + task.request * p.block_table_stride;
  int64_t slot = task.slot;
  reset(run, tile.num_vecs);
  for (int32_t chunk = task.chunk_begin; chunk < task.chunk_end; ++chunk) {
    const bool own_slot = task.slot >= 0 && task.chunk_begin > 0;
    SoftmaxState& state = own_slot || chunk == task.chunk_begin ? run : part;
    if (&state == &part || chunk > task.chunk_begin) reset(state, tile.num_vecs);
    const int64_t end = min64(max_bound, kv_chunk_begin(chunk + 1));
    for (int64_t t = kv_chunk_begin(chunk); t < end; t += kBlockTokens) {
      TokenBlock<Elem> block;
      load_block<C, CacheElem>(p, pages, t, end, rows, block);
      attend_block(block, tile, state);
    }
    if (&state == &part && !part.empty) fold(part, num_rows, tile.num_vecs, ldo, run);
    if (task.slot >= 0 && (own_slot || chunk + 1 == task.chunk_end)) {
      float* out = scratch.partials + slot++ * scratch.slot_stride;
      const size_t row_bytes = static_cast<size_t>(rows16) * sizeof(float);
      std::memcpy(out, run.m, row_bytes);
      std::memcpy(out + scratch.tile_rows, run.l, row_bytes);
      if (run.empty) {
        std::memset(out + 2 * scratch.tile_rows, 0, static_cast<size_t>(num_rows * ldo) * 4);
      } else {
        std::memcpy(out + 2 * scratch.tile_rows, run.o, static_cast<size_t>(num_rows * ldo) * 4);
      }
    }
  }
  if (task.slot < 0) write_rows<C, T>(p, task.request, task.row_begin, num_rows, run, ldo);
}

template <class C, class T>
void decode_merge(const MlaDecodeParams& p, const DecodeMerge& merge, const DecodeScratch& scratch,
                  int32_t row_begin, int32_t row_end) {
  const int64_t ldo = round_up(p.cache.kv_lora_rank, kDecodeStripColumns);
  const int32_t offset = row_begin - merge.row_begin;  // a multiple of 16
  const int num_rows = row_end - row_begin;
  const int num_vecs = (num_rows + 15) / 16;
  auto partial = [&](int64_t slot) {
    float* base = scratch.partials + slot * scratch.slot_stride;
    SoftmaxState state;
    state.m = base + offset;
    state.l = base + scratch.tile_rows + offset;
    state.o = base + 2 * scratch.tile_rows + offset * ldo;
    state.empty = false;
    return state;
  };
  SoftmaxState run = partial(merge.slot_begin);
  for (int64_t slot = merge.slot_begin + 1; slot < merge.slot_end; ++slot) {
    fold(partial(slot), num_rows, num_vecs, ldo, run);
  }
  write_rows<C, T>(p, merge.request, row_begin, num_rows, run, ldo);
}

// Calls f with the arithmetic, the cache element and the query element of `p` as types.
template <class Fn>
void with_types(const MlaDecodeParams& p, Fn&& f) {
  const bool bf16_q = p.q_dtype == DType::kBFloat16;
  if (p.cache.format != CacheFormat::kDense) {
#if defined(HELICORE_SIMD_BF16)
    if (bf16_q) return f(ComputeBf16{}, QuantizedRow{}, BFloat16{});
#else
    if (bf16_q) return f(ComputeF32{}, QuantizedRow{}, BFloat16{});
#endif
    return f(ComputeF32{}, QuantizedRow{}, float{});
  }
  if (p.cache.dtype == DType::kBFloat16) {
#if defined(HELICORE_SIMD_BF16)
    if (bf16_q) return f(ComputeBf16{}, BFloat16{}, BFloat16{});
#else
    if (bf16_q) return f(ComputeF32{}, BFloat16{}, BFloat16{});
#endif
    return f(ComputeF32{}, BFloat16{}, float{});
  }
  if (bf16_q) return f(ComputeF32{}, float{}, BFloat16{});
  return f(ComputeF32{}, float{}, float{});
}

}  // namespace

void mla_decode_task(const MlaDecodeParams& params, const DecodeTask& task,
                     const DecodeScratch& scratch) {
  with_types(params, [&](auto compute, auto cache, auto query) {
    decode_task<decltype(compute), decltype(cache), decltype(query)>(params, task, scratch);
  });
}

void mla_decode_merge(const MlaDecodeParams& params, const DecodeMerge& merge,
                      const DecodeScratch& scratch, int32_t row_begin, int32_t row_end) {
  with_types(params, [&](auto compute, auto /*cache*/, auto query) {
    decode_merge<decltype(compute), decltype(query)>(params, merge, scratch, row_begin, row_end);
  });
}

}  // namespace helicore::attention::HELICORE_ISA_NS
