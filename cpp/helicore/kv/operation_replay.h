// Runs an operation log again on a manager of the same configuration and tells where it first
// behaves otherwise.
#pragma once

#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "helicore/kv/kv_cache_manager.h"
#include "helicore/kv/operation_log.h"

namespace helicore::kv {

class ReplayDevice;

struct ReplayOptions {
  // After every n-th operation all invariants are checked; 0: never.
  int32_t check_every = 64;  // >= 0
  // Taken in place of the log's; must give as many slots.
  std::optional<KVCacheManagerConfig> config = std::nullopt;
};

struct ReplayDifference {
  size_t index = 0;         // of the operation
  std::string operation{};  // in words, with the recorded results
  std::string what{};       // "state: recorded 0x12, replayed 0x34"
};

struct ReplayReport {
  size_t num_replayed = 0;    // operations that ran, the one that differs included
  size_t num_operations = 0;  // of the log
  LogEnd end = LogEnd::kComplete;
  std::optional<ReplayDifference> difference = std::nullopt;
  std::string note{};  // about the log's end; empty when it is complete
};
// One or more lines for people.
[[nodiscard]] std::string describe(const ReplayReport& report);

// Its manager keeps books and has no memory for pages, so that the log of a large machine replays
// on a small one, GPU or not. Not thread-safe. The log must outlive it.
class Replayer {
 public:
  // Throws what the manager's constructor throws.
  explicit Replayer(const OperationLog& log, ReplayOptions options = {});
  ~Replayer();
  Replayer(const Replayer&) = delete;
  Replayer& operator=(const Replayer&) = delete;

  // Runs the rest of the log, up to the first difference.
  [[nodiscard]] ReplayReport run();
  // Runs the next operation; the difference that it made. Needs next() < the number of operations.
  [[nodiscard]] std::optional<ReplayDifference> step();
  [[nodiscard]] size_t next() const noexcept { return next_; }

  [[nodiscard]] KVCacheManager& manager() noexcept { return *manager_; }
  // The cache that was made as the n-th; null when there is none.
  [[nodiscard]] KVCache* cache(int64_t serial) const noexcept;

 private:
  class Sink;

  // What the operation met besides its arguments comes to it again.
  void prepare(const Operation& recorded);
  [[nodiscard]] std::optional<int64_t> stream_of(const Operation& operation) const;
  void call_on_streams(const Operation& operation);
  void call(const Operation& operation);
  void call_on_upkeep(const Operation& operation);
  void call_on_cache(const Operation& operation);
  void call_on_many(const Operation& operation);
  [[nodiscard]] std::optional<std::string> compare_slots() const;

  const OperationLog& log_;
  ReplayOptions options_;
  ReplayDevice* device_ = nullptr;  // the manager's
  std::unique_ptr<KVCacheManager> manager_;
  std::unique_ptr<Sink> sink_;
  std::vector<std::unique_ptr<std::vector<int32_t>>> rows_;  // lent to caches
  std::vector<std::unique_ptr<KVCache>> caches_;
  std::vector<std::unique_ptr<PlannedDrop>> plans_;
  std::map<const KVCache*, PrefetchTicket> tickets_;  // the last of each cache
  std::map<int64_t, StreamHandle> streams_;           // recorded step stream -> the one here
  std::deque<int64_t> times_;                         // that the clock will show
  int64_t now_ns_ = 0;
  size_t next_ = 0;
};

}  // namespace helicore::kv
