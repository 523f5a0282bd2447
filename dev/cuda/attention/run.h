// run.h -- one attention layer on the device, as every rung of the ladder gets it; shapes as in llmc/attention.cuh.
#pragma once

#include "llmc/device.h"

/// Longest head of the rungs that keep a row of the output in registers.
constexpr int kMaxHead = 64;

struct AttentionRun {
  int B, T, C, NH, HS;
  const floatX *qkv, *dout;  // (B,T,3C), (B,T,C)
  floatX *out, *dqkv;        // (B,T,C), (B,T,3C)
  float *lse, *delta;        // (B,NH,T)
  float *p, *dp;             // (B,NH,T,T): probabilities and their gradient, for the rungs that keep them
  float scale;               // 1 / sqrt(HS)

  __host__ __device__ size_t rows() const { return static_cast<size_t>(B) * NH * T; }
};

/// A row of the tensors: position t of head h of sequence b, number (b * NH + h) * T + t.
struct AttentionRow {
  const AttentionRun& run;
  size_t number;
  int b, h, t;
  __device__ __forceinline__ AttentionRow(const AttentionRun& r, size_t n)
      : run(r),
        number(n),
        b(static_cast<int>(n / r.T / r.NH)),
        h(static_cast<int>(n / r.T % r.NH)),
        t(static_cast<int>(n % r.T)) {}
  /// Where q (part 0), k (1) or v (2) of a position of this head starts in (B,T,3C).
  __device__ __forceinline__ size_t packed(int position, int part) const {
    return (static_cast<size_t>(b) * run.T + position) * 3 * run.C + static_cast<size_t>(part) * run.C + h * run.HS;
  }
  /// The same in (B,T,C).
  __device__ __forceinline__ size_t plain(int position) const {
    return (static_cast<size_t>(b) * run.T + position) * run.C + h * run.HS;
  }
  __device__ __forceinline__ const floatX* q(int position) const { return run.qkv + packed(position, 0); }
  __device__ __forceinline__ const floatX* k(int position) const { return run.qkv + packed(position, 1); }
  __device__ __forceinline__ const floatX* v(int position) const { return run.qkv + packed(position, 2); }
  __device__ __forceinline__ const floatX* dout(int position) const { return run.dout + plain(position); }
};
