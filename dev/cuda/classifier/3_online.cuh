// 3_online.cuh -- adds: maximum and sum in one pass (online softmax): a thread that meets a larger value rescales the
// sum it has so far, and two partial sums are combined in the same way. The row is read twice instead of three times,
// and there are as many reductions over the block.
//
// The price is a second exponential or a branch for every element, which also keeps a CPU's compiler from vectorising.
// Source: Milakov, Gimelshein, arXiv 1805.02867.
#pragma once

#include "llmc/device.h"

namespace online {

constexpr int kWarps = 16;
constexpr int kThreads = kWarps * kWarpSize;

// sum * exp(largest) = what has been added so far
struct Partial {
  float largest, sum;
};

__device__ inline Partial combine(Partial a, Partial b) {
  const float largest = fmaxf(a.largest, b.largest);
  if (largest == -INFINITY) return a;
  return {largest, a.sum * expf(a.largest - largest) + b.sum * expf(b.largest - largest)};
}

// The block's total, in every thread.
__device__ inline Partial reduce(Partial mine) {
  __shared__ float s_largest[kWarps], s_sum[kWarps];
  const float largest = warp_max(mine.largest);
  const float sum = warp_sum(largest == -INFINITY ? 0.0f : mine.sum * expf(mine.largest - largest));
  if (threadIdx.x == 0) {
    s_largest[threadIdx.y] = largest;
    s_sum[threadIdx.y] = sum;
  }
  __syncthreads();
  Partial total = {-INFINITY, 0.0f};
  for (int warp = 0; warp < kWarps; warp++) total = combine(total, {s_largest[warp], s_sum[warp]});
  return total;
}

__global__ void classify_kernel(float* losses, floatX* logits, const int* targets, int V, int Vp) {
  const size_t row = blockIdx.x;
  const int thread = threadIdx.y * kWarpSize + threadIdx.x;
  floatX* x = logits + row * Vp;
  const int target = targets[row];
  const float target_logit = (float)x[target];
  Partial partial = {-INFINITY, 0.0f};
  for (int i = thread; i < V; i += kThreads) {
    const float value = (float)x[i];
    if (value > partial.largest) {
      partial.sum = partial.sum * expf(partial.largest - value) + 1.0f;
      partial.largest = value;
    } else {
      partial.sum += expf(value - partial.largest);
    }
  }
  const Partial total = reduce(partial);
  if (thread == 0) losses[row] = logf(total.sum) - (target_logit - total.largest);
  const float scale = 1.0f / total.sum;
  for (int i = thread; i < Vp; i += kThreads) {
    const float p = i < V ? expf((float)x[i] - total.largest) * scale : 0.0f;
    x[i] = (floatX)(p - (i == target ? 1.0f : 0.0f));
  }
}

inline void classify(float* losses, floatX* logits, float*, const int* targets, int N, int V, int Vp,
                     cudaStream_t stream) {
  launch<classify_kernel>(N, dim3(kWarpSize, kWarps), 0, stream, losses, logits, targets, V, Vp);
}

}  // namespace online
