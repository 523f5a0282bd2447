// attention.cuh -- causal multi-head self-attention, forward and backward, without a T x T tensor.
//
//   out_i = sum_{j <= i} P_ij v_j,   P_ij = exp(scale q_i.k_j - lse_i),   lse_i = log sum_{j <= i} exp(scale q_i.k_j)
//   dv_j = sum_{i >= j} P_ij dout_i,   dS_ij = P_ij (dout_i.v_j - delta_i),   delta_i = dout_i.out_i
//   dq_i = scale sum_j dS_ij k_j,      dk_j = scale sum_i dS_ij q_i,          scale = 1 / sqrt(HS)
// Shapes: qkv, dqkv (B,T,3C) = [q | k | v], each NH heads of HS = C/NH; out, dout (B,T,C); lse, delta (B,NH,T) float.
// The forward pass keeps a running maximum and sum (online softmax); of the probabilities only lse is kept, the
// backward pass computes them again. It runs twice over the tiles, once by key for dk and dv, once by query for dq:
// 7 tile products instead of 5, but no atomics, no scratch of the size of q, and every sum in a fixed order.
// FLOPs (causal): forward 2 B NH T^2 HS, backward 7/2 of that. Bytes: O(B T C), independent of T^2.
// Source: Dao et al. 2022 (FlashAttention), Dao 2023 (FlashAttention-2); Milakov & Gimelshein 2018 (online softmax).
#pragma once

#include <cmath>

#include "llmc/attention_tile.cuh"
#include "llmc/check.h"
#include "llmc/numeric.h"

/// Sizes of a call, as every kernel gets them. `tiles` = tiles of columns per head, `slices` = slices of a head.
struct AttentionSizes {
  int T, C, NH, HS, tiles, slices;
  float scale;
};

/// The work of one block: head, first column, and the slice of the head whose results it writes.
struct AttentionBlock {
  size_t sequence;  // b
  int head;         // h
  size_t row;       // b * NH + h, times T: where the head's lse and delta start
  int column;
  int slice;
};

__device__ __forceinline__ AttentionBlock attention_block(const AttentionSizes& n) {
  const size_t pair = blockIdx.x / n.tiles;
  AttentionBlock block;
  block.sequence = pair / n.NH;
  block.head = static_cast<int>(pair % n.NH);
  block.row = pair * n.T;
  block.column = static_cast<int>(blockIdx.x % n.tiles) * kTileColumns;
  block.slice = static_cast<int>(blockIdx.y);
  return block;
}

/// q (part 0), k (1) or v (2) of the block's head in a (B,T,3C) tensor.
__device__ __forceinline__ HeadView packed_head(const floatX* qkv, const AttentionBlock& block, const AttentionSizes& n,
                                                int part) {
  const size_t stride = 3 * static_cast<size_t>(n.C);
  return {qkv + block.sequence * n.T * stride + static_cast<size_t>(part) * n.C + block.head * n.HS, stride, n.T};
}

/// The block's head in a (B,T,C) tensor.
__device__ __forceinline__ HeadView plain_head(const floatX* x, const AttentionBlock& block, const AttentionSizes& n) {
  const size_t stride = n.C;
  return {x + block.sequence * n.T * stride + block.head * n.HS, stride, n.T};
}

/// Where the i-th slice in order starts, and how long it is. The block's own slice is the last one, so that it is
/// still in shared memory when the scores are complete.
struct SlicePlace {
  int offset, width;
};
__device__ __forceinline__ SlicePlace slice_place(const AttentionBlock& block, const AttentionSizes& n, int i) {
  const int offset = (block.slice + 1 + i) % n.slices * kSlice;
  return {offset, min(kSlice, n.HS - offset)};
}

// ---------------------------------------------------------------------------------------------------------------------
// forward: columns are queries, rows are keys

constexpr int kColumnsPerThread = kSingleThread ? kTileColumns : 1;

/// Maximum and sum so far of the columns that a thread looks after: column thread + i * threads.
struct OnlineSoftmax {
  float maximum[kColumnsPerThread];
  float sum[kColumnsPerThread];
};

/// scores[y][x] := exp(scale (scores - maximum_x)) with the maximum over all rows so far, zero where the key is behind
/// the query; correction[x] = what the results of earlier tiles must be multiplied with.
__device__ __forceinline__ void online_softmax(OnlineSoftmax& state, float* __restrict__ scores,
                                               float* __restrict__ correction, float scale, TilePlace place) {
  const int first = attention_thread();
  if (first >= kTileColumns) return;
  float maximum[kColumnsPerThread];
  SIMD_LOOP
  for (int i = 0; i < kColumnsPerThread; i++) maximum[i] = state.maximum[i];
  for (int y = 0; y < kTileRows; y++) {
    const float* __restrict__ row = scores + y * kColumnStride + first;
    SIMD_LOOP
    for (int i = 0; i < kColumnsPerThread; i++) {
      const bool valid = attends<AttentionRows::kKeys>(place.row + y, place.column + first + i);
      maximum[i] = fmaxf(maximum[i], valid ? row[i] : -INFINITY);
    }
  }
  SIMD_LOOP
  for (int i = 0; i < kColumnsPerThread; i++) {
    const float factor = expf(scale * (state.maximum[i] - maximum[i]));
    correction[first + i] = factor;
    state.sum[i] *= factor;
    state.maximum[i] = maximum[i];
  }
  for (int y = 0; y < kTileRows; y++) {
    float* __restrict__ row = scores + y * kColumnStride + first;
    SIMD_LOOP
    for (int i = 0; i < kColumnsPerThread; i++) {
      const bool valid = attends<AttentionRows::kKeys>(place.row + y, place.column + first + i);
      const float all = expf(scale * (row[i] - maximum[i]));
      const float weight = valid ? all : 0.0f;
      row[i] = weight;
      state.sum[i] += weight;
    }
  }
}

constexpr size_t kForwardSharedBytes =
    (kColumnTileFloats + 2 * kRowTileFloats + kScoreTileFloats + kTileColumns) * sizeof(float);

__global__ void __launch_bounds__(kAttentionThreads, kAttentionBlocks)
    attention_forward_kernel(floatX* __restrict__ out, float* __restrict__ lse, const floatX* __restrict__ qkv,
                             AttentionSizes n) {
  DYNAMIC_SHARED(float, memory);
  float* queries = memory;
  float* keys = queries + kColumnTileFloats;
  float* values = keys + kRowTileFloats;
  float* scores = values + kRowTileFloats;
  float* correction = scores + kScoreTileFloats;
  const AttentionBlock block = attention_block(n);
  const SlicePlace own = slice_place(block, n, n.slices - 1);
  ResultTiles result = {};
  OnlineSoftmax state;
  for (int i = 0; i < kColumnsPerThread; i++) {
    state.maximum[i] = -INFINITY;
    state.sum[i] = 0.0f;
  }
  const int end = min(block.column + kTileColumns, n.T);
  for (int key = 0; key < end; key += kTileRows) {
    const TilePlace place = {key, block.column, n.T};
    for (int i = 0; i < n.slices; i++) {
      const SlicePlace slice = slice_place(block, n, i);
      if (key == 0 || n.slices > 1) {
        load_columns(queries, packed_head(qkv, block, n, 0), block.column, slice.offset, slice.width);
      }
      load_rows(keys, packed_head(qkv, block, n, 1), key, slice.offset, slice.width);
      if (i == 0) load_rows(values, packed_head(qkv, block, n, 2), key, own.offset, own.width);
      __syncthreads();
      multiply_scores<AttentionRows::kKeys>(scores, keys, queries, slice.width, i > 0, place);
      __syncthreads();
    }
    online_softmax(state, scores, correction, n.scale, place);
    __syncthreads();
    accumulate_result<AttentionRows::kKeys>(result, correction, scores, values, own.width, place);
    __syncthreads();
  }
  const int first = attention_thread();
  for (int i = 0; i < kColumnsPerThread && first < kTileColumns; i++) {
    correction[first + i] = 1.0f / state.sum[i];
    const int query = block.column + first + i;
    if (block.slice == 0 && query < n.T) lse[block.row + query] = n.scale * state.maximum[i] + logf(state.sum[i]);
  }
  __syncthreads();
  floatX* target = out + block.sequence * n.T * n.C + block.head * n.HS + own.offset;
  store_result(target, n.C, result, correction, 1.0f, own.width, block.column, n.T);
}

// ---------------------------------------------------------------------------------------------------------------------
// backward

/// delta[b,h,t] = sum_d dout[b,t,h,d] out[b,t,h,d]. One warp for each (b,t,h).
__global__ void attention_delta_kernel(float* __restrict__ delta, const floatX* __restrict__ dout,
                                       const floatX* __restrict__ out, AttentionSizes n, size_t count) {
  const size_t index = static_cast<size_t>(blockIdx.x) * blockDim.y + threadIdx.y;  // (b * T + t) * NH + h
  if (index >= count) return;
  const floatX* __restrict__ a = dout + index * n.HS;
  const floatX* __restrict__ b = out + index * n.HS;
  float sum = 0.0f;
  SIMD_SUM(sum)
  for (int d = threadIdx.x; d < n.HS; d += kWarpSize) sum += static_cast<float>(a[d]) * static_cast<float>(b[d]);
  sum = warp_sum(sum);
  if (threadIdx.x == 0) {
    const size_t head = index % n.NH, t = index / n.NH % n.T, sequence = index / n.NH / n.T;
    delta[(sequence * n.NH + head) * n.T + t] = sum;
  }
}

/// scores := P = exp(scale scores - lse), dscores := dS = P (dscores - delta), both zero where the key is behind the
/// query. lse and delta belong to the queries, so to the rows or to the columns of the tile.
template <AttentionRows kRows>
__device__ __forceinline__ void score_gradient(float* __restrict__ scores, float* __restrict__ dscores,
                                               const float* __restrict__ lse, const float* __restrict__ delta,
                                               float scale, TilePlace place) {
  for (int y = attention_warp(); y < kTileRows; y += kAttentionWarps) {
    float* __restrict__ row = scores + y * kColumnStride;
    float* __restrict__ drow = dscores + y * kColumnStride;
    SIMD_LOOP
    for (int x = attention_lane(); x < kTileColumns; x += kWarpSize) {
      const int query = kRows == AttentionRows::kKeys ? x : y;
      const bool valid = attends<kRows>(place.row + y, place.column + x);
      // computed for all, then selected: the scores of pairs that do not attend are not initialised
      const float weight = expf(scale * row[x] - lse[query]);
      const float gradient = weight * (drow[x] - delta[query]);
      row[x] = valid ? weight : 0.0f;
      drow[x] = valid ? gradient : 0.0f;
    }
  }
}

/// Shared memory of both backward kernels.
struct BackwardTiles {
  float *columns, *dcolumns;  // k and v of the keys, or q and dout of the queries, transposed
  float *rows, *drows;        // q and dout of the queries, or k and v of the keys
  float *scores, *dscores;
  float *lse, *delta;
};
constexpr size_t kBackwardSharedBytes =
    (2 * kColumnTileFloats + 2 * kRowTileFloats + 2 * kScoreTileFloats + 2 * kTileColumns) * sizeof(float);

__device__ __forceinline__ BackwardTiles backward_tiles(float* memory) {
  BackwardTiles tiles;
  tiles.columns = memory;
  tiles.dcolumns = tiles.columns + kColumnTileFloats;
  tiles.rows = tiles.dcolumns + kColumnTileFloats;
  tiles.drows = tiles.rows + kRowTileFloats;
  tiles.scores = tiles.drows + kRowTileFloats;
  tiles.dscores = tiles.scores + kScoreTileFloats;
  tiles.lse = tiles.dscores + kScoreTileFloats;
  tiles.delta = tiles.lse + kTileColumns;
  return tiles;
}

/// P and dS of the tile at `place` into tiles.scores and tiles.dscores; on return the block's own slice is in
/// tiles.rows. The column tiles are loaded when `first`, and for each tile again when a head has several slices.
template <AttentionRows kRows>
__device__ __forceinline__ void recompute_scores(const BackwardTiles& tiles, HeadView column, HeadView dcolumn,
                                                 HeadView row, HeadView drow, const AttentionBlock& block,
                                                 const AttentionSizes& n, TilePlace place) {
  const bool first = place.row == (kRows == AttentionRows::kKeys ? 0 : place.column);
  for (int i = 0; i < n.slices; i++) {
    const SlicePlace slice = slice_place(block, n, i);
    if (first || n.slices > 1) {
      load_columns(tiles.columns, column, place.column, slice.offset, slice.width);
      load_columns(tiles.dcolumns, dcolumn, place.column, slice.offset, slice.width);
    }
    load_rows(tiles.rows, row, place.row, slice.offset, slice.width);
    load_rows(tiles.drows, drow, place.row, slice.offset, slice.width);
    __syncthreads();
    multiply_scores<kRows>(tiles.scores, tiles.rows, tiles.columns, slice.width, i > 0, place);
    multiply_scores<kRows>(tiles.dscores, tiles.drows, tiles.dcolumns, slice.width, i > 0, place);
    __syncthreads();
  }
  score_gradient<kRows>(tiles.scores, tiles.dscores, tiles.lse, tiles.delta, n.scale, place);
  __syncthreads();
}

/// dk and dv of a tile of keys: columns are keys, rows are the queries from the diagonal on.
__global__ void __launch_bounds__(kAttentionThreads, kAttentionBlocks)
    attention_backward_key_kernel(floatX* __restrict__ dqkv, const floatX* __restrict__ dout,
                                  const floatX* __restrict__ qkv, const float* __restrict__ lse,
                                  const float* __restrict__ delta, AttentionSizes n) {
  DYNAMIC_SHARED(float, memory);
  const BackwardTiles tiles = backward_tiles(memory);
  const AttentionBlock block = attention_block(n);
  const SlicePlace own = slice_place(block, n, n.slices - 1);
  const HeadView q = packed_head(qkv, block, n, 0), k = packed_head(qkv, block, n, 1);
  const HeadView v = packed_head(qkv, block, n, 2), dout_head = plain_head(dout, block, n);
  ResultTiles dk = {}, dv = {};
  for (int query = block.column; query < n.T; query += kTileRows) {
    const TilePlace place = {query, block.column, n.T};
    load_statistics(tiles.lse, lse + block.row, query, kTileRows, n.T);
    load_statistics(tiles.delta, delta + block.row, query, kTileRows, n.T);
    recompute_scores<AttentionRows::kQueries>(tiles, k, v, q, dout_head, block, n, place);
    accumulate_result<AttentionRows::kQueries>(dv, nullptr, tiles.scores, tiles.drows, own.width, place);
    accumulate_result<AttentionRows::kQueries>(dk, nullptr, tiles.dscores, tiles.rows, own.width, place);
    __syncthreads();
  }
  const size_t stride = 3 * static_cast<size_t>(n.C);
  floatX* target = dqkv + block.sequence * n.T * stride + block.head * n.HS + own.offset;
  store_result(target + n.C, stride, dk, nullptr, n.scale, own.width, block.column, n.T);
  store_result(target + 2 * static_cast<size_t>(n.C), stride, dv, nullptr, 1.0f, own.width, block.column, n.T);
}

/// dq of a tile of queries: columns are queries, rows are the keys up to the diagonal.
__global__ void __launch_bounds__(kAttentionThreads, kAttentionBlocks)
    attention_backward_query_kernel(floatX* __restrict__ dqkv, const floatX* __restrict__ dout,
                                    const floatX* __restrict__ qkv, const float* __restrict__ lse,
                                    const float* __restrict__ delta, AttentionSizes n) {
  DYNAMIC_SHARED(float, memory);
  const BackwardTiles tiles = backward_tiles(memory);
  const AttentionBlock block = attention_block(n);
  const SlicePlace own = slice_place(block, n, n.slices - 1);
  const HeadView q = packed_head(qkv, block, n, 0), k = packed_head(qkv, block, n, 1);
  const HeadView v = packed_head(qkv, block, n, 2), dout_head = plain_head(dout, block, n);
  ResultTiles dq = {};
  load_statistics(tiles.lse, lse + block.row, block.column, kTileColumns, n.T);
  load_statistics(tiles.delta, delta + block.row, block.column, kTileColumns, n.T);
  const int end = min(block.column + kTileColumns, n.T);
  for (int key = 0; key < end; key += kTileRows) {
    const TilePlace place = {key, block.column, n.T};
    recompute_scores<AttentionRows::kKeys>(tiles, q, dout_head, k, v, block, n, place);
    accumulate_result<AttentionRows::kKeys>(dq, nullptr, tiles.dscores, tiles.rows, own.width, place);
    __syncthreads();
  }
  const size_t stride = 3 * static_cast<size_t>(n.C);
  floatX* target = dqkv + block.sequence * n.T * stride + block.head * n.HS + own.offset;
  store_result(target, stride, dq, nullptr, n.scale, own.width, block.column, n.T);
}

// ---------------------------------------------------------------------------------------------------------------------
// launchers

inline AttentionSizes attention_sizes(int B, int T, int C, int NH) {
  assert(B >= 1 && T >= 1 && C >= 1 && NH >= 1 && "attention: every size must be at least 1");
  assert(C % NH == 0 && "attention: the number of heads must divide C");
  AttentionSizes n;
  n.T = T;
  n.C = C;
  n.NH = NH;
  n.HS = C / NH;
  n.tiles = ceil_div(T, kTileColumns);
  n.slices = ceil_div(n.HS, kSlice);
  n.scale = 1.0f / std::sqrt(static_cast<float>(n.HS));
  return n;
}

/// One block for each head, tile of columns and slice of the head.
inline dim3 attention_grid(const AttentionSizes& n, int B) {
  const size_t blocks = static_cast<size_t>(B) * n.NH * n.tiles;
  assert(blocks <= 0x7fffffff && n.slices <= 65535 && "attention: too many blocks for a grid");
  return dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(n.slices));
}

/// Causal self-attention: out = softmax(scale q k^T, keys up to the query) v for each sequence and head.
/// Shapes: out (B,T,C) and qkv (B,T,3C) floatX, lse (B,NH,T) float. Overwrites out and lse; neither may overlap qkv.
/// Requires: NH divides C (else assert); any T, C/NH >= 1. Arithmetic in float whatever floatX is.
/// Asynchronous on `stream`, deterministic, no scratch. Cost: 2 B T^2 C FLOPs (causal), O(B T C) bytes.
inline void attention_forward(floatX* out, float* lse, const floatX* qkv, int B, int T, int C, int NH,
                              cudaStream_t stream) {
  const AttentionSizes n = attention_sizes(B, T, C, NH);
  if (kForwardSharedBytes > 48 * 1024) allow_dynamic_shared<attention_forward_kernel>(kForwardSharedBytes);
  launch<attention_forward_kernel>(attention_grid(n, B), dim3(kAttentionThreads), kForwardSharedBytes, stream, out, lse,
                                   qkv, n);
}

/// Arguments of attention_backward; shapes as in the header of this file.
struct AttentionBackward {
  floatX* dqkv;    // (B,T,3C), overwritten
  float* scratch;  // attention_backward_scratch_floats(...)
  const floatX* dout;
  const floatX* qkv;
  const floatX* out;  // of the forward pass
  const float* lse;   // of the forward pass
  int B, T, C, NH;
};

/// Floats of scratch: delta (B,NH,T).
inline size_t attention_backward_scratch_floats(int B, int T, int /*C*/, int NH) {
  return static_cast<size_t>(B) * NH * T;
}

/// Gradient of attention_forward: dqkv (overwritten) from dout and from qkv, out, lse of the forward pass.
/// Requires: as the forward pass; dqkv overlaps none of the inputs. Overwrites scratch.
/// Asynchronous on `stream`, deterministic (no atomics). Cost: 7 B T^2 C FLOPs (causal), O(B T C) bytes.
inline void attention_backward(const AttentionBackward& arguments, cudaStream_t stream) {
  const AttentionBackward& a = arguments;
  const AttentionSizes n = attention_sizes(a.B, a.T, a.C, a.NH);
  constexpr unsigned kDeltaRows = 8;
  const size_t rows = static_cast<size_t>(a.B) * a.T * a.NH;
  const size_t delta_blocks = ceil_div<size_t>(rows, kDeltaRows);
  assert(delta_blocks <= 0x7fffffff && "attention: too many rows for a grid");
  launch<attention_delta_kernel>(dim3(static_cast<unsigned>(delta_blocks)), dim3(kWarpSize, kDeltaRows), 0, stream,
                                 a.scratch, a.dout, a.out, n, rows);
  if (kBackwardSharedBytes > 48 * 1024) {
    allow_dynamic_shared<attention_backward_key_kernel>(kBackwardSharedBytes);
    allow_dynamic_shared<attention_backward_query_kernel>(kBackwardSharedBytes);
  }
  launch<attention_backward_key_kernel>(attention_grid(n, a.B), dim3(kAttentionThreads), kBackwardSharedBytes, stream,
                                        a.dqkv, a.dout, a.qkv, a.lse, a.scratch, n);
  launch<attention_backward_query_kernel>(attention_grid(n, a.B), dim3(kAttentionThreads), kBackwardSharedBytes, stream,
                                          a.dqkv, a.dout, a.qkv, a.lse, a.scratch, n);
}
