// The k best columns of a row, by a cluster whose CTAs meet once.
//
// A CTA has every C-th run of 32 columns, so that each part is like the others. Counts of the bests of columns that lie far
// apart, where neighbours may score alike, give its gate: a score that a few more than its share of k reach. What reaches
// the gate goes to the first CTA, which has room for SLOTS entries, and selects among them. If what it selects is not above
// all gates, or a room was too small, the row is done in the other way, as all are told. Else the first CTA has all that is
// chosen, and brings it in order by a bit for each column.
#pragma once
#include "topk_short.cuh"

constexpr u32 SLOTS = 4096, RUN = 8;  // entries; groups of four columns, a line of memory: half a line takes as long

// The best of the first, second, third and fourth columns of a thread's groups.
struct Bests {
  u32 keys[4];

  template <class F>
  DEVICE void each(F use) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) use(keys[i], 0u);
  }
};

// Entries in shared memory; 0 is none. Registers have no room for them beside the scores.
template <int THREADS>
struct Slots {
  const u64* rooms;

  template <class F>
  DEVICE void each(F use) const {
#pragma unroll
    for (u32 i = 0; i < SLOTS / THREADS; ++i) {
      const u64 entry = rooms[i * THREADS + threadIdx.x];
      use(static_cast<u32>(entry >> 32), static_cast<u32>(entry));
    }
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
  const u32 rank;
  u32* const bits;  // of the columns
  float4 x[VECTORS];
  Row row;

  DEVICE InCluster(const Params& params, Control& shared, u32* of_bins, u64* of_rooms, u32 this_cta)
      : p(params), control(shared), bins(of_bins), rooms(of_rooms), rank(this_cta),
        bits(reinterpret_cast<u32*>(rooms + SLOTS)) {}

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

  // Columns of a group that the row does not have become absent.
  DEVICE void keep_of_row(int i) {
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
  }

  // Waits until all that was sent is there. Asking again at once takes less time than being woken.
  DEVICE static void await(const u64& barrier) {
    while (!mbarrier_test(shared_address(&barrier), 0)) {}
  }

  // The barrier of a CTA: the first one's waits for what all hand over, another's for the verdict.
  DEVICE u32 barrier_of(u32 cta) const { return peer_address(shared_address(&control.met), cta); }

  // The barriers, and rooms without entries, are there for whoever the cluster's barrier lets go on.
  DEVICE void clear() {
    if (threadIdx.x == 0) {
      control.have = 0;
      mbarrier_init(shared_address(&control.met), rank == 0 ? p.cluster : 1);
      fence_barrier_init();
      if (rank > 0) mbarrier_arrive_expect(shared_address(&control.met), sizeof(control.verdict));
    }
    if (rank == 0 && threadIdx.x >= p.cluster && threadIdx.x < MAX_CLUSTER) control.gates[threadIdx.x] = 0;
    if (rank == 0) {
#pragma unroll
      for (u32 i = 0; i < SLOTS / 2 / THREADS; ++i)
        reinterpret_cast<uint4*>(rooms)[i * THREADS + threadIdx.x] = {0, 0, 0, 0};
    }
    __syncthreads();  // bins are at 0
    cluster_arrive();
  }

  DEVICE u32 gate_of(const Bests& bests, const FirstBins& first_bins) {
    const u64 found = select<THREADS, false, MORE>(control, bins, bests, p.need, first_bins.least, first_bins.shift,
                                                   p.room / 16, true);
    return max(static_cast<u32>(found >> 32), 1u);
  }

  // Appends the scores that reach the gate in this CTA's own memory, in any order; control.have may be more than p.room.
  DEVICE void collect(u32 least) {
    const u32 lane = threadIdx.x % 32;
    u32 count = 0, place = 0;
    if (least <= LOWEST_KEY) return;
    // The same condition in two ways, so that ptxas does not keep the first one's answers, which takes more than to compare.
    const float gate = score_of(least), below = score_of(least - 1 - (least == KEY_OF_ZERO));
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      add_if_reaches(count, x[i].x, gate, 1), add_if_reaches(count, x[i].y, gate, 1);
      add_if_reaches(count, x[i].z, gate, 1), add_if_reaches(count, x[i].w, gate, 1);
    }
    if (!__any_sync(~0u, count != 0)) return;
    const u32 inclusive = inclusive_scan(count), of_warp = __shfl_sync(~0u, inclusive, 31);
    if (lane == 0) place = atomicAdd(&control.have, of_warp);
    place = __shfl_sync(~0u, place, 0);
    if (place + of_warp > p.room) return;
    u32 own = shared_address(rooms) + 8 * (place + inclusive - count);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const u32 column = 4 * group(i);
      append_if_above(own, x[i].x, below, ~column), append_if_above(own, x[i].y, below, ~column - 1);
      append_if_above(own, x[i].z, below, ~column - 2), append_if_above(own, x[i].w, below, ~column - 3);
    }
  }

  // Hands over what was collected, and the gate. The first CTA's own entries lie where they belong.
  DEVICE void hand_over(u32 gate) {
    __syncthreads();
    const bool fails = control.have > p.room || gate <= LOWEST_KEY;
    const u32 have = fails ? 0 : control.have, barrier = barrier_of(0);
    const u32 target = peer_address(shared_address(rooms + rank * p.room), 0);
#pragma unroll 1
    for (u32 i = threadIdx.x; i < have; i += THREADS)
      send_8(target + i * 8, barrier,
             rooms[i] & 0xffffffff | static_cast<u64>(key_of_number(__uint_as_float(rooms[i] >> 32))) << 32);
    if (threadIdx.x == 0) {
      send_4(peer_address(shared_address(&control.gates[rank]), 0), barrier, fails ? ~0u : gate);
      mbarrier_arrive_expect_peer(barrier, have * 8 + sizeof(control.gates[rank]));
    }
    __syncwarp();
  }

  // The least entry that is chosen, the same in all CTAs; 0 if the row has to be done in another way.
  DEVICE u64 finish() {
    await(control.met);
    if (rank > 0) return control.verdict;
    const u32 highest = __reduce_max_sync(~0u, control.gates[threadIdx.x % MAX_CLUSTER]);
    u64 threshold = 0;
    if (highest != ~0u)
      threshold = select<THREADS, true, FAILURE>(control, bins, Slots<THREADS>{rooms}, p.k, highest, SHIFT_OF_GATED, 0,
                                                 false, Mark{shared_address(bits)});
    if (threadIdx.x > 0 && threadIdx.x < p.cluster)
      send_8(peer_address(shared_address(&control.verdict), threadIdx.x), barrier_of(threadIdx.x), threshold);
    return threshold;
  }

  DEVICE void clear_bits() {
    for (u32 i = 0; i < p.words; i += 4) *reinterpret_cast<uint4*>(bits + threadIdx.x * p.words + i) = {0, 0, 0, 0};
  }

  // Writes the entries from `threshold` on in the order of columns.
  DEVICE void write(u64 threshold, i64 number, int request) {
    if (control.listed == 0) {  // else it is marked
      const Mark mark = {shared_address(bits)};
#pragma unroll 1
      for (u32 i = threadIdx.x; i < SLOTS; i += THREADS) mark(rooms[i] >= threshold, position_of(rooms[i]));
    }
    meet<THREADS>();
    int* const columns = reinterpret_cast<int*>(rooms);  // entries are not needed any more
    columns_of_bits<THREADS>(control, bits, p.words, -row.skew, columns);
    meet<THREADS>();
    int* const out = p.indices + number * p.indices_pitch;
#pragma unroll 1
    for (int i = threadIdx.x; i < p.k; i += THREADS) out[i] = p.translated(columns[i], request);
  }

  DEVICE bool run(i64 number, int request, const Row& of_row) {
    row = of_row;
    if (!p.ahead) load(row.scores, row.skew, row.end);
    clear();
    const FirstBins first_bins(control, bins, true);
    float4 most = {absent(), absent(), absent(), absent()};
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      keep_of_row(i);
      most.x = fmaxf(most.x, x[i].x), most.y = fmaxf(most.y, x[i].y);
      most.z = fmaxf(most.z, x[i].z), most.w = fmaxf(most.w, x[i].w);
    }
    const Bests bests = {{key_of(most.x), key_of(most.y), key_of(most.z), key_of(most.w)}};
    bests.each([&](u32 key, u32) { first_bins.count(key); });
    const u32 gate = gate_of(bests, first_bins);
    cluster_wait();  // the first CTA's barrier is there
    collect(gate);
    hand_over(gate);
    if (rank == 0) clear_bits();
    const u64 threshold = finish();
    if (rank == 0 && threshold) write(threshold, number, request);
    return threshold;
  }
};
