#include "helicore/kv/quota.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "helicore/core/error.h"
#include "kv/kv_configs.h"
#include "kv/planning_configs.h"

namespace helicore::kv::testing {
namespace {

constexpr PoolGroupId kFirst{0};
constexpr PoolGroupId kSecond{1};

QuotaSplit split_of(const KVCacheManagerConfig& config, int64_t quota,
                    int64_t grain = kHostGrainBytes) {
  const Planned p(config);
  return split_quota(p.config, p.registry, p.layout, quota, grain);
}

GroupSlots wide(const TypedVec<PoolGroupId, int32_t>& slots) {
  GroupSlots result;
  for (int32_t count : slots) result.push_back(count);
  return result;
}

// What is wrong with a split, empty when nothing is.
std::string fault_of(const StorageLayout& layout, const GroupSlots& floors, const GroupSlots& slots,
                     int64_t quota, int64_t grain) {
  int64_t left = quota;
  for (size_t i = 0; i < slots.count(); ++i) {
    const PoolGroupId g(static_cast<int32_t>(i));
    if (slots[g] < floors[g]) return "below the floor";
    left -= bytes_for_slots(layout.groups()[g], slots[g], grain);
  }
  if (left < 0) return "above the quota";
  for (size_t i = 0; i < slots.count(); ++i) {
    const PoolGroupId g(static_cast<int32_t>(i));
    const PoolGroupLayout& shape = layout.groups()[g];
    const int64_t step =
        bytes_for_slots(shape, slots[g] + 1, grain) - bytes_for_slots(shape, slots[g], grain);
    if (step <= left) return "one more slot fits";
  }
  return "";
}

// Two groups of full attention, one per domain, with the given bytes per block.
KVCacheManagerConfig two_groups(int64_t target_bytes, int64_t draft_bytes) {
  auto config = attention_config(1, 1);
  config.layers = {AttentionLayerConfig{0, {{"k", target_bytes}}},
                   AttentionLayerConfig{1, {{"k", draft_bytes}}, {}, {}, CacheDomain::kDraft}};
  return config;
}

TEST(Quota, grains_grow_with_gpu_quotas_only) {
  constexpr int64_t kMiB = 1 << 20;
  constexpr int64_t kGiB = 1 << 30;
  EXPECT_EQ(grain_of(CacheTier::kGpuMem, 1), 2 * kMiB);
  EXPECT_EQ(grain_of(CacheTier::kGpuMem, 2 * kGiB - 1), 2 * kMiB);
  EXPECT_EQ(grain_of(CacheTier::kGpuMem, 2 * kGiB), 4 * kMiB);
  EXPECT_EQ(grain_of(CacheTier::kGpuMem, 16 * kGiB - 1), 16 * kMiB);
  EXPECT_EQ(grain_of(CacheTier::kGpuMem, 16 * kGiB), 32 * kMiB);
  EXPECT_EQ(grain_of(CacheTier::kGpuMem, 900 * kGiB), 32 * kMiB);
  EXPECT_EQ(grain_of(CacheTier::kHostMem, 900 * kGiB), 4096);
  EXPECT_EQ(grain_of(CacheTier::kDisk, 1), 2 * kMiB);
}

// ------------------------------------------------------------------ slots that a batch needs

TEST(SlotsForBatch, a_shared_system_prompt_counts_once) {
  const LifeCycle full;
  EXPECT_EQ(slots_for_batch(BatchDesc{{{40, 39}, {40, 39}}, 20}, full, {4}), 5 + 5 + 5);
  EXPECT_EQ(slots_for_batch(BatchDesc{{}, 20}, full, {4}), 0);
  EXPECT_EQ(slots_for_batch(BatchDesc{{{0, 0}}, 0}, full, {4}), 0);
  const LifeCycle window{.window = 8};
  EXPECT_EQ(slots_for_batch(BatchDesc{{{41, 40}}, 0}, window, {4}), 11 - 8);
}

TEST(SlotsForBatch, a_recurrent_state_is_one_slot_even_for_a_sequence_of_no_tokens) {
  const LifeCycle ssm{.kind = LayerType::kSsm};
  EXPECT_EQ(slots_for_batch(BatchDesc{{{0, 0}, {90, 3}, {5, 5}}, 64}, ssm, {4}), 3);
}

TEST(SlotsForBatch, scratch_blocks_of_a_windowed_prefill_share_a_few_slots) {
  auto config = attention_config(32, 1, 32);
  for (LayerConfig& layer : config.layers) {
    std::get<AttentionLayerConfig>(layer).sliding_window_size = 128;
  }
  config.swa_scratch_reuse = SwaScratchReuseConfig{};
  const Planned p(config);
  EXPECT_EQ(scratch_fraction(p.layout, LifeCycleId(0)), (Fraction{1, 32}));
  // 33 blocks, 28 of which are out of the window once 1025 tokens are history.
  const auto needed = slots_per_group(BatchDesc{{{1025, 0}}, 0}, p.config, p.registry, p.layout);
  EXPECT_EQ(needed[kFirst], 1 + 5);
  config.swa_scratch_reuse = SwaScratchReuseConfig{.max_rewind_len = 1025};
  const Planned rewinding(config);
  EXPECT_EQ(slots_per_group(BatchDesc{{{1025, 0}}, 0}, rewinding.config, rewinding.registry,
                            rewinding.layout)[kFirst],
            33);
}

TEST(SlotsForBatch, the_scratch_fraction_is_that_of_the_fullest_layer_and_pool) {
  auto config = attention_config(4, 1);
  config.layers = {AttentionLayerConfig{0, {{"k", 64}, {"v", 64}, {"x", 8}}, 8},
                   AttentionLayerConfig{1, {{"k", 64}}, 8},
                   AttentionLayerConfig{2, {{"k", 64}, {"x", 8}}, 8},
                   AttentionLayerConfig{3, {{"x", 8}}, 8}, AttentionLayerConfig{4, {{"k", 64}}, 9}};
  const Planned p(config);
  EXPECT_EQ(scratch_fraction(p.layout, LifeCycleId(0)), (Fraction{2, 4}));
  EXPECT_EQ(scratch_fraction(p.layout, LifeCycleId(1)), (Fraction{1, 1}));
}

TEST(SlotsForBatch, random_batches_agree_with_a_count_block_by_block) {
  Dice dice(11);
  for (int round = 0; round < 3000; ++round) {
    LifeCycle lc;
    if (dice.below(4) > 0) lc.window = dice.in(1, 40);
    if (lc.window) lc.num_sink_blocks = dice.in(0, 3);
    SlotRules rules{.tokens_per_block = dice.in(1, 9), .scratch_fraction = {1, dice.in(1, 5)}};
    if (dice.coin()) rules.max_rewind_len = dice.in(0, 12);
    const BatchDesc batch = random_batch(dice, 4, 150);
    const int32_t tpb = rules.tokens_per_block;
    const int32_t shared = batch.system_prompt_length / tpb;

    int64_t expected = 0;
    for (int32_t block = 0; block < shared; ++block) {
      const auto& all = batch.kv_caches;
      expected += std::any_of(all.begin(), all.end(), [&](const KVCacheDesc& desc) {
        return !is_stale(lc, desc.history_length, block, tpb);
      });
    }
    for (const KVCacheDesc& desc : batch.kv_caches) {
      int64_t scratch = 0;
      for (int32_t block = shared; block * tpb < desc.capacity; ++block) {
        scratch += rules.max_rewind_len && is_scratch(lc, desc, *rules.max_rewind_len, block, tpb);
      }
      const int64_t den = rules.scratch_fraction.den;
      expected += blocks_kept(lc, desc, shared, tpb) - scratch + (scratch + den - 1) / den;
    }
    ASSERT_EQ(slots_for_batch(batch, lc, rules), expected) << "round " << round;
  }
}

// ------------------------------------------------------------------ floors

TEST(Floors, the_gate_of_resume_is_exact) {
  EXPECT_EQ(util_ppm(0.97), 970'000);
  EXPECT_EQ(util_ppm(1.0), 1'000'000);
  EXPECT_EQ(util_ppm(1e-12), 1);
  EXPECT_EQ(slots_with_headroom(97, util_ppm(0.97)), 100) << "a rounding error asks for 101";
  for (double util : {0.97, 0.5, 1.0, 1.0 / 3.0, 0.999}) {
    for (int64_t used = 0; used < 2000; ++used) {
      const int64_t total = slots_with_headroom(used, util_ppm(util));
      ASSERT_FALSE(exceeds_util(used, total, util_ppm(util))) << used;
      if (total > 0) {
        ASSERT_TRUE(exceeds_util(used, total - 1, util_ppm(util))) << used;
      }
    }
  }
}

TEST(Floors, a_group_holds_the_sum_of_its_life_cycles) {
  auto config = attention_config(4, 1);
  config.layers = {AttentionLayerConfig{0, {{"k", 64}}},         // like the widest window: 5 + 2
                   AttentionLayerConfig{1, {{"k", 64}}, 16, 5},  // 2 sink blocks + 4 + 1
                   AttentionLayerConfig{2, {{"k", 64}}, 1},      // 0 + 1
                   SsmLayerConfig{3, {{"s", 512}}}};
  const Planned p(config);
  const GroupSlots floors = hot_floors(p.config, p.registry, p.layout);
  EXPECT_EQ(floors[kFirst], 7 + 7 + 1);
  EXPECT_EQ(floors[kSecond], 1);
}

TEST(Floors, headroom_is_for_groups_that_grow) {
  auto config = attention_config(4, 1);
  config.layers = {AttentionLayerConfig{0, {{"k", 64}}}, SsmLayerConfig{1, {{"s", 512}}}};
  config.max_util_for_resume = 0.5;
  config.constraints = {BatchDesc{{{40, 39}, {40, 39}}, 20},
                        BatchDesc{{{0, 0}, {0, 0}, {0, 0}}, 0}};
  const Planned p(config);
  const GroupSlots floors = hot_floors(p.config, p.registry, p.layout);
  EXPECT_EQ(floors[kFirst], (10 + 5) * 2);
  EXPECT_EQ(floors[kSecond], 3) << "three recurrent states fit in three slots exactly";
}

TEST(Floors, one_sequence_of_any_length_fits_in_the_floors_of_windows) {
  for (int32_t tpb : {1, 4, 32}) {
    for (int32_t window : {1, 2, 4, 5, 33, 64}) {
      const LifeCycle lc{.window = window, .num_sink_blocks = 2};
      int64_t most = 0;
      for (int32_t capacity = 1; capacity < 400; ++capacity) {
        most = std::max(most, blocks_kept(lc, {capacity, capacity - 1}, 0, tpb));
      }
      EXPECT_EQ(lc.max_live_blocks(tpb), most) << "window " << window << " tpb " << tpb;
    }
  }
}

// ------------------------------------------------------------------ splits

TEST(Quota, one_group_takes_all_that_fits) {
  const QuotaSplit split = split_of(attention_config(4, 10, 1, 1024), 40960);
  EXPECT_EQ(split.num_slots[kFirst], 10);
  EXPECT_EQ(split.quota, 40960);
  EXPECT_EQ(split.used, 40960);
  EXPECT_EQ(split.raised_by, 0);
}

TEST(Quota, a_tiny_quota_is_raised_to_the_floor_and_says_by_how_much) {
  const QuotaSplit split = split_of(attention_config(64, 1, 4, 4096), 1);
  EXPECT_EQ(split.num_slots[kFirst], 1);
  EXPECT_EQ(split.quota, 64 * 4096 * 4);
  EXPECT_EQ(split.minimum, split.quota);
  EXPECT_EQ(split.raised_by, split.quota - 4096);
}

TEST(Quota, target_and_draft_get_the_same_number_of_blocks_by_default) {
  auto config = attention_config(4, 1);
  config.layers = {AttentionLayerConfig{0, {{"k", 4096}}}, AttentionLayerConfig{1, {{"k", 4096}}},
                   AttentionLayerConfig{2, {{"k", 4096}}, {}, {}, CacheDomain::kDraft}};
  const QuotaSplit split = split_of(config, 3 * 4096 * 100);
  EXPECT_EQ(split.num_slots[kFirst], 100);
  EXPECT_EQ(split.num_slots[kSecond], 100);
}

TEST(Quota, an_initial_ratio_rules_the_split_but_not_the_floors) {
  auto config = two_groups(4096, 4096);
  config.initial_pool_ratio = {0.75, 0.25};
  EXPECT_EQ(split_of(config, 4096 * 100).num_slots[kFirst], 75);
  config.initial_pool_ratio = {0.999, 0.001};
  const QuotaSplit split = split_of(config, 4096 * 100);
  EXPECT_EQ(split.num_slots[kSecond], 1);
  EXPECT_EQ(split.num_slots[kFirst], 99);
  config.initial_pool_ratio = {1.0};
  EXPECT_THROW((void)split_of(config, 4096), InvalidArgument);
}

TEST(Quota, a_typical_step_of_long_sequences_favours_full_attention_over_windows) {
  auto config = attention_config(4, 1);
  config.layers = {AttentionLayerConfig{0, {{"k", 4096}}},
                   AttentionLayerConfig{1, {{"k", 8192}}, 8}};
  config.typical_step = BatchDesc{{{16, 15}}, 0};
  const QuotaSplit shorter = split_of(config, 1 << 22);
  config.typical_step = BatchDesc{{{400, 399}}, 0};
  const QuotaSplit longer = split_of(config, 1 << 22);
  EXPECT_GT(longer.num_slots[kFirst], shorter.num_slots[kFirst]);
  EXPECT_LT(longer.num_slots[kSecond], shorter.num_slots[kSecond]);
  config.typical_step.reset();
  config.constraints = {BatchDesc{{{400, 399}}, 0}};
  EXPECT_EQ(split_of(config, 1 << 22).num_slots.raw(), longer.num_slots.raw());
}

TEST(Quota, five_grains_of_slots_a_byte_below_and_at_the_grain_end_at_two_and_three) {
  for (int64_t grain : {int64_t{4096}, int64_t{2} << 20, int64_t{32} << 20}) {
    auto config = two_groups(grain - 1, grain);
    config.constraints = {BatchDesc{{{1, 0}}, 0}};
    const QuotaSplit split = split_of(config, 5 * grain, grain);
    EXPECT_EQ(split.num_slots[kFirst], 2);
    EXPECT_EQ(split.num_slots[kSecond], 3);
    EXPECT_EQ(split.used, 5 * grain);
  }
}

TEST(Quota, exact_floors_fit_in_exactly_the_minimum) {
  auto config = two_groups(5000, 300);
  config.constraints = {BatchDesc{{{7, 0}}, 0}};
  const Planned p(config);
  const int64_t minimum =
      min_quota(p.layout, hot_floors(p.config, p.registry, p.layout), kHostGrainBytes);
  const QuotaSplit split = split_of(config, minimum);
  EXPECT_EQ(split.raised_by, 0);
  EXPECT_EQ(split.num_slots[kFirst], 7);
  EXPECT_EQ(split.num_slots[kSecond], 13) << "the last grain holds more than the floor";
  EXPECT_EQ(split_of(config, minimum - kHostGrainBytes).raised_by, kHostGrainBytes);
}

KVCacheManagerConfig model_of_twelve_layers(bool recurrent) {
  auto config = attention_config(32, 1);
  config.layers.clear();
  config.commit_min_snapshot = recurrent;
  for (int32_t i = 0; i < 12; ++i) {
    if (recurrent && i % 3 == 0) {
      config.layers.push_back(SsmLayerConfig{i, {{"conv", 12'288}, {"state", 1'048'576}}});
    } else if (i % 4 == 1) {
      config.layers.push_back(
          AttentionLayerConfig{i, {{"k", 65'536}, {"v", 65'536}, {"s", 2'048}}});
    } else {
      config.layers.push_back(AttentionLayerConfig{
          i, {{"k", 16'384}, {"v", 8'192}}, i < 6 ? 128 : 1024, i < 6 ? 4 : 0});
    }
  }
  config.layers.push_back(
      AttentionLayerConfig{12, {{"k", 4'096}, {"scale", 96}}, {}, {}, CacheDomain::kDraft});
  return config;
}

TEST(Quota, models_of_twelve_mixed_layers_split_at_any_quota_and_grain) {
  for (bool recurrent : {false, true}) {
    auto config = model_of_twelve_layers(recurrent);
    config.constraints = {BatchDesc{{{4096, 0}}, 300}, BatchDesc{{{1, 0}, {1, 0}, {9, 8}}, 0}};
    const Planned p(config);
    const GroupSlots floors = hot_floors(p.config, p.registry, p.layout);
    for (int64_t quota = 1; quota < int64_t{1} << 41; quota = quota * 3 + 7) {
      for (int64_t grain : {kHostGrainBytes, kDiskGrainBytes, int64_t{32} << 20}) {
        const QuotaSplit split = split_of(config, quota, grain);
        ASSERT_EQ(fault_of(p.layout, floors, wide(split.num_slots), split.quota, grain), "");
      }
    }
  }
}

TEST(Quota, slots_that_ids_cannot_address_are_refused_and_the_largest_quota_does_not_overflow) {
  EXPECT_THROW((void)split_of(two_groups(1, 1), int64_t{1} << 40), InvalidArgument);
  const int64_t most = int64_t{1} << 56;
  const QuotaSplit split = split_of(two_groups(int64_t{1} << 39, int64_t{3} << 37), most);
  EXPECT_LE(split.used, most);
  EXPECT_GT(split.used, most - (int64_t{1} << 39));
  EXPECT_EQ(split.num_slots[kFirst], split.num_slots[kSecond]);
  EXPECT_EQ(split_of(two_groups(int64_t{1} << 39, 1), 1).num_slots[kSecond], 4096);
}

// The order of the header's definition, one slot at a time.
struct NaiveSplit {
  NaiveSplit(const StorageLayout& layout, const GroupSlots& weights, const GroupSlots& floors,
             int64_t quota, int64_t grain)
      : slots(floors) {
    std::vector<bool> out(floors.count(), false);
    std::optional<GroupSlots> ordered;
    for (;;) {
      std::optional<PoolGroupId> next;
      for (size_t i = 0; i < slots.count(); ++i) {
        const PoolGroupId g(static_cast<int32_t>(i));
        if (out[i]) continue;
        const auto due = [&](PoolGroupId a, PoolGroupId b) {  // time of a, times both weights
          return static_cast<__int128>(slots[a] + 1) * layout.groups()[a].slot_bytes() * weights[b];
        };
        const int64_t size = layout.groups()[g].slot_bytes();
        if (!next || due(g, *next) < due(*next, g) ||
            (due(g, *next) == due(*next, g) && size > layout.groups()[*next].slot_bytes())) {
          next = g;
        }
      }
      if (!next) break;
      ++slots[*next];
      if (min_quota(layout, slots, grain) <= quota) continue;
      --slots[*next];
      if (!ordered) ordered = slots;
      out[static_cast<size_t>(next->value())] = true;
    }
    in_order = *ordered;
  }
  GroupSlots slots;
  GroupSlots in_order;
};

TEST(Quota, random_splits_hand_out_slots_in_the_order_of_their_time) {
  Dice dice(7);
  for (int round = 0; round < 400; ++round) {
    const Planned p(random_config(dice, 9000));
    const int64_t grain = dice.coin() ? 1 + dice.below(5000) : kHostGrainBytes;
    const int64_t quota = 1 + dice.below(1 << 20);
    const QuotaSplit split = split_quota(p.config, p.registry, p.layout, quota, grain);
    const GroupSlots floors = hot_floors(p.config, p.registry, p.layout);
    const NaiveSplit naive(p.layout, hot_weights(p.config, p.registry, p.layout), floors,
                           split.quota, grain);
    ASSERT_EQ(wide(split.num_slots).raw(), naive.slots.raw()) << "round " << round;
    ASSERT_EQ(split.in_order.raw(), naive.in_order.raw()) << "round " << round;
    ASSERT_EQ(fault_of(p.layout, floors, naive.slots, split.quota, grain), "");
    ASSERT_EQ(split.used, min_quota(p.layout, naive.slots, grain));
    ASSERT_EQ(split.minimum, min_quota(p.layout, floors, grain));
    ASSERT_EQ(split.quota % grain, 0);
    ASSERT_EQ(split.quota, std::max(split.minimum, (quota + grain - 1) / grain * grain));
  }
}

TEST(Quota, bytes_follow_weights_within_a_slot_and_the_rest_is_less_than_a_slot) {
  Dice dice(13);
  for (int round = 0; round < 300; ++round) {
    const Planned p(random_config(dice, 9000));
    const GroupSlots none(p.num_groups(), 0);
    GroupSlots weights;
    for (size_t i = 0; i < p.num_groups(); ++i) weights.push_back(1 + dice.below(1000));
    const int64_t grain = dice.coin() ? 1 : kHostGrainBytes;
    const int64_t quota = (1 + dice.below(1 << 10)) * kHostGrainBytes;
    const QuotaSplit split = solve_split(p.layout, {weights, none, quota, grain});
    bool one_does_not_fit = false;
    for (size_t i = 0; i < p.num_groups(); ++i) {
      const PoolGroupId a(static_cast<int32_t>(i));
      for (size_t k = 0; k < p.num_groups(); ++k) {
        const PoolGroupId b(static_cast<int32_t>(k));
        // The last slot of a was due no later than the next of b.
        ASSERT_LE(split.in_order[a] * p.group(i).slot_bytes() * weights[b],
                  (split.in_order[b] + 1) * p.group(k).slot_bytes() * weights[a])
            << "round " << round;
      }
      GroupSlots more = split.in_order;
      ++more[a];
      one_does_not_fit = one_does_not_fit || min_quota(p.layout, more, grain) > quota;
      ASSERT_GE(split.num_slots[a], split.in_order[a]);
    }
    ASSERT_TRUE(one_does_not_fit) << "round " << round;
  }
}

TEST(Quota, the_checks_of_a_split_see_a_slot_too_many_or_too_few) {
  const Planned p(two_groups(5000, 300));
  const QuotaSplit split = split_quota(p.config, p.registry, p.layout, 1 << 20, 1);
  const GroupSlots floors = hot_floors(p.config, p.registry, p.layout);
  GroupSlots slots = wide(split.num_slots);
  ASSERT_EQ(fault_of(p.layout, floors, slots, split.quota, 1), "");
  ++slots[kFirst];
  EXPECT_EQ(fault_of(p.layout, floors, slots, split.quota, 1), "above the quota");
  slots[kFirst] -= 2;
  EXPECT_EQ(fault_of(p.layout, floors, slots, split.quota, 1), "one more slot fits");
  slots[kFirst] = 0;
  EXPECT_EQ(fault_of(p.layout, floors, slots, split.quota, 1), "below the floor");
}

bool falls_anywhere(const GroupSlots& before, const GroupSlots& after) {
  for (size_t i = 0; i < before.count(); ++i) {
    const PoolGroupId g(static_cast<int32_t>(i));
    if (after[g] < before[g]) return true;
  }
  return false;
}

TEST(Quota, more_quota_takes_no_ordered_slot_from_any_group_and_no_kept_one) {
  Dice dice(19);
  int num_fallen = 0;
  for (int round = 0; round < 150; ++round) {
    const Planned p(random_config(dice, 3000));
    const int64_t grain = dice.coin() ? 1 + dice.below(64) : kHostGrainBytes;
    std::optional<QuotaSplit> last;
    std::optional<GroupSlots> kept;
    int64_t quota = 1 + dice.below(1 << 16);
    for (int step = 0; step < 25; ++step, quota += 1 + dice.below(1 << (2 + round % 14))) {
      const QuotaSplit split = split_quota(p.config, p.registry, p.layout, quota, grain);
      if (last) {
        ASSERT_FALSE(falls_anywhere(last->in_order, split.in_order)) << "round " << round;
        num_fallen += falls_anywhere(wide(last->num_slots), wide(split.num_slots));
      }
      const QuotaSplit growing =
          split_quota(p.config, p.registry, p.layout, quota, grain, {.weights = {}, .keep = kept});
      const GroupSlots floors = hot_floors(p.config, p.registry, p.layout);
      const GroupSlots grown = wide(growing.num_slots);
      ASSERT_EQ(fault_of(p.layout, floors, grown, growing.quota, grain), "") << "round " << round;
      ASSERT_EQ(growing.quota, split.quota);
      ASSERT_EQ(growing.minimum, split.minimum);
      if (kept) {
        ASSERT_FALSE(falls_anywhere(*kept, grown)) << "round " << round;
      }
      kept = grown;
      last = split;
    }
  }
  EXPECT_GT(num_fallen, 0) << "the rounds never met a quota where maximal and monotone disagree";
}

TEST(Quota, no_split_can_be_maximal_and_monotone_at_once) {
  // Slots of 3 and 2 bytes without floors. Two bytes hold one small slot and nothing else; if no
  // larger quota may take it back, 4 bytes hold two, 6 hold three, and the large slots get none.
  const Planned p(two_groups(3, 2));
  const auto slots = [&](int64_t quota) {
    return solve_split(p.layout, {GroupSlots(2, 1), GroupSlots(2, 0), quota, 1});
  };
  EXPECT_EQ(slots(2).num_slots.raw(), (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(slots(3).num_slots.raw(), (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(slots(4).num_slots.raw(), (std::vector<int32_t>{0, 2}));
  EXPECT_EQ(slots(5).num_slots.raw(), (std::vector<int32_t>{1, 1})) << "the share of large slots";
  EXPECT_EQ(slots(4).in_order.raw(), (std::vector<int64_t>{0, 1})) << "what 5 bytes must not take";
}

TEST(Quota, the_worked_example_of_the_design_document) {
  constexpr int64_t kMiB = 1 << 20;
  auto config = two_groups(3 * kMiB, kMiB);
  config.tokens_per_block = 64;
  const Planned p(config);
  const auto split = [&](int64_t quota, const SplitHints& hints) {
    return split_quota(p.config, p.registry, p.layout, quota, 2 * kMiB, hints);
  };
  EXPECT_EQ(hot_weights(p.config, p.registry, p.layout).raw(),
            (std::vector<int64_t>{99 * kMiB, 33 * kMiB}));
  const QuotaSplit first = split(18 * kMiB, {});
  EXPECT_EQ(first.in_order.raw(), (std::vector<int64_t>{4, 4}));
  EXPECT_EQ(first.num_slots.raw(), (std::vector<int32_t>{4, 6}));
  EXPECT_EQ(first.used, 18 * kMiB);
  EXPECT_EQ(first.minimum, 6 * kMiB);
  EXPECT_EQ(split(20 * kMiB, {}).num_slots.raw(), (std::vector<int32_t>{5, 4}));
  EXPECT_EQ(split(20 * kMiB, {.weights = {}, .keep = wide(first.num_slots)}).num_slots.raw(),
            (std::vector<int32_t>{4, 8}));
  EXPECT_EQ(split(1, {}).raised_by, 4 * kMiB);
}

TEST(Quota, counts_to_keep_that_do_not_fit_are_ignored) {
  const Planned p(two_groups(4096, 4096));
  GroupSlots keep(2, 1);
  keep[kSecond] = 30;
  const auto split = [&](int64_t quota) {
    return split_quota(p.config, p.registry, p.layout, quota, 4096, {.weights = {}, .keep = keep});
  };
  EXPECT_EQ(split(40 * 4096).num_slots[kSecond], 30);
  EXPECT_EQ(split(40 * 4096).num_slots[kFirst], 10);
  EXPECT_EQ(split(30 * 4096).num_slots[kSecond], 15);
  EXPECT_EQ(split(30 * 4096).raised_by, 0);
}

TEST(Quota, weights_from_statistics_take_the_place_of_the_configured_ones) {
  auto config = two_groups(4096, 4096);
  config.initial_pool_ratio = {0.5, 0.5};
  const Planned p(config);
  GroupSlots weights(2, 1);
  weights[kSecond] = 3;
  EXPECT_EQ(
      split_quota(p.config, p.registry, p.layout, 40 * 4096, 4096, {.weights = weights, .keep = {}})
          .num_slots[kSecond],
      30);
}

TEST(Quota, bad_problems_name_the_argument) {
  const Planned p(two_groups(4096, 4096));
  const GroupSlots one(2, 1);
  EXPECT_THROW((void)solve_split(p.layout, {GroupSlots(1, 1), one, 1, 1}), InvalidArgument);
  EXPECT_THROW((void)solve_split(p.layout, {GroupSlots(2, 0), one, 1, 1}), InvalidArgument);
  EXPECT_THROW((void)solve_split(p.layout, {one, one, 0, 1}), InvalidArgument);
  EXPECT_THROW((void)solve_split(p.layout, {one, one, 1, 0}), InvalidArgument);
  EXPECT_THROW((void)split_cold_quota(p.layout, GroupSlots(3, 1), 1, 1), InvalidArgument);
}

// ------------------------------------------------------------------ colder levels

TEST(ColdQuota, slot_counts_keep_the_proportions_of_the_hot_level_at_other_page_sizes) {
  const Planned cold(two_groups(1024, 512));  // say half and an eighth of the hot sizes
  GroupSlots hot(2, 0);
  hot[kFirst] = 300;
  hot[kSecond] = 100;
  const QuotaSplit split = split_cold_quota(cold.layout, hot, 40 * (3 * 1024 + 512), 512);
  EXPECT_EQ(split.num_slots[kFirst], 120);
  EXPECT_EQ(split.num_slots[kSecond], 40);
}

TEST(ColdQuota, every_group_has_a_slot_and_one_for_a_page_on_its_way) {
  const Planned p(two_groups(4096, 1'000'000));
  GroupSlots hot(2, 0);
  hot[kFirst] = 1'000'000;
  const QuotaSplit split = split_cold_quota(p.layout, hot, 1, 4096);
  EXPECT_EQ(split.num_slots[kFirst], 2);
  EXPECT_EQ(split.num_slots[kSecond], 2);
  EXPECT_EQ(split.minimum, split.quota);
  EXPECT_EQ(split_cold_quota(p.layout, hot, 1 << 30, 4096).num_slots[kSecond], 2);
}

TEST(ColdQuota, random_splits_keep_floors_and_budget_and_are_maximal) {
  Dice dice(23);
  for (int round = 0; round < 300; ++round) {
    const Planned p(random_config(dice, 9000));
    GroupSlots hot;
    for (size_t i = 0; i < p.num_groups(); ++i) hot.push_back(dice.below(5000));
    const int64_t grain = dice.coin() ? kDiskGrainBytes : kHostGrainBytes;
    const QuotaSplit split = split_cold_quota(p.layout, hot, 1 + dice.below(1 << 26), grain);
    ASSERT_EQ(
        fault_of(p.layout, GroupSlots(hot.count(), 2), wide(split.num_slots), split.quota, grain),
        "")
        << "round " << round;
  }
}

// ------------------------------------------------------------------ how long a sequence fits

int64_t clamp(const Planned& p, std::vector<int32_t> slots, int64_t batch_size, int64_t upper) {
  ClampRequest request{
      .tokens_per_block = p.config.tokens_per_block, .batch_size = batch_size, .upper = upper};
  request.num_slots.raw() = std::move(slots);
  return clamp_max_seq_len(p.registry, p.layout, request);
}

TEST(ClampMaxSeqLen, edges) {
  const Planned p(attention_config(32, 1));
  EXPECT_EQ(clamp(p, {10}, 1, 0), 0);
  EXPECT_EQ(clamp(p, {10}, 1, 1), 1);
  EXPECT_EQ(clamp(p, {10}, 1, 319), 319);
  EXPECT_EQ(clamp(p, {10}, 1, 1'000'000), 320);
  EXPECT_EQ(clamp(p, {10}, 4, 1'000'000), 7 * 32);
  EXPECT_EQ(clamp(p, {1}, 1, 1'000'000), 32);
  EXPECT_EQ(clamp(p, {1}, 2, 1'000'000), 0) << "the other sequence has the only slot";
  EXPECT_EQ(clamp(p, {1}, 9, 1'000'000), 0);
  EXPECT_EQ(clamp(p, {0}, 1, 5), 0);
  EXPECT_EQ(clamp(p, {INT32_MAX}, 1, int64_t{1} << 48), int64_t{INT32_MAX} * 32);
  EXPECT_THROW((void)clamp(p, {10}, 0, 5), InvalidArgument);
  EXPECT_THROW((void)clamp(p, {10}, 1, -1), InvalidArgument);
  EXPECT_THROW((void)clamp(p, {10}, 1, INT64_MAX), InvalidArgument);
  EXPECT_THROW((void)clamp(p, {10, 10}, 1, 5), InvalidArgument);
}

TEST(ClampMaxSeqLen, a_window_of_one_block_lets_any_length_pass_in_its_floor) {
  auto config = attention_config(32, 1);
  config.layers = {AttentionLayerConfig{0, {{"k", 64}}, 32}};
  EXPECT_EQ(clamp(Planned(config), {2}, 1, 96), 96);
  EXPECT_EQ(clamp(Planned(config), {2}, 1, 1'000'001), 1'000'001);
  EXPECT_EQ(clamp(Planned(config), {1}, 1, 96), 32);
}

TEST(ClampMaxSeqLen, random_answers_are_the_longest_that_grows_token_by_token) {
  Dice dice(31);
  for (int round = 0; round < 400; ++round) {
    const Planned p(random_config(dice, 900));
    const int32_t tpb = p.config.tokens_per_block;
    const int32_t upper = dice.in(0, 200);
    const int32_t batch_size = dice.in(1, 3);
    std::vector<int32_t> slots;
    for (size_t g = 0; g < p.num_groups(); ++g) slots.push_back(dice.in(0, 40));
    const auto fits = [&](int32_t capacity) {
      std::vector<int64_t> needed(p.num_groups(), 0);
      for (size_t i = 0; i < p.registry.count(); ++i) {
        const LifeCycleId id(static_cast<int32_t>(i));
        needed[static_cast<size_t>(p.layout.group_of(id).value())] +=
            batch_size - 1 + blocks_kept(p.registry[id], {capacity, capacity - 1}, 0, tpb);
      }
      return std::equal(needed.begin(), needed.end(), slots.begin(),
                        [](int64_t a, int32_t b) { return a <= b; });
    };
    int32_t expected = 0;  // whole blocks: the last one may be started only if it can be filled
    for (int32_t capacity = 1; capacity <= (upper + tpb - 1) / tpb * tpb && fits(capacity);
         ++capacity) {
      if (capacity % tpb == 0) expected = capacity;
    }
    ASSERT_EQ(clamp(p, slots, batch_size, upper), std::min(expected, upper)) << "round " << round;
  }
}

}  // namespace
}  // namespace helicore::kv::testing
