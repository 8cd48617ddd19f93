// Warps of a CTA of `indexer_logits.cu` that bring keys, and queries with the first.
#pragma once

#include "indexer_layout.cuh"

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
