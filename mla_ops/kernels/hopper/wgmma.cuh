// Products of a warpgroup, whose operands lie in shared memory or in registers.
#pragma once

#include "ptx.cuh"

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// A tile with 128-byte rows in the 128-byte swizzle. `group_bytes` lies between groups of eight rows, `span_bytes`
// between neighbouring spans of 64 elements where the rows run along M or N and there is more than one.
DEVICE u64 tile_descriptor(u32 address, u32 group_bytes, u32 span_bytes) {
  return static_cast<u64>((address & 0x3ffff) >> 4) | static_cast<u64>(span_bytes >> 4) << 16 |
         static_cast<u64>(group_bytes >> 4) << 32 | 1ull << 62;
}

#define ACC4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ACC8(d, i) ACC4(d, i), ACC4(d, i + 4)
#define ACC12(d, i) ACC8(d, i), ACC4(d, i + 8)
#define ACC16(d, i) ACC8(d, i), ACC8(d, i + 8)
#define ACC32(d, i) ACC16(d, i), ACC16(d, i + 16)
#define ACC64(d, i) ACC32(d, i), ACC32(d, i + 32)

#define ACC128(d, i) ACC64(d, i), ACC64(d, i + 64)

#define REG8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define REG12 REG8 ", %8, %9, %10, %11"
#define REG16 REG12 ", %12, %13, %14, %15"
#define REG32 REG16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REG64                                                                                                        \
  REG32                                                                                                              \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, " \
  "%54, "                                                                                                            \
  "%55, %56, %57, %58, %59, %60, %61, %62, %63"

#define REG128                                                                                   \
  REG64                                                                                          \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"             \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"             \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// d[64 x N] (+)= a[64 x 16] b[16 x N]: a in registers, b in shared memory with rows along K.
#define WGMMA_RS(N, TYPE, REGS, ACC, A0, A1, A2, A3, B, C)                                                        \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " C ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE \
               "." TYPE " {" REGS "}, {" A0 ", " A1 ", " A2 ", " A3 "}, " B ", p, 1, 1, 0;\n}"                    \
               : ACC                                                                                              \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))

DEVICE void wgmma_float16(float (&d)[32], const u32* a, u64 b, int add) {
  WGMMA_RS(64, "f16", REG32, ACC32(d, 0), "%32", "%33", "%34", "%35", "%36", "%37");
}
DEVICE void wgmma_bfloat16(float (&d)[32], const u32* a, u64 b, int add) {
  WGMMA_RS(64, "bf16", REG32, ACC32(d, 0), "%32", "%33", "%34", "%35", "%36", "%37");
}
DEVICE void wgmma_float16(float (&d)[16], const u32* a, u64 b, int add) {
  WGMMA_RS(32, "f16", REG16, ACC16(d, 0), "%16", "%17", "%18", "%19", "%20", "%21");
}
DEVICE void wgmma_bfloat16(float (&d)[16], const u32* a, u64 b, int add) {
  WGMMA_RS(32, "bf16", REG16, ACC16(d, 0), "%16", "%17", "%18", "%19", "%20", "%21");
}
DEVICE void wgmma_float16(float (&d)[12], const u32* a, u64 b, int add) {
  WGMMA_RS(24, "f16", REG12, ACC12(d, 0), "%12", "%13", "%14", "%15", "%16", "%17");
}
DEVICE void wgmma_bfloat16(float (&d)[12], const u32* a, u64 b, int add) {
  WGMMA_RS(24, "bf16", REG12, ACC12(d, 0), "%12", "%13", "%14", "%15", "%16", "%17");
}
DEVICE void wgmma_float16(float (&d)[8], const u32* a, u64 b, int add) {
  WGMMA_RS(16, "f16", REG8, ACC8(d, 0), "%8", "%9", "%10", "%11", "%12", "%13");
}
DEVICE void wgmma_bfloat16(float (&d)[8], const u32* a, u64 b, int add) {
  WGMMA_RS(16, "bf16", REG8, ACC8(d, 0), "%8", "%9", "%10", "%11", "%12", "%13");
}

// d[64 x N] += a[64 x 16] b[16 x N], both in shared memory. TRANSPOSED operands have their rows along K.
#define WGMMA_SS(N, TYPE, REGS, ACC, A, B, TA, TB)                                                      \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGS "}, " A ", " B \
               ", 1, 1, 1, " TA ", " TB ";"                                                             \
               : ACC                                                                                    \
               : "l"(a), "l"(b))

// Weights [heads x keys] times values [keys x 128 dims].
DEVICE void wgmma_heads_by_dims(float (&d)[64], u64 a, u64 b) {
  WGMMA_SS(128, "f16", REG64, ACC64(d, 0), "%64", "%65", "0", "1");
}
DEVICE void wgmma_heads_by_dims_bfloat16(float (&d)[64], u64 a, u64 b) {
  WGMMA_SS(128, "bf16", REG64, ACC64(d, 0), "%64", "%65", "0", "1");
}
// The same, 256 dims in bfloat16, with weights in shared memory or in registers; `add` false begins a sum.
DEVICE void wgmma_heads_by_dims_bfloat16(float (&d)[128], u64 a, u64 b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" REG128
      "}, %128, %129, p, 1, 1, 0, 1;\n}"
      : ACC128(d, 0)
      : "l"(a), "l"(b), "r"(add));
}
DEVICE void wgmma_heads_by_dims_bfloat16(float (&d)[128], const u32* a, u64 b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" REG128
      "}, {%128, %129, %130, %131}, %132, p, 1, 1, 1;\n}"
      : ACC128(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
// Values, transposed, [64 dims x keys] times weights [keys x heads].
DEVICE void wgmma_dims_by_heads(float (&d)[16], u64 a, u64 b) {
  WGMMA_SS(32, "f16", REG16, ACC16(d, 0), "%16", "%17", "1", "0");
}
DEVICE void wgmma_dims_by_heads(float (&d)[12], u64 a, u64 b) {
  WGMMA_SS(24, "f16", REG12, ACC12(d, 0), "%12", "%13", "1", "0");
}
DEVICE void wgmma_dims_by_heads(float (&d)[8], u64 a, u64 b) {
  WGMMA_SS(16, "f16", REG8, ACC8(d, 0), "%8", "%9", "1", "0");
}
DEVICE void wgmma_dims_by_heads_bfloat16(float (&d)[16], u64 a, u64 b) {
  WGMMA_SS(32, "bf16", REG16, ACC16(d, 0), "%16", "%17", "1", "0");
}
DEVICE void wgmma_dims_by_heads_bfloat16(float (&d)[12], u64 a, u64 b) {
  WGMMA_SS(24, "bf16", REG12, ACC12(d, 0), "%12", "%13", "1", "0");
}
DEVICE void wgmma_dims_by_heads_bfloat16(float (&d)[8], u64 a, u64 b) {
  WGMMA_SS(16, "bf16", REG8, ACC8(d, 0), "%8", "%9", "1", "0");
}

// Keys [64 x 16 dims] times queries [16 dims x heads], neither transposed; `add` false begins a sum.
#define WGMMA_KEYS(N, TYPE, REGS, ACC, A, B, C)                                                                   \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " C ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE \
               "." TYPE " {" REGS "}, " A ", " B ", p, 1, 1, 0, 0;\n}"                                            \
               : ACC                                                                                              \
               : "l"(a), "l"(b), "r"(add))

// The other way round: queries [64 heads x 16 dims] times keys [16 dims x 64].
DEVICE void wgmma_heads_by_keys(float (&d)[32], u64 a, u64 b, int add) {
  WGMMA_KEYS(64, "bf16", REG32, ACC32(d, 0), "%32", "%33", "%34");
}
DEVICE void wgmma_keys_by_heads(float (&d)[16], u64 a, u64 b, int add) {
  WGMMA_KEYS(32, "bf16", REG16, ACC16(d, 0), "%16", "%17", "%18");
}
DEVICE void wgmma_keys_by_heads(float (&d)[8], u64 a, u64 b, int add) {
  WGMMA_KEYS(16, "bf16", REG8, ACC8(d, 0), "%8", "%9", "%10");
}
