#include "helicore/attention/planner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <vector>

namespace helicore::attention {
namespace {

using Tile = std::tuple<int32_t, int32_t, int32_t>;  // request, row_begin, row_end

// Empty when the plan keeps every rule of planner.h, else which one it breaks.
std::string broken_rule(const std::vector<DecodeWork>& work, const PlannerLimits& limits,
                        const DecodePlan& plan) {
  std::map<Tile, std::vector<DecodeTask>> tiles;
  std::map<int32_t, int64_t> rows_of_request;
  for (const DecodeTask& t : plan.tasks) {
    tiles[{t.request, t.row_begin, t.row_end}].push_back(t);
    if (t.row_end - t.row_begin > std::min(plan.tile_rows, limits.max_tile_rows))
      return "tile too big";
    if (t.cost > plan.target_cost && t.chunk_end - t.chunk_begin > 1) return "task over target";
  }
  if (!std::is_sorted(plan.tasks.begin(), plan.tasks.end(),
                      [](const auto& a, const auto& b) { return a.cost > b.cost; })) {
    return "not longest first";
  }
  std::map<Tile, DecodeMerge> merges;
  for (const DecodeMerge& m : plan.merges) merges[{m.request, m.row_begin, m.row_end}] = m;
  if (merges.size() != plan.merges.size()) return "two merges of one tile";
  std::set<int64_t> slots;
  for (auto& [tile, tasks] : tiles) {
    const auto [request, row_begin, row_end] = tile;
    rows_of_request[request] += row_end - row_begin;
    std::sort(tasks.begin(), tasks.end(),
              [](const auto& a, const auto& b) { return a.chunk_begin < b.chunk_begin; });
    const int64_t chunks = num_kv_chunks(work[static_cast<size_t>(request)].num_tokens);
    int64_t next_chunk = 0;
    int64_t next_slot = tasks[0].slot;
    for (const DecodeTask& t : tasks) {
      if (t.chunk_begin != next_chunk || t.chunk_end < t.chunk_begin)
        return "chunk not covered once";
      next_chunk = t.chunk_end;
      if (tasks.size() == 1) continue;
      if (t.slot != next_slot) return "slots out of order";
      for (int64_t i = 0; i < (t.chunk_begin == 0 ? 1 : t.chunk_end - t.chunk_begin); ++i) {
        if (!slots.insert(next_slot++).second) return "slot used twice";
      }
    }
    if (next_chunk != chunks) return "chunks missing";
    if (tasks.size() == 1) {
      if (tasks[0].slot != -1 || merges.count(tile) != 0) return "whole tile with a slot";
    } else if (merges.count(tile) == 0 || merges[tile].slot_begin != tasks[0].slot ||
               merges[tile].slot_end != next_slot) {
      return "merge does not match its tasks";
    }
  }
  for (size_t b = 0; b < work.size(); ++b) {
    if (rows_of_request[static_cast<int32_t>(b)] != work[b].num_rows)
      return "rows not covered once";
  }
  if (static_cast<int64_t>(slots.size()) != plan.num_slots) return "slots not dense";
  return "";
}

TEST(Planner, chunk_positions_are_increasing_and_cover_every_token_once) {
  EXPECT_EQ(num_kv_chunks(0), 0);
  EXPECT_EQ(num_kv_chunks(-5), 0);
  int64_t chunk = 0;
  for (int64_t tokens = 1; tokens <= 300000; ++tokens) {
    if (tokens > kv_chunk_begin(chunk)) ++chunk;
    ASSERT_EQ(num_kv_chunks(tokens), chunk) << tokens;
    ASSERT_LT(kv_chunk_begin(chunk - 1), tokens);
    ASSERT_GE(kv_chunk_begin(chunk), tokens);
  }
  for (int64_t i = 0; i < 400; ++i) ASSERT_EQ(kv_chunk_begin(i) % 128, 0);
  EXPECT_LE(num_kv_chunks(1 << 20), 256);
}

TEST(Planner, every_row_and_chunk_is_planned_exactly_once_for_random_batches) {
  DecodePlan plan;
  for (uint32_t seed = 0; seed < 3000; ++seed) {
    std::mt19937 rng(seed);
    auto below = [&](int64_t n) { return static_cast<int64_t>(rng() % static_cast<uint64_t>(n)); };
    const PlannerLimits limits{.num_workers = static_cast<int32_t>(1 + below(40)),
                               .max_tile_rows = static_cast<int32_t>(16 * (1 + below(8)))};
    std::vector<DecodeWork> work(static_cast<size_t>(below(20)));
    for (DecodeWork& w : work) {
      w.num_rows = static_cast<int32_t>(below(2) == 0 ? below(300) : 12);
      const int64_t magnitude = int64_t{1} << below(20);
      w.num_tokens = below(8) == 0 ? 0 : below(magnitude) + 1;
    }
    plan_decode(work.data(), static_cast<int32_t>(work.size()), limits, &plan);
    ASSERT_EQ(broken_rule(work, limits, plan), "") << "seed " << seed;
  }
}

TEST(Planner, checker_sees_a_lost_chunk_a_shared_slot_and_a_lost_tile) {
  const std::vector<DecodeWork> work{{12, 5000}, {12, 300}};
  const PlannerLimits limits{.num_workers = 8, .max_tile_rows = 128};
  DecodePlan good;
  plan_decode(work.data(), 2, limits, &good);
  ASSERT_EQ(broken_rule(work, limits, good), "");
  ASSERT_FALSE(good.merges.empty());
  DecodePlan bad = good;
  bad.tasks[0].chunk_end -= 1;
  EXPECT_NE(broken_rule(work, limits, bad), "");
  bad = good;
  bad.tasks.pop_back();
  EXPECT_NE(broken_rule(work, limits, bad), "");
  bad = good;
  for (DecodeTask& t : bad.tasks) t.slot = 0;
  EXPECT_NE(broken_rule(work, limits, bad), "");
}

TEST(Planner, one_long_request_is_spread_over_the_workers) {
  const DecodeWork work{16, 65536};
  DecodePlan plan;
  plan_decode(&work, 1, {.num_workers = 8, .max_tile_rows = 128}, &plan);
  EXPECT_GE(plan.tasks.size(), 8u);
  EXPECT_LE(plan.tasks.front().cost, decode_cost(16, 65536) / 8);
}

TEST(Planner, one_worker_or_a_full_batch_stores_no_partials) {
  std::vector<DecodeWork> work(64, DecodeWork{12, 1000});
  DecodePlan plan;
  plan_decode(work.data(), 64, {.num_workers = 8, .max_tile_rows = 128}, &plan);
  EXPECT_EQ(plan.num_slots, 0);
  plan_decode(work.data(), 1, {.num_workers = 1, .max_tile_rows = 128}, &plan);
  EXPECT_EQ(plan.num_slots, 0);
}

TEST(Planner, many_heads_over_a_short_context_are_split_by_rows) {
  const DecodeWork work{128, 60};
  DecodePlan plan;
  plan_decode(&work, 1, {.num_workers = 4, .max_tile_rows = 128}, &plan);
  EXPECT_GE(plan.tasks.size(), 4u);
  EXPECT_EQ(plan.num_slots, 0);
}

TEST(Planner, absorbed_form_is_chosen_below_about_171_query_tokens_of_a_long_context) {
  const MlaDims dims{.kv_lora_rank = 512, .nope_dim = 128, .rope_dim = 64, .v_dim = 128};
  EXPECT_TRUE(absorbed_is_cheaper(170, 1 << 20, dims));
  EXPECT_FALSE(absorbed_is_cheaper(172, 1 << 20, dims));
}

}  // namespace
}  // namespace helicore::attention
