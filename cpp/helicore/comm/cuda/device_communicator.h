// All-reduce of ranks that address each other's GPU memory, with what follows it in the same
// kernel (docs/design/comm-cuda.md).
//
// Data are their own flags: a word of a buffer holds the sentinel until the peer's data arrive.
#pragma once

#include <cstdint>
#include <memory>

#include "helicore/comm/cuda/device_memory.h"
#include "helicore/comm/symmetric_memory.h"
#include "helicore/core/tensor_view.h"
#include "helicore/quant/norm_epilogue.h"

namespace helicore::comm::cuda {

using Stream = void*;  // a cudaStream_t; null is the default stream

inline constexpr int kMaxRanks = 16;

enum class Shots : uint8_t {
  kAuto = 0,
  kOne,  // every rank sends its rows to all and sums them all
  kTwo,  // every rank sums a share of the columns and sends the sums to all
};

// Bytes that one of three or more ranks receives in one shot, up to which that is done; two ranks
// do nothing else. From virtual ranks on one H200.
inline constexpr int64_t kOneShotBytes = 512 << 10;

struct DeviceOptions {
  double timeout_s = 10.0;
  // Blocks that all ranks can have on their GPU at once; 0: as many as it has multiprocessors, by
  // the ranks that share it.
  int max_blocks = 0;
  int ranks_per_device = 1;
};

// One rank. All ranks make the same calls in the same order, each in one stream (or one chain of
// dependent streams); calls may be captured into graphs. Tensors are contiguous, on `device`.
// Nothing allocates or synchronises. A rank that waits longer than the time limit gives up: its
// results and those of later calls mean nothing, and check() and later calls throw CommError naming
// the rank that did not come. Throws InvalidArgument for a tensor that does not fit, before
// anything is sent.
class DeviceCommunicator {
 public:
  // Fills this rank's part of `memory`, which takes part in no call before that is done on all
  // ranks. Waits for the device. Throws InvalidArgument naming an option, or `num_bytes` of memory
  // that does not hold one row of 64 KiB per rank.
  DeviceCommunicator(std::unique_ptr<SymmetricMemory> memory, int device,
                     const DeviceOptions& options = {});
  ~DeviceCommunicator();
  DeviceCommunicator(const DeviceCommunicator&) = delete;
  DeviceCommunicator& operator=(const DeviceCommunicator&) = delete;

  [[nodiscard]] int rank() const noexcept { return memory_->rank(); }
  [[nodiscard]] int world_size() const noexcept { return memory_->world_size(); }

  // out [T, H] = sum of x over the ranks: in float32 in the order of ranks, rounded once, -0 made
  // +0. The same bits on every rank. float32 or bfloat16; out may be x.
  void all_reduce(const TensorView& x, const TensorView& out, Stream stream,
                  Shots shots = Shots::kAuto);
  // all_reduce and the fusion's rows of quant/norm_epilogue.h. Not with kNone.
  void all_reduce_fused(quant::AllReduceFusion fusion, const TensorView& x,
                        const quant::NormEpilogueTensors& tensors, Stream stream,
                        Shots shots = Shots::kAuto);
  // Throws CommError when a call of this rank has given up.
  void check() const;

 private:
  struct Call;
  void run(Call& call, const TensorView& x, Stream stream, Shots shots);

  std::unique_ptr<SymmetricMemory> memory_;
  HostWord failure_;
  int device_;
  int max_blocks_;
  uint64_t timeout_ns_;
  int64_t buffer_packets_;  // of one of the three buffers of a rank
};

}  // namespace helicore::comm::cuda
