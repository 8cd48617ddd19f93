// Rows without a key, in clusters. Over bfloat16 a CTA whose share has none takes no turn; where all of a cluster have none,
// nobody sends packets or waits for them. Over fp8 and V4 such a CTA looks at the whole row.
#pragma once

#include "gather.cuh"
#include "group.cuh"
#include "merge.cuh"

constexpr int NO_TURN = 4;               // kind of a turn, or which turn is the last, of a share without keys
constexpr float NO_KEYS_AT_ALL = 2 * NO_SCORE_YET;  // the running maximum that such a share sends

// Whether no CTA of a cluster has a key, asked where this one has none. Waits for the states of all.
template <class L>
DEVICE bool is_empty(const Row& row, u32 shared, int lane) {
  if (row.splits == 1) return false;
  mbarrier_wait_cluster(shared + L::STATES_FULL, 0);
  const u32 state = shared + L::End::STATES + min(lane, row.splits - 1) * (L::HEADS * 8);
  return __all_sync(~0u, load_shared_float(state + 4) == NO_KEYS_AT_ALL);
}

// This CTA's heads of an empty row's result, by so many warps.
template <class L, int WARPS = 8>
DEVICE void write_zeros(const Params& p, const Row& row, int warp, int lane) {
  const Target to = target_of_cluster<L>(p, row);
  const int size = to.whole ? 2 : 4;
#pragma unroll 1
  for (int head = row.rank * WARPS + warp; head < min(L::HEADS, to.heads); head += row.splits * WARPS)
#pragma unroll 1
    for (int at = lane * 16; at < 512 * size; at += 512)
      store_16_if(true, to.rows + head * to.head_stride * size + at, 0, 0, 0, 0);
}

// Ends the gather of a share without keys: by one turn of dead ones or, where the row has no key either, by the row's
// result. All other warps end then, too.
template <int HEADS, Format FORMAT, Launch LAUNCH>
DEVICE void end_empty_share(const Params& p, const Row& row, u32 shared) {
  using L = Layout<HEADS, FORMAT>;
  using R = Rows<FORMAT>;
  const bool ends = !has_keys(p, row, thread_here() & 127);
  const int warp = uniform((thread_here() & 127) >> 5), lane = lane_here();
  if (!ends) clear_rows<R>(shared + L::RAW + warp * L::RAW_SLOT, shared + L::SCALES + warp * L::SCALES_SLOT, 0, lane);
  if (lane == 0) store_shared_4(shared + L::LIVE + warp * 4, ends ? LAST_TURN | NO_KEYS : LAST_TURN);
  __syncwarp();
  const u32 barrier = shared + L::RAW_FULL + warp * 8;
  if constexpr (R::SCALES_APART) mbarrier_arrive(barrier);
  warp_arrive(barrier, lane);
  if (ends) {
    if (warp == 0 && lane == 0) store_shared_4(shared + L::TURN, EMPTY | LAST_TURN);
    __syncwarp();
    warp_arrive(shared + L::WEIGHTS_FULL, lane);
    write_zeros<L, 4>(p, row, warp, lane);
    const int head = warp * 32 + lane, global_head = row.tile * HEADS + head;
    if (row.rank == 0 && head < HEADS && global_head < p.num_heads) *lse_of_cluster(p, row, global_head) = -INFINITY;
  } else if constexpr (LAUNCH == Launch::GROUPS) {
    carry<L>(p, row, shared, warp, lane);
  } else {
    stand_by<L>(p, row, shared, true, warp * 32 + lane);
  }
  wait_for_prerequisites();
}
