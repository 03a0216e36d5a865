// Rows of quantised caches (attention/cache_format.h): append, which quantises from float32, and
// gather, which gives rows of one request back as elements.
#include <cuda_runtime.h>

#include <cmath>

#include "helicore/attention/cuda/common.cuh"
#include "helicore/attention/cuda/formats.cuh"
#include "helicore/attention/cuda/mla_cuda.h"
#include "helicore/core/cuda/check.h"

namespace helicore::attention::cuda {
namespace {

constexpr int kThreads = 128;
constexpr float kLargestInput = 0x1p127f;  // of a group's largest magnitude
constexpr float kLeastGroupMax = 1e-4f;    // of the groups of fp8_ds_mla

__device__ inline float warp_max(float x) {
  for (int o = kWarpSize / 2; o > 0; o /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, o));
  return x;
}

// 1 / sqrt(mean(x^2) + eps) over the block, or 1 without a weight.
template <typename In>
__device__ inline float norm_factor(const In* row, int rank, float eps, bool has_weight) {
  if (!has_weight) return 1.0f;
  __shared__ float partial[kThreads / kWarpSize];
  float sum = 0.0f;
  for (int i = threadIdx.x; i < rank; i += kThreads) {
    const float x = load_as_float(row + i);
    sum += x * x;
  }
  sum = warp_sum(sum);
  if (threadIdx.x % kWarpSize == 0) partial[threadIdx.x / kWarpSize] = sum;
  __syncthreads();
  sum = 0.0f;
  for (int w = 0; w < kThreads / kWarpSize; ++w) sum += partial[w];
  return 1.0f / sqrtf(sum / static_cast<float>(rank) + eps);
}

__device__ inline void put_fp8(const float* values, int count, float inverse, uint8_t* codes) {
  for (int i = threadIdx.x; i < count; i += kThreads) codes[i] = encode_e4m3(values[i] * inverse);
}

// A warp serves a group of 128 values: the least power of two under which none is out of range.
__device__ inline void put_fp8_groups(const float* values, int rank, uint8_t* codes,
                                      float* scales) {
  constexpr int kGroup = static_cast<int>(kFp8DsMlaGroup);
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  for (int g = threadIdx.x / kWarpSize; g < rank / kGroup; g += kThreads / kWarpSize) {
    float most = 0.0f;
    for (int i = lane; i < kGroup; i += kWarpSize)
      most = fmaxf(most, fabsf(values[g * kGroup + i]));
    most = fminf(warp_max(most), kLargestInput);
    const float wanted = fmaxf(most, kLeastGroupMax) / 448.0f;
    const float scale = __uint_as_float((__float_as_uint(wanted) + 0x7fffffu) & 0x7f800000u);
    const float inverse = 1.0f / scale;
    for (int i = lane; i < kGroup; i += kWarpSize) {
      codes[g * kGroup + i] = encode_e4m3(values[g * kGroup + i] * inverse);
    }
    if (lane == 0) scales[g] = scale;
  }
}

// A thread serves a group of 16 values.
__device__ inline void put_nvfp4(const float* values, int rank, float scale, uint8_t* codes,
                                 uint8_t* scales) {
  constexpr int kGroup = static_cast<int>(kNvFp4Group);
  for (int g = threadIdx.x; g < rank / kGroup; g += kThreads) {
    const float* const x = values + g * kGroup;
    float most = 0.0f;
    for (int i = 0; i < kGroup; ++i) most = fmaxf(most, fabsf(x[i]));
    const uint8_t code = encode_e4m3(fminf(most, kLargestInput) / 6.0f / scale);
    const float inverse = code == 0 ? 0.0f : 1.0f / (decode_e4m3(code) * scale);
    scales[g] = code;
    for (int i = 0; i < kGroup; i += 2) {
      codes[(g * kGroup + i) / 2] =
          static_cast<uint8_t>(encode_e2m1(x[i] * inverse) | encode_e2m1(x[i + 1] * inverse) << 4);
    }
  }
}

// One block a token. Values are made in shared memory, then quantised.
template <typename In, typename Weight>
__global__ void __launch_bounds__(kThreads)
    append_coded_kernel(const __grid_constant__ MlaAppendParams p) {
  extern __shared__ float values[];  // [R + dr]
  const int64_t token = blockIdx.x;
  const int64_t slot = p.slots[token];
  if (slot < 0) return;
  const MlaCache& cache = p.cache;
  const int rank = cache.kv_lora_rank;
  const In* const row = static_cast<const In*>(p.kv_a) + token * p.kv_a_stride;
  const Weight* const weight = static_cast<const Weight*>(p.norm_weight);
  const float factor = norm_factor(row, rank, p.eps, weight != nullptr);
  for (int i = threadIdx.x; i < rank; i += kThreads) {
    const float x = load_as_float(row + i);
    values[i] = weight == nullptr ? x : x * factor * load_as_float(weight + i);
  }
  const int half = cache.rope_dim / 2;
  for (int i = threadIdx.x; i < half; i += kThreads) {
    const float2 r = rotate_pair(row + rank, i, p.rope, p.positions[token]);
    values[rank + i] = r.x;
    values[rank + half + i] = r.y;
  }
  __syncthreads();
  const CodedRow to = coded_row(cache, slot / cache.page_size, slot % cache.page_size);
  auto* const codes = const_cast<uint8_t*>(to.codes);
  auto* const scales = const_cast<uint8_t*>(to.scales);
  if (cache.format == CacheFormat::kFp8) {
    return put_fp8(values, cache_width(cache), 1.0f / cache.scale, codes);
  }
  if (cache.format == CacheFormat::kFp8DsMla) {
    put_fp8_groups(values, rank, codes, reinterpret_cast<float*>(scales));
  } else {
    put_nvfp4(values, rank, cache.scale, codes, scales);
  }
  auto* const rope = reinterpret_cast<__nv_bfloat16*>(const_cast<uint8_t*>(to.rope));
  for (int i = threadIdx.x; i < cache.rope_dim; i += kThreads)
    store_float(rope + i, values[rank + i]);
}

template <typename Out>
__global__ void __launch_bounds__(kThreads)
    gather_rows_kernel(const __grid_constant__ MlaCache cache, const int32_t* pages, Out* out) {
  const int64_t token = blockIdx.x;
  const int width = cache_width(cache);
  const CodedRow row = coded_row(cache, pages[token / cache.page_size], token % cache.page_size);
  for (int d = threadIdx.x; d < width; d += kThreads) {
    store_float(out + token * width + d, coded_value(cache, row, d));
  }
}

}  // namespace

void launch_append_coded(const MlaAppendParams& params, Stream stream) {
  const size_t shared = static_cast<size_t>(params.cache.width()) * sizeof(float);
  dispatch_float(params.kv_a_dtype, "kv_a", [&](auto in) {
    dispatch_float(params.norm_dtype, "norm_weight", [&](auto weight) {
      append_coded_kernel<decltype(in), decltype(weight)>
          <<<static_cast<unsigned>(params.num_tokens), kThreads, shared,
             static_cast<cudaStream_t>(stream)>>>(params);
    });
  });
  helicore::cuda::check_launch("append_coded_kernel");
}

void launch_gather_rows(const GatherRowsParams& params, Stream stream) {
  if (params.num_tokens == 0) return;
  dispatch_float(params.out_dtype, "out", [&](auto element) {
    using T = decltype(element);
    gather_rows_kernel<<<static_cast<unsigned>(params.num_tokens), kThreads, 0,
                         static_cast<cudaStream_t>(stream)>>>(params.cache, params.pages,
                                                              static_cast<T*>(params.out));
  });
  helicore::cuda::check_launch("gather_rows_kernel");
}

}  // namespace helicore::attention::cuda
