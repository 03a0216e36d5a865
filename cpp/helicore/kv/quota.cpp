#include "helicore/kv/quota.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "helicore/core/error.h"

namespace helicore::kv {
namespace {

constexpr int64_t kMaxTokens = int64_t{1} << 48;  // of clamp_max_seq_len: sums do not overflow
constexpr int kWeightBits = 32;                   // weights are scaled to at most this many bits
constexpr int kTimeBits = 32;                     // fraction bits of a split's time
constexpr int64_t kRatioUnit = 1 << 30;           // integer weight of a share of 1.0

PoolGroupId group_at(size_t index) { return PoolGroupId(static_cast<int32_t>(index)); }
LifeCycleId life_cycle_at(size_t index) { return LifeCycleId(static_cast<int32_t>(index)); }

int64_t saturated_product(int64_t a, int64_t b) {
  const auto product = static_cast<__int128>(a) * b;
  return product > INT64_MAX ? INT64_MAX : static_cast<int64_t>(product);
}

int64_t round_up(int64_t value, int64_t grain) { return (value + grain - 1) / grain * grain; }

int64_t ceil_part(int64_t count, Fraction part) {
  return static_cast<int64_t>((static_cast<__int128>(count) * part.num + part.den - 1) / part.den);
}

// Proportions as integers of at most kWeightBits bits, none of them 0.
GroupSlots scaled(GroupSlots weights) {
  const int64_t largest = *std::max_element(weights.begin(), weights.end());
  const int shift =
      std::max(0, static_cast<int>(std::bit_width(static_cast<uint64_t>(largest))) - kWeightBits);
  for (int64_t& weight : weights) weight = std::max<int64_t>(1, weight >> shift);
  return weights;
}

// Hands out slots in order of their time, see the header.
class Splitter {
 public:
  Splitter(const StorageLayout& layout, const SplitProblem& problem, int64_t budget)
      : layout_(layout),
        weights_(scaled(problem.weights)),
        slots_(problem.floors),
        in_turn_(problem.weights.count(), true),
        budget_(budget),
        grain_(problem.grain) {}

  // Fills slots() and in_order().
  void run() {
    for (size_t rounds = in_turn_.count(); rounds > 0; --rounds) {
      jump();
      const PoolGroupId blocked = take_until_one_does_not_fit();
      if (in_order_.empty()) in_order_ = slots_;
      in_turn_[blocked] = false;
    }
  }
  [[nodiscard]] const GroupSlots& slots() const noexcept { return slots_; }
  [[nodiscard]] const GroupSlots& in_order() const noexcept { return in_order_; }
  [[nodiscard]] int64_t used() const { return bytes_of(slots_); }

 private:
  [[nodiscard]] int64_t slot_bytes(PoolGroupId g) const { return layout_.groups()[g].slot_bytes(); }

  // Stops counting above the budget.
  [[nodiscard]] int64_t bytes_of(const GroupSlots& slots) const {
    int64_t bytes = 0;
    for (size_t g = 0; g < slots.count() && bytes <= budget_; ++g) {
      bytes += bytes_for_slots(layout_.groups()[group_at(g)], slots[group_at(g)], grain_);
    }
    return bytes;
  }

  // What everyone has at `time`: slots due by then and those held already.
  [[nodiscard]] GroupSlots slots_at(__int128 time) const {
    GroupSlots slots = slots_;
    for (size_t i = 0; i < slots.count(); ++i) {
      const PoolGroupId g = group_at(i);
      if (!in_turn_[g]) continue;
      const __int128 due = (time * weights_[g] >> kTimeBits) / slot_bytes(g);
      const __int128 too_many = budget_ / slot_bytes(g) + 1;
      slots[g] = std::max(slots[g], static_cast<int64_t>(std::min(due, too_many)));
    }
    return slots;
  }

  // Goes to the latest whole time that fits: a run of the order at once.
  void jump() {
    __int128 low = 0;
    __int128 high = -1;
    for (size_t i = 0; i < in_turn_.count(); ++i) {
      const PoolGroupId g = group_at(i);
      if (!in_turn_[g]) continue;
      const __int128 too_many = budget_ / slot_bytes(g) + 1;
      const __int128 too_late = ((too_many * slot_bytes(g)) << kTimeBits) / weights_[g] + 1;
      if (high < 0 || too_late < high) high = too_late;
    }
    while (low + 1 < high) {
      const __int128 middle = low + (high - low) / 2;
      (bytes_of(slots_at(middle)) <= budget_ ? low : high) = middle;
    }
    slots_ = slots_at(low);
  }

  [[nodiscard]] bool comes_before(PoolGroupId a, PoolGroupId b) const {
    const __int128 time_a = static_cast<__int128>(slots_[a] + 1) * slot_bytes(a) * weights_[b];
    const __int128 time_b = static_cast<__int128>(slots_[b] + 1) * slot_bytes(b) * weights_[a];
    if (time_a != time_b) return time_a < time_b;
    if (slot_bytes(a) != slot_bytes(b)) return slot_bytes(a) > slot_bytes(b);
    return a < b;
  }

  PoolGroupId take_until_one_does_not_fit() {
    for (;;) {
      std::optional<PoolGroupId> next;
      for (size_t i = 0; i < in_turn_.count(); ++i) {
        const PoolGroupId g = group_at(i);
        if (in_turn_[g] && (!next || comes_before(g, *next))) next = g;
      }
      ++slots_[*next];
      if (bytes_of(slots_) > budget_) {
        --slots_[*next];
        return *next;
      }
    }
  }

  const StorageLayout& layout_;
  GroupSlots weights_;
  GroupSlots slots_;
  GroupSlots in_order_;
  TypedVec<PoolGroupId, char> in_turn_;
  int64_t budget_;
  int64_t grain_;
};

GroupSlots at_least(GroupSlots slots, const GroupSlots& other) {
  HELICORE_CHECK(slots.count() == other.count(), "kv.quota", "keep must have one count per group (",
                 slots.count(), "), got ", other.count());
  for (size_t g = 0; g < slots.count(); ++g) {
    slots[group_at(g)] = std::max(slots[group_at(g)], other[group_at(g)]);
  }
  return slots;
}

// Solves over `floors`, or over `keep` as well when the quota holds both.
QuotaSplit split_keeping(const StorageLayout& layout, SplitProblem problem,
                         const std::optional<GroupSlots>& keep) {
  if (!keep) return solve_split(layout, problem);
  const int64_t minimum = min_quota(layout, problem.floors, problem.grain);
  const int64_t asked = round_up(problem.quota, problem.grain);
  GroupSlots kept = at_least(problem.floors, *keep);
  if (min_quota(layout, kept, problem.grain) > std::max(asked, minimum)) {
    return solve_split(layout, problem);
  }
  problem.floors = std::move(kept);
  QuotaSplit split = solve_split(layout, problem);
  split.minimum = minimum;
  return split;
}

// The largest floor of a bounded life cycle of attention: what full attention gets too.
int64_t full_attention_floor(const LifeCycleRegistry& registry, int32_t tokens_per_block) {
  int64_t floor = 1;
  for (const LifeCycle& life_cycle : registry.all()) {
    if (life_cycle.kind == LayerType::kSsm) continue;
    floor = std::max(floor, life_cycle.max_live_blocks(tokens_per_block).value_or(1));
  }
  return floor;
}

// Blocks of `range` in [begin, end).
int32_t overlap(HalfOpenRange<int32_t> range, int32_t begin, int32_t end) {
  return std::max(0, std::min(range.end, end) - std::max(range.begin, begin));
}

}  // namespace

int64_t grain_of(CacheTier tier, int64_t quota) noexcept {
  if (tier == CacheTier::kHostMem) return kHostGrainBytes;
  if (tier == CacheTier::kDisk) return kDiskGrainBytes;
  const auto gib = static_cast<uint64_t>(std::max<int64_t>(0, quota) >> 30);
  return (int64_t{2} << 20) << std::clamp(static_cast<int>(std::bit_width(gib)) - 1, 0, 4);
}

Fraction scratch_fraction(const StorageLayout& layout, LifeCycleId life_cycle) {
  Fraction most{0, 1};
  for (const auto& [id, buffer] : layout.buffers()) {
    if (buffer.life_cycle != life_cycle) continue;
    const Fraction part{buffer.layer_slot_util, buffer.scale};
    if (part.num * most.den > most.num * part.den) most = part;
  }
  return most;
}

int64_t slots_for_batch(const BatchDesc& batch, const LifeCycle& life_cycle,
                        const SlotRules& rules) {
  if (life_cycle.kind == LayerType::kSsm) return static_cast<int64_t>(batch.kv_caches.size());
  if (batch.kv_caches.empty()) return 0;
  const int32_t tpb = rules.tokens_per_block;
  const int32_t shared = batch.system_prompt_length / tpb;
  int64_t total = 0;
  HalfOpenRange<int32_t> never_read{0, shared};  // blocks of the system prompt stale for everyone
  for (const KVCacheDesc& desc : batch.kv_caches) {
    const auto stale = life_cycle.stale_range(desc.history_length, tpb);
    const int32_t blocks = ceil_div(desc.capacity, tpb);
    const int32_t own_shared = shared - overlap(stale, 0, shared);
    total += std::max(0, blocks - overlap(stale, 0, blocks) - own_shared);
    if (rules.max_rewind_len) {
      const auto scratch =
          life_cycle.scratch_range(desc.history_length, desc.capacity, *rules.max_rewind_len, tpb);
      const int32_t count = overlap(scratch, shared, blocks);
      total += ceil_part(count, rules.scratch_fraction) - count;
    }
    never_read = {std::max(never_read.begin, stale.begin), std::min(never_read.end, stale.end)};
  }
  return total + shared - overlap(never_read, 0, shared);
}

GroupSlots slots_per_group(const BatchDesc& batch, const KVCacheManagerConfig& config,
                           const LifeCycleRegistry& registry, const StorageLayout& layout) {
  GroupSlots slots(layout.groups().count(), 0);
  SlotRules rules{.tokens_per_block = config.tokens_per_block};
  if (config.swa_scratch_reuse) rules.max_rewind_len = config.swa_scratch_reuse->max_rewind_len;
  for (size_t i = 0; i < registry.count(); ++i) {
    const LifeCycleId id = life_cycle_at(i);
    rules.scratch_fraction = scratch_fraction(layout, id);
    slots[layout.group_of(id)] += slots_for_batch(batch, registry[id], rules);
  }
  return slots;
}

int64_t util_ppm(double max_util) noexcept {
  const double ppm = std::clamp(max_util, 0.0, 1.0) * static_cast<double>(kPartsPerMillion);
  return std::clamp<int64_t>(std::llround(ppm), 1, kPartsPerMillion);
}

bool exceeds_util(int64_t used, int64_t total, int64_t ppm) noexcept {
  return static_cast<__int128>(used) * kPartsPerMillion > static_cast<__int128>(total) * ppm;
}

int64_t slots_with_headroom(int64_t used, int64_t ppm) noexcept {
  return ceil_part(used, {kPartsPerMillion, ppm});
}

GroupSlots hot_floors(const KVCacheManagerConfig& config, const LifeCycleRegistry& registry,
                      const StorageLayout& layout) {
  GroupSlots floors(layout.groups().count(), 0);
  TypedVec<PoolGroupId, char> grows(floors.count(), false);
  const int64_t full = full_attention_floor(registry, config.tokens_per_block);
  for (size_t i = 0; i < registry.count(); ++i) {
    const LifeCycle& life_cycle = registry[life_cycle_at(i)];
    const PoolGroupId group = layout.group_of(life_cycle_at(i));
    floors[group] += life_cycle.max_live_blocks(config.tokens_per_block).value_or(full);
    if (life_cycle.kind == LayerType::kAttention) grows[group] = true;
  }
  const int64_t ppm = util_ppm(config.max_util_for_resume);
  for (const BatchDesc& batch : config.constraints) {
    const GroupSlots needed = slots_per_group(batch, config, registry, layout);
    for (size_t i = 0; i < floors.count(); ++i) {
      const PoolGroupId g = group_at(i);
      // A batch that just fits must also pass the gate of resume, which groups of recurrent states
      // alone are not subject to.
      const int64_t padded = grows[g] ? slots_with_headroom(needed[g], ppm) : needed[g];
      floors[g] = std::max(floors[g], padded);
    }
  }
  return floors;
}

GroupSlots cold_floors(const StorageLayout& layout) {
  return GroupSlots(layout.groups().count(), 2);
}

int64_t bytes_for_slots(const PoolGroupLayout& group, int64_t num_slots, int64_t grain) {
  int64_t bytes = 0;
  for (int64_t piece : group.piece_bytes) bytes += round_up(num_slots * piece, grain);
  return bytes;
}

int64_t slots_for_bytes(const PoolGroupLayout& group, int64_t bytes, int64_t grain) {
  int64_t low = 0;
  int64_t high = bytes / group.slot_bytes() + 1;
  while (low + 1 < high) {
    const int64_t middle = low + (high - low) / 2;
    (bytes_for_slots(group, middle, grain) <= bytes ? low : high) = middle;
  }
  return low;
}

int64_t min_quota(const StorageLayout& layout, const GroupSlots& floors, int64_t grain) {
  int64_t bytes = 0;
  for (size_t g = 0; g < floors.count(); ++g) {
    bytes += bytes_for_slots(layout.groups()[group_at(g)], floors[group_at(g)], grain);
  }
  return bytes;
}

QuotaSplit solve_split(const StorageLayout& layout, const SplitProblem& problem) {
  const size_t num_groups = layout.groups().count();
  HELICORE_CHECK(problem.weights.count() == num_groups && problem.floors.count() == num_groups,
                 "kv.quota", "weights and floors must have one entry per group (", num_groups,
                 "), got ", problem.weights.count(), " and ", problem.floors.count());
  for (int64_t weight : problem.weights) {
    HELICORE_CHECK(weight > 0, "kv.quota", "weights must be > 0, got ", weight);
  }
  HELICORE_CHECK(problem.quota > 0, "kv.quota", "quota must be > 0 bytes, got ", problem.quota);
  HELICORE_CHECK(problem.grain > 0, "kv.quota", "grain must be > 0 bytes, got ", problem.grain);

  QuotaSplit split;
  const int64_t asked = round_up(problem.quota, problem.grain);
  split.minimum = min_quota(layout, problem.floors, problem.grain);
  split.quota = std::max(asked, split.minimum);
  split.raised_by = split.quota - asked;
  Splitter splitter(layout, problem, split.quota);
  splitter.run();
  split.in_order = splitter.in_order();
  split.used = splitter.used();
  for (int64_t count : splitter.slots()) {
    HELICORE_CHECK(count < INT32_MAX, "kv.quota", "quota gives ", count, " slots; at most ",
                   INT32_MAX - 1, " can be addressed");
    split.num_slots.push_back(static_cast<int32_t>(count));
  }
  return split;
}

GroupSlots weights_of_batches(std::span<const BatchDesc> batches,
                              const KVCacheManagerConfig& config, const LifeCycleRegistry& registry,
                              const StorageLayout& layout) {
  GroupSlots weights(layout.groups().count(), 1);
  for (const BatchDesc& batch : batches) {
    const GroupSlots needed = slots_per_group(batch, config, registry, layout);
    for (size_t i = 0; i < weights.count(); ++i) {
      const PoolGroupId g = group_at(i);
      const int64_t bytes =
          saturated_product(std::max<int64_t>(1, needed[g]), layout.groups()[g].slot_bytes());
      weights[g] = std::max(weights[g], bytes);
    }
  }
  return weights;
}

GroupSlots hot_weights(const KVCacheManagerConfig& config, const LifeCycleRegistry& registry,
                       const StorageLayout& layout) {
  if (config.initial_pool_ratio) {
    const auto& ratio = *config.initial_pool_ratio;
    HELICORE_CHECK(ratio.size() == registry.count(), "kv.config",
                   "initial_pool_ratio must have one share per layer group (", registry.count(),
                   "), got ", ratio.size());
    GroupSlots weights(layout.groups().count(), 0);
    for (size_t i = 0; i < ratio.size(); ++i) {
      weights[layout.group_of(life_cycle_at(i))] +=
          std::max<int64_t>(1, std::llround(ratio[i] * static_cast<double>(kRatioUnit)));
    }
    return weights;
  }
  if (config.typical_step) {
    return weights_of_batches({&*config.typical_step, 1}, config, registry, layout);
  }
  if (!config.constraints.empty()) {
    return weights_of_batches(config.constraints, config, registry, layout);
  }
  const BatchDesc one_sequence{{{2049, 2048}}, 0};
  return weights_of_batches({&one_sequence, 1}, config, registry, layout);
}

QuotaSplit split_quota(const KVCacheManagerConfig& config, const LifeCycleRegistry& registry,
                       const StorageLayout& layout, int64_t quota, int64_t grain,
                       const SplitHints& hints) {
  SplitProblem problem{
      .weights = hints.weights ? *hints.weights : hot_weights(config, registry, layout),
      .floors = hot_floors(config, registry, layout),
      .quota = quota,
      .grain = grain};
  return split_keeping(layout, std::move(problem), hints.keep);
}

QuotaSplit split_cold_quota(const StorageLayout& layout, const GroupSlots& slots, int64_t quota,
                            int64_t grain, const std::optional<GroupSlots>& keep) {
  HELICORE_CHECK(slots.count() == layout.groups().count(), "kv.quota",
                 "slots must have one count per group (", layout.groups().count(), "), got ",
                 slots.count());
  GroupSlots weights(slots.count(), 0);
  for (size_t i = 0; i < slots.count(); ++i) {
    const PoolGroupId g = group_at(i);
    weights[g] = saturated_product(std::max<int64_t>(1, slots[g]), layout.groups()[g].slot_bytes());
  }
  return split_keeping(layout, {std::move(weights), cold_floors(layout), quota, grain}, keep);
}

int64_t clamp_max_seq_len(const LifeCycleRegistry& registry, const StorageLayout& layout,
                          const ClampRequest& request) {
  HELICORE_CHECK(request.num_slots.count() == layout.groups().count(), "kv.clamp_max_seq_len",
                 "num_slots must have one count per group (", layout.groups().count(), "), got ",
                 request.num_slots.count());
  HELICORE_CHECK(request.tokens_per_block > 0, "kv.clamp_max_seq_len",
                 "tokens_per_block must be > 0, got ", request.tokens_per_block);
  HELICORE_CHECK(request.batch_size >= 1 && request.batch_size <= INT32_MAX, "kv.clamp_max_seq_len",
                 "batch_size must be in 1..", INT32_MAX, ", got ", request.batch_size);
  HELICORE_CHECK(request.upper >= 0 && request.upper <= kMaxTokens, "kv.clamp_max_seq_len",
                 "upper must be in 0..", kMaxTokens, " tokens, got ", request.upper);
  // One sequence of `blocks` blocks; bounded life cycles stop growing at some length.
  const auto fits = [&](int64_t blocks) {
    GroupSlots needed(layout.groups().count(), 0);
    for (size_t i = 0; i < registry.count(); ++i) {
      const auto most = registry[life_cycle_at(i)].max_live_blocks(request.tokens_per_block);
      needed[layout.group_of(life_cycle_at(i))] +=
          request.batch_size - 1 + std::min(blocks, most.value_or(blocks));
    }
    for (size_t i = 0; i < needed.count(); ++i) {
      if (needed[group_at(i)] > request.num_slots[group_at(i)]) return false;
    }
    return true;
  };
  int64_t low = 0;
  int64_t high = request.upper / request.tokens_per_block + 2;
  while (low + 1 < high) {
    const int64_t middle = low + (high - low) / 2;
    (fits(middle) ? low : high) = middle;
  }
  return std::min(request.upper, saturated_product(low, request.tokens_per_block));
}

}  // namespace helicore::kv
