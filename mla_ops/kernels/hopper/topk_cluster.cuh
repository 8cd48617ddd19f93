// The k best columns of a row, by a cluster whose CTAs meet once.
//
// A CTA has every C-th run of 32 columns, so that each part is like the others. Counts of the bests of columns that lie far
// apart, where neighbours may score alike, give its gate: a score that a few more than its share of k reach. What reaches
// the gate goes to the first CTA, which has room for SLOTS entries, and selects among them. If what it selects is not above
// all gates, or a room was too small, the row is done in the other way. Else each CTA is told the least entry that is
// chosen, and sends a bit for each of its columns to the CTA that writes what is chosen of the columns there.
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
    constexpr u32 TOGETHER = SLOTS / THREADS < 4 ? SLOTS / THREADS : 4;  // on their way at one time
#pragma unroll
    for (u32 i = 0; i < SLOTS / THREADS; i += TOGETHER) {
      u64 entries[TOGETHER];
#pragma unroll
      for (u32 j = 0; j < TOGETHER; ++j) entries[j] = rooms[(i + j) * THREADS + threadIdx.x];
#pragma unroll
      for (u32 j = 0; j < TOGETHER; ++j) use(static_cast<u32>(entries[j] >> 32), static_cast<u32>(entries[j]));
    }
  }
};

// Registers hold VECTORS groups of a thread.
template <int THREADS, int VECTORS>
struct InCluster {
  static constexpr u32 MOST = THREADS * VECTORS;  // groups of a CTA
  static constexpr u32 WARPS = THREADS / 32, TURNS = VECTORS * WARPS;
  static constexpr u32 TURN_BYTES = 16;  // a bit for each column
  const Params& p;
  Control& control;
  u32* const bins;
  u64* const rooms;
  const u32 rank;
  unsigned char* const bits;  // of the columns that this CTA writes, as they come
  float4 x[VECTORS];
  Row row;

  DEVICE InCluster(const Params& params, Control& shared, u32* of_bins, u64* of_rooms, u32 this_cta)
      : p(params), control(shared), bins(of_bins), rooms(of_rooms), rank(this_cta),
        bits(reinterpret_cast<unsigned char*>(rooms + SLOTS)) {}

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

  // A warp has a turn for each of its threads' groups. The columns of one turn of all CTAs are neighbours, so each CTA
  // writes those of some turns.
  DEVICE u32 first_turn(u32 cta) const { return cta << p.turn_bits; }

  DEVICE u32 turns_of(u32 cta) const {
    return min(max(TURNS, first_turn(cta)) - first_turn(cta), 1u << p.turn_bits);
  }

  // Whether there are two threads for each run of 32 columns that a CTA writes: alike neighbours are chosen together.
  DEVICE bool halved() const { return (p.cluster << p.turn_bits + 3) <= THREADS; }

  // The barriers, and rooms without entries, are there for whoever the cluster's barrier lets go on.
  DEVICE void clear() {
    if (threadIdx.x == 0) {
      control.have = 0;
      mbarrier_init(shared_address(&control.met), rank == 0 ? p.cluster : 1);
      mbarrier_init(shared_address(&control.given), 1);
      fence_barrier_init();
      if (rank > 0) mbarrier_arrive_expect(shared_address(&control.met), sizeof(control.verdict));
      mbarrier_arrive_expect(shared_address(&control.given), p.cluster * (turns_of(rank) * TURN_BYTES + sizeof(u32)));
    }
    if (threadIdx.x < MAX_CLUSTER) {
      control.chosen[threadIdx.x] = 0;
      if (rank == 0 && threadIdx.x >= p.cluster) control.gates[threadIdx.x] = 0;
    }
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
      threshold = select<THREADS, true, FAILURE>(control, bins, Slots<THREADS>{rooms}, p.k, highest, SHIFT_OF_GATED);
    if (threadIdx.x > 0 && threadIdx.x < p.cluster)
      send_8(peer_address(shared_address(&control.verdict), threadIdx.x), barrier_of(threadIdx.x), threshold);
    return threshold;
  }

  // Which of a thread's i-th group are chosen, a bit each: those above the least score, and with it up to column `last`.
  DEVICE u32 chosen_of(int i, float least, u32 last) const {
    const u32 column = 4 * group(i);
    const float values[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
    u32 chosen = 0;
    bool equal = false;
#pragma unroll
    for (int j = 0; j < 4; ++j) add_if_reaches(chosen, values[j], least, 1 << j), equal |= values[j] == least;
    if (equal) {
      auto drop = [&](float score, u32 j) { chosen &= ~(static_cast<u32>(score == least && column + j > last) << j); };
      drop(x[i].x, 0), drop(x[i].y, 1), drop(x[i].z, 2), drop(x[i].w, 3);
    }
    return chosen;
  }

  // The bits of four groups' columns, of a byte each.
  DEVICE static u32 together(u32 groups) {
    groups = (groups | groups >> 4) & 0xff00ff;
    return (groups | groups >> 8) & 0xffff;
  }

  // Sends to each CTA the bits of the columns that it writes, and how many are chosen in front of them.
  DEVICE void give(u64 threshold) {
    const u32 given = shared_address(&control.given), last = position_of(threshold), lane = threadIdx.x % 32;
    float least = score_of(static_cast<u32>(threshold >> 32));
    hold(least);
    unsigned char* const groups = reinterpret_cast<unsigned char*>(rooms);  // entries are not needed any more
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const u32 own = chosen_of(i, least, last), count = __reduce_add_sync(~0u, __popc(own));
      groups[i * THREADS + threadIdx.x] = own;
      if (lane == 0) atomicAdd(&control.chosen[i * WARPS + threadIdx.x / 32 >> p.turn_bits], count);
    }
    __syncthreads();
    if (threadIdx.x / 32 == WARPS - 1) {
      const u32 own = lane < MAX_CLUSTER ? control.chosen[lane] : 0, before = inclusive_scan(own) - own;
      if (lane < p.cluster)
        send_4(peer_address(shared_address(&control.before[rank]), lane), peer_address(given, lane), before);
    }
    for (u32 half = threadIdx.x; half < 2 * TURNS; half += THREADS) {
      const u32 turn = half / 2, to = turn >> p.turn_bits, place = (turn - first_turn(to)) * p.cluster + rank;
      const uint4 four = reinterpret_cast<const uint4*>(groups)[half];
      const u32 low = together(four.x) | together(four.y) << 16, high = together(four.z) | together(four.w) << 16;
      send_8(peer_address(shared_address(bits + place * TURN_BYTES + half % 2 * 8), to), peer_address(given, to),
             static_cast<u64>(high) << 32 | low);
    }
  }

  // Writes what is chosen of this CTA's part, in the order of columns.
  DEVICE void write(u64 threshold, u32 own_bits, i64 number, int request) {
    give(threshold);
    const u32 lane = threadIdx.x % 32;
    await(control.given);
    u32 word = 0, total;
    if (own_bits < p.cluster * turns_of(rank) * TURN_BYTES) word = *reinterpret_cast<const u32*>(bits + (own_bits & ~3u));
    if (halved()) word = own_bits & 2 ? word >> 16 : word & 0xffff;
    u32 place = exclusive_scan<THREADS>(control, __popc(word), total);
    place += __reduce_add_sync(~0u, lane < p.cluster ? control.before[lane] : 0);
    int* out = p.indices + number * p.indices_pitch + place;
    const int column = first_turn(rank) * 128 * p.cluster + threadIdx.x * (halved() ? 16 : 32) - row.skew;
#pragma unroll 1
    for (; word; word &= word - 1) *out++ = p.translated(column + __ffs(word) - 1, request);
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
    // A thread writes what is chosen of a run of columns. It finds out where the bits will lie before it waits.
    const u32 number_of_run = threadIdx.x >> halved(), run = number_of_run / p.cluster, of_cta = number_of_run % p.cluster;
    u32 own_bits = (run / 4 * p.cluster + of_cta) * TURN_BYTES + run % 4 * 4 + (halved() ? threadIdx.x % 2 * 2 : 0);
    hold(own_bits);
    const u64 threshold = finish();
    if (threshold) write(threshold, own_bits, number, request);
    return threshold;
  }
};
