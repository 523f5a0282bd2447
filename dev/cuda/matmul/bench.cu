// bench.cu -- the matmul ladder (forward pass of a linear layer): verifies every rung against float64, then times it.
//
//   make build/cpu-fp32-w1/ladder_matmul
//   build/cpu-fp32-w1/ladder_matmul [--rows N] [--channels C] [--out-channels OC] [--repeats R]
#include "dev/cuda/ladder_products.h"
#include "dev/cuda/matmul/1_naive.cuh"
#include "dev/cuda/matmul/2_shared_tiles.cuh"
#include "dev/cuda/matmul/3_register_tiles.cuh"
#include "dev/cuda/matmul/4_production.cuh"

struct MatmulShape {
  int N, C, OC;
};

/// inp weight^T + bias in float64.
static std::vector<double> exact_product(const MatmulShape& s, const std::vector<floatX>& inp,
                                         const std::vector<floatX>& weight, const std::vector<floatX>& bias) {
  const std::vector<double> x(inp.begin(), inp.end()), w(weight.begin(), weight.end());
  std::vector<double> out;
  for (int n = 0; n < s.N; n++) {
    for (int o = 0; o < s.OC; o++) {
      double sum = (float)bias[o];
      const double* a = &x[static_cast<size_t>(n) * s.C];
      const double* b = &w[static_cast<size_t>(o) * s.C];
      for (int c = 0; c < s.C; c++) sum += a[c] * b[c];
      out.push_back(sum);
    }
  }
  return out;
}

using Forward = void (*)(floatX*, const floatX*, const floatX*, const floatX*, int, int, int, cudaStream_t);

static int climb_matmul(const MatmulShape& s, int repeats, cudaStream_t stream) {
  const size_t inputs = static_cast<size_t>(s.N) * s.C, weights = static_cast<size_t>(s.OC) * s.C;
  const auto host_inp = ladder_values<floatX>(inputs, 1), host_weight = ladder_values<floatX>(weights, 2);
  const auto host_bias = ladder_values<floatX>(s.OC, 3);
  LadderArray<floatX> inp(stream, inputs), weight(stream, weights), bias(stream, s.OC);
  LadderArray<floatX> out(stream, static_cast<size_t>(s.N) * s.OC);
  inp.write(host_inp);
  weight.write(host_weight);
  bias.write(host_bias);
  const LadderCheck check = {[&] { out.poison(); },
                             [&] { return std::vector<std::vector<double>>{out.read()}; },
                             {exact_product(s, host_inp, host_weight, host_bias)},
                             s.C + 1};
  const auto rung = [&](const char* name, const char* adds, Forward forward) {
    return Rung{name, adds,
                [&, forward] { forward(out.data(), inp.data(), weight.data(), bias.data(), s.N, s.C, s.OC, stream); }};
  };
  Blas blas;
  const Rung library = {
      "4 production", "the library, with a plan for each shape",
      [&] { production::forward(blas, out.data(), inp.data(), weight.data(), bias.data(), s.N, s.C, s.OC, stream); }};
  const double ceiling = library_gflops(1024, repeats, stream), flops = 2.0 * s.N * s.C * s.OC;
  print_product_head(ceiling);
  bool right = true;
  for (const Rung& each : {rung("1 naive", "one thread per output", naive::forward),
                           rung("2 shared tiles", "tiles in shared memory, used by 32 threads", shared_tiles::forward),
                           rung("3 register tiles", "micro-tiles in registers", register_tiles::forward), library}) {
    right &= climb_product(each, check, flops, ceiling, repeats, stream);
  }
  return right ? 0 : 1;
}

int main(int argc, char** argv) {
  try {
    require_device();
    cudaStream_t stream;
    CUDA_CHECK(cudaStreamCreate(&stream));
    const MatmulShape shape = {option(argc, argv, "--rows", kIsCpuDevice ? 256 : 8192),
                               option(argc, argv, "--channels", 768), option(argc, argv, "--out-channels", 768)};
    printf("linear layer: %d rows, %d to %d channels\n", shape.N, shape.C, shape.OC);
    return climb_matmul(shape, option(argc, argv, "--repeats", 5), stream);
  } catch (const Error& error) {
    fprintf(stderr, "error: %s\n", error.what());
    return error.exit_code();
  }
}
