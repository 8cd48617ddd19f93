// The k best columns of a row of which CTAs have handed over candidates, by the last of them.
//
// Bins of all candidates give an edge that k of them reach, so that the k best of the row reach it. All scores of a piece
// that do are candidates, unless its gate lies above: then its scores are read again. What reaches the edge, a little more
// than k, goes to shared memory, and is chosen of.
#pragma once

#include "pieces.cuh"
#include "topk_row.cuh"

// A thread has PAIRS pairs of candidates at most.
template <int THREADS, int PAIRS = 6>
struct OfCandidates {
  static constexpr int OWN = SLOTS / THREADS;
  const TopkParams& p;
  Control& control;
  u32* const bins;
  u64* const rooms;

  // Adds scores of `count` pieces, whose numbers and gates are `found`, from the edge on and below the gate.
  static __device__ __noinline__ void read_again(Control& control, u64* rooms, const float* scores, const uint2* found,
                                                 u32 count, u32 stride, u32 end, u32 edge) {
    constexpr int TOGETHER = 4;  // loads of a thread
    const u32 tiles = (end + 63) / 64, each = (tiles + stride - 1) / stride * 16;  // groups of four of a piece
#pragma unroll 1
    for (u32 first = threadIdx.x; first < count * each; first += TOGETHER * THREADS) {
      float4 x[TOGETHER];
      u32 columns[TOGETHER], gates[TOGETHER];
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        const u32 group = first + i * THREADS, number = min(group / each, count - 1), rest = group - number * each;
        const uint2 piece = found[number];
        columns[i] = group < count * each ? (piece.x + rest / 16 * stride) * 64 + rest % 16 * 4 : end;
        gates[i] = piece.y;
        x[i] = load_once_16_if(columns[i] < end, scores + columns[i]);
      }
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        const float values[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
          const u32 key = key_of(values[j]);
          if (columns[i] + j >= end || key < edge || key >= gates[i]) continue;
          const u32 place = atomicAdd(&control.have, 1u);
          if (place < SLOTS) rooms[place] = entry_of(key, columns[i] + j);
        }
      }
    }
  }

  // Chooses and writes, if there are k candidates, and room for what reaches their edge.
  DEVICE bool run(i64 number, int request, int end, const Pieces& pieces, u32 room, const u64* candidates,
                  const u32* gates) {
    const u32 thread = threadIdx.x;
    const u32 count = pieces.end - pieces.first, pairs = count * room / 2;
    if (room > CANDIDATES || pairs > PAIRS * THREADS) return false;
    const ulonglong2* const from = reinterpret_cast<const ulonglong2*>(candidates + pieces.first * CANDIDATES) + thread;
    ulonglong2 x[PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      x[i].x = x[i].y = 0;
      if (i * THREADS + thread < pairs) x[i] = from[i * THREADS];
    }
    const u32 gate = thread < count ? gates[pieces.first + thread] : 0;
    InCluster<THREADS, 1> writer(p, control, bins, rooms, 0);
    writer.begin({p.scores + number * p.pitch, 0, end, 0});
    writer.clear_words();
    if (thread == 0) control.dropped = 0;
    const FirstBins first_bins(control, bins, true);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i)
      if (i * THREADS < pairs)
        first_bins.count(static_cast<u32>(x[i].x >> 32)), first_bins.count(static_cast<u32>(x[i].y >> 32));
    meet<THREADS>();
    const u32 place_address = shared_address(&control.bin);
    if (find_bin<THREADS>(control, bins, p.k, place_address) < static_cast<u32>(p.k)) return false;
    const u32 edge = first_bins.least + (place_at(place_address).bin << first_bins.shift);

    uint2* const found = reinterpret_cast<uint2*>(writer.fronts);
    if (gate > edge) found[atomicAdd(&control.dropped, 1u)] = {thread, gate};
    u32 reach = 0, total;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i)
      reach += (static_cast<u32>(x[i].x >> 32) >= edge) + (static_cast<u32>(x[i].y >> 32) >= edge);
    const u32 behind = inclusive_scan(reach);
    const u32 before = before_warp<THREADS>(control, __shfl_sync(~0u, behind, 31), 1, total);
    if (total > SLOTS) return false;
    u64* to = rooms + before + behind - reach;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      if (i * THREADS >= pairs) continue;
      const bool first = static_cast<u32>(x[i].x >> 32) >= edge, second = static_cast<u32>(x[i].y >> 32) >= edge;
      store_entry_if(first, to, x[i].x), to += first;
      store_entry_if(second, to, x[i].y), to += second;
    }
    const u32 again = control.dropped;
    if (thread == 0) control.have = total;
    meet<THREADS>();
    if (again) {
      read_again(control, rooms, writer.row.scores, found, again, count, end, edge);
      meet<THREADS>();
      total = control.have;
      if (total > SLOTS) return false;
    }
    Slots<OWN> slots;
    slots.turns = (total + THREADS - 1) / THREADS;
#pragma unroll
    for (int i = 0; i < OWN; ++i) slots.entries[i] = i * THREADS + thread < total ? rooms[i * THREADS + thread] : 0;
    const u64 threshold = select<THREADS>(control, bins, slots, p.k, edge, SHIFT_OF_GATED);
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
