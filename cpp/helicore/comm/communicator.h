// Collective calls of ranks that share memory (docs/design/comm-cpu.md).
//
// Every call is made of rounds. In a round each rank writes what others need to its own memory,
// publishes the number of the round, and reads what others published. Two areas take turns: a rank
// writes that of round n once all have published n - 1, for by then they have read round n - 2.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "helicore/comm/symmetric_memory.h"
#include "helicore/core/tensor_view.h"
#include "helicore/quant/norm_epilogue.h"

namespace helicore::comm {

// Bytes of a rank's part of an all-reduce up to which all ranks read all parts (one round); above,
// each sums a share of the elements and reads the others' sums (two rounds).
inline constexpr int64_t kOneShotBytes = 64 << 10;

// How long a rank spins before it sleeps.
inline constexpr double kSpinSeconds = 20e-6;

enum class CallKind : uint32_t {
  kNone = 0,
  kBarrier,
  kAllReduce,
  kAllGather,
  kAllToAll,
  kMergePartials,
  kBroadcast,
};
[[nodiscard]] std::string_view name_of(CallKind kind) noexcept;

struct ControlBlock;

// One rank. All ranks make the same calls in the same order, one thread at a time each. Tensors are
// contiguous, on the CPU, of any alignment. A call throws CommError naming the rank that did not
// come within the time limit, has died, has given up, or made another call; after that every call
// does. Throws InvalidArgument for a tensor that does not fit, before anything is sent.
class Communicator {
 public:
  Communicator(std::unique_ptr<SymmetricMemory> memory, double timeout_s);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int world_size() const noexcept { return world_; }
  [[nodiscard]] double timeout_s() const noexcept { return timeout_s_; }

  void barrier();
  // out = sum of x over the ranks: in float32 in the order of ranks, rounded once. The same bits on
  // every rank. float32 or bfloat16; out may be x.
  void all_reduce(const TensorView& x, const TensorView& out);
  // all_reduce of x [T, H], rounded to its dtype, and what the fusion does with each row: see
  // quant/norm_epilogue.h. Not with kNone.
  void all_reduce_fused(quant::AllReduceFusion fusion, const TensorView& x,
                        const quant::NormEpilogueTensors& tensors);
  // out[r] = x of rank r; out is [W, ...x]. Bytes are copied.
  void all_gather(const TensorView& x, const TensorView& out);
  // out[r] = x[rank()] of rank r; x and out are [W, ...].
  void all_to_all(const TensorView& x, const TensorView& out);
  // Merges partial attention over disjoint keys: o [T, H, R] float32 or bfloat16 and its statistics
  // float32 [T, H, 2] (core/softmax_stats.h) of each rank -> out [T, H / W, R] for heads
  // [rank * H / W, (rank + 1) * H / W). In float32 in the order of ranks, rounded once. A partial
  // of weight 0 is not read; a row that is empty everywhere gives 0.
  void merge_partials(const TensorView& o, const TensorView& stats, const TensorView& out);
  // The bytes that `root` gives, on every rank. wait_forever: no time limit for the root to come;
  // its death is noticed all the same.
  [[nodiscard]] std::string broadcast_bytes(std::optional<std::string_view> data, int root,
                                            bool wait_forever);

  // Ends current and later calls of all ranks with this message. From any thread.
  void abort(std::string_view message) noexcept;
  // Lets go of the memory; later calls throw. Safe to call again.
  void close() noexcept;

 private:
  struct Header;

  void start(CallKind kind, uint32_t dtype, uint64_t num_bytes, uint32_t root = 0);
  void open_round(double timeout_s);
  void publish() noexcept;
  // Waits until `rank` has published this round, and checks that it made the same call.
  void await(int rank, double timeout_s);
  void wait_for(int rank, uint32_t round, double timeout_s);
  void check_alive(int rank, double waited_s, double timeout_s);
  [[noreturn]] void fail(const std::string& message);
  [[nodiscard]] ControlBlock& control(int rank) const noexcept;
  [[nodiscard]] std::byte* area(int rank) const noexcept;  // of this round
  void reduce_one_shot(const std::byte* x, std::byte* out, int64_t count, DType dtype);
  void reduce_two_shot(const std::byte* x, std::byte* out, int64_t count, DType dtype);

  std::unique_ptr<SymmetricMemory> memory_;
  int rank_;
  int world_;
  double timeout_s_;
  size_t area_bytes_;
  uint32_t round_ = 0;
  uint64_t num_calls_ = 0;
  CallKind kind_ = CallKind::kNone;
  uint32_t dtype_ = 0;
  uint32_t root_ = 0;
  uint64_t num_bytes_ = 0;
  std::vector<std::byte> sums_;  // of a fused call
  std::string failure_;
};

}  // namespace helicore::comm
