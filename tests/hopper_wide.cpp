// Scores and values of wide turns: the Hopper kernels' own code, compiled for a CPU. `test_hopper_wide.py` builds it.
#include <cmath>

#include "hopper_simt.h"

#define pack_bfloat16 ptx_pack_bfloat16
#define load_shared_4 ptx_load_shared_4
#define load_shared_8 ptx_load_shared_8
#define load_shared_16 ptx_load_shared_16
#define load_shared_float ptx_load_shared_float
#define load_shared_float2 ptx_load_shared_float2
#define load_matrices ptx_load_matrices
#define copy_4 ptx_copy_4
#define wait_for_copies_but ptx_wait_for_copies_but
#define commit_copies ptx_commit_copies
#define fence_async_shared ptx_fence_async_shared
#define named_barrier ptx_named_barrier
#define store_matrices ptx_store_matrices
#define store_matrices_transposed ptx_store_matrices_transposed
#define multiply_bfloat16 ptx_multiply_bfloat16
#define reciprocal_approx ptx_reciprocal_approx
#define store_shared_float ptx_store_shared_float
#define store_shared_4 ptx_store_shared_4
#define store_shared_16 ptx_store_shared_16
#include "ptx.cuh"
#undef pack_bfloat16
#undef load_shared_4
#undef load_shared_8
#undef load_shared_16
#undef load_shared_float
#undef load_shared_float2
#undef load_matrices
#undef copy_4
#undef wait_for_copies_but
#undef commit_copies
#undef fence_async_shared
#undef named_barrier
#undef store_matrices
#undef store_matrices_transposed
#undef multiply_bfloat16
#undef reciprocal_approx
#undef store_shared_float
#undef store_shared_4
#undef store_shared_16
#define e4m3_to_bfloat16 ptx_e4m3_to_bfloat16
#define multiply_e4m3 ptx_multiply_e4m3
#include "wide_ptx.cuh"
#undef e4m3_to_bfloat16
#undef multiply_e4m3

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
static void store_shared_4(u32 address, u32 word) { at<u32>(address) = word; }
static void store_shared_16(u32 address, u32 a, u32 b, u32 c, u32 d) { at<uint4>(address) = {a, b, c, d}; }
static float load_shared_float(u32 address) { return at<float>(address); }
static float2 load_shared_float2(u32 address) { return at<float2>(address); }
static void copy_4(u32 destination, const void* source) { std::memcpy(&at<char>(destination), source, 4); }
template <int>
void wait_for_copies_but() {}
static void commit_copies() {}
static void fence_async_shared() {}
template <int ID, int THREADS>
void named_barrier() {
  simt::meet_cta();
}

static float of_e4m3(int byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  const float x = exponent ? std::ldexp(8.f + mantissa, exponent - 10) : std::ldexp(1.f * mantissa, -9);
  return (byte & 127) == 127 ? NAN : byte & 128 ? -x : x;
}

static u32 e4m3_to_bfloat16(u32 pair) { return pack_bfloat16(of_e4m3(pair & 255), of_e4m3(pair >> 8 & 255)); }

// By a power of two of at most 1, to nearest even.
static u32 multiply_e4m3(u32 word, u32 factor) {
  u32 result = 0;
  for (int i = 0; i < 4; ++i) {
    const int byte = word >> 8 * i & 255, sign = byte & 128;
    const float x = std::fabs(of_e4m3(byte)) * std::ldexp(1.f, static_cast<int>(factor >> 10 & 31) - 15);
    int found = 127;
    for (int one = 0; one < 127; ++one) {
      const float off = std::fabs(of_e4m3(one) - x), best = found == 127 ? INFINITY : std::fabs(of_e4m3(found) - x);
      if (off < best || off == best && one % 2 == 0) found = one;
    }
    result |= static_cast<u32>(sign | found) << 8 * i;
  }
  return result;
}

// The fragments lie as a warp's lanes have them.
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

#include "hopper_matrices.h"

static u32 multiply_bfloat16(u32 pair, u32 factor) {
  return pack_bfloat16(low_bfloat16(pair) * low_bfloat16(factor), high_bfloat16(pair) * high_bfloat16(factor));
}
static float reciprocal_approx(float x) { return 1 / x; }
static void store_shared_float(u32 address, float value) { at<float>(address) = value; }

// Keys in registers times heads in rows of 128 bytes in the swizzle.
template <int N>
void wgmma_bfloat16(float (&d)[N], const u32* a, u64 b, int add) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const u32 fragment[4] = {a[0], a[1], a[2], a[3]};
  for (int tile = 0; tile < N / 4; ++tile) {
    auto word = [&](int k) {
      const u32 address = (static_cast<u32>(b) << 4) + (tile * 8 + g) * 128 + k * 2;
      return at<u32>(address ^ (address >> 7 & 7) << 4);
    };
    const u32 words[2] = {word(2 * t), word(2 * t + 8)};
    float* own = d + tile * 4;
    if (!add) own[0] = own[1] = own[2] = own[3] = 0.f;
    multiply_16_by_8(own[0], own[1], own[2], own[3], fragment, words);
  }
}

#define __fdividef(a, b) ((a) / (b))
#include "keys.cuh"
#include "wide.cuh"

// 64 rows and scales as they lie in shared memory, scores [64, HEADS]; weights [64, HEADS], sums [HEADS, 512].
template <int HEADS, Format FORMAT>
void run(const unsigned char* rows, const unsigned char* scales, const u16* q, const u16* q_rope, int num_heads,
         float scale_log2, float* scores, const float* weights, float* sums) {
  using L = Layout<HEADS, FORMAT>;
  using R = Rows<FORMAT>;
  constexpr int CHUNK = TILE_KEYS * 128;
  constexpr float UNDO = 0.25f;  // what a head's column undoes of its RoPE
  Params p = {};
  p.q = q, p.q_head_stride = 512, p.num_heads = num_heads, p.scale_log2 = scale_log2;
  Row row = {};
  Ring ring = {};
  simt::launch(1, 1, 128, L::BYTES, 1, [&]() {
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, t = lane % 4;
    if (thread == 0) {
      std::memcpy(&at<char>(L::RAW), rows, 64 * R::BYTES);
      if (R::SCALES_APART) std::memcpy(&at<char>(L::SCALES), scales, 64 * R::SCALES_PITCH);
      for (int head = 0; head < HEADS; ++head) {
        at<float>(L::COLUMNS + head * 8) = scale_log2 * UNDO, at<float>(L::COLUMNS + head * 8 + 4) = 3.f * head;
        for (int dim = 0; dim < 64 && !R::ROPE_IS_VALUE; ++dim)
          at<u16>(L::QUERY + 8 * L::QUERY_CHUNK + head * 128 + (dim * 2 ^ (head & 7) << 4)) =
              pack_bfloat16(low_bfloat16(q_rope[min(head, num_heads - 1) * 64 + dim]) / UNDO, 0.f);
      }
    }
    simt::meet_cta();
    const int first = R::raw_row(lane / 4), key = warp * 16 + first;
    const u32 rests = place_of_rests<L>(0, 0);
    const u32 matrix_row =
        R::ROPE_AT + (R::raw_row(lane & 7) + (lane & 8) - first) * R::BYTES + (lane >> 4) * 16 - t * 16;
    const WidePlaces places{L::RAW + warp * L::RAW_SLOT + first * R::BYTES + t * 16,
                            R::ROPE_IS_VALUE ? R::ROPE_AT + t * 16 : matrix_row,
                            L::SCALES + warp * L::SCALES_SLOT + first * R::SCALES_PITCH,
                            L::VALUES + (warp * 16 + (lane & 15)) * 128 + (((lane >> 4) ^ (lane & 7)) << 4)};
    float s[HEADS / 2];
    wide_scores<L, 1>(s, p, row, ring, 0, places, thread);
    store_left_out<L, 1>(places.scales, rests, thread);
    for (int e = 0; e < HEADS / 2; ++e) {
      const int place = (key + (e & 2) * 4) * HEADS + e / 4 * 8 + 2 * t + (e & 1);
      scores[place] = s[e] + 3.f * (place % HEADS), s[e] = weights[place];
    }
    store_wide_weights<L>(s, 0, rests, thread);
    simt::meet_cta();
    // Lane t of four has dims 16 t to 16 t + 15 of a chunk, whose words 2 j and 2 j + 1 are step j's.
    for (int e = thread; e < HEADS * 512; e += 128) {
      const int head = e / 512, dim = e % 512;
      const u32 value = L::VALUES + dim / 64 * CHUNK,
                offset = dim % 16 / 4 * 32 + dim % 4 / 2 * 16 + dim % 64 / 16 * 4 + dim % 2 * 2;
      const u32 own = rests + (GROUPS_OF_RESTS<L> > 1 ? dim / 128 : 0) * (HEADS * 128);
      double sum = 0;
      for (int k = 0; k < 64; ++k) {
        auto number = [&](u32 matrix, int line, u32 column) {
          return low_bfloat16(at<u16>(matrix + line * 128 + (column ^ (line & 7) << 4)));
        };
        const double weight = number(L::WEIGHTS, head, k * 2);
        sum += (weight + number(own, head, k * 2)) * number(value, k, offset);
      }
      sums[e] = sum;
    }
  });
}

extern "C" int wide(int heads, int v4, const unsigned char* rows, const unsigned char* scales, const u16* q,
                    const u16* q_rope, int num_heads, float scale_log2, float* scores, const float* weights, float* sums) {
#define RUN(HEADS)                                                                                                  \
  if (heads == HEADS)                                                                                               \
    return (v4 ? run<HEADS, FP8_DS_MLA_V4> : run<HEADS, FP8_DS_MLA>)(rows, scales, q, q_rope, num_heads, scale_log2, \
                                                                     scores, weights, sums),                        \
           0;
  RUN(16) RUN(24) RUN(32) RUN(64)
  return 1;
}

// 64 rows and their scales once small groups are divided, and of each key the power of two taken out and its kind. Keys of
// a warp stay as they are if one of them is wide.
template <Format FORMAT>
void lower_rows(unsigned char* rows, unsigned char* scales, u32* undo, u32* kinds) {
  using L = Layout<64, FORMAT>;
  using R = Rows<FORMAT>;
  simt::launch(1, 1, 128, L::BYTES, 1, [&]() {
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    if (thread == 0) {
      std::memcpy(&at<char>(L::RAW), rows, 64 * R::BYTES);
      if (R::SCALES_APART) std::memcpy(&at<char>(L::SCALES), scales, 64 * R::SCALES_PITCH);
    }
    simt::meet_cta();
    const Places places = places_of<64, FORMAT>(0, warp, lane);
    const u32 scales_0 = places.scales + warp * L::SCALES_SLOT;
    // Two warpgroups of scores have steps of their own.
    ScalesOfTwo<FORMAT> own{{R::load_scales(scales_0), R::load_scales(scales_0 + 8 * R::SCALES_PITCH)}};
    u32 kind = 0;
    for (int r = 0; r < 2; ++r) {
      const int key = warp * 16 + R::raw_row(lane / 4) + r * 8;
      kind |= kinds[key] = R::template take_out<true>(own.of[r], undo[key]);
    }
    if (__reduce_or_sync(~0u, kind) == HAS_SMALL) {
      lower_keys<FORMAT, 0, 3>(own, places.raw + warp * L::RAW_SLOT);
      lower_keys<FORMAT, 3, R::LATENT / 64>(own, places.raw + warp * L::RAW_SLOT);
    }
    raise_scales<FORMAT>(scales_0, thread);
    simt::meet_cta();
    if (thread == 0) {
      std::memcpy(rows, &at<char>(L::RAW), 64 * R::BYTES);
      if (R::SCALES_APART) std::memcpy(scales, &at<char>(L::SCALES), 64 * R::SCALES_PITCH);
    }
  });
}

extern "C" void lower(int v4, unsigned char* rows, unsigned char* scales, u32* undo, u32* kinds) {
  (v4 ? lower_rows<FP8_DS_MLA_V4> : lower_rows<FP8_DS_MLA>)(rows, scales, undo, kinds);
}
