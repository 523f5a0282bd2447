// gpt2_block.h -- one transformer block of GPT-2, forward and backward, on the buffers of an activation slot.
//
//   ln1 = LN(x)              qkv = ln1 Wqkv^T + b       attention = softmax(q k^T / sqrt(HS), causal) v
//   residual = x + (attention Wproj^T + b)              ln2 = LN(residual)
//   fc = ln2 Wfc^T + b       gelu = GELU(fc)            output = residual + (gelu Wfcproj^T + b)
//
// The backward pass has two halves that may run at different times (zero-bubble schedules): the input gradient, which
// also makes the gradients of layernorms and biases, and the weight gradient of the four matrices. The first leaves the
// gradients that the second needs in the slot, each over an activation that has died (see gpt2_activations.h). Matrix
// FLOPs per token: forward 24 C^2 (+ attention 2 T C causal), input gradient and weight gradient the same again each.
// Source: Radford et al. 2019; layer order and shapes as in llm.c.
#pragma once

#include "llmc/attention.cuh"
#include "llmc/gelu.cuh"
#include "llmc/gpt2_activations.h"
#include "llmc/layernorm.cuh"
#include "llmc/matmul.cuh"

/// Pointers to the twelve tensors of a block: parameters (floatX) or their gradients (float).
template <class T>
struct BlockTensors {
  T *ln1w, *ln1b, *qkvw, *qkvb, *attprojw, *attprojb, *ln2w, *ln2b, *fcw, *fcb, *fcprojw, *fcprojb;
};

/// Scratch that every block of a rank shares; nothing in it outlives one call.
struct BlockScratch {
  floatX* wide = nullptr;    // (B,T,4C)
  floatX* narrow = nullptr;  // (B,T,C)
  float* floats = nullptr;   // max of what layernorm, bias and attention backward ask for
};

/// What a block call needs beside its tensors. Work is issued to `stream`; nothing waits.
struct BlockCall {
  Blas& blas;
  const GPT2Config& config;
  BatchShape shape;
  BlockScratch scratch;
  cudaStream_t stream;
};

inline size_t block_scratch_floats(const GPT2Config& config, const BatchShape& shape) {
  const int rows = shape.rows(), C = config.channels;
  return std::max({layernorm_backward_scratch_floats(rows, C), matmul_backward_bias_scratch_floats(rows, 4 * C),
                   attention_backward_scratch_floats(shape.B, shape.T, C, config.heads)});
}

/// Reads x and the block's parameters; overwrites every array of `a`.
inline void block_forward(const BlockCall& call, const BlockActivations& a, const BlockTensors<const floatX>& w,
                          const floatX* x) {
  const int N = call.shape.rows(), C = call.config.channels, B = call.shape.B, T = call.shape.T;
  cudaStream_t stream = call.stream;
  layernorm_forward(a.ln1, a.ln1_mean, a.ln1_rstd, x, w.ln1w, w.ln1b, N, C, stream);
  matmul_forward(call.blas, a.qkv, a.ln1, w.qkvw, w.qkvb, N, C, 3 * C, stream);
  attention_forward(a.attention, a.lse, a.qkv, B, T, C, call.config.heads, stream);
  matmul_forward(call.blas, call.scratch.narrow, a.attention, w.attprojw, w.attprojb, N, C, C, stream);
  residual_layernorm_forward(a.residual, a.ln2, a.ln2_mean, a.ln2_rstd, x, call.scratch.narrow, w.ln2w, w.ln2b, N, C,
                             stream);
  matmul_forward(call.blas, a.fc, a.ln2, w.fcw, w.fcb, N, C, 4 * C, stream);
  gelu_forward(a.gelu, a.fc, static_cast<size_t>(N) * 4 * C, stream);
  matmul_forward(call.blas, call.scratch.narrow, a.gelu, w.fcprojw, w.fcprojb, N, 4 * C, C, stream);
  residual_forward(a.output, a.residual, call.scratch.narrow, static_cast<size_t>(N) * C, stream);
}

/// Input gradient. In: a.output holds d(output). Out: `x` holds d(x); a.fc, a.residual, a.qkv hold their gradients, for
/// block_backward_weight. (+)= the gradients of layernorms and biases in `d` (overwritten unless `accumulate`).
inline void block_backward_input(const BlockCall& call, const BlockActivations& a, const BlockTensors<const floatX>& w,
                                 const BlockTensors<float>& d, floatX* x, bool accumulate) {
  const int N = call.shape.rows(), C = call.config.channels, B = call.shape.B, T = call.shape.T;
  const BlockScratch& scratch = call.scratch;
  cudaStream_t stream = call.stream;
  const size_t NC = static_cast<size_t>(N) * C;
  // MLP
  matmul_backward_bias(d.fcprojb, scratch.floats, a.output, N, C, accumulate, stream);
  matmul_backward_input(call.blas, scratch.wide, a.output, w.fcprojw, N, 4 * C, C, stream);
  gelu_backward(a.fc, scratch.wide, a.fc, 4 * NC, stream);
  matmul_backward_bias(d.fcb, scratch.floats, a.fc, N, 4 * C, accumulate, stream);
  matmul_backward_input(call.blas, scratch.narrow, a.fc, w.fcw, N, C, 4 * C, stream);
  layernorm_backward({a.residual, d.ln2w, d.ln2b, scratch.floats, scratch.narrow, a.residual, w.ln2w, a.ln2_mean,
                      a.ln2_rstd, a.output, N, C, accumulate},
                     stream);
  // attention
  matmul_backward_bias(d.attprojb, scratch.floats, a.residual, N, C, accumulate, stream);
  matmul_backward_input(call.blas, scratch.narrow, a.residual, w.attprojw, N, C, C, stream);
  attention_backward(
      {scratch.wide, scratch.floats, scratch.narrow, a.qkv, a.attention, a.lse, B, T, C, call.config.heads}, stream);
  CUDA_CHECK(cudaMemcpyAsync(a.qkv, scratch.wide, 3 * NC * sizeof(floatX), cudaMemcpyDeviceToDevice, stream));
  matmul_backward_bias(d.qkvb, scratch.floats, a.qkv, N, 3 * C, accumulate, stream);
  matmul_backward_input(call.blas, scratch.narrow, a.qkv, w.qkvw, N, C, 3 * C, stream);
  layernorm_backward({x, d.ln1w, d.ln1b, scratch.floats, scratch.narrow, x, w.ln1w, a.ln1_mean, a.ln1_rstd, a.residual,
                      N, C, accumulate},
                     stream);
}

/// Weight gradient of the four matrices, after block_backward_input of the same slot. (+)= into `d`.
inline void block_backward_weight(const BlockCall& call, const BlockActivations& a, const BlockTensors<float>& d,
                                  bool accumulate) {
  const int N = call.shape.rows(), C = call.config.channels;
  cudaStream_t stream = call.stream;
  matmul_backward_weight(call.blas, d.fcprojw, a.output, a.gelu, N, 4 * C, C, accumulate, stream);
  matmul_backward_weight(call.blas, d.fcw, a.fc, a.ln2, N, C, 4 * C, accumulate, stream);
  matmul_backward_weight(call.blas, d.attprojw, a.residual, a.attention, N, C, C, accumulate, stream);
  matmul_backward_weight(call.blas, d.qkvw, a.qkv, a.ln1, N, C, 3 * C, accumulate, stream);
}
