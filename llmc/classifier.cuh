// classifier.cuh -- softmax, cross-entropy and its gradient in one kernel, in place of the logits.
//
//   loss[n] = log(sum_v exp(logits[n,v])) - logits[n,target]
//   dlogits[n,v] = softmax(logits[n,:])[v] - (v == target)
// Shapes: logits (N,Vp) floatX, the first V columns are real; targets (N) int; losses (N) float.
// One block per row, because a row is long; with kWarpSize 1 the block is one thread and each pass a plain loop.
// Two passes for maximum and sum, not an online softmax: both loops vectorise, and the second finds the row in the
// second-level cache (50257 * 4 = 200 KB), as does the pass that writes the gradient. No array of probabilities exists.
//
// Bytes per row (e = size of floatX): V*e read, Vp*e written.
// Source: llm.c's fused classifier; the online alternative: Milakov, Gimelshein, arXiv 1805.02867.
#pragma once

#include "llmc/reduce.cuh"

constexpr int kClassifierWarps = kWarpSize == 1 ? 1 : 32;
constexpr int kClassifierThreads = kClassifierWarps * kWarpSize;

// max(x) and sum(exp(x - max)) of the block's row, the same bits in every thread. Kept apart: log(sum) + max would
// round the logarithm to the precision of a large max.
struct RowSum {
  float largest;
  float sum;
};
__device__ inline RowSum row_sum(const floatX* x, int V) {
  const int thread = threadIdx.y * kWarpSize + threadIdx.x;
  float largest = -INFINITY;
  SIMD_MAX(largest)
  for (int i = thread; i < V; i += kClassifierThreads) largest = (float)x[i] > largest ? (float)x[i] : largest;
  largest = block_max<kClassifierWarps>(largest);
  float sum = 0.0f;
  SIMD_SUM(sum)
  for (int i = thread; i < V; i += kClassifierThreads) sum += expf((float)x[i] - largest);
  return {largest, block_sum<kClassifierWarps>(sum)};
}

template <bool kWriteGradient>
__global__ void fused_classifier_kernel(float* __restrict__ losses, floatX* logits, const int* __restrict__ targets,
                                        int V, int Vp) {
  const size_t row = blockIdx.x;
  const int thread = threadIdx.y * kWarpSize + threadIdx.x;
  floatX* x = logits + row * Vp;
  const int target = targets[row];
  if (target == -1) {  // the same for the whole block
    if (thread == 0) losses[row] = 0.0f;
    if constexpr (kWriteGradient) {
      for_each_strided<kClassifierThreads>(thread, Vp, [=](int i) { x[i] = (floatX)0.0f; });
    }
    return;
  }
  // read before the barriers of the reductions: behind them other warps overwrite the row
  const float target_logit = target >= 0 && target < V ? (float)x[target] : NAN;
  const RowSum total = row_sum(x, V);
  if (thread == 0) losses[row] = logf(total.sum) - (target_logit - total.largest);
  if constexpr (kWriteGradient) {
    const float scale = 1.0f / total.sum;
    for_each_strided<kClassifierThreads>(thread, V, [=](int i) {
      x[i] = (floatX)(expf((float)x[i] - total.largest) * scale - (i == target ? 1.0f : 0.0f));
    });
    for_each_strided<kClassifierThreads>(V + thread, Vp, [=](int i) { x[i] = (floatX)0.0f; });
  }
}

/// losses[n] = cross-entropy of row n against targets[n]; with write_dlogits the row becomes the gradient of the SUM of
/// the losses (no scaling), its padding columns V..Vp-1 become 0; without it logits are only read (validation).
/// Overwrites losses (N) float; logits (N,Vp) floatX in place. targets (N): -1 = ignored, loss 0 and gradient 0; a
/// target outside [0,V) other than -1 gives the loss NaN and is never used as an index. A NaN in a row gives the loss
/// NaN. Any N >= 0, V >= 1, Vp >= V. Asynchronous on `stream`; deterministic. Traffic: N*V elements read, N*Vp written.
inline void fused_classifier(float* losses, floatX* logits, const int* targets, int N, int V, int Vp,
                             bool write_dlogits, cudaStream_t stream) {
  assert(N >= 0 && V >= 1 && Vp >= V);
  if (N == 0) return;
  const dim3 block(kWarpSize, kClassifierWarps);
  if (write_dlogits) {
    launch<fused_classifier_kernel<true>>(N, block, 0, stream, losses, logits, targets, V, Vp);
  } else {
    launch<fused_classifier_kernel<false>>(N, block, 0, stream, losses, logits, targets, V, Vp);
  }
}
