// Numbers that tell two managers apart: equal calls on equal managers give equal digests, in any
// process, however fast their copies are. Token ids, scopes and slots do not enter, only which
// pages stand where. Internal.
#pragma once

#include <cstdint>
#include <span>

#include "helicore/kv/manager_state.h"

namespace helicore::kv {

// Of the counters, the slots in use and the cursors of `caches`. O(pool groups + caches). Call with
// the lock held, shared or not.
[[nodiscard]] uint64_t counters_digest(const ManagerState& state, std::span<KVCache* const> caches);

// Of everything: open caches with their pages, tree, eviction queues. O(pages + tree). Call with
// the lock held and while no thread is inside a call on a cache.
[[nodiscard]] uint64_t state_digest(const ManagerState& state);

// Of the sizes of the levels, what they are on their way to and what the traffic has taught. O(pool
// groups + pages in the way). Call with the lock held.
[[nodiscard]] uint64_t sizes_digest(const ManagerState& state);

}  // namespace helicore::kv
