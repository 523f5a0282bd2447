// 2_fused_block.cuh -- adds: one kernel, a block for each row; the probabilities exist only in registers, on their way
// into the gradient that overwrites the logits. The row is read three times: maximum, sum, gradient.
//
// Reductions go through shared memory, as in layernorm/2_block_per_row.cuh.
#pragma once

#include "llmc/device.h"

namespace fused_block {

constexpr int kThreads = 512;

template <bool kMaximum>
__device__ inline float reduce(float value) {
  __shared__ float s_values[kThreads];
  const int thread = threadIdx.x;
  s_values[thread] = value;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (thread < half) {
      const float other = s_values[thread + half];
      s_values[thread] = kMaximum ? fmaxf(s_values[thread], other) : s_values[thread] + other;
    }
    __syncthreads();
  }
  const float result = s_values[0];
  __syncthreads();
  return result;
}

__global__ void classify_kernel(float* losses, floatX* logits, const int* targets, int V, int Vp) {
  const size_t row = blockIdx.x;
  floatX* x = logits + row * Vp;
  const int target = targets[row];
  const float target_logit = (float)x[target];  // before anyone overwrites it
  float largest = -INFINITY;
  for (int i = threadIdx.x; i < V; i += kThreads) largest = fmaxf(largest, (float)x[i]);
  largest = reduce<true>(largest);
  float sum = 0.0f;
  for (int i = threadIdx.x; i < V; i += kThreads) sum += expf((float)x[i] - largest);
  sum = reduce<false>(sum);
  if (threadIdx.x == 0) losses[row] = logf(sum) - (target_logit - largest);
  for (int i = threadIdx.x; i < Vp; i += kThreads) {
    const float p = i < V ? expf((float)x[i] - largest) / sum : 0.0f;
    x[i] = (floatX)(p - (i == target ? 1.0f : 0.0f));
  }
}

inline void classify(float* losses, floatX* logits, float*, const int* targets, int N, int V, int Vp,
                     cudaStream_t stream) {
  launch<classify_kernel>(N, kThreads, 0, stream, losses, logits, targets, V, Vp);
}

}  // namespace fused_block
