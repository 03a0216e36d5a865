// Long runs of random operations, which are told apart by --gtest_random_seed.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>

namespace helicore::kv::testing {

// Of the seeds that a run uses, fewer than a thousand.
inline uint64_t first_seed() {
  return 1 + 1000 * static_cast<uint64_t>(GTEST_FLAG_GET(random_seed));
}

}  // namespace helicore::kv::testing
