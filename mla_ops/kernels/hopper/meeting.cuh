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
  float2* states;          // [splits][HEADS]: sum and reference
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

// Counters of a row: CTAs that have left their part; CTAs that will not look at these again; shares of the result that
// are taken. The first two are sums of ONES, which have the launch's number in their upper half. Where a graph runs the
// launch twice at the same time, a sum is not of one launch: no CTA takes it for complete, and the last one fails.
struct SharersCounters {
  u64 here, gone;
  u32 taken;
};

DEVICE u64 ones(u32 count) { return static_cast<u64>(launch_number() * count) << 32 | count; }

// A CTA leaves its part by counting itself, and looks once it has nothing else to do. Whether all are there. If not, this
// CTA has lost its patience.
DEVICE bool await_sharers(const SharersCounters* counters, int count) {
  const u64 all = ones(count);
#pragma unroll 1
  for (int looks = PATIENCE; looks >= 0; --looks)
    if (load_acquire(&counters->here) == all) return true;
  return false;
}

// One of `count` shares that nobody has taken; `count` and more where there is none.
DEVICE int take_share(SharersCounters* counters) { return fetch_add(&counters->taken, 1); }

// The last one makes the counters ready for another launch. By then all are there, whether it has seen that or not.
DEVICE void leave_sharers(SharersCounters* counters, int count, bool complete) {
  const u64 before = fetch_add(&counters->gone, ones(1));
  if (static_cast<u32>(before) < static_cast<u32>(count) - 1) return;
  if (before != ones(count - 1) || !complete && load_acquire(&counters->here) != ones(count)) fail();
  counters->here = counters->gone = 0, counters->taken = 0;
}
