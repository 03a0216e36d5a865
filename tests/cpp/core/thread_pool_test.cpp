#include "helicore/core/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "helicore/core/error.h"

namespace helicore {
namespace {

TEST(ThreadPoolTest, runs_every_task_exactly_once) {
  for (int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    for (int64_t n : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> hits(static_cast<size_t>(n));
      pool.parallel_for(n, [&](int64_t i) { hits[static_cast<size_t>(i)].fetch_add(1); });
      for (auto& h : hits) EXPECT_EQ(h.load(), 1);
    }
  }
}

TEST(ThreadPoolTest, many_short_regions_lose_no_task) {
  ThreadPool pool(4, /*spin_us=*/0);  // workers sleep at once: the wake-up path is used each time
  std::atomic<int64_t> sum{0};
  for (int round = 0; round < 2000; ++round) {
    pool.parallel_for(5, [&](int64_t i) { sum.fetch_add(i); });
  }
  EXPECT_EQ(sum.load(), 2000 * 10);
}

TEST(ThreadPoolTest, concurrent_callers_take_turns_and_worker_ids_stay_exclusive) {
  ThreadPool pool(3);
  std::vector<std::atomic<int>> busy(3);
  std::atomic<bool> clash{false};
  std::atomic<int64_t> count{0};
  auto call = [&] {
    for (int round = 0; round < 200; ++round) {
      pool.parallel_for_worker(6, [&](int64_t, int worker) {
        if (busy[static_cast<size_t>(worker)].fetch_add(1) != 0) clash = true;
        count.fetch_add(1);
        busy[static_cast<size_t>(worker)].fetch_sub(1);
      });
    }
  };
  std::thread a(call), b(call);
  a.join();
  b.join();
  EXPECT_FALSE(clash.load());
  EXPECT_EQ(count.load(), 2 * 200 * 6);
}

TEST(ThreadPoolTest, nested_region_runs_serially_on_its_worker) {
  ThreadPool pool(2);
  std::atomic<int> wrong{0};
  pool.parallel_for_worker(8, [&](int64_t, int outer) {
    pool.parallel_for_worker(3, [&](int64_t, int inner) {
      if (inner != outer) wrong.fetch_add(1);
    });
  });
  EXPECT_EQ(wrong.load(), 0);
}

TEST(ThreadPoolTest, scratch_is_aligned_and_kept) {
  ThreadPool pool(2);
  ThreadPool::Lease lease(pool);
  void* first = pool.scratch(0, 1000);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(first) % 64, 0u);
  EXPECT_EQ(pool.scratch(0, 10), first);
}

TEST(ThreadPoolTest, refuses_a_bad_thread_count) {
  EXPECT_THROW(set_num_threads(0), InvalidArgument);
  EXPECT_THROW(ThreadPool(-1), InvalidArgument);
}

}  // namespace
}  // namespace helicore
