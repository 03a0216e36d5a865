// What a prefix store does when all is well, and how it says that something is not.
#include "helicore/kv/prefix_store.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <fstream>
#include <thread>

#include "helicore/core/error.h"
#include "helicore/kv/crc32c.h"
#include "helicore/kv/errors.h"
#include "kv/flaky_io.h"
#include "kv/prefix_blocks.h"
#include "kv/temp_dir.h"

namespace helicore::kv::testing {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const Digest kRoot = root_of(1);

class PrefixStoreTest : public ::testing::Test {
 protected:
  std::unique_ptr<PrefixStore> open(const PrefixStoreConfig& config) {
    return PrefixStore::open(config);
  }
  std::unique_ptr<PrefixStore> open(int64_t num_slots = 64) {
    return open(small_config(directory_, num_slots));
  }
  TempDir dir_;
  std::string directory_ = dir_.file("store");
};

TEST(Crc32cTest, both_ways_give_the_published_values) {
  const std::string digits = "123456789";
  EXPECT_EQ(crc32c(std::as_bytes(std::span(digits))), 0xe3069283U);
  const std::vector<std::byte> zeros(32), ones(32, std::byte{0xff});
  EXPECT_EQ(crc32c_portable(zeros, 0), 0x8a9136aaU);
  EXPECT_EQ(crc32c_portable(ones, 0), 0x62a8ab43U);
  if (!has_crc_instructions()) GTEST_SKIP() << "no SSE4.2";
  std::mt19937_64 random(1);
  std::vector<std::byte> bytes(20000);
  for (auto& byte : bytes) byte = static_cast<std::byte>(random());
  for (const size_t count : {0U, 1U, 7U, 8U, 9U, 3071U, 3072U, 3073U, 6144U, 20000U}) {
    for (const size_t skip : {0U, 1U, 5U}) {
      const auto part = std::span(bytes).first(count).subspan(std::min<size_t>(skip, count));
      EXPECT_EQ(crc32c_native(part, 77), crc32c_portable(part, 77)) << count << " " << skip;
    }
  }
  const auto all = std::span<const std::byte>(bytes);
  EXPECT_EQ(crc32c(all.subspan(5000), crc32c(all.first(5000))), crc32c(all));
}

TEST_F(PrefixStoreTest, what_was_put_is_matched_and_read_back) {
  auto store = open();
  auto chain = make_chain(kRoot, tokens_from(100, 14));  // three full blocks and a partial one
  EXPECT_THAT(put_all(*store, chain), Each(BlockStatus::kOk));
  const Fetched fetched = fetch(*store, kRoot, chain);
  EXPECT_EQ(fetched.num_ok, 4);
  EXPECT_EQ(fetched.num_wrong, 0);
  EXPECT_EQ(store->match(kRoot, tokens_from(100, 14)).num_tokens, 14);
  EXPECT_EQ(store->match(kRoot, tokens_from(100, 13)).num_tokens, 12) << "not that partial block";
  EXPECT_EQ(store->match(kRoot, tokens_from(100, 15)).num_tokens, 12);
  EXPECT_EQ(store->match(kRoot, tokens_from(100, 3)).num_tokens, 0);
  EXPECT_EQ(store->match(kRoot, {}).num_tokens, 0);
  EXPECT_EQ(store->match(root_of(2), tokens_from(100, 14)).num_tokens, 0) << "another scope";
  const auto stats = store->stats();
  EXPECT_EQ(stats.num_blocks, 4);
  EXPECT_EQ(stats.num_put, 4);
  EXPECT_EQ(stats.num_get, 4);
  store->check_invariants();
}

TEST_F(PrefixStoreTest, blocks_survive_a_restart_in_order_of_use) {
  auto first = make_chain(kRoot, tokens_from(100, 8)),
       second = make_chain(kRoot, tokens_from(200, 8));
  {
    auto store = open(4);
    EXPECT_THAT(put_all(*store, first), Each(BlockStatus::kOk));
    EXPECT_THAT(put_all(*store, second), Each(BlockStatus::kOk));
    EXPECT_EQ(fetch(*store, kRoot, first).num_ok, 2);  // the older one is used last
  }
  auto store = open(4);
  EXPECT_EQ(store->stats().num_loaded, 4);
  EXPECT_EQ(store->stats().emptied_reason, "");
  auto third = make_chain(kRoot, tokens_from(300, 4));
  EXPECT_THAT(put_all(*store, third), Each(BlockStatus::kOk));
  EXPECT_EQ(fetch(*store, kRoot, first).num_ok, 2);
  EXPECT_EQ(fetch(*store, kRoot, second).num_ok, 1) << "its leaf went, its root stayed";
  EXPECT_EQ(fetch(*store, kRoot, third).num_ok, 1);
}

TEST_F(PrefixStoreTest, borrowed_aligned_pages_are_written_from_where_they_lie) {
  auto config = small_config(directory_);
  config.block_bytes = 8192;
  config.sync = SyncPolicy::kBatch;
  auto store = open(config);
  auto chain = make_chain(kRoot, tokens_from(100, 8), 8192);
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(4096, 16384));
  std::vector<PutBlock> puts;
  for (size_t i = 0; i < 2; ++i) {
    std::memcpy(memory + 8192 * i, chain[i].bytes.data(), 8192);
    puts.push_back(chain[i].put());
    puts.back().pages = {{memory + 8192 * i, 4096}, {memory + 8192 * i + 4096, 4096}};
  }
  const auto token = store->put(puts, PagePolicy::kBorrow, WhenFull::kRefuse);
  EXPECT_THAT(store->wait(*token), Each(BlockStatus::kOk));
  std::memset(memory, 0, 16384);
  const auto match = store->match(kRoot, tokens_from(100, 8));
  ASSERT_EQ(match.blocks.size(), 2U);
  const std::vector<GetBlock> gets = {{match.blocks[0], {{memory, 8192}}},
                                      {match.blocks[1], {{memory + 8192, 8192}}}};
  EXPECT_THAT(store->wait(*store->get(gets, WhenFull::kRefuse)), Each(BlockStatus::kOk));
  EXPECT_EQ(std::memcmp(memory, chain[0].bytes.data(), 8192), 0);
  EXPECT_EQ(std::memcmp(memory + 8192, chain[1].bytes.data(), 8192), 0);
  std::free(memory);
}

TEST_F(PrefixStoreTest, each_put_says_how_it_ended) {
  auto store = open(3);
  auto chain = make_chain(kRoot, tokens_from(100, 20));
  EXPECT_THAT(put_all(*store, chain),
              ElementsAre(BlockStatus::kOk, BlockStatus::kOk, BlockStatus::kOk,
                          BlockStatus::kNoRoom, BlockStatus::kNoParent));
  EXPECT_THAT(put_all(*store, chain)[0], BlockStatus::kDuplicate);
  auto orphan = make_chain(kRoot, tokens_from(500, 8));
  orphan.erase(orphan.begin());
  EXPECT_THAT(put_all(*store, orphan), ElementsAre(BlockStatus::kNoParent));
  auto wrong_ordinal = make_chain(kRoot, tokens_from(100, 8));
  wrong_ordinal[1].tokens[0] = 9;
  wrong_ordinal[1].ordinal = 5;
  wrong_ordinal.erase(wrong_ordinal.begin());
  EXPECT_THAT(put_all(*store, wrong_ordinal), ElementsAre(BlockStatus::kNoParent));
}

TEST_F(PrefixStoreTest, nothing_hangs_on_a_partial_block) {
  auto store = open();
  auto chain = make_chain(kRoot, tokens_from(100, 6));
  EXPECT_THAT(put_all(*store, chain), Each(BlockStatus::kOk));
  auto child = make_chain(chain[1].key, tokens_from(106, 4));
  child[0].ordinal = 2;
  EXPECT_THAT(put_all(*store, child), ElementsAre(BlockStatus::kNoParent));
}

TEST_F(PrefixStoreTest, a_block_evicted_after_its_match_is_gone) {
  auto store = open(1);
  auto first = make_chain(kRoot, tokens_from(100, 4)),
       second = make_chain(kRoot, tokens_from(200, 4));
  put_all(*store, first);
  const auto match = store->match(kRoot, first[0].tokens);
  put_all(*store, second);
  std::vector<std::byte> page(kBlockBytes, std::byte{1});
  const std::vector<GetBlock> gets = {{match.blocks[0], {{page.data(), kBlockBytes}}}};
  EXPECT_THAT(store->wait(*store->get(gets, WhenFull::kBlock)), ElementsAre(BlockStatus::kGone));
  EXPECT_THAT(page, Each(std::byte{1}));
  EXPECT_EQ(store->stats().num_evicted, 1);
}

TEST_F(PrefixStoreTest, a_block_that_is_being_read_is_not_evicted) {
  auto config = small_config(directory_, 1);
  auto store = open(config);
  auto first = make_chain(kRoot, tokens_from(100, 4)),
       second = make_chain(kRoot, tokens_from(200, 4));
  put_all(*store, first);
  const auto match = store->match(kRoot, first[0].tokens);
  std::vector<std::byte> page(kBlockBytes);
  const std::vector<GetBlock> gets = {{match.blocks[0], {{page.data(), kBlockBytes}}}};
  const auto token = store->get(gets, WhenFull::kBlock);  // pinned until it is collected
  EXPECT_THAT(put_all(*store, second), ElementsAre(BlockStatus::kNoRoom));
  EXPECT_THAT(store->wait(*token), ElementsAre(BlockStatus::kOk));
  EXPECT_EQ(page, first[0].bytes);
  EXPECT_THAT(put_all(*store, second), ElementsAre(BlockStatus::kOk));
}

TEST_F(PrefixStoreTest, copied_pages_may_change_as_soon_as_put_returns) {
  auto store = open();
  auto chain = make_chain(kRoot, tokens_from(100, 40)), original = chain;
  std::vector<PutBlock> puts;
  for (auto& block : chain) puts.push_back(block.put());
  const auto token = store->put(puts, PagePolicy::kCopy, WhenFull::kBlock);
  for (auto& block : chain) std::fill(block.bytes.begin(), block.bytes.end(), std::byte{0});
  EXPECT_THAT(store->wait(*token), Each(BlockStatus::kOk));
  EXPECT_EQ(fetch(*store, kRoot, original).num_wrong, 0);
  EXPECT_EQ(fetch(*store, kRoot, original).num_ok, 10);
}

TEST_F(PrefixStoreTest, borrowed_pages_of_any_alignment_go_to_buffered_files) {
  auto config = small_config(directory_);
  config.direct_io = false;  // borrows whatever the alignment
  auto store = open(config);
  auto chain = make_chain(kRoot, tokens_from(100, 40)), original = chain;
  std::vector<PutBlock> puts;
  for (auto& block : chain) puts.push_back(block.put());
  for (size_t i = 0; i < chain.size(); ++i) {
    const auto token = store->put({&puts[i], 1}, PagePolicy::kBorrow, WhenFull::kBlock);
    if (i % 2 == 1) {
      EXPECT_THAT(store->wait(*token), Each(BlockStatus::kOk));
    } else {
      store->forget(*token);
      EXPECT_TRUE(store->flush());
    }
  }
  EXPECT_EQ(fetch(*store, kRoot, original).num_ok, 10);
}

TEST_F(PrefixStoreTest, a_cancelled_read_is_served_whole_or_not_at_all) {
  auto config = small_config(directory_);
  config.io.depth = 1;
  auto store = open(config);
  auto chain = make_chain(kRoot, tokens_from(100, 160));
  put_all(*store, chain);
  const auto match = store->match(kRoot, tokens_from(100, 160));
  std::vector<std::vector<std::byte>> pages(40, std::vector<std::byte>(kBlockBytes));
  std::vector<GetBlock> gets;
  for (size_t i = 0; i < 40; ++i) {
    gets.push_back({match.blocks[i], {{pages[i].data(), kBlockBytes}}});
  }
  const auto token = store->get(gets, WhenFull::kBlock);
  const int64_t num_cancelled = store->cancel(*token);
  const auto statuses = store->wait(*token);
  EXPECT_EQ(std::count(statuses.begin(), statuses.end(), BlockStatus::kCancelled), num_cancelled);
  EXPECT_EQ(std::count(statuses.begin(), statuses.end(), BlockStatus::kOk), 40 - num_cancelled);
  for (size_t i = 0; i < 40; ++i) {
    if (statuses[i] == BlockStatus::kOk) {
      EXPECT_EQ(pages[i], chain[i].bytes);
    }
  }
  EXPECT_EQ(fetch(*store, kRoot, chain).num_ok, 40) << "nothing stays pinned or forgotten";
  EXPECT_THROW(store->cancel(*token), InvalidArgument);
}

TEST_F(PrefixStoreTest, another_stamp_shape_or_version_empties_or_refuses) {
  auto chain = make_chain(kRoot, tokens_from(100, 8));
  const auto fill = [&] {
    auto store = open();
    put_all(*store, chain);
  };
  auto other_stamp = small_config(directory_);
  other_stamp.stamp[31] = 1;
  auto other_shape = small_config(directory_);
  other_shape.block_bytes = 601;
  auto other_tokens = small_config(directory_);
  other_tokens.tokens_per_block = 8;
  for (auto [config, reason] :
       {std::pair{other_stamp, "the stamp"}, std::pair{other_shape, "block_bytes 600, wanted 601"},
        std::pair{other_tokens, "tokens_per_block 4, wanted 8"}}) {
    fill();
    config.on_mismatch = OnMismatch::kRefuse;
    EXPECT_THAT(open(config)->stats().disabled_reason, HasSubstr(reason));
    EXPECT_EQ(open()->stats().num_loaded, 2) << "a refusal changes nothing";
    config.on_mismatch = OnMismatch::kEmpty;
    EXPECT_THAT(open(config)->stats().emptied_reason, HasSubstr(reason));
    EXPECT_EQ(open()->stats().num_loaded, 0);
  }
  fill();
  {
    std::fstream journal(directory_ + "/journal", std::ios::in | std::ios::out | std::ios::binary);
    journal.seekp(8);
    journal.put(99);
  }
  EXPECT_THAT(open()->stats().emptied_reason, HasSubstr("format version 99, this build writes 1"));
}

TEST_F(PrefixStoreTest, capacity_may_change_between_runs) {
  auto chain = make_chain(kRoot, tokens_from(100, 16));
  put_all(*open(4), chain);
  EXPECT_EQ(fetch(*open(8), kRoot, chain).num_ok, 4);
  auto store = open(2);
  EXPECT_EQ(store->stats().num_loaded, 2);
  const Fetched fetched = fetch(*store, kRoot, chain);
  EXPECT_EQ(fetched.num_ok, 2);
  EXPECT_EQ(fetched.num_wrong, 0);
}

TEST_F(PrefixStoreTest, a_second_opener_is_told_who_holds_the_directory) {
  auto store = open();
  const auto message_of = [&] {
    try {
      open();
    } catch (const ResourceBusy& e) {
      return std::string(e.what());
    }
    return std::string("opened");
  };
  EXPECT_THAT(message_of(), HasSubstr("in use by process " + std::to_string(::getpid())));
  store->close();
  store.reset();
  int to_parent[2], to_child[2];
  ASSERT_EQ(::pipe(to_parent), 0);
  ASSERT_EQ(::pipe(to_child), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(to_child[1]);
    char byte = 0;
    const auto held = PrefixStore::open(small_config(directory_));
    if (::write(to_parent[1], "x", 1) != 1) ::_exit(1);
    while (::read(to_child[0], &byte, 1) > 0) {
    }
    ::_exit(0);
  }
  char byte = 0;
  ASSERT_EQ(::read(to_parent[0], &byte, 1), 1);
  EXPECT_THAT(message_of(), HasSubstr("in use by process " + std::to_string(child)));
  for (const int fd : {to_parent[0], to_parent[1], to_child[0], to_child[1]}) ::close(fd);
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(message_of(), "opened");
}

TEST_F(PrefixStoreTest, an_unusable_directory_disables_the_store_with_a_reason) {
  const OpenFile file(dir_.file("plain"));
  for (const std::string& path : {dir_.file("plain") + "/below", std::string("/proc/helicore")}) {
    auto store = open(small_config(path));
    EXPECT_THAT(store->stats().disabled_reason, HasSubstr("make directory " + path));
    auto chain = make_chain(kRoot, tokens_from(100, 8));
    EXPECT_THAT(put_all(*store, chain), Each(BlockStatus::kDisabled));
    EXPECT_EQ(fetch(*store, kRoot, chain).num_matched, 0);
    std::vector<std::byte> page(kBlockBytes);
    const std::vector<GetBlock> gets = {{{0, 1}, {{page.data(), kBlockBytes}}}};
    EXPECT_THAT(store->wait(*store->get(gets, WhenFull::kBlock)), Each(BlockStatus::kDisabled));
    EXPECT_FALSE(store->flush());
  }
}

class FileLimit {
 public:
  explicit FileLimit(int64_t bytes) {
    ::getrlimit(RLIMIT_FSIZE, &old_);
    const ::rlimit limit{static_cast<rlim_t>(bytes), old_.rlim_max};
    EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  }
  ~FileLimit() { ::setrlimit(RLIMIT_FSIZE, &old_); }
  FileLimit(const FileLimit&) = delete;
  FileLimit& operator=(const FileLimit&) = delete;

 private:
  ::rlimit old_{};
};

TEST_F(PrefixStoreTest, a_data_file_that_does_not_fit_disables_the_store) {
  const FileLimit limit(63 * 4096);
  auto store = open(64);
  EXPECT_THAT(store->stats().disabled_reason, HasSubstr("File too large"));
}

TEST_F(PrefixStoreTest, a_journal_that_can_not_grow_makes_the_store_read_only) {
  auto first = make_chain(kRoot, tokens_from(100, 4));
  {
    const FileLimit limit(2 * 4096);
    auto store = open(2);
    EXPECT_THAT(put_all(*store, first), Each(BlockStatus::kOk));
    BlockStatus status = BlockStatus::kOk;
    for (int i = 0; i < 200 && status == BlockStatus::kOk; ++i) {
      auto next = make_chain(kRoot, tokens_from(1000 + 10 * i, 4));
      EXPECT_EQ(fetch(*store, kRoot, first).num_ok, 1);  // keeps it from eviction
      status = put_all(*store, next)[0];
    }
    EXPECT_EQ(status, BlockStatus::kIoError);
    EXPECT_THAT(store->stats().read_only_reason, HasSubstr("File too large"));
    auto last = make_chain(kRoot, tokens_from(5000, 4));
    EXPECT_THAT(put_all(*store, last), Each(BlockStatus::kDisabled));
    EXPECT_EQ(fetch(*store, kRoot, first).num_ok, 1) << "reading goes on";
    EXPECT_FALSE(store->flush());
  }
  auto store = open(2);
  EXPECT_EQ(fetch(*store, kRoot, first).num_ok, 1);
  EXPECT_EQ(store->stats().read_only_reason, "") << "a new start with more room";
}

TEST_F(PrefixStoreTest, a_full_disk_makes_the_store_read_only) {
  const auto is_block = [](const IoRequest& r) {
    return r.op == IoOp::kWrite && r.buffers.size() == 1 && r.buffers[0].num_bytes == 4096 &&
           r.offset > 0;
  };
  auto config = small_config(directory_);
  auto io = std::make_unique<FlakyIo>(
      make_async_io(config.io), FlakyPlan{.fail_rate = 1, .error = ENOSPC, .eligible = is_block});
  auto store = PrefixStore::open(config, std::move(io));
  auto chain = make_chain(kRoot, tokens_from(100, 8));
  EXPECT_THAT(put_all(*store, chain), ElementsAre(BlockStatus::kOk, BlockStatus::kIoError));
  EXPECT_EQ(store->stats().read_only_reason.substr(0, 13), "write a block");
  EXPECT_EQ(fetch(*store, kRoot, chain).num_ok, 1);
}

TEST_F(PrefixStoreTest, a_full_queue_refuses_a_put_and_takes_nothing) {
  auto config = small_config(directory_);
  config.max_queued_blocks = 2;
  auto store = open(config);
  auto chain = make_chain(kRoot, tokens_from(100, 12));
  std::vector<PutBlock> puts;
  for (auto& block : chain) puts.push_back(block.put());
  EXPECT_THROW(static_cast<void>(store->put(puts, PagePolicy::kCopy, WhenFull::kRefuse)),
               InvalidArgument);
  EXPECT_EQ(store->stats().num_put + store->stats().num_refused, 0);
  EXPECT_THAT(put_all(*store, chain), Each(BlockStatus::kOk)) << "blocking goes block by block";
  int num_refused = 0;
  for (int i = 0; i < 300; ++i) {
    auto more = make_chain(kRoot, tokens_from(1000 + 10 * i, 8));
    const std::vector<PutBlock> two = {more[0].put(), more[1].put()};
    const auto token = store->put(two, PagePolicy::kCopy, WhenFull::kRefuse);
    if (token) {
      store->forget(*token);
    } else {
      ++num_refused;
    }
  }
  EXPECT_TRUE(store->flush());
  const auto stats = store->stats();
  EXPECT_EQ(stats.num_put + stats.num_refused, 3 + 2 * (300 - num_refused));
}

TEST_F(PrefixStoreTest, misuse_throws_and_names_the_argument) {
  auto store = open();
  auto chain = make_chain(kRoot, tokens_from(100, 4));
  const auto put = [&](PutBlock block) {
    static_cast<void>(store->put({&block, 1}, PagePolicy::kCopy, WhenFull::kBlock));
  };
  auto block = chain[0].put();
  block.pages.pop_back();
  EXPECT_THROW(put(block), InvalidArgument);
  block = chain[0].put();
  block.tokens = {};
  EXPECT_THROW(put(block), InvalidArgument);
  block = chain[0].put();
  block.ordinal = -1;
  EXPECT_THROW(put(block), InvalidArgument);
  EXPECT_THROW(static_cast<void>(store->wait(77)), InvalidArgument);
  const auto token = *store->put({}, PagePolicy::kCopy, WhenFull::kBlock);
  EXPECT_THAT(store->wait(token), ElementsAre());
  EXPECT_THROW(static_cast<void>(store->poll(token)), InvalidArgument);
  auto config = small_config("");
  EXPECT_THROW(config.validate(), InvalidArgument);
  config = small_config(directory_);
  config.capacity_bytes = 4095;
  EXPECT_THROW(config.validate(), InvalidArgument);
}

TEST_F(PrefixStoreTest, closing_ends_what_was_put_and_then_serves_nothing) {
  auto store = open();
  auto chain = make_chain(kRoot, tokens_from(100, 40));
  put_all(*store, chain);
  const auto match = store->match(kRoot, tokens_from(100, 4));
  std::vector<std::byte> page(kBlockBytes);
  const std::vector<GetBlock> gets = {{match.blocks[0], {{page.data(), kBlockBytes}}}};
  const auto reading = store->get(gets, WhenFull::kBlock);
  auto more = make_chain(kRoot, tokens_from(500, 40));
  std::vector<PutBlock> puts;
  for (auto& block : more) puts.push_back(block.put());
  const auto writing = store->put(puts, PagePolicy::kCopy, WhenFull::kBlock);
  store->close();
  store->close();
  EXPECT_THAT(store->wait(*writing), Each(BlockStatus::kOk));
  EXPECT_THAT(store->wait(*reading), Each(BlockStatus::kOk));
  EXPECT_EQ(page, chain[0].bytes);
  EXPECT_EQ(store->match(kRoot, tokens_from(100, 4)).num_tokens, 0);
  EXPECT_THAT(put_all(*store, chain), Each(BlockStatus::kDisabled));
  EXPECT_FALSE(store->flush());
  store.reset();
  auto again = open();
  EXPECT_EQ(fetch(*again, kRoot, more).num_ok, 10);
}

TEST_F(PrefixStoreTest, threads_put_and_get_at_once_and_no_page_is_wrong) {
  auto store = open(24);
  std::atomic<int> num_wrong = 0, num_ok = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<uint32_t>(t));
      for (int round = 0; round < 60; ++round) {
        const auto salt = static_cast<int64_t>(random() % 2);
        auto chain =
            make_chain(root_of(salt), tokens_from(static_cast<TokenId>(random() % 12), 16));
        if (random() % 2 == 0) {
          put_all(*store, chain);
        } else {
          const Fetched fetched = fetch(*store, root_of(salt), chain);
          num_wrong += fetched.num_wrong + fetched.num_corrupt;
          num_ok += fetched.num_ok;
        }
        if (round % 20 == t) store->flush();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  store->check_invariants();
  EXPECT_EQ(num_wrong, 0);
  EXPECT_GT(num_ok, 0);
}

}  // namespace
}  // namespace helicore::kv::testing
