// Short tiles of prefill by the Hopper kernel's own code, compiled for a CPU: `test_hopper_prefill.py` builds it.
#include <cmath>

#include "hopper_simt.h"

#define copy_16_or_zeros ptx_copy_16_or_zeros
#define exp2_approx ptx_exp2_approx
#define pack_bfloat16 ptx_pack_bfloat16
#define shared_address ptx_shared_address
#define store_streaming_16 ptx_store_streaming_16
#define uniform ptx_uniform
#include "ptx.cuh"
#undef copy_16_or_zeros
#undef exp2_approx
#undef pack_bfloat16
#undef shared_address
#undef store_streaming_16
#undef uniform

static uintptr_t shared_address(const void* here) { return reinterpret_cast<uintptr_t>(here); }
template <int, int>
void copy_16_or_zeros(uintptr_t target, const void* source, u32 bytes) {
  if (target % 16 || reinterpret_cast<uintptr_t>(source) % 16) abort();
  std::memset(reinterpret_cast<void*>(target), 0, 16);
  std::memcpy(reinterpret_cast<void*>(target), source, bytes);
}
static void store_streaming_16(void* to, uint4 v) {
  if (reinterpret_cast<uintptr_t>(to) % 16) abort();
  std::memcpy(to, &v, 16);
}
static int uniform(int value) { return __shfl_sync(~0u, value, 0); }
static float exp2_approx(float x) { return std::exp2(x); }
static float __fmul_rn(float a, float b) { return a * b; }
static u32 rounded(float x) {
  const u32 bits = __float_as_uint(x);
  return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

#include "prefill_short.cuh"

struct Bfloat16 {
  static u32 pack(float low, float high) { return rounded(low) | rounded(high) << 16; }
  // [16 x 16] times [16 x 8]: each lane brings where its fragments are, and stays until all have read them.
  static void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const u32 own[6] = {a0, a1, a2, a3, b0, b1};
    const std::vector<uint64_t> all = simt::meet_warp(reinterpret_cast<uintptr_t>(own));
    auto of = [&](int lane, int n, int half) {
      const u32 word = reinterpret_cast<const u32*>(all[lane])[n];
      return half ? high_bfloat16(word) : low_bfloat16(word);
    };
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    for (int e = 0; e < 4; ++e) {
      double sum = d[e];
      for (int k = 0; k < 16; ++k) {
        const double a = of(g * 4 + k % 8 / 2, k / 8 * 2 + e / 2, k & 1);
        const double b = of((c * 2 + (e & 1)) * 4 + k % 8 / 2, 4 + k / 8, k & 1);
        sum += a * b;
      }
      d[e] = sum;
    }
    simt::meet_warp(0);
  }
};

extern "C" int bytes_of_params() { return sizeof(Params); }

template <int DIM, int DIM_V>
void launch(const Params& p, int ctas, int seed) {
  const size_t bytes = sizeof(Shared) + DIM / 16 * THREADS * 16 + 16;
  simt::launch(ctas, 1, THREADS, bytes, seed, [&] {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(simt::shared_memory()) + 15 & ~uintptr_t{15};
    Shared& shared = *reinterpret_cast<Shared*>(begin);
    const int cta = gridDim.x - 1 - blockIdx.x;  // the order is free
    run<DIM, DIM_V, Bfloat16>(p, shared, reinterpret_cast<uint4*>(&shared + 1) + threadIdx.x, cta);
  });
}

extern "C" void prefill_short(const char* params, int dim, int dim_v, int ctas, int seed) {
  alignas(64) Params p;
  std::memcpy(&p, params, sizeof(p));
  if (dim == 192)
    launch<192, 128>(p, ctas, seed);
  else if (dim == 256)
    launch<256, 256>(p, ctas, seed);
  else
    launch<64, 64>(p, ctas, seed);
}
