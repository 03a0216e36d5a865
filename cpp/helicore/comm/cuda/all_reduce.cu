// One kernel for one shot and two, with or without an epilogue. docs/design/comm-cuda.md
//
// A cluster of blocks takes rows cluster, cluster + num_clusters, ... It sends all of them before
// it waits for any, so that blocks of different ranks never wait for one another in a ring as long
// as the blocks of all ranks are on the GPU at once.
#include <cuda_runtime.h>

#include <cstddef>

#include "helicore/comm/cuda/all_reduce.h"
#include "helicore/core/cuda/check.h"
#include "helicore/core/cuda/device_guard.h"
#include "helicore/quant/cuda/dispatch.cuh"

namespace helicore::comm::cuda {
namespace {

using quant::cuda::EpilogueParams;
using quant::cuda::kPacketSize;
using quant::cuda::kRowThreads;
using quant::cuda::load_packet;
using quant::cuda::pack;
using quant::cuda::Row;
using quant::cuda::RowKind;
using quant::cuda::RowShape;
using quant::cuda::RowShared;
using quant::cuda::store_packet;
using quant::cuda::unpack;

constexpr int kPolled = 4;                   // packets that a thread has under way
constexpr int kPlainSharedBytes = 40 << 10;  // dynamic ones that need no leave
constexpr int kSpinsPerLook = 64;            // at the clock

__device__ inline uint64_t now_ns() {
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

// Accesses that peers see and that see peers': each 32-bit word is whole, a packet need not be.
__device__ inline void send(uint4* to, const uint4& v) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ inline uint4 look(const uint4* from) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}
__device__ inline bool has_come(const uint4& v) {
  return v.x != kSentinel && v.y != kSentinel && v.z != kSentinel && v.w != kSentinel;
}

// -0 as +0; subnormals stay. x + 0 in float32, x * 1 + 0 in pairs of bfloat16.
template <typename T>
__device__ inline uint32_t without_negative_zero(uint32_t word) {
  if constexpr (sizeof(T) == 4) {
    return __float_as_uint(__fadd_rn(__uint_as_float(word), 0.0f));
  } else {
    uint32_t out;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(word), "r"(0x3f803f80u), "r"(0u));
    return out;
  }
}
template <typename T>
__device__ inline uint4 without_negative_zero(const uint4& v) {
  return {without_negative_zero<T>(v.x), without_negative_zero<T>(v.y),
          without_negative_zero<T>(v.z), without_negative_zero<T>(v.w)};
}

// The state as a block finds it.
struct CallShared {
  CommNote note;
  uint32_t failed;
};

// What a block knows of a call.
struct Exchange {
  const AllReduceParams& a;
  CommState* state;
  uint32_t round = 0;
  uint64_t deadline = 0;
  bool gave_up = false;

  __device__ explicit Exchange(const AllReduceParams& params)
      : a(params), state(reinterpret_cast<CommState*>(params.ranks[params.rank])) {}

  // The state for the block; between it and its use the block has a barrier.
  __device__ void read_state(CallShared& call) const {
    if (threadIdx.x != 0) return;
    const volatile CommNote& note = state->notes[blockIdx.x];
    const uint32_t now[3] = {note.round, note.used,
                             *static_cast<volatile uint32_t*>(&state->failed)};
    call = {{now[0], now[1]}, now[2]};
  }
  __device__ void note_call() const {
    const int64_t each = a.share == 0 ? a.world * a.row_packets : a.world * a.share + a.row_packets;
    const CommNote note = {round + 1, static_cast<uint32_t>(a.num_rows * each)};
    for (int n = static_cast<int>(threadIdx.x);; n += static_cast<int>(blockDim.x)) {
      const int block = static_cast<int>(blockIdx.x) + n * a.num_clusters * a.cluster;
      if (block >= kMaxBlocks) break;
      state->notes[block] = note;
    }
  }

  __device__ uint4* buffer(int rank, uint32_t number) const {
    return reinterpret_cast<uint4*>(a.ranks[rank] + kStateBytes) +
           number % kNumBuffers * a.buffer_packets;
  }
  // Where packet j of row i from rank `source` waits.
  __device__ uint4* inbox(int rank, int i, int source, int j) const {
    return buffer(rank, round) + (int64_t{i} * a.world + source) * a.row_packets + j;
  }
  __device__ uint4* share_inbox(int rank, int i, int source, int j) const {
    return buffer(rank, round) + (int64_t{i} * a.world + source) * a.share + j;
  }
  __device__ uint4* sums(int rank, int i, int j) const {
    return buffer(rank, round) + int64_t{a.num_rows} * a.world * a.share +
           int64_t{i} * a.row_packets + j;
  }

  __device__ bool is_late() {
    const uint64_t now = now_ns();
    if (deadline == 0) deadline = now + a.timeout_ns;
    return now > deadline;
  }
  __device__ void give_up(int rank) {
    if (!gave_up && atomicCAS(&state->failed, 0u, static_cast<uint32_t>(rank) + 1) == 0) {
      *static_cast<volatile uint32_t*>(a.failure) = static_cast<uint32_t>(rank) + 1;
      __threadfence_system();
    }
    gave_up = true;
  }

  // Packets of ranks [first, first + count), `stride` apart, of `packets` places of the row that
  // are a block apart: got[k * (kPolled / kPlaces) + r]. Returns the slot of one that did not come,
  // or -1.
  template <int kPlaces>
  __device__ int receive(const uint4* from, int64_t stride, int count, int packets,
                         uint4 (&got)[kPolled]) {
    constexpr int kRanks = kPolled / kPlaces;
    uint32_t missing = 0;
    if (gave_up) return -1;
#pragma unroll
    for (int k = 0; k < kPlaces; ++k) {
      if (k < packets) missing |= ((1u << count) - 1) << (k * kRanks);
    }
#pragma unroll 1
    for (int spins = 0; missing != 0; ++spins) {
#pragma unroll
      for (int s = 0; s < kPolled; ++s) {
        if ((missing >> s & 1u) == 0) continue;
        got[s] = look(from + s / kRanks * static_cast<int>(blockDim.x) + s % kRanks * stride);
      }
#pragma unroll
      for (int s = 0; s < kPolled; ++s) {
        if ((missing >> s & 1u) != 0 && has_come(got[s])) missing &= ~(1u << s);
      }
      if (missing != 0 && spins % kSpinsPerLook == kSpinsPerLook - 1 && is_late()) {
        return __ffs(static_cast<int>(missing)) - 1;
      }
    }
    return -1;
  }

  // The sums over ranks, rounded, of places whose copies lie `stride` apart.
  template <typename T, int kPlaces>
  __device__ void reduce(const uint4* from, int64_t stride, int packets,
                         float (&sum)[kPlaces][kPacketSize<T>]) {
    constexpr int kRanks = kPolled / kPlaces;
#pragma unroll
    for (int k = 0; k < kPlaces; ++k) {
#pragma unroll
      for (int i = 0; i < kPacketSize<T>; ++i) sum[k][i] = 0.0f;
    }
#pragma unroll 1
    for (int first = 0; first < a.world; first += kRanks) {
      const int count = min(kRanks, a.world - first);
      uint4 got[kPolled];
      const int late = receive<kPlaces>(from + first * stride, stride, count, packets, got);
      if (late >= 0) give_up(first + late % kRanks);
#pragma unroll
      for (int s = 0; s < kPolled; ++s) {
        if (s % kRanks >= count) continue;
        float part[kPacketSize<T>];
        unpack(got[s], part);
        float (&into)[kPacketSize<T>] = sum[s / kRanks];
#pragma unroll
        for (int i = 0; i < kPacketSize<T>; ++i) {
          into[i] += part[i];
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kPlaces; ++k) {
      unpack(without_negative_zero<T>(pack(sum[k])), sum[k]);  // what a rank may have rounded to -0
    }
  }

  // The last call's packets become sentinels again: all ranks have sent this call's before they
  // write there, after they have read what this rank sends in the next.
  __device__ void clear_last(uint32_t used) const {
    uint4* const packets = buffer(a.rank, round + kNumBuffers - 1);
    const uint32_t step = gridDim.x * blockDim.x;
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < used; i += step) {
      packets[i] = {kSentinel, kSentinel, kSentinel, kSentinel};
    }
  }
};

template <typename T, int kPackets, bool kWhole>
struct Reducer {
  static constexpr int kPlaces = kPackets <= 2 ? kPackets : 1;  // that are waited for together
  static constexpr int kSize = kPacketSize<T>;
  const AllReduceParams& a;
  const EpilogueParams& p;
  Exchange& exchange;

  int thread = 0;
  int first = 0;    // packet of the block
  int cluster = 0;  // number of the block's cluster

  // See Row: nothing that is computed from the thread is kept from row to row.
  __device__ void begin_row() {
    thread = static_cast<int>(threadIdx.x);
    asm volatile("" : "+r"(thread));
  }
  __device__ int packet(int k) const { return first + k * static_cast<int>(blockDim.x) + thread; }

  __device__ void load_row(int i, uint4 (&v)[kPackets]) const {
    const T* const row = static_cast<const T*>(a.x) + (a.first_row + i) * p.width;
#pragma unroll
    for (int k = 0; k < kPackets; ++k) v[k] = load_packet<kWhole>(row, packet(k), p.width);
  }

  // `next` is the block's first row.
  __device__ void send_rows(uint4 (&next)[kPackets]) {
#pragma unroll 1
    for (int i = cluster; i < a.num_rows; i += a.num_clusters) {
      uint4 v[kPackets];
#pragma unroll
      for (int k = 0; k < kPackets; ++k) v[k] = next[k];
      begin_row();
      if (i + a.num_clusters < a.num_rows) load_row(i + a.num_clusters, next);
#pragma unroll
      for (int k = 0; k < kPackets; ++k) {
        const int j = packet(k);
        if (j < a.row_packets) send_packet(i, j, without_negative_zero<T>(v[k]));
      }
    }
  }

  __device__ void send_packet(int i, int j, const uint4& v) const {
    if (a.share != 0) {
      const int owner = j / a.share;
      return send(exchange.share_inbox(owner, i, a.rank, j - owner * a.share), v);
    }
#pragma unroll 1
    for (int r = 1; r <= a.world; ++r) {  // every rank begins elsewhere, and ends with itself
      send(exchange.inbox((a.rank + r) % a.world, i, a.rank, j), v);
    }
  }

  // The block's rows at once: a share alone would keep few threads busy.
  __device__ void send_sums() {
    const int begin = a.rank * a.share;
    const int count = min(a.share, a.row_packets - begin);
    const int rows = (a.num_rows - cluster + a.num_clusters - 1) / a.num_clusters;
    const int step = static_cast<int>(blockDim.x) * a.cluster;
#pragma unroll 1
    for (int n = first + static_cast<int>(threadIdx.x); n < rows * count; n += step) {
      const int i = cluster + n / count * a.num_clusters;
      const int j = n % count;
      float sum[1][kSize];
      exchange.template reduce<T, 1>(exchange.share_inbox(a.rank, i, 0, j), a.share, 1, sum);
      if (exchange.gave_up) return;
      const uint4 v = without_negative_zero<T>(pack(sum[0]));
#pragma unroll 1
      for (int r = 1; r <= a.world; ++r) {
        send(exchange.sums((a.rank + r) % a.world, i, begin + j), v);
      }
    }
  }

  // Sums of kPlaces packets of row i from packet(first) on.
  __device__ void take_sums(int i, int first, float (&sum)[kPlaces][kSize]) {
    const int j = packet(first);
    const int packets = (a.row_packets - j + static_cast<int>(blockDim.x) - 1) /
                        static_cast<int>(blockDim.x);  // <= 0: none
    if (a.share == 0) {
      const uint4* const from = exchange.inbox(a.rank, i, 0, j);
      return exchange.template reduce<T, kPlaces>(from, a.row_packets, packets, sum);
    }
    uint4 got[kPolled];
    const int late =
        exchange.template receive<kPlaces>(exchange.sums(a.rank, i, j), 0, 1, packets, got);
    if (late >= 0) exchange.give_up(packet(first + late / (kPolled / kPlaces)) / a.share);
#pragma unroll
    for (int k = 0; k < kPlaces; ++k) unpack(got[k * (kPolled / kPlaces)], sum[k]);
  }

  // `parked` holds a row of more packets than are waited for together; every thread uses its own.
  __device__ void finish_rows(uint4* parked, RowShared& shared) {
    int turn = 0;
#pragma unroll 1
    for (int i = cluster; i < a.num_rows; i += a.num_clusters) {
      begin_row();
      const int64_t at = a.first_row + i;
      Row<T, kPackets, kWhole> row;
      row.cluster = a.cluster;
      row.first = first;
      row.turn = turn;
      turn ^= 1;
      if (p.weight != nullptr) row.fetch(p, at);
      if constexpr (kPlaces == kPackets) {
        take_sums(i, 0, row.v);
      } else {
#pragma unroll 1
        for (int k = 0; k < kPackets && packet(k) < a.row_packets; ++k) {
          float sum[1][kSize];
          take_sums(i, k, sum);
          parked[packet(k)] = pack(sum[0]);
        }
#pragma unroll
        for (int k = 0; k < kPackets; ++k) unpack(parked[packet(k)], row.v[k]);
      }
#pragma unroll
      for (int k = 0; k < kPackets; ++k) {
        if (packet(k) >= a.row_packets) {
#pragma unroll
          for (int e = 0; e < kSize; ++e) row.v[k][e] = 0.0f;
        } else if (p.weight == nullptr) {
          store_packet<kWhole>(static_cast<T*>(a.out) + at * p.width, packet(k), p.width,
                               pack(row.v[k]));
        }
      }
      if (p.weight != nullptr) row.finish(p, at, shared);
    }
  }
};

template <typename T, int kPackets, bool kWhole>
__global__ void __launch_bounds__(kRowThreads<kPackets>)
    all_reduce_kernel(const __grid_constant__ AllReduceParams a,
                      const __grid_constant__ EpilogueParams p) {
  __shared__ RowShared shared;
  __shared__ CallShared call;
  extern __shared__ __align__(16) uint4 parked[];
  quant::cuda::enter_cluster(a.cluster);
  Exchange exchange(a);
  Reducer<T, kPackets, kWhole> reducer = {a, p, exchange};
  exchange.read_state(call);
  reducer.cluster = static_cast<int>(blockIdx.x) / a.cluster;
  reducer.first = static_cast<int>(blockIdx.x) % a.cluster * static_cast<int>(blockDim.x);
  reducer.begin_row();
  uint4 first[kPackets];
  reducer.load_row(reducer.cluster, first);
  __syncthreads();
  exchange.round = call.note.round;
  exchange.gave_up = call.failed != 0;  // then nothing is sent or waited for
  if (!exchange.gave_up) reducer.send_rows(first);
  exchange.note_call();
  exchange.clear_last(call.note.used);
  clear_padding(p, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  if (a.share != 0) reducer.send_sums();
  quant::cuda::await_cluster(a.cluster);
  reducer.finish_rows(parked, shared);
}

__global__ void clear_kernel(uint4* packets, int64_t num_packets) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < num_packets; i += step) {
    packets[i] = {kSentinel, kSentinel, kSentinel, kSentinel};
  }
}

template <typename T, int kPackets, bool kWhole>
void launch(RowKind<T, kPackets, kWhole> /*kind*/, const AllReduceParams& a,
            const EpilogueParams& p, const RowShape& shape, Stream stream) {
  auto* const kernel = all_reduce_kernel<T, kPackets, kWhole>;
  const int parked =
      kPackets <= 2 ? 0 : kPackets * shape.threads * static_cast<int>(kPacketBytes);  // a row
  if (parked > kPlainSharedBytes) {
    helicore::cuda::check(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, parked),
        "shared memory for all_reduce_kernel");
  }
  quant::cuda::launch_rows(kernel, a.num_clusters * a.cluster, shape, parked,
                           static_cast<cudaStream_t>(stream), a, p);
}

}  // namespace

void launch_all_reduce(const AllReduceParams& params, const EpilogueParams& epilogue, DType dtype,
                       const RowShape& shape, Stream stream) {
  quant::cuda::dispatch_row(epilogue, dtype, shape,
                            [&](auto kind) { launch(kind, params, epilogue, shape, stream); });
}

void launch_clear(int device, std::byte* rank, int64_t num_packets) {
  const helicore::cuda::DeviceGuard guard(device);
  helicore::cuda::check(cudaMemset(rank, 0, kStateBytes), "cudaMemset");
  clear_kernel<<<256, 256>>>(reinterpret_cast<uint4*>(rank + kStateBytes), num_packets);
  helicore::cuda::check_launch("clear_kernel");
  helicore::cuda::check(cudaDeviceSynchronize(), "clear_kernel");
}

}  // namespace helicore::comm::cuda
