// reduce.cuh -- how elements, rows and columns are dealt to threads, and reductions over a block.
//
// Three layouts cover the kernels that are not matrix products:
//   elements        (GELU, AdamW) one element per thread
//   along a row     (layernorm) one warp per row, lanes stride through the row, kRowsPerBlock rows in a block
//   down a column   (gradients of weights) a warp owns kWarpColumns columns and walks down the rows in a fixed order:
//                   one order of additions, whatever the number of threads
// With kWarpSize 1 (CPU) each becomes a plain loop inside one thread, which the compiler vectorises: 2048 elements, a
// row, or 64 columns. It vectorises the loop over threads, too (thread_outside in device.h), but not that of the longer
// bf16 kernels: gelu_backward and adamw were 3 to 6 times slower that way (Zen 3, AVX2, g++ 12).
// The loops that store floatX take their body as a lambda: g++ does not vectorise an `omp simd` loop in whose own text
// a struct like __nv_bfloat16 is made (5 times slower).
#pragma once

#include "llmc/device.h"
#include "llmc/numeric.h"

constexpr int kRowsPerBlock = 8;
constexpr int kElementsPerThread = kWarpSize == 1 ? 2048 : 1;
constexpr int kColumnsPerLane = kWarpSize == 1 ? 64 : 1;
constexpr int kWarpColumns = kColumnsPerLane * kWarpSize;

/// A number of blocks as the x dimension of a grid (at most 2^31 - 1, the hardware's limit).
inline unsigned grid_size(size_t blocks) {
  assert(blocks <= 0x7fffffffu);
  return static_cast<unsigned>(blocks);
}

/// Launch shape of a kernel that calls for_each_element(n, ...).
inline dim3 element_block() { return dim3(kWarpSize == 1 ? 1 : 256); }
inline dim3 element_grid(size_t n) {
  return dim3(grid_size(ceil_div<size_t>(n, (size_t)kElementsPerThread * element_block().x)));
}

/// Calls body(i) for the elements i < n of the calling thread. Different i must not depend on each other.
template <class Body>
__device__ inline void for_each_element(size_t n, const Body& body) {
  if constexpr (kElementsPerThread == 1) {
    const size_t i = thread_index();
    if (i < n) body(i);
  } else {
    const size_t begin = thread_index() * kElementsPerThread;
    const size_t end = begin + kElementsPerThread < n ? begin + kElementsPerThread : n;
    SIMD_LOOP
    for (size_t i = begin; i < end; i++) body(i);
  }
}

/// Calls body(i) for i = first, first + kStep, ... below end. Different i must not depend on each other.
template <int kStep, class Body>
__device__ inline void for_each_strided(int first, int end, const Body& body) {
  SIMD_LOOP
  for (int i = first; i < end; i += kStep) body(i);
}

/// Launch shape of a kernel with one warp per row.
inline dim3 row_block() { return dim3(kWarpSize, kRowsPerBlock); }
inline dim3 row_grid(size_t rows) { return dim3(grid_size(ceil_div<size_t>(rows, kRowsPerBlock))); }

/// The row of the calling warp (may be behind the last one).
__device__ inline size_t row_index() { return (size_t)blockIdx.x * blockDim.y + threadIdx.y; }

/// Launch shape of a kernel with one warp per (row or group of rows, column tile): grid (groups, tiles).
inline dim3 column_block() { return dim3(kWarpSize); }
inline dim3 column_grid(size_t groups, int C) { return dim3(grid_size(groups), ceil_div(C, kWarpColumns)); }

/// The columns of the calling lane: first, first + kWarpSize, ..., `count` of them (0 if the lane is behind the last
/// column).
struct LaneColumns {
  int first;
  int count;
};
__device__ inline LaneColumns lane_columns(int C) {
  const int first = blockIdx.y * kWarpColumns + threadIdx.x;
  const int left = first < C ? (C - first + kWarpSize - 1) / kWarpSize : 0;
  return {first, left < kColumnsPerLane ? left : kColumnsPerLane};
}

/// sums[k] += values of the lane's columns in one row (`row` points to column 0).
template <class T>
__device__ inline void add_row(float* sums, const T* __restrict__ row, LaneColumns columns) {
  const T* __restrict__ mine = row + columns.first;
  SIMD_LOOP
  for (int k = 0; k < columns.count; k++) sums[k] += (float)mine[k * kWarpSize];
}

/// row (+)= sums.
__device__ inline void store_row(float* __restrict__ row, const float* sums, LaneColumns columns, bool accumulate) {
  float* __restrict__ mine = row + columns.first;
  if (accumulate) {
    SIMD_LOOP
    for (int k = 0; k < columns.count; k++) mine[k * kWarpSize] += sums[k];
  } else {
    SIMD_LOOP
    for (int k = 0; k < columns.count; k++) mine[k * kWarpSize] = sums[k];
  }
}

/// Sum, or maximum, over a block of dim3(kWarpSize, kWarps); the same bits in every thread. All threads take part.
/// The leading barrier protects the scratch of the call before.
template <int kWarps>
__device__ inline float block_sum(float value) {
  value = warp_sum(value);
  if constexpr (kWarps > 1) {
    __shared__ float s_sums[kWarps];
    __syncthreads();
    if (threadIdx.x == 0) s_sums[threadIdx.y] = value;
    __syncthreads();
    value = 0.0f;
    for (int warp = 0; warp < kWarps; warp++) value += s_sums[warp];
  }
  return value;
}

template <int kWarps>
__device__ inline float block_max(float value) {
  value = warp_max(value);
  if constexpr (kWarps > 1) {
    __shared__ float s_maxima[kWarps];
    __syncthreads();
    if (threadIdx.x == 0) s_maxima[threadIdx.y] = value;
    __syncthreads();
    value = s_maxima[0];
    for (int warp = 1; warp < kWarps; warp++) value = fmaxf(value, s_maxima[warp]);
  }
  return value;
}
