// random.h -- counter-based random numbers: a function of (seed, stream, counter), the same bits on host and device.
//
// Philox4x32-10: ten rounds of two 32x32->64 bit products and two round keys turn a 128-bit counter into 128 random
// bits. There is no state. Whoever knows the key of an element computes its number, so results depend neither on the
// order of the threads nor on the number of ranks nor on where a run was interrupted:
//   weights             (seed, tensor, element)
//   stochastic rounding (seed, optimizer step, global element)
//   data order          (seed, epoch, index)
// Two uses that share a seed must differ in `stream`; the high half of `stream` is free to name the use.
// Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 4.3.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

/// 128 random bits. x, y, z, w are independent.
struct RandomWords {
  uint32_t x, y, z, w;
};

/// The block cipher itself, in the paper's terms: 4 counter words, 2 key words (known-answer tests call this).
HOST_DEVICE inline RandomWords philox4x32_10(RandomWords counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; round++) {
    const uint64_t product0 = static_cast<uint64_t>(0xD2511F53u) * counter.x;
    const uint64_t product1 = static_cast<uint64_t>(0xCD9E8D57u) * counter.z;
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter.y ^ key0, static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter.w ^ key1, static_cast<uint32_t>(product0)};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

/// 128 random bits for (seed, stream, counter). Different triples: independent bits. 100 integer operations.
HOST_DEVICE inline RandomWords random_u32x4(uint64_t seed, uint64_t stream, uint64_t counter) {
  const RandomWords words = {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32),
                             static_cast<uint32_t>(stream), static_cast<uint32_t>(stream >> 32)};
  return philox4x32_10(words, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
}

/// Uniform in [0, 1), a multiple of 2^-53.
HOST_DEVICE inline double random_uniform(uint64_t seed, uint64_t stream, uint64_t counter) {
  const RandomWords words = random_u32x4(seed, stream, counter);
  const uint64_t bits = (static_cast<uint64_t>(words.x) << 32 | words.y) >> 11;
  return static_cast<double>(bits) * (1.0 / 9007199254740992.0);
}

/// Standard normal, |z| < 8.6, by Box-Muller in double. For the host: log and cos of another machine's C library may
/// differ in the last bit of the double, which a later rounding to float hides in all but about one of 10^8 cases.
inline double random_normal(uint64_t seed, uint64_t stream, uint64_t counter) {
  const RandomWords words = random_u32x4(seed, stream, counter);
  const double kTwoPi = 6.283185307179586476925286766559;
  const uint64_t radius_bits = (static_cast<uint64_t>(words.x) << 32 | words.y) >> 11;
  const uint64_t angle_bits = (static_cast<uint64_t>(words.z) << 32 | words.w) >> 11;
  const double open_uniform = (static_cast<double>(radius_bits) + 1.0) * (1.0 / 9007199254740992.0);  // (0, 1]
  const double angle = kTwoPi * (static_cast<double>(angle_bits) * (1.0 / 9007199254740992.0));
  return std::sqrt(-2.0 * std::log(open_uniform)) * std::cos(angle);
}

/// Rounds `value` to one of its two bf16 neighbours, up with the probability that makes the mean exact:
/// E[result] = value. Uses the low 16 bits of `random`. Returns the bf16 value as a float (its low 16 bits are 0).
/// Values that are bf16 already stay, infinities and NaN too. Magnitudes above the largest bf16 may round to infinity.
HOST_DEVICE inline float stochastic_round_bf16(float value, uint32_t random) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  // adding a uniform 16-bit number carries into the kept half with probability (dropped half) / 2^16
  const uint32_t rounded = (bits + (random & 0xffffu)) & 0xffff0000u;
  const uint32_t chosen = (bits & 0x7f800000u) == 0x7f800000u ? bits : rounded;
  float result;
  memcpy(&result, &chosen, sizeof(result));
  return result;
}
