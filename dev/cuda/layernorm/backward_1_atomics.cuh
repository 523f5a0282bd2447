// backward_1_atomics.cuh -- layernorm backward, naive: one warp for each row computes dinp and adds the row's share of
// the weight gradients with atomicAdd.
//
// N rows add to the same C addresses, one after another. And float additions in an order that nobody fixes give other
// bits in every run: two trainings with the same seed drift apart.
#pragma once

#include "llmc/layernorm.cuh"

namespace backward_atomics {

__global__ void zero_kernel(float* dweight, float* dbias, int C) {
  const size_t i = thread_index();
  if (i >= static_cast<size_t>(C)) return;
  dweight[i] = 0.0f;
  dbias[i] = 0.0f;
}

__global__ void backward_kernel(floatX* dinp, float* dweight, float* dbias, const floatX* dout, const floatX* inp,
                                const floatX* weight, const float* mean, const float* rstd, int N, int C) {
  const size_t row = row_index();
  if (row >= static_cast<size_t>(N)) return;
  const floatX* d = dout + row * C;
  const floatX* x = inp + row * C;
  const float m = mean[row], r = rstd[row];
  float sum = 0.0f, sum_xhat = 0.0f;
  for (int i = threadIdx.x; i < C; i += kWarpSize) {
    const float gradient = (float)weight[i] * (float)d[i];
    sum += gradient;
    sum_xhat += gradient * (((float)x[i] - m) * r);
  }
  const float average = warp_sum(sum) / C, average_xhat = warp_sum(sum_xhat) / C;
  for (int i = threadIdx.x; i < C; i += kWarpSize) {
    const float xhat = ((float)x[i] - m) * r;
    atomicAdd(&dweight[i], (float)d[i] * xhat);
    atomicAdd(&dbias[i], (float)d[i]);
    dinp[row * C + i] = (floatX)(((float)weight[i] * (float)d[i] - average - xhat * average_xhat) * r);
  }
}

inline void backward(const LayernormBackward& a, cudaStream_t stream) {
  launch<zero_kernel>(ceil_div(a.C, 128), 128, 0, stream, a.dweight, a.dbias, a.C);
  launch<backward_kernel>(row_grid(a.N), row_block(), 0, stream, a.dinp, a.dweight, a.dbias, a.dout, a.inp, a.weight,
                          a.mean, a.rstd, a.N, a.C);
}

}  // namespace backward_atomics
