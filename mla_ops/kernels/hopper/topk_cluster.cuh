// The k best columns of a row, by a cluster whose CTAs meet once.
//
// A CTA has every C-th run of 16 columns, so that each part is like the others. Counts of the best of several neighbours
// give its gate, a score that a few more than its share of k reach. What reaches the gate goes to the first CTA, which has
// room for SLOTS entries, selects among them, and writes: a bit for each column says where it goes. If what it selects is
// not above all gates, or a room was too small, nothing has been written, and the row is done in the other way.
#pragma once
#include "topk_peers.cuh"
#include "topk_short.cuh"

constexpr u32 SLOTS = 4096, RUN = 4;  // entries; groups of four columns

// The best of a thread's groups; 0 is none.
template <int COUNT>
struct Keys {
  u32 keys[COUNT];

  template <class F>
  DEVICE void each(F use) const {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) use(keys[i], 0u);
  }
};

// A thread's entries; 0 is none.
template <int COUNT>
struct Slots {
  u64 entries[COUNT];

  template <class F>
  DEVICE void each(F use) const {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) use(static_cast<u32>(entries[i] >> 32), static_cast<u32>(entries[i]));
  }
};

// Registers hold VECTORS groups of a thread.
template <int THREADS, int VECTORS>
struct InCluster {
  static constexpr u32 MOST = THREADS * VECTORS;  // groups of a CTA
  const Params& p;
  Control& control;
  u32* const bins;
  u64* const rooms;
  const Row& row;
  const u32 rank, first, groups;
  const u32 first_room;  // address of the first CTA's rooms
  u32* const words;     // a bit for each column
  const u32 own_quads;  // of a thread, of four words
  u16* const fronts;    // of a quad: how many chosen columns are in front of it

  DEVICE InCluster(const Params& params, Control& shared, u32* of_bins, u64* of_rooms, const Row& of_row, u32 this_cta)
      : p(params), control(shared), bins(of_bins), rooms(of_rooms), row(of_row), rank(this_cta), first(of_row.start / 4),
        groups((of_row.end + 3) / 4 - of_row.start / 4),
        first_room(peer_address(shared_address(of_rooms), 0)),
        words(reinterpret_cast<u32*>(rooms + SLOTS)),
        own_quads(((groups + 31) / 32 + THREADS - 1) / THREADS),
        fronts(reinterpret_cast<u16*>(words + 4 * own_quads * THREADS)) {}

  DEVICE uint4& quad(u32 number) const { return reinterpret_cast<uint4*>(words)[number]; }

  // Counts the chosen among the first `count` columns of a quad.
  DEVICE static u32 chosen_of(const uint4& bits, u32 count) {
    auto of_word = [&](u32 word, u32 begin) {
      return __popc(count >= begin + 32 ? word : count > begin ? word & (1u << count - begin) - 1 : 0);
    };
    return of_word(bits.x, 0) + of_word(bits.y, 32) + of_word(bits.z, 64) + of_word(bits.w, 96);
  }

  // Number of a thread's i-th group in the row.
  DEVICE u32 group(int i) const {
    const u32 number = i * THREADS + threadIdx.x;
    return (number / RUN * p.cluster + rank) * RUN + number % RUN;
  }

  DEVICE float4 load(u32 own) const {
    const int column = 4 * (first + own);
    if (own < groups && Held<THREADS, 1>::whole(column, row.skew, p.num_columns)) return load_once_16(row.scores + column);
    return {absent(), absent(), absent(), absent()};
  }

  DEVICE void keys_of(const float4& x, u32 own, u32 (&keys)[4]) const {
    const int column = 4 * (first + own);
    float values[4] = {x.x, x.y, x.z, x.w};
    if (column >= row.start && column + 4 <= row.end) {
#pragma unroll
      for (int j = 0; j < 4; ++j) keys[j] = key_of(values[j]);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        keys[j] = 0;
        if (own >= groups || !row.has(column + j)) continue;
        if (!Held<THREADS, 1>::whole(column, row.skew, p.num_columns)) values[j] = row.scores[column + j];
        keys[j] = key_of(values[j]);
      }
    }
  }

  // Rooms are empty, and no column is chosen.
  DEVICE void clear() {
    if (threadIdx.x == 0) control.have = 0;
    if (rank == 0) {
#pragma unroll
      for (u32 i = 0; i < SLOTS / THREADS; ++i) rooms[i * THREADS + threadIdx.x] = 0;
#pragma unroll 1
      for (u32 i = 0; i < own_quads; ++i) quad(i * THREADS + threadIdx.x) = {0, 0, 0, 0};
    }
    __syncthreads();  // bins are at 0
    cluster_arrive_release();
  }

  DEVICE u32 gate_of(const Keys<VECTORS>& best, FirstBins first_bins) {
    return max(static_cast<u32>(select<THREADS, false, MORE>(control, bins, best, p.need, first_bins.least, first_bins.shift,
                                                       p.room / 16, true) >>
                                32),
               1u);
  }

  // Hands over keys that reach the gate, unless the room is too small.
  DEVICE void append(const u32 (&keys)[VECTORS][4], u32 gate) {
    const u32 lane = threadIdx.x % 32;
    u32 count = 0, place = 0;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) count += keys[i][j] >= gate;
    if (!__any_sync(~0u, count != 0)) return;
    const u32 inclusive = inclusive_scan(count, lane), of_warp = __shfl_sync(~0u, inclusive, 31);
    if (lane == 0) place = atomicAdd(&control.have, of_warp);
    place = __shfl_sync(~0u, place, 0);
    if (place + of_warp > p.room) return;
    u32 target = first_room + (rank * p.room + place + inclusive - count) * 8;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const u32 column = 4 * (first + group(i));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool kept = keys[i][j] >= gate;
        store_peer_if(kept, target, entry_of(keys[i][j], column + j));
        target += kept ? 8 : 0;
      }
    }
  }

  // Whether all is done; the same in all CTAs.
  DEVICE bool finish(u32 gate, i64 number, int request) {
    constexpr int OWN = SLOTS / THREADS;
    __syncthreads();
    if (threadIdx.x == 0) *peer_pointer(&control.gates[rank], 0) = control.have > p.room ? ~0u : gate;
    cluster_meet();
    if (rank > 0) {
      cluster_meet();
      return control.verdict == 1;
    }
    const u32 lane = threadIdx.x % 32, highest = __reduce_max_sync(~0u, lane < p.cluster ? control.gates[lane] : 0);
    Slots<OWN> slots;
#pragma unroll
    for (int i = 0; i < OWN; ++i) slots.entries[i] = rooms[i * THREADS + threadIdx.x];
    u64 threshold = 0;
    if (highest != ~0u) threshold = select<THREADS, true, FAILURE>(control, bins, slots, p.k, highest, SHIFT_OF_GATED);
    if (threadIdx.x < p.cluster) *peer_pointer(&control.verdict, threadIdx.x) = threshold ? 1 : 2;
    if (threshold == 0) {
      cluster_meet();
      return false;
    }
    cluster_arrive_release();
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const u32 column = position_of(slots.entries[i]) - 4 * first;
      if (slots.entries[i] >= threshold) atomicOr(&words[column / 32], 1u << column % 32);
    }
    __syncthreads();
    u32 sum = 0, total;
#pragma unroll 1
    for (u32 i = 0; i < own_quads; ++i) sum += chosen_of(quad(threadIdx.x * own_quads + i), 128);
    u32 front = exclusive_scan<THREADS>(control, sum, total);
#pragma unroll 1
    for (u32 i = 0; i < own_quads; ++i) {
      const u32 number = threadIdx.x * own_quads + i;
      fronts[number] = front, front += chosen_of(quad(number), 128);
    }
    __syncthreads();
    int* const out = p.indices + number * p.indices_pitch;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const u32 column = position_of(slots.entries[i]) - 4 * first;
      if (slots.entries[i] < threshold) continue;
      out[fronts[column / 128] + chosen_of(quad(column / 128), column % 128)] =
          p.translated(column + 4 * first - row.skew, request);
    }
    return true;
  }

  DEVICE bool run(i64 number, int request) {
    float4 x[VECTORS];
    u32 keys[VECTORS][4];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) x[i] = load(group(i));
    clear();
    const FirstBins first_bins(true);
    Keys<VECTORS> best;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      keys_of(x[i], group(i), keys[i]);
      best.keys[i] = max(max(keys[i][0], keys[i][1]), max(keys[i][2], keys[i][3]));
      first_bins.count(bins, best.keys[i]);
    }
    const u32 gate = gate_of(best, first_bins);
    cluster_wait();  // the first CTA's rooms are empty
    append(keys, gate);
    return finish(gate, number, request);
  }
};
