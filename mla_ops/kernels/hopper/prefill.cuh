// Both kernels of prefill share this: parameters, requests, and the table of the tiles that the second one does.
#pragma once

#include "ptx.cuh"

constexpr int QUERIES = 128;  // a request's tile has so many, its last aside
// A running maximum of the softmax, beyond which scores become rounded products first, as running maxima are: of one that is not
// rounded, 2^40 would leave more than exp2 takes.
constexpr float FAR_FROM_0 = 67108864.f;
constexpr float NO_SCORE_YET = -1.2676506e30f;

// A warp votes on this for speed alone: what each row does with its scores follows from its own running maximum.
DEVICE bool is_far(float running_max) { return fabsf(running_max) > FAR_FROM_0 && running_max != NO_SCORE_YET; }

// A tile of a request's queries that `prefill_attention` does: every head of it is an item.
struct Tile {
  int token, rows;  // the first query, and queries
  int last;         // key that the first query sees last, were there as many
  int end;          // keys that any of the queries sees, at least one
  int begin_k, len_k;
  int unused[2];
};

// Made by `prefill_short`, which runs in front.
struct Plan {
  int taken;      // items beyond one a CTA
  int num_tiles;  // `tiles` has so many
  int unused[2];
  Tile tiles[1];  // those of a request together, its last one first, and the requests with the most keys first
};

struct Params {
  TensorMap q, k, v;  // [tokens, heads, dims]; boxes of 64 dims of one head of a tile's tokens
  const u16 *q_rows, *k_rows, *v_rows;     // the same tensors
  const int *cu_seqlens_q, *cu_seqlens_k;  // [num_requests + 1]
  u16* out;                                // [num_tokens, num_heads, DIM_V]
  float* lse;                              // [num_tokens, num_heads]
  Plan* plan;                              // null where no tile can be too large for `prefill_short`
  i64 q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride;
  i64 out_token_stride, out_head_stride, lse_token_stride, lse_head_stride;
  int num_tokens, num_kv, num_requests, num_heads;
  int heads_per_kv_head;
  int heads_together;  // heads whose keys and values fit L2
  int shares;          // CTAs of `prefill_short` for each of its regions of tokens
  int short_cells;     // the most that a tile of `prefill_short` has
  int most_tiles;      // the plan has room for so many
  int causal;
  float scale_log2;
};

// Element n of cu_seqlens, within the tensor.
DEVICE int start_of(const int* cu_seqlens, int n, int end) { return min(max(__ldg(cu_seqlens + n), 0), end); }

struct Request {
  int begin_q, len_q, begin_k, len_k;
};

// Tokens behind the last request count as one more, without keys.
DEVICE Request nth_request(const Params& p, int n) {
  const bool real = n < p.num_requests;
  Request r;
  r.begin_q = start_of(p.cu_seqlens_q, n, p.num_tokens);
  r.len_q = (real ? start_of(p.cu_seqlens_q, n + 1, p.num_tokens) : p.num_tokens) - r.begin_q;
  r.begin_k = start_of(p.cu_seqlens_k, n, p.num_kv);
  r.len_k = real ? max(start_of(p.cu_seqlens_k, n + 1, p.num_kv) - r.begin_k, 0) : 0;
  return r;
}

DEVICE Tile nth_tile(const Params& p, const Request& r, int n) {
  Tile tile;
  tile.token = r.begin_q + n * QUERIES;
  tile.rows = min(r.len_q - n * QUERIES, QUERIES);
  tile.last = p.causal ? n * QUERIES + r.len_k - r.len_q : r.len_k - 1;
  tile.end = p.causal ? min(max(tile.last + tile.rows, 0), r.len_k) : r.len_k;
  tile.begin_k = r.begin_k;
  tile.len_k = r.len_k;
  return tile;
}

// Whether `prefill_short` does a tile: the only one of a request, of few cells of 16 queries by 16 keys, or one that sees
// no key. Several tiles of a request share its keys in L2 if the same kernel does them. It depends on the request alone,
// and so do the bits of the results.
DEVICE bool is_short(const Params& p, const Request& r, const Tile& tile) {
  const int cells = (tile.rows + 15) / 16 * ((tile.end + 15) / 16);
  return tile.end == 0 || (r.len_q <= QUERIES && cells <= p.short_cells);
}
