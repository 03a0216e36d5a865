// Sampling against naive filters, exact counts and a chi-square test with fixed seeds.
#include "helicore/nn/sampling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "helicore/core/error.h"
#include "helicore/core/thread_pool.h"
#include "helicore/nn/philox.h"
#include "nn/matrix.h"

namespace helicore::nn {
namespace {

using testing::available_isas;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A batch with one setting per row.
struct Batch {
  int64_t rows, vocab;
  std::vector<float> logits, temperature, top_p, min_p, logprobs;
  std::vector<int32_t> top_k, ids;
  std::vector<int64_t> seed, position;

  Batch(int64_t b, int64_t v) : rows(b), vocab(v), logits(static_cast<size_t>(b * v)) {
    const auto n = static_cast<size_t>(b);
    temperature.assign(n, 1.0f);
    top_p.assign(n, 1.0f);
    min_p.assign(n, 0.0f);
    logprobs.assign(n, 0.0f);
    top_k.assign(n, 0);
    ids.assign(n, -7);
    seed.assign(n, 5);
    position.assign(n, 0);
    std::iota(position.begin(), position.end(), 0);
  }
  void run() {
    const TensorView out = make_view(logprobs.data(), DType::kFloat32, {rows});
    sample(SampleTensors{.logits = make_view(logits.data(), DType::kFloat32, {rows, vocab}),
                         .temperature = make_view(temperature.data(), DType::kFloat32, {rows}),
                         .top_k = make_view(top_k.data(), DType::kInt32, {rows}),
                         .top_p = make_view(top_p.data(), DType::kFloat32, {rows}),
                         .min_p = make_view(min_p.data(), DType::kFloat32, {rows}),
                         .seed = make_view(seed.data(), DType::kInt64, {rows}),
                         .position = make_view(position.data(), DType::kInt64, {rows}),
                         .ids = make_view(ids.data(), DType::kInt32, {rows}),
                         .logprobs = &out});
  }
};

struct Filters {
  double temperature = 1.0;
  int top_k = 0;
  double top_p = 1.0;
  double min_p = 0.0;
};

// Probability of each token after the filters, the obvious way.
std::vector<double> naive_distribution(const std::vector<float>& logits, const Filters& f) {
  const auto n = logits.size();
  std::vector<size_t> order(n);
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return logits[a] > logits[b]; });
  std::vector<double> p(n);
  const double top = logits[order[0]];
  for (size_t i = 0; i < n; ++i) p[i] = std::exp((logits[i] - top) / f.temperature);
  for (double& v : p) v = v < f.min_p ? 0.0 : v;
  if (f.top_k > 0) {
    for (size_t i = static_cast<size_t>(f.top_k); i < n; ++i) p[order[i]] = 0.0;
  }
  const double kept = std::accumulate(p.begin(), p.end(), 0.0);
  double sum = 0.0;
  for (size_t i = 0; i < n; ++i) {
    const double v = p[order[i]];
    if (sum >= f.top_p * kept) p[order[i]] = 0.0;
    sum += v;
  }
  const double total = std::accumulate(p.begin(), p.end(), 0.0);
  for (double& v : p) v /= total;
  return p;
}

// Draws `draws` tokens and returns the chi-square statistic and the degrees of freedom; a token of
// probability 0 fails.
double chi_square(const std::vector<float>& logits, const Filters& used, const Filters& expected,
                  int draws, int* freedom) {
  Batch b(draws, static_cast<int64_t>(logits.size()));
  for (int r = 0; r < draws; ++r) {
    std::copy(logits.begin(), logits.end(),
              b.logits.begin() + static_cast<int64_t>(logits.size()) * r);
    const auto i = static_cast<size_t>(r);
    b.temperature[i] = static_cast<float>(used.temperature);
    b.top_k[i] = used.top_k;
    b.top_p[i] = static_cast<float>(used.top_p);
    b.min_p[i] = static_cast<float>(used.min_p);
  }
  b.run();
  std::vector<double> counts(logits.size(), 0.0);
  for (int32_t id : b.ids) counts[static_cast<size_t>(id)] += 1.0;
  const std::vector<double> p = naive_distribution(logits, expected);
  double statistic = 0.0;
  *freedom = -1;
  for (size_t i = 0; i < p.size(); ++i) {
    const double wanted = p[i] * draws;
    if (wanted == 0.0) {
      if (counts[i] > 0.0) statistic += 1e9;
      continue;
    }
    statistic += (counts[i] - wanted) * (counts[i] - wanted) / wanted;
    ++*freedom;
  }
  return statistic;
}

std::vector<float> spread_logits(size_t n) {
  std::vector<float> logits(n);
  std::mt19937 rng(3);
  std::normal_distribution<float> normal(0.0f, 1.2f);
  for (float& v : logits) v = normal(rng);
  return logits;
}

class SamplingTest : public ::testing::Test {
 protected:
  void TearDown() override {
    set_isa(detected_isa());
    set_num_threads(2);
  }
};

TEST(Philox, gives_the_published_known_answers) {
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}),
            (PhiloxBlock{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}));
  EXPECT_EQ(philox({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}),
            (PhiloxBlock{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}));
  EXPECT_EQ(
      philox({0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}, {0xa4093822u, 0x299f31d0u}),
      (PhiloxBlock{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}));
}

TEST_F(SamplingTest, greedy_takes_the_lowest_id_of_the_greatest_logit) {
  for (Isa isa : available_isas()) {
    set_isa(isa);
    for (int64_t vocab : {1, 2, 15, 16, 17, 64, 255, 256, 257, 1000, 4096}) {
      Batch b(4, vocab);
      std::mt19937 rng(static_cast<unsigned>(vocab));
      for (float& v : b.logits) v = static_cast<float>(static_cast<int>(rng() % 7) - 3);
      b.temperature.assign(4, 0.0f);
      b.run();
      for (int64_t r = 0; r < 4; ++r) {
        auto begin = b.logits.begin() + r * vocab;
        EXPECT_EQ(b.ids[static_cast<size_t>(r)], std::max_element(begin, begin + vocab) - begin)
            << name_of(isa) << " " << vocab;
      }
    }
  }
}

TEST_F(SamplingTest, frequencies_follow_the_filtered_distribution) {
  const std::vector<float> logits = spread_logits(40);
  const std::vector<Filters> all = {
      {},
      {.temperature = 0.5},
      {.temperature = 3.0},
      {.top_k = 7},
      {.top_p = 0.6},
      {.min_p = 0.15},
      {.temperature = 0.8, .top_k = 12, .top_p = 0.7},
      {.temperature = 1.5, .top_k = 20, .top_p = 0.9, .min_p = 0.05},
      {.top_p = 1e-6},
      {.top_k = 1},
  };
  for (Isa isa : available_isas()) {
    set_isa(isa);
    for (const Filters& f : all) {
      int freedom = 0;
      const double statistic = chi_square(logits, f, f, 20000, &freedom);
      // Mean is `freedom`, variance twice that: five standard deviations and a little.
      EXPECT_LT(statistic, freedom + 5 * std::sqrt(2.0 * freedom) + 1) << name_of(isa);
    }
  }
}

TEST_F(SamplingTest, chi_square_sees_a_slightly_different_temperature) {
  const std::vector<float> logits = spread_logits(40);
  int freedom = 0;
  const double statistic =
      chi_square(logits, {.temperature = 1.08}, {.temperature = 1.0}, 20000, &freedom);
  EXPECT_GT(statistic, freedom + 5 * std::sqrt(2.0 * freedom) + 1);
}

TEST_F(SamplingTest, only_tokens_that_pass_every_filter_are_drawn) {
  std::mt19937 rng(17);
  for (int round = 0; round < 60; ++round) {
    const auto vocab = static_cast<int64_t>(2 + rng() % 700);
    std::vector<float> logits(static_cast<size_t>(vocab));
    for (float& v : logits) v = static_cast<float>(rng() % 41) * 0.25f;  // many equal ones
    Filters f{.temperature = 0.3 + 0.1 * (rng() % 30)};
    if (rng() % 2) f.top_k = static_cast<int>(1 + rng() % 20);
    if (rng() % 2) f.min_p = 0.01 * (rng() % 60);
    const std::vector<double> p = naive_distribution(logits, f);
    Batch b(64, vocab);
    for (int64_t r = 0; r < 64; ++r) {
      std::copy(logits.begin(), logits.end(), b.logits.begin() + r * vocab);
      const auto i = static_cast<size_t>(r);
      b.temperature[i] = static_cast<float>(f.temperature);
      b.top_k[i] = f.top_k;
      b.min_p[i] = static_cast<float>(f.min_p);
      b.seed[i] = round;
    }
    b.run();
    for (int32_t id : b.ids) ASSERT_GT(p[static_cast<size_t>(id)], 0.0) << "round " << round;
  }
}

TEST_F(SamplingTest, a_seeded_row_draws_the_same_in_any_batch_and_with_any_threads) {
  const int64_t vocab = 513;
  Batch all(33, vocab);
  std::mt19937 rng(2);
  std::normal_distribution<float> normal;
  for (float& v : all.logits) v = normal(rng);
  for (size_t r = 0; r < 33; ++r) {
    all.seed[r] = static_cast<int64_t>(rng());
    all.top_p[r] = r % 2 ? 0.9f : 1.0f;
    all.top_k[r] = r % 3 ? 0 : 40;
  }
  set_num_threads(3);
  all.run();
  std::set<int32_t> distinct(all.ids.begin(), all.ids.end());
  EXPECT_GT(distinct.size(), 10u);
  set_num_threads(1);
  for (size_t r = 0; r < 33; ++r) {
    Batch one(1, vocab);
    std::copy_n(all.logits.begin() + static_cast<int64_t>(r) * vocab, vocab, one.logits.begin());
    one.seed[0] = all.seed[r];
    one.position[0] = all.position[r];
    one.top_p[0] = all.top_p[r];
    one.top_k[0] = all.top_k[r];
    one.run();
    EXPECT_EQ(one.ids[0], all.ids[r]);
    EXPECT_EQ(one.logprobs[0], all.logprobs[r]);
  }
}

TEST_F(SamplingTest, rows_without_a_usable_logit_get_id_minus_one) {
  for (Isa isa : available_isas()) {
    set_isa(isa);
    for (float temperature : {0.0f, 1.0f}) {
      Batch b(4, 100);
      std::fill(b.logits.begin(), b.logits.end(), 0.5f);
      b.logits[57] = kNan;                              // row 0
      std::fill_n(b.logits.begin() + 100, 100, -kInf);  // row 1
      std::fill_n(b.logits.begin() + 200, 100, -kInf);
      b.logits[200 + 99] = -1e30f;  // row 2: one token left
      b.logits[300 + 13] = kInf;    // row 3
      b.temperature.assign(4, temperature);
      b.top_k[3] = 5;
      b.run();
      EXPECT_EQ(b.ids, (std::vector<int32_t>{-1, -1, 99, 13})) << name_of(isa) << temperature;
      EXPECT_TRUE(std::isnan(b.logprobs[0]));
      EXPECT_NEAR(b.logprobs[2], 0.0f, 1e-6);
    }
  }
}

TEST_F(SamplingTest, wrong_settings_name_the_row) {
  auto run_with = [](auto change) {
    Batch b(3, 8);
    change(b);
    b.run();
  };
  EXPECT_THROW(run_with([](Batch& b) { b.temperature[1] = -1.0f; }), InvalidArgument);
  EXPECT_THROW(run_with([](Batch& b) { b.temperature[1] = kNan; }), InvalidArgument);
  EXPECT_THROW(run_with([](Batch& b) { b.top_p[2] = 0.0f; }), InvalidArgument);
  EXPECT_THROW(run_with([](Batch& b) { b.min_p[0] = 1.5f; }), InvalidArgument);
  try {
    run_with([](Batch& b) { b.top_p[2] = 1.25f; });
    FAIL();
  } catch (const InvalidArgument& e) {
    EXPECT_NE(std::string(e.what()).find("top_p[2] must be in (0, 1], got 1.25"), std::string::npos)
        << e.what();
  }
}

TEST_F(SamplingTest, logprobs_ranks_and_best_tokens_equal_double_precision) {
  for (Isa isa : available_isas()) {
    set_isa(isa);
    for (int64_t n : {0, 1, 5, 64, 65, 300}) {
      const int64_t rows = 5, vocab = 300;
      std::mt19937 rng(8);
      std::vector<float> logits(rows * vocab);
      for (float& v : logits) v = static_cast<float>(rng() % 97) * 0.37f;
      std::vector<int32_t> ids = {0, 299, 17, -1, 5}, ranks(rows),
                           top(static_cast<size_t>(rows * n));
      std::vector<float> values(rows), best(static_cast<size_t>(rows * n));
      top_logprobs(
          LogprobTensors{.logits = make_view(logits.data(), DType::kFloat32, {rows, vocab}),
                         .ids = make_view(ids.data(), DType::kInt32, {rows}),
                         .logprobs = make_view(values.data(), DType::kFloat32, {rows}),
                         .ranks = make_view(ranks.data(), DType::kInt32, {rows}),
                         .top_ids = make_view(top.data(), DType::kInt32, {rows, n}),
                         .top_logprobs = make_view(best.data(), DType::kFloat32, {rows, n})});
      for (int64_t r = 0; r < rows; ++r) {
        const float* row = logits.data() + r * vocab;
        double sum = 0;
        for (int64_t i = 0; i < vocab; ++i) sum += std::exp(double(row[i]) - 36.0);
        const double log_sum = std::log(sum) + 36.0;
        const int32_t id = ids[static_cast<size_t>(r)];
        if (id < 0) {
          EXPECT_TRUE(std::isnan(values[static_cast<size_t>(r)]));
          EXPECT_EQ(ranks[static_cast<size_t>(r)], 0);
        } else {
          EXPECT_NEAR(values[static_cast<size_t>(r)], row[id] - log_sum, 1e-5);
          EXPECT_EQ(ranks[static_cast<size_t>(r)],
                    1 + std::count_if(row, row + vocab, [&](float v) { return v > row[id]; }));
        }
        std::vector<int32_t> order(vocab);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(),
                         [&](int32_t a, int32_t b) { return row[a] > row[b]; });
        for (int64_t i = 0; i < n; ++i) {
          ASSERT_EQ(top[static_cast<size_t>(r * n + i)], order[static_cast<size_t>(i)]);
          ASSERT_NEAR(best[static_cast<size_t>(r * n + i)],
                      row[order[static_cast<size_t>(i)]] - log_sum, 1e-5);
        }
      }
    }
  }
}

}  // namespace
}  // namespace helicore::nn
