// 3_warp_per_row.cuh -- adds: a warp for each row instead of a block. The 32 lanes of a warp run together and exchange
// values through registers (warp_sum: 5 shuffles), so there is no shared memory and no barrier at all.
#pragma once

#include "llmc/device.h"

namespace warp_per_row {

constexpr int kRows = 8;  // warps of a block: 256 threads on a GPU

__global__ void forward_kernel(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight,
                               const floatX* bias, int N, int C) {
  const size_t row = static_cast<size_t>(blockIdx.x) * kRows + threadIdx.y;
  if (row >= static_cast<size_t>(N)) return;  // the whole warp leaves: no lane is missing in warp_sum
  const int lane = threadIdx.x;
  const floatX* x = inp + row * C;
  float sum = 0.0f;
  for (int i = lane; i < C; i += kWarpSize) sum += (float)x[i];
  const float m = warp_sum(sum) / C;
  float square = 0.0f;
  for (int i = lane; i < C; i += kWarpSize) square += ((float)x[i] - m) * ((float)x[i] - m);
  const float r = 1.0f / sqrtf(warp_sum(square) / C + 1e-5f);
  for (int i = lane; i < C; i += kWarpSize) {
    out[row * C + i] = (floatX)(((float)x[i] - m) * r * (float)weight[i] + (float)bias[i]);
  }
  if (lane == 0) {
    mean[row] = m;
    rstd[row] = r;
  }
}

inline void forward(floatX* out, float* mean, float* rstd, const floatX* inp, const floatX* weight, const floatX* bias,
                    int N, int C, cudaStream_t stream) {
  launch<forward_kernel>(ceil_div(N, kRows), dim3(kWarpSize, kRows), 0, stream, out, mean, rstd, inp, weight, bias, N,
                         C);
}

}  // namespace warp_per_row
