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
//
// With a recompute level the input gradient makes again what the slot does not keep (Chen et al. 2016, arXiv
// 1604.06174), by the same kernels from the same inputs, so that every bit is the same (ln2 at level 2 by the kernel
// without the residual addition, which normalises with the same code). An array that is made again is gone when its
// memory is used next, so the weight gradient that reads it moves into the input gradient as well
// (ParameterTensor::split_up_to). Per token and block, e = size of floatX:
//   level  kept    made again             extra bytes of traffic   extra matrix FLOPs      weight gradient left to do
//   0      16 C e  nothing                0                        0                       24 C^2, all four matrices
//   1      12 C e  gelu                   8 C e                    0                       16 C^2, all but fcproj
//   2      10 C e  gelu, ln1, ln2         12 C e - 6 C e           0                       2 C^2, attproj
//   3      C e     all but the output     as the forward pass      16 C^2 + attention      0
// (- 6 C e: from level 2 on d(qkv) is used up where it is made and not copied into the slot.) Level 3 adds 2/9 to the
// matrix FLOPs of a step and leaves a zero-bubble schedule nothing to fill bubbles with.
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
  int recompute;  // level of the stage
  cudaStream_t stream;
};

inline size_t block_scratch_floats(const GPT2Config& config, const BatchShape& shape) {
  const int rows = shape.rows(), C = config.channels;
  return std::max({layernorm_backward_scratch_floats(rows, C), matmul_backward_bias_scratch_floats(rows, 4 * C),
                   attention_backward_scratch_floats(shape.B, shape.T, C, config.heads)});
}

/// The forward pass up to the GELU. Reads x and the block's parameters; overwrites every array of `a` but the output.
inline void block_forward_to_gelu(const BlockCall& call, const BlockActivations& a, const BlockTensors<const floatX>& w,
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
}

/// Reads x and the block's parameters; overwrites every array of `a`. Those that the slot does not keep may lie in the
/// scratch, as GPT2Workspace::unkept places them: each has been read for the last time when its place is written next.
inline void block_forward(const BlockCall& call, const BlockActivations& a, const BlockTensors<const floatX>& w,
                          const floatX* x) {
  const int N = call.shape.rows(), C = call.config.channels;
  block_forward_to_gelu(call, a, w, x);
  matmul_forward(call.blas, call.scratch.narrow, a.gelu, w.fcprojw, w.fcprojb, N, 4 * C, C, call.stream);
  residual_forward(a.output, a.residual, call.scratch.narrow, static_cast<size_t>(N) * C, call.stream);
}

/// MLP half of block_backward_input: d(output) in a.output to d(fc) over a.fc and d(residual) over a.residual.
inline void block_backward_mlp(const BlockCall& call, const BlockActivations& a, const BlockTensors<const floatX>& w,
                               const BlockTensors<float>& d, bool accumulate) {
  const int N = call.shape.rows(), C = call.config.channels, level = call.recompute;
  const BlockScratch& scratch = call.scratch;
  cudaStream_t stream = call.stream;
  const size_t elements = static_cast<size_t>(N) * 4 * C;
  matmul_backward_bias(d.fcprojb, scratch.floats, a.output, N, C, accumulate, stream);
  if (level == kRecomputeGelu || level == kRecomputeLayernorms) gelu_forward(a.gelu, a.fc, elements, stream);
  if (level >= kRecomputeGelu) {
    matmul_backward_weight(call.blas, d.fcprojw, a.output, a.gelu, N, 4 * C, C, accumulate, stream);
  }
  matmul_backward_input(call.blas, scratch.wide, a.output, w.fcprojw, N, 4 * C, C, stream);
  gelu_backward(a.fc, scratch.wide, a.fc, elements, stream);
  matmul_backward_bias(d.fcb, scratch.floats, a.fc, N, 4 * C, accumulate, stream);
  if (level == kRecomputeLayernorms) {
    layernorm_forward(a.ln2, a.ln2_mean, a.ln2_rstd, a.residual, w.ln2w, w.ln2b, N, C, stream);
  }
  if (level >= kRecomputeLayernorms) {
    matmul_backward_weight(call.blas, d.fcw, a.fc, a.ln2, N, C, 4 * C, accumulate, stream);
  }
  matmul_backward_input(call.blas, scratch.narrow, a.fc, w.fcw, N, C, 4 * C, stream);
  layernorm_backward({a.residual, d.ln2w, d.ln2b, scratch.floats, scratch.narrow, a.residual, w.ln2w, a.ln2_mean,
                      a.ln2_rstd, a.output, N, C, accumulate},
                     stream);
}

/// Attention half: d(residual) in a.residual to d(x) over x, up to level 1 also d(qkv) over a.qkv.
inline void block_backward_attention(const BlockCall& call, const BlockActivations& a,
                                     const BlockTensors<const floatX>& w, const BlockTensors<float>& d, floatX* x,
                                     bool accumulate) {
  const int N = call.shape.rows(), C = call.config.channels, B = call.shape.B, T = call.shape.T;
  const int level = call.recompute;
  const BlockScratch& scratch = call.scratch;
  cudaStream_t stream = call.stream;
  matmul_backward_bias(d.attprojb, scratch.floats, a.residual, N, C, accumulate, stream);
  if (level >= kRecomputeBlock) {
    matmul_backward_weight(call.blas, d.attprojw, a.residual, a.attention, N, C, C, accumulate, stream);
  }
  matmul_backward_input(call.blas, scratch.narrow, a.residual, w.attprojw, N, C, C, stream);
  floatX* d_qkv = scratch.wide;
  attention_backward({d_qkv, scratch.floats, scratch.narrow, a.qkv, a.attention, a.lse, B, T, C, call.config.heads},
                     stream);
  if (level < kRecomputeLayernorms) {
    const size_t bytes = static_cast<size_t>(N) * 3 * C * sizeof(floatX);
    CUDA_CHECK(cudaMemcpyAsync(a.qkv, d_qkv, bytes, cudaMemcpyDeviceToDevice, stream));
    d_qkv = a.qkv;
  }
  matmul_backward_bias(d.qkvb, scratch.floats, d_qkv, N, 3 * C, accumulate, stream);
  if (level == kRecomputeLayernorms) {
    layernorm_forward(a.ln1, a.ln1_mean, a.ln1_rstd, x, w.ln1w, w.ln1b, N, C, stream);
  }
  if (level >= kRecomputeLayernorms) {
    matmul_backward_weight(call.blas, d.qkvw, d_qkv, a.ln1, N, C, 3 * C, accumulate, stream);
  }
  matmul_backward_input(call.blas, scratch.narrow, d_qkv, w.qkvw, N, C, 3 * C, stream);
  layernorm_backward({x, d.ln1w, d.ln1b, scratch.floats, scratch.narrow, x, w.ln1w, a.ln1_mean, a.ln1_rstd, a.residual,
                      N, C, accumulate},
                     stream);
}

/// Input gradient. In: a.output holds d(output), x the block's input. Out: `x` holds d(x); what block_backward_weight
/// still needs at this recompute level is in the slot. (+)= into `d` (overwritten unless `accumulate`) the gradients of
/// layernorms and biases, and of the matrices that block_backward_weight leaves out.
inline void block_backward_input(const BlockCall& call, const BlockActivations& a, const BlockTensors<const floatX>& w,
                                 const BlockTensors<float>& d, floatX* x, bool accumulate) {
  if (call.recompute >= kRecomputeBlock) block_forward_to_gelu(call, a, w, x);
  block_backward_mlp(call, a, w, d, accumulate);
  block_backward_attention(call, a, w, d, x, accumulate);
}

/// Weight gradient of the matrices whose input the slot keeps, after block_backward_input of the same slot. (+)= into
/// `d`.
inline void block_backward_weight(const BlockCall& call, const BlockActivations& a, const BlockTensors<float>& d,
                                  bool accumulate) {
  const int N = call.shape.rows(), C = call.config.channels, level = call.recompute;
  cudaStream_t stream = call.stream;
  if (level < kRecomputeGelu) {
    matmul_backward_weight(call.blas, d.fcprojw, a.output, a.gelu, N, 4 * C, C, accumulate, stream);
  }
  if (level < kRecomputeLayernorms) {
    matmul_backward_weight(call.blas, d.fcw, a.fc, a.ln2, N, C, 4 * C, accumulate, stream);
    matmul_backward_weight(call.blas, d.qkvw, a.qkv, a.ln1, N, C, 3 * C, accumulate, stream);
  }
  if (level < kRecomputeBlock) {
    matmul_backward_weight(call.blas, d.attprojw, a.residual, a.attention, N, C, C, accumulate, stream);
  }
}
