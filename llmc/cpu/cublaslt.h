// cublaslt.h -- the part of the cuBLASLt API that this program uses, on the CPU device, over OpenBLAS.
//
// Same names, types and rules as NVIDIA's header: column-major matrices, D = alpha op(A) op(B) + beta C + bias, beta ==
// 0 does not read C, bf16 inputs are multiplied and summed in float and rounded once. What is not used is refused with
// CUBLAS_STATUS_NOT_SUPPORTED: other types, C != D, other epilogues.
// The bits of a product must not depend on the number of threads. So the "algorithm" that the heuristic picks is a
// division of D into tiles, a function of m, n, k alone, and each tile is one call of a single-threaded sgemm. Like a
// kernel, a product is a task of its stream; the threads of the stream's team take its tiles one by one.
#pragma once

#include <cblas.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

#include "llmc/device.h"
#include "llmc/numeric.h"

extern "C" void openblas_set_num_threads(int threads);

enum cublasStatus_t {
  CUBLAS_STATUS_SUCCESS = 0,
  CUBLAS_STATUS_INVALID_VALUE = 7,
  CUBLAS_STATUS_NOT_SUPPORTED = 15,
};
enum cudaDataType_t { CUDA_R_32F = 0, CUDA_R_16BF = 14 };
enum cublasComputeType_t { CUBLAS_COMPUTE_32F = 68, CUBLAS_COMPUTE_32F_FAST_TF32 = 77 };
enum cublasOperation_t { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 };
enum cublasLtEpilogue_t { CUBLASLT_EPILOGUE_DEFAULT = 1, CUBLASLT_EPILOGUE_BIAS = 4 };
enum cublasLtMatmulDescAttributes_t {
  CUBLASLT_MATMUL_DESC_TRANSA = 3,
  CUBLASLT_MATMUL_DESC_TRANSB = 4,
  CUBLASLT_MATMUL_DESC_EPILOGUE = 7,
  CUBLASLT_MATMUL_DESC_BIAS_POINTER = 8,
};
enum cublasLtMatmulPreferenceAttributes_t {
  CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8,
};

struct cublasLtContext {};
struct cublasLtMatmulDescOpaque_t {
  cublasOperation_t transpose_a = CUBLAS_OP_N, transpose_b = CUBLAS_OP_N;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const void* bias = nullptr;  // of D's type, one value for each row of D
};
struct cublasLtMatrixLayoutOpaque_t {
  cudaDataType_t type;
  uint64_t rows, columns;
  int64_t leading;
};
struct cublasLtMatmulPreferenceOpaque_t {};
struct cublasLtMatmulAlgo_t {
  int tile_rows, tile_columns;
};
struct cublasLtMatmulHeuristicResult_t {
  cublasLtMatmulAlgo_t algo;
  size_t workspaceSize;
  cublasStatus_t state;
  float wavesCount;
};
using cublasLtHandle_t = cublasLtContext*;
using cublasLtMatmulDesc_t = cublasLtMatmulDescOpaque_t*;
using cublasLtMatrixLayout_t = cublasLtMatrixLayoutOpaque_t*;
using cublasLtMatmulPreference_t = cublasLtMatmulPreferenceOpaque_t*;

namespace cpu_device {

/// One product: D (rows x columns) = op(A) op(B), summed over `inner`.
struct MatmulTask {
  int rows, columns, inner;
  bool transpose_a, transpose_b;
  size_t leading_a, leading_b, leading_d;
  const void *a, *b, *bias;
  void* d;
  cudaDataType_t input_type, output_type;
  float alpha, beta;
  cublasLtMatmulAlgo_t tiling;
};

/// The tile of D that a block computes.
struct MatmulTile {
  int row, column, rows, columns;
};

inline size_t offset(bool transpose, size_t leading, size_t row, size_t column) {
  return transpose ? row * leading + column : column * leading + row;
}

// OpenBLAS built on OpenMP would start a team of its own when a tile is not computed inside of a parallel region.
class SingleThreaded {
 public:
#ifdef _OPENMP
  SingleThreaded() : threads_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~SingleThreaded() { omp_set_num_threads(threads_); }

 private:
  int threads_;
#endif
};

struct FloatMatrix {
  const float* data;
  size_t leading;
  bool transpose;
};

/// d (tile.rows x tile.columns) := alpha op(a) op(b) + beta d, summed over `inner`, in the calling thread.
inline void single_thread_sgemm(const MatmulTile& tile, int inner, float alpha, FloatMatrix a, FloatMatrix b,
                                float beta, float* d, size_t leading_d) {
  const SingleThreaded scope{};
  cblas_sgemm(CblasColMajor, a.transpose ? CblasTrans : CblasNoTrans, b.transpose ? CblasTrans : CblasNoTrans,
              tile.rows, tile.columns, inner, alpha, a.data, static_cast<int>(a.leading), b.data,
              static_cast<int>(b.leading), beta, d, static_cast<int>(leading_d));
}

/// Grows once per thread and is kept: a tile of A, of B and of D as float, for bf16.
class ConversionScratch {
 public:
  float* reserve(size_t count) {
    if (count > count_) {
      data_.reset(static_cast<float*>(aligned_alloc(64, round_up(count * sizeof(float), size_t{64}))));
      count_ = count;
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(float* data) const { free(data); }
  };
  std::unique_ptr<float, Free> data_;
  size_t count_ = 0;
};

/// target (length x count, packed) := float of `count` runs of `length` elements, `leading` apart.
inline void convert_runs(float* __restrict__ target, const __nv_bfloat16* __restrict__ source, size_t leading,
                         int length, int count) {
  for (int i = 0; i < count; i++) {
    float* __restrict__ to = target + static_cast<size_t>(i) * length;
    const __nv_bfloat16* __restrict__ from = source + i * leading;
    SIMD_LOOP
    for (int j = 0; j < length; j++) to[j] = static_cast<float>(from[j]);
  }
}

constexpr int kInnerChunk = 512;  // of a bf16 product: what is converted at a time stays in the caches

/// sum (tile.rows x tile.columns, leading dimension `leading`) := alpha op(A) op(B) + beta sum, from bf16 A and B.
inline void bf16_product(const MatmulTask& task, const MatmulTile& tile, float* scratch, float beta, float* sum,
                         size_t leading) {
  const auto* a = static_cast<const __nv_bfloat16*>(task.a);
  const auto* b = static_cast<const __nv_bfloat16*>(task.b);
  for (int k = 0; k < task.inner; k += kInnerChunk) {
    const int inner = std::min(kInnerChunk, task.inner - k);
    float* float_a = scratch;
    float* float_b = scratch + static_cast<size_t>(tile.rows) * inner;
    // the contiguous direction of each operand stays the contiguous direction
    const int run_a = task.transpose_a ? inner : tile.rows;
    const int run_b = task.transpose_b ? tile.columns : inner;
    convert_runs(float_a, a + offset(task.transpose_a, task.leading_a, tile.row, k), task.leading_a, run_a,
                 task.transpose_a ? tile.rows : inner);
    convert_runs(float_b, b + offset(task.transpose_b, task.leading_b, k, tile.column), task.leading_b, run_b,
                 task.transpose_b ? inner : tile.columns);
    single_thread_sgemm(tile, inner, task.alpha, {float_a, static_cast<size_t>(run_a), task.transpose_a},
                        {float_b, static_cast<size_t>(run_b), task.transpose_b}, k == 0 ? beta : 1.0f, sum, leading);
  }
}

/// sum[j * leading + i] := bias[i], so that the product is added to it: costs no more than the zeroing it replaces.
template <class T>
inline void fill_with_bias(float* sum, size_t leading, const T* bias, const MatmulTile& tile) {
  for (int j = 0; j < tile.columns; j++) {
    for (int i = 0; i < tile.rows; i++) sum[j * leading + i] = static_cast<float>(bias[tile.row + i]);
  }
}

/// A tile of float D.
inline void float_tile(const MatmulTask& task, const MatmulTile& tile, ConversionScratch& scratch) {
  float* d = static_cast<float*>(task.d) + offset(false, task.leading_d, tile.row, tile.column);
  float beta = task.beta;
  if (task.bias != nullptr) {
    fill_with_bias(d, task.leading_d, static_cast<const float*>(task.bias), tile);
    beta = 1.0f;
  }
  if (task.input_type == CUDA_R_16BF) {
    float* converted = scratch.reserve(static_cast<size_t>(tile.rows + tile.columns) * kInnerChunk);
    bf16_product(task, tile, converted, beta, d, task.leading_d);
    return;
  }
  const float* a = static_cast<const float*>(task.a) + offset(task.transpose_a, task.leading_a, tile.row, 0);
  const float* b = static_cast<const float*>(task.b) + offset(task.transpose_b, task.leading_b, 0, tile.column);
  single_thread_sgemm(tile, task.inner, task.alpha, {a, task.leading_a, task.transpose_a},
                      {b, task.leading_b, task.transpose_b}, beta, d, task.leading_d);
}

/// A tile of bf16 D: summed in float, rounded once.
inline void bf16_tile(const MatmulTask& task, const MatmulTile& tile, ConversionScratch& scratch) {
  const size_t area = static_cast<size_t>(tile.rows) * tile.columns;
  float* sum = scratch.reserve(area + static_cast<size_t>(tile.rows + tile.columns) * kInnerChunk);
  __nv_bfloat16* d = static_cast<__nv_bfloat16*>(task.d) + offset(false, task.leading_d, tile.row, tile.column);
  float beta = task.beta;
  if (task.bias != nullptr) {
    fill_with_bias(sum, tile.rows, static_cast<const __nv_bfloat16*>(task.bias), tile);
    beta = 1.0f;
  } else if (beta != 0.0f) {
    convert_runs(sum, d, task.leading_d, tile.rows, tile.columns);
  }
  bf16_product(task, tile, sum + area, beta, sum, tile.rows);
  for (int j = 0; j < tile.columns; j++) {
    const float* __restrict__ from = sum + static_cast<size_t>(j) * tile.rows;
    __nv_bfloat16* __restrict__ to = d + j * task.leading_d;
    SIMD_LOOP
    for (int i = 0; i < tile.rows; i++) to[i] = static_cast<__nv_bfloat16>(from[i]);
  }
}

/// Tile number `index` of the product, by the calling thread.
inline void compute_tile(const MatmulTask& task, size_t index) {
  static thread_local ConversionScratch scratch;
  const int across = ceil_div(task.rows, task.tiling.tile_rows);
  MatmulTile tile;
  tile.row = static_cast<int>(index) % across * task.tiling.tile_rows;
  tile.column = static_cast<int>(index) / across * task.tiling.tile_columns;
  tile.rows = std::min(task.tiling.tile_rows, task.rows - tile.row);
  tile.columns = std::min(task.tiling.tile_columns, task.columns - tile.column);
  if (task.output_type == CUDA_R_32F) {
    float_tile(task, tile, scratch);
  } else {
    bf16_tile(task, tile, scratch);
  }
}

/// Tiles for D (rows x columns) = A B with `inner` terms: the least thread-time, averaged over 1 and 2 threads, in a
/// model fitted to OpenBLAS 0.3.21 on a 2-core Zen 3: a tile of r x c costs r c + 12 (r + c) per term (the second part
/// is the packing of its operands) and the work of 2^16 multiply-adds to start. More tiles would keep more threads
/// busy, but cost every process that has one thread (a rank of a pipeline) up to 10%.
inline cublasLtMatmulAlgo_t choose_tiling(int rows, int columns, int inner) {
  constexpr int kLargest = 768, kRowUnit = 16, kColumnUnit = 8, kMoreCuts = 12;
  cublasLtMatmulAlgo_t best = {1, 1};
  double least = INFINITY;
  const int cuts_m = ceil_div(rows, kLargest), cuts_n = ceil_div(columns, kLargest);
  for (int i = cuts_m; i <= cuts_m + kMoreCuts; i++) {
    for (int j = cuts_n; j <= cuts_n + kMoreCuts; j++) {
      const int r = std::min(round_up(ceil_div(rows, i), kRowUnit), rows);
      const int c = std::min(round_up(ceil_div(columns, j), kColumnUnit), columns);
      const long tiles = static_cast<long>(ceil_div(rows, r)) * ceil_div(columns, c);
      const double tile_cost = (static_cast<double>(r) * c + 12.0 * (r + c)) * inner + 65536;
      double cost = 0;
      for (long threads : {1, 2}) cost += tile_cost * static_cast<double>(round_up(tiles, threads));
      if (cost < least) {
        least = cost;
        best = {r, c};
      }
    }
  }
  return best;
}

template <class T>
cublasStatus_t read_attribute(T& target, const void* buffer, size_t size) {
  if (buffer == nullptr || size != sizeof(T)) return CUBLAS_STATUS_INVALID_VALUE;
  memcpy(&target, buffer, size);
  return CUBLAS_STATUS_SUCCESS;
}

/// Fills `task` from descriptors; refuses what the real library refuses and what is not implemented here.
inline cublasStatus_t describe_task(MatmulTask& task, const cublasLtMatmulDescOpaque_t& matmul,
                                    const cublasLtMatrixLayoutOpaque_t& a, const cublasLtMatrixLayoutOpaque_t& b,
                                    const cublasLtMatrixLayoutOpaque_t& d) {
  const bool transpose_a = matmul.transpose_a == CUBLAS_OP_T, transpose_b = matmul.transpose_b == CUBLAS_OP_T;
  const uint64_t inner = transpose_a ? a.rows : a.columns;
  const bool fits = (transpose_a ? a.columns : a.rows) == d.rows && (transpose_b ? b.rows : b.columns) == d.columns &&
                    (transpose_b ? b.columns : b.rows) == inner;
  for (const auto* layout : {&a, &b, &d}) {
    if (!fits || layout->rows == 0 || layout->columns == 0 || layout->leading < static_cast<int64_t>(layout->rows) ||
        layout->leading > INT32_MAX || layout->columns > INT32_MAX) {
      return CUBLAS_STATUS_INVALID_VALUE;
    }
  }
  if (a.type != b.type || (d.type == CUDA_R_16BF && a.type == CUDA_R_32F)) return CUBLAS_STATUS_NOT_SUPPORTED;
  task.rows = static_cast<int>(d.rows);
  task.columns = static_cast<int>(d.columns);
  task.inner = static_cast<int>(inner);
  task.transpose_a = transpose_a;
  task.transpose_b = transpose_b;
  task.leading_a = static_cast<size_t>(a.leading);
  task.leading_b = static_cast<size_t>(b.leading);
  task.leading_d = static_cast<size_t>(d.leading);
  task.input_type = a.type;
  task.output_type = d.type;
  task.bias = matmul.epilogue == CUBLASLT_EPILOGUE_BIAS ? matmul.bias : nullptr;
  if (matmul.epilogue == CUBLASLT_EPILOGUE_BIAS && matmul.bias == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace cpu_device

// ---------------------------------------------------------------------------------------------------------------------
// the API

inline const char* cublasLtGetStatusString(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "the operation completed successfully";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "an unsupported value or parameter was passed to the function";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "the functionality requested is not supported";
  }
  return "unknown status";
}

inline cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  openblas_set_num_threads(1);
  *handle = new cublasLtContext();
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}

inline cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* matmul, cublasComputeType_t,
                                               cudaDataType_t scale) {
  if (scale != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
  *matmul = new cublasLtMatmulDescOpaque_t();
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t matmul) {
  delete matmul;
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t matmul,
                                                     cublasLtMatmulDescAttributes_t attribute, const void* buffer,
                                                     size_t size) {
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
      return cpu_device::read_attribute(matmul->transpose_a, buffer, size);
    case CUBLASLT_MATMUL_DESC_TRANSB:
      return cpu_device::read_attribute(matmul->transpose_b, buffer, size);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      return cpu_device::read_attribute(matmul->epilogue, buffer, size);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
      return cpu_device::read_attribute(matmul->bias, buffer, size);
  }
  return CUBLAS_STATUS_NOT_SUPPORTED;
}

inline cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType_t type, uint64_t rows,
                                                 uint64_t columns, int64_t leading) {
  *layout = new cublasLtMatrixLayoutOpaque_t{type, rows, columns, leading};
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete layout;
  return CUBLAS_STATUS_SUCCESS;
}

inline cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  *preference = new cublasLtMatmulPreferenceOpaque_t();
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete preference;
  return CUBLAS_STATUS_SUCCESS;
}
/// Workspace and alignments are known to the caller's real library only; no tile needs either.
inline cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t,
                                                           cublasLtMatmulPreferenceAttributes_t, const void* buffer,
                                                           size_t) {
  return buffer != nullptr ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

inline cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t matmul,
                                                     cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                                     cublasLtMatrixLayout_t, cublasLtMatrixLayout_t d,
                                                     cublasLtMatmulPreference_t, int requested,
                                                     cublasLtMatmulHeuristicResult_t* results, int* found) {
  if (requested < 1) return CUBLAS_STATUS_INVALID_VALUE;
  *found = 0;
  cpu_device::MatmulTask task = {};
  cublasLtMatmulDescOpaque_t shape = *matmul;
  shape.epilogue = CUBLASLT_EPILOGUE_DEFAULT;  // the bias pointer need not be known yet
  const cublasStatus_t status = cpu_device::describe_task(task, shape, *a, *b, *d);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  results[0] = {cpu_device::choose_tiling(task.rows, task.columns, task.inner), 0, CUBLAS_STATUS_SUCCESS, 1.0f};
  *found = 1;
  return CUBLAS_STATUS_SUCCESS;
}

inline cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t matmul, const void* alpha, const void* a,
                                     cublasLtMatrixLayout_t layout_a, const void* b, cublasLtMatrixLayout_t layout_b,
                                     const void* beta, const void* c, cublasLtMatrixLayout_t, void* d,
                                     cublasLtMatrixLayout_t layout_d, const cublasLtMatmulAlgo_t* algorithm, void*,
                                     size_t, cudaStream_t stream) {
  cpu_device::MatmulTask task = {};
  const cublasStatus_t status = cpu_device::describe_task(task, *matmul, *layout_a, *layout_b, *layout_d);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  task.a = a;
  task.b = b;
  task.d = d;
  task.alpha = *static_cast<const float*>(alpha);
  task.beta = *static_cast<const float*>(beta);
  if (task.beta != 0.0f && (c != d || task.bias != nullptr)) return CUBLAS_STATUS_NOT_SUPPORTED;
  task.tiling = algorithm != nullptr ? *algorithm : cpu_device::choose_tiling(task.rows, task.columns, task.inner);
  const size_t tiles = static_cast<size_t>(ceil_div(task.rows, task.tiling.tile_rows)) *
                       static_cast<size_t>(ceil_div(task.columns, task.tiling.tile_columns));
  const int workers = cpu_device::team_size();
  cpu_device::enqueue(stream, [=] {
    cpu_device::parallel_for(workers, tiles, [&](size_t index) { cpu_device::compute_tile(task, index); });
  });
  return CUBLAS_STATUS_SUCCESS;
}
