#include <cmath>
#include <map>
#include <random>
#include <cstdio>
#include "hopper_simt.h"
#define NAMES(X) X(pack_bfloat16) X(pack_float16) X(load_shared_4) X(load_shared_8) X(load_shared_16) X(load_shared_float) X(load_shared_float2) X(load_matrices) X(fence_async_shared) X(named_barrier_arrive) X(store_matrices) X(multiply_bfloat16) X(store_shared_float)
#define pack_bfloat16 ptx_pack_bfloat16
#define pack_float16 ptx_pack_float16
#define load_shared_4 ptx_load_shared_4
#define load_shared_8 ptx_load_shared_8
#define load_shared_16 ptx_load_shared_16
#define load_shared_float ptx_load_shared_float
#define load_shared_float2 ptx_load_shared_float2
#define load_matrices ptx_load_matrices
#define fence_async_shared ptx_fence_async_shared
#define named_barrier ptx_named_barrier
#define named_barrier_arrive ptx_named_barrier_arrive
#define named_barrier_any ptx_named_barrier_any
#define store_matrices ptx_store_matrices
#define multiply_bfloat16 ptx_multiply_bfloat16
#define store_shared_float ptx_store_shared_float
#define store_shared_float2 ptx_store_shared_float2
#define store_shared_4 ptx_store_shared_4
#define store_shared_8 ptx_store_shared_8
#define store_shared_16 ptx_store_shared_16
#define mbarrier_wait ptx_mbarrier_wait
#define warp_arrive ptx_warp_arrive
#define exp2_approx ptx_exp2_approx
#define log2_approx ptx_log2_approx
#define larger_halves ptx_larger_halves
#define larger_magnitudes ptx_larger_magnitudes
#define asm
#define volatile(...)
#include "ptx.cuh"
#undef asm
#undef volatile
#undef pack_bfloat16
#undef pack_float16
#undef load_shared_4
#undef load_shared_8
#undef load_shared_16
#undef load_shared_float
#undef load_shared_float2
#undef load_matrices
#undef fence_async_shared
#undef named_barrier
#undef named_barrier_arrive
#undef named_barrier_any
#undef store_matrices
#undef multiply_bfloat16
#undef store_shared_float
#undef store_shared_float2
#undef store_shared_4
#undef store_shared_8
#undef store_shared_16
#undef mbarrier_wait
#undef warp_arrive
#undef exp2_approx
#undef log2_approx
#undef larger_halves
#undef larger_magnitudes
template <class T> T& at(u32 a) { return *reinterpret_cast<T*>(simt::shared_memory() + a); }
static float exp2_approx(float x) { return std::exp2(x); }
static float log2_approx(float x) { return std::log2(x); }
static u32 f16(float x) { _Float16 h = (_Float16)x; u16 b; std::memcpy(&b, &h, 2); return b; }
static float from16(u32 b) { u16 s = b; _Float16 h; std::memcpy(&h, &s, 2); return (float)h; }
static u32 pack_float16(float a, float b) { return f16(a) | f16(b) << 16; }
static u32 pack_bfloat16(float low, float high) {
  auto half = [](float x) { const u32 bits = __float_as_uint(x); return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16; };
  return half(low) | half(high) << 16;
}
static u32 larger_halves(u32 a, u32 b) { return std::max(a & 0xffff, b & 0xffff) | std::max(a >> 16, b >> 16) << 16; }
static u32 larger_magnitudes(u32 a, u32 b) { return larger_halves(a & 0x7fff7fff, b & 0x7fff7fff); }
static u32 multiply_bfloat16(u32 p, u32 f) { return pack_bfloat16(low_bfloat16(p) * low_bfloat16(f), high_bfloat16(p) * high_bfloat16(f)); }
static u32 load_shared_4(u32 a) { return at<u32>(a); }
static uint2 load_shared_8(u32 a) { return at<uint2>(a); }
static uint4 load_shared_16(u32 a) { if (a % 16) std::abort(); return at<uint4>(a); }
static float load_shared_float(u32 a) { return at<float>(a); }
static float2 load_shared_float2(u32 a) { if (a % 8) std::abort(); return at<float2>(a); }
static void store_shared_4(u32 a, u32 v) { at<u32>(a) = v; }
static void store_shared_8(u32 a, u32 v, u32 w) { at<u32>(a) = v, at<u32>(a + 4) = w; }
static void store_shared_float(u32 a, float v) { at<float>(a) = v; }
static void store_shared_float2(u32 a, float v, float w) { at<float>(a) = v, at<float>(a + 4) = w; }
static void store_shared_16(u32 a, u32 v, u32 w, u32 x, u32 y) { if (a % 16) std::abort(); at<u32>(a) = v, at<u32>(a + 4) = w, at<u32>(a + 8) = x, at<u32>(a + 12) = y; }
static void fence_async_shared() {}
struct Bar { int count, left; unsigned phase; };
static std::map<u32, Bar> bars;
static void arrive(u32 b) { Bar& x = bars.at(b); if (--x.left == 0) x.left = x.count, ++x.phase; if (x.left < 0) std::abort(); }
static void mbarrier_wait(u32 b, u32 parity) { while ((bars.at(b).phase & 1) == parity) simt::leave(); }
static void warp_arrive(u32 b, int lane) { if (lane == 0) arrive(b); }
struct Named { int arrived = 0; unsigned generation = 0; bool value = false, last = false; };
static std::map<int, Named> named;
static bool sync(int id, int threads, bool value, bool waits) {
  Named& n = named[id]; const unsigned g = n.generation; n.value |= value;
  if (++n.arrived == threads) { n.arrived = 0, n.last = n.value, n.value = false, ++n.generation; return n.last; }
  if (!waits) return false;
  while (n.generation == g) simt::leave();
  return n.last;
}
template <int ID, int T> void named_barrier() { sync(ID, T, false, true); }
static void named_barrier(int id, int t) { sync(id, t, false, true); }
static void named_barrier_arrive(int id, int t) { sync(id, t, false, false); }
template <int ID, int T> bool named_barrier_any(bool v) { return sync(ID, T, v, true); }
static void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
  const int lane = threadIdx.x % 32; const u32 words[4] = {a, b, c, d};
  const auto rows = simt::meet_warp(address);
  for (int i = 0; i < 4; ++i) at<u32>((u32)rows[i * 8 + lane / 4] + lane % 4 * 4) = words[i];
}
static uint4 load_matrices(u32 address) {
  const int lane = threadIdx.x % 32; const auto rows = simt::meet_warp(address); u32 w[4];
  for (int i = 0; i < 4; ++i) w[i] = at<u32>((u32)rows[i * 8 + lane / 4] + lane % 4 * 4);
  return {w[0], w[1], w[2], w[3]};
}
// fragments of a warp: d[16 x 8] += a[16 x 16] b[16 x 8]; number(k, n) of b
template <class A, class B>
static void mma(float& d0, float& d1, float& d2, float& d3, const u32* a, A toa, B b) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  u32 words[4][32];
  for (int i = 0; i < 4; ++i) { const auto& all = simt::meet_warp(a[i]); for (int l = 0; l < 32; ++l) words[i][l] = (u32)all[l]; }
  float* d[4] = {&d0, &d1, &d2, &d3};
  for (int e = 0; e < 4; ++e) {
    const int row = g + e / 2 * 8, column = 2 * t + e % 2; double sum = *d[e];
    for (int k = 0; k < 16; ++k) { const u32 w = words[row / 8 + k / 8 * 2][row % 8 * 4 + k % 8 / 2]; sum += (double)toa(k & 1 ? w >> 16 : w & 0xffff) * b(k, column); }
    *d[e] = sum;
  }
}
static float frombf(u32 x) { return low_bfloat16(x); }
template <class T>
static void keys_by_heads(float (&d)[32], const u32* a, u64 b, int add, T conv) {
  for (int tile = 0; tile < 8; ++tile) {
    float* own = d + tile * 4; if (!add) own[0] = own[1] = own[2] = own[3] = 0;
    mma(own[0], own[1], own[2], own[3], a, conv, [&](int k, int n) { u32 x = ((u32)b << 4) + (tile * 8 + n) * 128 + k * 2; x ^= (x >> 7 & 7) << 4; return conv(at<u16>(x)); });
  }
}
static void wgmma_float16(float (&d)[32], const u32* a, u64 b, int add) { keys_by_heads(d, a, b, add, from16); }
static void wgmma_bfloat16(float (&d)[32], const u32* a, u64 b, int add) { keys_by_heads(d, a, b, add, frombf); }
static void wgmma_heads_by_dims(float (&d)[64], const u32* a, u64 b) {
  for (int tile = 0; tile < 16; ++tile) {
    float* own = d + tile * 4;
    mma(own[0], own[1], own[2], own[3], a, from16, [&](int k, int n) { const int dim = tile * 8 + n; u32 x = ((u32)b << 4) + dim / 64 * 8192 + k * 128 + dim % 64 * 2; x ^= (x >> 7 & 7) << 4; return from16(at<u16>(x)); });
  }
}
static u64 tile_descriptor(u32 address, u32, u32) { return address >> 4; }
static void wgmma_fence() {} static void wgmma_commit() {} template <int> static void wgmma_wait() {}
static void e4m3_to_float16(u32 word, u32& low, u32& high) {
  float v[4];
  for (int i = 0; i < 4; ++i) { const int byte = word >> 8 * i & 255, e = byte >> 3 & 15, m = byte & 7; float x = e ? std::ldexp(8.f + m, e - 10) : std::ldexp(1.f * m, -9); if ((byte & 127) == 127) x = NAN; v[i] = byte & 128 ? -x : x; }
  low = pack_float16(v[0], v[1]), high = pack_float16(v[2], v[3]);
}
static u32 smaller_halves(u32 a, u32 b) { return std::min(a & 0xffff, b & 0xffff) | std::min(a >> 16, b >> 16) << 16; }
#include "by_group.cuh"
using L = Layout<64, FP8_DS_MLA>; using R = L::R;
static float value_of(int byte) { u32 lo, hi; e4m3_to_float16(byte, lo, hi); return from16(lo & 0xffff); }
int main(int argc, char** argv) {
  const int TURNS = 5; int bad = 0;
  for (int mode = 0; mode < 6; ++mode) {
    std::mt19937 rng(mode + 1); std::normal_distribution<float> normal; std::uniform_real_distribution<float> uni(-1, 1);
    const int span = mode == 1 ? 30 : 12; const bool seen = mode >= 2; const bool spreadq = mode == 3; const bool dead = mode == 4;
    std::vector<unsigned char> rows(TURNS * 64 * 656);
    std::vector<u16> q(64 * 576); std::vector<float> qs(64 * 576);
    for (int h = 0; h < 64; ++h) for (int d = 0; d < 576; ++d) { float x = normal(rng); if (spreadq && d < 512) x *= std::exp2((float)(d / 128 * -13)); if (mode == 5) x *= 0; q[h * 576 + d] = pack_bfloat16(x, 0); qs[h * 576 + d] = low_bfloat16(q[h * 576 + d]); }
    std::vector<double> keys(TURNS * 64 * 576); std::vector<bool> live(TURNS * 64);
    for (int k = 0; k < TURNS * 64; ++k) {
      float scale[4];
      live[k] = !(dead && rng() % 3 == 0);
      for (int g = 0; g < 4; ++g) { scale[g] = std::exp2(uni(rng) * span) / 100; if (mode == 1 && rng() % 4 == 0) scale[g] = 0; if (spreadq) scale[g] = std::exp2(g * 13.f) / 100; }
      for (int d = 0; d < 512; ++d) { float x = normal(rng) * 100; int best = rng() % 126; best |= (rng() & 1) << 7; rows[k * 656 + d] = best; keys[k * 576 + d] = (double)value_of(best) * scale[d / 128]; }
      std::memcpy(&rows[k * 656 + 512], scale, 16);
      for (int d = 0; d < 64; ++d) { u16 b = pack_bfloat16(normal(rng), 0); std::memcpy(&rows[k * 656 + 528 + 2 * d], &b, 2); keys[k * 576 + 512 + d] = low_bfloat16(b); }
    }
    // scale so that scores are moderate
    double big = 1e-30; for (int k = 0; k < TURNS * 64; ++k) for (int h = 0; h < 64; ++h) { double s = 0; for (int d = 0; d < 576; ++d) s += keys[k * 576 + d] * qs[h * 576 + d]; big = std::max(big, std::fabs(s)); }
    const float scale_log2 = (mode == 0 ? 300 : 40) / big;
    const float ref0 = 3;  // before, if seen
    std::vector<float> got(64 * 512), sums(64), refs(64); 
    bars.clear(); named.clear();
    auto add = [](u32 b, int count) { bars[b] = {count, count, 0}; };
    for (int s = 0; s < 8; ++s) add(L::RAW_FULL + 8 * s, 1), add(L::RAW_FREE + 8 * s, 1);
    add(L::WEIGHTS_FULL, 4); for (int s = 0; s < 4; ++s) add(L::VALUES_FREE + 8 * s, 4);
    add(L::QUERIES_FREE, 4);
    Params p = {}; p.q = q.data(); p.q_head_stride = 576; p.num_heads = 64; p.scale_log2 = scale_log2;
    std::vector<float> o0(64 * 512); if (seen) for (auto& x : o0) x = normal(rng) * 1000;
    static std::vector<u32> shape(1); 
    simt::launch(1, 1, 416, L::BYTES, mode, [&]() {
      const int thread = threadIdx.x & 127, wg = threadIdx.x >> 7, warp = thread / 32, lane = thread % 32;
      if (threadIdx.x == 0) {
        for (int h = 0; h < 64; ++h) {
          float most = 0; for (int d = 0; d < 576; ++d) most = std::max(most, std::fabs(qs[h * 576 + d]));
          const int shift = most > 0 ? 142 - (int)(__float_as_uint(most) >> 23) : 110;
          at<float>(L::COLUMNS + h * 8) = scale_log2 / 256 * std::exp2((float)-shift), at<float>(L::COLUMNS + h * 8 + 4) = seen ? ref0 : 0;
          for (int d = 0; d < 512; ++d) { const u32 off = d % 16 / 4 * 32 + d % 4 / 2 * 16 + d % 64 / 16 * 4 + d % 2 * 2; at<u16>(L::QUERY + d / 64 * L::QUERY_CHUNK + h * 128 + (off ^ (h & 7) << 4)) = f16(qs[h * 576 + d] * std::exp2((float)shift)); }
          for (int d = 0; d < 64; ++d) at<u16>(L::QUERY + 8 * L::QUERY_CHUNK + h * 128 + (d * 2 ^ (h & 7) << 4)) = pack_bfloat16(qs[h * 576 + 512 + d] * std::exp2((float)shift + 8), 0);
        }
      }
      simt::meet_cta();
      Row row = {}; Ring ring = {};
      if (wg == 3) {
        if (lane == 0) for (int t = 0; t < TURNS; ++t) for (int w = 0; w < 4; ++w) {
          const int slot = (t & 1) * 4 + w; mbarrier_wait(L::RAW_FREE + 8 * slot, (t >> 1 & 1) ^ 1);
          u32 alive = t == TURNS - 1 ? LAST_TURN : 0;
          std::memset(&at<char>(L::RAW + slot * L::RAW_SLOT), 0, L::RAW_SLOT);
          for (int r = 0; r < 16; ++r) { // raw row r holds key index: g for which raw_row(g)=r%8, + 8 if r>=8
            int g = 0; while (R::raw_row(g) != r % 8) ++g; const int key = t * 64 + w * 16 + g + (r & 8);
            if (live[key]) alive |= 1 << r, std::memcpy(&at<char>(L::RAW + slot * L::RAW_SLOT + r * 656), &rows[key * 656], 656);
            else for (int i = 0; i < 4; ++i) at<u32>(L::RAW + slot * L::RAW_SLOT + r * 656 + 512 + 4 * i) = R::DEAD_SCALE;
          }
          at<u32>(L::LIVE + slot * 4) = alive; arrive(L::RAW_FULL + 8 * slot);
        }
        return;
      }
      if (wg == 0) {
        float sum[16], part[32]; for (auto& x : sum) x = seen ? 0.25f : 0; for (auto& x : part) x = 0;
        score_by_group<L, SCORE_BARRIER, true>(p, row, 0, thread, ring, sum, part, seen);
        store_sums<64>(sum, L::RAW + warp * 256, lane);
        sync(20, 384, false, true);
        if (thread < 64) sums[thread] = sum_of<64>(L::RAW, thread), refs[thread] = at<float>(L::COLUMNS + thread * 8 + 4);
      } else {
        const int half = wg - 1, g = lane / 4, t = lane % 4;
        float o[2][64];
        for (int piece = 0; piece < 2; ++piece) for (int e = 0; e < 64; ++e) o[piece][e] = o0[(warp * 16 + g + (e & 2) * 4) * 512 + half * 256 + piece * 128 + e / 4 * 8 + 2 * t + (e & 1)];
        mbarrier_wait(L::WEIGHTS_FULL, 0);
        accumulate_by_group<L, true>(0, half, thread, ring, o);
        for (int piece = 0; piece < 2; ++piece) for (int e = 0; e < 64; ++e) got[(warp * 16 + g + (e & 2) * 4) * 512 + half * 256 + piece * 128 + e / 4 * 8 + 2 * t + (e & 1)] = o[piece][e];
        sync(20, 384, false, true);
      }
    });
    double worst = 0, worst_sum = 0;
    for (int h = 0; h < 64; ++h) {
      std::vector<double> w(TURNS * 64); double total = seen ? 32 * 0.25 * std::exp2(ref0 - refs[h]) : 0;
      for (int k = 0; k < TURNS * 64; ++k) { double s = 0; for (int d = 0; d < 576; ++d) s += keys[k * 576 + d] * qs[h * 576 + d]; w[k] = live[k] ? std::exp2(s * scale_log2 - refs[h]) : 0; total += w[k]; }
      if (h < 3) std::printf("  h %d sum %g total %g ref %g\n", h, sums[h], total, refs[h]);
      worst_sum = std::max(worst_sum, std::fabs(sums[h] / total - 1));
      for (int n = 0; n < 512; ++n) {
        // position n of a chunk in memory is which dim?
        int pos = n % 64, dim = -1;
        for (int d = 0; d < 64; ++d) if ((d % 16 / 4 * 32 + d % 4 / 2 * 16 + d / 16 * 4 + d % 2 * 2) == pos * 2) dim = n / 64 * 64 + d;
        double exact = seen ? o0[h * 512 + n] * std::exp2(ref0 - refs[h]) : 0, size = std::fabs(exact), most = 0, bytes = 0;
        for (int k = 0; k < TURNS * 64; ++k) {
          float sc; std::memcpy(&sc, &rows[k * 656 + 512 + dim / 128 * 4], 4);
          exact += w[k] * 256 * keys[k * 576 + dim], size += std::fabs(w[k] * 256 * keys[k * 576 + dim]);
          most = std::max(most, w[k] * 256 * sc), bytes += std::fabs(value_of(rows[k * 656 + dim]));
        }
        size += std::exp2(-32 + 12) * most * bytes;
        const double e = std::fabs(got[h * 512 + n] - exact) / (size + 1e-300); worst = std::max(worst, std::isnan(e) ? 1e9 : e);
      }
    }
    std::printf("mode %d: sums %.3g values %.3g (2^-11 is %.3g)\n", mode, worst_sum, worst, 1 / 2048.);
    std::fflush(stdout);
  }
}
