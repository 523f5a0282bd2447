// 1_materialised.cuh -- attention, naive: the formulas one after another, one thread for each element of each result.
//
// Scores, probabilities and their gradient are whole (B,NH,T,T) arrays: 4 bytes times T for each query and head,
// written and read again by each of the small kernels. Every product reads its operands from global memory for each
// term.
#pragma once

#include "dev/cuda/attention/run.h"

namespace materialised {

__device__ __forceinline__ float dot(const floatX* a, const floatX* b, int HS) {
  float sum = 0.0f;
  for (int d = 0; d < HS; d++) sum += (float)a[d] * (float)b[d];
  return sum;
}

/// p[row][j] = scale q.k for j <= t, one thread for each (row, j).
__global__ void score_kernel(AttentionRun run) {
  const size_t index = thread_index();
  if (index >= run.rows() * run.T) return;
  const AttentionRow row(run, index / run.T);
  const int j = static_cast<int>(index % run.T);
  if (j <= row.t) run.p[index] = run.scale * dot(row.q(row.t), row.k(j), run.HS);
}

/// p := softmax of each row, lse := its logsumexp, one thread for each row.
__global__ void softmax_kernel(AttentionRun run) {
  const size_t row = thread_index();
  if (row >= run.rows()) return;
  float* x = run.p + row * run.T;
  const int count = static_cast<int>(row % run.T) + 1;
  float maximum = -INFINITY, sum = 0.0f;
  for (int j = 0; j < count; j++) maximum = fmaxf(maximum, x[j]);
  for (int j = 0; j < count; j++) sum += expf(x[j] - maximum);
  for (int j = 0; j < count; j++) x[j] = expf(x[j] - maximum) / sum;
  run.lse[row] = maximum + logf(sum);
}

/// out = p v, one thread for each element (row, d).
__global__ void value_kernel(AttentionRun run) {
  const size_t index = thread_index();
  if (index >= run.rows() * run.HS) return;
  const size_t d = index % run.HS;
  const AttentionRow row(run, index / run.HS);
  const float* p = run.p + row.number * run.T;
  float sum = 0.0f;
  for (int j = 0; j <= row.t; j++) sum += p[j] * (float)row.v(j)[d];
  run.out[row.plain(row.t) + d] = (floatX)sum;
}

inline void forward(const AttentionRun& run, cudaStream_t stream) {
  launch<score_kernel>(elementwise_grid(run.rows() * run.T), kElementwiseBlock, 0, stream, run);
  launch<softmax_kernel>(elementwise_grid(run.rows()), kElementwiseBlock, 0, stream, run);
  launch<value_kernel>(elementwise_grid(run.rows() * run.HS), kElementwiseBlock, 0, stream, run);
}

/// dp[row][j] = dout.v for j <= t, one thread for each (row, j).
__global__ void dp_kernel(AttentionRun run) {
  const size_t index = thread_index();
  if (index >= run.rows() * run.T) return;
  const AttentionRow row(run, index / run.T);
  const int j = static_cast<int>(index % run.T);
  if (j <= row.t) run.dp[index] = dot(row.dout(row.t), row.v(j), run.HS);
}

/// dp := gradient of the scores = scale p (dp - sum_j p dp), one thread for each row.
__global__ void dsoftmax_kernel(AttentionRun run) {
  const size_t row = thread_index();
  if (row >= run.rows()) return;
  const float* p = run.p + row * run.T;
  float* dp = run.dp + row * run.T;
  const int count = static_cast<int>(row % run.T) + 1;
  float sum = 0.0f;
  for (int j = 0; j < count; j++) sum += p[j] * dp[j];
  for (int j = 0; j < count; j++) dp[j] = run.scale * p[j] * (dp[j] - sum);
}

/// dq, dk and dv of one element of one position, one thread for each (row, d).
__global__ void dqkv_kernel(AttentionRun run) {
  const size_t index = thread_index();
  if (index >= run.rows() * run.HS) return;
  const size_t d = index % run.HS, T = run.T;
  const AttentionRow row(run, index / run.HS);
  const float* p = run.p + (row.number - row.t) * T;  // of the whole head
  const float* dp = run.dp + (row.number - row.t) * T;
  float dq = 0.0f, dk = 0.0f, dv = 0.0f;
  for (int j = 0; j <= row.t; j++) dq += dp[row.t * T + j] * (float)row.k(j)[d];
  for (int i = row.t; i < run.T; i++) {
    dk += dp[i * T + row.t] * (float)row.q(i)[d];
    dv += p[i * T + row.t] * (float)row.dout(i)[d];
  }
  run.dqkv[row.packed(row.t, 0) + d] = (floatX)dq;
  run.dqkv[row.packed(row.t, 1) + d] = (floatX)dk;
  run.dqkv[row.packed(row.t, 2) + d] = (floatX)dv;
}

inline void backward(const AttentionRun& run, cudaStream_t stream) {
  launch<dp_kernel>(elementwise_grid(run.rows() * run.T), kElementwiseBlock, 0, stream, run);
  launch<dsoftmax_kernel>(elementwise_grid(run.rows()), kElementwiseBlock, 0, stream, run);
  launch<dqkv_kernel>(elementwise_grid(run.rows() * run.HS), kElementwiseBlock, 0, stream, run);
}

}  // namespace materialised
