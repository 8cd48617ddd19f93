// Keys of rows in slices: the list of a row's live keys, the rows of a CTA's turns, and what leaves it.
#pragma once

#include "gather.cuh"
#include "slices_layout.cuh"
#include "slices_ptx.cuh"

// The warps that gather list the positions of a row's live keys in their order, a quarter of its turns each.
template <class Y>
DEVICE void list_keys(const Params& p, const Row& row, u32 shared, int warp, int lane) {
  constexpr int MOST_HALVES = (MOST_TURNS_IN_SLICES + 3) / 4 * 2;
  const int turns = (row.last + 3) / 4, first = warp * turns;
  int index[MOST_HALVES];
#pragma unroll
  for (int i = 0; i < MOST_HALVES; ++i) index[i] = i / 2 < turns ? index_at(p, row, first + i / 2, i % 2, lane) : -1;
  u32 mask = 0;  // lane i: live positions of the i-th half of a turn
  int count = 0;
#pragma unroll
  for (int i = 0; i < MOST_HALVES; ++i) {
    const u32 found = __ballot_sync(~0u, in_range(p.caches[first + i / 2 >= row.main_turns], index[i]));
    if (lane == i) mask = found;
    count += __popc(found);
  }
  if (lane == 0) store_shared_4(shared + Y::COUNTS + warp * 4, count);
  converge();
  named_barrier<STATES_BARRIER, 128>();
  int place = 0;
  for (int before = 0; before < warp; ++before) place += load_shared_4(shared + Y::COUNTS + before * 4);
#pragma unroll 1
  for (int i = 0; i < 2 * turns; ++i) {
    const u32 found = __shfl_sync(~0u, mask, i);
    if (found >> lane & 1)
      store_shared_2(shared + Y::LIST + (place + __popc(found & ((1u << lane) - 1))) * 2, first * 64 + i * 32 + lane);
    converge();
    place += __popc(found);
  }
  warp_arrive(shared + Y::LIST_FULL, lane);
  converge();
}

// The number of live keys.
template <class Y>
DEVICE int await_list(u32 shared) {
  mbarrier_wait(shared + Y::LIST_FULL, 0);
  const uint4 counts = load_shared_16(shared + Y::COUNTS);
  return uniform(counts.x + counts.y + counts.z + counts.w);
}

DEVICE int turns_of(int count) { return max(1, (count + TILE_KEYS - 1) / TILE_KEYS); }

// A live key's position, and what the row has there.
struct Key {
  int position, index;  // negative: none
};

template <class Y>
DEVICE Key key_at(const Params& p, const Row& row, u32 shared, int number, int count) {
  Key key{-1, -1};
  if (number >= count) return key;
  key.position = load_shared_2(shared + Y::LIST + number * 2);
  const bool extra = key.position >= row.main_turns * TILE_KEYS;
  const int local = key.position - (extra ? row.main_turns * TILE_KEYS : 0);
  const int* indices = extra ? p.indices[1] : p.indices[0];
  const i64 stride = extra ? p.indices_stride[1] : p.indices_stride[0];
  key.index = indices ? __ldg(indices + row.token * stride + local) : local;
  return key;
}

// Addresses of a key's row and scales; null: none.
struct KeyAddress {
  const unsigned char *row, *scales;
};

template <class R>
DEVICE KeyAddress address_in(const Cache& cache, int request, int index) {
  const Place place = place_at(cache, request, index);
  if (!is_live(cache, place)) return {nullptr, nullptr};
  const unsigned char* row = row_of_key<R>(cache, place);
  if constexpr (R::SCALES_APART) return {row, scales_of_key<R>(cache, place)};
  return {row, row + R::SCALES_AT};
}

// All lanes of a warp ask.
template <class R>
DEVICE KeyAddress address_of(const Params& p, const Row& row, int request, const Key& key) {
  const bool extra = key.position >= row.main_turns * TILE_KEYS;
  if (!__any_sync(~0u, extra)) return address_in<R>(p.caches[0], request, key.index);
  return address_in<R>(p.caches[extra], request, key.index);
}

// The record of one of this CTA's turns to memory once it is made, by a warp, and word of it to all CTAs.
template <class Y>
DEVICE void publish(const Params& p, u32 shared, int turn, int own, int lane) {
  mbarrier_wait(shared + Y::OWN_FULL + own % 4 * 8, own >> 2 & 1);
  fence_async_shared();
  if (lane == 0) {
    bulk_store(record_of(p, turn), shared + Y::OWN, 8192);
    commit_bulk_stores();
    await_bulk_reads();
    mbarrier_arrive(shared + Y::OWN_FREE);
    await_bulk_writes();
    fence_async();
  }
  converge();
  if (lane < Y::CTAS) mbarrier_release_peer(peer_address(shared + Y::PUBLISHED + turn * 8, lane));
  converge();
}

// Rows of this CTA's turns to the ring, a warp's 16 keys each.
template <class Y>
DEVICE void gather_turns(const Params& p, const Row& row, u32 shared, int rank, int warp, int lane) {
  using R = typename Y::R;
  const int request = uniform(request_of(p, row));
  list_keys<Y>(p, row, shared, warp, lane);
  const int count = await_list<Y>(shared), turns = turns_of(count);
  int slot = warp, parity = 1;
  auto key_of = [&](int turn) {
    return key_at<Y>(p, row, shared, turn * TILE_KEYS + warp * 16 + lane, lane < 16 ? count : 0);
  };
  Key key = key_of(rank);
  cluster_wait();  // other CTAs' barriers are there
  auto bring = [&](int turn) {
    const u32 barrier = shared + Y::RAW_FULL + slot * 8, rows = shared + Y::RAW + slot * Y::RAW_SLOT,
              scales = shared + Y::SCALES + slot * Y::SCALES_SLOT;
    const KeyAddress from = address_of<R>(p, row, request, key);
    key = key_of(turn + Y::CTAS);
    const bool copies = from.row;
    const u32 live = __ballot_sync(~0u, copies);
    mbarrier_wait(barrier + Y::RAW_FREE - Y::RAW_FULL, parity);
    if constexpr (R::SCALES_APART)
      if (copies) copy_8(scales + lane * R::SCALES_PITCH, from.scales);
    if (copies) bulk_copy(rows + lane * R::BYTES, from.row, R::BYTES, barrier);
    if (live != 0xffff) clear_rows<R>(rows, scales, live, lane);
    if (lane == 0) {
      store_shared_4(shared + Y::LIVE + slot * 4, live);
      if constexpr (R::SCALES_APART) mbarrier_expect(barrier, __popc(live) * R::BYTES);
    }
    __syncwarp();
    if constexpr (R::SCALES_APART)
      arrive_when_copied(barrier), warp_arrive(barrier, lane);
    else if (arrives(lane))
      mbarrier_arrive_expect(barrier, lane == 0 ? __popc(live) * R::BYTES : 0);
    converge();
    next_slot<Y::SLOTS>(slot, parity);
  };
#pragma unroll 1
  for (int turn = rank, own = 0;; turn += Y::CTAS, ++own) {
    if (turn < turns) bring(turn);
    if (own >= 1 && (own - 1) % 4 == warp) publish<Y>(p, shared, turn - Y::CTAS, own - 1, lane);
    if (turn >= turns) break;
  }
}

// The sums of weights of the heads of this CTA, as the thread of `score` adds them up whose number this one has. They go to
// all CTAs; -1 where the row can not be taken in slices.
template <class Y, int CHUNKS>
DEVICE void add_up_weights(const Params& p, u32 shared, int rank, int thread) {
  constexpr int TILES = CHUNKS ? CHUNKS : 1, AT_ONCE = 4;
  const int part = CHUNKS ? rank : rank / 2;  // two CTAs with half a chunk each add up the same
  const int turns = turns_of(await_list<Y>(shared)), warp = thread >> 5, lane = thread & 31;
  float sums[TILES * 2];
#pragma unroll
  for (int i = 0; i < TILES * 2; ++i) sums[i] = 0.f;
  const unsigned char* from = record_of(p, 0) + 8192 + part * (TILES * 2048) + thread * 16;
#pragma unroll 1
  for (int turn = 0; turn < turns; turn += AT_ONCE) {
#pragma unroll 1
    for (int i = turn; i < min(turn + AT_ONCE, turns); ++i) mbarrier_wait_cluster(shared + Y::PUBLISHED + i * 8, 0);
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      uint4 v[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        v[i] = make_uint4(0, 0, 0, 0);
        if (turn + i < turns && part * TILES + tile < 8) v[i] = load_l2_16(from + i * RECORD + tile * 2048);
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        sums[2 * tile] = __uint_as_float(v[i].x) + (__uint_as_float(v[i].z) + sums[2 * tile]);
        sums[2 * tile + 1] = __uint_as_float(v[i].y) + (__uint_as_float(v[i].w) + sums[2 * tile + 1]);
      }
    }
    from += AT_ONCE * RECORD;
  }
  const u32* const turn_refused = refused_turns(p);
  const bool refused = __any_sync(~0u, lane < turns && __ldcg(turn_refused + lane) ||
                                           lane + 32 < turns && __ldcg(turn_refused + lane + 32));
  if (thread == 0 && rank == 0) *is_refused(p, cluster_index(p)) = refused;
  converge();
  const u32 sums_at = shared + Y::DESK;  // as `store_sums` and `sum_of` add up
#pragma unroll
  for (int i = 0; i < TILES * 2; ++i) {
#pragma unroll
    for (int step = 16; step >= 4; step >>= 1) sums[i] += __shfl_xor_sync(~0u, sums[i], step);
    if (lane < 4) store_shared_float(sums_at + (warp * (TILES * 8) + i / 2 * 8 + 2 * lane + i % 2) * 4, sums[i]);
  }
  converge();
  named_barrier<STATES_BARRIER, 128>();
  const int head = part * (TILES * 8) + thread;
  if (thread < TILES * 8 && head < 64 && (CHUNKS || rank % 2 == 0)) {
    float part[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) part[w] = load_shared_float(sums_at + (w * (TILES * 8) + thread) * 4);
    const float sum = refused ? -1.f : part[0] + part[1] + (part[2] + part[3]);
#pragma unroll 1
    for (int to = 0; to < Y::CTAS; ++to)
      send_4(peer_address(shared + Y::FINAL + head * 4, to), peer_address(shared + Y::FINAL_FULL, to), sum);
  }
  converge();
}
