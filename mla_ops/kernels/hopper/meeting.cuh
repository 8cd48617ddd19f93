// CTAs of a group find one another through counters in memory, which they leave as they found them.
//
// They need not all run at the same time, so none waits for long: who loses patience gives its share of the result up
// and leaves; who comes last finds everything there, and does its own share and all that were given up.
#pragma once

#include "counters.cuh"
#include "layout.cuh"

// A CTA looks so often for the others, half a microsecond each.
#ifndef PATIENCE
#define PATIENCE 64
#endif

// Counters of a group's CTAs. A launch counts in one of two sets, which it owns while its number is in that half
// of `owners`. For a graph may run a launch twice at the same time, with the same memory: as two child nodes of another
// graph, or instantiated twice. Both write the same results, but must not count together. A third one waits for a set.
struct RowCounters {
  u64 owners;
  u32 sets[2][3];
};

constexpr int MOST_LOOKS = 1 << 22;  // some seconds

DEVICE int own_set(u64* owners) {
  const u64 own = launch_number();
  u64 seen = 0;
#pragma unroll 1
  for (int looks = 0; looks < MOST_LOOKS; ++looks) {
    const bool first = static_cast<u32>(seen), second = seen >> 32;
    if (static_cast<u32>(seen) == own) return 0;
    if (seen >> 32 == own) return 1;
    const u64 wanted = !first ? seen | own : !second ? seen | own << 32 : seen;
    const u64 before = compare_and_swap(owners, seen, wanted);
    seen = before == seen ? wanted : before;
  }
  fail();
  return 0;
}

DEVICE void give_back(u64* owners, int set) { clear_bits(owners, 0xffffffffull << 32 * set); }

// Leaves a row's set, whose last counter says how many of `count` have left it. The last one makes it ready for another
// launch.
DEVICE void leave_row(RowCounters* counters, u32* set, int count) {
  if (fetch_add(set + 2, 1) != static_cast<u32>(count) - 1) return;
  set[0] = set[1] = set[2] = 0;
  give_back(&counters->owners, set != counters->sets[0]);
}

// The partial results that a row's CTAs leave for one another.
struct Meeting {
  unsigned char* packets;  // [COUNT][splits], of Packet::BYTES
  float2* states;          // [splits][HEADS]: sum and running maximum
  // A set's counters: CTAs that left their states; CTAs that left everything, and from bit 16 on which shares were given
  // up; warps that will not look at counters again, two of each CTA.
  RowCounters* counters;
};

template <class L>
DEVICE Meeting meeting_of(const Params& p, const Row& row) {
  const i64 number = static_cast<i64>(row.token) * p.head_tiles + row.tile;
  const int packets_bytes = row.splits * (L::Packet::COUNT * L::Packet::BYTES);
  unsigned char* packets = p.exchange + number * (packets_bytes + row.splits * L::HEADS * 8);
  RowCounters* counters = reinterpret_cast<RowCounters*>(p.counters) + number;
  return {packets, reinterpret_cast<float2*>(packets + packets_bytes), counters};
}

// A bit for each share of the result that a CTA which has left everything has to add up.
DEVICE u32 shares_of(u32* set, const Row& row) {
  u32* const have_packets = set + 1;
  const u32 own = 1u << row.rank;
  auto all = [&](u32 seen) { return (seen & 0xffff) == row.splits; };
  u32 seen = fetch_add(have_packets, 1) + 1;
  if (all(seen)) return own | seen >> 16;
  for (int looks = PATIENCE; looks && !all(seen); --looks) seen = load_acquire(have_packets);
  // The last one may come in between: then it has not seen that this share was given up.
  return all(seen) || all(fetch_or(have_packets, own << 16)) ? own : 0;
}

// ---- CTAs that share a row, each with work of other rows besides (`cuts.cuh`) ---------------------------------------

// Counters of a row: CTAs that have left their part, and CTAs that will not look at these again. They are sums of ONES,
// which have the launch's number in their upper half. Where a graph runs the launch twice at the same time, a sum is not
// of one launch: no CTA takes it for complete, and the last one fails. The first one has the number of shares of the
// result that were given up from bit 16 on; whose, the CTAs' own counters say.
struct SharersCounters {
  u64 here, gone, given_up;
};

constexpr int NOT_ALL_HERE = -1;
constexpr u64 ALL_GIVEN_UP = 0xffff0000u;

DEVICE u64 ones(u32 count) { return static_cast<u64>(launch_number() * count) << 32 | count; }

DEVICE bool all_here(u64 seen, int count) { return (seen & ~ALL_GIVEN_UP) == ones(count); }

DEVICE int number_given_up(u64 seen) { return static_cast<u32>(seen) >> 16; }

// The bit by which a CTA gives a share up: a CTA may have one of the row that it began in, `number` 0, and of another.
DEVICE u32 bit_of_share(int number) { return number == 0 ? 2 : 1; }

// A CTA leaves its part by counting itself, and looks once it has nothing else to do. How many shares were given up where
// all are there. If not, this CTA has lost its patience and gives up its own: but not if the last one came in between. The
// last sharer looks once: it has no share.
DEVICE int await_sharers(SharersCounters* counters, int count, SharersCounters* own, int number) {
  const bool has_share = number < count - 1;
#pragma unroll 1
  for (int looks = has_share ? PATIENCE : 0; looks >= 0; --looks) {
    const u64 seen = load_acquire(&counters->here);
    if (all_here(seen, count)) return number_given_up(seen);
  }
  if (!has_share) return NOT_ALL_HERE;
  fetch_or(reinterpret_cast<u32*>(&own->given_up), bit_of_share(number));
  const u64 seen = fetch_add(&counters->here, static_cast<u64>(1 << 16));
  return all_here(seen, count) ? number_given_up(seen) : NOT_ALL_HERE;
}

// Whether the other one of two sharers has left its part. The first one, which comes to its end later, need not leave its
// own then, but adds up both, and counts itself when it leaves.
DEVICE bool other_is_here(const SharersCounters* counters) { return load_acquire(&counters->here) == ones(1); }

// The last one makes the counters ready for another launch. By then all are there, whether it has seen that or not. Those
// of the row's CTAs are `pitch` apart.
DEVICE void leave_sharers(SharersCounters* counters, int count, int pitch) {
  const u64 before = fetch_add_relaxed(&counters->gone, ones(1));
  if (static_cast<u32>(before) < static_cast<u32>(count) - 1) return;
  const u64 seen = load_acquire(&counters->here);
  if (before != ones(count - 1) || !all_here(seen, count)) fail();
#pragma unroll 1
  for (int number = 0; number < count && number_given_up(seen); ++number)
    clear_bits(&counters[number * pitch].given_up, bit_of_share(number));
  counters->here = counters->gone = 0;
}
