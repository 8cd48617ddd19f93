// The end of a row: partial results of a cluster into one.
//
// Every CTA sends each packet of its accumulators out of registers to the CTA that adds it up, and its heads' sums and
// references to all. A CTA's barriers count what it gets, so that it leaves when nothing more is on its way to it.
#pragma once

#include "softmax.cuh"

// The parts of all tokens one after the other.
DEVICE i64 result_row(const Params& p, const Row& row) { return row.part * p.num_tokens + row.token; }

DEVICE u16* out_row(const Params& p, const Row& row, int global_head) {
  return p.out + row.token * p.out_token_stride + global_head * p.out_head_stride;
}

// How many packets a CTA adds up.
template <class L>
DEVICE int packets_of(const Params& p, int rank) {
  return divide(L::Packet::COUNT - 1 - rank, p.of_splits) + 1;
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
DEVICE void stand_by(const Params& p, const Row& row, u32 shared, bool gathers, int thread) {
  if (row.splits == 1) return;
  if (gathers && thread == 0) {
    const int packets = (row.splits - 1) * packets_of<L>(p, row.rank);
    mbarrier_arrive_expect(shared + L::STATES_FULL, row.splits * L::HEADS * 8);
    mbarrier_arrive_expect(shared + L::PACKETS_FULL, packets * L::Packet::BYTES);
  }
  __syncwarp();
  cluster_arrive();
  cluster_wait();
}

// The sum and the reference of a head, to one CTA of the cluster. Sums below 0 say that packets are bfloat16.
template <class L>
DEVICE void send_state(const Row& row, u32 shared, int part, int head, float sum, float reference) {
  const u32 place = L::End::STATES + (row.rank * L::HEADS + head) * 8;
  if (row.splits == 1) {
    store_shared_float2(shared + place, sum, reference);
  } else {
    const u32 peer = peer_address(shared, part);
    send_float2(peer + place, peer + L::STATES_FULL, sum, reference);
  }
}

// A warp's packets, each to the CTA that adds it up: `word_of(u, w)` is word w of a lane's of the u-th. Instructions
// here run once, and come from memory.
template <class L, class Word>
DEVICE void send_packets(const Params& p, const Row& row, u32 shared, int warp, int lane, Word word_of) {
  using P = typename L::Packet;
  const int own = opaque(row.rank), splits = opaque(row.splits), step = 8 - divide(8, p.of_splits) * splits;
  int rank = warp - divide(warp, p.of_splits) * splits;
  u32 place = shared + L::PACKETS + (own + warp) * P::BYTES + lane * (P::UNIT * 4), barrier = shared + L::PACKETS_FULL;
  hold(barrier);
#pragma unroll
  for (int u = 0; u < P::OF_A_WARP; ++u) {
    // (packet / splits * splits + own) packets from the first
    const u32 to = peer_address(place - rank * P::BYTES, rank);
#pragma unroll
    for (int w = 0; w < P::WORDS; w += P::UNIT)
      if constexpr (P::UNIT == 2)
        send_8_unless(rank == own, to, peer_address(barrier, rank), word_of(u, 0), word_of(u, 1));
      else
        send_16_unless(rank == own, to + w * 128, peer_address(barrier, rank), word_of(u, w), word_of(u, w + 1),
                       word_of(u, w + 2), word_of(u, w + 3));
    place += 8 * P::BYTES, rank += step;
    if (rank >= splits) rank -= splits;
  }
}

// Of a head, in what a CTA knows of all parts: those of a lane's accumulators are neighbours.
template <class L>
DEVICE int column_of(int head) {
  return L::HEADS == 64 ? (head & 48) + (head & 7) * 2 + (head >> 3 & 1) : head;
}

// What each part counts in the result, and the lse: by 128 threads, several neighbours a head, who share its parts.
template <class L>
DEVICE void weigh_parts(const Params& p, const Row& row, u32 shared, int thread) {
  using E = typename L::End;
  constexpr int LANES = 128 / L::HEADS;
  if (row.splits == 1) named_barrier<SCORE_BARRIER, 128>();
  const int head = thread / LANES, own = thread % LANES, global_head = row.tile * L::HEADS + head;
  const bool there = global_head < p.num_heads;
  const float sink = p.attn_sink && there ? __ldg(p.attn_sink + global_head) : -INFINITY;
  const u32 states = shared + E::STATES + head * 8, factors = shared + E::FACTORS + column_of<L>(head) * 4;
  if (row.splits > 1) mbarrier_wait_cluster(shared + L::STATES_FULL, 0);
  float reference = NO_SCORE_YET, total = 0.f;
  u32 signs = 0;
#pragma unroll 2
  for (int part = own; part < row.splits; part += LANES)
    reference = fmaxf(reference, load_shared_float(states + part * (L::HEADS * 8) + 4));
#pragma unroll
  for (int step = LANES / 2; step; step >>= 1) reference = fmaxf(reference, __shfl_xor_sync(~0u, reference, step));
#pragma unroll 2
  for (int part = own; part < row.splits; part += LANES) {
    const float2 state = load_shared_float2(states + part * (L::HEADS * 8));
    const float factor = state.x == 0.f ? 0.f : exp2_approx(state.y - reference), weight = state.x * factor;
    total += fabsf(weight);
    signs |= __float_as_uint(state.x);
    store_shared_float(factors + part * (L::HEADS * 4), L::Packet::PACKED ? weight : factor);
  }
#pragma unroll
  for (int step = LANES / 2; step; step >>= 1) {
    total += __shfl_xor_sync(~0u, total, step);
    if (L::Packet::PACKED) signs |= __shfl_xor_sync(~0u, signs, step);
  }
  if (own) return;
  const float lse = total == 0.f ? -INFINITY : (reference + log2_approx(total)) * 0.6931471805599453f;
  float weight = __fdividef(1.f / L::FACTOR, total);
  if (sink != -INFINITY) weight = __fdividef(weight, 1.f + exp2_approx((sink - lse) * 1.4426950408889634f));
  store_shared_float(shared + E::WEIGHTS + head * 4, total == 0.f ? 0.f : weight);
  if (L::Packet::PACKED && head == 0) store_shared_4(shared + E::SOME_BFLOAT16, signs >> 31);
  if (there && row.rank == 0) p.lse[result_row(p, row) * p.lse_token_stride + global_head * p.lse_head_stride] = lse;
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
DEVICE Dims dims_of(const float (&v)[L::Packet::QUADS * 4], u32 packet, int lane) {
  using P = typename L::Packet;
  const int g = lane >> 2, t = lane & 3, warp = packet & 3;
  const u32 quad = packet / 8 * P::QUADS;
  Dims dims;
  dims.dim = (packet & 4) * 64;
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
DEVICE void write_dims(const Params& p, i64 first, int heads, u32 shared, const Dims& dims) {
  const float weight = load_shared_float(shared + L::End::WEIGHTS + dims.head * 4);
  if (dims.head >= heads) return;
  const i64 place = first + dims.head * p.out_head_stride + dims.dim;
  const float4 v = make_float4(dims.v.x * weight, dims.v.y * weight, dims.v.z * weight, dims.v.w * weight);
  if (p.parts > 1)
    reinterpret_cast<float4*>(p.out)[place / 4] = v;
  else
    *reinterpret_cast<uint2*>(p.out + place) = make_uint2(pack_bfloat16(v.x, v.y), pack_bfloat16(v.z, v.w));
}

// A lane's words of a packet.
template <class P>
struct Piece {
  u32 words[P::WORDS];

  DEVICE void load(u32 from) {
    if constexpr (P::WORDS == 2) {
      const uint2 v = load_shared_8(from);
      words[0] = v.x, words[1] = v.y;
    } else {
#pragma unroll
      for (int w = 0; w < P::WORDS; w += 4) {
        const uint4 v = load_shared_16(from + w * 128);
        words[w] = v.x, words[w + 1] = v.y, words[w + 2] = v.z, words[w + 3] = v.w;
      }
    }
  }

  DEVICE float2 pair(int i, bool bfloat16) const {
    if (!P::PACKED) return make_float2(__uint_as_float(words[2 * i]), __uint_as_float(words[2 * i + 1]));
    if (bfloat16) return make_float2(low_bfloat16(words[i]), high_bfloat16(words[i]));
    return unpack_float16(words[i]);
  }
};

// Adds up the parts of a packet, BATCH at a time, always in the same order. BFLOAT16: parts with factors below 0 are.
template <class L, int BATCH, bool BFLOAT16>
DEVICE void add_parts(float (&sums)[L::Packet::QUADS * 4], u32 from, u32 factors, int parts) {
  using P = typename L::Packet;
#pragma unroll 1
  for (; parts > 0; parts -= BATCH, from += BATCH * P::BYTES, factors += BATCH * L::HEADS * 4) {
    Piece<P> piece[BATCH];
    float2 factor[BATCH];  // of two heads
#pragma unroll
    for (int k = 0; k < BATCH; ++k) {
      factor[k] = load_shared_float2(factors + k * (L::HEADS * 4));
      piece[k].load(from + k * P::BYTES);
    }
#pragma unroll
    for (int k = 0; k < BATCH; ++k) {
      const bool bfloat16 = BFLOAT16 && ((__float_as_uint(factor[k].x) | __float_as_uint(factor[k].y)) >> 31);
      if (BFLOAT16) factor[k] = make_float2(fabsf(factor[k].x), fabsf(factor[k].y));
#pragma unroll
      for (int i = 0; i < P::QUADS * 2; ++i) {
        const float2 v = piece[k].pair(i, bfloat16);
        const bool second = L::HEADS == 64 && i % 2;
        sums[2 * i] = fmaf(v.x, second ? factor[k].y : factor[k].x, sums[2 * i]);
        sums[2 * i + 1] = fmaf(v.y, L::HEADS < 64 || second ? factor[k].y : factor[k].x, sums[2 * i + 1]);
      }
    }
  }
}

// This CTA's share of the result.
template <class L, int WARPS = 12>
DEVICE void finish(const Params& p, const Row& row, u32 shared, int warp, int lane) {
  using P = typename L::Packet;
  // This CTA's factors, and those packets that did not have to go far.
  __syncwarp();
  warp_arrive(shared + L::OWN_FULL, lane);
  i64 place = result_row(p, row) * p.out_token_stride + row.tile * L::HEADS * p.out_head_stride;
  int heads = p.num_heads - row.tile * L::HEADS, packets = packets_of<L>(p, row.rank), splits = row.splits;
  int batch = splits % 4 == 0 ? 4 : splits % 3 == 0 ? 3 : splits % 2 == 0 ? 2 : 1;
  hold(place), hold(heads), hold(packets), hold(splits), hold(batch);  // while there is time
  mbarrier_wait(shared + L::OWN_FULL, 0);
  if (splits > 1) mbarrier_wait_cluster(shared + L::PACKETS_FULL, 0);
  if (P::PACKED && load_shared_4(shared + L::End::SOME_BFLOAT16) != 0) batch = 1;
#pragma unroll 1
  for (int index = warp; index < packets; index += WARPS) {
    const u32 packet = index * splits + row.rank;
    const int column =
        L::HEADS == 64 ? (packet & 3) * 16 + (lane >> 2) * 2 : packet / 8 % (L::HEADS / 8) * 8 + (lane & 3) * 2;
    const u32 from = shared + L::PACKETS + index * splits * P::BYTES + lane * (P::UNIT * 4),
              factors = shared + L::End::FACTORS + column * 4;
    float sums[P::QUADS * 4];
#pragma unroll
    for (int e = 0; e < P::QUADS * 4; ++e) sums[e] = 0.f;
    if (batch == 4)
      add_parts<L, 4, false>(sums, from, factors, splits);
    else if (batch == 3)
      add_parts<L, 3, false>(sums, from, factors, splits);
    else if (batch == 2)
      add_parts<L, 2, false>(sums, from, factors, splits);
    else
      add_parts<L, 1, true>(sums, from, factors, splits);
    write_dims<L>(p, place, heads, shared, dims_of<L, 0>(sums, packet, lane));
    if constexpr (P::QUADS == 2) write_dims<L>(p, place, heads, shared, dims_of<L, 1>(sums, packet, lane));
  }
}
