// The end of a row: partial results of a cluster into one.
//
// Every CTA sends each packet of its accumulators out of registers to the CTA that adds it up, and its heads' sums and
// references to all. A CTA's barriers count what it gets, so that it leaves when nothing more is on its way to it.
#pragma once

#include "layout.cuh"

// The parts of all tokens one after the other.
DEVICE i64 result_row(const Params& p, const Row& row) { return row.part * p.num_tokens + row.token; }

DEVICE u16* out_row(const Params& p, const Row& row, int global_head) {
  return p.out + row.token * p.out_token_stride + global_head * p.out_head_stride;
}

// Of the cluster, the CTA that has a part of the row's keys.
DEVICE u32 rank_of(const Row&, int part) { return part; }

// Of the share of packets that has a lane's number: its first one, and the shared memory of the CTA that adds it up.
struct Shares {
  int first;
  u32 peer;
  int own;  // the number of this CTA's
};

template <class L>
DEVICE Shares shares_of(const Row& row, u32 shared, int lane) {
  const int part = min(lane, row.splits - 1);
  Shares shares;
  shares.first = static_cast<u32>(Packets<L::HEADS>::COUNT * lane) / static_cast<u32>(row.splits);
  shares.own = row.rank;
  hold(shares.own);
  shares.peer = part == shares.own ? shared : peer_address(shared, rank_of(row, part));
  hold(shares.first), hold(shares.peer);
  return shares;
}

// Once this warp needs nothing any more that lies where states and packets go.
DEVICE void open_to_peers(const Row& row) {
  if (row.splits == 1) return;
  fence_async_shared();
  cluster_arrive();
}

DEVICE void await_peers(const Row& row) {
  if (row.splits > 1) cluster_wait();
}

// For warps that have done their part; one of those that gather tells how much the others will get.
template <class L>
DEVICE void stand_by(const Row& row, u32 shared, bool gathers, int thread) {
  using P = Packets<L::HEADS>;
  if (row.splits == 1) return;
  if (gathers && thread == 0) {
    const int first = P::COUNT * row.rank / row.splits, last = P::COUNT * (row.rank + 1) / row.splits;
    mbarrier_arrive_expect(shared + L::STATES_FULL, row.splits * L::HEADS * 8);
    mbarrier_arrive_expect(shared + L::PACKETS_FULL, (row.splits - 1) * (last - first) * P::BYTES);
  }
  __syncwarp();
  cluster_arrive();
  cluster_wait();
}

// The sum and the reference of a head, to one CTA of the cluster.
template <class L>
DEVICE void send_state(const Row& row, u32 shared, int part, int head, float sum, float reference) {
  const u32 place = L::End::STATES + (row.rank * L::HEADS + head) * 8;
  if (row.splits == 1) {
    store_shared_float2(shared + place, sum, reference);
  } else {
    const u32 peer = peer_address(shared, rank_of(row, part));
    send_float2(peer + place, peer + L::STATES_FULL, sum, reference);
  }
}

// A quarter of a warp's packets. Lane n knows what to add to a place in share n.
template <class L, int QUARTER, class Accumulator>
DEVICE void send_quarter(const Row& row, const Shares& shares, u32 places, u32 to, int first, Accumulator o) {
  using P = Packets<L::HEADS>;
#pragma unroll
  for (int i = 0; i < P::OF_A_WARP / 4; ++i) {
    const int u = QUARTER * (P::OF_A_WARP / 4) + i, share = ((first + u + 1) * row.splits - 1) / P::COUNT;
    const u32 place = __shfl_sync(~0u, places, share) + to + (first + u) * row.splits * P::BYTES,
              barrier = __shfl_sync(~0u, shares.peer, share) + L::PACKETS_FULL;
#pragma unroll
    for (int q = 0; q < P::QUADS; ++q) {
      const int e = (u * P::QUADS + q) * 4;
      send_float4_unless(share == shares.own, place + q * 512, barrier, o(e), o(e + 1), o(e + 2), o(e + 3));
    }
  }
}

// A warp's accumulators. CTAs begin with different quarters, so that not all send to the same ones at a time.
template <class L, class Accumulator>
DEVICE void send_packets(const Row& row, const Shares& shares, int warp, int lane, Accumulator o) {
  using P = Packets<L::HEADS>;
  const u32 places = shares.peer + L::PACKETS + (shares.own - shares.first * row.splits) * P::BYTES;
  const int begin = shares.own & 3;
#pragma unroll 1
  for (int k = begin; k < begin + 4; ++k) {
    const int first = opaque(warp * P::OF_A_WARP);  // else places of all packets are computed ahead, and kept
    if ((k & 3) == 0) send_quarter<L, 0>(row, shares, places, lane * 16, first, o);
    if ((k & 3) == 1) send_quarter<L, 1>(row, shares, places, lane * 16, first, o);
    if ((k & 3) == 2) send_quarter<L, 2>(row, shares, places, lane * 16, first, o);
    if ((k & 3) == 3) send_quarter<L, 3>(row, shares, places, lane * 16, first, o);
  }
}

// What each part counts in the result, and the lse: by four warps, half a warp a head, a lane a part, BATCH heads at a
// time, which have their latencies in common.
template <class L, int BATCH = L::HEADS == 16 ? 2 : 4>
DEVICE void weigh_parts(const Params& p, const Row& row, u32 shared, int warp, int lane) {
  using P = Packets<L::HEADS>;
  const int part = lane & 15, first = P::COUNT * row.rank / row.splits, last = P::COUNT * (row.rank + 1) / row.splits;
  // Whether this CTA adds up a packet of that warp: tiles of 64 heads have 16 in warps n and n + 4.
  auto adds_up = [&](int warp_of) { return warp_of * P::OF_A_WARP < last && (warp_of + 1) * P::OF_A_WARP > first; };
  if (row.splits == 1) named_barrier<SCORE_BARRIER, 128>();
#pragma unroll 1
  for (int begin = warp * 2 + lane / 16; begin < L::HEADS; begin += 8 * BATCH) {
    if (L::HEADS == 64) {
      bool needed = false;
#pragma unroll
      for (int k = 0; k < BATCH; k += 2) {
        const int group = begin / 16 + k / 2;
        needed |= adds_up(group) || adds_up(group + 4);
      }
      if (!needed) continue;
    }
    const int first_head = row.tile * L::HEADS + begin;
    float sink[BATCH], reference[BATCH], factor[BATCH], total[BATCH];
    float2 state[BATCH];
#pragma unroll
    for (int k = 0; k < BATCH; ++k)
      sink[k] = p.attn_sink && first_head + 8 * k < p.num_heads ? __ldg(p.attn_sink + first_head + 8 * k) : -INFINITY;
    if (row.splits > 1) mbarrier_wait_cluster(shared + L::STATES_FULL, 0);
#pragma unroll
    for (int k = 0; k < BATCH; ++k) {
      state[k] = make_float2(0.f, NO_SCORE_YET);
      if (part < row.splits)
        state[k] = load_shared_float2(shared + L::End::STATES + (part * L::HEADS + begin + 8 * k) * 8);
      reference[k] = state[k].y;
    }
#pragma unroll
    for (int step = MAX_SPLITS / 2; step; step >>= 1)
#pragma unroll
      for (int k = 0; k < BATCH; ++k) reference[k] = fmaxf(reference[k], __shfl_xor_sync(~0u, reference[k], step));
#pragma unroll
    for (int k = 0; k < BATCH; ++k) {
      factor[k] = state[k].x == 0.f ? 0.f : exp2_approx(state[k].y - reference[k]);
      total[k] = state[k].x == 0.f ? 0.f : state[k].x * factor[k];
    }
#pragma unroll
    for (int step = MAX_SPLITS / 2; step; step >>= 1)
#pragma unroll
      for (int k = 0; k < BATCH; ++k) total[k] += __shfl_xor_sync(~0u, total[k], step);
#pragma unroll
    for (int k = 0; k < BATCH; ++k) {
      const int head = begin + 8 * k, global_head = first_head + 8 * k;
      const float lse = total[k] == 0.f ? -INFINITY : (reference[k] + log2f(total[k])) * 0.6931471805599453f;
      float weight = __fdividef(1.f / L::FACTOR, total[k]);
      if (sink[k] != -INFINITY) weight = __fdividef(weight, 1.f + exp2_approx((sink[k] - lse) * 1.4426950408889634f));
      if (factor[k] != 0.f) factor[k] *= weight;
      store_shared_float(shared + L::End::FACTORS + head * L::End::FACTORS_PITCH + part * 4, factor[k]);
      const bool reports = L::HEADS == 64 ? head / 16 * P::OF_A_WARP >= first && head / 16 * P::OF_A_WARP < last
                                          : head * row.splits / L::HEADS == row.rank;
      if (part == 0 && global_head < p.num_heads && reports)
        p.lse[result_row(p, row) * p.lse_token_stride + global_head * p.lse_head_stride] = lse;
    }
  }
}

// Dims stand permuted in the values' chunks of 64 (`QueryPlaces`): a lane's accumulators of a chunk are 16
// neighbours where dims are columns; where they are rows, row g of a warp is this dim, and row g + 8 the second next.
DEVICE int dim_of_row(int warp, int g) { return 16 * (g >> 1) + 4 * warp + (g & 1); }

// Of two values in this lane and in the one that differs in the bit MASK: the first ones if that bit is 0 here, else
// the second ones, in the order of lanes.
template <int MASK>
DEVICE float2 trade(float first, float second, int lane) {
  const bool upper = lane & MASK;
  const float other = __shfl_xor_sync(~0u, upper ? first : second, MASK);
  return upper ? make_float2(other, second) : make_float2(first, other);
}

// Four neighbouring dims of a head.
struct Dims {
  int head, dim;
  float4 v;
};

// What a lane writes of a packet's sums, N of QUADS.
template <class L, int N>
DEVICE Dims dims_of(const float (&v)[Packets<L::HEADS>::QUADS * 4], int packet, int lane) {
  using P = Packets<L::HEADS>;
  const int g = lane >> 2, t = lane & 3;
  const int warp = packet / P::OF_A_WARP & 3, quad = packet % P::OF_A_WARP * P::QUADS;
  Dims dims;
  dims.dim = packet / (4 * P::OF_A_WARP) * 256;
  if constexpr (L::HEADS == 64 && L::PERMUTED) {
    dims.head = warp * 16 + g + N * 8, dims.dim += quad / 8 * 64 + 16 * t + quad % 8 * 2;
    dims.v = make_float4(v[2 * N], v[2 * N + 1], v[2 * N + 4], v[2 * N + 5]);
  } else if constexpr (L::HEADS == 64) {
    const float2 a = trade<1>(v[4 * N], v[4 * N + 2], lane), b = trade<1>(v[4 * N + 1], v[4 * N + 3], lane);
    dims.head = warp * 16 + g + (t & 1) * 8, dims.dim += (quad + N) * 8 + (t & 2) * 2;
    dims.v = make_float4(a.x, b.x, a.y, b.y);
  } else {
    const float2 a = trade<4>(v[0], v[1], lane), b = trade<4>(v[2], v[3], lane);
    dims.head = quad % (L::HEADS / 8) * 8 + 2 * t + (g & 1), dims.dim += quad / (L::HEADS / 8) * 64;
    if constexpr (L::PERMUTED) {
      dims.dim += dim_of_row(warp, g & 6);
      dims.v = make_float4(a.x, a.y, b.x, b.y);
    } else {
      const float2 c = trade<8>(a.x, b.x, lane), d = trade<8>(a.y, b.y, lane);
      dims.dim += warp * 16 + (g & 4) + (g & 2) * 4;
      dims.v = make_float4(c.x, d.x, c.y, d.y);
    }
  }
  return dims;
}

template <class L>
DEVICE void write_dims(const Params& p, const Row& row, const Dims& dims) {
  const int global_head = row.tile * L::HEADS + dims.head;
  if (global_head >= p.num_heads) return;
  const i64 place = result_row(p, row) * p.out_token_stride + global_head * p.out_head_stride + dims.dim;
  const float4& v = dims.v;
  if (p.parts > 1)
    reinterpret_cast<float4*>(p.out)[place / 4] = v;
  else
    *reinterpret_cast<uint2*>(p.out + place) = make_uint2(pack_bfloat16(v.x, v.y), pack_bfloat16(v.z, v.w));
}

// This CTA's share of the result: adds up the parts of a packet, always in the same order.
template <class L, int WARPS = 12>
DEVICE void finish(const Params& p, const Row& row, u32 shared, const Shares& shares, int warp, int lane) {
  using P = Packets<L::HEADS>;
  constexpr bool HEADS_BY_DIMS = L::HEADS == 64;
  constexpr int BATCH = 8 / P::QUADS;
  // This CTA's factors, and those packets that did not have to go far.
  __syncwarp();
  warp_arrive(shared + L::OWN_FULL, lane);
  mbarrier_wait(shared + L::OWN_FULL, 0);
  if (row.splits > 1) mbarrier_wait_cluster(shared + L::PACKETS_FULL, 0);
  const int g = lane >> 2, t = lane & 3;
  const int first = __shfl_sync(~0u, shares.first, shares.own), last = __shfl_sync(~0u, shares.first, shares.own + 1);
  for (int packet = first + warp; packet < last; packet += WARPS) {
    const int head = HEADS_BY_DIMS ? (packet / P::OF_A_WARP & 3) * 16 + g : packet % (L::HEADS / 8) * 8 + 2 * t;
    const u32 from = shared + L::PACKETS + (packet - first) * row.splits * P::BYTES + lane * 16,
              factors = shared + L::End::FACTORS + head * L::End::FACTORS_PITCH;
    float sums[P::QUADS * 4];
#pragma unroll
    for (int e = 0; e < P::QUADS * 4; ++e) sums[e] = 0.f;
    for (int part = 0; part < row.splits; part += BATCH) {
      float4 v[BATCH][P::QUADS];
      uint4 factor[2][BATCH / 4];
#pragma unroll
      for (int k = 0; k < BATCH; ++k)
#pragma unroll
        for (int i = 0; i < P::QUADS; ++i)
          v[k][i] = load_shared_float4_if(part + k < row.splits, from + (part + k) * P::BYTES + i * 512);
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int k = 0; k < BATCH; k += 4)
          factor[i][k / 4] =
              load_shared_16(factors + (part + k) * 4 + i * ((HEADS_BY_DIMS ? 8 : 1) * L::End::FACTORS_PITCH));
#pragma unroll
      for (int k = 0; k < BATCH; ++k) {
        const float of[2] = {__uint_as_float(word(factor[0][k / 4], k % 4)),
                             __uint_as_float(word(factor[1][k / 4], k % 4))};
#pragma unroll
        for (int i = 0; i < P::QUADS; ++i) {
          float* sum = sums + i * 4;
          sum[0] = fmaf(v[k][i].x, of[0], sum[0]), sum[1] = fmaf(v[k][i].y, of[!HEADS_BY_DIMS], sum[1]);
          sum[2] = fmaf(v[k][i].z, of[HEADS_BY_DIMS], sum[2]), sum[3] = fmaf(v[k][i].w, of[1], sum[3]);
        }
      }
    }
    write_dims<L>(p, row, dims_of<L, 0>(sums, packet, lane));
    if constexpr (P::QUADS == 2) write_dims<L>(p, row, dims_of<L, 1>(sums, packet, lane));
  }
}
