// The row epilogue of quant/norm_epilogue.h on a GPU: a row is held in the registers of a block, or
// of the blocks of a cluster. Kernels differ in where a row comes from. CUDA sources only.
//
// A packet is 16 bytes of a row. Of blocks of N threads, thread i of block c holds packets c N + i,
// or, without a cluster, i, N + i, ... Roundings are those of the CPU; the sum of squares has
// another order. One multiprocessor is short of instruction slots, not of bandwidth, with a row to
// itself: values are rounded in pairs, and few rows are spread over clusters.
#pragma once

#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "helicore/core/cuda/elements.cuh"
#include "helicore/quant/cuda/codes.cuh"
#include "helicore/quant/cuda/epilogue_params.h"
#include "helicore/quant/formats.h"
#include "helicore/quant/row_quantize.h"

namespace helicore::quant::cuda {

using helicore::cuda::kWarpSize;

inline constexpr int kMaxThreads = 1024;
inline constexpr int kMaxWarps = kMaxThreads / kWarpSize;

// Threads of a block at most, by the packets that one holds.
template <int kPackets>
inline constexpr int kRowThreads = kPackets == 8 ? kMaxThreads / 2 : kMaxThreads;

template <typename T>
inline constexpr int kPacketSize = 16 / static_cast<int>(sizeof(T));  // elements

// Values of a packet as stored, and back. Values have the precision of T already.
__device__ inline void unpack(const uint4& bits, float (&v)[4]) {
  v[0] = __uint_as_float(bits.x);
  v[1] = __uint_as_float(bits.y);
  v[2] = __uint_as_float(bits.z);
  v[3] = __uint_as_float(bits.w);
}
__device__ inline void unpack(const uint4& bits, float (&v)[8]) {
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[2 * i] = __uint_as_float(words[i] << 16);
    v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}
__device__ inline uint4 pack(const float (&v)[4]) {
  return {__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
          __float_as_uint(v[3])};
}
__device__ inline uint4 pack(const float (&v)[8]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
    words[i] = *reinterpret_cast<const uint32_t*>(&pair);
  }
  return {words[0], words[1], words[2], words[3]};
}

// Rounds to T: the packet that is stored, and v as a reader of it sees it.
template <int kSize>
__device__ inline uint4 round_packet(float (&v)[kSize]) {
  const uint4 bits = pack(v);
  unpack(bits, v);
  return bits;
}

// Packet j of a row of `width` elements, zeros past its end. kWhole: the row consists of whole,
// aligned packets.
template <bool kWhole, typename T>
__device__ inline uint4 load_packet(const T* row, int j, int width) {
  constexpr int kSize = kPacketSize<T>;
  if (j * kSize >= width) return {0, 0, 0, 0};
  if constexpr (kWhole) {
    return *reinterpret_cast<const uint4*>(row + j * kSize);
  } else {
    float v[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const int at = j * kSize + i;
      v[i] = at < width ? helicore::cuda::load_as_float(row + at) : 0.0f;
    }
    return pack(v);
  }
}

template <bool kWhole, typename T>
__device__ inline void store_packet(T* row, int j, int width, const uint4& bits) {
  constexpr int kSize = kPacketSize<T>;
  if (j * kSize >= width) return;
  if constexpr (kWhole) {
    *reinterpret_cast<uint4*>(row + j * kSize) = bits;
  } else {
    float v[kSize];
    unpack(bits, v);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (j * kSize + i < width) helicore::cuda::store_float(row + j * kSize + i, v[i]);
    }
  }
}

// Shared memory of a row: what its warps found, those of a cluster's other blocks included. Rows
// take turns: a block may write the next row's before another has read this one's.
struct RowShared {
  float sums[2][kMaxWarps];
  float maxima[2][kMaxWarps];
};

template <int kLanes>
__device__ inline float max_of_lanes(float x) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  }
  return x;
}

struct Sum {
  __device__ static float warp(float x) { return helicore::cuda::warp_sum(x); }
};
struct Max {
  __device__ static float warp(float x) { return max_of_lanes<kWarpSize>(x); }
};

// Blocks of a cluster may write to each other's shared memory once all of them run: every thread
// says so first, and waits for the rest before the first over_row().
__device__ inline void enter_cluster(int cluster) {
  if (cluster > 1) asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
__device__ inline void await_cluster(int cluster) {
  if (cluster > 1) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// The sum or maximum of x >= 0 over a row, the same in every thread. `shared` is of the row's turn.
// The order is that of the warps of the row, in however many blocks they are.
template <typename Op>
__device__ inline float over_row(float x, float* shared, int cluster) {
  x = Op::warp(x);
  const unsigned lane = threadIdx.x % kWarpSize;
  const unsigned warps = blockDim.x / kWarpSize;
  unsigned warp = threadIdx.x / kWarpSize;
  if (cluster == 1) {
    if (lane == 0) shared[warp] = x;
    __syncthreads();
  } else {
    const auto blocks = cooperative_groups::this_cluster();
    warp += blocks.block_rank() * warps;
    if (lane < static_cast<unsigned>(cluster)) blocks.map_shared_rank(shared, lane)[warp] = x;
    blocks.sync();
  }
  return Op::warp(lane < warps * cluster ? shared[lane] : 0.0f);
}

// NaN is not counted.
template <int kSize>
__device__ inline float largest_of(const float (&v)[kSize]) {
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < kSize; ++i) most = fmaxf(most, fabsf(v[i]));
  return most;
}

// Two codes, `a` in the low byte; NaN gives NaN, out of range saturates.
__device__ inline uint32_t encode_fp8x2(float a, float b) {
  return __nv_cvt_float2_to_fp8x2({a, b}, __NV_SATFINITE, __NV_E4M3);
}

// Biased exponent of the least power of two that is not below `value`, and the inverse of it.
__device__ inline uint32_t exponent_up(float value) {
  const uint32_t bits = __float_as_uint(value);
  return min((bits >> 23) + ((bits & 0x7fffffu) != 0 ? 1u : 0u), 254u);
}
__device__ inline float inverse_power(uint32_t exponent) {
  return exponent == 254 ? 0x1p-127f : __uint_as_float((254 - exponent) << 23);
}

// `kSize` codes of one byte at `to`, those past the end of the row left out.
template <bool kWhole, int kSize>
__device__ inline void store_fp8(uint8_t* to, const float (&v)[kSize], float inverse, int valid) {
  uint32_t words[kSize / 4];
#pragma unroll
  for (int i = 0; i < kSize / 4; ++i) {
    words[i] = encode_fp8x2(v[4 * i] * inverse, v[4 * i + 1] * inverse) |
               encode_fp8x2(v[4 * i + 2] * inverse, v[4 * i + 3] * inverse) << 16;
  }
  if constexpr (kWhole) {
    if constexpr (kSize == 8) {
      *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
    } else {
      *reinterpret_cast<uint32_t*>(to) = words[0];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (i < valid) to[i] = static_cast<uint8_t>(words[i / 4] >> (i % 4 * 8));
    }
  }
}

// Two codes a byte; kSize is even, and so is a row's end.
template <int kSize>
__device__ inline void store_fp4(uint8_t* to, const float (&v)[kSize], float inverse, int valid) {
#pragma unroll
  for (int i = 0; i < kSize; i += 2) {
    if (i >= valid) return;
    to[i / 2] =
        static_cast<uint8_t>(encode_e2m1(v[i] * inverse) | encode_e2m1(v[i + 1] * inverse) << 4);
  }
}

// Where the scale of a group lies: a byte of byte scales, else an element.
__device__ inline int64_t scale_index(const EpilogueParams& p, int64_t row, int group) {
  if (p.layout == ScaleLayout::kSwizzled) {
    const int64_t tile = row / 128 * ((p.num_groups + 3) / 4) + group / 4;
    return tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + group % 4;
  }
  if (p.format == RowFormat::kFp8GroupPacked) return (row + group / 4 * p.scale_ld) * 4 + group % 4;
  return p.layout == ScaleLayout::kColumns ? row + group * p.scale_ld : row * p.num_groups + group;
}

// True for an element of the scales (byte of packed ones) that belongs to no row or no group.
__device__ inline bool is_padding(const EpilogueParams& p, int64_t element) {
  if (p.layout == ScaleLayout::kSwizzled) {
    const int64_t tile = element / 512;
    const int in_tile = static_cast<int>(element % 512);
    const int64_t tiles = (p.num_groups + 3) / 4;
    const int64_t row = tile / tiles * 128 + in_tile / 16 + in_tile % 16 / 4 * 32;
    return row >= p.num_rows || tile % tiles * 4 + in_tile % 4 >= p.num_groups;
  }
  if (p.layout == ScaleLayout::kRows) return false;
  const bool is_packed = p.format == RowFormat::kFp8GroupPacked;
  const int64_t word = is_packed ? element / 4 : element;
  const int64_t group = is_packed ? word / p.scale_ld * 4 + element % 4 : word / p.scale_ld;
  return word % p.scale_ld >= p.num_rows || group >= p.num_groups;
}

// Zeros in the padding; the threads of all blocks of a call.
__device__ inline void clear_padding(const EpilogueParams& p, int block, int num_blocks) {
  if (!p.has_padding) return;
  const int64_t step = int64_t{num_blocks} * blockDim.x;
  for (int64_t i = int64_t{block} * blockDim.x + threadIdx.x; i < p.num_scales; i += step) {
    if (!is_padding(p, i)) continue;
    if (p.has_byte_scales) {
      static_cast<uint8_t*>(p.scales)[i] = 0;
    } else {
      static_cast<float*>(p.scales)[i] = 0.0f;
    }
  }
}

// One row in the registers of a block. All its threads call the same functions.
template <typename T, int kPackets, bool kWhole>
struct Row {
  static constexpr int kSize = kPacketSize<T>;
  static constexpr bool kFetchesEarly = kPackets <= 2;  // else there are no registers for it
  float v[kPackets][kSize];
  int thread;
  int cluster = 1;  // blocks of the row
  int first = 0;    // packet of the block
  int turn = 0;     // 0 or 1, from row to row
  uint4 residual[kFetchesEarly ? kPackets : 1];
  uint4 weight[kFetchesEarly ? kPackets : 1];

  // The compiler must not see that the thread is the same in every row: it would keep what it
  // computes from it in more registers than there are.
  __device__ Row() : thread(static_cast<int>(threadIdx.x)) { asm volatile("" : "+r"(thread)); }

  __device__ int packet(int k) const { return first + k * static_cast<int>(blockDim.x) + thread; }

  // Starts to read what a row needs besides its sums.
  __device__ void fetch(const EpilogueParams& p, int64_t row) {
    if constexpr (kFetchesEarly) {
#pragma unroll
      for (int k = 0; k < kPackets; ++k) {
        if (p.residual != nullptr) residual[k] = load_residual(p, row, k);
        weight[k] = load_weight(p, k);
      }
    }
  }
  __device__ uint4 load_residual(const EpilogueParams& p, int64_t row, int k) const {
    return load_packet<kWhole>(static_cast<const T*>(p.residual) + row * p.width, packet(k),
                               p.width);
  }
  __device__ uint4 load_weight(const EpilogueParams& p, int k) const {
    return load_packet<kWhole>(static_cast<const T*>(p.weight), packet(k), p.width);
  }

  // v, sums that were rounded to T, becomes what the epilogue writes to `norm`.
  __device__ void normalise(const EpilogueParams& p, int64_t row, RowShared& shared) {
    const int64_t begin = row * p.width;
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < kPackets; ++k) {
      if (p.residual != nullptr) {
        float other[kSize];
        if constexpr (kFetchesEarly) {
          unpack(residual[k], other);
        } else {
          unpack(load_residual(p, row, k), other);
        }
#pragma unroll
        for (int i = 0; i < kSize; ++i) v[k][i] += other[i];
        store_packet<kWhole>(static_cast<T*>(p.residual_out) + begin, packet(k), p.width,
                             round_packet(v[k]));
      }
#pragma unroll
      for (int i = 0; i < kSize; ++i) squares += v[k][i] * v[k][i];
    }
    squares = over_row<Sum>(squares, shared.sums[turn], cluster);
    const float inverse = 1.0f / sqrtf(squares / static_cast<float>(p.width) + p.eps);
#pragma unroll
    for (int k = 0; k < kPackets; ++k) {
      float factor[kSize];
      if constexpr (kFetchesEarly) {
        unpack(weight[k], factor);
      } else {
        unpack(load_weight(p, k), factor);
      }
#pragma unroll
      for (int i = 0; i < kSize; ++i) v[k][i] = v[k][i] * inverse * factor[i];
      const uint4 bits = round_packet(v[k]);
      if (p.norm != nullptr) {
        store_packet<kWhole>(static_cast<T*>(p.norm) + begin, packet(k), p.width, bits);
      }
    }
  }

  __device__ int valid(int k, int width) const { return width - packet(k) * kSize; }

  // One scale for the row.
  __device__ void quantize_row(const EpilogueParams& p, int64_t row, RowShared& shared) const {
    float inverse = 1.0f / p.scale;
    if (p.format == RowFormat::kFp8Token) {
      float most = 0.0f;
#pragma unroll
      for (int k = 0; k < kPackets; ++k) most = fmaxf(most, largest_of(v[k]));
      most = over_row<Max>(most, shared.maxima[turn], cluster);
      most = fminf(most, kLargestInput);
      const float scale = fmaxf(most, kLeastTokenMax) / kE4M3Max;
      inverse = 1.0f / scale;
      if (packet(0) == 0) static_cast<float*>(p.scales)[row] = scale;
    }
    uint8_t* const codes = p.codes + row * p.codes_stride;
#pragma unroll
    for (int k = 0; k < kPackets; ++k) {
      const int left = valid(k, p.width);
      if (left > 0) store_fp8<kWhole>(codes + packet(k) * kSize, v[k], inverse, left);
    }
  }

  // A scale for kGroup columns: those of kLanes neighbouring threads.
  template <int kGroup, typename Encode>
  __device__ void quantize_groups(int width, Encode&& encode) const {
    constexpr int kLanes = kGroup / kSize;
#pragma unroll
    for (int k = 0; k < kPackets; ++k) {
      const float most = fminf(max_of_lanes<kLanes>(largest_of(v[k])), kLargestInput);
      if (valid(k, width) > 0) {
        encode(k, packet(k) / kLanes, packet(k) % kLanes == 0, most, valid(k, width));
      }
    }
  }

  __device__ void quantize(const EpilogueParams& p, int64_t row, RowShared& shared) const {
    uint8_t* const codes = p.codes + row * p.codes_stride;
    auto* const bytes = static_cast<uint8_t*>(p.scales);
    auto* const floats = static_cast<float*>(p.scales);
    switch (p.format) {
      case RowFormat::kFp8Tensor:
      case RowFormat::kFp8Token:
        return quantize_row(p, row, shared);
      case RowFormat::kFp8Group:
        return quantize_groups<128>(p.width, [&](int k, int group, bool leads, float most, int n) {
          const float scale = fmaxf(most, kLeastGroupMax) / kE4M3Max;
          if (leads) floats[scale_index(p, row, group)] = scale;
          store_fp8<kWhole>(codes + packet(k) * kSize, v[k], 1.0f / scale, n);
        });
      case RowFormat::kFp8GroupPacked:
        return quantize_groups<128>(p.width, [&](int k, int group, bool leads, float most, int n) {
          const uint32_t exponent = exponent_up(fmaxf(most / kE4M3Max, kLeastPackedScale));
          if (leads) bytes[scale_index(p, row, group)] = static_cast<uint8_t>(exponent);
          store_fp8<kWhole>(codes + packet(k) * kSize, v[k], inverse_power(exponent), n);
        });
      case RowFormat::kMxFp8:
        return quantize_groups<32>(p.width, [&](int k, int group, bool leads, float most, int n) {
          const uint32_t exponent = exponent_up(most / kE4M3Max);
          if (leads) bytes[scale_index(p, row, group)] = static_cast<uint8_t>(exponent);
          store_fp8<kWhole>(codes + packet(k) * kSize, v[k], inverse_power(exponent), n);
        });
      case RowFormat::kNvFp4:
        return quantize_groups<16>(p.width, [&](int k, int group, bool leads, float most, int n) {
          const uint32_t code =
              __nv_cvt_float_to_fp8(most / kE2M1Max * p.scale, __NV_SATFINITE, __NV_E4M3);
          const float value = decode_e4m3(static_cast<uint8_t>(code));
          if (leads) bytes[scale_index(p, row, group)] = static_cast<uint8_t>(code);
          store_fp4(codes + packet(k) * kSize / 2, v[k], value == 0.0f ? 0.0f : p.scale / value, n);
        });
    }
  }

  // Everything that follows fetch() and the sums of a row.
  __device__ void finish(const EpilogueParams& p, int64_t row, RowShared& shared) {
    normalise(p, row, shared);
    if (p.has_codes) quantize(p, row, shared);
  }
};

}  // namespace helicore::quant::cuda
