// Scores and values of wide turns: the Hopper kernels' own code, compiled for a CPU. `test_hopper_wide.py` builds it.
#include <cmath>

#include "hopper_simt.h"

#define pack_bfloat16 ptx_pack_bfloat16
#define load_shared_4 ptx_load_shared_4
#define load_shared_8 ptx_load_shared_8
#define load_shared_16 ptx_load_shared_16
#define load_shared_float ptx_load_shared_float
#define store_shared_float ptx_store_shared_float
#define copy_16_or_zeros ptx_copy_16_or_zeros
#define wait_for_copies ptx_wait_for_copies
#define named_barrier ptx_named_barrier
#define store_matrices ptx_store_matrices
#include "ptx.cuh"
#undef pack_bfloat16
#undef load_shared_4
#undef load_shared_8
#undef load_shared_16
#undef load_shared_float
#undef store_shared_float
#undef copy_16_or_zeros
#undef wait_for_copies
#undef named_barrier
#undef store_matrices
#define multiply_16_by_8 ptx_multiply_16_by_8
#define e4m3_to_bfloat16 ptx_e4m3_to_bfloat16
#include "wide_ptx.cuh"
#undef multiply_16_by_8
#undef e4m3_to_bfloat16

unsigned __byte_perm(unsigned a, unsigned b, unsigned choice) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  unsigned v = 0;
  for (int i = 0; i < 4; ++i) v |= static_cast<unsigned>(both >> (choice >> 4 * i & 7) * 8 & 255) << 8 * i;
  return v;
}

static u32 pack_bfloat16(float low, float high) {
  auto half = [](float x) {
    const u32 bits = __float_as_uint(x);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
  };
  return half(low) | half(high) << 16;
}

template <class T>
T& at(u32 address) {
  return *reinterpret_cast<T*>(simt::shared_memory() + address);
}
static u32 load_shared_4(u32 address) { return at<u32>(address); }
static uint2 load_shared_8(u32 address) { return at<uint2>(address); }
static uint4 load_shared_16(u32 address) { return at<uint4>(address); }
static float load_shared_float(u32 address) { return at<float>(address); }
static void store_shared_float(u32 address, float value) { at<float>(address) = value; }
template <int TO, int FROM>
void copy_16_or_zeros(u32 destination, const void* source, u32 bytes) {
  std::memset(&at<char>(destination + TO), 0, 16);
  std::memcpy(&at<char>(destination + TO), static_cast<const char*>(source) + FROM, bytes);
}
static void wait_for_copies() {}
template <int ID, int THREADS>
void named_barrier() {
  simt::meet_cta();
}

static u32 e4m3_to_bfloat16(u32 pair) {
  float v[2];
  for (int i = 0; i < 2; ++i) {
    const int byte = pair >> 8 * i & 255, exponent = byte >> 3 & 15, mantissa = byte & 7;
    float x = exponent ? std::ldexp(8.f + mantissa, exponent - 10) : std::ldexp(1.f * mantissa, -9);
    if ((byte & 127) == 127) x = NAN;
    v[i] = byte & 128 ? -x : x;
  }
  return pack_bfloat16(v[0], v[1]);
}

// As the fragments are laid out over a warp's lanes.
static void multiply_16_by_8(float& d0, float& d1, float& d2, float& d3, const u32 (&a)[4], const u32 (&b)[2]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  u32 words[6][32];
  for (int i = 0; i < 6; ++i) {
    const auto& all = simt::meet_warp(i < 4 ? a[i] : b[i - 4]);
    for (int l = 0; l < 32; ++l) words[i][l] = static_cast<u32>(all[l]);
  }
  auto half = [](u32 word, int k) { return k & 1 ? high_bfloat16(word) : low_bfloat16(word); };
  float* d[4] = {&d0, &d1, &d2, &d3};
  for (int e = 0; e < 4; ++e) {
    const int row = g + e / 2 * 8, column = 2 * t + e % 2;
    for (int k = 0; k < 16; ++k)
      *d[e] += half(words[row / 8 + k / 8 * 2][row % 8 * 4 + k % 8 / 2], k) *
               half(words[4 + k / 8][column * 4 + k % 8 / 2], k);
  }
}

static void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
  const int lane = threadIdx.x % 32;
  const u32 words[4] = {a, b, c, d};
  const auto rows = simt::meet_warp(address);
  for (int i = 0; i < 4; ++i) at<u32>(static_cast<u32>(rows[i * 8 + lane / 4]) + lane % 4 * 4) = words[i];
}

static u64 tile_descriptor(u32 address) { return address >> 4; }
static void wgmma_fence() {}
static void wgmma_commit() {}
template <int>
static void wgmma_wait() {}

// Rows of 128 bytes in the swizzle, 16 keys by 64 dims.
static void wgmma_heads_by_64_dims(float* d, const u32 (&a)[4], u64 b) {
  const int t = threadIdx.x % 4;
  const u32 base = static_cast<u32>(b) << 4;
  for (int tile = 0; tile < 8; ++tile) {
    const int g = threadIdx.x % 32 / 4;
    auto bits = [&](int k) -> u32 { return at<u16>(base + k * 128 + ((tile ^ (k & 7)) << 4) + g * 2); };
    const u32 words[2] = {bits(2 * t) | bits(2 * t + 1) << 16, bits(2 * t + 8) | bits(2 * t + 9) << 16};
    multiply_16_by_8(d[tile * 4], d[tile * 4 + 1], d[tile * 4 + 2], d[tile * 4 + 3], a, words);
  }
}

#define __fdividef(a, b) ((a) / (b))
#include "wide.cuh"

static int dim_of_row(int warp, int g) { return 16 * (g >> 1) + 4 * warp + (g & 1); }

// 64 rows and scales as they lie in shared memory, scores [64, HEADS]; weights [64, HEADS], sums [HEADS, 512].
template <int HEADS, Format FORMAT>
void run(const unsigned char* rows, const unsigned char* scales, const u16* q, const u16* q_rope, int num_heads,
         float scale_log2, float* scores, const float* weights, float* sums) {
  using L = Layout<HEADS, FORMAT>;
  using R = Rows<FORMAT>;
  Params p = {};
  p.q = q, p.q_rope = q_rope, p.q_head_stride = 512, p.q_rope_head_stride = 64, p.num_heads = num_heads;
  p.scale_log2 = scale_log2;
  Row row = {};
  simt::launch(1, 1, 128, L::BYTES, 1, [&]() {
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    if (thread == 0) {
      std::memcpy(&at<char>(L::RAW), rows, 64 * R::BYTES);
      if (R::SCALES_APART) std::memcpy(&at<char>(L::SCALES), scales, 64 * R::SCALES_PITCH);
    }
    simt::meet_cta();
    const int key = warp * 16 + R::raw_row(lane / 4);
    float s[HEADS / 2];
    wide_scores<L, 1>(s, p, row, L::RAW + warp * L::RAW_SLOT, L::SCALES + warp * L::SCALES_SLOT,
                      L::VALUES + WideQueries<L>::TABLE, thread);
    for (int e = 0; e < HEADS / 2; ++e)
      scores[(key + (e & 2) * 4) * HEADS + e / 4 * 8 + 2 * (lane & 3) + (e & 1)] = s[e] * scale_log2;
    simt::meet_cta();
    if constexpr (HEADS == 64) {
      const u32 values = L::VALUES + (warp * 16 + (lane & 15)) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
      store_wide_values<FORMAT>(L::RAW + warp * L::RAW_SLOT + R::raw_row(lane / 4) * R::BYTES, values, lane & 3);
      simt::meet_cta();
      for (int key = thread; key < 64; key += 128)
        std::memcpy(&at<char>(L::RAW + key * R::BYTES), weights + key * 64, 256);
    } else if (thread == 0) {
      std::memcpy(&at<char>(L::VALUES), weights, WideQueries<L>::TABLE);
    }
    simt::meet_cta();
    const int g = lane / 4, t = lane % 4;
    for (int half = 0; half < 2; ++half) {
      float o[HEADS == 64 ? 2 : 4][HEADS == 64 ? 64 : HEADS / 2] = {};
      for (int key = 0; key < 64; key += 16) {
        const u32 raw = L::RAW + key / 16 * L::RAW_SLOT, own_scales = L::SCALES + key / 16 * L::SCALES_SLOT,
                  table = L::VALUES + key * HEADS * 4;
        if constexpr (HEADS == 64)
          accumulate_wide<FORMAT>(o, raw, own_scales, tile_descriptor(L::VALUES + half * HALF_BYTES + key * 128), half,
                                  thread);
        else
          accumulate_wide<HEADS, FORMAT>(o, raw, own_scales, table, half, thread);
      }
      if constexpr (HEADS == 64) {
        for (int e = 0; e < 128; ++e) {
          const int head = warp * 16 + g + (e & 2) * 4;
          const int dim = half * 256 + 16 * t + e / 32 * 64 + e % 32 / 4 * 2 + e % 2;
          sums[head * 512 + dim] = o[e / 64][e % 64];
        }
      } else {
        for (int piece = 0; piece < 4; ++piece)
          for (int e = 0; e < HEADS / 2; ++e) {
            const int head = e / 4 * 8 + 2 * t + (e & 1),
                      dim = half * 256 + dim_of_row(warp, g) + piece * 64 + (e & 2);
            sums[head * 512 + dim] = o[piece][e];
          }
      }
    }
  });
}

extern "C" int wide(int heads, int v4, const unsigned char* rows, const unsigned char* scales, const u16* q,
                    const u16* q_rope, int num_heads, float scale_log2, float* scores, const float* weights,
                    float* sums) {
#define RUN(HEADS)                                                                                                  \
  if (heads == HEADS)                                                                                               \
    return (v4 ? run<HEADS, FP8_DS_MLA_V4> : run<HEADS, FP8_DS_MLA>)(rows, scales, q, q_rope, num_heads, scale_log2, \
                                                                     scores, weights, sums),                        \
           0;
  RUN(16) RUN(24) RUN(32) RUN(64)
  return 1;
}
