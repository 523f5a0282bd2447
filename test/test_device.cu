// test_device.cu -- kernels on the device: indices, barriers, collectives, shared memory, atomics, types, tensor cores.
//
// The same tests run on a GPU and on the CPU device, there for warps of 1 and of 32, in forward, reverse and shuffled
// thread order (LLMC_ORDER), poisoned, with late copies, and under the sanitizers. Errors that the CPU device must find
// are in test_planted_bugs.py, streams and events in test_streams.cu.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "llmc/device.h"
#include "llmc/memory.h"
#include "llmc/mma.h"

namespace {

class DeviceTest : public testing::Test {
 protected:
  void SetUp() override {
    require_device();
    CUDA_CHECK(cudaStreamCreate(&stream_));
  }
  void TearDown() override { CUDA_CHECK(cudaStreamDestroy(stream_)); }

  template <class T>
  DeviceArray<T> upload(const std::vector<T>& values) {
    DeviceArray<T> array("test", values.size());
    copy_to_device(array.data(), values.data(), values.size(), stream_);
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    return array;
  }
  template <class T>
  DeviceArray<T> zeros(size_t count) {
    return upload(std::vector<T>(count, T(0)));
  }

  cudaStream_t stream_ = nullptr;
};

std::vector<float> random_floats(size_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

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

// ---------------------------------------------------------------- warps

template <class T>
__global__ void sum_and_max(T* sums, float* maxima, const float* in) {
  const int i = blockIdx.x * blockDim.x * blockDim.y + threadIdx.y * blockDim.x + threadIdx.x;
  sums[i] = warp_sum(static_cast<T>(in[i]));
  maxima[i] = warp_max(in[i]);
}

/// The butterfly of a GPU: v += v of lane ^ 16, 8, 4, 2, 1.
template <class T>
std::vector<T> butterfly(std::vector<T> lanes) {
  for (size_t offset = lanes.size() / 2; offset > 0; offset /= 2) {
    std::vector<T> next(lanes.size());
    for (size_t i = 0; i < lanes.size(); i++) next[i] = lanes[i] + lanes[i ^ offset];
    lanes = next;
  }
  return lanes;
}

// warp_sum (float and double) has the bits of the butterfly in every lane, warp_max the maximum.
TEST_F(DeviceTest, WarpSumAndMax) {
  const int warps = 3 * 4;
  const std::vector<float> in = random_floats(warps * kWarpSize, 2);
  DeviceArray<float> device_in = upload(in), sums("sums", in.size()), maxima("maxima", in.size());
  DeviceArray<double> double_sums("double_sums", in.size());
  launch<sum_and_max<float>>(3, dim3(kWarpSize, 4), 0, stream_, sums.data(), maxima.data(), device_in.data());
  launch<sum_and_max<double>>(3, dim3(kWarpSize, 4), 0, stream_, double_sums.data(), maxima.data(), device_in.data());
  std::vector<float> expected, expected_max;
  std::vector<double> expected_double;
  for (int w = 0; w < warps; w++) {
    const std::vector<float> lanes(in.begin() + w * kWarpSize, in.begin() + (w + 1) * kWarpSize);
    const std::vector<float> sum = butterfly(lanes);
    const std::vector<double> double_sum = butterfly(std::vector<double>(lanes.begin(), lanes.end()));
    expected.insert(expected.end(), sum.begin(), sum.end());
    expected_double.insert(expected_double.end(), double_sum.begin(), double_sum.end());
    expected_max.insert(expected_max.end(), kWarpSize, *std::max_element(lanes.begin(), lanes.end()));
  }
  EXPECT_EQ(download(sums, stream_), expected);
  EXPECT_EQ(download(double_sums, stream_), expected_double);
  EXPECT_EQ(download(maxima, stream_), expected_max);
}

__global__ void shuffles(int* out, int width) {
  const int t = threadIdx.x, n = blockDim.x;
  out[t] = __shfl_xor_sync(0xffffffffu, t, 1, width);
  out[n + t] = __shfl_down_sync(0xffffffffu, t, 3u, width);
  out[2 * n + t] = __shfl_up_sync(0xffffffffu, t, 2u, width);
  out[3 * n + t] = __shfl_sync(0xffffffffu, t, 5, width);
  out[4 * n + t] = static_cast<int>(__shfl_xor_sync(0xffffffffu, static_cast<double>(t), 2, width));
  out[5 * n + t] = static_cast<int>(__ballot_sync(0xffffffffu, t % 3 == 0));
  out[6 * n + t] = __any_sync(0xffffffffu, t % 32 == 7) + 2 * __all_sync(0xffffffffu, t < 32);
}

// Shuffles in sections of 32 and of 8 lanes, and votes, as the CUDA programming guide defines them.
TEST_F(DeviceTest, ShufflesAndVotes) {
  if (kWarpSize == 1) GTEST_SKIP() << "a warp of one thread has nobody to talk to";
  const int n = 64;
  for (int width : {32, 8}) {
    DeviceArray<int> out("out", 7 * n);
    launch<shuffles>(1, n, 0, stream_, out.data(), width);
    const std::vector<int> result = download(out, stream_);
    for (int t = 0; t < n; t++) {
      const int lane = t % width, base = t - lane;
      EXPECT_EQ(result[t], t ^ 1);
      EXPECT_EQ(result[n + t], lane + 3 < width ? t + 3 : t);
      EXPECT_EQ(result[2 * n + t], lane >= 2 ? t - 2 : t);
      EXPECT_EQ(result[3 * n + t], base + 5);
      EXPECT_EQ(result[4 * n + t], t ^ 2);
      EXPECT_EQ(static_cast<unsigned>(result[5 * n + t]), t < 32 ? 0x49249249u : 0x92492492u);
      EXPECT_EQ(result[6 * n + t], 1 + 2 * (t < 32));
    }
  }
}

__global__ void warps_diverge(float* out, const float* in) {
  const int warp = threadIdx.y, i = threadIdx.y * blockDim.x + threadIdx.x;
  float value = in[i];
  for (int k = 0; k <= warp; k++) value = warp_sum(value) * 0.5f;  // each warp meets another number of times
  __syncthreads();
  out[i] = value;
}

// Warps take part in different numbers of collectives between two barriers of the block.
TEST_F(DeviceTest, WarpsMayDiverge) {
  const std::vector<float> in = random_floats(4 * kWarpSize, 3);
  DeviceArray<float> device_in = upload(in), out("out", in.size());
  launch<warps_diverge>(1, dim3(kWarpSize, 4), 0, stream_, out.data(), device_in.data());
  const std::vector<float> result = download(out, stream_);
  for (int w = 0; w < 4; w++) {
    std::vector<float> lanes(in.begin() + w * kWarpSize, in.begin() + (w + 1) * kWarpSize);
    for (int k = 0; k <= w; k++) {
      lanes = butterfly(lanes);
      for (float& value : lanes) value *= 0.5f;
    }
    for (int lane = 0; lane < kWarpSize; lane++) EXPECT_EQ(result[w * kWarpSize + lane], lanes[lane]);
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

// ---------------------------------------------------------------- types and arithmetic

__global__ void through_bf16(float* out, const float* in, size_t n) {
  if (thread_outside(n)) return;
  out[thread_index()] = static_cast<float>(static_cast<__nv_bfloat16>(in[thread_index()]));
}

/// Round to nearest, ties to even, in exact arithmetic: the two neighbours and their distances in double.
float reference_bf16(float x) {
  if (std::isnan(x) || std::isinf(x)) return x;
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint32_t low_bits = bits & 0xffff0000u, high_bits = low_bits + 0x10000u;
  float low, high;
  memcpy(&low, &low_bits, 4);
  memcpy(&high, &high_bits, 4);
  const double high_value = std::isinf(high) ? std::copysign(std::ldexp(1.0, 128), x) : static_cast<double>(high);
  const double below = std::fabs(static_cast<double>(x) - low), above = std::fabs(high_value - x);
  if (below != above) return below < above ? low : high;
  return low_bits & 0x10000u ? high : low;
}

// float -> bf16 -> float for ties, subnormals, overflow, infinities, NaN and two million other bit patterns.
TEST_F(DeviceTest, Bf16RoundsToNearestEven) {
  std::vector<uint32_t> patterns = {0x3f808000u, 0x3f818000u, 0x3f807fffu, 0x3f808001u, 0x7f7fffffu,
                                    0x7f7f7fffu, 0x7f7f8000u, 0x00000001u, 0x00008000u, 0x80018000u,
                                    0x7f800000u, 0xff800000u, 0x7f800001u, 0xffffffffu};
  for (uint64_t bits = 0; bits < (1ull << 32); bits += 2053) patterns.push_back(static_cast<uint32_t>(bits));
  std::vector<float> in(patterns.size());
  memcpy(in.data(), patterns.data(), 4 * in.size());
  if (in.size() > 100000 && sizeof(void*) == 8 && getenv("TSAN_OPTIONS") != nullptr) in.resize(100000);
  DeviceArray<float> device_in = upload(in), out("out", in.size());
  launch<through_bf16>(elementwise_grid(in.size()), kElementwiseBlock, 0, stream_, out.data(), device_in.data(),
                       in.size());
  const std::vector<float> result = download(out, stream_);
  for (size_t i = 0; i < in.size(); i++) {
    const float expected = reference_bf16(in[i]);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(result[i])) << std::hex << patterns[i];
    } else {
      ASSERT_EQ(result[i], expected) << std::hex << patterns[i];
      ASSERT_EQ(std::signbit(result[i]), std::signbit(expected)) << std::hex << patterns[i];
    }
  }
}

__global__ void functions(float* out, const float* in, size_t n) {
  if (thread_outside(n)) return;
  const size_t i = thread_index();
  const float x = in[i];
  out[i] = expf(x);
  out[n + i] = tanhf(x);
  out[2 * n + i] = logf(fabsf(x));
  out[3 * n + i] = rsqrtf(fabsf(x));
}

// expf, tanhf, logf and rsqrtf (vectorised on the CPU) are within 4 units in the last place, also at the edges.
TEST_F(DeviceTest, MathFunctions) {
  std::vector<float> in = random_floats(5000, 4);
  for (size_t i = 0; i < in.size(); i += 2) in[i] *= 20.0f;
  const size_t n = in.size();
  DeviceArray<float> device_in = upload(in), out("out", 4 * n);
  launch<functions>(elementwise_grid(n), kElementwiseBlock, 0, stream_, out.data(), device_in.data(), n);
  const std::vector<float> result = download(out, stream_);
  for (size_t i = 0; i < n; i++) {
    const double x = in[i], a = std::fabs(x);
    const double expected[4] = {std::exp(x), std::tanh(x), std::log(a), 1 / std::sqrt(a)};
    for (int f = 0; f < 4; f++) {
      const double unit = std::ldexp(1.0, std::ilogb(static_cast<float>(expected[f])) - 23);
      ASSERT_NEAR(result[f * n + i], expected[f], 4 * unit) << "function " << f << " of " << in[i];
    }
  }
}

__global__ void extremes(float* out, const float* in) {
  const float nan = in[0], one = in[1], two = in[2];
  out[0] = fmaxf(nan, one);
  out[1] = fmaxf(one, nan);
  out[2] = fminf(nan, two);
  out[3] = fmaxf(one, two);
  out[4] = fminf(one, two);
}

// fmaxf and fminf: the number wins over NaN, as in IEEE 754 and on a GPU.
TEST_F(DeviceTest, ExtremesIgnoreNan) {
  DeviceArray<float> in = upload(std::vector<float>{NAN, 1.0f, 2.0f}), out("out", 5);
  launch<extremes>(1, 1, 0, stream_, out.data(), in.data());
  EXPECT_EQ(download(out, stream_), (std::vector<float>{1, 1, 2, 2, 1}));
}

// ---------------------------------------------------------------- tensor cores, asynchronous copies

#if defined(__CUDACC__) || LLMC_WARP == 32

/// d(16,8) = a(16,16) b(16,8)^T-as-stored: a row-major, b as (8,16) row-major, through shared memory and ldmatrix.
__global__ void tile_product(float* d, const __nv_bfloat16* a, const __nv_bfloat16* b_transposed) {
  __shared__ __align__(16) __nv_bfloat16 s_a[16 * 16], s_b[16 * 16];
  const int lane = threadIdx.x, g = lane / 4, t = 2 * (lane % 4);
  cp_async16(s_a + 8 * lane, a + 8 * lane);
  cp_async_commit();
  if (lane < 16) cp_async16(s_b + 8 * lane, b_transposed + 8 * lane);
  cp_async_commit();
  if (lane >= 16) {
    for (int i = 0; i < 8; i++) s_b[8 * lane + i] = static_cast<__nv_bfloat16>(0.0f);
  }
  cp_async_wait<0>();
  __syncthreads();
  uint32_t a_registers[4], b_registers[4];
  ldmatrix_x4(a_registers, s_a + 16 * (lane % 16) + 8 * (lane / 16));
  ldmatrix_x4(b_registers, s_b + 16 * (lane % 8 + 8 * (lane / 16)) + 8 * (lane / 8 % 2));
  float sum[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  const uint32_t b_pair[2] = {b_registers[0], b_registers[1]};
  mma_m16n8k16(sum, a_registers, b_pair);
  for (int r = 0; r < 4; r++) d[8 * (g + 8 * (r / 2)) + t + r % 2] = sum[r];
}

// mma, ldmatrix and cp.async together compute 1 + a b.
TEST_F(DeviceTest, TileProduct) {
  std::vector<__nv_bfloat16> a(256), b(128);
  std::mt19937 generator(5);
  for (auto& x : a) x = static_cast<__nv_bfloat16>(static_cast<float>(static_cast<int>(generator() % 17)) - 8.0f);
  for (auto& x : b) x = static_cast<__nv_bfloat16>(static_cast<float>(static_cast<int>(generator() % 17)) - 8.0f);
  DeviceArray<__nv_bfloat16> device_a = upload(a), device_b = upload(b);
  DeviceArray<float> d("d", 128);
  launch<tile_product>(1, 32, 0, stream_, d.data(), device_a.data(), device_b.data());
  const std::vector<float> result = download(d, stream_);
  for (int i = 0; i < 16; i++) {
    for (int j = 0; j < 8; j++) {
      float expected = 1.0f;
      for (int k = 0; k < 16; k++) expected += static_cast<float>(a[16 * i + k]) * static_cast<float>(b[16 * j + k]);
      EXPECT_EQ(result[8 * i + j], expected) << i << "," << j;  // small integers: exact in any order
    }
  }
}

__global__ void transpose_tiles(uint32_t* out, const __nv_bfloat16* in) {
  __shared__ __align__(16) __nv_bfloat16 s[16 * 16];
  for (int i = 0; i < 8; i++) s[8 * threadIdx.x + i] = in[8 * threadIdx.x + i];
  __syncthreads();
  uint32_t r[4];
  ldmatrix_x4_trans(r, s + 16 * (threadIdx.x % 8 + 8 * (threadIdx.x / 16)) + 8 * (threadIdx.x / 8 % 2));
  for (int j = 0; j < 4; j++) out[4 * threadIdx.x + j] = r[j];
}

// ldmatrix.trans: lane 4g+t gets rows 2t and 2t+1 of column g of each 8x8 matrix.
TEST_F(DeviceTest, TransposedLoad) {
  std::vector<__nv_bfloat16> in(256);
  for (int i = 0; i < 256; i++) in[i] = static_cast<__nv_bfloat16>(static_cast<float>(i));
  DeviceArray<__nv_bfloat16> device_in = upload(in);
  DeviceArray<uint32_t> out("out", 128);
  launch<transpose_tiles>(1, 32, 0, stream_, out.data(), device_in.data());
  const std::vector<uint32_t> result = download(out, stream_);
  const auto bits_of = [&](int row, int column) {
    uint16_t bits;
    memcpy(&bits, &in[16 * row + column], 2);
    return static_cast<uint32_t>(bits);
  };
  for (int lane = 0; lane < 32; lane++) {
    for (int j = 0; j < 4; j++) {
      const int row = 2 * (lane % 4) + 8 * (j / 2), column = lane / 4 + 8 * (j % 2);
      EXPECT_EQ(result[4 * lane + j], bits_of(row, column) | bits_of(row + 1, column) << 16);
    }
  }
}

/// A double-buffered pipeline of copies: one group ahead, so that cp_async_wait<1> is the right wait.
__global__ void pipelined_sum(float* out, const float* in, int tiles) {
  __shared__ __align__(16) float s[2][128];
  const int t = threadIdx.x;
  float sum = 0.0f;
  cp_async16(&s[0][4 * t], in + 4 * t);
  cp_async_commit();
  for (int tile = 0; tile < tiles; tile++) {
    if (tile + 1 < tiles) cp_async16(&s[(tile + 1) % 2][4 * t], in + 128 * (tile + 1) + 4 * t);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    for (int i = 0; i < 4; i++) sum += s[tile % 2][(4 * t + i + 64) % 128];
    __syncthreads();
  }
  out[t] = sum;
}

TEST_F(DeviceTest, PipelinedCopies) {
  const int tiles = 9;
  std::vector<float> in(128 * tiles);
  std::iota(in.begin(), in.end(), 0.0f);
  DeviceArray<float> device_in = upload(in), out("out", 32);
  launch<pipelined_sum>(1, 32, 0, stream_, out.data(), device_in.data(), tiles);
  const std::vector<float> result = download(out, stream_);
  EXPECT_EQ(std::accumulate(result.begin(), result.end(), 0.0), 1152.0 * 1151 / 2);
}

#endif

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
