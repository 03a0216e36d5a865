// A page store of one level in host memory, for tests of what lies above it.
#pragma once

#include <memory>
#include <optional>

#include "helicore/kv/cache_device.h"
#include "helicore/kv/page_store.h"

namespace helicore::kv::testing {

class OneLevelStore {
 public:
  OneLevelStore(const StorageLayout& layout, const TypedVec<PoolGroupId, int32_t>& num_slots,
                std::optional<LifeCycleId> ssm = std::nullopt)
      : device_(make_cache_device({})),
        store_(layout, *device_, {{CacheTier::kHostMem, num_slots, num_slots, {}}}, ssm) {}
  PageStore& operator*() noexcept { return store_; }
  PageStore* operator->() noexcept { return &store_; }
  CacheDevice& device() noexcept { return *device_; }

 private:
  std::unique_ptr<CacheDevice> device_;
  PageStore store_;
};

// A private page that is held and not locked.
inline PageHandle allocate_held(PageStore& store, LifeCycleId life_cycle, uint8_t priority) {
  const PageHandle page = store.allocate(life_cycle, priority);
  store.unlock(page, TimePoint());
  return page;
}

}  // namespace helicore::kv::testing
