// Drives a manager by bytes: a configuration and a sequence of calls, legal or not, with checks
// that need no expensive model. Random bytes make a property test, a fuzzer's bytes make a fuzz
// target. See operation_setup.h for the configuration.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "helicore/core/error.h"
#include "helicore/kv/introspection.h"
#include "helicore/kv/kv_cache_manager.h"
#include "helicore/kv/state_digest.h"
#include "kv/operation_selection.h"
#include "kv/operation_setup.h"
#include "kv/operation_upkeep.h"

namespace helicore::kv::testing {

// Checks after each call: all invariants; a call that threw or found no room left the whole state
// as it was; only the errors of misuse are thrown; what is committed is what was said; a prefix is
// found when it must be and never one that nobody committed; copies are ordered against each other.
// The manager must not be used once the driver is gone, but for its destructor.
class OperationDriver {
 public:
  // `fake`: the manager's device, when it is one.
  OperationDriver(KVCacheManager& manager, const DriverConfig& config, FakeDevice* fake,
                  ByteSource& source)
      : manager_(manager),
        is_plain_(config.is_plain),
        may_fail_(config.may_fail),
        fake_(fake),
        source_(source),
        upkeep_(manager, config.may_fail, source) {
    state().now_ns = [now = now_] { return *now; };
    if (fake_ != nullptr) fake_->set_on_stuck([this] { return complete_all(); });
  }
  ~OperationDriver() {
    if (fake_ != nullptr) fake_->set_on_stuck(nullptr);
  }
  OperationDriver(const OperationDriver&) = delete;
  OperationDriver& operator=(const OperationDriver&) = delete;

  void run(int max_operations) {
    for (int i = 0; i < max_operations && !source_.is_empty(); ++i) {
      step();
      check();
    }
    finish();
    check();
  }
  [[nodiscard]] int num_refused() const { return num_refused_; }
  [[nodiscard]] int num_no_room() const { return num_no_room_; }
  [[nodiscard]] int num_hits() const { return num_hits_; }

 private:
  struct Sequence {
    std::unique_ptr<KVCache> cache;
    int scope = 0;
    std::vector<TokenId> committed;
    PrefetchTicket ticket{};
    bool is_forked = false, was_resumed = false;  // forked: or a fork
  };
  struct StepStream {
    StreamHandle handle = 0;
    uint64_t submitted = 0;
    uint64_t completed = 0;
  };
  enum class Must { kEither, kThrow, kSucceed };

  [[noreturn]] void fail(const std::string& what) const { throw DriverFailure(what); }
  ManagerState& state() const { return Introspection::state(manager_); }
  uint64_t digest() const { return state_digest(state()); }
  uint64_t num_failures() const { return state().device->num_failures(); }
  // The next call has nothing to take in first: failed copies, retention that has run out.
  bool is_calm() const { return !state().has_new_failures() && !state().timers.any_due(*now_); }
  void check() const {
    Introspection::check(manager_);
    if (fake_ != nullptr && !fake_->violations().empty()) fail(fake_->violations().front());
  }

  // True when the call was done, false when it threw or found no room, and nothing has changed,
  // unless it may go a part of its way.
  template <typename Call>
  bool attempt(const char* what, Must must, const Call& call, bool may_go_part = false) {
    const uint64_t before = digest();
    const uint64_t failures = num_failures();
    bool is_calm = this->is_calm();
    bool done = false;
    bool threw = true;
    try {
      done = call();
      threw = false;
    } catch (const InvalidArgument&) {
    } catch (const LogicError&) {
    } catch (const ResourceBusy&) {
    } catch (const DataLost&) {
      if (!may_fail_) throw;
      is_calm = false;
    } catch (const OutOfMemory&) {
      if (!may_fail_) throw;
      is_calm = false;
    }
    is_calm = is_calm && failures == num_failures();
    if (must == Must::kSucceed && !done) fail(std::string(what) + ": was refused");
    if (must == Must::kThrow && !threw) fail(std::string(what) + ": misuse was accepted");
    if (!done && is_calm && !may_go_part && digest() != before) {
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
    const int operation = source_.below(59);
    if (operation < 4) return create();
    if (operation == 4) return probe();
    if (operation == 5) return clear();
    const bool waits = operation == 6 || operation == 7 || (operation > 7 && operation < 31);
    if (waits) finish_steps_that_a_call_may_wait_for();
    if (operation == 6) return batch();
    if (operation == 7) return wild_batch();
    if (operation == 32) return advance_clock();
    if (operation < 36 && operation > 32) return run_device();
    if (operation == 36) return poll();
    if (operation == 37) return pin();
    if (operation == 38) return drop();
    if (operation < 42 && operation > 38) return submit();
    if (operation < 45 && operation > 41) return complete();
    if (operation > 49 && operation < 57) return upkeep_.step();
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
    if (operation == 45) return cancel(*sequence);
    if (operation == 46) return plan_drop(*sequence);
    if (operation == 47) return wild_stream(*sequence);
    if (operation == 57) return set_scratch(*sequence);
    if (operation == 58) return select_any(*sequence);
    if (operation > 47) return prefetch(*sequence);
    close(*sequence);
  }

  void create() {
    if (sequences_.size() >= 8) return close(*pick());
    Sequence sequence;
    sequence.scope = source_.below(3);
    const auto tokens = random_tokens(2 * block());
    const bool is_wild = source_.one_in(16);
    const int priority = is_wild ? 101 : source_.one_in(3) ? source_.below(101) : kPriorityDefault;
    std::vector<RetentionRange> retention;
    if (source_.one_in(4)) retention.push_back(some_range(source_, block()));
    if (!retention.empty() && source_.one_in(2)) retention.push_back(some_range(source_, block()));
    const uint64_t failures = is_calm() ? num_failures() : UINT64_MAX;
    const int expected = manager_.probe_reuse(tokens, scope_of(sequence.scope));
    attempt("create_kv_cache", is_wild ? Must::kThrow : Must::kEither, [&] {
      sequence.cache = manager_.create_kv_cache({.reuse_scope = scope_of(sequence.scope),
                                                 .input_tokens = tokens,
                                                 .priority = priority,
                                                 .retention = retention});
      return true;
    });
    if (sequence.cache == nullptr) return;
    const int matched = sequence.cache->num_committed_tokens();
    if (failures == num_failures() && matched != expected) {
      fail("create_kv_cache found other tokens than probe_reuse");
    }
    check_match(sequence.scope, tokens, matched);
    num_hits_ += matched > 0 ? 1 : 0;
    sequence.committed.assign(tokens.begin(), tokens.begin() + matched);
    sequences_.push_back(std::move(sequence));
    if (state().has_optional && source_.one_in(2)) select(sequences_.back(), source_.byte());
  }

  void select(Sequence& sequence, int mask) {
    KVCache& cache = *sequence.cache;
    const OptionalSelection selection(cache, mask);
    const bool legal = cache.status() == CacheStatus::kSuspended && !sequence.was_resumed;
    attempt("select_optional_reuse", legal ? Must::kSucceed : Must::kThrow, [&] {
      cache.select_optional_reuse(selection.groups);
      return true;
    });
    if (legal) selection.check(cache);
  }

  void select_any(Sequence& sequence) {
    const int mask = source_.byte();
    if (mask < 224) return select(sequence, mask);
    const LifeCycleId none(mask % 2 == 0 ? -1 : static_cast<int32_t>(state().num_life_cycles));
    attempt("select_optional_reuse of no group", Must::kThrow, [&] {
      sequence.cache->select_optional_reuse({&none, 1});
      return true;
    });
  }

  void advance_clock() { *now_ += int64_t{source_.below(64)} * 1'000'000; }

  void run_device() {
    if (fake_ == nullptr) return;
    if (source_.one_in(4)) {
      (void)fake_->run_all();
    } else {
      (void)fake_->run_one();
    }
  }

  void poll() {
    for (Sequence& sequence : sequences_) {
      const bool was_complete = sequence.ticket.is_complete();
      if (was_complete && !sequence.ticket.is_done()) fail("a complete prefetch is not done");
      (void)sequence.ticket.is_done();
    }
  }

  void prefetch(Sequence& sequence) {
    const int level = source_.one_in(8) ? manager_.num_levels() - 4 * source_.below(2)
                                        : source_.below(manager_.num_levels());
    const bool legal = sequence.cache->status() == CacheStatus::kSuspended && level >= 0 &&
                       level < manager_.num_levels();
    attempt("prefetch", legal ? Must::kEither : Must::kThrow, [&] {
      sequence.ticket = sequence.cache->prefetch(level);
      return true;
    });
  }

  void cancel(Sequence& sequence) {
    sequence.ticket.cancel();
    if (fake_ != nullptr) (void)fake_->run_all();
    bool is_stuck = false;  // behind a step that is not done
    for (const StepStream& stream : streams_) is_stuck |= stream.completed < stream.submitted;
    if (fake_ != nullptr && !is_stuck && !sequence.ticket.is_done()) {
      fail("a cancelled prefetch goes on");
    }
  }

  void pin() {
    if (pins_.size() >= 3) {
      pins_.erase(pins_.begin() + source_.below(3));
      return;
    }
    const int scope = source_.below(3);
    const auto tokens = random_tokens(block());
    attempt("pin", Must::kEither, [&] {
      pins_.push_back(manager_.pin(tokens, scope_of(scope)));
      check_match(scope, tokens, pins_.back()->num_committed_tokens());
      return true;
    });
  }

  void plan_drop(Sequence& sequence) {
    if (plans_.size() >= 4) return drop();
    const bool legal = sequence.cache->commit_state() != CommitState::kAllowed;
    attempt("plan_committed_block_drop", legal ? Must::kEither : Must::kThrow, [&] {
      auto plan = sequence.cache->plan_committed_block_drop();
      if (plan != nullptr) plans_.push_back(std::move(plan));
      return true;
    });
  }

  void drop() {
    if (plans_.empty()) return;
    const auto at = plans_.begin() + source_.below(static_cast<int>(plans_.size()));
    if (source_.one_in(2)) {
      (*at)->drop();
      attempt("drop for the second time", Must::kThrow, [&] {
        (*at)->drop();
        return true;
      });
    }
    plans_.erase(at);
  }

  void submit() {
    if (streams_.size() < 3 && (streams_.empty() || source_.one_in(4))) {
      streams_.push_back({manager_.make_step_stream()});
    }
    StepStream& stream =
        streams_[static_cast<size_t>(source_.below(static_cast<int>(streams_.size())))];
    const uint64_t step = manager_.submit_step(stream.handle);
    if (step != ++stream.submitted) fail("submit_step gave another number than the next");
  }

  // What the executor's own thread would do while a call waits for it; a log that is to be replayed
  // has it before the call instead, for here it is one thread.
  bool complete_all() {
    bool any = false;
    for (StepStream& stream : streams_) {
      if (stream.completed == stream.submitted) continue;
      any = true;
      state().device->complete_step(stream.handle, stream.completed = stream.submitted);
    }
    return any;
  }
  void finish_steps_that_a_call_may_wait_for() {
    if (fake_ != nullptr && !manager_.is_recording()) return;
    for (StepStream& stream : streams_) {
      if (stream.completed == stream.submitted) continue;
      manager_.complete_step(stream.handle, stream.completed = stream.submitted);
    }
  }

  void complete() {
    for (StepStream& stream : streams_) {
      const auto open =
          static_cast<int>(std::min<uint64_t>(stream.submitted - stream.completed, 9));
      stream.completed += static_cast<uint64_t>(source_.below(open + 1));
      manager_.complete_step(stream.handle, stream.completed);
    }
  }

  // None, a number that means nothing on this machine, a step stream.
  std::optional<int64_t> some_stream() {
    if (streams_.empty() || source_.one_in(2)) return std::nullopt;
    return streams_[static_cast<size_t>(source_.below(static_cast<int>(streams_.size())))].handle;
  }

  void wild_stream(Sequence& sequence) {
    KVCache& cache = *sequence.cache;
    const int64_t none = source_.one_in(2) ? INT64_MIN : -100000;  // no step stream
    attempt("set_stream", Must::kThrow, [&] {
      cache.set_stream(none);
      return true;
    });
    attempt("resume with a bad stream", Must::kThrow, [&] { return cache.resume(none); });
    attempt("submit_step", Must::kThrow, [&] {
      (void)manager_.submit_step(none);
      return true;
    });
    if (streams_.empty()) return;
    const StepStream& stream = streams_.front();
    attempt("complete_step of no step", Must::kThrow, [&] {
      manager_.complete_step(stream.handle, stream.submitted + 1);
      return true;
    });
    attempt("set_stream", Must::kEither, [&] {
      cache.set_stream(some_stream().value_or(0));
      return true;
    });
  }

  void set_scratch(Sequence& sequence) {
    const bool is_enabled = source_.one_in(2);
    attempt("enable_swa_scratch_reuse", Must::kEither, [&] {
      sequence.cache->scratch().set_enabled(is_enabled);
      return true;
    });
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
    if (!sequences_.empty() || !pins_.empty()) {
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
    pins_.clear();
    manager_.clear_reusable_blocks();
    committed_.clear();
    cleared_ = true;
    for (int level = 0; level < manager_.num_levels(); ++level) {
      for (const PoolGroupStatistics& group : manager_.storage_statistics(level)) {
        if (group.free + group.pending != group.total) fail("slots leaked");
      }
    }
  }

  void resume(Sequence& sequence) {
    KVCache& cache = *sequence.cache;
    const bool legal = cache.status() == CacheStatus::kSuspended;
    const auto stream = some_stream();
    sequence.was_resumed |= attempt("resume", legal ? Must::kEither : Must::kThrow,
                                    [&] { return cache.resume(stream); });
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
    sequence.is_forked = true;
    Sequence child{nullptr, sequence.scope, sequence.committed, {}, true, sequence.was_resumed};
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
    // Forks of one batch that contradict each other: those that come first are served.
    const bool has_forks =
        std::count_if(chosen.begin(), chosen.end(), [](auto* each) { return each->is_forked; }) > 1;
    const bool done = attempt(
        "commit_many", Must::kEither,
        [&] {
          manager_.commit_many(caches, tokens, counts);
          return true;
        },
        has_forks);
    for (size_t i = 0, at = 0; i < chosen.size(); ++i) {
      const auto count = static_cast<size_t>(counts[i]);
      const auto before = static_cast<int32_t>(chosen[i]->committed.size());
      const bool is_served = caches[i]->num_committed_tokens() > before;
      if (done || (has_forks && is_served)) {
        after_commit(*chosen[i], std::span(tokens).subspan(at, count));
      }
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
        for (Sequence& each : sequences_) each.was_resumed |= each.cache->is_active();
    }
  }

  void finish() {
    sequences_.clear();
    pins_.clear();
    plans_.clear();
    for (const StepStream& stream : streams_) {
      manager_.complete_step(stream.handle, stream.submitted);
    }
    if (fake_ != nullptr) (void)fake_->run_all();
    int64_t in_use = 0;
    for (int level = 0; level < manager_.num_levels(); ++level) {
      for (const PoolGroupStatistics& group : manager_.storage_statistics(level)) {
        in_use += group.unavailable() - group.pending;
      }
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
  bool may_fail_;
  FakeDevice* fake_;
  ByteSource& source_;
  std::shared_ptr<int64_t> now_ = std::make_shared<int64_t>(1);
  OperationUpkeep upkeep_;
  std::vector<StepStream> streams_;
  std::vector<std::unique_ptr<std::vector<int32_t>>> all_rows_;  // outlive the caches
  std::vector<Sequence> sequences_;
  std::vector<std::unique_ptr<KVCache>> pins_;
  std::vector<std::unique_ptr<PlannedDrop>> plans_;
  std::vector<std::pair<int, std::vector<TokenId>>> committed_;  // (scope, tokens)
  bool cleared_ = false;
  int num_done_ = 0;
  int num_refused_ = 0;
  int num_no_room_ = 0;
  int num_hits_ = 0;
};

}  // namespace helicore::kv::testing
