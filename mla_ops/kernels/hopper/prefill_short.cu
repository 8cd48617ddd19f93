// Dense attention of prefill for SM90, varlen: the tiles of queries that have few keys, each warp by itself.
//
// Such tiles cost one reading of their rows. So many loads have to be on their way at one time, and none that
// nobody needs. A warp takes 16 queries of one head, or those of several heads where there are fewer, and 16 keys after
// the other, straight from memory to the registers of its matrix instructions. No lane needs what another one loaded:
// each loads 16 bytes in a row, and which dims a fragment's places stand for follows from that. Its queries wait in
// shared memory, which only saves registers.
//
// A CTA belongs to 128 tokens, of any requests. With those that share them it deals out (queries, heads) evenly. One
// more CTA writes the table of the tiles that have more keys, for `prefill_attention`.

#include "prefill_short.cuh"

// ---- operand types --------------------------------------------------------------------------------------------------

// [16 x 16] times [16 x 8], added.
#define PRODUCT(TYPE)                                                                                              \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, " \
      "{%0, %1, %2, %3};"                                                                                          \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                             \
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))

struct Bfloat16 {
  static DEVICE u32 pack(float low, float high) { return pack_bfloat16(low, high); }
  static DEVICE void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { PRODUCT("bf16"); }
};

struct Float16 {
  static DEVICE u32 pack(float low, float high) { return pack_float16(low, high); }
  static DEVICE void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { PRODUCT("f16"); }
};

// ---- the kernel -----------------------------------------------------------------------------------------------------

template <int DIM, int DIM_V, class T = Bfloat16>
__global__ void __launch_bounds__(THREADS, 2) prefill_short(const __grid_constant__ Params p) {
  __shared__ Shared shared;
  __shared__ uint4 queries[DIM / 16 * THREADS];
  launch_dependents();
  run<DIM, DIM_V, T>(p, shared, queries + threadIdx.x, blockIdx.x);
}
