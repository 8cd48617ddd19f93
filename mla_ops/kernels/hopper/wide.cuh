// Turns with a key whose scales float16 does not hold together. Scores: e4m3 is float16 as it is, and so are a row's
// queries; a group's scale, float32, multiplies its sums of products. Values are e4m3 times four bits of a scale, which
// bfloat16 holds; the warpgroups that accumulate make them meanwhile. What they leave out goes to the weights: their
// upper bits serve all groups, and each group has rests of its own.
#pragma once

#include "layout.cuh"
#include "wide_ptx.cuh"

// Addresses of a lane: its first key and that one's scales. `rope` from `raw` on.
struct WidePlaces {
  u32 raw, rope, scales;
};

DEVICE u32 float16_to_bfloat16(u32 pair) {
  const float2 v = unpack_float16(pair);
  return pack_bfloat16(v.x, v.y);
}

// The second word becomes the first: loops of one copy take one after the other, since code that does not run costs rows
// that have no such turn 0.1 us a KB.
DEVICE void turn_words(uint4& v) { v.x = v.y, v.y = v.z, v.z = v.w; }

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

// Queries that are too small beside their head's largest for float16 to hold them, below 2^-16 in shared memory, are
// parts of further layers, 2^32 times as large in each.
constexpr float LEAST_HELD = 1.5258789e-5f, BEYOND_HELD = 65536.f;

// A pair of queries in a layer, 0 where they belong to another. `first` * `second`: how much larger they are there.
// `smaller`: whether one belongs to a later layer.
DEVICE u32 pair_of_layer(u32 pair, float first, float second, int layer, bool& smaller) {
  auto element = [&](float x) {
    x = x * first * second;
    const bool below = fabsf(x) < LEAST_HELD;
    smaller |= below && x != 0.f;
    return below || layer && !(fabsf(x) < BEYOND_HELD) ? 0.f : x;
  };
  return pack_float16(element(low_bfloat16(pair)), element(high_bfloat16(pair)));
}

// Address of eight dims of a chunk of queries, of a head; their words lie at it ^ 16 w.
DEVICE u32 piece_of_queries(u32 chunk, int head, int piece) {
  return chunk + head * 128 + ((piece & 1) * 64 + (piece >> 1) * 4 ^ (head & 7) << 4);
}

DEVICE const u16* query_of_tile(const Params& p, int token, int tile, int heads, int head) {
  return query_at(p, token, min(tile * heads + head, p.num_heads - 1));
}

// Whether queries may have a further layer: zeros may have been more than that. RoPE that is a value comes to shared
// memory as bfloat16.
template <class L, int BARRIER>
DEVICE bool has_layers(const Params& p, const Row& row, u32 shared, int thread) {
  using R = typename L::R;
  constexpr int LATENT = R::ROPE_IS_VALUE ? 448 : 512;
  int token = row.token, tile = row.tile;
  hold(shared), hold(token), hold(tile);  // else what is made of them would take registers of all turns
  if constexpr (R::ROPE_IS_VALUE) {
#pragma unroll 1
    for (int head = thread >> 3; head < L::HEADS; head += 16) {
      const u16* from = query_of_tile(p, token, tile, L::HEADS, head) + LATENT + (thread & 7) * 8;
      uint4 v = __ldg(reinterpret_cast<const uint4*>(from));
      const u32 up = (127 + shift_of_head<L>(p, shared, head)) * 0x00800080u,
                to = piece_of_queries(shared + L::WIDE_ROPE, head, thread & 7);
#pragma unroll 1
      for (int w = 0; w < 4; ++w, turn_words(v)) store_shared_4(to ^ w << 4, multiply_bfloat16(v.x, up));
    }
    fence_async_shared();
  }
  u32 least = ~0u;
#pragma unroll 1
  for (u32 place = shared + L::QUERY + thread * 16; place < shared + L::QUERY + L::HEADS * LATENT * 2; place += 2048) {
    const uint4 v = load_shared_16(place);
#pragma unroll
    for (int w = 0; w < 4; ++w) least = smaller_halves(least, word(v, w) & 0x7fff7fff);
  }
  return named_barrier_any<BARRIER, 128>((least & 0xffff) < 0x100 || least >> 16 < 0x100);  // 2^-16 as float16
}

// A layer of a chunk of the queries, to the place of weights. Whether this thread has elements of later layers.
template <class L, int BARRIER>
DEVICE bool make_layer(const Params& p, const Row& row, u32 shared, int chunk, int layer, int thread) {
  int token = row.token, tile = row.tile;
  hold(token), hold(tile);
  bool smaller = false;
  named_barrier<BARRIER, 128>();  // products have left it
#pragma unroll 1
  for (int head = thread >> 3; head < L::HEADS; head += 16) {
    const u16* from = query_of_tile(p, token, tile, L::HEADS, head) + chunk * 64 + (thread & 7) * 8;
    uint4 v = __ldg(reinterpret_cast<const uint4*>(from));
    const int up = 127 + shift_of_head<L>(p, shared, head) + 32 * layer;  // float32 may not hold the power at once
    const float first = __uint_as_float((up >> 1) + 63 << 23), second = __uint_as_float(up - (up >> 1) + 64 << 23);
    const u32 to = piece_of_queries(shared + L::WEIGHTS, head, thread & 7);
#pragma unroll 1
    for (int w = 0; w < 4; ++w, turn_words(v))
      store_shared_4(to ^ w << 4, pair_of_layer(v.x, first, second, layer, smaller));
  }
  fence_async_shared();
  named_barrier<BARRIER, 128>();
  return smaller;
}

// All scores of a lane's two keys, as powers of two that are relative to the references. Returns whether the queries
// have more than one layer. The turn before may be at its products yet.
template <class L, int BARRIER>
DEVICE bool wide_scores(float (&part)[L::HEADS / 2], const Params& p, const Row& row, const Ring& at, u32 shared,
                        const WidePlaces& places, bool layered, int thread) {
  hold(shared);
  using R = typename L::R;
  constexpr int N = L::HEADS / 2, LATENT_CHUNKS = R::ROPE_IS_VALUE ? 7 : 8, OF_A_GROUP = R::GROUP / 64;
  // Sums are so much smaller, and queries' RoPE that is no value has FACTOR already: float32 holds them for any scale.
  constexpr float DOWN = 9.094947e-13f, LAYER = 2.3283064e-10f;  // 2^-40, 2^-32
  float s[N], factor = R::FACTOR * DOWN;
#pragma unroll
  for (int e = 0; e < N; ++e) s[e] = 0.f;
  if (layered)
#pragma unroll 1
    for (int quarter = 0; quarter < 4; ++quarter) {  // weights are free then
      const Half half = half_of<L::HALVES>(at, quarter >> 1);
      mbarrier_wait(shared + L::VALUES_FREE + half.slot * 16 + (quarter & 1) * 8, half.parity ^ 1);
    }
  int layer = 0;
  bool smaller;
  do {
    smaller = false;
#pragma unroll 1
    for (int chunk = 0; chunk < LATENT_CHUNKS; ++chunk) {
      u32 query = uniform(shared + L::QUERY + chunk * L::QUERY_CHUNK);  // else descriptors go from register to register
      if (layered) {
        smaller |= make_layer<L, BARRIER>(p, row, shared, chunk, layer, thread);
        query = uniform(shared + L::WEIGHTS);
      }
      u32 f[16];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint4 v = load_shared_16(places.raw + r * (8 * R::BYTES) + chunk * 64);
#pragma unroll
        for (int j = 0; j < 4; ++j) e4m3_to_float16(word(v, j), f[4 * j + r], f[4 * j + 2 + r]);
      }
      hold(f);
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < 4; ++j)
        wgmma_float16(part, f + 4 * j, tile_descriptor(query + 32 * j, 1024, 16), j > 0 || chunk % OF_A_GROUP);
      wgmma_commit();
      wgmma_wait<0>();
      hold(part), hold(f);
      if ((chunk + 1) % OF_A_GROUP == 0) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float scale = R::scale(places.scales + r * (8 * R::SCALES_PITCH), chunk / OF_A_GROUP) * factor;
#pragma unroll
          for (int e = 2 * r; e < N; e += e % 2 ? 3 : 1) s[e] = fmaf(part[e], scale, s[e]);
        }
      }
    }
    factor *= LAYER, ++layer;
  } while (layered && named_barrier_any<BARRIER, 128>(smaller));
  // RoPE: bfloat16 in both.
  u32 f[16];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if constexpr (R::ROPE_IS_VALUE) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint2 v = load_shared_8(places.raw + r * (8 * R::BYTES) + places.rope + j * 8);
        f[4 * j + r] = v.x, f[4 * j + 2 + r] = v.y;
      }
    } else {
      const uint4 v = load_matrices(places.raw + places.rope + j * 32);
      f[4 * j] = v.x, f[4 * j + 1] = v.y, f[4 * j + 2] = v.z, f[4 * j + 3] = v.w;
    }
  }
  hold(f);
  wgmma_fence();
#pragma unroll
  for (int j = 0; j < 4; ++j)
    wgmma_bfloat16(part, f + 4 * j, tile_descriptor(shared + L::WIDE_ROPE + 32 * j, 1024, 16), j > 0);
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
  return layer > 1;
}

// Half of a turn's values, by a warpgroup. `slot`: of the keys of a warp; `values`: of this half.
template <class L>
DEVICE void make_wide_values(u32 shared, int slot, u32 values, int half, int warp, int lane) {
  using R = typename L::R;
  constexpr int CHUNK = TILE_KEYS * 128;
  const int key = R::raw_row(lane >> 2);
  u32 raw = shared + L::RAW + slot * L::RAW_SLOT + key * R::BYTES + (lane & 3) * 16 + half * 256,
      place = values + (warp * 16 + (lane & 15)) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
  const u32 scales = R::SCALES_APART ? shared + L::SCALES + slot * L::SCALES_SLOT + key * R::SCALES_PITCH
                                     : shared + L::RAW + slot * L::RAW_SLOT + key * R::BYTES + R::SCALES_AT;
#pragma unroll 1
  for (int chunk = half * 4; chunk < half * 4 + 4; ++chunk, raw += 64, place += CHUNK) {
    const bool rope = R::ROPE_IS_VALUE && chunk == 7;
    u32 bits[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float scale = rope ? 1.f : R::scale(scales + r * (8 * R::SCALES_PITCH), chunk * 64 / R::GROUP);
      const u32 rounded = __float_as_uint(rounded_scale(scale * R::FACTOR));
      bits[r] = rounded >> 16 | rounded;
    }
    uint4 words[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) words[r] = load_shared_16(raw + r * (8 * R::BYTES));
#pragma unroll 1
    for (int j = 0; j < 4; ++j) {
      u32 v[4];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (rope) {
          // The lane's 16 dims are 32 bytes.
          const uint2 two = load_shared_8(raw + r * (8 * R::BYTES) + (R::ROPE_AT - 448) + (lane & 3) * 16 + j * 8);
          v[r] = two.x, v[2 + r] = two.y;
        } else {
          e4m3_to_float16(words[r].x, v[r], v[2 + r]);
          v[r] = float16_to_bfloat16(v[r]), v[2 + r] = float16_to_bfloat16(v[2 + r]);
          turn_words(words[r]);
        }
      }
      store_matrices(place ^ j << 5, multiply_bfloat16(v[0], bits[0]), multiply_bfloat16(v[1], bits[1]),
                     multiply_bfloat16(v[2], bits[0]), multiply_bfloat16(v[3], bits[1]));
    }
  }
}

// Stores the factor by which four bits of a lane's scales are too small, in the table behind the rests.
template <class L>
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
  named_barrier<WIDE_VALUES_BARRIER, 384>();  // no warp reads keys or the weights' place any more
  if constexpr (!R::SCALES_APART) {
    const u32 table = rests + 4 * L::HEADS * 128 + ((warp * 16 + (lane >> 2)) * 4 + t) * 4;
    store_shared_float(table, left_out[0]), store_shared_float(table + 128, left_out[1]);
    __syncwarp();
  }
}

// The weights of such a turn: the upper bits for all groups, then each one's rests.
template <class L>
DEVICE void store_wide_weights(const float (&s)[L::HEADS / 2], u32 shared, u32 rests, int thread) {
  u32 table = rests + 4 * L::HEADS * 128 + ((thread >> 5) * 16 + ((thread & 31) >> 2)) * 16;
  u32 place = weights_row(rests, thread);
  store_weights<L::HEADS>(s, weights_row(shared + L::WEIGHTS, thread), [](float a, float b, int) {
    return __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x7632);
  });
  auto upper = [](float weight) { return __uint_as_float(__float_as_uint(weight) & 0xffff0000u); };
#pragma unroll 1
  for (int n = 0; n < GROUPS_OF_RESTS<L>; ++n, table += 4, place += L::HEADS * 128) {
    float factors[2] = {1.f, 1.f};
#pragma unroll
    for (int key = 0; key < 2; ++key)
      if (!L::R::SCALES_APART) factors[key] = load_shared_float(table + key * 128);
    store_weights<L::HEADS>(s, place, [&](float a, float b, int key) {
      return pack_bfloat16(fmaf(a, factors[key], -upper(a)), fmaf(b, factors[key], -upper(b)));
    });
  }
}
