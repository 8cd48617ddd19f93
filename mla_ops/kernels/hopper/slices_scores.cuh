// Scores and weights of rows in slices.
#pragma once

#include "slices_keys.cuh"
#include "scores.cuh"

template <class Y, Format FORMAT>
DEVICE Places places_in_slices(u32 shared, int lane) {
  using R = typename Y::R;
  Places places;
  const int key = R::raw_row(lane >> 2);
  const u32 latents = (lane & 3) * 16;
  places.scales = R::SCALES_APART ? shared + Y::SCALES + key * R::SCALES_PITCH
                                  : shared + Y::RAW + key * R::BYTES + R::SCALES_AT;
  places.raw = shared + Y::RAW + key * R::BYTES + latents;
  places.rope = R::ROPE_AT + latents;
  if (!R::ROPE_IS_VALUE)
    places.rope = R::ROPE_AT + (R::raw_row(lane & 7) + (lane & 8) - key) * R::BYTES + (lane >> 4) * 16 - latents;
  places.query = tile_descriptor(shared + Y::L::QUERY, 1024, 16);
  places.values = places.values_free = 0;
  return places;
}

// A turn's products, as `multiply` makes them, whose values other warps bring.
template <Format FORMAT>
DEVICE bool multiply_keys(float (&s)[32], u32 (&fragments)[2][16], const Start<FORMAT>& start, u32 undo,
                          const Places& places, u32 raw_0) {
  using R = Rows<FORMAT>;
  constexpr int QUERY_CHUNK = Layout<64, FORMAT>::QUERY_CHUNK, COUNT = R::CHUNKS;
  u32 too_large = 0;
  Bytes bytes[3] = {start.bytes[0], start.bytes[1]};
#pragma unroll
  for (int n = 0; n < COUNT; ++n) {
    const int chunk = chunk_of<true, FORMAT>(n);
    u32(&f)[16] = fragments[n % 2];
    if (n + 2 < COUNT) load_bytes<FORMAT>(bytes[(n + 2) % 3], places, raw_0, chunk_of<true, FORMAT>(n + 2));
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

// References of 64 heads after the first turn, to all CTAs, by one warp.
template <class Y>
DEVICE void send_references(u32 shared, u32 state, int lane) {
  const u32 column = shared + Y::L::COLUMNS + (lane & 15) * 32;
  const uint4 first = load_shared_16(column), second = load_shared_16(column + 16);
  const u32 words[4] = {lane < 16 ? first.y : state, first.w, second.y, second.w};
#pragma unroll 1
  for (int to = 0; to < Y::CTAS; ++to)
    if (lane < 17)
      send_16(peer_address(shared + Y::REFERENCES + lane * 16, to), peer_address(shared + Y::REFERENCES_FULL, to), words);
  converge();
}

template <int CHUNKS, Format FORMAT>
DEVICE void score_in_slices(const Params& p, const Row& row, u32 shared, int rank, int thread) {
  using Y = Slices<CHUNKS, FORMAT>;
  using L = typename Y::L;
  using R = Rows<FORMAT>;
  constexpr int HEADS = 64, TILES = 8;
  thread = kept(thread);
  const int warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
  const Places places = places_in_slices<Y, FORMAT>(shared, lane);
  const u32 own_row = weights_row(shared + Y::OWN, thread);
  bool seen = false, started = false;
  int slot = warp, parity = 0;
  Start<FORMAT> start;
  const int turns = turns_of(await_list<Y>(shared));
  cluster_wait();  // other CTAs' barriers are there
#pragma unroll 1
  for (int own = 0, number = rank; number < turns; ++own, number += Y::CTAS) {
    if (!started) {
      const u32 raw_0 = places.raw + slot * Y::RAW_SLOT;
      mbarrier_wait(shared + Y::RAW_FULL + slot * 8, parity);
      load_start<HEADS, FORMAT, true, 0>(start, places, raw_0, places.scales + slot * Y::SCALES_SLOT,
                                         shared + Y::LIVE + slot * 4);
      load_start_rest<HEADS, FORMAT, true, 0>(start, raw_0 + places.rope);
    }
    const u32 alive = start.alive;
    float s[TILES * 4];
    u32 undo, fragments[2][16];
    bool wide;
    const bool apart = take_out<HEADS, FORMAT, true, 0>(start, undo, wide);
    wide |= multiply_keys<FORMAT>(s, fragments, start, undo, places, places.raw + slot * Y::RAW_SLOT);
    int later_slot = slot, later_parity = parity;
    next_slot<Y::SLOTS>(later_slot, later_parity);
    started = __all_sync(~0u, mbarrier_test(shared + Y::RAW_FULL + later_slot * 8, later_parity)) && number + Y::CTAS < turns;
    const int ahead = started ? later_slot : slot;
    load_start<HEADS, FORMAT, true, 0>(start, places, places.raw + ahead * Y::RAW_SLOT,
                                       places.scales + ahead * Y::SCALES_SLOT, shared + Y::LIVE + ahead * 4);
    if (own == 0 && rank > 0) {
      mbarrier_wait(shared + Y::REFERENCES_FULL, 0);
      seen = load_shared_4(shared + Y::REFERENCES + 256);
      if (thread < HEADS)
        store_shared_float(shared + L::COLUMNS + thread * 8 + 4, load_shared_float(shared + Y::REFERENCES + thread * 4));
      named_barrier<SCORE_BARRIER, 128>();
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
    bool moves = named_barrier_any<SCORE_BARRIER, 128>(largest() > REFERENCE_SLACK || wide || !seen || alive != 0xffff);
    if (moves) {
#pragma unroll
      for (int e = 0; e < TILES * 4; ++e)
        if (!((e & 2) ? live_1 : live_0)) s[e] = -INFINITY;
      moves = named_barrier_any<SCORE_BARRIER, 128>(largest() > REFERENCE_SLACK || wide || !seen && alive);
    }
    bool refused = moves;
    if (moves && number == 0) {
      refused = named_barrier_any<SCORE_BARRIER, 128>(wide);
      float sums[TILES * 2] = {};
      raise_references<L>(s, sums, false, REFERENCE_SLACK, shared, thread);
      seen = true;
    }
    if (thread == 0) refused_turns(p)[number] = refused;
    if (number == 0 && warp == 0) send_references<Y>(shared, seen, lane);
    free_turn<Y::SLOTS>(shared + Y::RAW_FREE, slot >= warp ? slot - warp : slot - warp + Y::SLOTS, lane);
    converge();

#pragma unroll
    for (int e = 0; e < TILES * 4; ++e) s[e] = exp2_approx(s[e]);
    const float undone[2] = {low_bfloat16(undo), high_bfloat16(undo)};
    if (own > 0) mbarrier_wait(shared + Y::OWN_FREE, own - 1 & 1);
    store_weights<HEADS>(s, own_row, [](float a, float b, int) { return pack_float16(a, b); });
    unsigned char* const record = record_of(p, number) + 8192 + thread * 16;
#pragma unroll
    for (int j = 0; j < TILES; ++j)
      store_16(record + j * 2048, __float_as_uint(s[4 * j] * undone[0]), __float_as_uint(s[4 * j + 1] * undone[0]),
               __float_as_uint(s[4 * j + 2] * undone[1]), __float_as_uint(s[4 * j + 3] * undone[1]));
    __syncwarp();
    warp_arrive(shared + Y::OWN_FULL + own % 4 * 8, lane);
    converge();
    slot = later_slot, parity = later_parity;
  }
}
