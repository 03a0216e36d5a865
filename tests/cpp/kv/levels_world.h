// What random operations on a manager of several levels stand on: sequences, the clock of the
// device, and what is looked at after each operation. `levels_operations.h` has the operations.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <ostream>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "helicore/kv/introspection.h"
#include "helicore/kv/kv_cache_manager.h"
#include "kv/fake_device.h"
#include "kv/row_engine.h"

namespace helicore::kv::testing {

struct LevelsSetup {
  const char* name = "";
  int32_t tokens_per_block = 4;
  std::vector<LayerConfig> layers{};
  std::vector<int64_t> level_bytes{};
  bool partial = true;
  bool min_snapshot = false;
  int32_t backoff = 0;
  std::optional<int32_t> draft_backoff = std::nullopt;
  double max_util = 1.0;
  bool gpu = false;  // a GPU whose streams may be held; else the caller's thread
  bool automatic = false;
  bool any_order = false;
  bool roomy = false;  // nothing is ever dropped: a match is as long as it can be
  bool disk = false;   // the last level is a file
  double refused = 0;  // rates of faults
  double failed = 0;
  double torn = 0;
  double slow = 0;
  // Controls.
  bool careless_engine = false;
  bool ignore_after = false;
  double corrupt = 0;
  bool false_pins = false;
  bool wrong_durations = false;
};

// What a sequence asked for its blocks, told slowly.
struct Worth {
  int base = kPriorityDefault;
  std::vector<RetentionRange> ranges{};
  struct At {
    int priority = 0;
    std::optional<int64_t> duration_ms = std::nullopt;  // none: for ever
  };
  // Of the block that begins at `token`: the best of all ranges that need it, for the longest time.
  [[nodiscard]] At of(int32_t token) const {
    At at{base, std::nullopt};
    bool any = false;
    for (const RetentionRange& range : ranges) {
      const bool needs = !range.end || *range.end > token;
      if (!needs || range.priority <= base) continue;
      at.priority = std::max(at.priority, range.priority);
      if (!any) {
        at.duration_ms = range.duration_ms;
      } else if (at.duration_ms && range.duration_ms) {
        at.duration_ms = std::max(*at.duration_ms, *range.duration_ms);
      } else {
        at.duration_ms = std::nullopt;
      }
      any = true;
    }
    return at;
  }
};

// Every prefix of the sequences that were put in.
class PrefixTrie {
 public:
  void insert(std::span<const TokenId> tokens) {
    size_t at = 0;
    for (TokenId token : tokens) {
      const auto [it, added] = next_.try_emplace({at, token}, num_nodes_);
      if (added) ++num_nodes_;
      at = it->second;
    }
  }
  [[nodiscard]] int32_t longest(std::span<const TokenId> tokens) const {
    size_t at = 0;
    int32_t length = 0;
    for (TokenId token : tokens) {
      const auto it = next_.find({at, token});
      if (it == next_.end()) break;
      at = it->second;
      ++length;
    }
    return length;
  }
  void clear() {
    next_.clear();
    num_nodes_ = 1;
  }

 private:
  std::map<std::pair<size_t, TokenId>, size_t> next_;
  size_t num_nodes_ = 1;
};

// What the operations stand on.
class LevelsBase {
 public:
  static constexpr int kNumScopes = 2;

  // `device`: null for the real one. `shared`: other threads use the manager too.
  LevelsBase(const LevelsSetup& setup, KVCacheManager& manager, FakeDevice* device, uint64_t seed,
             bool shared = false)
      : setup_(setup),
        manager_(manager),
        device_(device),
        shared_(shared),
        random_(seed),
        engine_(manager),
        block_(setup.tokens_per_block),
        max_length_(block_ == 1        ? 14
                    : 12 * block_ > 60 ? 60
                                       : 12 * block_) {
    for (const LayerConfig& layer : setup.layers) {
      has_state_ |= std::holds_alternative<SsmLayerConfig>(layer);
    }
    if (device_ != nullptr && setup.gpu) {
      for (int i = 0; i < 3; ++i) streams_.push_back(device_->make_stream());
    }
    if (device_ != nullptr) {
      device_->inject_rate(FakeFault::kRefusedCopy, setup.refused);
      device_->inject_rate(FakeFault::kFailedTask, setup.failed);
      device_->inject_rate(FakeFault::kTornTask, setup.torn);
      device_->inject_rate(FakeFault::kSlowBatch, setup.slow);
      device_->inject_rate(FakeFault::kCorruptTask, setup.corrupt);
    }
  }

  struct Counts {
    int64_t operations = 0, bounces = 0, lost = 0, refused = 0, no_room = 0, prefetches = 0;
    int64_t matched = 0, exact = 0, forks = 0, snapshots = 0;
    int64_t pins = 0, priced = 0, resizes = 0, adjusts = 0, moved = 0;
    Counts& operator+=(const Counts& other) {
      operations += other.operations, bounces += other.bounces, lost += other.lost;
      refused += other.refused, no_room += other.no_room, prefetches += other.prefetches;
      matched += other.matched, exact += other.exact, forks += other.forks;
      pins += other.pins, priced += other.priced, resizes += other.resizes;
      adjusts += other.adjusts, moved += other.moved;
      return *this;
    }
    friend std::ostream& operator<<(std::ostream& out, const Counts& c) {
      return out << c.operations << " operations, " << c.bounces << " bounces, " << c.lost
                 << " lost, " << c.no_room << " without room, " << c.matched << " matched, "
                 << c.forks << " forks, " << c.pins << " pins, " << c.priced << " priced, "
                 << c.resizes << " resizes, " << c.adjusts << " adjusts, " << c.moved << " moved";
    }
  };
  [[nodiscard]] const Counts& counts() {
    counts_.operations = num_operations_;
    return counts_;
  }

 protected:
  ~LevelsBase() = default;
  using Tokens = std::vector<TokenId>;
  struct Sequence {
    std::unique_ptr<KVCache> cache;
    Tokens plan;
    Lineage lineage{0};
    Worth worth{};
    int scope = 0;
    int32_t noted = 0;         // committed tokens that the models know of
    int32_t written = 0;       // rows [0, written) are there
    bool must_resize = false;  // a fork or a rewind: rows may be shared
    bool may_commit = true;
    bool is_first = true;  // not resumed yet
    StreamHandle stream = 0;
    std::optional<PrefetchTicket> ticket;
    bool suspect = false;   // read wrong bytes; must turn out to be lost
    uint64_t failures = 0;  // of the device when it was resumed
    int64_t serial = 0;
  };
  struct Before {
    CacheStatus status;
    int32_t capacity, history, committed, blocks;
    std::vector<std::vector<int32_t>> tables;
    Tokens tokens;
    friend bool operator==(const Before&, const Before&) = default;
  };
  struct Finding {
    int64_t serial;
    std::string text;
  };

  int below(int bound) { return std::uniform_int_distribution<int>(0, bound - 1)(random_); }
  bool chance(int percent) { return below(100) < percent; }
  void differ(const std::string& what) {
    if (!difference_) difference_ = what;
  }
  [[nodiscard]] bool loses() const { return setup_.failed > 0 || setup_.torn > 0; }
  static ReuseScope scope_of(int scope) {
    ReuseScope result;
    if (scope == 1) result.salt = std::string("tenant");
    return result;
  }

  // ---- the clock and the streams ----
  void tick() {
    if (device_ == nullptr) return;
    if (!streams_.empty()) {
      const StreamHandle stream = streams_[static_cast<size_t>(below(3))];
      if (chance(40)) {
        device_->hold(stream);
      } else {
        device_->release(stream);
      }
    }
    if (chance(5)) device_->set_automatic(chance(30));
    for (int i = below(4); i > 0; --i) (void)device_->run_one();
  }
  // Everything that was started is done.
  void calm() {
    if (device_ == nullptr) return;
    for (StreamHandle stream : streams_) device_->release(stream);
    (void)device_->run_all();
  }

  void launch(const Sequence& s, std::vector<RowCell> cells, bool is_write) {
    auto work = [this, serial = s.serial, cells = std::move(cells), is_write] {
      if (is_write) return RowEngine::write(cells);
      if (auto wrong = RowEngine::check(cells)) findings_.push_back({serial, *wrong});
    };
    if (device_ == nullptr) return work();
    device_->launch(s.stream, std::move(work));
  }
  void check_rows(const Sequence& s) {
    if (!s.cache->is_active()) return;
    std::vector<RowCell> cells;
    engine_.rows(*s.cache, s.lineage, {0, s.written}, cells);
    if (has_state_ && s.written > 0 && !s.cache->is_lost()) {
      engine_.state(*s.cache, s.lineage, s.written, cells);
    }
    launch(s, std::move(cells), false);
  }
  void write_rows(Sequence& s, int32_t from, int32_t to) {
    std::vector<RowCell> cells;
    engine_.rows(*s.cache, s.lineage, {from, to}, cells);
    engine_.state(*s.cache, s.lineage, to, cells);
    if (setup_.careless_engine && from > 0 && chance(20)) {
      engine_.rows(*s.cache, s.lineage, {from - 1, from}, cells);
      cells.back().value ^= 1;
    }
    launch(s, std::move(cells), true);
    s.written = to;
  }

  // ---- what is looked at after each operation ----
  void look() {
    if (!shared_) Introspection::check(manager_);
    if (device_ != nullptr && !device_->violations().empty()) {
      differ("the device says: " + device_->violations().front());
    }
    while (!findings_.empty()) {
      const Finding finding = findings_.front();
      findings_.pop_front();
      const auto it = std::find_if(sequences_.begin(), sequences_.end(),
                                   [&](const Sequence& s) { return s.serial == finding.serial; });
      if (lost_.count(finding.serial) > 0) continue;
      if (!loses() || it == sequences_.end()) {
        differ("sequence " + std::to_string(finding.serial) + ": " + finding.text);
      } else {
        it->suspect = true;
        suspicion_ = finding.text;
      }
    }
    for (size_t i = 0; i < sequences_.size();) {
      if (sequences_[i].cache->is_lost()) {
        close_lost(i);
      } else {
        ++i;
      }
    }
  }

  void close_lost(size_t index) {
    Sequence& s = sequences_[index];
    ++counts_.lost;
    lost_.insert(s.serial);
    if (!loses()) differ("lost without a fault");
    if (!s.cache->is_active() && s.cache->resume(s.stream)) differ("a lost cache was resumed");
    bool refused = false;
    try {
      (void)s.cache->fork();
    } catch (const DataLost&) {
      refused = true;
    }
    if (!refused) differ("a lost cache was forked");
    s.cache->close();
    sequences_.erase(sequences_.begin() + static_cast<std::ptrdiff_t>(index));
  }

  // After this the sequence is known to be sound or to be lost.
  bool settle(Sequence& s) {
    if (!loses()) return true;
    calm();
    manager_.create_kv_cache()->close();  // any operation takes in what has failed
    while (!findings_.empty()) {
      for (Sequence& other : sequences_) {
        other.suspect = other.suspect || other.serial == findings_.front().serial;
      }
      suspicion_ = findings_.front().text;
      findings_.pop_front();
    }
    for (Sequence& other : sequences_) {
      // What was read and then let go before its loss came to light is nobody's any more.
      if (other.suspect && other.failures != device_->num_failures()) other.suspect = false;
      if (other.suspect && !other.cache->is_lost()) {
        differ("sequence " + std::to_string(other.serial) + " is not lost: " + suspicion_);
      }
    }
    return !s.cache->is_lost();
  }

  Before before(const Sequence& s) const {
    Before out{s.cache->status(),          s.cache->capacity(),
               s.cache->history_length(),  s.cache->num_committed_tokens(),
               s.cache->num_blocks(),      {},
               s.cache->committed_tokens()};
    for (size_t lc = 0; lc < manager_.num_layer_groups(); ++lc) {
      const auto table = s.cache->base_page_indices(LifeCycleId(static_cast<int32_t>(lc)));
      out.tables.emplace_back(table.begin(), table.end());
    }
    return out;
  }

  // Runs something that returns whether it worked; when it did not, or threw for want of memory,
  // the sequence must be as before.
  template <typename F>
  bool attempt(Sequence& s, const char* what, F&& f) {
    last_ = what;
    const Before was = before(s);
    bool worked = false;
    try {
      worked = f();
      counts_.no_room += worked ? 0 : 1;
    } catch (const OutOfMemory&) {
      if (setup_.refused == 0) throw;
      ++counts_.refused;
    }
    if (worked) return true;
    // A loss that comes to light suspends the cache.
    if (!s.cache->is_lost() && before(s) != was) differ(std::string(what) + " failed half-way");
    return false;
  }

  const LevelsSetup setup_;
  KVCacheManager& manager_;
  FakeDevice* device_;
  const bool shared_;
  std::mt19937_64 random_;
  RowEngine engine_;
  const int32_t block_;
  const int32_t max_length_;
  bool has_state_ = false;
  std::vector<StreamHandle> streams_;
  std::vector<Sequence> sequences_;
  std::deque<Finding> findings_;
  std::vector<Tokens> past_;
  std::map<int, PrefixTrie> committed_;  // by scope: an upper bound of what may be found
  std::map<int, PrefixTrie> shown_;      // what is found while nothing is dropped
  std::set<int64_t> lost_;
  int64_t num_sequences_ = 0;
  int64_t num_operations_ = 0;
  Counts counts_;
  std::string last_;
  std::string suspicion_;
  std::optional<std::string> difference_;
};

}  // namespace helicore::kv::testing
