// 2_warp_per_row.cuh -- adds: one warp for each row and one kernel for each direction: neighbouring lanes read
// neighbouring addresses, a row is summed by warp_max and warp_sum, and its probabilities are in the cache when they
// are used again.
//
// The (B,NH,T,T) arrays are still there, since the backward pass wants the probabilities.
#pragma once

#include "dev/cuda/attention/run.h"

namespace warp_per_row {

constexpr int kRowsPerBlock = 4;
constexpr int kPerLane = kMaxHead / kWarpSize;  // elements of a head that a lane holds: lane, lane + kWarpSize, ...

/// sum over d of a[d] b[d], in every lane.
__device__ __forceinline__ float warp_dot(const floatX* __restrict__ a, const floatX* __restrict__ b, int HS) {
  float sum = 0.0f;
  SIMD_SUM(sum)
  for (int d = threadIdx.x; d < HS; d += kWarpSize) sum += (float)a[d] * (float)b[d];
  return warp_sum(sum);
}

/// sum[i] += factor x[lane + i * kWarpSize]. The indices of sum are constants after unrolling: it stays in registers.
__device__ __forceinline__ void add_scaled(float* __restrict__ sum, float factor, const floatX* __restrict__ x,
                                           int HS) {
  UNROLL
  for (int i = 0; i < kPerLane; i++) {
    const int d = static_cast<int>(threadIdx.x) + i * kWarpSize;
    if (d < HS) sum[i] += factor * (float)x[d];
  }
}

__device__ __forceinline__ void store(floatX* __restrict__ target, const float* __restrict__ sum, int HS) {
  UNROLL
  for (int i = 0; i < kPerLane; i++) {
    const int d = static_cast<int>(threadIdx.x) + i * kWarpSize;
    if (d < HS) target[d] = (floatX)sum[i];
  }
}

/// One row: scores, softmax and output.
__global__ void forward_kernel(floatX* out, float* lse, float* p, const floatX* qkv, int T, int C, int NH, size_t rows,
                               float scale) {
  const size_t number = static_cast<size_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (number >= rows) return;
  const AttentionRow row(number, NH, T);
  const int HS = C / NH, count = row.t + 1;
  float* x = p + number * T;
  const floatX* q = qkv + row.packed(row.t, 0, T, C, HS);
  for (int j = 0; j < count; j++) {
    const float score = scale * warp_dot(q, qkv + row.packed(j, 1, T, C, HS), HS);
    if (threadIdx.x == 0) x[j] = score;
  }
  __syncwarp();
  float maximum = -INFINITY, sum = 0.0f;
  SIMD_MAX(maximum)
  for (int j = threadIdx.x; j < count; j += kWarpSize) maximum = fmaxf(maximum, x[j]);
  maximum = warp_max(maximum);
  SIMD_SUM(sum)
  for (int j = threadIdx.x; j < count; j += kWarpSize) sum += expf(x[j] - maximum);
  sum = warp_sum(sum);
  SIMD_LOOP
  for (int j = threadIdx.x; j < count; j += kWarpSize) x[j] = expf(x[j] - maximum) / sum;
  __syncwarp();
  float result[kPerLane] = {};
  for (int j = 0; j < count; j++) add_scaled(result, x[j], qkv + row.packed(j, 2, T, C, HS), HS);
  store(out + row.plain(row.t, T, C, HS), result, HS);
  if (threadIdx.x == 0) lse[number] = maximum + logf(sum);
}

/// One row: gradient of its scores into dp, and dq.
__global__ void query_kernel(floatX* dqkv, float* dp, const float* p, const floatX* dout, const floatX* qkv, int T,
                             int C, int NH, size_t rows, float scale) {
  const size_t number = static_cast<size_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (number >= rows) return;
  const AttentionRow row(number, NH, T);
  const int HS = C / NH, count = row.t + 1;
  float* dx = dp + number * T;
  const float* x = p + number * T;
  const floatX* o = dout + row.plain(row.t, T, C, HS);
  float delta = 0.0f;
  for (int j = 0; j < count; j++) {
    const float gradient = warp_dot(o, qkv + row.packed(j, 2, T, C, HS), HS);
    delta += x[j] * gradient;
    if (threadIdx.x == 0) dx[j] = gradient;
  }
  __syncwarp();
  SIMD_LOOP
  for (int j = threadIdx.x; j < count; j += kWarpSize) dx[j] = scale * x[j] * (dx[j] - delta);
  __syncwarp();
  float dq[kPerLane] = {};
  for (int j = 0; j < count; j++) add_scaled(dq, dx[j], qkv + row.packed(j, 1, T, C, HS), HS);
  store(dqkv + row.packed(row.t, 0, T, C, HS), dq, HS);
}

/// One key: dk and dv, from a column of dp and p.
__global__ void key_kernel(floatX* dqkv, const float* dp, const float* p, const floatX* dout, const floatX* qkv, int T,
                           int C, int NH, size_t rows) {
  const size_t number = static_cast<size_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (number >= rows) return;
  const AttentionRow row(number, NH, T);
  const int HS = C / NH;
  float dk[kPerLane] = {}, dv[kPerLane] = {};
  for (int i = row.t; i < T; i++) {
    const size_t pair = (number + i - row.t) * T + row.t;
    add_scaled(dk, dp[pair], qkv + row.packed(i, 0, T, C, HS), HS);
    add_scaled(dv, p[pair], dout + row.plain(i, T, C, HS), HS);
  }
  store(dqkv + row.packed(row.t, 1, T, C, HS), dk, HS);
  store(dqkv + row.packed(row.t, 2, T, C, HS), dv, HS);
}

inline dim3 grid(const AttentionRun& run) {
  return dim3(static_cast<unsigned>(ceil_div<size_t>(run.rows(), kRowsPerBlock)));
}
constexpr dim3 kBlock(kWarpSize, kRowsPerBlock);

inline void forward(const AttentionRun& run, cudaStream_t stream) {
  launch<forward_kernel>(grid(run), kBlock, 0, stream, run.out, run.lse, run.p, run.qkv, run.T, run.C, run.NH,
                         run.rows(), run.scale());
}

inline void backward(const AttentionRun& run, cudaStream_t stream) {
  launch<query_kernel>(grid(run), kBlock, 0, stream, run.dqkv, run.dp, run.p, run.dout, run.qkv, run.T, run.C, run.NH,
                       run.rows(), run.scale());
  launch<key_kernel>(grid(run), kBlock, 0, stream, run.dqkv, run.dp, run.p, run.dout, run.qkv, run.T, run.C, run.NH,
                     run.rows());
}

}  // namespace warp_per_row
