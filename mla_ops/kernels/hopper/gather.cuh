// The gather: rows of the cache into shared memory, as they are.
#pragma once

#include "layout.cuh"

// Rows of bfloat16.
template <int BYTES_>
struct PlainRows {
  static constexpr int BYTES = BYTES_;
  static constexpr bool SCALES_APART = false;
};

// Whether an index may be a key's: by itself, as far as nothing has to be read for it.
DEVICE bool in_range(const Cache& cache, int index) {
  return static_cast<u32>(index) < static_cast<u32>(cache.num_indices);
}

// A key's place in a cache before anything has been read at it; block < 0: not attended.
struct Place {
  int block, offset;
};

// The place of an index in range, or of a negative one. Reads the block table, for which whoever uses the block waits.
DEVICE Place place_at(const Cache& cache, int request, int index) {
  Place place;
  place.block = divide(index, cache.of_block_size);
  place.offset = index - place.block * cache.block_size;
  if (index < 0) place.block = -1;
  if (cache.block_table) {
    if (static_cast<u32>(request) >= static_cast<u32>(cache.num_requests)) place.block = -1;
    if (place.block >= 0) place.block = __ldg(cache.block_table + opaque(request) * cache.table_stride + place.block);
  }
  return place;
}

DEVICE bool is_live(const Cache& cache, Place place) {
  return static_cast<u32>(place.block) < static_cast<u32>(cache.num_blocks);
}

template <class R>
DEVICE const unsigned char* row_of_key(const Cache& cache, Place place) {
  return cache.rows + place.block * cache.block_bytes + static_cast<i64>(place.offset) * R::BYTES;
}

// The scales of a key, in formats that keep them behind all rows of a block.
template <class R>
DEVICE const unsigned char* scales_of_key(const Cache& cache, Place place) {
  return cache.rows + place.block * cache.block_bytes + static_cast<i64>(opaque(cache.block_size)) * R::BYTES +
         static_cast<i64>(place.offset) * R::SCALES_PITCH;
}

// The indices of a turn; null: every position is a key.
DEVICE const int* indices_of(const Params& p, const Row& row, int turn) {
  const bool extra = turn >= row.main_turns;
  const int* indices = extra ? p.indices[1] : p.indices[0];
  if (!indices) return nullptr;
  const i64 stride = extra ? p.indices_stride[1] : p.indices_stride[0];
  return indices + opaque(row.token) * stride + (extra ? turn - row.main_turns : turn) * TILE_KEYS;
}

// A lane's two indices of a turn, of positions `lane` and `lane` + 32; negative: dead, or past the end.
struct Indices {
  int of[2];
};

DEVICE int index_at(const Params& p, const Row& row, int turn, int half, int lane) {
  const bool extra = turn >= row.main_turns;
  const int position = (extra ? turn - row.main_turns : turn) * TILE_KEYS + half * 32 + lane;
  if (turn >= row.last || position >= (extra ? row.extra_length : row.length)) return -1;
  const int* indices = extra ? p.indices[1] : p.indices[0];
  const i64 stride = extra ? p.indices_stride[1] : p.indices_stride[0];
  return indices ? __ldg(indices + row.token * stride + position) : position;
}

DEVICE Indices indices_at(const Params& p, const Row& row, int turn, int lane) {
  return {{index_at(p, row, turn, 0, lane), index_at(p, row, turn, 1, lane)}};
}

// Where a lane's indices of a turn are, of positions `lane` and `lane` + 32, how many positions are left from the turn's first
// on, and the cache's `num_indices`. From turn to turn the first two move by a constant within a cache. Where every position
// is a key, `at` is where a list of all positions from address 0 on would have it.
struct Positions {
  const int* at;
  int left;
  u32 limit;
};

DEVICE int end_of_positions(const Row& row, bool extra) {
  return min(extra ? row.extra_length : row.length, (extra ? row.last - row.main_turns : row.last) * TILE_KEYS);
}

DEVICE Positions positions_at(const Params& p, const Row& row, int turn, int lane) {
  const bool extra = turn >= row.main_turns;
  const int position = (extra ? turn - row.main_turns : turn) * TILE_KEYS;
  const i64 stride = extra ? p.indices_stride[1] : p.indices_stride[0], before = p.indices[0] ? row.token * stride : 0;
  return {(extra ? p.indices[1] : p.indices[0]) + before + position + lane, end_of_positions(row, extra) - position,
          static_cast<u32>(p.caches[extra].num_indices)};
}

// QUICK: without a branch.
template <bool QUICK>
DEVICE Indices indices_at(const Params& p, const Positions& there, int lane) {
  const bool first = lane < there.left, second = lane < there.left - 32, given = p.indices[0] != nullptr;
  const int position = static_cast<int>(reinterpret_cast<u64>(there.at) >> 2);
  if (!QUICK && !given) return {{first ? position : -1, second ? position + 32 : -1}};
  Indices indices = {{QUICK && first && !given ? position : -1, QUICK && second && !given ? position + 32 : -1}};
  load_int_if(first && (given || !QUICK), there.at, indices.of[0]);
  load_int_if(second && (given || !QUICK), there.at + 32, indices.of[1]);
  return indices;
}

DEVICE int request_of(const Params& p, const Row& row) {
  return p.req_id_per_token && row.token < p.all_tokens - p.tokens_before ? __ldg(p.req_id_per_token + row.token) : -1;
}

// Indices that are loaded while rows of earlier turns are copied.
struct Ahead {
  Indices now, next;  // indices of the next turn and of the one after it
};

// A share's first indices. Those of its first 32 turns come to L2: where most are dead, they are what is waited for. WHOLE:
// those of the row, of which other shares follow. TO_L1: to L1. No prefetch brings anything there on Hopper, so
// each of the four warps loads a word of every fourth sector.
template <bool WHOLE = false, bool TO_L1 = false>
DEVICE Ahead begin_share(const Params& p, const Row& row, int lane) {
  const int turn = WHOLE ? lane : row.first + lane * row.stride;
  const bool worth_it = WHOLE ? begins_row(p, row) : row.last - row.first > row.stride;
  int loaded = 0;
  if (turn < row.last && worth_it) {
    const int* from = indices_of(p, row, turn);
    if constexpr (TO_L1) {
      const bool extra = turn >= row.main_turns;
      const int left = extra ? row.extra_length - (turn - row.main_turns) * TILE_KEYS : row.length - turn * TILE_KEYS,
                first = (thread_here() >> 5 & 3) * 8;
      if (from && first < left) loaded = __ldg(from + first);
      if (from && first + 32 < left) loaded |= __ldg(from + first + 32);
    } else if (from) {
      prefetch_to_l2(from), prefetch_to_l2(from + 32);
    }
  }
  Ahead ahead = {indices_at(p, row, row.first, lane), indices_at(p, row, row.first + row.stride, lane)};
  if (TO_L1) ahead.now.of[0] |= loaded & p.topk[0] >> 31;  // adds nothing; else the compiler would drop the loads
  return ahead;
}

// Asks for the indices of a share's first 16 turns, which come to L1: where most are dead, they are what is waited for. No
// prefetch brings anything there on Hopper, so a word of each sector of 32 bytes is copied to where nobody reads it.
DEVICE void ask_for_indices(const Params& p, const Row& row, u32 unread) {
  const int thread = thread_here() & 127, turn = row.first + (thread >> 3) * row.stride;
  if (turn >= row.last) return;
  const bool extra = turn >= row.main_turns;
  const int* indices = extra ? p.indices[1] : p.indices[0];
  const i64 stride = extra ? p.indices_stride[1] : p.indices_stride[0];
  const int position = (extra ? turn - row.main_turns : turn) * TILE_KEYS + (thread & 7) * 8;
  if (indices) copy_4(unread, indices + row.token * stride + min(position, (extra ? row.extra_length : row.length) - 1));
}

// The same of a share's first TURNS turns. Returns the indices of the first.
template <int TURNS>
DEVICE Indices begin_asking(const Params& p, Row row, int lane, u32 unread) {
  const Indices first = indices_at(p, row, row.first, lane);
#pragma unroll 1
  for (int n = 0; n < TURNS; n += 16, row.first += 16 * row.stride) ask_for_indices(p, row, unread);
  return first;
}

// Goes on to `turn`, whose indices are those that came next.
DEVICE void advance(const Params& p, const Row& row, Ahead& ahead, int turn, int lane) {
  ahead.now = ahead.next, ahead.next = indices_at(p, row, turn + row.stride, lane);
}

// Rows of a slot that hold no key: words that are finite as values, RoPE and scales, so that no weight of 0 meets a NaN.
template <class R>
DEVICE void clear_rows(u32 rows, u32 scales, u32 live, int lane) {
  static_assert(R::BYTES > 512 && R::BYTES <= 1024, "two stores of a warp clear a row");
  u32 word = 0;
  if constexpr (!R::SCALES_APART) word = R::DEAD_SCALE;
#pragma unroll 1
  for (u32 dead = ~live & 0xffff; dead; dead &= dead - 1) {
    const int row = __ffs(dead) - 1;
    const u32 to = rows + row * R::BYTES + lane * 16;
    store_shared_16(to, word, word, word, word);
    if (lane < (R::BYTES - 512) / 16) store_shared_16(to + 512, word, word, word, word);
    if constexpr (R::SCALES_APART)
      if (lane == 0) store_shared_8(scales + row * R::SCALES_PITCH, R::DEAD_SCALES, R::DEAD_SCALES);
  }
  fence_async_shared();  // copies come here later
}

// One row to all 16 of a slot, through L1: where all CTAs ask for one slot of the cache, bulk copies would queue at its
// few lines of L2.
template <class R>
DEVICE void copy_to_all(u32 rows, const unsigned char* row, int lane) {
#pragma unroll 1
  for (int at = lane * 16; at < R::BYTES; at += 512) {
    const uint4 v = __ldg(reinterpret_cast<const uint4*>(row + at));
#pragma unroll
    for (int i = 0; i < 16; ++i) store_shared_16(rows + i * R::BYTES + at, v.x, v.y, v.z, v.w);
  }
  fence_async_shared();  // copies come here later
}

template <bool GIVES_WAY>
DEVICE void copy_keys(u32 destination, const void* source, u32 bytes, u32 barrier) {
  if constexpr (GIVES_WAY)
    bulk_copy(destination, source, bytes, barrier, evict_first());
  else
    bulk_copy(destination, source, bytes, barrier);
}

// Brings a share's live keys into slots, 64 a turn, 16 of them a warp's. Each warp looks at all positions, so that all
// four agree on the place of each live key without a word, and copies those whose place is in its slot. A turn is
// handed over once it is known whether a key follows: the row's last one is marked. A share without keys is one turn.
// GIVES_WAY: keys leave L2 before anything else does. FOR_FEW: made for few tokens, where a CTA has one row or a part of
// it, and its start counts: whether the share has no key is returned, with nothing handed over. QUICK: by a
// register more. SKIPS: asks whether a turn has no key at all. ONE_PASS: takes both halves of a turn together, by
// registers more.
template <int HEADS, Format FORMAT, bool GIVES_WAY = false, bool FOR_FEW = false, bool QUICK = FOR_FEW,
          bool SKIPS = FOR_FEW, bool ONE_PASS = FOR_FEW>
DEVICE bool produce(const Params& p, const Row& row, u32 shared, Indices ahead, int warp, int lane, int& slot,
                    int& parity, bool paced) {
  using L = Layout<HEADS, FORMAT>;
  using R = Rows<FORMAT>;
  const int request = uniform(request_of(p, row)), last = uniform(row.last), main_turns = uniform(row.main_turns);
  int filled = -16 * warp;  // live keys of this turn so far, from this warp's first on
  u32 live = 0, bulk = 0;   // rows of this warp's slot that have a key, and those that a bulk copy brings
  u32 limit = 0;            // `num_indices` of the turn's cache
  auto found_of = [&](int index, bool extra) {
    return __ballot_sync(~0u, QUICK ? static_cast<u32>(index) < limit : in_range(p.caches[extra], index));
  };
  // Takes what was found of a turn's first or second half or, in one pass, of both: a lane mostly has one key at most for
  // this warp's slot, and another pass brings a second.
  auto take = [&](int index_0, int index_1, u32 found_0, u32 found_1, bool extra, bool over) {
    const u32 below = (1u << lane) - 1;
    const bool alive = in_range(p.caches[extra], index_0);
    int place = filled + __popc(found_0 & below), second_place = 0;
    filled += __popc(found_0);
    if (ONE_PASS) second_place = filled + __popc(found_1 & below), filled += __popc(found_1);
    for (;;) {
      const u32 barrier = shared + L::RAW_FULL + slot * 8, rows = shared + L::RAW + slot * L::RAW_SLOT,
                scales = shared + L::SCALES + slot * L::SCALES_SLOT;
      const bool first = (ONE_PASS ? found_0 >> lane & 1 : alive) && static_cast<u32>(place) < 16;
      const u32 firsts = __ballot_sync(~0u, first);
      u32 seconds = 0;
      if (ONE_PASS) seconds = __ballot_sync(~0u, found_1 >> lane & 1 && static_cast<u32>(second_place) < 16);
      const u32 window = firsts | seconds;
      if (window) {
        const Cache& cache = p.caches[extra];
        const int index = first || !ONE_PASS ? index_0 : index_1, at = first || !ONE_PASS ? place : second_place;
        const bool mine = ONE_PASS ? window >> lane & 1 : first;
        const int leader = __shfl_sync(~0u, index, __ffs(window) - 1);
        const bool all_one = __popc(window) == 16 && __all_sync(~0u, !mine || index == leader);
        const Place from = place_at(cache, request, mine ? index : -1);
        mbarrier_wait(barrier + L::RAW_FREE - L::RAW_FULL, parity);
        const bool copies = is_live(cache, from);
        if constexpr (R::SCALES_APART)  // scales first: copies of rows are issued one by one
          if (copies) copy_8(scales + at * R::SCALES_PITCH, scales_of_key<R>(cache, from));
        const unsigned char* row = row_of_key<R>(cache, from);
        const u32 copied = __reduce_or_sync(~0u, copies ? 1u << at : 0u);
        live |= copied;
        if (all_one && copied) {
          copy_to_all<R>(rows, shuffle_pointer(row, __ffs(window) - 1), lane);
        } else {
          bool neighbours = !p.indices[extra] && copied == 0xffff;  // maybe, in dense attention
          if (neighbours) {
            const unsigned char* first_row = row - at * R::BYTES;
            const bool same = first_row == shuffle_pointer(first_row, lane & 16);
            neighbours = __all_sync(~0u, !mine || same);
          }
          if (neighbours && mine && at == 0) copy_keys<GIVES_WAY>(rows, row, 16 * R::BYTES, barrier);
          if (!neighbours && copies) copy_keys<GIVES_WAY>(rows + at * R::BYTES, row, R::BYTES, barrier);
          bulk |= copied;
        }
        if (ONE_PASS && firsts & seconds) {
          found_0 &= ~firsts, found_1 &= ~seconds | firsts;
          continue;
        }
      }
      const bool more = filled > TILE_KEYS - 16 * warp;
      if (!more && !over) break;
      if (live != 0xffff) {
        mbarrier_wait(barrier + L::RAW_FREE - L::RAW_FULL, parity);
        clear_rows<R>(rows, scales, live, lane);
      }
      if (lane == 0) {
        store_shared_4(shared + L::LIVE + slot * 4, live | (more ? 0 : LAST_TURN));
        if constexpr (R::SCALES_APART) mbarrier_expect(barrier, __popc(bulk) * R::BYTES);
      }
      __syncwarp();
      if constexpr (R::SCALES_APART)
        arrive_when_copied(barrier), warp_arrive(barrier, lane);
      else if (arrives(lane))
        mbarrier_arrive_expect(barrier, lane == 0 ? __popc(bulk) * R::BYTES : 0);
      if (paced) mbarrier_wait(barrier, 0), paced = false;
      next_slot<L::SLOTS>(slot, parity);
      live = bulk = 0;
      if (!more) break;
      filled -= TILE_KEYS, place -= TILE_KEYS, second_place -= TILE_KEYS;
    }
  };
  // Keys of a turn that fill no row of this warp's and end nothing are counted only. Narrower tiles lose by the votes.
  auto counts_only = [&](const u32 (&found)[2], bool over) {
    if constexpr (HEADS < 64) return false;
    const int after = filled + __popc(found[0]) + __popc(found[1]);
    if (over || after > TILE_KEYS - 16 * warp || (after > 0 && filled < 16)) return false;
    filled = after;
    return true;
  };
  // A few tokens' turn without a key takes 45 instructions. With 64 heads the start does not wait for its first indices.
  constexpr bool LATE = FOR_FEW && HEADS == 64;
  Positions there;
  if constexpr (ONE_PASS) there = positions_at(p, row, LATE ? row.first : row.first + row.stride, lane);
  if (LATE) ahead = {{-1, -1}};
  if (QUICK) limit = p.caches[uniform(row.first) >= main_turns].num_indices;
#pragma unroll 1
  for (int turn = uniform(row.first) - (LATE ? row.stride : 0);; turn += row.stride) {
    const Indices indices = ahead;
    const bool extra = turn >= main_turns, over = turn >= last;
    u32 found[2];
    if constexpr (ONE_PASS) {
      found[0] = found_of(indices.of[0], extra), found[1] = found_of(indices.of[1], extra);
      limit = there.limit;
      const int later = turn + 2 * row.stride;
      ahead = indices_at<QUICK>(p, there, lane);
      if (static_cast<u32>(later - main_turns) < static_cast<u32>(row.stride))  // the second cache's begin there
        there = positions_at(p, row, later, opaque(lane));
      else
        there.at += row.stride * TILE_KEYS, there.left -= row.stride * TILE_KEYS;
    } else {
      ahead = indices_at(p, row, turn + row.stride, lane);
      found[0] = found_of(indices.of[0], extra), found[1] = found_of(indices.of[1], extra);
    }
    if (SKIPS && !over && !(found[0] | found[1]) || counts_only(found, over)) continue;
    if (FOR_FEW && over && filled == -16 * warp) return true;
    if constexpr (ONE_PASS) {
      take(indices.of[0], indices.of[1], found[0], found[1], extra, over);
      if (over) return false;
    } else {
      take(indices.of[0], -1, found_of(indices.of[0], extra), 0, extra, over);
      if (over) return false;
      take(indices.of[1], -1, found_of(indices.of[1], extra), 0, extra, false);
    }
  }
}

// Whether a row has a key, by the four warps that gather.
DEVICE bool has_keys(const Params& p, const Row& row, int thread) {
  constexpr int AT_ONCE = 16;
  bool found = false;
#pragma unroll 1
  for (int extra = 0; extra < 2; ++extra) {
    const int length = extra ? row.extra_length : row.length;
    const int* indices = p.indices[extra] + row.token * p.indices_stride[extra];
    if (!p.indices[extra]) found |= length > 0;
#pragma unroll 1
    for (int first = 0; first < length && p.indices[extra]; first += AT_ONCE * 128) {
      int some[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) some[i] = __ldg(indices + min(first + thread + i * 128, length - 1));
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) found |= in_range(p.caches[extra], some[i]);
    }
  }
  return named_barrier_any<GATHER_BARRIER, 128>(found);
}

// ---- keys of bfloat16, straight into the tiles that wgmma reads -----------------------------------------------------

// A share's live keys, which warps take 16 at a time, lane i the i-th of a turn's part that is its warp's. As in
// `produce`, each warp looks at all positions.
struct Stream {
  int turn, half;       // the positions that come next
  int filled;           // live keys of the next turn so far, from this warp's first on
  Ahead ahead;
};

// Whether a turn's positions are keys as they come, and it is not the last: most rows have no dead index.
DEVICE bool is_whole(const Params& p, const Ahead& ahead, bool extra, bool next_extra) {
  const Cache &cache = p.caches[extra], &next = p.caches[next_extra];
  return __all_sync(~0u, in_range(cache, ahead.now.of[0]) && in_range(cache, ahead.now.of[1])) &&
         __any_sync(~0u, in_range(next, ahead.next.of[0]) || in_range(next, ahead.next.of[1]));
}

// The index that lane i takes of a whole turn: one of its warp's 16. Lane i + 16 gets the same one.
DEVICE int index_of_whole(const Indices& indices, int warp, int lane) {
  return __shfl_sync(~0u, warp < 2 ? indices.of[0] : indices.of[1], (warp & 1) * 16 + (lane & 15));
}

constexpr u32 NO_KEY = ~0u;

// The key that a lane below 16 brings for a turn.
struct Chosen {
  u32 word;   // an index, above it which cache
  bool last;  // whether this turn is the share's last

  DEVICE int extra() const { return word >> 31; }
};

constexpr int LIST_WORDS = 32;  // a warp's keys of two turns

DEVICE Stream begin_stream(const Params& p, const Row& row, int warp, int lane) {
  return {row.first, 0, -16 * warp, begin_share<false, true>(p, row, lane)};
}

// The next turn's, an even or odd one of its row. `list`: this warp's words, indices with their cache above them. What
// a warp's lanes agree on is told to the compiler, which else keeps them apart.
DEVICE Chosen choose_keys(const Params& p, const Row& row, Stream& s, u32 list, bool odd, int warp, int lane) {
  const u32 here = list + (odd ? 64 : 0), later = list + (odd ? 0 : 64);
  const int last = uniform(row.last), main_turns = uniform(row.main_turns), enough = TILE_KEYS - 16 * warp;
  int turn = uniform(s.turn), half = uniform(s.half), filled = uniform(s.filled);
  if (half == 0 && filled == -16 * warp &&
      is_whole(p, s.ahead, turn >= main_turns, turn + row.stride >= main_turns)) {
    const int index = index_of_whole(s.ahead.now, warp, lane);
    Chosen chosen{NO_KEY, false};
    if (lane < 16) chosen.word = index | (turn >= main_turns ? 0x80000000u : 0u);
    s.turn = turn + row.stride, advance(p, row, s.ahead, s.turn, lane);
    return chosen;
  }
  __syncwarp();
#pragma unroll 1
  while (filled <= enough && turn < last) {
    const bool extra = turn >= main_turns;
    if (!half) {  // positions that hold no key of this warp's, and with which no turn ends, are counted only
      const Cache& cache = p.caches[extra];
      const int after = filled + __popc(__ballot_sync(~0u, in_range(cache, s.ahead.now.of[0]))) +
                        __popc(__ballot_sync(~0u, in_range(cache, s.ahead.now.of[1])));
      if (after <= 0 || (filled >= 16 && after <= TILE_KEYS)) {
        filled = after, turn += row.stride;
        advance(p, row, s.ahead, turn, lane);
        continue;
      }
    }
    const int index = half ? s.ahead.now.of[1] : s.ahead.now.of[0];
    const bool alive = in_range(p.caches[extra], index);
    const u32 found = __ballot_sync(~0u, alive), word = index | (extra ? 0x80000000u : 0u);
    const int place = filled + __popc(found & ((1u << lane) - 1));
    if (alive && static_cast<u32>(place) < 16) store_shared_4(here + place * 4, word);
    if (alive && static_cast<u32>(place - TILE_KEYS) < 16) store_shared_4(later + (place - TILE_KEYS) * 4, word);
    filled += __popc(found);
    if (half) {
      turn += row.stride;
      advance(p, row, s.ahead, turn, lane);
    }
    half ^= 1;
  }
  __syncwarp();
  Chosen chosen{NO_KEY, filled <= enough};
  if (lane < min(filled, 16)) chosen.word = load_shared_4(here + lane * 4);
  s.turn = turn, s.half = half, s.filled = filled - TILE_KEYS;
  return chosen;
}

// Whether a share has no keys, asked behind the choice of its first turn.
DEVICE bool has_no_keys(const Stream& s, const Chosen& first, int warp) {
  return first.last && uniform(s.filled) == -16 * warp - TILE_KEYS;
}

DEVICE Place place_of(const Params& p, int request, const Chosen& chosen) {
  return place_at(p.caches[chosen.extra()], request, chosen.word == NO_KEY ? -1 : static_cast<int>(chosen.word & 0x7fffffff));
}

// A warp copies 16 keys, eight lanes 128 bytes of one: a lane has four keys, every fourth, from lane / 8 on. Lane i
// knows the row of key i; a dead key's place becomes zeros. Where all 16 are one key, its row comes through L1: others
// may ask for the same lines of L2.
struct OwnRows {
  const unsigned char* row;
  u32 alive;
  bool all_one;
};

template <class R>
DEVICE OwnRows own_rows(const Params& p, const Chosen& chosen, Place place) {
  const Cache& cache = p.caches[chosen.extra()];
  const bool live = is_live(cache, place);
  const u32 alive = __ballot_sync(~0u, live), first = __shfl_sync(~0u, chosen.word, 0),
            like_first = __ballot_sync(~0u, live && chosen.word == first);
  const unsigned char* row = live ? row_of_key<R>(cache, place) : reinterpret_cast<const unsigned char*>(p.q);
  return {row, alive, like_first == 0xffff};
}

// Asks a warp's keys into L2, while room for them is waited for.
template <class R>
DEVICE void prefetch_keys(const OwnRows& own, int lane) {
  if (own.alive >> lane & 1) prefetch_bulk_to_l2(own.row, R::BYTES);
  converge();
}

// Address of a lane's first 16 bytes in a tile of [64, 64] a chunk of 64 dims, 128-byte rows, swizzled.
DEVICE u32 own_place(u32 tile, int warp, int lane) {
  return tile + (warp * 16 + lane / 8) * 128 + ((lane ^ lane / 8) & 7) * 16;
}

template <bool BY_L1, int CHUNK, int LAST, int TO>
DEVICE void copy_chunks_of(u32 to, const unsigned char* from, u32 bytes) {
  if constexpr (CHUNK < LAST) {
    if constexpr (BY_L1)
      copy_16_or_zeros_by_l1<TO + CHUNK * TILE_KEYS * 128, CHUNK * 128>(to, from, bytes);
    else
      copy_16_or_zeros<TO + CHUNK * TILE_KEYS * 128, CHUNK * 128>(to, from, bytes);
    copy_chunks_of<BY_L1, CHUNK + 1, LAST, TO>(to, from, bytes);
  }
}

// Chunks [FIRST, LAST) of 64 dims of a lane's I-th key and those behind it. One instruction a copy: offsets are
// constants.
template <bool BY_L1, int FIRST, int LAST, int I = 0>
DEVICE void copy_chunks_by(const OwnRows& own, u32 to, int lane) {
  if constexpr (I < 4 && FIRST < LAST) {
    const int key = I * 4 + lane / 8;
    const unsigned char* from = shuffle_pointer(own.row, key) + lane % 8 * 16;
    copy_chunks_of<BY_L1, FIRST, LAST, I * 512>(to ^ (I & 1) * 64, from, own.alive >> key & 1 ? 16 : 0);
    copy_chunks_by<BY_L1, FIRST, LAST, I + 1>(own, to, lane);
  }
}

template <int FIRST, int LAST>
DEVICE void copy_chunks(const OwnRows& own, u32 to, int lane) {
  if (own.all_one)
    copy_chunks_by<true, FIRST, LAST>(own, to, lane);
  else
    copy_chunks_by<false, FIRST, LAST>(own, to, lane);
}
