#include "helicore/kv/recorded_calls.h"

#include <algorithm>
#include <functional>
#include <utility>

namespace helicore::kv::recorded {
namespace {

using Field = OperationField;
using Kind = OperationKind;

Operation on(Kind kind, const KVCache& cache) {
  Operation operation{kind, {}};
  operation.set(Field::kCaches, cache.serial());
  return operation;
}

Operation on(Kind kind, const KVCacheManager& manager, Caches caches) {
  Operation operation{kind, {}};
  auto& serials = operation.list(Field::kCaches);
  serials.reserve(caches.size());
  for (const KVCache* cache : caches) {
    serials.push_back(cache == nullptr               ? kNullCache
                      : cache->manager() != &manager ? kForeignCache
                                                     : cache->serial());
  }
  return operation;
}

void add_result(Operation& operation, const KVCache& cache, bool done) {
  if (done) return;
  operation.set(Field::kOutcome, static_cast<int64_t>(OperationOutcome::kNoRoom));
  if (cache.last_failure()) operation.add_reason(*cache.last_failure());
}

void add_results(Operation& operation, Caches caches, std::span<const uint8_t> results) {
  operation.set_all(Field::kResults, results);
  for (size_t i = 0; i < caches.size(); ++i) {
    if (results[i] == 0 && caches[i]->last_failure()) {
      operation.add_reason(*caches[i]->last_failure());
    }
  }
}

void add_num_results(Operation& operation, Caches caches, size_t num_results) {
  if (num_results == caches.size()) return;
  operation.set(Field::kNumResults, static_cast<int64_t>(num_results));
}

// A call on one cache that has nothing to say but whether it threw.
template <typename Call>
void run_on(OperationSink& sink, Operation operation, KVCache& cache, const Call& call) {
  KVCache* const caches[] = {&cache};
  sink.run(operation, caches, call);
}

}  // namespace

std::unique_ptr<KVCache> create(OperationSink& sink, KVCacheManager& manager,
                                const CreateOptions& options) {
  Operation operation{Kind::kCreate, {}};
  operation.set_scope(options.reuse_scope);
  operation.set_all(Field::kTokens, options.input_tokens);
  operation.set(Field::kId, options.id);
  operation.set(Field::kPriority, options.priority);
  operation.set(Field::kExpectedLength, options.expected_prompt_length);
  operation.set_retention(options.retention);
  std::unique_ptr<KVCache> cache;
  sink.run(operation, {}, [&] {
    cache = manager.create_kv_cache(options);
    operation.set(Field::kNewCache, cache->serial());
    operation.set(Field::kMatched, cache->num_committed_tokens());
  });
  return cache;
}

bool resume(OperationSink& sink, KVCache& cache, std::optional<int64_t> stream) {
  Operation operation = on(Kind::kResume, cache);
  operation.set(Field::kStream, stream);
  KVCache* const caches[] = {&cache};
  bool done = false;
  sink.run(operation, caches, [&] {
    done = cache.resume(stream);
    add_result(operation, cache, done);
  });
  return done;
}

void suspend(OperationSink& sink, KVCache& cache) {
  run_on(sink, on(Kind::kSuspend, cache), cache, [&] { cache.suspend(); });
}

bool resize(OperationSink& sink, KVCache& cache, std::optional<int64_t> capacity,
            std::optional<int64_t> history) {
  Operation operation = on(Kind::kResize, cache);
  operation.set(Field::kCapacity, capacity);
  operation.set(Field::kHistory, history);
  KVCache* const caches[] = {&cache};
  bool done = false;
  sink.run(operation, caches, [&] {
    done = cache.resize(capacity, history);
    add_result(operation, cache, done);
  });
  return done;
}

void truncate(OperationSink& sink, KVCache& cache, int64_t num_tokens) {
  Operation operation = on(Kind::kTruncate, cache);
  operation.set(Field::kNumTokens, num_tokens);
  run_on(sink, std::move(operation), cache, [&] { cache.truncate(num_tokens); });
}

std::unique_ptr<KVCache> fork(OperationSink& sink, KVCache& cache, std::optional<int64_t> id) {
  Operation operation = on(Kind::kFork, cache);
  operation.set(Field::kId, id);
  KVCache* const caches[] = {&cache};
  std::unique_ptr<KVCache> child;
  sink.run(operation, caches, [&] {
    child = cache.fork(id);
    operation.set(Field::kNewCache, child->serial());
    operation.set(Field::kMatched, child->num_committed_tokens());
  });
  return child;
}

void commit(OperationSink& sink, KVCache& cache, std::span<const TokenId> tokens, bool is_end) {
  Operation operation = on(Kind::kCommit, cache);
  operation.set_all(Field::kTokens, tokens);
  if (is_end) operation.set(Field::kIsEnd, 1);
  run_on(sink, std::move(operation), cache, [&] { cache.commit(tokens, is_end); });
}

void stop_committing(OperationSink& sink, KVCache& cache) {
  run_on(sink, on(Kind::kStopCommitting, cache), cache, [&] { cache.stop_committing(); });
}

void close(OperationSink& sink, KVCache& cache) {
  run_on(sink, on(Kind::kClose, cache), cache, [&] { cache.close(); });
}

void set_index_row(OperationSink& sink, KVCache& cache, int beam, LifeCycleId group, Row row) {
  Operation operation = on(Kind::kSetIndexRow, cache);
  operation.set(Field::kBeam, beam);
  operation.set(Field::kGroup, group.value());
  if (row) operation.set(Field::kRowSize, static_cast<int64_t>(row->size()));
  run_on(sink, std::move(operation), cache,
         [&] { cache.set_base_page_index_buf(beam, group, row); });
}

void resume_many(OperationSink& sink, KVCacheManager& manager, Caches caches,
                 std::optional<int64_t> stream, std::span<uint8_t> results) {
  Operation operation = on(Kind::kResumeMany, manager, caches);
  add_num_results(operation, caches, results.size());
  operation.set(Field::kStream, stream);
  sink.run(operation, caches, [&] {
    manager.resume_many(caches, stream, results);
    add_results(operation, caches, results);
  });
}

void resize_many(OperationSink& sink, KVCacheManager& manager, Caches caches,
                 std::span<const int32_t> capacities, std::span<const int32_t> histories,
                 std::span<uint8_t> results) {
  Operation operation = on(Kind::kResizeMany, manager, caches);
  add_num_results(operation, caches, results.size());
  operation.set_all(Field::kCapacity, capacities);
  operation.set_all(Field::kHistory, histories);
  sink.run(operation, caches, [&] {
    manager.resize_many(caches, capacities, histories, results);
    add_results(operation, caches, results);
  });
}

void truncate_many(OperationSink& sink, KVCacheManager& manager, Caches caches,
                   std::span<const int32_t> num_tokens) {
  Operation operation = on(Kind::kTruncateMany, manager, caches);
  operation.set_all(Field::kNumTokens, num_tokens);
  sink.run(operation, caches, [&] { manager.truncate_many(caches, num_tokens); });
}

void commit_many(OperationSink& sink, KVCacheManager& manager, Caches caches,
                 std::span<const TokenId> tokens, std::span<const int32_t> counts) {
  Operation operation = on(Kind::kCommitMany, manager, caches);
  operation.set_all(Field::kTokens, tokens);
  operation.set_all(Field::kCounts, counts);
  sink.run(operation, caches, [&] { manager.commit_many(caches, tokens, counts); });
}

void clear_reusable_blocks(OperationSink& sink, KVCacheManager& manager) {
  Operation operation{Kind::kClearReusableBlocks, {}};
  sink.run(operation, {}, [&] { manager.clear_reusable_blocks(); });
}

void shutdown(OperationSink& sink, KVCacheManager& manager) {
  Operation operation{Kind::kShutdown, {}};
  sink.run(operation, {}, [&] { manager.shutdown(); });
}

std::unique_ptr<KVCache> pin(OperationSink& sink, KVCacheManager& manager,
                             std::span<const TokenId> tokens, const ReuseScope& scope) {
  Operation operation{Kind::kPin, {}};
  operation.set_scope(scope);
  operation.set_all(Field::kTokens, tokens);
  std::unique_ptr<KVCache> cache;
  sink.run(operation, {}, [&] {
    cache = manager.pin(tokens, scope);
    operation.set(Field::kNewCache, cache->serial());
    operation.set(Field::kMatched, cache->num_committed_tokens());
  });
  return cache;
}

PrefetchTicket prefetch(OperationSink& sink, KVCache& cache, int level) {
  Operation operation = on(Kind::kPrefetch, cache);
  operation.set(Field::kLevel, level);
  PrefetchTicket ticket;
  run_on(sink, std::move(operation), cache, [&] { ticket = cache.prefetch(level); });
  return ticket;
}

bool poll_prefetch(OperationSink& sink, KVCache& cache, PrefetchTicket& ticket) {
  bool done = false;
  run_on(sink, on(Kind::kPollPrefetch, cache), cache, [&] { done = ticket.is_done(); });
  return done;
}

void cancel_prefetch(OperationSink& sink, KVCache& cache, PrefetchTicket& ticket) {
  run_on(sink, on(Kind::kCancelPrefetch, cache), cache, [&] { ticket.cancel(); });
}

std::unique_ptr<PlannedDrop> plan_drop(OperationSink& sink, KVCache& cache) {
  Operation operation = on(Kind::kPlanDrop, cache);
  KVCache* const caches[] = {&cache};
  std::unique_ptr<PlannedDrop> plan;
  sink.run(operation, caches, [&] {
    plan = cache.plan_committed_block_drop();
    if (plan == nullptr) return;
    operation.set(Field::kNewPlan, plan->serial());
    operation.set(Field::kNumPages, static_cast<int64_t>(plan->num_pages()));
  });
  return plan;
}

void drop(OperationSink& sink, PlannedDrop& plan) {
  Operation operation{Kind::kDrop, {}};
  operation.set(Field::kPlan, plan.serial());
  sink.run(operation, {}, [&] { plan.drop(); });
}

StreamHandle make_step_stream(OperationSink& sink, KVCacheManager& manager) {
  Operation operation{Kind::kMakeStepStream, {}};
  StreamHandle stream = 0;
  sink.run(operation, {}, [&] {
    stream = manager.make_step_stream();
    operation.set(Field::kNewStream, stream);
  });
  return stream;
}

uint64_t submit_step(OperationSink& sink, KVCacheManager& manager, StreamHandle stream) {
  Operation operation{Kind::kSubmitStep, {}};
  operation.set(Field::kStream, stream);
  uint64_t step = 0;
  sink.run(operation, {}, [&] {
    step = manager.submit_step(stream);
    operation.set(Field::kNewStep, static_cast<int64_t>(step));
  });
  return step;
}

void complete_step(OperationSink& sink, KVCacheManager& manager, StreamHandle stream,
                   uint64_t step) {
  Operation operation{Kind::kCompleteStep, {}};
  operation.set(Field::kStream, stream);
  operation.set(Field::kStep, static_cast<int64_t>(step));
  sink.run(operation, {}, [&] { manager.complete_step(stream, step); });
}

void set_stream(OperationSink& sink, KVCache& cache, int64_t stream) {
  Operation operation = on(Kind::kSetStream, cache);
  operation.set(Field::kStream, stream);
  run_on(sink, std::move(operation), cache, [&] { cache.set_stream(stream); });
}

ResizeResult resize_level(OperationSink& sink, KVCacheManager& manager, int level, int64_t quota,
                          bool best_effort) {
  Operation operation{Kind::kResizeLevel, {}};
  operation.set(Field::kLevel, level);
  operation.set(Field::kQuota, quota);
  if (best_effort) operation.set(Field::kBestEffort, 1);
  ResizeResult result;
  sink.run(operation, {}, [&] {
    result = manager.resize(level, quota, best_effort);
    if (!result.done) {
      operation.set(Field::kOutcome, static_cast<int64_t>(OperationOutcome::kNoRoom));
    }
    if (result.reason) operation.add_reason(*result.reason);
    operation.set(Field::kNewQuota, result.quota);
    operation.set(Field::kMinimum, result.minimum);
    operation.set_all(Field::kGroupSlots, std::span<const int64_t>(result.slots.raw()));
    operation.set_all(Field::kPending, std::span<const int64_t>(result.pending.raw()));
  });
  return result;
}

int64_t maintain(OperationSink& sink, KVCacheManager& manager, int64_t max_pages) {
  Operation operation{Kind::kMaintain, {}};
  operation.set(Field::kMaxPages, max_pages);
  int64_t moved = 0;
  sink.run(operation, {}, [&] {
    moved = manager.maintain(max_pages);
    operation.set(Field::kNumMoved, moved);
  });
  return moved;
}

bool adjust(OperationSink& sink, KVCacheManager& manager) {
  Operation operation{Kind::kAdjust, {}};
  bool started = false;
  sink.run(operation, {}, [&] {
    started = manager.adjust();
    operation.set(Field::kStarted, started ? 1 : 0);
  });
  return started;
}

void set_scratch_reuse(OperationSink& sink, KVCache& cache, bool is_enabled) {
  Operation operation = on(Kind::kSetScratchReuse, cache);
  operation.set(Field::kIsEnabled, is_enabled ? 1 : 0);
  run_on(sink, std::move(operation), cache, [&] { cache.scratch().set_enabled(is_enabled); });
}

void select_optional_reuse(OperationSink& sink, KVCache& cache,
                           std::span<const LifeCycleId> groups) {
  Operation operation = on(Kind::kSelectOptionalReuse, cache);
  auto& kept = operation.list(Field::kGroup);
  for (const LifeCycleId group : groups) kept.push_back(group.value());
  run_on(sink, std::move(operation), cache, [&] { cache.select_optional_reuse(groups); });
}

void exclude_stats(OperationSink& sink, KVCacheManager& manager, int64_t id) {
  Operation operation{Kind::kExcludeStats, {}};
  operation.set(Field::kId, id);
  sink.run(operation, {}, [&] { manager.mark_stats_excluded(id); });
}

namespace {

std::vector<KVEvent> run_for_events(OperationSink& sink, const KVCacheManager& manager,
                                    Operation operation,
                                    const std::function<std::vector<KVEvent>()>& call) {
  std::vector<KVEvent> events;
  sink.run(operation, {}, [&] {
    events = call();
    operation.set(Field::kNumEvents, static_cast<int64_t>(events.size()));
    operation.set(Field::kDropped, static_cast<int64_t>(manager.num_dropped_events()));
    if (!events.empty()) operation.set(Field::kLastEvent, static_cast<int64_t>(events.back().id));
  });
  return events;
}

}  // namespace

std::vector<KVEvent> drain_events(OperationSink& sink, KVCacheManager& manager, size_t max_events) {
  Operation operation{Kind::kDrainEvents, {}};
  operation.set(Field::kMaxEvents,
                static_cast<int64_t>(std::min(max_events, static_cast<size_t>(INT64_MAX))));
  return run_for_events(sink, manager, std::move(operation),
                        [&] { return manager.drain_events(max_events); });
}

std::vector<KVEvent> snapshot_events(OperationSink& sink, KVCacheManager& manager) {
  return run_for_events(sink, manager, {Kind::kSnapshotEvents, {}},
                        [&] { return manager.snapshot_events(); });
}

}  // namespace helicore::kv::recorded
