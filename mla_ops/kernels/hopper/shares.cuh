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

// A warp's part of a share: packets, and for each lane the sum and the reference of a head.
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

// Whether this share's part stays in shared memory: a row's last one, where a CTA of 64 heads has all of them.
template <class L>
DEVICE bool keeps_part(const Params& p, const Row& row) {
  return L::HEADS == 64 && p.splits == 1 && ends_row(p, row);
}

// The place for it: the values', which is free then. Packets of 128 dims lie where those dims' values will be.
template <class L>
DEVICE u32 kept_of_warp(u32 shared, int half, int warp) {
  return shared + L::VALUES + half * HALF_BYTES + warp * L::Packet::BYTES;
}

template <class L>
constexpr int KEPT_PITCH = 4 * L::Packet::BYTES;  // from a warp's packet to its next

// A warp's part, to `store(number, words)`: `value_of(n)` is the n-th of its accumulators in the order of packets. `sum` is
// of this lane's head.
template <class L, class Value, class Store>
DEVICE void make_part(int lane, float sum, Value value_of, Store store) {
  using P = typename L::Packet;
  const float own = sum == 0.f ? 0.f : reciprocal_approx(fabsf(sum));
  const bool bfloat16 = __any_sync(~0u, __float_as_uint(sum) >> 31);
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
    store(number, words);
  }
}

// A part goes to memory; `reference` is of this lane's head.
template <class L, class Value>
DEVICE void leave_share(unsigned char* part, int lane, float sum, float reference, Value value_of) {
  using P = typename L::Packet;
  if (L::HEADS < 64) *reinterpret_cast<float2*>(part + PartOfWarp<L>::STATES + lane * 8) = make_float2(sum, reference);
  unsigned char* const to = part + lane * (P::UNIT * 4);
  const u64 policy = evict_last();  // the row's end reads it: keys that come meanwhile would drive it out
  make_part<L>(lane, sum, value_of, [&](int number, const u32 (&words)[P::WORDS]) {
    if constexpr (P::WORDS == 2)
      store_8_by(policy, to + number * P::BYTES, words[0], words[1]);
    else
#pragma unroll
      for (int w = 0; w < P::WORDS; w += 4)
        store_16_by(policy, to + number * P::BYTES + w * 128, words[w], words[w + 1], words[w + 2], words[w + 3]);
  });
}

// The part of a share that `keeps_part`.
template <class L, class Value>
DEVICE void keep_share(u32 kept, int lane, float sum, Value value_of) {
  using P = typename L::Packet;
  kept += lane * (P::UNIT * 4);
  make_part<L>(lane, sum, value_of, [&](int number, const u32 (&words)[P::WORDS]) {
#pragma unroll
    for (int w = 0; w + 3 < P::WORDS; w += 4)
      store_shared_16(kept + number * KEPT_PITCH<L> + w * 128, words[w], words[w + 1], words[w + 2], words[w + 3]);
  });
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

// A head's sum and reference at the end of a share of 64 heads: the sum for those that accumulate, both for the row's end.
// The next share begins with references of 0.
template <class L>
DEVICE void end_share(const Params& p, const Row& row, u32 shared, int head, float sum, u32 odd_row) {
  const u32 column = shared + L::COLUMNS + head * 8 + 4;
  const float reference = sum == 0.f ? NO_SCORE_YET : load_shared_float(column);
  store_shared_float(shared + L::ALPHA + head * 4, sum);
  store_shared_float(column, 0.f);
  unsigned char* const part = parts_of_warp<L>(p, head / 16, odd_row) + row.rank * (8 * PartOfWarp<L>::BYTES);
  *reinterpret_cast<float2*>(state_of_head<L>(part, head)) = make_float2(sum, reference);
}

// The warpgroup of scores of less than 64 heads calls this between two shares of a row. READ: those that accumulate read
// the references, too.
template <class L, bool READ>
DEVICE void renew_references(u32 shared, int thread, u32 parity) {
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
  float reference = NO_SCORE_YET, totals[LANES] = {};
#pragma unroll
  for (int s = 0; s < MOST; ++s) reference = fmaxf(reference, state[s].y);
#pragma unroll
  for (int s = 0; s < MOST; ++s) {
    weights.of[s] = state[s].x * (state[s].x == 0.f ? 0.f : exp2_approx(state[s].y - reference));
    totals[s % LANES] += fabsf(weights.of[s]);
  }
#pragma unroll
  for (int step = LANES / 2; step; step >>= 1)
#pragma unroll
    for (int i = 0; i < step; ++i) totals[i] += totals[i + step];
  const float total = totals[0];
  weights.lse = total == 0.f ? -INFINITY : (reference + log2_approx(total)) * 0.6931471805599453f;
  weights.whole = __fdividef(1.f / L::FACTOR, total);
  if (sink != -INFINITY)
    weights.whole = __fdividef(weights.whole, 1.f + exp2_approx((sink - weights.lse) * 1.4426950408889634f));
  if (total == 0.f) weights.whole = 0.f;
  return weights;
}

// Packets of a row's parts that are on their way together, MOST parts at most, and how many times: every other set is on its
// way while one is added up.
template <class L, int MOST>
struct Sets {
  using P = typename L::Packet;
  static constexpr int NUMBER = L::HEADS == 64 && MOST > 4 ? 1 : 2,
                       PACKETS = (L::HEADS == 64 ? 64 : 32) / P::WORDS / MOST / NUMBER;
  using Set = Piece<P>[PACKETS][MOST];
  Set of[NUMBER];
  const unsigned char *from, *kept;
  int own;  // the share whose parts are at `kept`, with 64 heads

  DEVICE void load(const Params& p, Set& set, int next) {
#pragma unroll
    for (int i = 0; i < PACKETS; ++i)
#pragma unroll
      for (int s = 0; s < MOST; ++s) {  // past the last one that once more: without a branch
        const int number = min(next + i * p.splits, P::OF_A_WARP - 1), share = min(s, p.shares - 1);
        const unsigned char* place = from + share * (8 * PartOfWarp<L>::BYTES) + number * P::BYTES;
        if constexpr (L::HEADS == 64) {
          if (share == own) place = kept + number * KEPT_PITCH<L>;
#pragma unroll
          for (int w = 0; w < P::WORDS; w += 4) {
            const uint4 v = load_either_16(place + w * 128);
            u32* const words = set[i][s].words + w;
            words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
          }
        } else {
          set[i][s].load(place);
        }
      }
  }
};

// Adds up a row's parts, as `weigh_parts` and `add_packets` do, of which the first set is on its way. Arrives at `freed`,
// and the barrier behind it, when the halves of what was kept are free.
template <class L, int MOST, bool FLOAT16>
DEVICE void add_sets(const Params& p, const Target& to, Sets<L, MOST>& sets, const Weights<MOST>& weights, u32 freed,
                     int warp, int lane) {
  using P = typename L::Packet;
  using S = Sets<L, MOST>;
  const int step = S::PACKETS * p.splits;
#pragma unroll 1
  for (int next = cluster_rank(); next < P::OF_A_WARP;) {
#pragma unroll
    for (int set = 0; set < S::NUMBER; ++set, next += step) {
      if (S::NUMBER > 1) sets.load(p, sets.of[(set + 1) % S::NUMBER], next + step);
#pragma unroll
      for (int i = 0; i < S::PACKETS; ++i) {
        const int number = next + i * p.splits;
        if (number >= P::OF_A_WARP) break;
        float sums[P::QUADS * 4] = {};
#pragma unroll
        for (int s = 0; s < MOST; ++s) {
          const float2 factor = of_heads<L>(weights.of[s], number, lane);
          if (s >= p.shares) continue;
          add_piece<L, FLOAT16>(sums, sets.of[set][i][s], factor);
        }
        const float2 factor = of_heads<L>(weights.whole, number, lane);
#pragma unroll
        for (int e = 0; e < P::QUADS * 4; ++e) sums[e] *= is_second<L>(e) ? factor.y : factor.x;
        write_packet<L>(to, sums, number, warp, lane);
      }
      if (S::NUMBER == 1) sets.load(p, sets.of[0], next + step);
    }
    if (L::HEADS == 64 && freed && next % (P::OF_A_WARP / 2) == 0) {  // one CTA, so each half ends here
      __syncwarp();
      warp_arrive(freed, lane);
      freed += 8;
    }
  }
}

template <class L, int MOST>
DEVICE void add_shares(const Params& p, const Row& row, const unsigned char* parts, u32 kept, u32 freed, int warp,
                       int lane) {
  using P = typename L::Packet;
  Sets<L, MOST> sets;
  sets.from = parts + lane * (P::UNIT * 4), sets.kept = shared_pointer(kept + lane * (P::UNIT * 4));
  sets.own = keeps_part<L>(p, row) ? row.rank : -1;
  const int global_head = row.tile * L::HEADS + head_of_lane<L>(warp, lane);
  const bool there = global_head < p.num_heads;
  const float sink = p.attn_sink && there ? __ldg(p.attn_sink + global_head) : -INFINITY;
  const unsigned char* states = parts + PartOfWarp<L>::STATES + lane * 8;
  if (L::HEADS == 64) states = parts - (warp & 4) * PartOfWarp<L>::BYTES + PartOfWarp<L>::STATES + lane % 16 * 8;
  float2 state[MOST];
  bool float16 = true;
#pragma unroll
  for (int s = 0; s < MOST; ++s) {
    state[s] = make_float2(0.f, NO_SCORE_YET);
    if (s >= p.shares) continue;
    const uint2 v = load_l2_8(states + s * (8 * PartOfWarp<L>::BYTES));
    state[s] = make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
    float16 &= !(v.x >> 31);
  }
  sets.load(p, sets.of[0], cluster_rank());
  const Weights<MOST> weights = weigh_shares<L>(state, sink);
  const bool tells = L::HEADS == 64 ? warp < 4 && lane < 16 : warp == 0 && lane < L::HEADS;
  if (tells && there && cluster_rank() == 0)
    p.lse[row.token * p.lse_token_stride + global_head * p.lse_head_stride] = weights.lse;
  Target to = target_of<L>(p, row);
  hold(to.rows), hold(to.head_stride);  // not before the parts are asked for
  if (__all_sync(~0u, float16))
    add_sets<L, MOST, true>(p, to, sets, weights, freed, warp, lane);
  else
    add_sets<L, MOST, false>(p, to, sets, weights, freed, warp, lane);
}
