// Tiles of quantised rows for the few-row decode kernel (mla_decode_sm90.cu): bytes arrive in a
// ring of their own, and every tile is decoded to bfloat16 in shared memory before it is
// multiplied.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "helicore/attention/cuda/common.cuh"
#include "helicore/attention/cuda/formats.cuh"
#include "helicore/attention/cuda/mma.cuh"

namespace helicore::attention::cuda {

struct Decoded16 {
  uint4 low, high;  // 16 values as bfloat16
};

// 16 e4m3 codes times `scale`.
__device__ inline Decoded16 decode_e4m3x16(uint4 codes, float scale) {
  const auto pair = [scale](uint32_t two) {
    const float2 x = decode_e4m3x2(static_cast<uint16_t>(two));
    return pack_bf16(x.x * scale, x.y * scale);
  };
  return {{pair(codes.x), pair(codes.x >> 16), pair(codes.y), pair(codes.y >> 16)},
          {pair(codes.z), pair(codes.z >> 16), pair(codes.w), pair(codes.w >> 16)}};
}

// 16 e2m1 codes times `factor`, which has kE2M1Exponent in it.
__device__ inline Decoded16 decode_e2m1x16(uint2 codes, float factor) {
  const auto pair = [factor](uint32_t two) {
    const float2 x = decode_e2m1x2(two & 0xffu);
    return pack_bf16(x.x * factor, x.y * factor);
  };
  return {{pair(codes.x), pair(codes.x >> 8), pair(codes.x >> 16), pair(codes.x >> 24)},
          {pair(codes.y), pair(codes.y >> 8), pair(codes.y >> 16), pair(codes.y >> 24)}};
}

// Where quantised rows come from; the interface of TileSource, with a step of decoding. L has the
// layout of the block (mla_decode_sm90.cu); a row in the ring is codes, scales, rope.
template <typename L>
struct CodedSource {
  static constexpr int kCodeBytes = static_cast<int>(code_bytes(L::kFormat, L::kRank, L::kRope));
  static constexpr int kScaleBytes = static_cast<int>(scale_bytes(L::kFormat, L::kRank));
  static constexpr int kRopeAt = kCodeBytes + kScaleBytes;
  static constexpr int kRowsOfWarp = L::kTokens / L::kWarps;

  const MlaDecodeParams& p;
  const int32_t* pages;
  int2 range;
  uint32_t shared;
  char* shared_pointer;

  __device__ int token_of(int tile) const {
    return range.x + tile * L::kTokens + (threadIdx.x / kWarpSize) * kRowsOfWarp +
           threadIdx.x % kWarpSize;
  }

  // The page of this thread's row of `tile`; 0 when it copies none.
  __device__ int page_of(int tile) const {
    const int token = token_of(tile);
    return threadIdx.x % kWarpSize < kRowsOfWarp && token < range.y
               ? pages[token / p.cache.page_size]
               : 0;
  }

  __device__ void start(int tile, int page) const {
    const int stage = tile % L::kRawStages;
    const uint32_t barrier = shared + L::kBarriers + stage * 8;
    const int valid = min(L::kTokens, range.y - range.x - tile * L::kTokens);
    if (threadIdx.x == 0) barrier_expect(barrier, valid * L::kRawRowBytes);
    const int row = (threadIdx.x / kWarpSize) * kRowsOfWarp + threadIdx.x % kWarpSize;
    if (threadIdx.x % kWarpSize >= kRowsOfWarp || row >= valid) return;
    const uint32_t to = shared + L::kRaw + stage * L::kRawStageBytes + row * L::kRawStride;
    const CodedRow from = coded_row(p.cache, page, token_of(tile) % p.cache.page_size);
    if constexpr (L::kFormat == CacheFormat::kNvFp4) {
      bulk_copy(to, from.codes, kCodeBytes, barrier);
      bulk_copy(to + kCodeBytes, from.scales, kScaleBytes, barrier);
      bulk_copy(to + kRopeAt, from.rope, L::kRawRowBytes - kRopeAt, barrier);
    } else {
      bulk_copy(to, from.codes, L::kRawRowBytes, barrier);
    }
  }

  __device__ void wait(int tile) const {
    barrier_wait(shared + L::kBarriers + tile % L::kRawStages * 8, tile / L::kRawStages & 1);
  }

  // The tile as bfloat16 rows, those past the range as zeros. kFp8's scale is left out.
  __device__ void decode(int tile) const {
    constexpr int kThreadsOfRow = L::kWarps * kWarpSize / L::kTokens;
    const int valid = min(L::kTokens, range.y - range.x - tile * L::kTokens);
    const int row = static_cast<int>(threadIdx.x) / kThreadsOfRow;
    const char* const from =
        shared_pointer + L::kRaw + tile % L::kRawStages * L::kRawStageBytes + row * L::kRawStride;
    char* const to = shared_pointer + row * L::kRowStride;
#pragma unroll
    for (int i = 0; i < L::kWidth / 16 / kThreadsOfRow; ++i) {
      const int unit = i * kThreadsOfRow + static_cast<int>(threadIdx.x) % kThreadsOfRow;
      Decoded16 x = {};
      if (row < valid) x = decode_unit(from, unit);
      reinterpret_cast<uint4*>(to)[unit * 2] = x.low;
      reinterpret_cast<uint4*>(to)[unit * 2 + 1] = x.high;
    }
  }

 private:
  // Values [16 unit, 16 unit + 16) of a row.
  __device__ Decoded16 decode_unit(const char* row, int unit) const {
    constexpr int kLatentUnits = L::kRank / 16;
    if constexpr (L::kFormat == CacheFormat::kFp8) {
      return decode_e4m3x16(reinterpret_cast<const uint4*>(row)[unit], 1.0f);
    }
    if (unit >= kLatentUnits) {
      const auto* const rope = reinterpret_cast<const uint4*>(row + kRopeAt);
      return {rope[(unit - kLatentUnits) * 2], rope[(unit - kLatentUnits) * 2 + 1]};
    }
    if constexpr (L::kFormat == CacheFormat::kFp8DsMla) {
      constexpr int kUnitsOfGroup = static_cast<int>(kFp8DsMlaGroup) / 16;
      return decode_e4m3x16(reinterpret_cast<const uint4*>(row)[unit],
                            reinterpret_cast<const float*>(row + kCodeBytes)[unit / kUnitsOfGroup]);
    } else {
      const float scale = decode_e4m3(static_cast<uint8_t>(row[kCodeBytes + unit]));
      return decode_e2m1x16(reinterpret_cast<const uint2*>(row)[unit],
                            scale * p.cache.scale * kE2M1Exponent);
    }
  }
};

}  // namespace helicore::attention::cuda
