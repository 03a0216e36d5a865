// Batches of copies to and from files, by one thread at a time per lane: neighbours in a file
// become one request, memory that file I/O can't reach goes through staging buffers, chunk by
// chunk.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "helicore/kv/async_io.h"
#include "helicore/kv/cache_device.h"

namespace helicore::kv {

// The way into memory that the CPU can't address: the copies of a GPU between it and buffers that
// file I/O can use. Every lane has slots of its own and its copies happen in order.
class StagingPort {
 public:
  virtual ~StagingPort() = default;
  [[nodiscard]] virtual bool owns(const MemoryPool& pool) const noexcept = 0;
  [[nodiscard]] virtual int num_slots() const noexcept = 0;  // of a lane; >= 2
  [[nodiscard]] virtual int64_t slot_bytes() const noexcept = 0;
  [[nodiscard]] virtual std::byte* slot(int lane, int index) const noexcept = 0;
  // Starts a copy from or to a slot; false when that failed.
  [[nodiscard]] virtual bool copy(int lane, std::byte* dst, const std::byte* src,
                                  int64_t num_bytes) noexcept = 0;
  // Ends what was started for the slot so far: mark() notes it, wait() waits for the note. False
  // when some of it failed.
  [[nodiscard]] virtual bool mark(int lane, int index) noexcept = 0;
  [[nodiscard]] virtual bool wait(int lane, int index) noexcept = 0;
};

// Threads: a lane belongs to one thread at a time; lanes are independent.
class FileCopies {
 public:
  static constexpr int kRequestsPerLane = 64;  // at most, in the hands of `io`
  static constexpr int64_t kMaxRequestBytes = int64_t{4} << 20;

  // `staging` may be null: then all memory is the CPU's.
  FileCopies(AsyncIo& io, StagingPort* staging, int num_lanes);

  // Runs the batch; returns the tags of the tasks that failed. Tasks may also be memory to memory.
  // A failed task may have written a part of its bytes.
  [[nodiscard]] std::vector<uint64_t> run(int lane, std::span<const CopyTask> tasks);

 private:
  // A part of a task between a file and memory.
  struct Piece {
    size_t task = 0;
    bool reads = false;  // from the file
    int fd = -1;
    int64_t offset = 0;
    std::byte* memory = nullptr;
    int64_t num_bytes = 0;
  };
  // Neighbours in a file: one request.
  struct Run {
    std::span<const Piece> pieces{};
    int64_t num_bytes = 0;
  };
  using Failed = std::vector<char>;  // by task

  static void add_pieces(const CopyTask& task, size_t index, int64_t max_bytes,
                         std::vector<Piece>& out);
  static std::vector<Run> group(std::vector<Piece>& pieces, int64_t max_bytes);
  static void judge(const Run& run, const IoStatus& status, Failed& failed);
  void run_direct(std::vector<Piece>& pieces, Failed& failed);
  void run_staged(int lane, std::vector<Piece>& pieces, Failed& failed);
  void read_staged(int lane, std::span<const Run> runs, Failed& failed);
  void write_staged(int lane, std::span<const Run> runs, Failed& failed);
  [[nodiscard]] IoToken submit_staged(int lane, size_t slot, const Run& run);
  void run_between_files(int lane, const CopyTask& task, size_t index, Failed& failed);

  AsyncIo* io_;
  StagingPort* staging_;
  std::vector<std::vector<std::byte>> bounce_;  // by lane; for copies between files
};

}  // namespace helicore::kv
