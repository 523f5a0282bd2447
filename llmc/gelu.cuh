// gelu.cuh -- GPT-2's GELU and its gradient: y = x/2 (1 + tanh(z)) with z = sqrt(2/pi) (x + 0.044715 x^3).
//
// Written with the logistic function: 1/2 (1 + tanh(z)) = 1/(1 + exp(-2z)). That is one exponential, and 1 + tanh(z)
// does not cancel for negative x.
// Finite for every finite x at every optimisation level, -Ofast included, because no infinity ever appears: the
// argument is clamped to [-10, 10]; outside, the logistic function is 0 or 1 in float, and exp(2 z(10)) = 8.6e37 is a
// float. (llm.c's tanh form: inf * 0 = NaN in the gradient beyond |x| = 1e19; with -ffast-math much earlier, issue 19.)
//
// Bytes: forward 2*n*e, backward 3*n*e (e = size of floatX). About 20 FLOP per element: bound by memory on a GPU.
// Source: Hendrycks, Gimpel, "Gaussian error linear units", arXiv 1606.08415.
#pragma once

#include "llmc/reduce.cuh"

constexpr float kGeluLimit = 10.0f;
constexpr float kGeluTwiceRootTwoOverPi = 1.5957691216057308f;  // 2 sqrt(2/pi)
constexpr float kGeluCubic = 0.044715f;

__device__ inline float gelu_clamp(float x) {
  return x < -kGeluLimit ? -kGeluLimit : (x > kGeluLimit ? kGeluLimit : x);
}

__device__ inline float gelu_value(float x) {
  const float u = gelu_clamp(x);
  const float gate = 1.0f / (1.0f + expf(-kGeluTwiceRootTwoOverPi * (u + kGeluCubic * u * u * u)));
  // below the limit |y| < 1e-36, while x * s(-10) would grow with x
  return x < -kGeluLimit ? 0.0f : x * gate;
}

__device__ inline float gelu_derivative(float x) {
  const float u = gelu_clamp(x);
  const float power = expf(-kGeluTwiceRootTwoOverPi * (u + kGeluCubic * u * u * u));
  const float gate = 1.0f / (1.0f + power);
  const float one_minus_gate = power * gate;
  return gate + u * gate * one_minus_gate * (kGeluTwiceRootTwoOverPi * (1.0f + 3.0f * kGeluCubic * u * u));
}

__global__ void gelu_forward_kernel(floatX* out, const floatX* inp, size_t n) {
  for_each_element(n, [=](size_t i) { out[i] = (floatX)gelu_value((float)inp[i]); });
}

__global__ void gelu_backward_kernel(floatX* dinp, const floatX* dout, const floatX* inp, size_t n) {
  for_each_element(n, [=](size_t i) { dinp[i] = (floatX)((float)dout[i] * gelu_derivative((float)inp[i])); });
}

/// out = GELU(inp), n elements floatX. Overwrites out, which may be inp. NaN stays NaN.
/// Asynchronous on `stream`; deterministic. 2*n elements of traffic.
inline void gelu_forward(floatX* out, const floatX* inp, size_t n, cudaStream_t stream) {
  if (n == 0) return;
  launch<gelu_forward_kernel>(element_grid(n), element_block(), 0, stream, out, inp, n);
}

/// dinp = dout * GELU'(inp), n elements floatX, `inp` as given to the forward pass. Overwrites dinp, which may be dout
/// or inp. Asynchronous on `stream`; deterministic. 3*n elements of traffic.
inline void gelu_backward(floatX* dinp, const floatX* dout, const floatX* inp, size_t n, cudaStream_t stream) {
  if (n == 0) return;
  launch<gelu_backward_kernel>(element_grid(n), element_block(), 0, stream, dinp, dout, inp, n);
}
