// Rows whose scores the first bins of a cluster do not tell apart: too few are counted, or too many lie in the border.
//
// Many equal scores are the likely reason. So CTAs agree on a key that most columns of the border have in some warp, and
// tell one another how many columns of each run have it, and how many have a larger one: if the k-th best is one of
// these, each CTA takes of its own what has less than enough in front of it. Else they count in bins of keys, each exactly:
// first about the border, then in the bin of the rank, until few are in it, or a single key.
#pragma once
#include "topk_cluster.cuh"

// Behind an exact count a border may have so many entries: the room of the others is for counts.
constexpr u32 FEW_SLOTS = SLOTS / 2;

// In `x` keys take the place of scores, 0 where the row has none.
template <int THREADS, int VECTORS>
struct WithExactCounts : InCluster<THREADS, VECTORS> {
  using Base = InCluster<THREADS, VECTORS>;
  using Base::Base, Base::WARPS, Base::p, Base::control, Base::bins, Base::border, Base::rank, Base::counts, Base::x, Base::row;
  using Base::times, Base::plus, Base::group, Base::within;

  template <class F>
  DEVICE void each_key(F use) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
      use(x[i].x, 4 * i), use(x[i].y, 4 * i + 1), use(x[i].z, 4 * i + 2), use(x[i].w, 4 * i + 3);
  }

  // Words of 8 bytes to all CTAs, and those of all. Barriers take turns: who asks for the next count has had this one.
  template <u32 COUNT, class Word>
  DEVICE void exchange(u64* of_all, u32 number, Word word) {
    const u32 barrier = shared_address(number % 2 ? &control.counted : &control.met);
    if (threadIdx.x == 0) mbarrier_arrive_expect(barrier, p.cluster * COUNT * sizeof(u64));
    __syncwarp();
    const u32 of_this = shared_address(of_all + rank * COUNT);
#pragma unroll 1
    for (u32 i = threadIdx.x; i < COUNT * p.cluster; i += THREADS) {
      const u32 at = i % COUNT, to = i / COUNT;
      send_8(peer_address(of_this + 8 * at, to), peer_address(barrier, to), word(at));
    }
    __syncwarp();
    while (!mbarrier_test(barrier, (1 + number / 2) % 2)) {}
  }

  DEVICE void make_keys() {
    each_key([](float& own, int) { own = __uint_as_float(key_of(own)); });
    if (within(row.start, row.end)) return;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int column = 4 * group(i);
      auto only_of_row = [&](float& own, int at) {
        if (!row.has(at)) own = 0;
      };
      only_of_row(x[i].x, column), only_of_row(x[i].y, column + 1);
      only_of_row(x[i].z, column + 2), only_of_row(x[i].w, column + 3);
    }
  }

  // Counts keys from `first` to `last`: bins 1 and 254 are of the keys `low` and `high`, the others of those below them,
  // between them, 2^shift in each, and above them.
  DEVICE void count_keys(u32 first, u32 last, u32 low, u32 high, int shift) {
    const u32 base = shared_address(bins), none = control.no_bin();
#pragma unroll 1
    for (u32 i = threadIdx.x; i < CLUSTER_BINS; i += THREADS) bins[i] = 0;
    __syncthreads();
    each_key([&](float& own, int) {
      const u32 key = __float_as_uint(own);
      u32 bin = (key - low - 1 >> shift) + 2;
      bin = key < high ? bin : key == high ? CLUSTER_BINS - 2 : CLUSTER_BINS - 1;
      bin = key > low ? bin : key == low;
      count_at(key - first <= last - first ? base + 4 * bin : none);
    });
    __syncthreads();
  }

  // As `find_border`, of exact counts and the rank `wanted`.
  DEVICE void find_exact_border(const unsigned short* exact, u32 wanted) {
    constexpr u32 OWN = CLUSTER_BINS > THREADS ? CLUSTER_BINS / THREADS : 1;
    const u32 first = CLUSTER_BINS - 1 - threadIdx.x * OWN;
    auto of_bin = [&](u32 bin) {
      u32 sum = 0;
#pragma unroll 4
      for (u32 cta = 0; cta < p.cluster; ++cta) sum += exact[cta * CLUSTER_BINS + bin];
      return sum;
    };
    u32 sum = 0, total;
    if (first < CLUSTER_BINS)
#pragma unroll 1
      for (u32 i = 0; i < OWN; ++i) sum += of_bin(first - i);
    u32 above = exclusive_scan<THREADS>(control, sum, total);
    if (above < wanted && wanted <= above + sum) {
      u32 bin = first, inside = of_bin(bin);
#pragma unroll 1
      for (; above + inside < wanted; inside = of_bin(--bin)) above += inside;
      control.bin = bin, control.above = above, control.inside = inside;
    }
    __syncthreads();
  }

  // Scores become 1 where their column is chosen: the keys above one, and of its equals the first ones. False, and nothing
  // is changed, if the k-th best is another one; `above` and `total` are how many columns have a larger key, or this one.
  DEVICE bool choose_by(u32 equal, u32 number, u32& above, u32& total) {
    constexpr u32 RUNS = THREADS * VECTORS / RUN, WORDS = (VECTORS + 3) / 4, ALLOWED = BINS / 2, COUNT = RUNS / 8 + 1;
    const u32 thread = threadIdx.x, lane = thread % 32, of_lane = lane < p.cluster ? lane : 0;
    u32 counts_of[WORDS] = {}, up_to[WORDS];  // a byte for each group
    above = 0;
    each_key([&](float& own, int i) {
      const u32 key = __float_as_uint(own);
      counts_of[i / 16] += (key == equal) << i / 4 % 4 * 8, above += key > equal;
    });
#pragma unroll
    for (u32 i = 0; i < WORDS; ++i) {
      up_to[i] = counts_of[i];
#pragma unroll
      for (u32 step = 1; step < RUN; step *= 2) {
        const u32 other = __shfl_up_sync(~0u, up_to[i], step);
        if (lane % RUN >= step) up_to[i] += other;
      }
    }
    unsigned char* const of_runs = reinterpret_cast<unsigned char*>(bins);
    if (lane % RUN == RUN - 1)
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) of_runs[(i * THREADS + thread) / RUN] = up_to[i / 4] >> i % 4 * 8;
    u32 of_this;
    before_warp<THREADS>(control, __reduce_add_sync(~0u, above), 1, of_this);
    exchange<COUNT>(border, number, [&](u32 at) {
      return at < RUNS / 8 ? reinterpret_cast<const u64*>(of_runs)[at] : static_cast<u64>(of_this);
    });
    const unsigned char* const of_all = reinterpret_cast<const unsigned char*>(border);
    u32 sum = 0, before = 0;
    if (thread < RUNS)
#pragma unroll 4
      for (u32 cta = 0; cta < p.cluster; ++cta) {
        const u32 of_cta = of_all[cta * COUNT * 8 + thread];
        before += cta < rank ? of_cta : 0, sum += of_cta;
      }
    before += exclusive_scan<THREADS>(control, sum, total);
    const u32 others = static_cast<u32>(border[of_lane * COUNT + RUNS / 8]), k = p.k;
    above = __reduce_add_sync(~0u, lane < p.cluster ? others : 0);
    if (above >= k || total < k - above) return false;
    if (thread < RUNS) bins[ALLOWED + thread] = max(k - above, before) - before;
    if (thread == 0) control.bin = control.inside = 0;
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < WORDS; ++i) up_to[i] -= counts_of[i];
    each_key([&](float& own, int i) {
      u32& before_this = up_to[i / 16];
      const u32 key = __float_as_uint(own), shift = i / 4 % 4 * 8;
      const bool first = key == equal && (before_this >> shift & 0xff) < bins[ALLOWED + (i / 4 * THREADS + thread) / RUN];
      own = key > equal || first ? 1.f : absent();
      before_this += (key == equal) << shift;
    });
    return true;
  }

  // The key from `first` to `last` that some warp's have most often, the same in all CTAs; 0 if none is of more than half
  // in a warp. A column of four says enough.
  DEVICE u32 common_key(u32 first, u32 last) {
    constexpr u32 LEAST = 4;
    const u32 lane = threadIdx.x % 32;
    u32 found = 0, of_range = 0, equal = 0;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const u32 key = __float_as_uint(x[i].x);
      if (key - first <= last - first) found = key, ++of_range;
    }
    found = __shfl_sync(~0u, found, 31 - __clz(__ballot_sync(~0u, found > 0) | 1));
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) equal += __float_as_uint(x[i].x) == found;
    equal = __reduce_add_sync(~0u, equal), of_range = __reduce_add_sync(~0u, of_range);
    if (found == 0 || equal < LEAST || 2 * equal < of_range) equal = 0;
    if (lane == 0) control.bests[threadIdx.x / 32] = static_cast<u64>(equal) << 32 | found;
    __syncthreads();
    auto most_of = [&](u64 of_lane) {
      const u32 most = __reduce_max_sync(~0u, static_cast<u32>(of_lane >> 32));
      const u32 there = __ballot_sync(~0u, most > 0 && of_lane >> 32 == most);
      return __shfl_sync(~0u, of_lane, there ? __ffs(there) - 1 : 0) & (there ? ~0ull : 0);
    };
    const u64 own = most_of(lane < WARPS ? control.bests[lane] : 0);
    u64* const of_all = control.list + SHORT_LIST / 2;  // in front of it counts of what is in no bin
    exchange<1>(of_all, 0, [&](u32) { return own; });
    return static_cast<u32>(most_of(lane < p.cluster ? of_all[lane] : 0));
  }

  // Finds what the first bins do not tell apart; these hold `counted`. `give` gets the bounds of the border.
  DEVICE void count_exactly(u32 counted, float& least, float& most) {
    const u32 lane = threadIdx.x % 32, of_lane = lane < p.cluster ? lane : 0;
    auto least_best = [&] { return __reduce_min_sync(~0u, static_cast<u32>(control.ranges[of_lane])); };
    u32 low = least_best(), high = __reduce_min_sync(~0u, static_cast<u32>(control.ranges[of_lane] >> 32));
    if (counted >= p.k) {  // about the bin of the rank
      const float width = __fdividef(1, times), begin = score_of(low), bin = control.bin;
      if (bin < CLUSTER_BINS - 1) high = key_of(begin + (bin + 0.6f) * width);
      if (bin > 0) low = key_of(begin + (bin - 0.6f) * width);
    } else if (counted > 0) {
      low = NAN_KEY, high = LOWEST_KEY;
    } else if (low == ~0u) {
      low = NAN_KEY;
    }
    u32 first = NAN_KEY, last = ~0u, wanted = p.k, number = 1;
    high = max(low, high);
    make_keys();
    u32 single = common_key(low, counted > 0 ? high : last);
#pragma unroll 1
    for (;; ++number) {
      if (single > 0) {
        u32 above, equal;
        if (choose_by(single, number, above, equal)) {
          times = 1, plus = 0, least = most = 0.5f;
          return;
        }
        if (above >= p.k)
          low = first = single + 1, high = last;
        else
          last = high = single - 1, wanted = p.k - above - equal, low = min(least_best(), last);
        single = 0;
        continue;
      }
      const u32 between = max(high - low, 2u) - 2;
      int shift = max(24 - __clz(between), 0);
      shift += between >> shift > CLUSTER_BINS - 5;
      count_keys(first, last, low, high, shift);
      u64* const exact = border + FEW_SLOTS + number % 2 * (MAX_CLUSTER * CLUSTER_BINS / 4);
      exchange<CLUSTER_BINS / 4>(exact, number, [&](u32 at) {
        const uint4 four = reinterpret_cast<const uint4*>(bins)[at];
        return static_cast<u64>(four.z | four.w << 16) << 32 | (four.x | four.y << 16);
      });
      unsigned short* const of_bins = reinterpret_cast<unsigned short*>(exact);
      find_exact_border(of_bins, wanted);
      const u32 bin = control.bin, inside = control.inside, of_cta = of_bins[of_lane * CLUSTER_BINS + bin];
      wanted -= control.above;
      if (bin == 0)
        last = low - 1;
      else if (bin == CLUSTER_BINS - 1)
        first = high + 1;
      else if (bin == 1)
        first = last = low;
      else if (bin == CLUSTER_BINS - 2)
        first = last = high;
      else
        first = low + 1 + (bin - 2 << shift), last = first + min(1u << shift, high - first) - 1;
      if (first == last) {
        single = first;
        continue;
      }
      if (inside <= FEW_SLOTS && first >= LOWEST_KEY && __reduce_max_sync(~0u, of_cta) <= MOST_OF_A_BIN) {
        if (threadIdx.x < p.cluster) counts[threadIdx.x * CLUSTER_BINS + bin] = of_cta;
        least = score_of(first), most = score_of(last - (last == KEY_OF_ZERO - 1));  // no score has the key of -0
        break;
      }
      low = first, high = last;
    }
    times = 1, plus = 0;
    __syncthreads();
    if (threadIdx.x == 0) control.above = p.k - wanted;
    each_key([&](float& own, int) {
      const u32 key = __float_as_uint(own);
      own = key >= LOWEST_KEY ? score_of(key) : absent();
    });
  }

  // Behind `clear` and `load`.
  DEVICE void run(i64 number, int request, const Row& of_row) {
    row = of_row;
    cluster_wait();  // all barriers are there
    if (!within(row.start, row.end)) {
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) this->keep_of_row(i);
    }
    this->place_bins();
    this->count();
    u32 counted;
    if (__builtin_expect(this->find_border(counted), true)) {
      const float least = FIRST_BIN + control.bin;
      finish(number, request, least, control.bin == CLUSTER_BINS - 1 ? INFINITY : least);
    } else {  // with code of its own behind it: else this lies amid the usual
      float least, most;
      count_exactly(counted, least, most);
      const u32 before = static_cast<u32>(opaque(blockIdx.x)) / p.cluster;  // else it is kept all the time
      finish(p.num_rows - 1 - before, request, least, most);
    }
  }

  DEVICE void finish(i64 number, int request, float least, float most) {
    this->give(least, most);
    u32 own_bits = this->bits_of(threadIdx.x >> this->halved()) + (this->halved() ? threadIdx.x % 2 * 2 : 0);  // while entries come
    hold(own_bits);
    this->choose_of_border();
    this->write(own_bits, number, request);
  }
};

// A row that the registers of a cluster hold; if those of a CTA do, the first one does it alone.
template <int THREADS, int VECTORS>
DEVICE void select_in_cluster(const Params& p, unsigned char* shared, i64 number, u32 rank) {
  Control& control = *reinterpret_cast<Control*>(shared);
  u32* const bins = reinterpret_cast<u32*>(shared + sizeof(Control));
  using All = WithExactCounts<THREADS, VECTORS>;
  Row row;
  row.scores = p.scores + number * p.pitch;
  row.skew = static_cast<int>(reinterpret_cast<u64>(row.scores) / 4 % 4);
  row.scores -= row.skew;
  hold(row.scores);
  All all(p, control, bins, reinterpret_cast<u64*>(bins + BINS), rank);
  const Params::Given given = p.given_of(number);
  clear_bins<THREADS>(bins);
  int start, end;
  p.columns_of(given, start, end);
  bool needs_all = all.needs_all(start + row.skew, end + row.skew);
  // While the launch in front ends; ptxas would make behind the wait what is not in memory before it.
  if (!p.ahead && threadIdx.x == 0) control.row = {start, end, needs_all};
  all.clear();
  wait_for_prerequisites();  // only scores may come from the launch in front
  launch_dependents();
  if (p.ahead) {
    all.load(row.scores, row.skew, p.num_columns + row.skew);
  } else {
    start = control.row.x, end = control.row.y, needs_all = control.row.z;
    if (needs_all) all.load(row.scores, row.skew, end + row.skew);
  }
  const int length = end - start;
  row.start = start + row.skew, row.end = end + row.skew;
  if (rank == 0 && threadIdx.x == 0) p.lengths[number] = min(length, p.k);
  if (needs_all) return all.run(number, given.request, row);
  cluster_wait();
  if (length <= p.k) return write_all<THREADS>(p, number, given.request, start, length, rank);
  if (rank > 0) return;
  const u32 first = row.start / 4;
  Held<THREADS, All::ALONE, (THREADS < 1024)> held(4 * first, (row.end + 3) / 4 - first);
  held.load(row.scores, row.skew, p.num_columns);
  __syncthreads();  // bins are at 0
  const FirstBins first_bins(control, bins, length > 2 * p.k);
  held.count(row, p.num_columns, first_bins);
  held.choose(p, control, bins, number, given.request, row, first_bins);
}
