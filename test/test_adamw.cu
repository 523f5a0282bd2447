// test_adamw.cu -- the AdamW update against float64, its rounding, and its independence of how parameters are cut.
#include "llmc/adamw.cuh"

#include "test/kernel_test.h"

static AdamW hyperparameters(int step) {
  AdamW adamw = {};
  adamw.learning_rate = 1e-2f;
  adamw.beta1 = 0.9f;
  adamw.beta2 = 0.95f;
  adamw.epsilon = 1e-8f;
  adamw.weight_decay = 0.1f;
  adamw.step = step;
  adamw.gradient_scale = 0.25f;
  adamw.seed = 1234;
  return adamw;
}

// Device state of n parameters; `weights` are what the fp32 parameters or the master copies start from.
struct AdamWState {
  size_t n;
  TestArray<floatX> params;
  TestArray<float> master, m, v;

  AdamWState(cudaStream_t stream, const std::vector<float>& weights)
      : n(weights.size()), params(stream, n), master(stream, kHasMasterWeights ? n : 0), m(stream, n), v(stream, n) {
    // in bf16 the update must not read params: they stay NaN
    if constexpr (kHasMasterWeights) {
      master.write(weights);
    } else {
      params.write(convert<floatX>(weights));
    }
    m.write(std::vector<float>(n, 0.0f));
    v.write(std::vector<float>(n, 0.0f));
  }

  // One step for the elements [begin, end), of which element i has the global index first_element + i.
  void update(TestArray<float>& gradient, size_t begin, size_t end, uint64_t first_element, const AdamW& adamw,
              cudaStream_t stream) {
    float* master_copy = kHasMasterWeights ? master.data() + begin : nullptr;
    adamw_update(params.data() + begin, master_copy, m.data() + begin, v.data() + begin, gradient.data() + begin,
                 end - begin, first_element + begin, adamw, stream);
  }

  // params, m, v, and the fp32 weights
  Outputs read() {
    return {params.read_float(), m.read(), v.read(), kHasMasterWeights ? master.read() : params.read_float()};
  }
};

template <class Real>
static std::vector<Real> reference(std::vector<Real> p, const std::vector<std::vector<float>>& gradients) {
  const AdamW h = hyperparameters(1);
  std::vector<Real> m(p.size()), v(p.size());
  for (size_t step = 1; step <= gradients.size(); step++) {
    const Real correction1 = static_cast<Real>(1 - std::pow(static_cast<double>(h.beta1), step));
    const Real correction2 = static_cast<Real>(1 - std::pow(static_cast<double>(h.beta2), step));
    for (size_t i = 0; i < p.size(); i++) {
      const Real g = gradients[step - 1][i] * static_cast<Real>(h.gradient_scale);
      m[i] = h.beta1 * m[i] + (1 - static_cast<Real>(h.beta1)) * g;
      v[i] = h.beta2 * v[i] + (1 - static_cast<Real>(h.beta2)) * g * g;
      const Real direction = m[i] / correction1 / (std::sqrt(v[i] / correction2) + h.epsilon);
      p[i] -= h.learning_rate * (direction + h.weight_decay * p[i]);
    }
  }
  return p;
}

// Ten steps follow the reference, at sizes around the block boundaries.
TEST(AdamW, TenSteps) {
  for (size_t n : {1, 255, 257, 2048, 5001}) {
    const auto weights = convert<float>(convert<floatX>(random_values(n, 1)));
    std::vector<std::vector<float>> gradients;
    for (int step = 1; step <= 10; step++) gradients.push_back(random_values(n, 100 + step));
    const Outputs outputs = run_everywhere([&](cudaStream_t stream) {
      AdamWState state(stream, weights);
      for (int step = 1; step <= 10; step++) {
        TestArray<float> gradient(stream, gradients[step - 1]);
        state.update(gradient, 0, n, 0, hyperparameters(step), stream);
      }
      return state.read();
    });
    expect_close(format_text("n %zu", n), outputs[3], reference(convert<double>(weights), gradients),
                 reference(weights, gradients));
  }
}

// One call equals two calls wherever the range is cut, and a call on a part of the arrays, at its global index.
TEST(AdamW, IndependentOfCuts) {
  const size_t n = 4500;
  const auto weights = random_values(n, 1), gradients = random_values(n, 2);
  const uint64_t first_element = (1ull << 32) - 1000;  // the index crosses 32 bits
  const auto run = [&](std::vector<size_t> cuts) {
    return run_everywhere([&](cudaStream_t stream) {
      AdamWState state(stream, weights);
      TestArray<float> gradient(stream, gradients);
      for (int step = 1; step <= 3; step++) {
        size_t begin = 0;
        for (size_t end : cuts) {
          state.update(gradient, begin, end, first_element, hyperparameters(step), stream);
          begin = end;
        }
      }
      return state.read();
    });
  };
  const Outputs whole = run({n});
  for (size_t cut : {size_t(0), size_t(1), size_t(3), size_t(256), size_t(1001), size_t(2047), n - 1}) {
    const Outputs parts = run({cut, cut + (n - cut) / 3, n});
    for (size_t i = 0; i < whole.size(); i++)
      EXPECT_TRUE(same_bits(whole[i], parts[i])) << "cut " << cut << " output " << i;
  }
}

// Weight decay is decoupled: without a gradient a weight shrinks by lr * weight_decay * w, and m and v stay 0.
TEST(AdamW, DecayIsDecoupled) {
  const auto weights = random_values(100, 1);
  const Outputs outputs = run_everywhere([&](cudaStream_t stream) {
    AdamWState state(stream, weights);
    TestArray<float> gradient(stream, std::vector<float>(100, 0.0f));
    state.update(gradient, 0, 100, 0, hyperparameters(1), stream);
    return state.read();
  });
  const AdamW h = hyperparameters(1);
  for (int i = 0; i < 100; i++) {
    EXPECT_EQ(outputs[1][i], 0.0f);
    EXPECT_EQ(outputs[2][i], 0.0f);
    EXPECT_NEAR(outputs[3][i], weights[i] * (1 - h.learning_rate * h.weight_decay), 2e-7 * std::fabs(weights[i]));
  }
}

// With bias correction the first step has the length lr whatever the size of the gradient.
TEST(AdamW, FirstStepIsLearningRate) {
  AdamW adamw = hyperparameters(1);
  adamw.weight_decay = 0;
  const std::vector<float> gradients = {1e-3f, -1e-3f, 1.0f, -1.0f, 1e4f, -1e4f};
  const Outputs outputs = run_everywhere([&](cudaStream_t stream) {
    AdamWState state(stream, std::vector<float>(gradients.size(), 1.0f));
    TestArray<float> gradient(stream, gradients);
    state.update(gradient, 0, gradients.size(), 0, adamw, stream);
    return state.read();
  });
  for (size_t i = 0; i < gradients.size(); i++) {
    const float step = gradients[i] > 0 ? -adamw.learning_rate : adamw.learning_rate;
    EXPECT_NEAR(outputs[3][i], 1 + step, 1e-6);
  }
}

// bf16 parameters after one step of n equal weights without a gradient: the master value is the same for all.
static Outputs round_equal_weights(size_t n, float weight, uint64_t seed, int step, uint64_t first_element) {
  AdamW adamw = hyperparameters(step);
  adamw.weight_decay = 0;
  adamw.seed = seed;
  TestStream stream;
  AdamWState state(stream, std::vector<float>(n, weight));
  TestArray<float> gradient(stream, std::vector<float>(n, 0.0f));
  state.update(gradient, 0, n, first_element, adamw, stream);
  return state.read();
}

// The rounding to bf16 takes one of the two neighbours of the master value, and its mean is the master value.
TEST(AdamW, RoundingIsUnbiased) {
  if (!kHasMasterWeights) GTEST_SKIP() << "fp32 parameters are not rounded";
  const size_t n = 100000;
  const float weight = 1.0f + 0.3f / 128;  // 3/10 of the way between two bf16 numbers
  const Outputs outputs = round_equal_weights(n, weight, 1, 1, 0);
  double sum = 0;
  for (size_t i = 0; i < n; i++) {
    ASSERT_EQ(outputs[3][i], weight);
    ASSERT_TRUE(outputs[0][i] == 1.0f || outputs[0][i] == 1.0f + 1.0f / 128);
    sum += (static_cast<double>(outputs[0][i]) - weight) * 128;
  }
  EXPECT_LT(std::fabs(sum / n), 5 * std::sqrt(0.3 * 0.7 / n));
}

// Step, seed and element each change the random bits; the same element has the same bits wherever it is computed.
TEST(AdamW, RoundingIsKeyedByElement) {
  if (!kHasMasterWeights) GTEST_SKIP() << "fp32 parameters are not rounded";
  const size_t n = 1000;
  const float weight = 1.0f + 0.5f / 128;
  const Outputs base = round_equal_weights(n, weight, 1, 1, 0);
  EXPECT_TRUE(same_bits(base[0], round_equal_weights(n, weight, 1, 1, 0)[0]));
  EXPECT_FALSE(same_bits(base[0], round_equal_weights(n, weight, 2, 1, 0)[0]));
  EXPECT_FALSE(same_bits(base[0], round_equal_weights(n, weight, 1, 2, 0)[0]));
  EXPECT_FALSE(same_bits(base[0], round_equal_weights(n, weight, 1, 1, 1ull << 32)[0]));
  const Outputs shifted = round_equal_weights(n - 7, weight, 1, 1, 7);
  EXPECT_TRUE(same_bits(std::vector<float>(base[0].begin() + 7, base[0].end()), shifted[0]));
}

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
