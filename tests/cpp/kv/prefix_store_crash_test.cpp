// What a crash, a bad sector or a failing disk may leave behind, and that no wrong page is served.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <random>

#include "helicore/kv/prefix_store.h"
#include "helicore/kv/prefix_store_format.h"
#include "kv/flaky_io.h"
#include "kv/prefix_blocks.h"
#include "kv/temp_dir.h"

namespace helicore::kv::testing {
namespace {

using ::testing::Each;

using Bytes = std::vector<char>;

Bytes read_all(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void write_all(const std::string& path, const Bytes& bytes) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

// Everything that a test ever puts: 40 chains over two scopes that share heads.
constexpr int kNumChains = 40;
std::vector<TestBlock> chain_number(int i) {
  auto tokens = tokens_from(static_cast<TokenId>(100 * (i % 5)), 8);
  const auto tail =
      tokens_from(static_cast<TokenId>(10000 + 10 * i), 4 + static_cast<size_t>(i % 6));
  tokens.insert(tokens.end(), tail.begin(), tail.end());
  return make_chain(root_of(i % 2), tokens);
}

Fetched fetch_everything(PrefixStore& store) {
  Fetched sum;
  for (int i = 0; i < kNumChains; ++i) {
    const Fetched one = fetch(store, root_of(i % 2), chain_number(i));
    sum.num_matched += one.num_matched;
    sum.num_ok += one.num_ok;
    sum.num_wrong += one.num_wrong;
    sum.num_corrupt += one.num_corrupt;
    sum.num_failed += one.num_failed;
  }
  store.check_invariants();
  return sum;
}

class PrefixStoreCrashTest : public ::testing::Test {
 protected:
  std::unique_ptr<PrefixStore> open(int64_t num_slots = 12, bool verify = true) {
    auto config = small_config(directory_, num_slots);
    config.io.backend = IoBackend::kThreads;
    config.verify_checksums = verify;
    return PrefixStore::open(config);
  }
  // A store with a used journal: puts, tombstones, and slots that were written more than once. Left
  // as a crash leaves it: the copy is taken before close() tidies up.
  void leave_a_crashed_store(int num_chains = 12) {
    const std::string copy = dir_.file("copy");
    {
      auto store = open();
      for (int i = 0; i < num_chains; ++i) {
        auto chain = chain_number(i);
        put_all(*store, chain);
      }
      ASSERT_GT(store->stats().num_evicted, 0);
      std::filesystem::copy(directory_, copy);
    }
    std::filesystem::remove_all(directory_);
    std::filesystem::rename(copy, directory_);
  }
  TempDir dir_;
  std::string directory_ = dir_.file("store");
};

TEST_F(PrefixStoreCrashTest, a_journal_cut_anywhere_serves_no_wrong_page) {
  leave_a_crashed_store();
  const std::string path = directory_ + "/journal";
  const Bytes whole = read_all(path);
  ASSERT_GT(whole.size(), store::kHeaderBytes + 1000);
  const int all = fetch_everything(*open()).num_ok;
  EXPECT_GT(all, 5);
  int most = 0;
  for (size_t size = 0; size <= whole.size(); size += size < store::kHeaderBytes ? 512 : 19) {
    write_all(path, Bytes(whole.begin(), whole.begin() + static_cast<ptrdiff_t>(size)));
    auto store = open();
    const Fetched fetched = fetch_everything(*store);
    EXPECT_EQ(fetched.num_wrong, 0) << size;
    EXPECT_EQ(store->stats().disabled_reason, "") << size;
    most = std::max(most, fetched.num_ok);
    // A slot whose tombstone was cut off holds a later block: found, refused, forgotten.
    EXPECT_EQ(fetch_everything(*store).num_corrupt, 0) << size;
  }
  EXPECT_LE(most, all);
}

TEST_F(PrefixStoreCrashTest, a_flipped_byte_anywhere_in_the_journal_serves_no_wrong_page) {
  leave_a_crashed_store();
  const std::string path = directory_ + "/journal";
  const Bytes whole = read_all(path);
  for (size_t at = 0; at < whole.size(); at += at < 96 || at >= store::kHeaderBytes ? 11 : 500) {
    Bytes broken = whole;
    broken[at] = static_cast<char>(broken[at] ^ 0x40);
    write_all(path, broken);
    EXPECT_EQ(fetch_everything(*open()).num_wrong, 0) << at;
  }
}

TEST_F(PrefixStoreCrashTest, a_damaged_slot_is_dropped_with_what_hangs_on_it) {
  for (const auto& [offset, count] : {std::pair<int64_t, int64_t>{0, 1}, {599, 1}, {300, 300}}) {
    std::filesystem::remove_all(directory_);
    auto chain = make_chain(root_of(1), tokens_from(100, 16));
    put_all(*open(), chain);
    {
      std::fstream data(directory_ + "/blocks", std::ios::in | std::ios::out | std::ios::binary);
      data.seekp(4096 + offset);  // the second block of the chain
      for (int64_t i = 0; i < count; ++i) data.put(static_cast<char>(0x5a));
    }
    auto store = open();
    const Fetched first = fetch(*store, root_of(1), chain);
    EXPECT_EQ(first.num_ok, 3);
    EXPECT_EQ(first.num_corrupt, 1);
    EXPECT_EQ(first.num_wrong, 0);
    EXPECT_EQ(fetch(*store, root_of(1), chain).num_matched, 1) << "the rest lost its prefix";
    EXPECT_EQ(put_all(*store, chain)[1], BlockStatus::kOk);
    EXPECT_EQ(fetch(*store, root_of(1), chain).num_ok, 4) << "and may come back";
    store->check_invariants();
  }
}

TEST_F(PrefixStoreCrashTest, a_lost_data_file_loses_the_blocks_and_nothing_else) {
  leave_a_crashed_store();
  std::filesystem::remove(directory_ + "/blocks");
  auto store = open();
  EXPECT_EQ(store->stats().num_loaded, 0);
  EXPECT_GT(store->stats().num_dropped, 0);
  auto chain = chain_number(3);
  EXPECT_THAT(put_all(*store, chain), Each(BlockStatus::kOk));
}

// What a power failure does without syncs: an old journal beside new data.
void age_the_journal(const std::string& directory, const std::function<void()>& write_more) {
  const Bytes old = read_all(directory + "/journal");
  write_more();
  write_all(directory + "/journal", old);
}

TEST_F(PrefixStoreCrashTest, an_old_journal_beside_new_data_serves_no_wrong_page) {
  leave_a_crashed_store(6);
  age_the_journal(directory_, [&] {
    auto store = open();
    for (int i = 20; i < 30; ++i) {
      auto chain = chain_number(i);
      put_all(*store, chain);
    }
  });
  const Fetched fetched = fetch_everything(*open());
  EXPECT_EQ(fetched.num_wrong, 0);
  EXPECT_GT(fetched.num_corrupt, 0) << "the test must meet a slot that was written over";
}

TEST_F(PrefixStoreCrashTest, without_checksums_the_same_tests_would_serve_wrong_pages) {
  leave_a_crashed_store(6);
  age_the_journal(directory_, [&] {
    auto store = open();
    for (int i = 20; i < 30; ++i) {
      auto chain = chain_number(i);
      put_all(*store, chain);
    }
  });
  EXPECT_GT(fetch_everything(*open(12, false)).num_wrong, 0);
}

// Runs until it is killed: puts chains over and over into few slots, one byte per acknowledged put.
[[noreturn]] void put_for_ever(const PrefixStoreConfig& config, int pipe_fd, uint32_t seed) {
  auto store = PrefixStore::open(config);
  std::mt19937 random(seed);
  while (true) {
    const auto i = static_cast<uint8_t>(random() % kNumChains);
    auto chain = chain_number(i);
    const auto statuses = put_all(*store, chain);
    const bool stored = std::ranges::all_of(statuses, [](BlockStatus status) {
      return status == BlockStatus::kOk || status == BlockStatus::kDuplicate;
    });
    const uint8_t said = stored ? i : 255;
    if (::write(pipe_fd, &said, 1) != 1) ::_exit(1);
  }
}

// Kills the child after `num_puts` acknowledgements; which chains were acknowledged.
std::vector<uint8_t> run_and_kill(const PrefixStoreConfig& config, int num_puts, uint32_t seed) {
  int fds[2];
  if (::pipe(fds) != 0) throw std::runtime_error("pipe");
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(fds[0]);
    put_for_ever(config, fds[1], seed);
  }
  ::close(fds[1]);
  std::vector<uint8_t> acknowledged;
  uint8_t byte = 0;
  while (static_cast<int>(acknowledged.size()) < num_puts && ::read(fds[0], &byte, 1) == 1) {
    acknowledged.push_back(byte);
  }
  ::kill(child, SIGKILL);
  while (::read(fds[0], &byte, 1) == 1) acknowledged.push_back(byte);  // said before it died
  ::close(fds[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  return acknowledged;
}

TEST_F(PrefixStoreCrashTest, a_killed_process_leaves_no_wrong_page_behind) {
  std::mt19937 random(11);
  int num_ok = 0;
  for (uint32_t round = 0; round < 25; ++round) {
    auto config = small_config(directory_, 12);
    config.sync = round % 5 == 0 ? SyncPolicy::kBatch : SyncPolicy::kNever;
    run_and_kill(config, 1 + static_cast<int>(random() % 40), round);
    auto store = open();
    EXPECT_EQ(store->stats().disabled_reason, "");
    const Fetched fetched = fetch_everything(*store);
    EXPECT_EQ(fetched.num_wrong, 0) << round;
    EXPECT_EQ(fetched.num_corrupt, 0) << round << ": the order of writes alone keeps it right";
    num_ok += fetched.num_ok;
  }
  EXPECT_GT(num_ok, 25 * 4);
}

TEST_F(PrefixStoreCrashTest, a_killed_process_loses_nothing_that_was_acknowledged) {
  const auto config = small_config(directory_, 1000);  // room for everything
  for (uint32_t round = 0; round < 8; ++round) {
    const auto acknowledged = run_and_kill(config, 10, 100 + round);
    auto store = open(1000);
    for (const uint8_t i : acknowledged) {
      ASSERT_NE(i, 255);
      const auto chain = chain_number(i);
      const Fetched fetched = fetch(*store, root_of(i % 2), chain);
      EXPECT_EQ(fetched.num_ok, static_cast<int>(chain.size())) << static_cast<int>(i);
      EXPECT_EQ(fetched.num_wrong, 0);
    }
  }
}

class FlakyStore {
 public:
  FlakyStore(const std::string& directory, FlakyPlan plan) {
    auto config = small_config(directory, 12);
    config.io.backend = IoBackend::kThreads;
    auto io = std::make_unique<FlakyIo>(make_async_io(config.io), std::move(plan));
    io_ = io.get();
    store_ = PrefixStore::open(config, std::move(io));
  }
  [[nodiscard]] PrefixStore& store() { return *store_; }
  [[nodiscard]] FlakyIo& io() { return *io_; }

 private:
  FlakyIo* io_ = nullptr;  // lives in the store
  std::unique_ptr<PrefixStore> store_;
};

bool is_block(const IoRequest& r) {
  return r.op != IoOp::kSync && r.buffers.size() == 1 && r.buffers[0].num_bytes == 4096 &&
         r.offset % 4096 == 0;
}

TEST_F(PrefixStoreCrashTest, failing_torn_and_reordered_block_transfers_serve_no_wrong_page) {
  int num_ok = 0, num_failed = 0;
  int64_t num_injected = 0;
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    static_cast<void>(open());  // the journal of the opening store is not to fail
    const FlakyPlan plan{.fail_rate = 0.15,
                         .tear_rate = 0.15,
                         .delay_rate = 0.3,
                         .seed = seed,
                         .eligible = is_block};
    {
      FlakyStore flaky(directory_, plan);
      if (!flaky.store().stats().disabled_reason.empty()) continue;
      std::mt19937 random(static_cast<uint32_t>(seed));
      for (int round = 0; round < 60; ++round) {
        const int i = static_cast<int>(random() % kNumChains);
        auto chain = chain_number(i);
        put_all(flaky.store(), chain);
        const Fetched fetched = fetch(flaky.store(), root_of(i % 2), chain);
        EXPECT_EQ(fetched.num_wrong + fetched.num_corrupt, 0);
        num_ok += fetched.num_ok;
        num_failed += fetched.num_failed;
      }
      flaky.store().check_invariants();
      num_injected += flaky.io().num_injected();
    }
    EXPECT_EQ(fetch_everything(*open()).num_wrong, 0);
  }
  EXPECT_GT(num_ok, 100);
  EXPECT_GT(num_failed, 10);
  EXPECT_GT(num_injected, 100);
}

TEST_F(PrefixStoreCrashTest, a_failing_journal_stops_writing_and_loses_nothing_older) {
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    std::filesystem::remove_all(directory_);
    auto kept = chain_number(0);
    put_all(*open(), kept);
    const auto is_record = [](const IoRequest& r) {
      return r.op == IoOp::kWrite && r.buffers.size() == 1 && r.buffers[0].num_bytes < 4096;
    };
    {
      FlakyStore flaky(directory_,
                       {.fail_rate = 0.1, .tear_rate = 0.2, .seed = seed, .eligible = is_record});
      for (int i = 10; i < 40; i += 2) {
        auto chain = chain_number(i);
        EXPECT_EQ(fetch(flaky.store(), root_of(0), kept).num_ok, static_cast<int>(kept.size()));
        put_all(flaky.store(), chain);
        EXPECT_EQ(fetch(flaky.store(), root_of(0), chain).num_wrong, 0);
      }
      EXPECT_NE(flaky.store().stats().read_only_reason, "");
    }
    auto store = open();
    EXPECT_EQ(fetch(*store, root_of(0), kept).num_ok, static_cast<int>(kept.size()));
    const Fetched fetched = fetch_everything(*store);
    EXPECT_EQ(fetched.num_wrong + fetched.num_corrupt, 0);
  }
}

}  // namespace
}  // namespace helicore::kv::testing
