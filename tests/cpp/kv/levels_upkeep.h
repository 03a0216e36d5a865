// What goes on beside the sequences of a manager of several levels: levels that change their sizes,
// pinned prefixes, and a clock by which retention runs out. Each with a model of its own.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kv/levels_world.h"

namespace helicore::kv::testing {

// Priorities that full blocks must have: of those that one sequence alone has had to do with, for
// what several ask for is theirs to agree on.
class WorthModel {
 public:
  // The sequence knows the first blocks of `tokens`; those from `first` on were committed at `now`.
  void touch(int64_t serial, const Worth& worth, std::span<const TokenId> tokens, size_t block,
             size_t first, int64_t now) {
    for (size_t b = 0; (b + 1) * block <= tokens.size(); ++b) {
      Entry& entry = entries_[{tokens.begin(), tokens.begin() + long((b + 1) * block)}];
      entry.serials.insert(serial);
      entry.worth = worth;
      if (b >= first) entry.committed = now;
    }
  }
  // Nothing is said of the block that has these tokens, or a part of it, and of what leads there.
  void leave_out(std::span<const TokenId> tokens) {
    const std::vector<TokenId> path(tokens.begin(), tokens.end());
    entries_[path].serials.insert(-1);
    for (auto it = entries_.lower_bound(path); it != entries_.end(); ++it) {
      if (!starts_with(it->first, path)) break;
      it->second.serials.insert(-1);
    }
  }
  // Of the last block of `path`; none when others had to do with it or with what follows it.
  // Of what follows it, blocks that are `present` count: with one that went, the claim may have
  // gone. `percent`: of each duration, for a model that is wrong.
  [[nodiscard]] std::optional<int> priority(const std::vector<TokenId>& path, size_t block,
                                            int64_t now,
                                            const std::set<std::vector<TokenId>>& present,
                                            int64_t percent = 100) const {
    int most = 0;
    for (auto it = entries_.lower_bound(path); it != entries_.end(); ++it) {
      const auto& [tokens, entry] = *it;
      if (!starts_with(tokens, path)) break;
      if (entry.serials.size() != 1 || !entry.committed) return std::nullopt;
      if (tokens != path && !present.contains(tokens)) continue;
      const auto at = entry.worth.of(int32_t(tokens.size() - block));
      const bool is_over =
          at.duration_ms && *entry.committed + *at.duration_ms * percent * 10'000 <= now;
      most = std::max(most, is_over ? entry.worth.base : at.priority);
    }
    return most == 0 && !entries_.contains(path) ? std::nullopt : std::optional(most);
  }
  void clear() { entries_.clear(); }

 private:
  static bool starts_with(std::span<const TokenId> tokens, std::span<const TokenId> path) {
    return tokens.size() >= path.size() && std::equal(path.begin(), path.end(), tokens.begin());
  }
  struct Entry {
    std::set<int64_t> serials;
    Worth worth{};
    std::optional<int64_t> committed = std::nullopt;
  };
  std::map<std::vector<TokenId>, Entry> entries_;
};

class LevelsUpkeep : public LevelsBase {
 public:
  LevelsUpkeep(const LevelsSetup& setup, KVCacheManager& manager, FakeDevice* device, uint64_t seed,
               bool shared = false)
      : LevelsBase(setup, manager, device, seed, shared) {
    for (int level = 0; level < manager.num_levels(); ++level) {
      first_quotas_.push_back(manager.quota(level));
    }
    if (!shared) Introspection::state(manager).now_ns = [now = now_] { return *now; };
  }

 protected:
  ~LevelsUpkeep() = default;

  void upkeep() {
    const int operation = below(100);
    if (operation < 25) return pass_time();
    if (operation < 40) return pin();
    if (operation < 50) return unpin();
    if (setup_.roomy) return pass_time();  // its sizes are such that nothing is ever dropped
    if (operation < 70) return resize_level();
    if (operation < 75) return adjust();
    maintain();
  }

  // ---- time ----
  [[nodiscard]] int64_t now() const { return *now_; }
  // Half of the sequences have nothing but a priority.
  Worth random_worth() {
    Worth worth{.base = chance(30) ? below(101) : kPriorityDefault};
    for (int i = chance(50) ? 1 + below(3) : 0; i > 0; --i) {
      RetentionRange range{.begin = below(max_length_), .priority = below(101)};
      if (chance(70)) range.end = range.begin + 1 + below(max_length_);
      if (chance(70)) range.duration_ms = 1 + below(100);
      worth.ranges.push_back(range);
    }
    return worth;
  }
  void pass_time() {
    last_ = "time";
    if (shared_) return;
    *now_ += int64_t{1 + below(40)} * 1'000'000;
    begin_operation();
    check_worth();
  }
  // What has run out is seen by the next operation.
  void begin_operation() { manager_.create_kv_cache()->close(); }

  void check_worth() {
    if (loses()) return;
    const ManagerState& state = Introspection::state(manager_);
    std::optional<size_t> full;
    for (size_t lc = 0; lc < state.num_life_cycles && !full; ++lc) {
      const LifeCycle& life_cycle = state.life_cycle(lc);
      const bool is_full = life_cycle.kind != LayerType::kSsm && !life_cycle.window;
      if (is_full && life_cycle.policy == ReusePolicy::kRequired) full = lc;
    }
    if (!full) return;
    const size_t block = static_cast<size_t>(block_);
    std::set<std::vector<TokenId>> present[kNumScopes];
    const auto for_each_block = [&](const auto& f) {
      for (size_t i = 0; i < state.store.pages().num_records(); ++i) {
        const PageRecord& page = state.store.page(PageId(static_cast<uint32_t>(i)));
        if (!page.in_use || page.node == kNoNode || page.life_cycle != *full) continue;
        if (state.tree.tokens(page.node).size() == block) f(page);
      }
    };
    for_each_block([&](const PageRecord& page) {
      auto [scope, path] = path_of(page.node);
      present[scope].insert(std::move(path));
    });
    for_each_block([&](const PageRecord& page) {
      const auto [scope, path] = path_of(page.node);
      const auto expected = worths_[scope].priority(path, block, now(), present[scope],
                                                    setup_.wrong_durations ? 200 : 100);
      if (!expected) return;
      ++counts_.priced;
      if (page.priority < *expected) {
        differ("a block of priority " + std::to_string(page.priority) + " is worth " +
               std::to_string(*expected));
      }
    });
  }
  std::pair<int, Tokens> path_of(NodeId node) const {
    const RadixTree& tree = Introspection::state(manager_).tree;
    std::vector<NodeId> path;
    tree.path_to(node, &path);
    Tokens tokens;
    for (NodeId each : path) {
      const auto own = tree.tokens(each);
      tokens.insert(tokens.end(), own.begin(), own.end());
    }
    const NodeId root = tree.node(path.front()).parent;
    return {root == tree.find_root(scope_of(1)) ? 1 : 0, std::move(tokens)};
  }
  // `with_tail`: the last block may be shown in part, or be shared.
  void note_worth(const Sequence& s, int32_t first_committed, bool with_tail) {
    if (shared_) return;
    const auto n = static_cast<size_t>(s.cache->num_committed_tokens());
    worths_[s.scope].touch(s.serial, s.worth, std::span(s.plan).first(n),
                           static_cast<size_t>(block_),
                           static_cast<size_t>(first_committed / block_), now());
    if (with_tail && n % static_cast<size_t>(block_) > 0) {
      worths_[s.scope].leave_out(std::span(s.plan).first(n));
    }
  }

  // ---- pins ----
  void pin() {
    last_ = "pin";
    if (pins_.size() >= 2 || past_.empty()) return;
    Pin pin;
    pin.tokens = past_[static_cast<size_t>(below(static_cast<int>(past_.size())))];
    pin.scope = below(kNumScopes);
    pin.cache = manager_.pin(pin.tokens, scope_of(pin.scope));
    pin.depth = pin.cache->num_committed_tokens();
    if (setup_.false_pins) pin.cache->close();
    ++counts_.pins;
    // Others' claims on these blocks are changed by it, and it is none of the model's sequences.
    const auto pinned = std::span(pin.tokens).first(static_cast<size_t>(pin.depth));
    worths_[pin.scope].touch(-1, {}, pinned, static_cast<size_t>(block_), 0, now());
    if (pin.depth % block_ > 0) worths_[pin.scope].leave_out(pinned);
    pins_.push_back(std::move(pin));
  }
  void unpin() {
    last_ = "unpin";
    if (!pins_.empty()) unpin_at(static_cast<size_t>(below(static_cast<int>(pins_.size()))));
  }
  void unpin_at(size_t at) {
    if (chance(50)) pins_[at].cache->close();
    pins_.erase(pins_.begin() + static_cast<std::ptrdiff_t>(at));
  }
  void unpin_all() {
    while (!pins_.empty()) unpin_at(pins_.size() - 1);
  }
  void check_pins() {
    std::erase_if(pins_, [this](const Pin& pin) { return pin.cache->is_lost() && loses(); });
    // Tokens that are trimmed off a match are not pinned, and a longer block may take the place of
    // the one that the pin has a part of.
    const int32_t trimmed = std::max(setup_.backoff, setup_.draft_backoff.value_or(0));
    const ManagerState& state = Introspection::state(manager_);
    for (const Pin& pin : pins_) {
      if (pin.cache->status() == CacheStatus::kClosed) continue;
      for (const PageHandle& page : Introspection::pages(*pin.cache)) {
        if (shared_ || page.is_null()) continue;
        const bool is_there = state.store.pages().is_current(page);
        if (!is_there || state.store.page(page.id).hold_count == 0) differ("a pinned page is gone");
      }
    }
    for (const Pin& pin : pins_) {
      // Inside a block another part of it may hide what a window or a state left there.
      if (pin.depth % block_ > 0 && (state.has_windows || has_state_)) continue;
      const int32_t depth = manager_.probe_reuse(pin.tokens, scope_of(pin.scope));
      if (depth >= pin.depth - pin.depth % block_ - trimmed || loses()) continue;
      differ("of " + std::to_string(pin.depth) + " pinned tokens " + std::to_string(depth) +
             " are left");
    }
  }

  // ---- sizes ----
  template <typename F>
  bool unless_refused(const F& f) {
    try {
      f();
      return true;
    } catch (const OutOfMemory&) {
      if (setup_.refused == 0) throw;
      return false;
    }
  }
  void resize_level() {
    last_ = "resize of a level";
    const int level = below(manager_.num_levels());
    const int64_t quota =
        std::max<int64_t>(1, first_quotas_[static_cast<size_t>(level)] * (8 + below(33)) / 20);
    const bool best_effort = shared_ || chance(70);
    if (!best_effort) calm();  // it waits for streams
    const int64_t before = manager_.quota(level);
    const int64_t grain = Introspection::state(manager_).levels[static_cast<size_t>(level)].grain;
    ResizeResult result;
    if (!unless_refused([&] { result = manager_.resize(level, quota, best_effort); })) return;
    if (shared_) return;
    if (result.done) {
      ++counts_.resizes;
      if (result.quota != (quota + grain - 1) / grain * grain) differ("quota of a resize");
    } else if (!best_effort) {
      if (result.quota != before) differ("quota of a resize that was refused");
      if (!result.reason && quota > result.minimum) differ("no reason for a refusal");
    }
  }
  void adjust() {
    last_ = "adjust";
    (void)unless_refused([&] { counts_.adjusts += manager_.adjust() ? 1 : 0; });
  }
  void maintain() {
    last_ = "maintain";
    const int64_t most = 1 + below(5);
    int64_t moved = 0;
    if (!unless_refused([&] { moved = manager_.maintain(most); })) return;
    counts_.moved += moved;
    if (moved > most) differ("maintain moved " + std::to_string(moved) + " pages");
  }
  // Levels are as large as they are going to be; false when something keeps them from it.
  bool settle_levels() {
    for (int i = 0; i < 60 && manager_.is_resizing(); ++i) {
      calm();
      (void)unless_refused([&] { (void)manager_.maintain(4); });
    }
    return !manager_.is_resizing();
  }

  // Every slot in use is one that there is memory for, and no two pages have one slot; no level has
  // more bytes than its quota, nor the device more than all of them.
  void check_sizes() {
    const ManagerState& state = Introspection::state(manager_);
    std::set<std::tuple<int, int, int32_t>> taken;
    const auto take = [&](int level, int group, int32_t slot) {
      const QuotaSplit& split = state.levels[static_cast<size_t>(level)].split;
      if (slot < 0 || slot >= split.num_slots[PoolGroupId(group)]) differ("a slot without memory");
      if (!taken.insert({level, group, slot}).second) differ("a slot of two pages");
    };
    for (size_t i = 0; i < state.store.pages().num_records(); ++i) {
      const PageRecord& page = state.store.page(PageId(static_cast<uint32_t>(i)));
      if (!page.in_use) continue;
      take(page.level, page.pool_group, page.slot.value());
      if (page.copy_slot.value() >= 0) {
        take(page.copy_level, page.pool_group, page.copy_slot.value());
      }
    }
    int64_t bytes = 0;
    for (const LevelState& level : state.levels) {
      int64_t used = 0;
      for (size_t g = 0; g < state.store.num_groups(); ++g) {
        const PoolGroupId group(static_cast<int32_t>(g));
        const PoolGroupLayout& layout = state.layout.groups()[group];
        used += bytes_for_slots(layout, level.split.num_slots[group], level.grain);
        bytes += level.split.num_slots[group] * layout.slot_bytes();
      }
      if (used > level.split.quota) differ("a level has more than its quota");
    }
    if (device_ != nullptr && device_->ledger()->num_bytes != bytes) {
      differ("the pools have " + std::to_string(device_->ledger()->num_bytes) + " bytes, not " +
             std::to_string(bytes));
    }
  }

  void look_at_upkeep() {
    if (!shared_) check_sizes();
    check_pins();
  }

  std::map<int, WorthModel> worths_;  // by scope

 private:
  struct Pin {
    std::unique_ptr<KVCache> cache;
    Tokens tokens;
    int scope = 0;
    int32_t depth = 0;
  };
  std::vector<Pin> pins_;
  std::vector<int64_t> first_quotas_;
  std::shared_ptr<int64_t> now_ = std::make_shared<int64_t>(0);
};

}  // namespace helicore::kv::testing
