// bench_elementwise.cu -- kernels without barriers on the CPU device, against the same loop in plain OpenMP.
//
//   build/cpu-fp32-w1/bench_elementwise [--pairs N] [--limit RATIO]
//
// Kernel and loop run alternately (their order changes from pair to pair), so that a busy machine slows down both; what
// counts is the CPU time of the process, which does not grow when other programs run. The result is the median of the
// ratios of a pair. The goal is 1.3. With --limit the program fails (exit code 1) above
// it: CI passes 2.0, far above the noise and far below the 4 to 12 of a thread loop that is not vectorised any more.
//
// adamw: 16 bytes read and 12 written per element, bound by memory. gelu: 4 read, 4 written, bound by arithmetic
// (tanhf).
#include <time.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "llmc/device.h"

namespace {

__host__ __device__ __forceinline__ void adamw_element(float* parameter, float* m, float* v, float gradient, size_t i) {
  const float first = 0.9f * m[i] + 0.1f * gradient;
  const float second = 0.95f * v[i] + 0.05f * gradient * gradient;
  m[i] = first;
  v[i] = second;
  parameter[i] -= 3e-4f * (first * 1.1f / (sqrtf(second * 1.05f) + 1e-8f) + 0.1f * parameter[i]);
}

__host__ __device__ __forceinline__ float gelu_element(float x) {
  return 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
}

__global__ void adamw_kernel(float* __restrict__ parameter, float* __restrict__ m, float* __restrict__ v,
                             const float* __restrict__ gradient, size_t n) {
  if (thread_outside(n)) return;
  const size_t i = thread_index();
  adamw_element(parameter, m, v, gradient[i], i);
}

__global__ void gelu_kernel(float* __restrict__ out, const float* __restrict__ in, size_t n) {
  if (thread_outside(n)) return;
  const size_t i = thread_index();
  out[i] = gelu_element(in[i]);
}

/// The yardstick: what a programmer would write without a device layer.
void adamw_loop(float* __restrict__ parameter, float* __restrict__ m, float* __restrict__ v,
                const float* __restrict__ gradient, size_t n) {
#pragma omp parallel for simd schedule(static)
  for (size_t i = 0; i < n; i++) adamw_element(parameter, m, v, gradient[i], i);
}

void gelu_loop(float* __restrict__ out, const float* __restrict__ in, size_t n) {
#pragma omp parallel for simd schedule(static)
  for (size_t i = 0; i < n; i++) out[i] = gelu_element(in[i]);
}

struct Cost {
  double wall_ms, cpu_ms;
};

double clock_ms(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return 1e3 * static_cast<double>(now.tv_sec) + 1e-6 * static_cast<double>(now.tv_nsec);
}

Cost measure(const std::function<void()>& work) {
  const double wall = clock_ms(CLOCK_MONOTONIC), cpu = clock_ms(CLOCK_PROCESS_CPUTIME_ID);
  work();
  return {clock_ms(CLOCK_MONOTONIC) - wall, clock_ms(CLOCK_PROCESS_CPUTIME_ID) - cpu};
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

/// Prints one line and returns the median ratio kernel : loop.
double compare(const char* name, double bytes, int pairs, const std::function<void()>& kernel,
               const std::function<void()>& loop) {
  kernel();
  loop();
  std::vector<double> kernel_ms, loop_ms, ratio;
  for (int i = 0; i < pairs; i++) {
    Cost of_kernel, of_loop;
    if (i % 2 == 0) {
      of_kernel = measure(kernel);
      of_loop = measure(loop);
    } else {
      of_loop = measure(loop);
      of_kernel = measure(kernel);
    }
    kernel_ms.push_back(of_kernel.wall_ms);
    loop_ms.push_back(of_loop.wall_ms);
    ratio.push_back(of_kernel.cpu_ms / of_loop.cpu_ms);
  }
  const double middle = median(ratio);
  printf("%-6s kernel %7.2f ms %6.1f GB/s   loop %7.2f ms %6.1f GB/s   ratio %.2f (%.2f to %.2f)\n", name,
         median(kernel_ms), bytes / median(kernel_ms) * 1e-6, median(loop_ms), bytes / median(loop_ms) * 1e-6, middle,
         *std::min_element(ratio.begin(), ratio.end()), *std::max_element(ratio.begin(), ratio.end()));
  return middle;
}

/// An array of the host for the loop, beside the device's for the kernel.
struct Arrays {
  size_t n;
  std::vector<std::vector<float>> host;
  std::vector<float*> device;

  Arrays(size_t size, int count) : n(size), host(count, std::vector<float>(size, 0.25f)), device(count) {
    for (int i = 0; i < count; i++) {
      CUDA_CHECK(cudaMalloc(&device[i], n * sizeof(float)));
      CUDA_CHECK(cudaMemcpy(device[i], host[i].data(), n * sizeof(float), cudaMemcpyHostToDevice));
    }
  }
};

int run(int pairs, double limit) {
  cudaStream_t stream;
  CUDA_CHECK(cudaStreamCreate(&stream));
  const size_t n = 4 << 20;
  Arrays a(n, 4);
  const double adamw = compare(
      "adamw", 28.0 * n, pairs,
      [&] {
        launch<adamw_kernel>(elementwise_grid(n), kElementwiseBlock, 0, stream, a.device[0], a.device[1], a.device[2],
                             a.device[3], n);
        CUDA_CHECK(cudaStreamSynchronize(stream));
      },
      [&] { adamw_loop(a.host[0].data(), a.host[1].data(), a.host[2].data(), a.host[3].data(), n); });
  const double gelu = compare(
      "gelu", 8.0 * n, pairs,
      [&] {
        launch<gelu_kernel>(elementwise_grid(n), kElementwiseBlock, 0, stream, a.device[1], a.device[3], n);
        CUDA_CHECK(cudaStreamSynchronize(stream));
      },
      [&] { gelu_loop(a.host[1].data(), a.host[3].data(), n); });
  if (std::max(adamw, gelu) <= limit) return 0;
  printf(
      "error: ratio above %.2f: is the thread loop (llmc/cpu/launch.h) still vectorised? compile with -fopt-info-vec\n",
      limit);
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  int pairs = 15;
  double limit = 1e9;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (strcmp(argv[i], "--pairs") == 0) pairs = atoi(argv[i + 1]);
    if (strcmp(argv[i], "--limit") == 0) limit = atof(argv[i + 1]);
  }
  try {
    require_device();
    return run(pairs, limit);
  } catch (const Error& error) {
    fprintf(stderr, "error: %s\n", error.what());
    return error.exit_code();
  }
}
