// Random operations on managers of several levels, with faults, and controls that must be caught.
//
// All of it, a million operations and more:
//   kv_test --gtest_also_run_disabled_tests --gtest_filter='*LevelsInFull*'
#include <gtest/gtest.h>

#include <iostream>

#include "kv/levels_setups.h"
#include "kv/temp_dir.h"

namespace helicore::kv::testing {
namespace {

using Param = std::tuple<LevelsSetup, MachineSetup>;

LevelsSetup setup_of(const Param& param) {
  LevelsSetup setup = std::get<0>(param);
  std::get<1>(param).apply(setup);
  return setup;
}

std::string name_of(const ::testing::TestParamInfo<Param>& info) {
  return std::string(std::get<0>(info.param).name) + "_on_" + std::get<1>(info.param).name;
}

class Levels : public ::testing::TestWithParam<Param> {};

TEST_P(Levels, random_operations_keep_every_byte_and_every_promise) {
  const TempDir dir;
  const auto difference = run_levels(setup_of(GetParam()), dir.path().string(), 7, 150);
  ASSERT_FALSE(difference) << *difference;
}

using LevelsInFull = Levels;

TEST_P(LevelsInFull, DISABLED_random_operations_keep_every_byte_and_every_promise) {
  const TempDir dir;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    LevelsWorld::Counts counts;
    const auto difference =
        run_levels(setup_of(GetParam()), dir.path().string(), seed, 250, &counts);
    ASSERT_FALSE(difference) << "seed " << seed << ": " << *difference;
  }
}

INSTANTIATE_TEST_SUITE_P(Models, Levels,
                         ::testing::Combine(::testing::ValuesIn(model_setups()),
                                            ::testing::ValuesIn(machine_setups())),
                         name_of);

}  // namespace
}  // namespace helicore::kv::testing
