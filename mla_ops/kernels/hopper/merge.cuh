// The end of a row: partial results of a cluster into one.
//
// Every CTA sends each packet of its accumulators out of registers to the CTA that adds it up, and its heads' sums and
// running maxima to all. A CTA's barriers count what it gets, so that it leaves when nothing more is on its way to it.
#pragma once

#include "balance.cuh"
#include "softmax.cuh"

// Whether a cluster has all keys of its row.
DEVICE bool is_whole(const Params& p, const Row& row) { return BY_LENGTH ? row.part < 0 : p.parts == 1; }

// A row's place among the parts of all tokens, one after the other.
DEVICE i64 row_of_part(const Params& p, const Row& row) {
  if (BY_LENGTH) return is_whole(p, row) ? row.token : row.part;
  return row.part * p.num_tokens + row.token;
}

// A head's lse, of a cluster that may have a part of the row's keys.
DEVICE float* lse_of_cluster(const Params& p, const Row& row, int global_head) {
  const bool whole = is_whole(p, row);
  const i64 token_stride = whole ? p.lse_token_stride : p.num_heads, head_stride = whole ? p.lse_head_stride : 1;
  return (whole ? p.lse : p.parts_lse) + row_of_part(p, row) * token_stride + global_head * head_stride;
}

DEVICE u16* out_row(const Params& p, const Row& row, int global_head) {
  return p.out + row.token * p.out_token_stride + global_head * p.out_head_stride;
}

// Leaves a head's lse in the result or, with `part` >= 0, and with the factor of its accumulators, in a part of a row.
DEVICE void leave_lse(const Params& p, const Row& row, int global_head, int part, float lse, float factor) {
  if (part >= 0)
    parts_of(p).heads[part * p.num_heads + global_head] = make_float2(lse, factor);
  else
    p.lse[row.token * p.lse_token_stride + global_head * p.lse_head_stride] = lse;
}

// Whether the CTAs of a cluster, two, keep a half of their accumulators each (`exchange_halves`). WIDER clusters, or those
// that have a part of a row's keys, never do.
template <class L, Launch LAUNCH = Launch::CLUSTERS, bool WIDER = false>
DEVICE bool by_halves(const Params& p, const Row& row) {
  return !WIDER && LAUNCH == Launch::CLUSTERS && L::HEADS < 64 && L::Packet::PACKED && row.splits == 2 && p.parts == 1;
}

// CTAs that share a row's keys by the launch's shape are `splits`; by its length each has a part alone.
DEVICE int by_splits(const Params& p, const Row& row, int number) {
  return in_cluster(row) ? divide(number, p.of_splits) : number;
}

// The number of packets that a CTA adds up.
template <class L>
DEVICE int packets_of(const Params& p, int rank) {
  return divide(L::Packet::COUNT - 1 - rank, p.of_splits) + 1;
}

template <class L>
DEVICE int packets_of(const Params& p, const Row& row) {
  return by_splits(p, row, L::Packet::COUNT - 1 - row.rank) + 1;
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

// Warps that have done their part call this; one of those that gather tells how much the others will get.
template <class L>
DEVICE void stand_by(const Params& p, const Row& row, u32 shared, bool gathers, int thread) {
  if (row.splits == 1) return;
  if (gathers && thread == 0) {
    const int packets = (row.splits - 1) * packets_of<L>(p, row);
    mbarrier_arrive_expect(shared + L::STATES_FULL, row.splits * L::HEADS * 8);
    mbarrier_arrive_expect(shared + L::PACKETS_FULL, packets * L::Packet::BYTES);
  }
  __syncwarp();
  cluster_arrive();
  cluster_wait();
}

// The sum and the running maximum of a head, to one CTA of the cluster. Sums below 0 say that packets are bfloat16.
template <class L>
DEVICE void send_state(const Row& row, u32 shared, int part, int head, float sum, float running_max) {
  const u32 place = L::End::STATES + (row.rank * L::HEADS + head) * 8;
  if (row.splits == 1) {
    store_shared_float2(shared + place, sum, running_max);
  } else {
    const u32 peer = peer_address(shared, part);
    send_float2(peer + place, peer + L::STATES_FULL, sum, running_max);
  }
}

// A warp's packets, each to the CTA that adds it up: `word_of(n)` is the n-th of a lane's words. Instructions
// here run once, and come from memory.
template <class L, class Word>
DEVICE void send_packets(const Params& p, const Row& row, u32 shared, int warp, int lane, Word word_of) {
  using P = typename L::Packet;
  const int own = __shfl_sync(~0u, row.rank, 0), splits = row.splits, step = 8 - by_splits(p, row, 8) * splits;
  warp = __shfl_sync(~0u, warp, 0);
  int rank = warp - by_splits(p, row, warp) * splits;
  u32 place = shared + L::PACKETS + (own + warp) * P::BYTES + lane * (P::UNIT * 4), barrier = shared + L::PACKETS_FULL;
  hold(barrier);
#pragma unroll
  for (int u = 0; u < P::OF_A_WARP; ++u) {
    // (packet / splits * splits + own) packets from the first
    const u32 to = in_cluster(row) ? peer_address(place - rank * P::BYTES, rank) : place;
    const int first = u * P::WORDS;
#pragma unroll
    for (int w = 0; w < P::WORDS; w += P::UNIT)
      if constexpr (P::UNIT == 2)
        send_8_unless(rank == own, to, peer_address(barrier, rank), word_of(first), word_of(first + 1));
      else
        send_16_unless(rank == own, to + w * 128, peer_address(barrier, rank), word_of(first + w),
                       word_of(first + w + 1), word_of(first + w + 2), word_of(first + w + 3));
    place += 8 * P::BYTES;
    rank = min(static_cast<u32>(rank + step), static_cast<u32>(rank + step - splits));
  }
}

// Column of a head in a CTA's table of all parts; the heads of a lane's accumulators are neighbours there.
template <class L>
DEVICE int column_of(int head) {
  return L::HEADS == 64 ? (head & 48) + (head & 7) * 2 + (head >> 3 & 1) : head;
}

// Column of the first head in a lane's words of a packet, the number-th of its warp. The words are of one head or two.
template <class L>
DEVICE int column_of_packet(int number, int warp, int lane) {
  if (L::HEADS < 64) return number % (L::HEADS / 8) * 8 + (lane & 3) * 2;
  return (warp & 3) * 16 + (lane >> 2) * 2 + (L::Packet::ONE_HEAD ? number & 1 : 0);
}

// Whether an accumulator is of the second head of a pair.
template <class L>
DEVICE constexpr bool is_second(int e) {
  return L::Packet::ONE_HEAD ? false : L::HEADS == 64 ? e & 2 : e & 1;
}

template <class L>
DEVICE float2 load_factors(u32 from) {
  return L::Packet::ONE_HEAD ? make_float2(load_shared_float(from), 0.f) : load_shared_float2(from);
}

// Computes each part's factor in the result, and the lse, which this CTA writes if it `tells`. 128 threads do it;
// neighbours share the parts of a head. `await_states` returns whether all states are there. TELLS_TYPE: a part of
// bfloat16 is noted where the caller had noted that there is none.
template <class L, bool TELLS_TYPE = false, class Await>
DEVICE void weigh_parts(const Params& p, const Row& row, u32 shared, int thread, bool tells, Await await_states) {
  using E = typename L::End;
  constexpr int LANES = L::HEADS > 32 ? 2 : L::HEADS > 16 ? 4 : 8;
  if (row.splits == 1) named_barrier<SCORE_BARRIER, 128>();
  const int head = thread / LANES, own = thread % LANES, global_head = row.tile * L::HEADS + head;
  if (LANES * L::HEADS < 128 && head >= L::HEADS) return;  // a tile of 24 heads leaves one warp without work
  const bool there = global_head < p.num_heads;
  const float sink = p.attn_sink && there ? __ldg(p.attn_sink + global_head) : -INFINITY;
  const u32 states = shared + E::STATES + head * 8, factors = shared + E::FACTORS + column_of<L>(head) * 4;
  if (!await_states()) return;
  float running_max = NO_SCORE_YET, total = 0.f;
  u32 signs = 0;
#pragma unroll 2
  for (int part = own; part < row.splits; part += LANES)
    running_max = fmaxf(running_max, load_shared_float(states + part * (L::HEADS * 8) + 4));
#pragma unroll
  for (int step = LANES / 2; step; step >>= 1) running_max = fmaxf(running_max, __shfl_xor_sync(~0u, running_max, step));
#pragma unroll 2
  for (int part = own; part < row.splits; part += LANES) {
    const float2 state = load_shared_float2(states + part * (L::HEADS * 8));
    const float factor = state.x == 0.f ? 0.f : exp2_approx(state.y - running_max), weight = state.x * factor;
    total += fabsf(weight);
    if (TELLS_TYPE) signs |= __float_as_uint(state.x);
    store_shared_float(factors + part * (L::HEADS * 4), L::Packet::PACKED ? weight : factor);
  }
  if (TELLS_TYPE && signs >> 31) store_shared_4(shared + E::ALL_FLOAT16, 0);
#pragma unroll
  for (int step = LANES / 2; step; step >>= 1) total += __shfl_xor_sync(~0u, total, step);
  if (own == 0) {
    const float lse = total == 0.f ? -INFINITY : (running_max + log2_approx(total)) * 0.6931471805599453f;
    float weight = __fdividef(1.f / L::FACTOR, total);
    if (sink != -INFINITY) weight = __fdividef(weight, 1.f + exp2_approx((sink - lse) * 1.4426950408889634f));
    store_shared_float(shared + E::WEIGHTS + column_of<L>(head) * 4, total == 0.f ? 0.f : weight);
    if (there && tells) *lse_of_cluster(p, row, global_head) = lse;
  }
  converge();
}

// The same for the CTAs of a cluster, which send their states.
template <class L, bool TELLS_TYPE = false>
DEVICE void weigh_parts(const Params& p, const Row& row, u32 shared, int thread) {
  weigh_parts<L, TELLS_TYPE>(p, row, shared, thread, row.rank == 0, [&]() {
    if (row.splits > 1) mbarrier_wait_cluster(shared + L::STATES_FULL, 0);
    return true;
  });
}

// Dims stand permuted in the values' chunks of 64 (`QueryPlaces`): a lane's accumulators of a chunk are 16
// neighbours where dims are columns; where they are rows, row g of a warp is this dim, and row g + 8 the second next.
DEVICE int dim_of_row(int warp, int g) { return 16 * (g >> 1) + 4 * warp + (g & 1); }

// Swaps values with the lane whose number differs in the bit MASK. Returns both lanes' first values where that bit is 0
// here, else both second ones, in the order of lanes.
template <int MASK>
DEVICE float2 trade(float first, float second, int lane) {
  const bool upper = lane & MASK;
  const float other = __shfl_xor_sync(~0u, upper ? first : second, MASK);
  return upper ? make_float2(other, second) : make_float2(first, other);
}

// A tile's rows in the result.
struct Target {
  char* rows;
  i64 head_stride;  // elements
  int heads;        // heads that exist, of the tile's
  bool whole;       // bfloat16 [...]; else a part, float32
};

template <class L>
DEVICE Target target_of(const Params& p, const Row& row) {
  return {reinterpret_cast<char*>(out_row(p, row, row.tile * L::HEADS)), p.out_head_stride,
          p.num_heads - row.tile * L::HEADS, true};
}

// The same of a cluster, which may have a part of the row's keys.
template <class L>
DEVICE Target target_of_cluster(const Params& p, const Row& row) {
  const bool whole = is_whole(p, row);
  const i64 head_stride = whole ? p.out_head_stride : 512, token_stride = whole ? p.out_token_stride : p.num_heads * 512,
            first = row_of_part(p, row) * token_stride + row.tile * L::HEADS * head_stride;
  char* const rows = whole ? reinterpret_cast<char*>(p.out) : reinterpret_cast<char*>(p.parts_out);
  return {rows + (whole ? 2 : 4) * first, head_stride, p.num_heads - row.tile * L::HEADS, whole};
}

DEVICE void write_floats(const Target& to, bool there, i64 place, const float* v) {
  store_16_if(there, to.rows + 4 * place, __float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
              __float_as_uint(v[3]));
}

// Four neighbouring dims of a head. Without a branch: a warp's lanes stay together.
DEVICE void write_4_dims(const Target& to, int head, int dim, const float (&v)[4]) {
  const i64 place = head * to.head_stride + dim;
  const bool there = head < to.heads;
  store_8_if(there && to.whole, to.rows + 2 * place, pack_bfloat16(v[0], v[1]), pack_bfloat16(v[2], v[3]));
  write_floats(to, there && !to.whole, place, v);
}

// Sixteen, of which neighbouring lanes have neighbouring ones: two lanes write 32 bytes together, as memory takes them.
DEVICE void write_16_dims(const Target& to, int head, int dim, const float (&v)[16], int lane) {
  const i64 place = head * to.head_stride + dim;
  const bool there = head < to.heads, odd = lane & 1;
  if (!to.whole) {
#pragma unroll
    for (int i = 0; i < 16; i += 4) write_floats(to, there, place + i, v + i);
    return;
  }
  u32 first[4], second[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 low = pack_bfloat16(v[2 * i], v[2 * i + 1]), high = pack_bfloat16(v[8 + 2 * i], v[9 + 2 * i]),
              away = __shfl_xor_sync(~0u, odd ? low : high, 1);
    first[i] = odd ? away : low, second[i] = odd ? high : away;
  }
  char* const even_lanes = to.rows + 2 * place + (odd ? -16 : 0);
  store_16_if(there, even_lanes, first[0], first[1], first[2], first[3]);
  store_16_if(there, even_lanes + 32, second[0], second[1], second[2], second[3]);
}

// A lane's accumulators of a packet, the number-th of a warp's.
template <class L>
DEVICE void write_packet(const Target& to, const float (&v)[L::Packet::QUADS * 4], u32 number, int warp, int lane) {
  const int g = lane >> 2, t = lane & 3;
  int head = (warp & 3) * 16 + g, dim = (warp & 4) * 64;
  if constexpr (L::Packet::ONE_HEAD) {
    write_16_dims(to, head + number % 2 * 8, dim + number / 2 * 64 + 16 * t, v, lane);
  } else if constexpr (L::HEADS == 64) {
    head += (t & 1) * 8, dim += number * L::Packet::QUADS * 8 + (t & 2) * 2;
#pragma unroll
    for (int q = 0; q < L::Packet::QUADS; ++q) {
      const float2 a = trade<1>(v[4 * q], v[4 * q + 2], lane), b = trade<1>(v[4 * q + 1], v[4 * q + 3], lane);
      write_4_dims(to, head, dim + q * 8, {a.x, b.x, a.y, b.y});
    }
  } else {
    const float2 a = trade<4>(v[0], v[1], lane), b = trade<4>(v[2], v[3], lane);
    head = number % (L::HEADS / 8) * 8 + 2 * t + (g & 1), dim += number / (L::HEADS / 8) * 64;
    if constexpr (L::PERMUTED) {
      write_4_dims(to, head, dim + dim_of_row(warp & 3, g & 6), {a.x, a.y, b.x, b.y});
    } else {
      const float2 c = trade<8>(a.x, b.x, lane), d = trade<8>(a.y, b.y, lane);
      write_4_dims(to, head, dim + (warp & 3) * 16 + (g & 4) + (g & 2) * 4, {c.x, d.x, c.y, d.y});
    }
  }
}

// A part of a token that intervals cut, in units of 16 bytes of each lane: accumulators of a packet, float32, or, with 64
// heads, 16-bit averages.
template <class L>
struct PartUnits {
  static constexpr bool PACKED = L::HEADS == 64;
  static constexpr int VALUES = PACKED ? 8 : 4, OF_A_PACKET = L::Packet::QUADS * 4 / VALUES,
                       OF_A_WARP = L::Packet::OF_A_WARP * OF_A_PACKET;
};

// The first unit of a warp's.
template <class L>
DEVICE float4* part_of_warp(const Params& p, int part, int tile, int warp) {
  return parts_of(p).out + ((static_cast<i64>(part) * p.head_tiles + tile) * 8 + warp) * (PartUnits<L>::OF_A_WARP * 32);
}

// Leaves them: `value_of(n)` is the n-th in the order of packets.
template <class L, bool BFLOAT16 = false, class Value>
DEVICE void leave_part(const Params& p, const Row& row, int part, int warp, int lane, Value value_of) {
  using U = PartUnits<L>;
  float4* const to = part_of_warp<L>(p, part, row.tile, warp) + lane;
#pragma unroll
  for (int unit = 0; unit < U::OF_A_WARP; ++unit) {
    float words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int n = unit * U::VALUES + w * (U::PACKED ? 2 : 1);
      if constexpr (U::PACKED)
        words[w] = __uint_as_float(BFLOAT16 ? pack_bfloat16(value_of(n), value_of(n + 1))
                                            : pack_float16(value_of(n), value_of(n + 1)));
      else
        words[w] = value_of(n);
    }
    to[unit * 32] = make_float4(words[0], words[1], words[2], words[3]);
  }
}

// The same of 16-bit averages: `word_of(n)` is the n-th pair of them.
template <class L, class Word>
DEVICE void leave_words(const Params& p, const Row& row, int part, int warp, int lane, Word word_of) {
  float4* const to = part_of_warp<L>(p, part, row.tile, warp) + lane;
#pragma unroll
  for (int unit = 0; unit < PartUnits<L>::OF_A_WARP; ++unit)
    to[unit * 32] = make_float4(__uint_as_float(word_of(unit * 4)), __uint_as_float(word_of(unit * 4 + 1)),
                                __uint_as_float(word_of(unit * 4 + 2)), __uint_as_float(word_of(unit * 4 + 3)));
}

// The head, in its tile, of a lane's first accumulator of a packet, the number-th of its warp.
template <class L>
DEVICE int head_of_packet(int number, int warp, int lane) {
  if (L::HEADS < 64) return number % (L::HEADS / 8) * 8 + (lane & 3) * 2;
  return (warp & 3) * 16 + (lane >> 2) + (L::Packet::ONE_HEAD ? number % 2 * 8 : 0);
}

// A warp's accumulators: `value_of(n)` is the n-th in the order of packets.
template <class L, class Value>
DEVICE void write_packets(const Target& to, int warp, int lane, Value value_of) {
  using P = typename L::Packet;
#pragma unroll
  for (int number = 0; number < P::OF_A_WARP; ++number) {
    float v[P::QUADS * 4];
#pragma unroll
    for (int e = 0; e < P::QUADS * 4; ++e) v[e] = value_of(number * P::QUADS * 4 + e);
    write_packet<L>(to, v, number, warp, lane);
  }
}

DEVICE float2 unpack(u32 word, bool bfloat16) {
  return bfloat16 ? make_float2(low_bfloat16(word), high_bfloat16(word)) : unpack_float16(word);
}

// A lane's words of a packet.
template <class P>
struct Piece {
  u32 words[P::WORDS];

  DEVICE void load(const unsigned char* from) {  // other SMs wrote them
    if constexpr (P::WORDS == 2) {
      const uint2 v = load_l2_8(from);
      words[0] = v.x, words[1] = v.y;
    } else {
#pragma unroll
      for (int w = 0; w < P::WORDS; w += 4) {
        const uint4 v = load_l2_16(from + w * 128);
        words[w] = v.x, words[w + 1] = v.y, words[w + 2] = v.z, words[w + 3] = v.w;
      }
    }
  }

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
    return unpack(words[i], bfloat16);
  }
};

// Adds `count` parts of a packet, MOST at most, always in the same order. Those with factors below 0 are bfloat16, unless
// all are FLOAT16. One copy of the code for all that a row may have: it runs once, and comes from memory.
template <class L, int MOST, bool FLOAT16, class From>
DEVICE void add_parts(float (&sums)[L::Packet::QUADS * 4], From from, u32 factors, int count) {
  using P = typename L::Packet;
  Piece<P> piece[MOST];
  float2 factor[MOST];  // two heads each
#pragma unroll
  for (int k = 0; k < MOST; ++k) {
    const int part = min(k, count - 1);
    factor[k] = load_factors<L>(factors + part * (L::HEADS * 4));
    piece[k].load(from + part * P::BYTES);
    if (k >= count) piece[k] = {}, factor[k] = {};
  }
#pragma unroll
  for (int k = 0; k < MOST; ++k) {
    const bool bfloat16 = !FLOAT16 && P::PACKED && ((__float_as_uint(factor[k].x) | __float_as_uint(factor[k].y)) >> 31);
    if (!FLOAT16 && P::PACKED) factor[k] = make_float2(fabsf(factor[k].x), fabsf(factor[k].y));
#pragma unroll
    for (int i = 0; i < P::QUADS * 2; ++i) {
      const float2 v = piece[k].pair(i, bfloat16);
      sums[2 * i] = fmaf(v.x, is_second<L>(2 * i) ? factor[k].y : factor[k].x, sums[2 * i]);
      sums[2 * i + 1] = fmaf(v.y, is_second<L>(2 * i + 1) ? factor[k].y : factor[k].x, sums[2 * i + 1]);
    }
  }
}

// Adds up the packets that are CTA `rank`'s of `splits`, `parts` of each: the first one's are at `first`, each next one's
// `pitch` bytes behind.
template <class L, int WARPS, bool FLOAT16 = false, class From>
DEVICE void add_packets(const Target& to, int rank, u32 shared, From first, int pitch, int packets, int splits,
                        int parts, int warp, int lane) {
  using P = typename L::Packet;
#pragma unroll 1
  for (int index = warp; index < packets; index += WARPS) {
    const u32 packet = index * splits + rank, number = packet / 8;
    const int column = column_of_packet<L>(number, packet & 7, lane);
    From from = first + index * pitch + lane * (P::UNIT * 4);
    u32 factors = shared + L::End::FACTORS + column * 4;
    float sums[P::QUADS * 4];
#pragma unroll
    for (int e = 0; e < P::QUADS * 4; ++e) sums[e] = 0.f;
    int left = parts;
#pragma unroll 1
    do {
      if (FLOAT16 && left > 4) {  // one type leaves registers for eight parts
        add_parts<L, 8, FLOAT16>(sums, from, factors, left);
        from += 8 * P::BYTES, factors += 8 * (L::HEADS * 4), left -= 8;
        continue;
      }
      if (left > 2)
        add_parts<L, 4, FLOAT16>(sums, from, factors, left);
      else
        add_parts<L, 2, FLOAT16>(sums, from, factors, left);
      from += 4 * P::BYTES, factors += 4 * (L::HEADS * 4), left -= 4;
    } while (left > 0);
    const float2 weight = load_factors<L>(shared + L::End::WEIGHTS + column * 4);
#pragma unroll
    for (int e = 0; e < P::QUADS * 4; ++e) sums[e] *= is_second<L>(e) ? weight.y : weight.x;
    write_packet<L>(to, sums, number, packet & 7, lane);
  }
}

// This CTA's share of the result, if it is in packets. In WIDER clusters code of its own adds packets that are all float16:
// it has half of the other's instructions.
template <class L, int WARPS = 12, bool WIDER = false>
DEVICE void finish(const Params& p, const Row& row, u32 shared, int warp, int lane) {
  using P = typename L::Packet;
  // This CTA's factors, and those packets that did not have to go far. Callers do not arrive for themselves: ptxas let
  // lane 0 come behind the others then, who had changed the warp's uniform registers.
  __syncwarp();
  warp_arrive(shared + L::OWN_FULL, lane);
  if (by_halves<L, Launch::CLUSTERS, WIDER>(p, row)) return;
  Target to = target_of_cluster<L>(p, row);
  int packets = packets_of<L>(p, row), splits = row.splits;
  hold(to.rows), hold(to.heads), hold(packets), hold(splits);  // while there is time
  mbarrier_wait(shared + L::OWN_FULL, 0);
  if (splits > 1) mbarrier_wait_cluster(shared + L::PACKETS_FULL, 0);
  if constexpr (WIDER) {
    if (uniform(load_shared_4(shared + L::End::ALL_FLOAT16))) {
      add_packets<L, WARPS, true>(to, row.rank, shared, shared + L::PACKETS, splits * P::BYTES, packets, splits, splits,
                                  warp, lane);
      return;
    }
  }
  add_packets<L, WARPS>(to, row.rank, shared, shared + L::PACKETS, splits * P::BYTES, packets, splits, splits, warp,
                        lane);
}

// Each CTA of a cluster of two keeps one half of its accumulators in registers and adds the other CTA's same half,
// which that CTA sends. A lane has the same accumulators in both.
template <class L, int N>
DEVICE void exchange_halves(const Params& p, const Row& row, u32 shared, int warp, int lane, const float (&o)[4][N],
                            const float (&inverse)[N / 2], bool bfloat16) {
  using E = typename L::End;
  static_assert(L::PERMUTED && L::Packet::PACKED, "accumulators stand otherwise");
  constexpr int HEADS = N / 2, UNITS = N / 4;  // a lane's heads; 16-byte units in half of its accumulators
  const int t = lane & 3, g = lane >> 2;
  const u32 peer = row.rank ^ 1, place = shared + L::PACKETS + warp * (UNITS * 512) + lane * 16,
            to = peer_address(place, peer), barrier = peer_address(shared + L::PACKETS_FULL, peer);
  auto head_of = [](int e) { return e / 4 * 2 + (e & 1); };
#pragma unroll
  for (int unit = 0; unit < UNITS; ++unit) {
    u32 words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int piece = (unit * 8 + 2 * w) / N, e = (unit * 8 + 2 * w) % N;
      const float a = select(row.rank, o[piece][e], o[piece + 2][e]) * inverse[head_of(e)],
                  b = select(row.rank, o[piece][e + 1], o[piece + 2][e + 1]) * inverse[head_of(e + 1)];
      words[w] = bfloat16 ? pack_bfloat16(a, b) : pack_float16(a, b);
    }
    send_16(to + unit * 512, barrier, words);
  }
  warp_arrive(shared + L::OWN_FULL, lane);

  const int first_head = row.tile * L::HEADS + 2 * t + (g & 1);
  const int dim = (warp & 4) * 64 + row.rank * 128 + dim_of_row(warp & 3, g & 6);
  u16* rows[N / 4];
#pragma unroll
  for (int j = 0; j < N / 4; ++j) rows[j] = out_row(p, row, first_head + 8 * j) + dim;
#pragma unroll
  for (int j = 0; j < N / 4; ++j)
    if (L::HEADS < 32) hold(rows[j]);  // registers have no room for more
  mbarrier_wait(shared + L::OWN_FULL, 0);
  float own[HEADS], others[HEADS];
  u32 signs = 0;  // signs of factors that are not NaN say whether the other CTA sends bfloat16
#pragma unroll
  for (int i = 0; i < HEADS; i += 2) {
    const u32 column = (i * 4 + 2 * t) * 4, factors = shared + E::FACTORS + column;
    const float2 weight = load_shared_float2(shared + E::WEIGHTS + column),
                 mine = load_shared_float2(factors + row.rank * (L::HEADS * 4)),
                 theirs = load_shared_float2(factors + peer * (L::HEADS * 4));
    own[i] = fabsf(mine.x) * weight.x * inverse[i], own[i + 1] = fabsf(mine.y) * weight.y * inverse[i + 1];
    others[i] = fabsf(theirs.x) * weight.x, others[i + 1] = fabsf(theirs.y) * weight.y;
    signs |= __float_as_uint(theirs.x) | __float_as_uint(theirs.y);
  }
  hold(own), hold(others), hold(signs);
  mbarrier_wait_cluster(shared + L::PACKETS_FULL, 0);
#pragma unroll
  for (int unit = 0; unit < UNITS; ++unit) {
    const uint4 v = load_shared_16(place + unit * 512);
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      const int piece = (unit * 8 + q * 4) / N, first = (unit * 8 + q * 4) % N;
      float sums[4];
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const float2 away = unpack(words[q * 2 + i / 2], signs >> 31);
        const int e = first + i, a = head_of(e), b = head_of(e + 1);
        sums[i] = fmaf(away.x, others[a], select(row.rank, o[piece + 2][e], o[piece][e]) * own[a]);
        sums[i + 1] = fmaf(away.y, others[b], select(row.rank, o[piece + 2][e + 1], o[piece][e + 1]) * own[b]);
      }
      const float2 c = trade<4>(sums[0], sums[1], lane), d = trade<4>(sums[2], sums[3], lane);
      store_8_if(first_head + first * 2 < p.num_heads, rows[first / 4] + piece * 64, pack_bfloat16(c.x, c.y),
                 pack_bfloat16(d.x, d.y));
    }
  }
}
