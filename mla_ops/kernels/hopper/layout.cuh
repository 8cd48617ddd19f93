// The warpgroups of `sparse_attention.cu` share these: parameters, the plan of shared memory, a CTA's part of the work.
#pragma once

#include "divide.cuh"
#include "formats.cuh"

#ifndef BY_LENGTH
#define BY_LENGTH 0  // 1: each row may have as many CTAs as its length asks for
#endif
#if BY_LENGTH
#include "row_ctas.cuh"
#endif

// A paged cache.
struct Cache {
  const unsigned char* rows;  // [num_blocks, block_bytes]
  const int* block_table;     // [num_requests, max_blocks]; null: indices are slots
  i64 block_bytes, table_stride;
  int num_blocks, block_size, num_indices, num_requests;  // indices below num_indices name a block
  Divisor of_block_size;
};

// Fields are in the order in which a CTA needs them. Constant memory comes in lines of 64 bytes, and the struct begins
// with the last 48 of one. At the start of a kernel the first line takes 600 cycles, each further one 75.
struct Params {
  int num_tokens, head_tiles;
  int parts;  // a row's keys are so many parts, a cluster of CTAs each
  int splits, rows;  // CTAs of a cluster or group, the grid's rows
  int all_tokens, tokens_before;  // of the whole call, and those of its launches before this one
  int workers;                    // so many may share all rows evenly instead (`balance.cuh`); 0: rows are as the shape says
  Divisor of_splits, of_parts, of_head_tiles;
  // The keys of a token in each cache; the second's topk is 0 if there is no second cache.
  const int* topk_length[2];  // [num_tokens]; null: topk
  const int* indices[2];      // [num_tokens, topk]; null: every position
  i64 indices_stride[2];
  int topk[2];
  float longest, margin;        // numbers of the whole call, by which `is_balanced` chooses one of the two ways
  const int* req_id_per_token;  // [num_tokens]; null without a block table
  Cache caches[2];
  const u16 *q, *q_rope;  // [num_tokens, num_heads, 512] and [num_tokens, num_heads, 64 or 0]
  i64 q_token_stride, q_head_stride, q_rope_token_stride, q_rope_head_stride;
  int num_heads;
  float scale_log2;
  const float* attn_sink;  // [num_heads]; null: none
  float* lse;  // [num_tokens, num_heads]
  u16* out;    // [num_tokens, num_heads, 512]
  i64 lse_token_stride, lse_head_stride, out_token_stride, out_head_stride;
  // Several parts of rows: [parts, num_tokens, num_heads, 512] and [parts, num_tokens, num_heads].
  float *parts_out, *parts_lse;
  // Room for what CTAs of groups and workers leave. `RowCounters` for each row of a group, `SharersCounters` for each
  // CTA of a worker, all 0 before and after.
  unsigned char* exchange;
  u32* counters;
  // A row has so many, of which a CTA may take several (`shares.cuh`); 0: bits may depend on the launch.
  int shares;
};

constexpr int MOST_SHARES = 16;  // a row has no more

// Who works on a row: a CTA that takes one row after the other; a cluster; a group, CTAs of no cluster that meet in L2;
// workers, of which each has an even share of all keys (`balance.cuh`); CTAs that take one share of a row after the
// other (`shares.cuh`); one CTA that takes all of them and keeps their sum in registers (`folds.cuh`); or a cluster whose
// CTAs keep several in registers (`held.cuh`), with one warpgroup of scores where two would add up a score in two parts:
// tiles of 16 heads then have the bits of tiles of 32. MANY_ROWS: as ROWS, with turns by group.
enum class Launch { ROWS, CLUSTERS, GROUPS, BALANCED, SHARES, FOLDS, HELD, HELD_BY_ONE, MANY_ROWS };

// Whether a CTA takes one row, or piece or share of one, after the other.
DEVICE constexpr bool is_persistent(Launch launch) { return launch != Launch::CLUSTERS && launch != Launch::GROUPS; }

DEVICE constexpr bool is_held(Launch launch) { return launch == Launch::HELD || launch == Launch::HELD_BY_ONE; }

DEVICE constexpr bool in_registers(Launch launch) { return launch == Launch::FOLDS || is_held(launch); }

DEVICE constexpr bool in_shares(Launch launch) { return launch == Launch::SHARES || in_registers(launch); }

// Whether clusters and groups have a gather that is made for few tokens, as `produce` says. Tiles of 24 heads lose 1 % by it,
// those of 32 of V4 spill.
DEVICE constexpr bool is_for_few(int heads, Format format) {
  return !BY_LENGTH && heads != 24 && !(heads == 32 && format == FP8_DS_MLA_V4);
}

// One warpgroup makes all scores if registers have to hold more.
template <int HEADS, Launch LAUNCH>
constexpr bool ONE_SCORER = HEADS == 64 || HEADS == 32 && in_registers(LAUNCH) || LAUNCH == Launch::HELD_BY_ONE;

// Warpgroups: one or two for scores, two for values, one for the gather.
template <int HEADS, Launch LAUNCH>
constexpr int THREADS_OF = ONE_SCORER<HEADS, LAUNCH> ? 512 : 640;

constexpr int TILE_KEYS = 64;                    // keys of a turn
constexpr int HALF_BYTES = TILE_KEYS * 256 * 2;  // bytes of half of a turn's values
// Weights may reach 2^15 before the softmax's running maximum moves; the largest is 2^7 or more then, and below 2^8. float16
// holds whole numbers of 11 bits down to 2^-14, so a key may count 2^-21 of what another does and lose nothing.
constexpr float RESCALE_THRESHOLD = 15.f, RAISED_TO = 7.f;
constexpr float NO_SCORE_YET = -1.2676506e30f;

constexpr int SCORE_BARRIER = 1, QUERY_BARRIER = 2, STATES_BARRIER = 3, STATES_HERE_BARRIER = 4, VALUES_BARRIER = 5,
              GATHER_BARRIER = 8;

// BY_GROUP: this turn and the row's later ones (`by_group.cuh`); with running maxima that moved, too. EMPTY: a row without keys.
enum Turn { USUAL = 0, MOVED = 1, WIDE = 2, BY_GROUP = 3, BY_GROUP_MOVED = 4, EMPTY = 5 };

constexpr u32 LAST_TURN = 1 << 16;  // flag beside the bits that say which keys count, or beside a `Turn`
constexpr u32 NO_KEYS = LAST_TURN << 1;  // beside LAST_TURN: of a share over bfloat16, else of a row, without keys

constexpr int SPLITS[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 16};  // CTAs of a cluster

// The most packets that a CTA gets, of `count` that each CTA of its cluster has.
constexpr int packets_room(int count) {
  int most = 0;
  for (int splits : SPLITS) {
    const int packets = (count + splits - 1) / splits * splits;
    if (packets > most) most = packets;
  }
  return most;
}

// Each CTA of a cluster adds up its share of all packets at the end of a row. A packet has QUADS times four
// accumulators of each lane of one of the eight warps that accumulate. Packet 8 u + w is the u-th of warp w; packet n
// goes to CTA n modulo the number of CTAs. PACKED: accumulators are 16 bits each, averages over a CTA's keys instead of sums.
template <int HEADS, bool PACKED_>
struct Packets {
  static constexpr bool PACKED = PACKED_;
  static constexpr int QUADS = HEADS < 64 ? 1 : PACKED ? 4 : 2;
  static constexpr bool ONE_HEAD = HEADS == 64 && PACKED;       // a lane has 16 neighbouring dims; else two heads
  static constexpr int WORDS = PACKED ? QUADS * 2 : QUADS * 4;  // words of a lane
  static constexpr int UNIT = WORDS < 4 ? WORDS : 4;            // words that lie together
  static constexpr int BYTES = WORDS * 128;
  static constexpr int OF_A_WARP = HEADS / 2 / QUADS;
  static constexpr int COUNT = 8 * OF_A_WARP;
  static constexpr int ROOM = packets_room(COUNT) * BYTES;
};

// These take the place of the queries after the last turn.
template <int HEADS, int QUERY>
struct Ends {
  static constexpr int FACTORS = QUERY;                      // float32 [16, HEADS]: weight of each CTA's part
  static constexpr int STATES = FACTORS + HEADS * 64;        // float2 [16, HEADS]: sum and running maximum from each CTA
  static constexpr int SUMS = STATES + HEADS * 128;          // float32 [4, HEADS]: sum of each warp of scores
  static constexpr int INVERSES = SUMS + HEADS * 16;         // float32 [HEADS]: 1 over the total of these
  static constexpr int WEIGHTS = INVERSES + HEADS * 4;       // float32 [HEADS]: weight of the result
  // A group's CTA: whether it has all states, and a bit for each share of the result that it adds up.
  static constexpr int COMPLETE = WEIGHTS + HEADS * 4, SHARES = COMPLETE + 4;
  // Whether this CTA's packets are bfloat16; whether no CTA's are.
  static constexpr int OWN_BFLOAT16 = SHARES + 4, ALL_FLOAT16 = OWN_BFLOAT16 + 4;
};

template <int HEADS_, Format FORMAT>
struct Layout {
  static constexpr int HEADS = HEADS_;
  using R = Rows<FORMAT>;
  static constexpr float FACTOR = R::FACTOR;
  static constexpr bool PERMUTED = true;  // dims, see `dim_of_row`
  static constexpr bool WHOLE_RUNNING_MAX = true;
  static constexpr int THREADS = HEADS == 64 ? 512 : 640;  // where shares are not in registers
  // Registers of a thread, by role; they add up to what the launch gives.
  static constexpr int GATHER_REGISTERS = HEADS == 64 && FORMAT == FP8_DS_MLA ? 24 : 32;
  static constexpr int SCORE_REGISTERS = HEADS == 64 ? 192 - GATHER_REGISTERS : HEADS == 32 ? 112 : 144;
  static constexpr int REST_REGISTERS = 112;
  static constexpr int VALUE_REGISTERS = HEADS == 64 ? 160 : HEADS == 32 ? 112 : 96;
  // Rings with as many entries as fit: halves of a turn's values, 256 dims each; slots of raw rows, 16 rows of a warp
  // each, four a turn; a second warpgroup's scores of a turn.
  static constexpr int HALVES = HEADS == 64 ? 2 : 3;
  static constexpr int SLOTS = HEADS == 16 ? 18 - R::CHUNKS : 8;
  static constexpr int SCORE_SLOTS = HEADS == 32 ? 1 : 2;
  static constexpr int QUERY = 0;
  static constexpr int QUERY_CHUNK = HEADS * 128;
  static constexpr int WEIGHTS = QUERY + R::CHUNKS * QUERY_CHUNK;
  static constexpr int VALUES = WEIGHTS + HEADS * 128;
  static constexpr int RAW = VALUES + HALVES * HALF_BYTES;
  static constexpr int RAW_SLOT = 16 * R::BYTES;
  static constexpr int COLUMNS =
      RAW + SLOTS * RAW_SLOT;  // float2 a head: factor and running maximum, at the end the factor of the result
  static constexpr int ALPHA = COLUMNS + HEADS * 8;  // float a head
  static constexpr int LIVE = ALPHA + HEADS * 4;     // u32 a slot: which of its 16 keys count
  // Scales of a slot's keys lie in their rows, or beside them.
  static constexpr int SCALES = (R::SCALES_APART ? LIVE + SLOTS * 4 : RAW) + R::SCALES_AT;
  static constexpr int SCALES_SLOT = 16 * R::SCALES_PITCH;
  static constexpr int TURN = LIVE + SLOTS * 4 + (R::SCALES_APART ? SLOTS * SCALES_SLOT : 0);
  // With 64 heads, of a row that is shared evenly: whether its parts have to be bfloat16.
  static constexpr int ROUGH = TURN + 4;
  static constexpr int BARRIERS = (TURN + (HEADS == 64 ? 8 : 4) + 7) / 8 * 8;
  static constexpr int RAW_FULL = BARRIERS;
  static constexpr int RAW_FREE = RAW_FULL + SLOTS * 8;
  static constexpr int WEIGHTS_FULL = RAW_FREE + SLOTS * 8;
  static constexpr int VALUES_FREE = WEIGHTS_FULL + 8;               // one barrier for each 128 dims
  static constexpr int FACTORS_FULL = VALUES_FREE + 2 * HALVES * 8;  // factors of a row; in a cluster the inverses
  static constexpr int FACTORS_FREE = FACTORS_FULL + 8;
  static constexpr int STATES_FULL = FACTORS_FREE + 8;  // clusters only
  static constexpr int PACKETS_FULL = STATES_FULL + 8;
  static constexpr int WEIGHTS_FREE = PACKETS_FULL + 8;  // up to 32 heads; with 64 heads VALUES_FREE says it
  static constexpr int OWN_FULL = WEIGHTS_FREE + 8;
  // The next row's queries, where rows of 64 heads follow one another, and so are in no cluster.
  static constexpr int QUERIES_FREE = STATES_FULL, QUERIES_FULL = PACKETS_FULL;
  // CTAs of a cluster that take several shares meet here: all have left their parts of a row.
  static constexpr int MEETING = OWN_FULL;
  // Barriers of a group: all warps have left what the others need; it is known which shares this CTA adds up.
  static constexpr int ALL_LEFT = PACKETS_FULL, SHARES_KNOWN = STATES_FULL;
  static constexpr int SCORES_FULL = OWN_FULL + 8;
  static constexpr int SCORES_FREE = SCORES_FULL + SCORE_SLOTS * 8;
  static constexpr int NUM_BARRIERS = ((HEADS == 64 ? SCORES_FULL : SCORES_FREE + SCORE_SLOTS * 8) - BARRIERS) / 8;
  static constexpr int SCORES = (SCORES_FREE + SCORE_SLOTS * 8 + 15) / 16 * 16;  // float32 [SCORE_SLOTS, 64, HEADS]
  // The interval of a balanced CTA. With 64 heads, which take all memory, it lies in place of two unused barriers.
  static constexpr int INTERVAL = HEADS == 64 ? WEIGHTS_FREE : SCORES + SCORE_SLOTS * HEADS * 256;
  // One CTA's shares of a row (`folds.cuh`): of the last one float4 [HEADS] and float [4, HEADS], sums of each warp; of
  // all up to now float [HEADS], running maxima, or a number; float2 [MOST_SHARES, HEADS], sums and running maxima.
  // With 32 heads, where one warpgroup makes all scores, in place of a second one's.
  static constexpr int FOLD = HEADS == 32 ? SCORES : INTERVAL + 16, FOLD_SUMS = FOLD + HEADS * 16,
                       FOLD_TOPS = FOLD_SUMS + HEADS * 16, FOLD_STATES = FOLD_TOPS + HEADS * 4;
  static constexpr int BYTES = HEADS == 64   ? SCORES_FULL
                               : HEADS == 16 ? FOLD_STATES + MOST_SHARES * HEADS * 8
                                             : INTERVAL + 16;
  static_assert(HEADS != 32 || FOLD_STATES + MOST_SHARES * HEADS * 8 <= INTERVAL, "shares overlap the interval");
  using End = Ends<HEADS, QUERY>;
  static constexpr int PACKETS = RAW;  // free once the last weights are there
  // The place for packets of shares that were held, and how many shares a CTA takes at most. 32 heads need the place of
  // the values, too, which is free once products have left it.
  static constexpr int HELD_PACKETS = HEADS == 32 ? VALUES : RAW, MOST_OF_A_CTA = HEADS == 32 ? 3 : 4;
  using Packet = Packets<HEADS, true>;
  static_assert(PACKETS + Packet::ROOM <= COLUMNS, "packets overlap the columns");
  static_assert(BYTES <= 232448, "more shared memory than an SM has");
};

struct Row {
  int token, tile, rank, splits, part;
  int length, extra_length, main_turns;  // keys in each cache; turns of the first, which the second's follow
  int first, stride, last;               // this CTA's turns: every `stride`-th one from the first on
};

// Turns of a token's keys in a cache, or in both.
DEVICE int turns_of(int topk, const int* lengths, int token) {
  int length = topk;
  if (lengths) length = max(0, min(length, __ldg(lengths + token)));
  return (length + TILE_KEYS - 1) / TILE_KEYS;
}

DEVICE int turns_of(const Params& p, int which, int token) {
  return turns_of(p.topk[which], p.topk_length[which], token);
}

DEVICE int turns_of(const Params& p, int token) { return turns_of(p, 0, token) + turns_of(p, 1, token); }

DEVICE int length_in(const Params& p, int which, int token) {
  if (token >= p.all_tokens - p.tokens_before) return 0;
  if (!p.topk_length[which]) return p.topk[which];
  return uniform(max(0, min(p.topk[which], __ldg(p.topk_length[which] + token))));
}

// A CTA's part of a token and a tile of its heads; no turns past the call's last token.
DEVICE Row row_of(const Params& p, int token, int tile, int part, int splits, int rank) {
  Row row;
  row.splits = splits, row.rank = rank;
  row.token = token, row.tile = tile, row.part = part;
  row.length = length_in(p, 0, row.token), row.extra_length = length_in(p, 1, row.token);
  row.main_turns = (row.length + TILE_KEYS - 1) / TILE_KEYS;
  row.last = row.main_turns + (row.extra_length + TILE_KEYS - 1) / TILE_KEYS;
  row.first = part * splits + rank, row.stride = splits > 1 ? splits * p.parts : 1;
  return row;
}

// This cluster's row: `item` of the token's tiles and parts.
DEVICE Row clusters_row(const Params& p, int token, int item, int rank) {
  const int tile = divide(item, p.of_parts);
  return row_of(p, token, tile, item - tile * p.parts, p.splits, rank);
}

DEVICE int cluster_index(const Params& p) { return divide(blockIdx.x, p.of_splits); }

DEVICE int token_of(const Params& p) { return blockIdx.z * p.rows + blockIdx.y; }

#if BY_LENGTH
// This CTA's part of a row: as the launch's shape says, or its part is its number, or its cluster's where `Params::longest`
// is 0, of `Params::parts`.
DEVICE Row row_by_length(const Params& p) {
  const bool of_clusters = p.longest == 0.f;
  const int lane = lane_here(), turns = lane < p.num_tokens ? turns_of(p, lane) : 0, cluster = token_of(p),
            tile = cluster_index(p), rank = cluster_rank(), number = of_clusters ? cluster : cluster * p.splits + rank,
            splits = of_clusters ? p.splits : 1;
  const CtasOfRow own = ctas_by_length(turns, p.num_tokens, p.parts, splits, p.longest, p.margin, lane);
  if (own.by_shape) {
    Row row = row_of(p, cluster, tile, 0, p.splits, rank);
    row.part = -1, row.stride = p.splits;
    return row;
  }
  // By reductions, whose results ptxas knows to be the same in all lanes.
  const bool mine = own.first <= number && number < own.first + own.count;
  const int owner = __reduce_max_sync(~0u, mine ? lane : -1), first = __reduce_max_sync(~0u, mine ? own.first : 0),
            count = __reduce_max_sync(~0u, mine ? own.count : 1);
  Row row = row_of(p, owner < 0 ? p.num_tokens : owner, tile, 0, splits, of_clusters ? rank : 0);
  row.part = number, row.first = (number - first) * splits + row.rank, row.stride = count * splits;
  return row;
}
#endif

template <Launch LAUNCH = Launch::CLUSTERS>
DEVICE Row this_row(const Params& p) {
#if BY_LENGTH
  if constexpr (LAUNCH == Launch::CLUSTERS) return row_by_length(p);
#endif
  const int item = cluster_index(p);
  return clusters_row(p, token_of(p), item, LAUNCH == Launch::GROUPS ? blockIdx.x - item * p.splits : cluster_rank());
}

// Whether a cluster's CTAs share its row, and merge what they have of it.
DEVICE bool in_cluster(const Row& row) { return !BY_LENGTH || row.splits > 1; }

// Whether a CTA of 64 heads has a part of its row alone, which it leaves in memory as 16-bit averages (`merge_units.cu`).
template <int HEADS>
DEVICE bool leaves_units(const Row& row) {
  return BY_LENGTH && HEADS == 64 && !in_cluster(row);
}

// This CTA's rank among those that share its row, read anew: else it would take a register of all turns.
DEVICE int rank_here(const Row& row) { return in_cluster(row) ? cluster_rank_here() : 0; }

// Row `item` of all tokens and tiles, for CTAs that take one row after the other.
DEVICE Row row_at(const Params& p, int item) {
  const int token = divide(item, p.of_head_tiles);
  return row_of(p, token, item - token * p.head_tiles, 0, 1, 0);
}

DEVICE Row next_row(const Params& p, const Row& row) {
  return row_at(p, row.token * p.head_tiles + row.tile + gridDim.x);
}

// A share of a row: the keys that a CTA of a cluster of `p.shares` would have.
DEVICE Row share_at(const Params& p, int item, int share) {
  const int token = divide(item, p.of_head_tiles);
  return row_of(p, token, item - token * p.head_tiles, 0, p.shares, share);
}

template <Launch LAUNCH>
DEVICE Row first_share(const Params& p) {
  if constexpr (LAUNCH == Launch::FOLDS) return share_at(p, blockIdx.x, 0);
  if constexpr (is_held(LAUNCH))
    return row_of(p, token_of(p), cluster_index(p), 0, p.shares, cluster_rank());
  return share_at(p, cluster_index(p), cluster_rank());
}

DEVICE bool begins_row(const Params& p, const Row& row) { return row.rank < p.splits; }
DEVICE bool ends_row(const Params& p, const Row& row) { return row.rank + p.splits >= p.shares; }

// The CTA's next share, of this row or another. KEYS_TOO: those who do not gather need no more than which it is.
template <Launch LAUNCH, bool KEYS_TOO>
DEVICE Row next_share(const Params& p, const Row& row) {
  constexpr bool ALONE = LAUNCH == Launch::FOLDS;
  const bool ends = ends_row(p, row);
  const int share = !ends ? row.rank + p.splits : ALONE ? 0 : static_cast<int>(cluster_rank()),
            clusters = ALONE ? gridDim.x : divide(gridDim.x, p.of_splits),
            item = row.token * p.head_tiles + row.tile + (ends ? clusters : 0);
  if (KEYS_TOO) return share_at(p, item, share);
  Row next = row;
  next.token = divide(item, p.of_head_tiles), next.tile = item - next.token * p.head_tiles;
  next.rank = share;
  return next;
}

// The addresses of a head's query, and of its dims behind the 512th.
DEVICE const u16* query_at(const Params& p, int token, int head) {
  return p.q + token * p.q_token_stride + head * p.q_head_stride;
}

DEVICE const u16* query_rope_at(const Params& p, int token, int head) {
  return p.q_rope + token * p.q_rope_token_stride + head * p.q_rope_head_stride;
}

// A warp's position in the rings and their barriers, which go on from row to row: turns so far, the slot of its raw
// rows and that of the first half of the values.
struct Ring {
  int turn, slot, parity, half, half_parity;
};

// One of the two halves of a turn's values.
struct Half {
  int slot, parity;
};

template <int HALVES>
DEVICE Half half_of(const Ring& at, int half) {
  const bool wraps = half && at.half + 1 == HALVES;
  return {wraps ? 0 : at.half + half, at.half_parity ^ wraps};
}

template <int HALVES>
DEVICE void next_turn(Ring& at) {
  ++at.turn;
  at.half += 2;
  if (at.half >= HALVES) at.half -= HALVES, at.half_parity ^= 1;
}

template <int SLOTS>
DEVICE void next_slot(int& slot, int& parity) {
  slot += 4;
  if (slot >= SLOTS) slot -= SLOTS, parity ^= 1;
}

// Sums of each warp's weights, float [4, 64], of a row that another one follows. They take the place of its last keys.
template <class L>
DEVICE u32 place_of_sums(u32 shared, int slot) {
  return shared + L::RAW + slot * L::RAW_SLOT;
}
