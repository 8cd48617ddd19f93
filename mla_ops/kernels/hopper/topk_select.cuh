// Exact selection among entries, by a CTA.
//
// An entry is 64 bits: the order of the score above, the complement of the position below. So entries differ from one
// another, the larger one is chosen first, and of equal scores the one at the lower position. 0 is no entry.
//
// A launch runs this code once, from memory: short code is fast code. Hence loops are not unrolled, and what several
// places need is a call.
#pragma once
#include "ptx.cuh"

constexpr int BIN_BITS = 11;
constexpr u32 BINS = 1 << BIN_BITS;
constexpr u32 SHORT_LIST = 64;          // entries that are compared with one another
constexpr u32 LOWEST_KEY = 0x007fffff;  // of -inf
constexpr u32 NAN_KEY = 1;
constexpr int MAX_CLUSTER = 16;

// What a CTA's threads tell one another.
struct alignas(16) Control {
  u64 list[SHORT_LIST];
  u64 threshold;
  u32 low, high;           // of what is left
  u32 bin, above, inside;  // where a rank lies
  u32 listed;
  u32 sums[2][32];              // of warps
  u32 counts[2][MAX_CLUSTER];  // entries of the cluster's CTAs, without and with another reading
};

// A barrier of the threads that select, which may be a part of a CTA's.
template <int THREADS>
DEVICE void meet() {
  named_barrier<1, THREADS>();
}

// A number that is larger where the score is; -0 and 0 have the same, NaN the least.
DEVICE u32 key_of(float score) {
  const u32 bits = __float_as_uint(score + 0.f);
  const u32 key = bits ^ (static_cast<u32>(static_cast<int>(bits) >> 31) | 0x80000000u);
  return score == score ? key : NAN_KEY;
}

// The score of a key that is at least LOWEST_KEY.
DEVICE float score_of(u32 key) {
  return __uint_as_float(key ^ (static_cast<u32>(static_cast<int>(~key) >> 31) | 0x80000000u));
}

DEVICE u64 entry_of(u32 key, u32 position) { return static_cast<u64>(key) << 32 | (~position & 0xffffffffu); }

DEVICE u32 position_of(u64 entry) { return ~static_cast<u32>(entry); }

// Sums of what the lanes up to this one have.
DEVICE u32 inclusive_scan(u32 value, u32 lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const u32 other = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

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
  const u32 inclusive = inclusive_scan(value, threadIdx.x % 32);
  const u32 of_warp = __shfl_sync(~0u, inclusive, 31);
  return before_warp<THREADS>(control, of_warp, 0, total) + inclusive - value;
}

// The bin in which the entry of a rank, counted from 1 at the top, lies; leaves all bins at 0. The counts must be
// complete, the result is there after the barrier at its end.
template <int THREADS>
DEVICE void find_bin(Control& control, u32* bins, u32 rank) {
  constexpr int OWN = BINS / THREADS;
  static_assert(OWN > 0 && BINS % THREADS == 0, "each thread has bins of its own");
  u32 counts[OWN], sum = 0, total;
  u32* const own = bins + BINS - (threadIdx.x + 1) * OWN;
#pragma unroll
  for (int i = 0; i < OWN; ++i) counts[i] = own[i], sum += counts[i], own[i] = 0;
  u32 above = exclusive_scan<THREADS>(control, sum, total);
  if (above < rank && rank <= above + sum) {
#pragma unroll
    for (int i = OWN - 1; i >= 0; --i) {
      if (above < rank && rank <= above + counts[i])
        control.bin = BINS - (threadIdx.x + 1) * OWN + i, control.above = above, control.inside = counts[i];
      above += counts[i];
    }
  }
  meet<THREADS>();
}

// Entries in shared memory.
template <int THREADS>
struct Listed {
  const u64* entries;
  u32 count;

  template <class F>
  DEVICE void each(F use) const {
#pragma unroll 1
    for (u32 i = threadIdx.x; i < count; i += THREADS) use(entries[i]);
  }
};

// A number that as many entries reach as a rank says, counted from 1 at the top; there are as many at least. Entries,
// and bins of 0, are there before a barrier that precedes this. First by scores; where one score is left, by positions.
template <int THREADS, class Entries>
DEVICE u64 select(Control& control, u32* bins, const Entries& entries, u32 rank) {
  const u32 thread = threadIdx.x;
  u64 low = 1, top = ~0ull;
  u32 inside;
  bool by_score = true;
#pragma unroll 1
  for (;;) {
    if (thread == 0) control.low = ~0u, control.high = 0, control.listed = 0;
    u32 least = ~0u, most = 0;
    entries.each([&](u64 entry) {
      if (entry < low || entry > top) return;
      const u32 word = static_cast<u32>(by_score ? entry >> 32 : entry);
      least = min(least, word), most = max(most, word);
    });
    least = __reduce_min_sync(~0u, least), most = __reduce_max_sync(~0u, most);
    meet<THREADS>();
    if (thread % 32 == 0 && least <= most) atomicMin(&control.low, least), atomicMax(&control.high, most);
    meet<THREADS>();
    least = control.low, most = control.high;
    const u32 range = most - least;
    const int shift = range >> BIN_BITS ? 32 - BIN_BITS - __clz(range) : 0;
    entries.each([&](u64 entry) {
      if (entry < low || entry > top) return;
      atomicAdd(&bins[(static_cast<u32>(by_score ? entry >> 32 : entry) - least) >> shift], 1u);
    });
    meet<THREADS>();
    find_bin<THREADS>(control, bins, rank);
    rank -= control.above, inside = control.inside;
    least += control.bin << shift;
    if (most - least >= 1u << shift) most = least + (1u << shift) - 1;
    if (by_score)
      low = static_cast<u64>(least) << 32, top = static_cast<u64>(most) << 32 | 0xffffffffu;
    else
      top = low >> 32 << 32 | most, low = low >> 32 << 32 | least;
    if (rank == inside) return low;  // all that are left
    if (inside <= SHORT_LIST) break;
    by_score = by_score && least != most;
  }
  entries.each([&](u64 entry) {
    if (entry >= low && entry <= top) control.list[atomicAdd(&control.listed, 1u)] = entry;
  });
  meet<THREADS>();
  if (thread < inside) {
    const u64 own = control.list[thread];
    u32 larger = 0;
#pragma unroll 1
    for (u32 i = 0; i < inside; ++i) larger += control.list[i] > own;
    if (larger == rank - 1) control.threshold = own;
  }
  meet<THREADS>();
  return control.threshold;
}

template <int THREADS>
__device__ __noinline__ u64 select_listed(Control& control, u32* bins, const u64* entries, u32 count, u32 rank) {
  return select<THREADS>(control, bins, Listed<THREADS>{entries, count}, rank);
}

// Calls `use(place, entry)` for the entries from `threshold` on, in their order. Returns how many those are. Where an
// entry stands may be written once it has been given.
template <int THREADS, class F>
DEVICE u32 each_chosen(Control& control, const u64* entries, u32 count, u64 threshold, F use) {
  u32 done = 0, parity = 0;
#pragma unroll 1
  for (u32 first = 0; first < count; first += THREADS, parity ^= 1) {
    const u32 i = first + threadIdx.x;
    const u64 entry = i < count ? entries[i] : 0;
    const u32 mask = __ballot_sync(~0u, entry >= threshold);
    u32 total;
    const u32 before = before_warp<THREADS>(control, __popc(mask), parity, total);
    if (entry >= threshold) use(done + before + __popc(mask & ((1u << threadIdx.x % 32) - 1)), entry);
    done += total;
  }
  return done;
}

// All but the `k` best of more entries go, the order of the others stays. Returns the least of these.
template <int THREADS>
__device__ __noinline__ u64 keep_best(Control& control, u32* bins, u64* entries, u32 count, u32 k) {
  const u64 threshold = select_listed<THREADS>(control, bins, entries, count, k);
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
