// embedding.cuh -- out[b,t,:] = wte[token[b,t],:] + wpe[t,:], and the gradients of both tables.
//
// Shapes: out, dout (B,T,C) floatX; tokens (B,T) int; wte (Vp,C), wpe (max_T,C) floatX; dwte (Vp,C), dwpe (max_T,C)
// float.
// The gradient of wte is a scatter: many positions hold the same token. Atomics would add them in an order that changes
// from run to run. So the host sorts the positions by token (it has the tokens anyway), and one warp adds the positions
// of one token in ascending order.
//
// Bytes (e = size of floatX): forward about 3*B*T*C*e; backward B*T*C*e read for each table, and the table.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "llmc/reduce.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// order of the additions

/// Positions of a micro-batch grouped by token. Group s holds token segment_tokens[s] at the positions
/// positions[segment_starts[s] .. segment_starts[s+1]), ascending.
struct EmbeddingOrder {
  std::vector<int> positions;       // (N)
  std::vector<int> segment_starts;  // (segments + 1)
  std::vector<int> segment_tokens;  // (segments), ascending
  int segments() const { return static_cast<int>(segment_tokens.size()); }
};

/// The same in device memory, uploaded by the caller.
struct EmbeddingSegments {
  const int* positions;
  const int* segment_starts;
  const int* segment_tokens;
  int segments;
};

/// Groups the N = B*T tokens of a micro-batch. Host only; O(N log N).
inline EmbeddingOrder embedding_order(const int* tokens, int N) {
  EmbeddingOrder order;
  order.positions.resize(N);
  std::iota(order.positions.begin(), order.positions.end(), 0);
  std::stable_sort(order.positions.begin(), order.positions.end(), [&](int a, int b) { return tokens[a] < tokens[b]; });
  for (int i = 0; i < N; i++) {
    const int token = tokens[order.positions[i]];
    if (i == 0 || token != order.segment_tokens.back()) {
      order.segment_tokens.push_back(token);
      order.segment_starts.push_back(i);
    }
  }
  order.segment_starts.push_back(N);
  return order;
}

// ---------------------------------------------------------------------------------------------------------------------
// kernels

__global__ void embedding_forward_kernel(floatX* __restrict__ out, const int* __restrict__ tokens,
                                         const floatX* __restrict__ wte, const floatX* __restrict__ wpe, int N, int T,
                                         int C) {
  const size_t row = row_index();
  if (row >= (size_t)N) return;
  floatX* __restrict__ y = out + row * C;
  const floatX* __restrict__ token = wte + (size_t)tokens[row] * C;
  const floatX* __restrict__ position = wpe + (row % T) * C;
  for_each_strided<kWarpSize>(threadIdx.x, C, [=](int i) { y[i] = (floatX)((float)token[i] + (float)position[i]); });
}

// One warp per (segment, column tile).
__global__ void embedding_backward_token_kernel(float* __restrict__ dwte, const floatX* __restrict__ dout,
                                                const int* __restrict__ positions,
                                                const int* __restrict__ segment_starts,
                                                const int* __restrict__ segment_tokens, int C, bool accumulate) {
  const LaneColumns columns = lane_columns(C);
  const int segment = blockIdx.x;
  float sums[kColumnsPerLane] = {};
  for (int i = segment_starts[segment]; i < segment_starts[segment + 1]; i++) {
    add_row(sums, dout + (size_t)positions[i] * C, columns);
  }
  store_row(dwte + (size_t)segment_tokens[segment] * C, sums, columns, accumulate);
}

// One warp per (position, column tile). Positions behind T have no rows to add.
__global__ void embedding_backward_position_kernel(float* __restrict__ dwpe, const floatX* __restrict__ dout, int B,
                                                   int T, int C, bool accumulate) {
  const LaneColumns columns = lane_columns(C);
  const size_t position = blockIdx.x;
  float sums[kColumnsPerLane] = {};
  for (size_t b = 0; position < (size_t)T && b < (size_t)B; b++) add_row(sums, dout + (b * T + position) * C, columns);
  store_row(dwpe + position * C, sums, columns, accumulate);
}

// ---------------------------------------------------------------------------------------------------------------------
// launchers

/// out[b,t,:] = wte[tokens[b,t],:] + wpe[t,:]. Overwrites out (B,T,C) floatX. Reads tokens (B,T) int, every one in [0,
/// rows of wte) (the data layer checks them), wte, wpe floatX; T <= rows of wpe. Asynchronous on `stream`;
/// deterministic.
inline void embedding_forward(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe, int B, int T, int C,
                              cudaStream_t stream) {
  assert(B >= 0 && T >= 1 && C >= 1);
  if (B == 0) return;
  launch<embedding_forward_kernel>(row_grid((size_t)B * T), row_block(), 0, stream, out, tokens, wte, wpe, B * T, T, C);
}

/// dwte[v,:] (+)= sum of dout over the positions that hold token v, ascending. dwte (Vp,C) float; dout (N,C) floatX;
/// `order`: the uploaded embedding_order of the micro-batch's tokens. accumulate false: rows of absent tokens become 0.
/// Asynchronous on `stream`; deterministic. N*C elements read; 4*Vp*C bytes written if not accumulate.
inline void embedding_backward_token(float* dwte, const floatX* dout, const EmbeddingSegments& order, int Vp, int C,
                                     bool accumulate, cudaStream_t stream) {
  assert(Vp >= 1 && C >= 1 && order.segments >= 0 && order.segments <= Vp);
  if (!accumulate) CUDA_CHECK(cudaMemsetAsync(dwte, 0, (size_t)Vp * C * sizeof(float), stream));
  if (order.segments == 0) return;
  launch<embedding_backward_token_kernel>(column_grid(order.segments, C), column_block(), 0, stream, dwte, dout,
                                          order.positions, order.segment_starts, order.segment_tokens, C, accumulate);
}

/// dwpe[t,:] (+)= sum over b ascending of dout[b,t,:]. dwpe (max_T,C) float; dout (B,T,C) floatX; T <= max_T.
/// accumulate false: the rows T..max_T-1 become 0. Asynchronous on `stream`; deterministic. B*T*C elements read.
inline void embedding_backward_position(float* dwpe, const floatX* dout, int B, int T, int C, int max_T,
                                        bool accumulate, cudaStream_t stream) {
  assert(B >= 0 && T >= 1 && T <= max_T && C >= 1);
  launch<embedding_backward_position_kernel>(column_grid(accumulate ? T : max_T, C), column_block(), 0, stream, dwpe,
                                             dout, B, T, C, accumulate);
}
