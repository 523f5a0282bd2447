// test_device_warps.cu -- warp collectives, number types and their functions, tensor cores, asynchronous copies.
//
// Runs on a GPU and on the CPU device, there for warps of 1 and of 32 and in every test mode (LLMC_ORDER, LLMC_POISON,
// LLMC_LATE_ASYNC). Reference values are computed on the host in exact or double arithmetic.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "llmc/mma.h"
#include "test/device_test.h"

namespace {

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

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
