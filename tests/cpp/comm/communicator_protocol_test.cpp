// Why two areas suffice: every order of steps of a small number of ranks, and of one that is wrong.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <set>
#include <vector>

namespace helicore::comm {
namespace {

constexpr int kRanks = 3;
constexpr int kRounds = 5;

// A rank's next step in a round: wait that all published the round before, write, publish, then
// read rank 0, rank 1 .. once they have published.
enum Step : int { kOpen = 0, kWrite, kPublish, kRead0, kEnd = kRead0 + kRanks };

struct State {
  std::array<int, kRanks> round{};  // that the rank is in
  std::array<int, kRanks> step{};
  std::array<int, kRanks> published{};
  std::array<std::array<int, 2>, kRanks> areas{};  // the round whose bytes are there
  auto operator<=>(const State&) const = default;
};

class Search {
 public:
  // reads_all: every rank reads all, else (a broadcast) the others read rank 0 alone. waits: a rank
  // writes an area only when all have published the round before.
  Search(int num_areas, bool reads_all, bool waits = true)
      : num_areas_(num_areas), reads_all_(reads_all), waits_(waits) {}

  // Visits every state that can be reached; false when a rank reads bytes of another round, or when
  // no rank can go on before the end.
  bool all_is_well() {
    std::vector<State> left = {start()};
    while (!left.empty()) {
      const State state = left.back();
      left.pop_back();
      if (!seen_.insert(state).second) continue;
      bool can_go_on = false;
      for (int rank = 0; rank < kRanks; ++rank) {
        State next = state;
        if (state.round[rank] > kRounds || !advance(next, rank)) continue;
        can_go_on = true;
        if (is_wrong_) return false;
        left.push_back(next);
      }
      const bool is_end = *std::ranges::min_element(state.round) > kRounds;
      if (!can_go_on && !is_end) return false;
    }
    return true;
  }
  [[nodiscard]] size_t num_states() const { return seen_.size(); }

 private:
  static State start() {
    State state;
    state.round.fill(1);
    return state;
  }

  bool advance(State& s, int rank) {
    const int round = s.round[rank];
    int& step = s.step[rank];
    if (step == kOpen) {
      for (int r = 0; waits_ && r < kRanks; ++r) {
        if (r != rank && s.published[r] < round - 1) return false;
      }
    } else if (step == kWrite) {
      s.areas[rank][round % num_areas_] = round;
    } else if (step == kPublish) {
      s.published[rank] = round;
    } else {
      const int other = step - kRead0;
      if (!reads_all_ && (rank == 0 || other != 0)) return finish_step(s, rank);
      if (s.published[other] < round) return false;
      if (s.areas[other][round % num_areas_] != round) is_wrong_ = true;
    }
    return finish_step(s, rank);
  }

  static bool finish_step(State& s, int rank) {
    if (++s.step[rank] == kEnd) {
      s.step[rank] = kOpen;
      ++s.round[rank];
    }
    return true;
  }

  int num_areas_;
  bool reads_all_;
  bool waits_;
  bool is_wrong_ = false;
  std::set<State> seen_;
};

TEST(ProtocolTest, two_areas_that_take_turns_are_never_overwritten_before_they_are_read) {
  for (bool reads_all : {true, false}) {
    Search search(2, reads_all);
    EXPECT_TRUE(search.all_is_well());
    EXPECT_GT(search.num_states(), 1000u);
  }
}

TEST(ProtocolTest, one_area_is_overwritten_before_it_is_read) {
  EXPECT_FALSE(Search(1, true).all_is_well());
}

TEST(ProtocolTest, a_root_that_does_not_wait_before_it_writes_runs_away) {
  EXPECT_FALSE(Search(2, false, false).all_is_well());
}

}  // namespace
}  // namespace helicore::comm
