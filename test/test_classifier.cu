// test_classifier.cu -- softmax, loss and gradient in place, against float64.
#include "llmc/classifier.cuh"

#include <sys/mman.h>

#include "test/kernel_test.h"

struct ClassifierData {
  int N, V, Vp;
  std::vector<floatX> logits;
  std::vector<int> targets;
};

// Random logits; the padding holds values that would dominate if they were read. Some targets are ignored.
static ClassifierData classifier_data(int N, int V, int Vp, double scale = 3.0, double mean = 0.0) {
  ClassifierData data = {N, V, Vp, convert<floatX>(random_values(static_cast<size_t>(N) * Vp, 1, scale, mean)), {}};
  for (int n = 0; n < N; n++) {
    for (int v = V; v < Vp; v++) data.logits[static_cast<size_t>(n) * Vp + v] = (floatX)(float)(mean + 100.0);
  }
  data.targets = random_integers(N, 2, V);
  for (int n = 3; n < N; n += 5) data.targets[n] = -1;
  data.targets[0] = V - 1;
  if (N > 1) data.targets[1] = 0;
  return data;
}

template <class Real>
struct ClassifierReference {
  std::vector<Real> losses, dlogits;
};

template <class Real>
static ClassifierReference<Real> reference(const ClassifierData& data) {
  ClassifierReference<Real> r;
  r.dlogits.resize(data.logits.size());
  for (int n = 0; n < data.N; n++) {
    const size_t row = static_cast<size_t>(n) * data.Vp;
    const int target = data.targets[n];
    if (target == -1) {
      r.losses.push_back(0);
      continue;
    }
    Real largest = static_cast<float>(data.logits[row]), sum = 0;
    for (int v = 0; v < data.V; v++) largest = std::max(largest, static_cast<Real>((float)data.logits[row + v]));
    for (int v = 0; v < data.V; v++) sum += std::exp(static_cast<Real>((float)data.logits[row + v]) - largest);
    r.losses.push_back(std::log(sum) - (static_cast<Real>((float)data.logits[row + target]) - largest));
    for (int v = 0; v < data.V; v++) {
      r.dlogits[row + v] = std::exp(static_cast<Real>((float)data.logits[row + v]) - largest) / sum - (v == target);
    }
  }
  return r;
}

// losses and logits as they are afterwards
static Outputs run_classifier(const ClassifierData& data, bool write, cudaStream_t stream) {
  TestArray<floatX> logits(stream, data.logits);
  TestArray<int> targets(stream, data.targets);
  TestArray<float> losses(stream, data.N);
  fused_classifier(losses.data(), logits.data(), targets.data(), data.N, data.V, data.Vp, write, stream);
  return {losses.read(), logits.read_float()};
}

static void check_classifier(const ClassifierData& data) {
  const std::string what = format_text("N %d V %d Vp %d", data.N, data.V, data.Vp);
  const Outputs read = run_everywhere([&](cudaStream_t stream) { return run_classifier(data, false, stream); });
  const Outputs write = run_everywhere([&](cudaStream_t stream) { return run_classifier(data, true, stream); });
  const auto exact = reference<double>(data);
  const auto plain = reference<float>(data);
  expect_close(what + " losses", write[0], exact.losses, plain.losses);
  expect_close(what + " dlogits", convert<floatX>(write[1]), exact.dlogits, plain.dlogits);
  EXPECT_TRUE(same_bits(read[0], write[0])) << what << ": the loss depends on whether the gradient is written";
  EXPECT_TRUE(same_bits(read[1], convert<float>(data.logits))) << what << ": logits written in validation";
}

// Losses and gradients are right for every vocabulary, with and without padding; without write_dlogits nothing is
// written (llm.c instantiated only one of the two kernels).
TEST(Classifier, MatchesReference) {
  for (int N : {1, 3, 64, 257}) {
    check_classifier(classifier_data(N, 2, 2));
    check_classifier(classifier_data(N, 61, 64));
    check_classifier(classifier_data(N, 256, 259));
  }
  for (int N : {1, 3}) check_classifier(classifier_data(N, 50257, 50257));
  if (!kInstrumented) check_classifier(classifier_data(16, 50257, 50304));
  check_classifier(classifier_data(2, 1, 4));
}

// Logits around +-10000, and far apart, neither overflow nor give NaN.
TEST(Classifier, LargeLogits) {
  check_classifier(classifier_data(7, 256, 256, 3.0, 1e4));
  check_classifier(classifier_data(7, 256, 256, 3.0, -1e4));
  const ClassifierData data = classifier_data(9, 61, 64, 1e4);
  const Outputs outputs = run_everywhere([&](cudaStream_t stream) { return run_classifier(data, true, stream); });
  const auto exact = reference<double>(data);
  for (int n = 0; n < data.N; n++)
    EXPECT_NEAR(outputs[0][n], exact.losses[n], 1e-6 * std::fabs(exact.losses[n]) + 1e-6);
  for (float gradient : outputs[1]) EXPECT_TRUE(gradient >= -1.0f && gradient <= 1.0f);
}

// An ignored row: loss 0 and gradient 0 in all Vp columns, whatever the logits hold.
TEST(Classifier, IgnoredRow) {
  ClassifierData data = classifier_data(2, 61, 64);
  data.targets = {-1, -1};
  for (floatX& logit : data.logits) logit = (floatX)NAN;
  const Outputs outputs = run_everywhere([&](cudaStream_t stream) { return run_classifier(data, true, stream); });
  EXPECT_EQ(outputs[0], std::vector<float>(2, 0.0f));
  EXPECT_EQ(outputs[1], std::vector<float>(128, 0.0f));
}

// A NaN among the logits, or a target that does not exist, gives the loss NaN: it cannot go unnoticed.
TEST(Classifier, WrongInputGivesNan) {
  ClassifierData data = classifier_data(3, 61, 64);
  data.logits[40] = (floatX)NAN;
  data.targets = {5, 61, -2};
  for (bool write : {false, true}) {
    const Outputs outputs = run_everywhere([&](cudaStream_t stream) { return run_classifier(data, write, stream); });
    for (float loss : outputs[0]) EXPECT_TRUE(std::isnan(loss));
  }
}

// Rows behind the 2^31st element: 3 rows of 2^30 columns, 2 of them real, in memory that exists only where touched.
TEST(Classifier, IndexBeyond31Bits) {
  if (!kIsCpuDevice) GTEST_SKIP() << "needs memory that is reserved but not there: CPU device only";
  const int N = 3, V = 2, Vp = 1 << 30;
  const size_t bytes = static_cast<size_t>(N) * Vp * sizeof(floatX);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no address space for " << bytes << " bytes";
  floatX* logits = static_cast<floatX*>(memory);
  for (size_t n = 0; n < N; n++) logits[n * Vp] = (floatX)(float)n;  // the other real column is 0
  TestStream stream;
  TestArray<int> targets(stream, std::vector<int>(N, 0));
  TestArray<float> losses(stream, N);
  fused_classifier(losses.data(), logits, targets.data(), N, V, Vp, false, stream);
  const std::vector<float> result = losses.read();
  munmap(memory, bytes);
  for (int n = 0; n < N; n++) EXPECT_NEAR(result[n], std::log1p(std::exp(-n)), 1e-6);
}

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
