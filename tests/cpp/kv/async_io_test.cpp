// One set of tests for both back ends, and the failing decorator itself.
#include "helicore/kv/async_io.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <random>
#include <thread>

#include "helicore/core/error.h"
#include "helicore/kv/io_queue.h"
#include "kv/flaky_io.h"
#include "kv/temp_dir.h"

namespace helicore::kv::testing {
namespace {

std::vector<std::byte> random_bytes(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> out(count);
  for (auto& byte : out) byte = static_cast<std::byte>(random());
  return out;
}

IoBuffer buffer_of(std::vector<std::byte>& bytes) {
  return {bytes.data(), static_cast<int64_t>(bytes.size())};
}

// At a multiple of 4096.
class AlignedBytes {
 public:
  explicit AlignedBytes(size_t count)
      : data_(static_cast<std::byte*>(std::aligned_alloc(4096, count))), count_(count) {
    std::memset(data_, 0, count);
  }
  ~AlignedBytes() { std::free(data_); }
  AlignedBytes(const AlignedBytes&) = delete;
  AlignedBytes& operator=(const AlignedBytes&) = delete;
  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] IoBuffer buffer() const noexcept { return {data_, static_cast<int64_t>(count_)}; }

 private:
  std::byte* data_;
  size_t count_;
};

class AsyncIoTest : public ::testing::TestWithParam<IoBackend> {
 protected:
  void SetUp() override {
    if (GetParam() == IoBackend::kUring && !why_no_io_uring().empty()) {
      GTEST_SKIP() << "no io_uring: " << why_no_io_uring();
    }
  }
  std::unique_ptr<AsyncIo> make(AsyncIoConfig config = {}) const {
    config.backend = GetParam();
    return make_async_io(config);
  }
  IoResult run(AsyncIo& io, std::vector<IoRequest> batch) const {
    return io.wait(*io.submit(std::move(batch), WhenFull::kBlock));
  }
  TempDir dir_;
};

INSTANTIATE_TEST_SUITE_P(Backends, AsyncIoTest,
                         ::testing::Values(IoBackend::kUring, IoBackend::kThreads),
                         [](const auto& info) {
                           return info.param == IoBackend::kUring ? "uring" : "threads";
                         });

TEST_P(AsyncIoTest, a_batch_reads_back_what_a_batch_wrote) {
  auto io = make();
  const OpenFile file(dir_.file("a"));
  auto first = random_bytes(10000, 1), second = random_bytes(333, 2), third = random_bytes(1, 3);
  EXPECT_TRUE(run(*io, {{IoOp::kWrite, file.fd(), 7, {buffer_of(first), buffer_of(second)}},
                        {IoOp::kWrite, file.fd(), 20000, {buffer_of(third)}}})
                  .ok());
  EXPECT_TRUE(run(*io, {{IoOp::kSync, file.fd()}}).ok());
  std::vector<std::byte> left(5000), right(5333), tail(1);
  const IoResult result =
      run(*io, {{IoOp::kRead, file.fd(), 7, {buffer_of(left), buffer_of(right)}},
                {IoOp::kRead, file.fd(), 20000, {buffer_of(tail)}}});
  EXPECT_EQ(result.requests, (std::vector<IoStatus>{{0, 10333}, {0, 1}}));
  EXPECT_EQ(std::memcmp(left.data(), first.data(), 5000), 0);
  EXPECT_EQ(std::memcmp(right.data(), first.data() + 5000, 5000), 0);
  EXPECT_EQ(std::memcmp(right.data() + 5000, second.data(), 333), 0);
  EXPECT_EQ(tail, third);
  const IoCounters counters = io->counters();
  EXPECT_EQ(counters.num_submitted, 5);
  EXPECT_EQ(counters.num_completed, 5);
  EXPECT_EQ(counters.bytes_written, 10334);
  EXPECT_EQ(counters.bytes_read, 10334);
}

TEST_P(AsyncIoTest, short_transfers_are_continued_across_buffer_edges) {
  auto io = make({.max_transfer_bytes = 7});
  const OpenFile file(dir_.file("a"));
  auto first = random_bytes(100, 1), second = random_bytes(3, 2), third = random_bytes(50, 3);
  const IoResult written = run(
      *io, {{IoOp::kWrite, file.fd(), 0, {buffer_of(first), buffer_of(second), buffer_of(third)}}});
  EXPECT_EQ(written.requests[0], (IoStatus{0, 153}));
  std::vector<std::byte> out(153);
  EXPECT_EQ(run(*io, {{IoOp::kRead, file.fd(), 0, {buffer_of(out)}}}).requests[0],
            (IoStatus{0, 153}));
  EXPECT_EQ(std::memcmp(out.data() + 100, second.data(), 3), 0);
  EXPECT_EQ(std::memcmp(out.data() + 103, third.data(), 50), 0);
  EXPECT_EQ(io->counters().num_continued, 2 * 21);
}

TEST_P(AsyncIoTest, more_buffers_than_the_kernel_takes_at_once_are_split) {
  auto io = make();
  const OpenFile file(dir_.file("a"));
  auto bytes = random_bytes(3000, 1);
  IoRequest write{IoOp::kWrite, file.fd(), 0, {}};
  for (auto& byte : bytes) write.buffers.push_back({&byte, 1});
  EXPECT_TRUE(run(*io, {write}).ok());
  std::vector<std::byte> out(3000);
  EXPECT_TRUE(run(*io, {{IoOp::kRead, file.fd(), 0, {buffer_of(out)}}}).ok());
  EXPECT_EQ(out, bytes);
}

TEST_P(AsyncIoTest, a_read_past_the_end_reports_what_was_there) {
  auto io = make();
  const OpenFile file(dir_.file("a"));
  auto bytes = random_bytes(10, 1);
  EXPECT_TRUE(run(*io, {{IoOp::kWrite, file.fd(), 0, {buffer_of(bytes)}}}).ok());
  std::vector<std::byte> out(16);
  const IoResult result = run(*io, {{IoOp::kRead, file.fd(), 4, {buffer_of(out)}}});
  EXPECT_EQ(result.requests[0], (IoStatus{kErrorEof, 6}));
  EXPECT_EQ(describe(result.requests[0]), "end of file after 6 bytes");
  EXPECT_EQ(std::memcmp(out.data(), bytes.data() + 4, 6), 0);
}

TEST_P(AsyncIoTest, errors_belong_to_their_request_and_not_to_the_batch) {
  auto io = make();
  const OpenFile good(dir_.file("a"));
  const int read_only = ::open(dir_.file("a").c_str(), O_RDONLY | O_CLOEXEC);
  auto bytes = random_bytes(10, 1);
  const IoResult result = run(*io, {{IoOp::kWrite, good.fd(), 0, {buffer_of(bytes)}},
                                    {IoOp::kWrite, read_only, 0, {buffer_of(bytes)}},
                                    {IoOp::kWrite, good.fd(), 10, {buffer_of(bytes)}}});
  ::close(read_only);
  EXPECT_EQ(result.requests, (std::vector<IoStatus>{{0, 10}, {EBADF, 0}, {0, 10}}));
  EXPECT_FALSE(result.ok());
  EXPECT_EQ(result.error(), EBADF);
  EXPECT_EQ(io->counters().num_failed, 1);
}

TEST_P(AsyncIoTest, a_full_file_ends_a_write_in_the_middle_with_its_errno) {
  auto io = make();
  const OpenFile file(dir_.file("a"));
  auto bytes = random_bytes(8192, 1);
  ::rlimit old{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old), 0);
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  const ::rlimit limit{6000, old.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  const IoResult result = run(*io, {{IoOp::kWrite, file.fd(), 0, {buffer_of(bytes)}}});
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old), 0);
  ::signal(SIGXFSZ, handler);
  EXPECT_EQ(result.requests[0], (IoStatus{EFBIG, 6000}));
}

TEST_P(AsyncIoTest, direct_files_take_aligned_memory) {
  const OpenFile file(dir_.file("a"), O_DIRECT);
  if (file.fd() < 0) GTEST_SKIP() << "the file system has no O_DIRECT";
  auto io = make();
  const AlignedBytes out(4096 * 3), in(4096 * 3);
  for (int i = 0; i < 4096 * 3; ++i) out.data()[i] = static_cast<std::byte>(i * 7);
  EXPECT_TRUE(run(*io, {{IoOp::kWrite, file.fd(), 8192, {out.buffer()}}}).ok());
  EXPECT_TRUE(run(*io, {{IoOp::kRead, file.fd(), 8192, {in.buffer()}}}).ok());
  EXPECT_EQ(std::memcmp(in.data(), out.data(), 4096 * 3), 0);
  EXPECT_EQ(run(*io, {{IoOp::kRead, file.fd(), 1, {in.buffer()}}}).error(), EINVAL);
}

TEST_P(AsyncIoTest, empty_batches_and_empty_requests_complete) {
  auto io = make();
  const OpenFile file(dir_.file("a"));
  EXPECT_TRUE(run(*io, {}).ok());
  EXPECT_EQ(
      run(*io, {{IoOp::kRead, file.fd(), 0, {}}, {IoOp::kWrite, file.fd(), 0, {{}}}}).requests,
      (std::vector<IoStatus>{{0, 0}, {0, 0}}));
}

TEST_P(AsyncIoTest, cancelled_requests_never_reach_the_file) {
  auto io = make({.depth = 1, .num_threads = 1});
  const OpenFile file(dir_.file("a"));
  auto bytes = random_bytes(1, 1);
  std::vector<IoRequest> batch;
  for (int i = 0; i < 200; ++i) {
    batch.push_back({IoOp::kWrite, file.fd(), i * 4096, {{bytes.data(), 1}}});
  }
  const IoToken token = *io->submit(batch, WhenFull::kBlock);
  const int64_t num_cancelled = io->cancel(token);
  const IoResult result = io->wait(token);
  EXPECT_EQ(std::count(result.requests.begin(), result.requests.end(), IoStatus{ECANCELED, 0}),
            num_cancelled);
  EXPECT_EQ(std::count(result.requests.begin(), result.requests.end(), IoStatus{0, 1}),
            200 - num_cancelled);
  for (size_t i = 0; i < 200; ++i) {
    std::byte found{};
    const bool there = ::pread(file.fd(), &found, 1, static_cast<off_t>(i) * 4096) == 1;
    if (result.requests[i].error == 0) {
      EXPECT_TRUE(there && found == bytes[0]) << i;
    } else {
      EXPECT_TRUE(!there || found == std::byte{0}) << i;
    }
  }
  EXPECT_EQ(io->counters().num_cancelled, num_cancelled);
}

TEST_P(AsyncIoTest, destruction_ends_what_was_submitted) {
  const OpenFile file(dir_.file("a"));
  auto bytes = random_bytes(100, 1);
  for (int round = 0; round < 20; ++round) {
    auto io = make({.depth = 2, .num_threads = 2});
    static_cast<void>(
        io->submit(std::vector<IoRequest>(50, {IoOp::kWrite, file.fd(), 0, {buffer_of(bytes)}}),
                   WhenFull::kBlock));
  }
}

TEST_P(AsyncIoTest, misuse_throws_and_names_what_was_wrong) {
  auto io = make({.queue_capacity = 2});
  const OpenFile file(dir_.file("a"));
  std::byte byte{};
  const auto submit = [&](std::vector<IoRequest> batch) {
    static_cast<void>(io->submit(std::move(batch), WhenFull::kBlock));
  };
  EXPECT_THROW(submit({{IoOp::kRead, -1, 0, {}}}), InvalidArgument);
  EXPECT_THROW(submit({{IoOp::kRead, file.fd(), -1, {}}}), InvalidArgument);
  EXPECT_THROW(submit({{IoOp::kRead, file.fd(), 0, {{nullptr, 1}}}}), InvalidArgument);
  EXPECT_THROW(submit({{IoOp::kRead, file.fd(), 0, {{&byte, -1}}}}), InvalidArgument);
  EXPECT_THROW(submit({{IoOp::kSync, file.fd(), 0, {{&byte, 1}}}}), InvalidArgument);
  EXPECT_THROW(submit(std::vector<IoRequest>(3, {IoOp::kRead, file.fd(), 0, {}})), InvalidArgument);
  EXPECT_THROW(static_cast<void>(io->poll(99)), InvalidArgument);
  const IoToken token = *io->submit({}, WhenFull::kRefuse);
  static_cast<void>(io->wait(token));
  EXPECT_THROW(static_cast<void>(io->wait(token)), InvalidArgument);
  EXPECT_THROW(AsyncIoConfig{.depth = 0}.validate(), InvalidArgument);
  EXPECT_THROW(AsyncIoConfig{.queue_capacity = 0}.validate(), InvalidArgument);
  EXPECT_THROW(AsyncIoConfig{.num_threads = 0}.validate(), InvalidArgument);
  EXPECT_THROW(AsyncIoConfig{.max_transfer_bytes = 0}.validate(), InvalidArgument);
}

TEST_P(AsyncIoTest, many_threads_share_one_back_end) {
  auto io = make({.queue_capacity = 8, .depth = 3, .num_threads = 3, .max_transfer_bytes = 100});
  const OpenFile file(dir_.file("a"));
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 20; ++round) {
        auto bytes = random_bytes(257, static_cast<uint64_t>(t * 100 + round));
        std::vector<std::byte> out(257);
        const int64_t offset = t * 1000;
        EXPECT_TRUE(run(*io, {{IoOp::kWrite, file.fd(), offset, {buffer_of(bytes)}}}).ok());
        const IoToken token =
            *io->submit({{IoOp::kRead, file.fd(), offset, {buffer_of(out)}}}, WhenFull::kBlock);
        std::optional<IoResult> result;
        while (!(result = io->poll(token))) std::this_thread::yield();
        EXPECT_TRUE(result->ok());
        EXPECT_EQ(out, bytes);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(io->counters().num_completed, 4 * 20 * 2);
}

// The queue alone: no back end takes anything unless the test does.

std::vector<IoRequest> syncs(size_t count) { return {count, IoRequest{IoOp::kSync, 0}}; }

void end_one(IoQueue& queue) {
  auto transfer = queue.take();
  ASSERT_NE(transfer, nullptr);
  EXPECT_EQ(transfer->advance(0), IoTransfer::Step::kDone);
  queue.finish(std::move(transfer));
}

TEST(IoQueueTest, a_full_queue_refuses_the_whole_batch) {
  IoQueue queue({.queue_capacity = 3});
  const auto first = queue.submit(syncs(2), WhenFull::kRefuse);
  ASSERT_TRUE(first);
  EXPECT_FALSE(queue.submit(syncs(2), WhenFull::kRefuse));
  const auto second = queue.submit(syncs(1), WhenFull::kRefuse);
  ASSERT_TRUE(second);
  end_one(queue);
  EXPECT_FALSE(queue.submit(syncs(2), WhenFull::kRefuse)) << "one of the batch still runs";
  EXPECT_FALSE(queue.poll(*first));
  end_one(queue);
  EXPECT_TRUE(queue.poll(*first));
  EXPECT_TRUE(queue.submit(syncs(2), WhenFull::kRefuse));
  EXPECT_FALSE(queue.poll(*second));
  queue.stop();
}

TEST(IoQueueTest, a_blocked_submitter_continues_when_room_appears) {
  IoQueue queue({.queue_capacity = 1});
  const auto first = queue.submit(syncs(1), WhenFull::kBlock);
  std::optional<IoToken> second;
  std::thread submitter([&] { second = queue.submit(syncs(1), WhenFull::kBlock); });
  end_one(queue);
  submitter.join();
  EXPECT_TRUE(queue.wait(*first).ok());
  ASSERT_TRUE(second);
  EXPECT_FALSE(queue.poll(*second));
  end_one(queue);
  EXPECT_TRUE(queue.poll(*second)->ok());
}

TEST(IoQueueTest, cancel_takes_back_only_what_has_not_started) {
  IoQueue queue({});
  const auto token = queue.submit(syncs(3), WhenFull::kBlock);
  const auto other = queue.submit(syncs(1), WhenFull::kBlock);
  auto started = queue.take();
  EXPECT_EQ(queue.cancel(*token), 2);
  EXPECT_EQ(queue.cancel(*token), 0);
  EXPECT_FALSE(queue.poll(*token)) << "the started one has not ended";
  EXPECT_EQ(started->advance(0), IoTransfer::Step::kDone);
  queue.finish(std::move(started));
  EXPECT_EQ(queue.poll(*token)->requests,
            (std::vector<IoStatus>{{0, 0}, {ECANCELED, 0}, {ECANCELED, 0}}));
  EXPECT_FALSE(queue.poll(*other));
  queue.stop();
  EXPECT_EQ(queue.poll(*other)->error(), ECANCELED);
}

TEST(IoQueueTest, interrupted_calls_are_tried_again_and_not_for_ever) {
  std::byte bytes[10] = {};
  IoTransfer transfer(1, 0, {IoOp::kWrite, 0, 100, {{bytes, 4}, {bytes + 4, 6}}});
  EXPECT_EQ(transfer.next(1 << 20).size(), 2U);
  EXPECT_EQ(transfer.advance(-EINTR), IoTransfer::Step::kAgain);
  EXPECT_EQ(transfer.advance(5), IoTransfer::Step::kAgain);
  EXPECT_EQ(transfer.offset(), 105);
  EXPECT_EQ(transfer.next(1 << 20)[0].iov_base, bytes + 5);
  int calls = 0;
  while (transfer.advance(-EAGAIN) == IoTransfer::Step::kAgain) ASSERT_LT(++calls, 1000);
  EXPECT_EQ(transfer.status(), (IoStatus{EAGAIN, 5}));
  IoTransfer stuck(1, 0, {IoOp::kWrite, 0, 0, {{bytes, 4}}});
  while (stuck.advance(0) == IoTransfer::Step::kAgain) ASSERT_LT(++calls, 1000);
  EXPECT_EQ(stuck.status().error, EIO);
}

// The decorator must do what it says, or the tests that lean on it show nothing.

TEST_P(AsyncIoTest, the_flaky_decorator_fails_tears_and_reorders) {
  const OpenFile file(dir_.file("a"));
  FlakyIo io(make(), {.fail_rate = 0.3, .tear_rate = 0.3, .delay_rate = 0.5, .seed = 7});
  std::vector<std::vector<std::byte>> data;
  std::vector<IoToken> tokens;
  for (int i = 0; i < 60; ++i) data.push_back(random_bytes(100, static_cast<uint64_t>(i + 1)));
  for (int i = 0; i < 60; ++i) {
    tokens.push_back(
        *io.submit({{IoOp::kWrite, file.fd(), i * 100, {buffer_of(data[static_cast<size_t>(i)])}}},
                   WhenFull::kBlock));
  }
  std::map<int, int> seen;  // what the file holds -> how often
  for (size_t i = 0; i < 60; ++i) {
    const int error = io.wait(tokens[i]).error();
    std::vector<std::byte> found(100);
    const ssize_t size = ::pread(file.fd(), found.data(), 100, static_cast<off_t>(i) * 100);
    EXPECT_TRUE(size >= 0) << i;  // a file that ends early reads as zeros
    const bool head = std::memcmp(found.data(), data[i].data(), 50) == 0;
    const bool tail = std::memcmp(found.data() + 50, data[i].data() + 50, 50) == 0;
    EXPECT_EQ(error, head && tail ? 0 : EIO) << i;
    ++seen[(head ? 1 : 0) + (tail ? 2 : 0)];
  }
  EXPECT_GT(seen[0], 5);
  EXPECT_GT(seen[1], 5);
  EXPECT_EQ(seen[2], 0);
  EXPECT_GT(seen[3], 5);
  EXPECT_EQ(seen[0] + seen[1], io.num_injected());
}

}  // namespace
}  // namespace helicore::kv::testing
