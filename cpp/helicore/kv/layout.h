// Storage layout: which buffers share a pool, which life cycles share a pool group, and the index
// arithmetic that kernels use to find a page. Pure functions of the config; no memory lives here.
//
// Inside one life cycle, buffers of equal size are packed back to back ("coalesced") into one piece
// of a slot, in declaration order. A life cycle's pieces, largest first, are its slot size list;
// life cycles of one domain with equal lists share a pool group. Group order is contractual: TARGET
// before DRAFT, then ascending by size list.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "helicore/kv/config.h"
#include "helicore/kv/life_cycle.h"
#include "helicore/kv/types.h"

namespace helicore::kv {

struct BufferId {
  int32_t layer_id = 0;
  std::string role{};
  friend auto operator<=>(const BufferId&, const BufferId&) = default;
  friend bool operator==(const BufferId&, const BufferId&) = default;
};

// Where one buffer lives inside a slot. A block of it starts at
//   pool base + slot * scale * expanded_size + offset, and is `expanded_size` bytes long.
struct BufferAttr {
  LifeCycleId life_cycle{0};
  PoolGroupId group{0};
  PoolIndex pool{0};
  int64_t offset = 0;            // bytes inside the slot's piece
  int64_t expanded_size = 0;     // bytes of one block: size * expansion
  int32_t expansion = 1;         // kernel pages per block: tokens_per_block / override
  int32_t scale = 1;             // buffers in the piece; slot index -> page index
  int32_t layer_slot_util = 1;   // buffers of the same layer in the piece, back to back
  int32_t layer_slot_index = 0;  // which of those it is

  [[nodiscard]] int64_t page_stride() const noexcept { return expanded_size / expansion; }
  [[nodiscard]] int64_t slot_bytes() const noexcept { return expanded_size * scale; }
  [[nodiscard]] int32_t layer_offset() const noexcept {
    return static_cast<int32_t>(offset / expanded_size);
  }
  // Exclusive bound of the page indices that address `num_slots` slots from the SHARED base.
  [[nodiscard]] int64_t page_index_upper_bound(int64_t num_slots) const noexcept {
    return (scale * num_slots - offset / expanded_size) * expansion;
  }
};

// Equal-size buffers of one life cycle in memory order.
struct CoalescedBuffer {
  int64_t single_buffer_size = 0;  // expanded bytes of each
  std::vector<BufferId> buffer_ids{};
  [[nodiscard]] int64_t bytes() const noexcept {
    return single_buffer_size * static_cast<int64_t>(buffer_ids.size());
  }
  friend bool operator==(const CoalescedBuffer&, const CoalescedBuffer&) = default;
};

// How one life cycle reads the slots of its group: one coalesced buffer per pool.
struct SlotDescVariant {
  LifeCycleId life_cycle{0};
  std::vector<CoalescedBuffer> coalesced_buffers{};
  friend bool operator==(const SlotDescVariant&, const SlotDescVariant&) = default;
};

struct PoolGroupLayout {
  CacheDomain domain = CacheDomain::kTarget;
  std::vector<int64_t> piece_bytes{};  // per pool, descending
  std::vector<SlotDescVariant> variants{};
  [[nodiscard]] int64_t slot_bytes() const noexcept;
};

class StorageLayout {
 public:
  StorageLayout(const KVCacheManagerConfig& config, const LifeCycleRegistry& registry);

  [[nodiscard]] const TypedVec<PoolGroupId, PoolGroupLayout>& groups() const noexcept {
    return groups_;
  }
  [[nodiscard]] PoolGroupId group_of(LifeCycleId id) const { return group_of_[id]; }
  [[nodiscard]] int32_t tokens_per_block() const noexcept { return tokens_per_block_; }
  // Throws InvalidArgument for an unknown layer or role.
  [[nodiscard]] const BufferAttr& buffer(int32_t layer_id, const std::string& role) const;
  [[nodiscard]] const std::map<BufferId, BufferAttr>& buffers() const noexcept { return buffers_; }

 private:
  TypedVec<PoolGroupId, PoolGroupLayout> groups_;
  TypedVec<LifeCycleId, PoolGroupId> group_of_;
  std::map<BufferId, BufferAttr> buffers_;
  int32_t tokens_per_block_;
};

// The blocks of a step that share slots, and those slots.
struct ScratchDesc {
  HalfOpenRange<int32_t> range{};
  std::vector<int32_t> slot_ids{};
  friend bool operator==(const ScratchDesc&, const ScratchDesc&) = default;
};

// Turns base page indices (slots) into the page indices of one buffer. BAD stays BAD.
//   SHARED:    base * scale, relative to the buffer's own base address
//   PER_LAYER: base * scale + layer_offset, relative to the pool's base address
// Scratch blocks, which are BAD in `base`, lie page after page in the slots of their description,
// each layer from its own place on and around the end of the slot. With u pages per block, of which
// the buffer is number j, block o of the range [begin, end) and t = (o - begin) * u + j:
//   PER_LAYER: slot_ids[t / scale] * scale + (t mod scale + layer_offset - j) mod scale
// Layers use the same pages: one layer is done with a step before the next begins.
// Then every index i becomes i * expansion + k for k in [0, expansion).
struct PageIndexConverter {
  int32_t scale = 1;
  int32_t expansion = 1;
  int32_t layer_offset = 0;
  int32_t scratch_pages_per_block = 1;  // buffers of the layer in the piece
  int32_t scratch_page = 0;             // which of them this one is

  // base[o] is block o; `out` holds base.size() * expansion entries.
  void convert(std::span<const int32_t> base, std::span<int32_t> out, PageIndexMode mode) const;
  // With the scratch blocks of the same sequence and life cycle. PER_LAYER only; blocks of the
  // range past base.size() are left out.
  void convert(std::span<const int32_t> base, std::span<int32_t> out, PageIndexMode mode,
               const ScratchDesc& scratch) const;
  friend bool operator==(const PageIndexConverter&, const PageIndexConverter&) = default;
};

}  // namespace helicore::kv
