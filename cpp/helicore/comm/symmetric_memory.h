// Memory of W ranks, as many bytes of each, that all of them read and write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "helicore/comm/error.h"

namespace helicore::comm {

// One rank's view. Zeroed at first; the bytes of every rank are aligned to a page.
class SymmetricMemory {
 public:
  virtual ~SymmetricMemory() = default;
  SymmetricMemory() = default;
  SymmetricMemory(const SymmetricMemory&) = delete;
  SymmetricMemory& operator=(const SymmetricMemory&) = delete;

  [[nodiscard]] virtual int rank() const noexcept = 0;
  [[nodiscard]] virtual int world_size() const noexcept = 0;
  [[nodiscard]] virtual size_t num_bytes() const noexcept = 0;  // of each rank
  [[nodiscard]] virtual std::byte* bytes(int rank) const noexcept = 0;
  // Empty, or why `rank` can not answer any more: "rank 2 (process 4711) has died".
  [[nodiscard]] virtual std::string why_gone(int rank) const = 0;
};

// This rank's memory, that other processes of the machine map. It has no name in the file system:
// the kernel frees it with the last process that has it, whatever way that ends.
class Segment {
 public:
  // Throws InvalidArgument naming the argument, OutOfMemory when the system has no such memory.
  Segment(int rank, int world_size, size_t num_bytes);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int world_size() const noexcept { return world_size_; }
  [[nodiscard]] size_t num_bytes() const noexcept { return num_bytes_; }
  [[nodiscard]] std::byte* bytes() const noexcept { return bytes_; }
  // What a peer needs to map this memory; for `map_segments` of this version only.
  [[nodiscard]] std::string handle() const;

 private:
  int rank_;
  int world_size_;
  size_t num_bytes_;
  int fd_ = -1;
  std::byte* bytes_ = nullptr;
  uint64_t token_ = 0;
};

// Maps the segments of all ranks. `handles` in order of rank, this rank's own included. Throws
// CommError naming the rank whose memory can not be mapped: it is on another machine, in another
// process namespace, has died, or was started with other sizes.
[[nodiscard]] std::unique_ptr<SymmetricMemory> map_segments(
    std::shared_ptr<Segment> segment, const std::vector<std::string>& handles);

// Ranks that are threads of this process.
[[nodiscard]] std::vector<std::unique_ptr<SymmetricMemory>> make_local_memory(int world_size,
                                                                              size_t num_bytes);

}  // namespace helicore::comm
