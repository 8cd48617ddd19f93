// CTAs of a group find one another through counters in memory, which they leave as they found them.
//
// They need not all run at the same time, so none waits for long: who loses patience gives its share of the result up
// and leaves; who comes last finds everything there, and does its own share and all that were given up.
#pragma once

#include "layout.cuh"

// A CTA looks so often for the others, half a microsecond each.
#ifndef PATIENCE
#define PATIENCE 64
#endif

// The partial results that a row's CTAs leave for one another, and COUNTERS numbers.
struct Meeting {
  unsigned char* packets;  // [COUNT][splits], of Packet::BYTES
  float2* states;          // [splits][HEADS]: sum and reference
  u32* have_states;        // CTAs that left theirs
  u32* have_packets;       // CTAs that left everything, and from bit 16 on which shares were given up
  u32* done;               // warps that will not look at counters again, two of each CTA
};

template <class L>
DEVICE Meeting meeting_of(const Params& p, const Row& row) {
  const i64 number = static_cast<i64>(row.token) * p.head_tiles + row.tile;
  const int packets_bytes = row.splits * (L::Packet::COUNT * L::Packet::BYTES);
  unsigned char* packets = p.exchange + number * (packets_bytes + row.splits * L::HEADS * 8);
  u32* counters = p.counters + number * COUNTERS;
  return {packets, reinterpret_cast<float2*>(packets + packets_bytes), counters, counters + 1, counters + 2};
}

// A bit for each share of the result that a CTA which has left everything has to add up.
DEVICE u32 shares_of(const Meeting& meeting, const Row& row) {
  const u32 own = 1u << row.rank;
  auto all = [&](u32 seen) { return (seen & 0xffff) == row.splits; };
  u32 seen = fetch_add(meeting.have_packets, 1) + 1;
  if (all(seen)) return own | seen >> 16;
  for (int looks = PATIENCE; looks && !all(seen); --looks) seen = load_acquire(meeting.have_packets);
  // The last one may come in between: then it has not seen that this share was given up.
  return all(seen) || all(fetch_or(meeting.have_packets, own << 16)) ? own : 0;
}

// A thread calls this that looks at the row's counters no more. The last one makes them ready for another launch.
DEVICE void leave_meeting(const Meeting& meeting, const Row& row) {
  if (fetch_add(meeting.done, 1) != 2 * row.splits - 1) return;
  *meeting.have_states = 0, *meeting.have_packets = 0, *meeting.done = 0;
}

// ---- CTAs that share a row, each with work of other rows besides (`cuts.cuh`) ---------------------------------------

// Three counters: how many of `count` CTAs have left their part, shares of the result that are taken, who will not look
// at these again. A CTA leaves its part by adding one to the first, and looks once it has nothing else to do.

// Whether all are there. If not, this CTA has lost its patience.
DEVICE bool await_sharers(const u32* counters, int count) {
#pragma unroll 1
  for (int looks = PATIENCE; looks >= 0; --looks)
    if (load_acquire(counters) == static_cast<u32>(count)) return true;
  return false;
}

// One of `count` shares that nobody has taken; `count` and more where there is none.
DEVICE int take_share(u32* counters) { return fetch_add(counters + 1, 1); }

// The last one makes the counters ready for another launch.
DEVICE void leave_sharers(u32* counters, int count) {
  if (fetch_add(counters + 2, 1) != static_cast<u32>(count) - 1) return;
  counters[0] = counters[1] = counters[2] = 0;
}
