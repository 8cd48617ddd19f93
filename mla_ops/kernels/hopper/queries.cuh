// Queries into shared memory.
#pragma once

#include "layout.cuh"

// The magnitude, as bfloat16's bits, of each element of a pair; 0 of one that is infinite or NaN.
DEVICE u32 finite_magnitudes(u32 pair) {
  const u32 low = pair & 0x7fffu, high = pair & 0x7fff0000u;
  return (low < 0x7f80u ? low : 0) | (high < 0x7f800000u ? high : 0);
}

// Queries are in pieces of eight elements, of which sixteen threads have a head's, every sixteenth each.
template <int HEADS, Format FORMAT, int THREADS>
struct Pieces {
  static constexpr int OF_A_HEAD = Rows<FORMAT>::CHUNKS * 8, OF_A_LANE = (OF_A_HEAD + 15) / 16;
  static constexpr int GROUPS = THREADS / 16, ROUNDS = (HEADS + GROUPS - 1) / GROUPS;

  static DEVICE bool has(int lane, int i) { return OF_A_HEAD % 16 == 0 || i + 1 < OF_A_LANE || lane < OF_A_HEAD % 16; }
};

// The largest magnitude in each half. Four maxima, since the next has to wait twenty cycles for the last.
template <int N>
DEVICE u32 largest_of(const uint4 (&piece)[N]) {
  u32 largest[4] = {piece[0].x, piece[0].y, piece[0].z, piece[0].w};
#pragma unroll
  for (int i = 1; i < N; ++i)
#pragma unroll
    for (int w = 0; w < 4; ++w) largest[w] = larger_magnitudes(largest[w], word(piece[i], w));
  return larger_magnitudes(larger_magnitudes(largest[0], largest[1]), larger_magnitudes(largest[2], largest[3])) &
         0x7fff7fffu;
}

// The largest finite magnitude that sixteen lanes have, in both halves. Infinities and NaN are looked for only once one
// was met: this is at the start of a row, where instructions come from memory.
template <int N>
DEVICE u32 largest_magnitude(const uint4 (&piece)[N]) {
  u32 largest = largest_of(piece);
  if (finite_magnitudes(largest) != largest) {
    largest = 0;
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
      for (int w = 0; w < 4; ++w) largest = larger_halves(largest, finite_magnitudes(word(piece[i], w)));
  }
#pragma unroll
  for (int step = 8; step; step >>= 1) largest = larger_halves(largest, __shfl_xor_sync(~0u, largest, step));
  return larger_halves(largest, largest << 16 | largest >> 16);
}

// Eight elements times a power of two, as float16 or still bfloat16.
DEVICE void scale_piece(u32 (&scaled)[4], const uint4& piece, u32 factor, bool to_float16) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const u32 pair = multiply_bfloat16(word(piece, w), factor);
    scaled[w] = to_float16 ? pack_float16(low_bfloat16(pair), high_bfloat16(pair)) : pair;
  }
}

// Addresses at which sixteen threads read and write a head's pieces. Pairs of a chunk's 64 dims stand where the
// fragments that `score` makes of a key's bytes meet them: lane t of four holds dims 16 t to 16 t + 15, and its words 2
// j, 2 j + 1 are the operand of step j. RoPE that is no value stands as it is.
template <class L>
struct QueryPlaces {
  static constexpr int STEP = 2 * L::QUERY_CHUNK;  // a lane's next piece is so far on
  u32 shared;
  int lane;

  DEVICE u32 at(int head, int offset) const {
    return shared + L::QUERY + lane / 8 * L::QUERY_CHUNK + head * 128 + (offset ^ (head & 7) << 4);
  }
  DEVICE u32 as_copied(int head) const { return at(head, lane % 8 * 16); }
  // Halves of the lanes begin with other words, so that they meet other banks.
  DEVICE u32 converted(int head) const { return at(head, lane % 2 * 64 + (lane & 8) * 4) + lane % 8 / 2 * 4; }
};

// The number of a head of the row's tile; the last one's for heads past it.
template <int HEADS>
DEVICE int global_head(const Params& p, const Row& row, int head) {
  return min(row.tile * HEADS + head, p.num_heads - 1);
}

// A lane's pieces of the dims below 512.
template <class L, int I = 0>
DEVICE void copy_latent(u32 to, const u16* from) {
  if constexpr (I < 4) {
    copy_16<I * QueryPlaces<L>::STEP, I * 256>(to, from);
    copy_latent<L, I + 1>(to, from);
  }
}

// A row's queries to where they will be, as they are: a group of this thread's copies a round. Heads past the last repeat
// another. Addresses go from round to round, for the warpgroup that gathers has 24 registers.
template <int HEADS, Format FORMAT, int THREADS>
DEVICE void copy_queries(const Params& p, const Row& row, u32 shared, int thread) {
  using P = Pieces<HEADS, FORMAT, THREADS>;
  using L = Layout<HEADS, FORMAT>;
  static_assert(P::GROUPS % 8 == 0, "a thread's heads lie alike in their rows of banks");
  const QueryPlaces<L> places{shared, thread & 15};
  int head = thread / 16;
  const int own = global_head<HEADS>(p, row, head), last = p.num_heads - 1 - row.tile * HEADS;
  const u16 *latent = query_at(p, row.token, own) + places.lane * 8,
            *rope = query_rope_at(p, row.token, own) + places.lane * 8;
  u32 place = places.as_copied(head);
#pragma unroll 1
  for (int round = 0; round < P::ROUNDS; ++round, place += P::GROUPS * 128) {
    if (head < HEADS) copy_latent<L>(place, latent);
    if (P::OF_A_LANE > 4 && head < HEADS && P::has(places.lane, 4)) copy_16<4 * places.STEP, 0>(place, rope);
    commit_copies();
    head += P::GROUPS;
    if (head <= last) latent += P::GROUPS * p.q_head_stride, rope += P::GROUPS * p.q_rope_head_stride;
  }
}

// The power of two that puts a magnitude, bfloat16 in both halves, below 2^16, held to what float32 can undo.
DEVICE int shift_of(u32 largest) { return min(max(142 - static_cast<int>(largest >> 23), -110), 110); }

// A head's factor of scores, and its running maximum.
template <class L>
DEVICE void store_column(const Params& p, u32 shared, int head, int shift) {
  store_shared_float2(shared + L::COLUMNS + head * 8,
                      p.scale_log2 / L::R::FACTOR * __uint_as_float((127 - shift) << 23), 0.f);
}

// Asks a row's queries into L2.
template <int HEADS, Format FORMAT>
DEVICE void prefetch_queries(const Params& p, const Row& row, int thread) {
  const int head = global_head<HEADS>(p, row, thread / 2);
  if (Rows<FORMAT>::CHUNKS > 8 && thread % 2) prefetch_to_l2(query_rope_at(p, row.token, head));
  const u16* latent = query_at(p, row.token, head) + thread % 2 * 64;
#pragma unroll 1
  for (int line = thread % 2; line < 8; line += 2, latent += 128) prefetch_to_l2(latent);
}

// Heads `first` and every GROUPS-th after it, from registers to shared memory: each as float16 (its RoPE part as
// bfloat16 if that is no value, FACTOR times as large) times a power of two of its own that puts its largest finite magnitude below 2^16.
template <int HEADS, Format FORMAT, int THREADS, int BATCH>
DEVICE void convert_queries(const Params& p, u32 shared, int lane, int first,
                            const uint4 (&piece)[BATCH][Pieces<HEADS, FORMAT, THREADS>::OF_A_LANE]) {
  using P = Pieces<HEADS, FORMAT, THREADS>;
  using L = Layout<HEADS, FORMAT>;
  using R = Rows<FORMAT>;
  const QueryPlaces<L> places{shared, lane};
  const bool upper = lane & 8;
  u32 largest[BATCH];
#pragma unroll
  for (int b = 0; b < BATCH; ++b) largest[b] = largest_magnitude(piece[b]);
  __syncwarp();  // other lanes have read what is written over
#pragma unroll
  for (int b = 0; b < BATCH; ++b) {
    const int head = first + b * P::GROUPS;
    if (head >= HEADS) continue;
    const int shift = shift_of(largest[b]);
    const u32 up = (127 + shift) << 7;  // 2^shift as bfloat16
    if (lane == 0) store_column<L>(p, shared, head, shift);
    const u32 to = places.converted(head);
#pragma unroll
    for (int i = 0; i < P::OF_A_LANE; ++i) {
      if (!P::has(lane, i)) continue;
      u32 v[4];
      const bool is_value = R::ROPE_IS_VALUE || i * 2 + lane / 8 < R::CHUNKS - 1;
      scale_piece(v, piece[b][i], (is_value ? up : up + R::FACTOR_OF_ROPE) * 0x10001u, is_value);
      if (!is_value) {
        store_shared_16(places.as_copied(head) + i * places.STEP, v[0], v[1], v[2], v[3]);
        continue;
      }
#pragma unroll
      for (int w = 0; w < 4; ++w) store_shared_4((to ^ w << 4) + i * places.STEP, upper ? v[w ^ 2] : v[w]);
    }
  }
}

// Loads the copied pieces of head `first` and of every GROUPS-th head after it.
template <int HEADS, Format FORMAT, int THREADS, int BATCH>
DEVICE void load_copied(uint4 (&piece)[BATCH][Pieces<HEADS, FORMAT, THREADS>::OF_A_LANE], u32 shared, int lane,
                        int first) {
  using P = Pieces<HEADS, FORMAT, THREADS>;
  const QueryPlaces<Layout<HEADS, FORMAT>> places{shared, lane};
#pragma unroll
  for (int b = 0; b < BATCH; ++b) {
    const int head = first + b * P::GROUPS;
#pragma unroll
    for (int i = 0; i < P::OF_A_LANE; ++i) {
      piece[b][i] = make_uint4(0, 0, 0, 0);
      if (head < HEADS && P::has(lane, i)) piece[b][i] = load_shared_16(places.as_copied(head) + i * places.STEP);
    }
  }
}

// Every other of a chunk's eight pieces.
DEVICE void load_pieces(uint4 (&piece)[4], u32 place) {
#pragma unroll
  for (int t = 0; t < 4; ++t) piece[t] = load_shared_16(place ^ t << 5);
}

// The largest magnitude of finite elements in every other piece of a head's.
template <class L>
DEVICE u32 largest_finite_copied(u32 place) {
  u32 largest = 0;
#pragma unroll 1
  for (int piece = 0; piece < L::R::CHUNKS * 4; ++piece) {
    const uint4 v = load_shared_16((place ^ piece % 4 << 5) + piece / 4 * L::QUERY_CHUNK);
#pragma unroll
    for (int w = 0; w < 4; ++w) largest = larger_halves(largest, finite_magnitudes(word(v, w)));
  }
  return largest;
}

// Queries that other threads have copied, by a warpgroup. Two threads have a head, each every other piece: of a chunk
// four, whose words are those of four pieces that `score` wants. Neighbours in a load have heads that meet other banks.
// Chunks are loaded together, or while the one before is used: a load takes 200 cycles here.
template <class L>
DEVICE void convert_copied_queries(const Params& p, u32 shared, int thread, u32 parity) {
  using R = typename L::R;
  constexpr int GROUP = R::CHUNKS % 3 ? 4 : 3;
  const int odd = thread & 1, head = (thread >> 5) * 16 + (thread & 6) + (thread >> 3 & 1) + (thread >> 1 & 8);
  const u32 row = shared + L::QUERY + head * 128, swizzle = (head & 7) << 4, from = row + (odd << 4 ^ swizzle);
  u32 largest = 0, place = from;
#pragma unroll 1
  for (int left = R::CHUNKS; left > 0; left -= GROUP, place += GROUP * L::QUERY_CHUNK) {
    uint4 piece[GROUP][4];
#pragma unroll
    for (int c = 0; c < GROUP; ++c) load_pieces(piece[c], place + c * L::QUERY_CHUNK);
#pragma unroll
    for (int c = 0; c < GROUP; ++c) largest = larger_halves(largest, largest_of(piece[c]));
  }
  uint4 piece[4], next[4];
  place = from;
  load_pieces(next, place);
  if (finite_magnitudes(largest) != largest) largest = largest_finite_copied<L>(from);
  largest = larger_halves(largest, largest << 16 | largest >> 16);
  largest = larger_halves(largest, __shfl_xor_sync(~0u, largest, 1));
  const int shift = shift_of(largest);
  const u32 up = (127 + shift) << 7;
  u32 target = row + (odd << 6 ^ swizzle);
#pragma unroll 1
  for (int chunk = 0; chunk < R::CHUNKS; ++chunk, place += L::QUERY_CHUNK, target += L::QUERY_CHUNK) {
#pragma unroll
    for (int t = 0; t < 4; ++t) piece[t] = next[t];
    if (chunk + 1 < R::CHUNKS) load_pieces(next, place + L::QUERY_CHUNK);
    u32 v[4][4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const bool is_value = R::ROPE_IS_VALUE || chunk < R::CHUNKS - 1;
      scale_piece(v[t], piece[t], (is_value ? up : up + R::FACTOR_OF_ROPE) * 0x10001u, is_value);
    }
    __syncwarp();  // the other thread has read what is written over
    if (!R::ROPE_IS_VALUE && chunk == R::CHUNKS - 1) {
#pragma unroll
      for (int t = 0; t < 4; ++t) store_shared_16(place ^ t << 5, v[t][0], v[t][1], v[t][2], v[t][3]);
    } else {
#pragma unroll
      for (int w = 0; w < 4; ++w) store_shared_16(target ^ w << 4, v[0][w], v[1][w], v[2][w], v[3][w]);
    }
  }
  mbarrier_wait(shared + L::FACTORS_FREE, parity);  // the columns of the row before were read
  if (!odd) store_column<L>(p, shared, head, shift);
  if (thread == 0) store_shared_4(shared + L::ROUGH, 0);
}

// All of a row's queries, by THREADS threads, sixteen a head. Heads past the last repeat it. Registers hold two rounds;
// if there are more, as in a CTA's first row of 64 heads, all are copied before the first is converted, in a loop, whose
// code is there after its first round.
template <int HEADS, Format FORMAT, int THREADS>
DEVICE void load_queries(const Params& p, const Row& row, u32 shared, int thread, bool wait, u32 parity) {
  using P = Pieces<HEADS, FORMAT, THREADS>;
  using L = Layout<HEADS, FORMAT>;
  const int lane = thread & 15;
  int first = thread / 16;
  if constexpr (P::ROUNDS > 2) {
    copy_queries<HEADS, FORMAT, THREADS>(p, row, shared, thread);
    if (wait) mbarrier_wait(shared + L::FACTORS_FREE, parity);  // the columns of the row before were read
#pragma unroll 1
    for (int left = P::ROUNDS - 1; left >= 0; --left, first += P::GROUPS) {
      uint4 piece[1][P::OF_A_LANE];
      wait_for_copies_but(left);
      load_copied<HEADS, FORMAT, THREADS>(piece, shared, lane, first);
      convert_queries<HEADS, FORMAT, THREADS>(p, shared, lane, first, piece);
    }
  } else {
    uint4 piece[P::ROUNDS][P::OF_A_LANE];
#pragma unroll
    for (int b = 0; b < P::ROUNDS; ++b) {
      const int head = global_head<HEADS>(p, row, first + b * P::GROUPS);
      const u16 *latent = query_at(p, row.token, head) + lane * 8, *rope = query_rope_at(p, row.token, head) + lane * 8;
      hold(latent);  // one address, of which instructions have the offsets
#pragma unroll
      for (int i = 0; i < P::OF_A_LANE; ++i) {
        piece[b][i] = make_uint4(0, 0, 0, 0);
        if (P::has(lane, i)) piece[b][i] = __ldg(reinterpret_cast<const uint4*>(i < 4 ? latent + i * 128 : rope));
      }
    }
    if (wait) mbarrier_wait(shared + L::FACTORS_FREE, parity);  // the columns of the row before were read
    convert_queries<HEADS, FORMAT, THREADS>(p, shared, lane, first, piece);
  }
}
