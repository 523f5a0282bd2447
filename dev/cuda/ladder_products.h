// ladder_products.h -- climbing ladders of tile products: GFLOP/s beside the matrix library's in the same run.
//
// As ladder.h, but these kernels are bound by arithmetic, so the ceiling is not a copy: it is one square product by
// cuBLASLt (CPU device: OpenBLAS) of the same precision. A rung whose arithmetic is float although floatX is bf16 is
// measured against the tensor cores all the same: that is what it leaves unused.
#pragma once

#include "dev/cuda/ladder.h"
#include "llmc/blas.h"

/// GFLOP/s of the library for d (n,n) = a b with inputs and outputs of floatX.
inline double library_gflops(int n, int repeats, cudaStream_t stream) {
  const size_t elements = static_cast<size_t>(n) * n;
  LadderArray<floatX> a(stream, elements), b(stream, elements), d(stream, elements);
  a.write(ladder_values<floatX>(elements, 101));
  b.write(ladder_values<floatX>(elements, 102));
  Blas blas;
  MatrixProduct product = {};
  product.d = d.data();
  product.a = a.data();
  product.b = b.data();
  product.m = product.n = product.k = n;
  product.input_type = product.output_type = kFloatXType;
  const double ms = fastest_ms([&] { blas.multiply(product, stream); }, std::max(repeats, 20), stream);
  return 2.0 * n * n * n / ms * 1e-6;
}

/// The error that a right rung may have: four times that of rounding the exact result to floatX, plus the random walk
/// of the roundings of its longest float sum.
inline double allowed_error(int terms) {
  return 4 * (sizeof(floatX) == 2 ? 1.66e-3 : 2.5e-8) + std::ldexp(1.0, -23) * std::sqrt(static_cast<double>(terms));
}

/// Largest relative error of the outputs after one run; NaN if any value is NaN.
inline double rung_error(const Rung& rung, const LadderCheck& check) {
  check.reset();
  rung.run();
  const auto outputs = check.read();
  double error = 0;
  for (size_t i = 0; i < outputs.size(); i++) {
    const double e = relative_error(outputs[i], check.exact[i]);
    error = e > error || std::isnan(e) ? e : error;
  }
  return error;
}

inline void print_product_head(double ceiling) {
  printf("%s, %s, square product of the library: %.1f GFLOP/s\n", device_name().c_str(), kPrecisionName, ceiling);
  printf("%-26s %10s %10s %13s %10s\n", "rung", "ms", "GFLOP/s", "% of library", "error");
}

/// Verifies the rung, then times it. `flops`: those of the computation, whatever the rung spends. Is it right?
inline bool climb_product(const Rung& rung, const LadderCheck& check, double flops, double ceiling, int repeats,
                          cudaStream_t stream) {
  const double error = rung_error(rung, check);
  const bool right = error <= allowed_error(check.terms);
  const double ms = fastest_ms(rung.run, repeats, stream);
  const double gflops = flops / ms * 1e-6;
  printf("%-26s %10.3f %10.2f %12.1f%% %10.1e%s\n", rung.name.c_str(), ms, gflops, 100 * gflops / ceiling, error,
         right ? "" : "  WRONG");
  if (!rung.adds.empty()) printf("    %s\n", rung.adds.c_str());
  return right;
}
