#include "helicore/kv/prefix_store_files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <utility>

#include "helicore/core/error.h"
#include "helicore/kv/errors.h"

namespace helicore::kv::store {
namespace {

// Writing past the limit would raise SIGXFSZ, which ends the process by default.
bool exceeds_file_limit(int64_t num_bytes) noexcept {
  ::rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return false;
  return static_cast<uint64_t>(num_bytes) > limit.rlim_cur;
}

int sync_directory(const std::string& directory) {
  const UniqueFd fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.ok() || ::fsync(fd.get()) != 0) return errno;
  return 0;
}

// The head of the file, or nothing with found = false.
std::vector<std::byte> read_file(const std::string& path, size_t max_bytes, bool* found) {
  std::vector<std::byte> bytes;
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct ::stat info{};
  *found = fd.ok() && ::fstat(fd.get(), &info) == 0;
  if (!*found) return bytes;
  bytes.resize(std::min(static_cast<size_t>(info.st_size), max_bytes));
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t got =
        ::pread(fd.get(), bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    done += static_cast<size_t>(got);
  }
  bytes.resize(done);  // what can't be read is as good as torn
  return bytes;
}

std::string mismatch_of(const Header& found, const Header& wanted) {
  using ::helicore::detail::concat;
  if (found.version != wanted.version) {
    return concat("format version ", found.version, ", this build writes ", wanted.version);
  }
  if (found.stamp != wanted.stamp) return "the stamp (model, dtype, layout) is another one";
  if (found.tokens_per_block != wanted.tokens_per_block) {
    return concat("tokens_per_block ", found.tokens_per_block, ", wanted ",
                  wanted.tokens_per_block);
  }
  if (found.block_bytes != wanted.block_bytes) {
    return concat("block_bytes ", found.block_bytes, ", wanted ", wanted.block_bytes);
  }
  return {};
}

}  // namespace

UniqueFd::~UniqueFd() {
  if (fd_ >= 0) ::close(fd_);
}
UniqueFd::UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
UniqueFd& UniqueFd::operator=(UniqueFd&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

std::string errno_reason(const std::string& what, int error) {
  return what + ": " + describe(IoStatus{error, 0});
}

UniqueFd lock_directory(const std::string& directory, std::string* reason) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) {
    *reason = "make directory " + directory + ": " + error.message();
    return UniqueFd();
  }
  const std::string path = directory + "/lock";
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  if (!fd.ok()) {
    *reason = errno_reason("open " + path, errno);
    return fd;
  }
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) {
      *reason = errno_reason("lock " + path, errno);
      return UniqueFd();
    }
    char owner[32] = {};
    const ssize_t got = ::pread(fd.get(), owner, sizeof(owner) - 1, 0);
    throw ResourceBusy("[kv.prefix_store] " + directory + " is in use by process " +
                       (got > 0 ? std::string(owner) : std::string("unknown")));
  }
  const std::string pid = std::to_string(::getpid());
  if (::ftruncate(fd.get(), 0) != 0 ||
      ::pwrite(fd.get(), pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size())) {
    *reason = errno_reason("write " + path, errno);
    return UniqueFd();
  }
  return fd;
}

DataFile open_data(const std::string& directory, int64_t num_bytes, bool direct,
                   std::string* reason) {
  const std::string path = directory + "/blocks";
  DataFile file;
  if (exceeds_file_limit(num_bytes)) {
    *reason = errno_reason("reserve " + std::to_string(num_bytes) + " bytes for " + path, EFBIG);
    return file;
  }
  const int flags = O_RDWR | O_CREAT | O_CLOEXEC;
  UniqueFd fd(direct ? ::open(path.c_str(), flags | O_DIRECT, 0644) : -1);
  file.direct = fd.ok();
  if (!fd.ok()) fd = UniqueFd(::open(path.c_str(), flags, 0644));
  struct ::stat info{};
  if (!fd.ok() || ::fstat(fd.get(), &info) != 0) {
    *reason = errno_reason("open " + path, errno);
    return file;
  }
  file.old_bytes = info.st_size;
  int error = 0;
  // A write of a killed process may still be on its way to the disk. It holds this lock through its
  // open file until it has landed; only then may slots be written again.
  while (::flock(fd.get(), LOCK_EX) != 0) {
    if (errno == EINTR) continue;
    error = errno;
    break;
  }
  if (error == 0 && info.st_size > num_bytes) {
    error = ::ftruncate(fd.get(), num_bytes) == 0 ? 0 : errno;
  }
  if (error == 0 && ::fallocate(fd.get(), 0, 0, num_bytes) != 0) {
    error = errno;
    if (error == EOPNOTSUPP) error = ::ftruncate(fd.get(), num_bytes) == 0 ? 0 : errno;
  }
  if (error != 0) {
    *reason = errno_reason("reserve " + std::to_string(num_bytes) + " bytes for " + path, error);
    return file;
  }
  file.fd = std::move(fd);
  return file;
}

std::string Journal::mismatch(const Header& wanted) const {
  bool found = false;
  std::string reason;
  Header header;
  const auto bytes = read_file(path(), kHeaderBytes, &found);
  if (!found) return {};
  return decode_header(bytes, &header, &reason) ? mismatch_of(header, wanted) : reason;
}

Journal::Loaded Journal::load(const Header& wanted, int64_t slot_bytes, int64_t data_bytes,
                              PrefixIndex* index) const {
  Loaded loaded;
  const std::vector<std::byte> bytes = read_file(path(), SIZE_MAX, &loaded.found);
  if (!loaded.found) return loaded;
  Header header;
  if (!decode_header(bytes, &header, &loaded.mismatch)) return loaded;
  loaded.epoch = header.epoch;
  loaded.mismatch = mismatch_of(header, wanted);
  if (!loaded.mismatch.empty()) return loaded;
  auto rest = std::span(bytes).subspan(kHeaderBytes);
  Record record;
  uint64_t count = 0;
  while (const size_t size = decode_record(rest, header, &record)) {
    rest = rest.subspan(size);
    if (const auto* put = std::get_if<PutRecord>(&record)) {
      const bool has_data = (int64_t{put->slot} + 1) * slot_bytes <= data_bytes;
      if (!has_data || !index->replay(*put, count < header.num_snapshot)) ++loaded.num_dropped;
    } else {
      index->replay(std::get<TombstoneRecord>(record));
    }
    ++count;
  }
  loaded.torn_bytes = static_cast<int64_t>(rest.size());
  index->rebuild_free_list();
  return loaded;
}

int Journal::write_at(int fd, int64_t offset, std::span<const std::byte> bytes, bool sync) {
  if (exceeds_file_limit(offset + static_cast<int64_t>(bytes.size()))) return EFBIG;
  // NOTE: a write never changes its memory; the buffer type serves both directions.
  auto* address = const_cast<std::byte*>(bytes.data());
  const IoBuffer buffer{address, static_cast<int64_t>(bytes.size())};
  const auto written = io_->submit({{IoOp::kWrite, fd, offset, {buffer}}}, WhenFull::kBlock);
  if (const int error = io_->wait(*written).error(); error != 0 || !sync) return error;
  return io_->wait(*io_->submit({{IoOp::kSync, fd, 0, {}}}, WhenFull::kBlock)).error();
}

int Journal::append(std::span<const std::byte> records, bool sync) {
  const int error = write_at(fd_.get(), end_, records, sync);
  appended_ = true;
  if (error == 0) end_ += static_cast<int64_t>(records.size());
  return error;
}

int Journal::sync() {
  return io_->wait(*io_->submit({{IoOp::kSync, fd_.get(), 0, {}}}, WhenFull::kBlock)).error();
}

int Journal::rewrite(const Header& header, std::span<const PutRecord> snapshot, bool sync) {
  std::vector<std::byte> bytes = encode_header(header);
  for (const PutRecord& record : snapshot) append_put(bytes, record, header);
  const std::string next = path() + ".new";
  UniqueFd fd(::open(next.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!fd.ok()) return errno;
  int error = write_at(fd.get(), 0, bytes, sync);
  if (error == 0 && ::rename(next.c_str(), path().c_str()) != 0) error = errno;
  if (error != 0) {
    ::unlink(next.c_str());
    return error;
  }
  fd_ = std::move(fd);
  header_ = header;
  end_ = static_cast<int64_t>(bytes.size());
  appended_ = false;
  return sync ? sync_directory(directory_) : 0;
}

}  // namespace helicore::kv::store
