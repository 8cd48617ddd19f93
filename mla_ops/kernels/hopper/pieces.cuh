// Pieces of a row of scores, and the candidates that each hands over. Where rows are few, each CTA of scores has every
// n-th tile of 64 keys of one row, so that pieces of a row are like one another.
#pragma once

#include "ptx.cuh"

constexpr int PIECE_ROWS = 4, PIECE_TILES = 64, CANDIDATES = 128;

struct Pieces {
  int first, end;  // CTAs that have a row
};

// Lane n has the tiles of row n, and gets its pieces; each of `rows` rows has one at least.
DEVICE Pieces pieces_of(int tiles, int lane, int rows, int ctas) {
  int behind = tiles;
#pragma unroll
  for (int distance = 1; distance < PIECE_ROWS; distance *= 2) {
    const int lower = __shfl_up_sync(~0u, behind, distance);
    if (lane >= distance) behind += lower;
  }
  const int total = __shfl_sync(~0u, behind, PIECE_ROWS - 1);
  const u32 shared = static_cast<u32>(behind) * (ctas - rows) / max(total, 1);
  const int end = min(lane + 1, rows) + shared, first = __shfl_up_sync(~0u, end, 1);
  return {lane ? first : 0, end};
}

// What each of `count` pieces hands over: its share of k and four standard deviations, at least; a little more has room.
struct Handed {
  u32 need, room;

  DEVICE Handed(int k, int count) {
    const float share = static_cast<float>(k) / count;
    need = static_cast<u32>(share + 4.f * sqrtf(share)) + 5;
    room = (need + need / 8 + 7) / 2 * 2;
  }
};
