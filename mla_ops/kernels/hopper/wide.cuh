// Turns with a key whose scales float16 does not hold together: scores and values out of the cache's bytes as bfloat16,
// which holds e4m3 and RoPE as they are. Scales stay float32.
#pragma once

#include "layout.cuh"
#include "wide_ptx.cuh"

// A tile's queries in bfloat16, chunks up to the fourth or from it on, behind the table of weights: a row of PITCH bytes
// for each head, so that eight of them lie in other banks.
template <class L>
struct WideQueries {
  static constexpr int TABLE = TILE_KEYS * L::HEADS * 4, PITCH = (L::R::CHUNKS - 4) * 128 + 32;
  static_assert(TABLE + L::HEADS * PITCH <= (L::HALVES == 2 ? 2 : 1) * HALF_BYTES, "queries leave the values' place");
};

template <class L>
DEVICE void copy_wide_queries(const Params& p, int token, int tile, u32 to, bool second, int warp, int lane) {
  to += warp * WideQueries<L>::PITCH + lane * 16;
#pragma unroll 1
  for (int head = warp; head < L::HEADS; head += 4, to += 4 * WideQueries<L>::PITCH) {
    const int global_head = tile * L::HEADS + head;
    const u32 bytes = global_head < p.num_heads ? 16 : 0;
    const int own = bytes ? global_head : 0;
    copy_16_or_zeros<0, 0>(to, query_at(p, token, own) + (second ? 256 : 0) + lane * 8, bytes);
    if (L::R::CHUNKS > 8 && second && lane < 8)
      copy_16_or_zeros<512, 0>(to, query_rope_at(p, token, own) + lane * 8, bytes);
  }
}

// Scores of a warp's 16 keys, which lie from `raw` and `scales` on, and all heads, as the usual products leave them. In
// each step of 16 dims a lane has four neighbouring ones.
template <class L, int BARRIER>
DEVICE void wide_scores(float (&s)[L::HEADS / 2], const Params& p, const Row& row, u32 raw, u32 scales, u32 queries,
                        int thread) {
  using R = typename L::R;
  constexpr int TILES = L::HEADS / 8, PITCH = WideQueries<L>::PITCH;
  const int lane = thread & 31, g = lane >> 2, t = lane & 3;
  int token = row.token, tile = row.tile;
  hold(token), hold(tile);  // else what is made of them would take registers of all turns
  raw += R::raw_row(g) * R::BYTES, scales += R::raw_row(g) * R::SCALES_PITCH;
#pragma unroll
  for (int e = 0; e < TILES * 4; ++e) s[e] = 0.f;
#pragma unroll 1
  for (int chunk = 0; chunk < R::CHUNKS; ++chunk) {
    if (chunk == 0 || chunk == 4) {
      named_barrier<BARRIER, 128>();  // all have read what lies there
      copy_wide_queries<L>(p, token, tile, queries, chunk == 4, thread >> 5, lane);
      wait_for_copies();
      named_barrier<BARRIER, 128>();
    }
    u32 query = queries + g * PITCH + t * 8 + (chunk < 4 ? chunk : chunk - 4) * 128;
    float sums[TILES * 4];
#pragma unroll
    for (int e = 0; e < TILES * 4; ++e) sums[e] = 0.f;
    const bool rope = chunk == R::CHUNKS - 1;
#pragma unroll 1
    for (int step = 0; step < 4; ++step, query += 32) {
      u32 keys[4];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const u32 key = raw + r * (8 * R::BYTES);
        if (rope) {
          const uint2 four = load_shared_8(key + R::ROPE_AT + step * 32 + t * 8);
          keys[r] = four.x, keys[2 + r] = four.y;
        } else {
          const u32 four = load_shared_4(key + chunk * 64 + step * 16 + t * 4);
          keys[r] = e4m3_to_bfloat16(four), keys[2 + r] = e4m3_to_bfloat16(four >> 16);
        }
      }
#pragma unroll
      for (int j = 0; j < TILES; ++j) {
        const uint2 two = load_shared_8(query + j * (8 * PITCH));
        const u32 heads[2] = {two.x, two.y};
        float* d = sums + j * 4;
        multiply_16_by_8(d[0], d[1], d[2], d[3], keys, heads);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float scale = rope ? 1.f : R::scale(scales + r * (8 * R::SCALES_PITCH), chunk * 64 / R::GROUP);
#pragma unroll
      for (int e = 2 * r; e < TILES * 4; e += e % 2 ? 3 : 1) s[e] = fmaf(sums[e], scale, s[e]);
    }
  }
}

constexpr u32 EXPONENT = 0x7f800000u;

// A weight as two bfloat16, of pairs: the upper bits, and what these leave. What is infinite or NaN leaves nothing.
DEVICE void split_weights(float a, float b, u32& upper, u32& rest) {
  const u32 bits_a = __float_as_uint(a) & 0xffff0000u, bits_b = __float_as_uint(b) & 0xffff0000u;
  upper = bits_a >> 16 | bits_b;
  const bool finite_a = (bits_a & EXPONENT) != EXPONENT, finite_b = (bits_b & EXPONENT) != EXPONENT;
  rest = pack_bfloat16(finite_a ? a - __uint_as_float(bits_a) : 0.f, finite_b ? b - __uint_as_float(bits_b) : 0.f);
}

// A lane's four keys of 16, as pairs.
DEVICE int key_of_pair(int t, int i) { return 2 * t + (i & 1) + (i >> 1) * 8; }

// What a key's weight is multiplied by for a chunk of a half's dims, which are as large as the accumulators want them.
// `scales` are the half's.
template <Format FORMAT>
DEVICE float factor_of_chunk(u32 scales, int half, int chunk) {
  using R = Rows<FORMAT>;
  const float scale = R::scale(scales, chunk * 64 / R::GROUP);  // of RoPE a byte that pads
  return R::ROPE_IS_VALUE && chunk == 3 && half ? R::FACTOR : scale * R::FACTOR;
}

// The values of a warp's 16 keys as bfloat16, in the usual places.
template <Format FORMAT>
DEVICE void store_wide_values(u32 raw, u32 values, int t) {
  using R = Rows<FORMAT>;
#pragma unroll 1
  for (int chunk = 0; chunk < 8; ++chunk, values += TILE_KEYS * 128) {
#pragma unroll 1
    for (int pair = 0; pair < 2; ++pair) {
      u32 f[8];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const u32 key = raw + r * (8 * R::BYTES);
        if (R::ROPE_IS_VALUE && chunk == 7) {
          const uint4 v = load_shared_16(key + R::ROPE_AT + t * 32 + pair * 16);
          f[r] = v.x, f[2 + r] = v.y, f[4 + r] = v.z, f[6 + r] = v.w;
        } else {
          const uint2 v = load_shared_8(key + chunk * 64 + t * 16 + pair * 8);
          f[r] = e4m3_to_bfloat16(v.x), f[2 + r] = e4m3_to_bfloat16(v.x >> 16);
          f[4 + r] = e4m3_to_bfloat16(v.y), f[6 + r] = e4m3_to_bfloat16(v.y >> 16);
        }
      }
      store_matrices(values ^ (pair << 6), f[0], f[1], f[2], f[3]);
      store_matrices(values ^ (pair << 6 | 32), f[4], f[5], f[6], f[7]);
    }
  }
}

// 16 keys of such a turn: 64 heads by dims. Weights lie where the latents of the keys were.
template <Format FORMAT>
DEVICE void accumulate_wide(float (&o)[2][64], u32 raw, u32 scales, u64 values, int half, int thread) {
  using R = Rows<FORMAT>;
  const int g = thread >> 2 & 7, t = thread & 3;
  const int first = R::raw_row(2 * t), step = R::raw_row(1);
  scales += first * R::SCALES_PITCH + half * R::SCALES_OF_HALF;
  raw += first * R::BYTES + (thread / 32 * 16 + g) * 4;
  constexpr int TOGETHER = R::GROUP / 64;  // chunks of one scale
#pragma unroll
  for (int chunk = 0; chunk < 4; chunk += TOGETHER) {
    __syncwarp();  // else ptxas mixes them, and spills
    u32 upper[4], rest[4];
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const u32 place = raw + i * (4 * R::BYTES), key = scales + i * (4 * R::SCALES_PITCH);
      const float one = factor_of_chunk<FORMAT>(key, half, chunk),
                  two = factor_of_chunk<FORMAT>(key + step * R::SCALES_PITCH, half, chunk);
#pragma unroll
      for (int r = 0; r < 2; ++r)
        split_weights(load_shared_float(place + r * 32) * one,
                      load_shared_float(place + step * R::BYTES + r * 32) * two, upper[i + r], rest[i + r]);
    }
    // One after the other: registers hold one operand.
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      hold(upper), hold(rest), hold(o[0]), hold(o[1]);
      wgmma_fence();
#pragma unroll
      for (int c = chunk; c < chunk + TOGETHER; ++c)
        wgmma_heads_by_64_dims(o[c / 2] + c % 2 * 32, upper, values + c * (TILE_KEYS * 128 / 16));
      wgmma_commit();
      wgmma_wait<0>();
      hold(upper), hold(o[0]), hold(o[1]);
#pragma unroll
      for (int i = 0; i < 4; ++i) upper[i] = rest[i];
    }
  }
}

// The same for dims by heads: rows g and g + 8 of a warp are two dims from `dim` on, two apart.
template <int HEADS, Format FORMAT, int PIECES>
DEVICE void accumulate_wide(float (&o)[PIECES][HEADS / 2], u32 raw, u32 scales, u32 table, int half,
                            int thread) {
  using R = Rows<FORMAT>;
  constexpr int TILES = HEADS / 8;
  half = opaque(half);
  const int g = thread >> 2 & 7, t = thread & 3;
  const u32 odd = g & 1;
  raw += 2 * t * R::BYTES, scales += 2 * t * R::SCALES_PITCH + half * R::SCALES_OF_HALF;
  table += (2 * t * HEADS + g) * 4;
  const int dim = g / 2 * 16 + thread / 32 * 4;
  constexpr int TOGETHER = R::GROUP / 64;  // pieces of one scale
#pragma unroll
  for (int first = 0; first < PIECES; first += TOGETHER) {
    __syncwarp();
    u32 a[TOGETHER][4];
#pragma unroll
    for (int n = 0; n < TOGETHER; ++n) {
      if (R::ROPE_IS_VALUE && first == 3 && half) {
        const u32 choice = odd ? 0x7632 : 0x5410;
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          const u32 key = raw + i * (4 * R::BYTES) + R::ROPE_AT + dim * 2;
          const uint2 one = load_shared_8(key), two = load_shared_8(key + R::BYTES);
          a[n][i] = __byte_perm(one.x, two.x, choice), a[n][i + 1] = __byte_perm(one.y, two.y, choice);
        }
      } else {
        const u32 choice = odd ? 0x7351 : 0x6240;
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          const u32 key = raw + i * (4 * R::BYTES) + half * 256 + (first + n) * 64 + dim;
          const u32 both = __byte_perm(load_shared_4(key), load_shared_4(key + R::BYTES), choice);
          a[n][i] = e4m3_to_bfloat16(both), a[n][i + 1] = e4m3_to_bfloat16(both >> 16);
        }
      }
    }
    float factors[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      factors[i] = factor_of_chunk<FORMAT>(scales + key_of_pair(0, i) * R::SCALES_PITCH, half, first);
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
      __syncwarp();
      u32 upper[2], rest[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const u32 place = table + (i * 8 * HEADS + j * 8) * 4;
        split_weights(load_shared_float(place) * factors[2 * i],
                      load_shared_float(place + HEADS * 4) * factors[2 * i + 1], upper[i], rest[i]);
      }
#pragma unroll
      for (int n = 0; n < TOGETHER; ++n) {
        float* d = o[first + n] + j * 4;
        multiply_16_by_8(d[0], d[1], d[2], d[3], a[n], upper);
        multiply_16_by_8(d[0], d[1], d[2], d[3], a[n], rest);
      }
    }
  }
}
