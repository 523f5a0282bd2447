// test_layernorm.cu -- layernorm and the residual addition, forward and backward, against float64.
#include "llmc/layernorm.cuh"

#include "test/kernel_test.h"

static const int kChannels[] = {1, 7, 32, 48, 100, 257, 768, 1600};
static const int kRows[] = {1, 3, 64, 257};

static bool too_slow(int N, int C) { return kInstrumented && N * C > 30000; }

// ---------------------------------------------------------------------------------------------------------------------
// reference: the formula, row by row, in the arithmetic of Real

template <class Real>
struct ForwardReference {
  std::vector<Real> out, mean, rstd;
};

template <class Real>
static ForwardReference<Real> reference_forward(const std::vector<Real>& inp, const std::vector<Real>& weight,
                                                const std::vector<Real>& bias, int N, int C) {
  ForwardReference<Real> r;
  r.out.resize(inp.size());
  for (int n = 0; n < N; n++) {
    const Real* x = inp.data() + static_cast<size_t>(n) * C;
    Real sum = 0, square = 0;
    for (int i = 0; i < C; i++) sum += x[i];
    const Real mean = sum / C;
    for (int i = 0; i < C; i++) square += (x[i] - mean) * (x[i] - mean);
    const Real rstd = 1 / std::sqrt(square / C + static_cast<Real>(1e-5));
    for (int i = 0; i < C; i++) r.out[static_cast<size_t>(n) * C + i] = (x[i] - mean) * rstd * weight[i] + bias[i];
    r.mean.push_back(mean);
    r.rstd.push_back(rstd);
  }
  return r;
}

template <class Real>
struct BackwardReference {
  std::vector<Real> dinp, dweight, dbias;
};

// dweight and dbias start from what they hold; dresidual may be empty.
template <class Real>
static void reference_backward(BackwardReference<Real>* g, const std::vector<Real>& dout, const std::vector<Real>& inp,
                               const std::vector<Real>& weight, const std::vector<Real>& dresidual, int N, int C) {
  const auto forward = reference_forward(inp, weight, weight, N, C);
  g->dinp.resize(inp.size());
  for (int n = 0; n < N; n++) {
    const size_t row = static_cast<size_t>(n) * C;
    const Real mean = forward.mean[n], rstd = forward.rstd[n];
    Real average = 0, average_xhat = 0;
    for (int i = 0; i < C; i++) {
      average += weight[i] * dout[row + i] / C;
      average_xhat += weight[i] * dout[row + i] * (inp[row + i] - mean) * rstd / C;
    }
    for (int i = 0; i < C; i++) {
      const Real xhat = (inp[row + i] - mean) * rstd;
      g->dinp[row + i] = rstd * (weight[i] * dout[row + i] - average - xhat * average_xhat);
      if (!dresidual.empty()) g->dinp[row + i] += dresidual[row + i];
      g->dweight[i] += dout[row + i] * xhat;
      g->dbias[i] += dout[row + i];
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// forward

struct ForwardData {
  int N, C;
  std::vector<floatX> a, b, weight, bias;
};

static ForwardData forward_data(int N, int C, double mean = 0.5, double scale = 2.0) {
  const size_t n = static_cast<size_t>(N) * C;
  return {N,
          C,
          convert<floatX>(random_values(n, 1, scale, mean)),
          convert<floatX>(random_values(n, 2)),
          convert<floatX>(random_values(C, 3, 0.5, 1.0)),
          convert<floatX>(random_values(C, 4))};
}

// out, mean, rstd
static Outputs run_forward(const ForwardData& data, cudaStream_t stream) {
  TestArray<floatX> inp(stream, data.a), weight(stream, data.weight), bias(stream, data.bias);
  TestArray<floatX> out(stream, data.a.size());
  TestArray<float> mean(stream, data.N), rstd(stream, data.N);
  layernorm_forward(out.data(), mean.data(), rstd.data(), inp.data(), weight.data(), bias.data(), data.N, data.C,
                    stream);
  return {out.read_float(), mean.read(), rstd.read()};
}

static void check_forward(const std::string& what, const ForwardData& data, const Outputs& outputs) {
  const auto exact = reference_forward(convert<double>(data.a), convert<double>(data.weight),
                                       convert<double>(data.bias), data.N, data.C);
  const auto plain =
      reference_forward(convert<float>(data.a), convert<float>(data.weight), convert<float>(data.bias), data.N, data.C);
  expect_close(what + " out", convert<floatX>(outputs[0]), exact.out, plain.out);
  // too few numbers for the plain program's error to be typical: the sums of C terms are allowed a random walk
  expect_close(what + " mean", outputs[1], exact.mean, data.C);
  expect_close(what + " rstd", outputs[2], exact.rstd, data.C);
}

// The forward pass is right at every shape.
TEST(Layernorm, Forward) {
  for (int C : kChannels) {
    for (int N : kRows) {
      if (too_slow(N, C)) continue;
      const ForwardData data = forward_data(N, C);
      check_forward(format_text("N %d C %d", N, C), data,
                    run_everywhere([&](cudaStream_t stream) { return run_forward(data, stream); }));
    }
  }
}

// A mean far larger than the deviation does not cancel: the variance must not be E[x^2] - E[x]^2.
TEST(Layernorm, ForwardLargeMean) {
  for (int C : {100, 768}) {
    const ForwardData data = forward_data(3, C, 300.0, 3.0);
    check_forward(format_text("large mean, C %d", C), data,
                  run_everywhere([&](cudaStream_t stream) { return run_forward(data, stream); }));
  }
}

// The fused residual + layernorm gives the bits of the two separate kernels, and the residual is a + b rounded once.
TEST(Layernorm, ResidualFusedEqualsSeparate) {
  for (int C : kChannels) {
    const ForwardData data = forward_data(65, C);
    const Outputs outputs = run_everywhere([&](cudaStream_t stream) -> Outputs {
      TestArray<floatX> a(stream, data.a), b(stream, data.b), weight(stream, data.weight), bias(stream, data.bias);
      TestArray<floatX> residual(stream, data.a.size()), out(stream, data.a.size());
      TestArray<floatX> residual2(stream, data.a.size()), out2(stream, data.a.size());
      TestArray<float> mean(stream, data.N), rstd(stream, data.N), mean2(stream, data.N), rstd2(stream, data.N);
      residual_layernorm_forward(residual.data(), out.data(), mean.data(), rstd.data(), a.data(), b.data(),
                                 weight.data(), bias.data(), data.N, C, stream);
      residual_forward(residual2.data(), a.data(), b.data(), data.a.size(), stream);
      layernorm_forward(out2.data(), mean2.data(), rstd2.data(), residual2.data(), weight.data(), bias.data(), data.N,
                        C, stream);
      return {residual.read_float(),  out.read_float(),  mean.read(),  rstd.read(),
              residual2.read_float(), out2.read_float(), mean2.read(), rstd2.read()};
    });
    for (int i = 0; i < 4; i++) EXPECT_TRUE(same_bits(outputs[i], outputs[i + 4])) << "C " << C << " output " << i;
    for (size_t i = 0; i < data.a.size(); i++) {
      const floatX sum = (floatX)((float)data.a[i] + (float)data.b[i]);
      ASSERT_EQ(outputs[0][i], (float)sum);
    }
  }
}

// out may be one of the operands of the residual addition.
TEST(Layernorm, ResidualInPlace) {
  const std::vector<floatX> a = convert<floatX>(random_values(5000, 1)), b = convert<floatX>(random_values(5000, 2));
  const Outputs outputs = run_everywhere([&](cudaStream_t stream) -> Outputs {
    TestArray<floatX> x(stream, a), y(stream, b), out(stream, a.size());
    residual_forward(out.data(), x.data(), y.data(), a.size(), stream);
    residual_forward(x.data(), x.data(), y.data(), a.size(), stream);
    return {out.read_float(), x.read_float()};
  });
  EXPECT_TRUE(same_bits(outputs[0], outputs[1]));
}

// ---------------------------------------------------------------------------------------------------------------------
// backward

struct BackwardCase {
  int N, C;
  bool residual, accumulate, in_place;
};

// What a test of the backward pass starts from, and the reference for it.
struct BackwardData {
  BackwardCase shape;
  std::vector<floatX> dout, inp, weight, dresidual;
  std::vector<float> dweight, dbias;

  explicit BackwardData(const BackwardCase& s) : shape(s) {
    const size_t n = static_cast<size_t>(s.N) * s.C;
    dout = convert<floatX>(random_values(n, 11));
    inp = convert<floatX>(random_values(n, 12, 2.0, 0.5));
    weight = convert<floatX>(random_values(s.C, 13, 0.5, 1.0));
    if (s.residual) dresidual = convert<floatX>(random_values(n, 14));
    dweight = random_values(s.C, 15);
    dbias = random_values(s.C, 16);
  }

  template <class Real>
  BackwardReference<Real> reference() const {
    BackwardReference<Real> g;
    g.dweight = shape.accumulate ? convert<Real>(dweight) : std::vector<Real>(shape.C);
    g.dbias = shape.accumulate ? convert<Real>(dbias) : std::vector<Real>(shape.C);
    reference_backward(&g, convert<Real>(dout), convert<Real>(inp), convert<Real>(weight), convert<Real>(dresidual),
                       shape.N, shape.C);
    return g;
  }
};

// dinp, dweight, dbias. In place: dinp is inp, and also dresidual if there is one (then inp holds dresidual's values).
static Outputs run_backward(const BackwardData& data, cudaStream_t stream) {
  const BackwardCase& s = data.shape;
  const size_t n = data.inp.size();
  TestArray<floatX> dout(stream, data.dout), inp(stream, data.inp), weight(stream, data.weight);
  TestArray<floatX> dresidual(stream, data.dresidual), dinp(stream, n), out(stream, n);
  TestArray<float> mean(stream, s.N), rstd(stream, s.N), dweight(stream, s.C), dbias(stream, s.C);
  TestArray<float> scratch(stream, layernorm_backward_scratch_floats(s.N, s.C));
  layernorm_forward(out.data(), mean.data(), rstd.data(), inp.data(), weight.data(), weight.data(), s.N, s.C, stream);
  if (s.accumulate) {
    dweight.write(data.dweight);
    dbias.write(data.dbias);
  }
  floatX* target = s.in_place ? (s.residual ? dresidual.data() : inp.data()) : dinp.data();
  LayernormBackward arguments = {target,        dweight.data(), dbias.data(), scratch.data(), dout.data(), inp.data(),
                                 weight.data(), mean.data(),    rstd.data(),  nullptr,        s.N,         s.C,
                                 s.accumulate};
  if (s.residual) arguments.dresidual = dresidual.data();
  layernorm_backward(arguments, stream);
  const auto& result = s.in_place ? (s.residual ? dresidual : inp) : dinp;
  return {result.read_float(), dweight.read(), dbias.read()};
}

static void check_backward(const BackwardCase& s) {
  const BackwardData data(s);
  const Outputs outputs = run_everywhere([&](cudaStream_t stream) { return run_backward(data, stream); });
  const auto exact = data.reference<double>();
  const auto plain = data.reference<float>();
  const std::string what =
      format_text("N %d C %d residual %d accumulate %d in place %d", s.N, s.C, s.residual, s.accumulate, s.in_place);
  expect_close(what + " dinp", convert<floatX>(outputs[0]), exact.dinp, plain.dinp);
  expect_close(what + " dweight", outputs[1], exact.dweight, plain.dweight);
  expect_close(what + " dbias", outputs[2], exact.dbias, plain.dbias);
}

// All three gradients are right at every shape, added to the residual's gradient or not, accumulated or overwritten.
TEST(Layernorm, Backward) {
  for (int C : kChannels) {
    for (int N : kRows) {
      if (too_slow(N, C)) continue;
      const bool residual = (N + C) % 2 == 0;  // both kinds of each C and of each N, in half the time
      check_backward({N, C, residual, residual, false});
    }
  }
}

// dinp may be the same array as inp, or as dresidual.
TEST(Layernorm, BackwardInPlace) {
  for (int C : {7, 257, 768}) {
    check_backward({67, C, false, true, true});
    check_backward({67, C, true, false, true});
  }
}

// Many rows: chunks of more than 32 rows, a last chunk that is not full, and scratch exactly as large as promised.
TEST(Layernorm, BackwardManyRows) {
  check_backward({256 * 32 + 1, 48, true, true, false});
  check_backward({10280, 7, false, false, false});
}

// No rows: gradients of the parameters become 0, or stay.
TEST(Layernorm, NoRows) {
  for (bool accumulate : {false, true}) {
    const BackwardData data({0, 48, false, accumulate, false});
    const Outputs outputs = run_everywhere([&](cudaStream_t stream) { return run_backward(data, stream); });
    const std::vector<float> zero(48, 0.0f);
    EXPECT_EQ(outputs[1], accumulate ? data.dweight : zero);
    EXPECT_EQ(outputs[2], accumulate ? data.dbias : zero);
  }
}

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
