#include "helicore/comm/communicator.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "helicore/core/error.h"

namespace helicore::comm {
namespace {

constexpr size_t kSmall = 64 << 10;  // so that calls are cut into several rounds

// `work` on a thread for each rank; what each threw, or "".
std::vector<std::string> on_ranks(int world, double timeout_s,
                                  const std::function<void(Communicator&)>& work) {
  std::vector<std::string> errors(world);
  std::vector<std::thread> threads;
  auto memory = make_local_memory(world, kSmall);
  for (int r = 0; r < world; ++r) {
    threads.emplace_back([&, r, mine = std::move(memory[r])]() mutable {
      Communicator communicator(std::move(mine), timeout_s);
      try {
        work(communicator);
      } catch (const std::exception& error) {
        errors[r] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

void expect_none(const std::vector<std::string>& errors) {
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

TensorView view(std::vector<float>& values) {
  return make_view(values.data(), DType::kFloat32, {static_cast<int64_t>(values.size())});
}

// The element of a rank's input: every one distinct, sums exact.
float element(int rank, int64_t i, int round) {
  return static_cast<float>((rank + 1) * 1000 + i % 977 + 3 * round);
}

class WorldTest : public testing::TestWithParam<int> {};

TEST_P(WorldTest, all_reduce_of_any_count_is_the_sum) {
  const int world = GetParam();
  expect_none(on_ranks(world, 60.0, [world](Communicator& c) {
    for (int64_t count : {0, 1, 7, 8, 9, 1000, 20000, 60001}) {
      std::vector<float> x(count + 1);
      for (int64_t i = 0; i < count; ++i) x[i + 1] = element(c.rank(), i, 0);
      const TensorView part = make_view(x.data() + 1, DType::kFloat32, {count});
      c.all_reduce(part, part);
      for (int64_t i = 0; i < count; ++i) {
        float sum = 0;
        for (int r = 0; r < world; ++r) sum += element(r, i, 0);
        ASSERT_EQ(x[i + 1], sum);
      }
    }
  }));
}

TEST_P(WorldTest, odd_values_end_and_are_the_same_everywhere) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const std::vector<float> values = {-0.0f, 0.0f, kNan, kInf, -kInf, 1e-45f, -1e-45f, -1e-38f};
  expect_none(on_ranks(GetParam(), 60.0, [&values, kInf](Communicator& c) {
    std::vector<float> x = values;
    std::vector<float> out(values.size());
    c.all_reduce(view(x), view(out));
    EXPECT_EQ(out[0], 0.0f);
    EXPECT_TRUE(std::isnan(out[2]));
    EXPECT_EQ(out[3], kInf);
    const auto world = static_cast<float>(c.world_size());
    EXPECT_EQ(out[5], 1e-45f * world);
  }));
}

TEST_P(WorldTest, gather_and_exchange_move_every_byte) {
  const int world = GetParam();
  expect_none(on_ranks(world, 60.0, [world](Communicator& c) {
    for (int64_t count : {0, 1, 3, 5000, 40000}) {
      std::vector<uint8_t> x(count);
      for (int64_t i = 0; i < count; ++i) x[i] = static_cast<uint8_t>(i * 7 + c.rank());
      std::vector<uint8_t> out(count * world);
      c.all_gather(make_view(x.data(), DType::kUInt8, {count}),
                   make_view(out.data(), DType::kUInt8, {world, count}));
      for (int64_t i = 0; i < count * world; ++i) {
        ASSERT_EQ(out[i], static_cast<uint8_t>(i % count * 7 + i / count));
      }
      std::vector<uint8_t> sent(count * world);
      for (int64_t i = 0; i < count * world; ++i) {
        sent[i] = static_cast<uint8_t>(c.rank() * 50 + i / count * 10 + i % count);
      }
      c.all_to_all(make_view(sent.data(), DType::kUInt8, {world, count}),
                   make_view(out.data(), DType::kUInt8, {world, count}));
      for (int64_t i = 0; i < count * world; ++i) {
        ASSERT_EQ(out[i], static_cast<uint8_t>(i / count * 50 + c.rank() * 10 + i % count));
      }
    }
  }));
}

TEST_P(WorldTest, bytes_of_a_root_come_to_all) {
  expect_none(on_ranks(GetParam(), 60.0, [](Communicator& c) {
    for (const std::string& text : {std::string(), std::string("a"), std::string(100001, 'z')}) {
      const int root = static_cast<int>(text.size()) % c.world_size();
      std::optional<std::string_view> mine;
      if (c.rank() == root) mine = text;
      ASSERT_EQ(c.broadcast_bytes(mine, root, false), text);
    }
  }));
}

TEST_P(WorldTest, a_thousand_mixed_calls_with_ranks_that_dawdle_stay_in_step) {
  expect_none(on_ranks(GetParam(), 60.0, [](Communicator& c) {
    std::mt19937 delays(c.rank());
    for (int round = 0; round < 1000; ++round) {
      // Work of a random length, so that every rank is the first and the last one at times.
      volatile uint32_t sink = 0;
      for (uint32_t i = 0, n = delays() % 3000; i < n; ++i) sink = sink + i;
      const int64_t count = 1 + round % 50;
      std::vector<float> x(count);
      for (int64_t i = 0; i < count; ++i) x[i] = element(c.rank(), i, round);
      if (round % 3 == 0) {
        std::vector<float> out(count * c.world_size());
        c.all_gather(view(x), view(out));
        ASSERT_EQ(out.back(), element(c.world_size() - 1, count - 1, round));
      } else if (round % 3 == 1) {
        std::optional<std::string_view> mine;
        if (c.rank() == 0) mine = "go";
        ASSERT_EQ(c.broadcast_bytes(mine, 0, true), "go");
      } else {
        c.all_reduce(view(x), view(x));
        float sum = 0;
        for (int r = 0; r < c.world_size(); ++r) sum += element(r, 0, round);
        ASSERT_EQ(x[0], sum);
      }
    }
  }));
}

INSTANTIATE_TEST_SUITE_P(Worlds, WorldTest, testing::Values(1, 2, 3, 4, 6, 8));

TEST(CommunicatorTest, partials_are_merged_for_the_heads_of_each_rank) {
  constexpr int kWorld = 3;
  constexpr int64_t kTokens = 40, kHeads = 6, kWidth = 64;  // more than one round
  expect_none(on_ranks(kWorld, 60.0, [](Communicator& c) {
    std::vector<float> o(kTokens * kHeads * kWidth);
    std::vector<float> stats(kTokens * kHeads * 2);
    for (size_t i = 0; i < o.size(); ++i) o[i] = static_cast<float>(c.rank() + i % 100);
    for (size_t i = 0; i < stats.size(); i += 2) {
      stats[i] = 0.0f;
      stats[i + 1] = 1.0f;
    }
    std::vector<float> out(kTokens * kHeads / kWorld * kWidth);
    c.merge_partials(make_view(o.data(), DType::kFloat32, {kTokens, kHeads, kWidth}),
                     make_view(stats.data(), DType::kFloat32, {kTokens, kHeads, 2}),
                     make_view(out.data(), DType::kFloat32, {kTokens, kHeads / kWorld, kWidth}));
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t h = 0; h < kHeads / kWorld; ++h) {
        for (int64_t i = 0; i < kWidth; ++i) {
          const int64_t at = (t * kHeads + c.rank() * kHeads / kWorld + h) * kWidth + i;
          ASSERT_NEAR(out[(t * kHeads / kWorld + h) * kWidth + i], 1.0f + at % 100, 1e-4);
        }
      }
    }
  }));
}

TEST(CommunicatorTest, a_rank_that_does_not_come_is_named) {
  const auto errors = on_ranks(3, 0.2, [](Communicator& c) {
    if (c.rank() != 1) c.barrier();
  });
  EXPECT_NE(errors[0].find("rank 1 did not come within 0.2 s"), std::string::npos) << errors[0];
  EXPECT_NE(errors[2].find("barrier"), std::string::npos) << errors[2];
}

TEST(CommunicatorTest, a_rank_that_makes_another_call_is_named) {
  const auto errors = on_ranks(2, 5.0, [](Communicator& c) {
    std::vector<float> x(c.rank() == 0 ? 4 : 5, 1.0f);
    c.all_reduce(view(x), view(x));
  });
  EXPECT_NE(errors[0].find("rank 1 has 20 bytes"), std::string::npos) << errors[0];
  EXPECT_NE(errors[1].find("rank 0 has 16 bytes"), std::string::npos) << errors[1];
  const auto kinds = on_ranks(2, 5.0, [](Communicator& c) {
    std::vector<float> x(4, 1.0f);
    if (c.rank() == 0) c.barrier();
    if (c.rank() == 1) c.all_reduce(view(x), view(x));
  });
  EXPECT_NE(kinds[0].find("rank 1 is in call 1, all_reduce"), std::string::npos) << kinds[0];
}

TEST(CommunicatorTest, a_rank_that_gives_up_ends_the_others_calls) {
  const auto errors = on_ranks(3, 60.0, [](Communicator& c) {
    if (c.rank() == 2) {
      c.abort("out of luck");
      c.abort("a second reason");
    } else {
      c.barrier();
    }
  });
  EXPECT_NE(errors[0].find("rank 2: out of luck"), std::string::npos) << errors[0];
  EXPECT_NE(errors[1].find("rank 2: out of luck"), std::string::npos) << errors[1];
}

TEST(CommunicatorTest, after_an_error_every_call_says_so) {
  const auto errors = on_ranks(2, 0.1, [](Communicator& c) {
    if (c.rank() == 1) return;
    EXPECT_THROW(c.barrier(), CommError);
    std::vector<float> x(4, 1.0f);
    c.all_reduce(view(x), view(x));
  });
  EXPECT_NE(errors[0].find("rank 1 did not come"), std::string::npos) << errors[0];
}

TEST(CommunicatorTest, tensors_that_do_not_fit_are_refused_before_anything_is_sent) {
  expect_none(on_ranks(2, 60.0, [](Communicator& c) {
    std::vector<float> x(6, 1.0f);
    std::vector<float> y(5, 1.0f);
    EXPECT_THROW(c.all_reduce(view(x), view(y)), InvalidArgument);
    EXPECT_THROW(c.all_gather(view(x), view(y)), InvalidArgument);
    EXPECT_THROW(c.all_to_all(view(y), view(y)), InvalidArgument);
    const TensorView ints = make_view(x.data(), DType::kInt32, {6});
    EXPECT_THROW(c.all_reduce(ints, ints), InvalidArgument);
    const TensorView o = make_view(x.data(), DType::kFloat32, {1, 3, 2});
    EXPECT_THROW(c.merge_partials(o, view(x), view(y)), InvalidArgument);
    EXPECT_THROW((void)c.broadcast_bytes(std::nullopt, c.rank(), false), InvalidArgument);
    EXPECT_THROW((void)c.broadcast_bytes("x", 1 - c.rank(), false), InvalidArgument);
    c.barrier();
  }));
}

TEST(CommunicatorTest, a_closed_communicator_says_so) {
  expect_none(on_ranks(1, 60.0, [](Communicator& c) {
    c.close();
    c.close();
    EXPECT_THROW(c.barrier(), CommError);
  }));
}

}  // namespace
}  // namespace helicore::comm
