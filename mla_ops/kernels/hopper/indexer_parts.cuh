// A CTA of scores finds its part of all groups' tiles, and asks into L2 meanwhile what it reads next.
#pragma once

#include "indexer_rows.cuh"

// Groups whose part one warp finds, so many for each of its lanes; tokens, and entries of all their requests' tables,
// that are prefetched.
template <int TOKENS, Source SOURCE>
constexpr int FEW = SOURCE != FLAT && TOKENS == 1 ? 4 : 1;
constexpr int PREFETCHED_TOKENS = 1024, PREFETCHED_BLOCKS = 64 * 1024;
constexpr int SECTOR_LOG2 = 3;  // entries of a table, by which L1 is filled

// Latencies are what a launch of few keys takes: what is read once lengths are known, on its way to L2 meanwhile. A table
// of which each thread has a sector goes to L1 as well, where threads ALONE that make products call this: the result is an
// entry that nobody needs.
template <class L, Source SOURCE, bool ALONE>
DEVICE int prefetch_rows(const Params& p) {
  if (SOURCE == FLAT || p.num_tokens > PREFETCHED_TOKENS) return 0;
  int unused = 0;
  const int thread = threadIdx.x - (ALONE ? L::FIRST_CONSUMER : 0), line = thread * 32;  // 128 bytes each
  constexpr int THREADS_LOG2 = L::CONSUMERS < 512 ? 8 : 9;
  const int each_log2 = THREADS_LOG2 - (p.num_requests > 1 ? 32 - __clz(p.num_requests - 1) : 0);  // threads of a row
  if (ALONE && each_log2 >= 0 && p.table_width <= 1 << each_log2 + SECTOR_LOG2) {
    const int request = thread >> each_log2, first = (thread & (1 << each_log2) - 1) << SECTOR_LOG2;
    if (request < p.num_requests && first < p.table_width)
      unused = __ldg(p.block_table + request * p.table_stride + first);
  } else {
    for (int request = blockIdx.x; request < p.num_requests; request += gridDim.x)
      if (line < min(p.table_width, PREFETCHED_BLOCKS / p.num_requests))
        prefetch_to_l2(p.block_table + request * p.table_stride + line);
  }
  for (int token = blockIdx.x; token < p.num_tokens; token += gridDim.x)
    if (line < L::HEADS) prefetch_to_l2(p.weights + token * p.weights_stride + line);
  return unused;
}

// Sum of what this lane and those in front of it bring.
DEVICE int sum_up_to(int value, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int lower = __shfl_up_sync(~0u, value, distance);
    if (lane >= distance) value += lower;
  }
  return value;
}

// All threads count the units of all groups. A call, so that a launch of few tokens need not read past it.
template <class L, Source SOURCE>
__device__ __noinline__ Part part_of_many(const Params& p, u32 shared) {
  constexpr int tokens = L::TOKENS * L::CLUSTER, step = STEP<tokens, SOURCE>;
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  prefetch_rows<L, SOURCE, false>(p);
  const int units = (p.num_tokens + step - 1) / step, each = (units + L::THREADS - 1) / L::THREADS;
  const int first = thread * each, last = min(first + each, units);
  int own = 0;
  for (int unit = first; unit < last; ++unit) own += group_at<tokens, SOURCE>(p, unit * step).units;
  int before = sum_up_to(own, lane);
  if (lane == 31) store_shared_4(shared + L::TOTALS + warp * 4, before);
  __syncthreads();
  before -= own;
  int total = 0;
#pragma unroll
  for (int w = 0; w < L::THREADS / 32; ++w) {
    const int units_of_warp = load_shared_4(shared + L::TOTALS + w * 4);
    if (w < warp) before += units_of_warp;
    total += units_of_warp;
  }
  const int number = blockIdx.x / L::CLUSTER, parts = gridDim.x / L::CLUSTER;
  const int begin = units_before(total, number, parts, p.of_parts),
            count = units_before(total, number + 1, parts, p.of_parts) - begin;
  if (count == 0) return {0, 0, 0, 0};
  if (before <= begin && begin < before + own) {
    Part part = {first * step, begin - before, count, total};
    if (each > 1) find_begin<tokens, SOURCE>(p, part);
    store_shared_8(shared + L::PART, part.token, part.skip);
  }
  __syncthreads();
  const uint2 part = load_shared_8(shared + L::PART);
  return {static_cast<int>(part.x), static_cast<int>(part.y), count, total};
}

// A warp does the same for up to FEW groups a lane, 32 neighbours at one time; `groups` becomes those of the 32 with which
// the part begins, and `first` the token of the first of them. A launch of few keys takes as long as this: a warp alone
// takes some clocks for each instruction.
template <int TOKENS, Source SOURCE>
DEVICE Part part_of_few(const Params& p, int lane, int number, int parts, Group& groups, int& first) {
  constexpr int step = STEP<TOKENS, SOURCE>;
  groups = group_at<TOKENS, SOURCE>(p, lane * step), first = 0;
  int behind = sum_up_to(groups.units, lane), total = __shfl_sync(~0u, behind, 31);
#pragma unroll 1
  for (int other = 32 * step; other < p.num_tokens; other += 32 * step)
    total += __reduce_add_sync(~0u, group_at<TOKENS, SOURCE>(p, other + lane * step).units);
  const int begin = units_before(total, number, parts, p.of_parts),
            count = units_before(total, number + 1, parts, p.of_parts) - begin;
  if (count == 0) return {0, 0, 0, 0};
#pragma unroll 1
  while (true) {
    const u32 here = __ballot_sync(~0u, begin < behind);
    if (here) {
      const int from = __ffs(here) - 1;
      return {first + from * step, begin - __shfl_sync(~0u, behind - groups.units, from), count, total};
    }
    first += 32 * step, groups = group_at<TOKENS, SOURCE>(p, first + lane * step);
    behind = __shfl_sync(~0u, behind, 31) + sum_up_to(groups.units, lane);
  }
}
