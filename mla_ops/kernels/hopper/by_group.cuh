// The rest of a row of 64 heads from its first wide turn on, over fp8_ds_mla: weights by group.
//
// Each group of 128 dims has weights of its own, a key's weight times its scale there, relative to a reference of each
// head and group. So values are e4m3 as float16, exact, and weights are float16 in its middle range, whatever the scales
// are. Scores are sums of each group's products times its scale, in float32.
//
//     score        S = sum over groups of (e4m3 Q') scale -> w = 2^(S - reference), float32, into the keys' own rows
//     accumulate   a = float16(w scale 2^(reference - reference of the group)), in registers; O += a e4m3
#pragma once

#include "keys.cuh"
#include "queries.cuh"
#include "softmax.cuh"
#include "wide_ptx.cuh"

// Of a turn: values are made; weights are there; they have been read by both warpgroups that accumulate; of a row's last
// one by these, as the ones that score must know.
constexpr int GROUP_VALUES_BARRIER = 8, GROUP_WEIGHTS_BARRIER = 9, GROUP_READ_BARRIER = 10, GROUP_ROW_BARRIER = 11;

// Where weights of usual turns were: how far a group's references are below the row's, float [4, HEADS], and factors of
// queries, which may be larger in a group, float [4, HEADS].
template <class L>
DEVICE u32 group_references(u32 shared) { return shared + L::WEIGHTS + 4096; }
template <class L>
DEVICE u32 query_factors(u32 shared) { return shared + L::WEIGHTS + 2048; }

// 2^-rise of the row's references, float [2, HEADS]: those of the turn before may still be read.
template <class L>
DEVICE u32 group_alpha(u32 shared, int turn) {
  return shared + L::WEIGHTS + 3072 + (turn & 1) * (L::HEADS * 4);
}

// Where the scales of a head's largest key are, u32 [2, HEADS], of a turn in which references moved; 0: it did not.
template <class L>
DEVICE u32 group_tops(u32 shared, int turn) {
  return shared + L::WEIGHTS + 5120 + (turn & 1) * (L::HEADS * 4);
}

// The power of two of a head's queries in shared memory.
template <class L>
DEVICE int shift_of_head(const Params& p, u32 shared, int head) {
  const u32 one = __float_as_uint(p.scale_log2 / L::R::FACTOR), column = load_shared_4(shared + L::COLUMNS + head * 8);
  return static_cast<int>(one >> 23 & 255) - static_cast<int>(column >> 23 & 255);
}

// Queries that float16 does not hold beside their head's largest, below 2^-16 in shared memory, are made anew, each group
// with a power of two of its own. Returns whether there were any: else all factors are 1, and are
// not read.
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
  const u32 has_seen = query_factors<L>(shared) - 4;  // registers are few
  if (thread == 0) store_shared_4(has_seen, seen), store_shared_4(shared + L::TURN, BY_GROUP);
  __syncwarp();
  warp_arrive(shared + L::WEIGHTS_FULL, thread & 31);  // those that accumulate begin
  const bool fitted = fit_queries<L, BARRIER>(p, row, shared, thread);
  if (thread == 0) store_shared_4(has_seen - 4, fitted);
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
      const u32 has_factors = load_shared_4(has_seen - 4);
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
    u32 turn = BY_GROUP;
    if (named_barrier_any<BARRIER, 128>(top > REFERENCE_SLACK || !load_shared_4(has_seen) && (alive & 0xffff))) {
      const u32 tops = group_tops<L>(shared, opaque(i));
      if (thread < L::HEADS) store_shared_4(tops + thread * 4, 0);
      raise_references<L>(s, sums, load_shared_4(has_seen) != 0, RAISED_TO, shared, thread);
      const int other = opaque(thread);
      const u32 row_0 = places_of<L::HEADS, FORMAT>(shared, other >> 5, other & 28).scales +
                        ((i & 1) * 4 + (other >> 5)) * L::SCALES_SLOT;
#pragma unroll
      for (int e = 0; e < N; ++e)
        if (s[e] >= RAISED_TO)
          store_shared_4(tops + (e / 4 * 8 + 2 * (other & 3) + (e & 1)) * 4, row_0 + (e >> 1 & 1) * (8 * R::SCALES_PITCH));
      turn = BY_GROUP_MOVED;
      if (thread == 0) store_shared_4(has_seen, 1);
      if (thread < L::HEADS)
        store_shared_4(group_alpha<L>(shared, opaque(i)) + thread * 4, load_shared_4(shared + L::ALPHA + thread * 4));
    }
    if (last) warp_arrive(shared + L::QUERIES_FREE, lane);
#pragma unroll
    for (int e = 0; e < N; ++e) s[e] = exp2_approx(s[e]);
#pragma unroll
    for (int c = 0; c < N / 2; ++c) sums[c] += s[c / 2 * 4 + (c & 1)] + s[c / 2 * 4 + (c & 1) + 2];
    hold(s);  // else powers are made behind the barrier
    named_barrier<GROUP_VALUES_BARRIER, 384>();  // then weights may take the place of latents
    // Heads n and n + 8 of 16 stand together.
    const int own_again = opaque(thread), own_slot = (i & 1) * 4 + (own_again >> 5);
    const u32 keys = places_of<L::HEADS, FORMAT>(shared, own_again >> 5, own_again & 31).raw + own_slot * L::RAW_SLOT +
                     (own_again & 31) / 8 * 16;  // so four neighbouring rows are 32 bytes apart modulo 128
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int m = 0; m < N / 8; ++m) {
        const float* v = s + 8 * m + 2 * r;
        store_shared_16(keys + r * (8 * R::BYTES) + m * 64, __float_as_uint(v[0]), __float_as_uint(v[4]),
                        __float_as_uint(v[1]), __float_as_uint(v[5]));
      }
    if (thread == 0) store_shared_4(shared + L::TURN, turn | own_slot << 8 | (last ? LAST_TURN : 0));
    __syncwarp();
    named_barrier_arrive(GROUP_WEIGHTS_BARRIER, 384);
    if (!last) warp_arrive(shared + L::WEIGHTS_FULL, lane);  // a phase for each turn
  }
  named_barrier(GROUP_ROW_BARRIER, 384);  // weights have been read where sums come
}

// Where key n of a lane's 16 lies behind its first.
template <class L>
DEVICE constexpr int place_of_key(int n) {
  return n / 4 * L::RAW_SLOT + (n % 2 * 4 + n / 2 % 2 * 8) * L::R::BYTES;
}

// A half of the values of a warp's keys: e4m3 as float16.
template <class L>
DEVICE void make_group_values(u32 shared, int turn, u32 values, int half, int thread) {
  using R = typename L::R;
  const int warp = thread >> 5, lane = thread & 31, slot = (turn & 1) * 4 + warp;
  u32 raw = shared + L::RAW + slot * L::RAW_SLOT + R::raw_row(lane >> 2) * R::BYTES + (lane & 3) * 16 + half * 256,
      place = values + (warp * 16 + (lane & 15)) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
  mbarrier_wait(shared + L::RAW_FULL + slot * 8, turn >> 1 & 1);
  uint4 next[2] = {load_shared_16(raw), load_shared_16(raw + 8 * R::BYTES)};
#pragma unroll 1
  for (int chunk = 0; chunk < 4; ++chunk, place += TILE_KEYS * 128) {
    const uint4 v[2] = {next[0], next[1]};
    if (chunk < 3) raw += 64;
    next[0] = load_shared_16(raw), next[1] = load_shared_16(raw + 8 * R::BYTES);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      u32 f[4];
#pragma unroll
      for (int r = 0; r < 2; ++r) e4m3_to_float16(word(v[r], j), f[r], f[2 + r]);
      store_matrices(place ^ j << 5, f[0], f[1], f[2], f[3]);
    }
  }
}

// Weights times values of the turns that are left of a row, from this one on. The results are relative to the row's
// references.
template <class L>
DEVICE void accumulate_by_group(u32 shared, int half, int thread, Ring& at, float (&o)[2][64]) {
  using R = typename L::R;
  constexpr float MOST = 65504.f, FACTOR_LOG2 = 8.f, LOWEST = 80.f, HIGHEST = LOWEST + 6.f, GROUP_RAISED_TO = 10.f,
                  LARGEST_RAISED = 256.f;
  static_assert(R::FACTOR == 256.f, "2^FACTOR_LOG2");
  auto first_head = [](int thread) { return static_cast<u32>((thread >> 5) * 64 + (thread & 31) / 4 * 8); };
  int& i = at.turn;
  bool begins = true;
#pragma unroll 1
  for (bool ends = false; !ends; next_turn<L::HALVES>(at)) {
    const u32 place = shared + L::VALUES + half_of<L::HALVES>(at, half).slot * HALF_BYTES;
    if (!begins) named_barrier(VALUES_BARRIER + 1 + half, 128);  // products have left the values
    make_group_values<L>(shared, i, place, half, opaque(thread));
    fence_async_shared();
    named_barrier_arrive(GROUP_VALUES_BARRIER, 384);
    named_barrier(GROUP_WEIGHTS_BARRIER, 384);
    const int own = opaque(thread), warp = own >> 5, lane = own & 31, t = lane & 3;  // registers are few
    const u32 heads = first_head(own), references = group_references<L>(shared) + half * (2 * L::HEADS * 4) + heads;
    const u32 turn = load_shared_4(shared + L::TURN);
    ends = uniform(turn) >= LAST_TURN;
    const u32 keys = shared + L::RAW + (uniform(turn) >> 8 & 0xff) * L::RAW_SLOT + t * R::BYTES,
              weights = keys + heads + t * 16, scales = keys + R::SCALES_AT + half * 8;
    const u64 values = tile_descriptor(place, 1024, TILE_KEYS * 128);
    // [head][piece], in shared memory where registers are few.
    auto load_references = [&](float (&above)[2][2]) {
#pragma unroll
      for (int piece = 0; piece < 2; ++piece) {
        const float2 two = load_shared_float2(references + piece * (L::HEADS * 4));
        above[0][piece] = two.x, above[1][piece] = two.y;
      }
    };
    auto store_references = [&](const float (&above)[2][2]) {
      __syncwarp();
      if (t == 0)
#pragma unroll
        for (int piece = 0; piece < 2; ++piece)
          store_shared_float2(references + piece * (L::HEADS * 4), above[0][piece], above[1][piece]);
      __syncwarp();
    };
    const bool moved = uniform(turn & 0xff) == BY_GROUP_MOVED;
    bool fits = !begins && !moved, hinted = moved && !begins;
    if (!fits) {
      float above[2][2] = {};
      if (!begins) load_references(above);
      const u32 alpha = group_alpha<L>(shared, i) + (heads + warp * 64) / 2;
      if (moved)
#pragma unroll
        for (int n = 0; n < 4; ++n)
          above[n / 2][n % 2] += static_cast<float>(127 - static_cast<int>(load_shared_4(alpha + n / 2 * 32) >> 23));
      store_references(above);
    }
    // Keys go once both halves have read weights.
    auto free_keys = [&]() {
      if (half == 0) {
        named_barrier_arrive(GROUP_READ_BARRIER, 256);
      } else {
        named_barrier(GROUP_READ_BARRIER, 256);
        if (!(ends && warp == 0)) warp_arrive(shared + L::RAW_FREE + ((turn >> 8 & 0xff) + warp) * 8, lane);
      }
      if (ends) named_barrier_arrive(GROUP_ROW_BARRIER, 384);
    };
    bool settled = false, second = false;  // references are as high as this turn's keys need; a step's first piece is done
    for (u32 k = 0;;) {
      hold(o[0]), hold(o[1]);
#pragma unroll 1
      for (; k < 4 && fits; ++k) {
        const u32 slot = k * L::RAW_SLOT;
        float2 w[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) w[n] = load_shared_float2(weights + slot + place_of_key<L>(n));
        auto multiply = [&](int piece) {
          const float2 above = load_shared_float2(references + piece * (L::HEADS * 4)),
                       factors = {exp2_approx(above.x + FACTOR_LOG2), exp2_approx(above.y + FACTOR_LOG2)};
          u32 a[4];
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            float scale[2];
#pragma unroll
            for (int b = 0; b < 2; ++b)
              scale[b] = load_shared_float(scales + slot + place_of_key<L>(2 * n + b) + piece * 4);
            a[2 * n] = pack_float16(w[2 * n].x * scale[0] * factors.x, w[2 * n + 1].x * scale[1] * factors.x);
            a[2 * n + 1] = pack_float16(w[2 * n].y * scale[0] * factors.y, w[2 * n + 1].y * scale[1] * factors.y);
          }
          const u32 largest = larger_magnitudes(larger_magnitudes(a[0], a[1]), larger_magnitudes(a[2], a[3]));
          const bool infinite = (largest & 0x7c00) == 0x7c00 || (largest & 0x7c000000) == 0x7c000000;
          if (__any_sync(~0u, infinite && !settled)) return false;
          hold(a);
          wgmma_fence();
          wgmma_heads_by_dims(o[piece], a, values + (piece * 2 * TILE_KEYS * 128) / 16 + k * (2048 / 16));
          wgmma_commit();
          if (piece == 1 && k == 3) free_keys();
          wgmma_wait<0>();
          hold(a), hold(o[piece]);
          return true;
        };
        if (!second) fits = multiply(0);
        second = fits;
        if (fits) fits = multiply(1);
        if (!fits) break;
        second = false;
      }
      if (opaque(static_cast<u32>(fits))) break;
      float above[2][2], wanted[2][2] = {};
      if (hinted) {
        load_references(above);
        // The key that moved a head's reference is its groups' largest, too, or nearly.
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const u32 key = load_shared_4(group_tops<L>(shared, i) + (heads + warp * 64) / 2 + r * 32);
          const float2 scale = load_shared_float2((key ? key : scales - half * 8) + half * 8);
          wanted[r][0] = key ? fabsf(scale.x) : 0.f, wanted[r][1] = key ? fabsf(scale.y) : 0.f;
        }
      } else {
#pragma unroll 1
        for (u32 slot = 0; slot < 4 * L::RAW_SLOT; slot += L::RAW_SLOT)
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            const float2 w = load_shared_float2(weights + slot + place_of_key<L>(n)),
                         scale = load_shared_float2(scales + slot + place_of_key<L>(n));
            wanted[0][0] = fmaxf(wanted[0][0], fabsf(w.x * scale.x)), wanted[0][1] = fmaxf(wanted[0][1], fabsf(w.x * scale.y));
            wanted[1][0] = fmaxf(wanted[1][0], fabsf(w.y * scale.x)), wanted[1][1] = fmaxf(wanted[1][1], fabsf(w.y * scale.y));
          }
        load_references(above);
        settled = true;
      }
      bool changes = false;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        float largest = wanted[n / 2][n % 2];
        if (!hinted) {
          largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
          largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        } else {
          largest *= LARGEST_RAISED;
        }
        const float before = above[n / 2][n % 2];
        float& reference = wanted[n / 2][n % 2];
        reference = before;
        if (begins || largest * exp2_approx(before + FACTOR_LOG2) > MOST || before > HIGHEST)
          reference = fminf(GROUP_RAISED_TO - FACTOR_LOG2 - ceilf(log2_approx(largest)),
                            begins ? LOWEST : fminf(before, LOWEST));
        changes |= reference != before;
      }
      if (__any_sync(~0u, changes)) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const int r = n / 2, piece = n % 2;
          const float alpha = exp2_approx(wanted[r][piece] - above[r][piece]);
#pragma unroll
          for (int e = 0; e < 64; e += 4) o[piece][e + 2 * r] *= alpha, o[piece][e + 2 * r + 1] *= alpha;
        }
        store_references(wanted);
      }
      hinted = false, fits = true;
    }
    if (!ends) {
      const u32 free = shared + L::VALUES_FREE + half_of<L::HALVES>(at, half).slot * 16;
      warp_arrive(free, lane), warp_arrive(free + 8, lane);
    }
    begins = false;
  }
#pragma unroll
  for (int piece = 0; piece < 2; ++piece) {
    const float2 above = load_shared_float2(group_references<L>(shared) + (half * 2 + piece) * (L::HEADS * 4) +
                                            first_head(opaque(thread)));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float back = exp2_approx(r ? -above.y : -above.x);
#pragma unroll
      for (int e = 0; e < 64; e += 4) o[piece][e + 2 * r] *= back, o[piece][e + 2 * r + 1] *= back;
    }
  }
}
