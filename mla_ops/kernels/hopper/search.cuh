// Shares with few live keys, in clusters and groups. The gather counts the live keys of all turns of the share at once,
// and then looks only at turns that have its own: to go from turn to turn would wait for indices each time.
#pragma once

// Included by gather.cuh, behind what finds indices.

constexpr int SEARCH_BARRIER = 8, MOST_SEARCHED = 16;  // turns of a share

// What a warp of the gather knows of a share that it searches: lane i how many live keys are in front of its turn i, from
// the turn on that comes next.
struct Search {
  bool begun;
  int before;
};

// How many live keys a turn of up to 16 has, from `first` on; lane i those of the i-th. The four warps count a quarter each.
DEVICE int live_keys(const Params& p, const Row& row, int first, int stride, u32 counts, int warp, int lane) {
  constexpr int EACH = MOST_SEARCHED / 4;
  Indices found[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int turn = first + (warp + 4 * i) * stride, extra = turn >= row.main_turns;
    const int position = (extra ? turn - row.main_turns : turn) * TILE_KEYS + lane;
    const int length = turn >= row.last ? 0 : extra ? row.extra_length : row.length;
    const i64 row_at = row.token * (extra ? p.indices_stride[1] : p.indices_stride[0]);
    const int* indices = (extra ? p.indices[1] : p.indices[0]) + row_at + position;
    found[i].of[0] = position < length ? __ldg(indices) : -1;
    found[i].of[1] = position + 32 < length ? __ldg(indices + 32) : -1;
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const Cache& cache = p.caches[first + (warp + 4 * i) * stride >= row.main_turns];
    const int count = __popc(__ballot_sync(~0u, in_range(cache, found[i].of[0]))) +
                      __popc(__ballot_sync(~0u, in_range(cache, found[i].of[1])));
    if (lane == 0) store_shared_4(counts + (warp + 4 * i) * 4, count);
  }
  named_barrier<SEARCH_BARRIER, 128>();
  const int own = lane < MOST_SEARCHED ? static_cast<int>(load_shared_4(counts + lane * 4)) : 0;
  named_barrier<SEARCH_BARRIER, 128>();
  return own;
}

// Counts a share's live keys if its first turn has less than three quarters of what it may have, and the share four turns
// or more. `counts`: 64 bytes. `flags` is NO_KEYS then if the row has no key in any share.
DEVICE Search begin_search(const Params& p, const Row& row, const Indices& ahead, u32 counts, u32& flags, int warp,
                           int lane) {
  const Cache& cache = p.caches[row.first >= row.main_turns];
  const int alive = __popc(__ballot_sync(~0u, in_range(cache, ahead.of[0]))) +
                    __popc(__ballot_sync(~0u, in_range(cache, ahead.of[1])));
  Search search{false, 0};
  if (alive >= 48 || !p.indices[0] || row.last - row.first <= 3 * row.stride || row.last - row.first > MOST_SEARCHED * row.stride)
    return search;
  int first = row.first, stride = row.stride;
  for (bool own = true;; own = false) {  // this share, then all of the row if there is nothing
    const int count = live_keys(p, row, first, stride, counts, warp, lane);
    if (own) search.before = count;
    if (__any_sync(~0u, count > 0)) break;
    first = own ? 0 : first + MOST_SEARCHED, stride = 1;
    if (first >= row.last) {
      flags = NO_KEYS;
      break;
    }
  }
  const int count = search.before;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int more = __shfl_up_sync(~0u, search.before, step);
    if (lane >= step) search.before += more;
  }
  search.before -= count, search.begun = true;
  return search;
}

// The share's next turn, from `turn` on, that has a key of this warp's, or with which a slot of its ends; behind the last if
// there is none. `filled` counts the keys of turns that are left out.
DEVICE int next_of_search(const Row& row, Search& search, int turn, int& filled, int warp, int lane) {
  const int here = filled + search.before, after = __shfl_sync(~0u, here, lane + 1 & 31),
            own = row.first + lane * row.stride;
  const bool counted = after <= TILE_KEYS - 16 * warp && (after <= 0 || here >= 16);
  const int next = __ffs(__ballot_sync(~0u, own >= turn && !counted || own >= row.last)) - 1;
  filled = __shfl_sync(~0u, here, next);
  search.before -= __shfl_sync(~0u, search.before, next + 1 & 31);
  return row.first + next * row.stride;
}
