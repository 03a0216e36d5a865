// An I/O back end that fails: EIO, transfers torn in the middle, and batches that start in another
// order than they were submitted. Wraps a real one.
#pragma once

#include <algorithm>
#include <cerrno>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <unordered_map>
#include <utility>
#include <vector>

#include "helicore/kv/async_io.h"

namespace helicore::kv::testing {

struct FlakyPlan {
  double fail_rate = 0;   // request never reaches the file
  double tear_rate = 0;   // a write of which only the first half reaches the file
  double delay_rate = 0;  // batch waits until somebody asks for a result
  int error = EIO;
  uint64_t seed = 1;
  // Which requests may fail; all by default.
  std::function<bool(const IoRequest&)> eligible{};
};

class FlakyIo final : public AsyncIo {
 public:
  FlakyIo(std::unique_ptr<AsyncIo> inner, FlakyPlan plan)
      : inner_(std::move(inner)), plan_(std::move(plan)), random_(plan_.seed) {}
  ~FlakyIo() override {
    const std::scoped_lock lock(mutex_);
    release_held();
  }

  std::optional<IoToken> submit(std::vector<IoRequest> batch, WhenFull when_full) override {
    const std::scoped_lock lock(mutex_);
    Entry entry;
    entry.injected.resize(batch.size());
    for (size_t i = 0; i < batch.size(); ++i) inject(batch[i], &entry.injected[i]);
    if (chance(plan_.delay_rate)) {
      entry.held = std::move(batch);
      order_.push_back(last_token_ + 1);
    } else {
      const auto inner = inner_->submit(std::move(batch), when_full);
      if (!inner) return std::nullopt;
      entry.inner = *inner;
    }
    entries_.emplace(++last_token_, std::move(entry));
    return last_token_;
  }
  int64_t cancel(IoToken token) override { return inner_->cancel(find(token).inner); }
  std::optional<IoResult> poll(IoToken token) override {
    const Entry entry = find(token);
    auto result = inner_->poll(entry.inner);
    if (!result) return std::nullopt;
    return finish(token, entry, *std::move(result));
  }
  IoResult wait(IoToken token) override {
    const Entry entry = find(token);
    return finish(token, entry, inner_->wait(entry.inner));
  }
  IoCounters counters() const override { return inner_->counters(); }
  std::string_view name() const noexcept override { return "flaky"; }
  int64_t num_injected() const {
    const std::scoped_lock lock(mutex_);
    return num_injected_;
  }
  // From now on nothing fails.
  void heal() {
    const std::scoped_lock lock(mutex_);
    plan_.fail_rate = plan_.tear_rate = 0;
  }

 private:
  struct Entry {
    IoToken inner = 0;
    std::vector<IoRequest> held{};
    std::vector<int> injected{};  // error per request, 0 for none
  };

  bool chance(double rate) { return std::uniform_real_distribution<>(0, 1)(random_) < rate; }

  void inject(IoRequest& request, int* error) {
    if (plan_.eligible && !plan_.eligible(request)) return;
    if (chance(plan_.fail_rate)) {
      *error = plan_.error;
      ++num_injected_;
      request.buffers.clear();
    } else if (request.op == IoOp::kWrite && chance(plan_.tear_rate)) {
      *error = plan_.error;
      ++num_injected_;
      for (size_t i = (request.buffers.size() + 1) / 2; i < request.buffers.size(); ++i) {
        request.buffers[i].num_bytes = 0;
      }
      if (request.buffers.size() == 1) request.buffers[0].num_bytes /= 2;
    }
  }

  void release_held() {
    std::shuffle(order_.begin(), order_.end(), random_);
    for (const IoToken token : order_) {
      Entry& entry = entries_.at(token);
      entry.inner = *inner_->submit(std::move(entry.held), WhenFull::kBlock);
    }
    order_.clear();
  }

  Entry find(IoToken token) {
    const std::scoped_lock lock(mutex_);
    release_held();
    return entries_.at(token);
  }

  IoResult finish(IoToken token, const Entry& entry, IoResult result) {
    const std::scoped_lock lock(mutex_);
    for (size_t i = 0; i < entry.injected.size(); ++i) {
      if (entry.injected[i] != 0) result.requests[i].error = entry.injected[i];
    }
    entries_.erase(token);
    return result;
  }

  std::unique_ptr<AsyncIo> inner_;
  mutable std::mutex mutex_;
  FlakyPlan plan_;
  std::mt19937_64 random_;
  std::unordered_map<IoToken, Entry> entries_;
  std::vector<IoToken> order_;  // held batches
  IoToken last_token_ = 0;
  int64_t num_injected_ = 0;
};

}  // namespace helicore::kv::testing
