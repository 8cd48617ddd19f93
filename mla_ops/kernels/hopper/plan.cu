// Which CTAs share the keys of which row: plan_sparse_attention.
//
// A warp places one row. A row's slots stand behind those of all rows that are longer, or as long with a smaller
// number: as many as there are such rows, its rank, and for i = 1, 2, 4, 8 as many as i times those of them with more
// than i shares. So nothing is sorted, and no CTA waits for another: each counts all rows and chooses the share anew.
//
// A step runs this once, from cold caches, so what it costs is a launch, one load, and the fetching of the code, which
// therefore is short.
#include "ptx.cuh"

struct Params {
  const int* topk_length;
  const int* extra_topk_length;  // null: `extra_topk` of all
  int* slots;
  u32 num_tokens;
  u32 num_slots;
  int cluster_log2;  // a row has up to 2^cluster_log2 parts
  int topk;
  int extra_topk;
  u32 capacity;  // blocks of the longest row that may be; 0: each row with keys has all parts
  u32 num_workers;
  u32 overhead;
  u32 multiplier;  // number * multiplier >> shift is number / num_workers
  int shift;
};

constexpr int KEYS_LOG2 = 6;  // of a block
constexpr int SHARES = 16;
constexpr int MAX_CLUSTER_LOG2 = 4;

// Whether a > b, of numbers up to 2^30, as a number: two instructions with the sum that it goes into.
DEVICE u32 is_above(int a, int b) { return static_cast<u32>(b - a) >> 31; }

DEVICE int count_blocks(int length, int columns) {
  const u32 keys = max(min(length, columns), 0);
  return (keys + (1 << KEYS_LOG2) - 1) >> KEYS_LOG2;
}

DEVICE int blocks_of(const Params& p, u32 token) {
  int extra = p.extra_topk;
  if (p.extra_topk_length != nullptr) extra = p.extra_topk_length[token];
  return count_blocks(p.topk_length[token], p.topk) + count_blocks(extra, p.extra_topk);
}

// Blocks of a part: candidates fall by half octaves from the longest row that may be.
DEVICE int share_of(const Params& p, u32 candidate) {
  const u32 octave = candidate / 2;
  return (p.capacity * (4 - candidate % 2) + (4 << octave) - 1) >> (octave + 2);
}

// Parts of a row beside its first.
DEVICE int more_parts(const Params& p, int blocks, int share) {
  int more = blocks > share;
  if (blocks > 2 * share) more = 3;
  if (blocks > 4 * share) more = 7;
  if (blocks > 8 * share) more = 15;
  return min(more, (1 << p.cluster_log2) - 1);
}

// Blocks of the largest part, where the longest row has so many.
DEVICE u32 largest_part(const Params& p, int share, int longest) {
  return max(min(share, longest), (longest + (1 << p.cluster_log2) - 1) >> p.cluster_log2);
}

// Of a candidate that needs so many slots beside one for each row, `live` of which have keys: an upper bound of the
// time that all take, the lesser of whole rounds of the longest slot and the average beside one longest slot.
DEVICE u64 time_of(const Params& p, int share, u32 more, u32 live, int longest, u64 total) {
  const u32 needed = more + live;
  const u32 slot = p.overhead + largest_part(p, share, longest);
  const u32 rounds = static_cast<u32>((needed + p.num_workers - 1) * static_cast<u64>(p.multiplier) >> p.shift);
  const u64 whole = static_cast<u64>(rounds * p.num_workers) * slot;
  const u64 average = static_cast<u64>(needed) * p.overhead + total + static_cast<u64>(p.num_workers) * slot;
  return p.num_tokens + more <= p.num_slots ? min(whole, average) : ~0ull;
}

// Of the candidates that lanes have, the first with the least time.
DEVICE int fastest(u64 time) {
  const u32 high = time >> 32, low = time;
  const bool first = high == __reduce_min_sync(~0u, high);
  const u32 least = __reduce_min_sync(~0u, first ? low : ~0u);
  return __ffs(__ballot_sync(~0u, first && low == least)) - 1;
}

DEVICE void store_slot(const Params& p, u32 slot, int row, int parts) {
  int* const entry = p.slots + 2 * static_cast<u64>(slot);
  entry[0] = row;
  entry[1] = parts;
}

// Slots behind the last that has work.
DEVICE void fill_slots(const Params& p, u32 slot, u32 step) {
#pragma unroll 1
  for (; slot < p.num_slots; slot += step) store_slot(p, slot, -1, 1);
}

// One row, by one warp, with at least as many workers as it may have parts: the least time is that of the shortest
// slot, of several such candidates the first, which has the fewest parts. Overheads and workers change nothing then.
__global__ void schedule_one(const __grid_constant__ Params p) {
  const u32 lane = threadIdx.x;
  const int blocks = blocks_of(p, 0);
  const int share = share_of(p, lane % SHARES);
  const u32 key = largest_part(p, share, blocks) << MAX_CLUSTER_LOG2 | more_parts(p, blocks, share);
  const u32 parts = 1 + __reduce_min_sync(~0u, key) % (1 << MAX_CLUSTER_LOG2);
#pragma unroll 1
  for (u32 slot = lane; slot < p.num_slots; slot += 32)
    store_slot(p, slot, slot < parts ? 0 : -1, slot < parts ? parts : 1);
}

// Up to 32 rows: a lane has the blocks of each, in every warp, so that warps have nothing to tell one another.
__global__ void schedule_few(const __grid_constant__ Params p) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, rows = blockDim.x / 32;
  const u32 row = blockIdx.x * rows + warp;
  int blocks = 0;
  if (lane < p.num_tokens) blocks = blocks_of(p, lane);
  const int own_share = share_of(p, lane % SHARES);
  int more = 0;
#pragma unroll 1
  for (int other = 0; other < p.num_tokens; other += 2)  // one each half of the warp; lanes of no row have no blocks
    more += more_parts(p, __shfl_sync(~0u, blocks, other + lane / SHARES), own_share);
  more += __shfl_xor_sync(~0u, more, SHARES);

  const int longest = __reduce_max_sync(~0u, blocks);
  const u32 total = __reduce_add_sync(~0u, static_cast<u32>(blocks));
  const int live = __popc(__ballot_sync(~0u, blocks > 0));
  const int best = fastest(time_of(p, own_share, more, live, longest, total));
  const int share = __shfl_sync(~0u, own_share, best);
  const u32 used = p.num_tokens + __shfl_sync(~0u, more, best);

  int parts = 1 + more_parts(p, blocks, share);
  const bool before = blocks + (lane < row) > __shfl_sync(~0u, blocks, row);
  const int first = __reduce_add_sync(~0u, before ? parts : 0);
  parts = __shfl_sync(~0u, parts, row);
  if (lane < parts && row < p.num_tokens) store_slot(p, first + lane, row, parts);
  fill_slots(p, used + row * 32 + lane, gridDim.x * rows * 32);
}

// Shared memory of `schedule_many`, in front of its rows.
struct Layout {
  static constexpr u32 ABOVE = 0;  // for each i, for each share, rows of more than 2^i of it
  static constexpr u32 LIVE = ABOVE + MAX_CLUSTER_LOG2 * SHARES * 4;  // rows with keys
  static constexpr u32 LOW = LIVE + 4, HIGH = LIVE + 8;  // blocks of all rows: the lower 16 bits of each, the rest
  static constexpr u32 LONGEST = LIVE + 12;
  static constexpr u32 ROWS = LONGEST + 4;  // length, then blocks of each; the lengths in the extra cache behind them
  static constexpr u32 BYTES = ROWS;
};
static_assert(Layout::ROWS % 16 == 0 && Layout::LIVE % 16 == 0);

DEVICE void add_shared(u32 address, u32 value) {
  asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

DEVICE void max_shared(u32 address, u32 value) {
  asm volatile("red.shared.max.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// As many rows as fit into shared memory, WARPS of them by a CTA. Lengths come by copies, all of a thread's under way
// at one time without registers to wait for; it alone reads what it has copied, so that needs no barrier.
template <int WARPS>
__global__ void __launch_bounds__(WARPS * 32) schedule_many(const __grid_constant__ Params p) {
  using L = Layout;
  EXPORT_SHARED_BYTES(L);
  constexpr u32 THREADS = WARPS * 32, GROUPS = THREADS / SHARES;
  static_assert(THREADS >= L::ROWS / 4);
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const u32 shared = shared_address(shared_memory);
  const u32 num_quads = (p.num_tokens + 3) / 4, padded = num_quads * 4;
  const u32 own_rows = shared + L::ROWS + 4 * thread;

  u32 at = own_rows;
#pragma unroll 1
  for (u32 token = thread; token < p.num_tokens; token += THREADS, at += 4 * THREADS) {
    copy_4(at, p.topk_length + token);
    if (p.extra_topk_length != nullptr) copy_4(at + 4 * padded, p.extra_topk_length + token);
  }
  if (thread < L::ROWS / 4) store_shared_4(shared + 4 * thread, 0);
  wait_for_copies();
  int longest = 0;
  u32 low = 0, high = 0, live = 0;
  at = own_rows;
#pragma unroll 1
  for (u32 token = thread; token < padded; token += THREADS, at += 4 * THREADS) {
    int length = 0, extra = 0;  // of what only fills a quad
    if (token < p.num_tokens) {
      length = load_shared_4(at), extra = p.extra_topk;
      if (p.extra_topk_length != nullptr) extra = load_shared_4(at + 4 * padded);
    }
    const int blocks = count_blocks(length, p.topk) + count_blocks(extra, p.extra_topk);
    store_shared_4(at, blocks);
    longest = max(longest, blocks);
    low += blocks & 0xffff, high += static_cast<u32>(blocks) >> 16, live += is_above(blocks, 0);
  }
  __syncthreads();

  live = __reduce_add_sync(~0u, live), low = __reduce_add_sync(~0u, low), high = __reduce_add_sync(~0u, high);
  longest = __reduce_max_sync(~0u, longest);
  if (lane < 3) add_shared(shared + L::LIVE + 4 * lane, lane == 0 ? live : lane == 1 ? low : high);
  if (lane == 3) max_shared(shared + L::LONGEST, longest);

  const u32 candidate = lane % SHARES;
  const int own_share = share_of(p, candidate);
  u32 counter = shared + L::ABOVE + 4 * candidate;
#pragma unroll 1
  for (int i = 0; i < p.cluster_log2; ++i) {
    const int limit = own_share << i;
    u32 above = 0;
#pragma unroll 1
    for (u32 quad = thread / SHARES; quad < num_quads; quad += GROUPS) {
      const uint4 blocks = load_shared_16(shared + L::ROWS + 16 * quad);
      above += is_above(blocks.x, limit), above += is_above(blocks.y, limit);
      above += is_above(blocks.z, limit), above += is_above(blocks.w, limit);
    }
    add_shared(counter, above);
    counter += 4 * SHARES;
  }

  const u32 row = blockIdx.x * WARPS + warp;
  const bool places = row < p.num_tokens;
  const int own = load_shared_4(shared + L::ROWS + (places ? 4 * row : 0));
  u32 rank = 0;
#pragma unroll 1
  for (u32 quad = lane; quad < num_quads; quad += 32) {
    const uint4 blocks = load_shared_16(shared + L::ROWS + 16 * quad);
    const int smaller = row - 4 * quad;  // of the numbers from here
    rank += is_above(blocks.x + is_above(smaller, 0), own);
    rank += is_above(blocks.y + is_above(smaller, 1), own);
    rank += is_above(blocks.z + is_above(smaller, 2), own);
    rank += is_above(blocks.w + is_above(smaller, 3), own);
  }
  rank = __reduce_add_sync(~0u, rank);
  __syncthreads();

  u32 above[MAX_CLUSTER_LOG2], more = 0;
#pragma unroll
  for (int i = 0; i < MAX_CLUSTER_LOG2; ++i) {
    above[i] = load_shared_4(shared + L::ABOVE + 4 * candidate + i * 4 * SHARES);
    more += above[i] << i;
  }
  const uint4 sums = load_shared_16(shared + L::LIVE);
  const u64 total = sums.y + (static_cast<u64>(sums.z) << 16);
  const int best = fastest(time_of(p, own_share, more, sums.x, sums.w, total));
  u32 first = rank, parts = 1;
#pragma unroll
  for (int i = 0; i < MAX_CLUSTER_LOG2; ++i) {
    const u32 longer = __shfl_sync(~0u, above[i], best);
    first += min(rank, longer) << i;
    parts += is_above(longer, rank) << i;
  }
  if (lane < parts && places) store_slot(p, first + lane, row, parts);
  const u32 used = p.num_tokens + __shfl_sync(~0u, more, best);
  fill_slots(p, used + blockIdx.x * THREADS + thread, gridDim.x * THREADS);
}
