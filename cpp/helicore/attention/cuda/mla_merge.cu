// Folding partial attention results: the splits of a decode call, and two states of equal shape.
#include <cuda_runtime.h>

#include <cmath>

#include "helicore/attention/cuda/common.cuh"
#include "helicore/attention/cuda/decode_dispatch.h"
#include "helicore/attention/cuda/mla_cuda.h"
#include "helicore/attention/cuda/mma.cuh"
#include "helicore/core/cuda/check.h"
#include "helicore/core/cuda/elements.cuh"
#include "helicore/core/softmax_stats.h"

namespace helicore::attention::cuda {
namespace {

constexpr int kMergeThreads = 128;
constexpr int kMergeSplitThreads = 256;
constexpr int kFewSplits = 8;
constexpr int kFewSplitsRank = 512;

// 0 unless `wanted`. A predicate and no branch, so that several loads are under way together.
__device__ inline float4 load_if(bool wanted, const float* p) {
  float4 x = {0.0f, 0.0f, 0.0f, 0.0f};
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.b32 wanted, %5, 0;\n"
      "@wanted ld.global.v4.f32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "+f"(x.x), "+f"(x.y), "+f"(x.z), "+f"(x.w)
      : "l"(__cvta_generic_to_global(p)), "r"(static_cast<int>(wanted)));
  return x;
}

__device__ inline void store_float4(float* p, float4 x) { *reinterpret_cast<float4*>(p) = x; }
__device__ inline void store_float4(__nv_bfloat16* p, float4 x) {
  *reinterpret_cast<uint2*>(p) = {pack_bf16(x.x, x.y), pack_bf16(x.z, x.w)};
}

// The first warp turns the (m, l) of a row's splits into weights of the partials; returns the
// merged (m, l) in every lane. A partial that saw nothing gets weight 0.
__device__ inline float2 split_weights(const float* stats, int64_t num_rows, int num_splits,
                                       float* weight) {
  const int lane = threadIdx.x;
  float2 own[kMaxSplits / kWarpSize];
  float m = -INFINITY;
#pragma unroll
  for (int i = 0; i < kMaxSplits / kWarpSize; ++i) {
    const int s = lane + i * kWarpSize;
    own[i] = {-INFINITY, 0.0f};
    if (s < num_splits) own[i] = *reinterpret_cast<const float2*>(stats + s * num_rows * 2);
    if (own[i].y > 0.0f) m = fmaxf(m, own[i].x);
  }
  for (int o = kWarpSize / 2; o > 0; o /= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, o));
  float l = 0.0f;
#pragma unroll
  for (int i = 0; i < kMaxSplits / kWarpSize; ++i) {
    const float w = own[i].y > 0.0f ? own[i].y * exp2f(own[i].x - m) : 0.0f;
    weight[lane + i * kWarpSize] = w;
    l += w;
  }
  return {m, warp_sum(l)};
}

// Threads that share the splits of four columns: enough for a few independent loads each.
__host__ __device__ inline int split_lanes(int num_splits) {
  int lanes = 2;
  while (lanes < 32 && lanes * 4 < num_splits) lanes *= 2;
  return lanes;
}

// A block serves 256 / lanes four-column groups of one (token, head) row. The order of the sums
// depends on num_splits alone.
template <typename QT>
__global__ void __launch_bounds__(kMergeSplitThreads)
    merge_splits_kernel(const __grid_constant__ MlaDecodeParams p,
                        const __grid_constant__ SplitOutput partial) {
  __shared__ float weight[kMaxSplits];
  __shared__ float merged_l;
  __shared__ float4 sums[kMergeSplitThreads];
  const int rank = p.cache.kv_lora_rank;
  const int64_t row = blockIdx.x;
  const int64_t num_rows = p.num_tokens * p.num_heads;
#if __CUDA_ARCH__ >= 900
  wait_for_previous_kernel();
#endif
  if (threadIdx.x < kWarpSize) {
    const float2 merged =
        split_weights(partial.stats + row * 2, num_rows, partial.num_splits, weight);
    if (threadIdx.x == 0) {
      merged_l = merged.y;
      if (p.stats != nullptr && blockIdx.y == 0) {
        p.stats[row * 2] = merged.x;
        p.stats[row * 2 + 1] = merged.y;
      }
    }
  }
  __syncthreads();
  const int lanes = split_lanes(partial.num_splits);
  const int quads = kMergeSplitThreads / lanes;
  const int lane = threadIdx.x / quads;
  const int column =
      (static_cast<int>(blockIdx.y) * quads + static_cast<int>(threadIdx.x) % quads) * 4;
  float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
  if (column < rank) {
    const float* const o = partial.o + row * rank + column;
#pragma unroll 4
    for (int s = lane; s < partial.num_splits; s += lanes) {
      const float w = weight[s];
      float4 x = {0.0f, 0.0f, 0.0f, 0.0f};  // a partial of weight 0 is never read
      if (w != 0.0f) x = *reinterpret_cast<const float4*>(o + s * num_rows * rank);
      sum.x = fmaf(w, x.x, sum.x);
      sum.y = fmaf(w, x.y, sum.y);
      sum.z = fmaf(w, x.z, sum.z);
      sum.w = fmaf(w, x.w, sum.w);
    }
  }
  sums[threadIdx.x] = sum;
  for (int half = lanes / 2; half > 0; half /= 2) {
    __syncthreads();
    if (lane >= half) continue;
    const float4 x = sums[threadIdx.x + half * quads];
    sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
    sums[threadIdx.x] = sum;
  }
  if (lane != 0 || column >= rank) return;
  const float inv = merged_l > 0.0f ? 1.0f / merged_l : 0.0f;
  QT* out = static_cast<QT*>(p.out) + row * rank + column;
  store_float(out, sum.x * inv);
  store_float(out + 1, sum.y * inv);
  store_float(out + 2, sum.z * inv);
  store_float(out + 3, sum.w * inv);
}

// The same for few splits and R = 512: a warp serves a row and waits for two reads, statistics and
// partials.
template <typename QT>
__global__ void __launch_bounds__(kMergeSplitThreads)
    merge_few_splits_kernel(const __grid_constant__ MlaDecodeParams p,
                            const __grid_constant__ SplitOutput partial) {
  constexpr int kQuads = kFewSplitsRank / 4 / kWarpSize;  // of a lane
  const int64_t num_rows = p.num_tokens * p.num_heads;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int64_t row =
      static_cast<int64_t>(blockIdx.x) * (kMergeSplitThreads / kWarpSize) + threadIdx.x / kWarpSize;
#if __CUDA_ARCH__ >= 900
  wait_for_previous_kernel();
#endif
  if (row >= num_rows) return;
  float2 own = {-INFINITY, 0.0f};  // of split `lane`
  if (lane < partial.num_splits) {
    own = *reinterpret_cast<const float2*>(partial.stats + (lane * num_rows + row) * 2);
  }
  float m = own.y > 0.0f ? own.x : -INFINITY;
  for (int o = kWarpSize / 2; o > 0; o /= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, o));
  const float own_weight = own.y > 0.0f ? own.y * exp2f(own.x - m) : 0.0f;
  const float l = warp_sum(own_weight);
  float4 x[kFewSplits][kQuads];
#pragma unroll
  for (int s = 0; s < kFewSplits; ++s) {
    const float w = __shfl_sync(0xffffffffu, own_weight, s);
    const float* const o = partial.o + (s * num_rows + row) * kFewSplitsRank + lane * 4;
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      x[s][j] = load_if(w != 0.0f, o + j * kWarpSize * 4);  // a partial of weight 0 is never read
    }
  }
  float4 sum[kQuads] = {};
#pragma unroll
  for (int s = 0; s < kFewSplits; ++s) {
    const float w = __shfl_sync(0xffffffffu, own_weight, s);
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      sum[j] = {fmaf(w, x[s][j].x, sum[j].x), fmaf(w, x[s][j].y, sum[j].y),
                fmaf(w, x[s][j].z, sum[j].z), fmaf(w, x[s][j].w, sum[j].w)};
    }
  }
  const float inv = l > 0.0f ? 1.0f / l : 0.0f;
  QT* const out = static_cast<QT*>(p.out) + row * kFewSplitsRank + lane * 4;
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
    store_float4(out + j * kWarpSize * 4,
                 {sum[j].x * inv, sum[j].y * inv, sum[j].z * inv, sum[j].w * inv});
  }
  if (lane == 0 && p.stats != nullptr) {
    p.stats[row * 2] = m;
    p.stats[row * 2 + 1] = l;
  }
}

template <typename T>
__global__ void __launch_bounds__(kMergeThreads)
    merge_states_kernel(const __grid_constant__ MergeStatesParams p) {
  const int64_t row = blockIdx.x;
  const SoftmaxStats a{p.stats_a[row * 2], p.stats_a[row * 2 + 1]};
  const SoftmaxStats b{p.stats_b[row * 2], p.stats_b[row * 2 + 1]};
  const bool has_a = a.l > 0.0f;
  const bool has_b = b.l > 0.0f;
  const float m = has_a && has_b ? fmaxf(a.m, b.m) : has_a ? a.m : has_b ? b.m : -INFINITY;
  const float wa = has_a ? a.l * exp2f(a.m - m) : 0.0f;
  const float wb = has_b ? b.l * exp2f(b.m - m) : 0.0f;
  const float l = wa + wb;
  for (int64_t i = threadIdx.x; i < p.width; i += kMergeThreads) {
    const int64_t at = row * p.width + i;
    float sum = 0.0f;
    if (wa != 0.0f) sum += wa / l * load_as_float(static_cast<const T*>(p.o_a) + at);
    if (wb != 0.0f) sum += wb / l * load_as_float(static_cast<const T*>(p.o_b) + at);
    store_float(static_cast<T*>(p.out) + at, sum);
  }
  __syncthreads();  // stats may alias an input
  if (threadIdx.x == 0 && p.stats != nullptr) {
    p.stats[row * 2] = m;
    p.stats[row * 2 + 1] = l;
  }
}

}  // namespace

void merge_splits(const MlaDecodeParams& params, const SplitOutput& partial, Stream stream) {
  const int64_t num_rows = params.num_tokens * params.num_heads;
  const bool few = partial.num_splits <= kFewSplits && params.cache.kv_lora_rank == kFewSplitsRank;
  const int quads = kMergeSplitThreads / split_lanes(partial.num_splits);
  constexpr int kRowsOfBlock = kMergeSplitThreads / kWarpSize;
  cudaLaunchAttribute early = {};  // blocks may start while the decode kernel ends
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim =
      few ? dim3(static_cast<unsigned>((num_rows + kRowsOfBlock - 1) / kRowsOfBlock))
          : dim3(static_cast<unsigned>(num_rows),
                 static_cast<unsigned>((params.cache.kv_lora_rank / 4 + quads - 1) / quads));
  config.blockDim = dim3(kMergeSplitThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &early;
  config.numAttrs = 1;
  dispatch_float(params.q_dtype, "q", [&](auto element) {
    using T = decltype(element);
    helicore::cuda::check(
        few ? cudaLaunchKernelEx(&config, merge_few_splits_kernel<T>, params, partial)
            : cudaLaunchKernelEx(&config, merge_splits_kernel<T>, params, partial),
        "merge_splits_kernel");
  });
}

void launch_merge_states(const MergeStatesParams& params, Stream stream) {
  if (params.num_rows == 0) return;
  dispatch_float(params.dtype, "o", [&](auto element) {
    merge_states_kernel<decltype(element)><<<static_cast<unsigned>(params.num_rows), kMergeThreads,
                                             0, static_cast<cudaStream_t>(stream)>>>(params);
  });
  helicore::cuda::check_launch("merge_states_kernel");
}

}  // namespace helicore::attention::cuda
