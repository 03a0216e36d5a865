#include "helicore/comm/symmetric_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>
#include <utility>

#include "helicore/core/error.h"

namespace helicore::comm {
namespace {

using detail::concat;

constexpr size_t kPage = 4096;
constexpr uint64_t kMagic = 0x31304d4d4f434c48;  // "HLCOMM01"
constexpr size_t kTokenOffset =
    kPage - sizeof(uint64_t);  // the end of the first page, of each rank

// The bytes of a handle; plain data of one build on one machine.
struct Handle {
  uint64_t magic = kMagic;
  std::array<char, 40> boot_id{};
  uint64_t pid_namespace = 0;
  int64_t pid = 0;
  uint64_t start_time = 0;  // of the process: a number is used again after its end
  int32_t fd = -1;
  int32_t rank = 0;
  int32_t world_size = 0;
  int32_t padding = 0;
  uint64_t num_bytes = 0;
  uint64_t token = 0;
};

// In clock ticks since the start of the machine; 0 for a process that is not there, or has ended
// and waits for its parent.
uint64_t start_time_of(int64_t pid) {
  std::ifstream file(concat("/proc/", pid, "/stat"));
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return 0;
  std::istringstream fields(text.substr(name_end + 1));
  std::string field;
  fields >> field;
  if (field == "Z" || field == "X") return 0;
  for (int i = 4; i <= 22 && fields; ++i) fields >> field;
  return std::strtoull(field.c_str(), nullptr, 10);
}

std::array<char, 40> boot_id() {
  std::array<char, 40> id{};
  std::ifstream("/proc/sys/kernel/random/boot_id").read(id.data(), id.size() - 1);
  return id;
}

uint64_t pid_namespace() {
  struct stat found{};
  return stat("/proc/self/ns/pid", &found) == 0 ? found.st_ino : 0;
}

uint64_t random_token() {
  uint64_t token = 0;
  if (getrandom(&token, sizeof token, 0) != sizeof token) {
    throw OutOfMemory("[comm.Segment] no random number from the system");
  }
  return token;
}

std::byte* map_shared(int fd, size_t num_bytes) {
  void* at = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return at == MAP_FAILED ? nullptr : static_cast<std::byte*>(at);
}

Handle parse(const std::string& text, int rank) {
  Handle handle;
  if (text.size() != sizeof handle) {
    throw CommError(concat("rank ", rank, " runs another version: its handle has ", text.size(),
                           " bytes, not ", sizeof handle));
  }
  std::memcpy(&handle, text.data(), sizeof handle);
  if (handle.magic != kMagic) throw CommError(concat("rank ", rank, " runs another version"));
  return handle;
}

class SharedMemory final : public SymmetricMemory {
 public:
  SharedMemory(std::shared_ptr<Segment> segment, const std::vector<std::string>& handles)
      : segment_(std::move(segment)) {
    const int world = segment_->world_size();
    HELICORE_CHECK(static_cast<int>(handles.size()) == world, "comm.map_segments",
                   "handles must be ", world, ", one of each rank, got ", handles.size());
    peers_.resize(world);
    try {
      for (int r = 0; r < world; ++r) map_peer(r, parse(handles[r], r));
    } catch (...) {
      unmap();
      throw;
    }
  }
  ~SharedMemory() override { unmap(); }

  [[nodiscard]] int rank() const noexcept override { return segment_->rank(); }
  [[nodiscard]] int world_size() const noexcept override { return segment_->world_size(); }
  [[nodiscard]] size_t num_bytes() const noexcept override { return segment_->num_bytes(); }
  [[nodiscard]] std::byte* bytes(int rank) const noexcept override { return peers_[rank].bytes; }
  [[nodiscard]] std::string why_gone(int rank) const override {
    const Peer& peer = peers_[rank];
    if (rank == this->rank() || start_time_of(peer.pid) == peer.start_time) return {};
    return concat("rank ", rank, " (process ", peer.pid, ") has died");
  }

 private:
  struct Peer {
    std::byte* bytes = nullptr;
    int64_t pid = 0;
    uint64_t start_time = 0;
  };

  void map_peer(int rank, const Handle& handle) {
    if (handle.rank != rank || handle.world_size != world_size() ||
        handle.num_bytes != num_bytes()) {
      throw CommError(concat("rank ", rank, " says that it is rank ", handle.rank, " of ",
                             handle.world_size, " with ", handle.num_bytes, " bytes; expected ",
                             world_size(), " ranks with ", num_bytes()));
    }
    peers_[rank] = {nullptr, handle.pid, handle.start_time};
    if (rank == this->rank()) {
      peers_[rank].bytes = segment_->bytes();
      return;
    }
    if (handle.boot_id != boot_id())
      throw CommError(concat("rank ", rank, " is on another machine"));
    if (handle.pid_namespace != pid_namespace()) {
      throw CommError(concat("rank ", rank, " is in another process namespace"));
    }
    const std::string path = concat("/proc/", handle.pid, "/fd/", handle.fd);
    const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) {
      const int error = errno;
      throw CommError(concat("memory of rank ", rank, " can not be opened: ", path, ": ",
                             std::strerror(error)));
    }
    struct stat found{};
    const bool fits = fstat(fd, &found) == 0 && static_cast<uint64_t>(found.st_size) == num_bytes();
    std::byte* bytes = fits ? map_shared(fd, num_bytes()) : nullptr;
    close(fd);
    if (bytes == nullptr) throw CommError(concat("memory of rank ", rank, " can not be mapped"));
    peers_[rank].bytes = bytes;
    uint64_t token = 0;
    std::memcpy(&token, bytes + kTokenOffset, sizeof token);
    if (token != handle.token) throw CommError(concat("rank ", rank, " has other memory by now"));
  }

  void unmap() noexcept {
    for (int r = 0; r < static_cast<int>(peers_.size()); ++r) {
      if (r != rank() && peers_[r].bytes != nullptr) munmap(peers_[r].bytes, num_bytes());
    }
  }

  std::shared_ptr<Segment> segment_;
  std::vector<Peer> peers_;
};

// One allocation that the views of all ranks share.
class LocalMemory final : public SymmetricMemory {
 public:
  LocalMemory(std::shared_ptr<std::byte> all, int rank, int world_size, size_t num_bytes)
      : all_(std::move(all)), rank_(rank), world_size_(world_size), num_bytes_(num_bytes) {}

  [[nodiscard]] int rank() const noexcept override { return rank_; }
  [[nodiscard]] int world_size() const noexcept override { return world_size_; }
  [[nodiscard]] size_t num_bytes() const noexcept override { return num_bytes_; }
  [[nodiscard]] std::byte* bytes(int rank) const noexcept override {
    return all_.get() + static_cast<size_t>(rank) * num_bytes_;
  }
  [[nodiscard]] std::string why_gone(int) const override { return {}; }

 private:
  std::shared_ptr<std::byte> all_;
  int rank_;
  int world_size_;
  size_t num_bytes_;
};

size_t checked_size(int rank, int world_size, size_t num_bytes, const char* where) {
  HELICORE_CHECK(world_size >= 1 && world_size <= 256, where, "world_size must be in 1..256, got ",
                 world_size);
  HELICORE_CHECK(rank >= 0 && rank < world_size, where, "rank must be in 0..", world_size - 1,
                 ", got ", rank);
  HELICORE_CHECK(num_bytes >= 16 * kPage && num_bytes <= (size_t{1} << 40), where,
                 "num_bytes must be in ", 16 * kPage, "..2^40, got ", num_bytes);
  return (num_bytes + kPage - 1) / kPage * kPage;
}

}  // namespace

Segment::Segment(int rank, int world_size, size_t num_bytes)
    : rank_(rank),
      world_size_(world_size),
      num_bytes_(checked_size(rank, world_size, num_bytes, "comm.Segment")),
      token_(random_token()) {
  fd_ = memfd_create("helicore", MFD_CLOEXEC);
  if (fd_ >= 0 && ftruncate(fd_, static_cast<off_t>(num_bytes_)) == 0) {
    bytes_ = map_shared(fd_, num_bytes_);
  }
  if (bytes_ == nullptr) {
    const int error = errno;
    if (fd_ >= 0) close(fd_);
    throw OutOfMemory(concat("[comm.Segment] no shared memory of ", num_bytes_,
                             " bytes: ", std::strerror(error)));
  }
  std::memcpy(bytes_ + kTokenOffset, &token_, sizeof token_);
}

Segment::~Segment() {
  munmap(bytes_, num_bytes_);
  close(fd_);
}

std::string Segment::handle() const {
  Handle handle;
  handle.boot_id = boot_id();
  handle.pid_namespace = pid_namespace();
  handle.pid = getpid();
  handle.start_time = start_time_of(handle.pid);
  handle.fd = fd_;
  handle.rank = rank_;
  handle.world_size = world_size_;
  handle.num_bytes = num_bytes_;
  handle.token = token_;
  return {reinterpret_cast<const char*>(&handle), sizeof handle};
}

std::unique_ptr<SymmetricMemory> map_segments(std::shared_ptr<Segment> segment,
                                              const std::vector<std::string>& handles) {
  return std::make_unique<SharedMemory>(std::move(segment), handles);
}

std::vector<std::unique_ptr<SymmetricMemory>> make_local_memory(int world_size, size_t num_bytes) {
  num_bytes = checked_size(0, world_size, num_bytes, "comm.make_local_memory");
  const size_t all_bytes = num_bytes * static_cast<size_t>(world_size);
  auto* bytes = static_cast<std::byte*>(std::aligned_alloc(kPage, all_bytes));
  if (bytes == nullptr) {
    throw OutOfMemory(concat("[comm.make_local_memory] no memory of ", all_bytes, " bytes"));
  }
  std::memset(bytes, 0, all_bytes);
  const std::shared_ptr<std::byte> all(bytes, [](std::byte* p) { std::free(p); });
  std::vector<std::unique_ptr<SymmetricMemory>> ranks;
  for (int r = 0; r < world_size; ++r) {
    ranks.push_back(std::make_unique<LocalMemory>(all, r, world_size, num_bytes));
  }
  return ranks;
}

}  // namespace helicore::comm
