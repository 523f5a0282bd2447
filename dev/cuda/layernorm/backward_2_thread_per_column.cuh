// backward_2_thread_per_column.cuh -- adds: the weight gradients in a kernel of their own, one thread for each column,
// which walks down all rows. Every sum has one order, so every run has the same bits; loads are coalesced.
//
// But only C threads work: 768 on a machine that wants 100,000, each with N dependent additions.
#pragma once

#include "llmc/layernorm.cuh"

namespace backward_columns {

__global__ void weight_kernel(float* dweight, float* dbias, const floatX* dout, const floatX* inp, const float* mean,
                              const float* rstd, int N, int C) {
  const size_t i = thread_index();
  if (i >= static_cast<size_t>(C)) return;
  float weight_sum = 0.0f, bias_sum = 0.0f;
  for (size_t row = 0; row < static_cast<size_t>(N); row++) {
    const float d = (float)dout[row * C + i];
    weight_sum += d * (((float)inp[row * C + i] - mean[row]) * rstd[row]);
    bias_sum += d;
  }
  dweight[i] = weight_sum;
  dbias[i] = bias_sum;
}

__global__ void input_kernel(floatX* dinp, const floatX* dout, const floatX* inp, const floatX* weight,
                             const float* mean, const float* rstd, int N, int C) {
  const size_t row = row_index();
  if (row >= static_cast<size_t>(N)) return;
  const floatX* d = dout + row * C;
  const floatX* x = inp + row * C;
  const float m = mean[row], r = rstd[row];
  float sum = 0.0f, sum_xhat = 0.0f;
  for (int i = threadIdx.x; i < C; i += kWarpSize) {
    sum += (float)weight[i] * (float)d[i];
    sum_xhat += (float)weight[i] * (float)d[i] * (((float)x[i] - m) * r);
  }
  const float average = warp_sum(sum) / C, average_xhat = warp_sum(sum_xhat) / C;
  for (int i = threadIdx.x; i < C; i += kWarpSize) {
    const float xhat = ((float)x[i] - m) * r;
    dinp[row * C + i] = (floatX)(((float)weight[i] * (float)d[i] - average - xhat * average_xhat) * r);
  }
}

inline void backward(const LayernormBackward& a, cudaStream_t stream) {
  launch<weight_kernel>(ceil_div(a.C, 128), 128, 0, stream, a.dweight, a.dbias, a.dout, a.inp, a.mean, a.rstd, a.N,
                        a.C);
  launch<input_kernel>(row_grid(a.N), row_block(), 0, stream, a.dinp, a.dout, a.inp, a.weight, a.mean, a.rstd, a.N,
                       a.C);
}

}  // namespace backward_columns
