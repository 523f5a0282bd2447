// test_gelu.cu -- GELU and its gradient against float64, and finite for every finite input.
#include "llmc/gelu.cuh"

#include <cfloat>

#include "test/kernel_test.h"

// The textbook form, with tanh. In double it is exact enough: 1 + tanh(z) loses at most 1e-16.
template <class Real>
static Real reference_value(Real x) {
  const Real z = std::sqrt(static_cast<Real>(2 / M_PI)) * (x + static_cast<Real>(0.044715) * x * x * x);
  return x / 2 * (1 + std::tanh(z));
}

template <class Real>
static Real reference_derivative(Real x) {
  const Real slope = std::sqrt(static_cast<Real>(2 / M_PI)) * (1 + 3 * static_cast<Real>(0.044715) * x * x);
  const Real t = std::tanh(std::sqrt(static_cast<Real>(2 / M_PI)) * (x + static_cast<Real>(0.044715) * x * x * x));
  return (1 + t) / 2 + x / 2 * (1 - t * t) * slope;
}

template <class Real>
static std::vector<Real> reference_backward(const std::vector<Real>& dout, const std::vector<Real>& inp) {
  std::vector<Real> dinp(inp.size());
  for (size_t i = 0; i < inp.size(); i++) dinp[i] = dout[i] * reference_derivative(inp[i]);
  return dinp;
}

template <class Real>
static std::vector<Real> reference_forward(std::vector<Real> values) {
  for (Real& value : values) value = reference_value(value);
  return values;
}

static const size_t kSizes[] = {1, 7, 255, 256, 257, 2048, 2049, 100003};

// The forward pass is right for sizes around every block boundary, and in place.
TEST(Gelu, Forward) {
  for (size_t n : kSizes) {
    const auto inp = convert<floatX>(random_values(n, 1, 2.0));
    const Outputs outputs = run_everywhere([&](cudaStream_t stream) -> Outputs {
      TestArray<floatX> x(stream, inp), y(stream, n);
      gelu_forward(y.data(), x.data(), n, stream);
      gelu_forward(x.data(), x.data(), n, stream);
      return {y.read_float(), x.read_float()};
    });
    expect_close(format_text("n %zu", n), convert<floatX>(outputs[0]), reference_forward(convert<double>(inp)),
                 reference_forward(convert<float>(inp)));
    EXPECT_TRUE(same_bits(outputs[0], outputs[1])) << "in place, n " << n;
  }
}

// The backward pass is right for the same sizes, and with dinp in the place of dout or of inp.
TEST(Gelu, Backward) {
  for (size_t n : kSizes) {
    const auto inp = convert<floatX>(random_values(n, 1, 2.0)), dout = convert<floatX>(random_values(n, 2));
    const Outputs outputs = run_everywhere([&](cudaStream_t stream) -> Outputs {
      TestArray<floatX> x(stream, inp), x2(stream, inp), dy(stream, dout), dx(stream, n);
      gelu_backward(dx.data(), dy.data(), x.data(), n, stream);
      gelu_backward(x2.data(), dy.data(), x2.data(), n, stream);
      gelu_backward(dy.data(), dy.data(), x.data(), n, stream);
      return {dx.read_float(), x2.read_float(), dy.read_float()};
    });
    expect_close(format_text("n %zu", n), convert<floatX>(outputs[0]),
                 reference_backward(convert<double>(dout), convert<double>(inp)),
                 reference_backward(convert<float>(dout), convert<float>(inp)));
    EXPECT_TRUE(same_bits(outputs[0], outputs[1])) << "dinp is inp, n " << n;
    EXPECT_TRUE(same_bits(outputs[0], outputs[2])) << "dinp is dout, n " << n;
  }
}

// y and dy/dx for each of `inputs` (dout = 1).
static Outputs value_and_derivative(const std::vector<floatX>& inputs) {
  return run_everywhere([&](cudaStream_t stream) -> Outputs {
    const std::vector<floatX> ones(inputs.size(), (floatX)1.0f);
    TestArray<floatX> x(stream, inputs), dy(stream, ones), y(stream, inputs.size()), dx(stream, inputs.size());
    gelu_forward(y.data(), x.data(), inputs.size(), stream);
    gelu_backward(dx.data(), dy.data(), x.data(), inputs.size(), stream);
    return {y.read_float(), dx.read_float()};
  });
}

static void check_values(const std::vector<floatX>& inputs) {
  const double kUnit = sizeof(floatX) == 2 ? std::ldexp(1.0, -8) : std::ldexp(1.0, -20);
  const double kTiny = FLT_MIN;  // numbers below it may be flushed to zero
  const Outputs outputs = value_and_derivative(inputs);
  for (size_t i = 0; i < inputs.size(); i++) {
    const double x = (float)inputs[i];
    // beyond 30 the textbook form itself overflows: there y = max(x, 0) and dy/dx is a step
    const double y = std::fabs(x) < 30 ? reference_value(x) : std::max(x, 0.0);
    const double slope = std::fabs(x) < 30 ? reference_derivative(x) : (x > 0 ? 1.0 : 0.0);
    ASSERT_TRUE(std::isfinite(outputs[0][i]) && std::isfinite(outputs[1][i])) << "x = " << x;
    ASSERT_LE(std::fabs(outputs[0][i] - y), kUnit * std::fabs(x) + 2 * kTiny) << "x = " << x;
    ASSERT_LE(std::fabs(outputs[1][i] - slope), kUnit) << "x = " << x;
  }
}

// Values and slopes at zero, tiny, huge and largest numbers: the inputs on which llm.c's form gives NaN.
TEST(Gelu, ExtremesAreFinite) {
  std::vector<floatX> inputs;
  for (float x : {0.0f,  FLT_TRUE_MIN, 1e-39f, FLT_MIN, 1e-20f, 1e-5f, 1.0f,  3.0f,  9.99f,   10.0f,   10.01f,
                  15.0f, 50.0f,        100.0f, 1e4f,    1e10f,  1e19f, 1e20f, 1e30f, 3.0e38f, 3.38e38f}) {
    for (float sign : {1.0f, -1.0f}) inputs.push_back((floatX)(sign * x));
  }
  check_values(inputs);
}

// The same for finite numbers with every exponent: every bf16 number, and as many floats evenly over all bit patterns.
TEST(Gelu, EveryExponentIsFinite) {
  std::vector<floatX> inputs;
  for (uint32_t upper = 0; upper < 65536; upper++) {
    const uint32_t bits = upper << 16 | (sizeof(floatX) == 4 ? upper * 40503u % 65536 : 0);
    float x;
    memcpy(&x, &bits, sizeof(x));
    if (std::isfinite(x)) inputs.push_back((floatX)x);
  }
  check_values(inputs);
}

// NaN is not hidden: it comes out of both passes.
TEST(Gelu, NanStaysNan) {
  const Outputs outputs = value_and_derivative(std::vector<floatX>(3, (floatX)NAN));
  for (int i = 0; i < 3; i++) EXPECT_TRUE(std::isnan(outputs[0][i]) && std::isnan(outputs[1][i]));
}

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
