// A reference model of the manager: a dictionary of committed prefixes, shared pointers for pages,
// linear scans for everything. Slow and plain on purpose; shares no code with the manager. Counts
// blocks, not slots.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace helicore::kv::testing {

using Tokens = std::vector<int32_t>;

// Deliberate mistakes, for negative controls.
enum class ModelFault {
  kNone,
  kEvictNewest,
  kIgnorePriority,
  kMixScopes,
  kForgetPartial,
  kForkCopiesNothing
};

struct ModelPage {
  int holds = 0;
  bool shown = false;
  std::pair<int, Tokens> key;  // scope and the whole prefix up to the end of the block
  int priority = 0;
  int64_t queued_at = 0;
};
using ModelPageRef = std::shared_ptr<ModelPage>;

struct ModelCache {
  int scope = 0;
  int priority = 0;
  Tokens committed;
  int capacity = 0;
  int history = 0;
  bool active = false;
  bool may_commit = true;
  bool needs_copy = false;
  bool may_share = false;
  std::vector<ModelPageRef> blocks;
};

class NaiveModel {
 public:
  NaiveModel(int tokens_per_block, int num_blocks, bool partial, int backoff, double max_util,
             ModelFault fault)
      : tpb_(tokens_per_block),
        total_(num_blocks),
        partial_(partial),
        backoff_(backoff),
        max_util_(max_util),
        fault_(fault) {}

  int free() const { return total_ - alive_; }
  int evictable() const {
    int count = 0;
    for (const auto& [key, page] : shown_) count += page->holds == 0 ? 1 : 0;
    return count;
  }

  int probe(int scope, const Tokens& tokens) const {
    int matched = std::max(0, match(scope, tokens) - backoff_);
    return partial_ ? matched : matched / tpb_ * tpb_;
  }

  // `partial_key` is the prefix of the page that the manager chose for a last block that matched in
  // part.
  ModelCache create(int scope, const Tokens& tokens, int priority, const Tokens& partial_key) {
    ModelCache cache;
    cache.scope = scope;
    cache.priority = priority;
    const int matched = probe(scope, tokens);
    cache.committed.assign(tokens.begin(), tokens.begin() + matched);
    cache.capacity = cache.history = matched;
    for (int end = tpb_; end <= matched; end += tpb_) {
      hold_block(cache, find(scope, Tokens(tokens.begin(), tokens.begin() + end)));
    }
    if (matched % tpb_ != 0) {
      hold_block(cache, find(scope, partial_key));
      cache.needs_copy = true;
    }
    return cache;
  }

  bool resume(ModelCache& cache) {
    if (num_active_ > 0 && total_ - free() - evictable() > max_util_ * total_) return false;
    const int copies = count_copies(cache, cache.blocks.size());
    if (free() + evictable() < copies) return false;
    make_room(copies);
    copy_blocks(cache, cache.blocks.size());
    cache.active = true;
    ++num_active_;
    return true;
  }

  void suspend(ModelCache& cache) {
    cache.active = false;
    --num_active_;
  }

  bool resize(ModelCache& cache, int capacity, int history) {
    const int blocks = static_cast<int>(cache.blocks.size());
    const int wanted = (capacity + tpb_ - 1) / tpb_;
    const auto kept = static_cast<size_t>(std::min(blocks, wanted));
    const int needed = std::max(0, wanted - blocks) + count_copies(cache, kept);
    if (needed > 0 && free() + evictable() < needed) return false;
    make_room(needed);
    copy_blocks(cache, kept);
    for (int i = blocks; i < wanted; ++i) cache.blocks.push_back(new_page(cache.priority));
    drop_blocks(cache, static_cast<size_t>(wanted));
    cache.capacity = capacity;
    cache.history = history;
    return true;
  }

  void truncate(ModelCache& cache, int num_tokens) {
    drop_blocks(cache, static_cast<size_t>((num_tokens + tpb_ - 1) / tpb_));
    cache.capacity = num_tokens;
    cache.history = std::min(cache.history, num_tokens);
  }

  ModelCache fork(ModelCache& parent) {
    ModelCache child = parent;
    child.active = false;
    child.capacity = child.history;
    child.blocks.resize(static_cast<size_t>((child.history + tpb_ - 1) / tpb_));
    for (const ModelPageRef& page : child.blocks) ++page->holds;
    child.may_share = !child.needs_copy && child.blocks.size() > first_uncommitted(child);
    parent.may_share = parent.may_share || child.may_share;
    return child;
  }

  // Whether rows from `history` on lie in blocks that others hold or that are shown.
  bool shares_next_rows(const ModelCache& cache) const {
    return count_copies(cache, cache.blocks.size()) > 0;
  }

  void commit(ModelCache& cache, const Tokens& tokens) {
    for (int32_t token : tokens) {
      cache.committed.push_back(token);
      if (cache.committed.size() % static_cast<size_t>(tpb_) != 0) continue;
      ModelPageRef& own = cache.blocks[cache.committed.size() / static_cast<size_t>(tpb_) - 1];
      if (const ModelPageRef twin = find(cache.scope, cache.committed)) {
        ++twin->holds;
        twin->priority = std::max(twin->priority, cache.priority);
        unhold(own);
        own = twin;
      } else {
        show(own, cache);
      }
    }
    cache.history = std::max(cache.history, static_cast<int>(cache.committed.size()));
  }

  void stop(ModelCache& cache) {
    if (!cache.may_commit) return;
    cache.may_commit = false;
    const size_t tail = cache.committed.size() % static_cast<size_t>(tpb_);
    if (tail == 0 || cache.needs_copy || !partial_) return;
    const ModelPage& own = *cache.blocks[cache.committed.size() / static_cast<size_t>(tpb_)];
    if (own.shown && !starts_with(cache.committed, own.key.second)) return;
    for (const auto& [key, page] : shown_) {
      if (key.first == scope_of(cache.scope) && starts_with(key.second, cache.committed) &&
          key.second.size() <= cache.committed.size() - tail + static_cast<size_t>(tpb_)) {
        return;  // the same or a longer block is there
      }
    }
    if (fault_ != ModelFault::kForgetPartial)
      show(cache.blocks[cache.committed.size() / static_cast<size_t>(tpb_)], cache);
  }

  void close(ModelCache& cache) {
    stop(cache);
    if (cache.active) --num_active_;
    cache.active = false;
    drop_blocks(cache, 0);
  }

  void clear() {
    while (evictable() > 0) evict_one();
  }

  bool is_shown(int scope, const Tokens& key) const {
    return shown_.count({scope_of(scope), key}) > 0;
  }

 private:
  int scope_of(int scope) const { return fault_ == ModelFault::kMixScopes ? 0 : scope; }

  size_t first_uncommitted(const ModelCache& cache) const {
    return cache.committed.size() / static_cast<size_t>(tpb_);
  }

  bool must_copy(const ModelCache& cache, size_t block) const {
    if (cache.needs_copy) return block + 1 == cache.blocks.size();
    const ModelPage& page = *cache.blocks[block];
    const bool shows_next_rows =
        page.shown && static_cast<int>(page.key.second.size()) > cache.history;
    return cache.may_share && (page.holds > 1 || shows_next_rows);
  }

  int count_copies(const ModelCache& cache, size_t end) const {
    int count = 0;
    for (auto b = static_cast<size_t>(cache.history / tpb_); b < end; ++b) {
      count += must_copy(cache, b) ? 1 : 0;
    }
    return count;
  }

  void copy_blocks(ModelCache& cache, size_t end) {
    const auto begin = static_cast<size_t>(cache.history / tpb_);
    for (size_t b = end; b-- > begin;) {
      if (!must_copy(cache, b) || fault_ == ModelFault::kForkCopiesNothing) continue;
      ModelPageRef shared = cache.blocks[b];
      cache.blocks[b] = new_page(cache.priority);
      unhold(shared);
    }
    cache.needs_copy = false;
    bool still_shares = false;
    for (size_t b = first_uncommitted(cache); b < end; ++b) {
      still_shares |= cache.blocks[b]->holds > 1 || cache.blocks[b]->shown;
    }
    cache.may_share = cache.may_share && still_shares;
  }

  void drop_blocks(ModelCache& cache, size_t num_blocks) {
    while (cache.blocks.size() > num_blocks) {
      unhold(cache.blocks.back());
      cache.blocks.pop_back();
    }
  }

  static bool starts_with(const Tokens& tokens, const Tokens& prefix) {
    return tokens.size() >= prefix.size() &&
           std::equal(prefix.begin(), prefix.end(), tokens.begin());
  }

  ModelPageRef find(int scope, const Tokens& key) const {
    const auto it = shown_.find({scope_of(scope), key});
    return it == shown_.end() ? nullptr : it->second;
  }

  int match(int scope, const Tokens& tokens) const {
    int full = 0;
    while (full + tpb_ <= static_cast<int>(tokens.size()) &&
           find(scope, Tokens(tokens.begin(), tokens.begin() + full + tpb_))) {
      full += tpb_;
    }
    int best = full;
    for (const auto& [key, page] : shown_) {
      const auto size = static_cast<int>(key.second.size());
      if (!partial_ || key.first != scope_of(scope) || size <= full || size > full + tpb_) continue;
      const auto end =
          std::mismatch(key.second.begin(), key.second.end(), tokens.begin(), tokens.end()).first;
      best = std::max(best, static_cast<int>(end - key.second.begin()));
    }
    return best;
  }

  void hold_block(ModelCache& cache, const ModelPageRef& page) {
    if (page == nullptr) return;  // a faulty model may ask for what is not there
    ++page->holds;
    page->priority = std::max(page->priority, cache.priority);
    cache.blocks.push_back(page);
  }

  ModelPageRef new_page(int priority) {
    ++alive_;
    auto page = std::make_shared<ModelPage>();
    page->holds = 1;
    page->priority = priority;
    return page;
  }

  void unhold(const ModelPageRef& page) {
    if (--page->holds > 0) return;
    if (page->shown)
      page->queued_at = ++clock_;
    else
      --alive_;
  }

  void hide(const ModelPageRef& page) {
    page->shown = false;
    shown_.erase(page->key);
    if (page->holds == 0) --alive_;
  }

  void show(const ModelPageRef& page, const ModelCache& cache) {
    const size_t begin =
        (cache.committed.size() - 1) / static_cast<size_t>(tpb_) * static_cast<size_t>(tpb_);
    for (size_t size = begin + 1; size < cache.committed.size(); ++size) {
      const ModelPageRef shorter =
          find(cache.scope, Tokens(cache.committed.begin(),
                                   cache.committed.begin() + static_cast<std::ptrdiff_t>(size)));
      if (shorter) hide(shorter);
    }
    page->shown = true;
    page->key = {scope_of(cache.scope), cache.committed};
    shown_[page->key] = page;
  }

  void evict_one() {
    ModelPageRef victim;
    for (const auto& [key, page] : shown_) {
      if (page->holds > 0) continue;
      if (victim == nullptr || goes_before(*page, *victim)) victim = page;
    }
    // What lies below goes with it; forks may still hold it.
    std::vector<ModelPageRef> below;
    for (const auto& [key, page] : shown_) {
      if (key.first == victim->key.first && starts_with(key.second, victim->key.second)) {
        below.push_back(page);
      }
    }
    for (const ModelPageRef& page : below) hide(page);
  }

  bool goes_before(const ModelPage& a, const ModelPage& b) const {
    if (fault_ == ModelFault::kEvictNewest) return a.queued_at > b.queued_at;
    if (fault_ == ModelFault::kIgnorePriority) return a.queued_at < b.queued_at;
    return std::pair(a.priority, a.queued_at) < std::pair(b.priority, b.queued_at);
  }

  void make_room(int count) {
    while (free() < count) evict_one();
  }

  int tpb_;
  int total_;
  bool partial_;
  int backoff_;
  double max_util_;
  ModelFault fault_;
  int alive_ = 0;
  int num_active_ = 0;
  int64_t clock_ = 0;
  std::map<std::pair<int, Tokens>, ModelPageRef> shown_;
};

}  // namespace helicore::kv::testing
