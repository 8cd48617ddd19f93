// Token-level sparse MLA over bfloat16 keys, paged or flat, for SM90: tiles of 64 heads.
//
// Two warpgroups own every other turn of 64 keys. The owner of a turn makes its weights (queries times keys, softmax in
// registers) and adds its own half of the values' dims with them; the other warpgroup reads the weights from shared
// memory and adds the other half. So one's products keep the tensor cores busy while the other has a softmax to do. A
// third warpgroup gathers keys into two tiles, one a warpgroup, in groups of dims. The softmax's running maxima pass from
// turn to turn with the weights, so the warpgroups need not agree on them.
//
// A CTA that is no part of a cluster takes one row after the other, and the gather runs ahead into the next row. In a
// cluster each CTA has a share of one row's keys. Kernels called balanced are given lengths, and share rows evenly among
// all CTAs instead where these are unequal.

#include "code.cuh"
#include "cuts.cuh"
#include "pair_turns.cuh"

// Stores 16 heads by 16 dims of a warp's results, two blocks of eight dims, of which a lane has two values for each of
// its two heads, to row lane % 16 at `to`; the upper lanes store the second block.
DEVICE void store_results(u32 to, const float (&v)[8]) {
  store_matrices(to, pack_bfloat16(v[0], v[1]), pack_bfloat16(v[2], v[3]), pack_bfloat16(v[4], v[5]),
                 pack_bfloat16(v[6], v[7]));
}

// A copy, since accumulators that lay as packets want them would make products wait for one another.
DEVICE u32 word_of(float accumulator) {
  hold(accumulator);
  return __float_as_uint(accumulator);
}

// Each CTA of a cluster of two keeps the first half of its accumulators, and adds the same dims that the other sends.
template <class L>
DEVICE void exchange_halves(const Params& p, const Row& row, const State& state, u32 shared, int warp, int lane) {
  using E = typename L::End;
  constexpr int QUADS = 16, BYTES = QUADS * 512;     // half of a warp's results
  constexpr int RESULT_BYTES = 16 * (128 * 4 + 32);  // a warp's 16 heads by 128 dims, in rows that meet all banks
  static_assert(8 * (BYTES + RESULT_BYTES) <= L::RUNNING_MAX - L::PACKETS, "no room for results");
  const u32 peer = row.rank ^ 1, place = shared + L::PACKETS + warp * BYTES + lane * 16, to = peer_address(place, peer),
            barrier = peer_address(shared + L::PACKETS_FULL, peer);
#pragma unroll
  for (int quad = 0; quad < QUADS; ++quad) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = word_of(state.o[64 + quad * 4 + i]);
    send_16(to + quad * 512, barrier, words);
  }
  warp_arrive(shared + L::OWN_FULL, lane);
  const Target target = target_of_cluster<L>(p, row);
  const int size = target.whole ? 2 : 4, pitch = 128 * size + 8 * size;
  const int head = (warp & 3) * 16 + lane, dim = (warp & 4) * 64 + row.rank * 128;
  const u32 column = column_of_packet<L>(0, warp, lane) * 4, factors = shared + E::FACTORS + column,
            results = shared + L::PACKETS + 8 * BYTES + warp * RESULT_BYTES;
  char* const to_memory = target.rows + (head * target.head_stride + dim) * size;
  mbarrier_wait(shared + L::OWN_FULL, 0);
  const float2 weight = load_shared_float2(shared + E::WEIGHTS + column),
               mine = load_shared_float2(factors + row.rank * (L::HEADS * 4)),
               theirs = load_shared_float2(factors + peer * (L::HEADS * 4));
  const float own[2] = {mine.x * weight.x, mine.y * weight.y}, others[2] = {theirs.x * weight.x, theirs.y * weight.y};
  auto add_quad = [&](int quad, float* sums) {
    const uint4 v = load_shared_16(place + quad * 512);
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      sums[i] = fmaf(__uint_as_float(words[i]), others[i / 2], state.o[quad * 4 + i] * own[i / 2]);
  };
  mbarrier_wait_cluster(shared + L::PACKETS_FULL, 0);
  if (target.whole) {
#pragma unroll
    for (int quad = 0; quad < QUADS; quad += 2) {
      float sums[8];
      add_quad(quad, sums), add_quad(quad + 1, sums + 4);
      store_results(results + lane % 16 * pitch + lane / 16 * 16 + quad * 16, sums);
    }
  } else {
#pragma unroll
    for (int quad = 0; quad < QUADS; ++quad) {
      float sums[4];
      add_quad(quad, sums);
      const u32 to_row = results + lane / 4 * pitch + lane % 4 * 8 + quad * 32;
      store_shared_float2(to_row, sums[0], sums[1]), store_shared_float2(to_row + 8 * pitch, sums[2], sums[3]);
    }
  }
  fence_async_shared();
  __syncwarp();
  if (lane < 16 && head < target.heads) bulk_store(to_memory, results + lane * pitch, 128 * size);
  await_bulk_stores();
}

// Adds up a head's sums over both warpgroups. Nobody needs this row's tiles and weights any more then.
template <class L>
DEVICE void add_sums(State& state, u32 shared, u32 row_parity, int half, int head, int lane) {
  const u32 sums = shared + L::SUMS + (row_parity * 2 * L::HEADS + head) * 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    state.sum[i] += __shfl_xor_sync(~0u, state.sum[i], 1);
    state.sum[i] += __shfl_xor_sync(~0u, state.sum[i], 2);
    if (lane % 4 == 0) store_shared_float(sums + (half * L::HEADS + i * 8) * 4, state.sum[i]);
  }
  named_barrier<PAIR_BARRIER, 256>();
#pragma unroll
  for (int i = 0; i < 2; ++i) state.sum[i] += load_shared_float(sums + ((half ^ 1) * L::HEADS + i * 8) * 4);
}

// Averages of a part become 16 bits: float16 times a power of two of each head, which `factor` gets and `stored` undoes,
// or, where values of a head are too far apart, bfloat16, and `stored` is below 0. Whether they are bfloat16, for all heads
// of a warp.
template <class L>
DEVICE bool fit_averages(const State& state, u32 shared, u32 row_parity, int half, int head, int lane, float (&factor)[2],
                         float (&stored)[2]) {
  float top[2] = {0.f, 0.f}, least[2] = {INFINITY, INFINITY};
#pragma unroll
  for (int e = 0; e < 128; ++e) {
    const float magnitude = fabsf(state.o[e]);
    top[e >> 1 & 1] = fmaxf(top[e >> 1 & 1], magnitude), least[e >> 1 & 1] = fminf(least[e >> 1 & 1], magnitude);
  }
  // Sums of the row before were here.
  const u32 tops = shared + L::SUMS + ((row_parity ^ 1) * 2 * L::HEADS + head) * 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int step = 1; step < 4; step <<= 1) {
      top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], step));
      least[i] = fminf(least[i], __shfl_xor_sync(~0u, least[i], step));
    }
    if (least[i] < top[i] * 0x1p-28f) top[i] = INFINITY;
    if (lane % 4 == 0) store_shared_float(tops + (half * L::HEADS + i * 8) * 4, top[i]);
  }
  named_barrier<PAIR_BARRIER, 256>();
  u32 exponent[2];
  bool bfloat16 = false;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    top[i] = fmaxf(top[i], load_shared_float(tops + ((half ^ 1) * L::HEADS + i * 8) * 4));
    exponent[i] = __float_as_uint(top[i] * factor[i]) >> 23 & 0xff;
    bfloat16 |= state.sum[i] != 0.f && (exponent[i] < 40 || exponent[i] > 230);
  }
  bfloat16 = __any_sync(~0u, bfloat16);
#pragma unroll
  for (int i = 0; i < 2; ++i) {  // the largest is below 2^15
    const u32 up = min(max(268 - static_cast<int>(exponent[i]), 1), 253);
    stored[i] = bfloat16 ? -1.f : __uint_as_float((254 - up) << 23);
    if (!bfloat16) factor[i] *= __uint_as_float(up << 23);
  }
  return bfloat16;
}

// The lse of a thread's two heads, and what makes averages of their sums.
DEVICE void weigh_heads(const State& state, float (&lse)[2], float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool none = state.sum[i] == 0.f;
    lse[i] = none ? -INFINITY : (state.running_max[i] + log2_approx(state.sum[i])) * 0.6931471805599453f;
    factor[i] = none ? 0.f : 1.f / state.sum[i];
  }
}

// Leaves a part of a row as 16-bit averages, `stored` as `fit_averages` has made it.
template <class L>
DEVICE void leave_averages(const Params& p, const Row& row, const State& state, int half, int head, int warp, int lane,
                           int part, bool bfloat16, const float (&lse)[2], const float (&factor)[2],
                           const float (&stored)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (half == 0 && row.tile * L::HEADS + head + i * 8 < p.num_heads && lane % 4 == 0)
      leave_lse(p, row, row.tile * L::HEADS + head + i * 8, part, lse[i], stored[i]);
  auto value_of = [&](int n) { return state.o[n] * factor[n >> 1 & 1]; };
  if (bfloat16)
    leave_part<L, true>(p, row, part, half * 4 + warp, lane_here(), value_of);
  else
    leave_part<L>(p, row, part, half * 4 + warp, lane_here(), value_of);
}

// Ends a part of a row that this CTA has alone.
template <class L>
DEVICE void leave_units(const Params& p, const Row& row, State& state, u32 shared, int half, int head, int warp,
                        int lane) {
  float factor[2], lse[2];
  weigh_heads(state, lse, factor);
  if (end_of_row<L>(shared, 0) == NO_TURN) {
#pragma unroll
    for (int e = 0; e < 128; ++e) state.o[e] = 0.f;
  }
  float stored[2];
  const bool bfloat16 = fit_averages<L>(state, shared, 0, half, head, lane, factor, stored);
  leave_averages<L>(p, row, state, half, head, warp, lane, row.part, bfloat16, lse, factor, stored);
}

// Ends a row in a cluster.
template <class L>
DEVICE void finish_cluster(const Params& p, const Row& row, State& state, u32 shared, int half, int head, int warp,
                           int lane) {
  add_sums<L>(state, shared, 0, half, head, lane);
  if (leaves_units<L::HEADS>(row)) {
    leave_units<L>(p, row, state, shared, half, head, warp, lane);
    return;
  }
  open_to_peers(row);
  await_peers(row);
  const bool empty = end_of_row<L>(shared, 0) == NO_TURN;
  const float no_score = empty ? NO_KEYS_AT_ALL : NO_SCORE_YET;
  for (int part = half * 4 + lane % 4; part < row.splits; part += 8)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      send_state<L>(row, shared, part, head + i * 8, state.sum[i],
                    state.sum[i] == 0.f ? no_score : state.running_max[i]);
  if (empty) {
    if (is_empty<L>(row, shared, lane)) {
      write_zeros<L>(p, row, half * 4 + warp, lane);
      return;
    }
#pragma unroll
    for (int e = 0; e < 128; ++e) state.o[e] = 0.f;
  }
  if (row.splits == 2) {
    exchange_halves<L>(p, row, state, shared, half * 4 + warp, lane);
    return;
  }
  send_packets<L>(p, row, shared, half * 4 + warp, lane, [&](int e) { return word_of(state.o[e]); });
  finish<L, 8>(p, row, shared, half * 4 + warp, lane);
}

// Stores a warp's results, 64 dims at a time, through its own part of its weights: `make(n, v)` makes a lane's n-th eight
// values.
template <class L, class Make>
DEVICE void store_rows(const Params& p, const Row& row, u32 shared, int half, int warp, int lane, Make make) {
  const u32 own = shared + L::WEIGHTS + half * CHUNK + warp * 2048, to = own + lane % 16 * 128;
  const int local_row = lane / 8, first_head = row.tile * L::HEADS + warp * 16 + local_row;
  u16* out = out_row(p, row, first_head) + half * 256 + lane % 8 * 8;
#pragma unroll
  for (int chunk = 0; chunk < 4; ++chunk) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      float v[8];
      make(chunk * 4 + k, v);
      store_results(to + (((k * 2 + lane / 16) ^ lane) & 7) * 16, v);
    }
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 16; r += 4) {
      const uint4 v = load_shared_16(own + (r + local_row) * 128 + ((lane ^ (r + local_row)) & 7) * 16);
      if (first_head + r < p.num_heads) store_streaming_16(out + r * p.out_head_stride + chunk * 64, v);
    }
    __syncwarp();
  }
}

// The result of a row of two sharers, of which the other has left its part and this one has float16 averages of its own in
// registers: as if these had been left, too.
template <class L>
DEVICE void add_up_both(const Params& p, const Row& row, State& state, u32 shared, int half, int head, int warp,
                        int lane, const float (&lse)[2], const float (&factor)[2], const float (&stored)[2]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) asm volatile("" : "=r"(state.query[i]));
  constexpr int AT_ONCE = 4;
  const int other = load_interval(shared + L::INTERVAL).worker + 1;
  const float4* const from = part_of_warp<L>(p, other, row.tile, half * 4 + warp) + lane;
  uint4 units[AT_ONCE];
  auto load = [&](int unit) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) units[i] = load_l2_16(from + (unit + i) * 32);
  };
  uint2 states[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    states[i] = load_l2_8(parts_of(p).heads + other * p.num_heads + global_head<L>(p, row, head + i * 8));
  load(0);
  BothParts both[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int global_head = row.tile * L::HEADS + head + i * 8;
    both[i] = weigh_both(p, states[i], global_head, make_float2(lse[i], stored[i]));
    if (half == 0 && global_head < p.num_heads && lane % 4 == 0) leave_lse(p, row, global_head, -1, both[i].lse, 0.f);
  }
  store_rows<L>(p, row, shared, half, warp, lane, [&](int unit, float (&v)[8]) {
    if (unit % AT_ONCE == 0 && unit) load(unit);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float own = both[w & 1].own;
      const u32 word = pack_float16(state.o[unit * 8 + 2 * w] * factor[w & 1], state.o[unit * 8 + 2 * w + 1] * factor[w & 1]);
      const float2 pair = unpack_float16(own != 0.f ? word : 0);
      v[2 * w] = pair.x * own, v[2 * w + 1] = pair.y * own;
    }
    add_unit<L>(v, units[unit % AT_ONCE], both[0].others, both[1].others);
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e] *= both[is_second<L>(e)].whole;
  });
  note_both<L>(shared);
}

// Ends a row that another may follow. Both warpgroups call it.
template <class L, Launch LAUNCH>
DEVICE void finish_row(const Params& p, const Row& row, State& state, u32 shared, u32 row_parity, int half, int head,
                       int warp, int lane) {
  add_sums<L>(state, shared, row_parity, half, head, lane);
  const int part = LAUNCH == Launch::BALANCED ? part_of(p, shared + L::INTERVAL, row.token) : -1;
  float factor[2], lse[2];
  weigh_heads(state, lse, factor);
  if (part >= 0) {
    float stored[2];
    const bool bfloat16 = fit_averages<L>(state, shared, row_parity, half, head, lane, factor, stored);
    bool alone = bfloat16;
    if (half == 0 && warp == 0) alone = alone || part < p.workers || !mbarrier_test(shared + L::STATES_FULL, 0);
    if (!named_barrier_any<PAIR_BARRIER, 256>(alone)) {
      add_up_both<L>(p, row, state, shared, half, head, warp, lane, lse, factor, stored);
      return;
    }
    leave_averages<L>(p, row, state, half, head, warp, lane, part, bfloat16, lse, factor, stored);
    tell_sharers<L, PAIR_BARRIER>(p, shared, part, half * 128 + warp * 32 + lane);
    return;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int global_head = row.tile * L::HEADS + head + i * 8;
    const bool there = global_head < p.num_heads;
    if (p.attn_sink && there && state.sum[i] != 0.f) factor[i] /= 1.f + expf(__ldg(p.attn_sink + global_head) - lse[i]);
    if (half == 0 && there && lane % 4 == 0) leave_lse(p, row, global_head, part, lse[i], factor[i]);
  }
  store_rows<L>(p, row, shared, half, warp, lane, [&](int unit, float (&v)[8]) {
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e] = state.o[unit * 8 + e] * factor[e / 2 & 1];
  });
}

// Takes the turns of a row that warpgroup w owns, and its half of the other's. Both warpgroups run the same code, since
// the first fetch of instructions comes from memory. The other's turn stands in front of the last scores, whose keys
// come last.
template <class L, bool PERSISTENT>
DEVICE void attend_row(const Params& p, State& state, const Places& at, u32 shared, int w, u32& own_parity,
                       u32& other_parity, int lane) {
  int end = 0, turn = w;  // 1: this warpgroup has had the last turn, 2: the other one has it
  if (!PERSISTENT) {
    mbarrier_wait(full_barrier<L>(shared, 0, w ? FAR : L::FIRST), 0);
    if (end_of_row<L>(shared, 0) == NO_TURN) return;
  }
  if (w) {
    mbarrier_wait(full_barrier<L>(shared, 0, FAR), other_parity);
    end = end_of_row<L>(shared, 0) & 1 ? 2 : 0;
  }
  for (; !end; turn += 2) {
    float s[32];
    u32 weights[16];
    multiply_queries<L, L::FIRST>(s, state, shared, w, own_parity);
    if (L::FIRST == ROPE) multiply_queries<L, NEAR>(s, state, shared, w, own_parity);
    if (turn) {
      add_other<L>(state, at, shared, w, other_parity, turn == 1);
      other_parity ^= 1;
    }
    multiply_queries<L, FAR>(s, state, shared, w, own_parity);
    end = end_of_row<L>(shared, w);
    if (turn) release_values<L, FAR, 1>(shared, w ^ 1, lane);
    const bool all = all_live<L>(shared, w);
    wgmma_wait<0>();
    hold(state.o);
    hold(s);
    hold(state.query);
    if (L::FIRST == ROPE) warp_arrive(free_barrier<L>(shared, w, ROPE, 0), lane);
    if (PERSISTENT && end == 1) warp_arrive(shared + L::QUERY_FREE, lane);
    soften<L>(p, state, s, weights, at, shared, w, all, turn == 0, lane);
    add_own<L>(state, weights, shared, w, lane, turn == 0);
    own_parity ^= 1;
  }
  if (end == 1) return;
  if (PERSISTENT) warp_arrive(shared + L::QUERY_FREE, lane);
  add_other<L>(state, at, shared, w, other_parity, turn == 1);
  other_parity ^= 1;
  release_values<L, FAR, 0>(shared, w ^ 1, lane);
  hold(state.o);
}

DEVICE void begin_row(State& state) {
  state.sum[0] = state.sum[1] = 0.f, state.running_max[0] = state.running_max[1] = NO_SCORE_YET;
}

// The warpgroup that scores second copies the first row's queries.
template <class L>
DEVICE void bring_first_queries(const Params& p, const Row& row, State& state, u32 shared) {
  const int thread = threadIdx.x & 127;
  if (threadIdx.x >= 128) {
    copy_queries<L>(p, row, shared, thread);
    arrive_when_copied(shared + L::QUERY_FULL);
  }
  load_query_fragments<L>(p, row, state, threadIdx.x >> 7, thread / 32 * 16 + thread % 32 / 4, thread % 4);
}

template <class L>
DEVICE void attend_cluster(const Params& p, const Row& row, u32 shared) {
  State state;
  bring_first_queries<L>(p, row, state, shared);
  begin_row(state);
  const int thread = threadIdx.x & 127, warp = __shfl_sync(~0u, thread >> 5, 0), lane = thread & 31,
            half = __shfl_sync(~0u, threadIdx.x >> 7, 0), head = warp * 16 + lane / 4;
  u32 own_parity = 0, other_parity = 0;
  mbarrier_wait(shared + L::QUERY_FULL, 0);
  const Places at = places_of<L>(shared, half, warp, lane);
  attend_row<L, false>(p, state, at, shared, half, own_parity, other_parity, lane);
  finish_cluster<L>(p, row, state, shared, half, head, warp, lane);
}

template <class L, Launch LAUNCH>
DEVICE void attend_rows(const Params& p, u32 shared) {
  u32 own_parity = 0, other_parity = 0, row_parity = 0;
  State state;
  int n = first_number<LAUNCH>(shared + L::INTERVAL);
  bring_first_queries<L>(p, row_number<LAUNCH>(p, shared + L::INTERVAL, n), state, shared);
  while (row_number<LAUNCH>(p, shared + L::INTERVAL, n).token < end_of_tokens<LAUNCH>(p)) {
    begin_row(state);
    // Code that runs once a row is the same for both warpgroups: instruction caches do not hold a kernel this long.
    {
      const int thread = threadIdx.x & 127, warp = __shfl_sync(~0u, thread >> 5, 0), lane = lane_here(),
                half = __shfl_sync(~0u, threadIdx.x >> 7, 0);
      const Places at = places_of<L>(shared, half, warp, lane);
      mbarrier_wait(shared + L::QUERY_FULL, row_parity);
      attend_row<L, true>(p, state, at, shared, half, own_parity, other_parity, lane);
    }
    hold(n);
    {
      const int thread = threadIdx.x & 127, warp = __shfl_sync(~0u, thread >> 5, 0), lane = lane_here(),
                half = __shfl_sync(~0u, threadIdx.x >> 7, 0), head = warp * 16 + lane / 4;
      const Row row = row_number<LAUNCH>(p, shared + L::INTERVAL, n);
      n += numbers_ahead<LAUNCH>(p, shared + L::INTERVAL);
      const Row next = row_number<LAUNCH>(p, shared + L::INTERVAL, n);
      if (next.token < end_of_tokens<LAUNCH>(p)) load_query_fragments<L>(p, next, state, half, head, lane % 4);
      finish_row<L, LAUNCH>(p, row, state, shared, row_parity, half, head, warp, lane);
    }
    row_parity ^= 1;
  }
  if constexpr (LAUNCH == Launch::BALANCED)
    add_up_cuts<L, PAIR_BARRIER, 2 * L::TILE>(p, shared, shared + L::TILES, thread_here());
}

// ---- the kernels ----------------------------------------------------------------------------------------------------

// A warp each: one thread takes long for all of them.
template <class L>
DEVICE void init_barriers(u32 shared) {
  if (threadIdx.x == 0) store_shared_4(shared + L::ENDS, 0);
  if (threadIdx.x % 32 == 0)
#pragma unroll 1
    for (int barrier = L::FULL + threadIdx.x / 32 * 8; barrier <= L::OWN_FULL; barrier += 12 * 8) {
      int arrivals = 128;  // the gather's threads
      if (barrier < L::FREE && (barrier - L::FULL) / 8 % GROUPS == NEAR)
        arrivals = 132;  // and who tells which keys count
      if (barrier < L::FREE && (barrier - L::FULL) / 8 % GROUPS == FAR) arrivals = 129;  // and which turn is the last
      if (barrier >= L::FREE && barrier < L::QUERY_FULL) arrivals = 4 * ARRIVALS_OF_A_WARP;
      if (barrier == L::QUERY_FREE) arrivals = 8 * ARRIVALS_OF_A_WARP;
      if (barrier == L::STATES_FULL || barrier == L::PACKETS_FULL) arrivals = 1;
      if (barrier == L::OWN_FULL) arrivals = 12 * ARRIVALS_OF_A_WARP;
      mbarrier_init(shared + barrier, arrivals);
      fence_barrier_init();
    }
  __syncthreads();
}

template <int DIM, Launch LAUNCH>
DEVICE void attend_all(const Params& p) {
  using L = PairLayout<DIM>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 shared = shared_address(shared_memory);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x >> 7, 0), thread = threadIdx.x & 127;
  Row row;
  Stream stream;
  if constexpr (LAUNCH == Launch::BALANCED) {
    find_interval<L::THREADS>(p, shared + L::INTERVAL, shared + L::TILES);
    if (first_token(p, shared + L::INTERVAL) >= p.all_tokens) {
      wait_for_prerequisites();
      return;
    }
  }
  if (warpgroup == 2) {
    row = row_number<LAUNCH>(p, shared + L::INTERVAL, first_number<LAUNCH>(shared + L::INTERVAL));
    stream = begin_stream(p, row, thread >> 5, thread & 31);
  }
  init_barriers<L>(shared);
  if (warpgroup < 2) {  // in machine code behind the gather, as in `sparse_attention.cu`
    more_registers<224>();
    attend_rows<L, LAUNCH>(p, shared);
  } else {
    fewer_registers<56>();
    launch_dependents();
    gather_rows<L, LAUNCH>(p, row, stream, shared, thread);
    if (LAUNCH == Launch::BALANCED && thread < 32) look_for_other<L>(p, shared, shared + L::STATES_FULL, thread);
    wait_for_prerequisites();
  }
}

// YIELDS: unless another launch has shared the tokens evenly.
template <int DIM, bool YIELDS = false>
__global__ void __launch_bounds__(384, 1) sparse_attention_bf16_64_rows(const __grid_constant__ Params p) {
  using L = PairLayout<DIM>;
  EXPORT_SHARED_BYTES(L);
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  if (YIELDS && is_done<L::THREADS>(p, shared_address(shared_memory) + L::TILES)) return;
  attend_all<DIM, Launch::ROWS>(p);
}

// One copy of the code serves both ways: with two copies ptxas keeps too much in registers.
template <int DIM>
__global__ void __launch_bounds__(384, 1) sparse_attention_bf16_64_balanced_rows(const __grid_constant__ Params p) {
  prefetch_code<128>();
  EXPORT_SHARED_BYTES(PairLayout<DIM>);
  attend_all<DIM, Launch::BALANCED>(p);
}

template <int DIM, bool YIELDS = false>
__global__ void __attribute__((cluster_dims())) __launch_bounds__(384, 1)
    sparse_attention_bf16_64_clusters(const __grid_constant__ Params p) {
  if (BY_LENGTH) prefetch_code<128>();
  using L = PairLayout<DIM>;
  EXPORT_SHARED_BYTES(L);
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 shared = shared_address(shared_memory);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x >> 7, 0), thread = threadIdx.x & 127;
  if (YIELDS && is_done<L::THREADS>(p, shared + L::TILES)) return;
  Row row;
  if (BY_LENGTH) row = this_row(p);
  if ((BY_LENGTH ? row.token : token_of(p)) >= p.num_tokens) return;
  Stream stream;
  if (!BY_LENGTH && warpgroup == 2) row = this_row(p);
  if (warpgroup == 2) stream = begin_stream(p, row, thread >> 5, thread & 31);
  init_barriers<L>(shared);
  if (warpgroup < 2) {
    more_registers<224>();
    attend_cluster<L>(p, BY_LENGTH ? row : this_row(p), shared);
  } else {
    fewer_registers<56>();
    gather_row<L>(p, row, stream, shared, thread);
    launch_dependents();
    if (!leaves_units<L::HEADS>(row)) {
      stand_by<L>(p, row, shared, true, thread);
      weigh_parts<L>(p, row, shared, thread);
      __syncwarp();
      warp_arrive(shared + L::OWN_FULL, thread % 32);
    }
    wait_for_prerequisites();
  }
}
