// accumulate.cuh -- additions of gradients in a fixed association: out = a + b, and the sum of many parts as a tree.
//
//   tree([p]) = p
//   tree([p0 .. pc-1]) = tree([p0 .. ps-1]) + tree([ps .. pc-1])      s = the largest power of two below c
// For c = 6: ((p0+p1) + (p2+p3)) + (p4+p5). For c = 2^k this is the sum that recursive halving over c replicas makes
// (nearest neighbours first) and that gradient accumulation over c micro-batches makes: all three agree bit for bit.
//
// Bytes: add 12 n, tree_sum 4 (count + 1) n.
#pragma once

#include "llmc/check.h"
#include "llmc/reduce.cuh"

__global__ void add_kernel(float* out, const float* a, const float* b, size_t n) {
  for_each_element(n, [=](size_t i) { out[i] = a[i] + b[i]; });
}

// The tree as an expression, for a small count known at compile time: no branches, vectorises.
template <int kCount>
__device__ inline float tree_value(const float* part, size_t n) {
  if constexpr (kCount == 1) {
    return *part;
  } else {
    static_assert(kCount <= 8, "kSplit is the largest power of two below kCount up to 8");
    constexpr int kSplit = kCount > 4 ? 4 : kCount > 2 ? 2 : 1;
    return tree_value<kSplit>(part, n) + tree_value<kCount - kSplit>(part + kSplit * n, n);
  }
}

template <int kCount>
__global__ void tree_sum_small_kernel(float* out, const float* parts, size_t n) {
  for_each_element(n, [=](size_t i) { out[i] = tree_value<kCount>(parts + i, n); });
}

// Any count: a binary counter. After j parts the stack holds one sum for every one bit of j, the largest block lowest.
__global__ void tree_sum_kernel(float* out, const float* parts, int count, size_t n) {
  for_each_element(n, [=](size_t i) {
    float stack[32];
    int depth = 0;
    for (int j = 0; j < count; j++) {
      float sum = parts[(size_t)j * n + i];
      for (int carry = j; carry & 1; carry >>= 1) sum = stack[--depth] + sum;
      stack[depth++] = sum;
    }
    float sum = stack[--depth];
    while (depth > 0) sum = stack[--depth] + sum;
    out[i] = sum;
  });
}

/// out = a + b, n floats. out may be a or b. Asynchronous on `stream`; deterministic.
inline void add(float* out, const float* a, const float* b, size_t n, cudaStream_t stream) {
  if (n == 0) return;
  launch<add_kernel>(element_grid(n), element_block(), 0, stream, out, a, b, n);
}

/// out (n) = tree over the `count` rows of parts (count, n), as defined above. out may be exactly one of the rows.
/// count >= 1. Asynchronous on `stream`; deterministic.
inline void tree_sum(float* out, const float* parts, int count, size_t n, cudaStream_t stream) {
  assert(count >= 1);
  if (n == 0) return;
  const dim3 grid = element_grid(n);
  const dim3 block = element_block();
  switch (count) {
    case 1:
      return launch<tree_sum_small_kernel<1>>(grid, block, 0, stream, out, parts, n);
    case 2:
      return launch<tree_sum_small_kernel<2>>(grid, block, 0, stream, out, parts, n);
    case 3:
      return launch<tree_sum_small_kernel<3>>(grid, block, 0, stream, out, parts, n);
    case 4:
      return launch<tree_sum_small_kernel<4>>(grid, block, 0, stream, out, parts, n);
    case 5:
      return launch<tree_sum_small_kernel<5>>(grid, block, 0, stream, out, parts, n);
    case 6:
      return launch<tree_sum_small_kernel<6>>(grid, block, 0, stream, out, parts, n);
    case 7:
      return launch<tree_sum_small_kernel<7>>(grid, block, 0, stream, out, parts, n);
    case 8:
      return launch<tree_sum_small_kernel<8>>(grid, block, 0, stream, out, parts, n);
    default:
      return launch<tree_sum_kernel>(grid, block, 0, stream, out, parts, count, n);
  }
}
