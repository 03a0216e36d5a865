// Work planner of split-KV decoding: pure host arithmetic, no memory of the cache is touched.
//
// The tokens of a request are cut at fixed positions ("chunks", kv_chunk_begin), the same for every
// request, batch and thread count. A row's result is the left fold of its chunks in ascending
// order. The plan only decides who computes which chunks and which partial results have to be
// stored, so it never changes a bit of the result.
#pragma once

#include <cstdint>
#include <vector>

namespace helicore::attention {

// First token of chunk i: 128 tokens each up to 2,048, then 512 up to 8,192, then 2,048 up to
// 131,072, then 8,192.
[[nodiscard]] int64_t kv_chunk_begin(int64_t chunk) noexcept;
// Chunks that cover [0, num_tokens); 0 for none.
[[nodiscard]] int64_t num_kv_chunks(int64_t num_tokens) noexcept;

// Rows are the (token, head) pairs of a request, token-major. One task computes a row tile over
// chunks [chunk_begin, chunk_end). A task that covers all chunks of its tile writes the output
// (slot -1). Otherwise the task that starts at chunk 0 folds its chunks into one partial at `slot`;
// any other stores one partial per chunk, from `slot` on.
struct DecodeTask {
  int32_t request = 0;
  int32_t row_begin = 0;
  int32_t row_end = 0;
  int32_t chunk_begin = 0;
  int32_t chunk_end = 0;
  int64_t slot = -1;
  int64_t cost = 0;
};

// The partials [slot_begin, slot_end) of one row tile, folded in ascending order.
struct DecodeMerge {
  int32_t request = 0;
  int32_t row_begin = 0;
  int32_t row_end = 0;
  int64_t slot_begin = 0;
  int64_t slot_end = 0;
};

struct DecodePlan {
  std::vector<DecodeTask> tasks;  // descending cost: handed out dynamically this is longest-first
  std::vector<DecodeMerge> merges;
  int64_t num_slots = 0;
  int32_t tile_rows = 0;    // most rows of a task
  int64_t target_cost = 0;  // no task costs more unless it is a single chunk
};

// One request: its rows (S_q * H) and the most cached tokens that any of them sees.
struct DecodeWork {
  int32_t num_rows = 0;
  int64_t num_tokens = 0;
};

struct PlannerLimits {
  int32_t num_workers = 1;
  int32_t max_tile_rows = 128;  // multiple of 16: what keeps a worker's state in its L2 cache
};

// Cost of a row tile over a range of tokens, in units of one token for 16 rows.
[[nodiscard]] int64_t decode_cost(int64_t num_rows, int64_t num_tokens) noexcept;

// Fills `plan`, reusing its memory. Requests with no rows get no task; requests with rows and no
// tokens get tasks with an empty chunk range, which write the empty result.
void plan_decode(const DecodeWork* work, int32_t num_requests, const PlannerLimits& limits,
                 DecodePlan* plan);

// Costs in multiply-adds per head of the two forms for S_q query tokens against kv_len cached ones.
struct MlaDims {
  int32_t kv_lora_rank = 0;
  int32_t nope_dim = 0;
  int32_t rope_dim = 0;
  int32_t v_dim = 0;
};
// True when absorbed decode is cheaper than expanded prefill for one request. Counts the causal
// half for the new tokens.
[[nodiscard]] bool absorbed_is_cheaper(int64_t num_q_tokens, int64_t kv_len,
                                       const MlaDims& dims) noexcept;

}  // namespace helicore::attention
