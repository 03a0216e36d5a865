#include "helicore/kv/prefix_store.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "helicore/core/error.h"
#include "helicore/kv/prefix_store_impl.h"

namespace helicore::kv {
namespace {

constexpr const char* kWhere = "kv.prefix_store";
constexpr size_t kCopyPartBytes = size_t{64} << 10;
constexpr size_t kHugePageBytes = size_t{2} << 20;

// As many blocks as so many MiB hold, within bounds.
int64_t blocks_in(int64_t mebibytes, int64_t slot_bytes, int64_t low, int64_t high) noexcept {
  return std::clamp((mebibytes << 20) / slot_bytes, low, high);
}

int64_t round_up(int64_t value, int64_t unit) noexcept { return (value + unit - 1) / unit * unit; }

}  // namespace

namespace store {

SlotBuffer::SlotBuffer(int64_t num_bytes)
    : data_(static_cast<std::byte*>(
          std::aligned_alloc(static_cast<size_t>(kAlignment), static_cast<size_t>(num_bytes)))) {
  if (data_ == nullptr) {
    throw OutOfMemory(detail::concat("[kv.prefix_store] no memory for a buffer of ", num_bytes));
  }
  std::memset(data_.get(), 0, static_cast<size_t>(num_bytes));
}

BufferPool::BufferPool(int64_t num_bytes, size_t max_kept)
    : num_bytes_(num_bytes), max_kept_(max_kept) {
  const size_t needed = static_cast<size_t>(num_bytes) * max_kept;
  const size_t bytes = needed + kHugePageBytes;
  void* mapping = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) return;  // the heap serves too
  mapping_ = mapping;
  mapping_bytes_ = bytes;
  const auto address = reinterpret_cast<uintptr_t>(mapping);
  const auto skipped = (kHugePageBytes - address % kHugePageBytes) % kHugePageBytes;
  next_ = static_cast<std::byte*>(mapping) + skipped;
  num_unused_ = max_kept;
  // A wish: a system without huge pages refuses it and all else works.
  static_cast<void>(::madvise(next_, needed, MADV_HUGEPAGE));
}

BufferPool::~BufferPool() {
  kept_.clear();
  if (mapping_ != nullptr && ::munmap(mapping_, mapping_bytes_) != 0) {
    log_error("kv.prefix_store: munmap failed");
  }
}

SlotBuffer BufferPool::take() {
  {
    const std::scoped_lock lock(mutex_);
    if (!kept_.empty()) {
      SlotBuffer buffer = std::move(kept_.back());
      kept_.pop_back();
      return buffer;
    }
    if (num_unused_ > 0) {
      --num_unused_;
      return SlotBuffer(std::exchange(next_, next_ + num_bytes_));
    }
  }
  return SlotBuffer(num_bytes_);
}

void BufferPool::give(SlotBuffer buffer) {
  const std::scoped_lock lock(mutex_);
  if (kept_.size() < max_kept_) kept_.push_back(std::move(buffer));
}

}  // namespace store

std::string_view name_of(BlockStatus status) noexcept {
  constexpr std::string_view kNames[] = {"OK",      "DUPLICATE", "NO_PARENT", "NO_ROOM", "GONE",
                                         "CORRUPT", "IO_ERROR",  "CANCELLED", "DISABLED"};
  return kNames[static_cast<size_t>(status)];
}

void PrefixStoreConfig::validate() const {
  HELICORE_CHECK(!directory.empty(), kWhere, "directory must not be empty");
  HELICORE_CHECK(block_bytes > 0, kWhere, "block_bytes must be > 0, got ", block_bytes);
  HELICORE_CHECK(tokens_per_block > 0, kWhere, "tokens_per_block must be > 0, got ",
                 tokens_per_block);
  const int64_t slot_bytes = round_up(block_bytes, store::kAlignment);
  HELICORE_CHECK(capacity_bytes >= slot_bytes && capacity_bytes / slot_bytes < INT32_MAX, kWhere,
                 "capacity_bytes must be from one slot (", slot_bytes,
                 " bytes) to 2^31 slots, got ", capacity_bytes);
  HELICORE_CHECK(max_queued_blocks >= 0, kWhere, "max_queued_blocks must be >= 0, got ",
                 max_queued_blocks);
  io.validate();
}

PrefixStore::Impl::Impl(const PrefixStoreConfig& config, std::unique_ptr<AsyncIo> io)
    : config_(config),
      slot_bytes_(round_up(config.block_bytes, store::kAlignment)),
      max_queued_(config.max_queued_blocks > 0 ? config.max_queued_blocks
                                               : blocks_in(64, slot_bytes_, 16, 1024)),
      max_batch_(static_cast<size_t>(
          std::min<int64_t>(blocks_in(32, slot_bytes_, 8, 256), config.io.queue_capacity))),
      io_(io != nullptr ? std::move(io) : make_async_io(config.io)),
      buffers_(slot_bytes_, static_cast<size_t>(max_queued_) + max_batch_),
      journal_(config.directory, io_.get()) {}

PrefixStore::Impl::~Impl() { close(); }

void PrefixStore::Impl::open() {
  std::string reason;
  lock_ = store::lock_directory(config_.directory, &reason);
  if (reason.empty()) reason = load_or_empty();
  stats_.num_slots = index_ != nullptr ? index_->num_slots() : 0;
  stats_.slot_bytes = slot_bytes_;
  stats_.io_backend = io_->name();
  stats_.direct_io = data_.direct;
  stats_.disabled_reason = reason;
  if (reason.empty()) {
    writer_ = std::thread([this] { write_loop(); });
  } else {
    lock_ = store::UniqueFd();
  }
}

// Empty, or why the store is disabled.
std::string PrefixStore::Impl::load_or_empty() {
  const int64_t num_slots = config_.capacity_bytes / slot_bytes_;
  const store::Header header{.tokens_per_block = config_.tokens_per_block,
                             .block_bytes = config_.block_bytes,
                             .num_slots = num_slots,
                             .stamp = config_.stamp};
  index_ = std::make_unique<store::PrefixIndex>(num_slots, config_.tokens_per_block);
  // Asked before the data file is touched: a refused store stays as it is.
  const std::string mismatch = journal_.mismatch(header);
  if (!mismatch.empty() && config_.on_mismatch == OnMismatch::kRefuse) {
    return "refused: " + mismatch;
  }
  std::string reason;
  data_ = store::open_data(config_.directory, num_slots * slot_bytes_, config_.direct_io, &reason);
  if (!reason.empty()) return reason;
  const auto loaded = journal_.load(header, slot_bytes_, data_.old_bytes, index_.get());
  stats_.emptied_reason = loaded.mismatch;
  stats_.num_loaded = index_->num_blocks();
  stats_.num_dropped = loaded.num_dropped;
  stats_.torn_bytes = loaded.torn_bytes;
  // Written anew in any case: no append ever follows a torn end.
  const auto snapshot = index_->snapshot();
  store::Header fresh = header;
  fresh.epoch = loaded.epoch + 1;
  fresh.num_snapshot = snapshot.size();
  if (const int error = journal_.rewrite(fresh, snapshot, syncs()); error != 0) {
    return store::errno_reason("write " + config_.directory + "/journal", error);
  }
  stats_.journal_bytes = journal_.num_bytes();
  return {};
}

PrefixMatch PrefixStore::Impl::match(const Digest& root, std::span<const TokenId> tokens) {
  PrefixMatch match;
  Digest parent = root;
  uint32_t last = store::kNoSlot;
  for (int32_t ordinal = 0; !tokens.empty(); ++ordinal) {
    const auto count = std::min(tokens.size(), static_cast<size_t>(config_.tokens_per_block));
    const auto block = tokens.first(count);
    const Digest key = block_key(parent, block);
    const std::scoped_lock lock(mutex_);
    if (!usable_locked()) return {};
    const auto slot = index_->find(key);
    if (!slot || index_->at(*slot).state != store::SlotState::kLive) break;
    const store::Slot& found = index_->at(*slot);
    const bool same = found.ordinal == ordinal && found.parent == parent &&
                      std::ranges::equal(index_->tokens(*slot), block);
    if (!same) break;
    match.blocks.push_back({*slot, found.sequence});
    match.num_tokens += static_cast<int32_t>(count);
    last = *slot;
    parent = key;
    tokens = tokens.subspan(count);
  }
  if (last == store::kNoSlot) return match;
  const std::scoped_lock lock(mutex_);
  if (index_->holds(last, match.blocks.back().sequence)) index_->touch(last);
  return match;
}

void PrefixStore::Impl::check_pieces(std::span<const IoBuffer> pieces, const char* where,
                                     const char* name) const {
  int64_t total = 0;
  for (const IoBuffer& piece : pieces) {
    HELICORE_CHECK(piece.num_bytes >= 0 && (piece.address != nullptr || piece.num_bytes == 0),
                   where, name, " must hold addresses with sizes >= 0, got ", piece.address, ", ",
                   piece.num_bytes);
    total += piece.num_bytes;
  }
  HELICORE_CHECK(total == config_.block_bytes, where, name,
                 " must hold block_bytes = ", config_.block_bytes, " bytes altogether, got ",
                 total);
}

void PrefixStore::Impl::check_put(const PutBlock& block) const {
  const char* where = "kv.prefix_store.put";
  HELICORE_CHECK(block.ordinal >= 0, where, "ordinal must be >= 0, got ", block.ordinal);
  HELICORE_CHECK(
      !block.tokens.empty() && block.tokens.size() <= static_cast<size_t>(config_.tokens_per_block),
      where, "tokens must hold 1..", config_.tokens_per_block, " tokens, got ",
      block.tokens.size());
  check_pieces(block.pages, where, "pages");
}

bool PrefixStore::Impl::can_go_direct(std::span<const IoBuffer> pieces) const noexcept {
  return !data_.direct || std::ranges::all_of(pieces, [](const IoBuffer& piece) {
    return reinterpret_cast<uintptr_t>(piece.address) % store::kAlignment == 0 &&
           piece.num_bytes % store::kAlignment == 0;
  });
}

StoreToken PrefixStore::Impl::add_operation_locked(std::shared_ptr<Operation> operation) {
  operation->token = ++last_token_;
  operations_.emplace(last_token_, std::move(operation));
  return last_token_;
}

PrefixStore::Impl::Job PrefixStore::Impl::make_job(const PutBlock& block, const Digest& key,
                                                   PagePolicy policy) {
  Job job;
  job.record = {0, block.ordinal, 0, 0, block.parent, {block.tokens.begin(), block.tokens.end()}};
  job.key = key;
  if (policy == PagePolicy::kBorrow && can_go_direct(block.pages)) {
    job.pages = block.pages;
    job.record.data_crc = store::crc_of(job.pages);
  } else {
    job.buffer = buffers_.take();
    std::byte* at = job.buffer.data();
    for (const IoBuffer& piece : block.pages) {
      // In parts, so that the checksum finds them in cache.
      for (auto bytes = store::bytes_of(piece); !bytes.empty();) {
        const auto part = bytes.first(std::min(bytes.size(), kCopyPartBytes));
        std::memcpy(at, part.data(), part.size());
        job.record.data_crc = crc32c({at, part.size()}, job.record.data_crc);
        at += part.size();
        bytes = bytes.subspan(part.size());
      }
    }
    // With what pads the slot, so that a direct write ends on a boundary.
    job.pages.push_back({job.buffer.data(), slot_bytes_});
  }
  return job;
}

// False when the store stopped taking blocks. `reserved`: its place in the queue was counted.
bool PrefixStore::Impl::put_one(const PutBlock& block, PagePolicy policy, bool reserved,
                                const std::shared_ptr<Operation>& operation, size_t index) {
  const Digest key = block_key(block.parent, block.tokens);
  const auto end_with = [&](BlockStatus status, bool counted) {
    operation->statuses[index] = status;
    --operation->num_left;
    num_queued_ -= counted ? 1 : 0;
    ++(status == BlockStatus::kDuplicate ? stats_.num_duplicate : stats_.num_refused);
    room_.notify_all();
  };
  {
    std::unique_lock lock(mutex_);
    const auto accepts = [this] { return usable_locked() && stats_.read_only_reason.empty(); };
    if (!reserved) {
      room_.wait(lock, [&] { return !accepts() || num_queued_ < max_queued_; });
    }
    const auto there = accepts() ? index_->find(key) : std::nullopt;
    const bool duplicate = there && index_->at(*there).state == store::SlotState::kLive;
    if (!accepts() || duplicate) {
      end_with(duplicate ? BlockStatus::kDuplicate : BlockStatus::kDisabled, reserved);
      return duplicate;
    }
    num_queued_ += reserved ? 0 : 1;
  }
  Job job;
  try {
    job = make_job(block, key, policy);
  } catch (const std::exception&) {  // no memory for the copy
    const std::scoped_lock lock(mutex_);
    end_with(BlockStatus::kNoRoom, true);
    return true;
  }
  job.operation = operation;
  job.index = index;
  const std::scoped_lock lock(mutex_);
  if (stop_) {
    end_with(BlockStatus::kDisabled, true);
    return false;
  }
  queue_.push_back(std::move(job));
  ++num_enqueued_;
  work_.notify_one();
  return true;
}

std::optional<StoreToken> PrefixStore::Impl::put(std::span<const PutBlock> blocks, PagePolicy pages,
                                                 WhenFull when_full) {
  for (const PutBlock& block : blocks) check_put(block);
  const bool reserve = when_full == WhenFull::kRefuse;
  const auto count = static_cast<int64_t>(blocks.size());
  HELICORE_CHECK(!reserve || count <= max_queued_, "kv.prefix_store.put",
                 "blocks must be at most max_queued_blocks = ", max_queued_,
                 " unless it may block, got ", count);
  auto operation = std::make_shared<Operation>();
  operation->is_put = true;
  operation->num_left = blocks.size();
  operation->statuses.assign(blocks.size(), BlockStatus::kDisabled);
  StoreToken token = 0;
  {
    const std::scoped_lock lock(mutex_);
    if (reserve && usable_locked()) {
      if (num_queued_ + count > max_queued_) return std::nullopt;
    }
    num_queued_ += reserve ? count : 0;
    token = add_operation_locked(operation);
  }
  for (size_t i = 0; i < blocks.size(); ++i) put_one(blocks[i], pages, reserve, operation, i);
  const std::scoped_lock lock(mutex_);
  if (operation->num_left == 0) done_.notify_all();
  return token;
}

std::optional<std::vector<BlockStatus>> PrefixStore::Impl::collect(StoreToken token, bool wait) {
  std::unique_lock lock(mutex_);
  const auto it = operations_.find(token);
  HELICORE_CHECK(it != operations_.end() && !it->second->collecting && !it->second->forgotten,
                 kWhere, "token ", token, " is unknown or was collected before");
  const std::shared_ptr<Operation> operation = it->second;
  operation->collecting = true;
  bool ended = false;
  if (operation->is_put) {
    if (wait) done_.wait(lock, [&] { return operation->num_left == 0; });
    ended = operation->num_left == 0;
  } else {
    lock.unlock();
    ended = drain_reads(*operation, wait);
    if (ended) finish_get(*operation);
    lock.lock();
  }
  operation->collecting = false;
  done_.notify_all();  // close() waits for collectors
  if (!ended) return std::nullopt;
  operations_.erase(token);
  return std::move(operation->statuses);
}

int64_t PrefixStore::Impl::cancel(StoreToken token) {
  std::unique_lock lock(mutex_);
  const auto it = operations_.find(token);
  HELICORE_CHECK(it != operations_.end(), kWhere, "token ", token,
                 " is unknown or was collected before");
  const std::shared_ptr<Operation> operation = it->second;
  if (operation->is_put || operation->collecting) return 0;
  operation->collecting = true;
  lock.unlock();
  int64_t count = 0;
  for (const Reading& reading : operation->readings) count += io_->cancel(reading.token);
  lock.lock();
  operation->collecting = false;
  done_.notify_all();
  return count;
}

void PrefixStore::Impl::forget(StoreToken token) {
  const std::scoped_lock lock(mutex_);
  const auto it = operations_.find(token);
  HELICORE_CHECK(it != operations_.end() && !it->second->collecting && !it->second->forgotten,
                 kWhere, "token ", token, " is unknown or was collected before");
  HELICORE_CHECK(it->second->is_put, kWhere, "token ", token,
                 " is of a get, which must be collected");
  it->second->forgotten = true;
  if (it->second->num_left == 0) operations_.erase(it);
}

bool PrefixStore::Impl::flush() {
  std::unique_lock lock(mutex_);
  if (!usable_locked() || stop_) return false;
  flush_target_ = num_enqueued_;
  const uint64_t ticket = ++flush_wanted_;
  work_.notify_one();
  done_.wait(lock, [&] { return flush_served_ >= ticket || closed_; });
  return flush_served_ >= ticket && flush_ok_;
}

PrefixStoreStats PrefixStore::Impl::stats() const {
  const std::scoped_lock lock(mutex_);
  PrefixStoreStats stats = stats_;
  if (index_ != nullptr) stats.num_blocks = index_->num_blocks();
  return stats;
}

void PrefixStore::Impl::close() {
  {
    std::unique_lock lock(mutex_);
    if (stop_) return;
    stop_ = true;
    work_.notify_all();
  }
  // NOTE: a store that never opened must not touch the journal: it may be another process's.
  const bool opened = writer_.joinable();
  if (opened) writer_.join();
  std::unique_lock lock(mutex_);
  closed_ = true;
  room_.notify_all();
  done_.notify_all();
  // Reads that nobody collects yet end here: the data file is about to go.
  done_.wait(lock, [this] { return num_starting_ == 0; });
  std::vector<std::shared_ptr<Operation>> gets;
  for (const auto& [token, operation] : operations_) {
    if (!operation->is_put) gets.push_back(operation);
  }
  for (const auto& operation : gets) {
    done_.wait(lock, [&] { return !operation->collecting; });
    operation->collecting = true;
    lock.unlock();
    drain_reads(*operation, true);
    finish_get(*operation);
    lock.lock();
    operation->collecting = false;
  }
  const bool compacts = opened && stats_.read_only_reason.empty();
  lock.unlock();
  if (compacts) {
    if (const int error = compact(); error != 0) stop_writing("compact the journal", error);
  }
  data_.fd = store::UniqueFd();
  lock_ = store::UniqueFd();
}

void PrefixStore::Impl::check_invariants() const {
  const std::scoped_lock lock(mutex_);
  if (index_ != nullptr) index_->check_invariants();
}

PrefixStore::PrefixStore(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
PrefixStore::~PrefixStore() { close(); }

std::unique_ptr<PrefixStore> PrefixStore::open(const PrefixStoreConfig& config,
                                               std::unique_ptr<AsyncIo> io) {
  config.validate();
  auto impl = std::make_unique<Impl>(config, std::move(io));
  impl->open();
  return std::unique_ptr<PrefixStore>(new PrefixStore(std::move(impl)));
}

PrefixMatch PrefixStore::match(const Digest& root, std::span<const TokenId> tokens) {
  return impl_->match(root, tokens);
}
std::optional<StoreToken> PrefixStore::put(std::span<const PutBlock> blocks, PagePolicy pages,
                                           WhenFull when_full) {
  return impl_->put(blocks, pages, when_full);
}
std::optional<StoreToken> PrefixStore::get(std::span<const GetBlock> blocks, WhenFull when_full) {
  return impl_->get(blocks, when_full);
}
std::optional<std::vector<BlockStatus>> PrefixStore::poll(StoreToken token) {
  return impl_->collect(token, false);
}
std::vector<BlockStatus> PrefixStore::wait(StoreToken token) {
  return *impl_->collect(token, true);
}
int64_t PrefixStore::cancel(StoreToken token) { return impl_->cancel(token); }
void PrefixStore::forget(StoreToken token) { impl_->forget(token); }
bool PrefixStore::flush() { return impl_->flush(); }
PrefixStoreStats PrefixStore::stats() const { return impl_->stats(); }
void PrefixStore::check_invariants() const { impl_->check_invariants(); }

void PrefixStore::close() noexcept {
  try {
    impl_->close();
  } catch (const std::exception& e) {
    log_error(std::string("kv.prefix_store: close: ") + e.what());
  }
}

}  // namespace helicore::kv
