// layernorm.cuh -- y = (x - mean) * rstd * w + b over the last axis, its gradient, and the residual addition before it.
//
//   mean = sum(x)/C     rstd = 1/sqrt(sum((x-mean)^2)/C + 1e-5)     xhat = (x-mean)*rstd
//   dx = rstd * (w*dy - average(w*dy) - xhat * average(w*dy*xhat))
//   dw = sum over rows of dy*xhat                                   db = sum over rows of dy
// Shapes: inp, out, residual (N,C) floatX; mean, rstd (N) float; weight, bias (C) floatX; dweight, dbias (C) float.
// The variance takes two passes: E[x^2] - E[x]^2 cancels when |mean| is large against the deviation.
// One warp per row; the row stays in the first-level cache between the passes. Deterministic, no atomics.
//
// Bytes (e = size of floatX): forward 2*N*C*e, with the residual 4*N*C*e; backward 5*N*C*e: the weight gradient walks
// down columns and the input gradient along rows, so dout and inp are read twice.
// Source: Ba, Kiros, Hinton, "Layer normalization", arXiv 1607.06450.
#pragma once

#include "llmc/reduce.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// forward

constexpr float kLayernormEpsilon = 1e-5f;

// One row by one warp. `inp` may be what the same lanes have just written.
__device__ inline void normalize_row(floatX* __restrict__ out, float* __restrict__ mean, float* __restrict__ rstd,
                                     const floatX* inp, const floatX* __restrict__ weight,
                                     const floatX* __restrict__ bias, int C) {
  const int lane = threadIdx.x;
  float sum = 0.0f;
  SIMD_SUM(sum)
  for (int i = lane; i < C; i += kWarpSize) sum += (float)inp[i];
  const float m = warp_sum(sum) / (float)C;
  float square = 0.0f;
  SIMD_SUM(square)
  for (int i = lane; i < C; i += kWarpSize) square += ((float)inp[i] - m) * ((float)inp[i] - m);
  const float r = 1.0f / sqrtf(warp_sum(square) / (float)C + kLayernormEpsilon);
  for_each_strided<kWarpSize>(
      lane, C, [=](int i) { out[i] = (floatX)(((float)inp[i] - m) * r * (float)weight[i] + (float)bias[i]); });
  if (lane == 0) {
    *mean = m;
    *rstd = r;
  }
}

__global__ void layernorm_forward_kernel(floatX* __restrict__ out, float* __restrict__ mean, float* __restrict__ rstd,
                                         const floatX* __restrict__ inp, const floatX* __restrict__ weight,
                                         const floatX* __restrict__ bias, int N, int C) {
  const size_t row = row_index();
  if (row >= (size_t)N) return;
  normalize_row(out + row * C, mean + row, rstd + row, inp + row * C, weight, bias, C);
}

__global__ void residual_layernorm_forward_kernel(floatX* __restrict__ residual, floatX* __restrict__ out,
                                                  float* __restrict__ mean, float* __restrict__ rstd,
                                                  const floatX* __restrict__ a, const floatX* __restrict__ b,
                                                  const floatX* __restrict__ weight, const floatX* __restrict__ bias,
                                                  int N, int C) {
  const size_t row = row_index();
  if (row >= (size_t)N) return;
  floatX* sum_row = residual + row * C;
  for_each_strided<kWarpSize>(threadIdx.x, C,
                              [=](int i) { sum_row[i] = (floatX)((float)a[row * C + i] + (float)b[row * C + i]); });
  normalize_row(out + row * C, mean + row, rstd + row, sum_row, weight, bias, C);
}

__global__ void residual_forward_kernel(floatX* out, const floatX* a, const floatX* b, size_t n) {
  for_each_element(n, [=](size_t i) { out[i] = (floatX)((float)a[i] + (float)b[i]); });
}

/// out = LN(inp), row by row.
/// Overwrites out (N,C) floatX, mean, rstd (N) float. Reads inp (N,C), weight, bias (C) floatX. out is not inp.
/// Any N >= 0, C >= 1. Asynchronous on `stream`; deterministic. 2*N*C elements of traffic.
inline void layernorm_forward(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                              const floatX* bias, int N, int C, cudaStream_t stream) {
  assert(N >= 0 && C >= 1 && out != inp);
  if (N == 0) return;
  launch<layernorm_forward_kernel>(row_grid(N), row_block(), 0, stream, out, mean, rstd, inp, weight, bias, N, C);
}

/// out = a + b, rounded to floatX. n elements; out may alias a or b. Asynchronous on `stream`. 3*n elements of traffic.
inline void residual_forward(floatX* out, const floatX* a, const floatX* b, size_t n, cudaStream_t stream) {
  if (n == 0) return;
  launch<residual_forward_kernel>(element_grid(n), element_block(), 0, stream, out, a, b, n);
}

/// residual = a + b rounded to floatX; out = LN(residual): the bits of residual_forward followed by layernorm_forward.
/// Overwrites residual, out (N,C) floatX, mean, rstd (N) float. Reads a, b (N,C), weight, bias (C). No two may alias.
/// Any N >= 0, C >= 1. Asynchronous on `stream`; deterministic. 4*N*C elements of traffic, 5*N*C for the two kernels.
inline void residual_layernorm_forward(floatX* residual, floatX* out, float* mean, float* rstd, const floatX* a,
                                       const floatX* b, const floatX* weight, const floatX* bias, int N, int C,
                                       cudaStream_t stream) {
  assert(N >= 0 && C >= 1 && residual != out && residual != a && residual != b);
  if (N == 0) return;
  launch<residual_layernorm_forward_kernel>(row_grid(N), row_block(), 0, stream, residual, out, mean, rstd, a, b,
                                            weight, bias, N, C);
}

// ---------------------------------------------------------------------------------------------------------------------
// backward

/// Arguments of layernorm_backward. Shapes: dinp, dout, inp, dresidual (N,C) floatX; mean, rstd (N) float; weight (C)
/// floatX; dweight, dbias (C) float; scratch: layernorm_backward_scratch_floats(N, C) floats, any contents.
struct LayernormBackward {
  floatX* dinp;
  float* dweight;
  float* dbias;
  float* scratch;
  const floatX* dout;
  const floatX* inp;
  const floatX* weight;
  const float* mean;
  const float* rstd;
  const floatX* dresidual;  // gradient that reaches the input past the layernorm; null: none
  int N;
  int C;
  bool accumulate;  // dweight, dbias: add to what is there, or overwrite
};

// Rows that one warp adds up: at least 32, and at most 256 chunks. Depends on N alone: the same sums on every machine.
constexpr int kLayernormChunkRows = 32;
constexpr int kLayernormMaxChunks = 256;
inline int layernorm_chunk_rows(int N) {
  const int rows = ceil_div(N, kLayernormMaxChunks);
  return rows > kLayernormChunkRows ? rows : kLayernormChunkRows;
}

/// Floats of scratch that layernorm_backward needs: two rows of C for every chunk of rows.
inline size_t layernorm_backward_scratch_floats(int N, int C) {
  return N == 0 ? 0 : 2 * (size_t)ceil_div(N, layernorm_chunk_rows(N)) * C;
}

// partial (2, chunks, C): sums of dout*xhat, then of dout, over the rows of each chunk in ascending order.
__global__ void layernorm_backward_partial_kernel(float* __restrict__ partial, const floatX* __restrict__ dout,
                                                  const floatX* __restrict__ inp, const float* __restrict__ mean,
                                                  const float* __restrict__ rstd, int N, int C, int chunk_rows) {
  const LaneColumns columns = lane_columns(C);
  const size_t chunk = blockIdx.x;
  const size_t begin = chunk * chunk_rows;
  const size_t end = begin + chunk_rows < (size_t)N ? begin + chunk_rows : (size_t)N;
  float weight_sums[kColumnsPerLane] = {};
  float bias_sums[kColumnsPerLane] = {};
  for (size_t row = begin; row < end; row++) {
    const floatX* __restrict__ d = dout + row * C + columns.first;
    const floatX* __restrict__ x = inp + row * C + columns.first;
    const float m = mean[row];
    const float r = rstd[row];
    SIMD_LOOP
    for (int k = 0; k < columns.count; k++) {
      const float dy = (float)d[k * kWarpSize];
      weight_sums[k] += dy * (((float)x[k * kWarpSize] - m) * r);
      bias_sums[k] += dy;
    }
  }
  store_row(partial + chunk * C, weight_sums, columns, false);
  store_row(partial + (gridDim.x + chunk) * C, bias_sums, columns, false);
}

// blockIdx.x: 0 = dweight, 1 = dbias. Adds the chunks in ascending order.
__global__ void layernorm_backward_reduce_kernel(float* __restrict__ dweight, float* __restrict__ dbias,
                                                 const float* __restrict__ partial, int chunks, int C,
                                                 bool accumulate) {
  const LaneColumns columns = lane_columns(C);
  const float* mine = partial + (size_t)blockIdx.x * chunks * C;
  float sums[kColumnsPerLane] = {};
  for (int chunk = 0; chunk < chunks; chunk++) add_row(sums, mine + (size_t)chunk * C, columns);
  store_row(blockIdx.x == 0 ? dweight : dbias, sums, columns, accumulate);
}

// One warp per row. dinp may be inp or dresidual: a lane reads an element for the last time just before it writes it.
template <bool kResidual>
__global__ void layernorm_backward_input_kernel(floatX* dinp, const floatX* __restrict__ dout, const floatX* inp,
                                                const floatX* __restrict__ weight, const float* __restrict__ mean,
                                                const float* __restrict__ rstd, const floatX* dresidual, int N, int C) {
  const size_t row = row_index();
  if (row >= (size_t)N) return;
  const floatX* d = dout + row * C;
  const floatX* x = inp + row * C;
  const float m = mean[row];
  const float r = rstd[row];
  float sum = 0.0f;
  float sum_xhat = 0.0f;
  SIMD_SUM(sum)
  for (int i = threadIdx.x; i < C; i += kWarpSize) sum += (float)weight[i] * (float)d[i];
  SIMD_SUM(sum_xhat)
  for (int i = threadIdx.x; i < C; i += kWarpSize) sum_xhat += (float)weight[i] * (float)d[i] * (((float)x[i] - m) * r);
  const float average = warp_sum(sum) / (float)C;
  const float average_xhat = warp_sum(sum_xhat) / (float)C;
  for_each_strided<kWarpSize>(threadIdx.x, C, [=](int i) {
    const float xhat = ((float)x[i] - m) * r;
    float gradient = ((float)weight[i] * (float)d[i] - average - xhat * average_xhat) * r;
    if constexpr (kResidual) gradient += (float)dresidual[row * C + i];
    dinp[row * C + i] = (floatX)gradient;
  });
}

/// dinp = dresidual + gradient of LN; dweight, dbias (+)= sums over the rows.
/// Reads dout, inp, weight, mean, rstd (as written by the forward pass), dresidual; overwrites dinp and scratch. dinp
/// may be exactly inp, exactly dresidual, or both (in place); dout must be another array. Any N >= 0, C >= 1.
/// Asynchronous on `stream`; deterministic. 5*N*C elements of traffic (6 with dresidual).
inline void layernorm_backward(const LayernormBackward& a, cudaStream_t stream) {
  assert(a.N >= 0 && a.C >= 1 && a.dinp != a.dout);
  const int chunk_rows = layernorm_chunk_rows(a.N);
  const int chunks = ceil_div(a.N, chunk_rows);
  if (chunks > 0) {
    // first the weights: dinp may overwrite inp
    launch<layernorm_backward_partial_kernel>(column_grid(chunks, a.C), column_block(), 0, stream, a.scratch, a.dout,
                                              a.inp, a.mean, a.rstd, a.N, a.C, chunk_rows);
  }
  launch<layernorm_backward_reduce_kernel>(column_grid(2, a.C), column_block(), 0, stream, a.dweight, a.dbias,
                                           a.scratch, chunks, a.C, a.accumulate);
  if (a.N == 0) return;
  if (a.dresidual != nullptr) {
    launch<layernorm_backward_input_kernel<true>>(row_grid(a.N), row_block(), 0, stream, a.dinp, a.dout, a.inp,
                                                  a.weight, a.mean, a.rstd, a.dresidual, a.N, a.C);
  } else {
    launch<layernorm_backward_input_kernel<false>>(row_grid(a.N), row_block(), 0, stream, a.dinp, a.dout, a.inp,
                                                   a.weight, a.mean, a.rstd, a.dresidual, a.N, a.C);
  }
}
