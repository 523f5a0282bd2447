// element_hash.h -- a 64-bit hash of numbered floats that can be added up in any order, by any number of ranks.
//
//   hash = sum over elements e of mix(e * 2^64/phi + bits(x_e))  modulo 2^64,  mix = the finaliser of splitmix64
// The summand is a bijection of the bits for a given e, so one changed element always changes the hash; that elements
// are swapped, or other changes cancel out, goes unnoticed with probability 2^-64. An integer sum has no order: every
// rank hashes the elements it holds, and the sum over the ranks is that of the whole model on every layout. Source of
// mix: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "llmc/numeric.h"

/// Hash of x[0 .. count), the global numbers of which are first_element, first_element + 1, ... Reads x (host memory);
/// hash(a and b) = hash(a) + hash(b). Pure, the same for any number of threads. About 1 ns per element and thread.
inline uint64_t element_hash(const float* x, size_t count, uint64_t first_element) {
  uint64_t sum = 0;
  const int64_t n = static_cast<int64_t>(count);
#pragma omp parallel for simd schedule(static) reduction(+ : sum) if (parallel : kParallelHostLoops && n >= 65536)
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    memcpy(&bits, x + i, sizeof bits);
    uint64_t h = (first_element + static_cast<uint64_t>(i)) * 0x9e3779b97f4a7c15ull + bits;
    h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9ull;
    h = (h ^ (h >> 27)) * 0x94d049bb133111ebull;
    sum += h ^ (h >> 31);
  }
  return sum;
}
