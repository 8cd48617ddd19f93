// Token-level sparse MLA over a paged cache, for SM90: one cluster a query token and tile of heads, one CTA a share of
// its keys.
//
// Roles, a warpgroup each: `produce` brings the rows of 64 keys a turn into shared memory as they are; `score` makes
// float16 (or bfloat16) fragments of them, which are the register operand of S^T = K Q^T and, stored once, the values;
// two warpgroups `accumulate` 256 dims of the values each. A cluster's partial results are merged through distributed
// shared memory.
//
// Kernels called balanced are given lengths, and share rows evenly among all CTAs instead where these are unequal.

#include "code.cuh"
#include "empty.cuh"
#include "gather.cuh"
#include "queries.cuh"
#include "scores.cuh"
#include "values.cuh"

// ROWS follow one another, the next one's keys on their way while this one ends; else one share of one row. WIDER:
// a cluster is of three CTAs or more, or has a part of a row's keys. FOR_FEW: as `produce` says; rows without a key end there.
// TWO_WAYS: this is one of a kernel's two.
template <int HEADS, Format FORMAT, Launch LAUNCH, bool WIDER = false, bool FOR_FEW = false, bool TWO_WAYS = false>
DEVICE void attend(const Params& p) {
  constexpr bool PERSISTENT = is_persistent(LAUNCH), BALANCED = LAUNCH == Launch::BALANCED, SHARES = in_shares(LAUNCH),
                 IN_REGISTERS = in_registers(LAUNCH), ONE = ONE_SCORER<HEADS, LAUNCH>;
  constexpr int THREADS = THREADS_OF<HEADS, LAUNCH>, QUERY_THREADS = THREADS - 128;  // all but those that gather
  using L = Layout<HEADS, FORMAT>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 shared = shared_address(shared_memory);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x >> 7, 0), thread = threadIdx.x & 127;
  Row row = PERSISTENT ? first_row<LAUNCH>(p, shared + L::INTERVAL) : this_row<LAUNCH>(p);
  if (row.token >= end_of_tokens<LAUNCH>(p)) {
    wait_for_prerequisites();
    return;
  }
  constexpr int PRODUCER = THREADS / 128 - 1;
  // Registers of each of two warpgroups, or twice as many of one, to the gather: pieces begin anywhere in a row, and turns
  // of rows and of few tokens are taken in one pass.
  constexpr bool MORE_OF_64 = BALANCED || FOR_FEW || LAUNCH == Launch::ROWS;
  constexpr int MOVED = HEADS < 64 ? (BALANCED ? 8 : 0) : MORE_OF_64 && L::GATHER_REGISTERS < 32 ? 4 : 0;
  // The first of two warpgroups of scores gives this many to each of those that accumulate, less what the second does.
  constexpr int KEPT = ONE ? 0 : is_held(LAUNCH) ? 24 : LAUNCH == Launch::FOLDS ? 8 : 0,
                OF_REST = KEPT > 16 ? 16 : 0;
  // One warpgroup of scores serves 32 heads.
  constexpr bool ONE_OF_32 = HEADS == 32 && ONE;
  constexpr int GATHER = ONE_OF_32 ? 24 : L::GATHER_REGISTERS,
                OF_32 = is_held(LAUNCH) || FORMAT == FP8_DS_MLA_V4 ? 168 : 160;
  constexpr int SCORERS = ONE ? 1 : 2;
  constexpr bool BY_GROUPS = TURNS_BY_GROUP<HEADS, FORMAT, LAUNCH>;
  // Rows whose indices come to L1, since they are what is waited for where most are dead: by copies to an unread word or,
  // where there is none, by loads from a CTA's second piece on. Kernels of two ways with fewer heads take 2 to 3 % more
  // by this and the next.
  constexpr bool ASKS = !FOR_FEW && !BY_LENGTH && !TWO_WAYS && HEADS != 24 &&
                        (LAUNCH == Launch::ROWS || LAUNCH == Launch::MANY_ROWS || LAUNCH == Launch::CLUSTERS && HEADS < 64),
                 LOADS = BALANCED && HEADS == 64;
  // Whether e4m3 of groups with small scales are divided where they lie. In clusters usual keys take 1 % more by it, tiles
  // of 32 heads would spill, turns by group take keys as they are, and a row's shares have one way in all kernels.
  constexpr bool LOWERS = LAUNCH == Launch::ROWS && !TWO_WAYS && HEADS != 32;

  int empty = 0;  // whether the gather found no key
  // The way from an index to a key in shared memory is the longest of the start.
  Indices ahead;
  if (warpgroup == PRODUCER) {
    if constexpr (FOR_FEW) {
      if (HEADS < 64) ahead = indices_at(p, row, row.first, thread & 31);
      ask_for_indices(p, row, shared + (HEADS == 64 ? L::ROUGH : L::INTERVAL));
    } else {
      if constexpr (ASKS)
        ahead = begin_asking<PERSISTENT ? 32 : 16>(p, row, thread & 31, shared + L::INTERVAL);
      else
        ahead = begin_share<IN_REGISTERS>(p, row, thread & 31).now;
    }
  }
  // A warp each: one thread takes 600 cycles for all of them, 32 of a warp even more.
  if (thread % 32 == 0)
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < L::NUM_BARRIERS; i += THREADS / 32) {
      const u32 barrier = L::BARRIERS + i * 8;
      if (BALANCED && HEADS == 64 && (barrier == L::INTERVAL || barrier == L::INTERVAL + 8)) continue;
      int arrivals = 4 * ARRIVALS_OF_A_WARP;
      if (barrier < L::RAW_FREE) arrivals = ARRIVALS_OF_A_WARP + (Rows<FORMAT>::SCALES_APART ? 32 : 0);
      if (barrier >= L::RAW_FREE && barrier < L::WEIGHTS_FULL) arrivals = SCORERS * ARRIVALS_OF_A_WARP;
      if (barrier == L::WEIGHTS_FREE || barrier == L::FACTORS_FREE) arrivals = 8 * ARRIVALS_OF_A_WARP;
      if (barrier == L::STATES_FULL || barrier == L::PACKETS_FULL) arrivals = 1;
      if (barrier == L::OWN_FULL) arrivals = (LAUNCH == Launch::GROUPS ? 13 : 12) * ARRIVALS_OF_A_WARP;
      if (LAUNCH == Launch::GROUPS && barrier == L::ALL_LEFT) arrivals = 12 * ARRIVALS_OF_A_WARP;
      if (LAUNCH == Launch::GROUPS && barrier == L::SHARES_KNOWN) arrivals = ARRIVALS_OF_A_WARP;
      if (LAUNCH == Launch::SHARES && barrier == L::MEETING) arrivals = 8 * p.splits;
      if (PERSISTENT && HEADS == 64 && barrier == L::QUERIES_FREE) arrivals = 4 * ARRIVALS_OF_A_WARP;
      if (PERSISTENT && HEADS == 64 && barrier == L::QUERIES_FULL) arrivals = 128;
      mbarrier_init(shared + barrier, arrivals);
      fence_barrier_init();
    }
  if (BALANCED && HEADS == 64 && threadIdx.x == 0) store_shared_4(shared + L::ROUGH, 0);
  __syncthreads();
  if (LAUNCH == Launch::SHARES) open_meeting(p);

  // ptxas puts the way of a condition that does not hold first, and the other one far behind it. What follows the start
  // comes from memory along with it: the gather, the longest way of all. Of 64 heads without clusters the other is faster.
  if (HEADS < 64 || LAUNCH == Launch::CLUSTERS ? warpgroup < PRODUCER : warpgroup != PRODUCER) {
    load_queries<HEADS, FORMAT, QUERY_THREADS>(p, row, shared, threadIdx.x, false, 0);
    fence_async_shared();
    // Behind the queries: in front of them a value of each role would lie in memory.
    if constexpr (LAUNCH == Launch::SHARES && HEADS == 64) prefetch_code<128>();
    named_barrier<QUERY_BARRIER, QUERY_THREADS>();
    if (LAUNCH == Launch::SHARES) await_opened(p);
    if (BALANCED) row = token_at(p, shared + L::INTERVAL, row.token);  // else what it comes from stays in registers
    Ring at{0, thread / 32, 0, 0, 0};
    u32 row_parity = 0, query_parity = 0, freed = 0;
    // Later rows' queries are loaded by the warpgroups of scores; of 64 heads the one that gathers has copied them.
    auto next_queries = [&]() {
      row = next_row<LAUNCH, false>(p, shared + L::INTERVAL, row);
      if (row.token >= end_of_tokens<LAUNCH>(p)) return false;
      const int worker = opaque(warpgroup == 0 ? thread : 128 + thread);
      if (SHARES && !begins_row(p, row)) {
        if (warpgroup == 0) {
          if (HEADS < 64) renew_running_max<L, LAUNCH == Launch::SHARES>(shared, worker, row_parity);
        }
        row_parity ^= 1;
        return true;
      }
      if constexpr (HEADS == 64) {
        mbarrier_wait(shared + L::QUERIES_FULL, SHARES ? query_parity : row_parity);
        query_parity ^= 1;
        convert_copied_queries<L>(p, shared, worker, row_parity);
      } else {
        named_barrier<QUERY_BARRIER, 128 * SCORERS>();
        load_queries<HEADS, FORMAT, 128 * SCORERS>(p, row, shared, worker, true, row_parity);
      }
      fence_async_shared();
      named_barrier<QUERY_BARRIER, 128 * SCORERS>();
      if (HEADS == 64 && freed) warp_arrive(freed, worker & 31);
      row_parity ^= 1;
      return true;
    };
    auto next_held = [&]() {
      if (ends_row(p, row)) return false;
      row = next_row<LAUNCH, false>(p, shared + L::INTERVAL, row);
      return true;
    };
    if (warpgroup == 0) {
      more_registers<ONE_OF_32 ? 512 - GATHER - 2 * OF_32
                               : L::SCORE_REGISTERS - (HEADS < 32    ? MOVED
                                                       : HEADS == 64 ? 2 * MOVED
                                                                     : 0) - 2 * KEPT + OF_REST>();
      if (is_held(LAUNCH) && thread == 0) store_shared_4(shared + L::FOLD_TOPS, 0);
      if (is_held(LAUNCH)) hold(row.token), hold(row.tile);  // else both roles keep one register for them
      if constexpr (BY_GROUPS) {
        // Code of turns by group lies behind the row's end: ptxas puts what comes back to the loop's begin last.
        float sums[HEADS / 4];
        int seen = 0;
        for (;;) {
          const u32 later = score<HEADS, FORMAT, LAUNCH, WIDER, FOR_FEW, LOWERS>(p, row, shared, thread, at, row_parity,
                                                                         query_parity, sums, seen);
          named_barrier<SCORE_BARRIER, 128>();  // else it takes rows to differ within a warp, and spills
          int next = uniform(opaque(later == LEFT_BY_GROUP));
          if (next == 0) {
            freed = later, seen = 0;
            forget(sums);
            next = next_queries() ? 0 : -1;
          }
          next = opaque(next);
          if (next < 0) break;
          if (next > 0) {
            score_by_group<L, SCORE_BARRIER>(p, row, shared, opaque(thread), at, sums, seen != 0);
            seen = 2;
          }
        }
      } else {
        for (;;) {
          float sums[HEADS / 4];
          int seen;
          const u32 later = score<HEADS, FORMAT, LAUNCH, WIDER, FOR_FEW, LOWERS>(p, row, shared, thread, at, row_parity,
                                                                         query_parity, sums, seen);
          if (HEADS == 64) freed = later;
          if (is_held(LAUNCH)) {
            if (later) break;
            renew_running_max<L, false>(shared, thread, 0);
            row_parity ^= 1;
          } else if (!PERSISTENT || !next_queries()) {
            break;
          }
        }
      }
    } else if (warpgroup < 3) {
      if constexpr (HEADS > 24 || KEPT)
        more_registers<ONE_OF_32 ? OF_32 : L::VALUE_REGISTERS - (HEADS == 32 ? MOVED : 0) + KEPT>();
      KeptOfShares<L, LAUNCH> before;
      if constexpr (BY_GROUPS) {
        Accumulators<HEADS> o;
        u32 resumed = 0;
        for (;;) {
          int next = opaque(accumulate<HEADS, FORMAT, LAUNCH, WIDER, FOR_FEW>(
              p, row, shared, warpgroup - 1, thread, at, row_parity, query_parity, before, o, resumed));
          if (next == 0) {
            forget(o[0]), forget(o[1]);
            resumed = 0;
            row = next_row<LAUNCH, false>(p, shared + L::INTERVAL, row), row_parity ^= 1;
            next = row.token >= end_of_tokens<LAUNCH>(p) ? -1 : 0;
          }
          next = opaque(next);
          if (next < 0) break;
          if (next > 0) {
            accumulate_by_group<L>(shared, warpgroup - 1, opaque(thread), at, o);
            resumed = 1;
          }
        }
      } else {
        do {
          Accumulators<HEADS> none;
          accumulate<HEADS, FORMAT, LAUNCH, WIDER, FOR_FEW>(p, row, shared, warpgroup - 1, thread, at, row_parity,
                                                            query_parity, before, none, 0);
          if (is_held(LAUNCH) && ends_row(p, row)) break;
          if (SHARES && ends_row(p, row)) query_parity ^= 1;
          if (PERSISTENT) row = next_row<LAUNCH, false>(p, shared + L::INTERVAL, row), row_parity ^= 1;
        } while (PERSISTENT && row.token < end_of_tokens<LAUNCH>(p));
      }
      if (by_halves<L, LAUNCH, WIDER>(p, row)) return;
    } else if constexpr (!ONE) {
      more_registers<L::REST_REGISTERS - (HEADS < 32 ? MOVED : 0) - OF_REST>();
      do {
        score_rest<HEADS, FORMAT, LAUNCH, FOR_FEW, LOWERS>(row, shared, thread, at);
      } while (is_held(LAUNCH) ? next_held() : PERSISTENT && next_queries());
      if (LAUNCH == Launch::CLUSTERS) stand_by<L>(p, row, shared, false, thread);
      if (is_held(LAUNCH)) stand_by_for_shares<L>(p, shared, false, thread);
      return;
    }
    if constexpr (BALANCED)
      if (warpgroup > 0)
        add_up_cuts<L, VALUES_BARRIER, L::COLUMNS - L::QUERY>(p, shared, shared + L::QUERY,
                                                              (warpgroup - 1) * 128 + thread);
    if (LAUNCH == Launch::CLUSTERS && !leaves_units<HEADS>(row)) {
      row.rank = rank_here(row);
      finish<L, 12, WIDER>(p, row, shared, threadIdx.x / 32, threadIdx.x % 32);
    }
    if constexpr (is_held(LAUNCH)) finish_shares<L>(p, row, shared, threadIdx.x / 32, threadIdx.x % 32);
    if constexpr (LAUNCH == Launch::GROUPS) finish_group<L>(p, row, shared, threadIdx.x / 32, threadIdx.x % 32);
    if (FOR_FEW) empty = opaque(0);  // ptxas must not see that only the gather goes where this is asked
  } else {
    fewer_registers<GATHER + 2 * MOVED>();
    launch_dependents();
    const int warp = __shfl_sync(~0u, thread >> 5, 0), lane = kept(thread & 31);
    int slot = warp, parity = 1;
    u32 row_parity = 0;
    for (bool first = true;; first = false) {
      // Groups over fp8 and tiles of 32 heads would spill.
      constexpr bool QUICK = FOR_FEW && HEADS != 32 && (LAUNCH == Launch::CLUSTERS || FORMAT == FP8_DS_MLA_V4);
      // Rows of 64 heads have registers for one pass over fp8 alone.
      constexpr bool ONE_PASS = FOR_FEW || ASKS && (HEADS < 64 || LAUNCH == Launch::ROWS && FORMAT == FP8_DS_MLA);
      empty = produce<HEADS, FORMAT, LAUNCH == Launch::SHARES, FOR_FEW, QUICK, FOR_FEW || ASKS || LOADS, ONE_PASS>(
          p, row, shared, ahead, warp, lane, slot, parity, HEADS == 64 && first);
      if (!PERSISTENT || is_held(LAUNCH) && ends_row(p, row)) break;
      row = next_row<LAUNCH, true>(p, shared + L::INTERVAL, row);
      if (row.token >= end_of_tokens<LAUNCH>(p)) break;
      if constexpr (ASKS)
        ahead = begin_asking<PERSISTENT ? 32 : 16>(p, row, lane, shared + L::INTERVAL);
      else
        ahead = begin_share<IN_REGISTERS, LOADS>(p, row, lane).now;
      if (is_held(LAUNCH) || SHARES && !begins_row(p, row)) continue;
      if constexpr (HEADS < 64 && !SHARES) {
        if (!p.indices[0] && warp * 16 < HEADS) prefetch_queries<HEADS, FORMAT>(p, row, opaque(warp * 32 + lane));
      }
      if constexpr (HEADS == 64) {
        prefetch_queries<HEADS, FORMAT>(p, row, opaque(warp * 32 + lane));
        mbarrier_wait(shared + L::QUERIES_FREE, row_parity);
        copy_queries<HEADS, FORMAT, 128>(p, row, shared, opaque(warp * 32 + lane));
        arrive_when_copied(shared + L::QUERIES_FULL);
        row_parity ^= 1;
      }
    }
    if (!FOR_FEW || !empty) {
      if (LAUNCH == Launch::CLUSTERS) stand_by<L>(p, row, shared, true, thread);
      if (is_held(LAUNCH)) stand_by_for_shares<L>(p, shared, true, thread);
      if (LAUNCH == Launch::SHARES) await_opened(p);
      if constexpr (LAUNCH == Launch::GROUPS) carry<L>(p, row, shared, warp, lane);
      wait_for_prerequisites();
      if (FOR_FEW) empty = opaque(0);
    }
  }
  // Behind all roles, since each of them gets its code from memory: where these 200 instructions lay in front of one, live rows
  // of 8 x 64 took 1.04.
  if constexpr (FOR_FEW)
    if (empty) end_empty_share<HEADS, FORMAT, LAUNCH>(p, row, shared);
}

// Attends to rows as the shape says. YIELDS: unless another launch has shared the tokens evenly.
template <int HEADS, Format FORMAT, Launch LAUNCH, bool YIELDS, bool WIDER = false, bool FOR_FEW = false>
DEVICE void attend_by_shape(const Params& p) {
  using L = Layout<HEADS, FORMAT>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  if (YIELDS && is_done<L::THREADS>(p, shared_address(shared_memory) + L::RAW)) return;
  attend<HEADS, FORMAT, LAUNCH, WIDER, FOR_FEW>(p);
}

// Rows of 64 heads that follow one another have one way for lengths of either kind. Others have two: with fewer heads
// ptxas takes the warps that gather for parted where intervals come from memory, and rows of one length take 2 % more.
template <int HEADS, Format FORMAT, Launch LAUNCH>
DEVICE void attend_by_lengths(const Params& p) {
  using L = Layout<HEADS, FORMAT>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 shared = shared_address(shared_memory), interval = shared + L::INTERVAL, scratch = shared + L::RAW;
  if constexpr (HEADS == 64 && LAUNCH == Launch::ROWS) {
    find_interval<L::THREADS>(p, interval, scratch);
    attend<HEADS, FORMAT, Launch::BALANCED>(p);
  } else {
    const Cost cost = add_up_costs<L::THREADS>(p, scratch);
    if (shares_evenly<LAUNCH>(p, cost)) {
      share_evenly<L::THREADS>(p, interval, scratch, cost);
      attend<HEADS, FORMAT, Launch::BALANCED>(p);
    } else {
      attend<HEADS, FORMAT, LAUNCH, false, false, true>(p);
    }
  }
}

template <int HEADS, Format FORMAT, bool YIELDS = false>
__global__ void __launch_bounds__(Layout<HEADS, FORMAT>::THREADS, 1)
    sparse_attention_rows(const __grid_constant__ Params p) {
  if constexpr (HEADS == 64) prefetch_code<128>();
  using L = Layout<HEADS, FORMAT>;
  EXPORT_SHARED_BYTES(L);
  attend_by_shape<HEADS, FORMAT, Launch::ROWS, YIELDS>(p);
}

template <int HEADS, Format FORMAT>
__global__ void __launch_bounds__(Layout<HEADS, FORMAT>::THREADS, 1)
    sparse_attention_many_rows(const __grid_constant__ Params p) {
  prefetch_code<128>();
  using L = Layout<HEADS, FORMAT>;
  EXPORT_SHARED_BYTES(L);
  attend<HEADS, FORMAT, Launch::MANY_ROWS>(p);
}

template <int HEADS, Format FORMAT>
__global__ void __launch_bounds__(Layout<HEADS, FORMAT>::THREADS, 1)
    sparse_attention_balanced_rows(const __grid_constant__ Params p) {
  prefetch_code<128>();
  using L = Layout<HEADS, FORMAT>;
  EXPORT_SHARED_BYTES(L);
  attend_by_lengths<HEADS, FORMAT, Launch::ROWS>(p);
}

// The attribute says that it is launched in clusters only. Without it each cluster barrier asks whether it was.
template <int HEADS, Format FORMAT, bool YIELDS = false>
__global__ void __attribute__((cluster_dims())) __launch_bounds__(Layout<HEADS, FORMAT>::THREADS, 1)
    sparse_attention_clusters(const __grid_constant__ Params p) {
  if (BY_LENGTH) prefetch_code<128>();
  using L = Layout<HEADS, FORMAT>;
  EXPORT_SHARED_BYTES(L);
  attend_by_shape<HEADS, FORMAT, Launch::CLUSTERS, YIELDS, (HEADS < 64), is_for_few(HEADS, FORMAT)>(p);
}

// Clusters of two CTAs that have all keys of their row. Other clusters have no code for it: launches of few tokens get
// each line of what they run from memory, and it would lie in between.
template <int HEADS, Format FORMAT, bool YIELDS = false>
__global__ void __attribute__((cluster_dims())) __launch_bounds__(Layout<HEADS, FORMAT>::THREADS, 1)
    sparse_attention_pairs(const __grid_constant__ Params p) {
  using L = Layout<HEADS, FORMAT>;
  EXPORT_SHARED_BYTES(L);
  attend_by_shape<HEADS, FORMAT, Launch::CLUSTERS, YIELDS>(p);
}

template <int HEADS, Format FORMAT>
__global__ void __attribute__((cluster_dims())) __launch_bounds__(Layout<HEADS, FORMAT>::THREADS, 1)
    sparse_attention_balanced_clusters(const __grid_constant__ Params p) {
  prefetch_code<128>();
  using L = Layout<HEADS, FORMAT>;
  EXPORT_SHARED_BYTES(L);
  attend_by_lengths<HEADS, FORMAT, Launch::CLUSTERS>(p);
}

// Launched in clusters or not.
template <int HEADS, Format FORMAT>
__global__ void __launch_bounds__(Layout<HEADS, FORMAT>::THREADS, 1)
    sparse_attention_shares(const __grid_constant__ Params p) {
  using L = Layout<HEADS, FORMAT>;
  EXPORT_SHARED_BYTES(L);
  attend<HEADS, FORMAT, Launch::SHARES>(p);
}

template <int HEADS, Format FORMAT>
__global__ void __launch_bounds__(THREADS_OF<HEADS, Launch::FOLDS>, 1)
    sparse_attention_folds(const __grid_constant__ Params p) {
  using L = Layout<HEADS, FORMAT>;
  EXPORT_SHARED_BYTES(L);
  attend<HEADS, FORMAT, Launch::FOLDS>(p);
}

template <int HEADS, Format FORMAT>
__global__ void __attribute__((cluster_dims())) __launch_bounds__(THREADS_OF<HEADS, Launch::HELD>, 1)
    sparse_attention_held(const __grid_constant__ Params p) {
  using L = Layout<HEADS, FORMAT>;
  EXPORT_SHARED_BYTES(L);
  attend<HEADS, FORMAT, Launch::HELD>(p);
}

template <int HEADS, Format FORMAT>
__global__ void __attribute__((cluster_dims())) __launch_bounds__(THREADS_OF<HEADS, Launch::HELD_BY_ONE>, 1)
    sparse_attention_held_by_one(const __grid_constant__ Params p) {
  using L = Layout<HEADS, FORMAT>;
  EXPORT_SHARED_BYTES(L);
  attend<HEADS, FORMAT, Launch::HELD_BY_ONE>(p);
}

template <int HEADS, Format FORMAT, bool YIELDS = false>
__global__ void __launch_bounds__(Layout<HEADS, FORMAT>::THREADS, 1)
    sparse_attention_groups(const __grid_constant__ Params p) {
  prefetch_code<128>();
  using L = Layout<HEADS, FORMAT>;
  EXPORT_SHARED_BYTES(L);
  attend_by_shape<HEADS, FORMAT, Launch::GROUPS, YIELDS, false, is_for_few(HEADS, FORMAT)>(p);
}

template <int HEADS, Format FORMAT>
__global__ void __launch_bounds__(Layout<HEADS, FORMAT>::THREADS, 1)
    sparse_attention_balanced_groups(const __grid_constant__ Params p) {
  prefetch_code<128>();
  using L = Layout<HEADS, FORMAT>;
  EXPORT_SHARED_BYTES(L);
  attend_by_lengths<HEADS, FORMAT, Launch::GROUPS>(p);
}
