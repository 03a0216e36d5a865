#include "helicore/kv/io_queue.h"

#include <limits.h>

#include <algorithm>
#include <cerrno>

#include "helicore/core/error.h"

namespace helicore::kv {
namespace {

constexpr int kMaxRetries = 64;  // interrupted calls in a row before the error is reported

bool is_transient(int error) noexcept { return error == EINTR || error == EAGAIN; }

void check_request(const IoRequest& r) {
  HELICORE_CHECK(r.fd >= 0, "kv.async_io", "fd must be >= 0, got ", r.fd);
  HELICORE_CHECK(r.op != IoOp::kSync || r.buffers.empty(), "kv.async_io",
                 "a sync takes no buffers, got ", r.buffers.size());
  HELICORE_CHECK(r.offset >= 0, "kv.async_io", "offset must be >= 0, got ", r.offset);
  for (const IoBuffer& b : r.buffers) {
    HELICORE_CHECK(b.num_bytes >= 0, "kv.async_io", "num_bytes must be >= 0, got ", b.num_bytes);
    HELICORE_CHECK(b.address != nullptr || b.num_bytes == 0, "kv.async_io",
                   "address must not be null for ", b.num_bytes, " bytes");
  }
}

}  // namespace

IoTransfer::IoTransfer(IoToken token, size_t index, const IoRequest& request)
    : token_(token), index_(index), op_(request.op), fd_(request.fd), offset_(request.offset) {
  buffers_.reserve(request.buffers.size());
  for (const IoBuffer& b : request.buffers) {
    if (b.num_bytes > 0) buffers_.push_back({b.address, static_cast<size_t>(b.num_bytes)});
  }
}

const std::vector<iovec>& IoTransfer::next(int64_t max_bytes) {
  call_.clear();
  int64_t room = max_bytes;
  int64_t skip = next_done_;
  for (size_t i = next_; i < buffers_.size() && room > 0 && call_.size() < IOV_MAX; ++i) {
    const int64_t left = static_cast<int64_t>(buffers_[i].iov_len) - skip;
    const int64_t bytes = std::min(left, room);
    call_.push_back(
        {static_cast<std::byte*>(buffers_[i].iov_base) + skip, static_cast<size_t>(bytes)});
    room -= bytes;
    skip = 0;
  }
  return call_;
}

IoTransfer::Step IoTransfer::finish(int error) noexcept {
  status_ = {error, done_};
  return Step::kDone;
}

IoTransfer::Step IoTransfer::advance(int64_t outcome) {
  if (outcome < 0) {
    const int error = static_cast<int>(-outcome);
    if (is_transient(error) && ++num_retries_ <= kMaxRetries) return Step::kAgain;
    return finish(error);
  }
  if (op_ == IoOp::kSync) return finish(0);
  if (outcome == 0 && !complete()) {
    if (op_ == IoOp::kRead) return finish(kErrorEof);
    return ++num_retries_ <= kMaxRetries ? Step::kAgain : finish(EIO);
  }
  num_retries_ = 0;
  done_ += outcome;
  while (outcome > 0) {
    const int64_t left = static_cast<int64_t>(buffers_[next_].iov_len) - next_done_;
    const int64_t bytes = std::min(left, outcome);
    outcome -= bytes;
    next_done_ += bytes;
    if (bytes == left) {
      ++next_;
      next_done_ = 0;
    }
  }
  if (complete()) return finish(0);
  ++num_continued_;
  return Step::kAgain;
}

std::optional<IoToken> IoQueue::submit(const std::vector<IoRequest>& batch, WhenFull when_full) {
  for (const IoRequest& request : batch) check_request(request);
  const auto count = static_cast<int64_t>(batch.size());
  HELICORE_CHECK(count <= config_.queue_capacity, "kv.async_io", "a batch must hold at most ",
                 config_.queue_capacity, " requests (queue_capacity), got ", count);
  std::unique_lock lock(mutex_);
  const auto has_room = [&] { return num_open_ + count <= config_.queue_capacity; };
  if (!has_room() && when_full == WhenFull::kRefuse) return std::nullopt;
  room_.wait(lock, has_room);
  const IoToken token = ++last_token_;
  Batch& added = batches_[token];
  added.result.requests.resize(batch.size());
  added.num_left = batch.size();
  for (size_t i = 0; i < batch.size(); ++i) {
    pending_.push_back(std::make_unique<IoTransfer>(token, i, batch[i]));
  }
  num_open_ += count;
  counters_.num_submitted += count;
  work_.notify_all();
  return token;
}

IoQueue::Batch& IoQueue::batch_of(IoToken token) {
  const auto it = batches_.find(token);
  HELICORE_CHECK(it != batches_.end(), "kv.async_io", "token ", token,
                 " is unknown or was collected before");
  return it->second;
}

int64_t IoQueue::cancel_pending(std::optional<IoToken> token) {
  std::deque<std::unique_ptr<IoTransfer>> kept;
  int64_t count = 0;
  for (auto& transfer : pending_) {
    if (token && transfer->token_ != *token) {
      kept.push_back(std::move(transfer));
      continue;
    }
    complete(transfer->token_, transfer->index_, {ECANCELED, 0});
    ++count;
  }
  pending_.swap(kept);
  return count;
}

int64_t IoQueue::cancel(IoToken token) {
  const std::scoped_lock lock(mutex_);
  static_cast<void>(batch_of(token));
  return cancel_pending(token);
}

std::optional<IoResult> IoQueue::poll(IoToken token) {
  const std::scoped_lock lock(mutex_);
  Batch& batch = batch_of(token);
  if (batch.num_left > 0) return std::nullopt;
  IoResult result = std::move(batch.result);
  batches_.erase(token);
  return result;
}

IoResult IoQueue::wait(IoToken token) {
  std::unique_lock lock(mutex_);
  Batch& batch = batch_of(token);  // stays where it is: only its collector erases it
  done_.wait(lock, [&batch] { return batch.num_left == 0; });
  IoResult result = std::move(batch.result);
  batches_.erase(token);
  return result;
}

IoCounters IoQueue::counters() const {
  const std::scoped_lock lock(mutex_);
  return counters_;
}

std::unique_ptr<IoTransfer> IoQueue::take() {
  const std::scoped_lock lock(mutex_);
  if (pending_.empty()) return nullptr;
  auto transfer = std::move(pending_.front());
  pending_.pop_front();
  return transfer;
}

std::unique_ptr<IoTransfer> IoQueue::take_or_wait() {
  std::unique_lock lock(mutex_);
  work_.wait(lock, [this] { return stopped_ || !pending_.empty(); });
  if (pending_.empty()) return nullptr;
  auto transfer = std::move(pending_.front());
  pending_.pop_front();
  return transfer;
}

void IoQueue::finish(std::unique_ptr<IoTransfer> transfer) {
  const std::scoped_lock lock(mutex_);
  counters_.num_continued += transfer->num_continued();
  if (transfer->op() == IoOp::kRead) counters_.bytes_read += transfer->status().num_bytes;
  if (transfer->op() == IoOp::kWrite) counters_.bytes_written += transfer->status().num_bytes;
  complete(transfer->token_, transfer->index_, transfer->status());
}

void IoQueue::complete(IoToken token, size_t index, const IoStatus& status) {
  Batch& batch = batches_.at(token);
  batch.result.requests[index] = status;
  --num_open_;
  ++counters_.num_completed;
  if (status.error == ECANCELED) {
    ++counters_.num_cancelled;
  } else if (status.error != 0) {
    ++counters_.num_failed;
  }
  room_.notify_all();
  if (--batch.num_left == 0) done_.notify_all();
}

void IoQueue::stop() {
  const std::scoped_lock lock(mutex_);
  stopped_ = true;
  cancel_pending(std::nullopt);
  work_.notify_all();
}

bool IoQueue::stopped() const {
  const std::scoped_lock lock(mutex_);
  return stopped_;
}

}  // namespace helicore::kv
