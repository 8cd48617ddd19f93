// Turns with a key whose scales float16 does not hold together. Scores: e4m3 is float16 as it is, and so are a row's
// queries; a group's scale, float32, multiplies its sums of products. Values are e4m3 times four bits of a scale, which
// bfloat16 holds. What these leave out goes to the weights: their upper bits serve all groups, and each group has rests
// of its own.
#pragma once

#include "layout.cuh"
#include "wide_ptx.cuh"

// Addresses of a lane: its first key and that one's scales, and its row of the first values.
struct WidePlaces {
  u32 raw, rope, scales, values;
};

DEVICE u32 float16_to_bfloat16(u32 pair) {
  const float2 v = unpack_float16(pair);
  return pack_bfloat16(v.x, v.y);
}

// Four significant bits of a scale.
DEVICE float rounded_scale(float scale) {
  return __uint_as_float((__float_as_uint(scale) + 0x00080000u) & 0xfff00000u);
}

// The place of the rests, bfloat16 [groups, heads, 64 keys]: where the keys were whose first slot this is. Behind them,
// float [64, groups], by what the four bits of a scale are too small.
template <class L>
DEVICE u32 place_of_rests(u32 shared, int slot) {
  static_assert(L::HEADS == 16 || L::SLOTS == 8 && L::RAW_SLOT * 4 % 1024 == 0, "rests lie in the rows of a turn");
  return (shared + L::RAW + slot * L::RAW_SLOT + 1023 & ~1023u) + (L::HEADS == 64 ? 1024 : 0);  // behind sums
}

template <class L>
constexpr int GROUPS_OF_RESTS = L::R::SCALES_APART ? 1 : 4;  // scales of V4 are powers of two

// A lane's address for `store_weights` in a matrix [heads, 64 keys] with rows of 128 bytes in the swizzle.
DEVICE u32 weights_row(u32 place, int thread) {
  const int warp = thread >> 5, lane = thread & 31;
  return place + (lane & 7) * 128 + ((((warp * 2) | ((lane >> 3) & 1)) ^ (lane & 7)) << 4) + (lane >> 4) * 1024;
}

// A lane's weights as pairs of 16 bits, which `pack` makes of two heads' and the number of the key.
template <int HEADS, class Pack>
DEVICE void store_weights(const float (&s)[HEADS / 2], u32 place, Pack pack) {
  constexpr int TILES = HEADS / 8;
#pragma unroll
  for (int j = 0; j + 1 < TILES; j += 2)
    store_matrices_transposed(place + j * 1024, pack(s[4 * j], s[4 * j + 1], 0), pack(s[4 * j + 2], s[4 * j + 3], 1),
                              pack(s[4 * j + 4], s[4 * j + 5], 0), pack(s[4 * j + 6], s[4 * j + 7], 1));
  if constexpr (TILES % 2)
    store_matrices_transposed(place + (TILES - 1) * 1024, pack(s[4 * TILES - 4], s[4 * TILES - 3], 0),
                              pack(s[4 * TILES - 2], s[4 * TILES - 1], 1));
}

// The power of two of a head's queries in shared memory.
template <class L>
DEVICE int shift_of_head(const Params& p, u32 shared, int head) {
  const u32 one = __float_as_uint(p.scale_log2 / L::R::FACTOR), column = load_shared_4(shared + L::COLUMNS + head * 8);
  return static_cast<int>(one >> 23 & 255) - static_cast<int>(column >> 23 & 255);
}

// Queries that are too small beside their head's largest for float16 to hold them are parts of further layers, 2^32
// times as large in each. The layer of a magnitude, bfloat16 with a shift; 0 or less: the first.
DEVICE int layer_of(u32 magnitude, int shift) { return 142 - shift - static_cast<int>(magnitude >> 7) >> 5; }

// A query's element of a layer and its neighbour.
DEVICE u32 pair_of_layer(u32 pair, int shift, int layer) {
  const int up = shift + 32 * layer;  // may be more than one float32 holds
  const float first = __uint_as_float((127 + (up >> 1)) << 23), second = __uint_as_float((127 + up - (up >> 1)) << 23);
  auto element = [&](u32 bits) {
    const u32 magnitude = bits >> 16 & 0x7fff;
    return magnitude && max(layer_of(magnitude, shift), 0) == layer ? __uint_as_float(bits) * first * second : 0.f;
  };
  return pack_float16(element(pair << 16), element(pair & 0xffff0000u));
}

// Address of eight dims of a chunk of queries, of a head; their words lie at it ^ 16 w.
DEVICE u32 piece_of_queries(u32 chunk, int head, int piece) {
  return chunk + head * 128 + ((piece & 1) * 64 + (piece >> 1) * 4 ^ (head & 7) << 4);
}

DEVICE const u16* query_of_tile(const Params& p, int token, int tile, int heads, int head) {
  return query_at(p, token, min(tile * heads + head, p.num_heads - 1));
}

// How many layers a tile's queries have: 1 where float16 holds them. RoPE that is a value comes to shared memory as
// bfloat16.
template <class L, int BARRIER>
DEVICE int layers_of_queries(const Params& p, const Row& row, u32 shared, int thread) {
  using R = typename L::R;
  constexpr int LATENT = R::ROPE_IS_VALUE ? 448 : 512;
  int token = row.token, tile = row.tile;
  hold(shared), hold(token), hold(tile);  // else what is made of them would take registers of all turns
  if constexpr (R::ROPE_IS_VALUE) {
#pragma unroll 2
    for (int head = thread >> 3; head < L::HEADS; head += 16) {
      const u16* from = query_of_tile(p, token, tile, L::HEADS, head) + LATENT + (thread & 7) * 8;
      const uint4 v = __ldg(reinterpret_cast<const uint4*>(from));
      const u32 up = (127 + shift_of_head<L>(p, shared, head)) * 0x00800080u,
                to = piece_of_queries(shared + L::WIDE_ROPE, head, thread & 7);
#pragma unroll
      for (int w = 0; w < 4; ++w) store_shared_4(to ^ w << 4, multiply_bfloat16(word(v, w), up));
    }
    fence_async_shared();
  }
  u32 least = ~0u;
#pragma unroll 2
  for (u32 place = shared + L::QUERY + thread * 16; place < shared + L::QUERY + L::HEADS * LATENT * 2; place += 2048) {
    const uint4 v = load_shared_16(place);
#pragma unroll
    for (int w = 0; w < 4; ++w) least = smaller_halves(least, word(v, w) & 0x7fff7fff);
  }
  int layers = 1, most = 0;
  // 2^-16 as float16. Zeros may have been more.
  if (named_barrier_any<BARRIER, 128>((least & 0xffff) < 0x100 || least >> 16 < 0x100)) {
#pragma unroll 1
    for (int head = thread >> 4; head < L::HEADS; head += 8) {
      const u16* from = query_of_tile(p, token, tile, L::HEADS, head);
      const int shift = shift_of_head<L>(p, shared, head);
#pragma unroll 1
      for (int dim = (thread & 15) * 8; dim < LATENT; dim += 128) {
        const uint4 v = __ldg(reinterpret_cast<const uint4*>(from + dim));
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const u32 low = word(v, w) & 0x7fff, high = word(v, w) >> 16 & 0x7fff;
          if (low) most = max(most, layer_of(low, shift));
          if (high) most = max(most, layer_of(high, shift));
        }
      }
    }
    while (named_barrier_any<BARRIER, 128>(most >= layers)) ++layers;
  }
  return layers;
}

// A layer of a chunk of the queries, to the place of weights.
template <class L, int BARRIER>
DEVICE void make_layer(const Params& p, const Row& row, u32 shared, int chunk, int layer, int thread) {
  int token = row.token, tile = row.tile;
  hold(token), hold(tile);
  named_barrier<BARRIER, 128>();  // products have left it
#pragma unroll 1
  for (int head = thread >> 3; head < L::HEADS; head += 16) {
    const u16* from = query_of_tile(p, token, tile, L::HEADS, head) + chunk * 64 + (thread & 7) * 8;
    const uint4 v = __ldg(reinterpret_cast<const uint4*>(from));
    const int shift = shift_of_head<L>(p, shared, head);
    const u32 to = piece_of_queries(shared + L::WEIGHTS, head, thread & 7);
#pragma unroll
    for (int w = 0; w < 4; ++w) store_shared_4(to ^ w << 4, pair_of_layer(word(v, w), shift, layer));
  }
  fence_async_shared();
  named_barrier<BARRIER, 128>();
}

// All scores of a lane's two keys, as powers of two that are relative to the references, and the values. The turn
// before may be at its products yet.
template <class L, int BARRIER>
DEVICE void wide_scores(float (&part)[L::HEADS / 2], const Params& p, const Row& row, const Ring& at, u32 shared,
                        WidePlaces places, int layers, int thread) {
  hold(shared), hold(places.raw), hold(places.rope), hold(places.scales), hold(places.values);
  using R = typename L::R;
  constexpr int CHUNK = TILE_KEYS * 128, N = L::HEADS / 2, LATENT_CHUNKS = R::ROPE_IS_VALUE ? 7 : 8,
                OF_A_GROUP = R::GROUP / 64;
  // Sums are so much smaller, and queries' RoPE that is no value has FACTOR already: float32 holds them for any scale.
  constexpr float DOWN = 9.094947e-13f, LAYER = 2.3283064e-10f;  // 2^-40, 2^-32
  auto wait_for_values = [&](int chunk) {
    const Half half = half_of<L::HALVES>(at, chunk >> 2);
    mbarrier_wait(shared + L::VALUES_FREE + half.slot * 16 + (chunk & 2) * 4, half.parity ^ 1);
  };
  auto place_of_values = [&](int chunk) {
    return places.values + half_of<L::HALVES>(at, chunk >> 2).slot * HALF_BYTES + (chunk & 3) * CHUNK;
  };
  float s[N];
#pragma unroll
  for (int e = 0; e < N; ++e) s[e] = 0.f;
  if (layers > 1)
#pragma unroll 1
    for (int chunk = 0; chunk < 8; chunk += 2) wait_for_values(chunk);  // weights are free then
#pragma unroll 1
  for (int layer = layers - 1; layer >= 0; --layer) {
#pragma unroll
    for (int e = 0; e < N; ++e) s[e] *= LAYER;
#pragma unroll 1
    for (int chunk = 0; chunk < LATENT_CHUNKS; ++chunk) {
      u32 query = shared + L::QUERY + chunk * L::QUERY_CHUNK;
      if (layers > 1) {
        make_layer<L, BARRIER>(p, row, shared, chunk, layer, thread);
        query = shared + L::WEIGHTS;
      }
      u32 f[16];
      float scales[2];
      u32 bits[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint4 v = load_shared_16(places.raw + r * (8 * R::BYTES) + chunk * 64);
        scales[r] = R::scale(places.scales + r * (8 * R::SCALES_PITCH), chunk / OF_A_GROUP);
#pragma unroll
        for (int j = 0; j < 4; ++j) e4m3_to_float16(word(v, j), f[4 * j + r], f[4 * j + 2 + r]);
        const u32 rounded = __float_as_uint(rounded_scale(scales[r] * R::FACTOR));
        bits[r] = rounded >> 16 | rounded;
        scales[r] *= R::FACTOR * DOWN;
      }
      if (chunk % 2 == 0) wait_for_values(chunk);
      const u32 place = place_of_values(chunk);
      hold(f);
      wgmma_fence();
      const u64 operand = tile_descriptor(query, 1024, 16);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        wgmma_float16(part, f + 4 * j, operand + 2 * j, j > 0 || chunk % OF_A_GROUP);
        u32 v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = multiply_bfloat16(float16_to_bfloat16(f[4 * j + i]), bits[i % 2]);
        store_matrices(place ^ j << 5, v[0], v[1], v[2], v[3]);
      }
      wgmma_commit();
      wgmma_wait<0>();
      hold(part), hold(f);
      if ((chunk + 1) % OF_A_GROUP == 0)
#pragma unroll
        for (int e = 0; e < N; ++e) s[e] = fmaf(part[e], scales[e >> 1 & 1], s[e]);
    }
  }
  // RoPE: bfloat16 in both.
  u32 f[16];
  if constexpr (R::ROPE_IS_VALUE) {
    const u32 place = place_of_values(7);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint4 v = load_shared_16(places.raw + r * (8 * R::BYTES) + places.rope + half * 16);
        f[8 * half + r] = v.x, f[8 * half + 2 + r] = v.y, f[8 * half + 4 + r] = v.z, f[8 * half + 6 + r] = v.w;
      }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      constexpr u32 FACTOR = 0x43804380u;
      static_assert(R::FACTOR == 256.f, "values are so many times as large");
      store_matrices(place ^ j << 5, multiply_bfloat16(f[4 * j], FACTOR), multiply_bfloat16(f[4 * j + 1], FACTOR),
                     multiply_bfloat16(f[4 * j + 2], FACTOR), multiply_bfloat16(f[4 * j + 3], FACTOR));
    }
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint4 v = load_matrices(places.raw + places.rope + j * 32);
      f[4 * j] = v.x, f[4 * j + 1] = v.y, f[4 * j + 2] = v.z, f[4 * j + 3] = v.w;
    }
  }
  hold(f);
  wgmma_fence();
  const u64 operand = tile_descriptor(shared + L::WIDE_ROPE, 1024, 16);
#pragma unroll
  for (int j = 0; j < 4; ++j) wgmma_bfloat16(part, f + 4 * j, operand + 2 * j, j > 0);
  wgmma_commit();
  wgmma_wait<0>();
  hold(part), hold(f);
  constexpr float OF_ROPE = R::ROPE_IS_VALUE ? R::FACTOR * DOWN : DOWN;
#pragma unroll
  for (int j = 0; j < N / 4; ++j) {
    const int t = (L::HEADS == 32 ? opaque(thread) : thread) & 3;  // registers are few
    const uint4 two = load_shared_16(shared + L::COLUMNS + (8 * j + 2 * t) * 8);  // factor and reference of two heads
#pragma unroll
    for (int e = 4 * j; e < 4 * j + 4; ++e)
      part[e] = fmaf(fmaf(part[e], OF_ROPE, s[e]) * __uint_as_float(e % 2 ? two.z : two.x), 1 / DOWN,
                  -__uint_as_float(e % 2 ? two.w : two.y));
  }
}

// Stores the factor by which four bits of a lane's scales are too small, in the table behind the rests.
template <class L, int BARRIER>
DEVICE void store_left_out(u32 scales, u32 rests, int thread) {
  using R = typename L::R;
  const int warp = thread >> 5, lane = thread & 31, t = lane & 3;
  float left_out[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float factor = R::SCALES_APART ? 1.f : R::scale(scales + r * (8 * R::SCALES_PITCH), t) * R::FACTOR;
    left_out[r] = factor * reciprocal_approx(rounded_scale(factor));
    if (!(fabsf(left_out[r] - 1.f) < 0.25f)) left_out[r] = 1.f;  // zero, infinite or NaN
  }
  named_barrier<BARRIER, 128>();  // no warp reads keys or the weights' place any more
  if constexpr (!R::SCALES_APART) {
    const u32 table = rests + 4 * L::HEADS * 128 + ((warp * 16 + (lane >> 2)) * 4 + t) * 4;
    store_shared_float(table, left_out[0]), store_shared_float(table + 128, left_out[1]);
    __syncwarp();
  }
}

// The weights of such a turn: the upper bits for all groups, then each one's rests.
template <class L>
DEVICE void store_wide_weights(const float (&s)[L::HEADS / 2], u32 shared, u32 rests, int thread) {
  u32 table = rests + 4 * L::HEADS * 128 + ((thread >> 5) * 16 + ((thread & 31) >> 2)) * 16 - 4;
  u32 place = shared + L::WEIGHTS;
#pragma unroll 1
  for (int n = 0; n <= GROUPS_OF_RESTS<L>; ++n, table += 4) {
    float factors[2] = {1.f, 1.f};
#pragma unroll
    for (int key = 0; key < 2; ++key) {
      if (!L::R::SCALES_APART) factors[key] = load_shared_float(table + key * 128);
      if (n == 0) factors[key] = 0.f;
    }
    const u32 sign = n ? 0x80000000u : 0;
    auto part = [&](float weight, int key) {
      return fmaf(weight, factors[key], __uint_as_float(__float_as_uint(weight) & 0xffff0000u ^ sign));
    };
    store_weights<L::HEADS>(s, weights_row(place, opaque(thread)),
                            [&](float a, float b, int key) { return pack_bfloat16(part(a, key), part(b, key)); });
    place = n ? place + L::HEADS * 128 : rests;
  }
}
