// The k best columns of a row that a CTA's registers hold: scores are read once, and counted in bins as they come.
//
// Latency is all, and each instruction that a score takes is one of all threads. So scores are asked for before a row's
// length is known, where they are all that it can have, from columns that the tensor has. What is chosen goes to shared
// memory in order, and from there to where it belongs.
#pragma once
#include "topk_params.cuh"

// A thread's keys, of groups of four neighbouring columns. A warp's groups stand next to one another, 32 at a time. Key 0
// is no score. FEW_REGISTERS: columns are made again where they are needed; else ptxas keeps all of them.
// ALL: each thread has VECTORS groups, and all keys are in the first bins.
template <int THREADS, int VECTORS, bool FEW_REGISTERS = false, bool ALL = false>
struct Held {
  static_assert(VECTORS <= 4, "counts of a warp's groups share a word");
  float4 scores[VECTORS];
  u32 keys[VECTORS * 4];
  mutable u32 first;  // column, a multiple of 4
  const u32 turns;    // groups of a thread

  DEVICE Held(u32 first_column, u32 groups) : first(first_column), turns((groups + THREADS - 1) / THREADS) {}

  DEVICE bool used(u32 i) const { return ALL || i < turns; }

  DEVICE u32 column(u32 i) const {
    const u32 warp = threadIdx.x / 32, group = (warp * (ALL ? VECTORS : turns) + i) * 32 + threadIdx.x % 32;
    return first + 4 * group;
  }

  DEVICE u64 entry(int i) const { return entry_of(keys[i], column(i / 4) + i % 4); }

  // Values made of `first` are not used again.
  DEVICE void forget_columns() const {
    if (FEW_REGISTERS) hold(first);
  }

  template <class F>
  DEVICE void each_key(F use) const {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      if (!used(i)) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) use(4 * i + j);
    }
  }

  template <class F>
  DEVICE void each(F use) const {
    forget_columns();
    each_key([&](int i) { use(keys[i], static_cast<u32>(entry(i))); });
  }

  // Whether the tensor has all of a group of four.
  DEVICE static bool whole(int column, int skew, int num_columns) {
    return column >= skew && column + 4 <= num_columns + skew;
  }

  DEVICE void load(const float* from, int skew, int num_columns) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
      scores[i] = load_once_16_if(used(i) && whole(column(i), skew, num_columns), from + column(i));
  }

  // Keys, and their counts as `select` makes them. Bins are at 0 before.
  DEVICE void count(const Row& row, int num_columns, const FirstBins& first_bins) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      u32* const own = keys + 4 * i;
      own[0] = own[1] = own[2] = own[3] = 0;
      if (!used(i)) continue;
      const int begin = column(i);
      float values[4] = {scores[i].x, scores[i].y, scores[i].z, scores[i].w};
      if (begin >= row.start && begin + 4 <= row.end) {
#pragma unroll
        for (int j = 0; j < 4; ++j) own[j] = key_of(values[j]), first_bins.count<ALL>(own[j]);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (!row.has(begin + j)) continue;
          if (!whole(begin, row.skew, num_columns)) values[j] = row.scores[begin + j];
          own[j] = key_of(values[j]), first_bins.count<ALL>(own[j]);
        }
      }
    }
  }

  // Entries of the columns from `threshold` on, in the order of columns. Returns how many those are.
  DEVICE u32 collect(Control& control, u64 threshold, u64* entries) const {
    forget_columns();
    u32 chosen = 0;  // a bit each
    each_key([&](int i) { chosen |= static_cast<u32>(entry(i) >= threshold) << i; });
    u32 counts = chosen - (chosen >> 1 & 0x5555);
    counts = (counts & 0x3333) + (counts >> 2 & 0x3333);
    counts = (counts | counts << 8) & 0xff00ff, counts = (counts | counts << 4) & 0xf0f0f0f;  // a byte for each group
    const u32 inclusive = inclusive_scan(counts), of_warp = __shfl_sync(~0u, inclusive, 31);
    const u32 halves = (of_warp & 0xff00ff) + (of_warp >> 8 & 0xff00ff);
    forget_columns();
    u32 total, place = before_warp<THREADS>(control, (halves & 0xffff) + (halves >> 16), 0, total);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      if (!used(i)) break;
      u64* own = entries + place + ((inclusive - counts) >> 8 * i & 0xff);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool kept = chosen >> (4 * i + j) & 1;
        store_entry_if(kept, own, entry(4 * i + j));
        own += kept;
      }
      place += of_warp >> 8 * i & 0xff;
    }
    return total;
  }

  // Chooses of what has been counted, and writes.
  DEVICE void choose(const Params& p, Control& control, u32* bins, i64 number, int request, const Row& row,
                     const FirstBins& first_bins) const {
    u64* const entries = reinterpret_cast<u64*>(bins + BINS);
    const u64 any = entry_of(1, ~0u);  // all that are there
    const bool all = row.end - row.start <= p.k;
    const u64 threshold =
        all ? any
            : select<THREADS, true, ALL ? NOTHING : MORE>(control, bins, *this, p.k, first_bins.least, first_bins.shift, 0,
                                                          true);
    const u32 count = collect(control, threshold, entries);
    __syncthreads();
    if (p.sorted) sort<THREADS>(entries, count);
    int* out = p.indices + number * p.indices_pitch;
    hold(out);
#pragma unroll 1
    for (u32 i = threadIdx.x; i < p.k; i += THREADS)
      out[i] = i < count ? p.translated(position_of(entries[i]) - row.skew, request) : -1;
  }
};

// All columns of a row that has not more than k, in order.
template <int THREADS>
DEVICE void write_all(const Params& p, i64 number, int request, int start, int length, u32 rank) {
  int* const out = p.indices + number * p.indices_pitch;
#pragma unroll 1
  for (u32 i = rank * THREADS + threadIdx.x; i < p.k; i += p.cluster * THREADS)
    out[i] = i < length ? p.translated(start + i, request) : -1;
}

template <int THREADS, int VECTORS>
DEVICE void select_short(const Params& p, unsigned char* shared, i64 number) {
  Control& control = *reinterpret_cast<Control*>(shared);
  u32* const bins = reinterpret_cast<u32*>(shared + sizeof(Control));

  const float* scores = p.scores + number * p.pitch;
  const int skew = static_cast<int>(reinterpret_cast<u64>(scores) / 4 % 4);
  scores -= skew;
  hold(scores);
  constexpr bool ALL = VECTORS <= 2 && THREADS * VECTORS <= 1024;  // fewer columns do not pay for finer bins
  Held<THREADS, VECTORS, false, ALL> held(0, (p.num_columns + skew + 3) / 4);
  wait_for_prerequisites();  // scores may come from the launch in front
  launch_dependents();
  held.load(scores, skew, p.num_columns);
  Params::Given given = p.given_of(number);
  clear_bins<THREADS>(bins);
  __syncthreads();
  hold(given.start), hold(given.end), hold(given.request);  // waited for behind the barrier, not in front of it
  int start, end;
  p.columns_of(given, start, end);
  const int length = end - start;
  if (threadIdx.x == 0) control.last_place = p.last_place(), p.lengths[number] = min(length, p.k);
  if (length <= p.k && !p.sorted) {
    int* const out = p.indices + number * p.indices_pitch;
    for (u32 i = threadIdx.x; i < p.k; i += THREADS) out[i] = i < length ? p.translated(start + i, given.request) : -1;
    return;
  }
  const Row row = {scores, start + skew, end + skew, skew};
  const FirstBins first_bins(control, bins, !ALL && length > 2 * p.k);
  held.count(row, p.num_columns, first_bins);
  held.choose(p, control, bins, number, given.request, row, first_bins);
}
