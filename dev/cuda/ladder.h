// ladder.h -- what the ladders share: a rung, its check against float64, its time beside a ceiling of the same run.
//
// A ladder is a folder of numbered files, each a self-contained way to compute the same thing and one idea faster than
// the file before; the last is the production header. bench.cu lists them as rungs and calls climb(): every rung is
// first verified, then timed. The ceiling is a device-to-device copy, because these kernels are bound by memory.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "llmc/device.h"
#include "llmc/random.h"

/// One way to compute the result.
struct Rung {
  std::string name;           // "3 warp per row"
  std::string adds;           // what it adds to the rung before, in one sentence
  std::function<void()> run;  // queues the kernels
};

/// What the results are compared with: `read` fetches them (any number of outputs, as doubles).
struct LadderCheck {
  std::function<void()> reset;                             // inputs as they were, outputs NaN
  std::function<std::vector<std::vector<double>>()> read;  // outputs after a run
  std::vector<std::vector<double>> exact;                  // the same in float64
  int terms;                                               // of the longest sum
};

/// The value of `--name N` among the arguments, or `otherwise`.
inline int option(int argc, char** argv, const char* name, int otherwise) {
  for (int i = 1; i + 1 < argc; i++) {
    if (strcmp(argv[i], name) == 0) return std::max(1, atoi(argv[i + 1]));
  }
  return otherwise;
}

/// N(mean, scale^2) rounded to T, from a fixed seed.
template <class T>
inline std::vector<T> ladder_values(size_t n, uint64_t stream, double scale = 1.0, double mean = 0.0) {
  std::vector<T> values(n);
  for (size_t i = 0; i < n; i++) values[i] = (T)(float)(mean + scale * random_normal(7, stream, i));
  return values;
}

/// Device memory for the length of the program's scope.
template <class T>
class LadderArray {
 public:
  LadderArray(cudaStream_t stream, size_t n) : stream_(stream), host_(n) {
    CUDA_CHECK(cudaMalloc(reinterpret_cast<void**>(&data_), n * sizeof(T)));
  }
  LadderArray(const LadderArray&) = delete;
  LadderArray& operator=(const LadderArray&) = delete;
  ~LadderArray() { cudaFree(data_); }
  T* data() { return data_; }
  void write(const std::vector<T>& values) {
    CUDA_CHECK(cudaMemcpyAsync(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice, stream_));
    CUDA_CHECK(cudaStreamSynchronize(stream_));
  }
  void poison() {
    CUDA_CHECK(cudaMemsetAsync(data_, 0xff, host_.size() * sizeof(T), stream_));
    CUDA_CHECK(cudaStreamSynchronize(stream_));
  }
  std::vector<double> read() {
    CUDA_CHECK(cudaMemcpyAsync(host_.data(), data_, host_.size() * sizeof(T), cudaMemcpyDeviceToHost, stream_));
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    std::vector<double> values(host_.size());
    for (size_t i = 0; i < values.size(); i++) values[i] = (float)host_[i];
    return values;
  }

 private:
  cudaStream_t stream_;
  std::vector<T> host_;
  T* data_ = nullptr;
};

/// |values - exact| / |exact|; NaN if any value is NaN.
inline double relative_error(const std::vector<double>& values, const std::vector<double>& exact) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < exact.size(); i++) {
    difference += (values[i] - exact[i]) * (values[i] - exact[i]);
    norm += exact[i] * exact[i];
  }
  return std::sqrt(difference) / (norm > 0 ? std::sqrt(norm) : 1.0);
}

/// Fastest of `repeats` runs in milliseconds, after one that is not counted: other programs only make a run slower.
inline double fastest_ms(const std::function<void()>& run, int repeats, cudaStream_t stream) {
  double fastest = INFINITY;
  for (int i = 0; i <= repeats; i++) {
    CUDA_CHECK(cudaStreamSynchronize(stream));
    const auto start = std::chrono::steady_clock::now();
    run();
    CUDA_CHECK(cudaStreamSynchronize(stream));
    const std::chrono::duration<double, std::milli> ms = std::chrono::steady_clock::now() - start;
    if (i > 0) fastest = std::min(fastest, ms.count());
  }
  return fastest;
}

/// GB/s (read + written) of a device-to-device copy that moves `bytes` in all.
inline double copy_bandwidth(size_t bytes, int repeats, cudaStream_t stream) {
  LadderArray<char> from(stream, bytes / 2), to(stream, bytes / 2);
  from.poison();
  const auto copy = [&] {
    CUDA_CHECK(cudaMemcpyAsync(to.data(), from.data(), bytes / 2, cudaMemcpyDeviceToDevice, stream));
  };
  return bytes / fastest_ms(copy, repeats, stream) * 1e-6;
}

/// Verifies each rung, then times it. `bytes`: the least traffic that the computation needs. Returns the exit code.
/// A rung is right if its error is at most four times that of rounding the exact result to floatX, plus the random walk
/// of the roundings of its longest float sum.
inline int climb(const std::vector<Rung>& rungs, const LadderCheck& check, size_t bytes, int repeats,
                 cudaStream_t stream) {
  const double copy = copy_bandwidth(bytes, repeats, stream);
  const double walk = std::ldexp(1.0, -23) * std::sqrt(static_cast<double>(check.terms));
  const double limit = 4 * (sizeof(floatX) == 2 ? 1.66e-3 : 2.5e-8) + walk;
  printf("%s, %s, copy of the same size %.1f GB/s\n", device_name().c_str(), kPrecisionName, copy);
  printf("%-26s %10s %9s %9s %10s\n", "rung", "ms", "GB/s", "% of copy", "error");
  bool right = true;
  for (const Rung& rung : rungs) {
    check.reset();
    rung.run();
    const auto outputs = check.read();
    double error = 0;
    for (size_t i = 0; i < outputs.size(); i++) {
      const double e = relative_error(outputs[i], check.exact[i]);
      error = e > error || std::isnan(e) ? e : error;
    }
    const bool ok = error <= limit;
    right = right && ok;
    const double ms = fastest_ms(rung.run, repeats, stream);
    printf("%-26s %10.3f %9.1f %8.0f%% %10.1e%s\n", rung.name.c_str(), ms, bytes / ms * 1e-6,
           100 * (bytes / ms * 1e-6) / copy, error, ok ? "" : "  WRONG");
    printf("    %s\n", rung.adds.c_str());
  }
  return right ? 0 : 1;
}
