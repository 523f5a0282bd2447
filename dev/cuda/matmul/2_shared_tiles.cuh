// 2_shared_tiles.cuh -- adds: a block loads tiles of both operands into shared memory, coalesced, and each loaded
// number serves 32 threads instead of one.
//
// Traffic to global memory falls 32 times; now shared memory is the limit: two loads for each multiply-add. (On the CPU
// device the barriers cost more than the tiles gain: a block of 1024 threads changes stacks 2048 times for each tile.)
#pragma once

#include "llmc/device.h"

namespace shared_tiles {

constexpr int kTile = 32;

__global__ void forward_kernel(floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, int N, int C,
                               int OC) {
  __shared__ float x[kTile][kTile];
  __shared__ float w[kTile][kTile + 1];  // a column of it is read at once: the spare float separates the banks
  const int tx = static_cast<int>(threadIdx.x), ty = static_cast<int>(threadIdx.y);
  const int n = static_cast<int>(blockIdx.y) * kTile + ty;
  const int o = static_cast<int>(blockIdx.x) * kTile + tx;
  const int first_o = static_cast<int>(blockIdx.x) * kTile;
  float sum = 0.0f;
  for (int c = 0; c < C; c += kTile) {
    x[ty][tx] = n < N && c + tx < C ? (float)inp[static_cast<size_t>(n) * C + c + tx] : 0.0f;
    w[ty][tx] = first_o + ty < OC && c + tx < C ? (float)weight[static_cast<size_t>(first_o + ty) * C + c + tx] : 0.0f;
    __syncthreads();
    for (int i = 0; i < kTile; i++) sum += x[ty][i] * w[tx][i];
    __syncthreads();
  }
  if (n < N && o < OC) out[static_cast<size_t>(n) * OC + o] = (floatX)(sum + (float)bias[o]);
}

inline void forward(floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, int N, int C, int OC,
                    cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(OC, kTile)), static_cast<unsigned>(ceil_div(N, kTile)));
  launch<forward_kernel>(grid, dim3(kTile, kTile), 0, stream, out, inp, weight, bias, N, C, OC);
}

}  // namespace shared_tiles
