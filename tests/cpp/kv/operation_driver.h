// Drives a manager by bytes: a configuration and a sequence of calls, legal or not, with checks
// that need no expensive model. Random bytes make a property test, a fuzzer's bytes make a fuzz
// target.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "helicore/core/error.h"
#include "helicore/kv/introspection.h"
#include "helicore/kv/kv_cache_manager.h"
#include "helicore/kv/state_digest.h"

namespace helicore::kv::testing {

// Zeros after its end.
class ByteSource {
 public:
  explicit ByteSource(std::span<const uint8_t> bytes) : bytes_(bytes) {}
  [[nodiscard]] bool is_empty() const { return bytes_.empty(); }
  uint8_t byte() {
    if (bytes_.empty()) return 0;
    const uint8_t value = bytes_[0];
    bytes_ = bytes_.subspan(1);
    return value;
  }
  int below(int bound) { return bound <= 1 ? 0 : byte() % bound; }
  bool one_in(int n) { return below(n) == n - 1; }
  // Mostly small, sometimes at the edges of 32 and 64 bits.
  int64_t wild() {
    switch (below(8)) {
      case 0:
        return -1 - below(4);
      case 1:
        return INT32_MAX - below(4);
      case 2:
        return INT64_MAX - below(4);
      case 3:
        return INT64_MIN + below(4);
      default:
        return below(256);
    }
  }

 private:
  std::span<const uint8_t> bytes_;
};

// What the driver found wrong.
class DriverFailure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct DriverConfig {
  KVCacheManagerConfig config{};
  bool is_plain = true;  // one level of full attention: what was committed and not evicted is found
};

// Asks for more than a build may support and takes the nearest configuration that it accepts.
inline DriverConfig driver_config(ByteSource& source) {
  constexpr int32_t kBlockSizes[] = {1, 2, 3, 4, 8, 16};
  constexpr double kUtils[] = {1.0, 0.97, 0.5};
  const int32_t tpb = kBlockSizes[source.below(6)];
  const int num_blocks = 2 + source.below(30);
  const int num_layers = 1 + source.below(3);
  const int wishes = source.byte();
  const int window = 1 + source.below(40);
  const int sinks = source.below(4);
  const auto build = [&](bool levels, bool ssm, bool windows, bool scratch) {
    KVCacheManagerConfig config;
    config.tokens_per_block = tpb;
    int64_t bytes = 0;
    for (int i = 0; i < num_layers; ++i) {
      AttentionLayerConfig layer{.layer_id = i, .buffers = {{"k", int64_t{512} * tpb}}};
      if (wishes >> i & 1) layer.buffers.push_back({"v", int64_t{512} * tpb});
      if (i > 0 && (wishes & 8) != 0) layer.cache_domain = CacheDomain::kDraft;
      if (windows && i % 2 == 1) {
        layer.sliding_window_size = window;
        layer.num_sink_tokens = sinks;
      }
      bytes += 512 * tpb * static_cast<int64_t>(layer.buffers.size());
      config.layers.push_back(std::move(layer));
    }
    if (ssm) {
      config.layers.push_back(SsmLayerConfig{.layer_id = 9, .buffers = {{"state", 1024}}});
      config.commit_min_snapshot = true;
    }
    if (scratch) config.swa_scratch_reuse = SwaScratchReuseConfig{.max_rewind_len = sinks};
    config.cache_tiers = {HostCacheTierConfig{bytes * num_blocks}};
    if (levels) {
      config.cache_tiers.push_back(HostCacheTierConfig{bytes * num_blocks * 2});
      if ((wishes & 32) != 0) {
        config.cache_tiers.push_back(DiskCacheTierConfig{
            bytes * num_blocks * 3, std::filesystem::temp_directory_path().string()});
      }
    }
    return config;
  };
  DriverConfig result;
  const bool levels = (wishes & 16) != 0, ssm = (wishes & 64) != 0, windows = (wishes & 128) != 0;
  result.config = build(levels, ssm, windows, windows && sinks == 3);
  result.is_plain = !levels && !ssm && !windows;
  const int flags = source.byte();
  result.config.enable_partial_reuse = (flags & 1) == 0;
  result.config.reuse_match_backoff = (flags & 2) != 0 ? 1 + (flags >> 6) : 0;
  result.config.max_util_for_resume = kUtils[(flags >> 2) % 3];
  result.config.event_buffer_size = (flags & 16) != 0 ? 16 : 0;
  result.config.enable_stats = (flags & 32) == 0;
  return result;
}

// Checks after each call: all invariants; a call that threw or found no room left the whole state
// as it was; only the errors of misuse are thrown; what is committed is what was said; a prefix is
// found when it must be and never one that nobody committed.
class OperationDriver {
 public:
  OperationDriver(KVCacheManager& manager, bool is_plain, ByteSource& source)
      : manager_(manager), is_plain_(is_plain), source_(source) {}

  void run(int max_operations) {
    for (int i = 0; i < max_operations && !source_.is_empty(); ++i) {
      step();
      Introspection::check(manager_);
    }
    finish();
    Introspection::check(manager_);
  }
  [[nodiscard]] int num_refused() const { return num_refused_; }
  [[nodiscard]] int num_no_room() const { return num_no_room_; }
  [[nodiscard]] int num_hits() const { return num_hits_; }

 private:
  struct Sequence {
    std::unique_ptr<KVCache> cache;
    int scope = 0;
    std::vector<TokenId> committed;
  };
  enum class Must { kEither, kThrow, kSucceed };

  static ReuseScope scope_of(int scope) {
    ReuseScope result;
    if (scope == 1) result.salt = std::string("tenant");
    if (scope == 2) result.lora_id = 3;
    return result;
  }
  [[noreturn]] void fail(const std::string& what) const { throw DriverFailure(what); }
  uint64_t digest() const { return state_digest(Introspection::state(manager_)); }

  // True when the call was done, false when it threw or found no room, and nothing has changed.
  template <typename Call>
  bool attempt(const char* what, Must must, const Call& call) {
    const uint64_t before = digest();
    bool done = false;
    bool threw = true;
    try {
      done = call();
      threw = false;
    } catch (const InvalidArgument&) {
    } catch (const LogicError&) {
    } catch (const ResourceBusy&) {
    }
    if (must == Must::kSucceed && !done) fail(std::string(what) + ": was refused");
    if (must == Must::kThrow && !threw) fail(std::string(what) + ": misuse was accepted");
    if (!done && digest() != before) {
      fail(std::string(what) + (threw ? ": threw" : ": found no room") + " and changed the state");
    }
    (done ? num_done_ : threw ? num_refused_ : num_no_room_) += 1;
    return done;
  }

  std::vector<TokenId> random_tokens(int max_length) {
    std::vector<TokenId> tokens;
    if (!committed_.empty() && !source_.one_in(3)) {
      const auto& [scope, known] = committed_[static_cast<size_t>(
          source_.below(static_cast<int>(std::min<size_t>(committed_.size(), 255))))];
      tokens.assign(known.begin(),
                    known.begin() + std::min<std::ptrdiff_t>(
                                        source_.byte(), static_cast<std::ptrdiff_t>(known.size())));
    }
    for (int i = source_.below(max_length + 1); i > 0; --i) tokens.push_back(source_.below(3));
    return tokens;
  }

  Sequence* pick() {
    if (sequences_.empty()) return nullptr;
    return &sequences_[static_cast<size_t>(source_.below(static_cast<int>(sequences_.size())))];
  }
  int block() const { return manager_.tokens_per_block(); }

  void step() {
    const int operation = source_.below(32);
    if (operation < 4) return create();
    if (operation == 4) return probe();
    if (operation == 5) return clear();
    if (operation == 6) return batch();
    if (operation == 7) return wild_batch();
    Sequence* sequence = pick();
    if (sequence == nullptr) return create();
    if (operation < 12) return resume(*sequence);
    if (operation < 14) return suspend(*sequence);
    if (operation < 20) return resize(*sequence);
    if (operation < 26) return commit(*sequence);
    if (operation == 26) return truncate(*sequence);
    if (operation == 27) return fork(*sequence);
    if (operation == 28) return stop(*sequence);
    if (operation == 29) return wild(*sequence);
    if (operation == 30) return set_row(*sequence);
    close(*sequence);
  }

  void create() {
    if (sequences_.size() >= 8) return close(*pick());
    Sequence sequence;
    sequence.scope = source_.below(3);
    const auto tokens = random_tokens(2 * block());
    const bool is_wild = source_.one_in(16);
    const int priority = is_wild ? 101 : source_.one_in(3) ? source_.below(101) : kPriorityDefault;
    const int expected = manager_.probe_reuse(tokens, scope_of(sequence.scope));
    attempt("create_kv_cache", is_wild ? Must::kThrow : Must::kEither, [&] {
      sequence.cache = manager_.create_kv_cache(
          {.reuse_scope = scope_of(sequence.scope), .input_tokens = tokens, .priority = priority});
      return true;
    });
    if (sequence.cache == nullptr) return;
    const int matched = sequence.cache->num_committed_tokens();
    if (matched != expected) fail("create_kv_cache found other tokens than probe_reuse");
    check_match(sequence.scope, tokens, matched);
    num_hits_ += matched > 0 ? 1 : 0;
    sequence.committed.assign(tokens.begin(), tokens.begin() + matched);
    sequences_.push_back(std::move(sequence));
  }

  void probe() {
    const int scope = source_.below(3);
    const auto tokens = random_tokens(2 * block());
    check_match(scope, tokens, manager_.probe_reuse(tokens, scope_of(scope)));
  }

  // Between the full blocks that must be there and the longest prefix that anyone committed.
  void check_match(int scope, const std::vector<TokenId>& tokens, int matched) const {
    int longest = 0;
    int certain = 0;
    const bool keeps_all = is_plain_ && !cleared_ && manager_.stats().evicted_blocks == 0;
    for (const auto& [known_scope, known] : committed_) {
      if (known_scope != scope) continue;
      const auto end = std::mismatch(known.begin(), known.end(), tokens.begin(), tokens.end());
      const int common = static_cast<int>(end.first - known.begin());
      longest = std::max(longest, common);
      certain = std::max(certain, common - common % block());
    }
    const auto backed_off = [&](int length) {
      length = std::max(0, length - manager_.init_config().reuse_match_backoff);
      return manager_.init_config().enable_partial_reuse ? length : length - length % block();
    };
    if (matched > backed_off(longest)) fail("a prefix was found that nobody committed");
    if (keeps_all && matched < backed_off(certain)) fail("a committed prefix was not found");
  }

  void clear() {
    if (!sequences_.empty()) {
      attempt("clear_reusable_blocks", Must::kThrow, [&] {
        manager_.clear_reusable_blocks();
        return true;
      });
      attempt("shutdown", Must::kThrow, [&] {
        manager_.shutdown();
        return true;
      });
    }
    if (!source_.one_in(8)) return;
    sequences_.clear();
    manager_.clear_reusable_blocks();
    committed_.clear();
    cleared_ = true;
    for (const PoolGroupStatistics& group : manager_.storage_statistics()) {
      if (group.free + group.pending != group.total) fail("slots leaked");
    }
  }

  void resume(Sequence& sequence) {
    KVCache& cache = *sequence.cache;
    const bool legal = cache.status() == CacheStatus::kSuspended;
    attempt("resume", legal ? Must::kEither : Must::kThrow, [&] { return cache.resume(); });
  }

  void suspend(Sequence& sequence) {
    KVCache& cache = *sequence.cache;
    attempt("suspend", cache.is_active() ? Must::kEither : Must::kThrow, [&] {
      cache.suspend();
      return true;
    });
  }

  void resize(Sequence& sequence) {
    KVCache& cache = *sequence.cache;
    const int history = cache.history_length() + (source_.one_in(4) ? source_.below(block()) : 0);
    const int capacity = history + source_.below(3 * block() + 1);
    attempt("resize", cache.is_active() ? Must::kEither : Must::kThrow,
            [&] { return cache.resize(capacity, history); });
  }

  void commit(Sequence& sequence) {
    KVCache& cache = *sequence.cache;
    const int room = cache.capacity() - cache.num_committed_tokens();
    std::vector<TokenId> tokens;
    for (int i = source_.below(room + 1); i > 0; --i) tokens.push_back(source_.below(3));
    const bool is_end = source_.one_in(16);
    const bool legal = cache.is_active() && cache.commit_state() == CommitState::kAllowed;
    const bool done = attempt("commit", legal ? Must::kEither : Must::kThrow, [&] {
      cache.commit(tokens, is_end);
      return true;
    });
    if (done) after_commit(sequence, tokens);
  }

  void after_commit(Sequence& sequence, std::span<const TokenId> tokens) {
    sequence.committed.insert(sequence.committed.end(), tokens.begin(), tokens.end());
    if (sequence.cache->committed_tokens() != sequence.committed) {
      fail("committed_tokens are not those that were committed");
    }
    committed_.emplace_back(sequence.scope, sequence.committed);
  }

  void truncate(Sequence& sequence) {
    KVCache& cache = *sequence.cache;
    const int least = cache.num_committed_tokens();
    const int length = least + source_.below(cache.capacity() - least + 1);
    const bool done = attempt("truncate", is_plain_ ? Must::kSucceed : Must::kEither, [&] {
      cache.truncate(length);
      return true;
    });
    if (done && cache.capacity() != length) fail("truncate did not set the capacity");
  }

  void fork(Sequence& sequence) {
    if (sequences_.size() >= 10) return;
    Sequence child{nullptr, sequence.scope, sequence.committed};
    attempt("fork", is_plain_ ? Must::kSucceed : Must::kEither, [&] {
      child.cache = sequence.cache->fork();
      return true;
    });
    if (child.cache == nullptr) return;
    if (child.cache->committed_tokens() != child.committed) fail("a fork has other tokens");
    sequences_.push_back(std::move(child));
  }

  void stop(Sequence& sequence) { sequence.cache->stop_committing(); }

  void close(Sequence& sequence) {
    if (source_.one_in(2)) {
      KVCache& cache = *sequence.cache;
      cache.close();
      cache.close();
      attempt("resume of a closed cache", Must::kThrow, [&] { return cache.resume(); });
    }
    sequences_.erase(sequences_.begin() + (&sequence - sequences_.data()));
  }

  void set_row(Sequence& sequence) {
    KVCache& cache = *sequence.cache;
    const int size = source_.one_in(4) ? source_.below(4) : 64;
    const int group = source_.one_in(16) ? 99 : 0;
    auto row = std::make_unique<std::vector<int32_t>>(static_cast<size_t>(size));
    const bool legal = group == 0 && size >= cache.num_blocks();
    attempt("set_base_page_index_buf", legal ? Must::kEither : Must::kThrow, [&] {
      cache.set_base_page_index_buf(0, LifeCycleId(group), std::span(*row));
      return true;
    });
    all_rows_.push_back(std::move(row));
  }

  // Arguments from the edges of their types.
  void wild(Sequence& sequence) {
    KVCache& cache = *sequence.cache;
    const int64_t a = source_.wild();
    switch (source_.below(4)) {
      case 0: {
        const bool bad = a < cache.num_committed_tokens() || a > cache.capacity();
        attempt("truncate", bad ? Must::kThrow : Must::kEither, [&] {
          cache.truncate(a);
          return true;
        });
        return;
      }
      case 1: {
        const int64_t history = source_.wild();
        const bool bad = history < cache.history_length() || a < history;
        attempt("resize", bad ? Must::kThrow : Must::kEither,
                [&] { return cache.resize(a, history); });
        return;
      }
      case 2: {
        const std::vector<TokenId> tokens = {0, -1 - source_.below(3)};
        attempt("commit of negative tokens", Must::kThrow, [&] {
          cache.commit(tokens);
          return true;
        });
        return;
      }
      default: {
        const std::vector<TokenId> tokens(
            static_cast<size_t>(cache.capacity() - cache.num_committed_tokens() + 1), 1);
        attempt("commit beyond the capacity", Must::kThrow, [&] {
          cache.commit(tokens);
          return true;
        });
      }
    }
  }

  void batch() {
    std::vector<KVCache*> caches;
    std::vector<Sequence*> chosen;
    for (Sequence& sequence : sequences_) {
      const KVCache& cache = *sequence.cache;
      if (!cache.is_active() || cache.commit_state() != CommitState::kAllowed) continue;
      caches.push_back(sequence.cache.get());
      chosen.push_back(&sequence);
    }
    std::vector<int32_t> capacities, counts, lengths;
    for (const KVCache* cache : caches) {
      capacities.push_back(cache->history_length() + source_.below(2 * block() + 1));
    }
    std::vector<uint8_t> results(caches.size());
    attempt("resize_many", Must::kEither, [&] {
      manager_.resize_many(caches, capacities, {}, results);
      return true;
    });
    std::vector<TokenId> tokens;
    for (const KVCache* cache : caches) {
      counts.push_back(source_.below(cache->capacity() - cache->num_committed_tokens() + 1));
      for (int i = 0; i < counts.back(); ++i) tokens.push_back(source_.below(2));
    }
    const bool done = attempt("commit_many", Must::kEither, [&] {
      manager_.commit_many(caches, tokens, counts);
      return true;
    });
    for (size_t i = 0, at = 0; done && i < chosen.size(); ++i) {
      const auto count = static_cast<size_t>(counts[i]);
      after_commit(*chosen[i], std::span(tokens).subspan(at, count));
      at += count;
    }
    for (const KVCache* cache : caches) lengths.push_back(cache->num_committed_tokens());
    if (!source_.one_in(3)) return;
    attempt("truncate_many", is_plain_ ? Must::kSucceed : Must::kEither, [&] {
      manager_.truncate_many(caches, lengths);
      return true;
    });
  }

  // A null, a cache twice, lengths that do not fit, caches in the wrong state.
  void wild_batch() {
    std::vector<KVCache*> caches;
    for (Sequence& sequence : sequences_) caches.push_back(sequence.cache.get());
    const int how = source_.below(4);
    if (how == 0) caches.push_back(nullptr);
    if (how == 1 && !caches.empty()) caches.push_back(caches.front());
    const bool bad = how == 0 || (how == 1 && !caches.empty()) || how == 2;
    std::vector<uint8_t> results(caches.size());
    std::vector<int32_t> numbers(caches.size() + (how == 2 ? 1 : 0),
                                 static_cast<int32_t>(source_.wild()));
    const Must must = bad ? Must::kThrow : Must::kEither;
    switch (source_.below(4)) {
      case 0:
        attempt("resize_many", must, [&] {
          manager_.resize_many(caches, numbers, {}, results);
          return true;
        });
        return;
      case 1:
        attempt("truncate_many", must, [&] {
          manager_.truncate_many(caches, numbers);
          return true;
        });
        return;
      case 2: {
        std::vector<TokenId> tokens(caches.size() + 1, 1);  // one too many
        attempt("commit_many", Must::kThrow, [&] {
          manager_.commit_many(caches, tokens, {});
          return true;
        });
        return;
      }
      default:
        if (how == 2) results.resize(numbers.size());
        attempt("resume_many", must, [&] {
          manager_.resume_many(caches, std::nullopt, results);
          return true;
        });
    }
  }

  void finish() {
    sequences_.clear();
    int64_t in_use = 0;
    for (const PoolGroupStatistics& group : manager_.storage_statistics()) {
      in_use += group.unavailable() - group.pending;
    }
    if (in_use != 0) fail("pages stay in use after the last cache");
    if (!source_.one_in(2)) return;
    manager_.shutdown();
    attempt("create_kv_cache after shutdown", Must::kThrow, [&] {
      (void)manager_.create_kv_cache({});
      return true;
    });
  }

  KVCacheManager& manager_;
  bool is_plain_;
  ByteSource& source_;
  std::vector<std::unique_ptr<std::vector<int32_t>>> all_rows_;  // outlive the caches
  std::vector<Sequence> sequences_;
  std::vector<std::pair<int, std::vector<TokenId>>> committed_;  // (scope, tokens)
  bool cleared_ = false;
  int num_done_ = 0;
  int num_refused_ = 0;
  int num_no_room_ = 0;
  int num_hits_ = 0;
};

}  // namespace helicore::kv::testing
