// How CTAs of the Hopper kernels that share rows evenly add up the parts of those that are cut, by their own code,
// compiled for a CPU: `test_hopper_cuts.py` builds it. Parts are made up; the CTAs come to their ends in any order.

#include <cmath>

#include "hopper_simt.h"

template <int ID, int THREADS>
void named_barrier() {
  simt::meet(simt::cta().named, threadIdx.x, THREADS, 0);
}
static float __fdividef(float a, float b) { return a / b; }
static int __ffs(unsigned bits) { return __builtin_ffs(bits); }

#define named_barrier ptx_named_barrier
#define load_acquire ptx_load_acquire
#define fetch_add ptx_fetch_add
#define exp2_approx ptx_exp2_approx
#define log2_approx ptx_log2_approx
#define pack_bfloat16 ptx_pack_bfloat16
#define select ptx_select
#define converge ptx_converge
#define thread_here ptx_thread_here
#define load_float ptx_load_float
#define load_float_if ptx_load_float_if
#define load_float4_if ptx_load_float4_if
#define store_8_if ptx_store_8_if
#define store_shared_4 ptx_store_shared_4
#define store_shared_8 ptx_store_shared_8
#define store_shared_16 ptx_store_shared_16
#define load_shared_4 ptx_load_shared_4
#define load_shared_8 ptx_load_shared_8
#define load_shared_16 ptx_load_shared_16
#include "ptx.cuh"
#undef named_barrier
#undef load_acquire
#undef fetch_add
#undef exp2_approx
#undef log2_approx
#undef pack_bfloat16
#undef select
#undef converge
#undef thread_here
#undef load_float
#undef load_float_if
#undef load_float4_if
#undef store_8_if
#undef store_shared_4
#undef store_shared_8
#undef store_shared_16
#undef load_shared_4
#undef load_shared_8
#undef load_shared_16

static u32 load_acquire(const u32* counter) {
  simt::leave();  // others go on while this one looks
  return *counter;
}
static u32 fetch_add(u32* counter, u32 value) { return atomicAdd(counter, value); }
static float exp2_approx(float x) { return std::exp2(x); }
static float log2_approx(float x) { return std::log2(x); }
static u32 bfloat16(float value) {
  const u32 bits = __float_as_uint(value);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static u32 pack_bfloat16(float low, float high) { return bfloat16(low) | bfloat16(high) << 16; }
static float select(bool condition, float a, float b) { return condition ? a : b; }
static void converge() { __syncwarp(); }
static int thread_here() { return threadIdx.x; }
static float load_float(const float* source) { return *source; }
static float load_float_if(bool there, const float* source) { return there ? *source : -INFINITY; }
static float4 load_float4_if(bool there, const float* source) {
  return there ? float4{source[0], source[1], source[2], source[3]} : float4{};
}
static void store_8_if(bool condition, void* target, u32 a, u32 b) {
  const u32 words[] = {a, b};
  if (condition) std::memcpy(target, words, 8);
}
static void store_shared_4(u32 address, u32 a) { std::memcpy(simt::shared_memory() + address, &a, 4); }
static void store_shared_8(u32 address, u32 a, u32 b) { store_shared_4(address, a), store_shared_4(address + 4, b); }
static void store_shared_16(u32 address, u32 a, u32 b, u32 c, u32 d) {
  store_shared_8(address, a, b), store_shared_8(address + 8, c, d);
}
static u32 load_shared_4(u32 address) {
  u32 value;
  std::memcpy(&value, simt::shared_memory() + address, 4);
  return value;
}
static uint2 load_shared_8(u32 address) { return {load_shared_4(address), load_shared_4(address + 4)}; }
static uint4 load_shared_16(u32 address) {
  return {load_shared_4(address), load_shared_4(address + 4), load_shared_4(address + 8), load_shared_4(address + 12)};
}

#include "cuts.cuh"

struct Places {
  static constexpr int HEADS = 64, INTERVAL = 0;
};

constexpr u32 FIND = 1024, SCRATCH = 2048;

// The CTAs of a launch at the same time. Each leaves parts of what `lse_of` and `value_of` say.
template <int AT_ONCE>
void share(const Params& p, int ctas, int seed) {
  using L = Places;
  simt::launch(1, ctas, 256, SCRATCH + 16384 + 16, seed, [&] {
    const int thread = threadIdx.x, cta = blockIdx.x;
    find_interval<256>(p, L::INTERVAL, FIND);
    Row row = first_row<Launch::BALANCED>(p, L::INTERVAL);
    while (row.token < p.all_tokens) {
      for (int wait = (cta * 7 + seed * 5 + row.token) % 11; wait; --wait) simt::leave();
      const int part = part_of(p, L::INTERVAL, row.token);
      if (part >= 0) {
        const Parts parts = parts_of(p);
        for (int head = row.tile * L::HEADS; head < min((row.tile + 1) * L::HEADS, p.num_heads); ++head) {
          const i64 place = static_cast<i64>(part) * p.num_heads + head;
          for (int dim = thread; dim < 512; dim += 256)
            parts.out[place * 512 + dim] = (head * 7 + dim * 3 + row.first * 11) % 32 - 16;
          if (thread == 0) parts.lse[place] = (head + row.first * 5) % 7 == 0 ? -INFINITY : (head + row.first * 5) % 7;
        }
        tell_sharers<L, 1>(p, 0, part, thread);
      }
      row = next_row<Launch::BALANCED, true>(p, L::INTERVAL, row);
    }
    add_up_cuts<L, 1, AT_ONCE>(p, 0, SCRATCH, thread);
  });
}

extern "C" void share_rows(const Params* p, int ctas, int at_once, int seed) {
  if (at_once == 2)
    share<2>(*p, ctas, seed);
  else
    share<4>(*p, ctas, seed);
}
