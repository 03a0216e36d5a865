#include "helicore/core/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "helicore/core/error.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace helicore {
namespace {

void cpu_relax() noexcept {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The worker index of this thread while it runs a task or holds a Lease, and how deep its leases
// are nested.
thread_local int current_worker = 0;
thread_local bool inside_region = false;
thread_local int lease_depth = 0;

struct AlignedBuffer {
  void* data = nullptr;
  size_t num_bytes = 0;

  AlignedBuffer() = default;
  AlignedBuffer(const AlignedBuffer&) = delete;
  AlignedBuffer& operator=(const AlignedBuffer&) = delete;
  ~AlignedBuffer() { std::free(data); }

  void* reserve(size_t wanted) {
    if (wanted > num_bytes) {
      std::free(data);
      num_bytes = (wanted + wanted / 2 + 63) / 64 * 64;
      data = std::aligned_alloc(64, num_bytes);
      if (data == nullptr) {
        num_bytes = 0;
        throw OutOfMemory(detail::concat("[core.thread_pool] no memory for ", wanted,
                                         " bytes of kernel scratch"));
      }
    }
    return data;
  }
};

struct alignas(64) WorkerState {
  AlignedBuffer scratch;
};

}  // namespace

struct ThreadPool::Impl {
  // The next task of the open region. A region closes (even generation) only after every worker
  // that joined has left, so a late worker can never take a task of a region it did not join.
  alignas(64) std::atomic<uint64_t> ticket{0};
  alignas(64) std::atomic<uint32_t> generation{0};
  alignas(64) std::atomic<int64_t> unfinished{0};
  std::atomic<int> sleepers{0};
  std::atomic<bool> stop{false};
  int64_t num_tasks = 0;
  TaskFn fn = nullptr;
  void* ctx = nullptr;
  std::atomic<int> active_workers{0};
  int spin_us = 200;
  std::mutex region_mutex;
  std::vector<std::unique_ptr<WorkerState>> workers;
  AlignedBuffer shared;
  std::vector<std::thread> threads;

  void work(uint32_t my_generation, int worker) {
    // Joining: after this increment the region's owner waits for us before it changes fn, ctx or
    // num_tasks.
    active_workers.fetch_add(1, std::memory_order_seq_cst);
    if (generation.load(std::memory_order_seq_cst) == my_generation) {
      drain(worker);
    }
    active_workers.fetch_sub(1, std::memory_order_release);
  }

  void drain(int worker) {
    int64_t done = 0;
    for (;;) {
      uint64_t task = ticket.fetch_add(1, std::memory_order_acq_rel);
      if (static_cast<int64_t>(task) >= num_tasks) break;
      fn(ctx, static_cast<int64_t>(task), worker);
      ++done;
    }
    if (done != 0) unfinished.fetch_sub(done, std::memory_order_acq_rel);
  }

  void worker_loop(int worker) {
    inside_region = true;
    current_worker = worker;
    uint32_t seen = 0;
    while (!stop.load(std::memory_order_acquire)) {
      uint32_t current = wait_for_change(seen);
      if (stop.load(std::memory_order_acquire)) return;
      seen = current;
      if (current % 2 == 1) work(current, worker);
    }
  }

  uint32_t wait_for_change(uint32_t seen) {
    auto deadline = std::chrono::steady_clock::now() + std::chrono::microseconds(spin_us);
    for (int i = 0;; ++i) {
      uint32_t current = generation.load(std::memory_order_acquire);
      if (current != seen) return current;
      cpu_relax();
      if (i % 64 == 63 && std::chrono::steady_clock::now() > deadline) break;
    }
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    generation.wait(seen, std::memory_order_seq_cst);
    sleepers.fetch_sub(1, std::memory_order_relaxed);
    return generation.load(std::memory_order_acquire);
  }
};

ThreadPool::ThreadPool(int num_threads, int spin_us)
    : impl_(std::make_unique<Impl>()), num_threads_(num_threads) {
  HELICORE_CHECK(num_threads >= 1 && num_threads <= 1024, "core.thread_pool",
                 "num_threads must be in 1..1024, got ", num_threads);
  impl_->spin_us = spin_us;
  for (int i = 0; i < num_threads; ++i) impl_->workers.push_back(std::make_unique<WorkerState>());
  for (int i = 1; i < num_threads; ++i) {
    impl_->threads.emplace_back([impl = impl_.get(), i] { impl->worker_loop(i); });
  }
}

ThreadPool::~ThreadPool() {
  impl_->stop.store(true, std::memory_order_seq_cst);
  impl_->generation.fetch_add(2, std::memory_order_seq_cst);
  impl_->generation.notify_all();
  for (std::thread& t : impl_->threads) t.join();
}

bool ThreadPool::workers_awake() const noexcept {
  return impl_->sleepers.load(std::memory_order_relaxed) == 0;
}

void* ThreadPool::scratch(int worker, size_t num_bytes) {
  return impl_->workers[static_cast<size_t>(worker)]->scratch.reserve(num_bytes);
}

void* ThreadPool::shared_scratch(size_t num_bytes) { return impl_->shared.reserve(num_bytes); }

ThreadPool::Lease::Lease(ThreadPool& pool) : pool_(&pool) {
  if (!inside_region && lease_depth++ == 0) pool_->impl_->region_mutex.lock();
}

ThreadPool::Lease::~Lease() {
  if (!inside_region && --lease_depth == 0) pool_->impl_->region_mutex.unlock();
}

void ThreadPool::run(int64_t num_tasks, TaskFn fn, void* ctx) {
  if (num_tasks <= 0) return;
  Lease lease(*this);
  if (num_tasks == 1 || num_threads_ == 1 || inside_region) {
    for (int64_t task = 0; task < num_tasks; ++task) fn(ctx, task, current_worker);
    return;
  }
  Impl& p = *impl_;
  p.num_tasks = num_tasks;
  p.fn = fn;
  p.ctx = ctx;
  p.ticket.store(0, std::memory_order_relaxed);
  p.unfinished.store(num_tasks, std::memory_order_relaxed);
  // Odd generations are open regions, even ones closed: a worker that wakes late sees a closed one
  // and goes back.
  p.generation.fetch_add(1, std::memory_order_seq_cst);
  if (p.sleepers.load(std::memory_order_seq_cst) > 0) p.generation.notify_all();
  inside_region = true;
  p.drain(0);
  inside_region = false;
  while (p.unfinished.load(std::memory_order_acquire) > 0) cpu_relax();
  p.generation.fetch_add(1, std::memory_order_seq_cst);
  while (p.active_workers.load(std::memory_order_seq_cst) > 0) cpu_relax();
}

namespace {

int available_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

// Never destroyed at exit: threads that outlive static destruction may still use it. A forked child
// has none of the parent's threads, so it drops the pool (without joining) and makes its own on
// first use.
std::atomic<ThreadPool*> process_pool{nullptr};
std::mutex process_pool_mutex;

ThreadPool& make_process_pool() {
  std::lock_guard<std::mutex> lock(process_pool_mutex);
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { process_pool.store(nullptr); });
  (void)registered;
  if (process_pool.load() == nullptr) process_pool.store(new ThreadPool(available_cpus()));
  return *process_pool.load();
}

}  // namespace

ThreadPool& default_pool() {
  ThreadPool* pool = process_pool.load(std::memory_order_acquire);
  return pool != nullptr ? *pool : make_process_pool();
}

void set_num_threads(int num_threads) {
  HELICORE_CHECK(num_threads >= 1 && num_threads <= 1024, "core.set_num_threads",
                 "num_threads must be in 1..1024, got ", num_threads);
  ThreadPool& old = default_pool();
  if (old.num_threads() == num_threads) return;
  auto replacement = std::make_unique<ThreadPool>(num_threads);
  process_pool.store(replacement.release(), std::memory_order_release);
  delete &old;
}

int num_threads() { return default_pool().num_threads(); }

}  // namespace helicore
