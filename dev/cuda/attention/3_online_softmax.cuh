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
using warp_per_row::warp_index;

__global__ void forward_kernel(AttentionRun run) {
  const AttentionRow row(run, warp_index());
  if (row.number >= run.rows()) return;
  const int HS = run.HS;
  float maximum = -INFINITY, sum = 0.0f;
  float result[kPerLane] = {};
  for (int j = 0; j <= row.t; j++) {
    const float score = run.scale * warp_dot(row.q(row.t), row.k(j), HS);
    if (score > maximum) {
      const float correction = expf(maximum - score);
      sum *= correction;
      UNROLL
      for (int i = 0; i < kPerLane; i++) result[i] *= correction;
      maximum = score;
    }
    const float weight = expf(score - maximum);
    sum += weight;
    add_scaled(result, weight, row.v(j), HS);
  }
  UNROLL
  for (int i = 0; i < kPerLane; i++) result[i] /= sum;
  store(run.out + row.plain(row.t), result, HS);
  if (threadIdx.x == 0) run.lse[row.number] = maximum + logf(sum);
}

/// dq of one query, and delta = dout.out for the keys' kernel.
__global__ void query_kernel(AttentionRun run) {
  const AttentionRow row(run, warp_index());
  if (row.number >= run.rows()) return;
  const int HS = run.HS;
  const float lse = run.lse[row.number], delta = warp_dot(row.dout(row.t), run.out + row.plain(row.t), HS);
  float dq[kPerLane] = {};
  for (int j = 0; j <= row.t; j++) {
    const float p = expf(run.scale * warp_dot(row.q(row.t), row.k(j), HS) - lse);
    const float dp = warp_dot(row.dout(row.t), row.v(j), HS);
    add_scaled(dq, run.scale * p * (dp - delta), row.k(j), HS);
  }
  store(run.dqkv + row.packed(row.t, 0), dq, HS);
  if (threadIdx.x == 0) run.delta[row.number] = delta;
}

/// dk and dv of one key.
__global__ void key_kernel(AttentionRun run) {
  const AttentionRow row(run, warp_index());
  if (row.number >= run.rows()) return;
  const int HS = run.HS;
  float dk[kPerLane] = {}, dv[kPerLane] = {};
  for (int i = row.t; i < run.T; i++) {
    const size_t query = row.number + i - row.t;
    const float p = expf(run.scale * warp_dot(row.q(i), row.k(row.t), HS) - run.lse[query]);
    const float dp = warp_dot(row.dout(i), row.v(row.t), HS);
    add_scaled(dv, p, row.dout(i), HS);
    add_scaled(dk, run.scale * p * (dp - run.delta[query]), row.q(i), HS);
  }
  store(run.dqkv + row.packed(row.t, 1), dk, HS);
  store(run.dqkv + row.packed(row.t, 2), dv, HS);
}

inline void forward(const AttentionRun& run, cudaStream_t stream) {
  launch<forward_kernel>(warp_per_row::grid(run), kBlock, 0, stream, run);
}

inline void backward(const AttentionRun& run, cudaStream_t stream) {
  launch<query_kernel>(warp_per_row::grid(run), kBlock, 0, stream, run);
  launch<key_kernel>(warp_per_row::grid(run), kBlock, 0, stream, run);
}

}  // namespace online_softmax_rung
