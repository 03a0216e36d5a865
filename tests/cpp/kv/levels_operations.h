// Random operations on a manager of several levels, with an oracle for the bytes, for what may be
// found again, for all-or-nothing, for leaks, and for who can be resumed. `levels_setups.h` has the
// configurations.
#pragma once

#include <algorithm>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kv/levels_upkeep.h"

namespace helicore::kv::testing {

class LevelsWorld final : public LevelsUpkeep {
 public:
  using LevelsUpkeep::LevelsUpkeep;

  // The first difference within `num_operations`, or nothing.
  std::optional<std::string> run(int num_operations) {
    for (int i = 0; i < num_operations && !difference_; ++i) {
      last_ = "none";
      try {
        step();
        look();
        look_at_upkeep();
      } catch (const std::exception& error) {
        differ(std::string("thrown: ") + error.what());
      }
      ++num_operations_;
      if (difference_) {
        *difference_ += " (operation " + std::to_string(i) + ", " + last_ + ")";
      }
    }
    return difference_;
  }

  // Closes everything; every slot of every level must be free then.
  std::optional<std::string> finish() {
    try {
      close_all();
      if (!shared_ && !difference_) check_empty();
    } catch (const std::exception& error) {
      differ(std::string("thrown at the end: ") + error.what());
    }
    return difference_;
  }

  // Caches may outlive a failed run only if their work is done.
  void abandon() {
    calm();
    for (Sequence& s : sequences_) {
      try {
        s.cache->close();
      } catch (const std::exception&) {
      }
    }
    unpin_all();
    calm();
    sequences_.clear();
  }

 private:
  // ---- operations ----
  Tokens random_tokens() {
    Tokens tokens;
    if (!past_.empty() && below(4) != 0) {
      tokens = past_[static_cast<size_t>(below(static_cast<int>(past_.size())))];
      if (chance(50)) tokens.resize(static_cast<size_t>(below(int(tokens.size()) + 1)));
    }
    for (int i = below(3 * block_ + 2); i > 0; --i) tokens.push_back(below(3));
    if (tokens.size() > size_t(max_length_)) tokens.resize(size_t(max_length_));
    past_.push_back(tokens);
    if (past_.size() > 30) past_.erase(past_.begin());
    return tokens;
  }

  void step() {
    if (chance(40)) tick();
    if (chance(20)) return upkeep();
    const int operation = below(100);
    if (sequences_.size() < 2 || (operation < 10 && sequences_.size() < 7)) return create();
    if (operation < 14) return probe();
    if (operation < 15) return chance(30) ? clear() : refuse_clear();
    if (operation < 17) return shared_ ? probe() : bounce();
    const auto at = static_cast<size_t>(below(int(sequences_.size())));
    Sequence& s = sequences_[at];
    if (operation < 21) return fork(at);
    if (operation < 26) return close(at);
    if (operation < 28) return stop(s);
    if (operation < 32) return truncate(s);
    if (operation < 36) return batch();
    if (operation < 40) return poll(s);
    if (!s.cache->is_active()) return operation < 46 ? prefetch(s) : resume(s);
    if (operation < 48) return suspend(s);
    if (operation < 68) return resize(s);
    return advance(s);
  }

  void set_plan(Sequence& s, Tokens plan) {
    s.plan = std::move(plan);
    s.lineage = Lineage(static_cast<uint64_t>(s.scope));
    s.lineage.assign(s.plan);
  }
  void extend(Sequence& s, int32_t length) {
    while (int32_t(s.plan.size()) < length) {
      s.plan.push_back(below(3));
      s.lineage.push(s.plan.back());
    }
  }
  void note_committed(Sequence& s, bool stopped) {
    if (shared_) return;
    note_worth(s, s.noted, stopped);
    s.noted = s.cache->num_committed_tokens();
    const auto n = static_cast<size_t>(s.cache->num_committed_tokens());
    const std::span<const TokenId> tokens = std::span(s.plan).first(n);
    committed_[s.scope].insert(tokens);
    const size_t whole = n - n % static_cast<size_t>(block_);
    shown_[s.scope].insert(tokens.first(stopped && setup_.partial ? n : whole));
  }

  void create() {
    last_ = "create";
    Sequence s;
    s.scope = below(kNumScopes);
    s.serial = ++num_sequences_;
    Tokens plan = random_tokens();
    Tokens prompt = plan;
    if (chance(50)) prompt.resize(static_cast<size_t>(below(int(prompt.size()) + 1)));
    const int32_t probed = manager_.probe_reuse(prompt, scope_of(s.scope));
    s.worth = random_worth();
    s.cache = manager_.create_kv_cache({.reuse_scope = scope_of(s.scope),
                                        .input_tokens = prompt,
                                        .priority = s.worth.base,
                                        .retention = s.worth.ranges});
    const int32_t matched = s.cache->num_committed_tokens();
    if (!shared_ && !loses() && matched != probed) differ("probe and create disagree");
    check_depth(prompt, s.scope, matched);
    set_plan(s, std::move(plan));
    s.written = matched;
    s.noted = matched;
    note_worth(s, INT32_MAX, true);
    counts_.matched += matched;
    if (!streams_.empty()) s.stream = streams_[static_cast<size_t>(below(3))];
    sequences_.push_back(std::move(s));
  }

  void check_depth(const Tokens& prompt, int scope, int32_t depth) {
    if (shared_) return;
    const int32_t most = committed_[scope].longest(prompt);
    if (depth > most) {
      differ("found " + std::to_string(depth) + " tokens, committed were " + std::to_string(most));
    }
    if (!setup_.roomy || loses() || manager_.stats().evicted_blocks > 0) return;
    int32_t exact = std::max(0, shown_[scope].longest(prompt) - setup_.backoff);
    if (!setup_.partial) exact -= exact % block_;
    ++counts_.exact;
    if (depth != exact) {
      differ("found " + std::to_string(depth) + " tokens, shown are " + std::to_string(exact));
    }
  }

  void probe() {
    last_ = "probe";
    const int scope = below(kNumScopes);
    const Tokens tokens = random_tokens();
    check_depth(tokens, scope, manager_.probe_reuse(tokens, scope_of(scope)));
  }

  void refuse_clear() {
    last_ = "refused clear";
    bool refused = false;
    try {
      manager_.clear_reusable_blocks();
    } catch (const ResourceBusy&) {
      refused = true;
    }
    if (!refused) differ("clear_reusable_blocks did not refuse open caches");
  }
  void clear() {
    if (shared_) return;
    last_ = "clear";
    close_all();
    if (!difference_) check_empty();
  }
  void close_all() {
    unpin_all();
    while (!sequences_.empty() && !difference_) {
      if (sequences_.back().cache->is_lost()) {
        sequences_.back().cache->close();
        sequences_.pop_back();
      } else {
        close(sequences_.size() - 1);
      }
    }
    calm();
  }
  void check_empty() {
    manager_.clear_reusable_blocks();
    committed_.clear();
    shown_.clear();
    worths_.clear();
    calm();
    look();
    for (int level = 0; level < manager_.num_levels(); ++level) {
      for (const PoolGroupStatistics& group : manager_.storage_statistics(level)) {
        if (group.free == group.total && group.evictable == 0 && group.pending == 0) continue;
        differ("level " + std::to_string(level) + " has " + std::to_string(group.free) + " of " +
               std::to_string(group.total) + " slots free, nothing is open");
      }
    }
    const ManagerState& state = Introspection::state(manager_);
    if (state.store.pages().num_in_use() != 0) differ("pages leaked");
    if (state.tree.num_nodes() != 0) differ("nodes leaked");
  }

  bool resume_as(Sequence& s, bool may_change_stream) {
    const auto pages = Introspection::pages(*s.cache);
    const std::vector<PageHandle> before(pages.begin(), pages.end());
    StreamHandle stream = s.stream;
    if (may_change_stream && !streams_.empty()) stream = streams_[static_cast<size_t>(below(3))];
    const StreamHandle old = std::exchange(s.stream, stream);
    if (device_ != nullptr) s.failures = device_->num_failures();
    if (!attempt(s, "resume", [&] { return s.cache->resume(stream); })) {
      s.stream = old;
      return false;
    }
    after_resume(s, before);
    return true;
  }
  void after_resume(Sequence& s, const std::vector<PageHandle>& before) {
    std::vector<RowCell> cells;  // what other policies than REQUIRED did not keep is computed again
    const auto lcs = static_cast<int32_t>(manager_.num_layer_groups());
    for (size_t i = 0; i < before.size(); ++i) {
      const LifeCycleId lc(static_cast<int32_t>(i) % lcs);
      const int32_t block = static_cast<int32_t>(i) / lcs;
      const bool may_be_empty = manager_.life_cycle(lc).policy == ReusePolicy::kOptional &&
                                !(Introspection::pages(*s.cache)[i] == before[i]);
      if (!before[i].is_null() && !may_be_empty) continue;
      const int32_t end = std::min(s.written, (block + 1) * block_);
      engine_.rows(*s.cache, lc, s.lineage, {block * block_, end}, cells);
    }
    if (!cells.empty()) launch(s, std::move(cells), true);
    s.must_resize = false;
    s.is_first = false;
    check_rows(s);
  }
  void resume(Sequence& s) { (void)resume_as(s, true); }

  void suspend(Sequence& s) {
    last_ = "suspend";
    check_rows(s);
    s.cache->suspend();
  }

  void resize(Sequence& s) {
    const int32_t history = s.cache->history_length();
    int32_t capacity = history + below(4 * block_ + 1);
    if (chance(5)) capacity = history + below(2 * max_length_);
    int32_t new_history = history;
    if (s.cache->capacity() == 0 && !setup_.roomy && chance(30)) {
      // Rows come from elsewhere: only what the windows keep.
      capacity = new_history = below(max_length_) + 1;
      if (!attempt(s, "resize of a transfer",
                   [&] { return s.cache->resize(capacity, new_history); })) {
        return;
      }
      extend(s, capacity);
      write_rows(s, 0, capacity);
      return;
    }
    if (!has_state_ && chance(30)) {
      const int32_t most = std::min(s.written, capacity);
      if (most > history) new_history += below(most - history + 1);
    }
    if (attempt(s, "resize", [&] { return s.cache->resize(capacity, new_history); })) {
      after_resize(s);
    }
  }
  void after_resize(Sequence& s) {
    s.must_resize = false;
    s.written = std::min(s.written, s.cache->capacity());
    check_rows(s);
  }

  // Writes the next rows and says how many tokens to commit.
  int32_t write_next(Sequence& s) {
    const int32_t end = s.cache->capacity();
    check_rows(s);
    if (!s.must_resize && s.written < end) {
      const int32_t to = chance(50) ? end : s.written + below(end - s.written + 1);
      extend(s, to);
      if (to > s.written) write_rows(s, s.written, to);
    }
    const int32_t most = s.must_resize ? s.cache->history_length() : s.written;
    const int32_t open = most - s.cache->num_committed_tokens();
    int32_t count = chance(50) ? open : below(open + 1);
    if (has_state_ && count < open && !s.must_resize) {
      // The state is that of the last row: history says so before anything looks at it.
      const int64_t refused = counts_.refused;
      if (!attempt(s, "history", [&] { return s.cache->resize(std::nullopt, s.written); })) {
        if (!s.cache->is_lost() && counts_.refused == refused) {
          differ("a longer history needs no room: " +
                 describe(s.cache->last_failure().value_or(NoRoom{})));
        }
        count = open;
      }
    }
    return count;
  }

  void advance(Sequence& s) {
    if (!s.may_commit && !s.must_resize && s.written < s.cache->capacity()) {
      last_ = "write";
      extend(s, s.cache->capacity());
      const int32_t from = s.written;
      check_rows(s);
      write_rows(s, from, s.cache->capacity());
      if (has_state_) {
        (void)attempt(s, "history", [&] { return s.cache->resize(std::nullopt, s.written); });
      }
      return;
    }
    if (!s.may_commit) return;
    const int32_t count = write_next(s);
    const auto from = static_cast<size_t>(s.cache->num_committed_tokens());
    const bool is_end = chance(6);
    last_ = is_end ? "last commit" : "commit";
    try {
      s.cache->commit(std::span(s.plan).subspan(from, static_cast<size_t>(count)), is_end);
    } catch (const DataLost&) {
      if (!s.cache->is_lost()) differ("DataLost without a loss");
      return;
    }
    if (is_end) s.may_commit = false;
    if (is_end && has_state_) s.must_resize = true;  // the state may have moved into the tree
    after_commit(s);
  }
  void after_commit(Sequence& s) {
    note_committed(s, !s.may_commit);
    const Tokens tokens = s.cache->committed_tokens();
    if (!std::equal(tokens.begin(), tokens.end(), s.plan.begin())) differ("committed tokens");
    if (s.may_commit || !has_state_) return check_rows(s);
    suspend_for_good(s);
  }
  // After the end of a sequence with a recurrent state nothing may be written.
  void suspend_for_good(Sequence& s) {
    std::vector<RowCell> cells;
    engine_.rows(*s.cache, s.lineage, {0, s.written}, cells);
    launch(s, std::move(cells), false);
    for (size_t i = 0; i < sequences_.size(); ++i) {
      if (sequences_[i].serial == s.serial) return close(i);
    }
  }

  void stop(Sequence& s) {
    last_ = "stop_committing";
    s.cache->stop_committing();
    s.may_commit = false;
    note_committed(s, true);
    check_rows(s);
  }

  void truncate(Sequence& s) {
    last_ = "truncate";
    const int32_t low = has_state_ ? s.cache->history_length() : s.cache->num_committed_tokens();
    const int32_t length = low + below(s.cache->capacity() - low + 1);
    const Before was = before(s);
    try {
      s.cache->truncate(length);
    } catch (const InvalidArgument&) {  // a window has let go of what that would need
      if (before(s) != was) differ("truncate failed half-way");
      return;
    }
    s.written = std::min(s.written, length);
    if (s.written == length && int32_t(s.plan.size()) > length) {
      s.plan.resize(static_cast<size_t>(length));
      s.lineage.resize(static_cast<size_t>(length));
    }
    s.must_resize = true;
    check_rows(s);
  }

  void fork(size_t at) {
    last_ = "fork";
    if (sequences_.size() >= 9 || setup_.roomy) return;
    Sequence& parent = sequences_[at];
    const int32_t history = parent.cache->history_length();
    Sequence child;
    try {
      child.cache = parent.cache->fork();
    } catch (const DataLost&) {
      return;
    }
    ++counts_.forks;
    child.scope = parent.scope;
    child.worth = parent.worth;
    child.noted = child.cache->num_committed_tokens();
    child.serial = ++num_sequences_;
    child.written = history;
    child.may_commit = parent.may_commit;
    child.stream = parent.stream;
    child.is_first = parent.is_first;
    child.must_resize = true;
    parent.must_resize = true;
    Tokens plan = parent.plan;
    if (chance(50)) plan.resize(static_cast<size_t>(history));
    set_plan(child, std::move(plan));
    note_worth(child, INT32_MAX, true);
    sequences_.push_back(std::move(child));
  }

  void close(size_t at) {
    Sequence& s = sequences_[at];
    check_rows(s);
    if (!settle(s)) return;
    last_ = "close";
    if (s.may_commit) note_committed(s, true);
    s.cache->close();
    sequences_.erase(sequences_.begin() + static_cast<std::ptrdiff_t>(at));
  }

  void prefetch(Sequence& s) {
    last_ = "prefetch";
    ++counts_.prefetches;
    try {
      s.ticket = s.cache->prefetch(below(manager_.num_levels()));
    } catch (const OutOfMemory&) {
      if (setup_.refused == 0) throw;
    }
  }
  void poll(Sequence& s) {
    last_ = "poll";
    if (!s.ticket) return;
    try {
      if (chance(10)) s.ticket->cancel();
      if (s.ticket->is_done()) {
        s.ticket.reset();
      } else if (s.ticket->is_complete()) {
        differ("a prefetch is complete and not done");
      }
    } catch (const OutOfMemory&) {
      if (setup_.refused == 0) throw;
    }
  }

  void batch() {
    last_ = "batch";
    std::vector<Sequence*> chosen;
    std::vector<KVCache*> caches;
    std::vector<int32_t> capacities, histories;
    std::vector<Before> was;
    for (Sequence& s : sequences_) {
      if (!s.cache->is_active() || !s.may_commit || s.cache->is_lost()) continue;
      chosen.push_back(&s);
      caches.push_back(s.cache.get());
      histories.push_back(s.cache->history_length());
      capacities.push_back(std::max(s.cache->history_length() + below(2 * block_ + 2), s.written));
      was.push_back(before(s));
    }
    std::vector<uint8_t> results(caches.size(), 0);
    bool threw = false;
    try {
      manager_.resize_many(caches, capacities, histories, results);
    } catch (const OutOfMemory&) {
      if (setup_.refused == 0) throw;
      threw = true;
    }
    for (size_t i = 0; i < chosen.size(); ++i) {
      Sequence& s = *chosen[i];
      if (s.cache->is_lost()) continue;
      const bool resized = threw ? before(s) != was[i] : results[i] != 0;
      if (resized && s.cache->capacity() != capacities[i]) differ("resize_many half-way");
      if (resized) after_resize(s);
      if (!threw && !resized && before(s) != was[i]) differ("resize_many failed half-way");
    }
    if (!threw) commit_many(chosen);
  }
  void commit_many(const std::vector<Sequence*>& chosen) {
    if (has_state_ && loses()) return;  // a loss would leave states ahead of their history
    std::vector<KVCache*> caches;
    std::vector<Sequence*> kept;
    Tokens flat;
    std::vector<int32_t> counts;
    for (Sequence* s : chosen) {
      if (!s->cache->is_active() || s->cache->is_lost()) continue;
      const auto from = static_cast<size_t>(s->cache->num_committed_tokens());
      const auto count = static_cast<size_t>(write_next(*s));
      const auto own = std::span(s->plan).subspan(from, count);
      kept.push_back(s);
      caches.push_back(s->cache.get());
      counts.push_back(int32_t(count));
      flat.insert(flat.end(), own.begin(), own.end());
    }
    last_ = "commit_many";
    for (const Sequence* s : kept) {
      if (s->cache->is_lost() || !s->cache->is_active()) return;
    }
    try {
      manager_.commit_many(caches, flat, counts);
    } catch (const DataLost&) {
      return;
    }
    for (Sequence* s : kept) after_commit(*s);
  }

  // With everything suspended, a cache that the hot level can hold can be resumed.
  void bounce() {
    calm();
    if (!sequences_.empty() && !settle(sequences_[0])) return;
    for (Sequence& s : sequences_) {
      if (s.cache->is_active()) s.cache->suspend();
    }
    calm();
    if (!settle_levels()) return;
    for (int i = 0; i < 2; ++i) {
      Sequence& s = sequences_[static_cast<size_t>(below(int(sequences_.size())))];
      if (s.cache->is_active() || s.cache->is_lost() || !fits(*s.cache)) continue;
      const int64_t refused = counts_.refused;
      ++counts_.bounces;
      const bool resumed = resume_as(s, true);
      last_ = "bounce";
      calm();
      if (!resumed && counts_.refused == refused && !s.cache->is_lost()) {
        return differ("could not be resumed with everything suspended: " +
                      describe(s.cache->last_failure().value_or(NoRoom{})));
      }
      if (resumed) s.cache->suspend();
      calm();
      if (!settle(s)) return;
    }
  }
  // Whether the hot level can hold what the cache needs there, and all levels what is held.
  bool fits(const KVCache& cache) const {
    const ManagerState& state = Introspection::state(manager_);
    const size_t groups = state.store.num_groups();
    std::vector<int32_t> hot(groups, 0), fresh(groups, 0), held(groups, 0);
    const auto pages = Introspection::pages(cache);
    const size_t lcs = state.num_life_cycles;
    for (size_t i = 0; i < pages.size(); ++i) {
      const auto block = static_cast<int32_t>(i / lcs);
      const auto range = state.life_cycle(i % lcs).stale_range(cache.history_length(), block_);
      if (state.is_ssm(i % lcs) || range.contains(block)) continue;
      ++hot[state.group_of(i % lcs)];
      const bool shared = block >= cache.history_length() / block_ ||
                          (Introspection::needs_copy(cache) && block + 1 == cache.num_blocks());
      if (pages[i].is_null() || shared) ++fresh[state.group_of(i % lcs)];  // at most
    }
    if (state.ssm) {
      const size_t group = state.group_of(static_cast<size_t>(state.ssm->value()));
      ++hot[group];
      ++fresh[group];
    }
    for (size_t i = 0; i < state.store.pages().num_records(); ++i) {
      const PageRecord& page = state.store.page(PageId(static_cast<uint32_t>(i)));
      if (page.in_use && page.hold_count > 0) ++held[page.pool_group];
    }
    for (size_t g = 0; g < groups; ++g) {
      const PoolGroupId group(static_cast<int32_t>(g));
      int32_t total = 0;
      for (int level = 0; level < state.store.num_levels(); ++level) {
        const int32_t slots = state.store.counts(group, level).total;
        if (level > 0 && slots == 1) return false;  // nothing can pass there
        total += slots - (level > 0 ? 1 : 0);
      }
      if (hot[g] > state.store.counts(group).total || held[g] + fresh[g] > total) return false;
    }
    return true;
  }
};

}  // namespace helicore::kv::testing
