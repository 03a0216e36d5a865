// The one pool of CPU worker threads that every CPU kernel uses.
//
// A parallel region costs about a microsecond while workers are still spinning after the last one;
// an idle worker spins for `spin_us` and then sleeps on a futex, so an oversubscribed machine does
// not crawl.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>

namespace helicore {

// Threads: one caller at a time owns the pool (others wait on its mutex); `parallel_for` called
// from inside a region executes serially on the calling worker. The calling thread is worker 0.
// Destruction joins the workers.
class ThreadPool {
 public:
  // num_threads >= 1 counts the calling thread.
  explicit ThreadPool(int num_threads, int spin_us = 200);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  [[nodiscard]] int num_threads() const noexcept { return num_threads_; }
  // Whether every worker still spins: a region then begins in well under a microsecond, else waking
  // costs several. A hint for choosing between a region and the calling thread; may be outdated at
  // once.
  [[nodiscard]] bool workers_awake() const noexcept;

  // Calls fn(task) for task in [0, num_tasks), tasks handed out dynamically in ascending order.
  // fn must not throw.
  template <typename Fn>
  void parallel_for(int64_t num_tasks, Fn&& fn) {
    parallel_for_worker(num_tasks, [&fn](int64_t task, int /*worker*/) { fn(task); });
  }

  // Calls fn(task, worker) with worker in [0, num_threads()); a worker runs one task at a time, so
  // per-worker scratch needs no lock.
  template <typename Fn>
  void parallel_for_worker(int64_t num_tasks, Fn&& fn) {
    using F = std::remove_reference_t<Fn>;
    run(
        num_tasks,
        [](void* ctx, int64_t task, int worker) { (*static_cast<F*>(ctx))(task, worker); },
        const_cast<void*>(static_cast<const void*>(&fn)));
  }

  // Exclusive use of the pool and its scratch over several regions; re-entrant. A kernel that uses
  // shared_scratch(), or scratch across two regions, holds a Lease for its whole run.
  class Lease {
   public:
    explicit Lease(ThreadPool& pool);
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

   private:
    ThreadPool* pool_;
  };

  // Scratch of at least `num_bytes` for `worker`, 64-byte aligned, kept between calls (it only
  // grows). Valid until the next scratch() call of the same worker. Call inside a region or under a
  // Lease.
  [[nodiscard]] void* scratch(int worker, size_t num_bytes);
  // Scratch for a whole region, under a Lease; valid until the next shared_scratch() call.
  [[nodiscard]] void* shared_scratch(size_t num_bytes);

 private:
  using TaskFn = void (*)(void* ctx, int64_t task, int worker);
  void run(int64_t num_tasks, TaskFn fn, void* ctx);

  struct Impl;
  std::unique_ptr<Impl> impl_;
  int num_threads_;
};

// The process-wide pool. Created on first use with the number of CPUs this process may run on.
[[nodiscard]] ThreadPool& default_pool();
// Replaces the pool; call while no kernel runs. num_threads < 1 throws InvalidArgument.
void set_num_threads(int num_threads);
[[nodiscard]] int num_threads();

}  // namespace helicore
