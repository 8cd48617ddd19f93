// Query tokens of the lightning indexer in groups that share keys, and each CTA's part of all groups' tiles of keys.
#pragma once

#include "divide.cuh"

struct Params {
  TensorMap queries;            // [num_tokens, num_heads, 128]
  TensorMap keys;               // [num_keys, 128], or [num_blocks, block_size, 128] of a cache
  const float* weights;         // [num_tokens, num_heads]
  const float* k_scale;         // [num_keys], for flat keys; null: ones
  const int* row_starts;        // [num_tokens], for flat keys
  const int* row_ends;          // [num_tokens]; for a cache: lengths
  const int* req_id_per_token;  // [num_tokens]
  const int* block_table;       // [num_requests, table_width]
  const unsigned char* cache;   // [num_blocks, block_bytes]
  float* out;                   // [num_tokens, width]
  i64 weights_stride, table_stride, block_bytes, out_stride;
  int num_tokens, num_columns;  // no row ends behind num_columns
  int width;
  int num_requests, table_width, num_blocks, block_size;
  int boxes_log2;  // a tile of keys is 2^boxes_log2 boxes, each in one block
  Divisor of_block_size;
  int keeps_scores;  // L2 does, for what reads them next
  Divisor of_parts;  // as many as CTAs, or clusters
};

constexpr int TILE = 64;  // keys

// Keys lie in one tensor, in blocks that hold whole boxes of a tile, or in blocks of any size.
enum Source { FLAT, BOXES, ANYWHERE };

struct Bounds {
  int start, end;  // columns of a row; equal: none
};

template <Source SOURCE>
DEVICE Bounds bounds_of(const Params& p, int token) {
  Bounds row = {0, 0};
  if (token >= p.num_tokens) return row;
  row.end = min(max(__ldg(p.row_ends + token), 0), p.num_columns);
  if (SOURCE == FLAT) {
    row.start = min(max(__ldg(p.row_starts + token), 0), row.end);
  } else {
    const int request = __ldg(p.req_id_per_token + token);
    if (request < 0 || request >= p.num_requests) row.end = 0;
  }
  return row;
}

// Up to TOKENS neighbours that read the same keys.
struct Group {
  int count;              // tokens
  int first_tile, tiles;  // tiles of keys; none if no token has keys
  int units;              // tiles, and what a CTA takes to change to this group's queries
  int end;                // column behind the last key
};

// Tiles of flat keys in whose time a CTA changes to a group of so many: some CTAs do, others have a part of one group.
template <int TOKENS, Source SOURCE>
DEVICE int change_to(const Params& p, int tiles) {
  return SOURCE == FLAT && p.num_tokens > TOKENS && tiles >= 64 ? 4 : 0;
}

// The group that begins with `token`, if one does. Of a cache: tokens of one request, within TOKENS that begin at a
// multiple of it. All that may be needed is asked for at one time: memory that no cache has answers late, and a launch
// waits for it. Of flat keys so many tokens' at a time as there are registers for.
template <int TOKENS, Source SOURCE, int TOGETHER = TOKENS>
DEVICE Group group_at(const Params& p, int token) {
  Group group = {0, 0, 0, 0, 0};
  if (token >= p.num_tokens) return group;
  const int room = min(TOKENS - token % TOKENS, p.num_tokens - token);
  int start = p.num_columns, end = 0;
  if constexpr (TOKENS == 1) {
    group.count = 1;
    const Bounds row = bounds_of<SOURCE>(p, token);
    start = row.start, end = row.end;
  } else if constexpr (SOURCE == FLAT) {
    group.count = room;
    static_assert(TOKENS % TOGETHER == 0, "all are looked at");
#pragma unroll 1
    for (int before = 0; before < room; before += TOGETHER) {
      int starts[TOGETHER], ends[TOGETHER];
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        const int other = min(token + before + i, p.num_tokens - 1);  // the last one again where there are no more
        starts[i] = __ldg(p.row_starts + other), ends[i] = __ldg(p.row_ends + other);
      }
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) hold(starts[i]), hold(ends[i]);
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        const int last = min(max(ends[i], 0), p.num_columns), begin = min(max(starts[i], 0), last);
        if (begin < last) start = min(start, begin), end = max(end, last);
      }
    }
  } else {
    int requests[TOKENS], ends[TOKENS];
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
      const int other = min(token + i, p.num_tokens - 1);
      requests[i] = __ldg(p.req_id_per_token + other), ends[i] = __ldg(p.row_ends + other);
    }
    const int before = __ldg(p.req_id_per_token + max(token - 1, 0)), request = requests[0];
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) hold(requests[i]), hold(ends[i]);
    if (token % TOKENS && before == request) return group;
    group.count = 1;
#pragma unroll
    for (int i = 1; i < TOKENS; ++i)
      if (group.count == i && i < room && requests[i] == request) ++group.count;
    if (request < 0 || request >= p.num_requests) return group;
    start = 0;
#pragma unroll
    for (int i = 0; i < TOKENS; ++i)
      if (i < group.count) end = max(end, min(ends[i], p.num_columns));
  }
  if (start >= end) return group;
  group.first_tile = start / TILE;
  group.tiles = (end - 1) / TILE + 1 - group.first_tile;
  group.units = group.tiles + change_to<TOKENS, SOURCE>(p, group.tiles);
  group.end = end;
  return group;
}

// Tokens between two that may begin a group.
template <int TOKENS, Source SOURCE>
constexpr int STEP = SOURCE == FLAT ? TOKENS : 1;

// A CTA's units: `count` from unit `skip` on of the group of `token`, and of the groups behind it; all CTAs have `total`.
struct Part {
  int token, skip, count, total;
};

// Takes from `part` what it has of a group, whose first tile and tiles become those of the part. A change comes before
// them.
template <int TOKENS, Source SOURCE>
DEVICE void take_tiles(const Params& p, Part& part, int& first_tile, int& tiles) {
  if constexpr (SOURCE != FLAT) {
    first_tile += part.skip, tiles = min(tiles - part.skip, part.count);
    part.skip = 0, part.count -= tiles;
  } else {
    const int change = change_to<TOKENS, SOURCE>(p, tiles), taken = min(tiles + change - part.skip, part.count);
    const int first = max(part.skip - change, 0);
    tiles = max(part.skip + taken - change, 0) - first, first_tile += first;
    part.skip = 0, part.count -= taken;
  }
}

// total * part / parts, where the product might not fit.
DEVICE int units_before(int total, int part, int parts, Divisor of_parts) {
  const int each = divide(total, of_parts), rest = total - each * parts;
  return each * part + divide(rest * part, of_parts);
}

// Makes `part` begin with the unit that `part.skip` counts from the group of `part.token` on.
template <int TOKENS, Source SOURCE>
DEVICE void find_begin(const Params& p, Part& part) {
  while (true) {
    const int units = group_at<TOKENS, SOURCE>(p, part.token).units;
    if (part.skip < units) return;
    part.skip -= units, part.token += STEP<TOKENS, SOURCE>;
  }
}
