// From the bytes of a level to the slots of each pool group, and back: how many slots a batch
// needs, which counts are the least, how a quota is split, how long a sequence fits. Pure functions
// of a config and its layout; integer arithmetic only, so every build and every rank gets the same
// counts. Shares and ratios given as doubles become integers once.
//
// The order of a split. Group g with weight w and slots of b bytes is due its k-th slot at "time"
// k * b / w. The slots of all groups are handed out by time (ties: the larger slot first, then the
// lower group), starting from the floors, until the next one does not fit; then that group stands
// aside and the rest go on in order with what is left. So
//   - floors are kept and the quota is never exceeded;
//   - the split is maximal: no group can take one more slot from what is left;
//   - `in_order`, the counts up to the first slot that did not fit, never fall as the quota grows
//   at
//     one grain. `num_slots` adds what fits in the rest, less than one slot of some group; a larger
//     quota may take that back. Maximal and monotone at once is impossible for a function of the
//     quota alone; SplitHints::keep gives both where a level grows (docs/design/kv-quota.md).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "helicore/kv/layout.h"

namespace helicore::kv {

using GroupSlots = TypedVec<PoolGroupId, int64_t>;  // a number of slots per pool group

inline constexpr int64_t kHostGrainBytes = int64_t{4} << 10;
inline constexpr int64_t kDiskGrainBytes = int64_t{2} << 20;

// Bytes by which the pools of a tier grow. GPU: 2 MiB for quotas below 2 GiB, doubled with the
// quota up to 32 MiB from 16 GiB on; host 4 KiB; disk 2 MiB.
[[nodiscard]] int64_t grain_of(CacheTier tier, int64_t quota) noexcept;

// ------------------------------------------------------------------ slots that a batch needs

struct Fraction {
  int64_t num = 1;
  int64_t den = 1;  // > 0
  friend bool operator==(const Fraction&, const Fraction&) = default;
};

// The part of a slot that one layer of the life cycle fills: over layers and pools, the most
// buffers of one layer per buffers of a piece. n scratch blocks live in ceil(n * part) slots.
[[nodiscard]] Fraction scratch_fraction(const StorageLayout& layout, LifeCycleId life_cycle);

struct SlotRules {
  int32_t tokens_per_block = 1;                          // > 0
  std::optional<int32_t> max_rewind_len = std::nullopt;  // tokens; none: no scratch blocks
  Fraction scratch_fraction{};                           // of the life cycle
};

// Slots of one life cycle that a batch needs. Blocks of the shared system prompt count once; a
// recurrent state is one slot per sequence, even of zero tokens. Scratch blocks inside the system
// prompt count in full: they may be the ones that are shared.
[[nodiscard]] int64_t slots_for_batch(const BatchDesc& batch, const LifeCycle& life_cycle,
                                      const SlotRules& rules);

// The same for every pool group: the sum over its life cycles.
[[nodiscard]] GroupSlots slots_per_group(const BatchDesc& batch, const KVCacheManagerConfig& config,
                                         const LifeCycleRegistry& registry,
                                         const StorageLayout& layout);

// ------------------------------------------------------------------ the gate of resume

inline constexpr int64_t kPartsPerMillion = 1'000'000;

// max_util_for_resume in parts per million, in [1, 1'000'000]: the value that every comparison
// uses.
[[nodiscard]] int64_t util_ppm(double max_util) noexcept;
// Whether `used` of `total` slots are more than `ppm` parts per million. Exact.
[[nodiscard]] bool exceeds_util(int64_t used, int64_t total, int64_t ppm) noexcept;
// The least total of which `used` slots do not exceed `ppm`.
[[nodiscard]] int64_t slots_with_headroom(int64_t used, int64_t ppm) noexcept;

// ------------------------------------------------------------------ floors

// The least slots per group of the hot level. Per life cycle: recurrent 1; windowed its
// max_live_blocks(); full attention the largest of those, at least 1. At least what each constraint
// needs, with headroom for the gate of resume in groups that grow (hold an attention life cycle).
[[nodiscard]] GroupSlots hot_floors(const KVCacheManagerConfig& config,
                                    const LifeCycleRegistry& registry, const StorageLayout& layout);
// The least of a colder level: one slot to keep a page and one for a page on its way through.
[[nodiscard]] GroupSlots cold_floors(const StorageLayout& layout);

// Bytes that `num_slots` slots of a group take when each of its pools is rounded up to the grain.
[[nodiscard]] int64_t bytes_for_slots(const PoolGroupLayout& group, int64_t num_slots,
                                      int64_t grain);
// The largest n with bytes_for_slots(group, n, grain) <= bytes.
[[nodiscard]] int64_t slots_for_bytes(const PoolGroupLayout& group, int64_t bytes, int64_t grain);
// Bytes of a level that holds exactly `floors`: the least quota it can have.
[[nodiscard]] int64_t min_quota(const StorageLayout& layout, const GroupSlots& floors,
                                int64_t grain);

// ------------------------------------------------------------------ splitting a quota

struct QuotaSplit {
  TypedVec<PoolGroupId, int32_t> num_slots{};
  GroupSlots in_order{};  // <= num_slots; never falls as the quota grows
  int64_t quota = 0;      // bytes in effect: a multiple of the grain, >= what was asked for
  int64_t used = 0;       // bytes of it that the pools take
  int64_t minimum = 0;    // bytes of the floors
  int64_t raised_by = 0;  // bytes above the rounded request, when the floors needed them
};

struct SplitProblem {
  GroupSlots weights{};  // > 0: proportions of bytes
  GroupSlots floors{};   // slots, >= 0
  int64_t quota = 0;     // bytes, > 0
  int64_t grain = 1;     // bytes, > 0
};

// The solver. Throws InvalidArgument for a count that int32 slot ids can't address and for weights,
// quota or grain <= 0.
[[nodiscard]] QuotaSplit solve_split(const StorageLayout& layout, const SplitProblem& problem);

// Weights from batches: bytes per group, the largest over the batches, every group at least one
// slot.
[[nodiscard]] GroupSlots weights_of_batches(std::span<const BatchDesc> batches,
                                            const KVCacheManagerConfig& config,
                                            const LifeCycleRegistry& registry,
                                            const StorageLayout& layout);
// Weights of the hot level: initial_pool_ratio, else typical_step, else the constraints, else one
// sequence of 2049 tokens, 2048 of them history. Throws InvalidArgument when initial_pool_ratio has
// not one share per life cycle.
[[nodiscard]] GroupSlots hot_weights(const KVCacheManagerConfig& config,
                                     const LifeCycleRegistry& registry,
                                     const StorageLayout& layout);

struct SplitHints {
  // Takes the place of hot_weights(): what the statistics of live traffic ask for.
  std::optional<GroupSlots> weights = std::nullopt;
  // Counts that no group may fall below as long as the quota holds them all: the present ones, when
  // a level grows. Without effect when they do not fit together.
  std::optional<GroupSlots> keep = std::nullopt;
};

// Splits the quota of the hot level over hot_floors().
[[nodiscard]] QuotaSplit split_quota(const KVCacheManagerConfig& config,
                                     const LifeCycleRegistry& registry, const StorageLayout& layout,
                                     int64_t quota, int64_t grain, const SplitHints& hints = {});

// Splits the quota of a colder level so that its slot counts are in the proportions of `slots`
// (those of the hot level, or what the statistics ask for) over cold_floors(). `layout` is the
// colder level's: its pages may have other sizes. Counts of 0 weigh as 1.
[[nodiscard]] QuotaSplit split_cold_quota(const StorageLayout& layout, const GroupSlots& slots,
                                          int64_t quota, int64_t grain,
                                          const std::optional<GroupSlots>& keep = std::nullopt);

// ------------------------------------------------------------------ how long a sequence fits

struct ClampRequest {
  TypedVec<PoolGroupId, int32_t> num_slots{};  // of the hot level
  int32_t tokens_per_block = 1;                // > 0
  int64_t batch_size = 1;                      // sequences, >= 1
  int64_t upper = 0;                           // tokens, >= 0
};

// The most tokens, <= upper, to which one sequence can grow a token at a time next to batch_size -
// 1 sequences of one token; a multiple of tokens_per_block unless it is `upper`. 0 when not even
// one block fits. Throws InvalidArgument.
[[nodiscard]] int64_t clamp_max_seq_len(const LifeCycleRegistry& registry,
                                        const StorageLayout& layout, const ClampRequest& request);

}  // namespace helicore::kv
