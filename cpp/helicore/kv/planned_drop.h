// Dropping pages of a finished sequence that nothing but its exact continuation can reuse.
#pragma once

#include <vector>

#include "helicore/kv/page_slab.h"

namespace helicore::kv {

struct ManagerState;

// Made by KVCache::plan_committed_block_drop(). Holds nothing: the pages may go earlier. Several
// plans may name one page; it goes with the last of them. The destructor drops. Any thread; the
// manager may go first.
class PlannedDrop {
 public:
  PlannedDrop(ManagerState& state, std::vector<PageHandle> pages);
  ~PlannedDrop();
  PlannedDrop(const PlannedDrop&) = delete;
  PlannedDrop& operator=(const PlannedDrop&) = delete;

  // Drops the pages that no other plan names and nobody holds. Throws LogicError the second time.
  void drop();
  [[nodiscard]] size_t num_pages() const noexcept { return pages_.size(); }
  // Its number among the plans that the manager's caches made, from 0.
  [[nodiscard]] int64_t serial() const noexcept { return serial_; }

 private:
  friend class KVCacheManager;
  void drop_locked();

  ManagerState* state_;  // null once dropped, or once the manager is gone
  int64_t serial_;
  bool is_dropped_ = false;
  std::vector<PageHandle> pages_;
};

}  // namespace helicore::kv
