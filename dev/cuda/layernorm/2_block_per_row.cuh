// 2_block_per_row.cuh -- adds: a block for each row, so that neighbouring threads read neighbouring elements
// (coalesced) and there are 256 times as many threads.
//
// The two sums over the row now go through shared memory: a tree of log2(256) = 8 steps with a barrier behind each. For
// C = 768 a thread has only 3 elements, so the barriers cost more than the additions.
#pragma once

#include "llmc/device.h"

namespace block_per_row {

constexpr int kThreads = 256;

// Sum over the block, in every thread. The barrier at the end lets the next call reuse the scratch.
__device__ inline float tree_sum(float value) {
  __shared__ float s_values[kThreads];
  const int thread = threadIdx.x;
  s_values[thread] = value;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (thread < half) s_values[thread] += s_values[thread + half];
    __syncthreads();
  }
  const float sum = s_values[0];
  __syncthreads();
  return sum;
}

__global__ void forward_kernel(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                               const floatX* bias, int C) {
  const size_t row = blockIdx.x;
  const floatX* x = inp + row * C;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < C; i += kThreads) sum += (float)x[i];
  const float m = tree_sum(sum) / C;
  float square = 0.0f;
  for (int i = threadIdx.x; i < C; i += kThreads) square += ((float)x[i] - m) * ((float)x[i] - m);
  const float r = 1.0f / sqrtf(tree_sum(square) / C + 1e-5f);
  for (int i = threadIdx.x; i < C; i += kThreads) {
    out[row * C + i] = (floatX)(((float)x[i] - m) * r * (float)weight[i] + (float)bias[i]);
  }
  if (threadIdx.x == 0) {
    mean[row] = m;
    rstd[row] = r;
  }
}

inline void forward(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight, const floatX* bias,
                    int N, int C, cudaStream_t stream) {
  launch<forward_kernel>(N, kThreads, 0, stream, out, mean, rstd, inp, weight, bias, C);
}

}  // namespace block_per_row
