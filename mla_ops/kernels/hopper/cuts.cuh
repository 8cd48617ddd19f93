// The parts of tokens that intervals of work have cut (`balance.cuh`), into those tokens' results.
//
// A CTA that has left a part counts itself among the token's sharers, and goes on. When it has done its interval, it looks
// whether all are there. Then it adds up all parts of its share of the token's packets. The last sharer has no share: it
// goes on with another token, of which it may have one, and a CTA that adds up twice ends last. It waits for none long,
// since not all CTAs need run at one time: who loses patience gives its share up and leaves, and who finds all there adds
// up what was given up as well. Parts are added up in their order, whoever does it.
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
  const Interval interval = load_interval(shared + L::INTERVAL);
  int first = interval.worker;  // where the token goes on behind the interval
  if (thread == 0 && part < p.workers) first = sharers_of(p, interval).x;  // on its way while others are waited for
  named_barrier<BARRIER, 256>();
  if (thread == 0) publish_add(&counters_of_sharers(p, first, interval.tile)->here, ones(1));
  converge();
}

constexpr int MOST_WORKERS = 144;  // of a launch; balance.py has the same
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// Where a token has two sharers, the first comes to it last, when the other has mostly left its part. Then the first adds
// up both from its registers, and leaves none. A warp that gathers looks for that part, once it has brought its last keys:
// `found` is a barrier of one arrival.
template <class L>
DEVICE void look_for_other(const Params& p, u32 shared, u32 found, int lane) {
  const Interval interval = load_interval(shared + L::INTERVAL);
  if (lane == 0 && interval.end != NO_END && sharers_of(p, interval).w == 2) {
    const SharersCounters* const counters = counters_of_sharers(p, interval.worker, interval.tile);
#pragma unroll 1
    for (int looks = PATIENCE; looks; --looks)
      if (other_is_here(counters)) {
        mbarrier_arrive(found);
        break;
      }
  }
  converge();
}

// The weights of both parts for a head, and what makes a result of their sum; as `weigh_cut` has them.
struct BothParts {
  float own, others, whole, lse;
};

// `own`: lse and factor of the first sharer's part of a head.
DEVICE BothParts weigh_both(const Params& p, const uint2& others, int global_head, const float2& own) {
  const float other_lse = __uint_as_float(others.x), top = fmaxf(own.x, other_lse), base = top == -INFINITY ? 0.f : top,
              first = exp2_approx((own.x - base) * LOG2_E), second = exp2_approx((other_lse - base) * LOG2_E),
              total = first + second;
  BothParts both;
  both.own = first == 0.f ? 0.f : first * own.y, both.others = second == 0.f ? 0.f : second * __uint_as_float(others.y);
  both.lse = total == 0.f ? -INFINITY : top + log2_approx(total) * LN_2;
  both.whole = total == 0.f ? 0.f : __fdividef(1.f, total);
  const float sink = p.attn_sink && global_head < p.num_heads ? __ldg(p.attn_sink + global_head) : -INFINITY;
  if (sink != -INFINITY && total != 0.f) both.whole = __fdividef(both.whole, 1.f + exp2_approx((sink - both.lse) * LOG2_E));
  return both;
}

// Each thread of the first sharer notes for itself that it has added up both. The interval has no part at its end then.
template <class L>
DEVICE void note_both(u32 shared) {
  store_shared_4(shared + L::INTERVAL + 8, NO_END);
}

// A cut token and a tile of its heads. Its parts are of so many workers from the first on, its shares of all but the last.
struct CutToken {
  int token, tile, first_worker, count;

  DEVICE int shares() const { return count - 1; }

  // The first part is that of the worker in which the token begins; the others were begun before.
  DEVICE int part(const Params& p, int number) const {
    return number == 0 ? p.workers + first_worker : first_worker + number;
  }
};

// Shared memory of a sum: a barrier for copies; how many shares of each of two tokens were given up; one of these; float
// [HEADS], factors of the sum; 8 KB for sums of a team; float [parts][HEADS], weights; the parts of the share.
template <class L>
struct SumPlaces {
  static constexpr int BARRIER = 0, GIVEN_UP = 8, NEXT = 16, WHOLE = 128, TEAMS = WHOLE + (L::HEADS * 4 + 127) / 128 * 128,
                       WEIGHTS = TEAMS + 8192;

  static DEVICE constexpr int stage(int count) { return WEIGHTS + (count * L::HEADS * 4 + 127) / 128 * 128; }
};

// 256 threads store the weights of a token's parts for each head to shared memory, neighbours of a head those of some
// parts each; the lse if this CTA `tells`.
template <class L, int BARRIER>
DEVICE void weigh_cut(const Params& p, const CutToken& cut, u32 scratch, bool tells, int thread) {
  constexpr int HEADS = L::HEADS, LANES = HEADS > 32 ? 4 : HEADS > 16 ? 8 : 16, AT_ONCE = 4;
  const int head = thread / LANES, own = thread % LANES, global_head = cut.tile * HEADS + head;
  const bool there = head < HEADS && global_head < p.num_heads;
  const float2* const heads = parts_of(p).heads + min(global_head, p.num_heads - 1);
  float2 state[AT_ONCE];
  auto load = [&](int from) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const uint2 v = load_l2_8(heads + cut.part(p, min(from + i * LANES, cut.count - 1)) * p.num_heads);
      state[i] = make_float2(from + i * LANES < cut.count ? __uint_as_float(v.x) : -INFINITY, __uint_as_float(v.y));
    }
  };
  const float sink = p.attn_sink && there ? __ldg(p.attn_sink + global_head) : -INFINITY;
  float top = -INFINITY, total = 0.f;
#pragma unroll 1
  for (int from = own; from - own < cut.count; from += AT_ONCE * LANES) {
    load(from);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) top = fmaxf(top, state[i].x);
  }
#pragma unroll
  for (int step = LANES / 2; step; step >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
  const float base = top == -INFINITY ? 0.f : top;
  const u32 weights = scratch + SumPlaces<L>::WEIGHTS + head * 4;
#pragma unroll 1
  for (int from = own; from - own < cut.count; from += AT_ONCE * LANES) {
    if (cut.count > AT_ONCE * LANES) load(from);  // else those of before
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int part = from + i * LANES;
      const float weight = exp2_approx((state[i].x - base) * LOG2_E);
      total += weight;
      if (part < cut.count && head < HEADS)
        store_shared_float(weights + part * (HEADS * 4), weight == 0.f ? 0.f : weight * state[i].y);
    }
  }
#pragma unroll
  for (int step = LANES / 2; step; step >>= 1) total += __shfl_xor_sync(~0u, total, step);
  if (own == 0 && head < HEADS) {
    const float lse = total == 0.f ? -INFINITY : top + log2_approx(total) * LN_2;
    float whole = total == 0.f ? 0.f : __fdividef(1.f, total);
    if (sink != -INFINITY && total != 0.f) whole = __fdividef(whole, 1.f + exp2_approx((sink - lse) * LOG2_E));
    store_shared_float(scratch + SumPlaces<L>::WHOLE + head * 4, whole);
    if (tells && there) p.lse[cut.token * p.lse_token_stride + global_head * p.lse_head_stride] = lse;
  }
  converge();
  named_barrier<BARRIER, 256>();
}

// A unit of a packet, of each lane of a warp.
template <class L>
DEVICE void write_unit(const Target& to, const float (&v)[PartUnits<L>::VALUES], u32 number, int unit, int warp,
                       int lane) {
  const int g = lane >> 2, t = lane & 3, head = (warp & 3) * 16 + g, dim = (warp & 4) * 64;
  if constexpr (L::Packet::ONE_HEAD) {
    const int own = head + number % 2 * 8;
    store_16_if(own < to.heads, to.rows + 2 * (own * to.head_stride + dim + number / 2 * 64 + 16 * t + 8 * unit),
                pack_bfloat16(v[0], v[1]), pack_bfloat16(v[2], v[3]), pack_bfloat16(v[4], v[5]),
                pack_bfloat16(v[6], v[7]));
  } else {
    write_packet<L>(to, v, number, warp, lane);
  }
}

// Adds a lane's unit of a part, whose weight is below 0 where it is bfloat16. Memory of weight 0 may hold anything.
template <class L>
DEVICE void add_unit(float (&sum)[PartUnits<L>::VALUES], const uint4& v, float first, float second) {
  const u32 words[4] = {v.x, v.y, v.z, v.w};
  if constexpr (PartUnits<L>::PACKED) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float own = is_second<L>(2 * i) ? second : first, weight = fabsf(own);
      const float2 pair = unpack(own != 0.f ? words[i] : 0, __float_as_uint(own) >> 31);
      sum[2 * i] = fmaf(pair.x, weight, sum[2 * i]), sum[2 * i + 1] = fmaf(pair.y, weight, sum[2 * i + 1]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float weight = is_second<L>(i) ? second : first;
      sum[i] += weight != 0.f ? __uint_as_float(words[i]) * weight : 0.f;
    }
  }
}

// Adds up a share of a cut token, some units of all parts, by eight warps. A share's are neighbours in each part, and come
// to shared memory by one copy of each, while weights are made. The code is short rather than fast: it runs once, and
// comes from memory.
template <class L, int BARRIER, int ROOM>
DEVICE void add_up(const Params& p, const CutToken& cut, int share, u32 scratch, u32& parity, int warp, int lane) {
  using U = PartUnits<L>;
  using Places = SumPlaces<L>;
  constexpr int ALL = 8 * U::OF_A_WARP, BYTES = 512, SECOND = L::Packet::ONE_HEAD ? 0 : L::HEADS == 64 ? 8 : 1;
  static_assert(Places::stage(MOST_WORKERS) + MOST_WORKERS * BYTES <= ROOM, "too little room for parts");
  // Quotients of numbers as small as these are far enough from the next whole one.
  auto quotient = [](int number, int by) {
    return static_cast<int>(__fdividef(number + 0.5f, static_cast<float>(by)));
  };
  const int begin = quotient(ALL * share, cut.shares()), end = quotient(ALL * (share + 1), cut.shares());
  const u32 stage = scratch + Places::stage(cut.count), barrier = scratch + Places::BARRIER;
  const int at_once = quotient((ROOM - Places::stage(cut.count)) / BYTES, cut.count);
  Row row;
  row.token = cut.token, row.tile = cut.tile, row.part = 0;
  Target to = target_of<L>(p, row);
  to.whole = true;
#pragma unroll 1
  for (int first = begin; first < end; first += at_once) {
    const int units = min(at_once, end - first);
    if (first > begin) named_barrier<BARRIER, 256>();  // parts have been read
    if (warp == 0) {
      if (lane == 0) mbarrier_arrive_expect(barrier, cut.count * units * BYTES);
      converge();
      fence_async_global();
#pragma unroll 1
      for (int part = lane; part < cut.count; part += 32)
        bulk_copy(stage + part * (units * BYTES), part_of_warp<L>(p, cut.part(p, part), cut.tile, 0) + first * 32,
                  units * BYTES, barrier);
      converge();
    }
    if (first == begin) weigh_cut<L, BARRIER>(p, cut, scratch, end == ALL, warp * 32 + lane);
    mbarrier_wait(barrier, parity);
    parity ^= 1;
    // Where there are fewer units than warps, a team of these has one, and each of it some of the parts.
    const int team = units > 4 ? 1 : units > 2 ? 2 : units > 1 ? 4 : 8, member = warp % team;
    const u32 teams = scratch + Places::TEAMS + warp * (4 * U::VALUES * 32) + lane * 16;
    auto head_of = [&](int own) {
      const int unit = first + own;
      return head_of_packet<L>(unit % U::OF_A_WARP / U::OF_A_PACKET, unit / U::OF_A_WARP, lane);
    };
    auto end_unit = [&](int own, float (&sum)[U::VALUES]) {
      const int unit = first + own, of_warp = unit % U::OF_A_WARP;
      const u32 factor = scratch + Places::WHOLE + head_of(own) * 4;
      const float one = load_shared_float(factor), other = load_shared_float(factor + SECOND * 4);
#pragma unroll
      for (int i = 0; i < U::VALUES; ++i) sum[i] *= is_second<L>(i) ? other : one;
      write_unit<L>(to, sum, of_warp / U::OF_A_PACKET, of_warp % U::OF_A_PACKET, unit / U::OF_A_WARP, lane);
    };
#pragma unroll 1
    for (int own = warp / team; own < units; own += 8) {
      u32 from = stage + (member * units + own) * BYTES + lane * 16,
          weights = scratch + Places::WEIGHTS + (member * L::HEADS + head_of(own)) * 4;
      float sum[U::VALUES] = {};
#pragma unroll 1
      for (int part = member; part < cut.count; part += team) {
        add_unit<L>(sum, load_shared_16(from), load_shared_float(weights), load_shared_float(weights + SECOND * 4));
        from += team * units * BYTES, weights += team * (L::HEADS * 4);
      }
      if (team == 1) {
        end_unit(own, sum);
        continue;
      }
#pragma unroll
      for (int i = 0; i < U::VALUES; i += 4)
        store_shared_16(teams + i * 128, __float_as_uint(sum[i]), __float_as_uint(sum[i + 1]),
                        __float_as_uint(sum[i + 2]), __float_as_uint(sum[i + 3]));
    }
    if (team == 1) continue;
    named_barrier<BARRIER, 256>();
    if (member == 0 && warp / team < units) {
      float sum[U::VALUES] = {};
#pragma unroll 1
      for (int other = 0; other < team; ++other)
#pragma unroll
        for (int i = 0; i < U::VALUES; i += 4) {
          const uint4 more = load_shared_16(teams + other * (4 * U::VALUES * 32) + i * 128);
          sum[i] += __uint_as_float(more.x), sum[i + 1] += __uint_as_float(more.y);
          sum[i + 2] += __uint_as_float(more.z), sum[i + 3] += __uint_as_float(more.w);
        }
      end_unit(warp / team, sum);
    }
    converge();
  }
}

// The end of a worker's CTA, by the 256 threads that wrote its results. `scratch`, ROOM bytes, is shared memory that nobody
// but these threads uses any more. A warp each asks for the tokens at both ends of the interval, at the same time.
template <class L, int BARRIER, int ROOM>
DEVICE void add_up_cuts(const Params& p, u32 shared, u32 scratch, int thread) {
  using Places = SumPlaces<L>;
  const Interval interval = load_interval(shared + L::INTERVAL);
  if (interval.turn == EVERY_WORKERS_TOKEN) return;  // whole tokens
  const int4 sharers = sharers_of(p, interval);
  const int warp = uniform(thread >> 5), lane = thread & 31;
  // A token whose parts the first sharer has added up already is only left.
  const bool done = interval.end == NO_END;
  const int counts[2] = {uniform(sharers.y), done ? 0 : uniform(sharers.w)},
            firsts[2] = {uniform(sharers.x), uniform(sharers.z)};
  if (sharers.y + sharers.w == 0) return;
  auto counters_of = [&](int worker) { return counters_of_sharers(p, worker, interval.tile); };
  fence_async_shared();           // what this thread has stored: copies come to the same place
  named_barrier<BARRIER, 256>();  // nobody needs what is in scratch
  if (thread == 0) mbarrier_init(scratch + Places::BARRIER, 1), fence_barrier_init();
  if (lane == 0 && warp < 2) {
    const int count = warp ? counts[1] : counts[0], first = warp ? firsts[1] : firsts[0];
    int given_up = NOT_ALL_HERE;
    if (count) given_up = await_sharers(counters_of(first), count, counters_of(interval.worker), interval.worker - first);
    store_shared_4(scratch + Places::GIVEN_UP + warp * 4, given_up);
  }
  converge();
  named_barrier<BARRIER, 256>();
  const uint2 words = load_shared_8(scratch + Places::GIVEN_UP);
  u32 parity = 0;
  bool used = false;  // places in scratch
#pragma unroll 1
  for (int which = 0; which < 2; ++which) {
    const int count = which ? counts[1] : counts[0], first = which ? firsts[1] : firsts[0],
              given_up = uniform(which ? words.y : words.x), own = interval.worker - first, shares = count - 1;
    if (count == 0) continue;
    const CutToken cut{which ? interval.last_token : interval.token, interval.tile, first, count};
    int next = 0;
#pragma unroll 1
    for (int share = own; given_up >= 0;) {
      if (share < shares) {
        if (used) fence_async_shared(), named_barrier<BARRIER, 256>();
        used = true;
        add_up<L, BARRIER, ROOM>(p, cut, share, scratch, parity, warp, lane);
      }
      if (given_up == 0) break;
      if (thread == 0) {  // what others have given up
        while (next < shares && (next == own || !(load_acquire(&counters_of(first + next)->given_up) & bit_of_share(next))))
          ++next;
        store_shared_4(scratch + Places::NEXT, next);
      }
      converge();
      named_barrier<BARRIER, 256>();
      share = uniform(load_shared_4(scratch + Places::NEXT)), next = share + 1;
      if (share == shares) break;
    }
  }
  const int left = warp & 1 ? uniform(sharers.w) : counts[0];
  if (warp >= 6 && lane == 0 && left) {  // one of the last warps for each token
    SharersCounters* const counters = counters_of(warp & 1 ? firsts[1] : firsts[0]);
    if (done && warp & 1) fetch_add(&counters->here, ones(1));  // before it leaves
    leave_sharers(counters, left, p.head_tiles);
  }
}
