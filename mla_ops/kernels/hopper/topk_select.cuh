// Exact selection among entries, by a CTA.
//
// An entry is 64 bits: the order of the score above, the complement of the position below. So entries differ from one
// another, the larger one is chosen first, and of equal scores the one at the lower position. 0 is no entry.
//
// A launch runs this code once, from memory: short code is fast code. Hence loops are not unrolled, and what several
// places need is a call.
#pragma once
#include "topk_ptx.cuh"

constexpr int BIN_BITS = 11;
constexpr u32 BINS = 1 << BIN_BITS;
constexpr u32 SHORT_LIST = 64;          // entries that are compared with one another
constexpr int POSITION_BITS = 22;       // 2^21 columns, and those in front of the first
constexpr u32 LOWEST_KEY = 0x007fffff;  // the key of -inf
constexpr u32 NAN_KEY = 1, KEY_OF_ZERO = 1u << 31;
constexpr int MAX_CLUSTER = 16;

// A CTA's threads tell one another by this.
struct alignas(16) Control {
  // Where some of it lies, in bytes.
  static constexpr u32 FOUND = SHORT_LIST * sizeof(u64), LISTED = FOUND + 12, THRESHOLD = FOUND + 16;
  u64 list[SHORT_LIST];
  u32 bin, above, inside;  // the place of a rank
  u32 listed;              // entries of the list
  u64 threshold;
  u64 met, counted, listed_all, given;  // mbarriers: of a cluster's ranges, counts, border and bits,
  u64 told[2], gathered;                // and of one that does without, of `counts` and of entries
  u64 ranges[MAX_CLUSTER];  // of each CTA: the key of its best score above, that of the least of its groups' bests below
  u64 bests[32];            // one a warp, likewise
  int4 row;                 // its first column, that behind the last, whether CTAs meet
  u32 have, front;          // entries of the border that this CTA has; those that are chosen in front of its columns
  u32 chosen[MAX_CLUSTER], before[MAX_CLUSTER];  // columns of this CTA by who writes them; those of each in front
  u32 sums[2][32];             // one a warp
  u32 counts[2][MAX_CLUSTER];  // entries of the cluster's CTAs, without and with another reading

  // Address of a word for what belongs to no bin, which takes less time than a branch: the list is made after counts.
  DEVICE u32 no_bin() const { return shared_address(list) + threadIdx.x % 32 * sizeof(u32); }
};

// A barrier of the threads that select, which may be a part of a CTA's.
template <int THREADS>
DEVICE void meet() {
  named_barrier<1, THREADS>();
}

// A number that is larger where the score is; -0 and 0 have the same.
DEVICE u32 key_of_number(float score) {
  const u32 bits = __float_as_uint(score + 0.f);
  return bits ^ (static_cast<u32>(static_cast<int>(bits) >> 31) | 0x80000000u);
}

// NaN has the least.
DEVICE u32 key_of(float score) {
  const u32 key = key_of_number(score);
  return score == score ? key : NAN_KEY;
}

// The score of a key that is at least LOWEST_KEY.
DEVICE float score_of(u32 key) {
  return __uint_as_float(key ^ (static_cast<u32>(static_cast<int>(~key) >> 31) | 0x80000000u));
}

DEVICE u64 entry_of(u32 key, u32 position) { return static_cast<u64>(key) << 32 | (~position & 0xffffffffu); }

DEVICE u32 position_of(u64 entry) { return ~static_cast<u32>(entry); }

// Sum of what the warps before this one bring; `total` of all. There is one barrier in it, and its `parity` may be used
// again behind the next.
template <int THREADS>
DEVICE u32 before_warp(Control& control, u32 count, u32 parity, u32& total) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane == 0) control.sums[parity][warp] = count;
  meet<THREADS>();
  const u32 other = lane < THREADS / 32 ? control.sums[parity][lane] : 0;
  total = __reduce_add_sync(~0u, other);
  return __reduce_add_sync(~0u, lane < warp ? other : 0);
}

// Sum of what the threads before this one bring.
template <int THREADS>
DEVICE u32 exclusive_scan(Control& control, u32 value, u32& total) {
  const u32 before = before_warp<THREADS>(control, __reduce_add_sync(~0u, value), 0, total);
  return before + inclusive_scan(value) - value;
}

template <int THREADS>
DEVICE void clear_bins(u32* bins) {
  if (BINS == 2 * THREADS) reinterpret_cast<uint2*>(bins)[threadIdx.x] = {0, 0};
#pragma unroll
  for (int i = 0; i < BINS / 4 / THREADS; ++i) reinterpret_cast<uint4*>(bins)[i * THREADS + threadIdx.x] = {0, 0, 0, 0};
}

// The bin in which the entry of a rank, counted from 1 at the top, lies, if there are as many; leaves all bins at 0, and
// nothing listed. The counts must be complete, the result is there after the barrier at its end. Returns the sum of the
// counts. `place` is the address of control.bin.
template <int THREADS>
DEVICE u32 find_bin(Control& control, u32* bins, u32 rank, u32 place) {
  constexpr int OWN = BINS / THREADS;
  static_assert(OWN > 0 && BINS % THREADS == 0, "each thread has bins of its own");
  u32 counts[OWN], sum = 0, total;
  u32* const own = bins + BINS - (threadIdx.x + 1) * OWN;
  if constexpr (OWN % 4 == 0) {  // words one by one would be in few banks
#pragma unroll
    for (int i = 0; i < OWN / 4; ++i) {
      uint4* const four = reinterpret_cast<uint4*>(own) + i;
      const uint4 found = *four;
      *four = {0, 0, 0, 0};
      counts[4 * i] = found.x, counts[4 * i + 1] = found.y, counts[4 * i + 2] = found.z, counts[4 * i + 3] = found.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < OWN; ++i) counts[i] = own[i], own[i] = 0;
  }
#pragma unroll
  for (int i = 0; i < OWN; ++i) sum += counts[i];
  u32 above = exclusive_scan<THREADS>(control, sum, total);
  if (above < rank && rank <= above + sum) {
    u32 bin = BINS - 1 - threadIdx.x * OWN, inside = counts[OWN - 1];
#pragma unroll
    for (int i = OWN - 2; i >= 0; --i) {
      if (above + inside >= rank) break;
      above += inside, inside = counts[i], --bin;
    }
    store_shared_16(place, bin, above, inside, 0);
  }
  meet<THREADS>();
  return total;
}

// Entries in shared memory, as words: of scores and of positions.
template <int THREADS>
struct Listed {
  const u64* entries;
  u32 count;

  template <class F>
  DEVICE void each(F use) const {
#pragma unroll 4
    for (u32 i = threadIdx.x; i < count; i += THREADS)
      use(static_cast<u32>(entries[i] >> 32), static_cast<u32>(entries[i]));
  }
};

// The entry of a rank among those of control's list, which begins at the address `at`. A barrier precedes.
template <int THREADS>
DEVICE u64 entry_of_list(Control& control, u32 at, u32 inside, u32 rank) {
  static_assert(SHORT_LIST == 64, "a lane has two of them");
  const u32 thread = threadIdx.x, lane = thread % 32;
  const u64 first = lane < inside ? control.list[lane] : 0, second = lane + 32 < inside ? control.list[lane + 32] : 0;
#pragma unroll 1
  for (u32 i = thread / 32; i < inside; i += THREADS / 32) {
    const u64 own = control.list[i];
    const u32 larger = __popc(__ballot_sync(~0u, first > own)) + __popc(__ballot_sync(~0u, second > own));
    if (larger == rank - 1 && lane == 0)
      store_shared_8(at + Control::THRESHOLD, static_cast<u32>(own), static_cast<u32>(own >> 32));
  }
  meet<THREADS>();
  const uint2 words = load_shared_8(at + Control::THRESHOLD);
  return static_cast<u64>(words.y) << 32 | words.x;
}

// The entry of a rank among a few: `each_left` calls what it is given with their words.
template <int THREADS, class EachLeft>
DEVICE u64 entry_of_rank(Control& control, u32 at, u32 inside, u32 rank, EachLeft each_left) {
  each_left([&](u32 key, u32 place) { store_shared_8(at + 8 * next_number(at + Control::LISTED), place, key); });
  meet<THREADS>();
  return entry_of_list<THREADS>(control, at, inside, rank);
}

// A number that as many entries reach as a rank says, counted from 1 at the top; there are as many at least, and none has
// a key below `least`. Bins are of 2^shift keys first, the last one of all above; then each round divides the bin of the
// rank. Where one score is left, positions follow. Entries, and bins of 0, are there before a barrier that precedes this.
// If it need not be EXACT, `spare` entries more may reach it, and all those of one score. The first counts may have been
// made. BELOW the first bins there is nothing, or what is searched next, or what lets this return 0 at once.
// UPPER_KEYS: keys have no lower halves, and entries mark what is chosen in the bin of the rank. What this returns, 0 or a
// key, is the highest one of which marked entries alone are chosen.
enum Below { NOTHING, MORE, FAILURE };
template <class Entries>
constexpr bool UPPER_KEYS = false;
template <int THREADS, bool EXACT = true, Below BELOW = NOTHING, class Entries>
DEVICE u64 select(Control& control, u32* bins, const Entries& entries, u32 rank, u32 least, int shift, u32 spare = 0,
                  bool counted = false) {
  if (!counted) least = max(least, 1u);
  u32 most = ~0u;
  u32 of_control = shared_address(&control);
  hold(of_control);  // else it is made again behind each barrier, of what a special register has
  const u32 at = of_control + sizeof(Control);  // of the bins
  // Narrows the range to the bin that was found. Returns how many are in it.
  auto narrow = [&] {
    const Place found =
        BELOW == NOTHING ? place_at(of_control + Control::FOUND) : Place{control.bin, control.above, control.inside};
    rank -= found.above;
    least += found.bin << shift;
    if (found.bin < BINS - 1 && most - least >= 1u << shift) most = least + (1u << shift) - 1;
    return found.inside;
  };
#pragma unroll 1
  for (;;) {
    if (!counted)
      entries.each([&](u32 key, u32) {
        count_if(key - least <= most - least, at + 4 * min(key - least >> shift, BINS - 1));
      });
    counted = false;
    meet<THREADS>();
    const u32 total = find_bin<THREADS>(control, bins, rank, of_control + Control::FOUND);
    if (BELOW != NOTHING && total < rank) {
      if (BELOW == FAILURE || least <= 1) return 0;
      rank -= total, most = least - 1, least = 1;
      shift = max(32 - BIN_BITS - __clz(most - least), 0);
      continue;
    }
    const u32 inside = narrow();
    least = max(least, 1u);
    if constexpr (UPPER_KEYS<Entries>) {
      if (inside == rank) return static_cast<u64>(least - (least == KEY_OF_ZERO ? 2 << 16 : 1 << 16)) << 32;
      if (most - least < 1u << 16 || inside <= SHORT_LIST)
        return entries.choose(control, bins, of_control, least, most, inside, rank);
    }
    if (inside - rank <= spare || (!EXACT && least == most)) return static_cast<u64>(least) << 32;
    if (EXACT && inside <= SHORT_LIST)
      return entry_of_rank<THREADS>(control, of_control, inside, rank, [&](auto use) {
        entries.each([&](u32 key, u32 place) {
          if (key - least <= most - least) use(key, place);
        });
      });
    if (least == most) break;
    shift = max(32 - BIN_BITS - __clz(most - least), UPPER_KEYS<Entries> ? 16 : 0);
  }
  const u32 score = least;
  least = ~0u << POSITION_BITS, most = ~0u;
#pragma unroll 1
  for (;;) {
    shift = max(32 - BIN_BITS - __clz(most - least), 0);
    entries.each([&](u32 key, u32 place) {
      if (key == score && place - least <= most - least) count_at(at + 4 * min(place - least >> shift, BINS - 1));
    });
    meet<THREADS>();
    find_bin<THREADS>(control, bins, rank, of_control + Control::FOUND);
    const u32 inside = narrow();
    if (inside == rank) return static_cast<u64>(score) << 32 | least;
    if (inside <= SHORT_LIST)
      return entry_of_rank<THREADS>(control, of_control, inside, rank, [&](auto use) {
        entries.each([&](u32 key, u32 place) {
          if (key == score && place - least <= most - least) use(key, place);
        });
      });
  }
}

// Bins of all keys, and of those from a gate on: scores above it differ little from it, and bins of 2^14 keys are up to
// 0.2 percent of it wide, and reach to sixteen times it.
constexpr int SHIFT_OF_ALL = 32 - BIN_BITS, SHIFT_OF_GATED = 14;

// Bins that are counted first: of all keys, or, where less than half of the scores are wanted, 64 for each power of two
// from 2^-16 to 2^16. ALL: all keys are in them.
struct FirstBins {
  u32 least, last;  // key, and number of the last bin, if that of key 0 is 0
  int shift;
  u32 base;  // address of such a bin 0
  u32 none;  // address for what is in no bin

  DEVICE static u32 least_of(bool few_wanted) { return few_wanted ? 0x80000000u + (127 - 16 << 23) : 0; }
  DEVICE static int shift_of(bool few_wanted) { return few_wanted ? 17 : SHIFT_OF_ALL; }

  DEVICE FirstBins(const Control& control, const u32* bins, bool few_wanted)
      : least(least_of(few_wanted)), shift(shift_of(few_wanted)), none(control.no_bin()) {
    last = (least >> shift) + BINS - 1, base = shared_address(bins) - 4 * (least >> shift);
    hold(least), hold(last), hold(shift), hold(base), hold(none);  // else they are made again for each score
  }

  template <bool ALL = false>
  DEVICE void count(u32 key) const {
    const u32 bin = ALL ? key >> shift : min(key >> shift, last);
    count_at(ALL || key >= least ? base + 4 * bin : none);
  }
};

// Behind a gate below zero scores of any size may come, between it and zero and above: bins of an eighth of a power of two.
DEVICE int shift_of_listed(u32 least) {
  return least >= KEY_OF_ZERO ? SHIFT_OF_GATED : least > LOWEST_KEY ? SHIFT_OF_ALL - 1 : SHIFT_OF_ALL;
}

template <int THREADS>
__device__ __noinline__ u64 select_listed(Control& control, u32* bins, const u64* entries, u32 count, u32 rank, u32 least,
                                          bool counted = false) {
  return select<THREADS>(control, bins, Listed<THREADS>{entries, count}, rank, max(least, 1u), shift_of_listed(least), 0,
                         counted);
}

// Calls `use(place, entry)` for the entries from `threshold` on, in their order. Returns how many those are. Where an
// entry stands may be written once it has been given. A warp takes GROUPS times 32 neighbours at one time.
template <int THREADS, class F>
DEVICE u32 each_chosen(Control& control, const u64* entries, u32 count, u64 threshold, F use) {
  constexpr int GROUPS = 4;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u32 done = 0, parity = 0;
#pragma unroll 1
  for (u32 first = warp * 32 * GROUPS + lane; first - lane - warp * 32 * GROUPS < count;
       first += THREADS * GROUPS, parity ^= 1) {
    u64 own[GROUPS];
    u32 masks[GROUPS], sum = 0, total;
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
      own[i] = first + i * 32 < count ? entries[first + i * 32] : 0;
      masks[i] = __ballot_sync(~0u, own[i] >= threshold);
      sum += __popc(masks[i]);
    }
    u32 place = done + before_warp<THREADS>(control, sum, parity, total);
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
      if (own[i] >= threshold) use(place + __popc(masks[i] & ((1u << lane) - 1)), own[i]);
      place += __popc(masks[i]);
    }
    done += total;
  }
  return done;
}

// Calls `use(chosen, place, entry, number)` for all entries, in their order. A warp has neighbours, which it counts before it gives
// them, so that one barrier is enough. `none` is no entry, and not chosen.
template <int THREADS, class Entry, class Chosen, class F>
DEVICE void each_by_warps(Control& control, const Entry* entries, u32 count, Entry none, Chosen is_chosen, F use) {
  constexpr int GROUPS = 4;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, each = (count + THREADS - 1) / THREADS * 32;
  const u32 end = min((warp + 1) * each, count), first = warp * each + lane;
  u32 own = 0, total;
  auto load = [&](u32 at, Entry(&of_lane)[GROUPS]) {
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) of_lane[i] = at + i * 32 < end ? entries[at + i * 32] : none;
  };
#pragma unroll 1
  for (u32 at = first; at - lane < end; at += 32 * GROUPS) {
    Entry of_lane[GROUPS];
    load(at, of_lane);
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) own += is_chosen(of_lane[i]);
  }
  u32 place = before_warp<THREADS>(control, __reduce_add_sync(~0u, own), 0, total);
#pragma unroll 1
  for (u32 at = first; at - lane < end; at += 32 * GROUPS) {
    Entry of_lane[GROUPS];
    load(at, of_lane);
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
      const bool chosen = is_chosen(of_lane[i]);
      const u32 mask = __ballot_sync(~0u, chosen);
      use(chosen, place + __popc(mask & ((1u << lane) - 1)), of_lane[i], at + i * 32);
      place += __popc(mask);
    }
  }
}

// All but the `k` best of more entries go, the order of the others stays. Returns the least of these.
template <int THREADS>
__device__ __noinline__ u64 keep_best(Control& control, u32* bins, u64* entries, u32 count, u32 k, u32 least) {
  const u64 threshold = select_listed<THREADS>(control, bins, entries, count, k, least);
  each_chosen<THREADS>(control, entries, count, threshold, [&](u32 place, u64 entry) { entries[place] = entry; });
  meet<THREADS>();
  return threshold;
}

// Sorts, the largest first, after zeros up to a power of two. A barrier precedes and follows.
template <int THREADS>
__device__ __noinline__ void sort(u64* entries, u32 count) {
  u32 padded = 2;
  while (padded < count) padded *= 2;
  for (u32 i = count + threadIdx.x; i < padded; i += THREADS) entries[i] = 0;
  meet<THREADS>();
#pragma unroll 1
  for (u32 size = 2; size <= padded; size *= 2) {
#pragma unroll 1
    for (u32 step = size / 2; step; step /= 2) {
#pragma unroll 1
      for (u32 i = threadIdx.x; i < padded / 2; i += THREADS) {
        const u32 a = 2 * i - (i & (step - 1)), b = a + step;
        const u64 first = entries[a], second = entries[b];
        if ((first < second) == ((a & size) == 0)) entries[a] = second, entries[b] = first;
      }
      meet<THREADS>();
    }
  }
}
