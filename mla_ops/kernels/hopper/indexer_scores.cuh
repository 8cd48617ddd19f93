// A CTA of `indexer_logits.cu`, which has the products and says how it works.
#pragma once

#include "indexer_parts.cuh"
#include "rows.cuh"

constexpr int CONSUMERS = 256, THREADS = 384, QUERY_STAGES = 2;
constexpr int TILE_BYTES = TILE * 128, GATHERERS = 4, LAG = 6;
constexpr int MORE_THAN_HALF = 114 * 1024;  // of an SM's shared memory
constexpr int FULL_L2 = 1 << 18;  // tiles whose scores of one token, 64 MB, are more than L2 has room for

template <int HEADS_, int TOKENS_, int STAGES_ = 16, int WARPGROUPS_ = 2, int CLUSTER_ = 1>
struct IndexerLayout {
  static constexpr int CLUSTER = CLUSTER_;  // CTAs that have the same keys and neighbouring tokens
  // Two warpgroups have two sets of products each, or more have one: then all threads have the same number of registers.
  static constexpr int WARPGROUPS = WARPGROUPS_, SETS = WARPGROUPS == 2 ? 2 : 1;
  static constexpr int CONSUMERS = WARPGROUPS * 128, THREADS = CONSUMERS + 128;
  // Warps begin one after the other, 18 cycles apart: where memory is the bound, those that bring keys first.
  static constexpr int FIRST_PRODUCER = SETS == 1 ? 0 : CONSUMERS, FIRST_CONSUMER = SETS == 1 ? 128 : 0;
  static constexpr int PRODUCERS = SETS == 2 ? 1 : WARPGROUPS;  // warps that bring keys by boxes, every n-th tile each
  static constexpr int HEADS = HEADS_, TOKENS = TOKENS_, COLUMNS = HEADS * TOKENS, STAGES = STAGES_;
  // A thread has all heads of its tokens where all columns are there: eight columns are two heads of four tokens.
  static constexpr bool WHOLE = COLUMNS == 256;
  static constexpr int PARTS = WHOLE ? 2 : 1;  // a tile's products are made in so many, as registers allow
  static constexpr int PART_TOKENS = TOKENS / PARTS, PART_COLUMNS = COLUMNS / PARTS, PART_BYTES = PART_COLUMNS * 128;
  static constexpr int QUERY_BYTES = COLUMNS * 128;
  static constexpr int QUERY = 0, KEY = QUERY_STAGES * QUERY_BYTES, SCALE = KEY + STAGES * TILE_BYTES;
  static constexpr int GROUP = SCALE + STAGES * TILE * 4;  // a query stage's token, count, first tile, tiles
  static constexpr int TOTALS = GROUP + QUERY_STAGES * 16, PART = TOTALS + (THREADS + 127) / 128 * 16;
  static constexpr int GROUP_FULL = PART + 16, QUERY_FULL = GROUP_FULL + QUERY_STAGES * 8;
  static constexpr int QUERY_FREE = QUERY_FULL + QUERY_STAGES * 8, KEY_FULL = QUERY_FREE + QUERY_STAGES * 8;
  static constexpr int KEY_FREE = KEY_FULL + STAGES * 8, NEEDED = KEY_FREE + STAGES * 8;
  // Two CTAs of few registers would share an SM while another one has none.
  static constexpr int BYTES = COLUMNS == 32 && NEEDED < MORE_THAN_HALF ? MORE_THAN_HALF : NEEDED;
  // A warpgroup that had not waited for a slot's last tile would take the one before it for the next one.
  static_assert(STAGES % WARPGROUPS == 0, "a slot's tiles are all of one warpgroup");
  static_assert(STAGES % PRODUCERS == 0, "a slot's tiles are all brought by one warp");
  static_assert(GROUP_FULL % 8 == 0, "barriers lie at multiples of 8 bytes");
  static_assert(BYTES <= 232448, "more shared memory than an SM has");
};

// A launch of scores. Where memory is the bound, more warps wait for keys, and fewer keys are on their way: more of them
// would take L2 from one another.
template <int COLUMNS, Source SOURCE>
constexpr bool OF_MEMORY = SOURCE == BOXES && COLUMNS < 256;
template <int COLUMNS, int TOKENS, Source SOURCE>
constexpr int WARPGROUPS_OF = !OF_MEMORY<COLUMNS, SOURCE> ? 2 : TOKENS == 1 ? 4 : 3;
template <int HEADS, int TOKENS, Source SOURCE>
using ScoresLayout = IndexerLayout<HEADS, TOKENS, !OF_MEMORY<HEADS * TOKENS, SOURCE> ? 16 : TOKENS == 1 ? 12 : 9,
                                   WARPGROUPS_OF<HEADS * TOKENS, TOKENS, SOURCE>, SOURCE == FLAT ? 2 : 1>;

// ---- the producer ---------------------------------------------------------------------------------------------------

// Slots of the ring of keys, a tile each.
struct Slot {
  int index;
  u32 parity;
};

template <class L>
DEVICE void next(Slot& slot) {
  if (++slot.index == L::STAGES) slot.index = 0, slot.parity ^= 1;
}

// The slot of the next tile that the same warpgroup has.
template <class L>
DEVICE void next_own(Slot& slot) {
  slot.index += L::WARPGROUPS;
  if constexpr ((L::STAGES & L::STAGES - 1) == 0) {
    slot.parity ^= static_cast<u32>(slot.index) / L::STAGES, slot.index &= L::STAGES - 1;
    return;
  }
  if (slot.index >= L::STAGES) slot.index -= L::STAGES, slot.parity ^= 1;
}

DEVICE u32 of_slot(u32 barriers, const Slot& slot) { return barriers + slot.index * 8; }

// The block of a group's key, -1 where there is none that can be read.
DEVICE int block_at(const Params& p, const int* table, int position, int end) {
  if (position >= end) return -1;
  const int block = __ldg(table + divide(position, p.of_block_size));
  return block < p.num_blocks ? max(block, -1) : -1;
}

DEVICE const int* table_of(const Params& p, int token) {
  return p.block_table + __ldg(p.req_id_per_token + token) * p.table_stride;
}

template <class L>
DEVICE void bring_flat(const Params& p, u32 shared, int lane, int first_tile, int tiles, Slot& slot) {
  for (int i = 0; i < tiles; ++i, next<L>(slot)) {
    mbarrier_wait(of_slot(shared + L::KEY_FREE, slot), slot.parity ^ 1);
    if (lane == 0) {
      const u32 full = of_slot(shared + L::KEY_FULL, slot), keys = shared + L::KEY + slot.index * TILE_BYTES;
      const int first = (first_tile + tiles - 1 - i) * TILE;
      mbarrier_arrive_expect(full, TILE_BYTES);
      if constexpr (L::CLUSTER == 1) {
        copy_box(keys, p.keys, 0, first, 0, full);
      } else {  // each CTA brings its part of a tile for all
        constexpr int OWN = TILE / L::CLUSTER;
        const int rank = blockIdx.x % L::CLUSTER;
        copy_box_to((1 << L::CLUSTER) - 1, keys + rank * OWN * 128, p.keys, 0, first + rank * OWN, 0, full);
      }
    }
  }
}

// A block has whole tiles. Lane n has the block of the n-th of 32 tiles that this warp brings.
template <class L>
DEVICE void bring_tiles(const Params& p, u32 shared, int thread, int token, int end, int first_tile, int tiles,
                        Slot& slot, u64 policy) {
  constexpr int EACH = L::PRODUCERS;
  const int lane = thread & 31, skipped = (thread / 32 + EACH - slot.index % EACH) % EACH;  // the other warps'
  const int* table = table_of(p, token);
  int position = (first_tile + skipped + lane * EACH) * TILE, block_after = block_at(p, table, position, end);
  Slot own = slot;
  slot.index += tiles, slot.parity ^= slot.index / L::STAGES & 1, slot.index %= L::STAGES;
  own.index += skipped;
  if (own.index >= L::STAGES) own.index -= L::STAGES, own.parity ^= 1;
  for (tiles -= skipped; tiles > 0; tiles -= 32 * EACH, position += 32 * EACH * TILE) {
    const int own_block = block_after, own_offset = position - divide(position, p.of_block_size) * p.block_size;
    if (tiles > 32 * EACH) block_after = block_at(p, table, position + 32 * EACH * TILE, end);
#pragma unroll 1
    for (int i = 0; i < 32 && i * EACH < tiles; ++i) {
      const int block = __shfl_sync(~0u, own_block, i), offset = __shfl_sync(~0u, own_offset, i);
      const u32 full = of_slot(shared + L::KEY_FULL, own), scales = shared + L::SCALE + own.index * TILE * 4;
      mbarrier_wait(of_slot(shared + L::KEY_FREE, own), own.parity ^ 1);
      if (block < 0) {
        for (int key = lane; key < TILE; key += 32) store_shared_float(scales + key * 4, -INFINITY);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(full);
      } else if (lane == 0) {
        mbarrier_arrive_expect(full, TILE * (RowOfFp8Index::BYTES + RowOfFp8Index::SCALE_BYTES));
        copy_box(shared + L::KEY + own.index * TILE_BYTES, p.keys, 0, offset, block, full, policy);
        bulk_copy(scales, p.cache + block * p.block_bytes + p.block_size * 128 + offset * 4, TILE * 4, full, policy);
      }
      __syncwarp();
      own.index += EACH;
      if (own.index >= L::STAGES) own.index -= L::STAGES, own.parity ^= 1;
    }
  }
}

// A tile has several blocks. Lane n has the n-th box of the tiles that it and the others go through together.
template <class L>
DEVICE void bring_boxes(const Params& p, u32 shared, int thread, int token, int end, int first_tile, int tiles,
                        Slot& slot, u64 policy) {
  const int lane = thread & 31, producer = thread >> 5;
  const int* table = table_of(p, token);
  const int boxes = 1 << p.boxes_log2, keys = TILE >> p.boxes_log2, together = 32 >> p.boxes_log2;
  const int box = lane & boxes - 1, turn = lane >> p.boxes_log2;
  int position = (first_tile + turn) * TILE + box * keys, block_after = block_at(p, table, position, end);
  for (; tiles > 0; tiles -= together, position += 32 * keys) {
    const int block = block_after, offset = position - divide(position, p.of_block_size) * p.block_size;
    const unsigned char* scales = p.cache + block * p.block_bytes + p.block_size * 128 + offset * 4;
    const u32 there = __ballot_sync(~0u, block >= 0);
    if (tiles > together) block_after = block_at(p, table, position + 32 * keys, end);
    for (int i = 0; i < min(tiles, together); ++i, next<L>(slot)) {
      if (L::PRODUCERS > 1 && slot.index % L::PRODUCERS != producer) continue;
      const u32 full = of_slot(shared + L::KEY_FULL, slot), scales_to = shared + L::SCALE + slot.index * TILE * 4;
      const int count = __popc(there >> (i << p.boxes_log2) & (1 << boxes) - 1);
      mbarrier_wait(of_slot(shared + L::KEY_FREE, slot), slot.parity ^ 1);
      if (count < boxes) {
        if (turn == i && block < 0)
#pragma unroll 1
          for (int key = 0; key < keys; ++key) store_shared_float(scales_to + (box * keys + key) * 4, -INFINITY);
        __syncwarp();
      }
      if (turn == i && box == 0)
        mbarrier_arrive_expect(full, count * keys * (RowOfFp8Index::BYTES + RowOfFp8Index::SCALE_BYTES));
      __syncwarp();
      if (turn == i && block >= 0) {
        copy_box(shared + L::KEY + slot.index * TILE_BYTES + box * keys * 128, p.keys, 0, offset, block, full, policy);
        bulk_copy(scales_to + box * keys * 4, scales, keys * 4, full, policy);
      }
    }
  }
}

// Four warps, a key of each sixteen for eight threads. Tiles that are on their way are those of the last LAG turns.
template <class L>
DEVICE void bring_anywhere(const Params& p, u32 shared, int thread, int token, int end, int first_tile, int tiles,
                           Slot& slot) {
  static_assert(LAG < L::STAGES, "a tile that is on its way keeps its slot");
  const int* table = table_of(p, token);
  const int chunk = thread % 8, lane = thread & 31;
  Slot arriving = slot;
  auto arrive = [&] {
    fence_async_shared();
    __syncwarp();
    warp_arrive(of_slot(shared + L::KEY_FULL, arriving), lane);
    next<L>(arriving);
  };
  int blocks[4], position = first_tile * TILE + thread / 8;
#pragma unroll
  for (int j = 0; j < 4; ++j) blocks[j] = block_at(p, table, position + j * 16, end);
  for (int i = 0; i < tiles; ++i, next<L>(slot)) {
    int blocks_after[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) blocks_after[j] = block_at(p, table, position + TILE + j * 16, end);
    mbarrier_wait(of_slot(shared + L::KEY_FREE, slot), slot.parity ^ 1);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int key = thread / 8 + j * 16, at = position + j * 16;
      const u32 scale = shared + L::SCALE + (slot.index * TILE + key) * 4;
      if (blocks[j] >= 0) {
        const int offset = at - divide(at, p.of_block_size) * p.block_size;
        const unsigned char* block = p.cache + blocks[j] * p.block_bytes;
        copy_16(shared + L::KEY + slot.index * TILE_BYTES + key * 128 + ((chunk ^ key & 7) << 4),
                block + offset * 128 + chunk * 16);
        if (chunk == 0) copy_4(scale, block + p.block_size * 128 + offset * 4);
      } else if (chunk == 0) {
        store_shared_float(scale, -INFINITY);
      }
      blocks[j] = blocks_after[j];
    }
    commit_copies();
    position += TILE;
    if (i >= LAG) {
      wait_for_copies_but<LAG>();
      arrive();
    }
  }
  wait_for_copies();
  for (int i = max(tiles - LAG, 0); i < tiles; ++i) arrive();
}

template <class L, Source SOURCE>
DEVICE void produce(const Params& p, u32 shared, Part part, bool few, Group groups, int first) {
  constexpr int tokens = L::TOKENS * L::CLUSTER, step = STEP<tokens, SOURCE>;
  const int before = blockIdx.x % L::CLUSTER * L::TOKENS;  // tokens of a group that other CTAs of the cluster have
  const int thread = threadIdx.x - L::FIRST_PRODUCER, lane = thread & 31;
  const bool leads = thread / 32 == L::PRODUCERS - 1;  // the warp whose first tile is needed last
  Slot slot = {0, 0};
  int stage = 0;
  u32 parity = 1;
  auto announce = [&](int token, int count, int first_tile, int tiles) {
    if (SOURCE == BOXES && !leads) return;
    mbarrier_wait(shared + L::QUERY_FREE + stage * 8, parity);
    if (leads && lane == 0) {
      store_shared_16(shared + L::GROUP + stage * 16, token, count, first_tile, tiles);
      mbarrier_arrive(shared + L::GROUP_FULL + stage * 8);
      if (tiles) {
        const u32 full = shared + L::QUERY_FULL + stage * 8;
        mbarrier_arrive_expect(full, L::QUERY_BYTES);
        if (!L::WHOLE) copy_box(shared + L::QUERY + stage * L::QUERY_BYTES, p.queries, 0, 0, token, full);
      }
    }
    __syncwarp();
    if (SOURCE == FLAT && leads && lane < L::TOKENS && token + lane < p.num_tokens)
      for (int line = 0; line < L::HEADS; line += 32) prefetch_to_l2(p.weights + (token + lane) * p.weights_stride + line);
    if (L::WHOLE && leads && tiles) {
      constexpr int EACH = L::HEADS / 2;  // boxes of four tokens
      copy_box(shared + L::QUERY + stage * L::QUERY_BYTES + lane * 1024, p.queries, 0, lane % EACH * 2,
               token + lane / EACH * 4, shared + L::QUERY_FULL + stage * 8);
    }
    if (++stage == QUERY_STAGES) stage = 0, parity ^= 1;
  };
  if (!few) first = part.token;
  // Keys that one group reads are not read again: what else is in L2 stays there, but for more scores than it holds.
  const bool once = p.num_tokens <= static_cast<i64>(p.num_requests) * L::TOKENS;
  const u64 policy = !once ? evict_normal() : part.total < FULL_L2 / L::TOKENS ? evict_first() : evict_unchanged();
  for (bool there = few; part.count; there = false, first += 32 * step) {
    if (!there) groups = group_at<tokens, SOURCE, SOURCE == FLAT ? 8 : tokens>(p, first + lane * step);
    u32 live = __ballot_sync(~0u, groups.units > 0);
    if (part.token > first) live &= ~0u << (part.token - first) / step;
    for (; live && part.count; live &= live - 1) {
      const int from = __ffs(live) - 1, token = first + from * step;
      const int count = __shfl_sync(~0u, groups.count, from), end = __shfl_sync(~0u, groups.end, from);
      int first_tile = __shfl_sync(~0u, groups.first_tile, from), tiles = __shfl_sync(~0u, groups.tiles, from);
      take_tiles<tokens, SOURCE>(p, part, first_tile, tiles);
      if (SOURCE == FLAT && tiles == 0) continue;
      announce(token + before, max(count - before, 1), first_tile, tiles);
      if (SOURCE == FLAT)
        bring_flat<L>(p, shared, lane, first_tile, tiles, slot);
      else if (SOURCE == BOXES && p.boxes_log2 == 0)
        bring_tiles<L>(p, shared, thread, token, end, first_tile, tiles, slot, policy);
      else if (SOURCE == BOXES)
        bring_boxes<L>(p, shared, thread, token, end, first_tile, tiles, slot, policy);
      else
        bring_anywhere<L>(p, shared, thread, token, end, first_tile, tiles, slot);
    }
  }
  launch_dependents();  // not before: what begins beside this launch would slow down its start
  announce(0, 0, 0, 0);
}

// ---- the consumers --------------------------------------------------------------------------------------------------

// Sums of four neighbouring lanes, (0 + 1) + (2 + 3) of each value; a lane is left with the quarter of them that its
// number names, low bit first, or with the only one.
template <int COUNT, int BIT = 1>
DEVICE void add_up(float* values, int lane) {
  if constexpr (COUNT == 1) {
    values[0] += __shfl_xor_sync(~0u, values[0], BIT);
  } else {
#pragma unroll
    for (int i = 0; i < COUNT / 2; ++i) {
      const bool upper = lane & BIT;
      const float sent = upper ? values[i] : values[i + COUNT / 2];
      values[i] = (upper ? values[i + COUNT / 2] : values[i]) + __shfl_xor_sync(~0u, sent, BIT);
    }
  }
  if constexpr (BIT == 1) add_up<(COUNT > 1 ? COUNT / 2 : 1), 2>(values, lane);
}

// A lane's scores of a tile: TOKENS tokens and ROWS keys, eight apart.
template <int TOKENS_, bool WHOLE>
struct Share {
  static constexpr int TOKENS = TOKENS_ / 4 > 1 ? TOKENS_ / 4 : 1, ROWS = TOKENS_ >= 4 ? 2 : 1;

  static DEVICE int token(int lane, int t) {
    if (WHOLE) return lane % 4 + 4 * t;
    return TOKENS_ >= 4 ? (lane & 1) * (TOKENS_ / 2) + (lane >> 1 & 1) * (TOKENS_ / 4) + t : TOKENS_ == 2 ? lane & 1 : 0;
  }
  static DEVICE int first_row(int lane) {
    return TOKENS_ >= 4 ? 0 : TOKENS_ == 2 ? lane >> 1 & 1 : lane & 1;
  }
  static DEVICE bool stores(int lane) { return TOKENS_ > 1 || (lane & 2) == 0; }
};

// Barriers of the slots that hold keys, of all CTAs that bring them.
template <class L>
struct FreeSlots {
  u32 barriers[L::CLUSTER];

  DEVICE explicit FreeSlots(u32 shared) {
#pragma unroll
    for (int rank = 0; rank < L::CLUSTER; ++rank)
      barriers[rank] = L::CLUSTER > 1 ? peer_address(shared + L::KEY_FREE, rank) : shared + L::KEY_FREE;
    if (L::CLUSTER > 1) hold(barriers);  // else they are made again for every tile
  }

  // This warp has read a slot's keys.
  DEVICE void release(const Slot& slot, int lane) const {
    if constexpr (L::CLUSTER == 1) {
      warp_arrive(of_slot(barriers[0], slot), lane);
    } else {
#pragma unroll
      for (int rank = 0; rank < L::CLUSTER; ++rank)
        if (arrives(lane)) mbarrier_arrive_peer(of_slot(barriers[rank], slot));
    }
  }
};

// Begins the products of a tile and a part of the queries.
template <int N>
DEVICE void multiply(float (&products)[N], u64 keys, u64 queries) {
  hold(products);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma_e4m3(products, keys + k * 2, queries + k * 2, k > 0);
  wgmma_commit();
}

// Whether no products were begun behind some.
struct Last {
  DEVICE constexpr operator bool() const { return true; }
};
struct Not {
  DEVICE constexpr operator bool() const { return false; }
};

// Sums of a part's tokens over this thread's heads, of two keys each.
template <class L>
DEVICE void weigh(const float (&products)[L::PART_COLUMNS / 2], const float* weights, float* sums) {
#pragma unroll
  for (int j = 0; j < L::HEADS / 4; ++j)
#pragma unroll
    for (int t = 0; t < L::PART_TOKENS; ++t)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int column = t * (L::HEADS / 4) + j;
        const float positive = positive_or_nan(products[column / 2 * 4 + r * 2 + column % 2]);
        float& sum = sums[t * 2 + r];
        sum = j ? __fmaf_rn(weights[column], positive, sum) : weights[column] * positive;
      }
}

// Sums of four, two apart, in the order of `add_up`; the first is left with it.
DEVICE void add_up_own(float* values) { values[0] = (values[0] + values[2]) + (values[4] + values[6]); }

// The same of a part of all heads of a thread's tokens: four sums each, of the heads that `weigh` gives four lanes.
template <class L>
DEVICE void weigh_whole(const float (&products)[L::PART_COLUMNS / 2], const float* weights, float* sums, int part) {
#pragma unroll
  for (int i = 0; i < L::PART_COLUMNS / 8; ++i)
#pragma unroll
    for (int c = 0; c < 2; ++c)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int of_tokens = (part * (L::PART_COLUMNS / 8) + i) * 2 + c, t = of_tokens / L::HEADS;
        const int head = of_tokens % L::HEADS;
        const float positive = positive_or_nan(products[i * 4 + r * 2 + c]), weight = weights[of_tokens];
        float& sum = sums[t * 8 + head % 8 / 2 * 2 + r];
        sum = head >= 8 || head % 2 ? __fmaf_rn(weight, positive, sum) : weight * positive;
        if (head == L::HEADS - 1) add_up_own(sums + t * 8 + r);
      }
}

// Stores a thread's scores.
template <class L, Source SOURCE>
struct Stored {
  using S = Share<L::TOKENS, L::WHOLE>;
  const Params& p;
  const u64 policy;
  float* rows[S::TOKENS];
  Bounds bounds[S::TOKENS];

  DEVICE explicit Stored(const Params& params)
      : p(params), policy(SOURCE != FLAT && params.keeps_scores ? evict_last() : evict_normal()) {}

  DEVICE void begin(const uint4& group, int lane) {
#pragma unroll
    for (int t = 0; t < S::TOKENS; ++t) {
      const int token = group.x, of_group = S::token(lane, t);
      bounds[t] = {0, 0};
      if (of_group < static_cast<int>(group.y) && S::stores(lane)) bounds[t] = bounds_of<SOURCE>(p, token + of_group);
      rows[t] = p.out + (token + of_group) * p.out_stride;
      hold(rows[t]);  // else it is computed for every score
    }
  }

  DEVICE void put(int t, int column, float score) const {
    const bool there = column >= bounds[t].start && column < bounds[t].end;
    if constexpr (SOURCE == FLAT)
      store_float_if(there, rows[t] + column, score);
    else
      store_float_if_by(policy, there, rows[t] + column, score);
  }
};

template <class L, Source SOURCE>
DEVICE void consume(const Params& p, u32 shared) {
  using S = Share<L::TOKENS, L::WHOLE>;
  const int lane = kept(threadIdx.x & 31), warpgroup = uniform(threadIdx.x >> 7) - L::FIRST_CONSUMER / 128;
  const int key = (threadIdx.x >> 5 & 3) * 16 + lane / 4 + S::first_row(lane) * 8;
  const u64 keys = tile_descriptor(shared + L::KEY, 1024, 16), queries = tile_descriptor(shared + L::QUERY, 1024, 16);
  Stored<L, SOURCE> stored(p);
  const FreeSlots<L> free_slots(shared);
  float even[L::PART_COLUMNS / 2], odd[L::PART_COLUMNS / 2], weights[L::COLUMNS / 4];
  Slot done = {warpgroup, 0}, ahead = done;  // slots whose products are summed up next, and begun next
  Slot& slot = L::SETS == 1 ? done : ahead;
  int turn = 0;   // tiles of the groups so far, modulo the warpgroups
  for (int stage = 0, parity = 0;;) {
    mbarrier_wait(shared + L::GROUP_FULL + stage * 8, parity);
    const uint4 group = load_shared_16(shared + L::GROUP + stage * 16);
    const int token = group.x;
    if (group.y == 0) return wait_for_prerequisites();
    constexpr int W = L::WARPGROUPS, STEP = SOURCE == FLAT ? -W * TILE : W * TILE;  // columns to the next own tile
    const int skipped = warpgroup - turn + (warpgroup < turn ? W : 0);              // the other warpgroups'
    // Flat keys: from the last tile to the first.
    const int first = SOURCE == FLAT ? static_cast<int>(group.w) - 1 - skipped : skipped;
    int column = (static_cast<int>(group.z) + first) * TILE + key;
    stored.begin(group, lane);
    if constexpr (L::WHOLE) {
#pragma unroll
      for (int t = 0; t < S::TOKENS; ++t) {
        const float* own = p.weights + min(token + S::token(lane, t), p.num_tokens - 1) * p.weights_stride;
        // With 64 heads ptxas makes a slower loop behind loads of four (docs/notes.md).
        if (L::HEADS == 32 && (reinterpret_cast<u64>(p.weights) | p.weights_stride * 4) % 16 == 0) {
#pragma unroll
          for (int head = 0; head < L::HEADS; head += 4) {
            const float4 four = __ldg(reinterpret_cast<const float4*>(own + head));
            float* const to = weights + t * L::HEADS + head;
            to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
          }
        } else {
#pragma unroll
          for (int head = 0; head < L::HEADS; ++head) weights[t * L::HEADS + head] = __ldg(own + head);
        }
      }
    } else {
#pragma unroll
      for (int t = 0; t < L::TOKENS; ++t) {
        const float* own = p.weights + min(token + t, p.num_tokens - 1) * p.weights_stride + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < L::HEADS / 4; ++j) weights[t * (L::HEADS / 4) + j] = __ldg(own + j / 2 * 8 + j % 2);
      }
    }
    int tiles = (group.w + W - 1 - skipped) / W;
    turn = (turn + group.w) % W;
    float sums[L::TOKENS * 2], scales[S::ROWS];
    const u64 own_queries = queries + stage * (L::QUERY_BYTES / 16);

    auto begin = [&](float(&products)[L::PART_COLUMNS / 2], int part) {
      if (part == 0) mbarrier_wait(of_slot(shared + L::KEY_FULL, slot), slot.parity);
      multiply(products, keys + static_cast<u32>(slot.index) * (TILE_BYTES / 16),
               own_queries + part * (L::PART_BYTES / 16));
      if (L::SETS == 2 && part == L::PARTS - 1) next_own<L>(ahead);
    };
    auto end = [&](float(&products)[L::PART_COLUMNS / 2], int part, auto last) {
      if (part == 0) {
#pragma unroll
        for (int r = 0; r < S::ROWS; ++r) {
          if (SOURCE != FLAT)
            scales[r] = load_shared_float(shared + L::SCALE + (done.index * TILE + key + r * 8) * 4);
          else
            scales[r] = p.k_scale && column + r * 8 < p.num_columns ? __ldg(p.k_scale + column + r * 8) : 1.f;
        }
      }
      wgmma_wait<last ? 0 : 1>();
      hold(products);
      if (part == L::PARTS - 1) {
        free_slots.release(done, lane);
        next_own<L>(done);
      }
      if constexpr (L::WHOLE)
        weigh_whole<L>(products, weights, sums, part);
      else
        weigh<L>(products, weights + part * (L::PART_COLUMNS / 4), sums + part * L::PART_TOKENS * 2);
      if (part < L::PARTS - 1) return;
      if constexpr (!L::WHOLE) add_up<L::TOKENS * 2>(sums, lane);
#pragma unroll
      for (int t = 0; t < S::TOKENS; ++t)
#pragma unroll
        for (int r = 0; r < S::ROWS; ++r) {
          float score = sums[L::WHOLE ? t * 8 + r : t * S::ROWS + r] * scales[r];
          if (SOURCE != FLAT && scales[r] == -INFINITY) score = -INFINITY;
          stored.put(t, column + r * 8, score);
        }
      column += STEP;
    };

    if ((stage | parity) == 0) wait_for_prerequisites();  // they may read what this launch writes over
    mbarrier_wait(shared + L::QUERY_FULL + stage * 8, parity);
    // The compiler has to see at every point which products are on their way.
    constexpr int PER_TURN = L::PARTS == 2 ? 1 : 2;  // tiles
    if constexpr (L::SETS == 1) {
      static_assert(L::PARTS == 1, "products that no others hide are made at one time");
      for (; tiles > 0; --tiles) begin(even, 0), end(even, 0, Last());
    } else if (tiles) {
      begin(even, 0);
      for (; tiles > PER_TURN; tiles -= PER_TURN) {
        begin(odd, L::PARTS - 1);
        end(even, 0, Not());
        begin(even, 0);
        end(odd, L::PARTS - 1, Not());
      }
      if (tiles == PER_TURN) {
        begin(odd, L::PARTS - 1);
        end(even, 0, Not());
        end(odd, L::PARTS - 1, Last());
      } else {
        end(even, 0, Last());
      }
    }
    __syncwarp();
    warp_arrive(shared + L::QUERY_FREE + stage * 8, lane);
    if (++stage == QUERY_STAGES) stage = 0, parity ^= 1;
  }
}

// ---- a CTA ----------------------------------------------------------------------------------------------------------

template <class L, Source SOURCE>
DEVICE void begin_barriers(const Params& p, u32 shared) {
  if (threadIdx.x == L::FIRST_CONSUMER) {  // lanes with addresses of their own would take turns
    constexpr u32 WARPS = ARRIVALS_OF_A_WARP;
    for (int stage = 0; stage < QUERY_STAGES; ++stage) {
      mbarrier_init(shared + L::GROUP_FULL + stage * 8, 1), mbarrier_init(shared + L::QUERY_FULL + stage * 8, 1);
      mbarrier_init(shared + L::QUERY_FREE + stage * 8, L::CONSUMERS / 32 * WARPS);
    }
    for (int slot = 0; slot < L::STAGES; ++slot) {
      mbarrier_init(shared + L::KEY_FULL + slot * 8, SOURCE == ANYWHERE ? GATHERERS * WARPS : 1);
      mbarrier_init(shared + L::KEY_FREE + slot * 8, 4 * L::CLUSTER * WARPS);
    }
    fence_barrier_init();
  }
  if (threadIdx.x == L::FIRST_CONSUMER + 32) prefetch_map(p.queries);
  if (threadIdx.x == L::FIRST_CONSUMER + 64 && SOURCE != ANYWHERE) prefetch_map(p.keys);
}

template <class L, Source SOURCE>
DEVICE void make_scores(const Params& p, u32 shared) {
  const bool brings = uniform(threadIdx.x >> 7) == L::FIRST_PRODUCER / 128;
  if (!brings) begin_barriers<L, SOURCE>(p, shared);
  __syncwarp();
  if (L::CLUSTER > 1) cluster_arrive();
  constexpr int tokens = L::TOKENS * L::CLUSTER, step = STEP<tokens, SOURCE>;
  const bool few = p.num_tokens <= 32 * FEW<tokens, SOURCE> * step;
  Part part = {0, 0, 0, 0};
  Group groups = {0, 0, 0, 0, 0};
  int first = 0, unused = 0;
  if (few) {
    if (brings && (SOURCE != FLAT || threadIdx.x < L::FIRST_PRODUCER + 32))
      part = part_of_few<tokens, SOURCE>(p, threadIdx.x & 31, blockIdx.x / L::CLUSTER, gridDim.x / L::CLUSTER, groups,
                                         first);
    else if (!brings)
      unused = prefetch_rows<L, SOURCE, true>(p);
    __syncthreads();
    if (static_cast<u32>(unused) == 1u << 31) store_shared_4(shared + L::TOTALS, unused);  // else none would be loaded
  } else {
    part = part_of_many<L, SOURCE>(p, shared);
    if (part.count == 0) {
      if (L::CLUSTER > 1) cluster_wait();
      return wait_for_prerequisites();
    }
  }
  if (L::CLUSTER > 1) cluster_wait();  // all have their barriers
  if (brings) {
    if (L::SETS == 2) fewer_registers<SOURCE == FLAT ? 40 : 72>();
    if (SOURCE == ANYWHERE || threadIdx.x < L::FIRST_PRODUCER + 32 * L::PRODUCERS)
      produce<L, SOURCE>(p, shared, part, few, groups, first);
  } else {
    if (L::SETS == 2) more_registers<SOURCE == FLAT ? 232 : 216>();
    consume<L, SOURCE>(p, shared);
  }
  if (L::CLUSTER > 1) cluster_meet();  // no CTA leaves while another one copies to it or arrives at its barriers
}
