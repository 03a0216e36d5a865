// Row shapes as template parameters. CUDA sources only.
#pragma once

#include "helicore/core/cuda/check.h"
#include "helicore/core/cuda/elements.cuh"
#include "helicore/quant/cuda/epilogue.cuh"
#include "helicore/quant/cuda/norm_quantize.h"

namespace helicore::quant::cuda {

template <typename T, int kPackets, bool kWhole>
struct RowKind {};

// Calls fn(RowKind{}) for the row that fits: whole packets one to eight a thread, rows of other
// sizes or alignments eight a thread.
template <typename Fn>
void dispatch_row(const EpilogueParams& p, DType dtype, RowShape shape, Fn&& fn) {
  helicore::cuda::dispatch_float(dtype, "x", [&](auto element) {
    using T = decltype(element);
    if (!p.is_whole) return fn(RowKind<T, 8, false>{});
    switch (shape.packets) {
      case 1:
        return fn(RowKind<T, 1, true>{});
      case 2:
        return fn(RowKind<T, 2, true>{});
      default:
        return fn(RowKind<T, 8, true>{});
    }
  });
}

// Launches `kernel` with clusters of shape.cluster blocks.
template <typename... Params, typename... Args>
void launch_rows(void (*kernel)(Params...), int num_blocks, const RowShape& shape, int shared_bytes,
                 cudaStream_t stream, const Args&... args) {
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(shape.cluster);
  cluster.val.clusterDim.y = 1;
  cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(num_blocks));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = shape.cluster > 1 ? 1 : 0;
  helicore::cuda::check(cudaLaunchKernelEx(&config, kernel, args...), "launch of a fused norm");
}

}  // namespace helicore::quant::cuda
