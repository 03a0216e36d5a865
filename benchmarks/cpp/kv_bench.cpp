// Host cost of the KV cache manager: decode step, match, commit, eviction, free, memory. Tokens are
// random below 128,000. "Cold" cycles through prompts in random order so that their metadata does
// not stay in cache.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "helicore/kv/kv_cache_manager.h"
#include "helicore/kv/page_slab.h"
#include "helicore/kv/radix_tree.h"
#include "helicore/kv/sha256.h"

namespace helicore::kv {
namespace {

constexpr int32_t kBlock = 64;

KVCacheManagerConfig config_for(int64_t num_blocks, int32_t tokens_per_block = kBlock) {
  KVCacheManagerConfig config;
  config.tokens_per_block = tokens_per_block;
  config.cache_tiers = {HostCacheTierConfig{num_blocks * 64}};
  config.layers = {AttentionLayerConfig{.layer_id = 0, .buffers = {{"latent", 64}}}};
  config.max_util_for_resume = 1.0;
  return config;
}

std::vector<TokenId> random_tokens(size_t count, std::mt19937& random) {
  std::vector<TokenId> tokens(count);
  for (TokenId& token : tokens) token = static_cast<TokenId>(random() % 128000);
  return tokens;
}

void require(bool ok) {
  if (!ok) std::abort();
}

std::unique_ptr<KVCache> commit_sequence(KVCacheManager& manager, std::span<const TokenId> tokens) {
  auto cache = manager.create_kv_cache();
  require(cache->resume());
  require(cache->resize(static_cast<int64_t>(tokens.size())));
  cache->commit(tokens);
  return cache;
}

// One decode step: +1 token for every sequence, page tables in caller-owned rows, full blocks
// committed.
void decode_step(benchmark::State& state) {
  const auto batch = static_cast<size_t>(state.range(0));
  std::mt19937 random(1);
  KVCacheManager manager(config_for(static_cast<int64_t>(batch) * 256));
  std::vector<int32_t> rows(batch * 256);  // outlives the caches that fill it
  std::vector<std::unique_ptr<KVCache>> owned;
  std::vector<KVCache*> caches;
  std::vector<int32_t> lengths(batch);
  for (size_t i = 0; i < batch; ++i) {
    lengths[i] = static_cast<int32_t>(1024 + random() % 2048);
    owned.push_back(
        commit_sequence(manager, random_tokens(static_cast<size_t>(lengths[i]), random)));
    owned[i]->set_base_page_index_buf(0, LifeCycleId(0), std::span(rows).subspan(i * 256, 256));
    caches.push_back(owned[i].get());
  }
  const auto start = lengths;
  std::vector<TokenId> tokens(batch, 7);
  std::vector<uint8_t> results(batch);
  int32_t steps = 0;
  for (auto _ : state) {
    if (++steps == 8000) {  // rows are full: start over
      state.PauseTiming();
      steps = 1;
      for (size_t i = 0; i < batch; ++i) {
        owned[i].reset();
        owned[i] = commit_sequence(manager, random_tokens(static_cast<size_t>(start[i]), random));
        owned[i]->set_base_page_index_buf(0, LifeCycleId(0), std::span(rows).subspan(i * 256, 256));
        caches[i] = owned[i].get();
      }
      lengths = start;
      state.ResumeTiming();
    }
    for (int32_t& length : lengths) ++length;
    manager.resize_many(caches, lengths, {}, results);
    for (TokenId& token : tokens) token = (token * 5 + 1) % 128000;
    manager.commit_many(caches, tokens, {});
  }
}
BENCHMARK(decode_step)->Arg(64)->Arg(256)->Unit(benchmark::kMicrosecond);

// create + match (held) of a cached prompt, and the close that gives it back, cold.
void create_and_match(benchmark::State& state) {
  const auto length = static_cast<size_t>(state.range(0));
  const size_t num_prompts = std::max<size_t>(4, 1600000 / length);
  std::mt19937 random(2);
  KVCacheManager manager(config_for(static_cast<int64_t>(num_prompts * (length / kBlock + 2))));
  std::vector<std::vector<TokenId>> prompts;
  for (size_t i = 0; i < num_prompts; ++i) {
    prompts.push_back(random_tokens(length, random));
    commit_sequence(manager, prompts.back());
  }
  for (auto _ : state) {
    const auto& prompt = prompts[random() % num_prompts];
    auto cache = manager.create_kv_cache({.input_tokens = prompt});
    require(cache->num_committed_tokens() == static_cast<int32_t>(length));
    state.PauseTiming();
    cache.reset();
    state.ResumeTiming();
  }
}
BENCHMARK(create_and_match)->Arg(10048)->Arg(100032)->Unit(benchmark::kMicrosecond);

// Match only, with a side branch every 256 tokens.
void match_with_branches(benchmark::State& state) {
  const auto length = static_cast<size_t>(state.range(0));
  std::mt19937 random(3);
  KVCacheManager manager(config_for(8 * 4096));
  std::vector<std::vector<TokenId>> prompts;
  for (int i = 0; i < 8; ++i) {
    prompts.push_back(random_tokens(length, random));
    commit_sequence(manager, prompts.back());
    for (size_t at = 256; at < length; at += 256) {
      std::vector<TokenId> branch(prompts.back().begin(),
                                  prompts.back().begin() + static_cast<std::ptrdiff_t>(at));
      const auto ending = random_tokens(kBlock, random);
      auto cache = manager.create_kv_cache({.input_tokens = branch});
      require(cache->resume() && cache->resize(static_cast<int64_t>(at + kBlock)));
      cache->commit(ending);
    }
  }
  for (auto _ : state) {
    const int32_t found = manager.probe_reuse(prompts[random() % prompts.size()]);
    require(found == static_cast<int32_t>(length));
  }
}
BENCHMARK(match_with_branches)->Arg(100032)->Unit(benchmark::kMicrosecond);

// Commit of 64 new blocks at once, SHA-256 chain keys included.
void commit_64_blocks(benchmark::State& state) {
  const auto block = static_cast<int32_t>(state.range(0));
  std::mt19937 random(4);
  KVCacheManager manager(config_for(4096, block));
  const auto count = static_cast<size_t>(64 * block);
  for (auto _ : state) {
    state.PauseTiming();
    const auto tokens = random_tokens(count, random);
    auto cache = manager.create_kv_cache();
    require(cache->resume() && cache->resize(static_cast<int64_t>(count)));
    state.ResumeTiming();
    cache->commit(tokens);
    state.PauseTiming();
    cache.reset();
    state.ResumeTiming();
  }
}
BENCHMARK(commit_64_blocks)->Arg(16)->Arg(64)->Unit(benchmark::kMicrosecond)->Iterations(3000);

// Making room for 10,000 blocks in a full cache of 100,000, handing them out included.
void evict_10k_of_100k(benchmark::State& state) {
  const size_t sequence_blocks = 100;
  std::mt19937 random(5);
  KVCacheManager manager(config_for(100000, 16));
  for (auto _ : state) {
    state.PauseTiming();
    while (manager.storage_statistics()[0].free > 0) {
      commit_sequence(manager, random_tokens(sequence_blocks * 16, random));
    }
    auto cache = manager.create_kv_cache();
    require(cache->resume());
    state.ResumeTiming();
    require(cache->resize(10000 * 16));
    state.PauseTiming();
    cache.reset();
    state.ResumeTiming();
  }
}
BENCHMARK(evict_10k_of_100k)->Unit(benchmark::kMillisecond)->Iterations(40);

// One new block at a time in a full pool: each growth evicts one.
void evict_one_when_full(benchmark::State& state) {
  std::mt19937 random(6);
  KVCacheManager manager(config_for(100000, 16));
  while (manager.storage_statistics()[0].free > 0) {
    commit_sequence(manager, random_tokens(1600, random));
  }
  auto cache = manager.create_kv_cache();
  require(cache->resume());
  int64_t capacity = 0;
  for (auto _ : state) {
    capacity += 16;
    require(cache->resize(capacity));
  }
}
BENCHMARK(evict_one_when_full)->Unit(benchmark::kNanosecond)->Iterations(80000);

// 256 finished sequences of 2,048 tokens give their pages back.
void free_256_sequences(benchmark::State& state) {
  std::mt19937 random(7);
  KVCacheManager manager(config_for(256 * 40));
  for (auto _ : state) {
    state.PauseTiming();
    std::vector<std::unique_ptr<KVCache>> caches;
    for (int i = 0; i < 256; ++i) {
      caches.push_back(commit_sequence(manager, random_tokens(2048, random)));
    }
    state.ResumeTiming();
    for (auto& cache : caches) cache->close();
    state.PauseTiming();
    caches.clear();
    state.ResumeTiming();
  }
}
BENCHMARK(free_256_sequences)->Unit(benchmark::kMicrosecond)->Iterations(60);

// A random 2k-token prompt of a cache of this many blocks of 16 tokens.
void match_2k_by_cache_size(benchmark::State& state) {
  const int64_t num_blocks = state.range(0);
  std::mt19937 random(8);
  KVCacheManager manager(config_for(num_blocks, 16));
  std::vector<std::vector<TokenId>> prompts;
  while (manager.storage_statistics()[0].free >= 128) {
    auto tokens = random_tokens(2048, random);
    commit_sequence(manager, tokens);
    if (prompts.size() < 300) prompts.push_back(std::move(tokens));
  }
  for (auto _ : state) {
    benchmark::DoNotOptimize(manager.probe_reuse(prompts[random() % prompts.size()]));
  }
}
BENCHMARK(match_2k_by_cache_size)->Arg(10000)->Arg(100000)->Arg(1000000);

void sha256_of_one_block(benchmark::State& state) {
  std::vector<uint8_t> bytes(static_cast<size_t>(state.range(0)));
  for (auto _ : state) benchmark::DoNotOptimize(sha256(bytes));
  state.SetBytesProcessed(state.iterations() * state.range(0));
}
BENCHMARK(sha256_of_one_block)->Arg(104)->Arg(296);

// Bytes, not time: what one cached block of 16 tokens costs besides its slot.
void bytes_per_block(benchmark::State& state) {
  for (auto _ : state) benchmark::DoNotOptimize(state.iterations());
  state.counters["page_record"] = sizeof(PageRecord);
  state.counters["tree_node_16"] =
      sizeof(NodeRecord) + sizeof(Digest) + sizeof(PageId) + 16 * sizeof(TokenId);
}
BENCHMARK(bytes_per_block)->Iterations(1);

}  // namespace
}  // namespace helicore::kv

BENCHMARK_MAIN();
