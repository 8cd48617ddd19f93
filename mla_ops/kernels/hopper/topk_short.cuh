// The k best columns of a row that a CTA's registers hold: scores are read once, columns leave in the order of threads.
//
// Latency is all. So scores are asked for before all else, where they are all that a row can have: before its length is
// known, from columns that the tensor has.
#pragma once
#include "topk_params.cuh"

// A thread's scores, of neighbouring columns from `base` on. Key 0 is no score.
template <int VECTORS>
struct Held {
  float4 scores[VECTORS];
  u32 keys[VECTORS * 4];
  const u32 base;  // a multiple of 4

  DEVICE explicit Held(u32 first) : base(first) {}

  DEVICE u32 column(int i) const { return base + 4 * VECTORS * threadIdx.x + i; }

  DEVICE u64 entry(int i) const { return entry_of(keys[i], column(i)); }

  template <class F>
  DEVICE void each(F use) const {
#pragma unroll
    for (int i = 0; i < VECTORS * 4; ++i) use(keys[i], ~column(i));
  }

  // Whether the tensor has all of a group of four.
  DEVICE static bool whole(int column, int skew, int num_columns) {
    return column >= skew && column + 4 <= num_columns + skew;
  }

  DEVICE void load(const float* from, int skew, int num_columns) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      scores[i] = {absent(), absent(), absent(), absent()};
      if (whole(column(4 * i), skew, num_columns)) scores[i] = load_once_16(from + column(4 * i));
    }
  }

  // Bins are at 0 before the next barrier.
  template <int THREADS>
  DEVICE void choose(const Params& p, Control& control, u32* bins, i64 number, int request, const Row& row) {
    const int length = row.end - row.start;
    int* const out = p.indices + number * p.indices_pitch;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int first = column(4 * i);
      u32* const own = keys + 4 * i;
      float values[4] = {scores[i].x, scores[i].y, scores[i].z, scores[i].w};
      if (first >= row.start && first + 4 <= row.end) {
#pragma unroll
        for (int j = 0; j < 4; ++j) own[j] = key_of(values[j]);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const bool there = row.has(first + j);
          if (there && !whole(first, row.skew, p.num_columns)) values[j] = row.scores[first + j];
          own[j] = there ? key_of(values[j]) : 0;
        }
      }
    }
    __syncthreads();
    const u64 any = entry_of(1, ~0u);  // all that are there
    const u64 threshold = length > p.k ? select<THREADS>(control, bins, *this, p.k, 0, SHIFT_OF_ALL) : any;
    u32 passing = 0, count;
#pragma unroll
    for (int i = 0; i < VECTORS * 4; ++i) passing += entry(i) >= threshold;
    u32 place = exclusive_scan<THREADS>(control, passing, count);
    const auto each_passing = [&](auto use) {
#pragma unroll
      for (int i = 0; i < VECTORS * 4; ++i) {
        if (entry(i) >= threshold) use(place++, entry(i));
      }
    };
    const auto chosen = [&](u64 entry) { return p.translated(position_of(entry) - row.skew, request); };
    if (!p.sorted && p.block_size == 0) {
      each_passing([&](u32 at, u64 entry) { out[at] = position_of(entry) - row.skew; });
      return;
    }
    if (!p.sorted) {
      each_passing([&](u32 at, u64 entry) { out[at] = chosen(entry); });
      return;
    }
    u64* const entries = reinterpret_cast<u64*>(bins + BINS);
    each_passing([&](u32 at, u64 entry) { entries[at] = entry; });
    __syncthreads();
    sort<THREADS>(entries, count);
    for (u32 i = threadIdx.x; i < p.k; i += THREADS) out[i] = i < count ? chosen(entries[i]) : -1;
  }
};

template <int THREADS, int VECTORS>
DEVICE void select_short(const Params& p, unsigned char* shared, i64 number) {
  Control& control = *reinterpret_cast<Control*>(shared);
  u32* const bins = reinterpret_cast<u32*>(shared + sizeof(Control));

  wait_for_prerequisites();  // scores may come from the launch in front
  launch_dependents();
  const float* const scores = p.scores + number * p.pitch;
  const int skew = static_cast<int>(reinterpret_cast<u64>(scores) / 4 % 4);
  Held<VECTORS> held(0);
  held.load(scores - skew, skew, p.num_columns);
  const Params::Given given = p.given_of(number);
  clear_bins<THREADS>(bins);
  int start, end;
  p.columns_of(given, start, end);
  const int length = end - start;
  if (threadIdx.x == 0) p.lengths[number] = min(length, p.k);
  if (length <= p.k && !p.sorted) {
    int* const out = p.indices + number * p.indices_pitch;
    for (u32 i = threadIdx.x; i < p.k; i += THREADS) out[i] = i < length ? p.translated(start + i, given.request) : -1;
    return;
  }
  const Row row = {scores - skew, start + skew, end + skew, skew};
  held.template choose<THREADS>(p, control, bins, number, given.request, row);
}
