// Products of a warp, and their operands out of e4m3.
#pragma once

#include "arithmetic.cuh"

// d[16 x 8] += a[16 x 16] b[16 x 8].
DEVICE void multiply_16_by_8(float& d0, float& d1, float& d2, float& d3, const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

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
