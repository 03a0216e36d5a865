// Reading from a prefix store: pin under the lock, read into the caller's pages or a buffer, verify
// on the thread that collects, unpin.
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "helicore/core/error.h"
#include "helicore/kv/prefix_store_impl.h"

namespace helicore::kv {
namespace {

constexpr size_t kReadGroup = 32;  // blocks per batch of the I/O back end

}  // namespace

// False: the store serves nothing. True counts in num_starting_ until the operation is listed.
bool PrefixStore::Impl::pin_for_reading(std::span<const GetBlock> blocks, Operation& operation) {
  operation.statuses.assign(blocks.size(), BlockStatus::kGone);
  const std::scoped_lock lock(mutex_);
  if (!usable_locked()) {
    operation.statuses.assign(blocks.size(), BlockStatus::kDisabled);
    return false;
  }
  ++num_starting_;
  for (size_t i = 0; i < blocks.size(); ++i) {
    const BlockRef& ref = blocks[i].block;
    if (!index_->holds(ref.slot, ref.sequence)) {
      ++stats_.num_gone;
      continue;
    }
    index_->pin(ref.slot);
    operation.items.push_back(
        {ref, index_->at(ref.slot).data_crc, i, blocks[i].destination, {}, std::nullopt});
  }
  return true;
}

// False: the queue was full and nothing was started.
bool PrefixStore::Impl::submit_reads(Operation& operation, WhenFull when_full) {
  for (ReadItem& item : operation.items) {
    if (!can_go_direct(item.destination)) item.bounce = buffers_.take();
  }
  const size_t group = when_full == WhenFull::kRefuse
                           ? operation.items.size()
                           : std::min(kReadGroup, static_cast<size_t>(config_.io.queue_capacity));
  for (size_t begin = 0; begin < operation.items.size(); begin += group) {
    const size_t end = std::min(operation.items.size(), begin + group);
    std::vector<IoRequest> batch;
    Reading reading;
    for (size_t i = begin; i < end; ++i) {
      const ReadItem& item = operation.items[i];
      const auto into =
          item.bounce ? std::vector<IoBuffer>{{item.bounce.data(), slot_bytes_}} : item.destination;
      batch.push_back({IoOp::kRead, data_.fd.get(), item.block.slot * slot_bytes_, into});
      reading.items.push_back(i);
    }
    const auto token = io_->submit(std::move(batch), when_full);
    if (!token) return false;
    reading.token = *token;
    operation.readings.push_back(std::move(reading));
  }
  return true;
}

std::optional<StoreToken> PrefixStore::Impl::get(std::span<const GetBlock> blocks,
                                                 WhenFull when_full) {
  for (const GetBlock& block : blocks) {
    check_pieces(block.destination, "kv.prefix_store.get", "destination");
  }
  HELICORE_CHECK(when_full == WhenFull::kBlock ||
                     blocks.size() <= static_cast<size_t>(config_.io.queue_capacity),
                 "kv.prefix_store.get",
                 "blocks must be at most io.queue_capacity = ", config_.io.queue_capacity,
                 " unless it may block, got ", blocks.size());
  auto operation = std::make_shared<Operation>();
  if (!pin_for_reading(blocks, *operation)) {
    const std::scoped_lock lock(mutex_);
    return add_operation_locked(std::move(operation));
  }
  const auto undo_locked = [&] {
    for (ReadItem& item : operation->items) {
      index_->unpin(item.block.slot);
      if (item.bounce) buffers_.give(std::move(item.bounce));
    }
    --num_starting_;
    done_.notify_all();
  };
  bool started = false;
  try {
    started = submit_reads(*operation, when_full);
  } catch (...) {  // no memory for a buffer: nothing was started
    const std::scoped_lock lock(mutex_);
    undo_locked();
    throw;
  }
  const std::scoped_lock lock(mutex_);
  if (!started) {
    undo_locked();
    return std::nullopt;
  }
  --num_starting_;
  done_.notify_all();
  return add_operation_locked(std::move(operation));
}

// Takes results from the I/O back end; true when all are there.
bool PrefixStore::Impl::drain_reads(Operation& operation, bool wait) {
  while (!operation.readings.empty()) {
    const Reading& reading = operation.readings.back();
    const auto result = wait ? std::optional(io_->wait(reading.token)) : io_->poll(reading.token);
    if (!result) return false;
    for (size_t i = 0; i < reading.items.size(); ++i) {
      operation.items[reading.items[i]].status = result->requests[i];
    }
    operation.readings.pop_back();
  }
  return true;
}

BlockStatus PrefixStore::Impl::verify(ReadItem& item) const {
  if (item.status->error == kErrorEof) return BlockStatus::kCorrupt;
  if (item.status->error == ECANCELED) return BlockStatus::kCancelled;
  if (item.status->error != 0) return BlockStatus::kIoError;
  const IoBuffer whole{item.bounce.data(), config_.block_bytes};
  const auto pieces = item.bounce ? std::span<const IoBuffer>(&whole, 1)
                                  : std::span<const IoBuffer>(item.destination);
  if (config_.verify_checksums && store::crc_of(pieces) != item.data_crc)
    return BlockStatus::kCorrupt;
  if (!item.bounce) return BlockStatus::kOk;
  const std::byte* at = item.bounce.data();
  for (const IoBuffer& piece : item.destination) {
    if (piece.num_bytes == 0) continue;
    std::memcpy(piece.address, at, static_cast<size_t>(piece.num_bytes));
    at += piece.num_bytes;
  }
  return BlockStatus::kOk;
}

void PrefixStore::Impl::finish_get(Operation& operation) {
  for (ReadItem& item : operation.items) {
    operation.statuses[item.index] = verify(item);
    if (item.bounce) buffers_.give(std::move(item.bounce));
  }
  const std::scoped_lock lock(mutex_);
  for (const ReadItem& item : operation.items) {
    const BlockStatus status = operation.statuses[item.index];
    stats_.num_get += status == BlockStatus::kOk ? 1 : 0;
    stats_.num_io_errors += status == BlockStatus::kIoError ? 1 : 0;
    stats_.num_corrupt += status == BlockStatus::kCorrupt ? 1 : 0;
    if (status == BlockStatus::kCorrupt && index_->holds(item.block.slot, item.block.sequence)) {
      index_->remove(item.block.slot);
    }
    index_->unpin(item.block.slot);
  }
  operation.items.clear();
}

}  // namespace helicore::kv
