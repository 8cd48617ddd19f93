// Shared memory of rows in slices (`slices.cuh`), and what its warpgroups share.
#pragma once

#include "layout.cuh"

constexpr int MOST_TURNS_IN_SLICES = 34;  // of a row: 2,048 keys and 128 of a second cache

template <int SLOTS>
DEVICE int slot_of(int first, int key) {
  const int slot = first + key / 16;
  return slot < SLOTS ? slot : slot - SLOTS;
}

// A warp has left a turn's four slots. One thread says so of one after the other: who waits for a slot by the parity of its
// barrier knows that the other phase of this parity is long over, since the slot that it took before was freed later.
template <int SLOTS>
DEVICE void free_turn(u32 barriers, int first, int lane) {
  if (lane == 0)
#pragma unroll
    for (int i = 0; i < 4; ++i) mbarrier_arrive(barriers + slot_of<SLOTS>(first, i * 16) * 8);
}

// CHUNKS of 64 dims are a CTA's slice, 0: half of one; the last CTA of three has two.
template <int CHUNKS, Format FORMAT>
struct Slices {
  using L = Layout<64, FORMAT>;  // queries, columns and alpha lie where it has them
  using R = Rows<FORMAT>;
  static constexpr int DIMS = CHUNKS ? CHUNKS * 64 : 32, CTAS = (512 + DIMS - 1) / DIMS;
  static constexpr int PLACES = CHUNKS == 4 ? 3 : CHUNKS == 3 ? 3 : CHUNKS == 2 ? 5 : 6;  // turns whose weights there is room for
  // Rings of slots of 16 keys.
  static constexpr int VALUE_SLOTS = CHUNKS == 4 ? 6 : CHUNKS == 3 ? 8 : CHUNKS == 2 ? 8 : CHUNKS == 1 ? 12 : 16, SLOTS = 6;
  static constexpr bool OVERLAPS = VALUE_SLOTS >= 8;  // products of a turn begin before those of the last one end
  static constexpr int VALUE_SLOT = DIMS * 32, RAW_SLOT = L::RAW_SLOT;
  // In place of the weights of `Layout`: what `raise_references` needs, what comes from other CTAs, the list of live keys.
  static constexpr int DESK = L::WEIGHTS;
  static constexpr int REFERENCES = DESK + 1280, FINAL = REFERENCES + 272, COUNTS = FINAL + 256, LIVE = COUNTS + 16;
  static constexpr int BARRIERS = LIVE + 32;
  static constexpr int RAW_FULL = BARRIERS, RAW_FREE = RAW_FULL + SLOTS * 8, VALUES_FULL = RAW_FREE + SLOTS * 8,
                       VALUES_FREE = VALUES_FULL + VALUE_SLOTS * 8, WEIGHTS_FULL = VALUES_FREE + VALUE_SLOTS * 8,
                       OWN_FULL = WEIGHTS_FULL + PLACES * 8,  // one of each warp that publishes
                       LIST_FULL = OWN_FULL + 4 * 8, OWN_FREE = LIST_FULL + 8,
                       REFERENCES_FULL = OWN_FREE + 8, FINAL_FULL = REFERENCES_FULL + 8, PUBLISHED = FINAL_FULL + 8,
                       NUM_BARRIERS = (PUBLISHED - BARRIERS) / 8 + MOST_TURNS_IN_SLICES;
  static constexpr int LIST = BARRIERS + NUM_BARRIERS * 8;  // u16: positions of live keys, those of the second cache behind
  static_assert(LIST + MOST_TURNS_IN_SLICES * 128 <= DESK + 8192, "the desk is full");
  static constexpr int OWN = L::VALUES, WEIGHTS = OWN + 8192, VALUES = WEIGHTS + PLACES * 8192,
                       RAW = VALUES + VALUE_SLOTS * VALUE_SLOT, END = RAW + SLOTS * RAW_SLOT;
  static constexpr int BEHIND = L::ALPHA + 256;
  static constexpr int SCALES = R::SCALES_APART ? BEHIND : RAW + R::SCALES_AT;
  static constexpr int SCALES_SLOT = R::SCALES_APART ? 16 * R::SCALES_PITCH : RAW_SLOT;
  static constexpr int BYTES = R::SCALES_APART ? SCALES + SLOTS * SCALES_SLOT : BEHIND;
  static_assert(END <= L::COLUMNS, "rings overlap the columns");
  static_assert(BYTES <= 232448, "more shared memory than an SM has");
};

// This cluster's row, whole. `again`: made anew where it is needed once, else it stays in registers of all turns.
DEVICE Row whole_row(const Params& p, bool again = false) {
  int token = token_of(p);
  if (again) hold(token);
  return row_of(p, token, cluster_index(p), 0, 1, 0);
}

// A turn's record in memory: weights as float16, as wgmma reads them, and as float32 of 8 heads, 128 threads' 16 bytes.
// Behind a row's records a word of each turn, and one of the row: whether it can not be taken in slices.
constexpr int RECORD = 8192 + 8 * 2048, RECORDS = MOST_TURNS_IN_SLICES * RECORD + 256;

DEVICE unsigned char* record_of(const Params& p, int turn, int tile) {
  const i64 number = static_cast<i64>(token_of(p)) * p.head_tiles + tile;
  return p.exchange + number * RECORDS + turn * RECORD;
}

DEVICE unsigned char* record_of(const Params& p, int turn) { return record_of(p, turn, cluster_index(p)); }

DEVICE u32* refused_turns(const Params& p) { return reinterpret_cast<u32*>(record_of(p, MOST_TURNS_IN_SLICES)); }

// Whether the row can not.
DEVICE u32* is_refused(const Params& p, int tile) {
  return reinterpret_cast<u32*>(record_of(p, MOST_TURNS_IN_SLICES, tile)) + MOST_TURNS_IN_SLICES;
}
