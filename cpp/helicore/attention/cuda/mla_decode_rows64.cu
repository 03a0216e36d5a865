// Absorbed decode for many rows: 64 packed query rows against pages of 64 tokens by warpgroup
// products. bfloat16 queries and cache, R = 512, rope width 64 or 0, sm_90a.
//
// The rows of a request are its (token, head) pairs in order; a block serves 64 of them and one
// split of the tokens they see. Latent tiles of 64 tokens alternate between two stages; tile 2 i is
// "even", 2 i + 1 "odd". Three warpgroups:
//   0   scores of even tiles, and columns [0, 256) of the result
//   1   scores of odd tiles, and columns [256, 512)
//   2   one warp copies the left halves of tiles (columns [0, 256)), one the rest
// Each of the first two needs the other's probabilities. For a pair of tiles, m the row maximum:
//   0:  S = q K_even;   m0 = max(m, S);  tell P_even and m0;  O += P_even V_even
//   1:  S = q K_odd;    O += P_even V_even;  m1 = max(m0, S);  tell P_odd and m1
//   0:  O += P_odd V_odd           1:  O += P_odd V_odd
// Group 1 starts its scores when group 0 has its own, so that one group's exponentials run under
// the other's products. A half of a stage is read last by the group whose columns it holds, which
// alone gives it back to the copying warp.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>

#include "helicore/attention/cuda/decode_dispatch.h"
#include "helicore/attention/cuda/mla_cuda.h"
#include "helicore/attention/cuda/mma.cuh"
#include "helicore/attention/cuda/rows64.cuh"
#include "helicore/attention/cuda/rows64_consumer.cuh"
#include "helicore/attention/cuda/tensor_map.h"
#include "helicore/core/cuda/check.h"

namespace helicore::attention::cuda {
namespace {

using namespace rows64;

// Copies half of every tile (0: left, 1: right with the rope columns), one warp.
template <int kHalf, int kChunks>
__device__ void copy_halves(const MlaDecodeParams& p, const CUtensorMap& map, const int32_t* pages,
                            int2 range, uint32_t shared) {
  constexpr int kFirst = kHalf * kHalfChunks;
  constexpr int kCount = kHalf == 0 ? kHalfChunks : kChunks - kHalfChunks;
  const int lane = threadIdx.x % kWarpSize;
  const int page_size = p.cache.page_size;
  const int box = min(page_size, kTokens);
  const int tiles = (range.y - range.x + kTokens - 1) / kTokens;
  const auto page_of = [&](int tile) {
    const int token = range.x + tile * kTokens + lane * box;
    return lane * box < kTokens && token < range.y ? pages[token / page_size] : 0;
  };
  int page = page_of(0);
  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % 2;
    const int token = range.x + tile * kTokens;
    const int copies = (min(kTokens, range.y - token) + box - 1) / box;
    const uint32_t full = full_barrier(shared, stage, kHalf);
    if (tile >= 2) barrier_wait(empty_barrier(shared, stage, kHalf), (tile / 2 - 1) & 1);
    if (lane == 0) barrier_expect(full, copies * box * kSwizzleRowBytes * kCount);
    __syncwarp();
    if (lane < copies) {
      const uint32_t to = stage_at(shared, stage) + lane * box * kSwizzleRowBytes;
      const int row = (token + lane * box) % page_size;
#pragma unroll
      for (int c = kFirst; c < kFirst + kCount; ++c) {
        tensor_copy(to + c * kChunkBytes, &map, c * kChunk, row, page, full);
      }
    }
    page = page_of(tile + 1);
  }
}

// Queries to shared memory, rows past the end as zeros; both consumer groups.
template <int kChunks>
__device__ inline void load_queries(const MlaDecodeParams& p, const RowTile& rows, char* smem) {
  constexpr int kUnits = kChunks * (kSwizzleRowBytes / kUnit);
  constexpr int kLoads = kRows * kUnits / (2 * kGroupThreads);
  const auto* q = static_cast<const uint4*>(p.q) + rows.first * kUnits;
  uint4 loaded[kLoads];  // all loads before the first store: one latency
#pragma unroll
  for (int n = 0; n < kLoads; ++n) {
    const int i = threadIdx.x + n * 2 * kGroupThreads;
    loaded[n] = i < rows.count * kUnits ? __ldg(q + i) : uint4{0, 0, 0, 0};
  }
#pragma unroll
  for (int n = 0; n < kLoads; ++n) {
    const int i = threadIdx.x + n * 2 * kGroupThreads;
    const int row = i / kUnits;
    const int unit = i % kUnits;
    *reinterpret_cast<uint4*>(smem + unit / 8 * kChunkBytes + row * kSwizzleRowBytes +
                              ((unit ^ row) & 7) * kUnit) = loaded[n];
  }
  fence_before_bulk_copies();
}

template <int kGroup, int kChunks>
__device__ void consume(const MlaDecodeParams& p, const SplitOutput& partial, const RowTile& rows,
                        int64_t first, int2 range, uint32_t shared, char* smem) {
  using Group = Consumer<kGroup, kChunks>;
  Group group = {p, shared, smem, range, (range.y - range.x + kTokens - 1) / kTokens, {}};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t t = (rows.first + min(Group::row(i), rows.count - 1)) / p.num_heads;
    group.bound[i] = min(visible_tokens(p, rows.request, t), range.y) - range.x;
  }
  group.run(partial, first, rows.count);
}

// A split without tokens: partials stay unwritten, the merge skips a sum of 0.
[[maybe_unused]] __device__ inline void store_empty(const MlaDecodeParams& p,
                                                    const SplitOutput& partial, int64_t first,
                                                    int count) {
  const bool split = partial.num_splits > 1;
  float* const stats = split ? partial.stats : p.stats;
  if (threadIdx.x < count && stats != nullptr) {
    stats[(first + threadIdx.x) * 2] = -INFINITY;
    stats[(first + threadIdx.x) * 2 + 1] = 0.0f;
  }
  if (split) return;
  uint32_t* out = reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(p.out) + first * kRank);
  for (int i = threadIdx.x; i < count * kRank / 2; i += kThreads) out[i] = 0;
}

template <int kChunks>
__global__ void __launch_bounds__(kThreads, 1)
    rows64_decode_kernel(const __grid_constant__ MlaDecodeParams p,
                         const __grid_constant__ SplitOutput partial,
                         const __grid_constant__ CUtensorMap map) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)  // supports_rows64 refuses others
  extern __shared__ __align__(1024) char smem[];
  RowTile rows;
  start_dependent_launch();  // the merge waits for the whole grid before it reads
  if (!find_rows(p, rows)) return;
  const int split = blockIdx.y;
  const int64_t first = split * p.num_tokens * p.num_heads + rows.first;
  const int2 range = split_range(visible_to_rows(p, rows), split, partial.num_splits, kTokens);
  if (range.y <= range.x) return store_empty(p, partial, first, rows.count);

  const uint32_t shared = shared_address(smem);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 4; ++i) {
      barrier_init(full_barrier(shared, i / 2, i % 2), 1);
      barrier_init(empty_barrier(shared, i / 2, i % 2), kGroupWarps);
    }
    fence_before_bulk_copies();
  }
  // Through a shuffle, so that the compiler sees one value for all lanes.
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / kGroupThreads, 0);
  __syncthreads();
  if (group == 2) {
    set_max_registers_down<24>();
    const int32_t* const pages = p.block_table + rows.request * p.block_table_stride;
    const int warp = threadIdx.x % kGroupThreads / kWarpSize;
    if (warp == 0) copy_halves<0, kChunks>(p, map, pages, range, shared);
    if (warp == 1) copy_halves<1, kChunks>(p, map, pages, range, shared);
  } else {
    set_max_registers_up<240>();
    load_queries<kChunks>(p, rows, smem);
    barrier_sync<kBoth, 2 * kGroupThreads>();
    if (group == 0) {
      consume<0, kChunks>(p, partial, rows, first, range, shared, smem);
    } else {
      consume<1, kChunks>(p, partial, rows, first, range, shared, smem);
    }
  }
#endif
}

int64_t blocks_of(const MlaDecodeParams& p) {
  return p.num_tokens * ((p.num_heads + kRows - 1) / kRows);
}

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % kUnit == 0; }

bool supports_page(int page_size) {
  return page_size % kTokens == 0 || (page_size >= 8 && kTokens % page_size == 0);
}

// More than half of a tile's rows are used; with fixed splits the heads alone decide, so that a
// row's kernel does not depend on its batch.
bool fills_tiles(const MlaDecodeParams& p, bool fixed) {
  const int64_t rows = fixed ? p.num_heads : p.num_tokens * p.num_heads / p.num_requests;
  return rows > kRows / 2;
}

bool supports_rows64(const MlaDecodeParams& p, const DecodeDevice& device, bool fixed) {
  return device.compute_major == 9 && p.q_dtype == DType::kBFloat16 &&
         p.cache.format == CacheFormat::kDense && p.cache.dtype == DType::kBFloat16 &&
         p.cache.kv_lora_rank == kRank && (p.cache.rope_dim == kChunk || p.cache.rope_dim == 0) &&
         p.num_requests > 0 && fills_tiles(p, fixed) && supports_page(p.cache.page_size) &&
         p.cache.page_stride * 2 % kUnit == 0 && aligned(p.cache.data) && aligned(p.q) &&
         aligned(p.out) && blocks_of(p) < (int64_t{1} << 31);
}

// The count that a simple model of the call's time likes best: waves of blocks, each a start-up and
// its pairs of tiles, then a merge whose traffic grows with the splits. Times in ns, from one H200.
int64_t rows64_splits(const MlaDecodeParams& p, int64_t max_kv_len, const DecodeDevice& device) {
  constexpr double kStartNs = 5000.0;
  constexpr double kTileNs = 1500.0;
  constexpr double kMergeNs = 2000.0;
  constexpr double kMergeRowNs = 0.8;  // a partial row written and read
  const int64_t all_rows = p.num_tokens * p.num_heads;
  const int64_t blocks =
      std::max((all_rows + kRows - 1) / kRows, std::min<int64_t>(p.num_requests, blocks_of(p)));
  const int64_t tiles = std::max<int64_t>(1, (max_kv_len + kTokens - 1) / kTokens);
  int64_t best = 1;
  double best_ns = 0.0;
  for (int64_t s = 1; s <= std::min<int64_t>(tiles, kMaxSplits); ++s) {
    const auto waves = static_cast<double>((blocks * s + device.num_sms - 1) / device.num_sms);
    const auto depth = static_cast<double>((tiles + s - 1) / s);
    const auto partial_rows = static_cast<double>(s * all_rows);
    const double ns = waves * (kStartNs + depth * kTileNs) +
                      (s > 1 ? kMergeNs + partial_rows * kMergeRowNs : 0.0);
    if (s == 1 || ns < best_ns) {
      best = s;
      best_ns = ns;
    }
  }
  return best;
}

template <int kChunks>
void launch(const MlaDecodeParams& p, const SplitOutput& partial, const CUtensorMap& map,
            Stream stream) {
  auto* kernel = rows64_decode_kernel<kChunks>;
  helicore::cuda::check(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
      "shared memory for rows64_decode_kernel");
  const dim3 grid(static_cast<unsigned>(blocks_of(p)), static_cast<unsigned>(partial.num_splits));
  kernel<<<grid, kThreads, kSharedBytes, static_cast<cudaStream_t>(stream)>>>(p, partial, map);
}

void run_rows64(const MlaDecodeParams& p, const SplitOutput& partial, Stream stream) {
  const CUtensorMap map = cache_tensor_map(p.cache, std::min(p.cache.page_size, kTokens));
  if (p.cache.rope_dim == 0) {
    launch<kRankChunks>(p, partial, map, stream);
  } else {
    launch<kMaxChunks>(p, partial, map, stream);
  }
  helicore::cuda::check_launch("rows64_decode_kernel");
}

}  // namespace

const DecodeKernel kRows64Decode = {"rows64_sm90a", supports_rows64, rows64_splits, run_rows64};

}  // namespace helicore::attention::cuda
