#include "helicore/attention/planner.h"

#include <algorithm>

namespace helicore::attention {
namespace {

// Runs of equally long chunks: from `first_chunk` on, chunks of `tokens`, the first one at
// `first_token`.
struct ChunkRun {
  int64_t first_chunk;
  int64_t first_token;
  int64_t tokens;
};
constexpr ChunkRun kRuns[] = {{0, 0, 128}, {16, 2048, 512}, {28, 8192, 2048}, {88, 131072, 8192}};

// Tokens that one visit of a task costs besides its own: loading queries, writing the result.
constexpr int64_t kVisitTokens = 48;
// Tasks per worker that the planner aims at: dynamic hand-out evens out the rest.
constexpr int64_t kTasksPerWorker = 3;
constexpr int64_t kRowLanes = 16;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int32_t pick_tile_rows(const DecodeWork* work, int32_t num_requests, const PlannerLimits& limits) {
  int64_t lanes16 = 0;  // units of 16 rows x chunks: how much parallel work there is
  int64_t most_rows = 0;
  int64_t units_at_full = 0;
  for (int32_t b = 0; b < num_requests; ++b) {
    const int64_t chunks = std::max<int64_t>(1, num_kv_chunks(work[b].num_tokens));
    lanes16 += ceil_div(work[b].num_rows, kRowLanes) * chunks;
    units_at_full += ceil_div(work[b].num_rows, limits.max_tile_rows) * chunks;
    most_rows = std::max<int64_t>(most_rows, work[b].num_rows);
  }
  int64_t tile =
      std::min<int64_t>(limits.max_tile_rows, ceil_div(most_rows, kRowLanes) * kRowLanes);
  const int64_t wanted = int64_t{limits.num_workers} * 2;
  if (limits.num_workers > 1 && units_at_full < wanted && tile > kRowLanes) {
    tile = std::clamp<int64_t>(lanes16 / wanted, 1, tile / kRowLanes) * kRowLanes;
  }
  return static_cast<int32_t>(std::max<int64_t>(tile, kRowLanes));
}

// Cuts the chunks of one row tile into tasks of at most target_cost.
void plan_tile(DecodeTask tile, int64_t num_tokens, DecodePlan* plan) {
  const int64_t rows = tile.row_end - tile.row_begin;
  const int64_t chunks = num_kv_chunks(num_tokens);
  tile.cost = decode_cost(rows, num_tokens);
  if (tile.cost <= plan->target_cost || chunks <= 1) {
    tile.chunk_begin = 0;
    tile.chunk_end = static_cast<int32_t>(chunks);
    tile.slot = -1;
    plan->tasks.push_back(tile);
    return;
  }
  const int64_t slot_begin = plan->num_slots;
  for (int64_t begin = 0; begin < chunks;) {
    int64_t end = begin + 1;
    auto cost_to = [&](int64_t chunk_end) {
      const int64_t last = std::min(num_tokens, kv_chunk_begin(chunk_end));
      return decode_cost(rows, last - kv_chunk_begin(begin));
    };
    while (end < chunks && cost_to(end + 1) <= plan->target_cost) ++end;
    tile.chunk_begin = static_cast<int32_t>(begin);
    tile.chunk_end = static_cast<int32_t>(end);
    tile.slot = plan->num_slots;
    tile.cost = cost_to(end);
    plan->num_slots += begin == 0 ? 1 : end - begin;
    plan->tasks.push_back(tile);
    begin = end;
  }
  if (plan->tasks.back().chunk_begin == 0) {  // one task took everything after all
    plan->tasks.back().slot = -1;
    plan->num_slots = slot_begin;
    return;
  }
  plan->merges.push_back({tile.request, tile.row_begin, tile.row_end, slot_begin, plan->num_slots});
}

}  // namespace

int64_t kv_chunk_begin(int64_t chunk) noexcept {
  for (int i = 3; i > 0; --i) {
    if (chunk >= kRuns[i].first_chunk) {
      return kRuns[i].first_token + (chunk - kRuns[i].first_chunk) * kRuns[i].tokens;
    }
  }
  return chunk * kRuns[0].tokens;
}

int64_t num_kv_chunks(int64_t num_tokens) noexcept {
  if (num_tokens <= 0) return 0;
  for (int i = 3; i > 0; --i) {
    if (num_tokens > kRuns[i].first_token) {
      return kRuns[i].first_chunk + ceil_div(num_tokens - kRuns[i].first_token, kRuns[i].tokens);
    }
  }
  return ceil_div(num_tokens, kRuns[0].tokens);
}

int64_t decode_cost(int64_t num_rows, int64_t num_tokens) noexcept {
  return ceil_div(num_rows, kRowLanes) * (std::max<int64_t>(num_tokens, 0) + kVisitTokens);
}

void plan_decode(const DecodeWork* work, int32_t num_requests, const PlannerLimits& limits,
                 DecodePlan* plan) {
  plan->tasks.clear();
  plan->merges.clear();
  plan->num_slots = 0;
  plan->tile_rows = pick_tile_rows(work, num_requests, limits);
  int64_t total = 0;
  for (int32_t b = 0; b < num_requests; ++b) {
    total += decode_cost(work[b].num_rows, work[b].num_tokens);
  }
  const int64_t workers = limits.num_workers;
  plan->target_cost = workers == 1 ? total : ceil_div(total, workers * kTasksPerWorker);
  for (int32_t b = 0; b < num_requests; ++b) {
    for (int32_t row = 0; row < work[b].num_rows; row += plan->tile_rows) {
      DecodeTask tile;
      tile.request = b;
      tile.row_begin = row;
      tile.row_end = std::min(work[b].num_rows, row + plan->tile_rows);
      plan_tile(tile, work[b].num_tokens, plan);
    }
  }
  std::sort(plan->tasks.begin(), plan->tasks.end(), [](const DecodeTask& a, const DecodeTask& b) {
    if (a.cost != b.cost) return a.cost > b.cost;
    if (a.request != b.request) return a.request < b.request;
    if (a.row_begin != b.row_begin) return a.row_begin < b.row_begin;
    return a.chunk_begin < b.chunk_begin;
  });
}

bool absorbed_is_cheaper(int64_t num_q_tokens, int64_t kv_len, const MlaDims& dims) noexcept {
  const double q = static_cast<double>(num_q_tokens);
  const double kv = static_cast<double>(kv_len);
  const double pairs = q * (kv - 0.5 * (q - 1.0));  // visible (query, cached) pairs
  const double project = static_cast<double>(dims.kv_lora_rank) * (dims.nope_dim + dims.v_dim);
  const double absorbed = pairs * (2.0 * dims.kv_lora_rank + dims.rope_dim) + q * project;
  const double expanded = pairs * (dims.nope_dim + dims.rope_dim + dims.v_dim) + kv * project;
  return absorbed <= expanded;
}

}  // namespace helicore::attention
