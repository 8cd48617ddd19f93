// The rest of a row of 64 heads from its first wide turn on, over fp8_ds_mla, by groups of 128 dims.
//
// Scores are sums of each group's products of e4m3 and queries, which float16 holds, times its scale, in float32. Values
// are e4m3 times four bits of their scale, which bfloat16 holds. What these leave out goes to weights, bfloat16 too, of
// which each group has its own. Accumulators are what usual turns make them.
//
//     score        S = sum over groups of (e4m3 Q') scale -> w = bfloat16(2^(S - running maximum) rest) into the keys' rows
//     accumulate   V = e4m3 bits of the scale, made of these rows once products of the last turn are over; O += w V
#pragma once

#include "keys.cuh"
#include "queries.cuh"
#include "softmax.cuh"
#include "wide.cuh"

constexpr u32 HAS_RESTS = 1 << 17;  // flag beside a `Turn`: weights differ by group

// Barriers of a turn: values are made, and products of the one before are over; it is known whether running maxima moved;
// weights are there; both warpgroups that accumulate have read them.
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

// Queries that float16 does not hold beside their head's largest, below 2^-16 in shared memory, are made anew, each group
// with a power of two of its own. Returns whether there were any: else all factors are 1, and are not read.
template <class L, int BARRIER>
DEVICE bool fit_queries(const Params& p, const Row& row, u32 shared, int thread) {
  u32 least = ~0u;
#pragma unroll 1
  for (u32 place = shared + L::QUERY + thread * 16; place < shared + L::QUERY + 8 * L::QUERY_CHUNK; place += 2048) {
    const uint4 v = load_shared_16(place);
#pragma unroll
    for (int w = 0; w < 4; ++w) least = smaller_halves(least, word(v, w) & 0x7fff7fff);
  }
  const bool small = named_barrier_any<BARRIER, 128>((least & 0xffff) < 0x100 || least >> 16 < 0x100);
  const u32 factors = query_factors<L>(shared);
  if (small) {
    const int lane = thread & 15;
#pragma unroll 1
    for (int n = thread >> 4; n < 4 * L::HEADS; n += 8) {
      const int head = n & (L::HEADS - 1), group = n / L::HEADS;
      const u16* from = query_at(p, row.token, global_head<L::HEADS>(p, row, head)) + group * 128 + lane * 8;
      const uint4 piece[1] = {__ldg(reinterpret_cast<const uint4*>(from))};
      const int shift = shift_of(largest_magnitude(piece));
      u32 v[4];
      scale_piece(v, piece[0], (127 + shift << 7) * 0x10001u, true);
      const u32 to = shared + L::QUERY + (group * 2 + lane / 8) * L::QUERY_CHUNK + head * 128 +
                     ((lane & 1) * 64 + (lane & 7) / 2 * 4 ^ (head & 7) << 4);
#pragma unroll
      for (int w = 0; w < 4; ++w) store_shared_4(to ^ w << 4, v[w]);
      if (lane == 0)
        store_shared_float(factors + n * 4, exp2_approx(static_cast<float>(shift_of_head<L>(p, shared, head) - shift)));
    }
    fence_async_shared();
    named_barrier<BARRIER, 128>();
  }
  return small;
}

// Whether a launch has such turns, and no other wide ones. Rows that have to have the bits of other launches do not, and
// with few rows of a CTA the start and the end of each take longer with this code in between (docs/notes.md).
template <int HEADS, Format FORMAT, Launch LAUNCH>
constexpr bool TURNS_BY_GROUP = LAUNCH == Launch::MANY_ROWS;

// Scores and weights of the turns that are left of a row, from this one on.
template <class L, int BARRIER>
DEVICE void score_by_group(const Params& p, const Row& row, u32 shared, int thread, Ring& at,
                           float (&sums)[L::HEADS / 4], bool seen) {
  using R = typename L::R;
  constexpr Format FORMAT = FP8_DS_MLA;
  constexpr int N = L::HEADS / 2;
  const u32 state = shared + L::ROUGH;  // 1: a key counted; 2: queries have factors; 4: a scale had a rest. Registers are few
  if (thread == 0) store_shared_4(state, seen), store_shared_4(shared + L::TURN, BY_GROUP);
  __syncwarp();
  warp_arrive(shared + L::WEIGHTS_FULL, thread & 31);  // those that accumulate begin
  const bool fitted = fit_queries<L, BARRIER>(p, row, shared, thread);
  if (thread == 0 && fitted) store_shared_4(state, load_shared_4(state) | 2);
  named_barrier<BARRIER, 128>();
  int& i = at.turn;
#pragma unroll 1
  for (bool last = false; !last; next_turn<L::HALVES>(at)) {
    // Addresses are made where they are used: registers are few.
    const int first = opaque(thread);
    const Places places = places_of<L::HEADS, FORMAT>(shared, first >> 5, first & 31);
    const int first_slot = (i & 1) * 4 + (first >> 5);
    const u32 raw = places.raw + first_slot * L::RAW_SLOT, scales = places.scales + first_slot * L::SCALES_SLOT;
    mbarrier_wait(shared + L::RAW_FULL + first_slot * 8, i >> 1 & 1);
    float s[N], part[N];
    u32 f[2][16];        // of two chunks: one is made while the other is multiplied
    uint4 bytes[2];      // of the chunk that is made next
    auto load = [&](int chunk, int group) {
#pragma unroll
      for (int r = 0; r < 2; ++r) bytes[r] = load_shared_16(raw + r * (8 * R::BYTES) + group * 128 + chunk * 64);
    };
    auto convert = [&](int chunk) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          e4m3_to_float16(word(bytes[r], j), f[chunk][4 * j + r], f[chunk][4 * j + 2 + r]);
      hold(f[chunk]);
    };
    auto multiply = [&](int chunk, int group) {
      const u64 query = places.query + (group * 2 + chunk) * (L::QUERY_CHUNK / 16);
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < 4; ++j) wgmma_float16(part, f[chunk] + 4 * j, query + j * 2, chunk > 0 || j > 0);
      wgmma_commit();
    };
    Bytes rope;
    load_rope<FORMAT>(rope, raw + places.rope, 0), load_rope<FORMAT>(rope, raw + places.rope, 1);
    load(0, 0);
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int w = 0; w < 4; ++w) f[1][4 * j + w] = word(rope.of[j / 2][j % 2], w);
    hold(f[1]);
    forget(s), forget(part);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; ++j)
      wgmma_bfloat16(s, f[1] + 4 * j, places.query + (8 * L::QUERY_CHUNK + j * 32) / 16, j > 0);
    wgmma_commit();
    convert(0);
    load(1, 0);
    wgmma_wait<0>();
    hold(s), hold(f[1]);
#pragma unroll 1
    for (int group = 0; group < 4; ++group) {
      const bool more = group < 3;
      multiply(0, group);
      convert(1);
      if (more) load(0, group + 1);
      multiply(1, group);
      wgmma_wait<1>();
      hold(f[0]);
      if (more) convert(0), load(1, group + 1);
      const float scale[2] = {R::scale(scales, group) * R::FACTOR,
                              R::scale(scales + 8 * R::SCALES_PITCH, group) * R::FACTOR};
      const u32 has_factors = load_shared_4(state) & 2;
      wgmma_wait<0>();
      hold(part), hold(f[1]);
      if (has_factors != 0)
#pragma unroll
        for (int j = 0; j < L::HEADS / 8; ++j) {
          const float2 two = load_shared_float2(query_factors<L>(shared) + (group * L::HEADS + 2 * (first & 3)) * 4 + j * 32);
#pragma unroll
          for (int e = 4 * j; e < 4 * j + 4; ++e) part[e] *= e & 1 ? two.y : two.x;
        }
#pragma unroll
      for (int e = 0; e < N; ++e) s[e] = fmaf(part[e], scale[e >> 1 & 1], s[e]);
    }
    const int own = opaque(thread), lane = own & 31, t = lane & 3, slot = (i & 1) * 4 + (own >> 5);
    const u32 alive = load_shared_4(shared + L::LIVE + slot * 4);
    last = uniform(alive) >= LAST_TURN;
#pragma unroll
    for (int j = 0; j < L::HEADS / 8; ++j) {
      const uint4 two = load_shared_16(shared + L::COLUMNS + (8 * j + 2 * t) * 8);  // factor and running maximum of two heads
#pragma unroll
      for (int e = 4 * j; e < 4 * j + 4; ++e)
        s[e] = fmaf(s[e], __uint_as_float(e & 1 ? two.z : two.x), -__uint_as_float(e & 1 ? two.w : two.y));
    }
    if ((uniform(alive) & 0xffff) != 0xffff) {
      const u32 mine = (alive & 0xffff) >> R::raw_row(lane >> 2);
#pragma unroll
      for (int e = 0; e < N; ++e)
        if (!(mine & (e & 2 ? 0x100 : 1))) s[e] = -INFINITY;
    }
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
    bool has_rests = load_shared_4(state) & 6;
    if (!has_rests) {
      has_rests = named_barrier_any<BARRIER, 128>(beyond & 0x000fffff);
      if (has_rests && thread == 0) store_shared_4(state, load_shared_4(state) | 4);
    }
    if (!has_rests && !(last && slot % 4 == 0)) warp_arrive(shared + L::RAW_FREE + slot * 8, lane);
    u32 turn = BY_GROUP;
    if (named_barrier_any<BARRIER, 128>(top > RESCALE_THRESHOLD || !(load_shared_4(state) & 1) && (alive & 0xffff))) {
      const u32 before = load_shared_4(state);
      raise_running_max<L>(s, sums, before & 1, RAISED_TO, shared, thread);
      turn = BY_GROUP_MOVED;
      if (thread == 0) store_shared_4(state, before | 1);
    }
    if (last) warp_arrive(shared + L::QUERIES_FREE, lane);
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
    if (!last) warp_arrive(shared + L::WEIGHTS_FULL, lane);  // a phase for each turn
  }
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

// Weights times values of the turns that are left of a row, from this one on.
template <class L>
DEVICE void accumulate_by_group(u32 shared, int half, int thread, Ring& at, float (&o)[2][64]) {
  int& i = at.turn;
  bool begins = true;
#pragma unroll 1
  for (bool ends = false; !ends; next_turn<L::HALVES>(at)) {
    const u32 place = shared + L::VALUES + half_of<L::HALVES>(at, half).slot * HALF_BYTES;
    if (!begins) named_barrier(VALUES_BARRIER + 1 + half, 128);  // products have left the values
    begins = false;
    make_group_values<L>(shared, i, place, half, opaque(thread));
    fence_async_shared();
    named_barrier_arrive(GROUP_VALUES_BARRIER, 384);
    named_barrier(GROUP_TURN_BARRIER, 384);
    const int own = opaque(thread), lane = own & 31;  // registers are few
    const u32 turn = load_shared_4(shared + L::TURN);
    ends = uniform(turn) & LAST_TURN;
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
    u64 weights = tile_descriptor(has_rests ? place_of_rests<L>(shared, first) + half * (2 * L::HEADS * 128)
                                            : shared + L::WEIGHTS, 1024, 16),
        values = tile_descriptor(place, 1024, TILE_KEYS * 128);
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
    // Keys go once both halves have read weights.
    if (has_rests && half == 0) {
      named_barrier_arrive(GROUP_READ_BARRIER, 256);
    } else if (has_rests) {
      named_barrier(GROUP_READ_BARRIER, 256);
      if (!(ends && own < 32)) warp_arrive(shared + L::RAW_FREE + (first + (own >> 5)) * 8, lane);
    }
    if (!ends) {
      const u32 freed = shared + L::VALUES_FREE + half_of<L::HALVES>(at, half).slot * 16;
      warp_arrive(freed, lane), warp_arrive(freed + 8, lane);
    }
  }
}
