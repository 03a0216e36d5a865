#include "helicore/comm/communicator.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <ctime>
#include <utility>

#include "helicore/comm/merge.h"
#include "helicore/core/error.h"

namespace helicore::comm {
namespace {

using detail::concat;
using Clock = std::chrono::steady_clock;

constexpr size_t kControlBytes = 4096;  // the first page of each rank
constexpr size_t kMessageBytes = 1024;
constexpr double kSliceSeconds = 0.05;  // between looks at whether the others are alive
constexpr size_t kAlignment = 64;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void pause() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Sleeps while `word` is `value`, at most a slice. The word is in memory of several processes.
void futex_wait(std::atomic<uint32_t>& word, uint32_t value) noexcept {
  timespec slice{0, static_cast<long>(kSliceSeconds * 1e9)};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, value, &slice, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) noexcept {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

int64_t bytes_of(const TensorView& t) { return t.numel() * static_cast<int64_t>(size_of(t.dtype)); }

void check_tensor(const TensorView& t, const char* where, const char* name) {
  check_contiguous(t, where, name);
  HELICORE_CHECK(t.device.type == DeviceType::kCpu, where, name, " must be on the CPU, got ",
                 t.describe());
}

void check_float(const TensorView& t, const char* where, const char* name) {
  HELICORE_CHECK(t.dtype == DType::kFloat32 || t.dtype == DType::kBFloat16, where, name,
                 " must be float32 or bfloat16, got ", t.describe());
}

}  // namespace

std::string_view name_of(CallKind kind) noexcept {
  switch (kind) {
    case CallKind::kNone:
      return "no call";
    case CallKind::kBarrier:
      return "barrier";
    case CallKind::kAllReduce:
      return "all_reduce";
    case CallKind::kAllGather:
      return "all_gather";
    case CallKind::kAllToAll:
      return "all_to_all";
    case CallKind::kMergePartials:
      return "merge_partials";
    case CallKind::kBroadcast:
      return "broadcast_bytes";
  }
  return "an unknown call";
}

// What ranks must agree on in a call.
struct Communicator::Header {
  uint64_t num_calls = 0;
  uint64_t num_bytes = 0;
  CallKind kind = CallKind::kNone;
  uint32_t dtype = 0;
  uint32_t root = 0;
};

// At the start of each rank's memory; written by that rank alone, but for `sleepers`.
struct ControlBlock {
  // The last round whose area is written. Stored after the area with release order, loaded before
  // it with acquire order: who sees the number sees the bytes.
  alignas(64) std::atomic<uint32_t> published;
  // How many ranks sleep, or are about to, until `published` changes.
  alignas(64) std::atomic<uint32_t> sleepers;
  alignas(64) std::atomic<uint32_t> has_given_up;
  char message[kMessageBytes];
  alignas(64) std::byte headers[2][64];
};
static_assert(sizeof(ControlBlock) <= kControlBytes - 64);
static_assert(std::atomic<uint32_t>::is_always_lock_free);

Communicator::Communicator(std::unique_ptr<SymmetricMemory> memory, double timeout_s)
    : memory_(std::move(memory)),
      rank_(memory_->rank()),
      world_(memory_->world_size()),
      timeout_s_(timeout_s),
      area_bytes_((memory_->num_bytes() - kControlBytes) / 2 / kAlignment * kAlignment) {
  HELICORE_CHECK(timeout_s > 0, "comm.Communicator", "timeout_s must be > 0, got ", timeout_s);
}

Communicator::~Communicator() { close(); }

void Communicator::close() noexcept {
  if (memory_ == nullptr) return;
  if (failure_.empty()) failure_ = "the communicator is closed";
  memory_.reset();
}

ControlBlock& Communicator::control(int rank) const noexcept {
  return *reinterpret_cast<ControlBlock*>(memory_->bytes(rank));
}

std::byte* Communicator::area(int rank) const noexcept {
  return memory_->bytes(rank) + kControlBytes + (round_ & 1) * area_bytes_;
}

void Communicator::fail(const std::string& message) {
  failure_ = concat(message, " (call ", num_calls_, ", ", name_of(kind_), ", rank ", rank_, " of ",
                    world_, ")");
  throw CommError(failure_);
}

void Communicator::abort(std::string_view message) noexcept {
  if (memory_ == nullptr) return;
  ControlBlock& mine = control(rank_);
  if (mine.has_given_up.load(std::memory_order_relaxed) != 0) return;
  const size_t length = std::min(message.size(), kMessageBytes - 1);
  std::memcpy(mine.message, message.data(), length);
  mine.message[length] = 0;
  mine.has_given_up.store(1, std::memory_order_release);
  futex_wake_all(mine.published);
}

// --- rounds ------------------------------------------------------------------------------------

void Communicator::start(CallKind kind, uint32_t dtype, uint64_t num_bytes, uint32_t root) {
  if (!failure_.empty()) throw CommError(failure_);
  kind_ = kind;
  dtype_ = dtype;
  num_bytes_ = num_bytes;
  root_ = root;
  ++num_calls_;
}

void Communicator::open_round(double timeout_s) {
  for (int r = 0; r < world_; ++r) {
    if (r != rank_) wait_for(r, round_, timeout_s);
  }
  ++round_;
  const Header header{num_calls_, num_bytes_, kind_, dtype_, root_};
  std::memcpy(control(rank_).headers[round_ & 1], &header, sizeof header);
}

void Communicator::publish() noexcept {
  ControlBlock& mine = control(rank_);
  // Sequentially consistent with the sleeper's increment and its second look: one of the two sees
  // the other.
  mine.published.store(round_, std::memory_order_seq_cst);
  if (mine.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(mine.published);
}

void Communicator::await(int rank, double timeout_s) {
  if (rank == rank_) return;
  wait_for(rank, round_, timeout_s);
  Header other;
  std::memcpy(&other, control(rank).headers[round_ & 1], sizeof other);
  if (other.kind != kind_ || other.num_calls != num_calls_) {
    fail(concat("rank ", rank, " is in call ", other.num_calls, ", ", name_of(other.kind)));
  }
  if (other.num_bytes != num_bytes_ || other.dtype != dtype_ || other.root != root_) {
    fail(concat("rank ", rank, " has ", other.num_bytes, " bytes of dtype ", other.dtype,
                " and root ", other.root, ", this rank ", num_bytes_, " bytes of dtype ", dtype_,
                " and root ", root_));
  }
}

void Communicator::wait_for(int rank, uint32_t round, double timeout_s) {
  ControlBlock& other = control(rank);
  const auto has_come = [&](std::memory_order order) {
    return static_cast<int32_t>(other.published.load(order) - round) >= 0;
  };
  if (has_come(std::memory_order_acquire)) return;
  const Clock::time_point start = Clock::now();
  do {
    for (int i = 0; i < 64; ++i) {
      if (has_come(std::memory_order_acquire)) return;
      pause();
    }
  } while (seconds_since(start) < kSpinSeconds);
  while (true) {
    other.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = other.published.load(std::memory_order_seq_cst);
    const bool is_here = static_cast<int32_t>(seen - round) >= 0;
    if (!is_here) futex_wait(other.published, seen);
    other.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    if (is_here || has_come(std::memory_order_acquire)) return;
    check_alive(rank, seconds_since(start), timeout_s);
  }
}

void Communicator::check_alive(int rank, double waited_s, double timeout_s) {
  for (int r = 0; r < world_; ++r) {
    ControlBlock& other = control(r);
    if (other.has_given_up.load(std::memory_order_acquire) != 0) {
      fail(r == rank_ ? std::string(other.message) : concat("rank ", r, ": ", other.message));
    }
  }
  // Any rank that is gone keeps the others from going on, not only the one waited for.
  for (int r = 0; r < world_; ++r) {
    if (std::string why = memory_->why_gone(r); !why.empty()) fail(why);
  }
  if (waited_s >= timeout_s) {
    fail(concat("rank ", rank, " did not come within ", timeout_s, " s"));
  }
}

// --- calls -------------------------------------------------------------------------------------

void Communicator::barrier() {
  start(CallKind::kBarrier, 0, 0);
  open_round(timeout_s_);
  publish();
  for (int r = 0; r < world_; ++r) await(r, timeout_s_);
}

void Communicator::all_reduce(const TensorView& x, const TensorView& out) {
  constexpr const char* kWhere = "comm.all_reduce";
  check_tensor(x, kWhere, "x");
  check_tensor(out, kWhere, "out");
  check_float(x, kWhere, "x");
  HELICORE_CHECK(out.dtype == x.dtype && out.numel() == x.numel(), kWhere,
                 "out must be like x, got ", out.describe(), " for ", x.describe());
  const int64_t element = static_cast<int64_t>(size_of(x.dtype));
  start(CallKind::kAllReduce, static_cast<uint32_t>(x.dtype), bytes_of(x));
  // Two rounds need room for a share's sum in the second one, which is less.
  const int64_t most = static_cast<int64_t>(area_bytes_) / element;
  const auto* from = x.ptr<std::byte>();
  auto* to = out.ptr<std::byte>();
  int64_t done = 0;
  do {
    const int64_t count = std::min(most, x.numel() - done);
    if (count * element <= kOneShotBytes || world_ == 1) {
      reduce_one_shot(from + done * element, to + done * element, count, x.dtype);
    } else {
      reduce_two_shot(from + done * element, to + done * element, count, x.dtype);
    }
    done += count;
  } while (done < x.numel());
}

void Communicator::all_reduce_fused(quant::AllReduceFusion fusion, const TensorView& x,
                                    const quant::NormEpilogueTensors& tensors) {
  constexpr const char* kWhere = "comm.all_reduce_fused";
  HELICORE_CHECK(fusion != quant::AllReduceFusion::kNone, kWhere,
                 "fusion must not be none: all_reduce does that");
  check_tensor(x, kWhere, "x");
  const quant::NormEpilogue epilogue = quant::make_epilogue(fusion, x, tensors, kWhere);
  sums_.resize(static_cast<size_t>(bytes_of(x)));
  TensorView sums = x;
  sums.data = sums_.data();
  all_reduce(x, sums);
  quant::apply_epilogue(epilogue, sums);
}

void Communicator::reduce_one_shot(const std::byte* x, std::byte* out, int64_t count, DType dtype) {
  open_round(timeout_s_);
  std::memcpy(area(rank_), x, static_cast<size_t>(count) * size_of(dtype));
  publish();
  std::vector<const void*> parts(world_);
  for (int r = 0; r < world_; ++r) {
    await(r, timeout_s_);
    parts[r] = area(r);
  }
  sum_parts(parts, out, count, dtype);
}

void Communicator::reduce_two_shot(const std::byte* x, std::byte* out, int64_t count, DType dtype) {
  const auto element = static_cast<int64_t>(size_of(dtype));
  const auto share_begin = [&](int r) { return count * r / world_ * element; };
  const int64_t begin = share_begin(rank_);
  const int64_t end = share_begin(rank_ + 1);
  // What others sum goes to them; the own share is summed from where it is.
  open_round(timeout_s_);
  std::memcpy(area(rank_), x, static_cast<size_t>(begin));
  std::memcpy(area(rank_) + end, x + end, static_cast<size_t>(count * element - end));
  publish();
  std::vector<const void*> parts(world_);
  for (int r = 0; r < world_; ++r) {
    await(r, timeout_s_);
    parts[r] = (r == rank_ ? x : area(r)) + begin;
  }
  open_round(timeout_s_);
  sum_parts(parts, area(rank_), (end - begin) / element, dtype);
  publish();
  std::memcpy(out + begin, area(rank_), static_cast<size_t>(end - begin));
  for (int i = 1; i < world_; ++i) {
    const int r = (rank_ + i) % world_;
    await(r, timeout_s_);
    std::memcpy(out + share_begin(r), area(r),
                static_cast<size_t>(share_begin(r + 1) - share_begin(r)));
  }
}

void Communicator::all_gather(const TensorView& x, const TensorView& out) {
  constexpr const char* kWhere = "comm.all_gather";
  check_tensor(x, kWhere, "x");
  check_tensor(out, kWhere, "out");
  HELICORE_CHECK(out.dtype == x.dtype && out.numel() == x.numel() * world_, kWhere,
                 "out must have ", world_, " times the elements of x, got ", out.describe(),
                 " for ", x.describe());
  const int64_t num_bytes = bytes_of(x);
  start(CallKind::kAllGather, static_cast<uint32_t>(x.dtype), num_bytes);
  int64_t done = 0;
  do {
    const int64_t count = std::min<int64_t>(area_bytes_, num_bytes - done);
    open_round(timeout_s_);
    std::memcpy(area(rank_), x.ptr<std::byte>() + done, count);
    publish();
    for (int r = 0; r < world_; ++r) {
      await(r, timeout_s_);
      std::memcpy(out.ptr<std::byte>() + r * num_bytes + done, area(r), count);
    }
    done += count;
  } while (done < num_bytes);
}

void Communicator::all_to_all(const TensorView& x, const TensorView& out) {
  constexpr const char* kWhere = "comm.all_to_all";
  check_tensor(x, kWhere, "x");
  check_tensor(out, kWhere, "out");
  HELICORE_CHECK(x.ndim >= 1 && x.size(0) == world_, kWhere, "x must be [", world_, ", ...], got ",
                 x.describe());
  HELICORE_CHECK(out.dtype == x.dtype && out.numel() == x.numel(), kWhere,
                 "out must be like x, got ", out.describe(), " for ", x.describe());
  const int64_t part = bytes_of(x) / world_;
  start(CallKind::kAllToAll, static_cast<uint32_t>(x.dtype), bytes_of(x));
  const int64_t most = static_cast<int64_t>(area_bytes_) / world_;
  int64_t done = 0;
  do {
    const int64_t count = std::min(most, part - done);
    open_round(timeout_s_);
    for (int r = 0; r < world_; ++r) {
      std::memcpy(area(rank_) + r * count, x.ptr<std::byte>() + r * part + done, count);
    }
    publish();
    for (int r = 0; r < world_; ++r) {
      await(r, timeout_s_);
      std::memcpy(out.ptr<std::byte>() + r * part + done, area(r) + rank_ * count, count);
    }
    done += count;
  } while (done < part);
}

void Communicator::merge_partials(const TensorView& o, const TensorView& stats,
                                  const TensorView& out) {
  constexpr const char* kWhere = "comm.merge_partials";
  check_tensor(o, kWhere, "o");
  check_tensor(stats, kWhere, "stats");
  check_tensor(out, kWhere, "out");
  check_float(o, kWhere, "o");
  HELICORE_CHECK(o.ndim == 3 && o.size(1) % world_ == 0, kWhere,
                 "o must be [T, H, R] with H a "
                 "multiple of the ",
                 world_, " ranks, got ", o.describe());
  const int64_t tokens = o.size(0);
  const int64_t heads = o.size(1);
  const int64_t width = o.size(2);
  const int64_t own = heads / world_;
  check_shape(stats, {tokens, heads, 2}, kWhere, "stats");
  check_dtype(stats, DType::kFloat32, kWhere, "stats");
  check_shape(out, {tokens, own, width}, kWhere, "out");
  check_dtype(out, o.dtype, kWhere, "out");
  const size_t o_bytes = static_cast<size_t>(heads * width) * size_of(o.dtype);
  const size_t stats_bytes = static_cast<size_t>(heads) * 8;
  HELICORE_CHECK(aligned(o_bytes) + stats_bytes <= area_bytes_, kWhere, "a token has ",
                 o_bytes + stats_bytes, " bytes, more than the ", area_bytes_,
                 " of a rank's shared memory");
  start(CallKind::kMergePartials, static_cast<uint32_t>(o.dtype), bytes_of(o));
  const auto most = static_cast<int64_t>((area_bytes_ - kAlignment) / (o_bytes + stats_bytes));
  std::vector<PartialView> parts(world_);
  for (int64_t done = 0; done < tokens;) {
    const int64_t count = std::min(most, tokens - done);
    const size_t stats_at = aligned(count * o_bytes);
    open_round(timeout_s_);
    std::memcpy(area(rank_), o.ptr<std::byte>() + done * o_bytes, count * o_bytes);
    std::memcpy(area(rank_) + stats_at, stats.ptr<std::byte>() + done * stats_bytes,
                count * stats_bytes);
    publish();
    for (int r = 0; r < world_; ++r) {
      await(r, timeout_s_);
      parts[r] = {area(r), area(r) + stats_at};
    }
    merge_parts({.parts = parts,
                 .tokens = count,
                 .heads = heads,
                 .width = width,
                 .first_head = rank_ * own,
                 .own_heads = own,
                 .dtype = o.dtype,
                 .out = out.ptr<std::byte>() + done * own * width * size_of(o.dtype)});
    done += count;
  }
}

std::string Communicator::broadcast_bytes(std::optional<std::string_view> data, int root,
                                          bool wait_forever) {
  constexpr const char* kWhere = "comm.broadcast_bytes";
  HELICORE_CHECK(root >= 0 && root < world_, kWhere, "root must be in 0..", world_ - 1, ", got ",
                 root);
  HELICORE_CHECK((root == rank_) == data.has_value(), kWhere,
                 "data must be given by the root, and by it alone");
  start(CallKind::kBroadcast, 0, 0, static_cast<uint32_t>(root));
  const double patience = wait_forever ? 1e18 : timeout_s_;
  const size_t most = std::min<size_t>(area_bytes_ - 8, UINT32_MAX);
  std::string result;
  uint64_t left = 0;
  bool is_first = true;
  do {
    open_round(patience);
    if (root == rank_) {
      if (is_first) left = data->size();
      const size_t count = std::min<uint64_t>(most, left);
      std::memcpy(area(rank_), &left, sizeof left);
      std::memcpy(area(rank_) + sizeof left, data->data() + (data->size() - left), count);
      publish();
      left -= count;
    } else {
      publish();
      await(root, is_first ? patience : timeout_s_);
      std::memcpy(&left, area(root), sizeof left);
      const size_t count = std::min<uint64_t>(most, left);
      result.append(reinterpret_cast<const char*>(area(root) + sizeof left), count);
      left -= count;
    }
    is_first = false;
  } while (left > 0);
  return root == rank_ ? std::string(*data) : result;
}

}  // namespace helicore::comm
