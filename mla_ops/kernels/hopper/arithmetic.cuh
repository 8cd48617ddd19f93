// Names of types, and arithmetic that CUDA C++ has no operator for: approximations, float16, bfloat16, e4m3.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

#define DEVICE __device__ __forceinline__
#define INFINITY __int_as_float(0x7f800000)

DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The larger of a number and 0; NaN stays.
DEVICE float positive_or_nan(float x) {
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE u32 pack_float16(float low, float high) {
  u32 v;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}

DEVICE float2 unpack_float16(u32 pair) {
  float2 v;
  asm("{.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;}"
      : "=f"(v.x), "=f"(v.y)
      : "r"(pair));
  return v;
}

DEVICE u32 pack_bfloat16(float low, float high) {
  u32 v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}

// The larger magnitude of each half of two pairs of bfloat16; NaN only where both are NaN. Signs mean nothing.
DEVICE u32 larger_magnitudes(u32 a, u32 b) {
  u32 v;
  asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
  return v;
}

// The larger of two pairs of unsigned 16-bit numbers, each half by itself.
DEVICE u32 larger_halves(u32 a, u32 b) {
  u32 v;
  asm("max.u16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
  return v;
}

DEVICE float low_bfloat16(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float high_bfloat16(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Four e4m3 in a word, times a pair of float16: two pairs of float16, each product rounded once.
DEVICE void e4m3_to_float16(u32 word, u32 scale, u32& low, u32& high) {
  asm("{\n"
      ".reg .b16 a, b;\n"
      ".reg .b32 x, y;\n"
      "mov.b32 {a, b}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 x, a;\n"
      "cvt.rn.f16x2.e4m3x2 y, b;\n"
      "mul.rn.f16x2 %0, x, %3;\n"
      "mul.rn.f16x2 %1, y, %3;\n"
      "}"
      : "=r"(low), "=r"(high)
      : "r"(word), "r"(scale));
}

DEVICE u32 multiply_bfloat16(u32 pair, u32 factor) {
  u32 v;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(pair), "r"(factor));
  return v;
}

// `nothing`, a pair of 0 in float16, unless one of `pair` is infinite or NaN: then NaN.
DEVICE u32 nan_unless_finite(u32 pair, u32 nothing) {
  u32 v;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(pair), "r"(0u), "r"(nothing));
  return v;
}

// Two e4m3, `low` in the lower byte. What is beyond 448 becomes 448, NaN 0x7f.
DEVICE u16 pack_e4m3(float low, float high) {
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

DEVICE float float16_to_float(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

DEVICE u16 float_to_float16(float value) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
