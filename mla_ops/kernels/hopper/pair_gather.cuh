// Tiles of 64 heads over bfloat16 keys (`sparse_attention_bf16_64.cu`): the plan of shared memory, and the gather.
#pragma once

#include "empty.cuh"

constexpr int CHUNK = TILE_KEYS * 128;  // bytes of 64 dims of 64 keys or heads
constexpr int PAIR_BARRIER = 6;

// A tile's dims come and go in three groups: those past the values, the half of the values' dims that the turn's owner
// adds, which is used up first, and the other half.
enum Group { ROPE = 0, NEAR = 1, FAR = 2, GROUPS = 3 };

// The room of a group's values becomes free in two parts, each for half of a turn's keys.
constexpr int KEY_HALVES = 2;

template <int DIM>
struct PairLayout {
  static constexpr int HEADS = 64, CHUNKS = DIM / 64;
  static constexpr float FACTOR = 1.f;
  static constexpr bool PERMUTED = false;
  static constexpr int THREADS = 384;
  // Registers hold one more chunk of queries, since shared memory is as busy as the tensor cores are: RoPE, for which
  // shared memory has no room, or the chunk that a warpgroup multiplies last.
  static constexpr int QUERY_CHUNKS = 8;
  static constexpr Group FIRST = CHUNKS > 8 ? ROPE : NEAR;
  static constexpr int QUERY = 0;
  static constexpr int WEIGHTS = QUERY + QUERY_CHUNKS * CHUNK;  // a warpgroup's of its turn; at the end its results
  static constexpr int TILES = WEIGHTS + 2 * CHUNK;
  static constexpr int TILE = CHUNKS * CHUNK;
  static constexpr int RUNNING_MAX = TILES + 2 * TILE;  // float a head, of the latest turn
  static constexpr int SUMS = RUNNING_MAX + HEADS * 4;  // float a head, of each warpgroup, of even and odd rows
  static constexpr int LIVE = SUMS + 4 * HEADS * 4;    // u32 a tile and warp: which of its 16 keys count
  static constexpr int ENDS = LIVE + 2 * 16;           // u32 a tile: which turn is the row's last
  static constexpr int LIST = ENDS + 2 * 4;            // keys that each warp of the gather brings next
  static constexpr int INTERVAL = (LIST + 4 * LIST_WORDS * 4 + 7) / 8 * 8;
  static constexpr int FULL = INTERVAL + 16;  // one for each tile and group, FREE for each part of the keys as well
  static constexpr int FREE = FULL + 2 * GROUPS * 8;
  static constexpr int WEIGHTS_FULL = FREE + 2 * GROUPS * KEY_HALVES * 8;
  static constexpr int QUERY_FULL = WEIGHTS_FULL + 2 * 8;
  static constexpr int QUERY_FREE = QUERY_FULL + 8;
  static constexpr int STATES_FULL = QUERY_FREE + 8;  // clusters only
  static constexpr int PACKETS_FULL = STATES_FULL + 8;
  static constexpr int OWN_FULL = PACKETS_FULL + 8;
  static constexpr int BYTES = OWN_FULL + 8;
  using End = Ends<HEADS, QUERY>;
  static constexpr int PACKETS = WEIGHTS;
  using Packet = Packets<HEADS, false>;
  static_assert(PACKETS + Packet::ROOM <= RUNNING_MAX, "packets overlap the running_max");
  static_assert(BYTES <= 232448, "more shared memory than an SM has");
};

template <class L>
DEVICE u32 full_barrier(u32 shared, int tile, Group group) {
  return shared + L::FULL + (tile * GROUPS + group) * 8;
}

template <class L>
DEVICE u32 free_barrier(u32 shared, int tile, Group group, int part) {
  return shared + L::FREE + ((tile * GROUPS + group) * KEY_HALVES + part) * 8;
}

// Each CTA of a cluster of two keeps the results of half of a warpgroup's dims. Keys and queries lie so that these dims
// are its first ones: chunk c of the values' dims stands at c ^ turned_chunks.
DEVICE int turned_chunks(const Row& row) { return row.splits == 2 ? row.rank * 2 : 0; }

// The number of a head of the row's tile; the last one's for heads past it.
template <class L>
DEVICE int global_head(const Params& p, const Row& row, int head) {
  return min(row.tile * L::HEADS + head, p.num_heads - 1);
}

// ---- the gather -----------------------------------------------------------------------------------------------------

template <class L, int CHUNK_ = 0>
DEVICE void copy_query(u32 to, const u16* from, int turned) {
  if constexpr (CHUNK_ < L::QUERY_CHUNKS) {
    copy_16<CHUNK_ * CHUNK, CHUNK_ * 128>(to, from + (CHUNK_ & 2 ? -turned : turned) * 64);
    copy_query<L, CHUNK_ + 1>(to, from, turned);
  }
}

template <class L>
DEVICE void copy_queries(const Params& p, const Row& row, u32 shared, int thread) {
  hold(thread);  // here, and not before the loop over turns: that has no registers to spare
  const int unit = thread % 8, first = thread / 8;
  const u32 to = shared + L::QUERY + first * 128 + ((unit ^ first) & 7) * 16;
#pragma unroll 1
  for (int i = 0; i < L::HEADS / 16; ++i)
    copy_query<L>(to + i * 2048, query_at(p, row.token, global_head<L>(p, row, first + i * 16)) + unit * 8, turned_chunks(row));
}

// The next row's queries come from memory while this row is at work.
template <class L>
DEVICE void prefetch_queries(const Params& p, const Row& row, int thread) {
  hold(thread);
  const int head = global_head<L>(p, row, thread / 2);
  const u16* from = query_at(p, row.token, head);
  for (int chunk = thread % 2; chunk < 8; chunk += 2) prefetch_to_l2(from + chunk * 64);
  if (L::CHUNKS > 8 && thread % 2 == 0) prefetch_to_l2(query_rope_at(p, row.token, head));
}

template <class L>
DEVICE void bring_queries(const Params& p, const Row& row, u32 shared, u32& parity, int thread) {
  mbarrier_wait(shared + L::QUERY_FREE, parity);
  parity ^= 1;
  copy_queries<L>(p, row, shared, thread);
  arrive_when_copied(shared + L::QUERY_FULL);
}

// Says beside the FAR group of a tile's keys which turn is the row's last: 1 for the tile's own, 2 for the next one.
template <class L>
DEVICE void tell_end(u32 shared, int tile, bool last, bool next_last) {
  store_shared_4(shared + L::ENDS + tile * 4, last ? 1 : next_last ? 2 : 0);
  mbarrier_arrive(full_barrier<L>(shared, tile, FAR));
}

template <class L>
DEVICE int end_of_row(u32 shared, int tile) {
  return uniform(load_shared_4(shared + L::ENDS + tile * 4));
}

// Says in place of a first turn that the CTA's share has no keys. Both warpgroups look there.
template <class L>
DEVICE void tell_no_keys(u32 shared) {
  const int thread = thread_here();
  if (thread % 128 == 0) {
    store_shared_4(shared + L::ENDS, NO_TURN);
    mbarrier_arrive(full_barrier<L>(shared, 0, FAR));
  }
  if (L::FIRST == NEAR && thread % 32 == 0) mbarrier_arrive(full_barrier<L>(shared, 0, NEAR));
  mbarrier_arrive(full_barrier<L>(shared, 0, L::FIRST));
  mbarrier_arrive(full_barrier<L>(shared, 0, FAR));
}

// Copies half of the values' dims of a turn's keys.
template <class L>
DEVICE void copy_half(OwnRows own, u32 tile, int half, int turned, int lane) {
  own.row += half * 512;
  tile += half * 4 * CHUNK;
  copy_chunks<0, 2>(own, tile + turned * CHUNK, lane), copy_chunks<2, 4>(own, tile - turned * CHUNK, lane);
}

// Copies the keys of a turn into a tile. `meanwhile` runs before the wait for the last part, which is the longest wait,
// and returns whether the next turn is the row's last. Both tiles use one copy of the code, since the first fetch of
// instructions comes from memory.
template <class L, class Meanwhile>
DEVICE void copy_turn(const OwnRows& own, bool last, u32 shared, u32 place, int tile, u32 parity, int turned, int warp,
                      int lane, Meanwhile meanwhile) {
  const u32 full = full_barrier<L>(shared, tile, NEAR) - NEAR * 8, free = free_barrier<L>(shared, tile, NEAR, 0),
            to = place + tile * L::TILE, part = warp * KEY_HALVES / 4 * 8;
  if (L::FIRST == ROPE) {
    mbarrier_wait(free_barrier<L>(shared, tile, ROPE, 0), parity);
    copy_chunks<8, L::CHUNKS>(own, to, lane);
    arrive_when_copied(full + ROPE * 8);
  }
  mbarrier_wait(free + part, parity);
  if (lane == 0) {
    store_shared_4(shared + L::LIVE + tile * 16 + warp * 4, own.alive);
    mbarrier_arrive(full + NEAR * 8);
  }
  copy_half<L>(own, to, tile, turned, lane);
  arrive_when_copied(full + NEAR * 8);
  const bool next_last = meanwhile();
  mbarrier_wait(free + KEY_HALVES * 8 + part, parity);
  if (warp == 0 && lane == 0) tell_end<L>(shared, tile, last, next_last);
  copy_half<L>(own, to, tile ^ 1, turned, lane);
  arrive_when_copied(full + FAR * 8);
}

// Gathers the one row of a CTA in a cluster.
template <class L>
DEVICE void gather_row(const Params& p, const Row& row, Stream stream, u32 shared, int thread) {
  using R = PlainRows<L::CHUNKS * 128>;
  const int warp = uniform(thread >> 5), lane = thread & 31, turned = turned_chunks(row);
  const int request = uniform(request_of(p, row));
  const u32 list = shared + L::LIST + warp * LIST_WORDS * 4, place = own_place(shared + L::TILES, warp, lane);
  Chosen chosen = choose_keys(p, row, stream, list, false, warp, lane);
  Place next = place_of(p, request, chosen);
  const bool empty = has_no_keys(stream, chosen, warp);
  if (empty) tell_no_keys<L>(shared);
  int tile = 0, parity = 1;
#pragma unroll 1
  for (bool last = empty; !last;) {
    last = chosen.last;
    const OwnRows own = own_rows<R>(p, chosen, next);
    copy_turn<L>(own, last, shared, place, tile, parity, turned, warp, lane, [&]() {
      if (!last) {
        chosen = choose_keys(p, row, stream, list, tile == 0, warp, lane);
        next = place_of(p, request, chosen);
      }
      return chosen.last;
    });
    tile ^= 1, parity ^= tile ^ 1;
  }
}

// Gathers one row after the other. While a turn waits for room, the warp chooses the next turn's keys and reads the
// block table, across rows as well. The warpgroups that need the first row's queries copy those.
template <class L, Launch LAUNCH>
DEVICE void gather_rows(const Params& p, Row row, Stream stream, u32 shared, int thread) {
  using R = PlainRows<L::CHUNKS * 128>;
  hold(thread);  // keeps it in a register, like the addresses
  const int warp = uniform(thread >> 5), lane = thread & 31;
  hold(shared);
  u32 place = own_place(shared + L::TILES, warp, lane);
  hold(place);
  int n = first_number<LAUNCH>(shared + L::INTERVAL), request = uniform(request_of(p, row));
  const u32 list = shared + L::LIST + warp * LIST_WORDS * 4;
  Chosen chosen = choose_keys(p, row, stream, list, false, warp, lane);
  Place next = place_of(p, request, chosen);
  bool first = true;
  u32 parities = 3, query_parity = 0;  // a bit a tile
  while (row.token < end_of_tokens<LAUNCH>(p)) {
    bool last = false;
#pragma unroll 1
    for (int turn = 0; !last; ++turn) {
      const int item = n, tile = turn & 1;
      last = chosen.last;
      const OwnRows own = own_rows<R>(p, chosen, next);
      if (turn == 0 && !first && !p.indices[0]) prefetch_keys<R>(own, lane);
      copy_turn<L>(own, last, shared, place, tile, parities >> tile & 1, 0, warp, lane, [&]() {
        if (turn == 0 && !first) bring_queries<L>(p, row_number<LAUNCH>(p, shared + L::INTERVAL, item), shared, query_parity, thread);
        if (last) {
          n += numbers_ahead<LAUNCH>(p, shared + L::INTERVAL);
          row = row_number<LAUNCH>(p, shared + L::INTERVAL, n);
          request = uniform(request_of(p, row));
          stream = begin_stream(p, row, warp, lane);
        }
        chosen = choose_keys(p, row, stream, list, !last && tile == 0, warp, lane);
        next = place_of(p, request, chosen);
        return chosen.last;
      });
      if (turn == 0) {
        const int next = item + numbers_ahead<LAUNCH>(p, shared + L::INTERVAL);
        const Row later = row_number<LAUNCH>(p, shared + L::INTERVAL, next);
        if (later.token < end_of_tokens<LAUNCH>(p)) prefetch_queries<L>(p, later, thread);
      }
      parities ^= 1 << tile;
    }
    first = false;
  }
}
