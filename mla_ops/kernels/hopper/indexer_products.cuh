// PTX of index scores: products of keys and queries of e4m3, and a store with a policy of L2.
#pragma once

#include "wgmma.cuh"

#define WGMMA_E4M3(N, REGS, ACC, A, B, C)                                                                          \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " C ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N                  \
               "k32.f32.e4m3.e4m3 {" REGS "}, " A ", " B ", p, 1, 1;\n}"                                           \
               : ACC                                                                                               \
               : "l"(a), "l"(b), "r"(add))

// Keys [64 x 32 dims] times queries [32 dims x columns]; `add` false begins a sum.
DEVICE void wgmma_e4m3(float (&d)[64], u64 a, u64 b, int add) {
  WGMMA_E4M3(128, REG64, ACC64(d, 0), "%64", "%65", "%66");
}
DEVICE void wgmma_e4m3(float (&d)[32], u64 a, u64 b, int add) {
  WGMMA_E4M3(64, REG32, ACC32(d, 0), "%32", "%33", "%34");
}
DEVICE void wgmma_e4m3(float (&d)[16], u64 a, u64 b, int add) {
  WGMMA_E4M3(32, REG16, ACC16(d, 0), "%16", "%17", "%18");
}

// Keys leave L2 as if nobody had read them.
DEVICE u64 evict_unchanged() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_unchanged.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

DEVICE void store_float_if_by(u64 policy, bool condition, float* target, float value) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p st.global.L2::cache_hint.f32 [%0], %1, %3;\n}" ::"l"(
                   target),
               "f"(value), "r"(static_cast<u32>(condition)), "l"(policy)
               : "memory");
}
