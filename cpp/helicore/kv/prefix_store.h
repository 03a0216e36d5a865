// A store of KV cache blocks on disk that outlives the process: chain key -> tokens and page bytes.
//
// A directory holds a data file of fixed-size slots, an append-only journal that says what lies in
// them, and a lock file. A block is found only after its bytes and its journal record are written;
// a slot is written over only after its tombstone is; every read is checked against a CRC32C. So
// whatever a crash leaves behind, a wrong page is never served. Formats and the argument step by
// step: docs/design/prefix-store.md.
//
// A failing disk degrades the store, never the process: it becomes read-only or disabled, with a
// reason; matches then find less or nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "helicore/kv/async_io.h"
#include "helicore/kv/block_key.h"
#include "helicore/kv/types.h"

namespace helicore::kv {

// What open() does with files of another format version, stamp, block shape, or a damaged header.
enum class OnMismatch : uint8_t { kEmpty, kRefuse };

enum class SyncPolicy : uint8_t {
  kNever,  // survives the end of the process; after a power failure checksums drop what is torn
  kBatch,  // fdatasync at each step of the protocol, once per batch of blocks
};

struct PrefixStoreConfig {
  std::string directory{};       // made when it is not there
  int64_t capacity_bytes = 0;    // of the data file; at least one slot
  int64_t block_bytes = 0;       // page bytes of one block, > 0
  int32_t tokens_per_block = 0;  // > 0
  // What gives the bytes their meaning: SHA-256 over model, weights, dtype, layout,
  // tokens_per_block.
  Digest stamp{};
  OnMismatch on_mismatch = OnMismatch::kEmpty;
  SyncPolicy sync = SyncPolicy::kNever;
  bool direct_io = true;  // O_DIRECT when the file system has it
  // Blocks put and not yet in a batch; 0: as many as 64 MiB hold, from 16 to 1024.
  int32_t max_queued_blocks = 0;
  bool verify_checksums = true;  // false is for measuring and for tests of the tests
  AsyncIoConfig io{.queue_capacity = 1024};
  void validate() const;
};

// A block as match() found it: the sequence number tells it from a later block in the same slot.
struct BlockRef {
  uint32_t slot = 0;
  uint64_t sequence = 0;
  friend bool operator==(const BlockRef&, const BlockRef&) = default;
};

struct PrefixMatch {
  std::vector<BlockRef> blocks{};  // consecutive from the first; the last may be partial
  int32_t num_tokens = 0;
};

enum class BlockStatus : uint8_t {
  kOk,
  kDuplicate,  // put: it was there already
  kNoParent,   // put: its parent is not stored, is partial, or its write failed
  kNoRoom,     // put: every slot is in use by readers, writers or ancestors
  kGone,       // get: evicted since the match
  kCorrupt,    // get: the checksum did not fit; the block and its descendants were forgotten
  kIoError,    // the disk refused
  kCancelled,  // get: taken back by cancel()
  kDisabled,   // the store is disabled, or read-only and this is a put
};
[[nodiscard]] std::string_view name_of(BlockStatus status) noexcept;

struct PutBlock {
  Digest parent{};                    // key of the block before; the scope's root key for ordinal 0
  int32_t ordinal = 0;                // block of the sequence, >= 0
  std::span<const TokenId> tokens{};  // 1 .. tokens_per_block; fewer than that ends the chain
  std::vector<IoBuffer> pages{};      // block_bytes altogether; only read
};

enum class PagePolicy : uint8_t {
  kCopy,    // pages may change as soon as put() returns
  kBorrow,  // pages stay as they are until the token is collected; spares a copy if 4096-aligned
};

struct GetBlock {
  BlockRef block{};
  std::vector<IoBuffer> destination{};  // block_bytes altogether; untouched only on kGone
};

using StoreToken = uint64_t;

struct PrefixStoreStats {
  int64_t num_slots = 0;
  int64_t num_blocks = 0;
  int64_t slot_bytes = 0;
  int64_t num_put = 0;  // blocks that became readable
  int64_t num_duplicate = 0;
  int64_t num_refused = 0;  // puts that ended in any other way
  int64_t num_evicted = 0;
  int64_t num_get = 0;  // blocks served
  int64_t num_gone = 0;
  int64_t num_corrupt = 0;  // blocks whose checksum failed
  int64_t num_io_errors = 0;
  int64_t num_compactions = 0;
  int64_t journal_bytes = 0;
  int64_t num_loaded = 0;   // blocks found when the store was opened
  int64_t num_dropped = 0;  // records that open() could not use
  int64_t torn_bytes = 0;   // of the journal's end that open() could not read
  bool direct_io = false;
  std::string io_backend{};
  std::string emptied_reason{};    // why open() started empty; empty when it did not have to
  std::string read_only_reason{};  // why puts are refused
  std::string disabled_reason{};   // why nothing works
};

// Threads: every call from any thread; one mutex guards the index and is never held during I/O,
// checksums or copies. One thread of the store writes, in batches. The destructor closes.
class PrefixStore {
 public:
  // Always a store, disabled with a reason when the directory can't be used. Throws InvalidArgument
  // for a bad config and ResourceBusy when another store, here or in another process, has the
  // directory open. `io` replaces the back end that the config describes.
  [[nodiscard]] static std::unique_ptr<PrefixStore> open(const PrefixStoreConfig& config,
                                                         std::unique_ptr<AsyncIo> io = nullptr);
  ~PrefixStore();
  PrefixStore(const PrefixStore&) = delete;
  PrefixStore& operator=(const PrefixStore&) = delete;

  // The longest stored chain from the root over `tokens`: full blocks, then the rest of the tokens
  // if a partial block of exactly them is stored. Compares tokens, computes keys as it goes, counts
  // as a use of what it finds.
  [[nodiscard]] PrefixMatch match(const Digest& root, std::span<const TokenId> tokens);

  // Writes blocks, parents before children. When more than max_queued_blocks would wait: nullopt,
  // nothing taken, or sleeps, by choice. The token's statuses come in the order of the blocks.
  [[nodiscard]] std::optional<StoreToken> put(std::span<const PutBlock> blocks, PagePolicy pages,
                                              WhenFull when_full);
  // Reads blocks into their destinations, which must stay valid until the token is collected.
  // nullopt: the I/O queue is full.
  [[nodiscard]] std::optional<StoreToken> get(std::span<const GetBlock> blocks, WhenFull when_full);

  // A token is collected once, by one thread. Throws InvalidArgument for an unknown one. Checksums
  // of a get are verified here. A kBorrow put and a get must be collected before their memory goes.
  [[nodiscard]] std::optional<std::vector<BlockStatus>> poll(StoreToken token);
  [[nodiscard]] std::vector<BlockStatus> wait(StoreToken token);
  // Takes back the reads of a get that have not started; how many. The token must still be
  // collected. 0 for a put, and while another thread collects.
  int64_t cancel(StoreToken token);
  // Collects a put of which nobody wants to know the outcome, whenever it ends.
  void forget(StoreToken token);

  // Returns when every block put before has ended and, whatever the policy, is on the disk. False
  // when the disk refused or the store is disabled.
  bool flush();
  [[nodiscard]] PrefixStoreStats stats() const;
  // Ends what was put, compacts the journal in order of use, releases the lock. Idempotent. Tokens
  // may still be collected; everything else then behaves as disabled.
  void close() noexcept;

  // Throws InternalError when an invariant of the index is broken; for tests. O(slots).
  void check_invariants() const;

 private:
  class Impl;
  explicit PrefixStore(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

}  // namespace helicore::kv
