// Turns with a key whose scales float16 does not hold together. Scores are sums of each group's products of e4m3 and
// queries, times its scale in float32: with the queries that are there, if float16 holds them, else as they came, with
// the same bits. Values are e4m3 as bfloat16, and each group has weights of its own, bfloat16, a key's weight times its
// scale there. Values of V4, whose scales are powers of two, have these; its weights have an upper part and a rest.
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

// The place of weights, bfloat16 [groups, heads, 64 keys], or of V4's rests: where the keys were whose first slot this
// is. Behind them, float [64, groups], scales.
template <class L>
DEVICE u32 place_of_wide_weights(u32 shared, int slot) {
  static_assert(L::HEADS == 16 || L::SLOTS == 8 && L::RAW_SLOT * 4 % 1024 == 0, "weights lie in the rows of a turn");
  return (shared + L::RAW + slot * L::RAW_SLOT + 1023 & ~1023u) + (L::HEADS == 64 ? 1024 : 0);  // behind sums
}

template <class L>
constexpr bool WEIGHTS_BY_GROUP = !L::R::SCALES_APART;  // scales of V4 are powers of two

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

// All scores of a lane's two keys, as powers of two that are relative to the references, and the values.
//
// Queries come two chunks of 64 dims ahead, in the order in which `score` has a key's, to the place of weights and to
// those of the last values. Heads past the last repeat it. RoPE that is no value is there as bfloat16.
template <class L, int BARRIER>
DEVICE void wide_scores(float (&s)[L::HEADS / 2], const Params& p, const Row& row, const Ring& at, u32 shared,
                        const WidePlaces& places, bool held, int thread) {
  using R = typename L::R;
  constexpr int CHUNK = TILE_KEYS * 128, N = L::HEADS / 2;
  // A head's factor and reference.
  auto column_of = [&](int e) {
    const int t = (L::HEADS == 32 ? opaque(thread) : thread) & 3;  // registers are few
    return load_shared_float2(shared + L::COLUMNS + (e / 4 * 8 + (e & 1) + 2 * t) * 8);
  };
  // The power of two by which a head's query was multiplied.
  auto unit_of = [&](float column) {
    const u32 one = __float_as_uint(p.scale_log2 / L::FACTOR);
    return __uint_as_float((one >> 23 & 255) + 127 - (__float_as_uint(column) >> 23 & 255) << 23);
  };
#pragma unroll
  for (int e = 0; e < N; ++e) s[e] = R::ROPE_IS_VALUE ? -column_of(e).y : 0.f;
  auto next = [&](u32 place) {
    const u32 spare = shared + L::VALUES + half_of<L::HALVES>(at, 1).slot * HALF_BYTES + 2 * CHUNK;
    return place == shared + L::WEIGHTS ? spare : place == spare ? spare + CHUNK : shared + L::WEIGHTS;
  };
  u32 here = shared + L::WEIGHTS;
#pragma unroll 1
  for (int step = held ? 2 * (8 - R::CHUNKS) : -4; step < 16; ++step) {  // halves of chunks, the first without keys
    const int chunk = step >> 1, half = step & 1;
    if (half == 0 && !held) {
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
    uint2 latents[2] = {};
    auto make_bfloat16 = [&]() {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        u32 a[4];
        e4m3_to_float16(latents[r].x, a[0], a[1]), e4m3_to_float16(latents[r].y, a[2], a[3]);
#pragma unroll
        for (int w = 0; w < 4; ++w) f[2 * w + r] = float16_to_bfloat16(a[w]);
      }
    };
    if (!rope)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        latents[r] = load_shared_8(places.raw + r * (8 * R::BYTES) + chunk * 64 + half * 8);
    float part[N];
    if (!R::ROPE_IS_VALUE && value && held) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
        e4m3_to_float16(latents[r].x, f[r], f[2 + r]), e4m3_to_float16(latents[r].y, f[4 + r], f[6 + r]);
      const u64 operand = tile_descriptor(shared + L::QUERY + chunk * L::QUERY_CHUNK + half * 64, 1024, 16);
      hold(f);
      wgmma_fence();
      wgmma_float16(part, f, operand, 0);
      wgmma_float16(part, f + 4, operand + 2, 1);
      wgmma_commit();
      wgmma_wait<0>();
      hold(part), hold(f);
      make_bfloat16();
    } else {
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
        make_bfloat16();
      }
      const u64 operand = tile_descriptor(
          (value ? here : shared + L::QUERY + (R::CHUNKS - 1) * L::QUERY_CHUNK) + half * 64, 1024, 16);
      hold(f);
      wgmma_fence();
      wgmma_bfloat16(part, f, operand, 0);
      wgmma_bfloat16(part, f + 4, operand + 2, 1);
      wgmma_commit();
      wgmma_wait<0>();
      hold(part), hold(f);
    }
    float scales[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scales[r] = rope ? 1.f : R::scale(places.scales + r * (8 * R::SCALES_PITCH), chunk * 64 / R::GROUP);
      const float factor = !value ? 1.f : R::ROPE_IS_VALUE ? scales[r] * p.scale_log2 : scales[r] * R::FACTOR;
#pragma unroll
      for (int e = 2 * r; e < N; e += e % 2 ? 3 : 1) {
        // Scores are in the units of the queries that are there, so that both ways give the same bits.
        if (!R::ROPE_IS_VALUE && value && !held) part[e] *= unit_of(column_of(e).x);
        s[e] = fmaf(part[e], factor, s[e]);
      }
    }
    if (value) {
      if constexpr (R::SCALES_APART)
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
    if (half) here = next(here);
  }
  if (!R::ROPE_IS_VALUE)
#pragma unroll
    for (int e = 0; e < N; ++e) {
      const float2 column = column_of(e);
      s[e] = fmaf(s[e], column.x, -column.y);
    }
}

// Whether float16 holds a row's queries beside their head's largest: none is below 2^-16 in shared memory.
template <class L, int BARRIER>
DEVICE bool queries_are_held(u32 shared, int thread) {
  u32 least = ~0u;
#pragma unroll 1
  for (u32 place = shared + L::QUERY + thread * 16; place < shared + L::QUERY + 8 * L::QUERY_CHUNK; place += 2048) {
    const uint4 v = load_shared_16(place);
#pragma unroll
    for (int w = 0; w < 4; ++w) least = smaller_halves(least, word(v, w) & 0x7fff7fff);
  }
  return !named_barrier_any<BARRIER, 128>((least & 0xffff) < 0x100 || least >> 16 < 0x100);
}

// Scores of a foreseen wide turn, with the queries that are there, which float16 holds: a group's products times its scale.
template <class L>
DEVICE void foreseen_scores(float (&s)[L::HEADS / 2], u32 shared, const WidePlaces& places, int thread) {
  using R = typename L::R;
  constexpr int N = L::HEADS / 2;
#pragma unroll
  for (int e = 0; e < N; ++e) s[e] = 0.f;
  float part[N];
  u32 f[16];
  const u64 query = tile_descriptor(shared + L::QUERY, 1024, 16);
#pragma unroll 1
  for (int group = 0; group < 4; ++group) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {  // halves of chunks: one becomes float16 while products of the one before run
      u32* const own = f + n % 2 * 8;
      if (n > 1) {
        wgmma_wait<1>();
        hold(f);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint2 v = load_shared_8(places.raw + r * (8 * R::BYTES) + group * 128 + n / 2 * 64 + n % 2 * 8);
        e4m3_to_float16(v.x, own[r], own[2 + r]), e4m3_to_float16(v.y, own[4 + r], own[6 + r]);
      }
      hold(f);
      wgmma_fence();
      const u64 operand = query + ((group * 2 + n / 2) * L::QUERY_CHUNK + n % 2 * 64) / 16;
      wgmma_float16(part, own, operand, n > 0);
      wgmma_float16(part, own + 4, operand + 2, 1);
      wgmma_commit();
    }
    const float scale[2] = {R::scale(places.scales, group) * R::FACTOR,
                            R::scale(places.scales + 8 * R::SCALES_PITCH, group) * R::FACTOR};
    wgmma_wait<0>();
    hold(part), hold(f);
#pragma unroll
    for (int e = 0; e < N; ++e) s[e] = fmaf(part[e], scale[e >> 1 & 1], s[e]);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint4 v = load_matrices(places.raw + places.rope + j * 32);
    f[4 * j] = v.x, f[4 * j + 1] = v.y, f[4 * j + 2] = v.z, f[4 * j + 3] = v.w;
  }
  hold(f);
  wgmma_fence();
#pragma unroll
  for (int j = 0; j < 4; ++j)
    wgmma_bfloat16(part, f + 4 * j, query + (8 * L::QUERY_CHUNK + j * 32) / 16, j > 0);
  wgmma_commit();
  wgmma_wait<0>();
  hold(part), hold(f);
#pragma unroll
  for (int j = 0; j < L::HEADS / 8; ++j) {
    const uint4 two = load_shared_16(shared + L::COLUMNS + (8 * j + 2 * (thread & 3)) * 8);  // of two heads
#pragma unroll
    for (int e = 4 * j; e < 4 * j + 4; ++e)
      s[e] = fmaf(s[e] + part[e], __uint_as_float(e & 1 ? two.z : two.x), -__uint_as_float(e & 1 ? two.w : two.y));
  }
}

// A half of the values of a foreseen turn, by the warpgroup that accumulates it: those of a warp's keys.
template <class L>
DEVICE void make_foreseen_values(u32 shared, int slot, int parity, u32 values, int half, int thread) {
  using R = typename L::R;
  const int warp = thread >> 5, lane = thread & 31;
  u32 raw = shared + L::RAW + slot * L::RAW_SLOT + R::raw_row(lane >> 2) * R::BYTES + (lane & 3) * 16 + half * 256,
      place = values + (warp * 16 + (lane & 15)) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
  mbarrier_wait(shared + L::RAW_FULL + slot * 8, parity);
#pragma unroll 1
  for (int chunk = 0; chunk < 4; ++chunk, raw += 64, place += TILE_KEYS * 128) {
    const uint4 v[2] = {load_shared_16(raw), load_shared_16(raw + 8 * R::BYTES)};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      u32 f[4];
#pragma unroll
      for (int r = 0; r < 2; ++r) e4m3_to_float16(word(v[r], j), f[r], f[2 + r]);
#pragma unroll
      for (int w = 0; w < 4; ++w) f[w] = float16_to_bfloat16(f[w]);
      store_matrices(place ^ j << 5, f[0], f[1], f[2], f[3]);
    }
  }
}

// Stores a lane's scales in the table behind the weights, once all warps have read the keys.
template <class L, int BARRIER>
DEVICE void store_scales(u32 scales, u32 weights, int thread) {
  using R = typename L::R;
  const int warp = thread >> 5, lane = thread & 31, t = lane & 3;
  float factors[2];
#pragma unroll
  for (int r = 0; r < 2; ++r)
    factors[r] = R::SCALES_APART ? 1.f : R::scale(scales + r * (8 * R::SCALES_PITCH), t) * R::FACTOR;
  named_barrier<BARRIER, 128>();  // no warp reads keys or the weights' place any more
  if constexpr (!R::SCALES_APART) {
    const u32 table = weights + 4 * L::HEADS * 128 + ((warp * 16 + (lane >> 2)) * 4 + t) * 4;
    store_shared_float(table, factors[0]), store_shared_float(table + 128, factors[1]);
    __syncwarp();
  }
}

// The weights of such a turn: of each group, or of V4 upper bits, at the usual place, and rests.
template <class L>
DEVICE void store_wide_weights(const float (&s)[L::HEADS / 2], u32 shared, u32 weights, int thread) {
  u32 table = weights + 4 * L::HEADS * 128 + ((thread >> 5) * 16 + ((thread & 31) >> 2)) * 16;
  if constexpr (!L::R::SCALES_APART) {
#pragma unroll 1
    for (u32 place = weights; place < weights + 4 * L::HEADS * 128; place += L::HEADS * 128, table += 4) {
      const float factors[2] = {load_shared_float(table), load_shared_float(table + 128)};
      store_weights<L::HEADS>(s, weights_row(place, opaque(thread)), [&](float a, float b, int key) {
        return pack_bfloat16(a * factors[key], b * factors[key]);
      });
    }
  } else {
#pragma unroll 1
    for (int n = 0; n < 2; ++n) {
      const u32 sign = n ? 0x80000000u : 0;
      const float factor = n ? 1.f : 0.f;
      auto part = [&](float weight) {
        return fmaf(weight, factor, __uint_as_float(__float_as_uint(weight) & 0xffff0000u ^ sign));
      };
      store_weights<L::HEADS>(s, weights_row(n ? weights : shared + L::WEIGHTS, opaque(thread)),
                              [&](float a, float b, int) { return pack_bfloat16(part(a), part(b)); });
    }
  }
}
