// Random operations on managers of several levels, with faults, and controls that must be caught.
//
// All of it, a million operations and more; --gtest_random_seed=1, 2, ... for others, and
// GTEST_TOTAL_SHARDS with GTEST_SHARD_INDEX to share them between processes, a setup each:
//   kv_test --gtest_also_run_disabled_tests --gtest_filter='*InFull*'
#include <gtest/gtest.h>

#include <iostream>

#include "kv/full_runs.h"
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

class LevelsInFull : public Levels {};

TEST_P(LevelsInFull, DISABLED_random_operations_keep_every_byte_and_every_promise) {
  const TempDir dir;
  LevelsWorld::Counts total;
  const uint64_t first = first_seed();
  for (uint64_t seed = first; seed < first + 40; ++seed) {
    LevelsWorld::Counts counts;
    const auto difference =
        run_levels(setup_of(GetParam()), dir.path().string(), seed, 250, &counts);
    ASSERT_FALSE(difference) << "seed " << seed << ": " << *difference;
    total += counts;
  }
  std::cout << total << std::endl;
}

INSTANTIATE_TEST_SUITE_P(Models, Levels,
                         ::testing::Combine(::testing::ValuesIn(model_setups()),
                                            ::testing::ValuesIn(machine_setups())),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Models, LevelsInFull,
                         ::testing::Combine(::testing::ValuesIn(model_setups()),
                                            ::testing::ValuesIn(machine_setups())),
                         name_of);

// The default slice is about something.
TEST(LevelsUpkeep, sizes_pins_and_retention_are_met_by_random_operations) {
  const TempDir dir;
  LevelsWorld::Counts total;
  for (const LevelsSetup& setup : model_setups()) {
    for (uint64_t seed = 1; seed <= 4; ++seed) {
      LevelsWorld::Counts counts;
      const auto difference = run_levels(setup, dir.path().string(), seed, 200, &counts);
      ASSERT_FALSE(difference) << setup.name << " seed " << seed << ": " << *difference;
      total += counts;
    }
  }
  EXPECT_GT(total.pins, 300);
  EXPECT_GT(total.priced, 300);
  EXPECT_GT(total.resizes, 300);
  EXPECT_GT(total.adjusts, 5);
  EXPECT_GT(total.moved, 15);
}

class LevelsControl : public ::testing::TestWithParam<const char*> {};

// A broken engine and broken devices must be caught.
TEST_P(LevelsControl, a_planted_fault_is_caught) {
  const TempDir dir;
  const std::string fault = GetParam();
  // Blocks that a pin should have held are seldom the ones to go: one setup that notices is enough.
  const bool is_rare = fault == "pins_that_hold_nothing";
  bool caught_in_any = false;
  for (LevelsSetup setup : model_setups()) {
    if (std::string(setup.name) != "full_window_two_groups" &&
        std::string(setup.name) != "state_full") {
      continue;
    }
    setup.gpu = fault != "corrupt_copies";
    setup.any_order = true;
    setup.careless_engine = fault == "careless_engine";
    setup.ignore_after = fault == "copies_do_not_wait";
    setup.false_pins = fault == "pins_that_hold_nothing";
    setup.wrong_durations = fault == "retention_of_other_durations";
    setup.corrupt = fault == "corrupt_copies" || fault == "corrupt_gpu_copies" ? 0.2 : 0.0;
    bool caught = false;
    for (uint64_t seed = 1; seed <= (is_rare ? 60u : 10u) && !caught; ++seed) {
      caught = run_levels(setup, dir.path().string(), seed, 1500).has_value();
    }
    EXPECT_TRUE(caught || is_rare) << setup.name;
    caught_in_any |= caught;
  }
  EXPECT_TRUE(caught_in_any);
}

INSTANTIATE_TEST_SUITE_P(Faults, LevelsControl,
                         ::testing::Values("careless_engine", "copies_do_not_wait",
                                           "corrupt_copies", "corrupt_gpu_copies",
                                           "pins_that_hold_nothing",
                                           "retention_of_other_durations"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace helicore::kv::testing
