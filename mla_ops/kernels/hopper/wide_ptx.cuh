// Operands of wide turns.
#pragma once

#include "arithmetic.cuh"
#include "wgmma.cuh"

#define FUNCTION __device__ __noinline__

// The e4m3 in the lower half of a word.
DEVICE u32 e4m3_to_bfloat16(u32 pair) {
  u32 v;
  asm("{\n"
      ".reg .b16 a, b, c, d;\n"
      ".reg .b32 x;\n"
      ".reg .f32 e, f;\n"
      "mov.b32 {a, b}, %1;\n"
      "cvt.rn.f16x2.e4m3x2 x, a;\n"
      "mov.b32 {c, d}, x;\n"
      "cvt.f32.f16 e, c;\n"
      "cvt.f32.f16 f, d;\n"
      "cvt.rn.bf16x2.f32 %0, f, e;\n"
      "}"
      : "=r"(v)
      : "r"(pair));
  return v;
}

// Whatever registers hold.
DEVICE void forget(uint2& v) { asm volatile("" : "=r"(v.x), "=r"(v.y)); }
DEVICE void forget(uint4& v) { asm volatile("" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)); }

// Four e4m3 in a word as two pairs of float16.
DEVICE void e4m3_to_float16(u32 word, u32& low, u32& high) {
  asm("{\n"
      ".reg .b16 a, b;\n"
      "mov.b32 {a, b}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, a;\n"
      "cvt.rn.f16x2.e4m3x2 %1, b;\n"
      "}"
      : "=r"(low), "=r"(high)
      : "r"(word));
}

// Four e4m3 in a word, times a pair of float16, as e4m3 again.
DEVICE u32 multiply_e4m3(u32 word, u32 factor) {
  u32 v;
  asm("{\n"
      ".reg .b16 a, b;\n"
      ".reg .b32 x, y;\n"
      "mov.b32 {a, b}, %1;\n"
      "cvt.rn.f16x2.e4m3x2 x, a;\n"
      "cvt.rn.f16x2.e4m3x2 y, b;\n"
      "mul.rn.f16x2 x, x, %2;\n"
      "mul.rn.f16x2 y, y, %2;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 a, x;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 b, y;\n"
      "mov.b32 %0, {a, b};\n"
      "}"
      : "=r"(v)
      : "r"(word), "r"(factor));
  return v;
}

// The smaller of two pairs of unsigned 16-bit numbers, each half by itself.
DEVICE u32 smaller_halves(u32 a, u32 b) {
  u32 v;
  asm("min.u16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
  return v;
}

template <int N>
DEVICE void forget(float (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "=f"(values[i]));
}
