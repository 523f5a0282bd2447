// numeric.h -- small checked arithmetic that replaces silent integer division and casts.
#pragma once

#include <cstddef>
#include <cstdint>

#include "llmc/check.h"

/// Host loops may use several threads. Not under the thread sanitizer: OpenMP's library is not instrumented, so the end
/// of a parallel loop would look like a race with what comes after it.
#if defined(__SANITIZE_THREAD__)
constexpr bool kParallelHostLoops = false;
#else
constexpr bool kParallelHostLoops = true;
#endif

template <class Integer>
constexpr Integer ceil_div(Integer a, Integer b) {
  return (a + b - 1) / b;
}

template <class Integer>
constexpr Integer round_up(Integer a, Integer multiple) {
  return ceil_div(a, multiple) * multiple;
}

/// a / b where b must divide a (a programmer error otherwise).
template <class Integer>
inline Integer div_exact(Integer a, Integer b) {
  assert(b != 0 && a % b == 0 && "div_exact: not a multiple");
  return a / b;
}

/// Conversion to a narrower integer that keeps the value (a programmer error otherwise).
template <class To, class From>
inline To narrow(From value) {
  const To result = static_cast<To>(value);
  assert(static_cast<From>(result) == value && (result < To{}) == (value < From{}) && "narrow: value does not fit");
  return result;
}
