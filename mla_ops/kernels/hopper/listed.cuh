// The gather of tiles below 64 heads. Each warp looks through its share's indices in a short loop and writes down those of its
// next 16 keys, which it then copies together. In `produce` each turn with a key for the warp goes through all of that.
#pragma once

#include "gather.cuh"

// As `produce`. ENDS_EMPTY: whether the share has no key is returned, with nothing handed over.
template <int HEADS, Format FORMAT, bool ENDS_EMPTY>
DEVICE bool produce_listed(const Params& p, const Row& row, u32 shared, Indices ahead, int warp, int own_lane, int& slot,
                           int& parity) {
  using L = Layout<HEADS, FORMAT>;
  using R = Rows<FORMAT>;
  const int request = uniform(request_of(p, row)), last = uniform(row.last), main_turns = uniform(row.main_turns);
  const int lane = own_lane;
  const u32 list = shared + L::LIST + warp * 64;
  int filled = -16 * warp;  // live keys of this turn so far, from this warp's first on
  u32 live = 0, bulk = 0;   // rows of this warp's slot that have a key, and those that a bulk copy brings
  bool copied = false;      // whether the slot's keys are on their way
  u32 limit = p.caches[uniform(row.first) >= main_turns].num_indices;
  Positions there = positions_at(p, row, row.first + row.stride, lane);
  auto found_of = [&](int index) {
    return __ballot_sync(~0u, static_cast<u32>(index) < limit);
  };
  // Brings the keys of the first `count` lanes into the slot. `word`: an index, above it which cache it is of.
  auto copy = [&](u32 word, int count) {
    const int lane = opaque(own_lane);  // registers are few: nothing is to be kept for it from turn to turn
    const u32 barrier = shared + L::RAW_FULL + slot * 8, rows = shared + L::RAW + slot * L::RAW_SLOT,
              scales = shared + L::SCALES + slot * L::SCALES_SLOT;
    mbarrier_wait(barrier + L::RAW_FREE - L::RAW_FULL, parity);
    for (u32 left = (1u << count) - 1; left;) {
      const u32 leader = __shfl_sync(~0u, word, __ffs(left) - 1);
      const bool extra = leader >> 31, mine = left >> lane & 1 && word >> 31 == leader >> 31;
      const u32 these = __ballot_sync(~0u, mine);
      left &= ~these;
      const Cache& cache = p.caches[extra];
      const bool all_one = these == 0xffff && __all_sync(~0u, !mine || word == leader);
      const Place from = place_at(cache, request, mine ? static_cast<int>(word & 0x7fffffff) : -1);
      const bool copies = is_live(cache, from);
      if constexpr (R::SCALES_APART)  // scales first: copies of rows are issued one by one
        if (copies) copy_8(scales + lane * R::SCALES_PITCH, scales_of_key<R>(cache, from));
      const unsigned char* source = row_of_key<R>(cache, from);
      const u32 brought = __ballot_sync(~0u, copies);
      live |= brought;
      if (all_one && brought) {
        copy_to_all<R>(rows, shuffle_pointer(source, 0), lane);
        continue;
      }
      bool neighbours = !p.indices[extra] && brought == 0xffff;  // maybe, in dense attention
      if (neighbours) {
        const unsigned char* first_row = source - lane * R::BYTES;
        const bool same = first_row == shuffle_pointer(first_row, 0);
        neighbours = __all_sync(~0u, !mine || same);
      }
      if (neighbours && lane == 0) copy_keys<false>(rows, source, 16 * R::BYTES, barrier);
      if (!neighbours && copies) copy_keys<false>(rows + lane * R::BYTES, source, R::BYTES, barrier);
      bulk |= brought;
    }
  };
  // The next indices, while keys are copied or, where registers are few, behind that.
  constexpr bool LATE = HEADS == 32;
  auto look_ahead = [&](int turn) {
    limit = there.limit;
    const int later = turn + 2 * row.stride;
    ahead = indices_at<true>(p, there, lane);
    if (static_cast<u32>(later - main_turns) < static_cast<u32>(row.stride))  // the second cache's begin there
      there = positions_at(p, row, later, opaque(lane));
    else
      there.at += row.stride * TILE_KEYS, there.left -= row.stride * TILE_KEYS;
  };
#pragma unroll 1
  for (int turn = uniform(row.first);; turn += row.stride) {
    const Indices indices = ahead;
    const bool extra = turn >= main_turns, over = turn >= last;
    const u32 found_0 = found_of(indices.of[0]), found_1 = found_of(indices.of[1]);
    if (!LATE) look_ahead(turn);
    if (!over && !(found_0 | found_1)) {
      if (LATE) look_ahead(turn);
      continue;
    }
    if (ENDS_EMPTY && over && filled == -16 * warp) return true;
    // Turns without a dead index are taken as they stand.
    const bool whole = (found_0 & found_1) == ~0u && filled == -16 * warp;
    int before = filled;
    filled += __popc(found_0) + __popc(found_1);
    const u32 above = extra ? 0x80000000u : 0u;
    for (;;) {
      if (!whole) {
        const u32 below = (1u << opaque(lane)) - 1;
        const int place = before + __popc(found_0 & below),
                  second_place = before + __popc(found_0) + __popc(found_1 & below);
        if (found_0 >> lane & 1 && static_cast<u32>(place) < 16)
          store_shared_4(list + place * 4, indices.of[0] | above);
        if (found_1 >> lane & 1 && static_cast<u32>(second_place) < 16)
          store_shared_4(list + second_place * 4, indices.of[1] | above);
      }
      const bool more = filled > TILE_KEYS - 16 * warp;
      if (!copied && (over || filled >= 16)) {
        u32 word;
        if (whole) {
          word = __shfl_sync(~0u, warp < 2 ? indices.of[0] : indices.of[1], (warp & 1) * 16 + (lane & 15)) | above;
        } else {
          __syncwarp();
          word = load_shared_4(list + (lane & 15) * 4);
        }
        copy(word, max(0, min(filled, 16)));
        copied = true;
      }
      if (!more && !over) break;
      const u32 barrier = shared + L::RAW_FULL + slot * 8;
      if (live != 0xffff)
        clear_rows<R>(shared + L::RAW + slot * L::RAW_SLOT, shared + L::SCALES + slot * L::SCALES_SLOT, live, lane);
      if (lane == 0) {
        store_shared_4(shared + L::LIVE + slot * 4, live | (more ? 0 : LAST_TURN));
        if constexpr (R::SCALES_APART) mbarrier_expect(barrier, __popc(bulk) * R::BYTES);
      }
      __syncwarp();
      if constexpr (R::SCALES_APART)
        arrive_when_copied(barrier), warp_arrive(barrier, lane);
      else if (arrives(lane))
        mbarrier_arrive_expect(barrier, lane == 0 ? __popc(bulk) * R::BYTES : 0);
      next_slot<L::SLOTS>(slot, parity);
      live = bulk = 0, copied = false;
      if (!more) return false;
      filled -= TILE_KEYS, before -= TILE_KEYS;
    }
    if (LATE) look_ahead(turn);
  }
}
