// What both I/O back ends share: tokens, the bounded queue, cancellation, waiting, counters, and
// the continuation of short transfers. A back end takes requests, moves bytes and reports.
#pragma once

#include <sys/uio.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "helicore/kv/async_io.h"

namespace helicore::kv {

// One request on its way. Heap-allocated once, at a fixed address until it is finished.
class IoTransfer {
 public:
  IoTransfer(IoToken token, size_t index, const IoRequest& request);

  [[nodiscard]] IoOp op() const noexcept { return op_; }
  [[nodiscard]] int fd() const noexcept { return fd_; }
  [[nodiscard]] bool complete() const noexcept { return next_ == buffers_.size(); }
  [[nodiscard]] int64_t offset() const noexcept { return offset_ + done_; }

  // The vector of the next system call: at most `max_bytes`, at most the kernel's vector length.
  // Valid until advance().
  [[nodiscard]] const std::vector<iovec>& next(int64_t max_bytes);

  enum class Step : uint8_t { kAgain, kDone };
  // Takes a system call's outcome: bytes, or a negative errno. kDone: status() is final.
  Step advance(int64_t outcome);
  [[nodiscard]] const IoStatus& status() const noexcept { return status_; }
  [[nodiscard]] int num_continued() const noexcept { return num_continued_; }

 private:
  friend class IoQueue;
  Step finish(int error) noexcept;

  IoToken token_;
  size_t index_;
  IoOp op_;
  int fd_;
  int64_t offset_;
  std::vector<iovec> buffers_;
  size_t next_ = 0;        // first buffer that is not done
  int64_t next_done_ = 0;  // bytes of it that are
  int64_t done_ = 0;
  int num_retries_ = 0;  // interrupted or empty calls in a row
  int num_continued_ = 0;
  std::vector<iovec> call_;
  IoStatus status_;
};

// Threads: every call from any thread; one mutex inside, never held during I/O.
class IoQueue {
 public:
  explicit IoQueue(const AsyncIoConfig& config) : config_(config) {}

  [[nodiscard]] const AsyncIoConfig& config() const noexcept { return config_; }

  // The callers' side, as in AsyncIo.
  [[nodiscard]] std::optional<IoToken> submit(const std::vector<IoRequest>& batch,
                                              WhenFull when_full);
  int64_t cancel(IoToken token);
  [[nodiscard]] std::optional<IoResult> poll(IoToken token);
  [[nodiscard]] IoResult wait(IoToken token);
  [[nodiscard]] IoCounters counters() const;

  // The back end's side. take() hands out the oldest request, or null when there is none;
  // take_or_wait() sleeps until there is one and returns null only after stop().
  [[nodiscard]] std::unique_ptr<IoTransfer> take();
  [[nodiscard]] std::unique_ptr<IoTransfer> take_or_wait();
  void finish(std::unique_ptr<IoTransfer> transfer);
  // Takes back what has not started and lets take_or_wait() return null.
  void stop();
  [[nodiscard]] bool stopped() const;

 private:
  struct Batch {
    IoResult result;
    size_t num_left = 0;
  };

  Batch& batch_of(IoToken token);  // lock held
  void complete(IoToken token, size_t index, const IoStatus& status);
  int64_t cancel_pending(std::optional<IoToken> token);

  const AsyncIoConfig config_;
  mutable std::mutex mutex_;
  std::condition_variable work_;  // a request was queued, or stop
  std::condition_variable done_;  // a batch completed
  std::condition_variable room_;  // requests left the queue
  std::deque<std::unique_ptr<IoTransfer>> pending_;
  std::unordered_map<IoToken, Batch> batches_;
  IoToken last_token_ = 0;
  int64_t num_open_ = 0;  // submitted and not completed
  bool stopped_ = false;
  IoCounters counters_;
};

// The thread back end, and io_uring or null with the reason.
[[nodiscard]] std::unique_ptr<AsyncIo> make_thread_io(const AsyncIoConfig& config);
[[nodiscard]] std::unique_ptr<AsyncIo> make_uring_io(const AsyncIoConfig& config,
                                                     std::string* why_not);

}  // namespace helicore::kv
