// Tiles of 64 heads over bfloat16 keys (`sparse_attention_bf16_64.cu`): a turn's scores, softmax and values.
#pragma once

#include "pair_gather.cuh"
#include "wgmma.cuh"

// A thread's state of a row; it has heads `head` and `head` + 8.
struct State {
  float o[128];  // heads by 256 dims; anything before the first values
  float running_max[2], sum[2];
  u32 query[16];  // a chunk of the queries
};

// Addresses of this thread's running maxima and of its row of weights. Registers keep them: to compute them in each turn
// would read a special register, which takes 100 cycles.
struct Places {
  u32 running_max, weights;
};

template <class L>
DEVICE Places places_of(u32 shared, int w, int warp, int lane) {
  const u32 running_max = shared + L::RUNNING_MAX + (warp * 16 + lane / 4) * 4,
            row = shared + L::WEIGHTS + w * CHUNK + (warp * 16 + lane % 16) * 128;
  return {static_cast<u32>(opaque(running_max)), static_cast<u32>(opaque(row + ((lane / 16 ^ lane) & 7) * 16))};
}

// This thread's share of 64 dims, as wgmma's first operand.
template <class L>
DEVICE void load_query_fragments(const Params& p, const Row& row, State& state, int half, int head, int t) {
  const int chunk = (half ? 3 : 7) ^ turned_chunks(row);
  const u32* from[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int own = global_head<L>(p, row, head + 8 * i);
    const u16* dims =
        L::FIRST == ROPE ? query_rope_at(p, row.token, own) : query_at(p, row.token, own) + chunk * 64;
    from[i] = reinterpret_cast<const u32*>(dims) + t;
  }
#pragma unroll
  for (int e = 0; e < 16; ++e) state.query[e] = __ldg(from[e & 1] + e / 4 * 8 + (e & 2) * 2);
}

// Multiplies the queries with one group of the dims of warpgroup w's tile.
template <class L, Group GROUP>
DEVICE void multiply_queries(float (&s)[32], const State& state, u32 shared, int w, u32 parity) {
  mbarrier_wait(full_barrier<L>(shared, w, GROUP), parity);
  fence_async_shared();
  const int first = GROUP == ROPE ? 8 : (GROUP == FAR ? w ^ 1 : w) * 4;
  const u64 query = tile_descriptor(shared + L::QUERY + first * CHUNK, 1024, 16),
            keys = tile_descriptor(shared + L::TILES + w * L::TILE + first * CHUNK, 1024, 16);
  constexpr Group IN_REGISTERS = L::FIRST == ROPE ? ROPE : FAR;
  constexpr int COUNT = GROUP == ROPE ? 1 : 4;
  wgmma_fence();
#pragma unroll
  for (int chunk = 0; chunk < COUNT; ++chunk)
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int add = GROUP != L::FIRST || chunk > 0 || k > 0, step = (chunk * CHUNK + k * 32) / 16;
      if (GROUP == IN_REGISTERS && chunk + 1 == COUNT)
        wgmma_bfloat16(s, state.query + k * 4, keys + step, add);
      else
        wgmma_heads_by_keys(s, query + step, keys + step, add);
    }
  wgmma_commit();
}

// Moves running maxima, and rescales what was added up relative to the old ones, unless there is nothing yet.
DEVICE void change_running_max(State& state, float first, float second, bool empty) {
  if (!empty) {
    const float alpha[2] = {exp2_approx(state.running_max[0] - first), exp2_approx(state.running_max[1] - second)};
#pragma unroll
    for (int e = 0; e < 128; ++e) state.o[e] *= alpha[e >> 1 & 1];
    state.sum[0] *= alpha[0], state.sum[1] *= alpha[1];
  }
  state.running_max[0] = first, state.running_max[1] = second;
}

// Multiplies weights, in registers or in shared memory, with the values at a descriptor. EMPTY: the accumulators become
// the products; else these are added.
template <class A>
DEVICE void multiply_values(State& state, A weights, u64 values, int step, bool empty) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    wgmma_heads_by_dims_bfloat16(state.o, weights + k * step, values + k * 128, k > 0 || !empty);
    if ((k + 1) * KEY_HALVES % 4 == 0) wgmma_commit();
  }
}

// Waits for those products, after which LATER more groups were begun.
template <class L, Group GROUP, int LATER, int PART = 0>
DEVICE void release_values(u32 shared, int tile, int lane) {
  if constexpr (PART < KEY_HALVES) {
    wgmma_wait<LATER + KEY_HALVES - 1 - PART>();
    warp_arrive(free_barrier<L>(shared, tile, GROUP, PART), lane);
    release_values<L, GROUP, LATER, PART + 1>(shared, tile, lane);
  }
}

// Begins warpgroup w's half of the values of the other's turn.
template <class L>
DEVICE void add_other(State& state, const Places& at, u32 shared, int w, u32 parity, bool empty) {
  mbarrier_wait(full_barrier<L>(shared, w ^ 1, FAR), parity);  // long since full: now to this warpgroup's knowledge
  mbarrier_wait(shared + L::WEIGHTS_FULL + (w ^ 1) * 8, parity);
  fence_async_shared();  // here, where there is time, and not by who wrote them
  const float first = load_shared_float(at.running_max), second = load_shared_float(at.running_max + 32);
  if (__any_sync(~0u, first != state.running_max[0] || second != state.running_max[1])) {
    wgmma_wait<0>();
    hold(state.o);
    change_running_max(state, first, second, empty);
  }
  const u64 weights = tile_descriptor(shared + L::WEIGHTS + (w ^ 1) * CHUNK, 1024, 16),
            values = tile_descriptor(shared + L::TILES + (w ^ 1) * L::TILE + w * 4 * CHUNK, 1024, CHUNK);
  hold(state.o);
  multiply_values(state, weights, values, 2, empty);
}

// Turns scores into weights relative to the running maxima; true if a weight is far too large for them, which is known
// before the weights are.
DEVICE bool weigh(const float (&s)[32], float scale, const State& state, float (&weights)[32]) {
  float largest[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
#pragma unroll
  for (int e = 0; e < 32; ++e) {
    const float exponent = fmaf(s[e], scale, -state.running_max[e >> 1 & 1]);
    largest[e & 3] = fmaxf(largest[e & 3], exponent);
    weights[e] = exp2_approx(exponent);
  }
  return fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3])) > RESCALE_THRESHOLD;
}

// Stores weights for the other warpgroup.
template <class L>
DEVICE void hand_over(const u32 (&weights)[16], const Places& at, u32 shared, int w, int lane) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
    store_matrices(at.weights ^ k * 32, weights[4 * k], weights[4 * k + 1], weights[4 * k + 2], weights[4 * k + 3]);
  __syncwarp();
  warp_arrive(shared + L::WEIGHTS_FULL + w * 8, lane);
}

// Whether all keys of warpgroup w's turn count.
template <class L>
DEVICE bool all_live(u32 shared, int w) {
  const uint4 live = load_shared_16(shared + L::LIVE + w * 16);
  return (live.x & live.y & live.z & live.w) == 0xffff;
}

// Turns the scores of warpgroup w's turn into weights, in registers and in shared memory.
template <class L>
DEVICE void soften(const Params& p, State& state, float (&s)[32], u32 (&weights)[16], const Places& at, u32 shared,
                   int w, bool all, bool first, int lane) {
  float scale = p.scale_log2;
  if (!all) {
    const uint4 live = load_shared_16(shared + L::LIVE + w * 16);
    const u32 words[4] = {live.x, live.y, live.z, live.w};
    const int column = lane_here() % 4 * 2;
#pragma unroll
    for (int e = 0; e < 32; ++e) {
      const int key = e / 4 * 8 + (e & 1);
      s[e] = words[key / 16] >> (key % 16 + column) & 1 ? s[e] * scale : -INFINITY;
    }
    scale = 1.f;
  }
  float weight[32];
  if (first || __any_sync(~0u, weigh(s, scale, state, weight))) {  // the first turn sets the running maxima
    // Running maxima are rounded products. Of one that is not, a score of 2^40 would be left that exp2 does not take.
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int e = 0; e < 32; ++e) s[e] *= scale, top[e >> 1 & 1] = fmaxf(top[e >> 1 & 1], s[e]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], 1));
      top[i] = fmaxf(fmaxf(top[i], __shfl_xor_sync(~0u, top[i], 2)), state.running_max[i]);
    }
    change_running_max(state, top[0], top[1], first);
    weigh(s, 1.f, state, weight);
    if (lane_here() % 4 == 0) {
      store_shared_float(at.running_max, state.running_max[0]);
      store_shared_float(at.running_max + 32, state.running_max[1]);
    }
  }
  // A loop of its own: among the exponentials each conversion would wait for one of them.
#pragma unroll
  for (int i = 0; i < 16; ++i) weights[i] = pack_bfloat16(weight[2 * i], weight[2 * i + 1]);
  hand_over<L>(weights, at, shared, w, lane);
  float sum[4] = {};
#pragma unroll
  for (int e = 0; e < 32; ++e) sum[e & 3] += weight[e];
  state.sum[0] += sum[0] + sum[1], state.sum[1] += sum[2] + sum[3];
}

// Adds warpgroup w's half of the values of its own turn.
template <class L>
DEVICE void add_own(State& state, u32 (&weights)[16], u32 shared, int w, int lane, bool empty) {
  const u64 values = tile_descriptor(shared + L::TILES + w * (L::TILE + 4 * CHUNK), 1024, CHUNK);
  hold(state.o);
  hold(weights);
  multiply_values<const u32*>(state, weights, values, 4, empty);
  release_values<L, NEAR, 0>(shared, w, lane);
  hold(state.o);
}
