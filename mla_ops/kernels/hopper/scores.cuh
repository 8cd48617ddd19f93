// Scores and weights, and the values for the warpgroups that accumulate.
#pragma once

#include "by_group.cuh"
#include "folds.cuh"
#include "group.cuh"
#include "held.cuh"
#include "keys.cuh"
#include "wgmma.cuh"
#include "wide.cuh"

// The steps of a turn, a chunk each. Tiles of few heads have registers for a second warpgroup of scores, which takes
// the last of them; RoPE is a step of the first where it is a value, since that one has to know whether float16 holds
// it. What was fastest of one to five: the first needs time for the softmax, of 32 heads in many turns most.
template <int HEADS, Format FORMAT, bool PERSISTENT>
DEVICE constexpr int first_steps() {
  if (HEADS == 64) return Rows<FORMAT>::CHUNKS;
  return FORMAT == FP8_DS_MLA && HEADS == 32 && PERSISTENT ? 2 : 3;
}

template <int HEADS, Format FORMAT, bool PERSISTENT>
constexpr int FIRST_STEPS = first_steps<HEADS, FORMAT, PERSISTENT>();

// COUNT steps of a turn: fragments of the keys, which are the values once those before them were used, and their
// products with the queries, which are left running. Values are stored before products are issued: with an operand in
// registers those hold up all that follows them. 32 heads, which have no register to spare, store them a step later.
// Returns whether this thread met a value that float16 does not hold.
template <int HEADS, Format FORMAT, bool ONE, int FIRST, int COUNT>
DEVICE bool multiply(float (&s)[HEADS / 2], u32 (&fragments)[2][16], const Start<FORMAT>& start,
                     u32 undo, const Places& places, u32 raw_0, const Half (&halves)[2]) {
  using R = Rows<FORMAT>;
  constexpr int QUERY_CHUNK = Layout<HEADS, FORMAT>::QUERY_CHUNK;
  constexpr int LATER = HEADS == 32 ? 1 : 0;
  u32 too_large = 0;
  const u32 values = opaque(places.values);  // else addresses of all turns stay in registers
  Bytes bytes[3] = {start.bytes[0], start.bytes[1]};
  auto store = [&](int n) {
    if (n < 0) return;
    const int chunk = chunk_of<ONE, FORMAT>(FIRST + n);
    if (chunk == ROPE<FORMAT> && !R::ROPE_IS_VALUE) return;
    const u32(&f)[16] = fragments[n % 2];
    const Half& half = halves[chunk / 4];
    if (n == 0 || chunk_of<ONE, FORMAT>(FIRST + n - 1) / 2 != chunk / 2)
      mbarrier_wait(places.values_free + half.slot * 16 + chunk % 4 / 2 * 8, half.parity ^ 1);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      store_matrices((values ^ (j << 5)) + half.slot * HALF_BYTES + chunk % 4 * (TILE_KEYS * 128), f[4 * j],
                     f[4 * j + 1], f[4 * j + 2], f[4 * j + 3]);
  };
#pragma unroll
  for (int n = 0; n < COUNT; ++n) {
    const int chunk = chunk_of<ONE, FORMAT>(FIRST + n);
    u32(&f)[16] = fragments[n % 2];
    if (n + 2 < COUNT) load_bytes<FORMAT>(bytes[(n + 2) % 3], places, raw_0, chunk_of<ONE, FORMAT>(FIRST + n + 2));
    if (n > 1) {
      wgmma_wait<1>();
      hold(f);
    }
    make_fragments<FORMAT>(f, bytes[n % 3], start.scales, undo, chunk, too_large);
    hold(f);
    store(n - LATER);
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
  if (LATER) store(COUNT - 1);
  return too_large != 0;
}

// The scores of a second warpgroup for the first: a thread's own, so that both address them alike.
template <int HEADS, Format FORMAT>
DEVICE u32 part_of_scores(u32 shared, int turn, int thread) {
  using L = Layout<HEADS, FORMAT>;
  return shared + L::SCORES + turn % L::SCORE_SLOTS * (HEADS * 256) + thread * 16;
}

// A second warpgroup of scores: its steps' part of each, and its chunks of the values.
template <int HEADS, Format FORMAT, Launch LAUNCH, bool FOR_FEW, bool LOWERS>
DEVICE void score_rest(const Row& row, u32 shared, int thread, Ring& at) {
  using L = Layout<HEADS, FORMAT>;
  using R = Rows<FORMAT>;
  constexpr int FIRST = FIRST_STEPS<HEADS, FORMAT, is_persistent(LAUNCH) && !in_shares(LAUNCH)>;
  const int warp = thread >> 5, lane = thread & 31;
  const Places places = places_of<HEADS, FORMAT>(shared, warp, lane);
  int &i = at.turn, &slot = at.slot, &parity = at.parity;
  for (bool last = false; !last; next_turn<L::HALVES>(at)) {
    const u32 barrier = shared + L::RAW_FULL + slot * 8, raw_0 = places.raw + slot * L::RAW_SLOT;
    Start<FORMAT> start;
    mbarrier_wait(barrier, parity);
    load_start<HEADS, FORMAT, false, FIRST>(start, places, raw_0, places.scales + slot * L::SCALES_SLOT,
                                     shared + L::LIVE + slot * 4);
    load_start_rest<HEADS, FORMAT, false, FIRST>(start, raw_0 + places.rope);
    last = uniform(start.alive) >= LAST_TURN;
    if (FOR_FEW) end_thread_if(__any_sync(~0u, start.alive >= NO_KEYS));
    float s[HEADS / 2];
    u32 undo, fragments[2][16];
    bool wide;
    take_out<HEADS, FORMAT, LOWERS, false, FIRST, R::CHUNKS - FIRST>(start, undo, wide, places, slot);
    multiply<HEADS, FORMAT, false, FIRST, R::CHUNKS - FIRST>(s, fragments, start, undo, places, raw_0,
                                                      {half_of<L::HALVES>(at, 0), half_of<L::HALVES>(at, 1)});
    __syncwarp();
    warp_arrive(barrier + L::RAW_FREE - L::RAW_FULL, lane);
    mbarrier_wait(shared + L::SCORES_FREE + i % L::SCORE_SLOTS * 8, (i / L::SCORE_SLOTS & 1) ^ 1);
    wgmma_wait<0>();
    hold(s);
    hold(fragments[0]), hold(fragments[1]);
#pragma unroll
    for (int e = 0; e < HEADS / 2; e += 4)
      store_shared_16(part_of_scores<HEADS, FORMAT>(shared, i, thread) + e * 512, __float_as_uint(s[e]),
                      __float_as_uint(s[e + 1]), __float_as_uint(s[e + 2]), __float_as_uint(s[e + 3]));
    __syncwarp();
    warp_arrive(shared + L::SCORES_FULL + i % L::SCORE_SLOTS * 8, lane);
    next_slot<L::SLOTS>(slot, parity);
  }
}

template <int N>
DEVICE float largest(const float (&s)[N]) {
  float tops[4] = {s[0], s[1], s[2], s[3]};
#pragma unroll
  for (int e = 4; e < N; ++e) tops[e & 3] = fmaxf(tops[e & 3], s[e]);
  return fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
}

constexpr u32 LEFT_BY_GROUP = 1;  // no barrier

// Scores and weights of a row. Returns a barrier that this warp has to arrive at once the row's factors are made, or 0.
// Whether this was the CTA's last share that is held. Its number is kept in memory, since registers are few.
template <int HEADS, Format FORMAT, Launch LAUNCH, bool WIDER, bool FOR_FEW, bool LOWERS>
DEVICE u32 score(const Params& p, const Row& row, u32 shared, int thread, Ring& at,
                 u32 row_parity, u32 odd_row, float (&sums)[HEADS / 4], int& seen) {
  using L = Layout<HEADS, FORMAT>;
  using R = Rows<FORMAT>;
  constexpr bool PERSISTENT = is_persistent(LAUNCH), SHARES = in_shares(LAUNCH);
  constexpr bool ONE = ONE_SCORER<HEADS, LAUNCH>;
  constexpr int FIRST = ONE ? R::CHUNKS : FIRST_STEPS<HEADS, FORMAT, PERSISTENT && !SHARES>;
  constexpr int TILES = HEADS / 8;
  thread = kept(thread);
  const int warp = thread >> 5, lane = thread & 31, t = lane & 3;
  // Made anew each time where registers are few.
  auto own_thread = [&]() { return ONE || HEADS == 32 ? opaque(thread) : thread; };
  const Places places = places_of<HEADS, FORMAT>(shared, warp, lane);
  constexpr bool BY_GROUPS = TURNS_BY_GROUP<HEADS, FORMAT, LAUNCH>;
  // 2 is left of a row whose turns by group are over; all else begins with 0.
  if (BY_GROUPS) seen = opaque(seen);
  const bool resumed = BY_GROUPS && seen == 2;
  if (!resumed) {
#pragma unroll
    for (int i = 0; i < TILES * 2; ++i) sums[i] = 0.f;
    if (BY_GROUPS) hold(sums);
  }
  // Whether a key counted, and with it the running maxima; 2: one that float16 does not hold as it is.
  if (!BY_GROUPS) seen = 0;

  Start<FORMAT> start;
  bool started = false, last = resumed;
  int& i = at.turn;
  auto slot_now = [&]() { return L::SLOTS == 8 ? (i & 1) * 4 + warp : at.slot; };
  auto rests_at = [&](int slot) {
    const int own = HEADS == 32 ? opaque(thread) >> 5 : warp;
    return place_of_rests<L>(shared, slot >= own ? slot - own : slot - own + L::SLOTS);
  };
  // A bit for each of the lane's two keys that counts: 1 and 0x100.
  auto own_keys = [&](u32 alive) { return alive >> R::raw_row((own_thread() & 31) >> 2); };
  // Scores of a turn that may be unusual become those that weights are made of. Returns the turn's kind.
  auto settle = [&](float (&s)[TILES * 4], u32& undo, bool maybe_unusual, int slot, u32 alive, bool live_0, bool live_1,
                    bool wide) {
    auto leave_out_dead = [&]() {
#pragma unroll
      for (int e = 0; e < TILES * 4; ++e)
        if (!((e & 2) ? live_1 : live_0)) s[e] = -INFINITY;
    };
    constexpr bool OFTEN = SHARES && HEADS == 64;
    int turn = USUAL;
    bool moves = maybe_unusual;
    if (moves) {
      // Shares begin often: code that they do not need would take longer to come than to run.
      if (!OFTEN || !__all_sync(~0u, live_0 && live_1)) leave_out_dead();
      if (OFTEN && !seen)
        moves = named_barrier_any<SCORE_BARRIER, 128>(wide || alive);
      else
        moves = named_barrier_any<SCORE_BARRIER, 128>(largest(s) > RESCALE_THRESHOLD || wide || !seen && alive);
    }
    if (moves) {
      turn = MOVED;
      if (HEADS < 64 ? wide : named_barrier_any<SCORE_BARRIER, 128>(wide)) {
        if constexpr (BY_GROUPS) return static_cast<int>(BY_GROUP);
        if constexpr (LOWERS) raise_scales<FORMAT>(places.scales + slot * L::SCALES_SLOT, opaque(thread));
        turn = WIDE;
        if constexpr (!BY_GROUPS) {
          wide_scores<L, SCORE_BARRIER>(s, p, row, at, shared,
                                        {places.raw + slot * L::RAW_SLOT, places.rope,
                                         places.scales + slot * L::SCALES_SLOT, places.values},
                                        opaque(thread));
          store_left_out<L, SCORE_BARRIER>(places.scales + slot * L::SCALES_SLOT, rests_at(slot), opaque(thread));
        }
        forget(start), started = false;  // loaded anew, since registers are few up to here
        undo = ONE_EACH;
        leave_out_dead();
      }
      // One turn raises many heads at once, unless a head's bits must not depend on the heads of its tile.
      const float least = in_shares(LAUNCH) || p.shares ? RESCALE_THRESHOLD : RAISED_TO;
      if (OFTEN) mbarrier_wait(shared + L::FACTORS_FREE, row_parity ^ 1);  // a sum where `alpha` will be
      raise_running_max<L>(s, sums, seen != 0, least, shared, thread);
      // Accumulators of a share that begins are 0.
      if (OFTEN && !seen && turn == MOVED) turn = USUAL;
      seen = turn == WIDE ? 2 : max(seen, 1);
    }
    return turn;
  };
  // The end of a turn: its keys are released, and its weights are made and handed over.
  auto hand_over = [&](float (&s)[TILES * 4], u32 undo, int slot, int turn, bool apart, bool may_be_wide) {
    if (apart) seen = 2;
    if (LAUNCH == Launch::BALANCED && HEADS == 64 && (apart || turn == WIDE)) store_shared_4(shared + L::ROUGH, 1);
    if (PERSISTENT && HEADS == 64 && last && (!SHARES || ends_row(p, row)))
      warp_arrive(shared + L::QUERIES_FREE, own_thread() & 31);
    // The sums of a row that another follows go where the first warp's last keys were. A wide turn's keys are released
    // by the warpgroups that accumulate.
    if (HEADS == 64 && !(may_be_wide && turn == WIDE) && !(PERSISTENT && last && warp == 0))
      warp_arrive(shared + L::RAW_FREE + slot * 8, own_thread() & 31);
#pragma unroll
    for (int e = 0; e < TILES * 4; ++e) s[e] = exp2_approx(s[e]);
    const float undone[2] = {low_bfloat16(undo), high_bfloat16(undo)};
#pragma unroll
    for (int c = 0; c < TILES * 2; ++c)
      sums[c] = fmaf(s[c / 2 * 4 + (c & 1)], undone[0], fmaf(s[c / 2 * 4 + (c & 1) + 2], undone[1], sums[c]));
    if (may_be_wide && turn == WIDE)
      store_wide_weights<L>(s, shared, rests_at(slot), opaque(thread));
    else
      store_weights<HEADS>(s, weights_row(shared + L::WEIGHTS, own_thread()),
                           [](float a, float b, int) { return pack_float16(a, b); });
    if (thread == 0) store_shared_4(shared + L::TURN, turn | slot << 8 | (last ? LAST_TURN : 0));
    __syncwarp();
    warp_arrive(shared + L::WEIGHTS_FULL, own_thread() & 31);
  };
  // A turn that may not be usual leaves the loop of 64 heads: code of such turns lies behind the loop, which is half as
  // long without it. ptxas would put it back, since it sees where each end of the loop leads, if `opaque` did not hide
  // that. Where only running maxima moved, the turn comes back with its scores. Groups, balanced rows and narrower tiles
  // lose by it.
  constexpr bool LEAVES = HEADS == 64 && LAUNCH != Launch::GROUPS && LAUNCH != Launch::BALANCED;
  constexpr u32 LEFT = 1 << 16, HAS_WIDE = 1 << 17, HAS_APART = 1 << 18, HAS_ALIVE = 1 << 19;  // beside `own_keys`
  float left_scores[TILES * 4];  // those of every turn where the loop may be left
  u32 left_undo, settled = 0;    // flags of a turn that comes back with its scores
  for (;;) {
    u32 left = 0;
    for (; !last || LEAVES && settled; next_turn<L::HALVES>(at)) {
      const int slot = slot_now(), parity = L::SLOTS == 8 ? i >> 1 & 1 : at.parity;
      float products[TILES * 4];
      u32 own_undo;
      auto& s = LEAVES ? left_scores : products;
      u32& undo = LEAVES ? left_undo : own_undo;
      bool apart = settled & HAS_APART;
      int turn = settled & 0xff, later_slot, later_parity;
      if (LEAVES && settled) {
        settled = 0;
      } else {
        if (!started) {
          const u32 raw_0 = places.raw + slot * L::RAW_SLOT;
          mbarrier_wait(shared + L::RAW_FULL + slot * 8, parity);
          load_start<HEADS, FORMAT, ONE, 0>(start, places, raw_0, places.scales + slot * L::SCALES_SLOT,
                                       shared + L::LIVE + slot * 4);
          load_start_rest<HEADS, FORMAT, ONE, 0>(start, raw_0 + places.rope);
          if (FOR_FEW) end_thread_if(__any_sync(~0u, start.alive >= NO_KEYS));
        }
        const u32 alive = start.alive & 0xffff;
        last = uniform(start.alive) >= LAST_TURN;
        bool wide;
        apart = take_out<HEADS, FORMAT, LOWERS, ONE, 0, FIRST>(start, undo, wide, places, slot);
        u32 fragments[2][16];
        wide |= multiply<HEADS, FORMAT, ONE, 0, FIRST>(
            products, fragments, start, undo, places, places.raw + slot * L::RAW_SLOT,
            {half_of<L::HALVES>(at, 0), half_of<L::HALVES>(at, 1)});
        // The ring of raw rows is short, so they are given back here, unless the turn is wide. 64 heads have no time
        // for a vote of its own.
        if constexpr (HEADS < 64) {
          wide = named_barrier_any<SCORE_BARRIER, 128>(wide);
          if (!wide) warp_arrive(shared + L::RAW_FREE + slot * 8, own_thread() & 31);
        }

        later_slot = slot ^ 4, later_parity = parity ^ (slot >> 2);
        if (L::SLOTS != 8) later_slot = slot, later_parity = parity, next_slot<L::SLOTS>(later_slot, later_parity);
        const u32 later_full = shared + L::RAW_FULL + later_slot * 8;
        uint4 columns[TILES];  // factor and running maximum of two heads each
#pragma unroll
        for (int j = 0; j < TILES / 2; ++j) columns[j] = load_shared_16(shared + L::COLUMNS + (8 * j + 2 * t) * 8);
        started = __all_sync(~0u, mbarrier_test(later_full, later_parity)) && !last;
        // 64 heads load without a branch, which would wait for all stores: this turn's keys once more where the next
        // are not there yet.
        const int ahead = started ? later_slot : slot;
        if (HEADS == 64 || started)
          load_start<HEADS, FORMAT, ONE, 0>(start, places, places.raw + ahead * L::RAW_SLOT,
                                            places.scales + ahead * L::SCALES_SLOT, shared + L::LIVE + ahead * 4);
        // Scores of keys that had a power of two taken out get it back first. Running maxima are subtracted then.
        if (apart)
#pragma unroll
          for (int j = 0; j < TILES / 2; ++j) columns[j].y = columns[j].w = 0;
        wgmma_wait<0>();
        hold(products);
        hold(fragments[0]), hold(fragments[1]);
        if constexpr (FIRST < R::CHUNKS) {
          mbarrier_wait(shared + L::SCORES_FULL + i % L::SCORE_SLOTS * 8, i / L::SCORE_SLOTS & 1);
#pragma unroll
          for (int e = 0; e < TILES * 4; e += 4) {
            const uint4 rest = load_shared_16(part_of_scores<HEADS, FORMAT>(shared, i, thread) + e * 512);
            products[e] += __uint_as_float(rest.x), products[e + 1] += __uint_as_float(rest.y);
            products[e + 2] += __uint_as_float(rest.z), products[e + 3] += __uint_as_float(rest.w);
          }
          __syncwarp();
          warp_arrive(shared + L::SCORES_FREE + i % L::SCORE_SLOTS * 8, own_thread() & 31);
        }

#pragma unroll
        for (int j = TILES / 2; j < TILES; ++j) {
          columns[j] = load_shared_16(shared + L::COLUMNS + (8 * j + 2 * t) * 8);
          columns[j].y = apart ? 0 : columns[j].y, columns[j].w = apart ? 0 : columns[j].w;
        }
        // A key's score is then log2 of what its weight counts beside the values as they are stored.
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
          const uint4& two = columns[j];
          s[4 * j] = fmaf(products[4 * j], __uint_as_float(two.x), -__uint_as_float(two.y));
          s[4 * j + 1] = fmaf(products[4 * j + 1], __uint_as_float(two.z), -__uint_as_float(two.w));
          s[4 * j + 2] = fmaf(products[4 * j + 2], __uint_as_float(two.x), -__uint_as_float(two.y));
          s[4 * j + 3] = fmaf(products[4 * j + 3], __uint_as_float(two.z), -__uint_as_float(two.w));
        }
        if (apart) {
          const u32 inverse = 0x7f007f00u - undo;
          const float back[2] = {low_bfloat16(inverse), high_bfloat16(inverse)},
                      taken[2] = {exponent_taken(undo, 0), exponent_taken(undo, 1)};
#pragma unroll
          for (int e = 0; e < TILES * 4; e += 4) {
            const u32 column = shared + L::COLUMNS + (2 * e + 2 * t) * 8;
            const float running_max[2] = {load_shared_float(column + 4), load_shared_float(column + 12)};
#pragma unroll
            for (int i = 0; i < 4; ++i)
              s[e + i] = fmaf(s[e + i], back[i >> 1], -running_max[i & 1]) + taken[i >> 1];
          }
        }
        if (HEADS == 64 || started)
          load_start_rest<HEADS, FORMAT, ONE, 0>(start, places.raw + ahead * L::RAW_SLOT + places.rope);
        const u32 mine = LEAVES ? 0 : own_keys(alive);
        const bool live_0 = mine & 1, live_1 = mine & 0x100;
        if (HEADS < 64) mbarrier_wait(shared + L::WEIGHTS_FREE, (i & 1) ^ 1);
        // One branch of the usual way for all that is not usual: it takes 25 cycles.
        const bool maybe_unusual =
            named_barrier_any<SCORE_BARRIER, 128>(largest(s) > RESCALE_THRESHOLD || wide || !seen || alive != 0xffff);
        if constexpr (LEAVES) {
          if (maybe_unusual) {
            left = LEFT | (wide ? HAS_WIDE : 0) | (apart ? HAS_APART : 0) | (alive ? HAS_ALIVE : 0);
            left |= own_keys(alive) & 0x101;
            break;
          }
        } else {
          turn = settle(s, undo, maybe_unusual, slot, alive, live_0, live_1, wide);
          if (BY_GROUPS && turn == BY_GROUP) {
            left = LEFT;
            break;
          }
        }
      }
      hand_over(s, undo, slot, turn, apart, !LEAVES);
      if (L::SLOTS != 8) at.slot = later_slot, at.parity = later_parity;
    }
    if constexpr (!LEAVES && !BY_GROUPS) break;
    left = opaque(left);
    if (!left) break;
    int turn = BY_GROUP;
    const int slot = slot_now();
    if (LEAVES)
      turn = settle(left_scores, left_undo, true, slot, left & HAS_ALIVE, left & 1, left & 0x100, left & HAS_WIDE);
    if constexpr (BY_GROUPS) {
      if (turn == BY_GROUP) return LEFT_BY_GROUP;
    }
    if constexpr (!LEAVES) break;
    if (!BY_GROUPS && turn == WIDE) {
      hand_over(left_scores, left_undo, slot, turn, left & HAS_APART, true);
      next_turn<L::HALVES>(at);
    } else {
      settled = opaque(LEFT | left & HAS_APART | turn);
    }
  }

  if constexpr (SHARES && HEADS == 64) {
    // Sums of warps go where the first one's last keys were, those of heads where nobody reads `alpha` any more.
    const int last_slot = (i - 1 & 1) * 4;
    const u32 place = place_of_sums<L>(shared, last_slot);
    store_sums<HEADS>(sums, place + warp * (HEADS * 4), lane);
    fence_async_shared();  // keys come there later
    mbarrier_wait(shared + L::FACTORS_FREE, row_parity ^ 1);  // of the share before
    const bool bfloat16 = named_barrier_any<SCORE_BARRIER, 128>(seen == 2);
    const int kind = uniform(load_shared_4(shared + L::TURN)) & 0xff;
    if (kind != USUAL) named_barrier<ALPHA_BARRIER, 384>();
    const int head = opaque(thread);
    if (head < HEADS) {
      const float total = sum_of<HEADS>(place, head);
      end_share<L>(p, row, shared, head, bfloat16 ? -total : total, odd_row);
    }
    __syncwarp();
    warp_arrive(shared + L::FACTORS_FULL, lane);
    mbarrier_wait(shared + L::FACTORS_FULL, row_parity);  // sums have been read, running maxima begin anew
    if (warp == 0) warp_arrive(shared + L::RAW_FREE + last_slot * 8, lane);
    return 0;
  }

  if constexpr (PERSISTENT && HEADS == 64) {
    // The warps that accumulate make factors of the sums.
    const int last_slot = (i - 1 & 1) * 4;
    const u32 place = place_of_sums<L>(shared, last_slot) + warp * (HEADS * 4);
    store_sums<HEADS>(sums, place, lane);
    __syncwarp();
    warp_arrive(shared + L::FACTORS_FULL, lane);
    // Else the compiler takes rows to differ within a warp, and spills. By groups the caller has it.
    if (!BY_GROUPS) named_barrier<SCORE_BARRIER, 128>();
    return warp == 0 ? shared + L::RAW_FREE + last_slot * 8 : 0;
  }

  if constexpr (LAUNCH == Launch::FOLDS || is_held(LAUNCH)) {
    int number = 0;  // this share's among the CTA's
    if (is_held(LAUNCH)) number = load_shared_4(shared + L::FOLD_TOPS);
    const bool sends = is_held(LAUNCH) && number + 1 == shares_of_cta(p, cluster_rank());
    if (sends) fence_async_shared(), cluster_arrive();
    store_sums<HEADS>(sums, shared + L::FOLD_SUMS + warp * (HEADS * 4), lane);
    const bool bfloat16 = named_barrier_any<SCORE_BARRIER, 128>(seen == 2);
    if (warp == 0) mbarrier_wait(shared + L::FACTORS_FREE, row_parity ^ 1);  // of the share before
    if (thread < HEADS) {
      const float total = sum_of<HEADS>(shared + L::FOLD_SUMS, thread),
                  running_max = total == 0.f ? NO_SCORE_YET : load_shared_float(shared + L::COLUMNS + thread * 8 + 4);
      const float2 state = make_float2(bfloat16 ? -total : total, running_max);
      if constexpr (is_held(LAUNCH))
        keep_state<L>(shared, number, thread, state);
      else
        end_fold<L>(p, row, shared, thread, state);
    }
    if (sends) {
      await_peers(row);
      named_barrier<SCORE_BARRIER, 128>();  // states are there
      send_states<L>(p, shared, opaque(thread));
    }
    __syncwarp();
    warp_arrive(shared + L::FACTORS_FULL, lane);
    if (sends)
      weigh_parts<L>(p, row, shared, opaque(thread), cluster_rank() == 0, [&]() {
        mbarrier_wait_cluster(shared + L::STATES_FULL, 0);
        return true;
      });
    return sends;
  }

  if constexpr (SHARES) {
    // Sums take the place of the last weights; those of heads go where nobody reads `alpha` any more.
    mbarrier_wait(shared + L::WEIGHTS_FREE, (i & 1) ^ 1);
    store_sums<HEADS>(sums, shared + L::WEIGHTS + warp * (HEADS * 4), lane);
    const bool bfloat16 = named_barrier_any<SCORE_BARRIER, 128>(seen == 2);
    if (thread < HEADS) {
      const float total = sum_of<HEADS>(shared + L::WEIGHTS, thread);
      store_shared_float(shared + L::ALPHA + thread * 4, bfloat16 ? -total : total);
    }
    __syncwarp();
    warp_arrive(shared + L::FACTORS_FULL, lane);
    return 0;
  }

  // The sum of each head, where the queries were.
  if (LAUNCH == Launch::CLUSTERS && in_cluster(row))
    fence_async_shared(), cluster_arrive();
  else
    named_barrier<SCORE_BARRIER, 128>();
  const int worker = opaque(thread);  // else addresses for the end stay in registers all the time
  const u32 place = shared + L::End::SUMS;
  store_sums<HEADS>(sums, place + worker / 32 * (HEADS * 4), worker & 31);
  if (WIDER && worker == 0) store_shared_4(shared + L::End::ALL_FLOAT16, 1);
  const bool bfloat16 = named_barrier_any<SCORE_BARRIER, 128>(!PERSISTENT && seen == 2);
  const int head = worker % HEADS, global_head = row.tile * HEADS + head;
  const float total = sum_of<HEADS>(place, head),
              running_max = total == 0.f ? NO_SCORE_YET : load_shared_float(shared + L::COLUMNS + head * 8 + 4);
  if (PERSISTENT) {
    const int part = LAUNCH == Launch::BALANCED ? part_of(p, shared + L::INTERVAL, row.token) : -1;
    if (worker < HEADS) {
      const float lse = total == 0.f ? -INFINITY : (running_max + log2_approx(total)) * 0.6931471805599453f;
      float factor = total == 0.f ? 0.f : 1.f / R::FACTOR / total;
      if (global_head < p.num_heads) {
        if (p.attn_sink && part < 0) factor /= 1.f + expf(__ldg(p.attn_sink + global_head) - lse);
        leave_lse(p, row, global_head, part, lse, factor);
      }
      store_shared_float(shared + L::COLUMNS + head * 8, total == 0.f ? 0.f : factor);
    }
    __syncwarp();
    warp_arrive(shared + L::FACTORS_FULL, lane);
  } else if constexpr (!PERSISTENT) {
    if (worker == 0) store_shared_4(shared + L::End::OWN_BFLOAT16, bfloat16);
    if (worker < HEADS)
      store_shared_float(shared + L::End::INVERSES + head * 4, total == 0.f ? 0.f : reciprocal_approx(total));
    // States before packets, which would hold them up; with 64 heads the first half of the values waits already.
    auto tell_factors = [&]() {
      __syncwarp();
      warp_arrive(shared + L::FACTORS_FULL, worker & 31);
    };
    const float sum = bfloat16 ? -total : total;
    if constexpr (LAUNCH == Launch::GROUPS) {
      tell_factors();
      leave_states<L>(p, row, shared, worker, sum, running_max);
      weigh_parts<L>(p, row, shared, worker, true, [&]() { return fetch_states<L>(p, row, shared, worker); });
    } else {
      if (HEADS == 64) tell_factors();
      if (leaves_units<HEADS>(row)) {
        const float lse = total == 0.f ? -INFINITY : (running_max + log2_approx(total)) * 0.6931471805599453f;
        if (worker < HEADS && global_head < p.num_heads)
          leave_lse(p, row, global_head, row.part, lse, bfloat16 ? -1.f / R::FACTOR : 1.f / R::FACTOR);
        return 0;
      }
      await_peers(row);
      Row own = row;
      own.rank = rank_here(row);
      constexpr int AT_ONCE = 128 / HEADS;
#pragma unroll 1
      for (int part = worker / HEADS; part < row.splits; part += AT_ONCE)
        if (AT_ONCE * HEADS == 128 || worker < AT_ONCE * HEADS) send_state<L>(own, shared, part, head, sum, running_max);
      if (HEADS < 64) tell_factors();
      weigh_parts<L, WIDER>(p, own, shared, worker);
    }
  }
  return 0;
}
