#include "helicore/comm/symmetric_memory.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "helicore/comm/communicator.h"
#include "helicore/core/error.h"

namespace helicore::comm {
namespace {

constexpr size_t kBytes = 1 << 20;

TEST(SegmentTest, bad_sizes_are_named) {
  EXPECT_THROW(Segment(0, 0, kBytes), InvalidArgument);
  EXPECT_THROW(Segment(2, 2, kBytes), InvalidArgument);
  EXPECT_THROW(Segment(0, 2, 100), InvalidArgument);
}

TEST(SegmentTest, a_handle_of_other_sizes_or_of_garbage_is_refused) {
  const auto mine = std::make_shared<Segment>(0, 2, kBytes);
  const Segment larger(1, 2, 2 * kBytes);
  const Segment other_world(1, 3, kBytes);
  for (const std::string& handle :
       {larger.handle(), other_world.handle(), std::string("x"), std::string(200, 'x')}) {
    try {
      (void)map_segments(mine, {mine->handle(), handle});
      FAIL();
    } catch (const CommError& error) {
      EXPECT_NE(std::string(error.what()).find("rank 1"), std::string::npos) << error.what();
    }
  }
}

TEST(SegmentTest, a_process_that_died_is_named_while_others_wait_for_it) {
  // The child's handle comes through a pipe; then it dies without a word.
  int pipes[2];
  ASSERT_EQ(pipe(pipes), 0);
  const pid_t child = fork();
  if (child == 0) {
    const Segment segment(1, 2, kBytes);
    const std::string handle = segment.handle();
    (void)!write(pipes[1], handle.data(), handle.size());
    while (true) pause();
  }
  const auto mine = std::make_shared<Segment>(0, 2, kBytes);
  std::string handle(mine->handle().size(), 0);
  ASSERT_EQ(read(pipes[0], handle.data(), handle.size()), static_cast<ssize_t>(handle.size()));
  Communicator communicator(map_segments(mine, {mine->handle(), handle}), 60.0);
  kill(child, SIGKILL);
  try {
    communicator.barrier();
    FAIL();
  } catch (const CommError& error) {
    EXPECT_NE(std::string(error.what()).find("rank 1 (process "), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("has died"), std::string::npos);
  }
  EXPECT_THROW(communicator.barrier(), CommError);
  waitpid(child, nullptr, 0);
  close(pipes[0]);
  close(pipes[1]);
}

TEST(SegmentTest, memory_of_a_process_that_is_gone_can_not_be_mapped) {
  const auto mine = std::make_shared<Segment>(0, 2, kBytes);
  std::string handle;
  {
    const Segment other(1, 2, kBytes);
    handle = other.handle();
  }
  EXPECT_THROW((void)map_segments(mine, {mine->handle(), handle}), CommError);
}

}  // namespace
}  // namespace helicore::comm
