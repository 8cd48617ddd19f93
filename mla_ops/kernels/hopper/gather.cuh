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

// Rows of bfloat16.
template <int BYTES_>
struct PlainRows {
  static constexpr int BYTES = BYTES_;
  static constexpr bool SCALES_APART = false;
};

// A key's place in a cache before anything has been read at it; block < 0: not attended.
struct Place {
  int block, offset;
};

// Reads the block table: `rows_at` waits for it.
DEVICE Place place_at(const Cache& cache, int request, int index) {
  Place place;
  place.block = divide(index, cache.of_block_size);
  place.offset = index - place.block * cache.block_size;
  if (index < 0) place.block = -1;
  if (cache.block_table) {
    if (static_cast<u32>(request) >= static_cast<u32>(cache.num_requests) || place.block >= cache.table_width)
      place.block = -1;
    if (place.block >= 0) place.block = __ldg(cache.block_table + request * cache.table_stride + place.block);
  }
  return place;
}

template <class R>
DEVICE Key key_of(const Params& p, const Cache& cache, Place place) {
  Key key;
  key.live = static_cast<u32>(place.block) < static_cast<u32>(cache.num_blocks);
  const unsigned char* rows = cache.rows + place.block * cache.block_bytes;
  key.row = key.live ? rows + place.offset * R::BYTES : p.zero_row;
  if constexpr (R::SCALES_APART) {
    key.scales = make_uint2(R::DEAD_SCALES, R::DEAD_SCALES);
    if (key.live)
      key.scales =
          __ldg(reinterpret_cast<const uint2*>(rows + cache.block_size * R::BYTES + place.offset * R::SCALES_PITCH));
  }
  return key;
}

template <class R>
DEVICE Key key_at(const Params& p, const Row& row, int turn, int request, int index) {
  const Cache& cache = p.caches[turn >= row.main_turns];
  return key_of<R>(p, cache, place_at(cache, request, index));
}

// The index of a producing lane's key in a turn, -1 past the end. Half of the lanes have one.
DEVICE int index_at(const Params& p, const Row& row, int turn, int warp, int lane) {
  const bool extra = turn >= row.main_turns;
  const int position = (extra ? turn - row.main_turns : turn) * KEYS + warp * 16 + lane;
  if (lane >= 16 || turn >= row.last || position >= (extra ? row.extra_length : row.length)) return -1;
  const int* indices = extra ? p.indices[1] : p.indices[0];
  const i64 stride = extra ? p.indices_stride[1] : p.indices_stride[0];
  return indices ? __ldg(indices + row.token * stride + position) : position;
}

DEVICE int request_of(const Params& p, const Row& row) {
  return p.req_id_per_token && row.token < p.num_tokens ? __ldg(p.req_id_per_token + row.token) : -1;
}

template <int HEADS, Format FORMAT>
DEVICE void produce(const Params& p, const Row& row, u32 shared, int index, int warp, int lane, int& slot, int& parity,
                    bool paced) {
  using L = Layout<HEADS, FORMAT>;
  using R = Rows<FORMAT>;
  const int request = request_of(p, row);
  Key key = key_at<R>(p, row, row.first, request, index);
  for (int turn = row.first; turn < row.last; ++turn) {
    index = index_at(p, row, turn + 1, warp, lane);
    const u32 barrier = shared + L::RAW_FULL + slot * 8;
    mbarrier_wait(barrier + L::RAW_FREE - L::RAW_FULL, parity);
    const u32 alive = __ballot_sync(~0u, key.live);
    if (lane == 0) store_shared_4(shared + L::LIVE + slot * 4, alive);
    if (lane == 0) {
      if constexpr (R::SCALES_APART)
        mbarrier_expect(barrier, 16 * R::BYTES);
      else
        mbarrier_arrive_expect(barrier, 16 * R::BYTES);
    }
    __syncwarp();
    const u32 destination = shared + L::RAW + slot * L::RAW_SLOT;
    const unsigned char* first = shuffle_pointer(key.row, 0);
    if (__all_sync(~0u, lane >= 16 || key.row == first + lane * R::BYTES)) {  // neighbours, as in dense attention
      if (elect_one()) bulk_copy(destination, first, 16 * R::BYTES, barrier);
    } else if (lane < 16) {
      bulk_copy(destination + lane * R::BYTES, key.row, R::BYTES, barrier);
    }
    if constexpr (R::SCALES_APART) {
      if (lane < 16)
        store_shared_8(shared + L::SCALES + slot * L::SCALES_SLOT + lane * R::SCALES_PITCH, key.scales.x, key.scales.y);
      __syncwarp();
      warp_arrive(barrier, lane);
    }
    key = key_at<R>(p, row, turn + 1, request, index);
    if (paced && turn == row.first) mbarrier_wait(barrier, 0);
    next_slot<L::SLOTS>(slot, parity);
  }
}

// ---- keys of bfloat16, straight into the tiles that wgmma reads -----------------------------------------------------

// A warp copies 16 keys, eight lanes 128 bytes of one: a lane has four keys, every fourth, from lane / 8 on.
struct OwnRows {
  const unsigned char* from[4];  // this lane's 16 bytes of each key's first 128
};

DEVICE OwnRows own_rows(const unsigned char* row, int lane) {
  OwnRows own;
#pragma unroll
  for (int i = 0; i < 4; ++i) own.from[i] = shuffle_pointer(row, i * 4 + lane / 8) + lane % 8 * 16;
  return own;
}

// Where a lane's first 16 bytes go, in a tile of [64, 64] a chunk of 64 dims, 128-byte rows, swizzled.
DEVICE u32 own_place(u32 tile, int warp, int lane) {
  return tile + (warp * 16 + lane / 8) * 128 + ((lane ^ lane / 8) & 7) * 16;
}

template <int I, int CHUNK, int LAST>
DEVICE void copy_chunks_of(const OwnRows& own, u32 to) {
  if constexpr (CHUNK < LAST) {
    copy_16<I * 512 + CHUNK * KEYS * 128, CHUNK * 128>(to, own.from[I]);
    copy_chunks_of<I, CHUNK + 1, LAST>(own, to);
  }
}

// Chunks [FIRST, LAST) of 64 dims. One instruction a copy: offsets are constants.
template <int FIRST, int LAST>
DEVICE void copy_chunks(const OwnRows& own, u32 to) {
  copy_chunks_of<0, FIRST, LAST>(own, to), copy_chunks_of<1, FIRST, LAST>(own, to ^ 64);
  copy_chunks_of<2, FIRST, LAST>(own, to), copy_chunks_of<3, FIRST, LAST>(own, to ^ 64);
}
