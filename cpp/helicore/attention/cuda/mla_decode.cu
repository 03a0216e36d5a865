// Portable absorbed decode over the paged latents (sm_80 and up, any widths): split-KV with a
// second launch that merges.
//
// A block serves one query token, a tile of heads and one split. It streams tiles of latent rows
// through shared memory; the row serves as key (all E columns) and as value (first R columns).
// Split boundaries come from the row's own length, partials are merged in ascending order.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "helicore/attention/cuda/common.cuh"
#include "helicore/attention/cuda/decode_dispatch.h"
#include "helicore/attention/cuda/formats.cuh"
#include "helicore/attention/cuda/mla_cuda.h"
#include "helicore/attention/cuda/ranges.cuh"
#include "helicore/core/cuda/check.h"
#include "helicore/core/cuda/elements.cuh"
#include "helicore/core/softmax_stats.h"

namespace helicore::attention::cuda {
namespace {

constexpr int kHeadTile = 8;                            // heads of a block
constexpr int kTokenTile = 16;                          // latent rows in shared memory at a time
constexpr int kDecodeThreads = kHeadTile * kTokenTile;  // one score a thread

// Rows are padded to an odd count of 16-byte units, so that a column of rows hits different banks.
__host__ __device__ inline int row_stride(int width) { return ((width / 4) | 1) * 4; }

struct SharedLayout {
  int stride;  // of q and latent rows, in floats
  int q, kv, acc, p, corr, total;

  __host__ __device__ SharedLayout(int rank, int width) : stride(row_stride(width)) {
    q = 0;
    kv = q + kHeadTile * stride;
    acc = kv + kTokenTile * stride;
    p = acc + kHeadTile * rank;
    corr = p + kHeadTile * kTokenTile;
    total = corr + 2 * kHeadTile;  // rescale factors, final 1/l
  }
};

template <typename CT>
__device__ inline void load_tile(const MlaDecodeParams& p, const int32_t* pages, int begin, int end,
                                 float* kv, int stride) {
  const int width = cache_width(p.cache);
  for (int j = threadIdx.x / kWarpSize; j < kTokenTile; j += kDecodeThreads / kWarpSize) {
    const int token = begin + j;
    float* row = kv + j * stride;
    if (token >= end) {  // rows past the range are zero: 0 * NaN of an unused row must not happen
      for (int d = threadIdx.x % kWarpSize; d < width; d += kWarpSize) row[d] = 0.0f;
      continue;
    }
    const int64_t page = pages[token / p.cache.page_size];
    const int64_t offset = token % p.cache.page_size;
    if constexpr (std::is_same_v<CT, CodedRow>) {
      const CodedRow src = coded_row(p.cache, page, offset);
      for (int d = threadIdx.x % kWarpSize; d < width; d += kWarpSize) {
        row[d] = coded_value(p.cache, src, d);
      }
    } else {
      const CT* src =
          static_cast<const CT*>(p.cache.data) + page * p.cache.page_stride + offset * width;
      for (int d = threadIdx.x % kWarpSize; d < width; d += kWarpSize) {
        row[d] = load_as_float(src + d);
      }
    }
  }
}

__device__ inline float dot(const float* a, const float* b, int width) {
  float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int d = 0; d < width; d += 4) {
    const float4 x = *reinterpret_cast<const float4*>(a + d);
    const float4 y = *reinterpret_cast<const float4*>(b + d);
    sum.x = fmaf(x.x, y.x, sum.x);
    sum.y = fmaf(x.y, y.y, sum.y);
    sum.z = fmaf(x.z, y.z, sum.z);
    sum.w = fmaf(x.w, y.w, sum.w);
  }
  return (sum.x + sum.y) + (sum.z + sum.w);
}

// acc[h][r] = acc[h][r] * corr[h] + sum_j p[h][j] kv[j][r]
__device__ inline void accumulate(float* acc, const float* prob, const float* corr, const float* kv,
                                  int rank, int stride) {
  const int quads = rank / 4;
  for (int i = threadIdx.x; i < kHeadTile * quads; i += kDecodeThreads) {
    const int h = i / quads;
    const int r = i % quads * 4;
    float4 a = *reinterpret_cast<float4*>(acc + h * rank + r);
    const float c = corr[h];
    a = {a.x * c, a.y * c, a.z * c, a.w * c};
    for (int j = 0; j < kTokenTile; ++j) {
      const float w = prob[h * kTokenTile + j];
      const float4 v = *reinterpret_cast<const float4*>(kv + j * stride + r);
      a.x = fmaf(w, v.x, a.x);
      a.y = fmaf(w, v.y, a.y);
      a.z = fmaf(w, v.z, a.z);
      a.w = fmaf(w, v.w, a.w);
    }
    *reinterpret_cast<float4*>(acc + h * rank + r) = a;
  }
}

template <typename QT, typename CT>
__global__ void __launch_bounds__(kDecodeThreads)
    mla_decode_kernel(const __grid_constant__ MlaDecodeParams p,
                      const __grid_constant__ SplitOutput partial) {
  extern __shared__ float4 shared[];
  float* const smem = reinterpret_cast<float*>(shared);
  const int rank = p.cache.kv_lora_rank;
  const int width = cache_width(p.cache);
  const SharedLayout at(rank, width);
  float* const q = smem + at.q;
  float* const kv = smem + at.kv;
  float* const acc = smem + at.acc;
  float* const prob = smem + at.p;
  float* const corr = smem + at.corr;

  const int64_t t = blockIdx.x;
  const int head_begin = blockIdx.y * kHeadTile;
  const int heads = min(kHeadTile, p.num_heads - head_begin);
  const int split = blockIdx.z;
  const int request = request_of(p.cu_q, p.num_requests, t);
  const int2 range =
      split_range(visible_tokens(p, request, t), split, partial.num_splits, kTokenTile);
  const int32_t* pages = p.block_table + request * p.block_table_stride;

  // Queries, scaled into base 2; heads past the end are zero.
  const QT* q_src = static_cast<const QT*>(p.q) + (t * p.num_heads + head_begin) * width;
  for (int i = threadIdx.x; i < kHeadTile * width; i += kDecodeThreads) {
    const int h = i / width;
    const float x = h < heads ? load_as_float(q_src + i) : 0.0f;
    q[h * at.stride + i % width] = x * (p.scale * kLog2E);
  }
  for (int i = threadIdx.x; i < kHeadTile * rank; i += kDecodeThreads) acc[i] = 0.0f;

  // Thread (h, j) owns one score of the tile; the kTokenTile threads of a head agree on its running
  // m and l.
  const int h = threadIdx.x / kTokenTile;
  const int j = threadIdx.x % kTokenTile;
  float m = -INFINITY;
  float l = 0.0f;
  for (int begin = range.x; begin < range.y; begin += kTokenTile) {
    __syncthreads();  // the last tile's values are used up, q is written
    load_tile<CT>(p, pages, begin, range.y, kv, at.stride);
    __syncthreads();
    float s = begin + j < range.y ? dot(q + h * at.stride, kv + j * at.stride, width) : -INFINITY;
    float tile_max = s;
    for (int o = kTokenTile / 2; o > 0; o /= 2) {
      tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffffu, tile_max, o));
    }
    const float m_new = fmaxf(m, tile_max);
    const float w = s == -INFINITY ? 0.0f : exp2f(s - m_new);
    float tile_sum = w;
    for (int o = kTokenTile / 2; o > 0; o /= 2) {
      tile_sum += __shfl_xor_sync(0xffffffffu, tile_sum, o);
    }
    const float c = m == -INFINITY ? 0.0f : exp2f(m - m_new);
    l = l * c + tile_sum;
    m = m_new;
    prob[h * kTokenTile + j] = w;
    if (j == 0) corr[h] = c;
    __syncthreads();
    accumulate(acc, prob, corr, kv, rank, at.stride);
  }

  if (j == 0) corr[kHeadTile + h] = l > 0.0f ? 1.0f / l : 0.0f;
  __syncthreads();
  const int64_t row0 = (split * p.num_tokens + t) * p.num_heads + head_begin;
  float* const stats = partial.num_splits > 1 ? partial.stats : p.stats;
  if (j == 0 && h < heads && stats != nullptr) {
    stats[(row0 + h) * 2] = m;
    stats[(row0 + h) * 2 + 1] = l;
  }
  for (int i = threadIdx.x; i < heads * rank; i += kDecodeThreads) {
    const float value = acc[i] * corr[kHeadTile + i / rank];
    if (partial.num_splits > 1) {
      partial.o[row0 * rank + i] = value;
    } else {
      store_float(static_cast<QT*>(p.out) + row0 * rank + i, value);
    }
  }
}

bool supports_any(const MlaDecodeParams&, const DecodeDevice&, bool) { return true; }

int64_t portable_splits(const MlaDecodeParams& params, int64_t max_kv_len,
                        const DecodeDevice& device) {
  const int64_t blocks = params.num_tokens * ((params.num_heads + kHeadTile - 1) / kHeadTile);
  const int64_t useful = std::max<int64_t>(1, max_kv_len / (4 * kTokenTile));
  return std::min((2 * device.num_sms + blocks - 1) / blocks, useful);
}

// Calls fn(T{}) with the element type of the cache, CodedRow for a quantised one.
template <typename Fn>
void dispatch_cache(const MlaCache& cache, Fn&& fn) {
  if (cache.format != CacheFormat::kDense) return fn(CodedRow{});
  dispatch_float(cache.dtype, "cache", fn);
}

void run_portable(const MlaDecodeParams& params, const SplitOutput& partial, Stream stream) {
  const SharedLayout layout(params.cache.kv_lora_rank, static_cast<int>(params.cache.width()));
  const size_t shared_bytes = static_cast<size_t>(layout.total) * sizeof(float);
  // Tokens go to x, whose limit is 2^31 - 1; heads and splits are far below the 65,535 of y and z.
  const dim3 grid(static_cast<unsigned>(params.num_tokens),
                  static_cast<unsigned>((params.num_heads + kHeadTile - 1) / kHeadTile),
                  static_cast<unsigned>(partial.num_splits));
  dispatch_float(params.q_dtype, "q", [&](auto q) {
    dispatch_cache(params.cache, [&](auto c) {
      auto* kernel = mla_decode_kernel<decltype(q), decltype(c)>;
      helicore::cuda::check(
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared_bytes)),
          "shared memory for mla_decode_kernel");
      kernel<<<grid, kDecodeThreads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(params,
                                                                                        partial);
    });
  });
  helicore::cuda::check_launch("mla_decode_kernel");
}

}  // namespace

const DecodeKernel kPortableDecode = {"portable", supports_any, portable_splits, run_portable};

}  // namespace helicore::attention::cuda
