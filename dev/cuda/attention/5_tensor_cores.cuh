// 5_tensor_cores.cuh -- adds: tensor cores. Forward pass for bf16 and heads of 64; the backward pass is the production
// one.
//
// One instruction multiplies 16x16 by 16x8 elements (mma.h), 16 times the rate of the float units of an H100. A warp
// owns 16 queries and keeps their q, scores and results in registers: the score tile of one product is, register by
// register, the left operand of the next, so probabilities never leave the warp. Key and value tiles are
// double-buffered: while one is multiplied, cp.async fetches the next. Probabilities are rounded to bf16 for the second
// product: error 2^-9 of each, as in FlashAttention.
#pragma once

#include "dev/cuda/attention/run.h"
#include "llmc/mma.h"

namespace tensor_cores {

constexpr int kHead = 64, kQueries = 64, kKeys = 64, kThreads = 128;
constexpr int kTile = kKeys * kHead;
constexpr size_t kSharedBytes = (kQueries * kHead + 4 * kTile) * sizeof(floatX);  // q, two tiles of k, two of v

/// The 16-byte chunk `chunk` of a row. Chunks are permuted by the row number, so that the 8 rows that ldmatrix reads
/// together are in different banks.
__device__ __forceinline__ floatX* chunk_of(floatX* tile, int row, int chunk) {
  return tile + row * kHead + ((chunk ^ (row & 7)) << 3);
}

/// Starts to fetch rows [first, first + 64) of a head; rows from T on become zero.
__device__ __forceinline__ void fetch(floatX* tile, const floatX* head, size_t stride, int first, int T) {
  for (int i = static_cast<int>(threadIdx.x); i < kKeys * 8; i += kThreads) {
    const int row = i / 8, chunk = i % 8;
    floatX* target = chunk_of(tile, row, chunk);
    if (first + row < T) {
      cp_async16(target, head + (first + row) * stride + chunk * 8);
    } else {
      *reinterpret_cast<uint4*>(target) = make_uint4(0, 0, 0, 0);
    }
  }
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  uint32_t bits;
  memcpy(&bits, &pair, sizeof(bits));
  return bits;
}

/// Of a quarter of a warp: the 4 lanes that share a row of a fragment.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/// What a lane keeps for its two rows of queries, g and g + 8 (g = lane / 4).
struct Rows {
  float result[8][4];
  float maximum[2], sum[2];
};

/// scores (16 queries x 64 keys) = q k^T
__device__ __forceinline__ void multiply_scores(float (&scores)[8][4], const uint32_t (&q)[4][4], floatX* k, int lane) {
  for (int j = 0; j < 8; j += 2) {
    for (int i = 0; i < 4; i++) {
      uint32_t keys[4];
      ldmatrix_x4(keys, chunk_of(k, j * 8 + (lane & 7) + ((lane >> 4) << 3), i * 2 + ((lane >> 3) & 1)));
      const uint32_t left[2] = {keys[0], keys[1]}, right[2] = {keys[2], keys[3]};
      mma_m16n8k16(scores[j], q[i], left);
      mma_m16n8k16(scores[j + 1], q[i], right);
    }
  }
}

/// scores := probabilities relative to the new maximum; corrects what was summed before.
__device__ __forceinline__ void online_softmax(Rows& rows, float (&scores)[8][4], float scale) {
  for (int h = 0; h < 2; h++) {
    float maximum = rows.maximum[h];
    for (int j = 0; j < 8; j++) maximum = fmaxf(maximum, fmaxf(scores[j][2 * h], scores[j][2 * h + 1]));
    maximum = quad_max(maximum);
    const float correction = expf(scale * (rows.maximum[h] - maximum));
    rows.maximum[h] = maximum;
    rows.sum[h] *= correction;
    for (int j = 0; j < 8; j++) {
      for (int r = 2 * h; r < 2 * h + 2; r++) {
        rows.result[j][r] *= correction;
        scores[j][r] = expf(scale * (scores[j][r] - maximum));
        rows.sum[h] += scores[j][r];
      }
    }
  }
}

/// result (16 queries x 64) += probabilities v
__device__ __forceinline__ void add_values(Rows& rows, const float (&p)[8][4], floatX* v, int lane) {
  for (int i = 0; i < 4; i++) {
    const uint32_t weights[4] = {pack(p[2 * i][0], p[2 * i][1]), pack(p[2 * i][2], p[2 * i][3]),
                                 pack(p[2 * i + 1][0], p[2 * i + 1][1]), pack(p[2 * i + 1][2], p[2 * i + 1][3])};
    for (int j = 0; j < 8; j += 2) {
      uint32_t values[4];
      ldmatrix_x4_trans(values, chunk_of(v, i * 16 + (lane & 15), j + (lane >> 4)));
      const uint32_t left[2] = {values[0], values[1]}, right[2] = {values[2], values[3]};
      mma_m16n8k16(rows.result[j], weights, left);
      mma_m16n8k16(rows.result[j + 1], weights, right);
    }
  }
}

/// out and lse of the lane's rows before T.
__device__ __forceinline__ void store(const Rows& rows, floatX* out, float* lse, int C, int T, int first, int lane,
                                      float scale) {
  for (int h = 0; h < 2; h++) {
    const float sum = quad_sum(rows.sum[h]);
    const int query = first + lane / 4 + h * 8;
    if (query >= T) continue;
    floatX* target = out + static_cast<size_t>(query) * C + (lane & 3) * 2;
    for (int j = 0; j < 8; j++) {
      const uint32_t pair = pack(rows.result[j][2 * h] / sum, rows.result[j][2 * h + 1] / sum);
      memcpy(target + j * 8, &pair, sizeof(pair));
    }
    if ((lane & 3) == 0) lse[query] = scale * rows.maximum[h] + logf(sum);
  }
}

/// One block: 64 queries of one head. Grid: tiles of queries, B * NH.
__global__ void __launch_bounds__(kThreads)
    forward_kernel(floatX* out, float* lse, const floatX* qkv, int T, int C, int NH, float scale) {
  DYNAMIC_SHARED(floatX, memory);
  floatX *s_q = memory, *s_k = memory + kQueries * kHead, *s_v = s_k + 2 * kTile;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int first = static_cast<int>(blockIdx.x) * kQueries;
  const size_t sequence = blockIdx.y / NH, head = blockIdx.y % NH, stride = 3 * static_cast<size_t>(C);
  const floatX* q = qkv + sequence * T * stride + head * kHead;
  const floatX *k = q + C, *v = q + 2 * C;
  fetch(s_q, q, stride, first, T);
  fetch(s_k, k, stride, 0, T);
  cp_async_commit();
  fetch(s_v, v, stride, 0, T);
  cp_async_commit();
  uint32_t r_q[4][4];
  Rows rows = {{}, {-INFINITY, -INFINITY}, {0.0f, 0.0f}};
  const int tiles = static_cast<int>(blockIdx.x) + 1;
  for (int tile = 0; tile < tiles; tile++) {
    floatX *tile_k = s_k + (tile & 1) * kTile, *tile_v = s_v + (tile & 1) * kTile;
    floatX *next_k = s_k + ((tile + 1) & 1) * kTile, *next_v = s_v + ((tile + 1) & 1) * kTile;
    cp_async_wait<1>();  // k of this tile
    __syncthreads();
    if (tile == 0) {
      for (int i = 0; i < 4; i++) ldmatrix_x4(r_q[i], chunk_of(s_q, warp * 16 + (lane & 15), i * 2 + (lane >> 4)));
    }
    float scores[8][4] = {};
    multiply_scores(scores, r_q, tile_k, lane);
    if (tile + 1 < tiles) fetch(next_k, k, stride, (tile + 1) * kKeys, T);
    cp_async_commit();
    if (tile == tiles - 1) {  // the diagonal
      for (int j = 0; j < 8; j++) {
        for (int r = 0; r < 4; r++) {
          const int key = j * 8 + (lane & 3) * 2 + (r & 1), query = warp * 16 + lane / 4 + (r >> 1) * 8;
          if (key > query) scores[j][r] = -INFINITY;
        }
      }
    }
    online_softmax(rows, scores, scale);
    cp_async_wait<1>();  // v of this tile
    __syncthreads();
    add_values(rows, scores, tile_v, lane);
    if (tile + 1 < tiles) fetch(next_v, v, stride, (tile + 1) * kKeys, T);
    cp_async_commit();
  }
  store(rows, out + sequence * T * C + head * kHead, lse + static_cast<size_t>(blockIdx.y) * T, C, T, first + warp * 16,
        lane, scale);
}

/// Requires heads of 64 and at most 65535 heads in all (else a user error).
inline void forward(const AttentionRun& run, cudaStream_t stream) {
  if (run.HS != kHead || run.B * run.NH > 65535) user_error("the tensor-core rung needs heads of 64");
  const dim3 grid(static_cast<unsigned>(ceil_div(run.T, kQueries)), static_cast<unsigned>(run.B * run.NH));
  launch<forward_kernel>(grid, dim3(kThreads), kSharedBytes, stream, run.out, run.lse, run.qkv, run.T, run.C, run.NH,
                         run.scale);
}

}  // namespace tensor_cores
