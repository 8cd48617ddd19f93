// Scores and weights of a relay.
#pragma once

#include "relay_keys.cuh"
#include "scores.cuh"

template <class Y, Format FORMAT>
DEVICE Places places_in_relay(u32 shared, int lane) {
  using R = typename Y::R;
  Places places;
  const int key = R::raw_row(lane >> 2);
  places.raw = shared + Y::RAW + key * R::BYTES;
  places.rope = R::ROPE_AT + (lane & 3) * 32;
  if (!R::ROPE_IS_VALUE)
    places.rope = R::ROPE_AT + (R::raw_row(lane & 7) + (lane & 8) - key) * R::BYTES + (lane >> 4) * 16;
  places.scales = R::SCALES_APART ? shared + Y::SCALES + key * R::SCALES_PITCH : places.raw + R::SCALES_AT;
  places.query = tile_descriptor(shared + Y::L::QUERY, 1024, 16);
  places.values = places.values_free = 0;
  return places;
}

// A turn's products, as `multiply` makes them, whose values other warps bring.
template <Format FORMAT>
DEVICE bool multiply_keys(float (&s)[32], u32 (&fragments)[2][16], const Start<FORMAT>& start, u32 undo,
                          const Places& places, u32 raw_0, int t) {
  using R = Rows<FORMAT>;
  constexpr int QUERY_CHUNK = Layout<64, FORMAT>::QUERY_CHUNK, COUNT = R::CHUNKS;
  u32 too_large = 0;
  Bytes bytes[3] = {start.bytes[0], start.bytes[1]};
#pragma unroll
  for (int n = 0; n < COUNT; ++n) {
    const int chunk = chunk_of<true, FORMAT>(n);
    u32(&f)[16] = fragments[n % 2];
    if (n + 2 < COUNT) load_bytes<FORMAT>(bytes[(n + 2) % 3], places, raw_0, chunk_of<true, FORMAT>(n + 2), t);
    if (n > 1) {
      wgmma_wait<1>();
      hold(f);
    }
    make_fragments<FORMAT>(f, bytes[n % 3], start.scales, undo, chunk, too_large);
    hold(f);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const u64 operand = places.query + (chunk * QUERY_CHUNK + j * 32) / 16;
      if (chunk == ROPE<FORMAT> && !R::ROPE_IS_VALUE)
        wgmma_bfloat16(s, f + 4 * j, operand, n > 0 || j > 0);
      else
        wgmma_float16(s, f + 4 * j, operand, n > 0 || j > 0);
    }
    wgmma_commit();
  }
  return too_large != 0;
}

// A number of a head to all CTAs, `kind` 0 its sum, 1 its reference.
template <class Y>
DEVICE void send_final(u32 shared, int kind, int head, float value) {
#pragma unroll 1
  for (int to = 0; to < Y::CTAS; ++to)
    send_4(peer_address(shared + Y::FINAL + kind * 256 + head * 4, to), peer_address(shared + Y::FINAL_FULL, to), value);
}

// References of 64 heads and their number of moves, to the CTA of the next turn, by one warp.
template <class Y>
DEVICE void send_references(u32 shared, int next, u32 state, int lane) {
  const u32 to = peer_address(shared + Y::REFERENCES + lane * 16, next), barrier = peer_address(shared + Y::REFERENCES_FULL, next);
  const u32 column = shared + Y::L::COLUMNS + (lane & 15) * 32;
  const uint4 first = load_shared_16(column), second = load_shared_16(column + 16);
  const u32 words[4] = {lane < 16 ? first.y : state, first.w, second.y, second.w};
  if (lane < 17) send_16(to, barrier, words);
  converge();
}

template <int CHUNKS, Format FORMAT>
DEVICE void score_in_relay(const Params& p, const Row& row, unsigned char* shared_pointer, u32 shared, int rank,
                           int thread) {
  using Y = Relay<CHUNKS, FORMAT>;
  using L = typename Y::L;
  using R = Rows<FORMAT>;
  constexpr int HEADS = 64, TILES = 8;
  thread = kept(thread);
  const int warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
  const int next = rank + 1 == Y::CTAS ? 0 : rank + 1, place = rank % Y::PLACES;
  const Places places = places_in_relay<Y, FORMAT>(shared, lane);
  const u32 weights_row = shared + Y::WEIGHTS + place * 8192 + (lane & 7) * 128 +
                          ((((warp * 2) | ((lane >> 3) & 1)) ^ (lane & 7)) << 4) + (lane >> 4) * 1024;
  const u32 head = shared + Y::HEADS_OF_PLACES + place * Y::HEAD;
  float sums[TILES * 2];
#pragma unroll
  for (int i = 0; i < TILES * 2; ++i) sums[i] = 0.f;
  bool seen = false, started = false;
  u32 moves_so_far = 0;
  int slot = warp, parity = 0;
  Start<FORMAT> start;
  if (thread == 0) {
    mbarrier_arrive_expect(shared + Y::REFERENCES_FULL, Y::HEAD);
    mbarrier_arrive_expect(shared + Y::SUMS_FULL, 8192);
  }
  converge();
  const int turns = turns_of(await_list<Y>(shared));
  if (rank >= turns) cluster_wait();
#pragma unroll 1
  for (int own = 0, number = rank; number < turns; ++own, number += Y::CTAS) {
    if (!started) {
      const u32 raw_0 = places.raw + slot * Y::RAW_SLOT;
      mbarrier_wait(shared + Y::RAW_FULL + slot * 8, parity);
      load_start<HEADS, FORMAT, true, 0>(start, places, raw_0, places.scales + slot * Y::SCALES_SLOT,
                                         shared + Y::LIVE + slot * 4, t);
      load_start_rest<HEADS, FORMAT, true, 0>(start, raw_0 + places.rope);
    }
    const u32 alive = start.alive;
    const bool last = number + 1 == turns, begins = number == 0;
    const u32 received = own - (rank == 0) & 1;
    float s[TILES * 4];
    u32 undo, fragments[2][16];
    bool wide;
    const bool apart = take_out<HEADS, FORMAT, true, 0>(start, undo, wide);
    wide |= multiply_keys<FORMAT>(s, fragments, start, undo, places, places.raw + slot * Y::RAW_SLOT, t);
    int later_slot = slot, later_parity = parity;
    next_slot<Y::SLOTS>(later_slot, later_parity);
    started = __all_sync(~0u, mbarrier_test(shared + Y::RAW_FULL + later_slot * 8, later_parity)) && number + Y::CTAS < turns;
    const int ahead = started ? later_slot : slot;
    load_start<HEADS, FORMAT, true, 0>(start, places, places.raw + ahead * Y::RAW_SLOT,
                                       places.scales + ahead * Y::SCALES_SLOT, shared + Y::LIVE + ahead * 4, t);
    if (own == 0) cluster_wait();  // other CTAs' barriers are there
    if (!begins) {
      mbarrier_wait(shared + Y::REFERENCES_FULL, received);
      const u32 state = load_shared_4(shared + Y::REFERENCES + 256);
      if (thread == 0) mbarrier_arrive_expect(shared + Y::REFERENCES_FULL, Y::HEAD);
      converge();
      seen = state >> 31;
      if (uniform(state & 0x7fffffff) != moves_so_far) {
        moves_so_far = uniform(state & 0x7fffffff);
        if (thread < HEADS)
          store_shared_float(shared + L::COLUMNS + thread * 8 + 4, load_shared_float(shared + Y::REFERENCES + thread * 4));
        named_barrier<SCORE_BARRIER, 128>();
      }
    }
    uint4 columns[TILES];
#pragma unroll
    for (int j = 0; j < TILES / 2; ++j) columns[j] = load_shared_16(shared + L::COLUMNS + (8 * j + 2 * t) * 8);
    if (apart)
#pragma unroll
      for (int j = 0; j < TILES / 2; ++j) columns[j].y = columns[j].w = 0;
    wgmma_wait<0>();
    hold(s);
    hold(fragments[0]), hold(fragments[1]);
#pragma unroll
    for (int j = TILES / 2; j < TILES; ++j) {
      columns[j] = load_shared_16(shared + L::COLUMNS + (8 * j + 2 * t) * 8);
      columns[j].y = apart ? 0 : columns[j].y, columns[j].w = apart ? 0 : columns[j].w;
    }
    const u32 mine = alive >> R::raw_row(g);
    const bool live_0 = mine & 1, live_1 = mine & 0x100;
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
      const uint4& two = columns[j];
      s[4 * j] = fmaf(s[4 * j], __uint_as_float(two.x), -__uint_as_float(two.y));
      s[4 * j + 1] = fmaf(s[4 * j + 1], __uint_as_float(two.z), -__uint_as_float(two.w));
      s[4 * j + 2] = fmaf(s[4 * j + 2], __uint_as_float(two.x), -__uint_as_float(two.y));
      s[4 * j + 3] = fmaf(s[4 * j + 3], __uint_as_float(two.z), -__uint_as_float(two.w));
    }
    if (apart) {
      const u32 inverse = 0x7f007f00u - undo;
      const float back[2] = {low_bfloat16(inverse), high_bfloat16(inverse)},
                  taken[2] = {exponent_taken(undo, 0), exponent_taken(undo, 1)};
#pragma unroll
      for (int e = 0; e < TILES * 4; e += 4) {
        const u32 column = shared + L::COLUMNS + (2 * e + 2 * t) * 8;
        const float references[2] = {load_shared_float(column + 4), load_shared_float(column + 12)};
#pragma unroll
        for (int i = 0; i < 4; ++i)
          s[e + i] = fmaf(s[e + i], back[i >> 1], -references[i & 1]) + taken[i >> 1];
      }
    }
    load_start_rest<HEADS, FORMAT, true, 0>(start, places.raw + ahead * Y::RAW_SLOT + places.rope);
    auto largest = [&]() {
      float tops[4] = {s[0], s[1], s[2], s[3]};
#pragma unroll
      for (int e = 4; e < TILES * 4; ++e) tops[e & 3] = fmaxf(tops[e & 3], s[e]);
      return fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
    };
    auto receive_sums = [&]() {
      if (begins) return;
      mbarrier_wait(shared + Y::SUMS_FULL, received);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint4 v = load_shared_16(shared + Y::SUMS + w * 2048 + thread * 16);
        sums[4 * w] = __uint_as_float(v.x), sums[4 * w + 1] = __uint_as_float(v.y);
        sums[4 * w + 2] = __uint_as_float(v.z), sums[4 * w + 3] = __uint_as_float(v.w);
      }
      if (thread == 0) mbarrier_arrive_expect(shared + Y::SUMS_FULL, 8192);
      converge();
    };
    // The turn whose weights were in this place has left it, everywhere.
    auto await_place = [&]() {
      const int freed = own - (rank < Y::PLACES);
      if (freed >= 0) mbarrier_wait(shared + Y::PLACE_FREE, freed & 1);
    };
    auto table_of_wide = [&]() { return wide_table_of(p, row, Y::CTAS, rank); };
    auto wide_place = [&]() { return (warp * 16 + R::raw_row(g)) * HEADS + 2 * t; };

    int turn = USUAL;
    bool moves = named_barrier_any<SCORE_BARRIER, 128>(largest() > REFERENCE_SLACK || wide || !seen || alive != 0xffff);
    if (moves) {
#pragma unroll
      for (int e = 0; e < TILES * 4; ++e)
        if (!((e & 2) ? live_1 : live_0)) s[e] = -INFINITY;
      moves = named_barrier_any<SCORE_BARRIER, 128>(largest() > REFERENCE_SLACK || wide || !seen && alive);
    }
    if (moves) {
      turn = MOVED;
      await_place();
      if (named_barrier_any<SCORE_BARRIER, 128>(wide)) {
        turn = WIDE;
        float* table = table_of_wide();
#pragma unroll 1
        for (int e = thread; e < TILE_KEYS * HEADS; e += 128) {
          const int key = e / HEADS, first = slot >= warp ? slot - warp : slot - warp + Y::SLOTS;
          const int row_of_key = slot_of<Y::SLOTS>(first, key) * 16 + key % 16;
          const int place = R::SCALES_APART ? Y::SCALES + row_of_key * R::SCALES_PITCH : Y::RAW + row_of_key * R::BYTES + R::SCALES_AT;
          table[e] = wide_score<HEADS, FORMAT>(p, row, shared_pointer + Y::RAW + row_of_key * R::BYTES,
                                               shared_pointer + place, e % HEADS) -
                     load_shared_float(shared + L::COLUMNS + e % HEADS * 8 + 4);
        }
        named_barrier<SCORE_BARRIER, 128>();
        table += wide_place();
#pragma unroll
        for (int e = 0; e < TILES * 4; ++e)
          s[e] = ((e & 2) ? live_1 : live_0)
                     ? table[(e & 2) * (4 * HEADS) + e / 4 * 8 + (e & 1)] + exponent_taken(undo, e >> 1 & 1)
                     : -INFINITY;
      }
      if (!Y::SPREAD) receive_sums();
      raise_references<L>(s, sums, seen, REFERENCE_SLACK, shared, thread);
      if (thread < HEADS)
        store_shared_float(head + thread * 4, load_shared_float(shared + L::ALPHA + thread * 4));
      seen = true, ++moves_so_far;
    }
    if (warp == 0 && !last) send_references<Y>(shared, next, moves_so_far | (seen ? 0x80000000u : 0), lane);
    warp_arrive(shared + Y::RAW_FREE + slot * 8, lane);
    converge();

#pragma unroll
    for (int e = 0; e < TILES * 4; ++e) s[e] = exp2_approx(s[e]);
    const float undone[2] = {low_bfloat16(undo), high_bfloat16(undo)};
    await_place();
    if (turn == WIDE) {
      float* table = table_of_wide() + wide_place();
#pragma unroll
      for (int e = 0; e < TILES * 4; ++e)
        table[(e & 2) * (4 * HEADS) + e / 4 * 8 + (e & 1)] = s[e] * undone[e >> 1 & 1];
      __threadfence();
    } else {
#pragma unroll
      for (int j = 0; j + 1 < TILES; j += 2)
        store_matrices_transposed(weights_row + j * 1024, pack_float16(s[4 * j], s[4 * j + 1]),
                                  pack_float16(s[4 * j + 2], s[4 * j + 3]), pack_float16(s[4 * j + 4], s[4 * j + 5]),
                                  pack_float16(s[4 * j + 6], s[4 * j + 7]));
    }
    if constexpr (Y::SPREAD) {
#pragma unroll
      for (int j = 0; j < TILES; ++j)
        send_16_unless(j == rank, peer_address(shared + Y::SUMS + place * 2048 + thread * 16, j),
                       peer_address(shared + Y::WEIGHTS_FULL + place * 8, j), __float_as_uint(s[4 * j] * undone[0]),
                       __float_as_uint(s[4 * j + 1] * undone[0]), __float_as_uint(s[4 * j + 2] * undone[1]),
                       __float_as_uint(s[4 * j + 3] * undone[1]));
    }
    if (thread == 0) store_shared_4(head + 256, turn);
    __syncwarp();
    warp_arrive(shared + Y::OWN_FULL, lane);
    converge();
    if constexpr (!Y::SPREAD) {
      if (turn == USUAL) receive_sums();
#pragma unroll
      for (int c = 0; c < TILES * 2; ++c)
        sums[c] = fmaf(s[c / 2 * 4 + (c & 1)], undone[0], fmaf(s[c / 2 * 4 + (c & 1) + 2], undone[1], sums[c]));
      if (!last) {
        const u32 to = peer_address(shared + Y::SUMS + thread * 16, next), barrier = peer_address(shared + Y::SUMS_FULL, next);
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const u32 words[4] = {__float_as_uint(sums[4 * w]), __float_as_uint(sums[4 * w + 1]),
                                __float_as_uint(sums[4 * w + 2]), __float_as_uint(sums[4 * w + 3])};
          send_16(to + w * 2048, barrier, words);
        }
      }
    }
    if (last) {
      const u32 sums_at = shared + Y::DESK;
      if (!Y::SPREAD) {
        store_sums<HEADS>(sums, sums_at + warp * (HEADS * 4), lane);
        named_barrier<SCORE_BARRIER, 128>();
      }
      if (thread < HEADS) {
        if (!Y::SPREAD) send_final<Y>(shared, 0, thread, sum_of<HEADS>(sums_at, thread));
        send_final<Y>(shared, 1, thread, load_shared_float(shared + L::COLUMNS + thread * 8 + 4));
      }
      converge();
    }
    slot = later_slot, parity = later_parity;
  }
}
