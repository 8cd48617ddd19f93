// Operands of wide turns.
#pragma once

#include "arithmetic.cuh"

DEVICE u32 float16_to_bfloat16(u32 pair) {
  u32 v;
  asm("{\n"
      ".reg .b16 a, b;\n"
      ".reg .f32 c, d;\n"
      "mov.b32 {a, b}, %1;\n"
      "cvt.f32.f16 c, a;\n"
      "cvt.f32.f16 d, b;\n"
      "cvt.rn.bf16x2.f32 %0, d, c;\n"
      "}"
      : "=r"(v)
      : "r"(pair));
  return v;
}

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

// The smaller of two pairs of unsigned 16-bit numbers, each half by itself.
DEVICE u32 smaller_halves(u32 a, u32 b) {
  u32 v;
  asm("min.u16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
  return v;
}

// Whatever registers hold.
DEVICE void forget(uint2& v) { asm volatile("" : "=r"(v.x), "=r"(v.y)); }
DEVICE void forget(uint4& v) { asm volatile("" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)); }
