#include "helicore/kv/file_copies.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <random>

#include "helicore/kv/memory_pools.h"
#include "kv/flaky_io.h"
#include "kv/temp_dir.h"

namespace helicore::kv::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// A "GPU": copies between its memory and the slots happen only when somebody waits for them.
class LatePort final : public StagingPort {
 public:
  LatePort(const MemoryPool* gpu, int num_slots, int64_t slot_bytes)
      : gpu_(gpu), num_slots_(num_slots), slot_bytes_(slot_bytes) {
    memory_.resize(static_cast<size_t>(num_slots * slot_bytes));
  }
  bool owns(const MemoryPool& pool) const noexcept override { return &pool == gpu_; }
  int num_slots() const noexcept override { return num_slots_; }
  int64_t slot_bytes() const noexcept override { return slot_bytes_; }
  std::byte* slot(int, int index) const noexcept override {
    return const_cast<std::byte*>(memory_.data()) + index * slot_bytes_;
  }
  bool copy(int, std::byte* dst, const std::byte* src, int64_t num_bytes) noexcept override {
    if (num_copies_++ == fail_copy) return false;
    queue_.push_back({dst, src, num_bytes});
    return true;
  }
  bool mark(int, int index) noexcept override {
    marks_[index] = done_ + queue_.size();
    return true;
  }
  bool wait(int, int index) noexcept override {
    for (; done_ < marks_[index]; ++done_) {
      const Move& move = queue_.front();
      std::memcpy(move.dst, move.src, static_cast<size_t>(move.num_bytes));
      queue_.pop_front();
    }
    return num_waits_++ != fail_wait;
  }

  int fail_copy = -1;
  int fail_wait = -1;

 private:
  struct Move {
    std::byte* dst;
    const std::byte* src;
    int64_t num_bytes;
  };
  const MemoryPool* gpu_;
  int num_slots_;
  int64_t slot_bytes_;
  std::vector<std::byte> memory_;
  std::deque<Move> queue_;
  size_t done_ = 0;
  std::map<int, size_t> marks_;
  int num_copies_ = 0;
  int num_waits_ = 0;
};

class FileCopiesTest : public ::testing::Test {
 protected:
  static constexpr int64_t kBytes = int64_t{1} << 20;

  void make(FlakyPlan plan = {}, int num_slots = 4, int64_t slot_bytes = 10000) {
    auto real = make_async_io(
        {.queue_capacity = FileCopies::kRequestsPerLane, .depth = 4, .num_threads = 2});
    real_ = real.get();
    io_ = std::make_unique<FlakyIo>(std::move(real), std::move(plan));
    host_ = std::make_unique<HostMemoryPool>(PoolSpec{CacheTier::kHostMem, kBytes, kBytes},
                                             HostMemoryOptions{});
    gpu_ = std::make_unique<HostMemoryPool>(PoolSpec{CacheTier::kHostMem, kBytes, kBytes},
                                            HostMemoryOptions{});
    for (auto* file : {&file_, &other_file_}) {
      *file = std::make_unique<DiskFilePool>(
          PoolSpec{CacheTier::kDisk, kBytes, kBytes, dir_.path().string()});
    }
    port_ = std::make_unique<LatePort>(gpu_.get(), num_slots, slot_bytes);
    copies_ = std::make_unique<FileCopies>(*io_, port_.get(), 1);
    std::mt19937_64 random(5);
    for (MemoryPool* pool : {host_.get(), gpu_.get()}) {
      for (int64_t i = 0; i < kBytes; ++i) pool->data()[i] = static_cast<std::byte>(random());
    }
  }
  static std::vector<std::byte> contents(const MemoryPool& pool) {
    std::vector<std::byte> out(kBytes);
    if (pool.fd() < 0) {
      std::memcpy(out.data(), pool.data(), out.size());
    } else {
      EXPECT_EQ(::pread(pool.fd(), out.data(), out.size(), 0), kBytes);
    }
    return out;
  }
  std::vector<uint64_t> run(const std::vector<CopyTask>& tasks) { return copies_->run(0, tasks); }

  TempDir dir_;
  AsyncIo* real_ = nullptr;
  std::unique_ptr<FlakyIo> io_;
  std::unique_ptr<MemoryPool> host_, gpu_, file_, other_file_;
  std::unique_ptr<LatePort> port_;
  std::unique_ptr<FileCopies> copies_;
};

TEST_F(FileCopiesTest, neighbours_in_the_file_are_one_request) {
  make();
  std::vector<CopyTask> tasks;
  for (int64_t i = 9; i >= 0; --i) {  // neighbours in the file, not in memory
    tasks.push_back({file_.get(), host_.get(), i * 1000, (i * 7 % 10) * 1000, 1000, 0});
  }
  tasks.push_back({file_.get(), host_.get(), 20000, 0, 1000, 0});
  EXPECT_THAT(run(tasks), IsEmpty());
  EXPECT_EQ(real_->counters().num_submitted, 2);
  EXPECT_EQ(real_->counters().bytes_written, 11000);
}

TEST_F(FileCopiesTest, empty_batches_and_empty_tasks_do_nothing) {
  make();
  EXPECT_THAT(run({}), IsEmpty());
  EXPECT_THAT(run({{file_.get(), host_.get(), 0, 0, 0, 0}, {file_.get(), gpu_.get(), 0, 0, 0, 0}}),
              IsEmpty());
  EXPECT_EQ(real_->counters().num_submitted, 0);
}

TEST_F(FileCopiesTest, whole_pools_survive_a_round_through_the_file) {
  make();
  const auto before = contents(*gpu_);
  EXPECT_THAT(run({{file_.get(), gpu_.get(), 0, 0, kBytes, 0}}), IsEmpty());
  EXPECT_THAT(run({{other_file_.get(), file_.get(), 0, 0, kBytes, 0}}), IsEmpty());
  EXPECT_EQ(contents(*other_file_), before);
  EXPECT_THAT(run({{host_.get(), other_file_.get(), 0, 0, kBytes, 0}}), IsEmpty());
  EXPECT_EQ(contents(*host_), before);
  std::memset(gpu_->data(), 0, kBytes);
  EXPECT_THAT(run({{gpu_.get(), other_file_.get(), 0, 0, kBytes, 0}}), IsEmpty());
  EXPECT_EQ(contents(*gpu_), before);
}

TEST_F(FileCopiesTest, a_short_read_fails_only_the_tasks_beyond_the_end) {
  make();
  ASSERT_EQ(::ftruncate(file_->fd(), 2500), 0);
  EXPECT_THAT(run({{host_.get(), file_.get(), 0, 0, 1000, 1},
                   {host_.get(), file_.get(), 1000, 1000, 1000, 2},
                   {host_.get(), file_.get(), 2000, 2000, 1000, 3},
                   {gpu_.get(), file_.get(), 0, 1000, 1500, 4},
                   {gpu_.get(), file_.get(), 1500, 2500, 1, 5}}),
              ElementsAre(3, 5));
}

TEST_F(FileCopiesTest, a_port_that_fails_fails_its_tasks) {
  make({}, 2, 1000);
  port_->fail_copy = 1;
  EXPECT_THAT(run({{file_.get(), gpu_.get(), 0, 0, 1000, 1},
                   {file_.get(), gpu_.get(), 5000, 0, 1000, 2},
                   {file_.get(), gpu_.get(), 9000, 0, 1000, 3}}),
              ElementsAre(2));
  make({}, 2, 1000);
  port_->fail_wait = 2;
  EXPECT_THAT(run({{gpu_.get(), file_.get(), 0, 0, 1000, 1},
                   {gpu_.get(), file_.get(), 5000, 5000, 1000, 2},
                   {gpu_.get(), file_.get(), 9000, 9000, 1000, 3}}),
              ElementsAre(2));
  make({}, 2, 1000);
  port_->fail_wait = 0;
  EXPECT_THAT(
      run({{file_.get(), gpu_.get(), 0, 0, 1000, 1}, {file_.get(), gpu_.get(), 5000, 0, 1000, 2}}),
      ElementsAre(1));
}

// Random batches of every direction over failing I/O, against plain copies: what is not reported
// as failed is there, what belongs to nobody is untouched.
TEST_F(FileCopiesTest, random_batches_match_plain_copies_where_nothing_failed) {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    std::mt19937_64 random(seed);
    const bool flaky = seed > 4;
    make({.fail_rate = flaky ? 0.1 : 0,
          .tear_rate = flaky ? 0.1 : 0,
          .delay_rate = 0.3,
          .seed = seed},
         2 + static_cast<int>(random() % 4), 1 + static_cast<int64_t>(random() % 50000));
    const MemoryPool* pools[] = {host_.get(), gpu_.get(), file_.get(), other_file_.get()};
    int num_failed = 0;
    for (int round = 0; round < 8; ++round) {
      std::vector<std::vector<std::byte>> want;
      for (const MemoryPool* pool : pools) want.push_back(contents(*pool));
      std::vector<CopyTask> tasks;
      std::vector<std::pair<size_t, size_t>> ends;  // pools of a task
      // Independent of each other: every task has a stretch of its own in each pool.
      int64_t at = 0;
      while (at < kBytes && tasks.size() < 200) {
        const int64_t size = std::min<int64_t>(
            static_cast<int64_t>(random() % (random() % 8 == 0 ? 200000 : 5000)), kBytes - at);
        const size_t dst = random() % 4, src = (dst + 1 + random() % 3) % 4;
        tasks.push_back({pools[dst], pools[src], at, at, size, tasks.size()});
        ends.emplace_back(dst, src);
        at += size + static_cast<int64_t>(random() % 2 * 100);
      }
      const auto failed = run(tasks);
      num_failed += static_cast<int>(failed.size());
      for (const CopyTask& task : tasks) {
        const auto [dst, src] = ends[task.tag];
        const auto from = static_cast<size_t>(task.src_offset);
        const auto size = static_cast<size_t>(task.num_bytes);
        const bool ok = std::find(failed.begin(), failed.end(), task.tag) == failed.end();
        if (ok) std::memcpy(want[dst].data() + from, want[src].data() + from, size);
        // A failed one may have written a part: not compared.
        if (!ok) {
          const auto got = contents(*pools[dst]);
          std::memcpy(want[dst].data() + from, got.data() + from, size);
        }
      }
      for (size_t i = 0; i < 4; ++i) {
        ASSERT_TRUE(contents(*pools[i]) == want[i])
            << "seed " << seed << ", round " << round << ", pool " << i;
      }
    }
    EXPECT_EQ(num_failed > 0, flaky) << "seed " << seed;
  }
}

}  // namespace
}  // namespace helicore::kv::testing
