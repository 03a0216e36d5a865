// Names that every unit of the KV cache manager uses: ids, enums, constants and the reuse scope.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "helicore/core/typed_index.h"
#include "helicore/core/types.h"

namespace helicore::kv {

// Layers whose blocks live and die together. Numbered in the order of first sight in the config.
// Python calls it the layer group id.
using LifeCycleId = StrongIndex<struct LifeCycleTag>;
// Pools that are allocated in lockstep by one slot allocator.
using PoolGroupId = StrongIndex<struct PoolGroupTag>;
// One pool inside its pool group.
using PoolIndex = StrongIndex<struct PoolTag>;
// Storage for one block of one life cycle; addresses every pool of its group.
using SlotId = StrongIndex<struct SlotTag>;
// 0-based block of a sequence.
using BlockOrdinal = StrongIndex<struct BlockTag>;
// A record in the page slab.
using PageId = StrongIndex<struct PageTag, uint32_t>;
// A node of the radix tree.
using NodeId = StrongIndex<struct NodeTag, uint32_t>;

inline constexpr PageId kNoPage{UINT32_MAX};
inline constexpr NodeId kNoNode{UINT32_MAX};

// What a page table holds where there is no page.
inline constexpr int32_t kBadPageIndex = -1;
inline constexpr int kDefaultBeamIndex = 0;
inline constexpr int kHotLevel = 0;
inline constexpr int kPriorityMin = 0;
inline constexpr int kPriorityMax = 100;  // lower is evicted sooner
inline constexpr int kPriorityDefault = 35;

enum class CacheTier : uint8_t { kGpuMem = 0, kHostMem = 1, kDisk = 2 };
// Draft models keep their pages apart: pool groups are never shared between domains.
enum class CacheDomain : uint8_t { kTarget = 0, kDraft = 1 };
// Whether pages are reused by later sequences. REQUIRED pages are shown, and a prefix is only as
// long as every required life cycle can serve; OPTIONAL ones are shown but shorten nothing; PRIVATE
// ones are never shown.
enum class ReusePolicy : uint8_t { kRequired = 0, kPrivate = 1, kOptional = 2 };
enum class LayerType : uint8_t { kAttention = 0, kSsm = 1 };
enum class PageStatus : uint8_t { kLocked = 0, kHeld = 1, kDroppable = 2 };
enum class PageIndexMode : uint8_t { kShared = 0, kPerLayer = 1 };
enum class CacheStatus : uint8_t { kActive = 0, kSuspended = 1, kClosed = 2 };
enum class CommitState : uint8_t { kAllowed = 0, kVirtualStop = 1, kUserStop = 2 };

[[nodiscard]] std::string_view name_of(CacheTier tier) noexcept;
[[nodiscard]] std::string_view name_of(CacheDomain domain) noexcept;
[[nodiscard]] std::string_view name_of(CacheStatus status) noexcept;
[[nodiscard]] std::string_view name_of(ReusePolicy policy) noexcept;

// Namespace of prefix matching. Two requests share pages only when every field is equal: "X" as a
// salt is not adapter X, an empty salt is not the absence of one, and a reloaded adapter (next
// generation) is another one.
struct ReuseScope {
  std::optional<int64_t> lora_id = std::nullopt;              // >= 0
  std::variant<std::monostate, int64_t, std::string> salt{};  // none, a number or a string
  int64_t lora_generation = 0;                                // >= 0; needs lora_id when not 0

  // Throws InvalidArgument.
  void validate() const;
  friend bool operator==(const ReuseScope&, const ReuseScope&) = default;
};

// Why there was no room. A value, never thrown by the scheduling calls.
struct NoRoom {
  CacheDomain domain = CacheDomain::kTarget;
  PoolGroupId pool_group{0};
  int level = kHotLevel;
  int64_t needed = 0;             // slots that the call needed
  int64_t free = 0;               // slots that nobody used
  int64_t evictable = 0;          // slots that eviction could have freed
  int64_t pending = 0;            // slots that become free when a step of the caller's is done
  bool over_utilisation = false;  // refused by max_util_for_resume rather than by the count
  bool data_lost = false;         // a page could not be read back: the cache can only be closed
  friend bool operator==(const NoRoom&, const NoRoom&) = default;
};

[[nodiscard]] std::string describe(const NoRoom& reason);

}  // namespace helicore::kv
