#include "helicore/kv/kv_cache_manager.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "helicore/core/error.h"
#include "helicore/kv/introspection.h"
#include "kv/fake_engine.h"
#include "kv/kv_configs.h"

namespace helicore::kv::testing {
namespace {

using ::testing::HasSubstr;

void commit_sequence(KVCacheManager& manager, const std::vector<TokenId>& tokens,
                     const ReuseScope& scope = {}, int priority = kPriorityDefault) {
  auto cache =
      manager.create_kv_cache({.reuse_scope = scope, .input_tokens = tokens, .priority = priority});
  const auto start = static_cast<size_t>(cache->num_committed_tokens());
  ASSERT_TRUE(cache->resume());
  ASSERT_TRUE(cache->resize(static_cast<int64_t>(tokens.size())));
  cache->commit(std::span(tokens).subspan(start));
}

TEST(KVCacheManager, a_prefix_is_found_only_in_its_own_scope) {
  using namespace std::string_literals;
  const std::vector<ReuseScope> scopes{{},
                                       {.salt = ""s},
                                       {.salt = "X"s},
                                       {.salt = int64_t{'X'}},
                                       {.lora_id = 'X'},
                                       {.lora_id = 1},
                                       {.lora_id = 2},
                                       {.lora_id = 1, .lora_generation = 1},
                                       {.lora_id = 1, .salt = "X"s}};
  const auto tokens = iota_tokens(8);
  for (const ReuseScope& owner : scopes) {
    KVCacheManager manager(attention_config(4, 32));
    commit_sequence(manager, tokens, owner);
    for (const ReuseScope& scope : scopes) {
      EXPECT_EQ(manager.probe_reuse(tokens, scope), scope == owner ? 8 : 0);
      auto cache = manager.create_kv_cache({.reuse_scope = scope, .input_tokens = tokens});
      EXPECT_EQ(cache->num_committed_tokens(), scope == owner ? 8 : 0);
    }
  }
}

TEST(KVCacheManager, a_reloaded_adapter_and_a_namesake_with_another_id_find_nothing) {
  KVCacheManager manager(attention_config(4, 32));
  const auto tokens = iota_tokens(8);
  commit_sequence(manager, tokens, {.lora_id = 1});
  EXPECT_EQ(manager.probe_reuse(tokens, {.lora_id = 1}), 8);
  EXPECT_EQ(manager.probe_reuse(tokens, {.lora_id = 2}), 0);
  EXPECT_EQ(manager.probe_reuse(tokens, {.lora_id = 1, .lora_generation = 1}), 0);
}

TEST(KVCacheManager, token_pairs_that_weak_hashes_confuse_do_not_match) {
  KVCacheManager manager(attention_config(2, 64));
  commit_sequence(manager, {100, 200, 300, 400});
  EXPECT_EQ(manager.probe_reuse(std::vector<TokenId>{131, 199, 300, 400}), 0);
  EXPECT_EQ(manager.probe_reuse(std::vector<TokenId>{100, 200, 331, 399}), 2);
  EXPECT_EQ(manager.probe_reuse(std::vector<TokenId>{100, 200, 300, 399}), 3);
  EXPECT_EQ(manager.probe_reuse(std::vector<TokenId>{-1, -1}), 0);
}

TEST(KVCacheManager, target_and_draft_grow_together_and_report_the_one_that_is_short) {
  auto config = attention_config(4, 1);
  config.layers = {AttentionLayerConfig{0, {{"latent", 4096}}},
                   AttentionLayerConfig{1, {{"latent", 4096}}, {}, {}, CacheDomain::kDraft}};
  config.cache_tiers = {HostCacheTierConfig{4096 * 8}};
  config.initial_pool_ratio = {0.75, 0.25};
  KVCacheManager manager(config);
  const auto groups = manager.storage_statistics();
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_EQ(groups[0].total, 6);
  EXPECT_EQ(groups[1].total, 2);
  EXPECT_EQ(groups[1].domain, CacheDomain::kDraft);
  auto cache = manager.create_kv_cache();
  ASSERT_TRUE(cache->resume());
  ASSERT_TRUE(cache->resize(8));
  EXPECT_FALSE(cache->resize(9));
  EXPECT_EQ(cache->last_failure()->domain, CacheDomain::kDraft);
  EXPECT_EQ(cache->last_failure()->pool_group, PoolGroupId(1));
  EXPECT_EQ(manager.storage_statistics()[0].free, 4) << "the target gave nothing";
  EXPECT_EQ(manager.num_total_blocks(), 2);
}

TEST(KVCacheManager, eviction_takes_the_suffix_before_the_prefix) {
  KVCacheManager manager(attention_config(4, 4, 1, 1024));
  ASSERT_EQ(manager.num_total_blocks(), 4);
  const auto tokens = iota_tokens(16);
  commit_sequence(manager, tokens);
  auto other = manager.create_kv_cache();
  ASSERT_TRUE(other->resume());
  for (int32_t blocks = 1; blocks <= 4; ++blocks) {
    ASSERT_TRUE(other->resize(4 * blocks));
    EXPECT_EQ(manager.probe_reuse(tokens), 16 - 4 * blocks);
  }
  EXPECT_EQ(manager.stats().evicted_blocks, 4u);
}

TEST(KVCacheManager, eviction_takes_low_priority_first_and_raises_a_shared_prefix) {
  KVCacheManager manager(attention_config(4, 6));
  const std::vector<TokenId> precious{1, 1, 1, 1, 2, 2, 2, 2};
  const std::vector<TokenId> cheap{1, 1, 1, 1, 3, 3, 3, 3};
  const std::vector<TokenId> newer{4, 4, 4, 4, 5, 5, 5, 5};
  commit_sequence(manager, precious, {}, 90);
  commit_sequence(manager, cheap, {}, 10);
  commit_sequence(manager, newer, {}, 35);
  auto other = manager.create_kv_cache();
  ASSERT_TRUE(other->resume());
  ASSERT_TRUE(other->resize(4 * 2));
  EXPECT_EQ(manager.probe_reuse(cheap), 4);
  EXPECT_EQ(manager.probe_reuse(newer), 8);
  ASSERT_TRUE(other->resize(4 * 4));
  EXPECT_EQ(manager.probe_reuse(newer), 0);
  EXPECT_EQ(manager.probe_reuse(precious), 8);
  EXPECT_THROW((void)manager.create_kv_cache({.priority = 101}), InvalidArgument);
}

TEST(KVCacheManager, the_gate_refuses_a_resume_above_the_limit_but_never_the_only_sequence) {
  auto config = attention_config(4, 8);
  config.max_util_for_resume = 0.5;
  KVCacheManager manager(config);
  ASSERT_EQ(manager.num_total_blocks(), 8);
  auto a = manager.create_kv_cache();
  auto b = manager.create_kv_cache();
  ASSERT_TRUE(a->resume());
  ASSERT_TRUE(a->resize(20));
  EXPECT_FALSE(b->resume());
  EXPECT_TRUE(b->last_failure()->over_utilisation);
  EXPECT_EQ(b->status(), CacheStatus::kSuspended);
  a->suspend();
  EXPECT_TRUE(a->resume()) << "alone, five of eight blocks held";
  ASSERT_TRUE(a->resize(16));
  EXPECT_TRUE(b->resume());
}

TEST(KVCacheManager, backoff_trims_tokens_from_the_match) {
  auto config = attention_config(4, 16);
  config.reuse_match_backoff = 3;
  KVCacheManager manager(config);
  commit_sequence(manager, iota_tokens(8));
  EXPECT_EQ(manager.probe_reuse(iota_tokens(8)), 5);
  EXPECT_EQ(manager.probe_reuse(iota_tokens(2)), 0);
  auto cache = manager.create_kv_cache({.input_tokens = iota_tokens(8)});
  EXPECT_EQ(cache->num_committed_tokens(), 5);
  config.enable_partial_reuse = false;
  KVCacheManager whole(config);
  commit_sequence(whole, iota_tokens(8));
  EXPECT_EQ(whole.probe_reuse(iota_tokens(8)), 4);
}

TEST(KVCacheManager, clear_and_shutdown_refuse_open_caches_and_change_nothing) {
  KVCacheManager manager(attention_config(4, 8));
  commit_sequence(manager, iota_tokens(4));
  auto cache = manager.create_kv_cache();
  try {
    manager.clear_reusable_blocks();
    FAIL();
  } catch (const ResourceBusy& error) {
    EXPECT_THAT(error.what(), HasSubstr("clear_reusable_blocks"));
    EXPECT_THAT(error.what(), HasSubstr("1 caches"));
  }
  EXPECT_THROW(manager.shutdown(), ResourceBusy);
  EXPECT_EQ(manager.probe_reuse(iota_tokens(4)), 4);
  cache->close();
  manager.clear_reusable_blocks();
  EXPECT_EQ(manager.probe_reuse(iota_tokens(4)), 0);
  EXPECT_EQ(manager.storage_statistics()[0].free, manager.storage_statistics()[0].total);
  manager.shutdown();
  manager.shutdown();
  EXPECT_THROW((void)manager.create_kv_cache(), LogicError);
  EXPECT_THROW((void)manager.probe_reuse(iota_tokens(4)), LogicError);
}

TEST(KVCacheManager, a_manager_destroyed_first_closes_its_caches) {
  auto manager = std::make_unique<KVCacheManager>(attention_config(4, 8));
  auto cache = manager->create_kv_cache();
  ASSERT_TRUE(cache->resume());
  ASSERT_TRUE(cache->resize(9));
  ::testing::internal::CaptureStderr();
  manager.reset();
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("1 open caches"));
  EXPECT_EQ(cache->status(), CacheStatus::kClosed);
  cache->close();
}

TEST(KVCacheManager, batch_calls_serve_each_cache_and_report_each) {
  KVCacheManager manager(attention_config(4, 4));
  std::vector<std::unique_ptr<KVCache>> owned;
  std::vector<KVCache*> caches;
  for (int i = 0; i < 3; ++i) {
    owned.push_back(manager.create_kv_cache());
    caches.push_back(owned.back().get());
  }
  std::vector<uint8_t> ok(3);
  manager.resume_many(caches, std::nullopt, ok);
  EXPECT_EQ(ok, (std::vector<uint8_t>{1, 1, 1}));
  manager.resize_many(caches, std::vector<int32_t>{8, 12, 4}, {}, ok);
  EXPECT_EQ(ok, (std::vector<uint8_t>{1, 0, 1})) << "a failure does not stop the next";
  EXPECT_EQ(caches[1]->last_failure()->needed, 3);
  manager.commit_many(std::vector<KVCache*>{caches[0], caches[2]},
                      std::vector<TokenId>{1, 2, 3, 4, 5, 9}, std::vector<int32_t>{5, 1});
  EXPECT_EQ(caches[0]->num_committed_tokens(), 5);
  EXPECT_EQ(caches[2]->committed_tokens(), std::vector<TokenId>{9});
  manager.commit_many(std::vector<KVCache*>{caches[0], caches[2]}, std::vector<TokenId>{6, 10}, {});
  EXPECT_EQ(caches[0]->num_committed_tokens(), 6);
  manager.resize_many({}, {}, {}, {});
  manager.commit_many({}, {}, {});
  Introspection::check(manager);
}

TEST(KVCacheManager, a_batch_call_with_one_wrong_argument_does_nothing) {
  KVCacheManager manager(attention_config(4, 8));
  KVCacheManager stranger(attention_config(4, 8));
  auto a = manager.create_kv_cache();
  auto b = manager.create_kv_cache();
  auto c = stranger.create_kv_cache();
  const std::vector<KVCache*> both{a.get(), b.get()};
  std::vector<uint8_t> ok(2);
  manager.resume_many(both, std::nullopt, ok);
  const auto resize = [&](std::vector<KVCache*> caches, std::vector<int32_t> capacities,
                          std::vector<int32_t> histories = {}) {
    std::vector<uint8_t> results(caches.size());
    manager.resize_many(caches, capacities, histories, results);
  };
  EXPECT_THROW(resize(both, {8}), InvalidArgument);
  EXPECT_THROW(resize(both, {8, -1}), InvalidArgument);
  EXPECT_THROW(resize(both, {8, 8}, {1}), InvalidArgument);
  EXPECT_THROW(resize(both, {8, 8}, {1, 9}), InvalidArgument);
  EXPECT_THROW(resize({a.get(), a.get()}, {8, 8}), InvalidArgument);
  EXPECT_THROW(resize({a.get(), c.get()}, {8, 8}), InvalidArgument);
  EXPECT_THROW(resize({a.get(), nullptr}, {8, 8}), InvalidArgument);
  EXPECT_EQ(a->capacity(), 0);
  resize(both, {8, 8});
  const std::vector<TokenId> tokens{1, 2, 3};
  EXPECT_THROW(manager.commit_many(both, tokens, {}), InvalidArgument);
  EXPECT_THROW(manager.commit_many(both, tokens, std::vector<int32_t>{4, -1}), InvalidArgument);
  EXPECT_THROW(manager.commit_many(both, std::vector<TokenId>{1, -2}, {}), InvalidArgument);
  EXPECT_THROW(manager.commit_many(both, iota_tokens(18), std::vector<int32_t>{9, 9}),
               InvalidArgument);
  EXPECT_EQ(a->num_committed_tokens(), 0);
  b->suspend();
  EXPECT_THROW(manager.commit_many(both, std::vector<TokenId>{1, 2}, {}), LogicError);
  EXPECT_THROW(manager.resume_many(both, std::nullopt, ok), LogicError);
  EXPECT_EQ(b->status(), CacheStatus::kSuspended);
}

TEST(KVCacheManager, counters_tell_hits_misses_and_evictions) {
  KVCacheManager manager(attention_config(4, 16));
  commit_sequence(manager, iota_tokens(10));
  auto cache =
      manager.create_kv_cache({.input_tokens = iota_tokens(20), .expected_prompt_length = 21});
  const KVCacheStats stats = manager.stats();
  EXPECT_EQ(stats.num_lookups, 2u);
  EXPECT_EQ(stats.lookup_tokens, 30u);
  EXPECT_EQ(stats.hit_tokens, 10u);
  EXPECT_EQ(stats.full_reused_blocks, 2u);
  EXPECT_EQ(stats.partial_reused_blocks, 1u);
  EXPECT_EQ(stats.missed_blocks, 3u + 3u);
  EXPECT_EQ(stats.committed_blocks, 2u);
  EXPECT_EQ(stats.allocated_blocks, 3u);
}

TEST(KVCacheManager, chain_keys_are_those_of_the_committed_blocks) {
  KVCacheManager manager(attention_config(4, 16));
  const ReuseScope scope{.lora_id = 3};
  commit_sequence(manager, iota_tokens(11), scope);
  const auto keys = manager.chain_keys(iota_tokens(11), scope);
  ASSERT_EQ(keys.size(), 2u);
  const ManagerState& state = Introspection::state(manager);
  std::vector<NodeId> path;
  (void)state.tree.match(state.tree.find_root(scope), iota_tokens(8), {.partial = false}, &path);
  ASSERT_EQ(path.size(), 2u);
  EXPECT_EQ(state.tree.key(path[0]), keys[0]);
  EXPECT_EQ(state.tree.key(path[1]), keys[1]);
}

TEST(KVCacheManager, pools_are_aligned_and_keep_their_addresses) {
  auto config = attention_config(4, 8, 3);
  KVCacheManager manager(config);
  const auto address = manager.mem_pool_base_address(0, "latent", PageIndexMode::kPerLayer);
  EXPECT_EQ(address % 64, 0u);
  commit_sequence(manager, iota_tokens(20));
  EXPECT_EQ(manager.mem_pool_base_address(0, "latent"), address);
  EXPECT_EQ(manager.mem_pool_base_address(2, "latent"), address + 2 * 4096);
  EXPECT_EQ(manager.page_index_scale(1, "latent"), 3);
  EXPECT_EQ(manager.page_stride(1, "latent"), 4096);
  EXPECT_EQ(manager.pool_group_descs()[0].pools[0].base_address, address);
  EXPECT_EQ(manager.layer_grouping(), (std::vector<std::vector<int32_t>>{{0, 1, 2}}));
}

TEST(KVCacheManager, probes_and_statistics_run_beside_a_working_sequence) {
  KVCacheManager manager(attention_config(4, 64));
  commit_sequence(manager, iota_tokens(40));
  std::atomic<bool> stop{false};
  std::atomic<int64_t> num_probes{0};
  std::vector<std::thread> readers;
  for (int i = 0; i < 2; ++i) {
    readers.emplace_back([&] {
      do {
        ASSERT_LE(manager.probe_reuse(iota_tokens(60)), 60);
        ASSERT_LE(manager.storage_statistics()[0].available(), manager.num_total_blocks());
        ASSERT_GE(manager.stats().num_lookups, 1u);
        num_probes.fetch_add(1);
      } while (!stop.load());
    });
  }
  for (int round = 0; round < 200; ++round) commit_sequence(manager, iota_tokens(36 + round % 24));
  stop.store(true);
  for (std::thread& reader : readers) reader.join();
  EXPECT_GE(num_probes.load(), 2);
  Introspection::check(manager);
}

TEST(KVCacheManager, sequences_of_one_manager_may_be_driven_by_different_threads) {
  KVCacheManager manager(attention_config(4, 200));
  std::vector<std::thread> drivers;
  for (int i = 0; i < 3; ++i) {
    drivers.emplace_back([&manager, i] {
      const FakeEngine engine(manager);
      for (int round = 0; round < 60; ++round) {
        auto tokens = iota_tokens(20);
        for (int32_t t = 0; t < 15; ++t) tokens.push_back(1000 * i + round % 5 + t);
        auto cache = manager.create_kv_cache({.input_tokens = tokens});
        const auto start = static_cast<size_t>(cache->num_committed_tokens());
        ASSERT_TRUE(cache->resume());
        ASSERT_TRUE(cache->resize(static_cast<int64_t>(tokens.size())));
        // Only rows that nobody else can see yet are written.
        engine.write(*cache, tokens, start);
        for (size_t at = start; at < tokens.size(); ++at)
          cache->commit(std::span(tokens).subspan(at, 1));
        ASSERT_EQ(engine.check(*cache, tokens), std::nullopt);
      }
    });
  }
  for (std::thread& driver : drivers) driver.join();
  Introspection::check(manager);
  EXPECT_EQ(manager.storage_statistics()[0].unavailable(), 0);
}

}  // namespace
}  // namespace helicore::kv::testing
