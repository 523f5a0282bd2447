// matmul.cuh -- the linear layer: out = inp weight^T + bias, and its three gradients.
//
//   out (N,OC) = inp (N,C) weight (OC,C)^T + bias (OC)         dinp (N,C) = dout (N,OC) weight
//   dweight (OC,C) (+)= dout^T inp                             dbias (OC) (+)= sum_n dout[n]
// All matrices are row-major; cuBLASLt is column-major and sees each of them transposed, so the operands change places.
// Input gradient and weight gradient are separate calls: zero-bubble pipeline schedules run them at different times.
// FLOPs: 2 N C OC for each product. The bias gradient reads dout once, at the speed of memory.
#pragma once

#include "llmc/blas.h"
#include "llmc/device.h"
#include "llmc/numeric.h"

/// out = inp weight^T + bias.
/// Shapes: out (N,OC), inp (N,C), weight (OC,C), bias (OC) or null, all floatX. Overwrites out, which overlaps no
/// input. Requires N, C, OC >= 1 (assert). Sums in float, rounded once. Asynchronous on `stream`, deterministic.
inline void matmul_forward(Blas& blas, floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, int N,
                           int C, int OC, cudaStream_t stream) {
  MatrixProduct product = {};
  product.d = out;
  product.a = weight;
  product.b = inp;
  product.bias = bias;
  product.m = OC;
  product.n = N;
  product.k = C;
  product.transpose_a = true;
  product.input_type = product.output_type = kFloatXType;
  blas.multiply(product, stream);
}

/// dinp = dout weight.
/// Shapes: dinp (N,C), dout (N,OC), weight (OC,C), all floatX. Overwrites dinp, which overlaps no input.
/// Requires N, C, OC >= 1 (assert). Sums in float, rounded once. Asynchronous on `stream`, deterministic.
inline void matmul_backward_input(Blas& blas, floatX* dinp, const floatX* dout, const floatX* weight, int N, int C,
                                  int OC, cudaStream_t stream) {
  MatrixProduct product = {};
  product.d = dinp;
  product.a = weight;
  product.b = dout;
  product.m = C;
  product.n = N;
  product.k = OC;
  product.input_type = product.output_type = kFloatXType;
  blas.multiply(product, stream);
}

/// dweight = dout^T inp, added to dweight if `accumulate`.
/// Shapes: dweight (OC,C) float, dout (N,OC) and inp (N,C) floatX. Without `accumulate` dweight is not read.
/// Requires N, C, OC >= 1 (assert). Sums in float. Asynchronous on `stream`, deterministic.
inline void matmul_backward_weight(Blas& blas, float* dweight, const floatX* dout, const floatX* inp, int N, int C,
                                   int OC, bool accumulate, cudaStream_t stream) {
  MatrixProduct product = {};
  product.d = dweight;
  product.a = inp;
  product.b = dout;
  product.m = C;
  product.n = OC;
  product.k = N;
  product.transpose_b = true;
  product.accumulate = accumulate;
  product.input_type = kFloatXType;
  product.output_type = CUDA_R_32F;
  blas.multiply(product, stream);
}

// ---------------------------------------------------------------------------------------------------------------------
// bias gradient: sums over fixed chunks of rows, then over the chunks in ascending order

constexpr int kBiasChunkRows = 256;
constexpr int kBiasRowThreads = kWarpSize == 1 ? 1 : 8;  // rows of a chunk that are summed side by side
constexpr int kBiasColumnsPerThread = kWarpSize == 1 ? 64 : 1;
constexpr int kBiasColumns = kWarpSize * kBiasColumnsPerThread;  // of a block

/// partial[chunk][c] = sum of dout[n][c] over the rows of the chunk. Block: kWarpSize x kBiasRowThreads; a thread sums
/// every kBiasRowThreads-th row of its columns, then the rows of threads are added in order.
__global__ void __launch_bounds__(kWarpSize* kBiasRowThreads)
    bias_partial_kernel(float* __restrict__ partial, const floatX* __restrict__ dout, int N, int OC, bool accumulate) {
  __shared__ float sums[kBiasRowThreads][kBiasColumns];
  const int first = static_cast<int>(blockIdx.x) * kBiasColumns + static_cast<int>(threadIdx.x);
  const int begin = static_cast<int>(blockIdx.y) * kBiasChunkRows;
  const int end = min(begin + kBiasChunkRows, N);
  const int columns = min(kBiasColumnsPerThread, (OC - first + kWarpSize - 1) / kWarpSize);
  float sum[kBiasColumnsPerThread] = {};
  for (int n = begin + static_cast<int>(threadIdx.y); n < end; n += kBiasRowThreads) {
    const floatX* __restrict__ row = dout + static_cast<size_t>(n) * OC + first;
    if (columns == kBiasColumnsPerThread) {
      SIMD_LOOP
      for (int j = 0; j < kBiasColumnsPerThread; j++) sum[j] += static_cast<float>(row[j * kWarpSize]);
    } else {
      for (int j = 0; j < columns; j++) sum[j] += static_cast<float>(row[j * kWarpSize]);
    }
  }
  for (int j = 0; j < kBiasColumnsPerThread; j++) sums[threadIdx.y][threadIdx.x + j * kWarpSize] = sum[j];
  __syncthreads();
  if (threadIdx.y != 0) return;
  float* target = partial + static_cast<size_t>(blockIdx.y) * OC + first;
  for (int j = 0; j < columns; j++) {
    float total = 0.0f;
    for (int i = 0; i < kBiasRowThreads; i++) total += sums[i][threadIdx.x + j * kWarpSize];
    target[j * kWarpSize] = accumulate ? target[j * kWarpSize] + total : total;
  }
}

/// dbias[c] (+)= sum of partial[chunk][c] in ascending order of the chunks. One thread for each c.
__global__ void bias_sum_kernel(float* __restrict__ dbias, const float* __restrict__ partial, int chunks, int OC,
                                bool accumulate) {
  const size_t c = thread_index();
  if (c >= static_cast<size_t>(OC)) return;
  float sum = 0.0f;
  for (int i = 0; i < chunks; i++) sum += partial[static_cast<size_t>(i) * OC + c];
  dbias[c] = accumulate ? dbias[c] + sum : sum;
}

/// Floats of scratch for matmul_backward_bias; 0 when one chunk holds all rows.
inline size_t matmul_backward_bias_scratch_floats(int N, int OC) {
  const int chunks = ceil_div(N, kBiasChunkRows);
  return chunks == 1 ? 0 : static_cast<size_t>(chunks) * OC;
}

/// dbias = sum over the rows of dout, added to dbias if `accumulate`.
/// Shapes: dbias (OC) float, dout (N,OC) floatX; scratch of matmul_backward_bias_scratch_floats(N, OC), overwritten.
/// Requires N, OC >= 1 (assert), at most 65535 chunks of 256 rows. Asynchronous on `stream`; deterministic: the order
/// of every sum depends on N only. Reads N OC elements once.
inline void matmul_backward_bias(float* dbias, float* scratch, const floatX* dout, int N, int OC, bool accumulate,
                                 cudaStream_t stream) {
  assert(N >= 1 && OC >= 1 && "matmul_backward_bias: every size must be at least 1");
  const int chunks = ceil_div(N, kBiasChunkRows);
  assert(chunks <= 65535 && "matmul_backward_bias: too many rows");
  const dim3 grid(static_cast<unsigned>(ceil_div(OC, kBiasColumns)), static_cast<unsigned>(chunks));
  const dim3 block(kWarpSize, kBiasRowThreads);
  if (chunks == 1) {
    launch<bias_partial_kernel>(grid, block, 0, stream, dbias, dout, N, OC, accumulate);
    return;
  }
  launch<bias_partial_kernel>(grid, block, 0, stream, scratch, dout, N, OC, false);
  launch<bias_sum_kernel>(elementwise_grid(OC), dim3(kElementwiseBlock), 0, stream, dbias, scratch, chunks, OC,
                          accumulate);
}
