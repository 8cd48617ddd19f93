// Turns with a key whose scales float16 does not hold together: keys as bfloat16, which holds e4m3 and RoPE as they
// are, and queries as they came. Scales stay float32 for scores. Values are e4m3 times four bits of a scale, which
// bfloat16 holds too. What these leave out goes to the weights: their upper bits serve all groups, and each group has
// rests of its own.
#pragma once

#include "layout.cuh"
#include "wide_ptx.cuh"

// Addresses of a lane: its first key and that one's scales, and its row of the first values.
struct WidePlaces {
  u32 raw, rope, scales, values;
};

// Four significant bits of a scale.
DEVICE float rounded_scale(float scale) {
  return __uint_as_float((__float_as_uint(scale) + 0x00080000u) & 0xfff00000u);
}

// By what that is too small.
DEVICE float rest_of_scale(float scale) {
  const float rest = scale * reciprocal_approx(rounded_scale(scale));
  return fabsf(rest - 1.f) < 0.25f ? rest : 1.f;  // of zero, infinite or NaN
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

// All scores of a lane's two keys, as powers of two that are relative to the running maxima, and the values.
//
// Queries come two chunks of 64 dims ahead, in the order in which `score` has a key's, to the place of weights and to
// those of the last values. Heads past the last repeat it. RoPE that is no value is there as bfloat16.
template <class L, int BARRIER>
DEVICE void wide_scores(float (&s)[L::HEADS / 2], const Params& p, const Row& row, const Ring& at, u32 shared,
                        const WidePlaces& places, int thread) {
  using R = typename L::R;
  constexpr int CHUNK = TILE_KEYS * 128, N = L::HEADS / 2;
  // A head's factor and running maximum.
  auto column_of = [&](int e) {
    const int t = (L::HEADS == 32 ? opaque(thread) : thread) & 3;  // registers are few
    return load_shared_float2(shared + L::COLUMNS + (e / 4 * 8 + (e & 1) + 2 * t) * 8);
  };
#pragma unroll
  for (int e = 0; e < N; ++e) s[e] = R::ROPE_IS_VALUE ? -column_of(e).y : 0.f;
  auto next = [&](u32 place) {
    const u32 spare = shared + L::VALUES + half_of<L::HALVES>(at, 1).slot * HALF_BYTES + 2 * CHUNK;
    return place == shared + L::WEIGHTS ? spare : place == spare ? spare + CHUNK : shared + L::WEIGHTS;
  };
  u32 here = shared + L::WEIGHTS;
#pragma unroll 1
  for (int step = -4; step < 16; ++step) {  // halves of chunks, the first without keys
    const int chunk = step >> 1, half = step & 1;
    if (half == 0) {
      wait_for_copies_but<1>();
      fence_async_shared();
      named_barrier<BARRIER, 128>();  // the chunk is there, and products of the one before are over
      if (chunk < 6) {
        // Eight threads have a head's 128 bytes.
        int token = row.token, own = thread;
        hold(token), hold(own);  // else what is made of them would take registers of all turns
        int head = own >> 3;
        const int piece = own & 7, last = p.num_heads - 1 - row.tile * L::HEADS;
        u32 to = next(next(here)) + head * 128 + ((piece & 1) * 64 + (piece >> 1) * 4 ^ (head & 7) << 4);
#pragma unroll 1
        for (; head < L::HEADS; head += 16, to += 16 * 128) {
          const u16* from = query_at(p, token, row.tile * L::HEADS + min(head, last)) + (chunk + 2) * 64 + piece * 8;
#pragma unroll
          for (int w = 0; w < 4; ++w) copy_4(to ^ w << 4, from + w * 2);
        }
      }
      commit_copies();
    }
    if (chunk < 8 - R::CHUNKS) {
      if (half) here = next(here);
      continue;
    }
    // The queries' RoPE that is no value has been there all the time, times what the columns undo.
    const bool value = R::ROPE_IS_VALUE || chunk >= 0, rope = R::ROPE_IS_VALUE ? chunk == 7 : !value;
    u32 f[8];
    if (rope && R::ROPE_IS_VALUE) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint4 v = load_shared_16(places.raw + r * (8 * R::BYTES) + places.rope + half * 16);
        f[r] = v.x, f[2 + r] = v.y, f[4 + r] = v.z, f[6 + r] = v.w;
      }
    } else if (rope) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint4 v = load_matrices(places.raw + places.rope + half * 64 + j * 32);
        f[4 * j] = v.x, f[4 * j + 1] = v.y, f[4 * j + 2] = v.z, f[4 * j + 3] = v.w;
      }
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint2 v = load_shared_8(places.raw + r * (8 * R::BYTES) + chunk * 64 + half * 8);
        f[r] = e4m3_to_bfloat16(v.x), f[2 + r] = e4m3_to_bfloat16(v.x >> 16);
        f[4 + r] = e4m3_to_bfloat16(v.y), f[6 + r] = e4m3_to_bfloat16(v.y >> 16);
      }
    }
    float part[N];
    hold(f);
    wgmma_fence();
    const u64 operand = tile_descriptor(
        (value ? here : shared + L::QUERY + (R::CHUNKS - 1) * L::QUERY_CHUNK) + half * 64, 1024, 16);
    wgmma_bfloat16(part, f, operand, 0);
    wgmma_bfloat16(part, f + 4, operand + 2, 1);
    wgmma_commit();
    wgmma_wait<0>();
    hold(part), hold(f);
    float scales[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scales[r] = rope ? 1.f : R::scale(places.scales + r * (8 * R::SCALES_PITCH), chunk * 64 / R::GROUP);
      const float factor = value ? scales[r] * p.scale_log2 : 1.f;
#pragma unroll
      for (int e = 2 * r; e < N; e += e % 2 ? 3 : 1) s[e] = fmaf(part[e], factor, s[e]);
    }
    if (value) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const u32 factor = __float_as_uint(rounded_scale(scales[r] * R::FACTOR)), both = factor >> 16 | factor;
#pragma unroll
        for (int i = r; i < 8; i += 2) f[i] = multiply_bfloat16(f[i], both);
      }
      const u32 slot = half_of<L::HALVES>(at, chunk >> 2).slot,
                place = places.values + slot * HALF_BYTES + (chunk & 3) * CHUNK ^ half << 6;
      store_matrices(place, f[0], f[1], f[2], f[3]);
      store_matrices(place ^ 32, f[4], f[5], f[6], f[7]);
    }
    if (half == 0) continue;
    if (!value)
#pragma unroll
      for (int e = 0; e < N; ++e) {
        const float2 column = column_of(e);
        s[e] = fmaf(s[e], column.x, -column.y);
      }
    here = next(here);
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
    left_out[r] = rest_of_scale(factor);
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
