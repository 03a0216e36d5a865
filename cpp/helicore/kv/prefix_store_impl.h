// The working parts of PrefixStore, shared by its sources: the callers' side in prefix_store.cpp,
// reading in prefix_store_reader.cpp, the writer thread in prefix_store_writer.cpp. Nothing else
// includes this.
#pragma once

#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "helicore/kv/crc32c.h"
#include "helicore/kv/prefix_store.h"
#include "helicore/kv/prefix_store_files.h"
#include "helicore/kv/prefix_store_index.h"

namespace helicore::kv {

namespace store {

struct FreeSlot {
  bool is_owner = true;
  void operator()(std::byte* data) const noexcept {
    if (is_owner) std::free(data);
  }
};

// Memory of one slot at a multiple of kAlignment. The bytes behind the block mean nothing.
class SlotBuffer {
 public:
  SlotBuffer() = default;
  explicit SlotBuffer(int64_t num_bytes);  // of the heap, zeros
  explicit SlotBuffer(std::byte* part_of_arena) : data_(part_of_arena, FreeSlot{false}) {}
  [[nodiscard]] std::byte* data() const noexcept { return data_.get(); }
  [[nodiscard]] explicit operator bool() const noexcept { return data_ != nullptr; }

 private:
  std::unique_ptr<std::byte, FreeSlot> data_;
};

// Keeps buffers for the next use. Any thread. The first `max_kept` lie side by side in huge pages,
// where there are any: a disk then gets a transfer as a few long pieces of memory, not as a list of
// pages, which more than doubles the rate of a fast one. They are taken from the system when first
// used. Buffers must be given back, or gone, before the pool.
class BufferPool {
 public:
  BufferPool(int64_t num_bytes, size_t max_kept);
  ~BufferPool();
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;
  [[nodiscard]] SlotBuffer take();
  void give(SlotBuffer buffer);

 private:
  const int64_t num_bytes_;
  const size_t max_kept_;
  void* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
  std::mutex mutex_;
  std::byte* next_ = nullptr;  // of the arena
  size_t num_unused_ = 0;      // buffers from next_ on
  std::vector<SlotBuffer> kept_;
};

[[nodiscard]] inline std::span<const std::byte> bytes_of(const IoBuffer& buffer) noexcept {
  return {static_cast<const std::byte*>(buffer.address), static_cast<size_t>(buffer.num_bytes)};
}

[[nodiscard]] inline uint32_t crc_of(std::span<const IoBuffer> pieces) noexcept {
  uint32_t crc = 0;
  for (const IoBuffer& piece : pieces) crc = crc32c(bytes_of(piece), crc);
  return crc;
}

}  // namespace store

class PrefixStore::Impl {
 public:
  Impl(const PrefixStoreConfig& config, std::unique_ptr<AsyncIo> io);
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void open();  // throws ResourceBusy
  PrefixMatch match(const Digest& root, std::span<const TokenId> tokens);
  std::optional<StoreToken> put(std::span<const PutBlock> blocks, PagePolicy pages,
                                WhenFull when_full);
  std::optional<StoreToken> get(std::span<const GetBlock> blocks, WhenFull when_full);
  std::optional<std::vector<BlockStatus>> collect(StoreToken token, bool wait);
  int64_t cancel(StoreToken token);
  void forget(StoreToken token);
  bool flush();
  PrefixStoreStats stats() const;
  void close();
  void check_invariants() const;

 private:
  struct ReadItem {
    BlockRef block;
    uint32_t data_crc = 0;
    size_t index = 0;  // in the caller's list
    std::vector<IoBuffer> destination;
    store::SlotBuffer bounce;
    std::optional<IoStatus> status;
  };
  struct Reading {  // one batch of the I/O back end
    IoToken token = 0;
    std::vector<size_t> items;
  };
  // What a token stands for. A put's statuses belong to the lock; a get's to whoever collects it.
  struct Operation {
    StoreToken token = 0;
    bool is_put = false;
    bool forgotten = false;
    bool collecting = false;
    size_t num_left = 0;  // blocks of a put
    std::vector<BlockStatus> statuses;
    std::vector<ReadItem> items;
    std::vector<Reading> readings;  // not collected yet
  };
  struct Job {
    store::PutRecord record;
    Digest key{};
    std::vector<IoBuffer> pages;  // what is written: the caller's, or the buffer
    store::SlotBuffer buffer;
    std::shared_ptr<Operation> operation;
    size_t index = 0;
    uint32_t slot = store::kNoSlot;
    BlockStatus status = BlockStatus::kOk;
  };

  // prefix_store.cpp. Lock held where a name ends in _locked.
  [[nodiscard]] bool usable_locked() const { return stats_.disabled_reason.empty() && !closed_; }
  StoreToken add_operation_locked(std::shared_ptr<Operation> operation);
  void check_put(const PutBlock& block) const;
  void check_pieces(std::span<const IoBuffer> pieces, const char* where, const char* name) const;
  [[nodiscard]] bool can_go_direct(std::span<const IoBuffer> pieces) const noexcept;
  Job make_job(const PutBlock& block, const Digest& key, PagePolicy policy);
  bool put_one(const PutBlock& block, PagePolicy policy, bool reserved,
               const std::shared_ptr<Operation>& operation, size_t index);
  std::string load_or_empty();

  // prefix_store_reader.cpp
  bool pin_for_reading(std::span<const GetBlock> blocks, Operation& operation);
  bool submit_reads(Operation& operation, WhenFull when_full);
  bool drain_reads(Operation& operation, bool wait);
  BlockStatus verify(ReadItem& item) const;
  void finish_get(Operation& operation);

  // prefix_store_writer.cpp
  void write_loop();
  void write_batch(std::vector<Job>& jobs);
  void write_jobs(std::vector<Job>& jobs);
  int make_room(const std::vector<Job>& jobs);
  int bury_dead();
  void allocate_locked(Job& job);
  void write_data(std::vector<Job>& jobs);
  int write_journal(const std::vector<Job>& jobs);
  void publish(std::vector<Job>& jobs);
  int sync_data();
  void sync_for_flush();
  int compact();
  void compact_if_long();
  void stop_writing(const std::string& what, int error);
  [[nodiscard]] bool syncs() const noexcept { return config_.sync == SyncPolicy::kBatch; }

  const PrefixStoreConfig config_;
  const int64_t slot_bytes_;
  const int64_t max_queued_;
  const size_t max_batch_;  // blocks written between two turns of the journal
  std::unique_ptr<AsyncIo> io_;
  store::BufferPool buffers_;
  store::UniqueFd lock_;
  store::DataFile data_;
  store::Journal journal_;  // of the writer thread once it runs
  std::thread writer_;

  mutable std::mutex mutex_;
  std::condition_variable work_;  // for the writer
  std::condition_variable room_;  // for blocked puts
  std::condition_variable done_;  // for collectors, flush and close
  std::unique_ptr<store::PrefixIndex> index_;
  std::deque<Job> queue_;
  int64_t num_starting_ = 0;  // gets between their pins and their place in operations_
  int64_t num_queued_ = 0;    // in the queue, or about to enter it
  std::unordered_map<StoreToken, std::shared_ptr<Operation>> operations_;
  StoreToken last_token_ = 0;
  uint64_t num_enqueued_ = 0;  // jobs, ever
  uint64_t num_ended_ = 0;
  uint64_t flush_target_ = 0;  // what must be on the disk: so many jobs
  uint64_t flush_wanted_ = 0;  // numbers of flush requests
  uint64_t flush_served_ = 0;
  bool flush_ok_ = true;
  bool stop_ = false;
  bool closed_ = false;
  PrefixStoreStats stats_;
};

}  // namespace helicore::kv
