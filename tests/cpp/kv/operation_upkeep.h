// What goes on beside the sequences of a driven manager: sizes, statistics and events.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "helicore/core/error.h"
#include "helicore/kv/kv_cache_manager.h"
#include "kv/operation_setup.h"

namespace helicore::kv::testing {

// A part of OperationDriver.
class OperationUpkeep {
 public:
  OperationUpkeep(KVCacheManager& manager, bool may_fail, ByteSource& source)
      : manager_(manager), may_fail_(may_fail), source_(source) {
    for (int level = 0; level < manager.num_levels(); ++level) {
      first_quotas_.push_back(manager.quota(level));
    }
  }

  void step() {
    const int operation = source_.below(7);
    if (operation < 2) return resize_level();
    if (operation < 4) return maintain();
    if (operation == 4) {
      attempt_freely("adjust", Must::kSucceed, [&] { (void)manager_.adjust(); });
    } else if (operation == 5) {
      manager_.mark_stats_excluded(source_.below(8));
    } else if (source_.one_in(4)) {
      (void)manager_.snapshot_events();
    } else {
      (void)manager_.drain_events(static_cast<size_t>(source_.below(4)));
    }
  }

 private:
  enum class Must { kEither, kThrow, kSucceed };

  // The call may have gone a part of its way when it throws.
  template <typename Call>
  void attempt_freely(const char* what, Must must, const Call& call) {
    bool threw = true;
    try {
      call();
      threw = false;
    } catch (const InvalidArgument&) {
    } catch (const OutOfMemory&) {
      if (!may_fail_) throw;
      return;
    }
    if (must == Must::kSucceed && threw) throw DriverFailure(std::string(what) + ": was refused");
    if (must == Must::kThrow && !threw)
      throw DriverFailure(std::string(what) + ": misuse was accepted");
  }

  void resize_level() {
    const int level = source_.below(manager_.num_levels());
    const bool best_effort = source_.one_in(2);
    if (source_.one_in(16)) {
      const int64_t quota = source_.wild();
      attempt_freely("resize of a level that is none", Must::kThrow,
                     [&] { (void)manager_.resize(manager_.num_levels(), quota, best_effort); });
      attempt_freely("resize of a level to any quota", quota > 0 ? Must::kEither : Must::kThrow,
                     [&] { (void)manager_.resize(level, quota, best_effort); });
      return;
    }
    const int64_t quota =
        std::max<int64_t>(1, first_quotas_[static_cast<size_t>(level)] * source_.below(40) / 16);
    attempt_freely("resize of a level", Must::kSucceed, [&] {
      const ResizeResult result = manager_.resize(level, quota, best_effort);
      if (result.done && manager_.quota(level) < quota)
        throw DriverFailure("a level is smaller than was asked");
    });
  }

  void maintain() {
    const int count = source_.below(9);
    attempt_freely("maintain", count == 0 ? Must::kThrow : Must::kSucceed,
                   [&] { (void)manager_.maintain(count); });
  }

  KVCacheManager& manager_;
  bool may_fail_;
  ByteSource& source_;
  std::vector<int64_t> first_quotas_;
};

}  // namespace helicore::kv::testing
