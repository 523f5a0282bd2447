// 1_naive.cuh -- out = inp weight^T + bias, naive: one thread for each element of the output, one loop over C.
//
// Each multiply-add needs two loads. Neighbouring threads share the row of inp but read rows of weight C elements
// apart: on a GPU a warp touches 32 cache lines for 32 numbers, and everything is read again for each row of the
// output.
#pragma once

#include "llmc/device.h"

namespace naive {

__global__ void forward_kernel(floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, int N, int C,
                               int OC) {
  const size_t index = thread_index();
  if (index >= static_cast<size_t>(N) * OC) return;
  const floatX* x = inp + index / OC * C;
  const floatX* w = weight + index % OC * C;
  float sum = (float)bias[index % OC];
  for (int c = 0; c < C; c++) sum += (float)x[c] * (float)w[c];
  out[index] = (floatX)sum;
}

inline void forward(floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, int N, int C, int OC,
                    cudaStream_t stream) {
  launch<forward_kernel>(elementwise_grid(static_cast<size_t>(N) * OC), kElementwiseBlock, 0, stream, out, inp, weight,
                         bias, N, C, OC);
}

}  // namespace naive
