// test_random.cpp -- the generator against its published answers, and the statistics that its users rely on.
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

#include "llmc/random.h"

static void expect_words(const RandomWords& words, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  EXPECT_EQ(words.x, x);
  EXPECT_EQ(words.y, y);
  EXPECT_EQ(words.z, z);
  EXPECT_EQ(words.w, w);
}

// Philox4x32-10 gives the three published known answers (kat_vectors of Random123).
TEST(Random, KnownAnswers) {
  expect_words(philox4x32_10({0, 0, 0, 0}, 0, 0), 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8);
  const uint32_t ones = 0xffffffffu;
  expect_words(philox4x32_10({ones, ones, ones, ones}, ones, ones), 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd);
  expect_words(philox4x32_10({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0xa4093822, 0x299f31d0), 0xd16cfe09,
               0x94fdcceb, 0x5001e420, 0x24126ea1);
}

// Every bit of seed, stream and counter reaches the generator, each in its own place.
TEST(Random, EveryKeyBitMatters) {
  std::set<uint64_t> seen;
  const auto insert = [&](uint64_t seed, uint64_t stream, uint64_t counter) {
    const RandomWords words = random_u32x4(seed, stream, counter);
    EXPECT_TRUE(seen.insert(static_cast<uint64_t>(words.x) << 32 | words.y).second);
  };
  insert(0, 0, 0);
  for (int bit = 0; bit < 64; bit++) {
    insert(1ull << bit, 0, 0);
    insert(0, 1ull << bit, 0);
    insert(0, 0, 1ull << bit);
  }
}

// Uniform numbers lie in [0, 1) and have the moments 1/2, 1/12 and no correlation between neighbours or streams.
TEST(Random, UniformMoments) {
  const int n = 200000;
  double sum = 0, square = 0, neighbours = 0, streams = 0;
  for (int i = 0; i < n; i++) {
    const double u = random_uniform(7, 3, i);
    ASSERT_GE(u, 0.0);
    ASSERT_LT(u, 1.0);
    sum += u - 0.5;
    square += (u - 0.5) * (u - 0.5);
    neighbours += (u - 0.5) * (random_uniform(7, 3, i + 1) - 0.5);
    streams += (u - 0.5) * (random_uniform(7, 4, i) - 0.5);
  }
  const double kFiveSigma = 5.0 / std::sqrt(n);
  EXPECT_LT(std::fabs(sum / n), kFiveSigma * std::sqrt(1.0 / 12));
  EXPECT_LT(std::fabs(square / n - 1.0 / 12), kFiveSigma * std::sqrt(1.0 / 180));
  EXPECT_LT(std::fabs(neighbours / n), kFiveSigma / 12);
  EXPECT_LT(std::fabs(streams / n), kFiveSigma / 12);
}

// Normal numbers have the moments 0, 1, 0, 3 and no correlation between neighbours or tensors.
TEST(Random, NormalMoments) {
  const int n = 200000;
  double moment[5] = {0, 0, 0, 0, 0}, neighbours = 0, tensors = 0;
  for (int i = 0; i < n; i++) {
    const double z = random_normal(42, 5, i);
    ASSERT_LT(std::fabs(z), 8.6);
    double power = 1;
    for (double& m : moment) {
      m += power;
      power *= z;
    }
    neighbours += z * random_normal(42, 5, i + 1);
    tensors += z * random_normal(42, 6, i);
  }
  const double kFiveSigma = 5.0 / std::sqrt(n);
  EXPECT_LT(std::fabs(moment[1] / n), kFiveSigma);
  EXPECT_LT(std::fabs(moment[2] / n - 1), kFiveSigma * std::sqrt(2.0));
  EXPECT_LT(std::fabs(moment[3] / n), kFiveSigma * std::sqrt(15.0));
  EXPECT_LT(std::fabs(moment[4] / n - 3), kFiveSigma * std::sqrt(96.0));
  EXPECT_LT(std::fabs(neighbours / n), kFiveSigma);
  EXPECT_LT(std::fabs(tensors / n), kFiveSigma);
}

static float float_from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// The mean of 1e5 stochastic roundings is the value itself, within 5 sigma, for both signs and several magnitudes.
TEST(StochasticRounding, Unbiased) {
  const int n = 100000;
  for (float value : {1.001f, -1.001f, 0.0123456f, -3.9999f, 1e-30f, 12345.678f}) {
    double sum = 0;
    const double lower = stochastic_round_bf16(value, 0), upper = stochastic_round_bf16(value, 0xffff);
    for (int i = 0; i < n; i++) {
      const float rounded = stochastic_round_bf16(value, random_u32x4(1, 2, i).x);
      ASSERT_TRUE(rounded == lower || rounded == upper);
      sum += static_cast<double>(rounded) - value;
    }
    const double p = (value - lower) / (upper - lower);
    const double sigma = std::fabs(upper - lower) * std::sqrt(p * (1 - p) / n);
    EXPECT_LT(std::fabs(sum / n), 5 * sigma) << value;
  }
}

// Roundings of neighbouring elements and of consecutive steps are uncorrelated (llm.c once reused one seed, PR 597).
TEST(StochasticRounding, NeighboursAndStepsUncorrelated) {
  const int n = 100000;
  const float value = float_from_bits(0x3f808000u);  // half way: each direction with probability 1/2
  const auto sign = [&](uint64_t step, uint64_t element) {
    return stochastic_round_bf16(value, random_u32x4(9, step, element).x) > value ? 1.0 : -1.0;
  };
  double neighbours = 0, steps = 0;
  for (int i = 0; i < n; i++) {
    neighbours += sign(1, i) * sign(1, i + 1);
    steps += sign(1, i) * sign(2, i);
  }
  EXPECT_LT(std::fabs(neighbours / n), 5.0 / std::sqrt(n));
  EXPECT_LT(std::fabs(steps / n), 5.0 / std::sqrt(n));
}

// Values that are bf16 already, infinities and NaN do not change, whatever the random bits.
TEST(StochasticRounding, FixedPoints) {
  for (uint32_t random : {0u, 1u, 0x8000u, 0xffffu, 0xffffffffu}) {
    for (uint32_t bits : {0x00000000u, 0x80000000u, 0x3f800000u, 0xbf810000u, 0x7f800000u, 0xff800000u, 0x7f7f0000u}) {
      const float rounded = stochastic_round_bf16(float_from_bits(bits), random);
      uint32_t result;
      memcpy(&result, &rounded, sizeof(result));
      EXPECT_EQ(result, bits);
    }
    EXPECT_TRUE(std::isnan(stochastic_round_bf16(float_from_bits(0x7fffffffu), random)));
    EXPECT_TRUE(std::isnan(stochastic_round_bf16(float_from_bits(0x7f800001u), random)));
  }
}

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
