// Dense attention of prefill for SM90, varlen: each request's queries over its own keys, one head of 128 queries at a
// time.
//
// Two warpgroups have 64 queries each; one thread of a third has keys and values brought to them, tile after tile, by
// bulk copies. A warpgroup issues the scores of a tile and the values of the tile before together, then makes those
// scores into weights in registers while the other warpgroup, whose turn it is by a named barrier, has the tensor cores.
// Tiles of keys go from the last, where masks are, to the first.
//
// A CTA takes one item (tile of queries, head) after the other from a counter, the longest first. What comes next is
// brought while this one ends. An item's results do not depend on who takes it. Tiles with few keys are not here:
// `prefill_short`, which runs in front, does those and makes the table of the others.

#include "prefill.cuh"
#include "wgmma.cuh"

constexpr int STAGES = 2, CONSUMERS = 256;
constexpr float RESCALE_THRESHOLD = 8.f;  // weights may reach 2^8 before the softmax's running maximum moves
constexpr int TURN_BARRIER = 1, GROUP_BARRIER = 3;  // and the next, one a warpgroup

template <int DIM, int DIM_V>
struct PrefillLayout {
  static constexpr int CHUNKS = DIM / 64, CHUNKS_V = DIM_V / 64, KEYS = DIM > 192 ? 80 : 128;
  static constexpr int QUERY_CHUNK = QUERIES * 128, CHUNK = KEYS * 128;  // bytes of 64 dims
  static constexpr int KEY_TILE = CHUNKS * CHUNK, VALUE_TILE = CHUNKS_V * CHUNK;
  static constexpr int QUERY = 0, KEY = CHUNKS * QUERY_CHUNK, VALUE = KEY + STAGES * KEY_TILE;
  static constexpr int ITEM = VALUE + STAGES * VALUE_TILE;
  static constexpr int QUERY_FULL = ITEM + 32, QUERY_FREE = QUERY_FULL + 8;
  static constexpr int KEY_FULL = QUERY_FREE + 8, KEY_FREE = KEY_FULL + STAGES * 8;
  static constexpr int VALUE_FULL = KEY_FREE + STAGES * 8, VALUE_FREE = VALUE_FULL + STAGES * 8;
  static constexpr int BYTES = VALUE_FREE + STAGES * 8;
  static_assert(BYTES <= 232448, "more shared memory than an SM has");
};

// ---- operand types --------------------------------------------------------------------------------------------------

#define REG40 REG32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define ACC40(d, i) ACC32(d, i), ACC8(d, i + 32)

#define WGMMA_VALUES(N, TYPE, REGS, ACC, A0, A1, A2, A3, B)                                                        \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGS "}, {" A0 ", " A1 ", " A2 \
               ", " A3 "}, " B ", 1, 1, 1, 1;"                                                                     \
               : ACC                                                                                               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// Queries [64 x 16 dims] times keys [16 dims x 128 or 80], and weights [64 x 16 keys] times values [16 keys x dims].
#define OPERAND(NAME, TYPE, PACK)                                                            \
  struct NAME {                                                                              \
    static DEVICE u32 pack(float low, float high) { return PACK(low, high); }                \
    static DEVICE void scores(float (&d)[64], u64 a, u64 b, int add) {                       \
      WGMMA_KEYS(128, TYPE, REG64, ACC64(d, 0), "%64", "%65", "%66");                        \
    }                                                                                        \
    static DEVICE void scores(float (&d)[40], u64 a, u64 b, int add) {                       \
      WGMMA_KEYS(80, TYPE, REG40, ACC40(d, 0), "%40", "%41", "%42");                         \
    }                                                                                        \
    static DEVICE void values(float (&d)[32], const u32* a, u64 b) {                         \
      WGMMA_VALUES(64, TYPE, REG32, ACC32(d, 0), "%32", "%33", "%34", "%35", "%36");         \
    }                                                                                        \
    static DEVICE void values(float (&d)[64], const u32* a, u64 b) {                         \
      WGMMA_VALUES(128, TYPE, REG64, ACC64(d, 0), "%64", "%65", "%66", "%67", "%68");        \
    }                                                                                        \
    static DEVICE void values(float (&d)[128], const u32* a, u64 b) {                        \
      WGMMA_VALUES(256, TYPE, REG128, ACC128(d, 0), "%128", "%129", "%130", "%131", "%132"); \
    }                                                                                        \
  }

OPERAND(Bfloat16, "bf16", pack_bfloat16);
OPERAND(Float16, "f16", pack_float16);

// ---- items ----------------------------------------------------------------------------------------------------------

struct Item {
  int head;         // -1: there are no more
  int token, rows;  // the first query, and queries
  int tiles, seen;  // tiles of keys, and those that every query sees all of
  int last;         // key that the first query sees last, were there as many
  int len_k;
  int begin_k;  // known to the producer alone
};

// The n-th of `num_tiles * num_heads` items: heads together, by tile, by head.
template <int KEYS>
DEVICE Item nth_item(const Params& p, int num_tiles, int n) {
  const int section = n / (num_tiles * p.heads_together), first_head = section * p.heads_together,
            heads = min(p.heads_together, p.num_heads - first_head), within = n - num_tiles * first_head;
  const uint4* tile = reinterpret_cast<const uint4*>(p.plan->tiles + within / heads);
  const uint4 a = tile[0], b = tile[1];
  Item item;
  item.head = first_head + within % heads;
  item.token = a.x;
  item.rows = a.y;
  item.last = a.z;
  item.tiles = (a.w + KEYS - 1) / KEYS;
  item.begin_k = b.x;
  item.len_k = b.y;
  item.seen = min(max(item.last + 1, 0), item.len_k) / KEYS;
  return item;
}

// ---- the producer, one thread ---------------------------------------------------------------------------------------

template <int CHUNKS, int ROWS>
DEVICE void copy_rows(const TensorMap& map, u32 to, int head, int token, u32 barrier) {
  mbarrier_arrive_expect(barrier, CHUNKS * ROWS * 128);
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; ++chunk) copy_box(to + chunk * ROWS * 128, map, chunk * 64, head, token, barrier);
}

template <class L>
DEVICE void produce(const Params& p, u32 shared) {
  wait_for_prerequisites();
  const int num_tiles = load_l2_16(p.plan).y;
  int n = blockIdx.x;
  u32 turn = 0, parity = 1;  // tiles of keys so far; parity of the item's barriers
  auto take_item = [&] {
    Item item;
    if (n >= num_tiles * p.num_heads) {
      item.head = -1;
    } else {
      item = nth_item<L::KEYS>(p, num_tiles, n);
      n = gridDim.x + atomicAdd(&p.plan->taken, 1);
    }
    return item;
  };
  Item item = take_item();
  while (true) {
    mbarrier_wait(shared + L::QUERY_FREE, parity);
    parity ^= 1;
    store_shared_16(shared + L::ITEM, item.head, item.token, item.rows, item.tiles);
    store_shared_16(shared + L::ITEM + 16, item.seen, item.last, item.len_k, 0);
    if (item.head < 0) {
      mbarrier_arrive(shared + L::QUERY_FULL);
      return;
    }
    copy_rows<L::CHUNKS, QUERIES>(p.q, shared + L::QUERY, item.head, item.token, shared + L::QUERY_FULL);
    const int kv_head = item.head / p.heads_per_kv_head, begin_k = item.begin_k, tiles = item.tiles;
    // values one tile behind the keys, as they are used
    for (int tile = tiles - 1; tile >= -1; --tile) {
      if (tile >= 0) {
        const u32 stage = turn % STAGES;
        mbarrier_wait(shared + L::KEY_FREE + stage * 8, turn / STAGES & 1 ^ 1);
        copy_rows<L::CHUNKS, L::KEYS>(p.k, shared + L::KEY + stage * L::KEY_TILE, kv_head, begin_k + tile * L::KEYS,
                                      shared + L::KEY_FULL + stage * 8);
        ++turn;
      }
      if (tile < tiles - 1) {
        const u32 before = turn - (tile >= 0 ? 2 : 1), stage = before % STAGES;
        mbarrier_wait(shared + L::VALUE_FREE + stage * 8, before / STAGES & 1 ^ 1);
        copy_rows<L::CHUNKS_V, L::KEYS>(p.v, shared + L::VALUE + stage * L::VALUE_TILE, kv_head,
                                        begin_k + (tile + 1) * L::KEYS, shared + L::VALUE_FULL + stage * 8);
      }
      // late, for balance, yet while the consumers have work
      if (tile == (tiles > 3 ? 2 : -1)) item = take_item();
    }
  }
}

// ---- the consumers --------------------------------------------------------------------------------------------------

// Scores of 64 queries and a tile of keys, begun.
template <class L, class T>
DEVICE void multiply_keys(float (&s)[L::KEYS / 2], u64 queries, u64 keys) {
#pragma unroll
  for (int chunk = 0; chunk < L::CHUNKS; ++chunk)
#pragma unroll
    for (int k = 0; k < 4; ++k)
      T::scores(s, queries + (chunk * L::QUERY_CHUNK + k * 32) / 16, keys + (chunk * L::CHUNK + k * 32) / 16,
                chunk + k > 0);
  wgmma_commit();
}

// The sum of values by weight, begun.
template <class L, class T>
DEVICE void multiply_values(float (&o)[L::CHUNKS_V * 32], const u32 (&weights)[L::KEYS / 4], u64 values) {
#pragma unroll
  for (int k = 0; k < L::KEYS / 16; ++k) T::values(o, weights + k * 4, values + k * 128);
  wgmma_commit();
}

// Hides what lies behind each row's last key; a thread has rows r and r + 8, and of eight keys two.
template <int N>
DEVICE void mask(float (&s)[N], int last, int len_k, int row, int first_key, bool causal) {
  int limit[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) limit[i] = (causal ? min(last + row + i * 8, len_k - 1) : len_k - 1) - first_key;
#pragma unroll
  for (int e = 0; e < N; ++e)
    if (e / 4 * 8 + (e & 1) > limit[e >> 1 & 1]) s[e] = -INFINITY;
}

// A thread's part of the softmax of its two rows.
struct Rows {
  float running_max[2], sum[2], alpha[2];
};

// Turns scores into weights relative to the running maxima, which move where a score is far above them; true if one of the
// warp's moved, so that what was added before must be rescaled.
template <int N>
DEVICE bool weigh(float (&s)[N], float scale, Rows& rows) {
  float top[4] = {s[0], s[1], s[2], s[3]}, sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int e = 4; e < N; ++e) top[e & 3] = fmaxf(top[e & 3], s[e]);
  bool moves = false;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float largest = fmaxf(top[2 * i], top[2 * i + 1]);
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2)) * scale;
    const bool far = largest > rows.running_max[i] + RESCALE_THRESHOLD;
    const float running_max = far ? largest : rows.running_max[i];
    rows.alpha[i] = exp2_approx(rows.running_max[i] - running_max);
    rows.running_max[i] = running_max;
    moves |= far;
  }
  const bool far[2] = {is_far(rows.running_max[0]), is_far(rows.running_max[1])};
  float factor[2] = {scale, scale};
  if (__any_sync(~0u, far[0] || far[1])) {
#pragma unroll
    for (int i = 0; i < 2; ++i) factor[i] = far[i] ? 1.f : scale;
#pragma unroll
    for (int e = 0; e < N; ++e)
      if (far[e >> 1 & 1]) s[e] = __fmul_rn(s[e], scale);
  }
#pragma unroll
  for (int e = 0; e < N; ++e) {
    s[e] = exp2_approx(fmaf(s[e], factor[e >> 1 & 1], -rows.running_max[e >> 1 & 1]));
    sum[e & 3] += s[e];
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) rows.sum[i] = fmaf(rows.sum[i], rows.alpha[i], sum[2 * i] + sum[2 * i + 1]);
  return __any_sync(~0u, moves);
}

// Values of keys behind the request's last are another's, and may be NaN: a weight of 0 does not hide them. Each
// warpgroup writes the zeros that it reads.
template <class L>
DEVICE void clear_values(u32 values, int first, int thread, int group) {
  for (int row = first + thread / 8; row < L::KEYS; row += 16)
#pragma unroll
    for (int chunk = 0; chunk < L::CHUNKS_V; ++chunk)
      store_shared_16(values + chunk * L::CHUNK + row * 128 + thread % 8 * 16, 0, 0, 0, 0);
  fence_async_shared();
  named_barrier(GROUP_BARRIER + group, 128);
}

// Word j of lane i of four becomes word i of lane j.
DEVICE void transpose(u32 (&w)[4], int lane) {
  const bool odd = lane & 1, high = lane & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const u32 other = __shfl_xor_sync(~0u, odd ? w[i] : w[i + 1], 1);
    (odd ? w[i] : w[i + 1]) = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 other = __shfl_xor_sync(~0u, high ? w[i] : w[i + 2], 2);
    (high ? w[i] : w[i + 2]) = other;
  }
}

template <class T, int N>
DEVICE void store_result(const Params& p, const Item& item, const float (&o)[N], Rows& rows, int row, int lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i, row += 8) {
    float sum = rows.sum[i];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const bool live = row < item.rows, none = sum == 0.f;
    const float factor = none ? 0.f : 1.f / sum, running_max = rows.running_max[i];
    const i64 token = item.token + row;
    if (live && lane % 4 == 0) {
      const float lse = none ? -INFINITY : (running_max + log2f(sum)) * 0.6931471805599453f;
      p.lse[token * p.lse_token_stride + item.head * p.lse_head_stride] = running_max == INFINITY ? INFINITY : lse;
    }
    u16* to = p.out + token * p.out_token_stride + item.head * p.out_head_stride + lane % 4 * 8;
#pragma unroll
    for (int part = 0; part < N / 16; ++part) {
      u32 w[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int e = part * 16 + j * 4 + i * 2;
        w[j] = T::pack(o[e] * factor, o[e + 1] * factor);
      }
      transpose(w, lane);
      if (live) store_streaming_16(to + part * 32, make_uint4(w[0], w[1], w[2], w[3]));
    }
  }
}

template <class L, class T>
DEVICE void consume(const Params& p, u32 shared) {
  const int thread = threadIdx.x & 127, group = __shfl_sync(~0u, threadIdx.x >> 7, 0), lane = thread & 31,
            row = group * 64 + (thread >> 5) * 16 + lane / 4;
  const u64 queries = tile_descriptor(shared + L::QUERY + group * 8192, 1024, 16),
            keys = tile_descriptor(shared + L::KEY, 1024, 16),
            values = tile_descriptor(shared + L::VALUE, 1024, L::CHUNK);
  float s[L::KEYS / 2], o[L::CHUNKS_V * 32];
  u32 weights[L::KEYS / 4];
  Rows rows;
  u32 turn = 0, parity = 0;
  auto release = [&](u32 barrier) { warp_arrive(barrier, lane); };
  auto to_weights = [&] {
#pragma unroll
    for (int i = 0; i < L::KEYS / 4; ++i) weights[i] = T::pack(s[2 * i], s[2 * i + 1]);
  };
  if (group == 1) named_barrier_arrive(TURN_BARRIER, CONSUMERS);
  while (true) {
    mbarrier_wait(shared + L::QUERY_FULL, parity);
    parity ^= 1;
    const uint4 a = load_shared_16(shared + L::ITEM), b = load_shared_16(shared + L::ITEM + 16);
    Item item;
    item.head = a.x, item.token = a.y, item.rows = a.z, item.tiles = a.w;
    item.seen = b.x, item.last = b.y, item.len_k = b.z;
    if (item.head < 0) return;
#pragma unroll
    for (int e = 0; e < L::CHUNKS_V * 32; ++e) o[e] = 0.f;
    rows.running_max[0] = rows.running_max[1] = NO_SCORE_YET, rows.sum[0] = rows.sum[1] = 0.f;
    int tile = item.tiles - 1;
    auto mask_tile = [&] {
      if (tile >= item.seen) mask(s, item.last, item.len_k, row, tile * L::KEYS + lane % 4 * 2, p.causal);
    };
    u32 stage = turn % STAGES;
    mbarrier_wait(shared + L::KEY_FULL + stage * 8, turn / STAGES & 1);
    wgmma_fence();
    multiply_keys<L, T>(s, queries, keys + stage * (L::KEY_TILE / 16));
    wgmma_wait<0>();
    hold(s);
    release(shared + L::KEY_FREE + stage * 8);
    if (tile == 0) release(shared + L::QUERY_FREE);
    mask_tile();
    weigh(s, p.scale_log2, rows);
    to_weights();
    if (item.len_k - tile * L::KEYS < L::KEYS) {
      mbarrier_wait(shared + L::VALUE_FULL + stage * 8, turn / STAGES & 1);
      clear_values<L>(shared + L::VALUE + stage * L::VALUE_TILE, item.len_k - tile * L::KEYS, thread, group);
    }
    while (--tile >= 0) {
      const u32 before = stage, before_parity = turn / STAGES & 1;
      stage = ++turn % STAGES;
      named_barrier(TURN_BARRIER + group, CONSUMERS);
      mbarrier_wait(shared + L::KEY_FULL + stage * 8, turn / STAGES & 1);
      hold(s);
      hold(o);
      hold(weights);
      wgmma_fence();
      multiply_keys<L, T>(s, queries, keys + stage * (L::KEY_TILE / 16));
      mbarrier_wait(shared + L::VALUE_FULL + before * 8, before_parity);
      wgmma_fence();
      multiply_values<L, T>(o, weights, values + before * (L::VALUE_TILE / 16));
      named_barrier_arrive(TURN_BARRIER + (group ^ 1), CONSUMERS);
      wgmma_wait<1>();
      hold(s);
      release(shared + L::KEY_FREE + stage * 8);
      if (tile == 0) release(shared + L::QUERY_FREE);
      mask_tile();
      const bool moves = weigh(s, p.scale_log2, rows);
      hold(s);
      if (moves) {
        wgmma_wait<0>();
        hold(o);
#pragma unroll
        for (int e = 0; e < L::CHUNKS_V * 32; ++e) o[e] *= rows.alpha[e >> 1 & 1];
      }
      wgmma_wait<0>();
      hold(o);
      hold(weights);
      release(shared + L::VALUE_FREE + before * 8);
      to_weights();
    }
    mbarrier_wait(shared + L::VALUE_FULL + stage * 8, turn / STAGES & 1);
    hold(o);
    hold(weights);
    wgmma_fence();
    multiply_values<L, T>(o, weights, values + stage * (L::VALUE_TILE / 16));
    wgmma_wait<0>();
    hold(o);
    release(shared + L::VALUE_FREE + stage * 8);
    ++turn;
    store_result<T>(p, item, o, rows, row, lane);
  }
}

// ---- the kernel -----------------------------------------------------------------------------------------------------

template <int DIM, int DIM_V, class T = Bfloat16>
__global__ void __launch_bounds__(384, 1) prefill_attention(const __grid_constant__ Params p) {
  using L = PrefillLayout<DIM, DIM_V>;
  EXPORT_SHARED_BYTES(L);
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 shared = shared_address(shared_memory);
  if (threadIdx.x == 0) {
    constexpr u32 READERS = CONSUMERS / 32 * ARRIVALS_OF_A_WARP;
    mbarrier_init(shared + L::QUERY_FULL, 1), mbarrier_init(shared + L::QUERY_FREE, READERS);
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(shared + L::KEY_FULL + stage * 8, 1), mbarrier_init(shared + L::KEY_FREE + stage * 8, READERS);
      mbarrier_init(shared + L::VALUE_FULL + stage * 8, 1), mbarrier_init(shared + L::VALUE_FREE + stage * 8, READERS);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (__shfl_sync(~0u, threadIdx.x >> 7, 0) == 2) {
    fewer_registers<40>();
    if (threadIdx.x == CONSUMERS) produce<L>(p, shared);
  } else {
    more_registers<232>();
    consume<L, T>(p, shared);
  }
}
