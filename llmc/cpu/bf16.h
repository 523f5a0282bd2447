// bf16.h -- __nv_bfloat16 with the names of cuda_bf16.h.
//
// The upper half of a float: 8 exponent bits (the range of float), 8 significant bits (relative rounding error 2^-9).
// Conversion rounds to nearest, ties to even: add 0x7fff, plus 1 if the bit that stays last is odd, and cut. The carry
// runs through the exponent as it should, up to infinity; only NaN needs a case of its own. The result equals
// cuda_bf16.h for all 2^32 floats, and unlike that header this code vectorises.
#pragma once

#include "llmc/cpu/types.h"

struct __nv_bfloat16_raw {
  unsigned short x;
};

struct alignas(2) __nv_bfloat16 {
  unsigned short upper;

  __nv_bfloat16() = default;
  __nv_bfloat16(__nv_bfloat16_raw raw) : upper(raw.x) {}
  __nv_bfloat16(float value) {
    const uint32_t bits = cpu_device::bits(value);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    upper = static_cast<unsigned short>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fff : rounded);
  }
  __nv_bfloat16(double value) : __nv_bfloat16(static_cast<float>(value)) {}
  __nv_bfloat16(int value) : __nv_bfloat16(static_cast<float>(value)) {}
  operator float() const { return cpu_device::from_bits<float>(static_cast<uint32_t>(upper) << 16); }
};

struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline __nv_bfloat16 __float2bfloat16(float value) { return __nv_bfloat16(value); }
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return __nv_bfloat16(value); }
inline float __bfloat162float(__nv_bfloat16 value) { return static_cast<float>(value); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 value) {
  return {static_cast<float>(value.x), static_cast<float>(value.y)};
}
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.upper; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short value) { return __nv_bfloat16(__nv_bfloat16_raw{value}); }
