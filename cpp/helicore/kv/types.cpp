#include "helicore/kv/types.h"

#include "helicore/core/error.h"

namespace helicore::kv {

std::string_view name_of(CacheTier tier) noexcept {
  switch (tier) {
    case CacheTier::kGpuMem:
      return "GPU_MEM";
    case CacheTier::kHostMem:
      return "HOST_MEM";
    case CacheTier::kDisk:
      return "DISK";
  }
  return "unknown";
}

std::string_view name_of(CacheDomain domain) noexcept {
  return domain == CacheDomain::kTarget ? "TARGET" : "DRAFT";
}

std::string_view name_of(CacheStatus status) noexcept {
  switch (status) {
    case CacheStatus::kActive:
      return "ACTIVE";
    case CacheStatus::kSuspended:
      return "SUSPENDED";
    case CacheStatus::kClosed:
      return "CLOSED";
  }
  return "unknown";
}

std::string_view name_of(ReusePolicy policy) noexcept {
  switch (policy) {
    case ReusePolicy::kRequired:
      return "REQUIRED";
    case ReusePolicy::kPrivate:
      return "PRIVATE";
    case ReusePolicy::kOptional:
      return "OPTIONAL";
  }
  return "unknown";
}

void ReuseScope::validate() const {
  HELICORE_CHECK(!lora_id || *lora_id >= 0, "kv.ReuseScope", "lora_id must be >= 0, got ",
                 *lora_id);
  HELICORE_CHECK(lora_generation >= 0, "kv.ReuseScope", "lora_generation must be >= 0, got ",
                 lora_generation);
  HELICORE_CHECK(lora_generation == 0 || lora_id, "kv.ReuseScope",
                 "lora_generation must be 0 without a lora_id, got ", lora_generation);
}

std::string describe(const NoRoom& reason) {
  return detail::concat("no room in pool group ", reason.pool_group, " (", name_of(reason.domain),
                        ", level ", reason.level, "): needed ", reason.needed, " slots, ",
                        reason.free, " free, ", reason.evictable, " evictable and ", reason.pending,
                        " pending", reason.over_utilisation ? ", above max_util_for_resume" : "",
                        reason.data_lost ? "; pages of the cache are lost, close it" : "");
}

}  // namespace helicore::kv
