// Random operations against the naive model and the fake engine, with controls that must be caught.
#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <string>

#include "helicore/kv/introspection.h"
#include "helicore/kv/kv_cache_manager.h"
#include "kv/event_listener.h"
#include "kv/fake_engine.h"
#include "kv/kv_configs.h"
#include "kv/naive_model.h"

namespace helicore::kv::testing {
namespace {

struct Setup {
  const char* name = "";
  int32_t tokens_per_block = 4;
  int32_t num_blocks = 24;
  bool partial = true;
  int32_t backoff = 0;
  double max_util = 1.0;
  bool with_draft = false;
  ModelFault fault = ModelFault::kNone;
  bool with_forks = false;
  int32_t event_buffer_size = 0;  // with it a listener rebuilds the tree
  int lost_removals = 0;          // the listener misses every n-th removal
  bool careless_engine = false;   // writes a token that the page table does not give it
};

KVCacheManagerConfig config_of(const Setup& setup) {
  auto config = attention_config(setup.tokens_per_block, setup.num_blocks, 2, 1024);
  config.enable_partial_reuse = setup.partial;
  config.reuse_match_backoff = setup.backoff;
  config.max_util_for_resume = setup.max_util;
  config.event_buffer_size = setup.event_buffer_size;
  if (setup.with_draft) {
    const int64_t bytes = 512LL * setup.tokens_per_block;
    config.layers.push_back(AttentionLayerConfig{.layer_id = 7,
                                                 .buffers = {{"k", bytes}, {"v", bytes}},
                                                 .cache_domain = CacheDomain::kDraft});
    config.cache_tiers = {HostCacheTierConfig{3072LL * setup.tokens_per_block * setup.num_blocks}};
  }
  return config;
}

constexpr int kNumScopes = 2;
ReuseScope scope_of(int scope) {
  ReuseScope result;
  if (scope == 1) result.salt = std::string("tenant");
  return result;
}

// Drives a manager and the model side by side; any difference is a message.
class Runner {
 public:
  Runner(const Setup& setup, uint64_t seed)
      : setup_(setup),
        random_(seed),
        manager_(config_of(setup)),
        engine_(manager_),
        model_(setup.tokens_per_block, static_cast<int>(manager_.num_total_blocks()), setup.partial,
               setup.backoff, setup.max_util, setup.fault),
        listener_(setup.lost_removals) {}

  // The first difference within `num_operations`, or nothing.
  std::optional<std::string> run(int num_operations) {
    for (int i = 0; i < num_operations && !difference_; ++i) {
      step();
      compare_counts();
      if (setup_.event_buffer_size > 0) listen(i);
      if (i % 64 == 0) Introspection::check(manager_);
      if (difference_) *difference_ += " (operation " + std::to_string(i) + ")";
    }
    return difference_;
  }

  size_t num_restarts() const { return num_restarts_; }
  const EventListener& listener() const { return listener_; }
  const KVCacheManager& manager() const { return manager_; }

 private:
  struct Pair {
    std::unique_ptr<KVCache> real;
    ModelCache model;
    Tokens plan;     // what this sequence will commit
    int frozen = 0;  // rows below were written before a fork: they hold the plan's tokens
  };

  int below(int bound) { return std::uniform_int_distribution<int>(0, bound - 1)(random_); }

  void differ(const std::string& what) {
    if (!difference_) difference_ = what;
  }
  template <typename A, typename B>
  void expect_equal(const char* what, A real, B model) {
    if (static_cast<int64_t>(real) == static_cast<int64_t>(model)) return;
    differ(std::string(what) + ": manager " + std::to_string(real) + ", model " +
           std::to_string(model));
  }

  // Often a prefix of an earlier sequence with a new ending.
  Tokens random_sequence() {
    Tokens tokens;
    if (!past_.empty() && below(4) != 0) {
      tokens = past_[static_cast<size_t>(below(static_cast<int>(past_.size())))];
      if (below(2) == 0)
        tokens.resize(static_cast<size_t>(below(static_cast<int>(tokens.size()) + 1)));
    }
    for (int i = below(3 * setup_.tokens_per_block + 2); i > 0; --i) tokens.push_back(below(3));
    if (tokens.size() > 60) tokens.resize(60);
    past_.push_back(tokens);
    if (past_.size() > 40) past_.erase(past_.begin());
    return tokens;
  }

  void step() {
    const int operation = below(100);
    if (pairs_.size() < 3 || (operation < 12 && pairs_.size() < (setup_.with_forks ? 5u : 8u)))
      return create();
    if (operation < 20) return probe();
    if (operation < 21) return clear();
    if (operation < 27) return batch();
    const auto at = static_cast<size_t>(below(static_cast<int>(pairs_.size())));
    if (setup_.with_forks && operation < 32) return operation < 31 ? fork(at) : truncate_all();
    Pair& pair = pairs_[at];
    if (operation < 45 && below(4) == 0) return truncate(pair, random_length(pair));
    if (operation < 37) return close(at);
    if (operation < 40) return stop(pair);
    if (!pair.model.active) return resume(pair);
    if (operation < 46) return suspend(pair);
    if (operation < 72) return resize(pair);
    return commit(pair);
  }

  void create() {
    const int scope = below(kNumScopes);
    const int priority = below(3) == 0 ? below(101) : kPriorityDefault;
    Pair pair;
    pair.plan = random_sequence();
    Tokens prompt = pair.plan;
    if (below(2) == 0)
      prompt.resize(static_cast<size_t>(below(static_cast<int>(prompt.size()) + 1)));
    const int expected = model_.probe(scope, prompt);
    expect_equal("probe before create", manager_.probe_reuse(prompt, scope_of(scope)), expected);
    pair.real = manager_.create_kv_cache(
        {.reuse_scope = scope_of(scope), .input_tokens = prompt, .priority = priority});
    expect_equal("matched", pair.real->num_committed_tokens(), expected);
    if (difference_) return;
    pair.model = model_.create(scope, prompt, priority, partial_key(*pair.real, prompt));
    expect_equal("blocks of the match", pair.real->num_blocks(), pair.model.blocks.size());
    pairs_.push_back(std::move(pair));
  }

  // The prefix shown by the page that the manager holds for a last block that matched in part.
  Tokens partial_key(const KVCache& cache, const Tokens& prompt) {
    if (!Introspection::needs_copy(cache)) return {};
    const RadixTree& tree = Introspection::state(manager_).tree;
    const PageHandle page = Introspection::pages(cache).back();
    const NodeId node = Introspection::state(manager_).store.page(page.id).node;
    const auto begin = static_cast<size_t>((cache.num_blocks() - 1) * setup_.tokens_per_block);
    Tokens key(prompt.begin(), prompt.begin() + static_cast<std::ptrdiff_t>(begin));
    const auto block = tree.tokens(node);
    const auto matched = static_cast<size_t>(cache.num_committed_tokens()) - begin;
    if (block.size() < matched ||
        !std::equal(block.begin(), block.begin() + static_cast<std::ptrdiff_t>(matched),
                    prompt.begin() + static_cast<std::ptrdiff_t>(begin))) {
      differ("the page held for the last block has other tokens");
    }
    key.insert(key.end(), block.begin(), block.end());
    return key;
  }

  void probe() {
    const int scope = below(kNumScopes);
    const Tokens tokens = random_sequence();
    expect_equal("probe", manager_.probe_reuse(tokens, scope_of(scope)),
                 model_.probe(scope, tokens));
  }

  void clear() {
    bool refused = false;
    try {
      manager_.clear_reusable_blocks();
    } catch (const ResourceBusy&) {
      refused = true;
    }
    if (!refused) differ("clear_reusable_blocks did not refuse open caches");
    if (below(10) != 0) return;
    while (!pairs_.empty()) close(pairs_.size() - 1);
    manager_.clear_reusable_blocks();
    model_.clear();
  }

  void resume(Pair& pair) {
    expect_equal("resume", pair.real->resume(), model_.resume(pair.model));
    verify(pair);
  }

  void suspend(Pair& pair) {
    verify(pair);
    pair.real->suspend();
    model_.suspend(pair.model);
  }

  std::pair<int, int> random_cursors(const Pair& pair) {
    const int history = pair.model.history;
    int capacity = history + below(4 * setup_.tokens_per_block);
    if (below(20) == 0) capacity += setup_.num_blocks * setup_.tokens_per_block;
    return {capacity, below(4) == 0 ? history + below(capacity - history + 1) : history};
  }

  int random_length(const Pair& pair) {
    const auto committed = static_cast<int>(pair.model.committed.size());
    return committed + below(pair.model.capacity - committed + 1);
  }

  void after_truncate(Pair& pair, int length) {
    model_.truncate(pair.model, length);
    // What was rejected is replaced by something else.
    if (static_cast<int>(pair.plan.size()) > length) pair.plan.resize(static_cast<size_t>(length));
    pair.frozen = std::min(pair.frozen, length);
    expect_equal("capacity after truncate", pair.real->capacity(), pair.model.capacity);
    expect_equal("blocks after truncate", pair.real->num_blocks(), pair.model.blocks.size());
    verify(pair);
  }

  void truncate(Pair& pair, int length) {
    pair.real->truncate(length);
    after_truncate(pair, length);
  }

  void truncate_all() {
    std::vector<KVCache*> caches;
    std::vector<int32_t> lengths;
    for (Pair& pair : pairs_) {
      caches.push_back(pair.real.get());
      lengths.push_back(random_length(pair));
    }
    manager_.truncate_many(caches, lengths);
    for (size_t i = 0; i < pairs_.size(); ++i) after_truncate(pairs_[i], lengths[i]);
  }

  void extend_plan(Pair& pair, size_t length) {
    while (pair.plan.size() < length) pair.plan.push_back(below(3));
  }

  void fork(size_t at) {
    if (pairs_.size() >= 10) return;
    Pair& parent = pairs_[at];
    const auto history = static_cast<size_t>(parent.model.history);
    const size_t written =
        std::max(parent.model.committed.size(), static_cast<size_t>(parent.frozen));
    extend_plan(parent, history);
    if (written < history) {
      if (!parent.model.active) return;
      engine_.write(*parent.real, std::span(parent.plan).first(history), written);
    }
    Pair child;
    child.real = parent.real->fork();
    child.model = model_.fork(parent.model);
    child.plan.assign(parent.plan.begin(),
                      parent.plan.begin() + static_cast<std::ptrdiff_t>(history));
    if (below(2) == 0) child.plan = parent.plan;
    if (!parent.model.needs_copy) parent.frozen = child.frozen = static_cast<int>(history);
    verify(child);
    pairs_.push_back(std::move(child));
  }

  void after_resize(Pair& pair, int old_blocks, bool resized) {
    if (resized && pair.real->num_blocks() > old_blocks) engine_.poison(*pair.real, old_blocks);
    expect_equal("capacity", pair.real->capacity(), pair.model.capacity);
    verify(pair);
  }

  void resize(Pair& pair) {
    const auto [capacity, history] = random_cursors(pair);
    const int old_blocks = pair.real->num_blocks();
    const bool resized = pair.real->resize(capacity, history);
    expect_equal("resize", resized, model_.resize(pair.model, capacity, history));
    after_resize(pair, old_blocks, resized);
  }

  // The next tokens of the plan that fit into the capacity, written by the engine.
  Tokens next_tokens(Pair& pair) {
    const size_t done = pair.model.committed.size();
    extend_plan(pair, done + 12);
    // Rows that are shared with a fork may be committed, not written.
    const int end = pair.model.may_share && model_.shares_next_rows(pair.model)
                        ? pair.model.history
                        : pair.model.capacity;
    const int room = end - static_cast<int>(done);
    const auto count = static_cast<std::ptrdiff_t>(below(std::min(room, 10) + 1));
    const auto begin = pair.plan.begin() + static_cast<std::ptrdiff_t>(done);
    Tokens tokens(begin, begin + count);
    Tokens whole = pair.model.committed;
    // A plan that left the matched prefix goes on from what is committed.
    whole.insert(whole.end(), tokens.begin(), tokens.end());
    engine_.write(*pair.real, whole, std::max(done, static_cast<size_t>(pair.frozen)));
    if (setup_.careless_engine && done > 0) engine_.row(*pair.real, 0, 0)[0] ^= std::byte{1};
    return tokens;
  }

  void commit(Pair& pair) {
    if (!pair.model.may_commit) return;
    const Tokens tokens = next_tokens(pair);
    const bool is_end = below(12) == 0;
    pair.real->commit(tokens, is_end);
    model_.commit(pair.model, tokens);
    if (is_end) model_.stop(pair.model);
    verify(pair);
  }

  void batch() {
    std::vector<KVCache*> caches;
    std::vector<Pair*> chosen;
    for (Pair& pair : pairs_) {
      if (!pair.model.active || !pair.model.may_commit) continue;
      caches.push_back(pair.real.get());
      chosen.push_back(&pair);
    }
    std::vector<int32_t> capacities, histories;
    std::vector<int32_t> old_blocks;
    for (Pair* pair : chosen) {
      const auto [capacity, history] = random_cursors(*pair);
      capacities.push_back(capacity);
      histories.push_back(history);
      old_blocks.push_back(pair->real->num_blocks());
    }
    std::vector<uint8_t> results(caches.size());
    manager_.resize_many(caches, capacities, histories, results);
    for (size_t i = 0; i < chosen.size(); ++i) {
      expect_equal("resize_many", results[i],
                   model_.resize(chosen[i]->model, capacities[i], histories[i]));
    }
    Tokens flat;
    std::vector<int32_t> counts;
    std::vector<Tokens> each;
    for (size_t i = 0; i < chosen.size(); ++i) {
      after_resize(*chosen[i], old_blocks[i], results[i] != 0);
      each.push_back(next_tokens(*chosen[i]));
      counts.push_back(static_cast<int32_t>(each.back().size()));
      flat.insert(flat.end(), each.back().begin(), each.back().end());
    }
    manager_.commit_many(caches, flat, counts);
    for (size_t i = 0; i < chosen.size(); ++i) model_.commit(chosen[i]->model, each[i]);
    for (Pair* pair : chosen) verify(*pair);
  }

  void stop(Pair& pair) {
    pair.real->stop_committing();
    model_.stop(pair.model);
  }

  void close(size_t at) {
    verify(pairs_[at]);
    pairs_[at].real->close();
    model_.close(pairs_[at].model);
    pairs_.erase(pairs_.begin() + static_cast<std::ptrdiff_t>(at));
  }

  void verify(const Pair& pair) {
    if (pair.real->committed_tokens() != pair.model.committed) differ("committed tokens");
    expect_equal("history", pair.real->history_length(), pair.model.history);
    if (!pair.real->is_active() || difference_) return;
    if (const auto wrong = engine_.check(*pair.real, pair.model.committed)) differ(*wrong);
  }

  void listen(int operation) {
    if (operation % 5 != 0) return;
    if (manager_.num_dropped_events() != num_dropped_) {
      num_dropped_ = manager_.num_dropped_events();
      ++num_restarts_;
      listener_.restart(manager_.snapshot_events());
    } else {
      listener_.apply(manager_.drain_events(3));
      listener_.apply(manager_.drain_events());
    }
    if (const auto wrong = listener_.compare(manager_)) differ("listener: " + *wrong);
  }

  void compare_counts() {
    for (const PoolGroupStatistics& group : manager_.storage_statistics()) {
      if (group.total != manager_.num_total_blocks()) continue;  // the larger group of two
      expect_equal("free", group.free, model_.free());
      expect_equal("evictable", group.evictable, model_.evictable());
    }
  }

  Setup setup_;
  std::mt19937_64 random_;
  KVCacheManager manager_;
  FakeEngine engine_;
  NaiveModel model_;
  std::vector<Pair> pairs_;
  std::vector<Tokens> past_;
  EventListener listener_;
  uint64_t num_dropped_ = 0;
  size_t num_restarts_ = 0;
  std::optional<std::string> difference_;
};

#if defined(HELICORE_DEBUG_CHECKS) || defined(__SANITIZE_THREAD__)
constexpr int kNumOperations =
    8000;  // slow builds; the first kind checks every invariant after each
#else
constexpr int kNumOperations = 50000;
#endif

class Property : public ::testing::TestWithParam<Setup> {};

class EventProperty : public ::testing::TestWithParam<Setup> {};

TEST_P(EventProperty, a_listener_rebuilds_the_tree_exactly) {
  Runner runner(GetParam(), 3);
  const auto difference = runner.run(kNumOperations / 2);
  ASSERT_FALSE(difference.has_value()) << *difference;
  for (EventKind kind :
       {EventKind::kCreated, EventKind::kStored, EventKind::kRemoved, EventKind::kUpdated}) {
    EXPECT_GT(runner.listener().num_seen(kind), 0u) << name_of(kind);
  }
  EXPECT_EQ(runner.num_restarts() > 0, GetParam().event_buffer_size < 100);
}

INSTANTIATE_TEST_SUITE_P(
    Setups, EventProperty,
    ::testing::Values(Setup{.name = "roomy", .num_blocks = 60, .event_buffer_size = 4096},
                      Setup{.name = "forks", .with_forks = true, .event_buffer_size = 4096},
                      Setup{.name = "overflowing", .num_blocks = 30, .event_buffer_size = 20}),
    [](const auto& info) { return std::string(info.param.name); });

TEST_P(Property, random_operations_agree_with_the_naive_model_and_the_data_survives) {
  for (uint64_t seed : {1u, 2u}) {
    Runner runner(GetParam(), seed);
    const auto difference = runner.run(kNumOperations);
    ASSERT_FALSE(difference.has_value()) << "seed " << seed << ": " << *difference;
    const KVCacheStats stats = runner.manager().stats();
    EXPECT_GT(stats.hit_tokens, 0u);
    EXPECT_GT(stats.evicted_blocks, 0u) << "the run never filled the pool";
    EXPECT_GT(stats.rebased_blocks, 0u) << "the run never committed a twin";
    EXPECT_EQ(stats.num_forks > 50, GetParam().with_forks);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Setups, Property,
    ::testing::Values(Setup{.name = "plain", .num_blocks = 60},
                      Setup{.name = "tight_pool", .num_blocks = 11},
                      Setup{.name = "one_token_blocks", .tokens_per_block = 1, .num_blocks = 40},
                      Setup{.name = "whole_blocks_only", .partial = false},
                      Setup{.name = "backoff_and_gate", .backoff = 3, .max_util = 0.8},
                      Setup{.name = "target_and_draft", .with_draft = true},
                      Setup{.name = "forks", .num_blocks = 40, .with_forks = true},
                      Setup{.name = "forks_in_a_tight_pool", .num_blocks = 13, .with_forks = true},
                      Setup{.name = "forks_of_one_token_blocks",
                            .tokens_per_block = 1,
                            .num_blocks = 40,
                            .with_forks = true},
                      Setup{.name = "forks_of_target_and_draft",
                            .num_blocks = 48,
                            .partial = false,
                            .with_draft = true,
                            .with_forks = true}),
    [](const auto& info) { return std::string(info.param.name); });

class PropertyControl : public ::testing::TestWithParam<Setup> {};

TEST_P(PropertyControl, a_planted_fault_is_caught) {
  Runner runner(GetParam(), 1);
  EXPECT_TRUE(runner.run(kNumOperations).has_value());
}

INSTANTIATE_TEST_SUITE_P(
    Faults, PropertyControl,
    ::testing::Values(
        Setup{.name = "evicts_the_newest", .fault = ModelFault::kEvictNewest},
        Setup{.name = "ignores_priority", .fault = ModelFault::kIgnorePriority},
        Setup{.name = "mixes_scopes", .fault = ModelFault::kMixScopes},
        Setup{.name = "forgets_partial_blocks", .fault = ModelFault::kForgetPartial},
        Setup{.name = "forks_copy_nothing",
              .fault = ModelFault::kForkCopiesNothing,
              .with_forks = true},
        Setup{.name = "listener_misses_removals", .event_buffer_size = 4096, .lost_removals = 50},
        Setup{.name = "engine_writes_shared_rows", .careless_engine = true}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace helicore::kv::testing
