// Pieces of a row of scores, and the candidates that each hands over to top-k. Where rows are few, each CTA of scores has
// every n-th tile of 64 keys of one row, so that pieces of a row are like one another.
#pragma once

#include "ptx.cuh"

constexpr int PIECE_ROWS = 4, PIECE_TILES = 64, CANDIDATES = 128;

struct Pieces {
  int first, end;  // CTAs of scores that have a row
};

// Lane n has the tiles of row n, and gets its pieces; each row that has tiles has one at least.
DEVICE Pieces pieces_of(int tiles, int lane, int ctas) {
  int behind = tiles;
#pragma unroll
  for (int distance = 1; distance < PIECE_ROWS; distance *= 2) {
    const int lower = __shfl_up_sync(~0u, behind, distance);
    if (lane >= distance) behind += lower;
  }
  const int total = __shfl_sync(~0u, behind, PIECE_ROWS - 1);
  const u32 there = __ballot_sync(~0u, tiles > 0);
  const u32 shared = static_cast<u32>(behind) * (ctas - __popc(there)) / max(total, 1);
  const int end = __popc(there & (2u << lane) - 1) + shared, first = __shfl_up_sync(~0u, end, 1);
  return {lane ? first : 0, end};
}

// What each of `count` pieces hands over: its share of k and four standard deviations, at least; a little more has room.
struct Handed {
  u32 need, room;

  DEVICE Handed(int k, int count) {
    const float share = static_cast<float>(k) / count;
    need = static_cast<u32>(share + 4.f * sqrtf(share)) + 5;
    room = need + need / 8 + 6;
  }
};
