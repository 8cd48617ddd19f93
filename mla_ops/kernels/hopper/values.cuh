// Weights times values.
#pragma once

#include "by_group.cuh"
#include "cuts.cuh"
#include "group.cuh"
#include "held.cuh"
#include "wgmma.cuh"
#include "wide.cuh"

DEVICE u32 scaled_pair(float a, float b, float factor) {
  return factor == 0.f ? 0u : pack_bfloat16(a * factor, b * factor);
}

// The factor of each of a warp's 16 heads, in both halves of it, from the sums that `score` left, and their lse. A part's
// makes averages, FACTOR times as large as keys are, and is below 0 where these have to be bfloat16.
template <class L>
DEVICE float factors_of(const Params& p, const Row& row, u32 shared, u32 row_parity, bool reports, int part, int warp,
                        int lane) {
  const int head = warp * 16 + lane % 16, global_head = row.tile * L::HEADS + head;
  const bool there = global_head < p.num_heads;
  const float sink = p.attn_sink && there && part < 0 ? __ldg(p.attn_sink + global_head) : -INFINITY;
  mbarrier_wait(shared + L::FACTORS_FULL, row_parity);
  const u32 turn = load_shared_4(shared + L::TURN),
            sums = place_of_sums<L>(shared, turn >> 8 & 0xff);
  const float total = sum_of<L::HEADS>(sums, head);
  const bool rough = load_shared_4(shared + L::ROUGH) != 0;
  const float running_max = load_shared_float(shared + L::COLUMNS + head * 8 + 4);
  __syncwarp();
  warp_arrive(shared + L::FACTORS_FREE, lane);
  const float lse = total == 0.f ? -INFINITY : (running_max + log2_approx(total)) * 0.6931471805599453f;
  float factor = __fdividef(part < 0 ? 1.f / L::FACTOR : 1.f, total);
  if (reports && there && lane < 16) leave_lse(p, row, global_head, part, lse, rough ? -1.f / L::FACTOR : 1.f / L::FACTOR);
  if (part >= 0 && rough) factor = -factor;
  if (sink != -INFINITY) factor = __fdividef(factor, 1.f + exp2_approx((sink - lse) * 1.4426950408889634f));
  return total == 0.f ? 0.f : factor;
}

// The result of a warp's 16 heads and 256 dims, through where its warpgroup's values were into rows of 512 bytes.
template <class L>
DEVICE void store_result(const Params& p, const Row& row, u32 shared, const float (&o)[2][64], float factor, int half,
                         int thread) {
  const int warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
  const float factors[2] = {__shfl_sync(~0u, factor, g), __shfl_sync(~0u, factor, g + 8)};
  named_barrier(VALUES_BARRIER + 1 + half, 128);  // products of this warpgroup have left them
  const u32 stage = shared + L::VALUES + (half * 4 + warp) * 8192;
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float* v = o[i / 4] + i % 4 * 16 + 2 * r;
      const int unit = i / 2 * 8 + t * 2 + i % 2;
      store_shared_16(stage + (g + r * 8) * 512 + (unit ^ g) * 16, scaled_pair(v[0], v[1], factors[r]),
                      scaled_pair(v[4], v[5], factors[r]), scaled_pair(v[8], v[9], factors[r]),
                      scaled_pair(v[12], v[13], factors[r]));
    }
  __syncwarp();
  const int first_head = row.tile * 64 + warp * 16;
  u16* target = out_row(p, row, first_head) + half * 256 + lane * 8;
#pragma unroll 8
  for (int line = 0; line < 16; ++line, target += p.out_head_stride)
    if (first_head + line < p.num_heads)
      *reinterpret_cast<uint4*>(target) = load_shared_16(stage + line * 512 + (lane ^ (line & 7)) * 16);
}

// The same for dims by heads, of both warpgroups, with the factors that `score` left in the columns.
template <class L, int PIECES, int N>
DEVICE void store_result(const Params& p, const Row& row, u32 shared, u32 stage, const float (&o)[PIECES][N], int half,
                         int thread) {
  const int warp = thread >> 5, lane = thread & 31, t = lane & 3;
  const u32 first_dim = half * 256 + dim_of_row(warp, lane >> 2);
#pragma unroll
  for (int c = 0; c < N / 2; ++c) {
    const int head = c / 2 * 8 + 2 * t + (c & 1);
    const float factor = load_shared_float(shared + L::COLUMNS + head * 8);
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int dim = first_dim + piece * 64 + r * 2;
        const u32 value = factor == 0.f ? 0u : pack_bfloat16(o[piece][c / 2 * 4 + (c & 1) + 2 * r] * factor, 0.f);
        store_shared_2(stage + head * 1024 + ((dim / 8) ^ (head >> 1 & 3)) * 16 + dim % 8 * 2, value);
      }
  }
  __syncwarp();
  warp_arrive(shared + L::FACTORS_FREE, lane);
  named_barrier<VALUES_BARRIER, 256>();
  u16* target = out_row(p, row, row.tile * L::HEADS + half * 2 + thread / 64) + (thread & 63) * 8;
#pragma unroll 2
  for (int head = half * 2 + thread / 64; head < L::HEADS; head += 4, target += 4 * p.out_head_stride)
    if (row.tile * L::HEADS + head < p.num_heads)
      *reinterpret_cast<uint4*>(target) = load_shared_16(stage + head * 1024 + ((thread & 63) ^ (head >> 1 & 3)) * 16);
  named_barrier<VALUES_BARRIER, 256>();
}

// The place of the n-th pair of a warp's packets among its accumulators: with 64 heads a packet is a chunk of 64 dims,
// all of one of two heads.
template <class L>
DEVICE constexpr int place_of_pair(int n) {
  return L::Packet::ONE_HEAD ? (n / 16 * 8 + n % 8) * 4 + n / 8 % 2 * 2 : n * 2;
}

// The sum and the running maximum of a lane's head in a share, that score left. A sum below 0 says that the part is bfloat16.
template <class L>
DEVICE float2 state_of_share(u32 shared, u32 parity, int warp, int lane) {
  const int head = head_of_lane<L>(warp, lane);
  mbarrier_wait(shared + L::FACTORS_FULL, parity);
  const float sum = load_shared_float(shared + L::ALPHA + head * 4);
  float running_max = 0.f;  // of 64 heads score has left it
  if (L::HEADS < 64) running_max = sum == 0.f ? NO_SCORE_YET : load_shared_float(shared + L::COLUMNS + head * 8 + 4);
  __syncwarp();
  warp_arrive(shared + L::FACTORS_FREE, lane);
  return make_float2(sum, running_max);
}

// A thread's accumulators, as chunks of 64 heads or dims.
template <int HEADS>
using Accumulators = float[HEADS == 64 ? 2 : 4][HEADS == 64 ? 64 : HEADS / 2];

// A thread keeps this from share to share: the sum of all, or those that wait.
template <class L, Launch LAUNCH>
struct KeptOfShares {
  Accumulators<L::HEADS> sums;
};
template <class L>
struct KeptOfShares<L, Launch::HELD> : Held<L> {};
template <class L>
struct KeptOfShares<L, Launch::HELD_BY_ONE> : Held<L> {};

template <int HEADS, Format FORMAT, Launch LAUNCH, bool WIDER, bool FOR_FEW>
DEVICE u32 accumulate(const Params& p, const Row& row, u32 shared, int half, int thread,
                       Ring& at, u32 row_parity, u32 odd_row, KeptOfShares<Layout<HEADS, FORMAT>, LAUNCH>& before,
                       Accumulators<HEADS>& carried, u32 resumed) {
  using L = Layout<HEADS, FORMAT>;
  constexpr bool PERSISTENT = is_persistent(LAUNCH), SHARES = LAUNCH == Launch::SHARES, FOLDS = LAUNCH == Launch::FOLDS,
                 HELD = is_held(LAUNCH), HEADS_BY_DIMS = HEADS == 64,
                 OPENS_EARLY = !HELD || L::HELD_PACKETS > L::VALUES;
  const bool sends = LAUNCH == Launch::CLUSTERS && in_cluster(row) || HELD && ends_row(p, row);  // packets
  constexpr int PIECES = HEADS_BY_DIMS ? 2 : 4, N = HEADS_BY_DIMS ? 64 : HEADS / 2;
  thread = kept(thread);
  const int warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
  // The head of accumulator e.
  auto head_of = [&](int e) { return HEADS_BY_DIMS ? warp * 16 + g + (e & 2) * 4 : e / 4 * 8 + 2 * t + (e & 1); };
  constexpr bool BY_GROUPS = TURNS_BY_GROUP<HEADS, FORMAT, LAUNCH>;
  float own[PIECES][N];
  auto& o = BY_GROUPS ? carried : own;
  if (BY_GROUPS) resumed = opaque(resumed);
  if (!BY_GROUPS || !resumed) {
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece)
#pragma unroll
      for (int e = 0; e < N; ++e) o[piece][e] = 0.f;
    if constexpr (BY_GROUPS) hold(o[0]), hold(o[1]);
  }

  const u64 weights = tile_descriptor(shared + L::WEIGHTS, 1024, 16);
  const u64 values = tile_descriptor(shared + L::VALUES, 1024, TILE_KEYS * 128);
  bool open = false;
  int& i = at.turn;
  int stage = 0;
  u32 left = USUAL;
  for (bool ends = resumed; !ends; next_turn<L::HALVES>(at)) {
    const int slot = half_of<L::HALVES>(at, half).slot;
    stage = at.half;
    // Made before the weights are there: the scores of the next turn wait for what comes after.
    u32 freed = shared + L::VALUES_FREE + slot * 16;
    u64 turn_weights = weights, turn_values = values + slot * (HALF_BYTES / 16);
    hold(freed), hold(turn_weights), hold(turn_values);
    mbarrier_wait(shared + L::WEIGHTS_FULL, i & 1);
    fence_async_shared();  // those that make values and weights have no time for it
    const u32 turn = load_shared_4(shared + L::TURN);
    ends = uniform(turn) >= LAST_TURN;
    // Its values' place is free when the result has left.
    const bool last = PERSISTENT && (!SHARES || HEADS_BY_DIMS && ends_row(p, row)) && !HELD &&
                      (HEADS_BY_DIMS || half == 0) && ends;
    if ((turn & 0xff) != USUAL) {
      if constexpr (BY_GROUPS) {
        if ((uniform(turn) & 0xff) >= BY_GROUP) {
          left = turn;
          break;
        }
      }
      if (FOR_FEW) end_thread_if(__any_sync(~0u, (turn & 0xff) == EMPTY));
#pragma unroll
      for (int piece = 0; piece < PIECES; ++piece)
#pragma unroll
        for (int e = 0; e < N; ++e) o[piece][e] *= load_shared_float(shared + L::ALPHA + head_of(e) * 4);
      if (SHARES && HEADS_BY_DIMS && ends && (turn & 0xff) != WIDE) named_barrier_arrive(ALPHA_BARRIER, 384);
      if (!BY_GROUPS && (turn & 0xff) == WIDE) {
        // By steps of 16 keys, upper bits of the weights and then each group's rests.
        const int first = uniform(turn) >> 8 & 0xff;
#pragma unroll 1
        for (int step = 0; step < 8; ++step) {
          constexpr int GROUP = GROUPS_OF_RESTS<L> > 1 ? HEADS * 128 : 0;
          const u32 rests = place_of_rests<L>(shared, first) + half * 2 * GROUP, upper = shared + L::WEIGHTS;
          const u64 factors[2] = {tile_descriptor((step < 4 ? upper : rests) + step % 4 * 32, 1024, 16),
                                  tile_descriptor((step < 4 ? upper : rests + GROUP) + step % 4 * 32, 1024, 16)};
          const u64 place = turn_values + step % 4 * (2048 / 16);
#pragma unroll
          for (int piece = 0; piece < PIECES; ++piece) hold(o[piece]);
          wgmma_fence();
#pragma unroll
          for (int piece = 0; piece < PIECES; ++piece) {
            if constexpr (HEADS_BY_DIMS)
              wgmma_heads_by_dims_bfloat16(o[piece], factors[piece], place + piece * 2 * TILE_KEYS * 128 / 16);
            else
              wgmma_dims_by_heads_bfloat16(o[piece], place + piece * TILE_KEYS * 128 / 16, factors[piece / 2]);
          }
          wgmma_commit();
          wgmma_wait<0>();
#pragma unroll
          for (int piece = 0; piece < PIECES; ++piece) hold(o[piece]);
        }
        named_barrier<VALUES_BARRIER, 256>();
        if (SHARES && HEADS_BY_DIMS && ends) named_barrier_arrive(ALPHA_BARRIER, 384);
        const int keys = first + warp < L::SLOTS ? first + warp : first + warp - L::SLOTS;
        if (half == 0 && !(PERSISTENT && HEADS_BY_DIMS && ends && warp == 0))
          warp_arrive(shared + L::RAW_FREE + keys * 8, lane);
        if (!last) warp_arrive(freed, lane), warp_arrive(freed + 8, lane);
        if (HEADS < 64) warp_arrive(shared + L::WEIGHTS_FREE, lane);
        continue;
      }
    }
    // The first half of 64 heads arrives behind its products, which the next turn's values would wait for; the other
    // one is about to wait anyway.
    if (OPENS_EARLY && sends && ends && (!HEADS_BY_DIMS || half == 1)) cluster_arrive(), open = true;
    // One after the other: the scores of the next turn then wait for fewer products of the tensor cores.
    if (HEADS_BY_DIMS && half == 1 && !last) mbarrier_wait(shared + L::VALUES_FREE + 8, i & 1);
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) hold(o[piece]);
    wgmma_fence();
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if constexpr (HEADS_BY_DIMS)
          wgmma_heads_by_dims(o[piece], turn_weights + k * 2,
                              turn_values + (piece * 2 * TILE_KEYS * 128 + k * 2048) / 16);
        else
          wgmma_dims_by_heads(o[piece], turn_values + (piece * TILE_KEYS * 128 + k * 2048) / 16, turn_weights + k * 2);
      }
      if ((piece + 1) % (PIECES / 2) == 0) wgmma_commit();
    }
    if (OPENS_EARLY && sends && ends && !open) cluster_arrive(), open = true;
    wgmma_wait<1>();
    if (!last) warp_arrive(freed, lane);
    wgmma_wait<0>();
    if (!last) warp_arrive(freed + 8, lane);
    if (HEADS < 64) warp_arrive(shared + L::WEIGHTS_FREE, lane);
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) hold(o[piece]);
  }

  if constexpr (BY_GROUPS) {
    left = opaque(left);
    if (left) return 1;
  }
  if constexpr (SHARES) {
    const int worker = opaque(thread), lane = worker & 31, warp = half * 4 + (worker >> 5);
    const float2 state = state_of_share<L>(shared, row_parity, warp, lane);
    const bool over = ends_row(p, row);
    unsigned char* const parts = parts_of_warp<L>(p, warp, odd_row);
    u32 keeps = 0;
    if (HEADS_BY_DIMS && over) {
#pragma unroll 1
      for (int number = cluster_rank(); number < L::Packet::OF_A_WARP; number += p.splits) keeps |= 1 << number;
      named_barrier(VALUES_BARRIER + 1 + half, 128);  // products have left the values
    }
    leave_share<L>(parts + row.rank * (8 * PartOfWarp<L>::BYTES), kept_of_warp<L>(shared, warp), keeps, lane_here(),
                   state.x, state.y, [&](int n) {
                     const int place = place_of_pair<L>(n / 2) + n % 2;
                     return o[place / N][place % N];
                   });
    if (over) {
      const int later = kept(thread), lane = later & 31, warp = half * 4 + (later >> 5);
      meet_peers<L>(p, shared, lane, odd_row);
      const unsigned char* const parts = parts_of_warp<L>(p, warp, odd_row);
      const u32 kept_here = kept_of_warp<L>(shared, warp);
      if (p.shares > 4)
        add_shares<L, 8>(p, row, parts, kept_here, warp, lane);
      else
        add_shares<L, 4>(p, row, parts, kept_here, warp, lane);
      if (HEADS_BY_DIMS) {
        __syncwarp();
        const u32 freed = shared + L::VALUES_FREE + half * 16;
        warp_arrive(freed, lane), warp_arrive(freed + 8, lane);
      }
    }
  } else if constexpr (FOLDS) {
    const bool goes_on = !ends_row(p, row);
    auto free_values = [&]() {
      const u32 freed = shared + L::VALUES_FREE + stage * 16;
      if (half == 0) warp_arrive(freed, lane), warp_arrive(freed + 8, lane);
    };
    if (goes_on) free_values();
    mbarrier_wait(shared + L::FACTORS_FULL, row_parity);
    fold<L>(before.sums, o, shared, lane, begins_row(p, row));
    __syncwarp();
    if (goes_on) {
      warp_arrive(shared + L::FACTORS_FREE, lane);
      return 0;
    }
    named_barrier<VALUES_BARRIER, 256>();  // products of both warpgroups have left the values
    store_result<L>(p, row, shared, shared + L::VALUES + stage * HALF_BYTES, before.sums, half, opaque(thread));
    __syncwarp();
    free_values();
  } else if constexpr (HELD) {
    if (sends) {
      if (!open) open_to_peers(row);
      await_peers(row);
    }
    mbarrier_wait(shared + L::FACTORS_FULL, row_parity);
    push<L>(before, o, shared, lane);
    if (sends) {
      const int own = cluster_rank(), later = opaque(thread);
      send_held<L>(p, shared, before, own, half * 4 + (later >> 5), later & 31);
    } else {
      __syncwarp();
      warp_arrive(shared + L::FACTORS_FREE, lane);
    }
  } else if constexpr (PERSISTENT) {
    const int worker = opaque(thread);  // else addresses for the result stay in registers all the time
    const int part = LAUNCH == Launch::BALANCED ? part_of(p, shared + L::INTERVAL, row.token) : -1;
    auto leave = [&](float own, int worker) {  // a lane has the factor of one of its warp's heads
      const int lane = worker & 31;
      const bool rough = HEADS_BY_DIMS && __any_sync(~0u, own < 0.f);  // no head without a sum says it
      own = fabsf(own);
      const float factors[2] = {__shfl_sync(~0u, own, lane >> 2), __shfl_sync(~0u, own, (lane >> 2) + 8)};
      auto value_of = [&](int n) {
        const int place = place_of_pair<L>(n / 2) + n % 2;
        return o[place / N][place % N] * (HEADS_BY_DIMS ? factors[place >> 1 & 1] : 1.f);
      };
      if (rough)
        leave_part<L, true>(p, row, part, half * 4 + (worker >> 5), lane, value_of);
      else
        leave_part<L>(p, row, part, half * 4 + (worker >> 5), lane, value_of);
    };
    auto factor_of_lane = [&](int part) {
      return factors_of<L>(p, row, shared, row_parity, half == 0, part, worker >> 5, worker & 31);
    };
    if constexpr (!HEADS_BY_DIMS) {
      if (part >= 0) leave(1.f, worker);
      mbarrier_wait(shared + L::FACTORS_FULL, row_parity);
    }
    if (part >= 0) {
      if constexpr (HEADS_BY_DIMS) {
        leave(factor_of_lane(part), opaque(worker));
      } else {
        __syncwarp();
        warp_arrive(shared + L::FACTORS_FREE, lane);
      }
      tell_sharers<L, VALUES_BARRIER>(p, shared, part, half * 128 + worker);
    } else if constexpr (HEADS_BY_DIMS) {
      store_result<L>(p, row, shared, o, factor_of_lane(-1), half, worker);
    } else {
      named_barrier<VALUES_BARRIER, 256>();  // products of both warpgroups have left the values
      store_result<L>(p, row, shared, shared + L::VALUES + stage * HALF_BYTES, o, half, worker);
    }
    if (HEADS_BY_DIMS || half == 0) {
      __syncwarp();
      const u32 freed = shared + L::VALUES_FREE + (HEADS_BY_DIMS ? half : stage) * 16;
      warp_arrive(freed, lane), warp_arrive(freed + 8, lane);
    }
  } else {
    const bool alone = LAUNCH == Launch::CLUSTERS && leaves_units<HEADS>(row);
    if (LAUNCH == Launch::CLUSTERS && !alone) {
      if (!in_cluster(row)) named_barrier<VALUES_BARRIER, 256>();  // packets take the place of keys
      if (!open) open_to_peers(row);
      await_peers(row);
    }
    mbarrier_wait(shared + L::FACTORS_FULL, 0);  // states first: they would wait behind all packets
    const bool bfloat16 = load_shared_4(shared + L::End::OWN_BFLOAT16) != 0;
    float inverse[HEADS_BY_DIMS ? 2 : N / 2];
    const u32 inverses = shared + L::End::INVERSES;
    if constexpr (HEADS_BY_DIMS) {
      inverse[0] = load_shared_float(inverses + (warp * 16 + g) * 4);
      inverse[1] = load_shared_float(inverses + (warp * 16 + g + 8) * 4);
    } else {
#pragma unroll
      for (int j = 0; j < N / 4; ++j) {
        const float2 two = load_shared_float2(inverses + (j * 8 + 2 * t) * 4);
        inverse[2 * j] = two.x, inverse[2 * j + 1] = two.y;
      }
    }
    if constexpr (!HEADS_BY_DIMS) {
      if (by_halves<L, LAUNCH, WIDER>(p, row)) {
        exchange_halves<L>(p, row, shared, half * 4 + warp, lane, o, inverse, bfloat16);
        return 0;
      }
    }
    auto inverse_of = [&](int e) { return inverse[HEADS_BY_DIMS ? e >> 1 & 1 : e / 4 * 2 + (e & 1)]; };
    auto word_of = [&](int n) {
      const int place = place_of_pair<L>(n), piece = place / N, e = place % N;
      const float a = o[piece][e] * inverse_of(e), b = o[piece][e + 1] * inverse_of(e + 1);
      return bfloat16 ? pack_bfloat16(a, b) : pack_float16(a, b);
    };
    if constexpr (HEADS_BY_DIMS) {
      if (alone) {
        leave_words<L>(p, row, row.part, half * 4 + warp, lane, word_of);
        return 0;
      }
    }
    if constexpr (LAUNCH == Launch::GROUPS)
      leave_packets<L>(p, row, shared, half * 4 + warp, lane, word_of);
    else
      send_packets<L>(p, row, shared, half * 4 + warp, lane, word_of);
  }
  return 0;
}
