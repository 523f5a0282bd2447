// mma.h -- tensor-core products and asynchronous copies (sm_80 instructions) as functions.
//
// A tile product: d(16,8) += a(16,16) b(16,8), bf16 operands, float sums, spread over the 32 lanes of a warp. With
// g = lane / 4 and t = lane % 4 a lane holds, two bf16 to a register (lower column or row in the lower half):
//   a[0] = (row g, cols 2t..)      a[1] = (row g+8, cols 2t..)   a[2] = (row g, cols 2t+8..)   a[3] = (row g+8, cols
//   2t+8..) b[0] = (rows 2t.., col g)      b[1] = (rows 2t+8.., col g) d[0], d[1] = (row g, cols 2t, 2t+1) d[2], d[3] =
//   (row g+8, cols 2t, 2t+1)
// Source: PTX ISA 8.x, "Matrix Fragments for mma.m16n8k16", "ldmatrix", "cp.async". On the CPU the instructions are
// emulated (llmc/cpu/mma.h), which needs LLMC_WARP=32: with warps of one thread these functions do not compile.
#pragma once

#include "llmc/device.h"

#ifdef __CUDACC__

namespace mma_detail {
__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}
}  // namespace mma_detail

/// d += a b, in the layout above. All 32 lanes take part.
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/// Four 8x8 matrices of bf16 from shared memory. Lane 8j+i passes the address (16-byte aligned) of row i of matrix j;
/// r[j] of a lane becomes elements 2t, 2t+1 of row g of matrix j. `_trans`: of the transposed matrix.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(mma_detail::shared_address(row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(mma_detail::shared_address(row))
               : "memory");
}

/// Starts a copy of 16 bytes from global to shared memory (both 16-byte aligned). The bytes are there for this thread
/// after cp_async_wait, and for others after a barrier behind it.
__device__ __forceinline__ void cp_async16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(mma_detail::shared_address(shared)), "l"(global)
               : "memory");
}
/// Ends a group: the copies that this thread has started since the last one.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
/// Waits until at most the N newest groups of this thread are on their way.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}

#else
#include "llmc/cpu/mma.h"
#endif
