// The k best columns of a row of which CTAs have handed over candidates, by the last of them.
#pragma once

#include "pieces.cuh"
#include "topk_row.cuh"

// A thread has PAIRS pairs of candidates at most. Those that reach the highest gate are about three halves of k: they go to
// shared memory, one behind the other, so that what follows them up has fewer.
template <int THREADS, int PAIRS = 6>
struct OfCandidates {
  static constexpr int OWN = SLOTS / THREADS;
  const TopkParams& p;
  Control& control;
  u32* const bins;
  u64* const rooms;

  // Chooses and writes, if that is enough: the k-th best candidate is not below any gate, and each CTA had room.
  DEVICE bool run(i64 number, int request, int end, const Pieces& pieces, u32 room, const u64* candidates,
                  const u32* gates) {
    const u32 thread = threadIdx.x, lane = thread % 32;
    const u32 count = pieces.end - pieces.first, pairs = count * room / 2;
    if (room > CANDIDATES || pairs > PAIRS * THREADS) return false;
    const u32 own_gate = thread < count ? gates[pieces.first + thread] : 0;
    const ulonglong2* const from = reinterpret_cast<const ulonglong2*>(candidates + pieces.first * CANDIDATES) + thread;
    ulonglong2 x[PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      x[i].x = x[i].y = 0;
      if (i * THREADS + thread < pairs) x[i] = from[i * THREADS];
    }
    InCluster<THREADS, 1> writer(p, control, bins, rooms, 0);
    writer.begin({p.scores + number * p.pitch, 0, end, 0});
    writer.clear_words();
    const u32 of_warp = __reduce_max_sync(~0u, own_gate);
    if (lane == 0) control.sums[0][thread / 32] = of_warp;
    meet<THREADS>();
    const u32 highest = __reduce_max_sync(~0u, control.sums[0][lane % (THREADS / 32)]);
    if (highest == ~0u) return false;

    u32 reach = 0, total;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i)
      reach += (static_cast<u32>(x[i].x >> 32) >= highest) + (static_cast<u32>(x[i].y >> 32) >= highest);
    const u32 behind = inclusive_scan(reach);
    const u32 before = before_warp<THREADS>(control, __shfl_sync(~0u, behind, 31), 1, total);
    if (total < static_cast<u32>(p.k) || total > SLOTS) return false;
    u64* to = rooms + before + behind - reach;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const bool first = static_cast<u32>(x[i].x >> 32) >= highest, second = static_cast<u32>(x[i].y >> 32) >= highest;
      store_entry_if(first, to, x[i].x), to += first;
      store_entry_if(second, to, x[i].y), to += second;
    }
    meet<THREADS>();
    Slots<OWN> slots;
#pragma unroll
    for (int i = 0; i < OWN; ++i) slots.entries[i] = i * THREADS + thread < total ? rooms[i * THREADS + thread] : 0;
    const u64 threshold = select<THREADS, true, FAILURE>(control, bins, slots, p.k, highest, SHIFT_OF_GATED);
    if (threshold == 0) return false;
    if (thread == 0) p.lengths[number] = p.k;
    writer.write(slots, threshold, number, request);
    return true;
  }
};

// The row anew, of scores in memory.
template <int THREADS>
__device__ __noinline__ void choose_of_scores(const TopkParams& p, unsigned char* memory, i64 number) {
  Selection<THREADS, 2, 2, true, 0>(p, memory).run(number, 0);
}
