#include "helicore/core/ledger.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace helicore {
namespace {

// Position by position, as the words say it.
struct NaiveLedger {
  NaiveLedger(const Ledger& ledger, int64_t length) : counts(ledger.world) {
    for (int64_t p = 0; p < length; ++p) {
      const int64_t rank = p / ledger.block % ledger.world;
      owners.push_back(rank);
      slots.push_back(counts[rank]++);
    }
  }
  std::vector<int64_t> owners, slots, counts;
};

TEST(LedgerTest, agrees_with_a_count_of_every_position) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 500; ++trial) {
    const Ledger ledger{std::uniform_int_distribution<int64_t>(1, 40)(random),
                        std::uniform_int_distribution<int64_t>(1, 9)(random)};
    const int64_t length = std::uniform_int_distribution<int64_t>(0, 700)(random);
    const NaiveLedger naive(ledger, length);
    int64_t sum = 0;
    for (int64_t r = 0; r < ledger.world; ++r) {
      EXPECT_EQ(ledger.local_len(length, r), naive.counts[r]);
      sum += ledger.local_len(length, r);
    }
    EXPECT_EQ(sum, length);
    for (int64_t p = 0; p < length; ++p) {
      EXPECT_EQ(ledger.owner(p), naive.owners[p]);
      EXPECT_EQ(ledger.slot(p), naive.slots[p]);
      EXPECT_EQ(ledger.position(ledger.slot(p), ledger.owner(p)), p);
    }
  }
}

TEST(LedgerTest, four_ranks_share_401_positions) {
  const Ledger ledger{32, 4};
  const std::vector<int64_t> expected = {113, 96, 96, 96};
  for (int64_t r = 0; r < 4; ++r) EXPECT_EQ(ledger.local_len(401, r), expected[r]);
  EXPECT_EQ(ledger.owner(400), 0);
  EXPECT_EQ(ledger.slot(400), 112);
}

TEST(LedgerTest, a_token_adds_a_row_to_its_owner_alone) {
  const Ledger ledger{16, 3};
  for (int64_t p = 0; p < 500; ++p) {
    for (int64_t r = 0; r < 3; ++r) {
      EXPECT_EQ(ledger.local_len(p + 1, r) - ledger.local_len(p, r), r == ledger.owner(p) ? 1 : 0);
    }
  }
}

TEST(LedgerTest, long_contexts_do_not_overflow) {
  const Ledger ledger{128, 64};
  const int64_t far = int64_t{1} << 40;
  EXPECT_EQ(ledger.position(ledger.slot(far), ledger.owner(far)), far);
}

}  // namespace
}  // namespace helicore
