// 1_three_kernels.cuh -- softmax, loss and gradient, naive: a kernel for each, as in a textbook; one thread for each
// row of the softmax, one for each element of the gradient.
//
// The probabilities are an array of their own, as large as the logits (N * 50257): written once and read twice.
#pragma once

#include "llmc/device.h"

namespace three_kernels {

__global__ void softmax_kernel(float* probabilities, const floatX* logits, int N, int V, int Vp) {
  const size_t row = thread_index();
  if (row >= static_cast<size_t>(N)) return;
  const floatX* x = logits + row * Vp;
  float* p = probabilities + row * Vp;
  float largest = -INFINITY;
  for (int i = 0; i < V; i++) largest = fmaxf(largest, (float)x[i]);
  float sum = 0.0f;
  for (int i = 0; i < V; i++) sum += p[i] = expf((float)x[i] - largest);
  for (int i = 0; i < V; i++) p[i] /= sum;
}

__global__ void loss_kernel(float* losses, const float* probabilities, const int* targets, int N, int Vp) {
  const size_t row = thread_index();
  if (row < static_cast<size_t>(N)) losses[row] = -logf(probabilities[row * Vp + targets[row]]);
}

__global__ void gradient_kernel(floatX* logits, const float* probabilities, const int* targets, int N, int V, int Vp) {
  const size_t i = thread_index();
  if (i >= static_cast<size_t>(N) * Vp) return;
  const int column = static_cast<int>(i % Vp);
  const float p = column < V ? probabilities[i] : 0.0f;
  logits[i] = (floatX)(p - (column == targets[i / Vp] ? 1.0f : 0.0f));
}

inline void classify(float* losses, floatX* logits, float* probabilities, const int* targets, int N, int V, int Vp,
                     cudaStream_t stream) {
  launch<softmax_kernel>(ceil_div(N, 32), 32, 0, stream, probabilities, logits, N, V, Vp);
  launch<loss_kernel>(ceil_div(N, 128), 128, 0, stream, losses, probabilities, targets, N, Vp);
  const size_t n = static_cast<size_t>(N) * Vp;
  launch<gradient_kernel>(static_cast<unsigned>(ceil_div<size_t>(n, 256)), 256, 0, stream, logits, probabilities,
                          targets, N, V, Vp);
}

}  // namespace three_kernels
