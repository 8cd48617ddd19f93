// The parts of tokens that intervals of work have cut (`balance.cuh`), into those tokens' results.
//
// A CTA that has left a part counts itself among the token's sharers, and goes on. When it has done its interval, it looks
// whether all are there. While they are, it takes one share after the other of the token's heads and adds up all parts of
// them. It waits for none long, since not all CTAs need run at one time: who loses patience leaves, and who comes last
// finds all parts there and goes on until no share is left. Parts are added up in their order, whoever does it.
#pragma once

#include "meeting.cuh"
#include "merge.cuh"

// Those of a token.
DEVICE u32* counters_of_sharers(const Params& p, int first_worker, int tile) {
  return p.counters + (first_worker * p.head_tiles + tile) * SHARERS_COUNTERS;
}

DEVICE int4 sharers_of(const Params& p, const Interval& interval) {
  return parts_of(p).sharers[interval.worker * p.head_tiles + interval.tile];
}

// For the 256 threads that have written a part and what its lse comes from.
template <class L, int BARRIER>
DEVICE void tell_sharers(const Params& p, u32 shared, int part, int thread) {
  const Interval interval = load_interval(shared + L::INTERVAL);
  named_barrier<BARRIER, 256>();
  if (thread == 0) {
    const int4 sharers = sharers_of(p, interval);
    fetch_add(counters_of_sharers(p, part < p.workers ? sharers.x : sharers.z, interval.tile), 1);
  }
  converge();
}

// One of `count` shares of a token's heads, by eight warps: one warp a head, or a team of them, if there are fewer heads,
// each with some of the parts. A lane has four dims of each 128.
template <class L, int BARRIER, int AT_ONCE>
DEVICE void add_up_share(const Params& p, int token, int tile, int first, int count, int share, u32 scratch, int warp,
                         int lane) {
  constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
  const Parts parts = parts_of(p);
  const int heads = min(L::HEADS, p.num_heads - tile * L::HEADS), each = (heads + count - 1) / count;
  const int team = each > 4 ? 1 : each > 2 ? 2 : each > 1 ? 4 : 8, member = warp % team;
  const int end = min((share + 1) * each, heads);
  // The first part is that of the worker in which the token begins; the others were begun before.
  auto place_of = [&](int part, int head) {
    return static_cast<i64>(part == 0 ? p.workers + first : first + part) * p.num_heads + head;
  };
#pragma unroll 1
  for (int from_head = share * each; from_head < end; from_head += 8 / team) {
    const int own = from_head + warp / team, head = tile * L::HEADS + min(own, end - 1);
    auto lse_of = [&](int part) { return load_float(parts.lse + place_of(part, head)); };
    float top = -INFINITY, total = 0.f;
#pragma unroll 1
    for (int part = lane; part < count; part += 32) top = fmaxf(top, lse_of(part));
    converge();
#pragma unroll
    for (int step = 16; step; step >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    if (top == -INFINITY) top = 0.f;
#pragma unroll 1
    for (int part = lane; part < count; part += 32) total += exp2_approx((lse_of(part) - top) * LOG2_E);
    converge();
#pragma unroll
    for (int step = 16; step; step >>= 1) total += __shfl_xor_sync(~0u, total, step);
    float4 sum[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) sum[q] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
    for (int from = member * AT_ONCE; from < count; from += team * AT_ONCE) {
      float4 v[AT_ONCE][4];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const float* row = parts.out + place_of(from + i, head) * 512 + lane * 4;
#pragma unroll
        for (int q = 0; q < 4; ++q) v[i][q] = load_float4_if(from + i < count, row + q * 128);
      }
      const int mine = from + lane % AT_ONCE;
      const float weight_here = mine < count ? exp2_approx((lse_of(mine) - top) * LOG2_E) : 0.f;
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const float weight = __shfl_sync(~0u, weight_here, i);
        const bool counts = weight != 0.f;  // what has no weight may be anything
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          sum[q].x += counts ? v[i][q].x * weight : 0.f, sum[q].y += counts ? v[i][q].y * weight : 0.f;
          sum[q].z += counts ? v[i][q].z * weight : 0.f, sum[q].w += counts ? v[i][q].w * weight : 0.f;
        }
      }
    }
    if (team > 1) {
      const u32 here = scratch + lane * 16;
#pragma unroll
      for (int q = 0; q < 4; ++q)
        store_shared_16(here + (warp * 4 + q) * 512, __float_as_uint(sum[q].x), __float_as_uint(sum[q].y),
                        __float_as_uint(sum[q].z), __float_as_uint(sum[q].w));
      named_barrier<BARRIER, 256>();
#pragma unroll 1
      for (int other = warp + 1; member == 0 && other < warp + team; ++other)
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const uint4 more = load_shared_16(here + (other * 4 + q) * 512);
          sum[q].x += __uint_as_float(more.x), sum[q].y += __uint_as_float(more.y);
          sum[q].z += __uint_as_float(more.z), sum[q].w += __uint_as_float(more.w);
        }
    }
    if (member > 0 || own >= end) continue;
    const float lse = total == 0.f ? -INFINITY : top + log2_approx(total) * LN_2;
    float factor = total == 0.f ? 0.f : __fdividef(1.f, total);
    if (p.attn_sink && total != 0.f)
      factor = __fdividef(factor, 1.f + exp2_approx((__ldg(p.attn_sink + head) - lse) * LOG2_E));
    u16* const out = p.out + token * p.out_token_stride + head * p.out_head_stride + lane * 4;
#pragma unroll
    for (int q = 0; q < 4; ++q)
      store_8_if(true, out + q * 128, pack_bfloat16(sum[q].x * factor, sum[q].y * factor),
                 pack_bfloat16(sum[q].z * factor, sum[q].w * factor));
    if (lane == 0) p.lse[token * p.lse_token_stride + head * p.lse_head_stride] = lse;
  }
}

// The end of a worker's CTA, by the 256 threads that wrote its results. `word` and `scratch`, 16 KB, are places in shared
// memory that nobody but these threads uses any more; AT_ONCE: parts that a lane has registers for.
template <class L, int BARRIER, int AT_ONCE>
DEVICE void add_up_cuts(const Params& p, u32 shared, u32 word, u32 scratch, int thread) {
  const Interval interval = load_interval(shared + L::INTERVAL);
  const int4 sharers = sharers_of(p, interval);
  const int warp = uniform(thread >> 5), lane = thread & 31;
#pragma unroll 1
  for (int which = 0; which < 2; ++which) {
    const int first = uniform(which ? sharers.z : sharers.x), count = uniform(which ? sharers.w : sharers.y);
    if (count == 0) continue;
    u32* const counters = counters_of_sharers(p, first, interval.tile);
    const bool complete = thread == 0 && await_sharers(counters, count);
    converge();
#pragma unroll 1
    for (;;) {
      named_barrier<BARRIER, 256>();  // the word has been read, and what is in scratch
      if (thread == 0) store_shared_4(word, complete ? take_share(counters) : count);
      converge();
      named_barrier<BARRIER, 256>();
      const int share = uniform(load_shared_4(word));
      if (share >= count) break;
      add_up_share<L, BARRIER, AT_ONCE>(p, which ? interval.last_token : interval.token, interval.tile, first, count,
                                        share, scratch, warp, lane);
    }
    if (thread == 0) leave_sharers(counters, count);
    converge();
  }
}
