// The thread back end: each worker runs one request at a time with blocking system calls.
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <thread>

#include "helicore/kv/io_queue.h"

namespace helicore::kv {
namespace {

int64_t call_kernel(IoTransfer& transfer, int64_t max_bytes) noexcept {
  ssize_t outcome = 0;
  if (transfer.op() == IoOp::kSync) {
    outcome = ::fdatasync(transfer.fd());
  } else {
    const auto& vec = transfer.next(max_bytes);
    const int count = static_cast<int>(vec.size());
    outcome = transfer.op() == IoOp::kRead
                  ? ::preadv(transfer.fd(), vec.data(), count, transfer.offset())
                  : ::pwritev(transfer.fd(), vec.data(), count, transfer.offset());
  }
  return outcome < 0 ? -static_cast<int64_t>(errno) : outcome;
}

class ThreadIo final : public AsyncIo {
 public:
  explicit ThreadIo(const AsyncIoConfig& config) : queue_(config) {
    try {
      for (int i = 0; i < config.num_threads; ++i) workers_.emplace_back([this] { work(); });
    } catch (...) {
      stop();
      throw;
    }
  }
  ~ThreadIo() override { stop(); }

  std::optional<IoToken> submit(std::vector<IoRequest> batch, WhenFull when_full) override {
    return queue_.submit(batch, when_full);
  }
  int64_t cancel(IoToken token) override { return queue_.cancel(token); }
  std::optional<IoResult> poll(IoToken token) override { return queue_.poll(token); }
  IoResult wait(IoToken token) override { return queue_.wait(token); }
  IoCounters counters() const override { return queue_.counters(); }
  std::string_view name() const noexcept override { return "threads"; }

 private:
  void stop() {
    queue_.stop();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
  }

  void work() {
    while (auto transfer = queue_.take_or_wait()) {
      const int64_t max_bytes = queue_.config().max_transfer_bytes;
      while (transfer->advance(call_kernel(*transfer, max_bytes)) == IoTransfer::Step::kAgain) {
      }
      queue_.finish(std::move(transfer));
    }
  }

  IoQueue queue_;
  std::vector<std::thread> workers_;
};

}  // namespace

std::unique_ptr<AsyncIo> make_thread_io(const AsyncIoConfig& config) {
  return std::make_unique<ThreadIo>(config);
}

}  // namespace helicore::kv
