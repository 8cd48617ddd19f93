// The end of a row whose CTAs are no cluster but a group: what `merge.cuh` does through distributed shared memory, here
// through L2. A cluster is a part of one GPC, and of most sizes leaves a tenth of the SMs or more without work; a group
// takes any SMs.
//
// Two of the producer's warps publish this CTA's results and poll the row's counters in L2, one for states, the other
// for packets. So one warp of a CTA polls a counter, and a fence that waits for the CTA's stores delays no other warp.
#pragma once

#include "meeting.cuh"
#include "merge.cuh"

// The sums and running maxima of this CTA's heads, by the warpgroup of scores.
template <class L>
DEVICE void leave_states(const Params& p, const Row& row, u32 shared, int thread, float sum, float running_max) {
  if (thread < L::HEADS) meeting_of<L>(p, row).states[row.rank * L::HEADS + thread] = make_float2(sum, running_max);
  __syncwarp();
  warp_arrive(shared + L::ALL_LEFT, thread & 31);
  named_barrier_arrive(STATES_BARRIER, 160);
}

// Those of all CTAs to where `weigh_parts` reads them. Whether they are there: else this CTA has given up.
template <class L>
DEVICE bool fetch_states(const Params& p, const Row& row, u32 shared, int thread) {
  named_barrier<STATES_HERE_BARRIER, 160>();
  const bool complete = load_shared_4(shared + L::End::COMPLETE) != 0;
  const float2* states = meeting_of<L>(p, row).states;
  if (complete)
#pragma unroll 4
    for (int i = thread; i < row.splits * L::HEADS / 2; i += 128) {
      const uint4 two = load_l2_16(states + i * 2);
      store_shared_16(shared + L::End::STATES + i * 16, two.x, two.y, two.z, two.w);
    }
  named_barrier<SCORE_BARRIER, 128>();
  return complete;
}

// A warp's packets: `word_of(n)` is the n-th of a lane's words.
template <class L, class Word>
DEVICE void leave_packets(const Params& p, const Row& row, u32 shared, int warp, int lane, Word word_of) {
  using P = typename L::Packet;
  static_assert(P::UNIT == 4, "words of a packet lie otherwise");
  unsigned char* to = meeting_of<L>(p, row).packets + (warp * row.splits + row.rank) * P::BYTES + lane * 16;
#pragma unroll
  for (int n = 0; n < P::OF_A_WARP * P::WORDS; n += 4) {
    *reinterpret_cast<uint4*>(to + n % P::WORDS * 128) =
        make_uint4(word_of(n), word_of(n + 1), word_of(n + 2), word_of(n + 3));
    if (n % P::WORDS + 4 == P::WORDS) to += 8 * row.splits * P::BYTES;
  }
  __syncwarp();
  warp_arrive(shared + L::ALL_LEFT, lane);
  converge();
}

// The warp for packets: finds out which shares this CTA adds up.
template <class L>
DEVICE void carry_packets(const Params& p, const Row& row, u32 shared, int lane) {
  RowCounters* const counters = meeting_of<L>(p, row).counters;
  u32* set = nullptr;
  if (lane == 0) set = counters->sets[own_set(&counters->owners)];
  converge();
  mbarrier_wait(shared + L::ALL_LEFT, 0);
  if (lane == 0) store_shared_4(shared + L::End::SHARES, shares_of(set, row));
  __syncwarp();
  warp_arrive(shared + L::OWN_FULL, lane), warp_arrive(shared + L::SHARES_KNOWN, lane);
  if (lane == 0) leave_row(counters, set, 2 * row.splits);
}

// The warp for states: polls until every CTA of the row has left its states or the warp for packets is back: it has
// all shares or has given up.
template <class L>
DEVICE void carry_states(const Params& p, const Row& row, u32 shared, int lane) {
  RowCounters* const counters = meeting_of<L>(p, row).counters;
  u32* set = nullptr;
  if (lane == 0) set = counters->sets[own_set(&counters->owners)];
  converge();
  named_barrier(STATES_BARRIER, 160);
  if (lane == 0) {
    fetch_add(set, 1);
    bool decided = false, complete = false;
    while (!decided && !complete) {
      decided = mbarrier_test(shared + L::SHARES_KNOWN, 0);
      complete = load_acquire(set) == row.splits;
    }
    store_shared_4(shared + L::End::COMPLETE, complete || load_shared_4(shared + L::End::SHARES) != 0);
  }
  __syncwarp();
  named_barrier_arrive(STATES_HERE_BARRIER, 160);
  if (lane == 0) leave_row(counters, set, 2 * row.splits);
}

// Two of the warps that gather, once they have done so.
template <class L>
DEVICE void carry(const Params& p, const Row& row, u32 shared, int warp, int lane) {
  if (warp == 0) carry_packets<L>(p, row, shared, lane);
  if (warp == 1) carry_states<L>(p, row, shared, lane);
}

// Twelve warps add up this CTA's shares of the result.
template <class L>
DEVICE void finish_group(const Params& p, const Row& row, u32 shared, int warp, int lane) {
  using P = typename L::Packet;
  __syncwarp();
  warp_arrive(shared + L::OWN_FULL, lane);  // factors
  Target to = target_of<L>(p, row);
  int splits = row.splits;
  const unsigned char* packets = meeting_of<L>(p, row).packets;
  hold(to.rows), hold(to.heads), hold(splits), hold(packets);
  mbarrier_wait(shared + L::OWN_FULL, 0);
#pragma unroll 1
  for (u32 shares = load_shared_4(shared + L::End::SHARES); shares; shares &= shares - 1) {
    const int share = __ffs(shares) - 1;
    add_packets<L, 12>(to, share, shared, packets + share * splits * P::BYTES, splits * splits * P::BYTES,
                       packets_of<L>(p, share), splits, splits, warp, lane);
  }
}
