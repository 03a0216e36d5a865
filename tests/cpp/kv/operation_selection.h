// Choices of a driven manager among what was found for OPTIONAL layer groups.
#pragma once

#include <algorithm>
#include <vector>

#include "helicore/kv/kv_cache.h"
#include "kv/operation_setup.h"

namespace helicore::kv::testing {

struct OptionalSelection {
  std::vector<LifeCycleId> groups{};
  std::vector<ReuseStatus> before{};

  // Of the OPTIONAL groups those whose bit is set.
  OptionalSelection(const KVCache& cache, int mask) : before(cache.reuse_status()) {
    for (const ReuseStatus& status : before) {
      const bool is_named = (mask >> (status.group.value() % 8) & 1) != 0;
      if (is_named && status.policy == ReusePolicy::kOptional) groups.push_back(status.group);
    }
  }
  // The cache has what was kept of each group and nothing else.
  void check(const KVCache& cache) const {
    const auto after = cache.reuse_status();
    for (size_t i = 0; i < after.size(); ++i) {
      const bool stays = after[i].policy != ReusePolicy::kOptional ||
                         std::find(groups.begin(), groups.end(), after[i].group) != groups.end();
      if (stays ? after[i].coverage != before[i].coverage : !after[i].coverage.empty()) {
        throw DriverFailure("select_optional_reuse kept other groups than were named");
      }
    }
  }
};

}  // namespace helicore::kv::testing
