// Rows of unequal lengths that share clusters of 16 CTAs: each has as many CTAs of one cluster as its length asks for, so
// that no part goes through memory. The fewest turns for which all rows fit are looked for, the largest row placed first.
#pragma once

#include "ptx.cuh"

constexpr int PACKED_CTAS = 16;  // of a cluster
constexpr u32 NOT_PACKED = ~0u;  // rows go by the launch's shape

// A CTA's row, the first CTA of it in the cluster and how many there are.
struct PackedCta {
  int token, first, splits;
};

DEVICE PackedCta unpack_cta(u32 found) {
  return {static_cast<int>(found & 0xff), static_cast<int>(found >> 8 & 0xff), static_cast<int>(found >> 16)};
}

// The row of CTA `rank` of a cluster; token 255 where it has none. A lane's row has so many `turns`, 0 past the last one;
// `most`, `total`: of all rows; by the launch's shape they take `by_shape` turns. All lanes of a warp call this. A function of
// its own: its code lies behind the kernel's, so that rows of one length have nothing to skip.
__device__ __noinline__ u32 pack_rows(int turns, int num_rows, int clusters, int cluster, int rank, int most, int total,
                                      int by_shape, int lane) {
  const int ctas = clusters * PACKED_CTAS;
  auto quotient = [](int number, int by) {
    return static_cast<int>(__fdividef(number + 0.5f, static_cast<float>(by)));
  };
  int longest = max(quotient(total + ctas - 1, ctas), quotient(most + PACKED_CTAS - 1, PACKED_CTAS));
#pragma unroll 1
  for (;; ++longest) {
    if (longest >= by_shape) return NOT_PACKED;
    int count = lane < num_rows ? max(1, quotient(turns + longest - 1, longest)) : 0;
    if (count == PACKED_CTAS - 1) count = PACKED_CTAS;  // `SPLITS` has none of these
    if (__reduce_add_sync(~0u, count) > ctas) continue;
    // Those of several CTAs, the largest first; the others fill what room is left.
    int left = count > 1 ? count << 5 | (31 - lane) : 0, room = lane < clusters ? PACKED_CTAS : 0;
    u32 found = 255;
#pragma unroll 1
    for (;;) {
      const int largest = __reduce_max_sync(~0u, left);
      if (largest == 0) break;
      const int size = largest >> 5;
      const u32 fits = __ballot_sync(~0u, room >= size);
      if (!fits) break;
      const int to = __ffs(fits) - 1, first = PACKED_CTAS - __shfl_sync(~0u, room, to), owner = 31 - (largest & 31);
      if (lane == to) room -= size;
      if (lane == owner) left = 0;
      if (to == cluster && first <= rank && rank < first + size) found = owner | first << 8 | size << 16;
    }
    if (__reduce_max_sync(~0u, left) > 0) continue;
    const int filled = PACKED_CTAS - __shfl_sync(~0u, room, cluster),
              place = __reduce_add_sync(~0u, lane < cluster ? room : 0) + rank - filled;
    const u32 alone = __ballot_sync(~0u, count == 1),
              here = __ballot_sync(~0u, count == 1 && __popc(alone & (1u << lane) - 1) == place);
    if (rank >= filled && here) found = __ffs(here) - 1 | rank << 8 | 1 << 16;
    return found;
  }
}
