// Rows of unequal lengths, evenly among the CTAs of a launch: each has an interval of the turns of all tokens' keys, one
// token's behind the other's, and finds it in the lengths on the device. A launch thus fits every batch.
//
// A launch that is given lengths adds them up first. Where rows are of about one length, it goes on as its shape says.
// Else its CTAs become workers. A *worker* is one CTA for each tile of heads; these have the same interval, so that they
// read the same keys at the same time. A token that lies in one interval is written as it is. One that is cut leaves
// *parts*, at most two a worker, which `cuts.cuh` adds up. Where whole tokens are about as even, none is cut.
#pragma once

#include "layout.cuh"
#include "parts.cuh"

constexpr int ROW_TURNS = 2;        // a row costs so many turns besides its own
constexpr int FEWEST_TURNS = 4;     // an interval has no fewer: less is not worth its merge
constexpr int PIECE_TURNS = 4;      // a piece of a stretched row costs so many turns besides its own
constexpr int FEWEST_OF_PIECE = 2;  // its own turns, or more
constexpr int STRETCHED = 2;        // the longest of stretched rows is longer than so many intervals
constexpr int NO_END = 0x7fffffff;
constexpr int EVERY_WORKERS_TOKEN = -1;
constexpr int OTHER_FOUND = 1 << 15;  // flag beside a worker's number, see `cuts.cuh`

// A place between two turns.
struct Cut {
  int token, turn;
};

// A worker's share: from a turn of a token to `end` of another's turns. It takes 16 bytes of shared memory.
struct Interval {
  int token, turn, last_token, end, worker, tile;

  DEVICE int step(int workers) const { return turn == EVERY_WORKERS_TOKEN ? workers : 1; }  // this leads from token to token
};

// Whether a call's tokens are shared evenly, or by shapes: where rows are about as long, that is faster. `total` and
// `most`: what all and the longest cost, in turns. All CTAs of all launches of the call find the same.
DEVICE bool is_balanced(const Params& p, int total, int most) {
  const int quota = max(FEWEST_TURNS, (total + p.workers - 1) / p.workers);
  return static_cast<float>(most) * p.longest > static_cast<float>(quota) + p.margin;
}

// Costs in turns: of this thread's tokens, of all of them, and of the longest.
struct Cost {
  int own, total, most;
};

// Adds up what the call's tokens cost, by all of a CTA's THREADS, of which each has some neighbours. `scratch` has eight
// bytes for each of their warps, and keeps what these cost.
template <int THREADS>
DEVICE Cost add_up_costs(const Params& p, u32 scratch) {
  scratch = opaque(scratch);  // else what is relative to it is not uniform later on
  const int thread = thread_here(), warp = thread >> 5, lane = thread & 31;
  const int each = (p.all_tokens + THREADS - 1) / THREADS, first = min(thread * each, p.all_tokens),
            last = min(first + each, p.all_tokens);
  Cost cost{0, 0, 0};
#pragma unroll 1
  for (int token = first; token < last; ++token) {
    const int own = turns_of(p, token - p.tokens_before) + ROW_TURNS;
    cost.own += own, cost.most = max(cost.most, own);
  }
  const int of_warp = __reduce_add_sync(~0u, cost.own);
  cost.most = __reduce_max_sync(~0u, cost.most);
  if (lane == 0) store_shared_8(scratch + warp * 8, of_warp, cost.most);
  __syncthreads();
  const uint2 of_warps = load_shared_8(scratch + min(lane, THREADS / 32 - 1) * 8);
  cost.most = __reduce_max_sync(~0u, static_cast<int>(of_warps.y));
  cost.total = __reduce_add_sync(~0u, lane < THREADS / 32 ? static_cast<int>(of_warps.x) : 0);
  return cost;
}

// The number of this CTA in the order of the grid.
DEVICE int cta_here() { return blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z); }

DEVICE int num_workers(const Params& p) { return p.workers; }

DEVICE Parts parts_of(const Params& p) { return parts_in(p.exchange, p.workers, p.head_tiles, p.num_heads); }

// Whether a call's tokens are shared evenly, which its first launch tells the merge of parts as well.
DEVICE bool decide(const Params& p, const Cost& cost) {
  const bool balanced = is_balanced(p, cost.total, cost.most);
  if (!p.tokens_before && thread_here() == 0 && cta_here() == 0) *parts_of(p).balanced = balanced;
  return balanced;
}

// The start of a launch that only goes by its shape, before barriers are made: whether another launch of the call shares
// its tokens evenly. Ends when what stands in front of it does. `scratch` is of `add_up_costs`. What comes behind may
// begin at once: it finds room where a CTA of this launch has left.
template <int THREADS>
DEVICE bool is_done(const Params& p, u32 scratch) {
  launch_dependents();
  if (!decide(p, add_up_costs<THREADS>(p, scratch))) return false;
  wait_for_prerequisites();
  return true;
}

// The way in which workers share the tokens; `total` and `most`: what all and the longest cost, in turns.
struct Sharing {
  int quota, snap;
  bool whole;  // tokens

  DEVICE Sharing(int num_tokens, int workers, int total, int most) {
    quota = max(FEWEST_TURNS, (total + workers - 1) / workers);
    snap = max(1, quota / 32);
    const i64 rounds = (num_tokens + workers - 1) / workers;
    whole = rounds * most * 25 <= static_cast<i64>(quota) * 27;
  }

  // The beginning of a worker's interval in the cost of all tokens.
  DEVICE int begin(int worker) const { return worker * quota; }

  // The cut at `at`, inside of a token that begins at `token_begin`. Next to its ends it moves there.
  DEVICE Cut cut(int at, int token, int token_begin, int turns) const {
    const int turn = at - token_begin - ROW_TURNS;
    if (turn < snap) return {token, 0};
    if (turns - turn < snap) return {token + 1, 0};
    return {token, turn};
  }

  // The first worker of a token that is cut, and how many there are: one more than cuts.
  DEVICE int2 sharers(int token_begin, int turns) const {
    const int first = (token_begin + ROW_TURNS + snap + quota - 1) / quota - 1,
              last = (token_begin + ROW_TURNS + turns - snap) / quota;
    return make_int2(first, last - first + 1);
  }
};

// A cut, and who shares the token that it is in, four words.
DEVICE void store_cut(u32 place, Cut cut, int2 sharers) {
  store_shared_8(place, cut.token, cut.turn);
  store_shared_8(place + 8, sharers.x, cut.turn > 0 ? sharers.y : 0);
}

// The interval of a CTA that has every so many-th of this launch's tokens, whole, to `place`.
DEVICE void store_whole_tokens(const Params& p, u32 place) {
  const int cta = cta_here(), worker = divide(cta, p.of_head_tiles);
  store_shared_8(place, worker < num_workers(p) ? worker | p.num_tokens - 1 << 16 : p.num_tokens,
                 static_cast<u32>(EVERY_WORKERS_TOKEN));
  store_shared_8(place + 8, NO_END, worker | (cta - worker * p.head_tiles) << 16);
}

// Few long rows among short ones. A piece of a row takes time besides its turns: it is begun, left and added up. Where
// all rows longer than an interval have less than a third of all turns, these are *stretched*: their turns cost so much
// more than others' that workers end at the same time.
struct Stretch {
  int quota, snap, workers, longest_short;
  float factor;

  DEVICE Stretch(int quota, int workers) : workers(workers), longest_short(NO_END), factor(1.f) { set_quota(quota); }

  DEVICE void set_quota(int turns) { quota = turns, snap = max(1, turns / 32); }

  // `longs`: turns of rows longer than `longest`; `others`: what all else costs. The quota grows until workers suffice.
  DEVICE void stretch(int longest, int others, int longs) {
    int turns = max(quota, PIECE_TURNS + FEWEST_OF_PIECE);
    const int most = turns + PIECE_TURNS;
    auto lacking = [&] {
      return __fdividef(static_cast<float>(others), static_cast<float>(turns)) +
                 __fdividef(static_cast<float>(longs), static_cast<float>(turns - PIECE_TURNS)) >
             static_cast<float>(workers);
    };
#pragma unroll 1
    while (turns < most && lacking()) ++turns;
    set_quota(turns);
    longest_short = longest, factor = __fdividef(static_cast<float>(turns), static_cast<float>(turns - PIECE_TURNS));
  }

  // The cost of tokens of which long rows have so many turns.
  DEVICE int place(int others, int longs) const { return others + static_cast<int>(longs * factor); }

  // The last worker of a token whose cost ends at `after`.
  DEVICE int last_worker(int after) const { return min((after - 1) / quota, workers - 1); }

  // Turns of a piece at an end of a long row; none where they would be few.
  static DEVICE int piece(int cost) { return cost < PIECE_TURNS + FEWEST_OF_PIECE ? 0 : cost - PIECE_TURNS; }
};

// A token where it lies in the cost of all: from `begin` to `after`.
struct Lying {
  int token, turns, begin, after;

  // The turn at the beginning of a worker's interval inside of this token. Next to the token's ends it moves there.
  DEVICE int turn_at(const Stretch& stretch, int worker) const {
    const int quota = stretch.quota;
    int turn = worker * quota - begin - ROW_TURNS;
    if (turns > stretch.longest_short) {
      const int first = begin / quota, last = stretch.last_worker(after), of_piece = quota - PIECE_TURNS,
                begun = Stretch::piece((first + 1) * quota - begin), inner = (last - first - 1) * of_piece,
                ended = Stretch::piece(after - last * quota);
      turn = static_cast<int>(__fdividef(static_cast<float>(begun + (worker - first - 1) * of_piece) * turns,
                                         static_cast<float>(begun + inner + ended)) + 0.5f);
    }
    return turn < stretch.snap ? 0 : turns - turn < stretch.snap ? turns : turn;
  }

  DEVICE Cut cut(const Stretch& stretch, int worker) const {
    const int turn = turn_at(stretch, worker);
    return turn && turn == turns ? Cut{token + 1, 0} : Cut{token, turn};
  }

  // The first worker of a token that is cut, and how many there are: one more than cuts.
  DEVICE int2 sharers(const Stretch& stretch) const {
    int first = begin / stretch.quota, last = stretch.last_worker(after);
    if (turn_at(stretch, first + 1) == 0) ++first;
    if (turn_at(stretch, last) == turns) --last;
    return make_int2(first, last - first + 1);
  }
};

// `Params` of the function below, by value: by reference it would read them from memory.
struct Batch {
  const int* lengths[2];
  int topk[2], num_tokens, workers;

  DEVICE int turns(int token) const {
    return turns_of(topk[0], lengths[0], token) + turns_of(topk[1], lengths[1], token);
  }
};

// The cuts of a worker's interval to `ends`, 16 bytes each, and who shares the tokens that they are in, where long rows
// may be stretched; `before`: what tokens before this thread's cost. It takes eight bytes for each warp behind `ends`. A
// function of its own: its code lies behind the kernel's, so that batches which do not need it have nothing to skip.
template <int THREADS>
__device__ __noinline__ void share_few_long(Batch batch, u32 ends, int costs, int most, int quota, int worker,
                                            int before) {
  const int thread = thread_here(), warp = thread >> 5, lane = thread & 31, num_tokens = batch.num_tokens;
  const int each = (num_tokens + THREADS - 1) / THREADS, first = thread * each, last = min(first + each, num_tokens);
  const int longest_short = most > STRETCHED * quota ? max(quota, 2 * PIECE_TURNS + FEWEST_OF_PIECE) : NO_END;
  const u32 scratch = ends + 32;
  int own_longs = 0;
#pragma unroll 1
  for (int token = first; token < last; ++token) {
    const int turns = batch.turns(token);
    own_longs += turns > longest_short ? turns : 0;
  }
  int longs_before = own_longs;  // up to this thread's tokens, then of those before them
#pragma unroll 1
  for (int step = 1; step < 32; step <<= 1) {
    const int below = __shfl_up_sync(~0u, longs_before, step);
    if (lane >= step) longs_before += below;
  }
  if (lane == 31) store_shared_8(scratch + warp * 8, longs_before, 0);
  __syncthreads();
  const int of_one = lane < THREADS / 32 ? load_shared_4(scratch + min(lane, THREADS / 32 - 1) * 8) : 0;
  int longs = __reduce_add_sync(~0u, of_one);
  longs_before += __reduce_add_sync(~0u, lane < warp ? of_one : 0) - own_longs;
  Stretch stretch(quota, batch.workers);
  if (0 < longs && 3 * longs < costs)
    stretch.stretch(longest_short, costs - longs, longs);
  else
    longs = longs_before = 0;
  const int total = stretch.place(costs - longs, longs);
  int others_before = before - longs_before;
  Lying here{first, 0, 0, stretch.place(others_before, longs_before)};
  auto at = [&](int end) { return worker + end < stretch.workers ? (worker + end) * stretch.quota : total; };
#pragma unroll 1
  for (; here.token < last; ++here.token) {
    here.turns = batch.turns(here.token), here.begin = here.after;
    (here.turns > stretch.longest_short ? longs_before : others_before) += here.turns;
    others_before += ROW_TURNS;
    here.after = stretch.place(others_before, longs_before);
#pragma unroll 1
    for (int end = 0; end < 2; ++end)
      if (here.begin <= at(end) && at(end) < here.after)
        store_cut(ends + end * 16, here.cut(stretch, worker + end), here.sharers(stretch));
  }
  if (thread < 2 && at(thread) >= total) store_cut(ends + thread * 16, {num_tokens, 0}, make_int2(0, 0));
}

// Whether rows beside the longest are as short as those among which long ones are stretched.
DEVICE bool may_stretch(const Params& p, const Cost& cost) {
  return cost.total <= FEWEST_TURNS * p.all_tokens + cost.most;
}

// This CTA's interval of all tokens to `place`, by all of its THREADS; none where it is no worker's. `scratch` is what
// `add_up_costs` left, behind it 32 bytes and as many again as it left. Ends with a barrier.
template <int THREADS>
DEVICE void share_evenly(const Params& p, u32 place, u32 scratch, const Cost& cost) {
  place = opaque(place), scratch = opaque(scratch);  // else what is relative to these is not uniform later on
  const int cta = cta_here(), worker = divide(cta, p.of_head_tiles), workers = num_workers(p);
  const int thread = thread_here(), warp = thread >> 5, lane = thread & 31, num_tokens = p.all_tokens;
  const u32 begins = scratch + THREADS / 32 * 8, ends = begins + 16;
  const bool works = worker < workers;
  const int of_warps = lane < warp ? load_shared_4(scratch + min(lane, THREADS / 32 - 1) * 8) : 0;
  int begin = cost.own;  // the cost of tokens up to this thread's, then of those before them
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const int below = __shfl_up_sync(~0u, begin, step);
    if (lane >= step) begin += below;
  }
  begin += __reduce_add_sync(~0u, of_warps) - cost.own;
  const Sharing sharing(num_tokens, workers, cost.total, cost.most);
  const int2 nobody = make_int2(0, 0);
  const Cut past{num_tokens, 0};
  const int from = sharing.begin(worker), to = sharing.begin(worker + 1);
  if (!works || sharing.whole) {
    if (thread == 0) {
      store_cut(begins, works ? Cut{worker, EVERY_WORKERS_TOKEN} : Cut{num_tokens, 0}, nobody);
      store_cut(ends, past, nobody);
    }
  } else if (__builtin_expect(may_stretch(p, cost), 0)) {
    const Batch batch{{p.topk_length[0], p.topk_length[1]}, {p.topk[0], p.topk[1]}, num_tokens, workers};
    share_few_long<THREADS>(batch, begins, cost.total, cost.most, sharing.quota, worker, begin);
  } else {
    if (thread == 0) {
      if (from >= cost.total) store_cut(begins, past, nobody);
      if (to >= cost.total) store_cut(ends, past, nobody);
    }
    if (from < begin + cost.own && to >= begin) {
      const int each = (num_tokens + THREADS - 1) / THREADS, first = thread * each,
                last = min(first + each, num_tokens);
#pragma unroll 1
      for (int token = first; token < last; ++token) {
        const int turns = turns_of(p, token), after = begin + turns + ROW_TURNS;
        const int2 sharers = sharing.sharers(begin, turns);
        if (begin <= from && from < after) store_cut(begins, sharing.cut(from, token, begin, turns), sharers);
        if (begin <= to && to < after) store_cut(ends, sharing.cut(to, token, begin, turns), sharers);
        begin = after;
      }
    }
  }
  __syncthreads();
  if (thread == 0) {
    const uint2 from = load_shared_8(begins), to = load_shared_8(ends), before = load_shared_8(begins + 8),
                behind = load_shared_8(ends + 8);
    // A token that goes on beyond both ends is one part.
    const bool goes_through = before.y && behind.y && from.x == to.x;
    const u32 last_token = (to.y ? to.x : to.x - 1) & 0xffff;
    store_shared_8(place, from.x | last_token << 16, from.y);
    store_shared_8(place + 8, to.y ? to.y : NO_END, worker | (cta - worker * p.head_tiles) << 16);
    if (works)
      parts_of(p).sharers[cta] = {static_cast<int>(before.x), static_cast<int>(before.y), static_cast<int>(behind.x),
                                  goes_through ? 0 : static_cast<int>(behind.y)};
  }
  __syncthreads();
}

// This CTA's interval, in a kernel that has one way for both: whole tokens of this launch where rows are about as long.
template <int THREADS>
DEVICE void find_interval(const Params& p, u32 place, u32 scratch) {
  const Cost cost = add_up_costs<THREADS>(p, scratch);
  if (decide(p, cost)) {
    share_evenly<THREADS>(p, place, scratch, cost);
    return;
  }
  // At once: this is at the start of a kernel, where instructions come from memory.
  if (thread_here() == 0) store_whole_tokens(p, opaque(place));
  __syncthreads();
}

DEVICE Interval load_interval(u32 place) {
  const uint2 a = load_shared_8(place), b = load_shared_8(place + 8);
  const int tokens = uniform(a.x), here = uniform(b.y);
  Interval interval;
  interval.token = tokens & 0xffff, interval.last_token = static_cast<short>(tokens >> 16);
  interval.turn = uniform(a.y), interval.end = uniform(b.x);
  interval.worker = here & OTHER_FOUND - 1, interval.tile = here >> 16;
  return interval;
}

// A token of an interval, past the last one none, without its keys.
DEVICE Row token_at(const Params& p, u32 place, int token) {
  const Interval interval = load_interval(place);
  const bool past = token > interval.last_token ||
                    token == interval.token && token == interval.last_token && interval.turn >= interval.end;
  Row row;
  row.part = 0;
  row.token = past ? p.all_tokens : token, row.tile = interval.tile;
  return row;
}

// The first one: a worker may have none.
DEVICE int first_token(const Params& p, u32 place) {
  return token_at(p, place, load_interval(place).token).token;
}

// The row of `token` with what the interval has of its keys.
DEVICE Row piece_at(const Params& p, u32 place, int token) {
  Row row = token_at(p, place, token);
  row = row_of(p, row.token, row.tile, 0, 1, 0);
  const Interval interval = load_interval(place);
  if (token == interval.token) row.first = max(interval.turn, 0);
  if (token == interval.last_token) row.last = min(row.last, interval.end);
  return row;
}

// This worker's part of a token that is cut; -1 of a whole one. All lanes of a warp ask together.
DEVICE int part_of(const Params& p, u32 place, int token) {
  const Interval interval = load_interval(place);
  if (token == interval.token && interval.turn > 0) return interval.worker;
  return token == interval.last_token && interval.end != NO_END ? num_workers(p) + interval.worker : -1;
}

// Tokens of the call, or of this launch.
template <Launch LAUNCH>
DEVICE int end_of_tokens(const Params& p) {
  return LAUNCH == Launch::BALANCED ? p.all_tokens : p.num_tokens;
}

// Rows by number, as a CTA takes them one after the other: of all tokens and tiles, or tokens in its interval.
template <Launch LAUNCH>
DEVICE Row row_number(const Params& p, u32 place, int number) {
  return LAUNCH == Launch::BALANCED ? piece_at(p, place, number) : row_at(p, number);
}

template <Launch LAUNCH>
DEVICE int first_number(u32 place) {
  return LAUNCH == Launch::BALANCED ? load_interval(place).token : blockIdx.x;
}

template <Launch LAUNCH>
DEVICE int numbers_ahead(const Params& p, u32 place) {
  return LAUNCH == Launch::BALANCED ? load_interval(place).step(num_workers(p)) : gridDim.x;
}

template <Launch LAUNCH>
DEVICE Row first_row(const Params& p, u32 place) {
  if constexpr (in_shares(LAUNCH)) return first_share<LAUNCH>(p);
  return row_number<LAUNCH>(p, place, first_number<LAUNCH>(place));
}

// The row that follows; KEYS_TOO: those who do not gather need no more than which it is.
template <Launch LAUNCH, bool KEYS_TOO>
DEVICE Row next_row(const Params& p, u32 place, const Row& row) {
  if constexpr (LAUNCH == Launch::BALANCED) {
    const int token = row.token + numbers_ahead<LAUNCH>(p, place);
    return KEYS_TOO ? piece_at(p, place, token) : token_at(p, place, token);
  } else if constexpr (in_shares(LAUNCH)) {
    return next_share<LAUNCH, KEYS_TOO>(p, row);
  } else {
    return next_row(p, row);
  }
}

// Whether a launch that is given lengths shares them evenly. Memory of groups is packets'.
template <Launch LAUNCH>
DEVICE bool shares_evenly(const Params& p, const Cost& cost) {
  return LAUNCH == Launch::GROUPS ? is_balanced(p, cost.total, cost.most) : decide(p, cost);
}
