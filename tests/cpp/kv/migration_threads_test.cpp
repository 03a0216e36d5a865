// Several levels under threads: each drives caches of its own on one manager, real copies and a
// real file below, while others ask. For TSan, and for what only real time shows.
#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <thread>

#include "kv/levels_setups.h"
#include "kv/temp_dir.h"

namespace helicore::kv::testing {
namespace {

#if defined(HELICORE_DEBUG_CHECKS) || defined(__SANITIZE_THREAD__)
constexpr int kOperations = 400;  // per thread; slow builds
#else
constexpr int kOperations = 3000;
#endif

// Pages of 64 KiB: the file level has 32 slots at least.
LevelsSetup threaded_setup(const std::vector<AttentionSpec>& specs, int64_t state_bytes) {
  std::vector<AttentionSpec> wide = specs;
  for (AttentionSpec& spec : wide) spec.row_bytes = 16384;
  LevelsSetup setup =
      setup_of("threads", 4, layers_of(4, wide, state_bytes > 0 ? 65536 : 0), {16, 4, 12});
  setup.min_snapshot = state_bytes > 0;
  return setup;
}

void run_threads(const LevelsSetup& setup, int num_threads) {
  const TempDir dir;
  KVCacheManager manager(config_of(setup, dir.path().string()));
  std::atomic<int> num_running{num_threads};
  std::mutex mutex;
  std::vector<std::string> differences;
  std::vector<std::thread> threads;
  for (int i = 0; i < num_threads; ++i) {
    threads.emplace_back([&, i] {
      LevelsWorld world(setup, manager, nullptr, static_cast<uint64_t>(i) + 1, true);
      auto difference = world.run(kOperations);
      if (!difference) difference = world.finish();
      if (difference) {
        const std::scoped_lock lock(mutex);
        differences.push_back(*difference);
        world.abandon();
      }
      --num_running;
    });
  }
  std::thread reader([&] {
    const std::vector<TokenId> prompt{0, 1, 2, 0, 1, 2, 0, 1};
    while (num_running > 0) {
      (void)manager.probe_reuse(prompt);
      (void)manager.stats();
      (void)manager.migration_stats();
      for (int level = 0; level < manager.num_levels(); ++level) {
        (void)manager.storage_statistics(level);
      }
      std::this_thread::yield();
    }
  });
  for (std::thread& thread : threads) thread.join();
  reader.join();
  for (const std::string& difference : differences) ADD_FAILURE() << difference;
  manager.clear_reusable_blocks();
  EXPECT_EQ(Introspection::state(manager).store.pages().num_in_use(), 0u);
  Introspection::check(manager);
}

TEST(LevelsThreads, full_attention_and_a_window_keep_their_bytes) {
  run_threads(threaded_setup({{}, {.window = 6, .sinks = 3}}, 0), 3);
}

TEST(LevelsThreads, recurrent_states_keep_their_bytes) {
  run_threads(threaded_setup({{}}, 65536), 3);
}

// The same operations by one thread, all checks on.
TEST(LevelsThreads, one_thread_on_the_real_machine_keeps_every_promise) {
  const TempDir dir;
  const LevelsSetup setup = threaded_setup({{}, {.window = 6}}, 0);
  KVCacheManager manager(config_of(setup, dir.path().string()));
  LevelsWorld world(setup, manager, nullptr, 11);
  auto difference = world.run(kOperations);
  if (!difference) difference = world.finish();
  if (difference) world.abandon();
  EXPECT_FALSE(difference) << *difference;
}

}  // namespace
}  // namespace helicore::kv::testing
