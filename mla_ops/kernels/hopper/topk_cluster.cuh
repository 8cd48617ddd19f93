// The k best columns of a row, by a cluster whose CTAs meet once.
//
// A CTA has every C-th run of 16 columns, so that each part is like the others. Counts of the best of several neighbours
// give its gate, a score that a few more than its share of k reach. What reaches the gate goes to the first CTA, which has
// room for SLOTS entries, selects among them, and writes: a bit for each column says where it goes. If what it selects is
// not above all gates, or a room was too small, nothing has been written, and the row is done in the other way.
#pragma once
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
  const TopkParams& p;
  Control& control;
  u32* const bins;
  u64* const rooms;
  const u32 rank;
  u32* const words;  // a bit for each column
  float4 x[VECTORS];
  Row row;
  u32 quads;    // a thread has so many of four words
  u16* fronts;  // how many chosen columns are in front of each word

  DEVICE InCluster(const TopkParams& params, Control& shared, u32* of_bins, u64* of_rooms, u32 this_cta)
      : p(params), control(shared), bins(of_bins), rooms(of_rooms), rank(this_cta),
        words(reinterpret_cast<u32*>(rooms + SLOTS)) {}

  // Number of a thread's i-th group in the row.
  DEVICE u32 group(int i) const {
    const u32 number = i * THREADS + threadIdx.x;
    return (number / RUN * p.cluster + rank) * RUN + number % RUN;
  }

  // Columns up to `end`, of those that the tensor has.
  DEVICE void load(const float* scores, int skew, int end) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int column = 4 * group(i);
      x[i] = load_once_16_if(column < end && Held<THREADS, 1>::whole(column, skew, p.num_columns), scores + column);
    }
  }

  // The best of a group, whose columns that the row does not have become absent.
  DEVICE u32 best_of(int i) {
    const int column = 4 * group(i);
    if (column < row.start || column + 4 > row.end) {
      const bool whole = Held<THREADS, 1>::whole(column, row.skew, p.num_columns);
      auto only_of_row = [&](float& score, int at) {
        if (!row.has(at))
          score = absent();
        else if (!whole)
          score = row.scores[at];
      };
      only_of_row(x[i].x, column), only_of_row(x[i].y, column + 1);
      only_of_row(x[i].z, column + 2), only_of_row(x[i].w, column + 3);
    }
    return key_of(fmaxf(fmaxf(x[i].x, x[i].y), fmaxf(x[i].z, x[i].w)));
  }

  // The barrier of a CTA: the first one's waits for what all hand over, another's for the verdict.
  DEVICE u32 barrier_of(u32 cta) const { return peer_address(shared_address(&control.met), cta); }

  // No column is chosen, and the barriers are there for whoever the cluster's barrier lets go on.
  DEVICE void clear() {
    if (threadIdx.x == 0) {
      control.have = control.dropped = 0;
      mbarrier_init(shared_address(&control.met), rank == 0 ? p.cluster : 1);
      fence_barrier_init();
      if (rank > 0) mbarrier_arrive_expect(shared_address(&control.met), sizeof(control.verdict));
    }
    if (rank == 0) {
      if (threadIdx.x >= p.cluster && threadIdx.x < MAX_CLUSTER) control.gates[threadIdx.x] = 0;
#pragma unroll 1
      for (u32 i = 0; i < quads; ++i) reinterpret_cast<uint4*>(words)[i * THREADS + threadIdx.x] = {0, 0, 0, 0};
    }
    __syncthreads();  // bins are at 0
    cluster_arrive();
  }

  DEVICE u32 gate_of(const Keys<VECTORS>& best, const FirstBins& first_bins) {
    const u64 found = select<THREADS, false, MORE>(control, bins, best, p.need, first_bins.least, first_bins.shift,
                                                   p.room / 16, true);
    return max(static_cast<u32>(found >> 32), 1u);
  }

  // Hands over scores that reach the gate, unless the room is too small, or the gate is no score.
  DEVICE void append(u32 least) {
    const u32 lane = threadIdx.x % 32;
    u32 count = 0, place = 0;
    if (least <= LOWEST_KEY) return;
    float gate = score_of(least);
    hold(gate);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      add_if_reaches(count, x[i].x, gate, 1), add_if_reaches(count, x[i].y, gate, 1);
      add_if_reaches(count, x[i].z, gate, 1), add_if_reaches(count, x[i].w, gate, 1);
    }
    if (!__any_sync(~0u, count != 0)) return;
    const u32 inclusive = inclusive_scan(count), of_warp = __shfl_sync(~0u, inclusive, 31);
    if (lane == 0) place = atomicAdd(&control.have, of_warp);
    place = __shfl_sync(~0u, place, 0);
    if (place + of_warp > p.room) {
      if (lane == 0) atomicAdd(&control.dropped, of_warp);
      return;
    }
    const u32 barrier = barrier_of(0);
    u32 target = peer_address(shared_address(rooms), 0) + (rank * p.room + place + inclusive - count) * 8;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const u32 column = 4 * group(i);
      const float values[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (!(values[j] >= gate)) continue;
        send_8(target, barrier, entry_of(key_of_number(values[j]), column + j));
        target += 8;
      }
    }
  }

  // Whether all is done; the same in all CTAs.
  DEVICE bool finish(u32 gate, i64 number, int request) {
    constexpr int OWN = SLOTS / THREADS;
    __syncthreads();
    if (threadIdx.x == 0) {
      const u32 have = control.have, barrier = barrier_of(0);
      send_8(peer_address(shared_address(&control.gates[rank]), 0), barrier,
             static_cast<u64>(have > p.room || gate <= LOWEST_KEY ? ~0u : gate) << 32 | have);
      mbarrier_arrive_expect_peer(barrier, (have - control.dropped) * 8 + sizeof(control.gates[rank]));
    }
    __syncwarp();
    mbarrier_wait_cluster(shared_address(&control.met), 0);
    if (rank > 0) return control.verdict == 1;
    const u32 lane = threadIdx.x % 32, room_bits = 31 - __clz(p.room);
    const u32 highest = __reduce_max_sync(~0u, static_cast<u32>(control.gates[lane % MAX_CLUSTER] >> 32));
    Slots<OWN> slots;
#pragma unroll
    for (u32 i = 0; i < OWN; ++i) {
      const u32 slot = i * THREADS + threadIdx.x, there = static_cast<u32>(control.gates[slot >> room_bits]);
      const u64 entry = rooms[slot];
      slots.entries[i] = (slot & p.room - 1) < there ? entry : 0;
    }
    u64 threshold = 0;
    if (highest != ~0u) threshold = select<THREADS, true, FAILURE>(control, bins, slots, p.k, highest, SHIFT_OF_GATED);
    if (threadIdx.x > 0 && threadIdx.x < p.cluster)
      send_4(peer_address(shared_address(&control.verdict), threadIdx.x), barrier_of(threadIdx.x), threshold ? 1 : 2);
    if (threshold == 0) return false;
    write(slots, threshold, number, request);
    return true;
  }

  // Writes what is chosen of the slots, in the order of columns.
  template <int OWN>
  DEVICE void write(Slots<OWN>& slots, u64 threshold, i64 number, int request) {
    const u32 at = shared_address(words);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const u32 column = position_of(slots.entries[i]);
      set_if(slots.entries[i] >= threshold, at + column / 32 * 4, 1u << column % 32);
    }
    __syncthreads();
    u32 sum = 0, total;
    uint2* const own = reinterpret_cast<uint2*>(fronts) + threadIdx.x * quads;
#pragma unroll 1
    for (u32 i = 0; i < quads; ++i) {
      const uint4 bits = reinterpret_cast<const uint4*>(words)[threadIdx.x * quads + i];
      const u32 second = sum + __popc(bits.x), third = second + __popc(bits.y), fourth = third + __popc(bits.z);
      own[i] = {sum | second << 16, third | fourth << 16};
      sum = fourth + __popc(bits.w);
    }
    const u32 before = exclusive_scan<THREADS>(control, sum, total) * 0x10001;
#pragma unroll 1
    for (u32 i = 0; i < quads; ++i) own[i] = {own[i].x + before, own[i].y + before};
    __syncthreads();
    int* const chosen = reinterpret_cast<int*>(rooms);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      hold(slots.entries[i]);  // else what the first loop made of it is kept in registers
      const u32 column = position_of(slots.entries[i]);
      if (slots.entries[i] >= threshold)
        chosen[fronts[column / 32] + __popc(words[column / 32] & (1u << column % 32) - 1)] = column - row.skew;
    }
    __syncthreads();
    int* out = p.indices + number * p.indices_pitch;
    hold(out);
#pragma unroll 1
    for (u32 i = threadIdx.x; i < p.k; i += THREADS) out[i] = p.translated(chosen[i], request);
  }

  DEVICE bool run(i64 number, int request, const Row& of_row) {
    row = of_row;
    quads = ((row.end + 127) / 128 + THREADS - 1) / THREADS;
    fronts = reinterpret_cast<u16*>(words + 4 * quads * THREADS);
    if (!p.ahead) load(row.scores, row.skew, row.end);
    clear();
    const FirstBins first_bins(control, bins, true);
    Keys<VECTORS> best;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      best.keys[i] = best_of(i);
      first_bins.count(best.keys[i]);
    }
    const u32 gate = gate_of(best, first_bins);
    cluster_wait();  // the first CTA's barrier is there
    append(gate);
    return finish(gate, number, request);
  }
};
