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

/// The row of this warp.
__device__ __forceinline__ size_t warp_index() { return static_cast<size_t>(blockIdx.x) * blockDim.y + threadIdx.y; }

/// One row: scores, softmax and output.
__global__ void forward_kernel(AttentionRun run) {
  const AttentionRow row(run, warp_index());
  if (row.number >= run.rows()) return;
  const int HS = run.HS, count = row.t + 1;
  float* x = run.p + row.number * run.T;
  for (int j = 0; j < count; j++) {
    const float score = run.scale * warp_dot(row.q(row.t), row.k(j), HS);
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
  for (int j = 0; j < count; j++) add_scaled(result, x[j], row.v(j), HS);
  store(run.out + row.plain(row.t), result, HS);
  if (threadIdx.x == 0) run.lse[row.number] = maximum + logf(sum);
}

/// One row: gradient of its scores into dp, and dq.
__global__ void query_kernel(AttentionRun run) {
  const AttentionRow row(run, warp_index());
  if (row.number >= run.rows()) return;
  const int HS = run.HS, count = row.t + 1;
  float* dx = run.dp + row.number * run.T;
  const float* x = run.p + row.number * run.T;
  float delta = 0.0f;
  for (int j = 0; j < count; j++) {
    const float gradient = warp_dot(row.dout(row.t), row.v(j), HS);
    delta += x[j] * gradient;
    if (threadIdx.x == 0) dx[j] = gradient;
  }
  __syncwarp();
  SIMD_LOOP
  for (int j = threadIdx.x; j < count; j += kWarpSize) dx[j] = run.scale * x[j] * (dx[j] - delta);
  __syncwarp();
  float dq[kPerLane] = {};
  for (int j = 0; j < count; j++) add_scaled(dq, dx[j], row.k(j), HS);
  store(run.dqkv + row.packed(row.t, 0), dq, HS);
}

/// One key: dk and dv, from a column of dp and p.
__global__ void key_kernel(AttentionRun run) {
  const AttentionRow row(run, warp_index());
  if (row.number >= run.rows()) return;
  float dk[kPerLane] = {}, dv[kPerLane] = {};
  for (int i = row.t; i < run.T; i++) {
    const size_t pair = (row.number + i - row.t) * run.T + row.t;
    add_scaled(dk, run.dp[pair], row.q(i), run.HS);
    add_scaled(dv, run.p[pair], row.dout(i), run.HS);
  }
  store(run.dqkv + row.packed(row.t, 1), dk, run.HS);
  store(run.dqkv + row.packed(row.t, 2), dv, run.HS);
}

inline dim3 grid(const AttentionRun& run) {
  return dim3(static_cast<unsigned>(ceil_div<size_t>(run.rows(), kRowsPerBlock)));
}
constexpr dim3 kBlock(kWarpSize, kRowsPerBlock);

inline void forward(const AttentionRun& run, cudaStream_t stream) {
  launch<forward_kernel>(grid(run), kBlock, 0, stream, run);
}

inline void backward(const AttentionRun& run, cudaStream_t stream) {
  launch<query_kernel>(grid(run), kBlock, 0, stream, run);
  launch<key_kernel>(grid(run), kBlock, 0, stream, run);
}

}  // namespace warp_per_row
