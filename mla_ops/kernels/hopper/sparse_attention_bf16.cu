// Token-level sparse MLA over bfloat16 keys, paged or flat, for SM90: tiles of 16 and 32 heads.
//
// Each warpgroup has a role: one brings the keys of a turn into the tiles that wgmma reads (`copy_keys`), one makes
// weights of them (`score_tile`), and two multiply the weights with 256 dims each of the same tile (`add_values`). Rows
// end as in `sparse_attention.cu`.

#include "code.cuh"
#include "cuts.cuh"
#include "empty.cuh"
#include "wgmma.cuh"

// CTAS: how many run on an SM at least. With two, one gathers while the other computes or ends its row.
// BALANCED: a CTA takes piece after piece (`balance.cuh`), whose queries come to two buffers in turn.
template <int HEADS_, int DIM, int CTAS, bool BALANCED_ = false>
struct PlainLayout {
  static constexpr bool BALANCED = BALANCED_;
  static constexpr int HEADS = HEADS_, CHUNKS = DIM / 64;
  static constexpr float FACTOR = 1.f;
  static constexpr bool PERMUTED = false;
  static constexpr bool WHOLE_RUNNING_MAX = false;
  static constexpr int THREADS = 512;
  static constexpr int STAGES = CTAS == 2 ? 1 : HEADS == 16 && DIM == 512 && !BALANCED ? 3 : 2;
  static constexpr int GATHER_REGISTERS = BALANCED ? 56 : 40;
  static constexpr int SCORE_REGISTERS = CTAS == 2 ? 72 : BALANCED ? 136 : 152, VALUE_REGISTERS = CTAS == 2 ? 72 : 160;
  static constexpr int QUERY = 0;
  static constexpr int QUERY_CHUNK = HEADS * 128;
  static constexpr int QUERY_BYTES = CHUNKS * QUERY_CHUNK;
  static constexpr int WEIGHTS = QUERY + (BALANCED ? 2 : 1) * QUERY_BYTES;
  static constexpr int TILES = WEIGHTS + HEADS * 128;  // keys: [64, 64] a chunk, 128-byte rows, swizzled
  static constexpr int TILE = CHUNKS * TILE_KEYS * 128;
  static constexpr int COLUMNS = TILES + STAGES * TILE;  // float2 a head, the second its running maximum
  static constexpr int ALPHA = COLUMNS + HEADS * 8;      // float a head
  static constexpr int LIVE = ALPHA + HEADS * 4;         // u32 a stage and warp: which of its 16 keys count
  static constexpr int LIST = LIVE + STAGES * 16;        // keys that each warp of the gather brings next
  static constexpr int TURN = LIST + 4 * LIST_WORDS * 4;
  static constexpr int INTERVAL = (TURN + 4 + 7) / 8 * 8;
  static constexpr int SUMS = (INTERVAL + 16 + 15) / 16 * 16;  // float [4, HEADS]: of each warp of scores
  static constexpr int FULL = SUMS + (BALANCED ? HEADS * 16 : 0);  // two a stage, of parts by dims: the second has dims 256 to 512
  static constexpr int FREE = FULL + STAGES * 16;      // two a stage, of halves of the keys
  static constexpr int WEIGHTS_FULL = FREE + STAGES * 16;
  static constexpr int WEIGHTS_FREE = WEIGHTS_FULL + 8;
  static constexpr int STATES_FULL = WEIGHTS_FREE + 8;  // clusters only
  static constexpr int PACKETS_FULL = STATES_FULL + 8;
  static constexpr int OWN_FULL = PACKETS_FULL + 8;
  static constexpr int QUERY_FULL = OWN_FULL + 8;  // one a buffer, as pieces follow one another
  static constexpr int QUERY_FREE = QUERY_FULL + 16;
  static constexpr int FACTORS_FULL = QUERY_FREE + 16;
  static constexpr int FACTORS_FREE = FACTORS_FULL + 8;
  static constexpr int BYTES = BALANCED ? FACTORS_FREE + 8 : QUERY_FULL;
  using End = Ends<HEADS, QUERY>;
  static constexpr int PACKETS = TILES;
  using Packet = Packets<HEADS, false>;
  static_assert(PACKETS + Packet::ROOM <= COLUMNS, "packets overlap the columns");
  static_assert(CTAS * (BYTES + 1024) <= 233472, "more shared memory than an SM has");
};

// Copies queries as they are into tiles of 64 dims; heads past the last repeat it.
template <class L, int THREADS>
DEVICE void copy_queries(const Params& p, const Row& row, u32 to, int thread) {
#pragma unroll 1
  for (int piece = thread; piece < L::HEADS * 64; piece += THREADS) {
    const int head = piece / 64, unit = piece % 64, own = min(row.tile * L::HEADS + head, p.num_heads - 1);
    copy_16(to + unit / 8 * L::QUERY_CHUNK + head * 128 + ((unit ^ head) & 7) * 16,
            query_at(p, row.token, own) + unit * 8);
  }
  if constexpr (L::CHUNKS > 8)
    for (int piece = thread; piece < L::HEADS * 8; piece += THREADS) {
      const int head = piece / 8, unit = piece % 8, own = min(row.tile * L::HEADS + head, p.num_heads - 1);
      copy_16(to + 8 * L::QUERY_CHUNK + head * 128 + ((unit ^ head) & 7) * 16,
              query_rope_at(p, row.token, own) + unit * 8);
    }
}

// Sets running maxima to what holds before any key; warp 0 reads them.
template <class L>
DEVICE void clear_columns(u32 shared, int thread) {
  if (thread < L::HEADS) store_shared_float2(shared + L::COLUMNS + thread * 8, 0.f, 0.f);
}

// Moves on to the next piece; false if there is none. KEYS_TOO: finds which keys that piece has.
template <class L, bool KEYS_TOO>
DEVICE bool goes_on(const Params& p, Row& row, u32 shared) {
  if constexpr (L::BALANCED) {
    row = next_row<Launch::BALANCED, KEYS_TOO>(p, shared + L::INTERVAL, row);
    return row.token < p.all_tokens;
  }
  return false;
}

// ---- the gather -----------------------------------------------------------------------------------------------------

template <class L>
DEVICE void copy_keys(const Params& p, Row row, u32 shared, Stream stream, int warp, int lane) {
  using R = PlainRows<L::CHUNKS * 128>;
  hold(shared);
  const u32 list = shared + L::LIST + warp * LIST_WORDS * 4;
  u32 place = own_place(shared + L::TILES, warp, lane);
  hold(place);
  u32 stage = 0, parity = 1;
  for (int piece = 0;; ++piece) {
    const int request = uniform(request_of(p, row));
    if constexpr (L::BALANCED) {
      const int buffer = piece & 1;
      mbarrier_wait(shared + L::QUERY_FREE + buffer * 8, (piece >> 1 & 1) ^ 1);
      copy_queries<L, 128>(p, row, shared + L::QUERY + buffer * L::QUERY_BYTES, opaque(warp * 32 + lane));
      arrive_when_copied(shared + L::QUERY_FULL + buffer * 8);
    }
    Chosen chosen = choose_keys(p, row, stream, list, false, warp, lane);
    Place next = place_of(p, request, chosen);
    const bool empty = !L::BALANCED && has_no_keys(stream, chosen, warp);
    bool odd = false;
#pragma unroll 1
    for (bool last = false; !last;) {
      last = chosen.last;
      const u32 barrier = shared + L::FULL + stage * 16;
      const OwnRows own = own_rows<R>(p, chosen, next);
      mbarrier_wait(barrier + L::FREE - L::FULL + warp / 2 * 8, parity);
      if (lane == 0) {
        const u32 flags = (last ? LAST_TURN : 0) | (empty ? NO_KEYS : 0);
        store_shared_4(shared + L::LIVE + (stage * 4 + warp) * 4, own.alive | flags);
        mbarrier_arrive(barrier);
      }
      const u32 to = place + stage * L::TILE;
      if (!empty) copy_chunks<8, L::CHUNKS>(own, to, lane), copy_chunks<0, 4>(own, to, lane);
      arrive_when_copied(barrier);
      if (!empty) copy_chunks<4, 8>(own, to, lane);
      arrive_when_copied(barrier + 8);
      if (!last) {
        chosen = choose_keys(p, row, stream, list, odd ^= true, warp, lane);
        next = place_of(p, request, chosen);
      }
      if (++stage == L::STAGES) stage = 0, parity ^= 1;
    }
    if (!goes_on<L, true>(p, row, shared)) return;
    stream = begin_stream(p, row, warp, lane);
  }
}

// ---- scores ---------------------------------------------------------------------------------------------------------

// A warp's position in the ring of tiles, which goes on from piece to piece.
struct Stage {
  int turn, stage, parity;
};

// Makes the weights of a row or a piece, and sums up this thread's own.
template <class L>
DEVICE void score_turns(const Params& p, u32 shared, u32 queries, float (&sums)[L::HEADS / 4], Stage& at, int thread) {
  constexpr int HEADS = L::HEADS, TILES = HEADS / 8;
  const int warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
  const u32 weights_row = shared + L::WEIGHTS + (lane & 7) * 128 +
                          ((((warp * 2) | ((lane >> 3) & 1)) ^ (lane & 7)) << 4) + (lane >> 4) * 1024;
  const u64 query = tile_descriptor(queries, 1024, 16);
#pragma unroll
  for (int i = 0; i < TILES * 2; ++i) sums[i] = 0.f;
  bool seen = false;  // whether a key counted, and with it the running maxima
  bool last = false;
  int &i = at.turn, &stage = at.stage, &parity = at.parity;
  if (!L::BALANCED) {  // a share without keys takes no turn
    mbarrier_wait(shared + L::FULL, 0);
    last = uniform(load_shared_4(shared + L::LIVE + warp * 4)) & NO_KEYS;
    if (last) {
      if (thread == 0) store_shared_4(shared + L::TURN, NO_TURN | LAST_TURN);
      __syncwarp();
      warp_arrive(shared + L::WEIGHTS_FULL, lane);
    }
  }
  for (; !last; ++i) {
    const u32 full = shared + L::FULL + stage * 16;
    const u64 keys = tile_descriptor(shared + L::TILES + stage * L::TILE, 1024, 16);
    float s[TILES * 4];
    auto multiply = [&](int chunk, bool add) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        wgmma_keys_by_heads(s, keys + (chunk * TILE_KEYS * 128 + j * 32) / 16,
                            query + (chunk * L::QUERY_CHUNK + j * 32) / 16, add || j > 0);
    };
    mbarrier_wait(full, parity);
    fence_async_shared();
    wgmma_fence();
    if (L::CHUNKS > 8) multiply(8, false);
#pragma unroll
    for (int chunk = 0; chunk < 4; ++chunk) multiply(chunk, L::CHUNKS > 8 || chunk > 0);
    wgmma_commit();
    mbarrier_wait(full + 8, parity);
    fence_async_shared();
    wgmma_fence();
#pragma unroll
    for (int chunk = 4; chunk < 8; ++chunk) multiply(chunk, true);
    wgmma_commit();
    const u32 live = load_shared_4(shared + L::LIVE + (stage * 4 + warp) * 4), alive = live & 0xffff;
    last = uniform(live) >= LAST_TURN;
    float2 running_max[TILES];
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
      const uint4 two = load_shared_16(shared + L::COLUMNS + (8 * j + 2 * t) * 8);
      running_max[j] = make_float2(__uint_as_float(two.y), __uint_as_float(two.w));
    }
    wgmma_wait<0>();
    hold(s);
#pragma unroll
    for (int e = 0; e < TILES * 4; ++e)
      s[e] = fmaf(s[e], p.scale_log2, (e & 1) ? -running_max[e / 4].y : -running_max[e / 4].x);
    if (alive != 0xffff) {
      const bool live[2] = {(alive >> g & 1) != 0, (alive >> (g + 8) & 1) != 0};
#pragma unroll
      for (int e = 0; e < TILES * 4; ++e)
        if (!live[e >> 1 & 1]) s[e] = -INFINITY;
    }
    float tops[4] = {s[0], s[1], s[2], s[3]};
#pragma unroll
    for (int e = 4; e < TILES * 4; ++e) tops[e & 3] = fmaxf(tops[e & 3], s[e]);
    const float largest = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
    const bool moves = named_barrier_any<SCORE_BARRIER, 128>(largest > RESCALE_THRESHOLD || !seen && alive);
    mbarrier_wait(shared + L::WEIGHTS_FREE, (i & 1) ^ 1);
    if (moves) {
      raise_running_max<L>(s, sums, seen, RAISED_TO, shared, thread);
      seen = true;
    }
#pragma unroll
    for (int e = 0; e < TILES * 4; ++e) s[e] = exp2_approx(s[e]);
#pragma unroll
    for (int c = 0; c < TILES * 2; ++c) sums[c] += s[c / 2 * 4 + (c & 1)] + s[c / 2 * 4 + (c & 1) + 2];
#pragma unroll
    for (int j = 0; j < TILES; j += 2)
      store_matrices_transposed(weights_row + j * 1024, pack_bfloat16(s[4 * j], s[4 * j + 1]),
                                pack_bfloat16(s[4 * j + 2], s[4 * j + 3]), pack_bfloat16(s[4 * j + 4], s[4 * j + 5]),
                                pack_bfloat16(s[4 * j + 6], s[4 * j + 7]));
    if (thread == 0) store_shared_4(shared + L::TURN, (moves ? MOVED : USUAL) | (live & LAST_TURN));
    __syncwarp();
    warp_arrive(shared + L::WEIGHTS_FULL, lane);
    if (++stage == L::STAGES) stage = 0, parity ^= 1;
  }
}

// Whether this CTA's share has no keys, once its weights are there.
template <class L>
DEVICE bool takes_no_turn(u32 shared) {
  return (uniform(load_shared_4(shared + L::TURN)) & 0xff) == NO_TURN;
}

template <class L>
DEVICE void score_tile(const Params& p, const Row& row, u32 shared, int thread) {
  constexpr int HEADS = L::HEADS;
  const int warp = thread >> 5, lane = thread & 31;
  float sums[HEADS / 4];
  Stage at{0, 0, 0};
  score_turns<L>(p, shared, shared + L::QUERY, sums, at, thread);
  open_to_peers(row);
  const u32 place = shared + L::End::SUMS;  // queries have had their last product
  store_sums<HEADS>(sums, place + warp * (HEADS * 4), lane);
  named_barrier<SCORE_BARRIER, 128>();
  const int head = thread % HEADS;
  const bool empty = takes_no_turn<L>(shared);
  const float total = sum_of<HEADS>(place, head), no_score = empty ? NO_KEYS_AT_ALL : NO_SCORE_YET,
              running_max = total == 0.f ? no_score : load_shared_float(shared + L::COLUMNS + head * 8 + 4);
  await_peers(row);
#pragma unroll 1
  for (int part = thread / HEADS; part < row.splits; part += 128 / HEADS)
    send_state<L>(row, shared, part, head, total, running_max);
  named_barrier_arrive(STATES_BARRIER, 384);
  weigh_parts<L>(p, row, shared, thread);
  if (empty && is_empty<L>(row, shared, lane)) return;
  finish<L>(p, row, shared, warp, lane);
}

// Scores piece after piece. The warps that add values apply the factors.
template <class L>
DEVICE void score_pieces(const Params& p, Row row, u32 shared, int thread) {
  constexpr int HEADS = L::HEADS;
  const int warp = thread >> 5, lane = thread & 31;
  Stage at{0, 0, 0};
  for (int piece = 0;; ++piece) {
    const int buffer = piece & 1;
    float sums[HEADS / 4];
    mbarrier_wait(shared + L::QUERY_FULL + buffer * 8, piece >> 1 & 1);
    score_turns<L>(p, shared, shared + L::QUERY + buffer * L::QUERY_BYTES, sums, at, thread);
    warp_arrive(shared + L::QUERY_FREE + buffer * 8, lane);
    const u32 place = shared + L::SUMS;
    store_sums<HEADS>(sums, place + warp * (HEADS * 4), lane);
    named_barrier<SCORE_BARRIER, 128>();
    mbarrier_wait(shared + L::FACTORS_FREE, (piece & 1) ^ 1);
    const int part = part_of(p, shared + L::INTERVAL, row.token);
    if (thread < HEADS) {
      const u32 column = shared + L::COLUMNS + thread * 8;
      const int head = row.tile * HEADS + thread;
      const float total = sum_of<HEADS>(place, thread);
      const float lse =
          total == 0.f ? -INFINITY : (load_shared_float(column + 4) + log2_approx(total)) * 0.6931471805599453f;
      float factor = total == 0.f ? 0.f : 1.f / total;
      if (head < p.num_heads) {
        if (p.attn_sink && part < 0) factor /= 1.f + expf(__ldg(p.attn_sink + head) - lse);
        leave_lse(p, row, head, part, lse, factor);
      }
      store_shared_float2(column, total == 0.f ? 0.f : factor, 0.f);
    }
    __syncwarp();
    warp_arrive(shared + L::FACTORS_FULL, lane);
    if (!goes_on<L, false>(p, row, shared)) return;
    named_barrier<SCORE_BARRIER, 128>();  // running maxima are those before any key
  }
}

// ---- values ---------------------------------------------------------------------------------------------------------

constexpr int PIECES = 4;  // a warpgroup adds up so many of 64 dims

// Adds up the weighted values of a row or a piece.
template <class L>
DEVICE void add_turns(float (&o)[PIECES][L::HEADS / 2], u32 shared, Stage& at, int half, int thread) {
  constexpr int N = L::HEADS / 2;
  const int lane = thread & 31, t = lane & 3;
  auto head_of = [&](int e) { return e / 4 * 8 + 2 * t + (e & 1); };
#pragma unroll
  for (int piece = 0; piece < PIECES; ++piece)
#pragma unroll
    for (int e = 0; e < N; ++e) o[piece][e] = 0.f;
  const u64 weights = tile_descriptor(shared + L::WEIGHTS, 1024, 16);
  bool last = false;
  int &i = at.turn, &stage = at.stage;
  for (; !last; ++i) {
    mbarrier_wait(shared + L::WEIGHTS_FULL, i & 1);
    fence_async_shared();
    const u32 turn = load_shared_4(shared + L::TURN);
    last = uniform(turn) >= LAST_TURN;
    if ((turn & 0xff) != USUAL) {
      if (!L::BALANCED && (uniform(turn) & 0xff) == NO_TURN) break;
#pragma unroll
      for (int piece = 0; piece < PIECES; ++piece)
#pragma unroll
        for (int e = 0; e < N; ++e) o[piece][e] *= load_shared_float(shared + L::ALPHA + head_of(e) * 4);
    }
    const u64 values =
        tile_descriptor(shared + L::TILES + stage * L::TILE + half * 4 * (TILE_KEYS * 128), 1024, TILE_KEYS * 128);
    const u32 freed = shared + L::FREE + stage * 16;
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) hold(o[piece]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int piece = 0; piece < PIECES; ++piece)
        wgmma_dims_by_heads_bfloat16(o[piece], values + (piece * TILE_KEYS * 128 + k * 2048) / 16, weights + k * 2);
      if (k & 1) wgmma_commit();
    }
    wgmma_wait<1>();
    warp_arrive(freed, lane);
    wgmma_wait<0>();
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) hold(o[piece]);
    warp_arrive(freed + 8, lane), warp_arrive(shared + L::WEIGHTS_FREE, lane);
    if (++stage == L::STAGES) stage = 0;
  }
}

template <class L>
DEVICE void add_values(const Params& p, const Row& row, u32 shared, int half, int thread) {
  constexpr int N = L::HEADS / 2;
  const int warp = thread >> 5, lane = thread & 31;
  float o[PIECES][N];
  Stage at{0, 0, 0};
  add_turns<L>(o, shared, at, half, thread);
  if (row.splits == 1) named_barrier<VALUES_BARRIER, 256>();  // packets take the place of tiles
  open_to_peers(row);
  await_peers(row);
  named_barrier<STATES_BARRIER, 384>();  // states first: they would wait behind all packets
  if (takes_no_turn<L>(shared) && is_empty<L>(row, shared, lane)) {
    write_zeros<L>(p, row, half * 4 + warp, lane);
    return;
  }
  send_packets<L>(p, row, shared, half * 4 + warp, lane, [&](int e) { return __float_as_uint(o[e / N][e % N]); });
  finish<L>(p, row, shared, 4 + half * 4 + warp, lane);
}

// Adds up piece after piece and writes each out of registers.
template <class L>
DEVICE void add_pieces(const Params& p, Row row, u32 shared, int half, int thread) {
  constexpr int N = L::HEADS / 2;
  const int warp = half * 4 + (thread >> 5), lane = thread & 31;
  Stage at{0, 0, 0};
  for (int piece = 0;; ++piece) {
    float o[PIECES][N], factors[N / 2];
    add_turns<L>(o, shared, at, half, thread);
    mbarrier_wait(shared + L::FACTORS_FULL, piece & 1);
#pragma unroll
    for (int c = 0; c < N / 2; ++c)
      factors[c] = load_shared_float(shared + L::COLUMNS + (c / 2 * 8 + 2 * (lane & 3) + (c & 1)) * 8);
    __syncwarp();
    warp_arrive(shared + L::FACTORS_FREE, lane);
    const int part = part_of(p, shared + L::INTERVAL, row.token);
    if (part >= 0) {
      leave_part<L>(p, row, part, warp, lane, [&](int n) { return o[n / N][n % N]; });
      tell_sharers<L, VALUES_BARRIER>(p, shared, part, half * 128 + thread);
    } else {
      write_packets<L>(target_of<L>(p, row), warp, lane, [&](int n) {
        const int e = n % N;
        const float factor = factors[e / 4 * 2 + (e & 1)];
        return factor == 0.f ? 0.f : o[n / N][e] * factor;
      });
    }
    if (!goes_on<L, false>(p, row, shared)) break;
  }
  add_up_cuts<L, VALUES_BARRIER, L::COLUMNS - L::TILES>(p, shared, shared + L::TILES, thread_here() - 128);
}

// ---- the kernel -----------------------------------------------------------------------------------------------------

template <class L>
DEVICE void attend_to_keys(const Params& p, const Row& row, u32 shared, int warpgroup, int thread) {
  if (!L::BALANCED) {
    copy_queries<L, 384>(p, row, shared + L::QUERY, threadIdx.x);
    wait_for_copies();
  }
  clear_columns<L>(shared, threadIdx.x);
  fence_async_shared();
  named_barrier<QUERY_BARRIER, 384>();
  if (warpgroup == 0) {
    more_registers<L::SCORE_REGISTERS>();
    if constexpr (L::BALANCED)
      score_pieces<L>(p, row, shared, thread);
    else
      score_tile<L>(p, row, shared, thread);
  } else {
    more_registers<L::VALUE_REGISTERS>();
    if constexpr (L::BALANCED)
      add_pieces<L>(p, row, shared, warpgroup - 1, thread);
    else
      add_values<L>(p, row, shared, warpgroup - 1, thread);
  }
}

template <class L>
DEVICE void attend(const Params& p) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 shared = shared_address(shared_memory);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x >> 7, 0), thread = threadIdx.x & 127;
  const Row row = L::BALANCED ? first_row<Launch::BALANCED>(p, shared + L::INTERVAL) : this_row(p);
  if (row.token >= (L::BALANCED ? p.all_tokens : p.num_tokens)) {
    wait_for_prerequisites();
    return;
  }
  Stream stream;
  if (warpgroup == 3) stream = begin_stream(p, row, thread >> 5, thread & 31);
  if (threadIdx.x == 0) {
    for (int i = 0; i < L::STAGES; ++i) {
      // the gather's 128 threads arrive, and on the first of the two the four that say which keys count
      mbarrier_init(shared + L::FULL + i * 16, 132);
      mbarrier_init(shared + L::FULL + i * 16 + 8, 128);
      mbarrier_init(shared + L::FREE + i * 16, 8 * ARRIVALS_OF_A_WARP);
      mbarrier_init(shared + L::FREE + i * 16 + 8, 8 * ARRIVALS_OF_A_WARP);
    }
    mbarrier_init(shared + L::WEIGHTS_FULL, 4 * ARRIVALS_OF_A_WARP);
    mbarrier_init(shared + L::WEIGHTS_FREE, 8 * ARRIVALS_OF_A_WARP);
    mbarrier_init(shared + L::STATES_FULL, 1), mbarrier_init(shared + L::PACKETS_FULL, 1);
    mbarrier_init(shared + L::OWN_FULL, 12 * ARRIVALS_OF_A_WARP);
    if (L::BALANCED) {
      for (int buffer = 0; buffer < 2; ++buffer) {
        mbarrier_init(shared + L::QUERY_FULL + buffer * 8, 128);
        mbarrier_init(shared + L::QUERY_FREE + buffer * 8, 4 * ARRIVALS_OF_A_WARP);
      }
      mbarrier_init(shared + L::FACTORS_FULL, 4 * ARRIVALS_OF_A_WARP);
      mbarrier_init(shared + L::FACTORS_FREE, 8 * ARRIVALS_OF_A_WARP);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (warpgroup < 3) {  // in machine code behind the gather, as in `sparse_attention.cu`
    attend_to_keys<L>(p, row, shared, warpgroup, thread);
    return;
  }
  fewer_registers<L::GATHER_REGISTERS>();
  launch_dependents();
  copy_keys<L>(p, row, shared, stream, __shfl_sync(~0u, thread >> 5, 0), thread & 31);
  if (!L::BALANCED) stand_by<L>(p, row, shared, true, thread);
  wait_for_prerequisites();
}

// Works as the shape says. YIELDS: unless another launch has shared the tokens evenly.
template <int HEADS, int DIM, int CTAS, bool YIELDS = false>
__global__ void __launch_bounds__(512, CTAS) sparse_attention_bf16(const __grid_constant__ Params p) {
  if (BY_LENGTH) prefetch_code<128>();
  using L = PlainLayout<HEADS, DIM, CTAS>;
  EXPORT_SHARED_BYTES(L);
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  if (YIELDS && is_done<L::THREADS>(p, shared_address(shared_memory) + L::TILES)) return;
  attend<L>(p);
}

template <bool FIRST, class A, class B>
struct Selected {
  using Type = A;
};

template <class A, class B>
struct Selected<false, A, B> {
  using Type = B;
};

// Shares tokens of unequal lengths evenly among all CTAs.
template <int HEADS, int DIM>
__global__ void __launch_bounds__(512, 1) sparse_attention_bf16_balanced(const __grid_constant__ Params p) {
  prefetch_code<128>();
  using L = PlainLayout<HEADS, DIM, 1>;
  using Balanced = PlainLayout<HEADS, DIM, 1, true>;
  using Larger = typename Selected<(L::BYTES > Balanced::BYTES), L, Balanced>::Type;
  EXPORT_SHARED_BYTES(Larger);
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const u32 shared = shared_address(shared_memory);
  const Cost cost = add_up_costs<L::THREADS>(p, shared + L::TILES);
  if (shares_evenly<Launch::CLUSTERS>(p, cost)) {
    share_evenly<L::THREADS>(p, shared + Balanced::INTERVAL, shared + L::TILES, cost);
    attend<Balanced>(p);
  } else {
    attend<L>(p);
  }
}
