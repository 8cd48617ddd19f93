// A row by a cluster whose CTAs add up as one CTA would: the bits of `Launch::ROWS`, for few rows.
//
// Turns go round: CTA r scores every n-th turn from the r-th on. What the softmax carries from turn to turn, references
// and sums of weights, goes on from CTA to CTA through distributed shared memory, so that each turn finds what it would
// find in one CTA. Its weights go to all. Each CTA adds up a slice of the values' dims over all turns, in their order.
// So there is no merge, and no number is added in another order than in one CTA.
//
//   gather      4 warps   live indices -> rows of this CTA's turns -> ring of raw rows
//   score       4 warps   raw bytes -> fragments -> S' = K Q' -> weights, to every CTA; sums and references to the next
//   bring       4 warps   this CTA's slice of all keys, memory -> registers -> float16 -> ring of values
//   add up      4 warps   O += P V, in this slice
#pragma once

#include "gather.cuh"
#include "queries.cuh"
#include "scores.cuh"
#include "values.cuh"

constexpr int MOST_TURNS = 34;  // of a row: 2,048 keys and 128 of a second cache

// CHUNKS of 64 dims are a CTA's slice; the last CTA of three has two.
template <int CHUNKS, Format FORMAT>
struct Relay {
  using L = Layout<64, FORMAT>;  // queries, columns and alpha lie where it has them
  using R = Rows<FORMAT>;
  static constexpr int CTAS = (8 + CHUNKS - 1) / CHUNKS;
  static constexpr int PLACES = CTAS < 4 ? CTAS : 4;  // turns whose weights there is room for
  // Sums of weights go from CTA to CTA, or, where these are many and would wait for one another, each CTA adds up those of
  // some heads, whose weights come as float32 as well.
  static constexpr bool SPREAD = CTAS > 4;
  // Rings of slots of 16 keys.
  static constexpr int VALUE_SLOTS = CHUNKS == 4 ? 6 : CHUNKS == 3 ? 7 : CHUNKS == 2 ? 8 : 12;
  static constexpr int SLOTS = CHUNKS == 1 || FORMAT == FP8_DS_MLA_V4 && CHUNKS != 3 ? 8 : 7;
  static constexpr int VALUE_SLOT = CHUNKS * 2048, RAW_SLOT = L::RAW_SLOT;
  // In place of the weights of `Layout`: what `raise_references` needs, what comes from other CTAs, the list of live keys.
  static constexpr int DESK = L::WEIGHTS;
  static constexpr int REFERENCES = DESK + 1280, FINAL = REFERENCES + 272;
  static constexpr int FINAL_BYTES = 512;  // sums and references of all heads
  static constexpr int HEAD = 272, HEADS_OF_PLACES = FINAL + FINAL_BYTES;  // of a place: alpha, a float a head, and the turn
  static constexpr int COUNTS = HEADS_OF_PLACES + PLACES * HEAD;   // live keys that each gathering warp found
  static constexpr int LIVE = COUNTS + 16;
  static constexpr int BARRIERS = LIVE + 32;
  static constexpr int RAW_FULL = BARRIERS, RAW_FREE = RAW_FULL + SLOTS * 8, VALUES_FULL = RAW_FREE + SLOTS * 8,
                       VALUES_FREE = VALUES_FULL + VALUE_SLOTS * 8, WEIGHTS_FULL = VALUES_FREE + VALUE_SLOTS * 8,
                       OWN_FULL = WEIGHTS_FULL + PLACES * 8, LIST_FULL = OWN_FULL + 8, PLACE_FREE = LIST_FULL + 8,
                       REFERENCES_FULL = PLACE_FREE + 8, SUMS_FULL = REFERENCES_FULL + 8, FINAL_FULL = SUMS_FULL + 8,
                       NUM_BARRIERS = (FINAL_FULL + 8 - BARRIERS) / 8;
  static constexpr int LIST = FINAL_FULL + 8;  // u16: positions of live keys, those of the second cache behind
  static_assert(LIST + MOST_TURNS * 128 <= DESK + 8192, "the desk is full");
  static constexpr int WEIGHTS_BYTES = 8192 + HEAD + (SPREAD ? 2048 : 0);  // from another CTA, a turn
  static constexpr int WEIGHTS = L::VALUES, VALUES = WEIGHTS + PLACES * 8192,
                       RAW = VALUES + VALUE_SLOTS * VALUE_SLOT, END = RAW + SLOTS * RAW_SLOT;
  static constexpr int BEHIND = L::ALPHA + 256;
  // Sums of the turn before, float [4, 128, 4]; spread, of each place 16 bytes of each thread that made weights.
  static constexpr int SUMS = R::SCALES_APART ? BEHIND : (END + 15) / 16 * 16;
  static constexpr int SCALES = R::SCALES_APART ? SUMS + 8192 : RAW + R::SCALES_AT;
  static constexpr int SCALES_SLOT = R::SCALES_APART ? 16 * R::SCALES_PITCH : RAW_SLOT;
  static constexpr int BYTES = R::SCALES_APART ? SCALES + SLOTS * SCALES_SLOT : BEHIND;
  static_assert((R::SCALES_APART ? END : SUMS + 8192) <= L::COLUMNS, "rings overlap the columns");
  static_assert(BYTES <= 232448, "more shared memory than an SM has");
};

DEVICE void wgmma_heads_by_dims(float (&d)[32], u64 a, u64 b) {
  WGMMA_SS(64, "f16", REG32, ACC32(d, 0), "%32", "%33", "0", "1");
}
DEVICE void wgmma_heads_by_dims(float (&d)[96], u64 a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n192k16.f32.f16.f16 {" REG64
               ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83"
               ", %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, %96, %97, 1, 1, 1, 0, 1;"
               : ACC64(d, 0), ACC32(d, 64)
               : "l"(a), "l"(b));
}
DEVICE int load_shared_2(u32 address) {
  unsigned short v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
  return v;
}

DEVICE void copy_to_peer(u32 to, u32 from, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// This cluster's row, whole. `again`: made anew where it is needed once, else it stays in registers of all turns.
DEVICE Row whole_row(const Params& p, bool again = false) {
  int token = token_of(p);
  if (again) hold(token);
  return row_of(p, token, cluster_index(p), 0, 1, 0);
}

// The number of a CTA's table of wide weights, float32 [64 keys, 64 heads].
DEVICE float* wide_table_of(const Params& p, const Row& row, int ctas, int rank) {
  return reinterpret_cast<float*>(p.exchange) + ((static_cast<i64>(row.token) * p.head_tiles + row.tile) * ctas + rank) * 4096;
}

// ---- keys -----------------------------------------------------------------------------------------------------------

// The warps that gather list the positions of a row's live keys in their order, a quarter of its turns each.
template <class Y>
DEVICE void list_keys(const Params& p, const Row& row, u32 shared, int warp, int lane) {
  constexpr int MOST_HALVES = (MOST_TURNS + 3) / 4 * 2;
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
  named_barrier<STATES_BARRIER, 128>();
  int place = 0;
  for (int before = 0; before < warp; ++before) place += load_shared_4(shared + Y::COUNTS + before * 4);
#pragma unroll 1
  for (int i = 0; i < 2 * turns; ++i) {
    const u32 found = __shfl_sync(~0u, mask, i);
    if (found >> lane & 1)
      store_shared_2(shared + Y::LIST + (place + __popc(found & ((1u << lane) - 1))) * 2, first * 64 + i * 32 + lane);
    place += __popc(found);
  }
  __syncwarp();
  warp_arrive(shared + Y::LIST_FULL, lane);
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
#pragma unroll 1
  for (int turn = rank; turn < turns; turn += Y::CTAS) {
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
    next_slot<Y::SLOTS>(slot, parity);
  }
}

// ---- values ---------------------------------------------------------------------------------------------------------

// A lane's bytes of two keys: 16 dims of each chunk of the slice, of RoPE that is a value 32 bytes.
template <class Y, int CHUNKS>
struct Slice {
  uint4 bytes[2][CHUNKS], more[2];
  typename Y::R::Scales scales[2];
};

template <class Y, int CHUNKS>
DEVICE void load_slice(Slice<Y, CHUNKS>& slice, const KeyAddress (&from)[2], int rank, int lane) {
  using R = typename Y::R;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool there = from[r].row;
    if constexpr (R::SCALES_APART) {
      slice.scales[r] = make_uint2(R::DEAD_SCALES, R::DEAD_SCALES);
      if (there) slice.scales[r] = __ldg(reinterpret_cast<const uint2*>(from[r].scales));
    } else {
      slice.scales[r] = make_uint4(R::DEAD_SCALE, R::DEAD_SCALE, R::DEAD_SCALE, R::DEAD_SCALE);
      if (there) slice.scales[r] = __ldg(reinterpret_cast<const uint4*>(from[r].scales));
    }
    const unsigned char* bytes = from[r].row + rank * (CHUNKS * 64) + lane % 4 * 16;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const int chunk = rank * CHUNKS + c;
      const bool rope = R::ROPE_IS_VALUE && chunk == R::CHUNKS - 1;
      slice.bytes[r][c] = make_uint4(0, 0, 0, 0);
      if (there && chunk < 8)
        slice.bytes[r][c] = __ldg(reinterpret_cast<const uint4*>(bytes + c * 64 + (rope ? lane % 4 * 16 : 0)));
      if (R::ROPE_IS_VALUE && c == (R::CHUNKS - 1) % CHUNKS) {
        slice.more[r] = make_uint4(0, 0, 0, 0);
        if (there && rope) slice.more[r] = __ldg(reinterpret_cast<const uint4*>(bytes + c * 64 + lane % 4 * 16 + 16));
      }
    }
  }
}

// The same as float16, as `score` makes them of a key's bytes, to a slot: rows of 128 bytes a chunk and key, swizzled.
template <class Y, int CHUNKS>
DEVICE void store_slice(Slice<Y, CHUNKS>& slice, u32 slot, int rank, int lane) {
  using R = typename Y::R;
  u32 undo[2] = {ONE_EACH, ONE_EACH};
  if (__any_sync(~0u, R::outside(slice.scales)))
    R::take_out(slice.scales[0], undo[0]), R::take_out(slice.scales[1], undo[1]);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int key = r * 8 + lane / 4, t = lane % 4;
    const u32 to = slot + key * 128;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const int chunk = rank * CHUNKS + c;
      if (chunk >= 8) continue;
      u32 v[8];
      if (R::ROPE_IS_VALUE && chunk == R::CHUNKS - 1) {
        const u32 factor = twice(undo[r], 0);
#pragma unroll
        for (int w = 0; w < 4; ++w)
          v[w] = R::rope(word(slice.bytes[r][c], w), factor), v[4 + w] = R::rope(word(slice.more[r], w), factor);
      } else {
        const u32 scale = R::pair(slice.scales[r], chunk);
#pragma unroll
        for (int w = 0; w < 4; ++w) e4m3_to_float16(word(slice.bytes[r][c], w), scale, v[2 * w], v[2 * w + 1]);
      }
      store_shared_16(to + c * 2048 + ((2 * t ^ (key & 7)) << 4), v[0], v[1], v[2], v[3]);
      store_shared_16(to + c * 2048 + ((2 * t + 1 ^ (key & 7)) << 4), v[4], v[5], v[6], v[7]);
    }
  }
}

// This CTA's slice of all keys, a warp's 16 of each turn. A lane has two of them, in the order in which `score` has them.
template <class Y, int CHUNKS>
DEVICE void bring_values(const Params& p, const Row& row, u32 shared, int rank, int warp, int lane) {
  using R = typename Y::R;
  const int request = uniform(request_of(p, row)), count = await_list<Y>(shared), turns = turns_of(count);
  int slot = warp, parity = 1, own = warp * 16 + R::raw_row(lane / 4);
  Key keys[2];
  auto find = [&](int turn) {
#pragma unroll
    for (int r = 0; r < 2; ++r) keys[r] = key_at<Y>(p, row, shared, turn * TILE_KEYS + own + r * 8, count);
  };
  auto load = [&](Slice<Y, CHUNKS>& slice) {
    const KeyAddress from[2] = {address_of<R>(p, row, request, keys[0]), address_of<R>(p, row, request, keys[1])};
    load_slice<Y, CHUNKS>(slice, from, rank, lane);
  };
  auto store = [&](Slice<Y, CHUNKS>& slice) {
    mbarrier_wait(shared + Y::VALUES_FREE + slot * 8, parity);
    store_slice<Y, CHUNKS>(slice, shared + Y::VALUES + slot * Y::VALUE_SLOT, rank, lane);
    __syncwarp();
    warp_arrive(shared + Y::VALUES_FULL + slot * 8, lane);
    next_slot<Y::VALUE_SLOTS>(slot, parity);
  };
  Slice<Y, CHUNKS> even, odd;
  find(0), load(even), find(1);
#pragma unroll 1
  for (int turn = 0; turn < turns; turn += 2) {
    load(odd), find(turn + 2);
    store(even);
    if (turn + 1 == turns) break;
    load(even), find(turn + 3);
    store(odd);
  }
}

// ---- scores ---------------------------------------------------------------------------------------------------------

template <class Y, Format FORMAT>
DEVICE Places places_in_relay(u32 shared, int lane) {
  using R = typename Y::R;
  Places places;
  const int key = R::raw_row(lane >> 2);
  places.raw = shared + Y::RAW + key * R::BYTES;
  places.rope = R::ROPE_AT + (lane & 3) * 32;
  if (!R::ROPE_IS_VALUE)
    places.rope = R::ROPE_AT + (R::raw_row(lane & 7) + (lane & 8) - key) * R::BYTES + (lane >> 4) * 16;
  places.scales = R::SCALES_APART ? shared + Y::SCALES + key * R::SCALES_PITCH : places.raw + R::SCALES_AT;
  places.query = tile_descriptor(shared + Y::L::QUERY, 1024, 16);
  places.values = places.values_free = 0;
  return places;
}

// A turn's products, as `multiply` makes them, whose values other warps bring.
template <Format FORMAT>
DEVICE bool multiply_keys(float (&s)[32], u32 (&fragments)[2][16], const Start<FORMAT>& start, u32 undo,
                          const Places& places, u32 raw_0, int t) {
  using R = Rows<FORMAT>;
  constexpr int QUERY_CHUNK = Layout<64, FORMAT>::QUERY_CHUNK, COUNT = R::CHUNKS;
  u32 too_large = 0;
  Bytes bytes[3] = {start.bytes[0], start.bytes[1]};
#pragma unroll
  for (int n = 0; n < COUNT; ++n) {
    const int chunk = chunk_of<true, FORMAT>(n);
    u32(&f)[16] = fragments[n % 2];
    if (n + 2 < COUNT) load_bytes<FORMAT>(bytes[(n + 2) % 3], places, raw_0, chunk_of<true, FORMAT>(n + 2), t);
    if (n > 1) {
      wgmma_wait<1>();
      hold(f);
    }
    make_fragments<FORMAT>(f, bytes[n % 3], start.scales, undo, chunk, too_large);
    hold(f);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const u64 operand = places.query + (chunk * QUERY_CHUNK + j * 32) / 16;
      if (chunk == ROPE<FORMAT> && !R::ROPE_IS_VALUE)
        wgmma_bfloat16(s, f + 4 * j, operand, n > 0 || j > 0);
      else
        wgmma_float16(s, f + 4 * j, operand, n > 0 || j > 0);
    }
    wgmma_commit();
  }
  return too_large != 0;
}

// To shared memory of a CTA of the cluster, whose barrier counts the bytes.
DEVICE void send_4(u32 address, u32 barrier, float value) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address),
               "r"(__float_as_uint(value)), "r"(barrier)
               : "memory");
}

// A number of a head to all CTAs, `kind` 0 its sum, 1 its reference.
template <class Y>
DEVICE void send_final(u32 shared, int kind, int head, float value) {
#pragma unroll 1
  for (int to = 0; to < Y::CTAS; ++to)
    send_4(peer_address(shared + Y::FINAL + kind * 256 + head * 4, to), peer_address(shared + Y::FINAL_FULL, to), value);
}

// References of 64 heads and their number of moves, to the CTA of the next turn, by one warp.
template <class Y>
DEVICE void send_references(u32 shared, int next, u32 state, int lane) {
  const u32 to = peer_address(shared + Y::REFERENCES + lane * 16, next), barrier = peer_address(shared + Y::REFERENCES_FULL, next);
  const u32 column = shared + Y::L::COLUMNS + (lane & 15) * 32;
  const uint4 first = load_shared_16(column), second = load_shared_16(column + 16);
  const u32 words[4] = {lane < 16 ? first.y : state, first.w, second.y, second.w};
  if (lane < 17) send_16(to, barrier, words);
  __syncwarp();
}

template <int CHUNKS, Format FORMAT>
DEVICE void score_in_relay(const Params& p, const Row& row, unsigned char* shared_pointer, u32 shared, int rank,
                           int thread) {
  using Y = Relay<CHUNKS, FORMAT>;
  using L = typename Y::L;
  using R = Rows<FORMAT>;
  constexpr int HEADS = 64, TILES = 8;
  thread = kept(thread);
  const int warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
  const int next = rank + 1 == Y::CTAS ? 0 : rank + 1, place = rank % Y::PLACES;
  const Places places = places_in_relay<Y, FORMAT>(shared, lane);
  const u32 weights_row = shared + Y::WEIGHTS + place * 8192 + (lane & 7) * 128 +
                          ((((warp * 2) | ((lane >> 3) & 1)) ^ (lane & 7)) << 4) + (lane >> 4) * 1024;
  const u32 head = shared + Y::HEADS_OF_PLACES + place * Y::HEAD;
  float sums[TILES * 2];
#pragma unroll
  for (int i = 0; i < TILES * 2; ++i) sums[i] = 0.f;
  bool seen = false, started = false;
  u32 moves_so_far = 0;
  int slot = warp, parity = 0;
  Start<FORMAT> start;
  if (thread == 0) {
    mbarrier_arrive_expect(shared + Y::REFERENCES_FULL, Y::HEAD);
    mbarrier_arrive_expect(shared + Y::SUMS_FULL, 8192);
  }
  const int turns = turns_of(await_list<Y>(shared));
  if (rank >= turns) cluster_wait();
#pragma unroll 1
  for (int own = 0, number = rank; number < turns; ++own, number += Y::CTAS) {
    if (!started) {
      const u32 raw_0 = places.raw + slot * Y::RAW_SLOT;
      mbarrier_wait(shared + Y::RAW_FULL + slot * 8, parity);
      load_start<HEADS, FORMAT, true, 0>(start, places, raw_0, places.scales + slot * Y::SCALES_SLOT,
                                         shared + Y::LIVE + slot * 4, t);
      load_start_rest<HEADS, FORMAT, true, 0>(start, raw_0 + places.rope);
    }
    const u32 alive = start.alive;
    const bool last = number + 1 == turns, begins = number == 0;
    const u32 received = own - (rank == 0) & 1;
    float s[TILES * 4];
    u32 undo, fragments[2][16];
    bool wide;
    const bool apart = take_out<HEADS, FORMAT, true, 0>(start, undo, wide);
    wide |= multiply_keys<FORMAT>(s, fragments, start, undo, places, places.raw + slot * Y::RAW_SLOT, t);
    int later_slot = slot, later_parity = parity;
    next_slot<Y::SLOTS>(later_slot, later_parity);
    started = __all_sync(~0u, mbarrier_test(shared + Y::RAW_FULL + later_slot * 8, later_parity)) && number + Y::CTAS < turns;
    const int ahead = started ? later_slot : slot;
    load_start<HEADS, FORMAT, true, 0>(start, places, places.raw + ahead * Y::RAW_SLOT,
                                       places.scales + ahead * Y::SCALES_SLOT, shared + Y::LIVE + ahead * 4, t);
    if (own == 0) cluster_wait();  // other CTAs' barriers are there
    if (!begins) {
      mbarrier_wait(shared + Y::REFERENCES_FULL, received);
      const u32 state = load_shared_4(shared + Y::REFERENCES + 256);
      if (thread == 0) mbarrier_arrive_expect(shared + Y::REFERENCES_FULL, Y::HEAD);
      seen = state >> 31;
      if (uniform(state & 0x7fffffff) != moves_so_far) {
        moves_so_far = uniform(state & 0x7fffffff);
        if (thread < HEADS)
          store_shared_float(shared + L::COLUMNS + thread * 8 + 4, load_shared_float(shared + Y::REFERENCES + thread * 4));
        named_barrier<SCORE_BARRIER, 128>();
      }
    }
    uint4 columns[TILES];
#pragma unroll
    for (int j = 0; j < TILES / 2; ++j) columns[j] = load_shared_16(shared + L::COLUMNS + (8 * j + 2 * t) * 8);
    if (apart)
#pragma unroll
      for (int j = 0; j < TILES / 2; ++j) columns[j].y = columns[j].w = 0;
    wgmma_wait<0>();
    hold(s);
    hold(fragments[0]), hold(fragments[1]);
#pragma unroll
    for (int j = TILES / 2; j < TILES; ++j) {
      columns[j] = load_shared_16(shared + L::COLUMNS + (8 * j + 2 * t) * 8);
      columns[j].y = apart ? 0 : columns[j].y, columns[j].w = apart ? 0 : columns[j].w;
    }
    const u32 mine = alive >> R::raw_row(g);
    const bool live_0 = mine & 1, live_1 = mine & 0x100;
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
      const uint4& two = columns[j];
      s[4 * j] = fmaf(s[4 * j], __uint_as_float(two.x), -__uint_as_float(two.y));
      s[4 * j + 1] = fmaf(s[4 * j + 1], __uint_as_float(two.z), -__uint_as_float(two.w));
      s[4 * j + 2] = fmaf(s[4 * j + 2], __uint_as_float(two.x), -__uint_as_float(two.y));
      s[4 * j + 3] = fmaf(s[4 * j + 3], __uint_as_float(two.z), -__uint_as_float(two.w));
    }
    if (apart) {
      const u32 inverse = 0x7f007f00u - undo;
      const float back[2] = {low_bfloat16(inverse), high_bfloat16(inverse)},
                  taken[2] = {exponent_taken(undo, 0), exponent_taken(undo, 1)};
#pragma unroll
      for (int e = 0; e < TILES * 4; e += 4) {
        const u32 column = shared + L::COLUMNS + (2 * e + 2 * t) * 8;
        const float references[2] = {load_shared_float(column + 4), load_shared_float(column + 12)};
#pragma unroll
        for (int i = 0; i < 4; ++i)
          s[e + i] = fmaf(s[e + i], back[i >> 1], -references[i & 1]) + taken[i >> 1];
      }
    }
    load_start_rest<HEADS, FORMAT, true, 0>(start, places.raw + ahead * Y::RAW_SLOT + places.rope);
    auto largest = [&]() {
      float tops[4] = {s[0], s[1], s[2], s[3]};
#pragma unroll
      for (int e = 4; e < TILES * 4; ++e) tops[e & 3] = fmaxf(tops[e & 3], s[e]);
      return fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
    };
    auto receive_sums = [&]() {
      if (begins) return;
      mbarrier_wait(shared + Y::SUMS_FULL, received);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint4 v = load_shared_16(shared + Y::SUMS + w * 2048 + thread * 16);
        sums[4 * w] = __uint_as_float(v.x), sums[4 * w + 1] = __uint_as_float(v.y);
        sums[4 * w + 2] = __uint_as_float(v.z), sums[4 * w + 3] = __uint_as_float(v.w);
      }
      if (thread == 0) mbarrier_arrive_expect(shared + Y::SUMS_FULL, 8192);
    };
    // The turn whose weights were in this place has left it, everywhere.
    auto await_place = [&]() {
      const int freed = own - (rank < Y::PLACES);
      if (freed >= 0) mbarrier_wait(shared + Y::PLACE_FREE, freed & 1);
    };
    auto table_of_wide = [&]() { return wide_table_of(p, row, Y::CTAS, rank); };
    auto wide_place = [&]() { return (warp * 16 + R::raw_row(g)) * HEADS + 2 * t; };

    int turn = USUAL;
    bool moves = named_barrier_any<SCORE_BARRIER, 128>(largest() > REFERENCE_SLACK || wide || !seen || alive != 0xffff);
    if (moves) {
#pragma unroll
      for (int e = 0; e < TILES * 4; ++e)
        if (!((e & 2) ? live_1 : live_0)) s[e] = -INFINITY;
      moves = named_barrier_any<SCORE_BARRIER, 128>(largest() > REFERENCE_SLACK || wide || !seen && alive);
    }
    if (moves) {
      turn = MOVED;
      await_place();
      if (named_barrier_any<SCORE_BARRIER, 128>(wide)) {
        turn = WIDE;
        float* table = table_of_wide();
#pragma unroll 1
        for (int e = thread; e < TILE_KEYS * HEADS; e += 128) {
          const int key = e / HEADS, first = slot >= warp ? slot - warp : slot - warp + Y::SLOTS;
          const int row_of_key = slot_of<Y::SLOTS>(first, key) * 16 + key % 16;
          const int place = R::SCALES_APART ? Y::SCALES + row_of_key * R::SCALES_PITCH : Y::RAW + row_of_key * R::BYTES + R::SCALES_AT;
          table[e] = wide_score<HEADS, FORMAT>(p, row, shared_pointer + Y::RAW + row_of_key * R::BYTES,
                                               shared_pointer + place, e % HEADS) -
                     load_shared_float(shared + L::COLUMNS + e % HEADS * 8 + 4);
        }
        named_barrier<SCORE_BARRIER, 128>();
        table += wide_place();
#pragma unroll
        for (int e = 0; e < TILES * 4; ++e)
          s[e] = ((e & 2) ? live_1 : live_0)
                     ? table[(e & 2) * (4 * HEADS) + e / 4 * 8 + (e & 1)] + exponent_taken(undo, e >> 1 & 1)
                     : -INFINITY;
      }
      if (!Y::SPREAD) receive_sums();
      raise_references<L>(s, sums, seen, REFERENCE_SLACK, shared, thread);
      if (thread < HEADS)
        store_shared_float(head + thread * 4, load_shared_float(shared + L::ALPHA + thread * 4));
      seen = true, ++moves_so_far;
    }
    if (warp == 0 && !last) send_references<Y>(shared, next, moves_so_far | (seen ? 0x80000000u : 0), lane);
    warp_arrive(shared + Y::RAW_FREE + slot * 8, lane);

#pragma unroll
    for (int e = 0; e < TILES * 4; ++e) s[e] = exp2_approx(s[e]);
    const float undone[2] = {low_bfloat16(undo), high_bfloat16(undo)};
    await_place();
    if (turn == WIDE) {
      float* table = table_of_wide() + wide_place();
#pragma unroll
      for (int e = 0; e < TILES * 4; ++e)
        table[(e & 2) * (4 * HEADS) + e / 4 * 8 + (e & 1)] = s[e] * undone[e >> 1 & 1];
      __threadfence();
    } else {
#pragma unroll
      for (int j = 0; j + 1 < TILES; j += 2)
        store_matrices_transposed(weights_row + j * 1024, pack_float16(s[4 * j], s[4 * j + 1]),
                                  pack_float16(s[4 * j + 2], s[4 * j + 3]), pack_float16(s[4 * j + 4], s[4 * j + 5]),
                                  pack_float16(s[4 * j + 6], s[4 * j + 7]));
    }
    if constexpr (Y::SPREAD) {
#pragma unroll
      for (int j = 0; j < TILES; ++j)
        send_16_unless(j == rank, peer_address(shared + Y::SUMS + place * 2048 + thread * 16, j),
                       peer_address(shared + Y::WEIGHTS_FULL + place * 8, j), __float_as_uint(s[4 * j] * undone[0]),
                       __float_as_uint(s[4 * j + 1] * undone[0]), __float_as_uint(s[4 * j + 2] * undone[1]),
                       __float_as_uint(s[4 * j + 3] * undone[1]));
    }
    if (thread == 0) store_shared_4(head + 256, turn);
    __syncwarp();
    warp_arrive(shared + Y::OWN_FULL, lane);
    if constexpr (!Y::SPREAD) {
      if (turn == USUAL) receive_sums();
#pragma unroll
      for (int c = 0; c < TILES * 2; ++c)
        sums[c] = fmaf(s[c / 2 * 4 + (c & 1)], undone[0], fmaf(s[c / 2 * 4 + (c & 1) + 2], undone[1], sums[c]));
      if (!last) {
        const u32 to = peer_address(shared + Y::SUMS + thread * 16, next), barrier = peer_address(shared + Y::SUMS_FULL, next);
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const u32 words[4] = {__float_as_uint(sums[4 * w]), __float_as_uint(sums[4 * w + 1]),
                                __float_as_uint(sums[4 * w + 2]), __float_as_uint(sums[4 * w + 3])};
          send_16(to + w * 2048, barrier, words);
        }
      }
    }
    if (last) {
      const u32 sums_at = shared + Y::DESK;
      if (!Y::SPREAD) {
        store_sums<HEADS>(sums, sums_at + warp * (HEADS * 4), lane);
        named_barrier<SCORE_BARRIER, 128>();
      }
      if (thread < HEADS) {
        if (!Y::SPREAD) send_final<Y>(shared, 0, thread, sum_of<HEADS>(sums_at, thread));
        send_final<Y>(shared, 1, thread, load_shared_float(shared + L::COLUMNS + thread * 8 + 4));
      }
    }
    slot = later_slot, parity = later_parity;
  }
}

// ---- sums of values -------------------------------------------------------------------------------------------------

// Accumulators of the most registers that ptxas takes in one instruction here.
template <int CHUNKS>
constexpr int PIECES = CHUNKS == 4 ? 2 : 1;

// A wide turn: keys one after the other from memory, in float32.
template <class Y, int CHUNKS, Format FORMAT>
DEVICE void add_wide(float (&o)[PIECES<CHUNKS>][CHUNKS * 32 / PIECES<CHUNKS>], const Params& p, u32 shared, int whose,
                     int first_key, int rank, int head, int t) {
  using R = Rows<FORMAT>;
  const Row row = whole_row(p, true);
  const float* table = wide_table_of(p, row, Y::CTAS, whose);
  const int request = request_of(p, row), count = await_list<Y>(shared);
#pragma unroll 1
  for (int key = 0; key < TILE_KEYS; ++key, table += 64) {
    const KeyAddress from = address_of<R>(p, row, request, key_at<Y>(p, row, shared, first_key + key, count));
    const unsigned char *raw = from.row, *scales = from.scales;
    const float weight_0 = __ldcg(table + head), weight_1 = __ldcg(table + head + 8);
    const int first = opaque(rank) * CHUNKS;  // else addresses of all values stay in registers
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const int chunk = first + c;
      const bool there = raw && chunk < 8;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        constexpr int N = CHUNKS * 32 / PIECES<CHUNKS>;
        const int e = c * 32 + i / 2 * 4 + i % 2;
        float (&two)[N] = o[e / N];
        const float value =
            there ? value_of<FORMAT>(raw, scales, chunk * 64 + 2 * t + i / 2 * 8 + i % 2, chunk * 64 / R::GROUP) : 0.f;
        two[e % N] = fmaf(weight_0, value, two[e % N]);
        two[e % N + 2] = fmaf(weight_1, value, two[e % N + 2]);
      }
    }
  }
}

template <int CHUNKS, Format FORMAT>
DEVICE void add_up_in_relay(const Params& p, u32 shared, int rank, int thread) {
  using Y = Relay<CHUNKS, FORMAT>;
  using L = typename Y::L;
  constexpr int N = CHUNKS * 32 / PIECES<CHUNKS>;
  thread = kept(thread);
  float o[PIECES<CHUNKS>][N];
#pragma unroll
  for (int piece = 0; piece < PIECES<CHUNKS>; ++piece)
#pragma unroll
    for (int e = 0; e < N; ++e) o[piece][e] = 0.f;
  if (thread == 0) {
    for (int place = 0; place < Y::PLACES; ++place)
      mbarrier_arrive_expect(shared + Y::WEIGHTS_FULL + place * 8, Y::WEIGHTS_BYTES);
    mbarrier_arrive_expect(shared + Y::FINAL_FULL, Y::FINAL_BYTES);
  }
  const int turns = turns_of(await_list<Y>(shared));
  cluster_wait();
  float sums[2] = {0.f, 0.f};  // spread: of two heads and the keys of one thread of `score`
  int whose = 0, slot = 0;
  u32 parities = 0;  // of the places' barriers, of this CTA's own turns and of the ring of values
  constexpr u32 OWN = 1u << 30, RING = 1u << 31;
#pragma unroll 1
  for (int number = 0; number < turns; ++number) {
    // Made anew each time: registers are few.
    const int own = thread_here() & 127, warp = own >> 5, lane = own & 31, g = lane >> 2, t = lane & 3;
    const int place = opaque(whose) % Y::PLACES;
    const u32 weights_at = shared + Y::WEIGHTS + place * 8192, head = shared + Y::HEADS_OF_PLACES + place * Y::HEAD;
    const u32 barrier = shared + Y::WEIGHTS_FULL + place * 8;
    if (whose == rank) {
      mbarrier_wait(shared + Y::OWN_FULL, (parities & OWN) != 0);
      parities ^= OWN;
      fence_async_shared();
      if (warp == 0) {
        if (lane < Y::CTAS && lane != rank) {
          copy_to_peer(peer_address(weights_at, lane), weights_at, 8192, peer_address(barrier, lane));
          copy_to_peer(peer_address(head, lane), head, Y::HEAD, peer_address(barrier, lane));
        }
        __syncwarp();
      }
    } else {
      mbarrier_wait(barrier, parities >> place & 1);
      parities ^= 1u << place;
      if (own == 0) mbarrier_arrive_expect(barrier, Y::WEIGHTS_BYTES);
    }
    const u32 turn = uniform(load_shared_4(head + 256));
    if (turn != USUAL) {
      const float alpha[2] = {load_shared_float(head + (warp * 16 + g) * 4), load_shared_float(head + (warp * 16 + g + 8) * 4)};
#pragma unroll
      for (int piece = 0; piece < PIECES<CHUNKS>; ++piece)
#pragma unroll
        for (int e = 0; e < N; ++e) o[piece][e] *= alpha[e >> 1 & 1];
      if constexpr (Y::SPREAD) {
        const float2 of_sums = load_shared_float2(head + (rank * 8 + 2 * t) * 4);
        sums[0] *= of_sums.x, sums[1] *= of_sums.y;
      }
    }
    if constexpr (Y::SPREAD) {
      const uint4 v = load_shared_16(shared + Y::SUMS + place * 2048 + own * 16);
      sums[0] = __uint_as_float(v.x) + (__uint_as_float(v.z) + sums[0]);
      sums[1] = __uint_as_float(v.y) + (__uint_as_float(v.w) + sums[1]);
    }
    const int first_slot = slot;
#pragma unroll 1
    for (int k = 0; k < 4; ++k) {
      mbarrier_wait(shared + Y::VALUES_FULL + slot * 8, parities >> 31);
      if (++slot == Y::VALUE_SLOTS) slot = 0, parities ^= RING;
    }
    if (turn == WIDE) {
      add_wide<Y, CHUNKS, FORMAT>(o, p, shared, whose, number * TILE_KEYS, rank, warp * 16 + g, t);
    } else {
      fence_async_shared();
      const u64 weights = tile_descriptor(weights_at, 1024, 16), ring = tile_descriptor(shared + Y::VALUES, 1024, 2048);
#pragma unroll
      for (int piece = 0; piece < PIECES<CHUNKS>; ++piece) hold(o[piece]);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const u64 values = ring + slot_of<Y::VALUE_SLOTS>(first_slot, k * 16) * (Y::VALUE_SLOT / 16);
#pragma unroll
        for (int piece = 0; piece < PIECES<CHUNKS>; ++piece)
          wgmma_heads_by_dims(o[piece], weights + k * 2, values + piece * (N / 32 * 2048 / 16));
      }
      wgmma_commit();
      wgmma_wait<0>();
#pragma unroll
      for (int piece = 0; piece < PIECES<CHUNKS>; ++piece) hold(o[piece]);
    }
    __syncwarp();
    if (lane < 4) mbarrier_arrive(shared + Y::VALUES_FREE + slot_of<Y::VALUE_SLOTS>(first_slot, lane * 16) * 8);
    // The CTA of the turn that takes this place next waits for all.
    if (lane == 4 && number + Y::PLACES < turns) {
      const int next = whose + Y::PLACES;
      mbarrier_arrive_peer(peer_address(shared + Y::PLACE_FREE, next >= Y::CTAS ? next - Y::CTAS : next));
    }
    __syncwarp();
    whose = whose + 1 == Y::CTAS ? 0 : whose + 1;
  }

  const Row row = whole_row(p, true);
  const int own = thread_here() & 127, warp = own >> 5, lane = own & 31, g = lane >> 2, t = lane & 3;
  const int of_lane = warp * 16 + lane % 16, global_head = row.tile * 64 + of_lane;
  const bool there = global_head < p.num_heads;
  const float sink = p.attn_sink && there ? __ldg(p.attn_sink + global_head) : -INFINITY;
  if constexpr (Y::SPREAD) {  // as `store_sums` and `sum_of` add up
    const u32 sums_at = shared + Y::DESK;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int step = 16; step >= 4; step >>= 1) sums[i] += __shfl_xor_sync(~0u, sums[i], step);
    if (lane < 4) store_shared_float2(sums_at + (warp * 8 + 2 * lane) * 4, sums[0], sums[1]);
    named_barrier(VALUES_BARRIER, 128);
    if (own < 8) send_final<Y>(shared, 0, rank * 8 + own, sum_of<8>(sums_at, own));
    __syncwarp();
  }
  mbarrier_wait(shared + Y::FINAL_FULL, 0);
  const float total = load_shared_float(shared + Y::FINAL + of_lane * 4),
              reference = load_shared_float(shared + Y::FINAL + 256 + of_lane * 4);
  const float lse = total == 0.f ? -INFINITY : (reference + log2_approx(total)) * 0.6931471805599453f;
  float factor = __fdividef(1.f / L::FACTOR, total);
  if (rank == 0 && there && lane < 16) leave_lse(p, row, global_head, -1, lse, factor);
  if (sink != -INFINITY) factor = __fdividef(factor, 1.f + exp2_approx((sink - lse) * 1.4426950408889634f));
  factor = total == 0.f ? 0.f : factor;
  const float factors[2] = {__shfl_sync(~0u, factor, g), __shfl_sync(~0u, factor, g + 8)};
  named_barrier(VALUES_BARRIER, 128);  // all products have left the values
  constexpr int UNITS = CHUNKS * 8;
  const u32 stage = shared + Y::VALUES + warp * (16 * UNITS * 16);
#pragma unroll
  for (int i = 0; i < UNITS; ++i)
#pragma unroll
    for (int r = 0; r < 2; ++r)
      store_shared_4(stage + ((g + 8 * r) * UNITS + (i ^ g)) * 16 + t * 4,
                     scaled_pair(o[4 * i / N][4 * i % N + 2 * r], o[4 * i / N][4 * i % N + 2 * r + 1], factors[r]));
  __syncwarp();
#pragma unroll 4
  for (int at = lane; at < 16 * UNITS; at += 32) {
    const int line = at / UNITS, unit = at % UNITS, head = row.tile * 64 + warp * 16 + line;
    if (head < p.num_heads && rank * CHUNKS + unit / 8 < 8)
      *reinterpret_cast<uint4*>(out_row(p, row, head) + rank * (CHUNKS * 64) + unit * 8) =
          load_shared_16(stage + (line * UNITS + (unit ^ (line & 7))) * 16);
  }
}

// ---- all of it ------------------------------------------------------------------------------------------------------

template <int CHUNKS, Format FORMAT>
DEVICE void relay(const Params& p) {
  using Y = Relay<CHUNKS, FORMAT>;
  constexpr int QUERY_THREADS = 384;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 shared = shared_address(shared_memory);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x >> 7, 0), thread = threadIdx.x & 127;
  const int rank = uniform(cluster_rank());
  const Row row = whole_row(p);
  if (row.token >= p.num_tokens) {
    wait_for_prerequisites();
    return;
  }
  if (thread % 32 == 0)
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < Y::NUM_BARRIERS; i += 16) {
      const u32 barrier = Y::BARRIERS + i * 8;
      int arrivals = 1;
      if (barrier < Y::RAW_FREE) arrivals = ARRIVALS_OF_A_WARP + (Rows<FORMAT>::SCALES_APART ? 32 : 0);
      if (barrier >= Y::RAW_FREE && barrier < Y::VALUES_FREE) arrivals = ARRIVALS_OF_A_WARP;
      if (barrier >= Y::VALUES_FREE && barrier < Y::WEIGHTS_FULL) arrivals = 4;
      if (barrier == Y::OWN_FULL || barrier == Y::LIST_FULL) arrivals = 4 * ARRIVALS_OF_A_WARP;
      if (barrier == Y::PLACE_FREE) arrivals = 4 * Y::CTAS;
      mbarrier_init(shared + barrier, arrivals);
      fence_barrier_init();
    }
  __syncthreads();
  cluster_arrive();
  if (warpgroup < 3) {
    load_queries<64, FORMAT, QUERY_THREADS>(p, row, shared, threadIdx.x, false, 0);
    fence_async_shared();
    named_barrier<QUERY_BARRIER, QUERY_THREADS>();
    if (warpgroup == 0) {
      more_registers<168>();
      score_in_relay<CHUNKS, FORMAT>(p, row, shared_memory, shared, rank, thread);
    } else if (warpgroup == 1) {
      more_registers<160>();
      add_up_in_relay<CHUNKS, FORMAT>(p, shared, rank, thread);
    } else {
      more_registers<144>();
      bring_values<Y, CHUNKS>(p, row, shared, rank, thread / 32, thread % 32);
      cluster_wait();
    }
  } else {
    fewer_registers<40>();
    launch_dependents();
    gather_turns<Y>(p, row, shared, rank, thread / 32, thread % 32);
    cluster_wait();
    wait_for_prerequisites();
  }
  // No CTA leaves while others write to it.
  cluster_meet();
}
