// A CTA of `indexer_logits.cu`, which has the products and says how it works.
#pragma once

#include "indexer_keys.cuh"
#include "planes.cuh"

// ---- the consumers --------------------------------------------------------------------------------------------------

// Sums of four neighbouring lanes, (0 + 1) + (2 + 3) of each value; a lane is left with the quarter of them that its
// number names, low bit first, or with the only one.
template <int COUNT, int BIT = 1>
DEVICE void add_up(float* values, int lane) {
  if constexpr (COUNT == 1) {
    values[0] += __shfl_xor_sync(~0u, values[0], BIT);
  } else {
#pragma unroll
    for (int i = 0; i < COUNT / 2; ++i) {
      const bool upper = lane & BIT;
      const float sent = upper ? values[i] : values[i + COUNT / 2];
      values[i] = (upper ? values[i + COUNT / 2] : values[i]) + __shfl_xor_sync(~0u, sent, BIT);
    }
  }
  if constexpr (BIT == 1) add_up<(COUNT > 1 ? COUNT / 2 : 1), 2>(values, lane);
}

// A lane's scores of a tile: TOKENS tokens and ROWS keys, eight apart.
template <int TOKENS_, bool WHOLE>
struct Share {
  static constexpr int TOKENS = TOKENS_ / 4 > 1 ? TOKENS_ / 4 : 1, ROWS = TOKENS_ >= 4 ? 2 : 1;

  static DEVICE int token(int lane, int t) {
    if (WHOLE) return lane % 4 + 4 * t;
    return TOKENS_ >= 4 ? (lane & 1) * (TOKENS_ / 2) + (lane >> 1 & 1) * (TOKENS_ / 4) + t : TOKENS_ == 2 ? lane & 1 : 0;
  }
  static DEVICE int first_row(int lane) {
    return TOKENS_ >= 4 ? 0 : TOKENS_ == 2 ? lane >> 1 & 1 : lane & 1;
  }
  static DEVICE bool stores(int lane) { return TOKENS_ > 1 || (lane & 2) == 0; }
};

// Barriers of the slots that hold keys, of all CTAs that bring them.
template <class L>
struct FreeSlots {
  u32 barriers[L::CLUSTER];

  DEVICE explicit FreeSlots(u32 shared) {
#pragma unroll
    for (int rank = 0; rank < L::CLUSTER; ++rank)
      barriers[rank] = L::CLUSTER > 1 ? peer_address(shared + L::KEY_FREE, rank) : shared + L::KEY_FREE;
    if (L::CLUSTER > 1) hold(barriers);  // else they are made again for every tile
  }

  // This warp has read a slot's keys.
  DEVICE void release(const Slot& slot, int lane) const {
    if constexpr (L::CLUSTER == 1) {
      warp_arrive(of_slot(barriers[0], slot), lane);
    } else {
#pragma unroll
      for (int rank = 0; rank < L::CLUSTER; ++rank)
        if (arrives(lane)) mbarrier_arrive_peer(of_slot(barriers[rank], slot));
    }
  }
};

// Begins the products of a tile and a part of the queries.
template <int N>
DEVICE void multiply(float (&products)[N], u64 keys, u64 queries) {
  hold(products);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma_e4m3(products, keys + k * 2, queries + k * 2, k > 0);
  wgmma_commit();
}

// Whether no products were begun behind some.
struct Last {
  DEVICE constexpr operator bool() const { return true; }
};
struct Not {
  DEVICE constexpr operator bool() const { return false; }
};

// Sums of a part's tokens over this thread's heads, of two keys each.
template <class L>
DEVICE void weigh(const float (&products)[L::PART_COLUMNS / 2], const float* weights, float* sums) {
#pragma unroll
  for (int j = 0; j < L::HEADS / 4; ++j)
#pragma unroll
    for (int t = 0; t < L::PART_TOKENS; ++t)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int column = t * (L::HEADS / 4) + j;
        const float positive = positive_or_nan(products[column / 2 * 4 + r * 2 + column % 2]);
        float& sum = sums[t * 2 + r];
        sum = j ? __fmaf_rn(weights[column], positive, sum) : weights[column] * positive;
      }
}

// Sums of four, two apart, in the order of `add_up`; the first is left with it.
DEVICE void add_up_own(float* values) { values[0] = (values[0] + values[2]) + (values[4] + values[6]); }

// Heads whose relu is x + |x|, twice as much, by half of the weight: a maximum for each would leave one pipe more to do
// than the other. The bits are the same but for weights below 2^-125, whose half is not exact. ptxas' schedule decides
// which heads, and for which kernels (docs/notes.md).
template <class L, Source SOURCE, bool PLANES>
constexpr bool by_addition(int head) {
  return SOURCE == FLAT && L::HEADS == 64 && (PLANES ? head / 2 % 2 : head % 2 == 0);
}

// The same of a part of all heads of a thread's tokens: four sums each, of the heads that `weigh` gives four lanes.
template <class L, Source SOURCE, bool PLANES>
DEVICE void weigh_whole(const float (&products)[L::PART_COLUMNS / 2], const float* weights, float* sums, int part) {
#pragma unroll
  for (int i = 0; i < L::PART_COLUMNS / 8; ++i)
#pragma unroll
    for (int c = 0; c < 2; ++c)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int of_tokens = (part * (L::PART_COLUMNS / 8) + i) * 2 + c, t = of_tokens / L::HEADS;
        const int head = of_tokens % L::HEADS;
        const float product = products[i * 4 + r * 2 + c], weight = weights[of_tokens];
        const float positive =
            by_addition<L, SOURCE, PLANES>(head) ? product + fabsf(product) : positive_or_nan(product);
        float& sum = sums[t * 8 + head % 8 / 2 * 2 + r];
        sum = head >= 8 || head % 2 ? __fmaf_rn(weight, positive, sum) : weight * positive;
        if (head == L::HEADS - 1) add_up_own(sums + t * 8 + r);
      }
}

// Stores a thread's scores, as numbers or by planes (planes.cuh).
template <class L, Source SOURCE, bool PLANES>
struct Stored {
  using S = Share<L::TOKENS, L::WHOLE>;
  static_assert(!PLANES || S::ROWS == 2, "a thread has both keys of a word");
  const Params& p;
  const u64 policy;
  float* rows[S::TOKENS];
  Bounds bounds[S::TOKENS];

  DEVICE explicit Stored(const Params& params)
      : p(params), policy(SOURCE != FLAT && params.keeps_scores ? evict_last() : evict_normal()) {}

  DEVICE void begin(const uint4& group, int lane) {
#pragma unroll
    for (int t = 0; t < S::TOKENS; ++t) {
      const int token = group.x, of_group = S::token(lane, t);
      bounds[t] = {0, 0};
      if (of_group < static_cast<int>(group.y) && S::stores(lane)) bounds[t] = bounds_of<SOURCE>(p, token + of_group);
      rows[t] = p.out + (token + of_group) * p.out_stride;
      if (PLANES) {  // a word is stored if the row has one of its columns
        rows[t] -= (threadIdx.x >> 5 & 3) * 8;
        bounds[t].start -= 8;
      }
      if (!PLANES || L::HEADS == 32) hold(rows[t]);  // else it is computed for every score, in less time with 64 heads
    }
  }

  DEVICE void put(int t, int column, float score) const {
    const bool there = column >= bounds[t].start && column < bounds[t].end;
    if constexpr (SOURCE == FLAT)
      store_float_if(there, rows[t] + column, score);
    else
      store_float_if_by(policy, there, rows[t] + column, score);
  }

  // Scores of a column of the first eight of sixteen and of the one eight behind it.
  DEVICE void put_words(int t, int column, float first, float second) const {
    const bool there = column >= bounds[t].start && column < bounds[t].end;
    const u32 a = __float_as_uint(first), b = __float_as_uint(second);
    float* const to = rows[t] + column;
    store_float_if(there, to, __uint_as_float(__byte_perm(a, b, 0x7632)));
    store_float_if(there, to + LOWER_HALVES, __uint_as_float(__byte_perm(a, b, 0x5410)));
  }
};

template <class L, Source SOURCE, bool PLANES>
DEVICE void consume(const Params& p, u32 shared) {
  using S = Share<L::TOKENS, L::WHOLE>;
  const int lane = kept(threadIdx.x & 31), warpgroup = uniform(threadIdx.x >> 7) - L::FIRST_CONSUMER / 128;
  const int key = (threadIdx.x >> 5 & 3) * 16 + lane / 4 + S::first_row(lane) * 8;
  const u64 keys = tile_descriptor(shared + L::KEY, 1024, 16), queries = tile_descriptor(shared + L::QUERY, 1024, 16);
  Stored<L, SOURCE, PLANES> stored(p);
  const FreeSlots<L> free_slots(shared);
  float even[L::PART_COLUMNS / 2], odd[L::PART_COLUMNS / 2], weights[L::COLUMNS / 4];
  Slot done = {warpgroup, 0}, ahead = done;  // slots whose products are summed up next, and begun next
  Slot& slot = L::SETS == 1 ? done : ahead;
  int turn = 0;   // tiles of the groups so far, modulo the warpgroups
  for (int stage = 0, parity = 0;;) {
    mbarrier_wait(shared + L::GROUP_FULL + stage * 8, parity);
    const uint4 group = load_shared_16(shared + L::GROUP + stage * 16);
    const int token = group.x;
    if (group.y == 0) return wait_for_prerequisites();
    constexpr int W = L::WARPGROUPS, STEP = SOURCE == FLAT ? -W * TILE : W * TILE;  // columns to the next own tile
    const int skipped = warpgroup - turn + (warpgroup < turn ? W : 0);              // the other warpgroups'
    // Flat keys: from the last tile to the first.
    const int first = SOURCE == FLAT ? static_cast<int>(group.w) - 1 - skipped : skipped;
    int column = (static_cast<int>(group.z) + first) * TILE + key;
    stored.begin(group, lane);
    if constexpr (L::WHOLE) {
#pragma unroll
      for (int t = 0; t < S::TOKENS; ++t) {
        const float* own = p.weights + min(token + S::token(lane, t), p.num_tokens - 1) * p.weights_stride;
        // With 64 heads ptxas makes a slower loop behind loads of four (docs/notes.md).
        if (L::HEADS == 32 && (reinterpret_cast<u64>(p.weights) | p.weights_stride * 4) % 16 == 0) {
#pragma unroll
          for (int head = 0; head < L::HEADS; head += 4) {
            const float4 four = __ldg(reinterpret_cast<const float4*>(own + head));
            float* const to = weights + t * L::HEADS + head;
            to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
          }
        } else {
#pragma unroll
          for (int head = 0; head < L::HEADS; ++head)
            weights[t * L::HEADS + head] = __ldg(own + head) * (by_addition<L, SOURCE, PLANES>(head) ? 0.5f : 1.f);
        }
      }
    } else {
#pragma unroll
      for (int t = 0; t < L::TOKENS; ++t) {
        const float* own = p.weights + min(token + t, p.num_tokens - 1) * p.weights_stride + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < L::HEADS / 4; ++j) weights[t * (L::HEADS / 4) + j] = __ldg(own + j / 2 * 8 + j % 2);
      }
    }
    int tiles = (group.w + W - 1 - skipped) / W;
    turn = (turn + group.w) % W;
    float sums[L::TOKENS * 2], scales[S::ROWS];
    const u64 own_queries = queries + stage * (L::QUERY_BYTES / 16);

    auto begin = [&](float(&products)[L::PART_COLUMNS / 2], int part) {
      if (part == 0) mbarrier_wait(of_slot(shared + L::KEY_FULL, slot), slot.parity);
      multiply(products, keys + static_cast<u32>(slot.index) * (TILE_BYTES / 16),
               own_queries + part * (L::PART_BYTES / 16));
      if (L::SETS == 2 && part == L::PARTS - 1) next_own<L>(ahead);
    };
    auto end = [&](float(&products)[L::PART_COLUMNS / 2], int part, auto last) {
      if (part == 0) {
#pragma unroll
        for (int r = 0; r < S::ROWS; ++r) {
          if (SOURCE != FLAT)
            scales[r] = load_shared_float(shared + L::SCALE + (done.index * TILE + key + r * 8) * 4);
          else
            scales[r] = p.k_scale && column + r * 8 < p.num_columns ? __ldg(p.k_scale + column + r * 8) : 1.f;
        }
      }
      wgmma_wait<last ? 0 : 1>();
      hold(products);
      if (part == L::PARTS - 1) {
        free_slots.release(done, lane);
        next_own<L>(done);
      }
      if constexpr (L::WHOLE)
        weigh_whole<L, SOURCE, PLANES>(products, weights, sums, part);
      else
        weigh<L>(products, weights + part * (L::PART_COLUMNS / 4), sums + part * L::PART_TOKENS * 2);
      if (part < L::PARTS - 1) return;
      if constexpr (!L::WHOLE) add_up<L::TOKENS * 2>(sums, lane);
#pragma unroll
      for (int t = 0; t < S::TOKENS; ++t) {
        float scores[S::ROWS];
#pragma unroll
        for (int r = 0; r < S::ROWS; ++r) {
          scores[r] = sums[L::WHOLE ? t * 8 + r : t * S::ROWS + r] * scales[r];
          if (SOURCE != FLAT && scales[r] == -INFINITY) scores[r] = -INFINITY;
          if constexpr (!PLANES) stored.put(t, column + r * 8, scores[r]);
        }
        if constexpr (PLANES) stored.put_words(t, column, scores[0], scores[1]);
      }
      column += STEP;
    };

    if ((stage | parity) == 0) wait_for_prerequisites();  // they may read what this launch writes over
    mbarrier_wait(shared + L::QUERY_FULL + stage * 8, parity);
    // The compiler has to see at every point which products are on their way.
    constexpr int PER_TURN = L::PARTS == 2 ? 1 : 2;  // tiles
    if constexpr (L::SETS == 1) {
      static_assert(L::PARTS == 1, "products that no others hide are made at one time");
      for (; tiles > 0; --tiles) begin(even, 0), end(even, 0, Last());
    } else if (tiles) {
      begin(even, 0);
      for (; tiles > PER_TURN; tiles -= PER_TURN) {
        begin(odd, L::PARTS - 1);
        end(even, 0, Not());
        begin(even, 0);
        end(odd, L::PARTS - 1, Not());
      }
      if (tiles == PER_TURN) {
        begin(odd, L::PARTS - 1);
        end(even, 0, Not());
        end(odd, L::PARTS - 1, Last());
      } else {
        end(even, 0, Last());
      }
    }
    __syncwarp();
    warp_arrive(shared + L::QUERY_FREE + stage * 8, lane);
    if (++stage == QUERY_STAGES) stage = 0, parity ^= 1;
  }
}

// ---- a CTA ----------------------------------------------------------------------------------------------------------

template <class L, Source SOURCE>
DEVICE void begin_barriers(const Params& p, u32 shared) {
  if (threadIdx.x == L::FIRST_CONSUMER) {  // lanes with addresses of their own would take turns
    constexpr u32 WARPS = ARRIVALS_OF_A_WARP;
    for (int stage = 0; stage < QUERY_STAGES; ++stage) {
      mbarrier_init(shared + L::GROUP_FULL + stage * 8, 1), mbarrier_init(shared + L::QUERY_FULL + stage * 8, 1);
      mbarrier_init(shared + L::QUERY_FREE + stage * 8, L::CONSUMERS / 32 * WARPS);
    }
    for (int slot = 0; slot < L::STAGES; ++slot) {
      mbarrier_init(shared + L::KEY_FULL + slot * 8, SOURCE == ANYWHERE ? GATHERERS * WARPS : 1);
      mbarrier_init(shared + L::KEY_FREE + slot * 8, 4 * L::CLUSTER * WARPS);
    }
    fence_barrier_init();
  }
  if (threadIdx.x == L::FIRST_CONSUMER + 32) prefetch_map(p.queries);
  if (threadIdx.x == L::FIRST_CONSUMER + 64 && SOURCE != ANYWHERE) prefetch_map(p.keys);
}

template <class L, Source SOURCE, bool PLANES>
DEVICE void make_scores(const Params& p, u32 shared) {
  const bool brings = uniform(threadIdx.x >> 7) == L::FIRST_PRODUCER / 128;
  if (!brings) begin_barriers<L, SOURCE>(p, shared);
  __syncwarp();
  if (L::CLUSTER > 1) cluster_arrive();
  constexpr int tokens = L::TOKENS * L::CLUSTER, step = STEP<tokens, SOURCE>;
  const bool few = p.num_tokens <= 32 * FEW<tokens, SOURCE> * step;
  Part part = {0, 0, 0, 0};
  Group groups = {0, 0, 0, 0, 0};
  int first = 0, unused = 0;
  if (few) {
    if (brings && (SOURCE != FLAT || threadIdx.x < L::FIRST_PRODUCER + 32))
      part = part_of_few<tokens, SOURCE>(p, threadIdx.x & 31, blockIdx.x / L::CLUSTER, gridDim.x / L::CLUSTER, groups,
                                         first);
    else if (!brings)
      unused = prefetch_rows<L, SOURCE, true>(p);
    __syncthreads();
    if (static_cast<u32>(unused) == 1u << 31) store_shared_4(shared + L::TOTALS, unused);  // else none would be loaded
  } else {
    part = part_of_many<L, SOURCE>(p, shared);
    if (part.count == 0) {
      if (L::CLUSTER > 1) cluster_wait();
      return wait_for_prerequisites();
    }
  }
  if (L::CLUSTER > 1) cluster_wait();  // all have their barriers
  if (brings) {
    if (L::SETS == 2) fewer_registers<SOURCE == FLAT ? 40 : 72>();
    if (SOURCE == ANYWHERE || threadIdx.x < L::FIRST_PRODUCER + 32 * L::PRODUCERS)
      produce<L, SOURCE>(p, shared, part, few, groups, first);
  } else {
    if (L::SETS == 2) more_registers<SOURCE == FLAT ? 232 : 216>();
    consume<L, SOURCE, PLANES>(p, shared);
  }
  if (L::CLUSTER > 1) cluster_meet();  // no CTA leaves while another one copies to it or arrives at its barriers
}
