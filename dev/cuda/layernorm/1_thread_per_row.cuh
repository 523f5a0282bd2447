// 1_thread_per_row.cuh -- layernorm forward, naive: the formula of the paper, one thread for each row.
//
// Neighbouring threads read addresses C elements apart, so each load of a warp touches 32 cache lines to use 2 or 4
// bytes of each; and N = 8192 rows are only 8192 threads, a few percent of what a GPU needs to hide the latency of
// memory.
#pragma once

#include "llmc/device.h"

namespace thread_per_row {

__global__ void forward_kernel(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                               const floatX* bias, int N, int C) {
  const size_t row = thread_index();
  if (row >= static_cast<size_t>(N)) return;
  const floatX* x = inp + row * C;
  float m = 0.0f;
  for (int i = 0; i < C; i++) m += (float)x[i];
  m /= C;
  float variance = 0.0f;
  for (int i = 0; i < C; i++) variance += ((float)x[i] - m) * ((float)x[i] - m);
  variance /= C;
  const float r = 1.0f / sqrtf(variance + 1e-5f);
  for (int i = 0; i < C; i++) out[row * C + i] = (floatX)(((float)x[i] - m) * r * (float)weight[i] + (float)bias[i]);
  mean[row] = m;
  rstd[row] = r;
}

inline void forward(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight, const floatX* bias,
                    int N, int C, cudaStream_t stream) {
  launch<forward_kernel>(ceil_div(N, 64), 64, 0, stream, out, mean, rstd, inp, weight, bias, N, C);
}

}  // namespace thread_per_row
