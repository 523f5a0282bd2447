// 1_materialised.cuh -- attention, naive: the formulas one after another, one thread for each element of each result.
//
// Scores, probabilities and their gradient are whole (B,NH,T,T) arrays: 4 bytes times T for each query and head,
// written and read again by each of the small kernels. Every product reads its operands from global memory for each
// term.
#pragma once

#include "dev/cuda/attention/run.h"

namespace materialised {

/// p[row][j] = scale q.k for j <= t, one thread for each (row, j).
__global__ void score_kernel(float* p, const floatX* qkv, int B, int T, int C, int NH, float scale) {
  const size_t index = thread_index();
  if (index >= static_cast<size_t>(B) * NH * T * T) return;
  const AttentionRow row(index / T, NH, T);
  const int j = static_cast<int>(index % T), HS = C / NH;
  if (j > row.t) return;
  const floatX* q = qkv + row.packed(row.t, 0, T, C, HS);
  const floatX* k = qkv + row.packed(j, 1, T, C, HS);
  float sum = 0.0f;
  for (int d = 0; d < HS; d++) sum += (float)q[d] * (float)k[d];
  p[index] = scale * sum;
}

/// p := softmax of each row, lse := its logsumexp, one thread for each row.
__global__ void softmax_kernel(float* p, float* lse, int T, size_t rows) {
  const size_t row = thread_index();
  if (row >= rows) return;
  float* x = p + row * T;
  const int count = static_cast<int>(row % T) + 1;
  float maximum = -INFINITY, sum = 0.0f;
  for (int j = 0; j < count; j++) maximum = fmaxf(maximum, x[j]);
  for (int j = 0; j < count; j++) sum += expf(x[j] - maximum);
  for (int j = 0; j < count; j++) x[j] = expf(x[j] - maximum) / sum;
  lse[row] = maximum + logf(sum);
}

/// out = p v, one thread for each element.
__global__ void value_kernel(floatX* out, const float* p, const floatX* qkv, int T, int C, int NH, size_t elements) {
  const size_t index = thread_index();  // ((b * NH + h) * T + t) * HS + d
  if (index >= elements) return;
  const int HS = C / NH, d = static_cast<int>(index % HS);
  const AttentionRow row(index / HS, NH, T);
  const float* weights = p + index / HS * T;
  float sum = 0.0f;
  for (int j = 0; j <= row.t; j++) sum += weights[j] * (float)qkv[row.packed(j, 2, T, C, HS) + d];
  out[row.plain(row.t, T, C, HS) + d] = (floatX)sum;
}

inline void forward(const AttentionRun& run, cudaStream_t stream) {
  const size_t pairs = run.rows() * run.T, elements = run.rows() * run.HS();
  launch<score_kernel>(elementwise_grid(pairs), kElementwiseBlock, 0, stream, run.p, run.qkv, run.B, run.T, run.C,
                       run.NH, run.scale());
  launch<softmax_kernel>(elementwise_grid(run.rows()), kElementwiseBlock, 0, stream, run.p, run.lse, run.T, run.rows());
  launch<value_kernel>(elementwise_grid(elements), kElementwiseBlock, 0, stream, run.out, run.p, run.qkv, run.T, run.C,
                       run.NH, elements);
}

/// dp[row][j] = dout.v for j <= t, one thread for each (row, j).
__global__ void dp_kernel(float* dp, const floatX* dout, const floatX* qkv, int B, int T, int C, int NH) {
  const size_t index = thread_index();
  if (index >= static_cast<size_t>(B) * NH * T * T) return;
  const AttentionRow row(index / T, NH, T);
  const int j = static_cast<int>(index % T), HS = C / NH;
  if (j > row.t) return;
  const floatX* o = dout + row.plain(row.t, T, C, HS);
  const floatX* v = qkv + row.packed(j, 2, T, C, HS);
  float sum = 0.0f;
  for (int d = 0; d < HS; d++) sum += (float)o[d] * (float)v[d];
  dp[index] = sum;
}

/// dp := gradient of the scores = scale p (dp - sum_j p dp), one thread for each row.
__global__ void dsoftmax_kernel(float* dp, const float* p, int T, size_t rows, float scale) {
  const size_t row = thread_index();
  if (row >= rows) return;
  const int count = static_cast<int>(row % T) + 1;
  float sum = 0.0f;
  for (int j = 0; j < count; j++) sum += p[row * T + j] * dp[row * T + j];
  for (int j = 0; j < count; j++) dp[row * T + j] = scale * p[row * T + j] * (dp[row * T + j] - sum);
}

/// dq, dk and dv of one element of one position, one thread for each.
__global__ void dqkv_kernel(floatX* dqkv, const float* p, const float* dp, const floatX* dout, const floatX* qkv, int T,
                            int C, int NH, size_t elements) {
  const size_t index = thread_index();
  if (index >= elements) return;
  const int HS = C / NH, d = static_cast<int>(index % HS);
  const size_t number = index / HS;
  const AttentionRow row(number, NH, T);
  const float* head_p = p + (number - row.t) * T;
  const float* head_dp = dp + (number - row.t) * T;
  float dq = 0.0f, dk = 0.0f, dv = 0.0f;
  for (int j = 0; j <= row.t; j++) {
    dq += head_dp[static_cast<size_t>(row.t) * T + j] * (float)qkv[row.packed(j, 1, T, C, HS) + d];
  }
  for (int i = row.t; i < T; i++) {
    dk += head_dp[static_cast<size_t>(i) * T + row.t] * (float)qkv[row.packed(i, 0, T, C, HS) + d];
    dv += head_p[static_cast<size_t>(i) * T + row.t] * (float)dout[row.plain(i, T, C, HS) + d];
  }
  dqkv[row.packed(row.t, 0, T, C, HS) + d] = (floatX)dq;
  dqkv[row.packed(row.t, 1, T, C, HS) + d] = (floatX)dk;
  dqkv[row.packed(row.t, 2, T, C, HS) + d] = (floatX)dv;
}

inline void backward(const AttentionRun& run, cudaStream_t stream) {
  const size_t pairs = run.rows() * run.T, elements = run.rows() * run.HS();
  launch<dp_kernel>(elementwise_grid(pairs), kElementwiseBlock, 0, stream, run.dp, run.dout, run.qkv, run.B, run.T,
                    run.C, run.NH);
  launch<dsoftmax_kernel>(elementwise_grid(run.rows()), kElementwiseBlock, 0, stream, run.dp, run.p, run.T, run.rows(),
                          run.scale());
  launch<dqkv_kernel>(elementwise_grid(elements), kElementwiseBlock, 0, stream, run.dqkv, run.p, run.dp, run.dout,
                      run.qkv, run.T, run.C, run.NH, elements);
}

}  // namespace materialised
