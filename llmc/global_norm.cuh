// global_norm.cuh -- sums of squares in fixed blocks: the first half of the global gradient norm.
//
//   partial[i] = sum over the elements [1024 i, 1024 (i+1)) of x^2, in double
// The blocks belong to the model's canonical parameter order, not to a rank or a launch, and the host adds their
// doubles left to right; therefore the norm has the same bits for every partition of the parameters.
// Double: in float the sum over 10^8 elements would keep only 3 or 4 digits.
//
// Bytes: 4 n read. One warp per block.
#pragma once

#include "llmc/norm_block.h"
#include "llmc/reduce.cuh"

__global__ void square_sum_blocks_kernel(double* __restrict__ partial, const float* __restrict__ x, size_t n) {
  const size_t block = row_index();
  if (block * kNormBlock >= n) return;
  const float* __restrict__ mine = x + block * kNormBlock;
  const int count = n - block * kNormBlock < kNormBlock ? (int)(n - block * kNormBlock) : (int)kNormBlock;
  double sum = 0.0;
  SIMD_SUM(sum)
  for (int i = threadIdx.x; i < count; i += kWarpSize) sum += (double)mine[i] * (double)mine[i];
  sum = warp_sum(sum);
  if (threadIdx.x == 0) partial[block] = sum;
}

/// partial[i] = sum of squares of x[i*kNormBlock ...], ceil(n / kNormBlock) doubles, overwritten; the last block may be
/// short. Reads x (n) float. Any n. Asynchronous on `stream`; deterministic: a block's value depends on its own
/// elements only.
inline void square_sum_blocks(double* partial, const float* x, size_t n, cudaStream_t stream) {
  if (n == 0) return;
  launch<square_sum_blocks_kernel>(row_grid(ceil_div(n, kNormBlock)), row_block(), 0, stream, partial, x, n);
}
