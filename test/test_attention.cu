// test_attention.cu -- attention and its gradient against the textbook formula in double, and what must not change a
// bit.
#include "llmc/attention.cuh"

#include <cmath>
#include <string>
#include <vector>

#include "dev/cuda/attention/reference.h"
#include "test/kernel_test.h"

namespace {

using Shape = AttentionShape;

/// Every T with every head size; batch and number of heads vary along.
std::vector<Shape> all_shapes() {
  std::vector<Shape> shapes;
  for (int T : {1, 3, 64, 257}) {
    for (int HS : {1, 5, 16, 48, 64, 100}) {
      const int i = static_cast<int>(shapes.size());
      shapes.push_back({1 + i % 3, T, 1 + i % 2, HS});
    }
  }
  shapes.push_back({1, 130, 2, 130});  // three slices of a head, the last one almost empty
  shapes.push_back({2, 65, 3, 17});
  return shapes;
}

struct Inputs {
  std::vector<floatX> qkv, dout;
  explicit Inputs(const Shape& s, double scale = 1.0)
      : qkv(convert<floatX>(random_values(3 * s.elements(), 1, scale))),
        dout(convert<floatX>(random_values(s.elements(), 2))) {}
};

template <class Real>
AttentionReference<Real> reference(const Shape& s, const Inputs& inputs) {
  return AttentionReference<Real>(s, convert<Real>(convert<float>(inputs.qkv)),
                                  convert<Real>(convert<float>(inputs.dout)));
}

/// What the kernels return, read back.
struct Results {
  std::vector<floatX> out, dqkv;
  std::vector<float> lse;
};

Results run(cudaStream_t stream, const Shape& s, const Inputs& inputs) {
  TestArray<floatX> qkv(stream, inputs.qkv), dout(stream, inputs.dout);
  TestArray<floatX> out(stream, s.elements()), dqkv(stream, 3 * s.elements());
  TestArray<float> lse(stream, s.rows());
  TestArray<float> scratch(stream, attention_backward_scratch_floats(s.B, s.T, s.C(), s.NH));
  attention_forward(out.data(), lse.data(), qkv.data(), s.B, s.T, s.C(), s.NH, stream);
  AttentionBackward backward = {};
  backward.dqkv = dqkv.data();
  backward.scratch = scratch.data();
  backward.dout = dout.data();
  backward.qkv = qkv.data();
  backward.out = out.data();
  backward.lse = lse.data();
  backward.B = s.B;
  backward.T = s.T;
  backward.C = s.C();
  backward.NH = s.NH;
  attention_backward(backward, stream);
  scratch.read();  // checks the guard behind it
  EXPECT_TRUE(same_bits(qkv.read(), inputs.qkv)) << "an input was written";
  EXPECT_TRUE(same_bits(dout.read(), inputs.dout)) << "an input was written";
  return {out.read(), dqkv.read(), lse.read()};
}

void expect_close_to_reference(const Shape& s, const Inputs& inputs, const Results& results) {
  const auto exact = reference<double>(s, inputs);
  const auto plain = reference<float>(s, inputs);
  expect_close(s.name() + " out", results.out, exact.out, plain.out);
  expect_close(s.name() + " lse", results.lse, exact.lse, plain.lse);
  // With one token dq and dk are zero but for rounding: see OneTokenCopiesItsValue.
  if (s.T > 1) expect_close(s.name() + " dqkv", results.dqkv, exact.dqkv, plain.dqkv);
}

// The backward formula of the reference is the derivative of its forward formula (central differences in double).
TEST(Attention, ReferenceGradientEqualsDifferences) {
  const Shape s = {1, 5, 2, 3};
  const Inputs inputs(s);
  std::vector<double> qkv = convert<double>(convert<float>(inputs.qkv));
  const std::vector<double> dout = convert<double>(convert<float>(inputs.dout));
  const auto loss = [&] {
    const AttentionReference<double> r(s, qkv, dout);
    double sum = 0;
    for (size_t i = 0; i < r.out.size(); i++) sum += r.out[i] * dout[i];
    return sum;
  };
  const AttentionReference<double> r(s, qkv, dout);
  for (size_t i = 0; i < qkv.size(); i++) {
    const double step = 1e-5, value = qkv[i];
    qkv[i] = value + step;
    const double above = loss();
    qkv[i] = value - step;
    const double below = loss();
    qkv[i] = value;
    EXPECT_NEAR(r.dqkv[i], (above - below) / (2 * step), 1e-8) << "element " << i;
  }
}

// Forward and backward for every odd length and head size, outputs and scratch poisoned.
TEST(Attention, EqualsDouble) {
  TestStream stream;
  for (const Shape& s : all_shapes()) {
    const Inputs inputs(s);
    expect_close_to_reference(s, inputs, run(stream, s, inputs));
  }
}

// Scores of several hundred: the running maximum keeps exp in range, and the results stay as exact as the plain
// program.
TEST(Attention, LargeScoresDoNotOverflow) {
  TestStream stream;
  const Shape s = {1, 150, 1, 64};
  const Inputs inputs(s, 12.0);
  const auto exact = reference<double>(s, inputs);
  ASSERT_GT(largest_magnitude(exact.lse), 300.0);
  expect_close_to_reference(s, inputs, run(stream, s, inputs));
}

// Runs with one and with three OS threads, and repeated runs, give the same bits.
TEST(Attention, SameBitsEveryTime) {
  for (const Shape& s : {Shape{2, 257, 2, 48}, Shape{1, 70, 3, 100}}) {
    const Inputs inputs(s);
    run_everywhere([&](cudaStream_t stream) -> Outputs {
      const Results results = run(stream, s, inputs);
      return {convert<float>(results.out), convert<float>(results.dqkv), results.lse};
    });
  }
}

// A sequence gives the same bits alone and in a batch: micro-batches may be cut anywhere.
TEST(Attention, SequencesAreIndependent) {
  TestStream stream;
  const Shape all = {3, 100, 2, 20}, one = {1, 100, 2, 20};
  const Inputs inputs(all);
  const Results together = run(stream, all, inputs);
  const size_t n = one.elements();
  for (int b = 0; b < all.B; b++) {
    Inputs alone(one);
    alone.qkv.assign(inputs.qkv.begin() + 3 * n * b, inputs.qkv.begin() + 3 * n * (b + 1));
    alone.dout.assign(inputs.dout.begin() + n * b, inputs.dout.begin() + n * (b + 1));
    const Results single = run(stream, one, alone);
    const std::vector<floatX> out(together.out.begin() + n * b, together.out.begin() + n * (b + 1));
    const std::vector<floatX> dqkv(together.dqkv.begin() + 3 * n * b, together.dqkv.begin() + 3 * n * (b + 1));
    EXPECT_TRUE(same_bits(single.out, out)) << "sequence " << b;
    EXPECT_TRUE(same_bits(single.dqkv, dqkv)) << "sequence " << b;
  }
}

// Later tokens do not change a bit of earlier outputs, and get no gradient from them.
TEST(Attention, IsCausal) {
  TestStream stream;
  const Shape s = {1, 200, 1, 24};
  const int cut = 131;
  Inputs inputs(s);
  for (size_t i = static_cast<size_t>(cut) * s.C(); i < s.elements(); i++) inputs.dout[i] = static_cast<floatX>(0.0f);
  const Results before = run(stream, s, inputs);
  for (size_t i = static_cast<size_t>(cut) * 3 * s.C(); i < inputs.qkv.size(); i++) {
    inputs.qkv[i] = static_cast<floatX>(-3.0f * static_cast<float>(inputs.qkv[i]) + 1.0f);
  }
  const Results after = run(stream, s, inputs);
  const size_t kept = static_cast<size_t>(cut) * s.C();
  const auto first = [](const std::vector<floatX>& values, size_t n) {
    return std::vector<floatX>(values.begin(), values.begin() + n);
  };
  EXPECT_TRUE(same_bits(first(before.out, kept), first(after.out, kept)));
  EXPECT_TRUE(same_bits(first(before.dqkv, 3 * kept), first(after.dqkv, 3 * kept)));
  for (size_t i = 3 * kept; i < before.dqkv.size(); i++) EXPECT_EQ(static_cast<float>(before.dqkv[i]), 0.0f) << i;
}

// A single token attends to itself only: out is its value and dv is dout, bit for bit; dq and dk are the difference of
// two equal sums of HS products, which may be off by the roundings of both: 2 HS 2^-24 sum |dout v|.
TEST(Attention, OneTokenCopiesItsValue) {
  TestStream stream;
  for (int HS : {1, 10, 64, 100}) {
    const Shape s = {2, 1, 3, HS};
    const int C = s.C();
    const Inputs inputs(s);
    const Results results = run(stream, s, inputs);
    for (int pair = 0; pair < s.B * s.NH; pair++) {
      const size_t query = static_cast<size_t>(pair / s.NH) * 3 * C + pair % s.NH * HS;
      const size_t key = query + C, value = query + 2 * C, plain = static_cast<size_t>(pair) * HS;
      double magnitude = 0, score = 0;
      for (int d = 0; d < HS; d++) {
        const double q = static_cast<float>(inputs.qkv[query + d]), k = static_cast<float>(inputs.qkv[key + d]);
        magnitude += std::fabs(static_cast<float>(inputs.dout[plain + d]) * static_cast<float>(inputs.qkv[value + d]));
        score += std::fabs(q * k) / std::sqrt(HS);
      }
      for (int d = 0; d < HS; d++) {
        const float dout = static_cast<float>(inputs.dout[plain + d]);
        EXPECT_EQ(static_cast<float>(results.out[plain + d]), static_cast<float>(inputs.qkv[value + d]));
        EXPECT_NEAR(static_cast<float>(results.dqkv[value + d]), dout, std::ldexp(std::fabs(dout) * (score + 8), -23));
      }
      const double limit = 2.1 * HS * std::ldexp(1.0, -24) * magnitude / std::sqrt(HS);
      for (int d = 0; d < HS; d++) {
        const double q = static_cast<float>(inputs.qkv[query + d]), k = static_cast<float>(inputs.qkv[key + d]);
        EXPECT_LE(std::fabs(static_cast<float>(results.dqkv[query + d])), limit * std::fabs(k)) << s.name();
        EXPECT_LE(std::fabs(static_cast<float>(results.dqkv[key + d])), limit * std::fabs(q)) << s.name();
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
