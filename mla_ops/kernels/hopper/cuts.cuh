// The parts of tokens that intervals of work have cut (`balance.cuh`), into those tokens' results.
//
// A CTA that has left a part counts itself among the token's sharers, and goes on. When it has done its interval, it looks
// whether all are there. While they are, it takes one share after the other of the token's heads and adds up all parts of
// them. It waits for none long, since not all CTAs need run at one time: who loses patience leaves, and who comes last
// finds all parts there and goes on until no share is left. Parts are added up in their order, whoever does it.
#pragma once

#include "meeting.cuh"
#include "merge.cuh"

constexpr int MAX_SHARERS = 160;  // a token has no more

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
  named_barrier<BARRIER, 256>();
  const Interval interval = load_interval(shared + L::INTERVAL);
  if (thread == 0) {
    const int4 sharers = sharers_of(p, interval);
    fetch_add(counters_of_sharers(p, part < p.workers ? sharers.x : sharers.z, interval.tile), 1);
  }
  converge();
}

// A cut token's parts, and what of its tile's heads one CTA adds up.
struct CutToken {
  int token, tile, first_worker, count;

  // The first part is that of the worker in which the token begins; the others were begun before.
  DEVICE i64 row_of(const Params& p, int part, int head) const {
    return static_cast<i64>(part == 0 ? p.workers + first_worker : first_worker + part) * p.num_heads + head;
  }
};

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// Four float4 of a lane: four dims of each 128. What there is not is 0.
DEVICE void load_row(float4 (&v)[4], bool there, const float* row) {
#pragma unroll
  for (int q = 0; q < 4; ++q) v[q] = load_float4_if(there, row + q * 128);
}

// A row without weight is not added: its memory may hold anything.
DEVICE void add_row(float4 (&sum)[4], const float4 (&v)[4], float weight) {
  const bool counts = weight != 0.f;
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    sum[q].x += counts ? v[q].x * weight : 0.f, sum[q].y += counts ? v[q].y * weight : 0.f;
    sum[q].z += counts ? v[q].z * weight : 0.f, sum[q].w += counts ? v[q].w * weight : 0.f;
  }
}

DEVICE void write_head(const Params& p, int token, int head, const float4 (&sum)[4], float top, float total, int lane) {
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

// Heads [begin, end) of a token of two parts, by eight warps, AT_ONCE each.
template <int AT_ONCE>
DEVICE void add_up_two(const Params& p, const Parts& parts, const CutToken& cut, int begin, int end, int warp,
                       int lane) {
#pragma unroll 1
  for (int own = begin + warp * AT_ONCE; own < end; own += 8 * AT_ONCE) {
    float4 v[AT_ONCE][2][4];
    float lse[AT_ONCE][2];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const i64 row = cut.row_of(p, part, min(own + i, end - 1));
        load_row(v[i][part], own + i < end, parts.out + row * 512 + lane * 4);
        lse[i][part] = load_float(parts.lse + row);
      }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      float top = fmaxf(lse[i][0], lse[i][1]);
      if (top == -INFINITY) top = 0.f;
      const float a = exp2_approx((lse[i][0] - top) * LOG2_E), b = exp2_approx((lse[i][1] - top) * LOG2_E);
      float4 sum[4] = {};
      add_row(sum, v[i][0], a), add_row(sum, v[i][1], b);
      if (own + i < end) write_head(p, cut.token, own + i, sum, top, a + b, lane);
    }
  }
}

// The same of any number of parts: one warp a head, or a team of them, if there are fewer heads, each with some of the
// parts, AT_ONCE at a time.
template <int BARRIER, int AT_ONCE>
DEVICE void add_up_many(const Params& p, const Parts& parts, const CutToken& cut, int begin, int end, int each,
                        u32 scratch, int warp, int lane) {
  constexpr int OF_A_LANE = MAX_SHARERS / 32;
  const int team = each > 4 ? 1 : each > 2 ? 2 : each > 1 ? 4 : 8, member = warp % team;
#pragma unroll 1
  for (int from_head = begin; from_head < end; from_head += 8 / team) {
    const int own = from_head + warp / team, head = min(own, end - 1);
    float4 v[AT_ONCE][4], sum[4] = {};
    auto load_parts = [&](int from) {
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i)
        load_row(v[i], from + i < cut.count, parts.out + cut.row_of(p, from + i, head) * 512 + lane * 4);
    };
    load_parts(member * AT_ONCE);  // before it is known what they count
    float weights[OF_A_LANE], top = -INFINITY, total = 0.f;
#pragma unroll
    for (int k = 0; k < OF_A_LANE; ++k) {
      const int part = k * 32 + lane;
      weights[k] = -INFINITY;
      if (k * 32 < cut.count) weights[k] = load_float_if(part < cut.count, parts.lse + cut.row_of(p, part, head));
    }
#pragma unroll
    for (int k = 0; k < OF_A_LANE; ++k) top = fmaxf(top, weights[k]);
#pragma unroll
    for (int step = 16; step; step >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    if (top == -INFINITY) top = 0.f;
#pragma unroll
    for (int k = 0; k < OF_A_LANE; ++k) {
      weights[k] = exp2_approx((weights[k] - top) * LOG2_E);
      total += weights[k];
    }
#pragma unroll
    for (int step = 16; step; step >>= 1) total += __shfl_xor_sync(~0u, total, step);
#pragma unroll 1
    for (int from = member * AT_ONCE;;) {
      float here = weights[0];  // 32 parts' one a lane, of which AT_ONCE neighbours are these
#pragma unroll
      for (int k = 1; k < OF_A_LANE; ++k) here = select(k == from / 32, weights[k], here);
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) add_row(sum, v[i], __shfl_sync(~0u, here, (from + i) % 32));
      from += team * AT_ONCE;
      if (from >= cut.count) break;
      load_parts(from);
    }
    if (team > 1) {
      const u32 here = scratch + lane * 16;
      named_barrier<BARRIER, 256>();  // all have read what was there before
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
    if (member == 0 && own < end) write_head(p, cut.token, head, sum, top, total, lane);
  }
}

// The end of a worker's CTA, by the 256 threads that wrote its results. `scratch`, 16 KB and 8 bytes, is shared memory,
// and nobody but these threads uses it any more; AT_ONCE: rows that a lane has registers for. A warp each asks for the
// tokens at both ends of the interval, at the same time.
template <class L, int BARRIER, int AT_ONCE>
DEVICE void add_up_cuts(const Params& p, u32 shared, u32 scratch, int thread) {
  const Interval interval = load_interval(shared + L::INTERVAL);
  const int4 sharers = sharers_of(p, interval);
  const int warp = uniform(thread >> 5), lane = thread & 31;
  const int counts[2] = {uniform(sharers.y), uniform(sharers.w)};
  if (counts[0] + counts[1] == 0) return;
  const Parts parts = parts_of(p);
  const int own_count = warp == 0 ? counts[0] : warp == 1 ? counts[1] : 0;
  const bool asks = lane == 0 && own_count > 0;
  u32* const counters = counters_of_sharers(p, warp == 0 ? sharers.x : sharers.z, interval.tile);
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
      const int first = cut.tile * L::HEADS, heads = min(L::HEADS, p.num_heads - first),
                each = (heads + count - 1) / count, end = first + min((share + 1) * each, heads);
      if (count == 2)
        add_up_two<AT_ONCE / 2>(p, parts, cut, first + share * each, end, warp, lane);
      else
        add_up_many<BARRIER, AT_ONCE>(p, parts, cut, first + share * each, end, each, scratch, warp, lane);
    }
  }
  if (asks) leave_sharers(counters, own_count);
  converge();
}
