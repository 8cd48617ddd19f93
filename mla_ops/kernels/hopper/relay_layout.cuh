// Shared memory of a relay (`relay.cuh`), and what its warpgroups share.
#pragma once

#include "layout.cuh"

constexpr int MOST_TURNS_OF_RELAY = 34;  // of a row: 2,048 keys and 128 of a second cache

// CHUNKS of 64 dims are a CTA's slice; the last CTA of three has two.
template <int CHUNKS, Format FORMAT>
struct Relay {
  using L = Layout<64, FORMAT>;  // queries, columns and alpha lie where it has them
  using R = Rows<FORMAT>;
  static constexpr int CTAS = (8 + CHUNKS - 1) / CHUNKS;
  static constexpr int PLACES = CTAS < 4 ? CTAS : 4;  // turns whose weights there is room for
  // Sums of weights go from CTA to CTA, or, where these are many and would wait for one another, each CTA adds up those of
  // some heads, whose weights come as float32 as well.
  static constexpr bool SPREAD = CTAS > 4;
  // Rings of slots of 16 keys.
  static constexpr int VALUE_SLOTS = CHUNKS == 4 ? 6 : CHUNKS == 3 ? 7 : CHUNKS == 2 ? 8 : 12;
  static constexpr int SLOTS = CHUNKS == 1 || FORMAT == FP8_DS_MLA_V4 && CHUNKS != 3 ? 8 : 7;
  static constexpr int VALUE_SLOT = CHUNKS * 2048, RAW_SLOT = L::RAW_SLOT;
  // In place of the weights of `Layout`: what `raise_references` needs, what comes from other CTAs, the list of live keys.
  static constexpr int DESK = L::WEIGHTS;
  static constexpr int REFERENCES = DESK + 1280, FINAL = REFERENCES + 272;
  static constexpr int FINAL_BYTES = 512;  // sums and references of all heads
  static constexpr int HEAD = 272, HEADS_OF_PLACES = FINAL + FINAL_BYTES;  // of a place: alpha, a float a head, and the turn
  static constexpr int COUNTS = HEADS_OF_PLACES + PLACES * HEAD;   // live keys that each gathering warp found
  static constexpr int LIVE = COUNTS + 16;
  static constexpr int BARRIERS = LIVE + 32;
  static constexpr int RAW_FULL = BARRIERS, RAW_FREE = RAW_FULL + SLOTS * 8, VALUES_FULL = RAW_FREE + SLOTS * 8,
                       VALUES_FREE = VALUES_FULL + VALUE_SLOTS * 8, WEIGHTS_FULL = VALUES_FREE + VALUE_SLOTS * 8,
                       OWN_FULL = WEIGHTS_FULL + PLACES * 8, LIST_FULL = OWN_FULL + 8, PLACE_FREE = LIST_FULL + 8,
                       REFERENCES_FULL = PLACE_FREE + 8, SUMS_FULL = REFERENCES_FULL + 8, FINAL_FULL = SUMS_FULL + 8,
                       NUM_BARRIERS = (FINAL_FULL + 8 - BARRIERS) / 8;
  static constexpr int LIST = FINAL_FULL + 8;  // u16: positions of live keys, those of the second cache behind
  static_assert(LIST + MOST_TURNS_OF_RELAY * 128 <= DESK + 8192, "the desk is full");
  static constexpr int WEIGHTS_BYTES = 8192 + HEAD + (SPREAD ? 2048 : 0);  // from another CTA, a turn
  static constexpr int WEIGHTS = L::VALUES, VALUES = WEIGHTS + PLACES * 8192,
                       RAW = VALUES + VALUE_SLOTS * VALUE_SLOT, END = RAW + SLOTS * RAW_SLOT;
  static constexpr int BEHIND = L::ALPHA + 256;
  // Sums of the turn before, float [4, 128, 4]; spread, of each place 16 bytes of each thread that made weights.
  static constexpr int SUMS = R::SCALES_APART ? BEHIND : (END + 15) / 16 * 16;
  static constexpr int SCALES = R::SCALES_APART ? SUMS + 8192 : RAW + R::SCALES_AT;
  static constexpr int SCALES_SLOT = R::SCALES_APART ? 16 * R::SCALES_PITCH : RAW_SLOT;
  static constexpr int BYTES = R::SCALES_APART ? SCALES + SLOTS * SCALES_SLOT : BEHIND;
  static_assert((R::SCALES_APART ? END : SUMS + 8192) <= L::COLUMNS, "rings overlap the columns");
  static_assert(BYTES <= 232448, "more shared memory than an SM has");
};

// This cluster's row, whole. `again`: made anew where it is needed once, else it stays in registers of all turns.
DEVICE Row whole_row(const Params& p, bool again = false) {
  int token = token_of(p);
  if (again) hold(token);
  return row_of(p, token, cluster_index(p), 0, 1, 0);
}

// The number of a CTA's table of wide weights, float32 [64 keys, 64 heads].
DEVICE float* wide_table_of(const Params& p, const Row& row, int ctas, int rank) {
  return reinterpret_cast<float*>(p.exchange) + ((static_cast<i64>(row.token) * p.head_tiles + row.tile) * ctas + rank) * 4096;
}
