// 3_register_tiles.cuh -- adds: each thread computes a micro-tile of 4 x 4 outputs in registers, so that 8 loads from
// shared memory serve 16 multiply-adds.
//
// With kWarpSize == 1 a block is one thread, which walks over micro-tiles of 6 x 16: the compiler keeps them in 12
// vector registers. From here to the library it is tuning: 8 x 8 micro-tiles, double buffering, and on a GPU the tensor
// cores.
#pragma once

#include "llmc/device.h"

namespace register_tiles {

constexpr bool kOneThread = kWarpSize == 1;
constexpr int kRows = kOneThread ? 96 : 64;      // of the output, n
constexpr int kColumns = kOneThread ? 128 : 64;  // of the output, o
constexpr int kInner = kOneThread ? 128 : 16;
constexpr int kMicroRows = kOneThread ? 6 : 4;
constexpr int kMicroColumns = kOneThread ? 16 : 4;
constexpr int kThreads = kOneThread ? 1 : (kRows / kMicroRows) * (kColumns / kMicroColumns);
constexpr int kTiles = (kRows / kMicroRows) * (kColumns / kMicroColumns) / kThreads;  // of a thread

/// tile[i][j] := source[first + j][c + i], i < kInner, j < kCount: transposed, zero outside of the matrix.
template <int kCount>
__device__ __forceinline__ void load_transposed(float* __restrict__ tile, const floatX* __restrict__ source, int first,
                                                int rows, int c, int C) {
  for (int index = threadIdx.x; index < kCount * kInner; index += kThreads) {
    const int i = index % kInner, j = index / kInner;
    const bool inside = first + j < rows && c + i < C;
    tile[i * kCount + j] = inside ? (float)source[static_cast<size_t>(first + j) * C + c + i] : 0.0f;
  }
}

/// sum += x^T w of one micro-tile; x points to its first row, w to its first column.
__device__ __forceinline__ void multiply(float (&sum)[kMicroRows][kMicroColumns], const float* __restrict__ x,
                                         const float* __restrict__ w) {
  float product[kMicroRows][kMicroColumns] = {};
  for (int k = 0; k < kInner; k++) {
    UNROLL
    for (int i = 0; i < kMicroRows; i++) {
      const float factor = x[k * kRows + i];
      SIMD_LOOP
      for (int j = 0; j < kMicroColumns; j++) product[i][j] += factor * w[k * kColumns + j];
    }
  }
  UNROLL
  for (int i = 0; i < kMicroRows; i++) {
    SIMD_LOOP
    for (int j = 0; j < kMicroColumns; j++) sum[i][j] += product[i][j];
  }
}

__global__ void __launch_bounds__(kThreads)
    forward_kernel(floatX* __restrict__ out, const floatX* __restrict__ inp, const floatX* __restrict__ weight,
                   const floatX* __restrict__ bias, int N, int C, int OC) {
  DYNAMIC_SHARED(float, memory);
  float* x = memory;
  float* w = memory + kInner * kRows;
  const int first_n = static_cast<int>(blockIdx.y) * kRows, first_o = static_cast<int>(blockIdx.x) * kColumns;
  constexpr int kAcross = kColumns / kMicroColumns;
  float sum[kTiles][kMicroRows][kMicroColumns] = {};
  for (int c = 0; c < C; c += kInner) {
    load_transposed<kRows>(x, inp, first_n, N, c, C);
    load_transposed<kColumns>(w, weight, first_o, OC, c, C);
    __syncthreads();
    for (int t = 0; t < kTiles; t++) {
      const int tile = t * kThreads + static_cast<int>(threadIdx.x);
      multiply(sum[t], x + tile / kAcross * kMicroRows, w + tile % kAcross * kMicroColumns);
    }
    __syncthreads();
  }
  for (int t = 0; t < kTiles; t++) {
    const int tile = t * kThreads + static_cast<int>(threadIdx.x);
    for (int i = 0; i < kMicroRows; i++) {
      const int n = first_n + tile / kAcross * kMicroRows + i;
      for (int j = 0; j < kMicroColumns; j++) {
        const int o = first_o + tile % kAcross * kMicroColumns + j;
        if (n < N && o < OC) out[static_cast<size_t>(n) * OC + o] = (floatX)(sum[t][i][j] + (float)bias[o]);
      }
    }
  }
}

inline void forward(floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, int N, int C, int OC,
                    cudaStream_t stream) {
  constexpr size_t kBytes = kInner * (kRows + kColumns) * sizeof(float);
  if (kBytes > 48 * 1024) allow_dynamic_shared<forward_kernel>(kBytes);
  const dim3 grid(static_cast<unsigned>(ceil_div(OC, kColumns)), static_cast<unsigned>(ceil_div(N, kRows)));
  launch<forward_kernel>(grid, dim3(kThreads), kBytes, stream, out, inp, weight, bias, N, C, OC);
}

}  // namespace register_tiles
