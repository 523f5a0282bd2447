// blas.h -- matrix products: cuBLASLt on CUDA, the same calls over OpenBLAS on the CPU device.
//
// cuBLASLt needs descriptors, layouts and a heuristic search before each product: tens of microseconds on the host, as
// long as a small product. They depend on the shape only, so they are made once per shape and kept as a "plan".
// Sums are in float, without TF32 unless asked for. Source: cuBLAS 13 documentation, "Using the cuBLASLt API".
#pragma once

#include "llmc/device.h"
#ifdef __CUDACC__
#include <cublasLt.h>
#else
#include "llmc/cpu/cublaslt.h"
#endif

#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <type_traits>

#include "llmc/check.h"

/// floatX in the words of cuBLAS.
constexpr cudaDataType_t kFloatXType = std::is_same<floatX, float>::value ? CUDA_R_32F : CUDA_R_16BF;

/// One product of packed column-major matrices: d (m,n) = op(a) (m,k) op(b) (k,n), plus bias (m) in each column, plus
/// the old d if `accumulate`.
struct MatrixProduct {
  void* d;
  const void* a;     // stored (m,k), or (k,m) if transpose_a
  const void* b;     // stored (k,n), or (n,k) if transpose_b
  const void* bias;  // of d's type; null: none
  int m, n, k;
  bool transpose_a, transpose_b, accumulate;
  cudaDataType_t input_type, output_type;
};

/// The library handle, its workspace and the plans. One object per stream: the workspace belongs to the product that
/// runs.
class Blas {
 public:
  /// 32 MiB let cuBLASLt split the inner dimension when an output is too small to fill the GPU (weight gradients).
  static constexpr size_t kWorkspaceBytes = size_t{32} << 20;

  /// `tensor_float`: allow TF32 for float inputs on CUDA (10 bits of mantissa; no effect on the CPU device).
  explicit Blas(bool tensor_float = false)
      : compute_(tensor_float ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F) {
    CUBLAS_CHECK(cublasLtCreate(&handle_));
  }
  Blas(const Blas&) = delete;
  Blas& operator=(const Blas&) = delete;
  ~Blas() {
    plans_.clear();
    cublasLtDestroy(handle_);
    cudaFree(workspace_);
  }

  /// Runs `product` on `stream`: overwrites d, or adds to it. Requires m, n, k >= 1 (assert); d overlaps no input.
  /// Asynchronous and deterministic. Throws an environment error if the library knows no way for this shape.
  void multiply(const MatrixProduct& product, cudaStream_t stream) {
    Plan& plan = plan_for(product);
    if (product.bias != nullptr) {
      set(plan.matmul.get(), CUBLASLT_MATMUL_DESC_BIAS_POINTER, product.bias);
    }
    const float one = 1.0f, beta = product.accumulate ? 1.0f : 0.0f;
    CUBLAS_CHECK(cublasLtMatmul(handle_, plan.matmul.get(), &one, product.a, plan.a.get(), product.b, plan.b.get(),
                                &beta, product.d, plan.d.get(), product.d, plan.d.get(), &plan.algorithm, workspace_,
                                plan.workspace_bytes, stream));
  }

  /// Shapes seen so far.
  size_t plan_count() const { return plans_.size(); }

 private:
  struct PlanKey {
    int m, n, k;
    bool transpose_a, transpose_b, bias;
    cudaDataType_t input_type, output_type;
    uint32_t align_a, align_b, align_d;

    auto fields() const {
      return std::tie(m, n, k, transpose_a, transpose_b, bias, input_type, output_type, align_a, align_b, align_d);
    }
    bool operator<(const PlanKey& other) const { return fields() < other.fields(); }
  };

  struct Destroy {
    void operator()(cublasLtMatmulDesc_t p) const { cublasLtMatmulDescDestroy(p); }
    void operator()(cublasLtMatrixLayout_t p) const { cublasLtMatrixLayoutDestroy(p); }
    void operator()(cublasLtMatmulPreference_t p) const { cublasLtMatmulPreferenceDestroy(p); }
  };
  template <class Handle>
  using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, Destroy>;

  struct Plan {
    Owned<cublasLtMatmulDesc_t> matmul;
    Owned<cublasLtMatrixLayout_t> a, b, d;
    cublasLtMatmulAlgo_t algorithm;
    size_t workspace_bytes;
  };

  /// The largest power of two up to 256 that divides the address: what the library may assume about the pointer.
  static uint32_t alignment(const void* pointer) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(pointer) | 256;
    return static_cast<uint32_t>(address & (~address + 1));
  }

  template <class T>
  static void set(cublasLtMatmulDesc_t matmul, cublasLtMatmulDescAttributes_t attribute, const T& value) {
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(matmul, attribute, &value, sizeof(value)));
  }

  static Owned<cublasLtMatrixLayout_t> layout(cudaDataType_t type, bool transpose, int rows, int columns) {
    if (transpose) std::swap(rows, columns);
    cublasLtMatrixLayout_t handle = nullptr;
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&handle, type, rows, columns, rows));
    return Owned<cublasLtMatrixLayout_t>(handle);
  }

  Plan& plan_for(const MatrixProduct& p) {
    const PlanKey key = {p.m,
                         p.n,
                         p.k,
                         p.transpose_a,
                         p.transpose_b,
                         p.bias != nullptr,
                         p.input_type,
                         p.output_type,
                         alignment(p.a),
                         alignment(p.b),
                         alignment(p.d)};
    const auto found = plans_.find(key);
    if (found != plans_.end()) return found->second;
    assert(p.m >= 1 && p.n >= 1 && p.k >= 1 && "matrix product: every size must be at least 1");
    return plans_.emplace(key, make_plan(key)).first->second;
  }

  Plan make_plan(const PlanKey& key) {
    Plan plan;
    cublasLtMatmulDesc_t matmul = nullptr;
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&matmul, compute_, CUDA_R_32F));
    plan.matmul.reset(matmul);
    set(matmul, CUBLASLT_MATMUL_DESC_TRANSA, key.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(matmul, CUBLASLT_MATMUL_DESC_TRANSB, key.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(matmul, CUBLASLT_MATMUL_DESC_EPILOGUE, key.bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT);
    plan.a = layout(key.input_type, key.transpose_a, key.m, key.k);
    plan.b = layout(key.input_type, key.transpose_b, key.k, key.n);
    plan.d = layout(key.output_type, false, key.m, key.n);
    choose_algorithm(plan, key);
    return plan;
  }

  void choose_algorithm(Plan& plan, const PlanKey& key) {
    cublasLtMatmulPreference_t handle = nullptr;
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&handle));
    const Owned<cublasLtMatmulPreference_t> preference(handle);
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
      CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(handle, attribute, &value, sizeof(value)));
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{kWorkspaceBytes});
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.align_a);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.align_b);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key.align_d);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.align_d);
    cublasLtMatmulHeuristicResult_t result = {};
    int found = 0;
    CUBLAS_CHECK(cublasLtMatmulAlgoGetHeuristic(handle_, plan.matmul.get(), plan.a.get(), plan.b.get(), plan.d.get(),
                                                plan.d.get(), handle, 1, &result, &found));
    if (found == 0) {
      environment_error("cuBLASLt knows no algorithm for a product of %d x %d x %d; check the driver and CUDA version",
                        key.m, key.n, key.k);
    }
    plan.algorithm = result.algo;
    plan.workspace_bytes = result.workspaceSize;
    // allocated for the first plan that wants it: the CPU device never does
    if (plan.workspace_bytes > 0 && workspace_ == nullptr) CUDA_CHECK(cudaMalloc(&workspace_, kWorkspaceBytes));
  }

  cublasComputeType_t compute_;
  cublasLtHandle_t handle_ = nullptr;
  void* workspace_ = nullptr;
  std::map<PlanKey, Plan> plans_;
};
