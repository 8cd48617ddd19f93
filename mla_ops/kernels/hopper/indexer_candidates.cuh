// A CTA of `indexer_candidates.cu`: scores of a piece of a row, and its best as candidates.
#pragma once

#include "indexer_scores.cuh"
#include "pieces.cuh"
#include "topk_select.cuh"

template <int HEADS>
struct CandidatesLayout : ScoresLayout<HEADS, 1, BOXES> {
  using Scores = ScoresLayout<HEADS, 1, BOXES>;
  static constexpr int CONTROL = (Scores::BYTES + 15) / 16 * 16, BIN = CONTROL + sizeof(Control);
  static constexpr int KEPT = BIN + BINS * 4, TURN_BYTES = Scores::CONSUMERS / 2 * 4;  // half of the lanes have scores
  static constexpr int BYTES = KEPT + PIECE_TILES / Scores::WARPGROUPS * TURN_BYTES;
  static_assert(BYTES <= 232448, "more shared memory than an SM has");
};

// Stores scores, keeps them in shared memory, and counts them.
template <class L>
struct Counted : Stored<L, BOXES> {
  using Base = Stored<L, BOXES>;
  static constexpr bool PIECE = true;
  Control& control;
  u32* const bins;
  const FirstBins first_bins;
  const u32 kept;  // address of this lane's first score; of lanes in pairs the first has one
  u32 next;

  DEVICE Counted(const Params& params, u32 shared, unsigned char* memory)
      : Base(params, shared, memory),
        control(*reinterpret_cast<Control*>(memory + L::CONTROL)), bins(reinterpret_cast<u32*>(memory + L::BIN)),
        first_bins(control, bins, true), kept(shared + L::KEPT + (threadIdx.x / 4 * 2 + threadIdx.x % 2) * 4), next(kept) {}

  DEVICE void put(int t, int column, float score) {
    Base::put(t, column, score);
    if (!Share<1, false>::stores(threadIdx.x)) return;
    const bool there = column >= this->bounds[t].start && column < this->bounds[t].end;
    store_shared_float(next, there ? score : -INFINITY);
    next += L::TURN_BYTES;
    if (there) first_bins.count(key_of(score));
  }

  // Finds a gate that enough scores reach, and hands these over.
  DEVICE void hand_over(const uint4& group, int lane) {
    const Handed handed(this->p.topk, group.y);
    meet<L::CONSUMERS>();
    const u32 place_address = shared_address(&control.bin);
    const u32 total = find_bin<L::CONSUMERS>(control, bins, handed.need, place_address);
    const bool enough = total >= handed.need && handed.room <= CANDIDATES;
    const u32 least = !enough ? ~0u : first_bins.least + (place_at(place_address).bin << first_bins.shift);
    if (least != ~0u) {
      const float gate = score_of(least);
      u32 count = 0, place = 0;
      if (Share<1, false>::stores(lane))
#pragma unroll 4
        for (u32 at = kept; at < next; at += L::TURN_BYTES) count += load_shared_float(at) >= gate;
      const u32 behind = sum_up_to(count, lane), of_warp = __shfl_sync(~0u, behind, 31);
      if (lane == 0) place = atomicAdd(&control.have, of_warp);
      place = __shfl_sync(~0u, place, 0);
      if (place + of_warp <= handed.room) {
        u64* to = this->p.candidates + blockIdx.x * CANDIDATES + place + behind - count;
        const int key = (threadIdx.x >> 5 & 3) * 16 + lane / 4 + Share<1, false>::first_row(lane) * 8;
        int column = (group.z + (threadIdx.x >> 7) * group.y) * TILE + key;
        if (count)
          for (u32 at = kept; at < next; at += L::TURN_BYTES, column += L::WARPGROUPS * TILE * group.y) {
            const float score = load_shared_float(at);
            if (score >= gate) *to++ = entry_of(key_of_number(score), column);
          }
      }
    }
    meet<L::CONSUMERS>();
    if (threadIdx.x == 0)
      this->p.gates[blockIdx.x] = static_cast<u64>(control.have > handed.room ? ~0u : least) << 32 | control.have;
  }
};

// The warps that bring keys: this CTA's piece.
template <class L>
DEVICE void bring_piece(const Params& p, u32 shared, int token, const Pieces& pieces, int all_tiles) {
  const int thread = threadIdx.x - L::CONSUMERS, lane = thread & 31, warp = thread / 32;
  const int stride = pieces.end - pieces.first, rank = static_cast<int>(blockIdx.x) - pieces.first;
  const int tiles = max(all_tiles - rank + stride - 1, 0) / max(stride, 1);
  if (warp == L::PRODUCERS - 1 && lane == 0) {
    store_shared_16(shared + L::GROUP, token, stride, rank, tiles);
    mbarrier_arrive(shared + L::GROUP_FULL);
    mbarrier_arrive_expect(shared + L::QUERY_FULL, L::QUERY_BYTES);
    copy_box(shared + L::QUERY, p.queries, 0, 0, token, shared + L::QUERY_FULL);
  }
  __syncwarp();
  Slot slot = {0, 0};
  if (tiles) bring_tiles<L>(p, shared, thread, token, all_tiles * TILE, rank, tiles, slot, evict_first(), stride);
  launch_dependents();
}

template <class L>
DEVICE void make_candidates(const Params& p, u32 shared, unsigned char* memory) {
  const bool brings = uniform(threadIdx.x >> 7) == L::WARPGROUPS;
  const int lane = threadIdx.x & 31;
  int token = 0, tiles = 0;
  Pieces pieces = {0, 0};
  if (brings) {
    if (lane < p.num_tokens) tiles = (bounds_of<BOXES>(p, lane).end + TILE - 1) / TILE;
    pieces = pieces_of(tiles, lane, gridDim.x);
    const int number = blockIdx.x;
    token = __ffs(__ballot_sync(~0u, pieces.first <= number && number < pieces.end)) - 1;
    pieces = {__shfl_sync(~0u, pieces.first, token & 31), __shfl_sync(~0u, pieces.end, token & 31)};
    tiles = __shfl_sync(~0u, tiles, token & 31);
  } else {
    begin_barriers<L, BOXES>(p, shared);
    clear_bins<L::CONSUMERS>(reinterpret_cast<u32*>(memory + L::BIN));
    if (threadIdx.x == 0) reinterpret_cast<Control*>(memory + L::CONTROL)->have = 0;
    prefetch_rows<L, BOXES>(p);
  }
  __syncthreads();
  if (brings) {
    if (token < 0) {  // no row has keys
      if (threadIdx.x == L::CONSUMERS)
        store_shared_16(shared + L::GROUP, 0, 0, 0, 0), mbarrier_arrive(shared + L::GROUP_FULL);
    } else if (threadIdx.x < L::CONSUMERS + 32 * L::PRODUCERS) {
      bring_piece<L>(p, shared, token, pieces, tiles);
    }
  } else {
    wait_for_prerequisites();
    consume<L, BOXES, Counted<L>>(p, shared, memory);
  }
}
