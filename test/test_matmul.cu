// test_matmul.cu -- the linear layer and its gradients against sums in double, and the fixed order of those sums.
#include "llmc/matmul.cuh"

#include <array>
#include <string>
#include <vector>

#include "test/kernel_test.h"

namespace {

struct Shape {
  int N, C, OC;
  std::string name() const { return format_text("N %d C %d OC %d", N, C, OC); }
};

const std::vector<Shape> kShapes = {{1, 1, 1},     {3, 7, 1},      {1, 257, 48},    {64, 1, 100},
                                    {5, 32, 7},    {33, 48, 48},   {100, 100, 257}, {257, 257, 100},
                                    {64, 768, 32}, {65, 33, 1025}, {1025, 17, 31},  {40, 1029, 50}};

std::vector<double> to_double(const std::vector<floatX>& values) { return convert<double>(convert<float>(values)); }

std::vector<floatX> random_floatx(size_t n, uint64_t seed) { return convert<floatX>(random_values(n, seed)); }

/// The layer's tensors on the host, rounded to floatX.
struct Layer {
  Shape shape;
  std::vector<floatX> inp, weight, bias, dout;
  explicit Layer(const Shape& s)
      : shape(s),
        inp(random_floatx(static_cast<size_t>(s.N) * s.C, 1)),
        weight(random_floatx(static_cast<size_t>(s.OC) * s.C, 2)),
        bias(random_floatx(s.OC, 3)),
        dout(random_floatx(static_cast<size_t>(s.N) * s.OC, 4)) {}
};

/// out[n][o] for the given rows n only.
std::vector<double> forward_reference(const Layer& layer, const std::vector<int>& rows, bool with_bias) {
  const int C = layer.shape.C, OC = layer.shape.OC;
  const std::vector<double> inp = to_double(layer.inp), weight = to_double(layer.weight), bias = to_double(layer.bias);
  std::vector<double> out;
  for (int n : rows) {
    for (int o = 0; o < OC; o++) {
      double sum = with_bias ? bias[o] : 0.0;
      const double* x = &inp[static_cast<size_t>(n) * C];
      const double* w = &weight[static_cast<size_t>(o) * C];
      for (int c = 0; c < C; c++) sum += x[c] * w[c];
      out.push_back(sum);
    }
  }
  return out;
}

std::vector<int> all_rows(int N) {
  std::vector<int> rows(N);
  for (int n = 0; n < N; n++) rows[n] = n;
  return rows;
}

std::vector<double> backward_input_reference(const Layer& layer) {
  const int N = layer.shape.N, C = layer.shape.C, OC = layer.shape.OC;
  const std::vector<double> dout = to_double(layer.dout), weight = to_double(layer.weight);
  std::vector<double> dinp(static_cast<size_t>(N) * C, 0.0);
  for (int n = 0; n < N; n++) {
    for (int o = 0; o < OC; o++) {
      const double factor = dout[static_cast<size_t>(n) * OC + o];
      for (int c = 0; c < C; c++)
        dinp[static_cast<size_t>(n) * C + c] += factor * weight[static_cast<size_t>(o) * C + c];
    }
  }
  return dinp;
}

std::vector<double> backward_weight_reference(const Layer& layer) {
  const int N = layer.shape.N, C = layer.shape.C, OC = layer.shape.OC;
  const std::vector<double> dout = to_double(layer.dout), inp = to_double(layer.inp);
  std::vector<double> dweight(static_cast<size_t>(OC) * C, 0.0);
  for (int n = 0; n < N; n++) {
    for (int o = 0; o < OC; o++) {
      const double factor = dout[static_cast<size_t>(n) * OC + o];
      for (int c = 0; c < C; c++)
        dweight[static_cast<size_t>(o) * C + c] += factor * inp[static_cast<size_t>(n) * C + c];
    }
  }
  return dweight;
}

std::vector<double> backward_bias_reference(const Layer& layer) {
  const std::vector<double> dout = to_double(layer.dout);
  std::vector<double> dbias(layer.shape.OC, 0.0);
  for (size_t i = 0; i < dout.size(); i++) dbias[i % layer.shape.OC] += dout[i];
  return dbias;
}

std::vector<floatX> run_forward(Blas& blas, cudaStream_t stream, const Layer& layer, bool with_bias) {
  const Shape& s = layer.shape;
  TestArray<floatX> inp(stream, layer.inp), weight(stream, layer.weight), bias(stream, layer.bias);
  TestArray<floatX> out(stream, static_cast<size_t>(s.N) * s.OC);
  matmul_forward(blas, out.data(), inp.data(), weight.data(), with_bias ? bias.data() : nullptr, s.N, s.C, s.OC,
                 stream);
  return out.read();
}

/// Adds `times` gradients to `dweight` and `dbias` (NaN at first: the first one must overwrite).
struct WeightGradients {
  std::vector<float> dweight, dbias;
};
WeightGradients run_weight_gradients(Blas& blas, cudaStream_t stream, const Layer& layer, int times) {
  const Shape& s = layer.shape;
  TestArray<floatX> inp(stream, layer.inp), dout(stream, layer.dout);
  TestArray<float> dweight(stream, static_cast<size_t>(s.OC) * s.C), dbias(stream, s.OC);
  TestArray<float> scratch(stream, matmul_backward_bias_scratch_floats(s.N, s.OC));
  for (int i = 0; i < times; i++) {
    scratch.poison();
    matmul_backward_weight(blas, dweight.data(), dout.data(), inp.data(), s.N, s.C, s.OC, i > 0, stream);
    matmul_backward_bias(dbias.data(), scratch.data(), dout.data(), s.N, s.OC, i > 0, stream);
  }
  scratch.read();  // checks the guard behind it
  return {dweight.read(), dbias.read()};
}

std::vector<floatX> run_backward_input(Blas& blas, cudaStream_t stream, const Layer& layer) {
  const Shape& s = layer.shape;
  TestArray<floatX> dout(stream, layer.dout), weight(stream, layer.weight);
  TestArray<floatX> dinp(stream, static_cast<size_t>(s.N) * s.C);
  matmul_backward_input(blas, dinp.data(), dout.data(), weight.data(), s.N, s.C, s.OC, stream);
  return dinp.read();
}

// out = inp weight^T + bias, with and without a bias, overwrites a poisoned output, for odd and skinny shapes.
TEST(Matmul, ForwardEqualsDouble) {
  TestStream stream;
  Blas blas;
  for (const Shape& shape : kShapes) {
    const Layer layer(shape);
    for (bool with_bias : {false, true}) {
      const auto exact = forward_reference(layer, all_rows(shape.N), with_bias);
      expect_close(shape.name(), run_forward(blas, stream, layer, with_bias), exact, shape.C + 1);
    }
  }
}

// A product with many tiles in both directions, not a multiple of any tile size: every tile lands in its place.
TEST(Matmul, ForwardLargeEqualsDouble) {
  TestStream stream;
  Blas blas;
  const Shape shape = {1000, 300, 1777};
  const Layer layer(shape);
  const std::vector<int> rows = {0, 1, 255, 256, 511, 512, 767, 768, 998, 999};
  const std::vector<floatX> out = run_forward(blas, stream, layer, true);
  std::vector<floatX> chosen;
  for (int n : rows) {
    chosen.insert(chosen.end(), out.begin() + static_cast<size_t>(n) * shape.OC,
                  out.begin() + static_cast<size_t>(n + 1) * shape.OC);
  }
  expect_close(shape.name(), chosen, forward_reference(layer, rows, true), shape.C + 1);
  for (float value : convert<float>(out)) ASSERT_TRUE(std::isfinite(value)) << "an element was not written";
}

// dinp = dout weight overwrites a poisoned output.
TEST(Matmul, BackwardInputEqualsDouble) {
  TestStream stream;
  Blas blas;
  for (const Shape& shape : kShapes) {
    const Layer layer(shape);
    expect_close(shape.name(), run_backward_input(blas, stream, layer), backward_input_reference(layer), shape.OC);
  }
}

// Weight and bias gradients overwrite NaN when they do not accumulate, and add up when they do.
TEST(Matmul, BackwardWeightAndBiasEqualDouble) {
  TestStream stream;
  Blas blas;
  for (const Shape& shape : kShapes) {
    const Layer layer(shape);
    const std::vector<double> dweight = backward_weight_reference(layer), dbias = backward_bias_reference(layer);
    for (int times : {1, 3}) {
      const WeightGradients result = run_weight_gradients(blas, stream, layer, times);
      std::vector<double> exact_weight = dweight, exact_bias = dbias;
      for (double& value : exact_weight) value *= times;
      for (double& value : exact_bias) value *= times;
      expect_close(shape.name() + " dweight", result.dweight, exact_weight, shape.N * times);
      expect_close(shape.name() + " dbias", result.dbias, exact_bias, shape.N * times);
    }
  }
}

// The bits do not depend on the number of threads, nor change from run to run.
TEST(Matmul, SameBitsWithAnyNumberOfThreads) {
  TestStream stream;
  Blas blas;
  for (const Shape& shape : {Shape{300, 257, 1000}, Shape{700, 48, 100}, Shape{40, 1029, 50}}) {
    const Layer layer(shape);
    std::vector<floatX> out, dinp;
    WeightGradients gradients;
    for (int threads : {1, 2, 3, 3}) {
      set_kernel_threads(threads);
      const std::vector<floatX> new_out = run_forward(blas, stream, layer, true);
      const std::vector<floatX> new_dinp = run_backward_input(blas, stream, layer);
      const WeightGradients new_gradients = run_weight_gradients(blas, stream, layer, 2);
      if (threads > 1) {
        EXPECT_TRUE(same_bits(out, new_out)) << shape.name() << " out, threads " << threads;
        EXPECT_TRUE(same_bits(dinp, new_dinp)) << shape.name() << " dinp, threads " << threads;
        EXPECT_TRUE(same_bits(gradients.dweight, new_gradients.dweight)) << shape.name() << " dweight " << threads;
        EXPECT_TRUE(same_bits(gradients.dbias, new_gradients.dbias)) << shape.name() << " dbias " << threads;
      }
      out = new_out;
      dinp = new_dinp;
      gradients = new_gradients;
    }
  }
  set_kernel_threads(2);
}

// The column sums have one order, whatever the number of threads.
TEST(Matmul, BiasGradientHasOneOrder) {
  const Layer layer({777, 1, 143});
  run_everywhere([&](cudaStream_t stream) -> Outputs {
    TestArray<floatX> dout(stream, layer.dout);
    TestArray<float> dbias(stream, 143), scratch(stream, matmul_backward_bias_scratch_floats(777, 143));
    matmul_backward_bias(dbias.data(), scratch.data(), dout.data(), 777, 143, false, stream);
    return {dbias.read()};
  });
}

// Operands at odd addresses (a tensor in the middle of an arena) give the bits of aligned ones.
TEST(Matmul, AlignmentDoesNotMatter) {
  TestStream stream;
  Blas blas;
  const Layer layer({37, 29, 41});
  const std::vector<floatX> expected = run_forward(blas, stream, layer, true);
  const auto shifted = [](std::vector<floatX> values) {
    values.insert(values.begin(), values[0]);
    return values;
  };
  TestArray<floatX> inp(stream, shifted(layer.inp)), weight(stream, shifted(layer.weight));
  TestArray<floatX> bias(stream, shifted(layer.bias)), out(stream, 37 * 41 + 1);
  matmul_forward(blas, out.data() + 1, inp.data() + 1, weight.data() + 1, bias.data() + 1, 37, 29, 41, stream);
  std::vector<floatX> result = out.read();
  EXPECT_TRUE(std::isnan(static_cast<float>(result[0]))) << "written in front of the output";
  result.erase(result.begin());
  expect_close("shifted", result, forward_reference(layer, all_rows(37), true), 30);
  if (kIsCpuDevice) {
    EXPECT_TRUE(same_bits(result, expected));
  }
}

// Descriptors and the heuristic are made once per shape, not once per call.
TEST(Matmul, PlansAreKept) {
  TestStream stream;
  Blas blas;
  const Layer small({8, 16, 24}), large({8, 24, 16});
  run_forward(blas, stream, small, false);
  const size_t one = blas.plan_count();
  for (int i = 0; i < 5; i++) run_forward(blas, stream, small, false);
  EXPECT_EQ(one, 1u);
  EXPECT_EQ(blas.plan_count(), 1u);
  run_forward(blas, stream, large, false);
  run_forward(blas, stream, small, true);
  EXPECT_EQ(blas.plan_count(), 3u);
}

// A product is a task of its stream: it sees what was queued before it, without any wait of the host.
TEST(Matmul, IsOrderedByItsStream) {
  TestStream stream;
  Blas blas;
  const Layer layer({120, 130, 140});
  const std::vector<floatX> expected = run_forward(blas, stream, layer, false);
  TestArray<floatX> inp(stream, layer.inp.size()), weight(stream, layer.weight), out(stream, expected.size());
  std::vector<floatX> result(expected.size());
  for (int i = 0; i < 20; i++) {
    CUDA_CHECK(cudaMemsetAsync(inp.data(), 0xff, layer.inp.size() * sizeof(floatX), stream));
    CUDA_CHECK(cudaMemcpyAsync(inp.data(), layer.inp.data(), layer.inp.size() * sizeof(floatX), cudaMemcpyHostToDevice,
                               stream));
    matmul_forward(blas, out.data(), inp.data(), weight.data(), nullptr, 120, 130, 140, stream);
    CUDA_CHECK(
        cudaMemcpyAsync(result.data(), out.data(), result.size() * sizeof(floatX), cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    ASSERT_TRUE(same_bits(result, expected)) << "round " << i;
  }
}

#ifndef __CUDACC__
// The stand-in refuses what the real library refuses, instead of computing something else.
TEST(CublasLt, RefusesWhatDoesNotFit) {
  TestStream stream;
  cublasLtHandle_t handle;
  cublasLtMatmulDesc_t matmul;
  ASSERT_EQ(cublasLtCreate(&handle), CUBLAS_STATUS_SUCCESS);
  ASSERT_EQ(cublasLtMatmulDescCreate(&matmul, CUBLAS_COMPUTE_32F, CUDA_R_32F), CUBLAS_STATUS_SUCCESS);
  cublasLtMatrixLayout_t a, b, d, thin, half;
  cublasLtMatrixLayoutCreate(&a, CUDA_R_32F, 4, 5, 4);
  cublasLtMatrixLayoutCreate(&b, CUDA_R_32F, 5, 6, 5);
  cublasLtMatrixLayoutCreate(&d, CUDA_R_32F, 4, 6, 4);
  cublasLtMatrixLayoutCreate(&thin, CUDA_R_32F, 4, 6, 3);  // leading dimension below the rows
  cublasLtMatrixLayoutCreate(&half, CUDA_R_16BF, 5, 6, 5);
  TestArray<float> memory(stream, 100);
  float* x = memory.data();
  const float one = 1, zero = 0;
  const auto product = [&](cublasLtMatrixLayout_t left, cublasLtMatrixLayout_t right, cublasLtMatrixLayout_t result,
                           const float* beta, const float* c) {
    return cublasLtMatmul(handle, matmul, &one, x, left, x + 20, right, beta, c, result, x + 60, result, nullptr,
                          nullptr, 0, stream);
  };
  EXPECT_EQ(product(a, b, d, &zero, x + 60), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(product(b, a, d, &zero, x + 60), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(product(a, b, thin, &zero, x + 60), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(product(a, half, d, &zero, x + 60), CUBLAS_STATUS_NOT_SUPPORTED);
  EXPECT_EQ(product(a, b, d, &one, x), CUBLAS_STATUS_NOT_SUPPORTED);  // C is not D
  for (cublasLtMatrixLayout_t layout : {a, b, d, thin, half}) cublasLtMatrixLayoutDestroy(layout);
  cublasLtMatmulDescDestroy(matmul);
  cublasLtDestroy(handle);
}

// The tiles cover any shape, and on large ones there are enough for two threads, shared evenly.
TEST(CublasLt, TilesCoverTheOutput) {
  for (int rows : {1, 7, 48, 257, 768, 2304, 50304}) {
    for (int columns : {1, 15, 256, 1024}) {
      const cublasLtMatmulAlgo_t tiling = cpu_device::choose_tiling(rows, columns, 768);
      EXPECT_GE(tiling.tile_rows, 1);
      EXPECT_GE(tiling.tile_columns, 1);
      EXPECT_LE(tiling.tile_rows, rows);
      EXPECT_LE(tiling.tile_columns, columns);
      const int tiles = ceil_div(rows, tiling.tile_rows) * ceil_div(columns, tiling.tile_columns);
      if (rows >= 768 && columns >= 256) {
        EXPECT_EQ(tiles % 2, 0) << rows << " x " << columns;
      }
    }
  }
}
#endif

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
