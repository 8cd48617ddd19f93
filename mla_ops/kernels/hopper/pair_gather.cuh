// Tiles of 64 heads over bfloat16 keys (`sparse_attention_bf16_64.cu`): the plan of shared memory, and the gather.
#pragma once

#include "gather.cuh"
#include "merge.cuh"

constexpr int CHUNK = KEYS * 128;  // bytes of 64 dims of 64 keys or heads
constexpr int PAIR_BARRIER = 6;

// Parts of a tile that come and go by themselves: dims past the values, and the halves of the values' dims: that of the
// turn's owner, which is done with first, and the other's.
enum Group { ROPE = 0, NEAR = 1, FAR = 2, GROUPS = 3 };

// Values are done with, and their room is free for other keys, by halves of a turn's keys.
constexpr int PARTS = 2;

template <int DIM>
struct PairLayout {
  static constexpr int HEADS = 64, CHUNKS = DIM / 64;
  static constexpr float FACTOR = 1.f;
  static constexpr bool PERMUTED = false;
  static constexpr int THREADS = 384;
  // One more chunk of queries lives in registers, for shared memory is as busy as the tensor cores are: RoPE, for which
  // there would be no room, or the last of those that a warpgroup multiplies.
  static constexpr int QUERY_CHUNKS = 8;
  static constexpr Group FIRST = CHUNKS > 8 ? ROPE : NEAR;
  static constexpr int QUERY = 0;
  static constexpr int WEIGHTS = QUERY + QUERY_CHUNKS * CHUNK;  // of a warpgroup's turn; at the end its results
  static constexpr int TILES = WEIGHTS + 2 * CHUNK;
  static constexpr int TILE = CHUNKS * CHUNK;
  static constexpr int REFERENCES = TILES + 2 * TILE;  // float a head, of the latest turn
  static constexpr int SUMS = REFERENCES + HEADS * 4;  // float a head, of each warpgroup, of even and odd rows
  static constexpr int LIVE = SUMS + 4 * HEADS * 4;    // u32 a tile and warp: which of its 16 keys count
  static constexpr int FULL = LIVE + 2 * 16;           // by tile and group, FREE by part of the keys as well
  static constexpr int FREE = FULL + 2 * GROUPS * 8;
  static constexpr int WEIGHTS_FULL = FREE + 2 * GROUPS * PARTS * 8;
  static constexpr int QUERY_FULL = WEIGHTS_FULL + 2 * 8;
  static constexpr int QUERY_FREE = QUERY_FULL + 8;
  static constexpr int STATES_FULL = QUERY_FREE + 8;  // in a cluster
  static constexpr int PACKETS_FULL = STATES_FULL + 8;
  static constexpr int OWN_FULL = PACKETS_FULL + 8;
  static constexpr int BYTES = OWN_FULL + 8;
  using End = Ends<HEADS, QUERY>;
  static constexpr int PACKETS = WEIGHTS;
  using Packet = Packets<HEADS, false>;
  static_assert(PACKETS + Packet::ROOM <= REFERENCES, "packets overlap the references");
  static_assert(BYTES <= 232448, "more shared memory than an SM has");
};

template <class L>
DEVICE u32 full_barrier(u32 shared, int tile, Group group) {
  return shared + L::FULL + (tile * GROUPS + group) * 8;
}

template <class L>
DEVICE u32 free_barrier(u32 shared, int tile, Group group, int part) {
  return shared + L::FREE + ((tile * GROUPS + group) * PARTS + part) * 8;
}

// In a cluster of two each CTA keeps the results of half of a warpgroup's dims, and keys and queries are laid so that
// these are its first: chunk c of the values' dims stands at c ^ this.
DEVICE int turned_chunks(const Row& row) { return row.splits == 2 ? row.rank * 2 : 0; }

// Of a head of the row's tile; heads past the last repeat it.
template <class L>
DEVICE const u16* query_of(const Params& p, const Row& row, int head) {
  return p.q + row.token * p.q_token_stride + min(row.tile * L::HEADS + head, p.num_heads - 1) * p.q_head_stride;
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
    copy_query<L>(to + i * 2048, query_of<L>(p, row, first + i * 16) + unit * 8, turned_chunks(row));
}

// The next row's queries come from memory while this row is at work.
template <class L>
DEVICE void prefetch_queries(const Params& p, const Row& row, int thread) {
  if (row.token >= p.num_tokens) return;
  hold(thread);
  const u16* from = query_of<L>(p, row, thread / 2);
  for (int chunk = thread % 2; chunk < L::CHUNKS; chunk += 2) prefetch_to_l2(from + chunk * 64);
}

// `a` if `first`, else `b`.
DEVICE Row either(bool first, const Row& a, const Row& b) {
  Row row = b;
  if (first) row = a;
  return row;
}

template <class L>
DEVICE void bring_queries(const Params& p, const Row& row, u32 shared, u32& parity, int thread) {
  mbarrier_wait(shared + L::QUERY_FREE, parity);
  parity ^= 1;
  copy_queries<L>(p, row, shared, thread);
  arrive_when_copied(shared + L::QUERY_FULL);
}

// The keys of a turn into tile T, and the row's queries where they are free later than half of the tile.
template <class L, int T>
DEVICE void copy_turn(const Params& p, const Row& row, const OwnRows& own, u32 alive, u32 shared, u32 place, u32 parity,
                      bool queries, u32& query_parity, int warp, int thread) {
  const u32 tile = place + T * L::TILE;
  if (L::FIRST == ROPE) {
    mbarrier_wait(free_barrier<L>(shared, T, ROPE, 0), parity);
    copy_chunks<8, L::CHUNKS>(own, tile);
    arrive_when_copied(full_barrier<L>(shared, T, ROPE));
  }
  mbarrier_wait(free_barrier<L>(shared, T, NEAR, 0) + warp * PARTS / 4 * 8, parity);
  if (thread % 32 == 0) {
    store_shared_4(shared + L::LIVE + T * 16 + warp * 4, alive);
    mbarrier_arrive(full_barrier<L>(shared, T, NEAR));
  }
  copy_chunks<T * 4, T * 4 + 4>(own, tile);
  arrive_when_copied(full_barrier<L>(shared, T, NEAR));
  if (T == 0 && queries) bring_queries<L>(p, row, shared, query_parity, thread);
  mbarrier_wait(free_barrier<L>(shared, T, FAR, 0) + warp * PARTS / 4 * 8, parity);
  copy_chunks<4 - T * 4, 8 - T * 4>(own, tile);
  arrive_when_copied(full_barrier<L>(shared, T, FAR));
}

// What the gather asks for before anything else: the way from an index to a key in shared memory is the longest of the
// start.
struct GatherStart {
  int request, indices[2];  // of the first two turns
};

DEVICE GatherStart gather_start(const Params& p, const Row& row, int warp, int lane) {
  GatherStart start{request_of(p, row)};
#pragma unroll
  for (int i = 0; i < 2; ++i) start.indices[i] = index_at(p, row, row.first + i, warp, lane);
  return start;
}

// Half of the values' dims of a turn's keys.
template <class L>
DEVICE void copy_half(OwnRows own, u32 tile, int half, int turned) {
#pragma unroll
  for (int i = 0; i < 4; ++i) own.from[i] += half * 512;
  tile += half * 4 * CHUNK;
  copy_chunks<0, 2>(own, tile + turned * CHUNK), copy_chunks<2, 4>(own, tile - turned * CHUNK);
}

// The one row of a CTA in a cluster. Its first instructions come from memory, 100 cycles for eight of them: so there
// are few in front of the first copies, and one tile's are the other's.
template <class L>
DEVICE void gather_row(const Params& p, const Row& row, const GatherStart& start, u32 shared, int thread) {
  using R = PlainRows<L::CHUNKS * 128>;
  const int warp = __shfl_sync(~0u, thread >> 5, 0), lane = thread & 31, turned = turned_chunks(row);
  const u32 part = warp * PARTS / 4 * 8;
  Key key = key_at<R>(p, row, row.first, start.request, start.indices[0]);
  u32 place = own_place(shared + L::TILES, warp, lane);
  int index = start.indices[1], tile = 0, parity = 1;
#pragma unroll 1
  for (int turn = row.first; turn < row.last; ++turn) {
    const OwnRows own = own_rows(key.row, lane);
    const u32 alive = __ballot_sync(~0u, key.live);
    const u32 full = full_barrier<L>(shared, tile, NEAR) - NEAR * 8, free = free_barrier<L>(shared, tile, NEAR, 0),
              to = place + tile * L::TILE;
    if (L::FIRST == ROPE) {
      mbarrier_wait(free_barrier<L>(shared, tile, ROPE, 0), parity);
      copy_chunks<8, L::CHUNKS>(own, to);
      arrive_when_copied(full + ROPE * 8);
    }
    mbarrier_wait(free + part, parity);
    if (lane == 0) {
      store_shared_4(shared + L::LIVE + tile * 16 + warp * 4, alive);
      mbarrier_arrive(full + NEAR * 8);
    }
    copy_half<L>(own, to, tile, turned);
    arrive_when_copied(full + NEAR * 8);
    const Cache& cache = p.caches[turn + 1 >= row.main_turns];
    const Place later = place_at(cache, start.request, index);
    index = index_at(p, row, turn + 2, warp, lane);
    mbarrier_wait(free + PARTS * 8 + part, parity);
    copy_half<L>(own, to, tile ^ 1, turned);
    arrive_when_copied(full + FAR * 8);
    key = key_of<R>(p, cache, later);
    tile ^= 1, parity ^= tile ^ 1;
  }
}

// An index is read two turns ahead and the block table one ahead, in the next row as well, so that this waits for
// nothing but room. The first row's queries are brought by those who need them.
template <class L>
DEVICE void gather_rows(const Params& p, Row row, const GatherStart& start, u32 shared, int thread) {
  using R = PlainRows<L::CHUNKS * 128>;
  hold(thread);  // in a register, as the addresses
  const int warp = __shfl_sync(~0u, thread >> 5, 0), lane = thread & 31;
  hold(shared);
  u32 place = own_place(shared + L::TILES, warp, lane);
  hold(place);
  int n = blockIdx.x, request = start.request, index = start.indices[1];  // of the turn after the key's
  Key key = key_at<R>(p, row, row.first, request, start.indices[0]);
  bool ahead = true, first = true;
  u32 parity[2] = {1, 1}, query_parity = 0;
  while (row.token < p.num_tokens) {
    const int turns = turns_of(row);
    if (!ahead) {
      request = request_of(p, row);
      index = index_at(p, row, row.first, warp, lane);
      if (turns) bring_queries<L>(p, row, shared, query_parity, thread);
      key = key_at<R>(p, row, row.first, request, index);
    }
    const Row next = row_at(p, n += gridDim.x);
    const int next_request = request_of(p, next);
    // of this row's turn and of those of the next row behind it
    auto index_of = [&](int turn) {
      const bool over = turn >= turns;
      return index_at(p, either(over, next, row), turn + (over ? next.first - turns : row.first), warp, lane);
    };
    if (!ahead || turns == 1) index = index_of(1);
    for (int turn = 0; turn < turns; ++turn) {
      const OwnRows own = own_rows(key.row, lane);
      const u32 alive = __ballot_sync(~0u, key.live);
      const bool ends = turn + 1 == turns;
      const Cache& cache =
          p.caches[ends ? next.first >= next.main_turns : row.first + turn + 1 >= row.main_turns];  // of the next turn
      const Place later = place_at(cache, ends ? next_request : request, index);
      index = index_of(turn + 2);
      if (turn & 1)
        copy_turn<L, 1>(p, row, own, alive, shared, place, parity[1], false, query_parity, warp, thread);
      else
        copy_turn<L, 0>(p, row, own, alive, shared, place, parity[0], ahead && !first && turn == 0, query_parity, warp,
                        thread);
      if (turn == 0) prefetch_queries<L>(p, next, thread);
      parity[0] ^= ~turn & 1, parity[1] ^= turn & 1;
      key = key_of<R>(p, cache, later);
    }
    row = next, request = next_request, ahead = turns > 0, first = false;
  }
}
