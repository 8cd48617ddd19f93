// The k best columns of a row that a CTA's registers hold: scores are read once, columns leave in the order of threads.
//
// Latency is all. So scores are loaded before the row's length is known, from columns that the tensor has.
#pragma once
#include "topk_row.cuh"

// A thread's scores: groups of four columns, THREADS groups apart. Key 0 is no score.
template <int THREADS, int VECTORS>
struct Held {
  u32 keys[VECTORS][4];

  DEVICE static u32 column(int vector) { return 4 * (vector * THREADS + threadIdx.x); }

  DEVICE u64 entry(int vector, int i) const {
    return keys[vector][i] ? entry_of(keys[vector][i], column(vector) + i) : 0;
  }

  template <class F>
  DEVICE void each(F use) const {
#pragma unroll
    for (int i = 0; i < VECTORS * 4; ++i) use(keys[i / 4][i % 4], ~(column(i / 4) + i % 4));
  }
};

template <int THREADS, int VECTORS>
DEVICE void select_short(const Params& p, unsigned char* shared, i64 number) {
  static_assert(VECTORS <= 2, "counts of two groups share a word");
  using Scores = Held<THREADS, VECTORS>;
  const u32 thread = threadIdx.x;
  Control& control = *reinterpret_cast<Control*>(shared);
  u32* const bins = reinterpret_cast<u32*>(shared + sizeof(Control));
  u64* const entries = reinterpret_cast<u64*>(bins + BINS);

  int start, end;
  p.columns_of(number, start, end);
  const int request = p.request_of(number);
  for (u32 i = thread; i < BINS; i += THREADS) bins[i] = 0;
  wait_for_prerequisites();  // scores may come from the launch in front
  launch_dependents();

  const float* const scores = p.scores + number * p.pitch;
  const int skew = static_cast<int>(reinterpret_cast<u64>(scores) / 4 % 4), width = p.num_columns + skew;
  float4 x[VECTORS];
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int column = Scores::column(i);
    if (column >= skew && column + 4 <= width)
      x[i] = load_once_16(scores - skew + column);
    else
      x[i] = {absent(), absent(), absent(), absent()};
  }
  const int length = end - start;
  int* const out = p.indices + number * p.indices_pitch;
  if (thread == 0) p.lengths[number] = min(length, p.k);
  if (length <= p.k && !p.sorted) {
    for (u32 i = thread; i < p.k; i += THREADS) out[i] = i < length ? p.translated(start + i, request) : -1;
    return;
  }

  const Row row = {scores - skew, start + skew, start + length + skew, skew};
  Scores held;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int column = Scores::column(i);
    const float values[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const bool partial = column < skew || column + 4 > width;
      float value = values[j];
      if (partial && row.has(column + j)) value = row.scores[column + j];
      held.keys[i][j] = row.has(column + j) ? key_of(value) : 0;
    }
  }
  __syncthreads();  // the bins are at 0
  const u64 threshold = length > p.k ? select<THREADS>(control, bins, held, p.k, 0, SHIFT_OF_ALL) : 1;
  u32 counts = 0;
#pragma unroll
  for (int i = 0; i < VECTORS * 4; ++i) counts += (held.entry(i / 4, i % 4) >= threshold) << i / 4 * 16;
  u32 total;
  const u32 before = exclusive_scan<THREADS>(control, counts, total);
  u32 at[2] = {before & 0xffff, (before >> 16) + (total & 0xffff)};
  const u32 count = (total & 0xffff) + (total >> 16);
#pragma unroll
  for (int i = 0; i < VECTORS * 4; ++i) {
    const u64 entry = held.entry(i / 4, i % 4);
    if (entry < threshold) continue;
    if (p.sorted)
      entries[at[i / 4]++] = entry;
    else
      out[at[i / 4]++] = p.translated(position_of(entry) - skew, request);
  }
  if (!p.sorted) return;
  __syncthreads();
  sort<THREADS>(entries, count);
  for (u32 i = thread; i < p.k; i += THREADS)
    out[i] = i < count ? p.translated(position_of(entries[i]) - skew, request) : -1;
}
