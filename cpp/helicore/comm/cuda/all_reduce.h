// The launches of the device communicator, with checked arguments.
#pragma once

#include <cstdint>

#include "helicore/comm/cuda/device_communicator.h"
#include "helicore/core/types.h"
#include "helicore/quant/cuda/norm_quantize.h"

namespace helicore::comm::cuda {

inline constexpr int kNumBuffers = 3;
inline constexpr uint32_t kSentinel = 0x80000000u;  // two bfloat16, or a float, that are not sent
inline constexpr int64_t kPacketBytes = 16;

inline constexpr int kMaxBlocks = 500;

// What a rank notes for its next call; the host never reads it. Every block has a note of its own,
// so that none waits for another: it reads one, and writes those of all blocks that are its own
// modulo the number of blocks of the call.
struct CommNote {
  uint32_t round;  // calls so far
  uint32_t used;   // packets of the last one, to be made sentinels again
};
struct CommState {
  CommNote notes[kMaxBlocks];
  uint32_t failed;  // 1 + the rank that did not come; calls do nothing from then on
};
inline constexpr int64_t kStateBytes = 4096;
static_assert(sizeof(CommState) <= kStateBytes);

// Rows [first_row, first_row + num_rows) of a call.
struct AllReduceParams {
  std::byte* ranks[kMaxRanks] = {};  // a state, then three buffers, each
  const void* x = nullptr;
  void* out = nullptr;  // of a call without an epilogue
  uint32_t* failure = nullptr;
  uint64_t timeout_ns = 0;
  int64_t buffer_packets = 0;
  int64_t first_row = 0;
  int32_t num_rows = 0;
  int32_t row_packets = 0;
  int32_t share = 0;  // packets of a row that one rank sums, in two shots; 0: one shot
  int32_t rank = 0;
  int32_t world = 0;
  int32_t cluster = 1;       // blocks of a row
  int32_t num_clusters = 0;  // their blocks are at most kMaxBlocks
};

// `epilogue.weight` null: no epilogue, width and is_whole count.
void launch_all_reduce(const AllReduceParams& params, const quant::cuda::EpilogueParams& epilogue,
                       DType dtype, const quant::cuda::RowShape& shape, Stream stream);
// Sentinels in the buffers of one rank on `device`, zeros in its state. Waits for the device.
void launch_clear(int device, std::byte* rank, int64_t num_packets);

}  // namespace helicore::comm::cuda
