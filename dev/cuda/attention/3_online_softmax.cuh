// 3_online_softmax.cuh -- adds: no T x T array. The forward pass meets each key once, with a running maximum and sum
// that correct what was added before; it keeps only lse, from which the backward pass computes each probability again.
//
// Memory goes from O(T^2) to O(T) for a head, for half as many products again in the backward pass. But each product
// still reads both operands from the caches, one multiply-add for every two loads.
#pragma once

#include "dev/cuda/attention/2_warp_per_row.cuh"

namespace online_softmax_rung {

using warp_per_row::add_scaled;
using warp_per_row::kBlock;
using warp_per_row::kPerLane;
using warp_per_row::store;
using warp_per_row::warp_dot;

__global__ void forward_kernel(floatX* out, float* lse, const floatX* qkv, int T, int C, int NH, size_t rows,
                               float scale) {
  const size_t number = static_cast<size_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (number >= rows) return;
  const AttentionRow row(number, NH, T);
  const int HS = C / NH;
  const floatX* q = qkv + row.packed(row.t, 0, T, C, HS);
  float maximum = -INFINITY, sum = 0.0f;
  float result[kPerLane] = {};
  for (int j = 0; j <= row.t; j++) {
    const float score = scale * warp_dot(q, qkv + row.packed(j, 1, T, C, HS), HS);
    if (score > maximum) {
      const float correction = expf(maximum - score);
      sum *= correction;
      SIMD_LOOP
      for (int i = 0; i < kPerLane; i++) result[i] *= correction;
      maximum = score;
    }
    const float weight = expf(score - maximum);
    sum += weight;
    add_scaled(result, weight, qkv + row.packed(j, 2, T, C, HS), HS);
  }
  for (int i = 0; i < kPerLane; i++) result[i] /= sum;
  store(out + row.plain(row.t, T, C, HS), result, HS);
  if (threadIdx.x == 0) lse[number] = maximum + logf(sum);
}

/// dq of one query, and delta = dout.out for the keys' kernel.
__global__ void query_kernel(floatX* dqkv, float* delta, const floatX* dout, const floatX* out, const floatX* qkv,
                             const float* lse, int T, int C, int NH, size_t rows, float scale) {
  const size_t number = static_cast<size_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (number >= rows) return;
  const AttentionRow row(number, NH, T);
  const int HS = C / NH;
  const floatX* q = qkv + row.packed(row.t, 0, T, C, HS);
  const floatX* o = dout + row.plain(row.t, T, C, HS);
  const float own_delta = warp_dot(o, out + row.plain(row.t, T, C, HS), HS);
  float dq[kPerLane] = {};
  for (int j = 0; j <= row.t; j++) {
    const floatX* k = qkv + row.packed(j, 1, T, C, HS);
    const float p = expf(scale * warp_dot(q, k, HS) - lse[number]);
    const float dp = warp_dot(o, qkv + row.packed(j, 2, T, C, HS), HS);
    add_scaled(dq, scale * p * (dp - own_delta), k, HS);
  }
  store(dqkv + row.packed(row.t, 0, T, C, HS), dq, HS);
  if (threadIdx.x == 0) delta[number] = own_delta;
}

/// dk and dv of one key.
__global__ void key_kernel(floatX* dqkv, const float* delta, const floatX* dout, const floatX* qkv, const float* lse,
                           int T, int C, int NH, size_t rows, float scale) {
  const size_t number = static_cast<size_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (number >= rows) return;
  const AttentionRow row(number, NH, T);
  const int HS = C / NH;
  const floatX* k = qkv + row.packed(row.t, 1, T, C, HS);
  const floatX* v = qkv + row.packed(row.t, 2, T, C, HS);
  float dk[kPerLane] = {}, dv[kPerLane] = {};
  for (int i = row.t; i < T; i++) {
    const size_t query = number + i - row.t;
    const floatX* q = qkv + row.packed(i, 0, T, C, HS);
    const floatX* o = dout + row.plain(i, T, C, HS);
    const float p = expf(scale * warp_dot(q, k, HS) - lse[query]);
    add_scaled(dv, p, o, HS);
    add_scaled(dk, scale * p * (warp_dot(o, v, HS) - delta[query]), q, HS);
  }
  store(dqkv + row.packed(row.t, 1, T, C, HS), dk, HS);
  store(dqkv + row.packed(row.t, 2, T, C, HS), dv, HS);
}

inline void forward(const AttentionRun& run, cudaStream_t stream) {
  launch<forward_kernel>(warp_per_row::grid(run), kBlock, 0, stream, run.out, run.lse, run.qkv, run.T, run.C, run.NH,
                         run.rows(), run.scale());
}

inline void backward(const AttentionRun& run, cudaStream_t stream) {
  launch<query_kernel>(warp_per_row::grid(run), kBlock, 0, stream, run.dqkv, run.delta, run.dout, run.out, run.qkv,
                       run.lse, run.T, run.C, run.NH, run.rows(), run.scale());
  launch<key_kernel>(warp_per_row::grid(run), kBlock, 0, stream, run.dqkv, run.delta, run.dout, run.qkv, run.lse, run.T,
                     run.C, run.NH, run.rows(), run.scale());
}

}  // namespace online_softmax_rung
