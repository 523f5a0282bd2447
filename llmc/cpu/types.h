// types.h -- CUDA's language words, vector types and built-in variables for an ordinary C++17 compiler.
//
// A kernel is a plain function here: `__global__` and `__device__` vanish, `__shared__` becomes one copy per OS thread
// (an OS thread runs one block at a time, so that is one copy per block).
//
// threadIdx and its sisters are `static __thread`: internal linkage, and nobody takes their address. From this the
// compiler proves that a store through a kernel's pointer cannot change them, keeps them in registers and vectorises
// the loop over the threads of a block. With external linkage the same kernel is 4 to 6 times slower. The price: all
// kernels of a program are in one translation unit (the linker checks it, see the end of this file), and code here
// copies threadIdx member by member, because copying it as a whole would take its address.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifndef LLMC_WARP
#define LLMC_WARP 1
#endif
static_assert(LLMC_WARP == 1 || LLMC_WARP == 32, "LLMC_WARP (threads of a warp) is 1 (fast) or 32 (as on a GPU)");

#define __global__
#define __device__
#define __host__
#define __constant__
// __constinit: or gcc guards the "initialisation" of an array of bf16 by a hidden flag, which is slow and looks like a
// race.
#ifdef __clang__
#define __shared__ static __thread
#else
#define __shared__ __constinit static __thread
#endif
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct uint3 {
  unsigned x, y, z;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

[[maybe_unused]] static __thread uint3 threadIdx, blockIdx;
[[maybe_unused]] static __thread dim3 blockDim, gridDim;
// threadIdx.x again, signed: gcc splits a loop only at a comparison of a signed counter (see thread_outside in
// device.h).
[[maybe_unused]] static __thread int signed_thread_x;

/// Threads of a warp: what kernels compute their launch shapes and strides from.
constexpr int kWarpSize = LLMC_WARP;

namespace cpu_device {

/// The bits of a 4-byte value as an integer, and back.
template <class T>
inline uint32_t bits(T value) {
  static_assert(sizeof(T) == 4, "a 4-byte type");
  uint32_t result;
  memcpy(&result, &value, 4);
  return result;
}
template <class T>
inline T from_bits(uint32_t value) {
  static_assert(sizeof(T) == 4, "a 4-byte type");
  T result;
  memcpy(&result, &value, 4);
  return result;
}

/// T, in a place where the compiler must not deduce it: arguments convert to the kernel's own parameter types.
template <class T>
struct Same {
  typedef T type;
};

}  // namespace cpu_device

// Two translation units with kernels would each have their own threadIdx: let the linker refuse ("multiple
// definition").
extern "C" {
char llmc_only_one_translation_unit_may_include_device_h;
}
