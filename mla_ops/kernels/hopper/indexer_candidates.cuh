// A CTA of `indexer_candidates.cu`: scores of a piece of a row, its best as candidates, and the row's best if it is last.
//
// Two warpgroups choose. Code that runs once, behind the last tile, would come from memory line by line. So they run all
// of it on other data first, while the others make scores: a dry run, whose results nobody reads.
#pragma once

#include "counters.cuh"
#include "indexer_scores.cuh"
#include "topk_handed.cuh"

struct SelectionParams {
  Params scores;
  TopkParams topk;
  u64* candidates;  // [CTAs, CANDIDATES], those of a row one behind the other
  u64* gates;       // [CTAs]: a key, and the number of candidates, all that reach it; ~0: there are others
  u64* counters;    // [rows]: CTAs that have handed over, with the launch's number; 0 before and after
};

// Candidates of a row; columns, for each of which there is a bit, and for each 32 how many chosen ones are in front.
constexpr int MOST_SLOTS = 12 * 512, MOST_COLUMNS = 6 * 128 * 256;
constexpr int DRY_PIECES = 4, DRY_TILES = 8, DRY_WANTED = 64;

template <int HEADS>
struct CandidatesLayout : ScoresLayout<HEADS, 1, BOXES> {
  using Scores = ScoresLayout<HEADS, 1, BOXES>;
  static constexpr int CHOOSERS = 256, FIRST = CHOOSERS, THREADS = Scores::THREADS + CHOOSERS;
  static constexpr int CONTROL = (Scores::BYTES + 15) / 16 * 16, BIN = CONTROL + sizeof(Control);
  static constexpr int KEPT = BIN + BINS * 4, DRY = KEPT + PIECE_TILES * TILE * 4;
  // Of a choice, where keys were before: entries, how many each piece has, the columns, bits.
  static constexpr int ENTRIES = 0, HAVES = ENTRIES + MOST_SLOTS * 8, CHOSEN = HAVES + 256 * 4, WORDS = CHOSEN + 4096 * 4;
  // Of a dry run.
  static constexpr int DRY_BIN = DRY + sizeof(Control), DRY_KEPT = DRY_BIN + BINS * 4;
  static constexpr int DRY_HANDED = DRY_KEPT + DRY_TILES * TILE * 4, DRY_GATES = DRY_HANDED + DRY_PIECES * CANDIDATES * 8;
  static constexpr int DRY_ENTRIES = DRY_GATES + DRY_PIECES * 8, DRY_HAVES = DRY_ENTRIES + DRY_PIECES * CANDIDATES * 8;
  static constexpr int DRY_CHOSEN = DRY_HAVES + 16, DRY_WORDS = DRY_CHOSEN + DRY_WANTED * 4;
  static constexpr int CHOICE = DRY_WORDS + CHOOSERS * 24, BYTES = CHOICE + sizeof(Choice);
  static_assert(BYTES <= 232448, "more shared memory than an SM has");
  static_assert(WORDS + MOST_COLUMNS / 128 * 24 <= Scores::SCALE, "a choice has room where keys were");
  static_assert(WORDS % 16 == 0 && DRY_WORDS % 16 == 0 && DRY_HANDED % 16 == 0, "words are cleared by fours");
};

// Barriers of those that choose and those that make products.
template <class L>
DEVICE void meet_choosers() {
  named_barrier<2, L::CHOOSERS + L::CONSUMERS>();
}

// Stores scores, keeps them in shared memory, and counts them.
template <class L>
struct Counted : Stored<L, BOXES> {
  using Base = Stored<L, BOXES>;
  static constexpr bool PIECE = true;
  const FirstBins first_bins;
  u32 next;  // address of the next score that this lane keeps; of lanes in pairs the first has one

  DEVICE Counted(const Params& params, u32 shared, unsigned char* memory)
      : Base(params),
        first_bins(*reinterpret_cast<Control*>(memory + L::CONTROL), reinterpret_cast<u32*>(memory + L::BIN), true) {
    const u32 thread = threadIdx.x - L::FIRST, lane = thread % 32;
    const u32 key = (thread >> 5 & 3) * 16 + lane / 4 + Share<1, false>::first_row(lane) * 8;
    next = shared + L::KEPT + ((thread >> 7) * TILE + key) * 4;
  }

  DEVICE void put(int t, int column, float score) {
    Base::put(t, column, score);
    if (!Share<1, false>::stores(threadIdx.x)) return;
    const bool there = column >= this->bounds[t].start && column < this->bounds[t].end;
    store_shared_float(next, there ? score : -INFINITY);
    next += L::WARPGROUPS * TILE * 4;
    if (there) first_bins.count(key_of(score));
  }
};

// Scores that are kept, of a thread.
template <int THREADS>
struct Kept {
  const float* scores;
  u32 count;

  template <class F>
  DEVICE void each(F use) const {
#pragma unroll 4
    for (u32 i = threadIdx.x; i < count; i += THREADS) use(key_of(scores[i]), 0u);
  }
};

// Finds a gate that enough of a piece's scores reach, and hands these over, in the same order in every run: a graph may
// run a launch twice at the same time, with the same memory. Bins have been counted.
template <int THREADS>
DEVICE void hand_over(Control& control, u32* bins, const float* kept, const Choice& c) {
  const Handed handed = c.handed;
  const u32 count = c.tiles * TILE;
  u32 least = ~0u, total = 0;
  if (handed.need <= count && handed.room <= CANDIDATES) {
    const Kept<THREADS> scores = {kept, count};
    least = select<THREADS, false, MORE>(control, bins, scores, handed.need, FirstBins::least_of(true),
                                         FirstBins::shift_of(true), handed.room - handed.need, true) >>
            32;
    if (least <= LOWEST_KEY) least = ~0u;  // columns that the row does not have would reach it
    u32 own = 0;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < count; i += THREADS) own += key_of(kept[i]) >= least;
    const u32 of_warp = __reduce_add_sync(~0u, own), behind = inclusive_scan(own);
    const u32 place = before_warp<THREADS>(control, of_warp, 1, total) + behind - own;
    if (total <= handed.room) {
      u64* to = c.candidates + c.rank * handed.room + place;
#pragma unroll 4
      for (u32 i = threadIdx.x; i < count; i += THREADS) {
        const u32 key = key_of(kept[i]);
        if (key >= least) *to++ = entry_of(key, (c.rank + i / TILE * c.count) * TILE + i % TILE);
      }
    }
  }
  if (threadIdx.x == 0) c.gates[c.rank] = static_cast<u64>(total > handed.room ? ~0u : least) << 32 | total;
}

// Whether all pieces of a row have been handed over. Where a graph runs the launch twice at the same time, a sum is not
// of one launch, and the kernel fails.
DEVICE bool is_last(u64* counter, u32 count) {
  const u64 one = static_cast<u64>(launch_number()) << 32 | 1, before = fetch_add(counter, one);
  if (static_cast<u32>(before) != count - 1) return false;
  if (before != (static_cast<u64>(launch_number() * (count - 1)) << 32 | (count - 1))) fail();
  *counter = 0;
  return true;
}

// What a dry run reads.
template <class L>
DEVICE void prepare_dry_run(unsigned char* memory, const Handed& handed) {
  const u32 thread = threadIdx.x;
  Control& control = *reinterpret_cast<Control*>(memory + L::DRY);
  u32* const bins = reinterpret_cast<u32*>(memory + L::DRY_BIN);
  float* const kept = reinterpret_cast<float*>(memory + L::DRY_KEPT);
  u64* const entries = reinterpret_cast<u64*>(memory + L::DRY_HANDED);
  clear_bins<L::CHOOSERS>(bins);
  meet<L::CHOOSERS>();
  const FirstBins first_bins(control, bins, true);
#pragma unroll 1
  for (u32 i = thread; i < DRY_TILES * TILE; i += L::CHOOSERS) {
    const float score = 1.f + (i * 2654435761u >> 8) * 0x1p-23f;
    kept[i] = score, first_bins.count(key_of(score));
    if (i < DRY_PIECES * CANDIDATES) entries[i] = entry_of(key_of(score), i);
  }
  if (thread < DRY_PIECES)
    reinterpret_cast<u64*>(memory + L::DRY_GATES)[thread] = static_cast<u64>(key_of(1.f)) << 32 | handed.room;
}

// Those that choose.
template <class L>
DEVICE void choose(const SelectionParams& all, u32 shared, unsigned char* memory) {
  constexpr int THREADS = L::CHOOSERS;
  const TopkParams& p = all.topk;
  mbarrier_wait(shared + L::GROUP_FULL, 0);
  const uint4 group = load_shared_16(shared + L::GROUP);  // row, pieces, number of this one, tiles
  if (group.y == 0) return;
  prepare_dry_run<L>(memory, Handed(p.k, group.y));
  Choice& choice = *reinterpret_cast<Choice*>(memory + L::CHOICE);
  u32* const told = &reinterpret_cast<Control*>(memory + L::CONTROL)->verdict;
  bool chosen = false;
#pragma unroll 1
  for (int turn = 0; turn < 2; ++turn) {
    const bool dry = turn == 0;
    auto of = [&](int in_dry, int at) { return memory + (dry ? in_dry : at); };
    if (threadIdx.x == 0) {
      const uint4 own = load_shared_16(shared + L::GROUP);
      const TopkParams::Given given = p.given_of(own.x);
      int start, end;
      p.columns_of(given, start, end);
      const i64 first = static_cast<int>(blockIdx.x) - static_cast<int>(own.z);
      choice.candidates = dry ? reinterpret_cast<u64*>(memory + L::DRY_HANDED) : all.candidates + first * CANDIDATES;
      choice.gates = dry ? reinterpret_cast<u64*>(memory + L::DRY_GATES) : all.gates + first;
      choice.entries = reinterpret_cast<u64*>(of(L::DRY_ENTRIES, L::ENTRIES));
      choice.words = reinterpret_cast<u32*>(of(L::DRY_WORDS, L::WORDS));
      choice.chosen = reinterpret_cast<int*>(of(L::DRY_CHOSEN, L::CHOSEN));
      choice.haves = reinterpret_cast<u32*>(of(L::DRY_HAVES, L::HAVES));
      choice.row = own.x, choice.request = given.request, choice.end = dry ? DRY_TILES * TILE : end;
      choice.k = dry ? min(DRY_WANTED, p.k) : p.k, choice.dry = dry, choice.handed = Handed(p.k, own.y);
      choice.rank = dry ? 0 : own.z, choice.count = dry ? DRY_PIECES : own.y, choice.tiles = dry ? DRY_TILES : own.w;
    }
    if (dry)
      meet<THREADS>();
    else
      meet_choosers<L>();
    Control& control = *reinterpret_cast<Control*>(of(L::DRY, L::CONTROL));
    u32* const bins = reinterpret_cast<u32*>(of(L::DRY_BIN, L::BIN));
    hand_over<THREADS>(control, bins, reinterpret_cast<float*>(of(L::DRY_KEPT, L::KEPT)), choice);
    meet<THREADS>();
    if (threadIdx.x == 0) *told = choice.dry || is_last(all.counters + choice.row, choice.count);
    meet<THREADS>();
    if (!*told) return;
    chosen = choose_of_candidates<THREADS>(p, control, bins, choice);
    meet<THREADS>();  // nobody reads what is written next
  }
  if (chosen) return;
  Control& control = *reinterpret_cast<Control*>(memory + L::CONTROL);
  choose_of_scores<THREADS>(p, control, reinterpret_cast<u32*>(memory + L::BIN), choice.row, choice.end, choice.request);
}

// The warps that bring keys: this CTA's piece.
template <class L>
DEVICE void bring_piece(const Params& p, u32 shared, int thread, int token, const Pieces& pieces, int all_tiles) {
  const int lane = thread & 31, warp = thread / 32;
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
  const int role = uniform(threadIdx.x >> 7), lane = threadIdx.x & 31;
  const bool brings = role == (L::FIRST + L::CONSUMERS) / 128, chooses = role < L::FIRST / 128;
  int token = 0, tiles = 0;
  Pieces pieces = {0, 0};
  if (brings) {
    if (lane < p.num_tokens) tiles = (bounds_of<BOXES>(p, lane).end + TILE - 1) / TILE;
    pieces = pieces_of(tiles, lane, p.num_tokens, gridDim.x);
    const int number = blockIdx.x;
    token = __ffs(__ballot_sync(~0u, pieces.first <= number && number < pieces.end)) - 1;
    pieces = {__shfl_sync(~0u, pieces.first, token & 31), __shfl_sync(~0u, pieces.end, token & 31)};
    tiles = __shfl_sync(~0u, tiles, token & 31);
  } else if (chooses) {
    begin_barriers<L, BOXES>(p, shared);
    clear_bins<L::CHOOSERS>(reinterpret_cast<u32*>(memory + L::BIN));
    prefetch_rows<L, BOXES>(p);
  }
  __syncthreads();
  if (brings) {
    const int thread = threadIdx.x - L::FIRST - L::CONSUMERS;
    if (token < 0) {  // rows have less keys than there are CTAs
      if (thread == 0) store_shared_16(shared + L::GROUP, 0, 0, 0, 0), mbarrier_arrive(shared + L::GROUP_FULL);
    } else if (thread < 32 * L::PRODUCERS) {
      bring_piece<L>(p, shared, thread, token, pieces, tiles);
    }
    return;
  }
  wait_for_prerequisites();
  if (chooses) return choose<L>(all, shared, memory);
  consume<L, BOXES, Counted<L>>(p, shared, shared, memory);
  if (load_shared_16(shared + L::GROUP).y) meet_choosers<L>();
}
