// The operation log of a manager: every public call with its results, in the order in which they
// happened, so that a bug report can be replayed. Written by KVCacheManager::start_recording(),
// read by OperationLog, run again by Replayer.
//
// Format, version 1: the bytes "hckvops\n", the version, then frames of
//   u32 size, u32 CRC32C of the size and the payload, payload of `size` bytes.
// A payload begins with its type: a header (text: what was recorded and the configuration), an
// operation, an operation that has begun and the results of one (both written when the log is
// written ahead), an end. Integers are little-endian.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "helicore/kv/config.h"
#include "helicore/kv/operation.h"

namespace helicore::kv {

inline constexpr uint32_t kOperationLogVersion = 1;

struct RecordingOptions {
  std::string path{};  // the file, written anew with mode 0600; empty: in memory
  // The recording ends, and says so, before it grows beyond.
  int64_t max_bytes = int64_t{1} << 30;  // > 0
  // After every n-th operation a digest of the whole state is noted, at a cost that grows with the
  // pages in use; 0: never. Counters and the cursors of the caches concerned are noted each time.
  int32_t state_every = 64;  // >= 0
  // Token ids, salts, ids and streams are replaced by numbers in the order of their appearance and
  // paths are left out: equal prefixes stay equal, what was said can't be read. How often each
  // number occurs can be.
  bool anonymise = false;
  // Each call reaches the file before it runs, so that the one that ends the process is the last of
  // the log. A system call per operation.
  bool write_ahead = false;
  // Throws InvalidArgument.
  void validate() const;
};

struct RecordingSummary {
  uint64_t num_operations = 0;
  int64_t num_bytes = 0;
  std::string problem{};           // why the recording ended early; empty: it did not
  std::vector<std::byte> bytes{};  // of a recording in memory
};

// Where the slots of a pool group are, and how many: replays check that theirs are as many.
struct RecordedSlots {
  int32_t level = 0;
  int32_t pool_group = 0;
  int64_t num_slots = 0;
  friend bool operator==(const RecordedSlots&, const RecordedSlots&) = default;
};

enum class LogEnd : uint8_t {
  kComplete = 0,  // the recording was stopped, or its manager destroyed
  kOpen = 1,      // the writer went away between two operations
  kTorn = 2,      // it went away while writing: the unfinished record is left out
  kDamaged = 3,   // a record in the middle is damaged; it and what follows are left out
};
[[nodiscard]] std::string_view name_of(LogEnd end) noexcept;

// A log in memory.
struct OperationLog {
  KVCacheManagerConfig config{};
  std::vector<RecordedSlots> slots{};
  std::vector<int64_t> grains{};  // bytes by which the pools of each level grow; none in old logs
  int32_t state_every = 0;
  bool is_anonymised = false;
  std::vector<Operation> operations{};
  LogEnd end = LogEnd::kOpen;
  std::string problem{};  // what the writer said at the end, or what is damaged

  // Throws InvalidArgument when the bytes are no log or its header is damaged, and NotSupported
  // when another version wrote it. A damaged or missing tail is told by `end`.
  [[nodiscard]] static OperationLog parse(std::span<const std::byte> bytes);
  // The same for a file; throws InvalidArgument when it can't be read.
  [[nodiscard]] static OperationLog load(const std::string& path);
  // The log as bytes, for tests and tools that edit one.
  [[nodiscard]] std::vector<std::byte> serialise() const;
};

}  // namespace helicore::kv
