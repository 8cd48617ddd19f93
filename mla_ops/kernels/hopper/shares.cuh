// A row in shares, as many as its heads and its capacity say, however many CTAs it has: each takes every so many-th share,
// one after the other, and each share starts from nothing. What a share finds is the part that a cluster's CTA would
// send, and parts are added up as a cluster does it. So bits do not depend on the number of CTAs.
//
// A lane leaves its parts in memory and finds them there again. With several CTAs a warp adds up every so many-th packet:
// parts that the same lane of the same warp has left in each of them.
#pragma once

#include "balance.cuh"
#include "either.cuh"
#include "merge.cuh"

// After a share's last turn, if that is not usual: those that accumulate have read `alpha`, and what lies where keys were.
constexpr int ALPHA_BARRIER = 12;

// A warp's part of a share: packets, and for each lane the sum and the running maximum of a head.
template <class L>
struct PartOfWarp {
  static constexpr int STATES = L::Packet::OF_A_WARP * L::Packet::BYTES, BYTES = STATES + 256;
};

// The place of a warp's part of the row's first share; those of the next ones follow `8 * PartOfWarp::BYTES` behind. If a
// row has several CTAs, each takes two places in turn: peers still read what was left of the row before.
template <class L>
DEVICE unsigned char* parts_of_warp(const Params& p, int warp, u32 parity) {
  const int cluster = cluster_index(p), place = p.splits > 1 ? cluster * 2 + parity : cluster;
  return p.exchange + (static_cast<i64>(place) * p.shares * 8 + warp) * PartOfWarp<L>::BYTES;
}

// The head whose state a lane has, which it shares with others or not.
template <class L>
DEVICE int head_of_lane(int warp, int lane) {
  return L::HEADS == 64 ? (warp & 3) * 16 + lane % 16 : min(lane, L::HEADS - 1);
}

// A number of the heads of a lane's words in a packet, two or one, of which another lane knows it.
template <class L>
DEVICE float2 of_heads(float own, int number, int lane) {
  if (L::Packet::ONE_HEAD) return make_float2(__shfl_sync(~0u, own, (lane >> 2) + (number & 1) * 8), 0.f);
  const int first = number % (L::HEADS / 8) * 8 + (lane & 3) * 2;
  return make_float2(__shfl_sync(~0u, own, first), __shfl_sync(~0u, own, first + 1));
}

// Where a warp of 64 heads keeps what it adds up itself of its CTA's last share: its values' place, which is free then.
template <class L>
DEVICE u32 kept_of_warp(u32 shared, int warp) {
  return shared + L::VALUES + warp * (L::Packet::OF_A_WARP * L::Packet::BYTES);
}

// A warp's part: `value_of(n)` is the n-th of its accumulators in the order of packets. `sum` and `running_max` are of this
// lane's head. Packets that have a bit in `keeps` go to `kept` in shared memory.
template <class L, class Value>
DEVICE void leave_share(unsigned char* part, u32 kept, u32 keeps, int lane, float sum, float running_max, Value value_of) {
  using P = typename L::Packet;
  const float own = sum == 0.f ? 0.f : reciprocal_approx(fabsf(sum));
  const bool bfloat16 = __any_sync(~0u, __float_as_uint(sum) >> 31);
  if (L::HEADS < 64) *reinterpret_cast<float2*>(part + PartOfWarp<L>::STATES + lane * 8) = make_float2(sum, running_max);
  unsigned char* const to = part + lane * (P::UNIT * 4);
  kept += lane * (P::UNIT * 4);
  const u64 policy = evict_last();  // the row's end reads it: keys that come meanwhile would drive it out
#pragma unroll
  for (int number = 0; number < P::OF_A_WARP; ++number) {
    const float2 inverse = of_heads<L>(own, number, lane);
    u32 words[P::WORDS];
#pragma unroll
    for (int w = 0; w < P::WORDS; ++w) {
      const int n = number * P::WORDS + w;
      const float a = value_of(2 * n) * (is_second<L>(2 * w) ? inverse.y : inverse.x),
                  b = value_of(2 * n + 1) * (is_second<L>(2 * w + 1) ? inverse.y : inverse.x);
      words[w] = bfloat16 ? pack_bfloat16(a, b) : pack_float16(a, b);
    }
    if constexpr (P::WORDS == 2) {
      store_8_by(policy, to + number * P::BYTES, words[0], words[1]);
    } else {
      const bool here = keeps >> number & 1;
#pragma unroll
      for (int w = 0; w < P::WORDS; w += 4)
        if (here)
          store_shared_16(kept + number * P::BYTES + w * 128, words[w], words[w + 1], words[w + 2], words[w + 3]);
        else
          store_16_by(policy, to + number * P::BYTES + w * 128, words[w], words[w + 1], words[w + 2], words[w + 3]);
    }
  }
}

// CTAs of a cluster arrive at one another's barriers, which have to be there.
DEVICE void open_meeting(const Params& p) {
  if (p.splits > 1) cluster_arrive();
}

DEVICE void await_opened(const Params& p) {
  if (p.splits > 1) cluster_wait();
}

// The place of a head's state in a part of 64 heads.
template <class L>
DEVICE unsigned char* state_of_head(unsigned char* part_of_head, int head) {
  return part_of_head + PartOfWarp<L>::STATES + head % 16 * 8;
}

// A head's sum and running maximum at the end of a share of 64 heads: the sum for those that accumulate, both for the row's end.
// The next share begins with running maxima of 0.
template <class L>
DEVICE void end_share(const Params& p, const Row& row, u32 shared, int head, float sum, u32 odd_row) {
  const u32 column = shared + L::COLUMNS + head * 8 + 4;
  const float running_max = sum == 0.f ? NO_SCORE_YET : load_shared_float(column);
  store_shared_float(shared + L::ALPHA + head * 4, sum);
  store_shared_float(column, 0.f);
  unsigned char* const part = parts_of_warp<L>(p, head / 16, odd_row) + row.rank * (8 * PartOfWarp<L>::BYTES);
  *reinterpret_cast<float2*>(state_of_head<L>(part, head)) = make_float2(sum, running_max);
}

// The warpgroup of scores of less than 64 heads calls this between two shares of a row. READ: those that accumulate read
// the running maxima, too.
template <class L, bool READ>
DEVICE void renew_running_max(u32 shared, int thread, u32 parity) {
  if (READ) mbarrier_wait(shared + L::FACTORS_FREE, parity);
  if (thread < L::HEADS) store_shared_float(shared + L::COLUMNS + thread * 8 + 4, 0.f);
  named_barrier<SCORE_BARRIER, 128>();
}

// A lane may then read what the same lane of the warp has left in each CTA of the cluster.
template <class L>
DEVICE void meet_peers(const Params& p, u32 shared, int lane, u32 parity) {
  if (p.splits == 1) return;
  __syncwarp();
  if (lane < p.splits) mbarrier_release_peer(peer_address(shared + L::MEETING, lane));
  converge();
  mbarrier_wait_cluster(shared + L::MEETING, parity);
}

// Adds a part of a packet, as `add_parts` does: bfloat16 if its factor is below 0, unless all are FLOAT16.
template <class L, bool FLOAT16>
DEVICE void add_piece(float (&sums)[L::Packet::QUADS * 4], const Piece<typename L::Packet>& piece, float2 factor) {
  const bool bfloat16 = !FLOAT16 && (__float_as_uint(factor.x) | __float_as_uint(factor.y)) >> 31;
  factor = make_float2(fabsf(factor.x), fabsf(factor.y));
#pragma unroll
  for (int i = 0; i < L::Packet::QUADS * 2; ++i) {
    const float2 v = piece.pair(i, bfloat16);
    sums[2 * i] = fmaf(v.x, is_second<L>(2 * i) ? factor.y : factor.x, sums[2 * i]);
    sums[2 * i + 1] = fmaf(v.y, is_second<L>(2 * i + 1) ? factor.y : factor.x, sums[2 * i + 1]);
  }
}

// Results of `weigh_parts` from the states of a head's shares: their weights, the result's, and the lse.
template <int MOST>
struct Weights {
  float of[MOST], whole, lse;
};

template <class L, int MOST>
DEVICE Weights<MOST> weigh_shares(const float2 (&state)[MOST], float sink) {
  constexpr int LANES = L::HEADS > 32 ? 2 : L::HEADS > 16 ? 4 : 8;  // as `weigh_parts` has them
  Weights<MOST> weights;
  float running_max = NO_SCORE_YET, totals[LANES] = {};
#pragma unroll
  for (int s = 0; s < MOST; ++s) running_max = fmaxf(running_max, state[s].y);
#pragma unroll
  for (int s = 0; s < MOST; ++s) {
    weights.of[s] = state[s].x * (state[s].x == 0.f ? 0.f : exp2_approx(state[s].y - running_max));
    totals[s % LANES] += fabsf(weights.of[s]);
  }
#pragma unroll
  for (int step = LANES / 2; step; step >>= 1)
#pragma unroll
    for (int i = 0; i < step; ++i) totals[i] += totals[i + step];
  const float total = totals[0];
  weights.lse = total == 0.f ? -INFINITY : (running_max + log2_approx(total)) * 0.6931471805599453f;
  weights.whole = __fdividef(1.f / L::FACTOR, total);
  if (sink != -INFINITY)
    weights.whole = __fdividef(weights.whole, 1.f + exp2_approx((sink - weights.lse) * 1.4426950408889634f));
  if (total == 0.f) weights.whole = 0.f;
  return weights;
}

// Adds up a row's parts, MOST at most, as `weigh_parts` and `add_packets` do. With 64 heads those of share `own` are at
// `kept`. Every other set of packets is on its way while one is added up.
template <class L, int MOST, bool FLOAT16>
DEVICE void add_packets_of_shares(const Params& p, const Target& to, const unsigned char* from,
                                  const unsigned char* kept, int own, const Weights<MOST>& weights, int warp, int lane) {
  using P = typename L::Packet;
  constexpr int PITCH = 8 * PartOfWarp<L>::BYTES, SETS = L::HEADS == 64 && MOST > 4 ? 1 : 2,
                AT_ONCE = (L::HEADS == 64 ? 64 : 32) / P::WORDS / MOST / SETS;  // packets of a set
  Piece<P> piece[SETS][AT_ONCE][MOST];
  auto load = [&](Piece<P> (&set)[AT_ONCE][MOST], int next) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
      for (int s = 0; s < MOST; ++s) {  // past the last one that once more: without a branch
        const int number = min(next + i * p.splits, P::OF_A_WARP - 1);
        const unsigned char* place = from + min(s, p.shares - 1) * PITCH;
        if constexpr (L::HEADS == 64) {
          if (min(s, p.shares - 1) == own) place = kept;
#pragma unroll
          for (int w = 0; w < P::WORDS; w += 4) {
            const uint4 v = load_either_16(place + number * P::BYTES + w * 128);
            u32* const words = set[i][s].words + w;
            words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
          }
        } else {
          set[i][s].load(place + number * P::BYTES);
        }
      }
  };
  const int step = AT_ONCE * p.splits;
  int next = cluster_rank();
  load(piece[0], next);
#pragma unroll 1
  for (; next < P::OF_A_WARP;) {
#pragma unroll
    for (int set = 0; set < SETS; ++set, next += step) {
      if (SETS > 1) load(piece[(set + 1) % SETS], next + step);
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const int number = next + i * p.splits;
        if (number >= P::OF_A_WARP) break;
        float sums[P::QUADS * 4] = {};
#pragma unroll
        for (int s = 0; s < MOST; ++s) {
          const float2 factor = of_heads<L>(weights.of[s], number, lane);
          if (s >= p.shares) continue;
          add_piece<L, FLOAT16>(sums, piece[set][i][s], factor);
        }
        const float2 factor = of_heads<L>(weights.whole, number, lane);
#pragma unroll
        for (int e = 0; e < P::QUADS * 4; ++e) sums[e] *= is_second<L>(e) ? factor.y : factor.x;
        write_packet<L>(to, sums, number, warp, lane);
      }
      if (SETS == 1) load(piece[0], next + step);
    }
  }
}

template <class L, int MOST>
DEVICE void add_shares(const Params& p, const Row& row, const unsigned char* parts, u32 kept, int warp, int lane) {
  using P = typename L::Packet;
  constexpr int PITCH = 8 * PartOfWarp<L>::BYTES;
  const int global_head = row.tile * L::HEADS + head_of_lane<L>(warp, lane);
  const bool there = global_head < p.num_heads;
  const float sink = p.attn_sink && there ? __ldg(p.attn_sink + global_head) : -INFINITY;
  float2 state[MOST];
  bool float16 = true;
#pragma unroll
  for (int s = 0; s < MOST; ++s) {
    state[s] = make_float2(0.f, NO_SCORE_YET);
    if (s >= p.shares) continue;
    const unsigned char* const part = parts + s * PITCH;
    const uint2 v = load_l2_8(L::HEADS == 64
                                  ? part - (warp & 4) * PartOfWarp<L>::BYTES + PartOfWarp<L>::STATES + lane % 16 * 8
                                  : part + PartOfWarp<L>::STATES + lane * 8);
    state[s] = make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
    float16 &= !(v.x >> 31);
  }
  const Weights<MOST> weights = weigh_shares<L>(state, sink);
  const bool tells = L::HEADS == 64 ? warp < 4 && lane < 16 : warp == 0 && lane < L::HEADS;
  if (tells && there && cluster_rank() == 0)
    p.lse[row.token * p.lse_token_stride + global_head * p.lse_head_stride] = weights.lse;

  const Target to = target_of<L>(p, row);
  const unsigned char* const from = parts + lane * (P::UNIT * 4);
  const unsigned char* const kept_place = shared_pointer(kept + lane * (P::UNIT * 4));
  if (__all_sync(~0u, float16))
    add_packets_of_shares<L, MOST, true>(p, to, from, kept_place, row.rank, weights, warp, lane);
  else
    add_packets_of_shares<L, MOST, false>(p, to, from, kept_place, row.rank, weights, warp, lane);
}
