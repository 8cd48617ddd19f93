// The k best columns of a row, by a cluster whose CTAs meet three times.
//
// A CTA has every C-th run of 32 columns, so that each part is like the others. Groups of columns that lie far apart have
// a best one each. The least of these in the cluster is likely to be chosen, and k columns are likely to lie above it:
// there bins begin, of equal width, up to the least of the CTAs' best ones. Each CTA counts its scores in the bins, and
// tells all others (8 bits a bin), so that all know in which bin the k-th best lies: the border. Columns in bins above it
// are chosen: a CTA sends their bits to the CTA that writes what is chosen of the columns there. Those of the border, a
// few, all CTAs get as entries, and choose of them what is wanted.
#pragma once
#include "topk_short.cuh"

constexpr u32 SLOTS = 4096, RUN = 8;  // entries; groups of four columns, a line of memory: half a line takes as long
constexpr u32 CLUSTER_BINS = 256, MOST_OF_A_BIN = 255;  // of one CTA: a byte, the highest says: perhaps more
constexpr u32 TOO_MANY = 1 << 16;
constexpr float FIRST_BIN = 8388608.f;  // 2^23: a number from here on is a bin's, in its low bits

// Registers hold VECTORS groups of a thread.
template <int THREADS, int VECTORS>
struct InCluster {
  static constexpr u32 MOST = THREADS * VECTORS;  // groups of a CTA
  static constexpr u32 WARPS = THREADS / 32, TURNS = VECTORS * WARPS;
  static constexpr u32 TURN_BYTES = 16;  // a bit for each column
  const Params& p;
  Control& control;
  u32* const bins;
  u64* const border;  // entries of all CTAs
  const u32 rank;
  unsigned char* const counts;  // of all CTAs
  unsigned char* const groups;  // this CTA's, four bits that say which are above the border
  unsigned char* const bits;    // of the columns that this CTA writes, as they come
  const u32 first_group;
  float4 x[VECTORS];
  Row row;
  float times, plus;  // make a score's bin

  DEVICE InCluster(const Params& params, Control& shared, u32* of_bins, u64* of_rooms, u32 this_cta)
      : p(params), control(shared), bins(of_bins), border(of_rooms), rank(this_cta),
        counts(reinterpret_cast<unsigned char*>(border + SLOTS)), groups(counts + MAX_CLUSTER * CLUSTER_BINS),
        bits(groups + MOST), first_group((threadIdx.x / RUN * p.cluster + rank) * RUN + threadIdx.x % RUN) {}

  // Number of a thread's i-th group in the row.
  DEVICE u32 group(int i) const { return first_group + i * THREADS * p.cluster; }

  // Whether all of a thread's columns are in a range.
  DEVICE bool within(int begin, int end) const {
    return 4 * static_cast<int>(group(0)) >= begin && 4 * static_cast<int>(group(VECTORS - 1)) + 4 <= end;
  }

  // Whether a row needs more than a CTA, whose registers hold so many groups a thread.
  static constexpr u32 ALONE = THREADS < 1024 ? 3 : 2;
  DEVICE bool needs_all(int start, int end) const {
    return static_cast<u32>((end + 3) / 4 - start / 4) > ALONE * THREADS && end - start > p.k;
  }

  // Columns up to `end`, of those that the tensor has.
  DEVICE void load(const float* scores, int skew, int end) {
    if (within(skew, min(end, p.num_columns + skew))) {
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) x[i] = load_once_16(scores + 4 * group(i));
      return;
    }
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

  // A warp has a turn for each of its threads' groups. The columns of one turn of all CTAs are neighbours, so each CTA
  // writes those of some turns.
  DEVICE u32 first_turn(u32 cta) const { return cta << p.turn_bits; }

  DEVICE u32 turns_of(u32 cta) const {
    return min(max(TURNS, first_turn(cta)) - first_turn(cta), 1u << p.turn_bits);
  }

  // Whether there are two threads for each run of 32 columns that a CTA writes: alike neighbours are chosen together.
  DEVICE bool halved() const { return (p.cluster << p.turn_bits + 3) <= THREADS; }

  // The barriers are there for whoever the cluster's barrier lets go on.
  DEVICE void clear() {
    if (threadIdx.x == 0) {
      control.have = control.front = 0, control.last_place = p.last_place();
      mbarrier_init(shared_address(&control.met), 1), mbarrier_init(shared_address(&control.counted), 1);
      mbarrier_init(shared_address(&control.listed_all), 1), mbarrier_init(shared_address(&control.given), 1);
      fence_barrier_init();
      mbarrier_arrive_expect(shared_address(&control.met), p.cluster * sizeof(u64));
      mbarrier_arrive_expect(shared_address(&control.counted), p.cluster * CLUSTER_BINS);
      mbarrier_arrive_expect(shared_address(&control.given), p.cluster * (turns_of(rank) * TURN_BYTES + sizeof(u32)));
    }
    if (threadIdx.x < MAX_CLUSTER) control.chosen[threadIdx.x] = 0;
#pragma unroll 1
    for (u32 i = p.cluster * (CLUSTER_BINS / 16) + threadIdx.x; i < MAX_CLUSTER * CLUSTER_BINS / 16; i += THREADS)
      reinterpret_cast<uint4*>(counts)[i] = {0, 0, 0, 0};
    __syncthreads();  // bins are at 0
    cluster_arrive();
  }

  template <class F>
  DEVICE void each(F use) const {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
      use(x[i].x, 4 * i), use(x[i].y, 4 * i + 1), use(x[i].z, 4 * i + 2), use(x[i].w, 4 * i + 3);
  }

  // Where bins begin and end, the same in all CTAs. A group of columns is so large that one and a half to three of its
  // columns are chosen on average.
  DEVICE void place_bins() {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float most = absent();
    each([&](float score, int) { most = fmaxf(most, score); });
#pragma unroll
    for (u32 lanes = 1; lanes < 32; lanes *= 2)  // those of other runs of columns first: neighbours score alike
      if (8 * VECTORS * lanes * p.k <= 3u * (row.end - row.start))
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 16 / lanes));
    u32 highest = key_of(most), lowest = most > -INFINITY ? highest : ~0u;
    auto reduce = [&] { lowest = __reduce_min_sync(~0u, lowest), highest = __reduce_max_sync(~0u, highest); };
    reduce();
    if (lane == 0) control.bests[warp] = static_cast<u64>(highest) << 32 | lowest;
    __syncthreads();
    if (warp == 0) {
      const u64 own = lane < WARPS ? control.bests[lane] : ~0u;
      lowest = static_cast<u32>(own), highest = static_cast<u32>(own >> 32);
      reduce();
      if (lane < p.cluster)
        send_8(peer_address(shared_address(&control.ranges[rank]), lane), peer_address(shared_address(&control.met), lane),
               static_cast<u64>(highest) << 32 | lowest);
    }
    await(control.met);
    const u64 own = lane < p.cluster ? control.ranges[lane] : ~0ull;
    const float low = score_of(__reduce_min_sync(~0u, static_cast<u32>(own)));
    const float high = score_of(__reduce_min_sync(~0u, static_cast<u32>(own >> 32)));
    times = __fdividef(CLUSTER_BINS - 1, high - low), plus = FIRST_BIN - low * times;
    if (!(times > 0 && fabsf(plus) < INFINITY)) times = absent();  // then nothing is counted
  }

  DEVICE float bin_of(float score) const { return __fmaf_rn(score, times, plus); }

  // Counts, and tells all CTAs.
  DEVICE void count() {
    const u32 base = shared_address(bins) - 4 * __float_as_uint(FIRST_BIN), none = control.no_bin();
    each([&](float score, int) {
      const float bin = bin_of(score);
      const u32 at = base + 4 * __float_as_uint(fminf(bin, FIRST_BIN + (CLUSTER_BINS - 1)));
      count_at(bin >= FIRST_BIN ? at : none);
    });
    __syncthreads();
    const u32 counted = shared_address(&control.counted), of_this = shared_address(counts + rank * CLUSTER_BINS);
#pragma unroll 1
    for (u32 i = threadIdx.x; i < CLUSTER_BINS / 8 * p.cluster; i += THREADS) {
      const u32 eight = i % (CLUSTER_BINS / 8), to = i / (CLUSTER_BINS / 8);
      auto four = [&](u32 number) {
        const uint4 of_bins = reinterpret_cast<const uint4*>(bins)[number];
        return min(of_bins.x, MOST_OF_A_BIN) | min(of_bins.y, MOST_OF_A_BIN) << 8 | min(of_bins.z, MOST_OF_A_BIN) << 16 |
               min(of_bins.w, MOST_OF_A_BIN) << 24;
      };
      const u32 low = four(2 * eight), high = four(2 * eight + 1);
      send_8(peer_address(of_this + 8 * eight, to), peer_address(counted, to), static_cast<u64>(high) << 32 | low);
    }
  }

  // The bin in which the k-th best lies, in control. Whether there is one, and room for what is in it. Bins hold `total`.
  DEVICE bool find_border(u32& total) {
    constexpr u32 OWN = CLUSTER_BINS > THREADS ? CLUSTER_BINS / THREADS : 1;
    await(control.counted);
    u32 of_bins[OWN], sum = 0;
#pragma unroll
    for (u32 i = 0; i < OWN; ++i) {
      of_bins[i] = 0;
      const u32 bin = CLUSTER_BINS - 1 - threadIdx.x * OWN - i;
      if (bin < CLUSTER_BINS)
#pragma unroll
        for (u32 cta = 0; cta < MAX_CLUSTER; ++cta) {
          const u32 of_cta = counts[cta * CLUSTER_BINS + bin];
          of_bins[i] += of_cta == MOST_OF_A_BIN ? TOO_MANY : of_cta;
        }
      sum += of_bins[i];
    }
    u32 above = exclusive_scan<THREADS>(control, sum, total);
    const u32 k = p.k;
    if (above < k && k <= above + sum) {
      u32 i = 0;
#pragma unroll
      for (u32 j = 0; j + 1 < OWN; ++j)
        if (i == j && above + of_bins[j] < k) above += of_bins[j], ++i;
      control.bin = CLUSTER_BINS - 1 - threadIdx.x * OWN - i, control.above = above;
#pragma unroll
      for (u32 j = 0; j < OWN; ++j)
        if (i == j) control.inside = of_bins[j];
    }
    __syncthreads();
    return total >= k && control.inside <= SLOTS;
  }

  // The bits of four groups' columns, of a byte each.
  DEVICE static u32 together(u32 of_groups) {
    of_groups = (of_groups | of_groups >> 4) & 0xff00ff;
    return (of_groups | of_groups >> 8) & 0xffff;
  }

  // Sends to each CTA the entries of the border, the bits of the columns that it writes, and how many are above the border
  // in front of them.
  DEVICE void give(float least, float most) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, bin = control.bin;
    hold(times);  // else all bins are kept from the counting on
    u32 above = 0, inside = 0;  // a bit for each column
    each([&](float score, int i) {
      const float own = bin_of(score);
      add_if_reaches(inside, own, least, 1 << i), add_if_above(above, own, most, 1 << i);
    });
    inside ^= above;
    if (inside) {
      u32 own = shared_address(bins) + 8 * atomicAdd(&control.have, static_cast<u32>(__popc(inside)));
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        const u32 column = ~(4 * group(i));
        append_if(inside >> 4 * i & 1, own, x[i].x, column), append_if(inside >> 4 * i & 2, own, x[i].y, column - 1);
        append_if(inside >> 4 * i & 4, own, x[i].z, column - 2), append_if(inside >> 4 * i & 8, own, x[i].w, column - 3);
      }
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const u32 own = above >> 4 * i & 15, count = __reduce_add_sync(~0u, __popc(own));
      groups[i * THREADS + threadIdx.x] = own;
      if (lane == 0) atomicAdd(&control.chosen[i * WARPS + warp >> p.turn_bits], count);
    }
    __syncthreads();
    const u32 listed = shared_address(&control.listed_all), given = shared_address(&control.given);
    if (threadIdx.x == 0) mbarrier_arrive_expect(listed, control.inside * sizeof(u64));
    __syncwarp();
    const u32 of_bin = lane < rank ? counts[lane * CLUSTER_BINS + bin] : 0, before_these = __reduce_add_sync(~0u, of_bin);
    const u32 to_border = threadIdx.x % MAX_CLUSTER;
#pragma unroll 1
    for (u32 i = threadIdx.x / MAX_CLUSTER; i < control.have; i += THREADS / MAX_CLUSTER) {
      if (to_border >= p.cluster) break;
      const u64 staged = reinterpret_cast<const u64*>(bins)[i];
      send_8(peer_address(shared_address(border + before_these + i), to_border), peer_address(listed, to_border),
             staged & 0xffffffff | static_cast<u64>(key_of_number(__uint_as_float(staged >> 32))) << 32);
    }
    __syncwarp();
    if (warp == WARPS - 1) {
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
    __syncwarp();
  }

  // Byte of the bits of a run of 32 columns, of those that this CTA writes.
  DEVICE u32 bits_of(u32 run) const {
    const u32 of_a_cta = run / p.cluster;
    return (of_a_cta / 4 * p.cluster + run - of_a_cta * p.cluster) * TURN_BYTES + of_a_cta % 4 * 4;
  }

  DEVICE int first_column(u32 cta) const { return first_turn(cta) * 128 * p.cluster; }

  // An entry of the border is chosen.
  DEVICE void choose(u64 entry) {
    const int column = position_of(entry) - first_column(rank);
    if (column < 0)
      atomicAdd(&control.front, 1u);
    else if (column < first_column(1))
      atomicOr(reinterpret_cast<u32*>(bits + bits_of(column / 32)), 1u << column % 32);
  }

  // Chooses of the border, whose entries differ from one another.
  DEVICE void choose_of_border() {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, inside = control.inside, wanted = p.k - control.above;
    await(control.listed_all);
    await(control.given);
    constexpr u32 FEW = 32 * WARPS < 128 ? 32 * WARPS : 128;
    if (inside <= FEW) {
      u64 others[FEW / 32], chosen = 0;
#pragma unroll
      for (u32 j = 0; j < FEW / 32; ++j) others[j] = j * 32 + lane < inside ? border[j * 32 + lane] : 0;
#pragma unroll 1
      for (u32 i = warp, turn = 0; i < inside; i += WARPS, ++turn) {
        const u64 own = border[i];
        u32 larger = 0;
#pragma unroll
        for (u32 j = 0; j < FEW / 32; ++j)
          if (j < 2 || inside > 64) larger += __popc(__ballot_sync(~0u, others[j] > own));
        if (lane == turn && larger < wanted) chosen = own;
      }
      if (chosen) choose(chosen);
    } else {
      __syncthreads();  // what bins held has been sent
      clear_bins<THREADS>(bins);
      __syncthreads();
      const u64 threshold = select_listed<THREADS>(control, bins, border, inside, wanted, 0);
#pragma unroll 1
      for (u32 i = threadIdx.x; i < inside; i += THREADS)
        if (border[i] >= threshold) choose(border[i]);
    }
    __syncthreads();
  }

  // Writes what is chosen of this CTA's part, in the order of columns. A thread has a run of columns, or a half.
  DEVICE void write(u32 own_bits, i64 number, int request) {
    const u32 lane = threadIdx.x % 32;
    u32 word = 0, total;
    if (own_bits < p.cluster * turns_of(rank) * TURN_BYTES) word = *reinterpret_cast<const u32*>(bits + (own_bits & ~3u));
    if (halved()) word = own_bits & 2 ? word >> 16 : word & 0xffff;
    u32 place = exclusive_scan<THREADS>(control, __popc(word), total) + control.front;
    place += __reduce_add_sync(~0u, lane < p.cluster ? control.before[lane] : 0);
    int* out = p.indices + number * p.indices_pitch + place;
    const int column = first_column(rank) + threadIdx.x * (halved() ? 16 : 32) - row.skew;
#pragma unroll 1
    for (; word; word &= word - 1) *out++ = p.translated(column + __ffs(word) - 1, request);
  }
};
