// planted_bugs.cu -- kernels with one deliberate error each, and their corrected twins.
//
//   planted_bugs BUG [fixed]     prints `result X` and ends; test/test_planted_bugs.py checks what is reported
//
// Every kernel takes a template argument `kFixed`. With false it contains the error that its name says; with true the
// error is gone and every tool must stay silent. The errors are those that are made in practice and that a plain run,
// on a CPU or on a GPU, usually does not show.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "llmc/device.h"
#include "llmc/mma.h"

namespace {

constexpr int kThreads = 128;

// ---------------------------------------------------------------- beyond the end of an array

template <bool kFixed>
__global__ void write_past_global(float* out, const float*, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (kFixed ? i < n : i <= n) out[i] = 1.0f;
}

template <bool kFixed>
__global__ void read_past_global(float* out, const float* in, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = in[kFixed ? i : i + 1];
}

template <bool kFixed>
__global__ void write_past_static_shared(float* out, const float* in, int) {
  __shared__ float s[kThreads];
  const int t = threadIdx.x;
  s[kFixed ? t : t + 1] = in[t];
  __syncthreads();
  out[t] = s[t];
}

template <bool kFixed>
__global__ void read_past_static_shared(float* out, const float* in, int) {
  __shared__ float s[kThreads];
  const int t = threadIdx.x;
  s[t] = in[t];
  __syncthreads();
  out[t] = s[kFixed ? kThreads - 1 - t : t + 1];
}

template <bool kFixed>
__global__ void write_past_dynamic_shared(float* out, const float* in, int) {
  DYNAMIC_SHARED(float, s);
  const int t = threadIdx.x;
  s[kFixed ? t : t + 1] = in[t];
  __syncthreads();
  out[t] = s[t];
}

template <bool kFixed>
__global__ void read_past_dynamic_shared(float* out, const float* in, int) {
  DYNAMIC_SHARED(float, s);
  const int t = threadIdx.x;
  s[t] = in[t];
  __syncthreads();
  out[t] = s[kFixed ? kThreads - 1 - t : t + 1];
}

// ---------------------------------------------------------------- races

template <bool kFixed>
__global__ void missing_barrier(float* out, const float* in, int) {
  __shared__ float s[kThreads];
  const int t = threadIdx.x;
  s[t] = in[t];
  if (kFixed) __syncthreads();
  out[t] = s[kThreads - 1 - t];
}

/// The classic: a block reduction in a loop, whose scratch is overwritten while another warp still reads it.
template <bool kFixed>
__global__ void reused_scratch(float* out, const float* in, int) {
  __shared__ float partial[kThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int row = 0; row < 4; row++) {
    const float sum = warp_sum(in[row * kThreads + threadIdx.x]);
    if (lane == 0) partial[warp] = sum;
    __syncthreads();
    const float total = warp_sum(lane < kThreads / 32 ? partial[lane] : 0.0f);
    if (threadIdx.x == 0) out[row] = total;
    if (kFixed) __syncthreads();
  }
}

template <bool kFixed>
__global__ void blocks_race(float* out, const float*, int) {
  if (threadIdx.x != 0) return;
  if (kFixed) {
    atomicAdd(&out[0], 1.0f);
  } else {
    out[0] += 1.0f;
  }
}

template <bool kFixed>
__global__ void missing_async_wait(float* out, const float* in, int) {
  DYNAMIC_SHARED(float, s);
  const int t = threadIdx.x;
  if (t < kThreads / 4) cp_async16(s + 4 * t, in + 4 * t);
  cp_async_commit();
  if (kFixed) cp_async_wait<0>();
  __syncthreads();
  out[t] = s[t];
}

/// The wait is there, the barrier behind it is not: other threads' copies may still be on their way.
template <bool kFixed>
__global__ void missing_barrier_after_async(float* out, const float* in, int) {
  DYNAMIC_SHARED(float, s);
  const int t = threadIdx.x;
  if (t < kThreads / 4) cp_async16(s + 4 * t, in + 4 * t);
  cp_async_commit();
  cp_async_wait<0>();
  if (kFixed) __syncthreads();
  out[t] = s[t];
}

// ---------------------------------------------------------------- barriers and memory

/// Half of the threads wait for the block, the other half for their whole warp: nobody ever goes on.
template <bool kFixed>
__global__ void divergent_barrier(float* out, const float* in, int) {
  const int t = threadIdx.x;
  float value = in[t];
  if (kFixed || t % 32 >= 16) value = warp_sum(value);
  __syncthreads();
  out[t] = value;
}

template <bool kFixed>
__global__ void uninitialised_read(float* out, const float* in, int) {
  const int t = threadIdx.x;
  if (kFixed) out[t] = 0.0f;
  out[t] += in[t];
}

template <bool kFixed>
__global__ void uninitialised_shared(float* out, const float* in, int) {
  DYNAMIC_SHARED(float, s);
  const int t = threadIdx.x;
  if (kFixed || t > 0) s[t] = in[t];
  __syncthreads();
  out[t] = s[t ^ 1];
}

// ---------------------------------------------------------------- host code

__global__ void copy_kernel(float* out, const float* in, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = in[i];
}

struct Device {
  cudaStream_t first, second;
  float *out, *in;  // out: never written by the host, in: 0, 1, 2, ...
  int n = 1000;     // not a multiple of the block, so that guards matter
};

Device make_device() {
  Device device;
  CUDA_CHECK(cudaStreamCreateWithFlags(&device.first, cudaStreamNonBlocking));
  CUDA_CHECK(cudaStreamCreateWithFlags(&device.second, cudaStreamNonBlocking));
  CUDA_CHECK(cudaMalloc(&device.out, device.n * sizeof(float)));
  CUDA_CHECK(cudaMalloc(&device.in, device.n * sizeof(float)));
  std::vector<float> values(device.n);
  for (int i = 0; i < device.n; i++) values[i] = static_cast<float>(i);
  CUDA_CHECK(cudaMemcpy(device.in, values.data(), device.n * sizeof(float), cudaMemcpyHostToDevice));
  return device;
}

/// One stream writes, the other reads; the event between them is missing.
void missing_event(const Device& device, bool fixed) {
  cudaEvent_t written;
  CUDA_CHECK(cudaEventCreateWithFlags(&written, cudaEventDisableTiming));
  CUDA_CHECK(cudaMemsetAsync(device.out, 0, device.n * sizeof(float), device.first));
  CUDA_CHECK(cudaStreamSynchronize(device.first));
  launch<copy_kernel>(dim3(8), dim3(kThreads), 0, device.first, device.out, device.in, device.n);
  CUDA_CHECK(cudaEventRecord(written, device.first));
  if (fixed) CUDA_CHECK(cudaStreamWaitEvent(device.second, written));
  std::vector<float> values(device.n);
  CUDA_CHECK(
      cudaMemcpyAsync(values.data(), device.out, device.n * sizeof(float), cudaMemcpyDeviceToHost, device.second));
  CUDA_CHECK(cudaStreamSynchronize(device.second));
  printf("result %g\n", values[device.n - 1]);
  CUDA_CHECK(cudaDeviceSynchronize());
  CUDA_CHECK(cudaEventDestroy(written));
}

/// The host reads what a stream copies to it, without waiting for the stream.
void missing_synchronize(const Device& device, bool fixed) {
  std::vector<float> values(device.n, 0.0f);
  CUDA_CHECK(cudaMemcpyAsync(values.data(), device.in, device.n * sizeof(float), cudaMemcpyDeviceToHost, device.first));
  if (fixed) CUDA_CHECK(cudaStreamSynchronize(device.first));
  printf("result %g\n", values[device.n - 1]);
  CUDA_CHECK(cudaDeviceSynchronize());
}

void host_access(const Device& device, bool fixed) {
  float value = 0;
  if (fixed) {
    CUDA_CHECK(cudaMemcpy(&value, device.in + 7, sizeof value, cudaMemcpyDeviceToHost));
  } else {
    value = *(device.in + 7);
  }
  printf("result %g\n", value);
}

void use_after_free(const Device& device, bool fixed) {
  float* array;
  CUDA_CHECK(cudaMalloc(&array, device.n * sizeof(float)));
  if (!fixed) CUDA_CHECK(cudaFree(array));
  launch<copy_kernel>(dim3(8), dim3(kThreads), 0, device.first, array, device.in, device.n);
  CUDA_CHECK(cudaStreamSynchronize(device.first));
  if (fixed) CUDA_CHECK(cudaFree(array));
  printf("result 0\n");
}

/// Runs the kernel and prints the sum of what it wrote.
template <auto kBroken, auto kFixed>
void run_kernel(const Device& device, bool fixed, int blocks, int written) {
  const size_t shared_bytes = kThreads * sizeof(float);
  if (fixed) {
    launch<kFixed>(dim3(blocks), dim3(kThreads), shared_bytes, device.first, device.out, device.in, device.n);
  } else {
    launch<kBroken>(dim3(blocks), dim3(kThreads), shared_bytes, device.first, device.out, device.in, device.n);
  }
  std::vector<float> values(device.n);
  CUDA_CHECK(
      cudaMemcpyAsync(values.data(), device.out, device.n * sizeof(float), cudaMemcpyDeviceToHost, device.first));
  CUDA_CHECK(cudaStreamSynchronize(device.first));
  double sum = 0;
  for (int i = 0; i < written; i++) sum += values[i];
  printf("result %g\n", sum);
}

#define KERNEL(name, blocks, written) \
  if (bug == #name) return run_kernel<name<false>, name<true>>(device, fixed, blocks, written), 0
#define HOST(name) \
  if (bug == #name) return name(device, fixed), 0

int run(const std::string& bug, bool fixed) {
  const Device device = make_device();
  KERNEL(write_past_global, 8, 1000);
  KERNEL(read_past_global, 8, 1000);
  KERNEL(write_past_static_shared, 1, kThreads);
  KERNEL(read_past_static_shared, 1, kThreads);
  KERNEL(write_past_dynamic_shared, 1, kThreads);
  KERNEL(read_past_dynamic_shared, 1, kThreads);
  KERNEL(missing_barrier, 1, kThreads);
  KERNEL(reused_scratch, 1, 4);
  if (bug == "blocks_race") CUDA_CHECK(cudaMemset(device.out, 0, device.n * sizeof(float)));
  KERNEL(blocks_race, 8, 1);
  KERNEL(missing_async_wait, 1, kThreads);
  KERNEL(missing_barrier_after_async, 1, kThreads);
  KERNEL(divergent_barrier, 1, kThreads);
  KERNEL(uninitialised_read, 1, kThreads);
  KERNEL(uninitialised_shared, 1, kThreads);
  HOST(missing_event);
  HOST(missing_synchronize);
  HOST(host_access);
  HOST(use_after_free);
  fprintf(stderr, "error: no bug named %s\n", bug.c_str());
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    fprintf(stderr, "usage: planted_bugs BUG [fixed]\n");
    return 2;
  }
  return run(argv[1], argc > 2 && strcmp(argv[2], "fixed") == 0);
}
