// The parts of tokens that intervals of work have cut (`balance.cuh`), into those tokens' results.
//
// A CTA that has left a part counts itself among the token's sharers, and goes on. When it has done its interval, it looks
// whether all are there. While they are, it takes one share after the other of the token's packets and adds up all parts
// of them. It waits for none long, since not all CTAs need run at one time: who loses patience leaves, and who comes last
// finds all parts there and goes on until no share is left. Parts are added up in their order, whoever does it.
#pragma once

#include "meeting.cuh"
#include "merge.cuh"

// Those of a token.
DEVICE SharersCounters* counters_of_sharers(const Params& p, int first_worker, int tile) {
  return reinterpret_cast<SharersCounters*>(p.counters) + first_worker * p.head_tiles + tile;
}

DEVICE int4 sharers_of(const Params& p, const Interval& interval) {
  return parts_of(p).sharers[interval.worker * p.head_tiles + interval.tile];
}

// The 256 threads that have written a part, and what its lse comes from, call this.
template <class L, int BARRIER>
DEVICE void tell_sharers(const Params& p, u32 shared, int part, int thread) {
  named_barrier<BARRIER, 256>();
  const Interval interval = load_interval(shared + L::INTERVAL);
  if (thread == 0) {
    const int4 sharers = sharers_of(p, interval);
    fetch_add(&counters_of_sharers(p, part < p.workers ? sharers.x : sharers.z, interval.tile)->here, ones(1));
  }
  converge();
}

constexpr int MOST_WORKERS = 160;  // of a launch; balance.py has the same
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// A cut token and a tile of its heads. Its parts are of so many workers from the first on.
struct CutToken {
  int token, tile, first_worker, count;

  // The first part is that of the worker in which the token begins; the others were begun before.
  DEVICE int part(const Params& p, int number) const {
    return number == 0 ? p.workers + first_worker : first_worker + number;
  }
};

// Numbers of the sum of a cut token's parts lie in shared memory, behind 16 KB for sums of a team and two words:
// float [threads of a head][HEADS], first tops and then totals; float [HEADS], the factor of the sum; float [parts][HEADS],
// their weights.
template <class L>
struct SumPlaces {
  static constexpr int GROUPS = 256 / L::HEADS;  // threads of a head
  static constexpr int BYTES = (16384 + 16 + (256 + L::HEADS * (1 + MOST_WORKERS)) * 4 + 15) / 16 * 16;
  u32 partial, whole, weights;

  DEVICE explicit SumPlaces(u32 scratch)
      : partial(scratch + 16384 + 16), whole(partial + GROUPS * L::HEADS * 4), weights(whole + L::HEADS * 4) {}
};

// 256 threads store the weights of a token's parts for each head to shared memory; the lse if this CTA `tells`.
template <class L, int BARRIER>
DEVICE void weigh_cut(const Params& p, const CutToken& cut, const SumPlaces<L>& places, bool tells, int thread) {
  constexpr int HEADS = L::HEADS, AT_ONCE = 4;
  const int groups = min(SumPlaces<L>::GROUPS, (cut.count + AT_ONCE - 1) / AT_ONCE);
  const int head = thread % HEADS, group = thread / HEADS, global_head = cut.tile * HEADS + head;
  const bool works = group < groups, there = works && global_head < p.num_heads;
  const float2* const heads = parts_of(p).heads + min(global_head, p.num_heads - 1);
  float2 state[AT_ONCE];
  auto load = [&](int from) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const uint2 v = load_l2_8(heads + cut.part(p, min(from + i * groups, cut.count - 1)) * p.num_heads);
      state[i] = make_float2(from + i * groups < cut.count ? __uint_as_float(v.x) : -INFINITY, __uint_as_float(v.y));
    }
  };
  const float sink = p.attn_sink && there ? __ldg(p.attn_sink + global_head) : -INFINITY;
  float top = -INFINITY, total = 0.f;
#pragma unroll 1
  for (int from = group; from < cut.count && works; from += AT_ONCE * groups) {
    load(from);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) top = fmaxf(top, state[i].x);
  }
  const u32 partial = places.partial + head * 4;
  named_barrier<BARRIER, 256>();  // numbers of another token have been read
  if (works) store_shared_float(partial + group * (HEADS * 4), top);
  named_barrier<BARRIER, 256>();
#pragma unroll 1
  for (int i = 0; i < groups; ++i) top = fmaxf(top, load_shared_float(partial + i * (HEADS * 4)));
  const float base = top == -INFINITY ? 0.f : top;
  named_barrier<BARRIER, 256>();
#pragma unroll 1
  for (int from = group; from < cut.count && works; from += AT_ONCE * groups) {
    if (cut.count > AT_ONCE * groups) load(from);  // else those of before
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int part = from + i * groups;
      const float weight = exp2_approx((state[i].x - base) * LOG2_E);
      total += weight;
      if (part < cut.count)
        store_shared_float(places.weights + (part * HEADS + head) * 4, weight == 0.f ? 0.f : weight * state[i].y);
    }
  }
  if (works) store_shared_float(partial + group * (HEADS * 4), total);
  named_barrier<BARRIER, 256>();
  if (group == 0) {
    total = 0.f;
#pragma unroll 1
    for (int i = 0; i < groups; ++i) total += load_shared_float(partial + i * (HEADS * 4));
    const float lse = total == 0.f ? -INFINITY : top + log2_approx(total) * LN_2;
    float whole = total == 0.f ? 0.f : __fdividef(1.f, total);
    if (sink != -INFINITY && total != 0.f) whole = __fdividef(whole, 1.f + exp2_approx((sink - lse) * LOG2_E));
    store_shared_float(places.whole + head * 4, whole);
    if (tells && there) p.lse[cut.token * p.lse_token_stride + global_head * p.lse_head_stride] = lse;
  }
  converge();
  named_barrier<BARRIER, 256>();
}

// The parts of packets that a warp adds up, one after the other: all of each eighth packet or, where there are fewer
// packets than warps, some of one, of which a team of warps has each some.
struct PartsOfWarp {
  int own, part;  // the packet's number among the share's
  int team, member, end;

  DEVICE PartsOfWarp(int packets, int warp) {
    team = packets > 4 ? 1 : packets > 2 ? 2 : packets > 1 ? 4 : 8, member = warp % team;
    own = team == 1 ? warp : max(min(warp / team, packets - 1), 0);
    part = member, end = team == 1 || packets == 0 ? packets : own + 1;
  }
  DEVICE bool left() const { return own < end; }
  DEVICE bool ends_packet(int count) const { return part + team >= count; }
  DEVICE void advance(int count) {
    if (ends_packet(count))
      part = member, own += 8;
    else
      part += team;
  }
};

// Adds up packets of a cut token, `share`'s, by eight warps. Parts come to shared memory, so many of a warp at a time as
// there is room for: each lane copies what it adds. The first are on their way while the parts' weights are made.
template <class L, int BARRIER, int ROOM>
DEVICE void add_up(const Params& p, const CutToken& cut, int share, u32 scratch, int warp, int lane) {
  using P = typename L::Packet;
  constexpr int F = P::QUADS * 4, SECOND = P::ONE_HEAD ? 0 : L::HEADS == 64 ? 8 : 1, PIECE = P::QUADS * 512,
                FREE = (ROOM - SumPlaces<L>::BYTES) / 8 / PIECE, AT_ONCE = FREE < 24 ? FREE : 24;
  static_assert(AT_ONCE >= 4, "too little room for parts");
  const int packets = share < P::COUNT ? (P::COUNT - 1 - share) / cut.count + 1 : 0;
  const SumPlaces<L> places(scratch);
  const u32 stage = scratch + SumPlaces<L>::BYTES + warp * (AT_ONCE * PIECE) + lane * 16;
  PartsOfWarp here(packets, warp), ahead = here;
  auto packet_of = [&](const PartsOfWarp& piece) { return share + piece.own * cut.count; };
  auto begin_copies = [&]() {
    u32 to = stage;
#pragma unroll 1
    for (int n = 0; n < AT_ONCE && ahead.left(); ++n, to += PIECE) {
      const int packet = packet_of(ahead);
      const float4* from = part_of_warp<L>(p, cut.part(p, ahead.part), cut.tile, packet % 8) +
                           packet / 8 * (P::QUADS * 32) + lane;
#pragma unroll
      for (int q = 0; q < P::QUADS; ++q) copy_16(to + q * 512, from + q * 32);
      ahead.advance(cut.count);
    }
  };
  begin_copies();
  weigh_cut<L, BARRIER>(p, cut, places, share == 0, warp * 32 + lane);
  Row row;
  row.token = cut.token, row.tile = cut.tile, row.part = 0;
  Target to = target_of<L>(p, row);
  to.whole = true;
  float sum[F] = {};
  u32 from = stage;
  int copied = AT_ONCE;
  wait_for_copies();
#pragma unroll 1
  while (here.left()) {
    if (copied == 0) {
      begin_copies();
      wait_for_copies();
      copied = AT_ONCE, from = stage;
    }
    const int packet = packet_of(here), head = head_of_packet<L>(packet / 8, packet % 8, lane);
    const u32 weights = places.weights + (here.part * L::HEADS + head) * 4;
    const float first = load_shared_float(weights), second = load_shared_float(weights + SECOND * 4);
#pragma unroll
    for (int q = 0; q < P::QUADS; ++q) {
      const uint4 v = load_shared_16(from + q * 512);
      const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float weight = SECOND && is_second<L>(4 * q + i) ? second : first;
        sum[4 * q + i] += weight != 0.f ? __uint_as_float(words[i]) * weight : 0.f;  // else memory may hold anything
      }
    }
    from += PIECE, --copied;
    if (here.ends_packet(cut.count)) {
      if (here.team > 1) {
        const u32 own = scratch + warp * PIECE + lane * 16;
#pragma unroll
        for (int q = 0; q < P::QUADS; ++q)
          store_shared_16(own + q * 512, __float_as_uint(sum[4 * q]), __float_as_uint(sum[4 * q + 1]),
                          __float_as_uint(sum[4 * q + 2]), __float_as_uint(sum[4 * q + 3]));
        named_barrier<BARRIER, 256>();
#pragma unroll 1
        for (int other = 1; here.member == 0 && other < here.team; ++other)
#pragma unroll
          for (int q = 0; q < P::QUADS; ++q) {
            const uint4 more = load_shared_16(own + other * PIECE + q * 512);
            sum[4 * q] += __uint_as_float(more.x), sum[4 * q + 1] += __uint_as_float(more.y);
            sum[4 * q + 2] += __uint_as_float(more.z), sum[4 * q + 3] += __uint_as_float(more.w);
          }
      }
      if (here.member == 0 && (here.team == 1 || warp / here.team < packets)) {
        const float whole = load_shared_float(places.whole + head * 4),
                    other = load_shared_float(places.whole + (head + SECOND) * 4);
#pragma unroll
        for (int e = 0; e < F; ++e) sum[e] *= SECOND && is_second<L>(e) ? other : whole;
        write_packet<L>(to, sum, packet / 8, packet % 8, lane);
      }
#pragma unroll
      for (int e = 0; e < F; ++e) sum[e] = 0.f;
    }
    here.advance(cut.count);
  }
}

// The end of a worker's CTA, by the 256 threads that wrote its results. `scratch`, ROOM bytes, is shared memory that nobody
// but these threads uses any more. A warp each asks for the tokens at both ends of the interval, at the same time.
template <class L, int BARRIER, int ROOM>
DEVICE void add_up_cuts(const Params& p, u32 shared, u32 scratch, int thread) {
  const Interval interval = load_interval(shared + L::INTERVAL);
  if (interval.turn == EVERY_WORKERS_TOKEN) return;  // whole tokens
  const int4 sharers = sharers_of(p, interval);
  const int warp = uniform(thread >> 5), lane = thread & 31;
  const int counts[2] = {uniform(sharers.y), uniform(sharers.w)};
  if (counts[0] + counts[1] == 0) return;
  const int own_count = warp == 0 ? counts[0] : warp == 1 ? counts[1] : 0;
  const bool asks = lane == 0 && own_count > 0;
  SharersCounters* const counters = counters_of_sharers(p, warp == 0 ? sharers.x : sharers.z, interval.tile);
  const bool complete = asks && await_sharers(counters, own_count);
  converge();
#pragma unroll 1
  for (;;) {
    const u32 word = scratch + 16384;
    named_barrier<BARRIER, 256>();  // the words have been read, and what is in scratch
    if (lane == 0 && warp < 2) store_shared_4(word + warp * 4, complete ? take_share(counters) : own_count);
    converge();
    named_barrier<BARRIER, 256>();
    const uint2 words = load_shared_8(word);
    const int shares[2] = {uniform(words.x), uniform(words.y)};
    if (shares[0] >= counts[0] && shares[1] >= counts[1]) break;
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
      const int share = which ? shares[1] : shares[0], count = which ? counts[1] : counts[0];
      if (share >= count) continue;
      const CutToken cut{which ? interval.last_token : interval.token, interval.tile,
                         uniform(which ? sharers.z : sharers.x), count};
      add_up<L, BARRIER, ROOM>(p, cut, share, scratch, warp, lane);
    }
  }
  if (asks) leave_sharers(counters, own_count, complete);
  converge();
}
