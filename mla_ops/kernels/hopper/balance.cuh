// Rows of unequal lengths, evenly among CTAs that stay: each has an interval of the turns of all tokens' keys, one
// token's behind the other's, and finds it in the lengths on the device. A launch thus fits every batch.
//
// A *worker* is one CTA for each tile of heads; these have the same interval, so that they read the same keys at the
// same time. A token that lies in one interval is written as it is. One that is cut leaves *parts*, at most two a
// worker, which `merge_cuts.cu` adds up. Where whole tokens are about as even, none is cut.
#pragma once

#include "layout.cuh"
#include "parts.cuh"

constexpr int ROW_TURNS = 2;      // what a row costs besides its turns, in turns
constexpr int FEWEST_TURNS = 6;   // of an interval: less is not worth its merge
constexpr int NO_END = 0x7fffffff;
constexpr int EVERY_WORKERS_TOKEN = -1;

// A place between two turns.
struct Cut {
  int token, turn;
};

// What a worker takes, 16 bytes: from a turn of a token to `end` of another's turns.
struct Interval {
  int token, turn, last_token, end;

  DEVICE int step(int workers) const { return turn == EVERY_WORKERS_TOKEN ? workers : 1; }  // from token to token
};

DEVICE int turns_of(const Params& p, int which, int token) {
  int length = p.topk[which];
  if (p.topk_length[which]) length = max(0, min(length, __ldg(p.topk_length[which] + token)));
  return (length + KEYS - 1) / KEYS;
}

DEVICE int turns_of(const Params& p, int token) { return turns_of(p, 0, token) + turns_of(p, 1, token); }

// Whether a call's tokens are shared evenly, or by shapes: where rows are about as long, that is faster. `total` and
// `most`: what all and the longest cost, in turns. All CTAs of all launches of the call find the same.
DEVICE bool is_balanced(const Params& p, int total, int most) {
  const int quota = max(FEWEST_TURNS, (total + p.workers - 1) / p.workers);
  return static_cast<float>(most) * p.longest > static_cast<float>(quota) + p.margin;
}

// Asked by a launch whose tokens the balanced launch in front of it may have, by all of its THREADS, before barriers are
// made. `scratch` has eight bytes for each of their warps.
template <int THREADS>
DEVICE bool is_balanced(const Params& p, u32 scratch) {
  const int thread = threadIdx.x, end = p.all_tokens - p.tokens_before;
  int total = 0, most = 0;
  for (int token = thread - p.tokens_before; token < end; token += THREADS) {
    const int own = turns_of(p, token) + ROW_TURNS;
    total += own, most = max(most, own);
  }
  total = __reduce_add_sync(~0u, total), most = __reduce_max_sync(~0u, most);
  if (thread % 32 == 0) store_shared_8(scratch + thread / 32 * 8, total, most);
  __syncthreads();
  total = 0;
#pragma unroll 4
  for (int i = 0; i < THREADS / 32; ++i) {
    const uint2 of_warp = load_shared_8(scratch + i * 8);
    total += of_warp.x, most = max(most, static_cast<int>(of_warp.y));
  }
  __syncthreads();
  return is_balanced(p, total, most);
}

// The start of a launch by shapes: whether its tokens are done by a balanced one. Ends when that one does.
template <int THREADS>
DEVICE bool is_done(const Params& p, u32 scratch) {
  if (!p.workers || !is_balanced<THREADS>(p, scratch)) return false;
  wait_for_prerequisites();
  return true;
}

// How the tokens are shared among workers; `total` and `most`: what all and the longest cost, in turns.
struct Sharing {
  int workers, quota, snap;
  bool whole;  // tokens

  DEVICE Sharing(int num_tokens, int workers, int total, int most) : workers(workers) {
    quota = max(FEWEST_TURNS, (total + workers - 1) / workers);
    snap = max(1, quota / 32);
    const i64 rounds = (num_tokens + workers - 1) / workers;
    whole = rounds * most * 25 <= static_cast<i64>(quota) * 27;
  }

  // Where a worker's interval begins in what all tokens cost.
  DEVICE int begin(int worker) const { return worker * quota; }

  // The cut at `at`, inside of a token that begins at `token_begin`. Next to its ends it moves there.
  DEVICE Cut cut(int at, int token, int token_begin, int turns) const {
    const int turn = at - token_begin - ROW_TURNS;
    if (turn < snap) return {token, 0};
    if (turns - turn < snap) return {token + 1, 0};
    return {token, turn};
  }
};

DEVICE void store_begin(u32 place, Cut cut) {
  store_shared_4(place, cut.token), store_shared_4(place + 4, cut.turn);
}

DEVICE void store_end(u32 place, Cut cut) {
  store_shared_4(place + 8, cut.turn ? cut.token : cut.token - 1);
  store_shared_4(place + 12, cut.turn ? cut.turn : NO_END);
}

DEVICE int worker_here(const Params& p) { return divide(blockIdx.x, p.of_head_tiles); }

DEVICE int num_workers(const Params& p) { return p.workers; }

DEVICE Parts parts_of(const Params& p, int workers) { return parts_in(p.exchange, workers, p.num_heads); }

// This CTA's interval to `place`, by all of its THREADS; `scratch` has eight bytes for each of their warps. Ends with a
// barrier.
template <int THREADS>
DEVICE void find_interval(const Params& p, u32 place, u32 scratch) {
  const int worker = worker_here(p), workers = num_workers(p);
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const int each = (p.num_tokens + THREADS - 1) / THREADS, first = min(thread * each, p.num_tokens),
            last = min(first + each, p.num_tokens);
  int cost = 0, most = 0;
#pragma unroll 4
  for (int token = first; token < last; ++token) {
    const int own = turns_of(p, token) + ROW_TURNS;
    cost += own, most = max(most, own);
  }
  int until = cost;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const int below = __shfl_up_sync(~0u, until, step);
    if (lane >= step) until += below;
  }
  most = __reduce_max_sync(~0u, most);
  if (lane == 31) store_shared_8(scratch + warp * 8, until, most);
  __syncthreads();
  int total = 0, begin = until - cost;
#pragma unroll 4
  for (int i = 0; i < THREADS / 32; ++i) {
    const uint2 of_warp = load_shared_8(scratch + i * 8);
    if (i < warp) begin += of_warp.x;
    total += of_warp.x, most = max(most, static_cast<int>(of_warp.y));
  }
  const Sharing sharing(p.num_tokens, workers, total, most);
  const bool balanced = is_balanced(p, total, most);
  if (!balanced) {
    if (thread == 0) store_begin(place, {p.num_tokens, 0}), store_end(place, {p.num_tokens, 0});
  } else if (sharing.whole) {
    if (thread == 0) {
      store_begin(place, {worker, EVERY_WORKERS_TOKEN}), store_end(place, {p.num_tokens, 0});
    }
  } else {
    const int from = sharing.begin(worker), to = sharing.begin(worker + 1);
    if (thread == 0) {
      if (from >= total) store_begin(place, {p.num_tokens, 0});
      if (to >= total) store_end(place, {p.num_tokens, 0});
    }
    if (from < begin + cost && to >= begin) {
#pragma unroll 1
      for (int token = first; token < last; ++token) {
        const int turns = turns_of(p, token), after = begin + turns + ROW_TURNS;
        if (begin <= from && from < after) store_begin(place, sharing.cut(from, token, begin, turns));
        if (begin <= to && to < after) store_end(place, sharing.cut(to, token, begin, turns));
        begin = after;
      }
    }
  }
  __syncthreads();
  if (thread == 0 && blockIdx.x == worker * p.head_tiles) {
    const bool cut = static_cast<int>(load_shared_4(place + 4)) > 0;
    parts_of(p, workers).records[worker] = make_int2(worker ? load_shared_4(place) : balanced, cut);
  }
}

DEVICE Interval load_interval(u32 place) {
  Interval interval;
  interval.token = uniform(load_shared_4(place)), interval.turn = uniform(load_shared_4(place + 4));
  interval.last_token = uniform(load_shared_4(place + 8)), interval.end = uniform(load_shared_4(place + 12));
  return interval;
}

// A token of an interval, past the last one none, without its keys.
DEVICE Row token_at(const Params& p, u32 place, int token) {
  const Interval interval = load_interval(place);
  const bool past = token > interval.last_token ||
                    token == interval.token && token == interval.last_token && interval.turn >= interval.end;
  Row row;
  row.part = 0;
  row.token = past ? p.num_tokens : token, row.tile = opaque(blockIdx.x) - opaque(worker_here(p)) * p.head_tiles;
  return row;
}

// The first one: a worker may have none.
DEVICE int first_token(const Params& p, u32 place) {
  return token_at(p, place, uniform(load_shared_4(place))).token;
}

// With what the interval has of its keys.
DEVICE Row piece_at(const Params& p, u32 place, int token) {
  Row row = token_at(p, place, token);
  row = row_of(p, row.token, row.tile, 0, 1, 0);
  const Interval interval = load_interval(place);
  if (token == interval.token) row.first = max(interval.turn, 0);
  if (token == interval.last_token) row.last = min(row.last, interval.end);
  return row;
}

// Which part of a token that is cut this worker has; -1 of a whole one. All lanes of a warp ask together.
DEVICE int part_of(const Params& p, u32 place, int token) {
  const Interval interval = load_interval(place);
  const int worker = worker_here(p);
  if (token == interval.token && interval.turn > 0) return worker;
  return token == interval.last_token && interval.end != NO_END ? num_workers(p) + worker : -1;
}

// Rows by number, as a CTA takes them one after the other: of all tokens and tiles, or tokens in its interval.
template <Launch LAUNCH>
DEVICE Row row_number(const Params& p, u32 place, int number) {
  return LAUNCH == Launch::BALANCED ? piece_at(p, place, number) : row_at(p, number);
}

template <Launch LAUNCH>
DEVICE int first_number(u32 place) {
  return LAUNCH == Launch::BALANCED ? uniform(load_shared_4(place)) : blockIdx.x;
}

template <Launch LAUNCH>
DEVICE int numbers_ahead(const Params& p, u32 place) {
  return LAUNCH == Launch::BALANCED ? load_interval(place).step(num_workers(p)) : gridDim.x;
}

template <Launch LAUNCH>
DEVICE Row first_row(const Params& p, u32 place) {
  return row_number<LAUNCH>(p, place, first_number<LAUNCH>(place));
}

// The row that follows; KEYS_TOO: those who do not gather need no more than which it is.
template <Launch LAUNCH, bool KEYS_TOO>
DEVICE Row next_row(const Params& p, u32 place, const Row& row) {
  if constexpr (LAUNCH == Launch::BALANCED) {
    const int token = row.token + numbers_ahead<LAUNCH>(p, place);
    return KEYS_TOO ? piece_at(p, place, token) : token_at(p, place, token);
  } else {
    return next_row(p, row);
  }
}
