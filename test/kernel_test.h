// kernel_test.h -- what every kernel test shares: data, device arrays, computed tolerances, "the same bits every time".
//
// A kernel test has three parts:
//   1. inputs: random_values(...) rounded to the kernel's type, uploaded into a TestArray. Outputs start as NaN, and
//      the elements behind each array are checked, so an element that is not written or written too far shows.
//   2. a reference written once as a template on the arithmetic type. <double> is the truth; <float> is the plain
//      program in the precision of the kernel. expect_close allows the kernel twice the error of the plain program
//      (the rule of the flash-attention tests): the limit is computed from the data, never guessed.
//   3. run_everywhere(...) repeats the launch with other numbers of OS threads and requires the same bits.
#pragma once

#include <gtest/gtest.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "llmc/check.h"
#include "llmc/device.h"

/// Sanitizer builds are 20 to 100 times slower: tests leave out what only repeats or enlarges.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kInstrumented = true;
#else
constexpr bool kInstrumented = false;
#endif

// ---------------------------------------------------------------------------------------------------------------------
// data

/// n values of N(mean, scale^2), a pure function of the arguments.
inline std::vector<float> random_values(size_t n, uint64_t seed, double scale = 1.0, double mean = 0.0) {
  std::mt19937_64 engine(seed * 0x9E3779B97F4A7C15ull + 1);
  std::normal_distribution<double> normal(mean, scale);
  std::vector<float> values(n);
  for (float& value : values) value = static_cast<float>(normal(engine));
  return values;
}

/// n integers in [0, limit).
inline std::vector<int> random_integers(size_t n, uint64_t seed, int limit) {
  std::mt19937_64 engine(seed * 0x9E3779B97F4A7C15ull + 2);
  std::vector<int> values(n);
  for (int& value : values) value = static_cast<int>(engine() % static_cast<uint64_t>(limit));
  return values;
}

/// Elementwise conversion with rounding to nearest: convert<floatX>(floats), convert<double>(floatXs), ...
template <class To, class From>
inline std::vector<To> convert(const std::vector<From>& values) {
  std::vector<To> result(values.size());
  for (size_t i = 0; i < values.size(); i++) {
    if constexpr (std::is_same_v<From, double>) {
      result[i] = static_cast<To>(static_cast<float>(values[i]));
    } else {
      result[i] = static_cast<To>(values[i]);
    }
  }
  return result;
}

template <>
inline std::vector<double> convert<double, double>(const std::vector<double>& values) {
  return values;
}

// ---------------------------------------------------------------------------------------------------------------------
// device memory

/// An array in device memory, followed by a guard that nobody may write. Starts as NaN (all bits set) or as `values`.
template <class T>
class TestArray {
 public:
  TestArray(cudaStream_t stream, size_t count) : stream_(stream), count_(count) {
    CUDA_CHECK(cudaMalloc(reinterpret_cast<void**>(&data_), bytes()));
    poison();
  }
  TestArray(cudaStream_t stream, const std::vector<T>& values) : TestArray(stream, values.size()) { write(values); }
  TestArray(const TestArray&) = delete;
  TestArray& operator=(const TestArray&) = delete;
  ~TestArray() {
    cudaStreamSynchronize(stream_);
    cudaFree(data_);
  }

  T* data() { return data_; }
  size_t size() const { return count_; }

  void poison() {
    CUDA_CHECK(cudaMemsetAsync(data_, 0xff, bytes(), stream_));
    CUDA_CHECK(cudaStreamSynchronize(stream_));
  }
  void write(const std::vector<T>& values) {
    assert(values.size() == count_);
    if (count_ == 0) return;
    CUDA_CHECK(cudaMemcpyAsync(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice, stream_));
    CUDA_CHECK(cudaStreamSynchronize(stream_));
  }
  /// Waits for the stream, copies back, checks the guard.
  std::vector<T> read() const {
    std::vector<unsigned char> raw(bytes());
    CUDA_CHECK(cudaMemcpyAsync(raw.data(), data_, bytes(), cudaMemcpyDeviceToHost, stream_));
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    for (size_t i = count_ * sizeof(T); i < raw.size(); i++) {
      EXPECT_EQ(raw[i], 0xff) << "written behind the end of a device array, byte " << i - count_ * sizeof(T);
      if (raw[i] != 0xff) break;
    }
    std::vector<T> values(count_);
    if (count_ > 0) memcpy(static_cast<void*>(values.data()), raw.data(), count_ * sizeof(T));
    return values;
  }
  /// read() as float (exact for float and bf16).
  std::vector<float> read_float() const { return convert<float>(read()); }

 private:
  static constexpr size_t kGuardBytes = 64;
  size_t bytes() const { return count_ * sizeof(T) + kGuardBytes; }

  cudaStream_t stream_;
  size_t count_;
  T* data_ = nullptr;
};

/// A stream for the length of a test.
class TestStream {
 public:
  TestStream() { CUDA_CHECK(cudaStreamCreate(&stream_)); }
  ~TestStream() { cudaStreamDestroy(stream_); }
  TestStream(const TestStream&) = delete;
  TestStream& operator=(const TestStream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// ---------------------------------------------------------------------------------------------------------------------
// tolerance

/// Distance of two vectors: Euclidean relative to the reference, and the largest single difference.
struct Distance {
  double relative;
  double largest;
};

template <class T>
inline Distance distance(const std::vector<T>& values, const std::vector<double>& reference) {
  double difference = 0, norm = 0, largest = 0;
  for (size_t i = 0; i < reference.size(); i++) {
    const double d = static_cast<double>(static_cast<float>(values[i])) - reference[i];
    difference += d * d;
    norm += reference[i] * reference[i];
    if (!(std::fabs(d) <= largest)) largest = std::fabs(d);
  }
  return {std::sqrt(difference) / (norm > 0 ? std::sqrt(norm) : 1.0), largest};
}

inline double largest_magnitude(const std::vector<double>& values) {
  double largest = 0;
  for (double value : values) largest = std::max(largest, std::fabs(value));
  return largest;
}

/// The kernel's `values` may be twice as far from `exact` as the same formula computed plainly in float and stored as T
/// (`plain`), plus one rounding of float. The largest single difference is bounded too, so that one wrong element
/// among many cannot hide in the norm; there the factor is 4, because the maximum of few roundings fluctuates more.
template <class T>
inline void expect_close(const std::string& what, const std::vector<T>& values, const std::vector<double>& exact,
                         const std::vector<float>& plain) {
  ASSERT_EQ(values.size(), exact.size()) << what;
  ASSERT_EQ(plain.size(), exact.size()) << what;
  const double kUnit = std::ldexp(1.0, -24);
  const Distance rounding = distance(convert<T>(convert<float>(exact)), exact);
  const Distance allowed = distance(convert<T>(plain), exact);
  const Distance actual = distance(values, exact);
  const double relative_limit = 2 * std::max(allowed.relative, rounding.relative) + kUnit;
  const double largest_limit = 4 * std::max(allowed.largest, rounding.largest) + kUnit * largest_magnitude(exact);
  EXPECT_LE(actual.relative, relative_limit) << what << ": relative error";
  EXPECT_LE(actual.largest, largest_limit) << what << ": largest error";
}

/// The same without a plain twin, for sums of `terms` products: a float sum in any order is allowed a random walk of
/// roundings, 2^-24 sqrt(terms) (relative to the norm of the result), doubled.
template <class T>
inline void expect_close(const std::string& what, const std::vector<T>& values, const std::vector<double>& exact,
                         size_t terms) {
  ASSERT_EQ(values.size(), exact.size()) << what;
  const double kUnit = std::ldexp(1.0, -24);
  const double walk = kUnit * std::sqrt(static_cast<double>(terms) + 1);
  const Distance rounding = distance(convert<T>(convert<float>(exact)), exact);
  const Distance actual = distance(values, exact);
  EXPECT_LE(actual.relative, 2 * (rounding.relative + walk)) << what << ": relative error";
  EXPECT_LE(actual.largest, 4 * (rounding.largest + walk * largest_magnitude(exact))) << what << ": largest error";
}

/// Same length and same bits (so NaN equals NaN).
template <class T>
inline bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || memcmp(static_cast<const void*>(a.data()),
                                                      static_cast<const void*>(b.data()), a.size() * sizeof(T)) == 0);
}

// ---------------------------------------------------------------------------------------------------------------------
// the same bits every time

/// Results of one run of a test body: one vector of floats for each output.
using Outputs = std::vector<std::vector<float>>;

/// Number of OS threads that work on the kernels launched from here on (CPU device; no effect on a GPU).
inline void set_kernel_threads(int threads) {
#ifdef _OPENMP
  omp_set_num_threads(threads);
#else
  (void)threads;
#endif
}

/// Runs `body(stream)` (set up inputs, launch, return the outputs) three times, the last two with one and with three OS
/// threads, and requires the same bits each time. Returns the outputs. (The order of the CUDA threads within a block is
/// chosen for the whole program: LLMC_ORDER, see llmc/cpu/settings.h; test.sh runs every kernel test in several.)
template <class Body>
inline Outputs run_everywhere(const Body& body) {
  TestStream stream;
  const Outputs first = body(static_cast<cudaStream_t>(stream));
  if (kInstrumented) return first;
  for (int threads : {1, 3}) {
    set_kernel_threads(threads);
    const Outputs again = body(static_cast<cudaStream_t>(stream));
    EXPECT_EQ(first.size(), again.size());
    for (size_t i = 0; i < first.size() && i < again.size(); i++) {
      EXPECT_TRUE(same_bits(first[i], again[i]))
          << "output " << i << " differs in a run with " << threads << " threads";
    }
  }
  set_kernel_threads(2);
  return first;
}
