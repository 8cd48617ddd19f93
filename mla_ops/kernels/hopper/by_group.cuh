// Wide turns of 64 heads over fp8_ds_mla, by groups of 128 dims.
//
// Scores are sums of each group's products of e4m3 and queries, which float16 holds, times its scale, in float32. Values
// are e4m3 times four bits of their scale, which bfloat16 holds. What these leave out goes to weights, bfloat16 too, of
// which each group has its own. Accumulators are what usual turns make them.
//
//     score        S = sum over groups of (e4m3 Q') scale -> w = bfloat16(2^(S - reference) rest) into the keys' rows
//     accumulate   V = e4m3 bits of the scale, made of these rows once products of the last turn are over; O += w V
#pragma once

#include "keys.cuh"
#include "queries.cuh"
#include "softmax.cuh"
#include "wide.cuh"

// Barriers of a turn: values are made, and products of the one before are over; it is known whether references moved;
// weights are there; both warpgroups that accumulate have read them.
constexpr u32 HAS_RESTS = 1 << 17;  // flag beside a `Turn`: weights differ by group
constexpr int GROUP_VALUES_BARRIER = 8, GROUP_TURN_BARRIER = 9, GROUP_WEIGHTS_BARRIER = 10,
              GROUP_READ_BARRIER = 11;

// Where weights of usual turns were: factors of queries, which may be larger in a group, float [4, HEADS].
template <class L>
DEVICE u32 query_factors(u32 shared) { return shared + L::WEIGHTS + 2048; }

// The power of two of a head's queries in shared memory.
template <class L>
DEVICE int shift_of_head(const Params& p, u32 shared, int head) {
  const u32 one = __float_as_uint(p.scale_log2 / L::R::FACTOR), column = load_shared_4(shared + L::COLUMNS + head * 8);
  return static_cast<int>(one >> 23 & 255) - static_cast<int>(column >> 23 & 255);
}

// Makes queries anew from those in memory, times a power of two of each head, or of each head and group with FITTED.
template <class L, bool FITTED>
DEVICE void remake_queries(const Params& p, const Row& row, u32 shared, int thread) {
  const int lane = thread & 15;
#pragma unroll 1
  for (int n = thread >> 4; n < 4 * L::HEADS; n += 8) {
    const int head = n & (L::HEADS - 1), group = n / L::HEADS, of_head = shift_of_head<L>(p, shared, head);
    const u16* from = query_at(p, row.token, global_head<L::HEADS>(p, row, head)) + group * 128 + lane * 8;
    const uint4 piece[1] = {__ldg(reinterpret_cast<const uint4*>(from))};
    const int shift = FITTED ? shift_of(largest_magnitude(piece)) : of_head;
    u32 v[4];
    scale_piece(v, piece[0], (127 + shift << 7) * 0x10001u, true);
    const u32 to = shared + L::QUERY + (group * 2 + lane / 8) * L::QUERY_CHUNK + head * 128 +
                   ((lane & 1) * 64 + (lane & 7) / 2 * 4 ^ (head & 7) << 4);
#pragma unroll
    for (int w = 0; w < 4; ++w) store_shared_4(to ^ w << 4, v[w]);
    if (FITTED && lane == 0)
      store_shared_float(query_factors<L>(shared) + n * 4, exp2_approx(static_cast<float>(of_head - shift)));
  }
  fence_async_shared();
  named_barrier<SCORE_BARRIER, 128>();
}

// Whether a row has queries that float16 does not hold beside their head's largest, below 2^-16 in shared memory.
template <class L>
DEVICE bool has_small_queries(u32 shared, int thread) {
  u32 least = ~0u;
#pragma unroll 1
  for (u32 place = shared + L::QUERY + thread * 16; place < shared + L::QUERY + 8 * L::QUERY_CHUNK; place += 2048) {
    const uint4 v = load_shared_16(place);
#pragma unroll
    for (int w = 0; w < 4; ++w) least = smaller_halves(least, word(v, w) & 0x7fff7fff);
  }
  return named_barrier_any<SCORE_BARRIER, 128>((least & 0xffff) < 0x100 || least >> 16 < 0x100);
}

template <int HEADS, Format FORMAT>
constexpr bool TURNS_BY_GROUP = HEADS == 64 && FORMAT == FP8_DS_MLA;

// Scores and weights of this turn and of wide ones that follow it at once. `last`: whether this is the row's last turn;
// says so of the last one that was taken, too.
template <class L, Launch LAUNCH>
DEVICE void score_by_group(const Params& p, const Row& row, u32 shared, int thread, Ring& at,
                           float (&s)[L::HEADS / 2], float (&sums)[L::HEADS / 4], int& seen, bool& last) {
  using R = typename L::R;
  constexpr Format FORMAT = FP8_DS_MLA;
  constexpr bool PERSISTENT = is_persistent(LAUNCH), SHARES = in_shares(LAUNCH);
  constexpr int N = L::HEADS / 2;
  if (thread == 0) store_shared_4(shared + L::TURN, BY_GROUP);
  const bool fitted = has_small_queries<L>(shared, thread);
  if (fitted) remake_queries<L, true>(p, row, shared, thread);
  bool has_rests = fitted;  // factors of queries lie where weights without rests would
  int& i = at.turn;
  for (;;) {
    __syncwarp();
    warp_arrive(shared + L::WEIGHTS_FULL, opaque(thread) & 31);  // those that accumulate begin
    // Addresses are made where they are used: registers are few.
    const int first = opaque(thread);
    const Places places = places_of<L::HEADS, FORMAT>(shared, first >> 5, first & 31);
    const int first_slot = (i & 1) * 4 + (first >> 5);
    const u32 raw = places.raw + first_slot * L::RAW_SLOT, scales = places.scales + first_slot * L::SCALES_SLOT;
    float part[N];
    u32 f[8];  // of 32 dims: registers are few
#pragma unroll
    for (int e = 0; e < N; ++e) s[e] = 0.f;
#pragma unroll 1
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint4 v = load_matrices(raw + places.rope + step * 64 + j * 32);
        f[4 * j] = v.x, f[4 * j + 1] = v.y, f[4 * j + 2] = v.z, f[4 * j + 3] = v.w;
      }
      hold(f);
      wgmma_fence();
      const u64 query = places.query + (8 * L::QUERY_CHUNK + step * 64) / 16;
      wgmma_bfloat16(part, f, query, 0), wgmma_bfloat16(part, f + 4, query + 2, 1);
      wgmma_commit();
      wgmma_wait<0>();
      hold(part), hold(f);
#pragma unroll
      for (int e = 0; e < N; ++e) s[e] += part[e];
    }
#pragma unroll 1
    for (int step = 0; step < 16; ++step) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint2 v = load_shared_8(raw + r * (8 * R::BYTES) + (step >> 1) * 64 + (step & 1) * 8);
        e4m3_to_float16(v.x, f[r], f[2 + r]), e4m3_to_float16(v.y, f[4 + r], f[6 + r]);
      }
      hold(f);
      wgmma_fence();
      const u64 query = places.query + ((step >> 1) * L::QUERY_CHUNK + (step & 1) * 64) / 16;
      wgmma_float16(part, f, query, 0), wgmma_float16(part, f + 4, query + 2, 1);
      wgmma_commit();
      wgmma_wait<0>();
      hold(part), hold(f);
      {
        const float scale[2] = {R::scale(scales, step >> 2) * R::FACTOR,
                                R::scale(scales + 8 * R::SCALES_PITCH, step >> 2) * R::FACTOR};
        if (fitted)
#pragma unroll
          for (int j = 0; j < L::HEADS / 8; ++j) {
            const float2 two = load_shared_float2(query_factors<L>(shared) + ((step >> 2) * L::HEADS + 2 * (first & 3) + j * 8) * 4);
#pragma unroll
            for (int e = 4 * j; e < 4 * j + 4; ++e) part[e] *= e & 1 ? two.y : two.x;
          }
#pragma unroll
        for (int e = 0; e < N; ++e) s[e] = fmaf(part[e], scale[e >> 1 & 1], s[e]);
      }
    }
    const int own = opaque(thread), lane = own & 31, t = lane & 3, slot = (i & 1) * 4 + (own >> 5);
    const u32 alive = load_shared_4(shared + L::LIVE + slot * 4);
    last = uniform(alive) >= LAST_TURN;
#pragma unroll
    for (int j = 0; j < L::HEADS / 8; ++j) {
      const uint4 two = load_shared_16(shared + L::COLUMNS + (8 * j + 2 * t) * 8);  // factor and reference of two heads
#pragma unroll
      for (int e = 4 * j; e < 4 * j + 4; ++e)
        s[e] = fmaf(s[e], __uint_as_float(e & 1 ? two.z : two.x), -__uint_as_float(e & 1 ? two.w : two.y));
    }
    const u32 mine = (alive & 0xffff) >> R::raw_row(lane >> 2);
#pragma unroll
    for (int e = 0; e < N; ++e)
      if (!(mine & (e & 2 ? 0x100 : 1))) s[e] = -INFINITY;
    float top = s[0];
#pragma unroll
    for (int e = 1; e < N; ++e) top = fmaxf(top, s[e]);
    uint4 own_scales[2];
    u32 beyond = 0;  // bits of scales beyond four
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      own_scales[r] = R::load_scales(shared + L::SCALES + R::raw_row(lane >> 2) * R::SCALES_PITCH +
                                     slot * L::SCALES_SLOT + r * (8 * R::SCALES_PITCH));
#pragma unroll
      for (int w = 0; w < 4; ++w) beyond |= word(own_scales[r], w);
    }
    named_barrier<GROUP_VALUES_BARRIER, 384>();  // then weights may take the place of keys
    if (!has_rests) has_rests = named_barrier_any<SCORE_BARRIER, 128>(beyond & 0x000fffff);
    // The sums of a row that another follows go where the first warp's last keys were.
    if (!has_rests && !(PERSISTENT && last && slot % 4 == 0)) warp_arrive(shared + L::RAW_FREE + slot * 8, lane);
    u32 turn = BY_GROUP;
    if (named_barrier_any<SCORE_BARRIER, 128>(top > REFERENCE_SLACK || !seen && (alive & 0xffff))) {
      const float least = SHARES || p.shares ? REFERENCE_SLACK : RAISED_TO;
      raise_references<L>(s, sums, seen != 0, least, shared, thread);
      turn = BY_GROUP_MOVED, seen = 2;
    }
    if (PERSISTENT && last && (!SHARES || ends_row(p, row))) warp_arrive(shared + L::QUERIES_FREE, lane);
    if (has_rests) turn |= HAS_RESTS;
    if (thread == 0) store_shared_4(shared + L::TURN, turn | slot << 8 | (last ? LAST_TURN : 0));
    __syncwarp();
    named_barrier_arrive(GROUP_TURN_BARRIER, 384);
#pragma unroll
    for (int e = 0; e < N; ++e) s[e] = exp2_approx(s[e]);
#pragma unroll
    for (int c = 0; c < N / 2; ++c) sums[c] += s[c / 2 * 4 + (c & 1)] + s[c / 2 * 4 + (c & 1) + 2];
    if (has_rests) {
      u32 place = place_of_rests<L>(shared, (i & 1) * 4);
#pragma unroll 1
      for (int group = 0; group < 4; ++group, place += L::HEADS * 128) {
        float rest[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) rest[r] = rest_of_scale(__uint_as_float(word(own_scales[r], group)) * R::FACTOR);
        store_weights<L::HEADS>(s, weights_row(place, opaque(thread)), [&](float a, float b, int key) {
          return pack_bfloat16(a * rest[key], b * rest[key]);
        });
      }
    } else {
      store_weights<L::HEADS>(s, weights_row(shared + L::WEIGHTS, opaque(thread)),
                              [](float a, float b, int) { return pack_bfloat16(a, b); });
    }
    __syncwarp();
    named_barrier_arrive(GROUP_WEIGHTS_BARRIER, 384);
    next_turn<L::HALVES>(at);
    if (last) break;
    const int later = opaque(thread), later_slot = (i & 1) * 4 + (later >> 5);
    mbarrier_wait(shared + L::RAW_FULL + later_slot * 8, i >> 1 & 1);
    bool wide = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const u32 from = shared + L::SCALES + R::raw_row((later & 31) >> 2) * R::SCALES_PITCH;
      typename R::Scales scales = R::load_scales(from + later_slot * L::SCALES_SLOT + r * (8 * R::SCALES_PITCH));
      u32 undo;
      wide |= R::take_out(scales, undo);
    }
    if (!named_barrier_any<SCORE_BARRIER, 128>(wide || fitted && !SHARES)) break;
  }
  if (seen) seen = 2;
  // A share's bits may not depend on what the one before had.
  if constexpr (SHARES)
    if (fitted && !(last && ends_row(p, row))) remake_queries<L, false>(p, row, shared, thread);
}

// Four e4m3 in a word times a pair of bfloat16, as two pairs of these.
DEVICE void scaled_e4m3_to_bfloat16(u32 word, u32 scale, u32& low, u32& high) {
  e4m3_to_float16(word, low, high);
  const float2 a = unpack_float16(low), b = unpack_float16(high);
  low = multiply_bfloat16(pack_bfloat16(a.x, a.y), scale), high = multiply_bfloat16(pack_bfloat16(b.x, b.y), scale);
}

// A half of the values of a warp's keys.
template <class L>
DEVICE void make_group_values(u32 shared, int turn, u32 values, int half, int thread) {
  using R = typename L::R;
  const int warp = thread >> 5, lane = thread & 31, slot = (turn & 1) * 4 + warp;
  const u32 row = shared + L::RAW + slot * L::RAW_SLOT + R::raw_row(lane >> 2) * R::BYTES;
  u32 raw = row + (lane & 3) * 16 + half * 256, scales = row + R::SCALES_AT + half * 8,
      place = values + (warp * 16 + (lane & 15)) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
  mbarrier_wait(shared + L::RAW_FULL + slot * 8, turn >> 1 & 1);
#pragma unroll 1
  for (int chunk = 0; chunk < 4; ++chunk, raw += 64, place += TILE_KEYS * 128) {
    const uint4 v[2] = {load_shared_16(raw), load_shared_16(raw + 8 * R::BYTES)};
    u32 scale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const u32 bits = __float_as_uint(rounded_scale(load_shared_float(scales + r * (8 * R::SCALES_PITCH)) * R::FACTOR));
      scale[r] = bits >> 16 | bits;
    }
    scales += (chunk & 1) * 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      u32 f[4];
#pragma unroll
      for (int r = 0; r < 2; ++r) scaled_e4m3_to_bfloat16(word(v[r], j), scale[r], f[r], f[2 + r]);
      store_matrices(place ^ j << 5, f[0], f[1], f[2], f[3]);
    }
  }
}

// Weights times values of such a turn: makes the values at `place`. Returns the turn's kind and flags.
template <class L>
DEVICE u32 accumulate_by_group(u32 shared, int half, int thread, int i, u32 place, float (&o)[2][64]) {
  named_barrier(VALUES_BARRIER + 1 + half, 128);  // products have left the values
  make_group_values<L>(shared, i, place, half, opaque(thread));
  fence_async_shared();
  named_barrier_arrive(GROUP_VALUES_BARRIER, 384);
  named_barrier(GROUP_TURN_BARRIER, 384);
  const int own = opaque(thread), lane = own & 31;  // registers are few
  const u32 turn = load_shared_4(shared + L::TURN);
  if ((turn & 0xff) == BY_GROUP_MOVED) {
    const u32 alpha = shared + L::ALPHA + ((own >> 5) * 16 + (lane >> 2)) * 4;
    const float factors[2] = {load_shared_float(alpha), load_shared_float(alpha + 32)};
#pragma unroll
    for (int piece = 0; piece < 2; ++piece)
#pragma unroll
      for (int e = 0; e < 64; ++e) o[piece][e] *= factors[e >> 1 & 1];
  }
  named_barrier(GROUP_WEIGHTS_BARRIER, 384);
  fence_async_shared();
  const int first = uniform(turn) >> 8 & 0xff;
  const bool has_rests = uniform(turn) & HAS_RESTS;
  const int of_a_group = has_rests ? L::HEADS * 128 : 0;
  const u32 at = has_rests ? place_of_rests<L>(shared, first) + half * (2 * L::HEADS * 128) : shared + L::WEIGHTS;
  u64 weights = tile_descriptor(at, 1024, 16), values = tile_descriptor(place, 1024, TILE_KEYS * 128);
  hold(weights), hold(values), hold(o[0]), hold(o[1]);
  wgmma_fence();
#pragma unroll
  for (int piece = 0; piece < 2; ++piece)
#pragma unroll
    for (int k = 0; k < 4; ++k)
      wgmma_heads_by_dims_bfloat16(o[piece], weights + (piece * of_a_group + k * 32) / 16,
                                   values + (piece * 2 * TILE_KEYS * 128 + k * 2048) / 16);
  wgmma_commit();
  wgmma_wait<0>();
  hold(o[0]), hold(o[1]);
  return turn;
}

// Gives keys of such a turn back once both halves have read weights in their place. The first warp's last ones stay in a
// row that another follows.
template <class L>
DEVICE void free_keys_by_group(u32 shared, int half, int thread, u32 turn, bool persistent) {
  if (!(uniform(turn) & HAS_RESTS)) return;
  if (half == 0) {
    named_barrier_arrive(GROUP_READ_BARRIER, 256);
    return;
  }
  named_barrier(GROUP_READ_BARRIER, 256);
  const int own = opaque(thread);
  if (!(persistent && turn & LAST_TURN && own < 32))
    warp_arrive(shared + L::RAW_FREE + ((turn >> 8 & 0xff) + (own >> 5)) * 8, own & 31);
}
