// Rows without a key, in clusters over bfloat16 keys. A CTA whose share has none takes no turn; where all of a cluster have
// none, nobody sends packets or waits for them.
#pragma once

#include "gather.cuh"
#include "merge.cuh"

constexpr int NO_TURN = 4;               // kind of a turn, or which turn is the last, of a share without keys
constexpr float NO_KEYS_AT_ALL = 2 * NO_SCORE_YET;  // the reference that such a share sends

// Whether no CTA of a cluster has a key, asked where this one has none. Waits for the states of all.
template <class L>
DEVICE bool is_empty(const Row& row, u32 shared, int lane) {
  if (row.splits == 1) return false;
  mbarrier_wait_cluster(shared + L::STATES_FULL, 0);
  const u32 state = shared + L::End::STATES + min(lane, row.splits - 1) * (L::HEADS * 8);
  return __all_sync(~0u, load_shared_float(state + 4) == NO_KEYS_AT_ALL);
}

// This CTA's heads of an empty row's result, by eight warps.
template <class L>
DEVICE void write_zeros(const Params& p, const Row& row, int warp, int lane) {
  const Target to = target_of_cluster<L>(p, row);
  const int size = to.whole ? 2 : 4;
#pragma unroll 1
  for (int head = row.rank * 8 + warp; head < min(L::HEADS, to.heads); head += row.splits * 8)
#pragma unroll 1
    for (int at = lane * 16; at < 512 * size; at += 512)
      store_16_if(true, to.rows + head * to.head_stride * size + at, 0, 0, 0, 0);
}
