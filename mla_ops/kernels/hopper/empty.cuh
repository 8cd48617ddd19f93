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

// Whether a row has a key, by the four warps that gather. Each looks at a quarter of the row's indices.
DEVICE bool has_keys(const Params& p, const Row& row, int thread) {
  bool found = false;
#pragma unroll 1
  for (int extra = 0; extra < 2; ++extra) {
    const int length = extra ? row.extra_length : row.length;
    const int* indices = p.indices[extra] + row.token * p.indices_stride[extra];
#pragma unroll 1
    for (int at = thread; at < length; at += 512) {
      int some[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) some[i] = p.indices[extra] ? __ldg(indices + min(at + i * 128, length - 1)) : 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) found |= in_range(p.caches[extra], some[i]);
    }
  }
  return named_barrier_any<GATHER_BARRIER, 128>(found);
}

// Hands over a share without keys: one turn of dead ones, or none where the whole row has no key and its result is left
// here, which is returned.
template <int HEADS, Format FORMAT>
DEVICE void end_empty_share(const Params& p, const Row& row, u32 shared, int warp, int lane) {
  using L = Layout<HEADS, FORMAT>;
  using R = Rows<FORMAT>;
  const bool ends = !has_keys(p, row, thread_here() & 127);
  warp = uniform((thread_here() & 127) >> 5), lane = lane_here();
  if (!ends) clear_rows<R>(shared + L::RAW + warp * L::RAW_SLOT, shared + L::SCALES + warp * L::SCALES_SLOT, 0, lane);
  if (lane == 0) store_shared_4(shared + L::LIVE + warp * 4, ends ? LAST_TURN | NO_KEYS : LAST_TURN);
  __syncwarp();
  const u32 barrier = shared + L::RAW_FULL + warp * 8;
  if constexpr (R::SCALES_APART) mbarrier_arrive(barrier);
  warp_arrive(barrier, lane);
  if (!ends) return;
  write_zeros<L, 4>(p, row, warp, lane);
  const int head = warp * 32 + lane, global_head = row.tile * L::HEADS + head;
  if (row.rank == 0 && head < L::HEADS && global_head < p.num_heads) *lse_of_cluster(p, row, global_head) = -INFINITY;
  wait_for_prerequisites();
  end_thread();
}
