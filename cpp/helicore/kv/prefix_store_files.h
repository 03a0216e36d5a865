// The files of a prefix store: lock, data file, journal. Blocking calls of one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "helicore/kv/async_io.h"
#include "helicore/kv/prefix_store_format.h"
#include "helicore/kv/prefix_store_index.h"

namespace helicore::kv::store {

inline constexpr int64_t kAlignment = 4096;  // of slots, and of memory for direct I/O

class UniqueFd {
 public:
  explicit UniqueFd(int fd = -1) noexcept : fd_(fd) {}
  ~UniqueFd();
  UniqueFd(UniqueFd&& other) noexcept;
  UniqueFd& operator=(UniqueFd&& other) noexcept;
  [[nodiscard]] int get() const noexcept { return fd_; }
  [[nodiscard]] bool ok() const noexcept { return fd_ >= 0; }

 private:
  int fd_;
};

// "open data: No space left on device"
[[nodiscard]] std::string errno_reason(const std::string& what, int error);

// Takes the directory's lock. Throws ResourceBusy when somebody has it; on any other failure the
// descriptor is not ok() and `reason` says why. Makes the directory.
[[nodiscard]] UniqueFd lock_directory(const std::string& directory, std::string* reason);

struct DataFile {
  UniqueFd fd;
  bool direct = false;
  int64_t old_bytes = 0;  // size before it was brought to the wanted size
};
// Opens or makes the data file with room for `num_bytes`, reserved on the disk where the file
// system can. Not ok() with a reason on failure.
[[nodiscard]] DataFile open_data(const std::string& directory, int64_t num_bytes, bool direct,
                                 std::string* reason);

class Journal {
 public:
  Journal(std::string directory, AsyncIo* io) : directory_(std::move(directory)), io_(io) {}

  struct Loaded {
    bool found = false;
    std::string mismatch{};  // why the file can't be used at all
    int64_t num_dropped = 0;
    int64_t torn_bytes = 0;
    uint64_t epoch = 0;
  };
  // Why the file's header does not fit `wanted` (num_slots may differ); empty when it does, and
  // when there is no file.
  [[nodiscard]] std::string mismatch(const Header& wanted) const;
  // Replays the file into the index if its header fits `wanted` (num_slots may differ). Records of
  // slots that end behind `data_bytes` are dropped.
  [[nodiscard]] Loaded load(const Header& wanted, int64_t slot_bytes, int64_t data_bytes,
                            PrefixIndex* index) const;

  // A new file that holds just the snapshot takes the place of the old one, atomically. 0 or errno;
  // on failure the old file stays in use.
  int rewrite(const Header& header, std::span<const PutRecord> snapshot, bool sync);
  // 0 or errno. After a failure nothing more may be appended: the file's end is unknown.
  int append(std::span<const std::byte> records, bool sync);
  int sync();
  [[nodiscard]] const Header& header() const noexcept { return header_; }
  [[nodiscard]] int64_t num_bytes() const noexcept { return end_; }
  [[nodiscard]] bool appended() const noexcept { return appended_; }

 private:
  int write_at(int fd, int64_t offset, std::span<const std::byte> bytes, bool sync);
  [[nodiscard]] std::string path() const { return directory_ + "/journal"; }

  std::string directory_;
  AsyncIo* io_;
  UniqueFd fd_;
  Header header_;
  int64_t end_ = 0;
  bool appended_ = false;  // since the last rewrite
};

}  // namespace helicore::kv::store
