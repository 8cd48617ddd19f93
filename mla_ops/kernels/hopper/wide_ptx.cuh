// Operands of wide turns.
#pragma once

#include "arithmetic.cuh"

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
