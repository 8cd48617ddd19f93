// Scores of the lightning indexer for SM90: the sum over heads of weight * relu(query . key), times the key's scale.
//
// A tile of 64 keys is the rows of a warpgroup's products; the heads of up to eight query tokens, 256 of them, are their
// columns. So a thread has two keys' products of a quarter of the heads; weights of these heads stay in its registers for
// as long as the tokens stay the same. The sum over heads is made in the thread and its three neighbours.
//
// Two warpgroups have every second tile each. Each has two sets of products: one is summed up while the tensor cores make
// the other. One warp brings keys and queries by bulk copies, or four warps bring keys where blocks do not fit a tile.
//
// All tiles of keys of all groups of tokens, one after the other, are cut into as many equal parts as there are CTAs.
// Lengths are read on the device, by every CTA, so that a graph follows them. A score does not depend on who makes it:
// its sum has one order in every kernel.

#include "wgmma.cuh"

// ---- products -------------------------------------------------------------------------------------------------------

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

#include "indexer_scores.cuh"

template <int HEADS, int TOKENS, Source SOURCE>
__global__ void __launch_bounds__(THREADS, 1) indexer_logits(const __grid_constant__ Params p) {
  using L = IndexerLayout<HEADS, TOKENS>;
  EXPORT_SHARED_BYTES(L);
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  make_scores<L, SOURCE>(p, shared_address(shared_memory));
}
