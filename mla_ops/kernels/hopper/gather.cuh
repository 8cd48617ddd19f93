// The gather: rows of the cache into shared memory, as they are.
#pragma once

#include "layout.cuh"

// A key of a producing lane: its row, or one of zeros that stands for a key which is not attended, and its scales if
// they lie apart.
struct Key {
  const unsigned char* row;
  uint2 scales;
  bool live;
};

template <class R>
DEVICE Key key_at(const Params& p, const Row& row, int turn, int request, int index) {
  const Cache& cache = p.caches[turn >= row.main_turns];
  int block = index / cache.block_size;
  const int offset = index - block * cache.block_size;
  Key key;
  key.live = index >= 0;
  if (cache.block_table) {
    key.live =
        key.live && static_cast<u32>(request) < static_cast<u32>(cache.num_requests) && block < cache.table_width;
    block = key.live ? __ldg(cache.block_table + request * cache.table_stride + block) : -1;
  }
  key.live = key.live && block >= 0 && block < cache.num_blocks;
  const unsigned char* rows = cache.rows + block * cache.block_bytes;
  key.row = key.live ? rows + offset * R::BYTES : p.zero_row;
  if constexpr (R::SCALES_APART) {
    key.scales = make_uint2(R::DEAD_SCALES, R::DEAD_SCALES);
    if (key.live)
      key.scales = __ldg(reinterpret_cast<const uint2*>(rows + cache.block_size * R::BYTES + offset * R::SCALES_PITCH));
  }
  return key;
}

// The index of a producing lane's key in a turn, -1 past the end. Half of the lanes have one.
DEVICE int index_at(const Params& p, const Row& row, int turn, int warp, int lane) {
  const bool extra = turn >= row.main_turns;
  const int position = (extra ? turn - row.main_turns : turn) * KEYS + warp * 16 + lane;
  if (lane >= 16 || turn >= row.last || position >= (extra ? row.extra_length : row.length)) return -1;
  const Cache& cache = p.caches[extra];
  return __ldg(cache.indices + row.token * cache.indices_stride + position);
}

template <int HEADS, Format FORMAT>
DEVICE void produce(const Params& p, const Row& row, u32 shared, int index, int warp, int lane) {
  using L = Layout<HEADS, FORMAT>;
  using R = Rows<FORMAT>;
  const int request = p.req_id_per_token ? __ldg(p.req_id_per_token + row.token) : -1;
  Key key = key_at<R>(p, row, row.first, request, index);
  u32 stage = 0, parity = 1;
  for (int turn = row.first; turn < row.last; ++turn) {
    index = index_at(p, row, turn + 1, warp, lane);
    const u32 barrier = shared + L::RAW_FULL + (stage * 4 + warp) * 8;
    mbarrier_wait(barrier + L::RAW_FREE - L::RAW_FULL, parity);
    const u32 alive = __ballot_sync(~0u, key.live);
    if (lane == 0) store_shared_4(shared + L::LIVE + (stage * 4 + warp) * 4, alive);
    if (lane == 0) {
      if constexpr (R::SCALES_APART)
        mbarrier_expect(barrier, 16 * R::BYTES);
      else
        mbarrier_arrive_expect(barrier, 16 * R::BYTES);
    }
    __syncwarp();
    const u32 destination = shared + L::RAW + stage * L::RAW_STAGE + warp * (16 * R::BYTES);
#pragma unroll 4
    for (int r = 0; r < 16; ++r) {
      const unsigned char* from = shuffle_pointer(key.row, r);
      if (elect_one()) bulk_copy(destination + r * R::BYTES, from, R::BYTES, barrier);
    }
    if constexpr (R::SCALES_APART) {
      if (lane < 16)
        store_shared_8(shared + L::SCALES + stage * L::SCALES_STAGE + (warp * 16 + lane) * R::SCALES_PITCH,
                       key.scales.x, key.scales.y);
      __syncwarp();
      if (lane == 0) mbarrier_arrive(barrier);
    }
    key = key_at<R>(p, row, turn + 1, request, index);
    if (++stage == L::STAGES) stage = 0, parity ^= 1;
  }
}
