// device.h -- the one header that kernels include: CUDA, or the CPU device that runs the same kernels with no GPU.
//
// On a GPU this is a thin layer over the CUDA runtime. On a CPU, llmc/cpu/ provides the same names: see cpu/fiber.h for
// how the threads of a block run, cpu/stream.h for streams and events, cpu/settings.h for the test modes. No other file
// of the project asks which device it is built for.
//
// floatX is the type of weights and activations (PRECISION=fp32|bf16); gradients of parameters, statistics and losses
// are always float. kWarpSize is 32 on a GPU; on the CPU 32, or 1: then a warp is one thread, warp collectives are the
// identity, and `for (i = lane; i < C; i += kWarpSize)` is a plain loop that the compiler vectorises. Kernels must be
// right for both: they compute launch shapes and strides from kWarpSize.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <utility>

#include "llmc/check.h"
#include "llmc/numeric.h"

#ifdef __CUDACC__

#include <cuda_bf16.h>
#include <cuda_runtime.h>

constexpr int kWarpSize = 32;
constexpr bool kIsCpuDevice = false;  // for sizes that depend on the kind of device; never for results

template <class T>
struct SameType {
  typedef T type;
};
template <auto K>
struct Launcher;
template <class... P, void (*K)(P...)>
struct Launcher<K> {
  static void launch(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                     typename SameType<P>::type... arguments) {
    K<<<grid, block, shared_bytes, stream>>>(arguments...);
    const cudaError_t status = cudaGetLastError();
    if (status != cudaSuccess) {
      environment_error("%s (grid %u x %u x %u, block %u x %u x %u, %zu bytes of shared memory) failed: %s",
                        __PRETTY_FUNCTION__, grid.x, grid.y, grid.z, block.x, block.y, block.z, shared_bytes,
                        cudaGetErrorString(status));
    }
  }
};

/// Queues kernel K on the stream and returns. Its template arguments must be explicit: launch<kernel<float>>(...).
/// The arguments convert to the kernel's parameter types. Throws an environment error if the launch is refused.
template <auto K, class... Arguments>
inline void launch(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream, Arguments&&... arguments) {
  Launcher<K>::launch(grid, block, shared_bytes, stream, std::forward<Arguments>(arguments)...);
}

/// `T* name`: the block's dynamic shared memory (the launch's shared_bytes), aligned to 128 bytes.
#define DYNAMIC_SHARED(T, name)                                         \
  extern __shared__ __align__(128) unsigned char llmc_dynamic_shared[]; \
  T* name = reinterpret_cast<T*>(llmc_dynamic_shared)

/// Sum or maximum over the warp, in every lane (butterfly order); all 32 lanes take part.
template <class T>
__device__ __forceinline__ T warp_sum(T value) {
  static_assert(sizeof(T) >= 4, "float or double");
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}

#define SIMD_LOOP
#define SIMD_SUM(variable)
#define SIMD_MAX(variable)
#define UNROLL _Pragma("unroll")

#else

#include "llmc/cpu/atomic.h"
#include "llmc/cpu/bf16.h"
#include "llmc/cpu/launch.h"
#include "llmc/cpu/math.h"
#include "llmc/cpu/runtime.h"
#include "llmc/cpu/types.h"
#include "llmc/cpu/warp.h"

constexpr bool kIsCpuDevice = true;

#define LLMC_PRAGMA(text) _Pragma(#text)
/// Before a loop whose iterations do not depend on each other; whose iterations only do `variable += ...`; whose
/// iterations only do `variable = fmaxf(variable, ...)`. On a GPU they mean nothing: there a lane is a thread.
#define SIMD_LOOP LLMC_PRAGMA(omp simd)
#define SIMD_SUM(variable) LLMC_PRAGMA(omp simd reduction(+ : variable))
#define SIMD_MAX(variable) LLMC_PRAGMA(omp simd reduction(max : variable))
#define UNROLL

#endif

#if defined(PRECISION_BF16)
typedef __nv_bfloat16 floatX;
constexpr const char* kPrecisionName = "bf16";
#else
typedef float floatX;
constexpr const char* kPrecisionName = "fp32";
#endif

/// Number of this thread in the grid, in 64 bits (32-bit index arithmetic also keeps gcc from vectorising: 4 times
/// slower).
__device__ __forceinline__ size_t thread_index() { return static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; }

/// thread_index() >= n, for the guard of an elementwise kernel. On the CPU it is written as a comparison of the signed
/// loop counter with a bound that does not change in the loop over threads: gcc then ends the loop at the bound. From
/// `thread_index() >= n` it makes masked loads and stores instead, 4 times slower on processors without AVX-512.
__device__ __forceinline__ bool thread_outside(size_t n) {
#ifdef __CUDACC__
  return thread_index() >= n;
#else
  const size_t first = static_cast<size_t>(blockIdx.x) * blockDim.x;
  const size_t inside = n > first ? n - first : 0;
  return signed_thread_x >= static_cast<int>(inside < 1024 ? inside : 1024);
#endif
}

/// Elementwise kernels: one element per thread, `if (thread_outside(n)) return; const size_t i = thread_index();`,
/// launched as launch<kernel>(elementwise_grid(n), kElementwiseBlock, 0, stream, ...) for n >= 1.
constexpr unsigned kElementwiseBlock = 256;
inline dim3 elementwise_grid(size_t n) {
  const size_t blocks = ceil_div<size_t>(n, kElementwiseBlock);
  assert(blocks >= 1 && blocks <= 0x7fffffff && "elementwise_grid: n must be 1 to 2^31 blocks");
  return dim3(static_cast<unsigned>(blocks));
}

/// Lets kernel K use up to `bytes` of dynamic shared memory (more than 48 KiB needs it; at most 227 KiB on sm_90).
template <auto K>
inline void allow_dynamic_shared(size_t bytes) {
  assert(bytes <= 0x7fffffff && "allow_dynamic_shared: more than any device has");
  CUDA_CHECK(cudaFuncSetAttribute(K, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
}

/// Ends the program with one clear line (environment error) unless there is a device to run on. Call it first in main:
/// without a driver cudaGetDeviceCount leaves the count unwritten and every later call fails with an obscure text.
inline void require_device() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
#ifdef __CUDACC__
  if (status == cudaErrorInsufficientDriver) {
    int driver = 0;
    cudaDriverGetVersion(&driver);
    if (driver != 0) {
      environment_error(
          "built for CUDA %d.%d, but the NVIDIA driver here only knows CUDA %d.%d: update the driver, "
          "or build with `make train_gpt2 DEVICE=cpu`",
          CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10, driver / 1000, driver % 1000 / 10);
    }
    environment_error(
        "built for NVIDIA GPUs (CUDA %d.%d), but no NVIDIA driver is installed here; build with "
        "`make train_gpt2 DEVICE=cpu`",
        CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
  }
#endif
  if (status != cudaSuccess) environment_error("no usable device: %s", cudaGetErrorString(status));
  if (count == 0) {
    environment_error(
        "no NVIDIA GPU is visible (see nvidia-smi and CUDA_VISIBLE_DEVICES); build with `make train_gpt2 "
        "DEVICE=cpu` to run without one");
  }
}

/// "NVIDIA H200" or "CPU, warps of 1".
inline std::string device_name() {
  int device = 0;
  cudaDeviceProp properties;
  CUDA_CHECK(cudaGetDevice(&device));
  CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  return properties.name;
}
