// The k best columns of a row of which CTAs have handed over candidates, by the last of them.
#pragma once

#include "pieces.cuh"
#include "topk_row.cuh"

// A thread has HANDED candidates at most.
template <int THREADS, int HANDED = 12>
struct OfCandidates {
  const TopkParams& p;
  Control& control;
  u32* const bins;
  u64* const rooms;

  // Chooses and writes, if that is enough: the k-th best candidate is not below any gate, and each CTA had room.
  DEVICE bool run(i64 number, const TopkParams::Given& given, int end, const Pieces& pieces, const Handed& handed,
                  const u64* candidates, const u64* gates) {
    const u32 thread = threadIdx.x, lane = thread % 32;
    const u32 count = pieces.end - pieces.first, of_room = (1u << 21) / handed.room + 1;  // slots are below 2^13
    if (handed.room > CANDIDATES || count * handed.room > HANDED * THREADS) return false;
    const u64 head = thread < count ? gates[pieces.first + thread] : 0;
    const u64* const from = candidates + pieces.first * CANDIDATES;
    Slots<HANDED> slots;
#pragma unroll
    for (int i = 0; i < HANDED; ++i) {
      const u32 slot = i * THREADS + thread, piece = slot * of_room >> 21;
      slots.entries[i] = 0;
      if (piece < count) slots.entries[i] = from[piece * CANDIDATES + slot - piece * handed.room];
    }
    InCluster<THREADS, 1> writer(p, control, bins, rooms, 0);
    writer.begin({p.scores + number * p.pitch, 0, end, 0});
    writer.clear_words();
    u32* const haves = reinterpret_cast<u32*>(rooms);
    const u32 gate = __reduce_max_sync(~0u, static_cast<u32>(head >> 32));
    if (thread < count) haves[thread] = static_cast<u32>(head);
    if (lane == 0) control.sums[0][thread / 32] = gate;
    meet<THREADS>();
    const u32 highest = __reduce_max_sync(~0u, control.sums[0][lane % (THREADS / 32)]);
    if (highest == ~0u) return false;
#pragma unroll
    for (int i = 0; i < HANDED; ++i) {
      const u32 slot = i * THREADS + thread, piece = slot * of_room >> 21;
      if (piece >= count || slot - piece * handed.room >= haves[piece]) slots.entries[i] = 0;
    }
    const u64 threshold = select<THREADS, true, FAILURE>(control, bins, slots, p.k, highest, SHIFT_OF_GATED);
    if (threshold == 0) return false;
    if (thread == 0) p.lengths[number] = p.k;
    writer.write(slots, threshold, number, given.request);
    return true;
  }
};

// The row anew, of scores in memory.
template <int THREADS>
__device__ __noinline__ void choose_of_scores(const TopkParams& p, unsigned char* memory, i64 number) {
  Selection<THREADS, 2, 2, true, 0>(p, memory).run(number, 0);
}
