// Entry of absorbed decoding: checks, plan, the two parallel regions.
#include <algorithm>
#include <vector>

#include "helicore/attention/checks.h"
#include "helicore/attention/cpu/kernels.h"
#include "helicore/attention/mla.h"
#include "helicore/core/thread_pool.h"

namespace helicore::attention {
namespace {

constexpr const char* kWhere = "attention.mla_decode";
constexpr int64_t kMergeRows = 16;  // rows of one merge task
constexpr int64_t kCacheBudget = 896
                                 << 10;  // bytes of a worker's state and block: fits an L2 cache

// Memory of one calling thread that is kept between calls, so that a call allocates nothing.
struct Workspace {
  std::vector<DecodeWork> work;
  std::vector<int64_t> first_merge_task;
  DecodePlan plan;
};

int64_t padded_rank(const MlaDecodeParams& p) {
  return (p.cache.kv_lora_rank + kDecodeStripColumns - 1) / kDecodeStripColumns *
         kDecodeStripColumns;
}

int32_t max_tile_rows(const MlaDecodeParams& p) {
  const int64_t block = p.cache.width() * 4 * 64;
  const int64_t row = p.cache.width() * 4 + padded_rank(p) * 8 + 64 * 8;
  return static_cast<int32_t>(std::clamp<int64_t>((kCacheBudget - block) / row / 16, 1, 8) * 16);
}

size_t worker_bytes(const MlaDecodeParams& p, int64_t rows) {
  const int64_t width = p.cache.width();
  const int64_t floats = rows * (width + 64 + 64 + 8 + 2 * padded_rank(p)) + 64 * width;
  return static_cast<size_t>(floats * 4 + 16 * 64);
}

// Rows and the longest visible range of each request; the page ids of that range are checked.
void describe_work(const MlaDecodeParams& p, const RaggedBatch& batch,
                   std::vector<DecodeWork>* work) {
  work->resize(static_cast<size_t>(p.num_requests));
  for (int32_t b = 0; b < p.num_requests; ++b) {
    const int64_t num_q = p.cu_q[b + 1] - p.cu_q[b];
    int64_t visible = num_q > 0 ? p.kv_len[b] : 0;
    if (p.kv_bound != nullptr) {
      visible = 0;
      for (int32_t t = p.cu_q[b]; t < p.cu_q[b + 1]; ++t) {
        HELICORE_CHECK(p.kv_bound[t] <= p.kv_len[b], kWhere, "kv_bound must be at most kv_len ",
                       p.kv_len[b], " of its request ", b, ", got ", p.kv_bound[t], " at token ",
                       t);
        visible = std::max<int64_t>(visible, p.kv_bound[t]);
      }
    }
    HELICORE_CHECK(num_q * p.num_heads <= kMaxRows, kWhere, "request ", b,
                   " has too many query rows: ", num_q, " tokens of ", p.num_heads, " heads");
    check_pages(batch, p.cache, b, visible, kWhere);
    (*work)[static_cast<size_t>(b)] = {static_cast<int32_t>(num_q * p.num_heads), visible};
  }
}

void run(const MlaDecodeParams& p, Workspace& w) {
  ThreadPool& pool = default_pool();
  ThreadPool::Lease lease(pool);
  plan_decode(w.work.data(), p.num_requests,
              {.num_workers = pool.num_threads(), .max_tile_rows = max_tile_rows(p)}, &w.plan);
  const DecodePlan& plan = w.plan;
  DecodeScratch shared;
  shared.tile_rows = plan.tile_rows;
  shared.slot_stride = plan.tile_rows * (2 + padded_rank(p));
  if (plan.num_slots > 0) {
    shared.partials = static_cast<float*>(
        pool.shared_scratch(static_cast<size_t>(plan.num_slots * shared.slot_stride) * 4));
  }
  const size_t bytes = worker_bytes(p, plan.tile_rows);
  for (int i = 0; i < pool.num_threads(); ++i) (void)pool.scratch(i, bytes);
  pool.parallel_for_worker(static_cast<int64_t>(plan.tasks.size()), [&](int64_t i, int worker) {
    DecodeScratch scratch = shared;
    scratch.worker = pool.scratch(worker, bytes);
    HELICORE_DISPATCH_ISA(mla_decode_task(p, plan.tasks[static_cast<size_t>(i)], scratch));
  });
  if (plan.merges.empty()) return;
  const int64_t parts = (plan.tile_rows + kMergeRows - 1) / kMergeRows;
  pool.parallel_for(static_cast<int64_t>(plan.merges.size()) * parts, [&](int64_t i) {
    const DecodeMerge& merge = plan.merges[static_cast<size_t>(i / parts)];
    const auto begin = static_cast<int32_t>(merge.row_begin + i % parts * kMergeRows);
    const auto end = static_cast<int32_t>(std::min<int64_t>(merge.row_end, begin + kMergeRows));
    if (begin < end) HELICORE_DISPATCH_ISA(mla_decode_merge(p, merge, shared, begin, end));
  });
}

}  // namespace

void mla_decode(const MlaDecodeArgs& args) {
  MlaDecodeParams p;
  check_shape(args.q, {-1, -1, -1}, kWhere, "q");
  nn::check_float_rows(args.q, kWhere, "q");
  check_contiguous(args.q, kWhere, "q");
  p.num_tokens = args.q.size(0);
  HELICORE_CHECK(args.q.size(1) >= 1 && args.q.size(1) <= 4096, kWhere,
                 "q must have 1 to 4096 heads, got ", args.q.describe());
  p.num_heads = static_cast<int32_t>(args.q.size(1));
  check_shape(args.out, {p.num_tokens, p.num_heads, -1}, kWhere, "out");
  nn::check_plain(args.out, args.q.dtype, kWhere, "out");
  p.cache = make_mla_cache(args.cache, args.out.size(2), kWhere, args.coding);
  check_shape(args.q, {p.num_tokens, p.num_heads, p.cache.width()}, kWhere, "q");
  check_scale(args.scale, kWhere);
  const RaggedBatch batch =
      check_batch(args.block_table, args.cu_q, args.kv_len, p.num_tokens, kWhere);
  p.stats = check_stats(args.stats, p.num_tokens, p.num_heads, kWhere);
  if (args.kv_bound != nullptr) {
    nn::check_plain(*args.kv_bound, DType::kInt32, kWhere, "kv_bound");
    check_shape(*args.kv_bound, {p.num_tokens}, kWhere, "kv_bound");
    p.kv_bound = args.kv_bound->ptr<const int32_t>();
  }
  p.q = args.q.data;
  p.q_dtype = args.q.dtype;
  p.block_table = batch.block_table;
  p.block_table_stride = batch.block_table_stride;
  p.cu_q = batch.cu_q;
  p.kv_len = batch.kv_len;
  p.num_requests = batch.num_requests;
  p.scale = args.scale;
  p.out = args.out.data;
  if (p.num_tokens == 0) return;
  static thread_local Workspace workspace;
  describe_work(p, batch, &workspace.work);
  run(p, workspace);
}

}  // namespace helicore::attention
