// Append: RMS norm of the latent, rotation of the rope part, write to the slot; one launch for all
// tokens. Rope of query rows shares the rotation.
#include <cuda_runtime.h>

#include "helicore/attention/cuda/common.cuh"
#include "helicore/attention/cuda/mla_cuda.h"
#include "helicore/core/cuda/check.h"
#include "helicore/core/cuda/elements.cuh"

namespace helicore::attention::cuda {
namespace {

constexpr int kAppendThreads = 128;
constexpr int kRopeThreads = 128;

// One block a token. The norm follows the CPU twin: normalise in float32, round to the model's
// type, times weight.
template <typename In, typename Weight, typename Out>
__global__ void __launch_bounds__(kAppendThreads)
    mla_append_kernel(const __grid_constant__ MlaAppendParams p) {
  const int64_t token = blockIdx.x;
  const int64_t slot = p.slots[token];
  if (slot < 0) return;
  const int rank = p.cache.kv_lora_rank;
  const In* row = static_cast<const In*>(p.kv_a) + token * p.kv_a_stride;
  Out* out = static_cast<Out*>(p.cache.data) + slot / p.cache.page_size * p.cache.page_stride +
             slot % p.cache.page_size * cache_width(p.cache);

  const Weight* weight = static_cast<const Weight*>(p.norm_weight);
  float inv_rms = 1.0f;
  if (weight != nullptr) {
    __shared__ float partial[kAppendThreads / kWarpSize];
    float sum = 0.0f;
    for (int i = threadIdx.x; i < rank; i += kAppendThreads) {
      const float x = load_as_float(row + i);
      sum += x * x;
    }
    sum = warp_sum(sum);
    if (threadIdx.x % kWarpSize == 0) partial[threadIdx.x / kWarpSize] = sum;
    __syncthreads();
    sum = 0.0f;
    for (int w = 0; w < kAppendThreads / kWarpSize; ++w) sum += partial[w];
    inv_rms = rsqrtf(sum / static_cast<float>(rank) + p.eps);
  }
  for (int i = threadIdx.x; i < rank; i += kAppendThreads) {
    const float x = load_as_float(row + i);
    const float y = weight == nullptr ? x : rounded<In>(x * inv_rms) * load_as_float(weight + i);
    store_float(out + i, rounded<In>(y));
  }

  const int half = p.cache.rope_dim / 2;
  for (int i = threadIdx.x; i < half; i += kAppendThreads) {
    const float2 r = rotate_pair(row + rank, i, p.rope, p.positions[token]);
    store_float(out + rank + i, rounded<In>(r.x));
    store_float(out + rank + half + i, rounded<In>(r.y));
  }
}

// One thread a (token, head, pair). Writing in place is safe only if a row's reads finish before
// its writes, so a block owns whole (token, head) rows and synchronises between the two.
template <typename T>
__global__ void __launch_bounds__(kRopeThreads)
    rope_rows_kernel(const __grid_constant__ RopeRowsParams p) {
  const int half = p.rope.dim / 2;
  const int64_t token = blockIdx.x;
  const int head = blockIdx.y;
  const T* in = static_cast<const T*>(p.in) + token * p.in_row_stride + head * p.in_head_stride;
  T* out = static_cast<T*>(p.out) + token * p.out_row_stride + head * p.out_head_stride;
  extern __shared__ float2 rotated[];  // [half]
  for (int i = threadIdx.x; i < half; i += kRopeThreads) {
    rotated[i] = rotate_pair(in, i, p.rope, p.positions[token]);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < half; i += kRopeThreads) {
    store_float(out + i, rotated[i].x);
    store_float(out + half + i, rotated[i].y);
  }
}

}  // namespace

void launch_mla_append(const MlaAppendParams& params, Stream stream) {
  if (params.num_tokens == 0) return;
  if (params.cache.format != CacheFormat::kDense) return launch_append_coded(params, stream);
  dispatch_float(params.kv_a_dtype, "kv_a", [&](auto in) {
    dispatch_float(params.norm_dtype, "norm_weight", [&](auto weight) {
      dispatch_float(params.cache.dtype, "cache", [&](auto out) {
        mla_append_kernel<decltype(in), decltype(weight), decltype(out)>
            <<<static_cast<unsigned>(params.num_tokens), kAppendThreads, 0,
               static_cast<cudaStream_t>(stream)>>>(params);
      });
    });
  });
  helicore::cuda::check_launch("mla_append_kernel");
}

void launch_rope_rows(const RopeRowsParams& params, Stream stream) {
  if (params.num_tokens == 0 || params.num_heads == 0 || params.rope.dim == 0) return;
  const dim3 grid(static_cast<unsigned>(params.num_tokens),
                  static_cast<unsigned>(params.num_heads));
  dispatch_float(params.dtype, "q", [&](auto element) {
    rope_rows_kernel<decltype(element)>
        <<<grid, kRopeThreads, sizeof(float2) * static_cast<size_t>(params.rope.dim / 2),
           static_cast<cudaStream_t>(stream)>>>(params);
  });
  helicore::cuda::check_launch("rope_rows_kernel");
}

}  // namespace helicore::attention::cuda
