// Warpgroup products (sm_90a) on tiles in shared memory: thin wrappers of one instruction each.
//
// An operand in shared memory is an array of chunks of 64 columns of bfloat16; a chunk is rows of
// 128 bytes whose 16-byte units are permuted by the row (the 128-byte swizzle of tensor copies),
// 1,024-byte aligned. Lane l of warp w of the group holds rows 16 w + l / 4 (d[4 j], d[4 j + 1])
// and that + 8 (d[4 j + 2], d[4 j + 3]) of columns 8 j + 2 (l % 4) and the next.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace helicore::attention::cuda {

inline constexpr int kSwizzleRowBytes = 128;
inline constexpr int kSwizzleGroupBytes = 8 * kSwizzleRowBytes;

// A matrix operand at `address`; chunk_bytes is the distance from chunk to chunk, which matters for
// an operand that is transposed (its columns are the outer dimension of the product).
__device__ inline uint64_t wgmma_operand(uint32_t address, uint32_t chunk_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | uint64_t{kSwizzleGroupBytes >> 4} << 32 |
         static_cast<uint64_t>(chunk_bytes >> 4) << 16 | (address & 0x3ffffu) >> 4;
}

// Before the first product of a batch, and after registers of its operands were written.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending committed batches run.
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from reading sums before the wait that they follow in the source.
template <int kCount>
__device__ inline void wgmma_settle(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define HELICORE_WGMMA_8(d, i)                                                                \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])

// clang-format off: the lists of registers
// d[64, 64] (+)= a[64, 16] b[64, 16]^T, both in shared memory.
__device__ inline void wgmma_64x64(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred sum;\nsetp.ne.b32 sum, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, sum, 1, 1, 0, 0;\n}"
      : HELICORE_WGMMA_8(d, 0), HELICORE_WGMMA_8(d, 8), HELICORE_WGMMA_8(d, 16), HELICORE_WGMMA_8(d, 24)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}

// d[64, 256] += a[64, 16] b[16, 256], both in shared memory.
__device__ inline void wgmma_64x256(float (&d)[128], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
      "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
      "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, "
      "%66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "
      "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, "
      "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, "
      "%126, %127"
      "}, %128, %129, 1, 1, 1, 0, 1;"
      : HELICORE_WGMMA_8(d, 0), HELICORE_WGMMA_8(d, 8), HELICORE_WGMMA_8(d, 16), HELICORE_WGMMA_8(d, 24), HELICORE_WGMMA_8(d, 32), HELICORE_WGMMA_8(d, 40), HELICORE_WGMMA_8(d, 48), HELICORE_WGMMA_8(d, 56), HELICORE_WGMMA_8(d, 64), HELICORE_WGMMA_8(d, 72), HELICORE_WGMMA_8(d, 80), HELICORE_WGMMA_8(d, 88), HELICORE_WGMMA_8(d, 96), HELICORE_WGMMA_8(d, 104), HELICORE_WGMMA_8(d, 112), HELICORE_WGMMA_8(d, 120)
      : "l"(a), "l"(b));
}

// The same with a in registers: rows l / 4 and + 8 of columns 2 (l % 4), then of those + 8.
__device__ inline void wgmma_64x256(float (&d)[128], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
      "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
      "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, "
      "%66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "
      "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, "
      "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, "
      "%126, %127"
      "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
      : HELICORE_WGMMA_8(d, 0), HELICORE_WGMMA_8(d, 8), HELICORE_WGMMA_8(d, 16), HELICORE_WGMMA_8(d, 24), HELICORE_WGMMA_8(d, 32), HELICORE_WGMMA_8(d, 40), HELICORE_WGMMA_8(d, 48), HELICORE_WGMMA_8(d, 56), HELICORE_WGMMA_8(d, 64), HELICORE_WGMMA_8(d, 72), HELICORE_WGMMA_8(d, 80), HELICORE_WGMMA_8(d, 88), HELICORE_WGMMA_8(d, 96), HELICORE_WGMMA_8(d, 104), HELICORE_WGMMA_8(d, 112), HELICORE_WGMMA_8(d, 120)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// clang-format on

// Moves registers between the warpgroups of a block; every warp of a group, once, at its start.
template <int kCount>
__device__ inline void set_max_registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ inline void set_max_registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

#undef HELICORE_WGMMA_8

}  // namespace helicore::attention::cuda
