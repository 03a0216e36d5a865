// The checks and the plan of device calls; compiled with and without CUDA.
#include "helicore/comm/cuda/device_communicator.h"

#include <algorithm>

#include "helicore/comm/cuda/all_reduce.h"
#include "helicore/comm/error.h"
#include "helicore/core/cuda/runtime.h"
#include "helicore/core/error.h"

namespace helicore::comm::cuda {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % kPacketBytes == 0; }

void check_out(const TensorView& x, const TensorView& out, const char* where) {
  check_shape(x, {-1, -1}, where, "x");
  check_contiguous(x, where, "x");
  HELICORE_CHECK(x.dtype == DType::kFloat32 || x.dtype == DType::kBFloat16, where,
                 "x must be float32 or bfloat16, got ", x.describe());
  check_shape(out, {x.size(0), x.size(1)}, where, "out");
  check_dtype(out, x.dtype, where, "out");
  check_contiguous(out, where, "out");
  HELICORE_CHECK(out.device == x.device, where, "out must be on the device of x, got ",
                 out.describe());
}

}  // namespace

struct DeviceCommunicator::Call {
  const char* where = "";
  AllReduceParams params{};
  quant::cuda::EpilogueParams epilogue{};
};

DeviceCommunicator::DeviceCommunicator(std::unique_ptr<SymmetricMemory> memory, int device,
                                       const DeviceOptions& options)
    : memory_(std::move(memory)),
      device_(device),
      max_blocks_(options.max_blocks),
      timeout_ns_(static_cast<uint64_t>(options.timeout_s * 1e9)) {
  constexpr const char* kWhere = "comm.DeviceCommunicator";
  HELICORE_CHECK(world_size() <= kMaxRanks, kWhere, "world_size must be at most ", kMaxRanks,
                 ", got ", world_size());
  HELICORE_CHECK(options.timeout_s > 0 && options.timeout_s <= 1e6, kWhere,
                 "timeout_s must be > 0 and at most 1e6, got ", options.timeout_s);
  HELICORE_CHECK(options.max_blocks >= 0 && options.max_blocks <= kMaxBlocks, kWhere,
                 "max_blocks must be in [0, ", kMaxBlocks, "], got ", options.max_blocks);
  HELICORE_CHECK(options.ranks_per_device >= 1, kWhere, "ranks_per_device must be >= 1, got ",
                 options.ranks_per_device);
  if (max_blocks_ == 0) {
    const int num_sms = helicore::cuda::num_multiprocessors(device);
    max_blocks_ = std::clamp(num_sms / options.ranks_per_device, 1, kMaxBlocks);
  }
  const auto bytes = static_cast<int64_t>(memory_->num_bytes());
  buffer_packets_ = std::min((bytes - kStateBytes) / kNumBuffers / kPacketBytes,
                             int64_t{UINT32_MAX});  // counted in 32 bits
  const int64_t least = int64_t{world_size()} * quant::cuda::kMaxRowBytes / kPacketBytes;
  HELICORE_CHECK(buffer_packets_ >= least, kWhere, "num_bytes must be at least ",
                 least * kPacketBytes * kNumBuffers + kStateBytes, " for ", world_size(),
                 " ranks, got ", bytes);
  launch_clear(device, memory_->bytes(rank()), buffer_packets_ * kNumBuffers);
}

DeviceCommunicator::~DeviceCommunicator() = default;

void DeviceCommunicator::check() const {
  const uint32_t failed = failure_.value();
  if (failed == 0) return;
  throw CommError(detail::concat("rank ", rank(), ": rank ", failed - 1, " did not come within ",
                                 static_cast<double>(timeout_ns_) * 1e-9,
                                 " s; what this communicator wrote since means nothing"));
}

void DeviceCommunicator::all_reduce(const TensorView& x, const TensorView& out, Stream stream,
                                    Shots shots) {
  Call call{.where = "comm.all_reduce"};
  check_out(x, out, call.where);
  quant::cuda::check_rows(x, call.where);
  call.params.out = out.data;
  call.epilogue.width = static_cast<int32_t>(x.size(1));
  const int64_t packet = kPacketBytes / static_cast<int64_t>(size_of(x.dtype));
  call.epilogue.is_whole = x.size(1) % packet == 0 && is_aligned(out.data);
  run(call, x, stream, shots);
}

void DeviceCommunicator::all_reduce_fused(quant::AllReduceFusion fusion, const TensorView& x,
                                          const quant::NormEpilogueTensors& tensors, Stream stream,
                                          Shots shots) {
  Call call{.where = "comm.all_reduce_fused"};
  HELICORE_CHECK(fusion != quant::AllReduceFusion::kNone, call.where,
                 "fusion must not be none: all_reduce does that");
  quant::cuda::check_rows(x, call.where);
  const quant::NormEpilogue epilogue = quant::make_epilogue(fusion, x, tensors, call.where);
  call.epilogue = quant::cuda::make_params(epilogue, x.size(0));
  run(call, x, stream, shots);
}

void DeviceCommunicator::run(Call& call, const TensorView& x, Stream stream, Shots shots) {
  check();
  HELICORE_CHECK(x.device.index == device_, call.where, "x must be on device ", device_, ", got ",
                 x.describe());
  const int64_t rows = x.size(0);
  if (rows == 0 || x.size(1) == 0) return;
  const int64_t row_bytes = x.size(1) * static_cast<int64_t>(size_of(x.dtype));
  const int world = world_size();
  AllReduceParams& p = call.params;
  for (int r = 0; r < world; ++r) p.ranks[r] = memory_->bytes(r);
  call.epilogue.is_whole &= is_aligned(x.data);
  p.x = x.data;
  p.failure = failure_.device_address();
  p.timeout_ns = timeout_ns_;
  p.buffer_packets = buffer_packets_;
  p.rank = rank();
  p.world = world;
  p.row_packets = static_cast<int32_t>(ceil_div(row_bytes, kPacketBytes));
  const bool is_small = world <= 2 || rows * row_bytes * world <= kOneShotBytes;
  const bool one_shot = shots == Shots::kOne || (shots == Shots::kAuto && is_small);
  p.share = one_shot ? 0 : static_cast<int32_t>(ceil_div(p.row_packets, world));
  const int64_t packets_per_row =
      one_shot ? int64_t{world} * p.row_packets : int64_t{world} * p.share + p.row_packets;
  const int64_t rows_at_once = std::min<int64_t>(buffer_packets_ / packets_per_row, INT32_MAX);
  for (int64_t first = 0; first < rows; first += rows_at_once) {
    p.first_row = first;
    p.num_rows = static_cast<int32_t>(std::min(rows_at_once, rows - first));
    const auto shape = quant::cuda::row_shape(call.epilogue, x.dtype, p.num_rows, max_blocks_);
    p.cluster = shape.cluster;
    p.num_clusters = static_cast<int32_t>(std::min<int64_t>(max_blocks_ / p.cluster, p.num_rows));
    launch_all_reduce(p, call.epilogue, x.dtype, shape, stream);
  }
}

}  // namespace helicore::comm::cuda
