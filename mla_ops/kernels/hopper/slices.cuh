// A row by a cluster whose CTAs add up as one CTA would: the bits of `Launch::ROWS`, for few rows.
//
// Turns go round: CTA r scores every n-th turn from the r-th on, relative to the references after the first turn, which its
// CTA sends to all. A turn's weights go to memory, and from there to all. Each CTA adds up a slice of the values' dims over
// all turns, in their order. So there is no merge, and no number is added in another order than in one CTA.
//
//   gather      4 warps   live indices -> rows of this CTA's turns -> ring of raw rows; weights -> memory; their sums
//   score       4 warps   raw bytes -> fragments -> S' = K Q' -> weights
//   bring       4 warps   this CTA's slice of all keys, memory -> registers -> float16 -> ring of values
//   add up      4 warps   O += P V, in this slice
#pragma once

#include "queries.cuh"
#include "slices_scores.cuh"
#include "slices_values.cuh"

template <int CHUNKS, Format FORMAT>
DEVICE void attend_in_slices(const Params& p) {
  using Y = Slices<CHUNKS, FORMAT>;
  constexpr int QUERY_THREADS = 384;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 shared = shared_address(shared_memory);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x >> 7, 0), thread = threadIdx.x & 127;
  const int rank = uniform(cluster_rank());
  const Row row = whole_row(p);
  if (row.token >= p.num_tokens) {
    wait_for_prerequisites();
    return;
  }
  if (thread % 32 == 0)
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < Y::NUM_BARRIERS; i += 16) {
      const u32 barrier = Y::BARRIERS + i * 8;
      int arrivals = 1;
      if (barrier < Y::RAW_FREE) arrivals = ARRIVALS_OF_A_WARP + (Rows<FORMAT>::SCALES_APART ? 32 : 0);
      if (barrier >= Y::VALUES_FULL && barrier < Y::VALUES_FREE) arrivals = ARRIVALS_OF_A_WARP;
      if (barrier >= Y::RAW_FREE && barrier < Y::VALUES_FULL || barrier >= Y::VALUES_FREE && barrier < Y::WEIGHTS_FULL)
        arrivals = 4;
      if (barrier >= Y::OWN_FULL && barrier <= Y::LIST_FULL) arrivals = 4 * ARRIVALS_OF_A_WARP;
      mbarrier_init(shared + barrier, arrivals);
      fence_barrier_init();
    }
  __syncthreads();
  cluster_arrive();
  if (warpgroup < 3) {
    load_queries<64, FORMAT, QUERY_THREADS>(p, row, shared, threadIdx.x, false, 0);
    fence_async_shared();
    named_barrier<QUERY_BARRIER, QUERY_THREADS>();
    if (warpgroup == 0) {
      more_registers<Y::L::SCORE_REGISTERS>();
      score_in_slices<CHUNKS, FORMAT>(p, row, shared, rank, thread);
    } else if (warpgroup == 1) {
      more_registers<160>();
      add_up_in_slices<CHUNKS, FORMAT>(p, shared, rank, thread);
    } else {
      more_registers<144>();
      bring_values<Y, CHUNKS>(p, row, shared, rank, thread / 32, thread % 32);
      cluster_wait();
    }
  } else {
    fewer_registers<40>();
    launch_dependents();
    gather_turns<Y>(p, row, shared, rank, thread / 32, thread % 32);
    add_up_weights<Y, CHUNKS>(p, shared, rank, thread);
    wait_for_prerequisites();
  }
  // No CTA leaves while others write to it.
  cluster_meet();
}
