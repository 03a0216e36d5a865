// The public calls of managers and caches as operations: each function says what is asked, runs the
// call inside the sink and says what came of it. The methods come here first while there is a sink.
// Internal.
#pragma once

#include <memory>

#include "helicore/kv/kv_cache_manager.h"
#include "helicore/kv/operation_sink.h"

namespace helicore::kv::recorded {

using Caches = std::span<KVCache* const>;
using Row = std::optional<std::span<int32_t>>;

[[nodiscard]] std::unique_ptr<KVCache> create(OperationSink& sink, KVCacheManager& manager,
                                              const CreateOptions& options);
[[nodiscard]] bool resume(OperationSink& sink, KVCache& cache, std::optional<int64_t> stream);
void suspend(OperationSink& sink, KVCache& cache);
[[nodiscard]] bool resize(OperationSink& sink, KVCache& cache, std::optional<int64_t> capacity,
                          std::optional<int64_t> history);
void truncate(OperationSink& sink, KVCache& cache, int64_t num_tokens);
[[nodiscard]] std::unique_ptr<KVCache> fork(OperationSink& sink, KVCache& cache,
                                            std::optional<int64_t> id);
void commit(OperationSink& sink, KVCache& cache, std::span<const TokenId> tokens, bool is_end);
void stop_committing(OperationSink& sink, KVCache& cache);
void close(OperationSink& sink, KVCache& cache);
void set_index_row(OperationSink& sink, KVCache& cache, int beam, LifeCycleId group, Row row);
void resume_many(OperationSink& sink, KVCacheManager& manager, Caches caches,
                 std::optional<int64_t> stream, std::span<uint8_t> results);
void resize_many(OperationSink& sink, KVCacheManager& manager, Caches caches,
                 std::span<const int32_t> capacities, std::span<const int32_t> histories,
                 std::span<uint8_t> results);
void truncate_many(OperationSink& sink, KVCacheManager& manager, Caches caches,
                   std::span<const int32_t> num_tokens);
void commit_many(OperationSink& sink, KVCacheManager& manager, Caches caches,
                 std::span<const TokenId> tokens, std::span<const int32_t> counts);
void clear_reusable_blocks(OperationSink& sink, KVCacheManager& manager);
void shutdown(OperationSink& sink, KVCacheManager& manager);
[[nodiscard]] std::unique_ptr<KVCache> pin(OperationSink& sink, KVCacheManager& manager,
                                           std::span<const TokenId> tokens,
                                           const ReuseScope& scope);
[[nodiscard]] PrefetchTicket prefetch(OperationSink& sink, KVCache& cache, int level);
[[nodiscard]] bool poll_prefetch(OperationSink& sink, KVCache& cache, PrefetchTicket& ticket);
void cancel_prefetch(OperationSink& sink, KVCache& cache, PrefetchTicket& ticket);
[[nodiscard]] std::unique_ptr<PlannedDrop> plan_drop(OperationSink& sink, KVCache& cache);
void drop(OperationSink& sink, PlannedDrop& plan);
[[nodiscard]] StreamHandle make_step_stream(OperationSink& sink, KVCacheManager& manager);
uint64_t submit_step(OperationSink& sink, KVCacheManager& manager, StreamHandle stream);
void complete_step(OperationSink& sink, KVCacheManager& manager, StreamHandle stream,
                   uint64_t step);
void set_stream(OperationSink& sink, KVCache& cache, int64_t stream);
[[nodiscard]] ResizeResult resize_level(OperationSink& sink, KVCacheManager& manager, int level,
                                        int64_t quota, bool best_effort);
int64_t maintain(OperationSink& sink, KVCacheManager& manager, int64_t max_pages);
bool adjust(OperationSink& sink, KVCacheManager& manager);
void set_scratch_reuse(OperationSink& sink, KVCache& cache, bool is_enabled);
void select_optional_reuse(OperationSink& sink, KVCache& cache,
                           std::span<const LifeCycleId> groups);
void exclude_stats(OperationSink& sink, KVCacheManager& manager, int64_t id);
[[nodiscard]] std::vector<KVEvent> drain_events(OperationSink& sink, KVCacheManager& manager,
                                                size_t max_events);
[[nodiscard]] std::vector<KVEvent> snapshot_events(OperationSink& sink, KVCacheManager& manager);

}  // namespace helicore::kv::recorded
