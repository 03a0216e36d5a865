// A prefetch of a cache's pages, as its caller sees it.
#pragma once

#include <cstdint>
#include <vector>

#include "helicore/kv/page_slab.h"
#include "helicore/kv/timeline.h"
#include "helicore/kv/types.h"

namespace helicore::kv {

class KVCache;

// What a cache remembers of its prefetch.
struct PrefetchState {
  uint64_t serial = 0;
  int level = kHotLevel;
  std::vector<PageHandle> pages{};  // still to come, last first
  TimePoint arrival{};              // of the batch under way
  bool is_short = false;            // there was no room for everything
};

// Pages of a suspended cache on their way to a hotter level. The cache must outlive it.
class PrefetchTicket {
 public:
  PrefetchTicket() = default;
  // Nothing is left to do: everything arrived, there was no room for the rest, or it was cancelled.
  // Starts the next batch when the last one has arrived: poll it once per step.
  [[nodiscard]] bool is_done();
  // Starts nothing more; what is under way arrives.
  void cancel();
  // Every page arrived.
  [[nodiscard]] bool is_complete() const noexcept;

 private:
  friend class KVCache;
  PrefetchTicket(KVCache* cache, uint64_t serial) : cache_(cache), serial_(serial) {}
  KVCache* cache_ = nullptr;
  uint64_t serial_ = 0;
};

}  // namespace helicore::kv
