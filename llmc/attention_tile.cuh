// attention_tile.cuh -- the tile products that the attention kernels are made of.
//
// A block keeps one tile of "columns" (queries in the forward pass and for dq, keys for dk and dv) and walks over tiles
// of "rows" (keys, or queries). All three kernels then need the same two products, and no horizontal sum:
//   scores[y][x]  = sum_d rows[y][d] columns[d][x]        the columns are stored transposed, once per block
//   result[x][n] += sum_y weights[y][x] values[y][n]      weights are probabilities or their gradients
// Each thread owns micro-tiles, small enough for registers. On a GPU 128 threads own one of 4x4 (scores) and one of 4x8
// (result) each; with kWarpSize == 1 the single thread of a block walks over all of them, 6x16, and the compiler turns
// the inner loops into fused multiply-adds of whole vector registers (12 of the 16 of AVX2 hold sums). Heads longer
// than kSlice are cut into slices.
#pragma once

#include "llmc/device.h"

constexpr bool kSingleThread = kWarpSize == 1;
constexpr int kAttentionThreads = kSingleThread ? 1 : 128;
// Told to the compiler as blocks per multiprocessor: 168 registers a thread, which all three kernels fit without
// spills.
constexpr int kAttentionBlocks = 3;
constexpr int kTileColumns = kSingleThread ? 96 : 64;
constexpr int kTileRows = kSingleThread ? 96 : 32;
constexpr int kSlice = 64;                         // elements of a head that are in shared memory at a time
constexpr int kMicroRows = kSingleThread ? 6 : 4;  // of both products
constexpr int kScoreWidth = kSingleThread ? 16 : 4;
constexpr int kResultWidth = kSingleThread ? 16 : 8;
// Four spare floats put the rows that one warp reads together into different banks and keep 16-byte alignment.
constexpr int kPadding = kSingleThread ? 0 : 4;
constexpr int kRowStride = kSlice + kPadding;
constexpr int kColumnStride = kTileColumns + kPadding;

constexpr int kScoreTiles = (kTileRows / kMicroRows) * (kTileColumns / kScoreWidth);
constexpr int kResultTiles = (kTileColumns / kMicroRows) * (kSlice / kResultWidth);
constexpr int kResultTilesPerThread = kResultTiles / kAttentionThreads;
static_assert(kScoreTiles % kAttentionThreads == 0 && kResultTiles % kAttentionThreads == 0,
              "every thread owns the same");
static_assert(kTileColumns % kTileRows == 0, "the first tile of rows starts at the diagonal");

constexpr int kRowTileFloats = kTileRows * kRowStride;
constexpr int kColumnTileFloats = kSlice * kColumnStride;
constexpr int kScoreTileFloats = kTileRows * kColumnStride;

/// The part of a result tile (columns x slice) that a thread owns.
using ResultTiles = float[kResultTilesPerThread][kMicroRows][kResultWidth];

__device__ __forceinline__ int attention_thread() { return kSingleThread ? 0 : static_cast<int>(threadIdx.x); }
__device__ __forceinline__ int attention_lane() { return attention_thread() % kWarpSize; }
__device__ __forceinline__ int attention_warp() { return attention_thread() / kWarpSize; }
constexpr int kAttentionWarps = kAttentionThreads / kWarpSize;

/// One head of one sequence in global memory: element d of position t is at data[t * stride + d].
struct HeadView {
  const floatX* data;
  size_t stride;
  int T;
};

/// tile[y][d] = head[first + y][offset + d] for d < width; zero behind the last position. All threads of the block.
__device__ __forceinline__ void load_rows(float* __restrict__ tile, HeadView head, int first, int offset, int width) {
  for (int y = attention_warp(); y < kTileRows; y += kAttentionWarps) {
    const int t = first + y;
    const int valid = t < head.T ? width : 0;
    const floatX* __restrict__ source = head.data + static_cast<size_t>(t) * head.stride + offset;
    float* __restrict__ target = tile + y * kRowStride;
    SIMD_LOOP
    for (int d = attention_lane(); d < valid; d += kWarpSize) target[d] = static_cast<float>(source[d]);
    for (int d = valid + attention_lane(); d < kSlice; d += kWarpSize) target[d] = 0.0f;
  }
}

/// tile[d][x] = head[first + x][offset + d] for d < width; zero behind the last position. All threads of the block.
__device__ __forceinline__ void load_columns(float* __restrict__ tile, HeadView head, int first, int offset,
                                             int width) {
  for (int x = attention_warp(); x < kTileColumns; x += kAttentionWarps) {
    const int t = first + x;
    const floatX* __restrict__ source = head.data + static_cast<size_t>(t) * head.stride + offset;
    for (int d = attention_lane(); d < width; d += kWarpSize) {
      tile[d * kColumnStride + x] = t < head.T ? static_cast<float>(source[d]) : 0.0f;
    }
  }
}

/// values[i] = source[first + i] for i < count, zero from T on: logsumexp or delta of the positions of a tile.
__device__ __forceinline__ void load_statistics(float* values, const float* source, int first, int count, int T) {
  for (int i = attention_thread(); i < count; i += kAttentionThreads) {
    values[i] = first + i < T ? source[first + i] : 0.0f;
  }
}

/// product[i][j] += sum over k in [begin, end) of a[i * kStepI + k * kStepK] * b[k * kStrideB + j], in registers.
template <int kWidth, int kStepI, int kStepK, int kStrideB>
__device__ __forceinline__ void micro_product(float (&product)[kMicroRows][kWidth], const float* __restrict__ a,
                                              const float* __restrict__ b, int begin, int end) {
  for (int k = begin; k < end; k++) {
    UNROLL
    for (int i = 0; i < kMicroRows; i++) {
      const float factor = a[i * kStepI + k * kStepK];
      SIMD_LOOP
      for (int j = 0; j < kWidth; j++) product[i][j] += factor * b[k * kStrideB + j];
    }
  }
}

/// Which of the two axes of a score tile holds the keys; a query attends to the keys that are not behind it.
enum class AttentionRows { kKeys, kQueries };

/// Is the pair (position of the row, position of the column) part of the sum?
template <AttentionRows kRows>
__device__ __forceinline__ bool attends(int row, int column) {
  return kRows == AttentionRows::kKeys ? row <= column : row >= column;
}

/// Positions of the tile at hand: row y is position row + y, column x is position column + x of T.
struct TilePlace {
  int row, column, T;
};

/// scores[y][x] (+)= sum over d < width of rows[y][d] columns[d][x]; micro-tiles without any pair that attends are left
/// out.
template <AttentionRows kRows>
__device__ __forceinline__ void multiply_scores(float* __restrict__ scores, const float* __restrict__ rows,
                                                const float* __restrict__ columns, int width, bool add,
                                                TilePlace place) {
  constexpr int kAcross = kTileColumns / kScoreWidth;
  for (int m = attention_thread(); m < kScoreTiles; m += kAttentionThreads) {
    const int y = m / kAcross * kMicroRows;
    const int x = m % kAcross * kScoreWidth;
    const int row = place.row + y, column = place.column + x;
    if (row >= place.T || column >= place.T) continue;
    if (kRows == AttentionRows::kKeys ? row > column + kScoreWidth - 1 : row + kMicroRows - 1 < column) continue;
    float product[kMicroRows][kScoreWidth];
    UNROLL
    for (int i = 0; i < kMicroRows; i++) {
      SIMD_LOOP
      for (int j = 0; j < kScoreWidth; j++) product[i][j] = add ? scores[(y + i) * kColumnStride + x + j] : 0.0f;
    }
    micro_product<kScoreWidth, kRowStride, 1, kColumnStride>(product, rows + y * kRowStride, columns + x, 0, width);
    UNROLL
    for (int i = 0; i < kMicroRows; i++) {
      SIMD_LOOP
      for (int j = 0; j < kScoreWidth; j++) scores[(y + i) * kColumnStride + x + j] = product[i][j];
    }
  }
}

/// result[x][n] = result[x][n] * factor[x] + sum_y weights[y][x] values[y][n]; factor may be null (1). n < width only.
template <AttentionRows kRows>
__device__ __forceinline__ void accumulate_result(ResultTiles& result, const float* __restrict__ factor,
                                                  const float* __restrict__ weights, const float* __restrict__ values,
                                                  int width, TilePlace place) {
  constexpr int kAcross = kSlice / kResultWidth;
  for (int m = 0; m < kResultTilesPerThread; m++) {
    const int tile = m * kAttentionThreads + attention_thread();
    const int x = tile / kAcross * kMicroRows;
    const int n = tile % kAcross * kResultWidth;
    if (n >= width || place.column + x >= place.T) continue;
    // A copy with constant indices stays in registers; result[m] itself would be stored after each step.
    float product[kMicroRows][kResultWidth];
    UNROLL
    for (int i = 0; i < kMicroRows; i++) {
      const float scale = factor != nullptr ? factor[x + i] : 1.0f;
      SIMD_LOOP
      for (int j = 0; j < kResultWidth; j++) product[i][j] = result[m][i][j] * scale;
    }
    // Outside of [begin, end) the weights of these columns are zero, or there are no positions.
    const int diagonal = place.column + x - place.row;
    const int begin = kRows == AttentionRows::kKeys ? 0 : max(0, diagonal);
    const int end =
        kRows == AttentionRows::kKeys ? min(kTileRows, diagonal + kMicroRows) : min(kTileRows, place.T - place.row);
    micro_product<kResultWidth, 1, kColumnStride, kRowStride>(product, weights + x, values + n, begin, end);
    UNROLL
    for (int i = 0; i < kMicroRows; i++) {
      SIMD_LOOP
      for (int j = 0; j < kResultWidth; j++) result[m][i][j] = product[i][j];
    }
  }
}

/// target[(first + x) * stride + n] = result[x][n] * factor (a vector over x, or null) * scale, for positions before T
/// and n < width.
__device__ __forceinline__ void store_result(floatX* __restrict__ target, size_t stride, const ResultTiles& result,
                                             const float* factor, float scale, int width, int first, int T) {
  constexpr int kAcross = kSlice / kResultWidth;
  for (int m = 0; m < kResultTilesPerThread; m++) {
    const int tile = m * kAttentionThreads + attention_thread();
    const int x = tile / kAcross * kMicroRows;
    const int n = tile % kAcross * kResultWidth;
    UNROLL
    for (int i = 0; i < kMicroRows; i++) {
      if (first + x + i >= T) break;
      const float all = factor != nullptr ? factor[x + i] * scale : scale;
      floatX* __restrict__ row = target + static_cast<size_t>(first + x + i) * stride + n;
      for (int j = 0; j < kResultWidth; j++) {
        if (n + j < width) row[j] = static_cast<floatX>(result[m][i][j] * all);
      }
    }
  }
}
