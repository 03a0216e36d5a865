// When to open a parallel region: waking and joining workers costs microseconds, so small work
// stays on the caller.
#pragma once

#include <cstdint>

#include "helicore/core/thread_pool.h"

namespace helicore::nn {

// Work that is worth a region, in nanoseconds on one thread: while the workers spin, and when they
// must be woken.
inline constexpr double kWorthARegionNs = 1.5e3;
inline constexpr double kWorthWakingNs = 3e4;

// Whether `total_ns` of work should be shared. Affects time only, never results.
inline bool worth_a_region(double total_ns) {
  const ThreadPool& pool = default_pool();
  if (pool.num_threads() == 1 || total_ns < kWorthARegionNs) return false;
  return total_ns >= kWorthWakingNs || pool.workers_awake();
}

// Calls fn(task, worker) for task in [0, num_tasks), in parallel when `total_ns` is worth it.
template <typename Fn>
void parallel_tasks(int64_t num_tasks, double total_ns, Fn&& fn) {
  ThreadPool& pool = default_pool();
  if (num_tasks > 1 && worth_a_region(total_ns)) return pool.parallel_for_worker(num_tasks, fn);
  pool.parallel_for_worker(1, [&](int64_t /*task*/, int worker) {
    for (int64_t task = 0; task < num_tasks; ++task) fn(task, worker);
  });
}

// Runs fn(begin, end) over [0, rows) in chunks, in parallel when rows * row_ns is worth it.
template <typename Fn>
void for_row_chunks(int64_t rows, double row_ns, Fn&& fn) {
  if (rows == 0) return;
  if (rows == 1 || !worth_a_region(static_cast<double>(rows) * row_ns)) return fn(int64_t{0}, rows);
  ThreadPool& pool = default_pool();
  const auto at_least = static_cast<int64_t>(1e3 / row_ns) + 1;
  const int64_t share = (rows + 2 * pool.num_threads() - 1) / (2 * pool.num_threads());
  const int64_t chunk = share > 256 ? 256 : (share < at_least ? at_least : share);
  pool.parallel_for((rows + chunk - 1) / chunk, [&](int64_t task) {
    const int64_t begin = task * chunk;
    fn(begin, begin + chunk < rows ? begin + chunk : rows);
  });
}

// Rough time of a matrix product on one thread, in nanoseconds.
inline double product_ns(int64_t rows, int64_t out_features, int64_t in_features) {
  const double products = static_cast<double>(out_features) * static_cast<double>(in_features);
  return products * (0.014 + 0.006 * static_cast<double>(rows));
}

}  // namespace helicore::nn
