// One block a row: residual, norm and codes with one pass over memory.
#include <cuda_runtime.h>

#include "helicore/core/cuda/check.h"
#include "helicore/quant/cuda/dispatch.cuh"

namespace helicore::quant::cuda {
namespace {

template <typename T, int kPackets, bool kWhole>
__global__ void __launch_bounds__(kRowThreads<kPackets>)
    norm_quantize_kernel(const __grid_constant__ EpilogueParams p, const void* x, int cluster) {
  __shared__ RowShared shared;
  enter_cluster(cluster);
  const int64_t row = blockIdx.x / cluster;
  Row<T, kPackets, kWhole> values;
  values.cluster = cluster;
  values.first = static_cast<int>(blockIdx.x % cluster * blockDim.x);
#pragma unroll
  for (int k = 0; k < kPackets; ++k) {
    unpack(load_packet<kWhole>(static_cast<const T*>(x) + row * p.width, values.packet(k), p.width),
           values.v[k]);
  }
  values.fetch(p, row);
  clear_padding(p, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  await_cluster(cluster);
  values.finish(p, row, shared);
}

template <typename T, int kPackets, bool kWhole>
void launch(RowKind<T, kPackets, kWhole> /*kind*/, const EpilogueParams& p, const void* x,
            const RowShape& shape, Stream stream) {
  launch_rows(norm_quantize_kernel<T, kPackets, kWhole>,
              static_cast<int>(p.num_rows) * shape.cluster, shape, 0,
              static_cast<cudaStream_t>(stream), p, x, shape.cluster);
}

}  // namespace

void launch_norm_quantize(const EpilogueParams& params, const void* x, DType dtype,
                          const RowShape& shape, Stream stream) {
  dispatch_row(params, dtype, shape, [&](auto kind) { launch(kind, params, x, shape, stream); });
}

}  // namespace helicore::quant::cuda
