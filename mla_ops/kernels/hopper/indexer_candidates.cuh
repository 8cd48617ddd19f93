// A CTA of `indexer_candidates.cu`: scores of a piece of a row, its best as candidates, and the row's best if it is last.
#pragma once

#include "counters.cuh"
#include "indexer_scores.cuh"
#include "topk_handed.cuh"

struct SelectionParams {
  Params scores;
  TopkParams topk;
  u64* candidates;  // [CTAs, CANDIDATES]
  u64* gates;       // [CTAs]: a key, and the number of candidates, all that reach it; ~0: there are others
  u64* counters;    // [rows]: CTAs that have handed over, with the launch's number; 0 before and after
};

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
  const SelectionParams& all;
  unsigned char* const memory;
  Control& control;
  u32* const bins;
  const FirstBins first_bins;
  const u32 kept;  // address of this lane's first score; of lanes in pairs the first has one
  u32 next;

  DEVICE Counted(const SelectionParams& params, u32 shared, unsigned char* shared_memory)
      : Base(params.scores), all(params), memory(shared_memory),
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

  // Finds a gate that enough scores reach, and hands these over, in the same order in every run: a graph may run a launch
  // twice at the same time, with the same memory.
  DEVICE void hand_over(const uint4& group, int lane, const Handed& handed) {
    const u32 place_address = shared_address(&control.bin);
    meet<L::CONSUMERS>();
    const u32 counted = find_bin<L::CONSUMERS>(control, bins, handed.need, place_address);
    const bool enough = counted >= handed.need && handed.room <= CANDIDATES;
    u32 least = !enough ? ~0u : first_bins.least + (place_at(place_address).bin << first_bins.shift), total = 0;
    if (least != ~0u) {
      const float gate = score_of(least);
      u32 count = 0;
      if (Share<1, false>::stores(lane))
#pragma unroll 4
        for (u32 at = kept; at < next; at += L::TURN_BYTES) count += load_shared_float(at) >= gate;
      const u32 behind = inclusive_scan(count), of_warp = __shfl_sync(~0u, behind, 31);
      const u32 place = before_warp<L::CONSUMERS>(control, of_warp, 1, total) + behind - count;
      if (total > handed.room) {
        least = ~0u;
      } else if (count) {
        u64* to = all.candidates + blockIdx.x * CANDIDATES + place;
        const int key = (threadIdx.x >> 5 & 3) * 16 + lane / 4 + Share<1, false>::first_row(lane) * 8;
        int column = (group.z + (threadIdx.x >> 7) * group.y) * TILE + key;
        for (u32 at = kept; at < next; at += L::TURN_BYTES, column += L::WARPGROUPS * TILE * group.y) {
          const float score = load_shared_float(at);
          if (score >= gate) *to++ = entry_of(key_of_number(score), column);
        }
      }
    }
    if (threadIdx.x == 0) all.gates[blockIdx.x] = static_cast<u64>(least) << 32 | total;
  }

  // Whether all pieces of the row have been handed over. Where a graph runs the launch twice at the same time, a sum is
  // not of one launch, and the kernel fails.
  DEVICE bool is_last(int row, u32 count) {
    meet<L::CONSUMERS>();
    if (threadIdx.x == 0) {
      const u64 one = static_cast<u64>(launch_number()) << 32 | 1, before = fetch_add(all.counters + row, one);
      const bool last = static_cast<u32>(before) == count - 1;
      if (last) {
        if (before != (static_cast<u64>(launch_number() * (count - 1)) << 32 | (count - 1))) fail();
        all.counters[row] = 0;
      }
      control.verdict = last;
    }
    meet<L::CONSUMERS>();
    return control.verdict;
  }

  DEVICE void end_piece(const uint4& group, int lane) {
    const TopkParams& p = all.topk;
    const int count = group.y, row = group.x;
    const TopkParams::Given given = p.given_of(row);
    const Handed handed(p.k, count);
    hand_over(group, lane, handed);
    if (!is_last(row, count)) return;
    int start, end;
    p.columns_of(given, start, end);
    const int first = static_cast<int>(blockIdx.x) - static_cast<int>(group.z);
    u64* const rooms = reinterpret_cast<u64*>(memory);
    const bool chosen = OfCandidates<L::CONSUMERS>{p, control, bins, rooms}.run(
        row, given, end, {first, first + count}, handed, all.candidates, all.gates);
    if (!chosen) {
      meet<L::CONSUMERS>();  // nobody reads the memory any more
      choose_of_scores<L::CONSUMERS>(p, memory, row);
    }
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
}

template <class L>
DEVICE void make_candidates(const SelectionParams& all, u32 shared, unsigned char* memory) {
  const Params& p = all.scores;
  const bool brings = uniform(threadIdx.x >> 7) == L::WARPGROUPS;
  const int lane = threadIdx.x & 31;
  int token = 0, tiles = 0;
  Pieces pieces = {0, 0};
  if (brings) {
    if (lane < p.num_tokens) tiles = (bounds_of<BOXES>(p, lane).end + TILE - 1) / TILE;
    pieces = pieces_of(tiles, lane, p.num_tokens, gridDim.x);
    const int number = blockIdx.x;
    token = __ffs(__ballot_sync(~0u, pieces.first <= number && number < pieces.end)) - 1;
    pieces = {__shfl_sync(~0u, pieces.first, token & 31), __shfl_sync(~0u, pieces.end, token & 31)};
    tiles = __shfl_sync(~0u, tiles, token & 31);
  } else {
    begin_barriers<L, BOXES>(p, shared);
    clear_bins<L::CONSUMERS>(reinterpret_cast<u32*>(memory + L::BIN));
    prefetch_rows<L, BOXES>(p);
  }
  __syncthreads();
  if (brings) {
    if (token < 0) {  // rows have less keys than there are CTAs
      if (threadIdx.x == L::CONSUMERS)
        store_shared_16(shared + L::GROUP, 0, 0, 0, 0), mbarrier_arrive(shared + L::GROUP_FULL);
    } else if (threadIdx.x < L::CONSUMERS + 32 * L::PRODUCERS) {
      bring_piece<L>(p, shared, token, pieces, tiles);
    }
  } else {
    wait_for_prerequisites();
    Counted<L> counted(all, shared, memory);
    consume<L, BOXES>(p, shared, counted);
  }
}
