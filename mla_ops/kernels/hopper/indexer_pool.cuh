// Tiles that CTAs of scores draw one run after the other, when their own part is brought: SMs do not get the same share of
// memory's bandwidth.
#pragma once

#include "counters.cuh"

// Counters are 0 between launches. A launch counts in one of two sets, which it owns while its number is in that half of
// `owners`: a graph may run a launch twice at the same time, with the same memory. A third one waits for a set.
struct Pool {
  u64 owners;
  u64 drawn[2];  // runs
  u32 left[2];   // CTAs that found none
};

DEVICE int own_set(Pool* pool) {
  const u64 own = launch_number();
  u64 seen = 0;
#pragma unroll 1
  for (int looks = 0; looks < 1 << 22; ++looks) {
    if (static_cast<u32>(seen) == own) return 0;
    if (seen >> 32 == own) return 1;
    const u64 wanted = !static_cast<u32>(seen) ? seen | own : !(seen >> 32) ? seen | own << 32 : seen;
    const u64 before = compare_and_swap(&pool->owners, seen, wanted);
    seen = before == seen ? wanted : before;
  }
  fail();
  return 0;
}

// The number of a run; one more than all others had.
DEVICE u32 draw_run(Pool* pool, int set) { return fetch_add_relaxed(pool->drawn + set, 1); }

// The last of `ctas` makes the set ready for another launch.
DEVICE void leave(Pool* pool, int set, u32 ctas) {
  if (fetch_add(pool->left + set, 1) != ctas - 1) return;
  pool->drawn[set] = pool->left[set] = 0;
  clear_bits(&pool->owners, 0xffffffffull << set * 32);
}
