// Asynchronous file I/O: batches of reads, writes and syncs, each batch one token. Two back ends
// with the same behaviour: the kernel's io_uring, and a pool of threads over preadv/pwritev for
// kernels or sandboxes without it.
//
// Order: none between requests, in a batch or across batches. Whoever needs "B after A" waits for
// A first. Short transfers are continued; a read that meets the end of the file reports kErrorEof.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace helicore::kv {

struct IoBuffer {
  void* address = nullptr;  // written by reads, only read by writes
  int64_t num_bytes = 0;    // >= 0
};

enum class IoOp : uint8_t {
  kRead,
  kWrite,
  kSync,  // fdatasync(fd): covers writes that completed before it was submitted
};

// The buffers are consecutive in the file from `offset` on. Memory belongs to the caller and must
// stay valid until the batch has completed; the descriptor must stay open as long. A descriptor
// opened with O_DIRECT wants offset, addresses and sizes aligned to the device's logical block
// (4096 bytes is always enough); what is not fails with EINVAL from the kernel.
struct IoRequest {
  IoOp op = IoOp::kRead;
  int fd = -1;
  int64_t offset = 0;
  std::vector<IoBuffer> buffers{};  // none for kSync
};

// What a read reports that met the end of the file: no errno says so.
inline constexpr int kErrorEof = -1;

struct IoStatus {
  int error = 0;          // 0, kErrorEof or an errno; ECANCELED for what cancel() took back
  int64_t num_bytes = 0;  // transferred; everything when error is 0
  friend bool operator==(const IoStatus&, const IoStatus&) = default;
};
[[nodiscard]] std::string describe(const IoStatus& status);

struct IoResult {
  std::vector<IoStatus> requests{};          // in the order of the batch
  [[nodiscard]] bool ok() const noexcept;    // every request has error 0
  [[nodiscard]] int error() const noexcept;  // of the first request that failed, else 0
};

using IoToken = uint64_t;

enum class WhenFull : uint8_t { kRefuse, kBlock };

struct IoCounters {
  int64_t num_submitted = 0;  // requests
  int64_t num_completed = 0;  // failures and cancellations included
  int64_t num_failed = 0;     // cancellations excluded
  int64_t num_cancelled = 0;
  int64_t num_continued = 0;  // short transfers that were taken up again
  int64_t bytes_read = 0;
  int64_t bytes_written = 0;
  friend bool operator==(const IoCounters&, const IoCounters&) = default;
};

enum class IoBackend : uint8_t { kAuto, kUring, kThreads };

struct AsyncIoConfig {
  IoBackend backend = IoBackend::kAuto;
  int32_t queue_capacity = 256;                   // requests submitted and not completed; > 0
  int32_t depth = 32;                             // requests in the kernel's hands at once; 1..4096
  int32_t num_threads = 4;                        // of the thread back end; 1..256
  int64_t max_transfer_bytes = int64_t{1} << 28;  // of one system call; > 0
  void validate() const;
};

// Threads: every call from any thread. A token is collected once, by one thread: by poll() or
// wait(). The destructor takes back what has not started and waits for the rest; nobody may be
// inside a call by then.
class AsyncIo {
 public:
  virtual ~AsyncIo() = default;
  AsyncIo(const AsyncIo&) = delete;
  AsyncIo& operator=(const AsyncIo&) = delete;

  // Whole batch or nothing. Without room for it: nullopt or waits, by choice. Throws
  // InvalidArgument for a malformed request or a batch that can never fit.
  [[nodiscard]] virtual std::optional<IoToken> submit(std::vector<IoRequest> batch,
                                                      WhenFull when_full) = 0;
  // Takes back the requests of a batch that have not started; how many. The batch must still be
  // collected.
  virtual int64_t cancel(IoToken token) = 0;
  // The result, once every request of the batch has ended; nullopt before. Throws InvalidArgument
  // for a token that is unknown or was collected.
  [[nodiscard]] virtual std::optional<IoResult> poll(IoToken token) = 0;
  [[nodiscard]] virtual IoResult wait(IoToken token) = 0;
  [[nodiscard]] virtual IoCounters counters() const = 0;
  [[nodiscard]] virtual std::string_view name() const noexcept = 0;  // "io_uring", "threads"

 protected:
  AsyncIo() = default;
};

// The back end that the config names; kAuto takes io_uring when the kernel lets us and threads
// otherwise. Throws NotSupported, with the reason, when kUring was asked for and can't be had.
[[nodiscard]] std::unique_ptr<AsyncIo> make_async_io(const AsyncIoConfig& config = {});
// Empty when io_uring works here, otherwise why it does not.
[[nodiscard]] std::string why_no_io_uring();

}  // namespace helicore::kv
