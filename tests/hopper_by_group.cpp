// A row's turns by group: the Hopper kernels' own code, compiled for a CPU. `test_hopper_by_group.py` builds it.
#include <cmath>
#include <map>

#include "hopper_simt.h"

// These are modelled below.
#define pack_float16 ptx_pack_float16
#define pack_bfloat16 ptx_pack_bfloat16
#define load_shared_4 ptx_load_shared_4
#define load_shared_16 ptx_load_shared_16
#define load_shared_float ptx_load_shared_float
#define load_shared_float2 ptx_load_shared_float2
#define load_matrices ptx_load_matrices
#define store_matrices ptx_store_matrices
#define store_shared_4 ptx_store_shared_4
#define store_shared_8 ptx_store_shared_8
#define store_shared_16 ptx_store_shared_16
#define store_shared_float ptx_store_shared_float
#define store_shared_float2 ptx_store_shared_float2
#define named_barrier ptx_named_barrier
#define named_barrier_arrive ptx_named_barrier_arrive
#define named_barrier_any ptx_named_barrier_any
#define mbarrier_wait ptx_mbarrier_wait
#define warp_arrive ptx_warp_arrive
#define exp2_approx ptx_exp2_approx
#define log2_approx ptx_log2_approx
#define larger_halves ptx_larger_halves
#define larger_magnitudes ptx_larger_magnitudes
#define multiply_bfloat16 ptx_multiply_bfloat16
#define e4m3_to_float16 ptx_e4m3_to_float16
#define smaller_halves ptx_smaller_halves
#define reciprocal_approx ptx_reciprocal_approx
#define unpack_float16 ptx_unpack_float16
#define store_matrices_transposed ptx_store_matrices_transposed
#define wgmma_heads_by_dims_bfloat16 ptx_wgmma_heads_by_dims_bfloat16
#include "ptx.cuh"
#include "wide_ptx.cuh"
#undef pack_float16
#undef pack_bfloat16
#undef load_shared_4
#undef load_shared_16
#undef load_shared_float
#undef load_shared_float2
#undef load_matrices
#undef store_matrices
#undef store_shared_4
#undef store_shared_8
#undef store_shared_16
#undef store_shared_float
#undef store_shared_float2
#undef named_barrier
#undef named_barrier_arrive
#undef named_barrier_any
#undef mbarrier_wait
#undef warp_arrive
#undef exp2_approx
#undef log2_approx
#undef larger_halves
#undef larger_magnitudes
#undef multiply_bfloat16
#undef e4m3_to_float16
#undef smaller_halves
#undef reciprocal_approx
#undef unpack_float16
#undef store_matrices_transposed
#undef wgmma_heads_by_dims_bfloat16

template <class T>
T& at(u32 address) {
  return *reinterpret_cast<T*>(simt::shared_memory() + address);
}
static float exp2_approx(float x) { return std::exp2(x); }
static float reciprocal_approx(float x) { return 1 / x; }
static float log2_approx(float x) { return std::log2(x); }
static u32 bits_of_float16(float x) { return bits_of<u16>(static_cast<_Float16>(x)); }
static float float16_of_bits(u32 x) { return bits_of<_Float16>(static_cast<u16>(x)); }
static u32 pack_float16(float low, float high) { return bits_of_float16(low) | bits_of_float16(high) << 16; }
static u32 pack_bfloat16(float low, float high) {
  auto half = [](float x) {
    const u32 bits = __float_as_uint(x);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
  };
  return half(low) | half(high) << 16;
}
static u32 larger_halves(u32 a, u32 b) { return max(a & 0xffff, b & 0xffff) | max(a >> 16, b >> 16) << 16; }
static u32 smaller_halves(u32 a, u32 b) { return min(a & 0xffff, b & 0xffff) | min(a >> 16, b >> 16) << 16; }
static u32 larger_magnitudes(u32 a, u32 b) { return larger_halves(a & 0x7fff7fff, b & 0x7fff7fff); }
static u32 multiply_bfloat16(u32 pair, u32 factor) {
  return pack_bfloat16(low_bfloat16(pair) * low_bfloat16(factor), high_bfloat16(pair) * high_bfloat16(factor));
}
static void e4m3_to_float16(u32 word, u32& low, u32& high) {
  float v[4];
  for (int i = 0; i < 4; ++i) {
    const int byte = word >> 8 * i & 255, exponent = byte >> 3 & 15, mantissa = byte & 7;
    const float x = exponent ? std::ldexp(8.f + mantissa, exponent - 10) : std::ldexp(1.f * mantissa, -9);
    v[i] = (byte & 127) == 127 ? NAN : byte & 128 ? -x : x;
  }
  low = pack_float16(v[0], v[1]), high = pack_float16(v[2], v[3]);
}

static float2 unpack_float16(u32 pair) { return {float16_of_bits(pair & 0xffff), float16_of_bits(pair >> 16)}; }

static u32 load_shared_4(u32 address) { return at<u32>(address); }
static uint4 load_shared_16(u32 address) { return address % 16 ? std::abort(), uint4{} : at<uint4>(address); }
static float load_shared_float(u32 address) { return at<float>(address); }
static float2 load_shared_float2(u32 address) { return address % 8 ? std::abort(), float2{} : at<float2>(address); }
static void store_shared_4(u32 address, u32 value) { at<u32>(address) = value; }
static void store_shared_8(u32 address, u32 a, u32 b) { at<uint2>(address) = {a, b}; }
static void store_shared_16(u32 address, u32 a, u32 b, u32 c, u32 d) { at<uint4>(address) = {a, b, c, d}; }
static void store_shared_float(u32 address, float value) { at<float>(address) = value; }
static void store_shared_float2(u32 address, float a, float b) { at<float2>(address) = {a, b}; }

#include "hopper_matrices.h"

// Barriers in memory, by their addresses, and named ones.
struct Barrier {
  int count = 1, arrived = 0;
  unsigned phase = 0;
};
static std::map<u32, Barrier> barriers;
static void arrive(u32 address) {
  Barrier& own = barriers[address];
  if (++own.arrived == own.count) own.arrived = 0, ++own.phase;
}
static void warp_arrive(u32 address, int lane) {
  if (lane == 0) arrive(address);
}
static void mbarrier_wait(u32 address, u32 parity) {
  while ((barriers[address].phase & 1) == parity) simt::leave();
}
struct Named {
  int arrived = 0;
  unsigned generation = 0;
  bool any = false, last = false;
};
static std::map<int, Named> named;
static bool meet(int id, int threads, bool value, bool waits) {
  Named& own = named[id];
  const unsigned generation = own.generation;
  own.any |= value;
  if (++own.arrived == threads)
    own.arrived = 0, own.last = own.any, own.any = false, ++own.generation;
  else
    while (waits && own.generation == generation) simt::leave();
  return own.last;
}
static void named_barrier(int id, int threads) { meet(id, threads, false, true); }
static void named_barrier_arrive(int id, int threads) { meet(id, threads, false, false); }
template <int ID, int THREADS>
void named_barrier() {
  meet(ID, THREADS, false, true);
}
template <int ID, int THREADS>
bool named_barrier_any(bool value) {
  return meet(ID, THREADS, value, true);
}

// d[16 x 8] += a[16 x 16] b[16 x 8] of a warp, whose lanes have fragments of `a`.
template <class Number, class B>
void multiply_16_by_8(float* d, const u32* a, Number number, B b) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  u32 words[4][32];
  for (int i = 0; i < 4; ++i) {
    const auto& all = simt::meet_warp(a[i]);
    for (int l = 0; l < 32; ++l) words[i][l] = static_cast<u32>(all[l]);
  }
  for (int e = 0; e < 4; ++e) {
    const int row = g + e / 2 * 8, column = 2 * t + e % 2;
    double sum = d[e];
    for (int k = 0; k < 16; ++k) {
      const u32 pair = words[row / 8 + k / 8 * 2][row % 8 * 4 + k % 8 / 2];
      sum += static_cast<double>(number(k & 1 ? pair >> 16 : pair & 0xffff)) * b(k, column);
    }
    d[e] = sum;
  }
}
static u16 swizzled(u32 address) { return at<u16>(address ^ (address >> 7 & 7) << 4); }
template <class Number>
void keys_by_heads(float (&d)[32], const u32* a, u64 b, int add, Number number) {
  for (int tile = 0; tile < 8; ++tile) {
    float* own = d + tile * 4;
    if (!add) own[0] = own[1] = own[2] = own[3] = 0.f;
    multiply_16_by_8(own, a, number, [&](int k, int n) {
      return number(swizzled((static_cast<u32>(b) << 4) + (tile * 8 + n) * 128 + k * 2));
    });
  }
}
static void wgmma_float16(float (&d)[32], const u32* a, u64 b, int add) {
  keys_by_heads(d, a, b, add, float16_of_bits);
}
static void wgmma_bfloat16(float (&d)[32], const u32* a, u64 b, int add) {
  keys_by_heads(d, a, b, add, low_bfloat16);
}
// Rows of a warp's 16 heads, from `a` on.
static void wgmma_heads_by_dims_bfloat16(float (&d)[64], u64 a, u64 b) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, g = lane / 4, t = lane % 4;
  for (int e = 0; e < 64; ++e) {
    const int head = warp * 16 + g + e / 2 % 2 * 8, dim = e / 4 * 8 + 2 * t + e % 2;
    double sum = d[e];
    for (int k = 0; k < 16; ++k)
      sum += static_cast<double>(low_bfloat16(swizzled((static_cast<u32>(a) << 4) + head * 128 + k * 2))) *
             low_bfloat16(swizzled((static_cast<u32>(b) << 4) + dim / 64 * 8192 + k * 128 + dim % 64 * 2));
    d[e] = sum;
  }
}
#include "by_group.cuh"

using L = Layout<64, FP8_DS_MLA>;
using R = L::R;

// Dim `dim` of a chunk's 64 among bytes of its float16.
static u32 offset_of(int dim) { return dim % 16 / 4 * 32 + dim % 4 / 2 * 16 + dim % 64 / 16 * 4 + dim % 2 * 2; }

// Rows of `turns` * 64 keys, of which some count; queries [64, 576]; the order of threads. Sums of weights and of
// weights times keys, 256 times as large, [64, 512], both relative to running maxima [64].
extern "C" void by_group(int turns, const unsigned char* rows, const bool* live, const u16* q, float scale_log2,
                         unsigned seed, double* sums, float* running_max, float* out) {
  barriers.clear(), named.clear();
  for (u32 of_4_warps : {L::WEIGHTS_FULL, L::QUERIES_FREE, L::VALUES_FREE, L::VALUES_FREE + 8, L::VALUES_FREE + 16,
                         L::VALUES_FREE + 24})
    barriers[of_4_warps].count = 4;
  Params p = {};
  p.q = q, p.q_head_stride = 576, p.num_heads = 64, p.scale_log2 = scale_log2;
  std::fill_n(sums, 64, 0.0);
  simt::launch(1, 1, 416, L::BYTES, seed, [&]() {
    const int thread = threadIdx.x % 128, role = threadIdx.x / 128;
    const int warp = thread / 32, lane = thread % 32, t = lane % 4;
    if (threadIdx.x == 0)
      for (int head = 0; head < 64; ++head) {
        float most = 0;
        for (int dim = 0; dim < 576; ++dim) most = max(most, std::fabs(low_bfloat16(q[head * 576 + dim])));
        const int shift = shift_of(most > 0 ? __float_as_uint(most) : 0);
        at<float2>(L::COLUMNS + head * 8) = {scale_log2 / R::FACTOR * std::exp2f(-shift), 0.f};
        for (int dim = 0; dim < 576; ++dim) {
          const float value = low_bfloat16(q[head * 576 + dim]) * std::exp2f(shift);
          const u32 offset = dim < 512 ? offset_of(dim) : dim % 64 * 2;
          at<u16>(L::QUERY + dim / 64 * L::QUERY_CHUNK + head * 128 + (offset ^ (head & 7) << 4)) =
              dim < 512 ? bits_of_float16(value) : pack_bfloat16(value * R::FACTOR, 0.f);
        }
      }
    simt::meet_cta();
    Row row = {};
    Ring ring = {};
    if (role == 3) {  // a warp that gathers
      for (int slot = 0; lane == 0 && slot < turns * 4; ++slot) {
        const u32 place = L::RAW + slot % 8 * L::RAW_SLOT;
        mbarrier_wait(L::RAW_FREE + slot % 8 * 8, (slot / 8 & 1) ^ 1);
        u32 alive = slot / 4 == turns - 1 ? LAST_TURN : 0;
        for (int n = 0; n < 16; ++n) {
          const int key = slot * 16 + n, line = R::raw_row(n % 8) + n / 8 * 8;
          std::memset(&at<char>(place + line * R::BYTES), 0, R::BYTES);
          if (live[key])
            alive |= 1 << line, std::memcpy(&at<char>(place + line * R::BYTES), rows + key * R::BYTES, R::BYTES);
          else
            for (int i = 0; i < 4; ++i) at<u32>(place + line * R::BYTES + R::SCALES_AT + 4 * i) = R::DEAD_SCALE;
        }
        at<u32>(L::LIVE + slot % 8 * 4) = alive;
        arrive(L::RAW_FULL + slot % 8 * 8);
      }
    } else if (role == 0) {
      float own[16] = {};
      score_by_group<L, SCORE_BARRIER>(p, row, 0, thread, ring, own, false);
      for (int c = 0; c < 16; ++c) sums[c / 2 * 8 + 2 * t + c % 2] += own[c];
      named_barrier<SCORE_BARRIER, 128>();
      if (thread < 64) running_max[thread] = at<float>(L::COLUMNS + thread * 8 + 4);
    } else {
      float o[2][64] = {};
      accumulate_by_group<L>(0, role - 1, thread, ring, o);
      for (int e = 0; e < 128; ++e) {
        const int head = warp * 16 + lane / 4 + (e & 2) * 4, n = e % 64 / 4 * 8 + 2 * t + e % 2;  // as values lie
        for (int dim = 0; dim < 64; ++dim)
          if (offset_of(dim) == n % 64 * 2)
            out[head * 512 + (role - 1) * 256 + e / 64 * 128 + n / 64 * 64 + dim] = o[e / 64][e % 64];
      }
    }
  });
}
