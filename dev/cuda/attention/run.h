// run.h -- one attention layer on the device, as every rung of the ladder gets it; shapes as in llmc/attention.cuh.
#pragma once

#include "llmc/device.h"

/// Longest head of the rungs that keep a row of the output in registers.
constexpr int kMaxHead = 64;

struct AttentionRun {
  int B, T, C, NH;
  const floatX *qkv, *dout;  // (B,T,3C), (B,T,C)
  floatX *out, *dqkv;        // (B,T,C), (B,T,3C)
  float *lse, *delta;        // (B,NH,T)
  float *p, *dp;             // (B,NH,T,T): probabilities and their gradient, for the rungs that keep them

  int HS() const { return C / NH; }
  float scale() const { return 1.0f / sqrtf(static_cast<float>(HS())); }
  size_t rows() const { return static_cast<size_t>(B) * NH * T; }
};

/// A row of the tensors: sequence b, head h, position t, in the order (B,NH,T).
struct AttentionRow {
  int b, h, t;
  __device__ __forceinline__ AttentionRow(size_t row, int NH, int T)
      : b(static_cast<int>(row / T / NH)), h(static_cast<int>(row / T % NH)), t(static_cast<int>(row % T)) {}
  /// Offset of q (part 0), k (1) or v (2) of position `position` of this head in (B,T,3C).
  __device__ __forceinline__ size_t packed(int position, int part, int T, int C, int HS) const {
    return (static_cast<size_t>(b) * T + position) * 3 * C + static_cast<size_t>(part) * C +
           static_cast<size_t>(h) * HS;
  }
  /// The same in (B,T,C).
  __device__ __forceinline__ size_t plain(int position, int T, int C, int HS) const {
    return (static_cast<size_t>(b) * T + position) * C + static_cast<size_t>(h) * HS;
  }
};
