// math.h -- CUDA's arithmetic functions, in forms that the compiler vectorises.
//
// glibc has vector versions of expf, logf and tanhf (libmvec, at most 4 ulp). The compiler uses them when the functions
// are declared `simd`, without the rest of -ffast-math: gelu is 12 times faster with them. fmaxf and fminf would be
// library calls, since the instruction treats NaN differently; the inline forms below keep IEEE's rule (the number
// wins).
#pragma once

#include <math.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "llmc/cpu/types.h"

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
extern "C" {
__attribute__((__simd__("notinbranch"))) float expf(float) noexcept;
__attribute__((__simd__("notinbranch"))) float logf(float) noexcept;
__attribute__((__simd__("notinbranch"))) float powf(float, float) noexcept;
#if __GLIBC__ > 2 || __GLIBC_MINOR__ >= 35
__attribute__((__simd__("notinbranch"))) float tanhf(float) noexcept;
__attribute__((__simd__("notinbranch"))) float erff(float) noexcept;
#endif
}
#endif

namespace cpu_device {
inline float larger(float a, float b) { return a > b || b != b ? a : b; }
inline float smaller(float a, float b) { return a < b || b != b ? a : b; }
}  // namespace cpu_device
#define fmaxf cpu_device::larger
#define fminf cpu_device::smaller

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }

inline unsigned __float_as_uint(float x) { return cpu_device::bits(x); }
inline int __float_as_int(float x) { return static_cast<int>(cpu_device::bits(x)); }
inline float __uint_as_float(unsigned x) { return cpu_device::from_bits<float>(x); }
inline float __int_as_float(int x) { return cpu_device::from_bits<float>(static_cast<uint32_t>(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x != 0 ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }

template <class T>
inline T __ldg(const T* address) {
  return *address;
}
template <class T>
inline T __ldcs(const T* address) {
  return *address;
}
template <class T>
inline void __stcs(T* address, typename cpu_device::Same<T>::type value) {
  *address = value;
}

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(a) : static_cast<T>(b);
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(a) > static_cast<T>(b) ? static_cast<T>(a) : static_cast<T>(b);
}
