// 4_production.cuh -- adds: the library, cuBLASLt (tensor cores, asynchronous copies, split sums; an algorithm chosen
// for each shape and kept), or OpenBLAS on the CPU device. It is llmc/matmul.cuh itself.
#pragma once

#include "llmc/matmul.cuh"

namespace production {

inline void forward(Blas& blas, floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, int N, int C,
                    int OC, cudaStream_t stream) {
  matmul_forward(blas, out, inp, weight, bias, N, C, OC, stream);
}

}  // namespace production
