// Tensor-core and bulk-copy primitives of the tuned kernels (sm_90 and up): thin wrappers of one
// instruction each. Shared-memory addresses are 32-bit, from shared_address().
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace helicore::attention::cuda {

__device__ inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Four 8x8 matrices of 2-byte elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// d[16, 8] += a[16, 16] b[16, 8], bfloat16 in, float32 sums. Lane l holds d rows l / 4 (d[0..1])
// and l / 4 + 8 (d[2..3]), columns 2 (l % 4) and the next.
__device__ inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// 2^x to about 2 ulp; 0 for -inf and where the result would be subnormal.
__device__ inline float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Lets the next kernel of the stream start its blocks early if it was launched so, ...
__device__ inline void start_dependent_launch() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ... where this waits until the one before has ended and its writes are visible.
__device__ inline void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ inline void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Orders this thread's ordinary shared-memory writes before later bulk copies into shared memory.
__device__ inline void fence_before_bulk_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// One arrival that also announces `bytes` of bulk copies.
__device__ inline void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again%=;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Copies `bytes` (a multiple of 16, both ends 16-byte aligned) to this block's shared memory.
__device__ inline void bulk_copy(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
      : "memory");
}

__device__ inline void barrier_arrive_one(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Copies the box of a tensor map at (column, row, page) to this block's shared memory.
__device__ inline void tensor_copy(uint32_t to, const void* map, int column, int row, int page,
                                   uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(page), "r"(barrier)
      : "memory");
}

}  // namespace helicore::attention::cuda
