// Entry of expanded prefill: checks and the parallel region over (request, head, query rows).
#include <algorithm>
#include <vector>

#include "helicore/attention/checks.h"
#include "helicore/attention/cpu/kernels.h"
#include "helicore/attention/mla.h"
#include "helicore/core/thread_pool.h"
#include "helicore/nn/linear.h"

namespace helicore::attention {
namespace {

constexpr const char* kWhere = "attention.mla_prefill";
constexpr int64_t kChunkBudget = 384
                                 << 10;  // bytes of expanded keys and values: part of an L2 cache
constexpr int64_t kMinTaskRows = 256;    // fewer query rows would not pay for the expansion
constexpr int64_t kMaxTaskRows = 8192;   // bounds the running state of a worker

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Positions per chunk depend on the widths only, so results do not depend on the batch.
int64_t pick_chunk_tokens(const MlaPrefillParams& p) {
  const int64_t row = int64_t{p.nope_dim} + p.cache.rope_dim + p.v_dim;
  return std::clamp<int64_t>(kChunkBudget / (row * 2) / 64, 1, 64) * 64;
}

size_t worker_bytes(const MlaPrefillParams& p, int64_t chunk_tokens, int64_t task_rows) {
  const int64_t dqk = int64_t{p.nope_dim} + p.cache.rope_dim;
  const int64_t rows = round_up(task_rows, 16);
  const int64_t floats = (chunk_tokens + 64) * (dqk + p.v_dim) + 16 * (p.cache.width() + 32) +
                         kPrefillTileRows * (dqk + 64 + 64 + 2) +
                         rows * (2 + round_up(p.v_dim, kDecodeStripColumns));
  return static_cast<size_t>(floats * 4 + 16 * 64);
}

int64_t rows_per_task(const MlaPrefillParams& p, int num_workers) {
  int64_t most = 0;
  int64_t active = 0;
  for (int32_t b = 0; b < p.num_requests; ++b) {
    const int64_t num_q = p.cu_q[b + 1] - p.cu_q[b];
    most = std::max(most, num_q);
    active += num_q > 0 ? 1 : 0;
  }
  const int64_t units = active * p.num_heads;  // tasks if no request is cut
  const int64_t wanted = int64_t{num_workers} * 6;
  const int64_t cuts = num_workers == 1 ? 1 : std::max<int64_t>(1, (wanted + units - 1) / units);
  const int64_t rows = round_up((most + cuts - 1) / cuts, kPrefillTileRows);
  return std::clamp(rows, kMinTaskRows, kMaxTaskRows);
}

void make_tasks(const MlaPrefillParams& p, int64_t task_rows, std::vector<PrefillTask>* tasks) {
  tasks->clear();
  for (int32_t b = 0; b < p.num_requests; ++b) {
    const int64_t num_q = p.cu_q[b + 1] - p.cu_q[b];
    for (int64_t begin = 0; begin < num_q; begin += task_rows) {
      const int64_t end = std::min(num_q, begin + task_rows);
      const int64_t visible = std::max<int64_t>(0, p.kv_len[b] - num_q + end);
      for (int32_t h = 0; h < p.num_heads; ++h) {
        tasks->push_back({b, h, static_cast<int32_t>(begin), static_cast<int32_t>(end),
                          visible * (end - begin)});
      }
    }
  }
  std::sort(tasks->begin(), tasks->end(), [](const PrefillTask& a, const PrefillTask& b) {
    if (a.cost != b.cost) return a.cost > b.cost;
    if (a.request != b.request) return a.request < b.request;
    if (a.q_begin != b.q_begin) return a.q_begin < b.q_begin;
    return a.head < b.head;
  });
}

// Checks w [H, packed...] as the packed form of one [n, rank] matrix per head; returns the head
// stride.
int64_t check_weight(const TensorView& w, int64_t heads, int64_t n, int64_t rank,
                     const char* name) {
  nn::check_cpu(w, kWhere, name);
  check_contiguous(w, kWhere, name);
  HELICORE_CHECK(w.ndim >= 4 && w.size(0) == heads, kWhere, name,
                 " must be packed with one matrix for each of ", heads, " heads, got ",
                 w.describe());
  TensorView head = w;
  head.ndim = w.ndim - 1;
  for (int d = 0; d < head.ndim; ++d) {
    head.shape[d] = w.shape[d + 1];
    head.strides[d] = w.strides[d + 1];
  }
  const nn::PackedWeight packed = nn::packed_weight(head, n, rank, kWhere, name);
  return packed.num_blocks() * packed.block_stride();
}

void run(const MlaPrefillParams& p) {
  static thread_local std::vector<PrefillTask> tasks;
  ThreadPool& pool = default_pool();
  ThreadPool::Lease lease(pool);
  const int64_t chunk_tokens = pick_chunk_tokens(p);
  const int64_t task_rows = rows_per_task(p, pool.num_threads());
  make_tasks(p, task_rows, &tasks);
  int64_t most_rows = 0;
  for (const PrefillTask& t : tasks) most_rows = std::max<int64_t>(most_rows, t.q_end - t.q_begin);
  const size_t bytes = worker_bytes(p, chunk_tokens, most_rows);
  for (int i = 0; i < pool.num_threads(); ++i) (void)pool.scratch(i, bytes);
  const std::vector<PrefillTask>& list = tasks;  // workers must not see their own thread's vector
  pool.parallel_for_worker(static_cast<int64_t>(list.size()), [&](int64_t i, int worker) {
    HELICORE_DISPATCH_ISA(mla_prefill_task(p, list[static_cast<size_t>(i)], chunk_tokens,
                                           pool.scratch(worker, bytes)));
  });
}

}  // namespace

void mla_prefill(const MlaPrefillArgs& args) {
  MlaPrefillParams p;
  check_shape(args.q, {-1, -1, -1}, kWhere, "q");
  nn::check_float_rows(args.q, kWhere, "q");
  check_contiguous(args.q, kWhere, "q");
  p.num_tokens = args.q.size(0);
  const int64_t heads = args.q.size(1);
  HELICORE_CHECK(heads >= 1 && heads <= 4096, kWhere, "q must have 1 to 4096 heads, got ",
                 args.q.describe());
  p.num_heads = static_cast<int32_t>(heads);
  p.cache = make_mla_cache(args.cache, args.kv_lora_rank, kWhere, args.coding);
  const int64_t nope_dim = args.q.size(2) - p.cache.rope_dim;
  check_width(nope_dim, 4, kWhere, "nope width (q width - rope width of the cache)");
  p.nope_dim = static_cast<int32_t>(nope_dim);
  check_shape(args.out, {p.num_tokens, -1}, kWhere, "out");
  nn::check_plain(args.out, args.q.dtype, kWhere, "out");
  HELICORE_CHECK(args.out.size(1) % heads == 0, kWhere, "out must have a multiple of ", heads,
                 " columns, got ", args.out.describe());
  check_width(args.out.size(1) / heads, 4, kWhere, "value width (out columns / heads)");
  p.v_dim = static_cast<int32_t>(args.out.size(1) / heads);
  check_scale(args.scale, kWhere);
  const RaggedBatch batch =
      check_batch(args.block_table, args.cu_q, args.kv_len, p.num_tokens, kWhere);
  p.w_uk_head_stride = check_weight(args.w_uk, heads, p.nope_dim, args.kv_lora_rank, "w_uk");
  p.w_uv_head_stride = check_weight(args.w_uv, heads, p.v_dim, args.kv_lora_rank, "w_uv");
  check_dtype(args.w_uv, args.w_uk.dtype, kWhere, "w_uv");
  p.stats = check_stats(args.stats, p.num_tokens, heads, kWhere);
  p.q = args.q.data;
  p.q_dtype = args.q.dtype;
  p.block_table = batch.block_table;
  p.block_table_stride = batch.block_table_stride;
  p.cu_q = batch.cu_q;
  p.kv_len = batch.kv_len;
  p.num_requests = batch.num_requests;
  p.w_uk = args.w_uk.data;
  p.w_uv = args.w_uv.data;
  p.w_dtype = args.w_uk.dtype;
  p.scale = args.scale;
  p.out = args.out.data;
  if (p.num_tokens == 0) return;
  for (int32_t b = 0; b < p.num_requests; ++b) {
    if (p.cu_q[b + 1] > p.cu_q[b]) check_pages(batch, p.cache, b, p.kv_len[b], kWhere);
  }
  run(p);
}

}  // namespace helicore::attention
