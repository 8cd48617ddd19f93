// A warp's keys of a turn: their bytes from shared memory, as fragments of the products with the queries.
#pragma once

#include "layout.cuh"
#include "wgmma.cuh"
#include "wide_ptx.cuh"

template <Format FORMAT>
constexpr int ROPE = Rows<FORMAT>::CHUNKS - 1;

// ONE warpgroup begins with what powers of two are taken out of.
template <bool ONE, Format FORMAT>
DEVICE constexpr int chunk_of(int step) {
  if (Rows<FORMAT>::ROPE_IS_VALUE) return ONE || step < 2 ? step : step == 2 ? ROPE<FORMAT> : step - 1;
  if (ONE) return step == 0 ? ROPE<FORMAT> : step - 1;
  return step < 3 ? step : step == 3 ? ROPE<FORMAT> : step - 1;
}

// Addresses in shared memory at which a thread of a warpgroup of scores reads and writes.
struct Places {
  u32 raw, rope, scales, values, values_free;  // `raw` of its latents in a chunk, `rope` from there on
  u64 query;
};

template <int HEADS, Format FORMAT>
DEVICE Places places_of(u32 shared, int warp, int lane) {
  using L = Layout<HEADS, FORMAT>;
  using R = Rows<FORMAT>;
  Places places;
  const int key = R::raw_row(lane >> 2);
  places.scales = R::SCALES_APART ? shared + L::SCALES + key * R::SCALES_PITCH
                                  : shared + L::RAW + key * R::BYTES + R::SCALES_AT;
  const u32 latents = (lane & 3) * 16;
  places.raw = shared + L::RAW + key * R::BYTES + latents;
  places.rope = R::ROPE_AT + latents;
  // A row of a matrix to each lane: eight keys' first 16 bytes, those of the other eight, then the next 16.
  if (!R::ROPE_IS_VALUE)
    places.rope = R::ROPE_AT + (R::raw_row(lane & 7) + (lane & 8) - key) * R::BYTES + (lane >> 4) * 16 - latents;
  places.query = tile_descriptor(shared + L::QUERY, 1024, 16);
  places.values_free = shared + L::VALUES_FREE;
  places.values = shared + L::VALUES + (warp * 16 + (lane & 15)) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
  return places;
}

// The bytes of a lane's two keys for one step, [key][16 bytes]; a chunk of 64 dims takes half of it. Of RoPE that is no
// value, which needs no conversion, the fragments of four k-steps.
struct Bytes {
  uint4 of[2][2];
};

template <Format FORMAT>
DEVICE void load_rope(Bytes& bytes, u32 rope, int half) {
  using R = Rows<FORMAT>;
  if constexpr (R::ROPE_IS_VALUE) {
#pragma unroll
    for (int r = 0; r < 2; ++r) bytes.of[r][half] = load_shared_16(rope + r * (8 * R::BYTES) + half * 16);
  } else {
#pragma unroll
    for (int step = 0; step < 2; ++step) bytes.of[half][step] = load_matrices(rope + (half * 2 + step) * 32);
  }
}

template <Format FORMAT>
DEVICE void load_bytes(Bytes& bytes, const Places& places, u32 raw_0, int chunk) {
  using R = Rows<FORMAT>;
  if (chunk == ROPE<FORMAT>) {
    load_rope<FORMAT>(bytes, raw_0 + places.rope, 0), load_rope<FORMAT>(bytes, raw_0 + places.rope, 1);
    return;
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) bytes.of[r][0] = load_shared_16(raw_0 + r * (8 * R::BYTES) + chunk * 64);
}

// A turn starts with scales and the bytes of two steps. Loads stay two steps ahead of the products, since they queue
// behind those that the tensor cores have not taken yet.
template <Format FORMAT>
struct Start {
  typename Rows<FORMAT>::Scales scales[2];
  Bytes bytes[2];
  u32 alive;
};

// Registers hold none of it from here on.
template <Format FORMAT>
DEVICE void forget(Start<FORMAT>& start) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    forget(start.scales[n]);
#pragma unroll
    for (int i = 0; i < 4; ++i) forget(start.bytes[n].of[i / 2][i % 2]);
  }
}

template <int HEADS, Format FORMAT, bool ONE, int FIRST>
DEVICE void load_start(Start<FORMAT>& start, const Places& places, u32 raw_0, u32 scales_0, u32 live) {
  using R = Rows<FORMAT>;
  if (chunk_of<ONE, FORMAT>(FIRST) == ROPE<FORMAT>)
    load_rope<FORMAT>(start.bytes[0], raw_0 + places.rope, 0);
  else
    load_bytes<FORMAT>(start.bytes[0], places, raw_0, chunk_of<ONE, FORMAT>(FIRST));
  start.scales[0] = R::load_scales(scales_0), start.scales[1] = R::load_scales(scales_0 + 8 * R::SCALES_PITCH);
  load_bytes<FORMAT>(start.bytes[1], places, raw_0, chunk_of<ONE, FORMAT>(FIRST + 1));
  start.alive = load_shared_4(live);
}

// Loads the rest of a start, once registers are free again.
template <int HEADS, Format FORMAT, bool ONE, int FIRST>
DEVICE void load_start_rest(Start<FORMAT>& start, u32 rope) {
  if (chunk_of<ONE, FORMAT>(FIRST) == ROPE<FORMAT>) load_rope<FORMAT>(start.bytes[0], rope, 1);
}

constexpr u32 ONE_EACH = 0x3f803f80u;  // bfloat16

// One of a pair of bfloat16 in both places.
DEVICE u32 twice(u32 pair, int key) { return __byte_perm(pair, 0, key ? 0x3232 : 0x1010); }

DEVICE float exponent_taken(u32 undo, int key) {
  return static_cast<float>(127 - static_cast<int>((key ? undo >> 16 : undo & 0xffff) >> 7));
}

// A chunk of a lane's keys as the fragments of four steps of 16 dims. `too_large`: not 0 if float16 does not hold one.
template <Format FORMAT>
DEVICE void make_fragments(u32 (&f)[16], const Bytes& bytes, const typename Rows<FORMAT>::Scales (&scales)[2],
                           u32 undo, int chunk, u32& too_large) {
  using R = Rows<FORMAT>;
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      u32 &first = f[4 * j + r], &second = f[4 * j + 2 + r];
      if (chunk == ROPE<FORMAT> && R::ROPE_IS_VALUE) {
        const u32 factor = twice(undo, r);
        first = R::rope(word(bytes.of[r][j / 2], j % 2 * 2), factor);
        second = R::rope(word(bytes.of[r][j / 2], j % 2 * 2 + 1), factor);
        too_large = nan_unless_finite(second, nan_unless_finite(first, too_large));
      } else if (chunk == ROPE<FORMAT>) {
        first = word(bytes.of[j / 2][j % 2], r), second = word(bytes.of[j / 2][j % 2], 2 + r);
      } else {
        e4m3_to_float16(word(bytes.of[r][0], j), R::pair(scales[r], chunk), first, second);
      }
    }
}

template <Format FORMAT>
struct ScalesOfTwo {
  typename Rows<FORMAT>::Scales of[2];
};

// Divides e4m3 of a lane's groups with small scales by powers of two where they lie, chunks from BEGIN to END. No other
// thread reads them, but in a wide turn, which has its scales from `raise_scales`. ptxas puts a function behind all
// roles: in the loop it would be in the way of keys that do not need it.
template <Format FORMAT, int BEGIN, int END>
FUNCTION ScalesOfTwo<FORMAT> lower_keys(ScalesOfTwo<FORMAT> scales, u32 raw_0) {
  using R = Rows<FORMAT>;
  constexpr int OF_GROUP = R::GROUP / 64;  // chunks
  auto flags = [](u32 exponents) { return (exponents + 0x07777777u & 0x08888888u) >> 3; };
  const u32 first = R::raise_small(scales.of[0]), second = R::raise_small(scales.of[1]);
  u32 left = __reduce_or_sync(~0u, flags(first) | flags(second) << 1);  // a bit for each group and key of a lane
  constexpr u32 UP_TO_END = END == R::LATENT / 64 ? ~0u : (1u << (END + OF_GROUP - 1) / OF_GROUP * 4) - 1,
                FROM_BEGIN = ~0u << BEGIN / OF_GROUP * 4;
  left &= UP_TO_END & FROM_BEGIN;
#pragma unroll 1
  for (; left != 0; left &= left - 1) {
    const int bit = __ffs(left) - 1, chunk = (bit >> 2) * OF_GROUP;
    const u32 exponent = (bit & 1 ? second : first) >> (bit & 28) & 15, factor = (15 - exponent << 10) * 0x10001u;
    const u32 place = raw_0 + (bit & 1) * (8 * R::BYTES) + chunk * 64;
    uint4 v[OF_GROUP];
#pragma unroll
    for (int c = 0; c < OF_GROUP; ++c) v[c] = load_shared_16(place + c * 64);
#pragma unroll
    for (int c = 0; c < OF_GROUP; ++c)
      if (chunk + c >= BEGIN && chunk + c < END)
        store_shared_16(place + c * 64, multiply_e4m3(v[c].x, factor), multiply_e4m3(v[c].y, factor),
                        multiply_e4m3(v[c].z, factor), multiply_e4m3(v[c].w, factor));
  }
  fence_async_shared();  // other keys are copied there
  return scales;
}

DEVICE u32 word(const uint2& v, int i) { return i == 0 ? v.x : v.y; }

// Scales of a warp's keys in memory as `lower_keys` left e4m3 for them, before a wide turn reads both.
template <Format FORMAT>
FUNCTION void raise_scales(u32 scales_0, int thread) {
  using R = Rows<FORMAT>;
  const int own = thread & sizeof(typename R::Scales) / 4 - 1;  // word
  ScalesOfTwo<FORMAT> scales;
  u32 kinds = 0, unused, raised[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    scales.of[r] = R::load_scales(scales_0 + r * (8 * R::SCALES_PITCH));
    raised[r] = word(scales.of[r], own);
    kinds |= R::template take_out<true>(scales.of[r], unused);
    raised[r] -= word(scales.of[r], own);
  }
  if (__reduce_or_sync(~0u, kinds) != HAS_SMALL) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    R::raise_small(scales.of[r]);
    store_shared_4(scales_0 + r * (8 * R::SCALES_PITCH) + own * 4, raised[r] + word(scales.of[r], own));
  }
  __syncwarp();
}

// Divides a lane's keys by powers of two of their own where one of its warp needs that, which is returned: their
// scales, and RoPE that is no value where it is among the start's bytes. `undo`: by what they were multiplied, a pair
// of bfloat16. `wide`: whether this does not make float16 hold them.
template <int HEADS, Format FORMAT, bool LOWERS, bool ONE, int FIRST, int COUNT>
DEVICE bool take_out(Start<FORMAT>& start, u32& undo, bool& wide, const Places& places, int slot) {
  using R = Rows<FORMAT>;
  undo = ONE_EACH, wide = false;
  if (!__any_sync(~0u, R::outside(start.scales))) return false;
  u32 second;
  u32 kinds = 0;
  if constexpr (LOWERS)
    kinds = R::template take_out<true>(start.scales[0], undo) | R::template take_out<true>(start.scales[1], second);
  else
    wide = R::template take_out<false>(start.scales[0], undo),
    wide |= R::template take_out<false>(start.scales[1], second);
  undo |= second << 16;
  // Where a key is wide, the others need not be lowered.
  if (LOWERS) wide = kinds & IS_WIDE;
  if (LOWERS && __reduce_or_sync(~0u, kinds) == HAS_SMALL) {
    constexpr int LATER = R::ROPE_IS_VALUE ? 1 : 0;  // V4's first steps have RoPE among them
    constexpr int BEGIN = FIRST > 0 ? FIRST - LATER : 0, END = ONE || FIRST > 0 ? R::LATENT / 64 : COUNT - LATER;
    const u32 raw_0 = places.raw + opaque(slot) * Layout<HEADS, FORMAT>::RAW_SLOT;
    const ScalesOfTwo<FORMAT> scales = lower_keys<FORMAT, BEGIN, END>({{start.scales[0], start.scales[1]}}, raw_0);
    start.scales[0] = scales.of[0], start.scales[1] = scales.of[1];
#pragma unroll
    for (int n = 0; n < 2; ++n)
      if (chunk_of<ONE, FORMAT>(FIRST + n) != ROPE<FORMAT>)
        load_bytes<FORMAT>(start.bytes[n], places, raw_0, chunk_of<ONE, FORMAT>(FIRST + n));
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    if (R::ROPE_IS_VALUE || chunk_of<ONE, FORMAT>(FIRST + n) != ROPE<FORMAT>) continue;
    const u32 factors[2] = {twice(undo, 0), twice(undo, 1)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint4& v = start.bytes[n].of[i / 2][i % 2];
      v.x = multiply_bfloat16(v.x, factors[0]), v.y = multiply_bfloat16(v.y, factors[1]);
      v.z = multiply_bfloat16(v.z, factors[0]), v.w = multiply_bfloat16(v.w, factors[1]);
    }
  }
  return __any_sync(~0u, undo != ONE_EACH);
}
