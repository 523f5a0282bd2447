// test_device.cu -- kernels on the device: launches, indices, barriers, shared memory, atomics, memory.
//
// The same tests run on a GPU and on the CPU device, there for warps of 1 and of 32, in forward, reverse and shuffled
// thread order (LLMC_ORDER), poisoned, and under the sanitizers. Warps, number types and tensor cores are in
// test_device_warps.cu, streams and events in test_streams.cu, errors that must be found in test_planted_bugs.py.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "test/device_test.h"

namespace {

// ---------------------------------------------------------------- launch

__global__ void mark_indices(int* visits) {
  const dim3 grid(gridDim.x, gridDim.y, gridDim.z), block(blockDim.x, blockDim.y, blockDim.z);
  const size_t number_of_block = blockIdx.x + static_cast<size_t>(grid.x) * (blockIdx.y + grid.y * blockIdx.z);
  const size_t number_of_thread = threadIdx.x + block.x * (threadIdx.y + block.y * threadIdx.z);
  visits[number_of_block * (block.x * block.y * block.z) + number_of_thread] += 1;
}

// Every thread of every block runs exactly once with its own indices, whatever the shape.
TEST_F(DeviceTest, EveryThreadRunsOnce) {
  for (dim3 grid : {dim3(1), dim3(1000), dim3(7, 5, 3), dim3(1, 1, 9)}) {
    for (dim3 block : {dim3(1), dim3(37), dim3(1024), dim3(5, 6, 7), dim3(1, 64), dim3(1, 1, 64)}) {
      const size_t threads = static_cast<size_t>(grid.x) * grid.y * grid.z * block.x * block.y * block.z;
      DeviceArray<int> visits = zeros<int>(threads);
      launch<mark_indices>(grid, block, 0, stream_, visits.data());
      EXPECT_EQ(download(visits, stream_), std::vector<int>(threads, 1));
    }
  }
}

template <class T>
__global__ void store_arguments(T* out, size_t large, const float* pointer, double real, long negative) {
  out[0] = static_cast<T>(large);
  out[1] = static_cast<T>(pointer == nullptr);
  out[2] = static_cast<T>(real);
  out[3] = static_cast<T>(negative);
}

// Arguments convert to the kernel's own parameter types: int to size_t, nullptr to a pointer, float to double.
TEST_F(DeviceTest, ArgumentsConvert) {
  DeviceArray<double> out("out", 4);
  launch<store_arguments<double>>(1, 1, 0, stream_, out.data(), 5, nullptr, 2.5f, -3);
  EXPECT_EQ(download(out, stream_), (std::vector<double>{5, 1, 2.5, -3}));
}

// A shape that no GPU would run is refused with the kernel's name and the reason, and nothing runs.
TEST_F(DeviceTest, InvalidLaunchThrows) {
  DeviceArray<int> visits = zeros<int>(4096);
  EXPECT_THROW(launch<mark_indices>(1, 1025, 0, stream_, visits.data()), Error);
  EXPECT_THROW(launch<mark_indices>(1, 0, 0, stream_, visits.data()), Error);
  EXPECT_THROW(launch<mark_indices>(0, 32, 0, stream_, visits.data()), Error);
  EXPECT_THROW(launch<mark_indices>(dim3(1, 65536), 32, 0, stream_, visits.data()), Error);
  EXPECT_THROW(launch<mark_indices>(1, 32, 49 * 1024, stream_, visits.data()), Error);
  try {
    launch<mark_indices>(1, 2048, 0, stream_, visits.data());
  } catch (const Error& error) {
    EXPECT_NE(strstr(error.what(), "mark_indices"), nullptr) << error.what();
    EXPECT_EQ(error.exit_code(), 1);
  }
  EXPECT_EQ(download(visits, stream_), std::vector<int>(4096, 0));
  allow_dynamic_shared<mark_indices>(64 * 1024);
  launch<mark_indices>(1, 32, 64 * 1024, stream_, visits.data());
  EXPECT_EQ(download(visits, stream_)[31], 1);
}

__global__ void add_one(float* x, size_t n) {
  if (thread_outside(n)) return;
  x[thread_index()] += 1.0f;
}

// Elementwise kernels touch exactly the first n elements.
TEST_F(DeviceTest, ElementwiseStopsAtTheEnd) {
  const size_t room = 3000;
  for (size_t n : {size_t(1), size_t(255), size_t(256), size_t(257), size_t(1023), size_t(1024), size_t(1025), room}) {
    DeviceArray<float> x = zeros<float>(room);
    launch<add_one>(elementwise_grid(n), kElementwiseBlock, 0, stream_, x.data(), n);
    const std::vector<float> result = download(x, stream_);
    EXPECT_EQ(std::accumulate(result.begin(), result.begin() + n, 0.0), static_cast<double>(n));
    EXPECT_EQ(std::accumulate(result.begin() + n, result.end(), 0.0), 0.0);
  }
}

// ---------------------------------------------------------------- barriers and shared memory

__global__ void reverse_block(int* data) {
  DYNAMIC_SHARED(int, s);
  const int threads = blockDim.x * blockDim.y * blockDim.z;
  const int t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  int* mine = data + static_cast<size_t>(blockIdx.x) * threads;
  s[t] = mine[t];
  __syncthreads();
  mine[t] = s[threads - 1 - t];
}

// A barrier separates writes from reads for every block size and shape, in many blocks.
TEST_F(DeviceTest, BarrierReversesBlocks) {
  for (dim3 block : {dim3(1), dim3(2), dim3(31), dim3(33), dim3(256), dim3(1024), dim3(8, 4, 3), dim3(1, 100)}) {
    const int threads = block.x * block.y * block.z, blocks = 50;
    std::vector<int> values(static_cast<size_t>(blocks) * threads);
    std::iota(values.begin(), values.end(), 0);
    DeviceArray<int> data = upload(values);
    launch<reverse_block>(blocks, block, threads * sizeof(int), stream_, data.data());
    for (int b = 0; b < blocks; b++) std::reverse(values.begin() + b * threads, values.begin() + (b + 1) * threads);
    EXPECT_EQ(download(data, stream_), values);
  }
}

/// Pass a number round a ring of threads: two barriers a round. Local variables and arrays must survive each of them.
__global__ void ring(int* out, int rounds) {
  __shared__ int s[100];
  const int t = threadIdx.x;
  int history[8] = {};
  int value = t;
  for (int round = 0; round < rounds; round++) {
    s[t] = value;
    __syncthreads();
    value = s[(t + 1) % 100];
    history[round % 8] = value;
    __syncthreads();
  }
  out[blockIdx.x * 100 + t] =
      value + 1000 * (history[(rounds - 1) % 8] == value) + 1000 * (history[(rounds - 2) % 8] == (value + 99) % 100);
}

TEST_F(DeviceTest, LocalVariablesSurviveBarriers) {
  DeviceArray<int> out("out", 300);
  launch<ring>(3, 100, 0, stream_, out.data(), 57);
  const std::vector<int> result = download(out, stream_);
  for (int i = 0; i < 300; i++) EXPECT_EQ(result[i], (i % 100 + 57) % 100 + 2000);
}

/// Threads return one after the other; those that are left go on meeting at barriers.
__global__ void leave_one_by_one(int* rounds_seen) {
  __shared__ int s[64];
  const int t = threadIdx.x;
  for (int round = 0; round < 64; round++) {
    if (t < round) return;
    s[t] = round;
    __syncthreads();
    if (s[blockDim.x - 1] == round) rounds_seen[t]++;
    __syncthreads();
  }
}

TEST_F(DeviceTest, ReturnedThreadsDoNotBlockOthers) {
  DeviceArray<int> seen = zeros<int>(64);
  launch<leave_one_by_one>(1, 64, 0, stream_, seen.data());
  const std::vector<int> result = download(seen, stream_);
  for (int t = 0; t < 64; t++) EXPECT_EQ(result[t], t + 1);
}

__global__ void row_sums(float* out, const float* in, int columns) {
  DYNAMIC_SHARED(float, partial);
  const float* row = in + static_cast<size_t>(blockIdx.x) * columns;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < columns; i += blockDim.x) sum += row[i];
  partial[threadIdx.x] = sum;
  __syncthreads();
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (static_cast<int>(threadIdx.x) < half) partial[threadIdx.x] += partial[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) out[blockIdx.x] = partial[0];
}

// Several streams run blocks with shared memory at the same time without disturbing each other; same bits every time.
TEST_F(DeviceTest, ConcurrentKernelsKeepTheirSharedMemory) {
  const int rows = 40, columns = 301;
  DeviceArray<float> in = upload(random_floats(rows * columns, 1));
  std::vector<cudaStream_t> streams(4);
  std::vector<DeviceArray<float>> outs;
  for (cudaStream_t& stream : streams) {
    CUDA_CHECK(cudaStreamCreate(&stream));
    outs.emplace_back("out", rows);
  }
  for (int round = 0; round < 5; round++) {
    for (size_t i = 0; i < streams.size(); i++) {
      launch<row_sums>(rows, 64, 64 * sizeof(float), streams[i], outs[i].data(), in.data(), columns);
    }
  }
  const std::vector<float> expected = download(outs[0], streams[0]);
  for (size_t i = 0; i < streams.size(); i++) {
    EXPECT_EQ(download(outs[i], streams[i]), expected);
    CUDA_CHECK(cudaStreamDestroy(streams[i]));
  }
}

// ---------------------------------------------------------------- atomics

__global__ void count(int* integer, float* real, unsigned long long* wide, int* largest, unsigned* claimed) {
  __shared__ int in_block;
  if (threadIdx.x == 0) in_block = 0;
  __syncthreads();
  atomicAdd(&in_block, 1);
  atomicAdd(integer, 1);
  atomicAdd(real, 1.0f);
  atomicAdd(wide, 1ull << 33);
  atomicMax(largest, static_cast<int>(thread_index()));
  if (atomicCAS(claimed, 0u, 1u) == 0u) atomicAdd(claimed, 1u);
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(integer, in_block);
}

// Atomic operations of all threads of all blocks lose nothing.
TEST_F(DeviceTest, Atomics) {
  DeviceArray<int> integer = zeros<int>(1), largest = zeros<int>(1);
  DeviceArray<float> real = zeros<float>(1);
  DeviceArray<unsigned long long> wide = zeros<unsigned long long>(1);
  DeviceArray<unsigned> claimed = zeros<unsigned>(1);
  launch<count>(60, 100, 0, stream_, integer.data(), real.data(), wide.data(), largest.data(), claimed.data());
  EXPECT_EQ(download(integer, stream_)[0], 12000);
  EXPECT_EQ(download(real, stream_)[0], 6000.0f);
  EXPECT_EQ(download(wide, stream_)[0], 6000ull << 33);
  EXPECT_EQ(download(largest, stream_)[0], 5999);
  EXPECT_EQ(download(claimed, stream_)[0], 2u);
}

/// The last block to finish adds up the partial results of all.
__global__ void last_block_sums(int* total, int* partial, unsigned* finished) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = static_cast<int>(blockIdx.x) + 1;
    __threadfence();
    last = atomicInc(finished, gridDim.x - 1) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (!last || threadIdx.x != 0) return;
  *total = 0;
  for (unsigned b = 0; b < gridDim.x; b++) *total += partial[b];
}

TEST_F(DeviceTest, LastBlockPattern) {
  DeviceArray<int> total("total", 1), partial("partial", 100);
  DeviceArray<unsigned> finished = zeros<unsigned>(1);
  for (int round = 0; round < 3; round++) {
    launch<last_block_sums>(100, 32, 0, stream_, total.data(), partial.data(), finished.data());
    EXPECT_EQ(download(total, stream_)[0], 5050);
  }
}

// ---------------------------------------------------------------- memory

// Arrays are 256-byte aligned, counted while they live, and what does not fit is refused with a clear error.
TEST_F(DeviceTest, MemoryIsCountedAndLimited) {
  const size_t before = device_memory_in_use();
  MemoryLedger ledger;
  ledger.predict("a", 4000);
  ledger.predict("b", 999);
  {
    DeviceArray<float> a("a", 1000, &ledger);
    DeviceArray<char> b("b", 1000, &ledger);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(a.data()) % 256, 0u);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(b.data()) % 256, 0u);
    EXPECT_EQ(device_memory_in_use(), before + 5000);
    EXPECT_EQ(ledger.total_allocated(), 5000u);
    EXPECT_EQ(ledger.differences(), std::vector<std::string>{"b"});
    DeviceArray<float> moved = std::move(a);
    EXPECT_EQ(a.data(), nullptr);
    EXPECT_EQ(ledger.allocated("a"), 4000u);
  }
  EXPECT_EQ(device_memory_in_use(), before);
  EXPECT_EQ(ledger.total_allocated(), 0u);
  EXPECT_GE(device_memory_peak(), before + 5000);
  void* pointer = nullptr;
  EXPECT_EQ(cudaMalloc(&pointer, size_t(1) << 50), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_THROW(DeviceArray<float>("activations", size_t(1) << 48), Error);
}

// Copies in both directions and on the device; cudaMemset; zero bytes are fine.
TEST_F(DeviceTest, Copies) {
  std::vector<int> values(1000);
  std::iota(values.begin(), values.end(), 0);
  DeviceArray<int> a = upload(values), b("b", 1000);
  CUDA_CHECK(cudaMemcpyAsync(b.data(), a.data(), b.bytes(), cudaMemcpyDeviceToDevice, stream_));
  CUDA_CHECK(cudaMemsetAsync(b.data() + 500, 0, 100 * sizeof(int), stream_));
  CUDA_CHECK(cudaMemcpyAsync(b.data(), values.data(), 0, cudaMemcpyHostToDevice, stream_));
  std::fill(values.begin() + 500, values.begin() + 600, 0);
  EXPECT_EQ(download(b, stream_), values);
  PinnedArray<int> pinned(1000);
  copy_to_host(pinned.data(), b.data(), 1000, stream_);
  CUDA_CHECK(cudaStreamSynchronize(stream_));
  EXPECT_TRUE(std::equal(pinned.begin(), pinned.end(), values.begin()));
}

#ifndef __CUDACC__

// The CPU device refuses copies that leave an array or name the wrong direction (a GPU may silently overwrite).
TEST_F(DeviceTest, WrongCopiesAreRefused) {
  std::vector<float> host(100);
  DeviceArray<float> a = zeros<float>(100), b = zeros<float>(100);
  volatile size_t too_many = 404;  // volatile: the compiler sees and refuses a constant that does not fit
  EXPECT_EQ(cudaMemcpy(a.data(), host.data(), too_many, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(a.data() + 50, host.data(), too_many / 2, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpyAsync(host.data(), a.data(), 400, cudaMemcpyHostToDevice, stream_), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpyAsync(b.data(), a.data(), 400, cudaMemcpyDeviceToHost, stream_), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemsetAsync(host.data(), 0, 400, stream_), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(host.data()), cudaErrorInvalidValue);
  cudaGetLastError();
}

// Fresh memory is NaN in debug and sanitizer builds and with LLMC_POISON=1.
TEST_F(DeviceTest, FreshMemoryIsPoisoned) {
  if (!cpu_device::settings().poison) GTEST_SKIP() << "not a debug build, LLMC_POISON is not set";
  DeviceArray<float> a("a", 1000);
  for (float x : download(a, stream_)) EXPECT_TRUE(std::isnan(x));
}

// Results do not depend on the number of OS threads.
TEST_F(DeviceTest, SameBitsForAnyTeam) {
  const int rows = 64, columns = 500;
  DeviceArray<float> in = upload(random_floats(rows * columns, 6)), out("out", rows);
  const int before = omp_get_max_threads();
  std::vector<std::vector<float>> results;
  for (int threads : {1, 2, 3, 8}) {
    omp_set_num_threads(threads);
    launch<row_sums>(rows, 64, 64 * sizeof(float), stream_, out.data(), in.data(), columns);
    results.push_back(download(out, stream_));
    EXPECT_EQ(results.back(), results.front());
  }
  omp_set_num_threads(before);
}

#endif

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
