// A row's shares by a cluster whose CTAs take several each: all but a CTA's last one stay in its registers, packed as
// packets are, until every CTA sends all it has. From there on it is the end of a cluster of as many CTAs as shares.
//
// Tiles of 16 and 32 heads have the registers. A `Row` is a share here: `rank` of `splits` shares, which `p.splits` CTAs take.
#pragma once

#include "shares.cuh"

// A lane's words of a CTA's shares, the latest first, each in the order of its warp's packets. The last place has
// none until the CTA's last one is pushed, when the accumulators give their registers back.
template <class L>
struct Held {
  u32 words[L::MOST_OF_A_CTA][L::Packet::OF_A_WARP * L::Packet::WORDS];
};

// The number of a row's shares that a CTA of its cluster takes.
DEVICE int shares_of_cta(const Params& p, int cta) { return divide(p.shares - 1 - cta, p.of_splits) + 1; }

// The state of a CTA's share, for the row's end, and what makes averages of its accumulators. By a thread for each head.
template <class L>
DEVICE void keep_state(u32 shared, int number, int head, float2 state) {
  store_shared_float2(shared + L::FOLD_STATES + (number * L::HEADS + head) * 8, state.x, state.y);
  if (head == 0) store_shared_4(shared + L::FOLD_TOPS, number + 1);
  const float inverse = state.x == 0.f ? 0.f : reciprocal_approx(fabsf(state.x));
  store_shared_16(shared + L::FOLD + head * 16, __float_as_uint(inverse), __float_as_uint(state.x) >> 31, 0, 0);
}

// Adds a share: a lane's accumulators as words of packets.
template <class L, int PIECES, int N>
DEVICE void push(Held<L>& held, const float (&o)[PIECES][N], u32 shared, int lane) {
#pragma unroll
  for (int j = 0; j < N / 4; ++j) {
    const u32 from = shared + L::FOLD + (j * 8 + (lane & 3) * 2) * 16;
    const uint4 first = load_shared_16(from), second = load_shared_16(from + 16);  // heads
    const float inverse_0 = __uint_as_float(first.x), inverse_1 = __uint_as_float(second.x);
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece)
#pragma unroll
      for (int e = j * 4; e < j * 4 + 4; e += 2) {
        const float a = o[piece][e] * inverse_0, b = o[piece][e + 1] * inverse_1;
        const int w = (piece * N + e) / 2;
#pragma unroll
        for (int i = L::MOST_OF_A_CTA - 1; i > 0; --i) held.words[i][w] = held.words[i - 1][w];
        held.words[0][w] = first.y ? pack_bfloat16(a, b) : pack_float16(a, b);
      }
  }
}

// The place of a share's packet in the shared memory of the CTA that adds it up, from the first one's place on.
template <class L>
DEVICE int place_of_packet(const Params& p, int packet, int share) {
  return (divide(packet, p.of_splits) * p.shares + share) * L::Packet::BYTES;
}

// A warp's packets of all shares of this CTA, each to the CTA that adds it up. One share's after the other's, by the same
// instructions, since these come from memory: `held` moves up.
template <class L>
DEVICE void send_held(const Params& p, u32 shared, Held<L>& held, int own, int warp, int lane) {
  using P = typename L::Packet;
  static_assert(P::UNIT == 2 && P::WORDS == 2, "as many words are sent at a time");
#pragma unroll 1
  for (int share = own + (shares_of_cta(p, own) - 1) * p.splits; share >= 0; share -= p.splits) {
#pragma unroll
    for (int u = 0; u < P::OF_A_WARP; ++u) {
      const int packet = u * 8 + warp, rank = packet - divide(packet, p.of_splits) * p.splits;
      const u32 place = shared + L::HELD_PACKETS + place_of_packet<L>(p, packet, share) + lane * (P::UNIT * 4);
      send_8_unless(rank == own, peer_address(place, rank), peer_address(shared + L::PACKETS_FULL, rank),
                    held.words[0][u * 2], held.words[0][u * 2 + 1]);
    }
#pragma unroll
    for (int i = 1; i < L::MOST_OF_A_CTA; ++i)
#pragma unroll
      for (int w = 0; w < P::OF_A_WARP * P::WORDS; ++w) held.words[i - 1][w] = held.words[i][w];
  }
}

// Warps that have done their part call this; one of those that gather tells how much the others will send.
template <class L>
DEVICE void stand_by_for_shares(const Params& p, u32 shared, bool gathers, int thread) {
  if (gathers && thread == 0) {
    const int own = cluster_rank(), packets = (p.shares - shares_of_cta(p, own)) * packets_of<L>(p, own);
    mbarrier_arrive_expect(shared + L::STATES_FULL, p.shares * L::HEADS * 8);
    mbarrier_arrive_expect(shared + L::PACKETS_FULL, packets * L::Packet::BYTES);
  }
  __syncwarp();
  cluster_arrive();
  cluster_wait();
}

// The states of all shares of this CTA to every CTA, by the warpgroup of scores.
template <class L>
DEVICE void send_states(const Params& p, u32 shared, int thread) {
  const int own = cluster_rank(), count = shares_of_cta(p, own) * p.splits * L::HEADS;
#pragma unroll 1
  for (int n = thread; n < count; n += 128) {
    const int head = n % L::HEADS, which = n / L::HEADS, number = divide(which, p.of_splits);
    const float2 state = load_shared_float2(shared + L::FOLD_STATES + (number * L::HEADS + head) * 8);
    const u32 peer = peer_address(shared, which - number * p.splits);
    send_float2(peer + L::End::STATES + ((own + number * p.splits) * L::HEADS + head) * 8, peer + L::STATES_FULL,
                state.x, state.y);
  }
  converge();
}

// This CTA's part of the result.
template <class L, int WARPS = 12>
DEVICE void finish_shares(const Params& p, const Row& row, u32 shared, int warp, int lane) {
  __syncwarp();
  warp_arrive(shared + L::OWN_FULL, lane);
  const int own = cluster_rank();
  Target to = target_of<L>(p, row);
  int packets = packets_of<L>(p, own);
  hold(to.rows), hold(to.heads), hold(packets);
  mbarrier_wait(shared + L::OWN_FULL, 0);
  mbarrier_wait_cluster(shared + L::PACKETS_FULL, 0);
  add_packets<L, WARPS>(to, own, shared, shared + L::HELD_PACKETS, p.shares * L::Packet::BYTES, packets, p.splits, p.shares,
                        warp, lane);
}
