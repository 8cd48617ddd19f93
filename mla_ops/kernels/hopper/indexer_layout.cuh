// Shared memory and warps of a CTA of `indexer_logits.cu`.
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
