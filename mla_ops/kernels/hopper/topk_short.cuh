// The k best columns of a row that a CTA's registers hold: scores are read once, columns leave in the order of threads.
//
// Latency is all. So scores are loaded before the row's length is known, from columns that the tensor has.
#pragma once
#include "topk_row.cuh"

// A thread's scores, of neighbouring columns. Key 0 is no score.
template <int VECTORS>
struct Held {
  u32 keys[VECTORS * 4];

  DEVICE static u32 column(int i) { return 4 * VECTORS * threadIdx.x + i; }

  DEVICE u64 entry(int i) const { return entry_of(keys[i], column(i)); }

  template <class F>
  DEVICE void each(F use) const {
#pragma unroll
    for (int i = 0; i < VECTORS * 4; ++i) use(keys[i], ~column(i));
  }
};

template <int THREADS, int VECTORS>
DEVICE void select_short(const Params& p, unsigned char* shared, i64 number) {
  using Scores = Held<VECTORS>;
  Control& control = *reinterpret_cast<Control*>(shared);
  u32* const bins = reinterpret_cast<u32*>(shared + sizeof(Control));
  u64* const entries = reinterpret_cast<u64*>(bins + BINS);

  if (threadIdx.x == 0) p.prefetch_given(number);
  clear_bins<THREADS>(bins);
  wait_for_prerequisites();  // scores may come from the launch in front
  launch_dependents();
  const float* const scores = p.scores + number * p.pitch;
  const int skew = static_cast<int>(reinterpret_cast<u64>(scores) / 4 % 4), width = p.num_columns + skew;
  float4 x[VECTORS];
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int column = Scores::column(4 * i);
    x[i] = {absent(), absent(), absent(), absent()};
    if (column >= skew && column + 4 <= width) x[i] = load_once_16(scores - skew + column);
  }
  const Params::Given given = p.given_of(number);
  int start, end;
  p.columns_of(given, start, end);
  const int length = end - start;
  int* const out = p.indices + number * p.indices_pitch;
  if (threadIdx.x == 0) p.lengths[number] = min(length, p.k);
  if (length <= p.k && !p.sorted) {
    for (u32 i = threadIdx.x; i < p.k; i += THREADS) out[i] = i < length ? p.translated(start + i, given.request) : -1;
    return;
  }

  const Row row = {scores - skew, start + skew, start + length + skew, skew};
  Scores held;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int column = Scores::column(4 * i);
    u32* const keys = held.keys + 4 * i;
    float values[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
    if (column >= row.start && column + 4 <= row.end) {
#pragma unroll
      for (int j = 0; j < 4; ++j) keys[j] = key_of(values[j]);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool there = row.has(column + j);
        if (there && (column < skew || column + 4 > width)) values[j] = row.scores[column + j];
        keys[j] = there ? key_of(values[j]) : 0;
      }
    }
  }
  __syncthreads();  // the bins are at 0
  const u64 any = entry_of(1, ~0u);  // all that are there
  const u64 threshold = length > p.k ? select<THREADS>(control, bins, held, p.k, 0, SHIFT_OF_ALL) : any;
  u32 own = 0, count;
#pragma unroll
  for (int i = 0; i < VECTORS * 4; ++i) own += held.entry(i) >= threshold;
  u32 place = exclusive_scan<THREADS>(control, own, count);
  const auto each = [&](auto use) {
#pragma unroll
    for (int i = 0; i < VECTORS * 4; ++i) {
      if (held.entry(i) >= threshold) use(place++, held.entry(i));
    }
  };
  if (!p.sorted && p.block_size == 0) {
    each([&](u32 at, u64 entry) { out[at] = position_of(entry) - skew; });
    return;
  }
  if (!p.sorted) {
    each([&](u32 at, u64 entry) { out[at] = p.translated(position_of(entry) - skew, given.request); });
    return;
  }
  each([&](u32 at, u64 entry) { entries[at] = entry; });
  __syncthreads();
  sort<THREADS>(entries, count);
  for (u32 i = threadIdx.x; i < p.k; i += THREADS)
    out[i] = i < count ? p.translated(position_of(entries[i]) - skew, given.request) : -1;
}
