// The io_uring back end, by system calls alone. One driver thread owns the ring; it sleeps in the
// kernel until a request ends or a submitter writes to an event descriptor that the ring reads.
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <thread>

#include "helicore/core/error.h"
#include "helicore/kv/io_queue.h"

#if defined(__linux__) && __has_include(<linux/io_uring.h>) && defined(SYS_io_uring_setup)
#include <linux/io_uring.h>

namespace helicore::kv {
namespace {

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) noexcept : fd_(fd) {}
  ~FileDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  [[nodiscard]] int get() const noexcept { return fd_; }

 private:
  int fd_;
};

class Mapping {
 public:
  Mapping(int fd, size_t num_bytes, off_t offset) noexcept : num_bytes_(num_bytes) {
    address_ =
        ::mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, offset);
  }
  ~Mapping() {
    if (ok()) ::munmap(address_, num_bytes_);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  [[nodiscard]] bool ok() const noexcept { return address_ != MAP_FAILED; }
  template <typename T>
  [[nodiscard]] T* at(uint32_t offset) const noexcept {
    return reinterpret_cast<T*>(static_cast<std::byte*>(address_) + offset);
  }

 private:
  void* address_ = MAP_FAILED;
  size_t num_bytes_;
};

// The two rings and the submission entries; used by one thread.
class Ring {
 public:
  Ring(int fd, const io_uring_params& p) noexcept
      : fd_(fd),
        rings_(fd,
               std::max(p.sq_off.array + p.sq_entries * sizeof(uint32_t),
                        p.cq_off.cqes + p.cq_entries * sizeof(io_uring_cqe)),
               IORING_OFF_SQ_RING),
        entries_(fd, p.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES),
        params_(p) {}

  [[nodiscard]] bool ok() const noexcept { return rings_.ok() && entries_.ok(); }

  // A zeroed entry, part of the next enter(). The caller never holds more than sq_entries.
  [[nodiscard]] io_uring_sqe& push() noexcept {
    const uint32_t mask = params_.sq_entries - 1;
    const uint32_t slot = tail_ & mask;
    rings_.at<uint32_t>(params_.sq_off.array)[slot] = slot;
    io_uring_sqe& entry = entries_.at<io_uring_sqe>(0)[slot];
    std::memset(&entry, 0, sizeof(entry));
    ++tail_;
    ++num_unsubmitted_;
    return entry;
  }

  // Hands over what was pushed and sleeps until something ended. 0 or an errno.
  int enter() noexcept {
    std::atomic_ref(*rings_.at<uint32_t>(params_.sq_off.tail))
        .store(tail_, std::memory_order_release);
    const long taken = ::syscall(SYS_io_uring_enter, fd_.get(), num_unsubmitted_, 1U,
                                 IORING_ENTER_GETEVENTS, nullptr, 0);
    if (taken < 0) return errno;
    num_unsubmitted_ -= static_cast<uint32_t>(taken);
    return 0;
  }

  // Calls fn(user_data, outcome) for everything that ended.
  template <typename Fn>
  void reap(Fn&& fn) {
    std::atomic_ref head(*rings_.at<uint32_t>(params_.cq_off.head));
    std::atomic_ref tail(*rings_.at<uint32_t>(params_.cq_off.tail));
    uint32_t at = head.load(std::memory_order_relaxed);
    const uint32_t end = tail.load(std::memory_order_acquire);
    for (; at != end; ++at) {
      const auto& entry =
          rings_.at<io_uring_cqe>(params_.cq_off.cqes)[at & (params_.cq_entries - 1)];
      const uint64_t user_data = entry.user_data;
      const int32_t outcome = entry.res;
      head.store(at + 1, std::memory_order_release);
      fn(user_data, outcome);
    }
  }

 private:
  FileDescriptor fd_;
  Mapping rings_;
  Mapping entries_;
  io_uring_params params_;
  uint32_t tail_ = 0;
  uint32_t num_unsubmitted_ = 0;
};

class UringIo final : public AsyncIo {
 public:
  UringIo(const AsyncIoConfig& config, std::unique_ptr<Ring> ring, int wake_fd)
      : queue_(config), ring_(std::move(ring)), wake_fd_(wake_fd), driver_([this] { drive(); }) {}
  ~UringIo() override {
    queue_.stop();
    wake();
    driver_.join();
  }

  std::optional<IoToken> submit(std::vector<IoRequest> batch, WhenFull when_full) override {
    const auto token = queue_.submit(batch, when_full);
    if (token) wake();
    return token;
  }
  int64_t cancel(IoToken token) override { return queue_.cancel(token); }
  std::optional<IoResult> poll(IoToken token) override { return queue_.poll(token); }
  IoResult wait(IoToken token) override { return queue_.wait(token); }
  IoCounters counters() const override { return queue_.counters(); }
  std::string_view name() const noexcept override { return "io_uring"; }

 private:
  static constexpr uint64_t kWake = 0;  // user data of the wake-up read; others are addresses

  void wake() const noexcept {
    const uint64_t one = 1;
    // Fails only when the counter is full, and then the driver is awake anyway.
    [[maybe_unused]] const auto written = ::write(wake_fd_.get(), &one, sizeof(one));
  }

  void arm_wake() noexcept {
    wake_vec_ = {&wake_count_, sizeof(wake_count_)};
    io_uring_sqe& entry = ring_->push();
    entry.opcode = IORING_OP_READV;
    entry.fd = wake_fd_.get();
    entry.addr = reinterpret_cast<uint64_t>(&wake_vec_);
    entry.len = 1;
    entry.user_data = kWake;
    wake_armed_ = true;
  }

  void start(IoTransfer* transfer) {
    io_uring_sqe& entry = ring_->push();
    entry.fd = transfer->fd();
    entry.user_data = reinterpret_cast<uint64_t>(transfer);
    if (transfer->op() == IoOp::kSync) {
      entry.opcode = IORING_OP_FSYNC;
      entry.fsync_flags = IORING_FSYNC_DATASYNC;
      return;
    }
    const auto& vec = transfer->next(queue_.config().max_transfer_bytes);
    entry.opcode = transfer->op() == IoOp::kRead ? IORING_OP_READV : IORING_OP_WRITEV;
    entry.off = static_cast<uint64_t>(transfer->offset());
    entry.addr = reinterpret_cast<uint64_t>(vec.data());
    entry.len = static_cast<uint32_t>(vec.size());
  }

  void on_end(uint64_t user_data, int32_t outcome) {
    if (user_data == kWake) {
      wake_armed_ = false;
      return;
    }
    auto* transfer = reinterpret_cast<IoTransfer*>(user_data);
    if (transfer->advance(outcome) == IoTransfer::Step::kAgain) {
      again_.push_back(transfer);
      return;
    }
    --num_started_;
    queue_.finish(std::unique_ptr<IoTransfer>(transfer));
  }

  void drive() {
    while (true) {
      // NOTE: re-armed before the queue is looked at, so that no submission is missed.
      const bool stopping = queue_.stopped();
      if (!wake_armed_ && !stopping) arm_wake();
      for (IoTransfer* transfer : again_) start(transfer);
      again_.clear();
      while (num_started_ < queue_.config().depth) {
        auto transfer = queue_.take();
        if (transfer == nullptr) break;
        ++num_started_;
        start(transfer.release());
      }
      if (stopping && num_started_ == 0 && !wake_armed_) return;
      const int error = ring_->enter();
      if (error != 0 && error != EINTR && error != EAGAIN && error != EBUSY) {
        // The kernel refuses a ring that it made: there is no way to tell what it still touches.
        log_error(std::string("kv.async_io: io_uring_enter failed: ") + std::strerror(error));
        std::terminate();
      }
      ring_->reap([this](uint64_t data, int32_t outcome) { on_end(data, outcome); });
    }
  }

  IoQueue queue_;
  std::unique_ptr<Ring> ring_;
  FileDescriptor wake_fd_;
  // Of the driver thread alone:
  uint64_t wake_count_ = 0;
  iovec wake_vec_{};
  bool wake_armed_ = false;
  int num_started_ = 0;
  std::vector<IoTransfer*> again_;
  std::thread driver_;  // last: starts when everything else is there
};

uint32_t round_up_to_power_of_two(uint32_t value) noexcept {
  uint32_t power = 1;
  while (power < value) power *= 2;
  return power;
}

}  // namespace

std::unique_ptr<AsyncIo> make_uring_io(const AsyncIoConfig& config, std::string* why_not) {
  io_uring_params params{};
  const uint32_t entries = round_up_to_power_of_two(static_cast<uint32_t>(config.depth) + 1);
  const int fd = static_cast<int>(::syscall(SYS_io_uring_setup, entries, &params));
  if (fd < 0) {
    *why_not = std::string("io_uring_setup: ") + std::strerror(errno);
    return nullptr;
  }
  auto ring = std::make_unique<Ring>(fd, params);
  const uint32_t needed = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP;
  if ((params.features & needed) != needed) {
    *why_not = "the kernel's io_uring is older than 5.5";
    return nullptr;
  }
  const int wake_fd = ::eventfd(0, EFD_CLOEXEC);
  if (!ring->ok() || wake_fd < 0) {
    *why_not = std::string("mapping the rings: ") + std::strerror(errno);
    if (wake_fd >= 0) ::close(wake_fd);
    return nullptr;
  }
  return std::make_unique<UringIo>(config, std::move(ring), wake_fd);
}

}  // namespace helicore::kv

#else

namespace helicore::kv {

std::unique_ptr<AsyncIo> make_uring_io(const AsyncIoConfig&, std::string* why_not) {
  *why_not = "this build has no io_uring header";
  return nullptr;
}

}  // namespace helicore::kv

#endif
